"""`restore` reads a checkpoint's arrays into a tree like the saved one, and shards them.

Before it reads any array, it compares the manifest with the tree. One error lists all differences.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path as FilePath
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding

from functree.argument_checks import FILE, FLAG, check, check_tree
from functree.devices.meshes import MeshLike
from functree.devices.placement import is_sharded_as, sharding_text
from functree.errors import (
    CheckpointError,
    CheckpointFileError,
    Problem,
    count,
    listed,
    path_text,
    warn,
)
from functree.io.casts import Loss, cast_on_devices, cast_on_host, lost_on_host, warn_of_losses
from functree.io.checkpoints.contents import warn_of_changes
from functree.io.checkpoints.engine import (
    from_stored,
    load_arrays,
    stored_form,
    stored_sharding,
)
from functree.io.checkpoints.folder import files, folder_at, read_manifest
from functree.io.checkpoints.manifest import Manifest, SavedArray
from functree.io.laid_out import is_enabled, laid_out, like_value, misplaced
from functree.labels.filters import (
    ClassFilter,
    Conjunction,
    Disjunction,
    Filter,
    FilterLike,
    FunctionFilter,
    Negation,
    as_filter,
    atoms,
    meant,
    naming,
)
from functree.labels.leaves import Leaf, Leaves, meeting
from functree.layout.layout import LayoutTree
from functree.processes.agreement import Agreement, Facts
from functree.processes.digest import digests_of
from functree.processes.exchange import text_of_first
from functree.tree.arrays import array_text, dtype_text, is_key
from functree.tree.paths import Path

T = TypeVar("T")


class _Wanted(NamedTuple):
    """An array to restore.

    Attributes:
        leaf: the array in `like`.
        row: the array's row in the manifest.
        sharding: the sharding of the restored array; None for a NumPy array or an uncommitted
            array.
    """

    leaf: Leaf
    row: SavedArray
    sharding: Sharding | None

    @property
    def name(self) -> str:
        """The name of the stored array."""
        return str(self.row.same_as or self.row.path)

    @property
    def target(self) -> Any:
        """The target of `load_arrays` for the stored array."""
        shape, dtype = stored_form(self.row.shape, self.row.dtype)
        if self.sharding is None or not is_enabled(dtype):
            return np.empty(shape, dtype)
        return jax.ShapeDtypeStruct(
            shape, dtype, sharding=stored_sharding(self.sharding, len(shape))
        )

    def array(self, stored: Any) -> tuple[Any, int | jax.Array]:
        """Convert a stored array to the dtype in `like`, and count the values that are lost."""
        like, sharding = self.leaf.value, self.sharding
        array = from_stored(stored, self.row.dtype, sharding)
        if sharding is not None and isinstance(array, jax.Array):
            if array.dtype == like.dtype and is_sharded_as(array, sharding):
                return array, 0
            return cast_on_devices(array, like.dtype, sharding)
        lost = 0 if array.dtype == like.dtype else lost_on_host(np.asarray(array), like.dtype)
        if sharding is None:
            array = cast_on_host(array, like.dtype)
        else:  # read as a NumPy array, since JAX has not enabled the dtype
            array = jax.make_array_from_callback(
                array.shape, sharding, lambda index: cast_on_host(array[index], like.dtype)
            )
        return like_value(array, like), lost


def restore(
    path: str | os.PathLike[str],
    like: T,
    layout: LayoutTree = None,
    mesh: MeshLike = None,
    *,
    only: FilterLike | None = None,
    cast: bool = False,
    verify: bool = True,
) -> T:
    """Restore a saved tree. Its arrays are created sharded, on any number of devices.

    One error lists all differences between the checkpoint and `like`, before any array is read.

    Args:
        path: the folder of the checkpoint, or its address in a bucket.
        like: a tree with the saved arrays' paths, shapes and dtypes. The tree may be abstract. The
            result has the structure and the static leaves of `like`.
        layout: the layout of the tree. By default, each array is sharded as in `like`.
        mesh: a mesh, or None for the current mesh.
        only: a filter for the arrays to restore. All other arrays come from `like`, and are neither
            read nor compared. Classes and functions in the filter match only arrays in `like`. Each
            pattern, class and function in the filter must match an array in the checkpoint or in
            `like`.
        cast: whether arrays are cast to the dtypes in `like`. A warning lists the paths of arrays
            with values that the new dtype cannot hold, such as 300.7 in int8. Rounding floats
            causes no warning.
        verify: whether the digests of the values are checked.

    Raises:
        CheckpointError: if `path` is not a checkpoint.
        CheckpointError: if an array is only in the checkpoint, or only in `like`.
        CheckpointError: if an array's saved shape differs from its shape in `like`.
        CheckpointError: if an array's saved dtype differs from its dtype in `like`, and `cast` is
            False.
        CheckpointError: if a random key was saved as a different kind of random key.
        CheckpointError: if a random key in `like` was saved as numbers, or the reverse.
        CheckpointError: if two arrays in `like` have the same path.
        CheckpointError: if `only`, or a pattern, class or function in it, matches no array.
        CheckpointError: if an array in `like` is traced.
        CheckpointError: if an array in `like` has no sharding, and there is no layout.
        CheckpointError: if an array cannot be created with its sharding or dtype.
        CheckpointError: if the checkpoint's files cannot be read.
        CheckpointError: if the data have changed since they were saved.
        FunctreeError: if the processes restore different arrays.
        ShardingError: if the layout does not fit the tree.

    Examples:
        >>> mesh, make = ft.make_mesh(data=8), ft.abstract(eqx.nn.Linear)
        >>> ft.save(
        ...     folder / "linear", eqx.nn.Linear(16, 8, key=jax.random.key(0))
        ... )
        >>> like = make(16, 8, key=jax.random.key(0))
        >>> layout = ft.FSDP("data", min_size=0)
        >>> ft.restore(folder / "linear", like, layout, mesh).weight.sharding.spec
        P(None, 'data')
    """
    check("restore: invalid arguments", path=(path, FILE), cast=(cast, FLAG), verify=(verify, FLAG))
    check_tree("restore", like)
    place = folder_at(path)
    folder = place.path
    asked = None if only is None else as_filter(only)

    while True:
        with Agreement(f"{folder} cannot be restored") as agreement:
            manifest = read_manifest(place)
            leaves, shardings = laid_out(like, layout, mesh, asked)
            wanted = _wanted_arrays(folder, manifest, leaves, shardings, asked, cast)
            agreement.compare(partial(_facts, manifest, wanted, verify))
        try:
            stored = _stored(folder, manifest, wanted)
            if verify:
                _verify(folder, wanted, stored)
            break
        except CheckpointError:
            # If another process has replaced the checkpoint meanwhile, the new one is read.
            with Agreement(f"{folder} cannot be restored"):
                newest = read_manifest(place).arrays
            if text_of_first(str(newest)) == str(manifest.arrays):
                raise
    if asked is None:
        warn_of_changes(manifest.static, like)
    arrays = _arrays(folder, wanted, stored)
    return leaves.skeleton.fill([arrays.get(leaf.path, leaf.value) for leaf in leaves.leaves])


def _facts(manifest: Manifest, wanted: Sequence[_Wanted], verify: bool) -> Facts:
    """Return the facts that must be the same in all processes."""
    like: list[str] = []
    for leaf, _, sharding in wanted:
        where = "on the host" if sharding is None else sharding_text(sharding)
        like.append(f"{path_text(leaf.path)}: {array_text(leaf.value)} {where}")
    return {"manifest": manifest.to_json().splitlines(), "like": like, "verify": [str(verify)]}


def _stored(folder: FilePath, manifest: Manifest, wanted: Sequence[_Wanted]) -> dict[str, Any]:
    """Read each stored array once, and return the arrays by name.

    Raises:
        CheckpointError: if an array cannot be read.
    """
    stored: dict[str, Any] = {}
    targets: dict[str, Any] = {}
    for one in reversed(wanted):  # the first array with a name sets the target
        target = one.target
        if target.size:
            targets[one.name] = target
        else:  # an empty array is only in the manifest
            stored[one.name] = np.empty(target.shape, target.dtype)
    return stored | _loaded(folder, folder / str(manifest.arrays), targets)


def _loaded(folder: FilePath, values: FilePath, targets: Mapping[str, Any]) -> dict[str, Any]:
    """Read some of a checkpoint's arrays.

    If reading fails, bisection finds the array at fault, which orbax may not name. All processes
    bisect, since orbax needs the same number of calls in each process.

    Raises:
        CheckpointError: if an array cannot be read.
    """
    try:
        with Agreement(f"{folder} cannot be restored"), files(f"{folder} cannot be read"):
            return load_arrays(values, targets)
    except CheckpointError as error:
        names = list(targets)
        if len(names) == 1:
            remedy = f"restore another checkpoint: files in {folder}, or the disk, may be damaged"
            problem = Problem(Path(names[0]), None, "", str(error), remedy)
            raise CheckpointFileError(f"{folder} cannot be restored", [problem]) from error
        for half in (names[: len(names) // 2], names[len(names) // 2 :]):
            _loaded(folder, values, {name: targets[name] for name in half})
        raise  # this time, both halves could be read


def _verify(folder: FilePath, wanted: Sequence[_Wanted], stored: Mapping[str, Any]) -> None:
    """Compare the arrays' digests with the saved digests.

    Raises:
        CheckpointError: if an array's digest differs from its saved digest.
        CheckpointError: if the processes read different values.
    """
    # Each process reads separately, so copies may differ.
    full = {name: value for name, value in stored.items() if value.size}
    digests, problems = digests_of(
        full, "restore another checkpoint: the processes read different values"
    )
    without = 0
    for one in wanted:
        if one.name not in digests:
            continue
        if one.row.digest is None:
            without += 1
        elif (found := digests[one.name]) != one.row.digest:
            why = "its values have changed since they were saved: their digest is "
            remedy = f"restore another checkpoint: files in {folder} have changed"
            problems.append(one.leaf.problem(f"{why}{found}, but was {one.row.digest}", remedy))
    if problems:
        raise CheckpointFileError(
            f"{count(len(problems), 'leaf')} of {folder} cannot be restored", problems
        )
    if without:
        warn(
            f"{folder} was saved with `verify=False`: {count(without, 'array')} cannot be verified"
        )


def _arrays(
    folder: FilePath, wanted: Sequence[_Wanted], stored: Mapping[str, Any]
) -> dict[Path, Any]:
    """Convert the stored arrays, and return them by path.

    Paths with the same stored array, sharding and dtype share an array in the result if they share
    a JAX array in `like`, or are abstract in `like`. NumPy arrays are never shared.
    """
    losses: list[Loss] = []
    made: dict[Any, Any] = {}
    used: set[str] = set()
    arrays: dict[Path, Any] = {}
    for one in wanted:
        value = one.leaf.value
        key: Any = (one.name, one.sharding, value.dtype)
        if isinstance(value, jax.Array):
            key = (*key, id(value))
        elif not isinstance(value, jax.ShapeDtypeStruct):
            # A NumPy array at two paths is often just zeros that were made once.
            key = one.leaf.path
        if key not in made:
            array, lost = one.array(stored[one.name])
            losses.append(Loss(one.leaf.path, array.size, one.row.dtype, array.dtype, lost))
            # Two arrays that share a buffer could not both be donated.
            made[key] = array.copy() if one.name in used else array
            used.add(one.name)
        arrays[one.leaf.path] = made[key]
    # The warning comes last, since reading the counts waits for the devices.
    warn_of_losses(
        f"{folder} was restored",
        losses,
        "give these arrays in `like` the dtype that they have in the checkpoint",
    )
    return arrays


def _wanted_arrays(
    folder: FilePath,
    manifest: Manifest,
    leaves: Leaves,
    shardings: Sequence[Sharding | None],
    only: Filter | None,
    cast: bool,
) -> list[_Wanted]:
    """Return the arrays to restore.

    Args:
        folder: the checkpoint's folder, for the message.
        manifest: the checkpoint's manifest.
        leaves: the arrays in `like`.
        shardings: the sharding of each array.
        only: the filter for the arrays to restore.
        cast: whether dtypes in `like` may differ from the saved dtypes.

    Raises:
        CheckpointError: if the arrays in `like` differ from the saved arrays.
        CheckpointError: if an array cannot be created with its sharding.
        CheckpointError: if `only` matches no array.
    """
    rows = {row.path: row for row in manifest.rows}
    known = set(leaves.paths)
    alone = [_saved_leaf(row) for row in manifest.rows if row.path not in known]
    taken: list[tuple[Leaf, Sharding | None]] = []
    for leaf, to in zip(leaves.leaves, shardings, strict=True):
        if only is None or only(leaf):
            taken.append((leaf, to))
    if only is not None:
        alone = _matched(folder, only, leaves.leaves, alone)
    problems: list[Problem] = []
    for leaf, _ in taken:
        problems += _differences(leaf, rows.get(leaf.path), cast)
    for leaf in alone:
        problems.append(leaf.problem("was saved, but is not in `like`", _EXCLUDE))
    for leaf, to in taken:
        problems += misplaced(leaf, to)
    problems += meeting(leaf for leaf, _ in taken)
    if problems:
        wrong = count(len({problem.path for problem in problems}), "leaf")
        raise CheckpointError(f"{wrong} cannot be restored from {folder}", problems)
    return [_Wanted(leaf, rows[leaf.path], to) for leaf, to in taken]


def _saved_leaf(row: SavedArray) -> Leaf:
    """Convert a row to a leaf that filters accept."""
    value = jax.ShapeDtypeStruct(row.shape, row.dtype)
    return Leaf(row.path, value, row.axes, seen=row.path, buffer=row.buffer)


_EXCLUDE = "pass `only=` with a filter that excludes these leaves"


def _differences(leaf: Leaf, row: SavedArray | None, cast: bool) -> Iterator[Problem]:
    """Yield a problem for each difference between an array in `like` and the saved array."""
    if row is None:
        yield leaf.problem("is in `like`, but was not saved", _EXCLUDE)
        return
    if leaf.shape != row.shape:
        why = f"was saved as {_saved_leaf(row).text}, with a different shape"
        yield leaf.problem(why, _EXCLUDE)
    if leaf.value.dtype == row.dtype:
        return
    saved, wanted = dtype_text(row.dtype), dtype_text(leaf.value.dtype)
    if is_key(row.dtype) or is_key(leaf.value.dtype):
        why = "random keys cannot be converted to numbers, or to another kind of key"
        how = "build `like` with the saved kind of key, using `jax.random.key(..., impl=)`"
        yield leaf.problem(f"was saved as {saved}: {why}", how)
    elif not cast:
        yield leaf.problem(f"was saved as {saved}", f"pass `cast=True` to convert it to {wanted}")


def _matched(
    folder: FilePath, only: Filter, leaves: Sequence[Leaf], saved: Sequence[Leaf]
) -> list[Leaf]:
    """Return the arrays that are only in the checkpoint, and that a filter matches.

    Raises:
        CheckpointError: if the filter, or a pattern, class or function in it, matches no array.
            Otherwise, a typo would restore nothing, or everything if the filter is negated (`~`).
    """
    matched = [leaf for leaf in saved if _matches(only, leaf)]
    lost: list[Filter] = []
    # Properties such as a dtype are exempt: a filter may name a property that no array has.
    functions = [part for part in atoms(only) if isinstance(part, FunctionFilter)]
    for part in (*naming(only), *functions):
        if not any(map(part, leaves)) and not any(_matches(part, leaf) for leaf in saved):
            lost.append(part)
    both = [*leaves, *saved]
    if not lost and not matched and both and not any(map(only, leaves)):
        # Each part matches an array, but no array matches all parts, or has the property.
        lost = [only]
    if lost:
        remedy = "correct the filter, or leave it out"
        raise CheckpointError(
            f"only={only!r}: no array in {folder} or `like` matches "
            f"{listed(list(map(repr, lost)))}{meant(lost[0], both)}",
            [leaf.problem("does not match", remedy) for leaf in both],
        )
    return matched


def _matches(item: Filter, leaf: Leaf) -> bool:
    """Return whether a filter matches an array that is only in the checkpoint.

    Classes and functions match only arrays in `like`.
    """
    match item:
        case Conjunction():
            return all(_matches(part, leaf) for part in item.parts)
        case Disjunction():
            return any(_matches(part, leaf) for part in item.parts)
        case Negation():
            return not _matches(item.parts[0], leaf)
        case ClassFilter() | FunctionFilter():
            return False
    return item(leaf)
