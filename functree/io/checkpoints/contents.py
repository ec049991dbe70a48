"""`Contents` holds the arrays and the manifest that a checkpoint stores for a tree.

The manifest also stores the texts of static leaves, so that a restore can warn about changes.
"""

import dataclasses
import functools
import hashlib
import json
import re
import reprlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from functree.argument_checks import check_tree, shown
from functree.devices.meshes import mesh_view
from functree.errors import CheckpointError, Problem, RuleError, count, listed, warn
from functree.io.checkpoints.engine import NOT_STORED, StoredArray, to_stored
from functree.io.checkpoints.manifest import Manifest, SavedArray
from functree.io.laid_out import partly
from functree.labels.leaves import Leaf, array_problem, meeting, read
from functree.layout.decide import live_rows
from functree.processes.agreement import Facts
from functree.processes.digest import digest
from functree.report.json_text import parsed
from functree.tree.arrays import Tree, is_array, unheld
from functree.tree.nodes import leaves_of
from functree.tree.paths import Path

# Static leaves


def static_texts(tree: Tree) -> dict[str, str]:
    """Return the texts of a tree's static leaves by path.

    Leaves whose text contains a memory address are omitted, since addresses differ between
    processes.
    """
    texts: dict[str, str] = {}
    for path, leaf in leaves_of(tree):
        if not is_array(leaf) and (text := _text(leaf)) is not None:
            texts[str(path)] = text
    return texts


def unsaveable(tree: Tree) -> Iterator[Problem]:
    """Yield a problem for each leaf that looks like an array, but has values that cannot be saved.

    Otherwise, these leaves would be treated as static, and a restore would return the values from
    `like`.
    """
    for path, leaf in leaves_of(tree):
        if isinstance(leaf, jax.Ref):
            yield Problem(
                path,
                tuple(leaf.shape),
                "a mutable reference",
                "has values that can change while they are written",
                "save its value: `jax.freeze(ref)` or `ref[...]`",
            )
        elif (fault := unheld(leaf)) is not None:
            yield array_problem(path, leaf, *fault)


def warn_of_changes(saved: Mapping[str, str], like: Tree) -> None:
    """Warn about static leaves in `like` that differ from the saved leaves."""
    differ: list[str] = []
    leaves = {str(path): leaf for path, leaf in leaves_of(like)}
    for name, then in saved.items():
        # This leaf is None or missing in `like`.
        if name not in leaves:
            differ.append(f"`{name}` was saved as {then}, but is missing from `like`")
            continue
        leaf = leaves[name]
        # An array at this path causes a separate error.
        if not is_array(leaf) and (now := _text(leaf)) not in (None, then):
            differ.append(f"`{name}` was saved as {then}, but is {now} in `like`")
    if differ:
        warn(
            f"static leaves are not restored, but come from `like`: {listed(differ)}; build `like` "
            "in the same way as the saved tree, save numbers as arrays (`jnp.asarray(...)`), or "
            "save these values in `meta=`"
        )


_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}")
_LONGEST = 200
# A user's `__repr__` may raise any error. In that case, `reprlib` returns a text with an address.
_REPR = reprlib.Repr()
_REPR.maxother = sys.maxsize


