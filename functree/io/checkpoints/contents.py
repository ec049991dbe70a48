"""A tree ─► what a checkpoint keeps of it: the arrays that are stored, and a manifest."""

import copy
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.tree_util import tree_flatten_with_path

from functree.errors import CheckpointError, Problem, RuleError, count
from functree.io.checkpoints.manifest import Manifest, SavedArray
from functree.io.checkpoints.stored import NOT_STORED, to_stored
from functree.io.saveable import not_saveable
from functree.layout.meshes import mesh_view
from functree.layout.plan.live import live_rows
from functree.parameters import check_tree, shown
from functree.processes.agreement import Facts
from functree.processes.digest import digest
from functree.tree.leaf import Leaf
from functree.tree.leaves import read
from functree.tree.paths import Path


class Contents(NamedTuple):
    """What is saved of a tree.

    Attributes:
        stored: the arrays that are stored, by path.
        manifest: what is said of them, without digests.
    """

    stored: dict[str, Any]
    manifest: Manifest

    @classmethod
    def of(cls, tree: Any, meta: Any, step: int | None) -> "Contents":
        """What is saved of a tree.

        Raises:
            CheckpointError: an array is traced or abstract, or its path has no text; `meta` is not JSON.
        """
        check_tree("save", tree)
        leaves = read(tree).leaves
        if problems := list(_problems(leaves)):
            raise CheckpointError(f"{count(len(problems), 'leaf')} cannot be saved", problems)
        _check_meta(meta)
        meta = copy.deepcopy(meta)  # it is written later, in the background
        live, mesh = live_rows(leaves)
        rows, stored, first = [], dict[str, Any](), dict[int, Path]()
        for leaf, row in zip(leaves, live, strict=True):
            same_as = first.setdefault(id(leaf.value), leaf.path)
            saved = SavedArray(leaf.path, row.shape, row.dtype, leaf.axes, row.spec, row.bytes_global)
            if same_as != leaf.path:
                saved = saved._replace(same_as=same_as)
            elif leaf.value.size:
                stored[str(leaf.path)] = to_stored(leaf.value)
            rows.append(saved)
        sizes = {} if mesh is None else mesh_view(mesh).sizes
        return cls(stored, Manifest(tuple(rows), None, step, sizes, numbers_of(tree), meta))

    def facts(self) -> Facts:
        """What has to be the same in all processes: the arrays, and the values of those that each has for itself."""
        manifest = self.manifest
        texts = [f"{row.path} {row.dtype}{list(row.shape)} {row.spec} {row.same_as or ''}" for row in manifest.rows]
        own = {path: value for path, value in self.stored.items() if not isinstance(value, jax.Array)}
        values = [f"{path} {digest(value):08x}" for path, value in own.items()]
        numbers = [f"{path}: {number}" for path, number in manifest.numbers.items()]
        meta = json.dumps(manifest.meta, indent=1, sort_keys=True).splitlines()
        return {
            "arrays": texts,
            "arrays of numpy": values,
            "numbers": numbers,
            "step": [str(manifest.step)],
            "meta": meta,
        }


def numbers_of(tree: Any) -> dict[str, str]:
    """The Python numbers and texts among the leaves of a tree, as text."""
    flat, _ = tree_flatten_with_path(tree)
    static = (bool, int, float, complex, str)
    return {str(Path.of(path)): repr(leaf) for path, leaf in flat if type(leaf) in static}


def _problems(leaves: Sequence[Leaf]) -> Iterator[Problem]:
    for leaf in leaves:
        if (problem := not_saveable(leaf)) is not None:
            yield problem
        elif str(leaf.value.dtype) in NOT_STORED:
            yield leaf.problem("has a dtype that XLA cannot convert to bytes", "convert it, such as to int8")
        if not _is_readable(leaf.path):
            yield leaf.problem("its path has a key that has no text of its own", "name it by a text or a number")


def _is_readable(path: Path) -> bool:
    """Whether the text of a path is read as this path."""
    try:
        return Path(str(path)) == path
    except RuleError:
        return False


def _check_meta(meta: Any) -> None:
    """Raise CheckpointError for values that JSON does not have, or would return as others."""
    for where, value in _misfits(meta, "meta"):
        raise CheckpointError(f"`{where}` is {shown(value)}, which is not JSON: write texts, numbers, lists and dicts")


def _misfits(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _misfits(one, f"{where}[{key!r}]") if type(key) is str else [(f"a key of {where}", key)]
    elif isinstance(value, list):
        for i, one in enumerate(value):
            yield from _misfits(one, f"{where}[{i}]")
    elif type(value) not in (str, int, float, bool, type(None)):
        yield where, value
