"""The arrays that are restored: each with what was saved for it, and where it is created."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from functree.devices.placement import is_sharded_as
from functree.errors import CheckpointError, Problem, count
from functree.io.casts import cast_on_devices, cast_on_host, lost_on_host
from functree.io.checkpoints.manifest import Manifest, SavedArray
from functree.io.checkpoints.only import check_only
from functree.io.checkpoints.stored_arrays import from_stored, stored_form, stored_sharding
from functree.io.checkpoints.suggested_filter import without
from functree.io.laid_out import is_enabled, misplaced
from functree.labels.filters import Filter
from functree.labels.leaf import Leaf, meeting
from functree.labels.leaves import Leaves
from functree.tree.arrays import array_text, dtype_text, is_key
from functree.tree.paths import Path


class Wanted(NamedTuple):
    """An array that is restored.

    Attributes:
        leaf: the array in `like`.
        row: what was saved for it.
        sharding: where it is created; None for an array of numpy, and for one that is not committed
            to a device.
    """

    leaf: Leaf
    row: SavedArray
    sharding: Sharding | None

    @property
    def name(self) -> str:
        """The name of what is stored."""
        return str(self.row.same_as or self.row.path)

    @property
    def target(self) -> Any:
        """What is read."""
        shape, dtype = stored_form(self.row.shape, self.row.dtype)
        if self.sharding is None or not is_enabled(dtype):
            return np.empty(shape, dtype)
        return jax.ShapeDtypeStruct(
            shape, dtype, sharding=stored_sharding(self.sharding, len(shape))
        )

    def array(self, stored: Any) -> tuple[Any, int | jax.Array]:
        """The array from what was read, with the dtype of that in `like`; and how many of its
        values this dtype does not hold."""
        dtype = self.leaf.value.dtype
        array = from_stored(stored, self.row.dtype, self.sharding)
        if self.sharding is not None and isinstance(array, jax.Array):
            if array.dtype == dtype and is_sharded_as(array, self.sharding):
                return array, 0
            return cast_on_devices(array, dtype, self.sharding)
        if array.dtype == dtype:
            return self._from_host(array, self.sharding), 0
        return self._from_host(array, self.sharding), lost_on_host(np.asarray(array), dtype)

    def _from_host(self, array: Any, sharding: Sharding | None) -> Any:
        """The array from one of the host: it is committed to no device, or was read by numpy since
        JAX has no such dtype."""
        value = self.leaf.value
        if sharding is not None:
            return jax.make_array_from_callback(
                array.shape, sharding, lambda index: cast_on_host(array[index], value.dtype)
            )
        array = cast_on_host(array, value.dtype)
        if isinstance(value, jax.Array):
            return jnp.asarray(array)
        return array[()] if isinstance(value, np.generic) else array


def wanted_arrays(
    folder: FilePath,
    manifest: Manifest,
    leaves: Leaves,
    shardings: Sequence[Sharding | None],
    only: Filter | None,
    cast: bool,
) -> list[Wanted]:
    """The arrays that are restored.

    Args:
        folder: the checkpoint, for the message.
        manifest: what it says.
        leaves: the arrays in `like`.
        shardings: where each of them is created.
        only: the filter of those that are restored.
        cast: whether they may have other dtypes.

    Raises:
        CheckpointError: they differ from those that were saved.
    """
    rows = {row.path: row for row in manifest.rows}
    extra = _extra(folder, manifest, leaves, only)
    taken = [
        (leaf, to)
        for leaf, to in zip(leaves.leaves, shardings, strict=True)
        if only is None or only(leaf)
    ]
    problems = [
        *(
            problem
            for leaf, _ in taken
            for problem in _differences(leaf, rows.get(leaf.path), cast)
        ),
        *(_row_problem(row, "was saved, and `like` has no such array") for row in extra),
    ]
    if problems:
        paths = {*rows, *leaves.paths}
        differ = {Path(problem.path or ()) for problem in problems}
        remedy = without(differ, paths, only)
        # Without these it would match nothing, which is an error.
        if only is not None and all(leaf.path in differ for leaf, _ in taken):
            remedy = f"correct only={only!r}, which matches nothing else, or `like`"
        # One of another dtype is a problem with a remedy of its own.
        problems = [
            problem if problem.remedy else problem._replace(remedy=remedy) for problem in problems
        ]
    problems += [problem for leaf, to in taken for problem in misplaced(leaf, to)]
    problems += _untied([leaf for leaf, _ in taken], rows)
    problems += meeting(leaf for leaf, _ in taken)
    if problems:
        wrong = count(len({problem.path for problem in problems}), "leaf")
        raise CheckpointError(f"{wrong} cannot be restored from {folder}", problems)
    return [Wanted(leaf, rows[leaf.path], to) for leaf, to in taken]


def _differences(leaf: Leaf, row: SavedArray | None, cast: bool) -> Iterator[Problem]:
    """In what an array in `like` differs from the one that was saved."""
    if row is None:
        yield leaf.problem("is in `like`, and was not saved", "")
        return
    if leaf.shape != row.shape:
        yield leaf.problem(f"was saved as {_row_text(row)}: another shape", "")
    if leaf.value.dtype == row.dtype:
        return
    saved, wanted = dtype_text(row.dtype), dtype_text(leaf.value.dtype)
    if is_key(row.dtype) or is_key(leaf.value.dtype):
        kinds = is_key(row.dtype) and is_key(leaf.value.dtype)
        other = "random keys of another kind" if kinds else "and random keys are no numbers"
        how = (
            "make `like` with the same `jax.random.key(..., impl=)`"
            if kinds
            else "save and restore typed keys alike"
        )
        yield leaf.problem(f"was saved as {saved}: {other}", how)
    elif not cast:
        yield leaf.problem(f"was saved as {saved}", f"to have it as {wanted}: cast=True")


def _row_text(row: SavedArray) -> str:
    """An array that was saved, in messages."""
    return array_text(row) + (f'   "{row.axes}"' if any(row.axes) else "")


def _row_problem(row: SavedArray, why: str) -> Problem:
    return Problem(row.path, row.shape, _row_text(row), why)


def _extra(
    folder: FilePath, manifest: Manifest, leaves: Leaves, only: Filter | None
) -> list[SavedArray]:
    """The arrays that were saved, and that `like` does not have."""
    known = set(leaves.paths)
    alone = [row for row in manifest.rows if row.path not in known]
    if only is None:
        return alone
    matched = {leaf.path for leaf in check_only(folder, only, leaves, alone)}
    return [row for row in alone if row.path in matched]


def _untied(leaves: Sequence[Leaf], rows: Mapping[Path, SavedArray]) -> Iterator[Problem]:
    """The places of one array in `like` for which two different arrays were saved."""
    first: dict[int, SavedArray] = {}  # by the array in `like`
    for leaf in leaves:
        row = rows.get(leaf.path)
        if row is None or not isinstance(leaf.value, jax.Array):
            continue
        other = first.setdefault(id(leaf.value), row)
        stored_once = (other.same_as or other.path) == (row.same_as or row.path)
        if not stored_once and (row.digest is None or row.digest != other.digest):
            why = f"is one array with `{other.path}` in `like`, and two arrays were saved"
            yield leaf.problem(why, "untie them in `like`: `ft.copy` one of them")