def _text(value: object) -> str | None:
    """Return a value's text if it is equal in all processes, or None.

    A long text is shortened, and ends with a digest of the whole text.
    """
    try:
        text = _structured(value)
    except (RecursionError, AttributeError, ValueError):
        return None  # the text has an address, or the value contains itself or lacks a field
    if len(text) <= _LONGEST:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{text[: _LONGEST // 2]}... (sha256 {digest[:16]})"


def _structured(value: Any) -> str:
    """Build a value's text from its contents. Sets are sorted, since their order may vary.

    Raises:
        ValueError: if the text contains a memory address.
    """
    name = type(value).__qualname__
    if isinstance(value, set | frozenset):
        return f"{name}({', '.join(sorted(map(_structured, value)))})"
    if isinstance(value, functools.partial):
        parts = map(_structured, (value.func, value.args, value.keywords))
        return f"{name}({', '.join(parts)})"
    # A function's or class's module is left out, since it is `__main__` in a training script.
    qualified = getattr(value, "__qualname__", None)
    if isinstance(qualified, str):
        return qualified
    if dataclasses.is_dataclass(value):
        parts = [_structured(getattr(value, one.name)) for one in dataclasses.fields(value)]
        return f"{name}({', '.join(parts)})"
    text = _REPR.repr_instance(value, 0)
    # A string that looks like an address stays the same. Other addresses change with each run.
    if not isinstance(value, str | bytes) and _ADDRESS.search(text):
        raise ValueError("the text contains a memory address")
    return text


# Arrays


class Contents(NamedTuple):
    """The arrays and the manifest of a checkpoint.

    Attributes:
        stored: the arrays that are stored, by path.
        manifest: their description, without digests.
    """

    stored: dict[str, StoredArray]
    manifest: Manifest

    @classmethod
    def of(cls, tree: Tree, meta: object, step: int | None) -> "Contents":
        """Build the contents of a tree's checkpoint.

        Raises:
            CheckpointError: if an array cannot be saved.
            CheckpointError: if an array's path cannot be parsed from a string.
            CheckpointError: if `meta` is not JSON.
        """
        check_tree("save", tree)
        try:
            problems = list(unsaveable(tree))
        except (TypeError, RecursionError):
            read(tree)  # raises an error with the path of the node that JAX cannot flatten
            raise
        leaves = () if problems else read(tree).leaves
        problems += _problems(leaves)
        if problems:
            raise CheckpointError(f"{count(len(problems), 'leaf')} cannot be saved", problems)
        # `meta` is written later in the background. The training loop may change it before that.
        meta = _as_json(meta)
        live, mesh = live_rows(leaves)
        rows: list[SavedArray] = []
        stored: dict[str, StoredArray] = {}
        first: dict[int, Path] = {}
        for leaf, row in zip(leaves, live, strict=True):
            saved = SavedArray(
                leaf.path,
                row.shape,
                row.dtype,
                leaf.axes,
                row.spec,
                row.bytes_global,
                buffer=leaf.buffer,
            )
            # An array at several paths, such as a tied embedding, is stored once. A restore creates
            # one array again, so the embedding stays tied.
            same_as = first.setdefault(id(leaf.value), leaf.path)
            if same_as != leaf.path:
                saved = saved._replace(same_as=same_as)
            elif leaf.value.size:
                # An array without elements is fully described by its shape and dtype in the
                # manifest.
                stored[str(leaf.path)] = to_stored(leaf.value)
            rows.append(saved)
        sizes = {} if mesh is None else mesh_view(mesh).sizes
        return cls(stored, Manifest(tuple(rows), None, step, sizes, static_texts(tree), meta))

    def facts(self) -> Facts:
        """Return the facts that must be the same in all processes."""
        manifest = self.manifest
        arrays: list[str] = []
        for row in manifest.rows:
            arrays.append(f"{row.path} {row.dtype}{list(row.shape)} {row.spec} {row.same_as or ''}")
        # Each process has its own NumPy arrays, and orbax writes only the first process's arrays.
        # If another process's values differed, they would be lost silently. A JAX array is the same
        # array in all processes.
        values: list[str] = []
        for path, value in self.stored.items():
            if not isinstance(value, jax.Array):
                values.append(f"{path} {digest(value):08x}")
        return {
            "arrays": arrays,
            "NumPy arrays": values,
            "static leaves": [f"{path}: {text}" for path, text in manifest.static.items()],
            "step": [str(manifest.step)],
            "meta": json.dumps(manifest.meta, indent=1, sort_keys=True).splitlines(),
        }


def _problems(leaves: Sequence[Leaf]) -> Iterator[Problem]:
    yield from meeting(leaves)
    for leaf in leaves:
        if (problem := not_saveable(leaf)) is not None:
            yield problem
        elif str(leaf.value.dtype) in NOT_STORED:
            yield leaf.problem(
                "has a dtype that XLA cannot convert to bytes",
                "cast it to a dtype that can hold its values, such as bfloat16",
            )
        if not _is_readable(leaf.path):
            yield leaf.problem(
                "has a path that cannot be parsed from a string",
                "use strings or integers as keys",
            )


def not_saveable(leaf: Leaf) -> Problem | None:
    """Return the problem of an array whose values cannot be saved, or None."""
    value = leaf.value
    if isinstance(value, Tracer):
        return leaf.problem("is traced, and has no values yet", "save it outside `jit`")
    if isinstance(value, jax.ShapeDtypeStruct):
        return leaf.problem("is abstract, and has no values", "save the concrete tree instead")
    if isinstance(value, jax.Array) and value.is_deleted():
        return leaf.problem(
            "was donated or deleted, and has no values", "save the state that the step returned"
        )
    if (where := partly(value)) is not None:
        return leaf.problem(
            where,
            "place the tree on a mesh with devices of all processes: "
            "`ft.shard(tree, ft.P(), mesh)`",
        )
    return None


def _is_readable(path: Path) -> bool:
    """Return whether a path's text parses as the same path."""
    # The text names the array in the manifest and in orbax's files. The text of a key of a user's
    # class may be the text of another path.
    try:
        return Path(str(path)) == path
    except RuleError:
        return False


def _as_json(meta: object) -> Any:
    """Return a copy of `meta`, or raise a CheckpointError if JSON cannot hold it, or changes it."""
    try:
        # The manifest nests `meta` equally deep, so it can be parsed again.
        copied = parsed(json.dumps({"meta": meta}))["meta"]
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"`meta` is not JSON: {error}") from error
    # JSON turns tuples into lists, and numeric keys into strings. The texts are compared, since a
    # NaN differs from itself.
    if repr(copied) != repr(meta):
        raise CheckpointError(
            f"`meta` is {shown(meta)}, which JSON would change to {shown(copied)}: use only "
            "strings, numbers, lists and dicts"
        )
    return copied
