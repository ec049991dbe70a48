"""`Contents` holds the arrays and the manifest that a checkpoint stores for a tree."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from functree.argument_checks import check_tree, shown
from functree.devices.meshes import mesh_view
from functree.errors import CheckpointError, Problem, RuleError, count
from functree.io.checkpoints.engine import NOT_STORED, StoredArray, to_stored
from functree.io.checkpoints.manifest import Manifest, SavedArray
from functree.io.checkpoints.static_leaves import static_texts, unsaveable
from functree.io.laid_out import partly
from functree.labels.leaf import Leaf, meeting
from functree.labels.leaves import read
from functree.layout.plan.live_arrays import live_rows
from functree.processes.agreement import Facts
from functree.processes.digest import digest
from functree.report.json_text import parsed
from functree.tree.arrays import Tree
from functree.tree.paths import Path


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
