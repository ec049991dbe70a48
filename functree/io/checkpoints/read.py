"""A checkpoint and a tree like the one that was saved ─► the tree with the saved arrays, born where
a layout says."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path as FilePath
from typing import Any, TypeVar

import jax
import numpy as np

from functree.argument_checks import FILE, FLAG, check, check_tree
from functree.devices.meshes import MeshLike
from functree.devices.placement import is_deleted, refuse_deleted, sharding_text
from functree.errors import (
    CheckpointError,
    CheckpointFileError,
    Problem,
    count,
    path_text,
    warn,
)
from functree.io.casts import Loss, warn_of_losses
from functree.io.checkpoints.drafts import read_manifest
from functree.io.checkpoints.engine import check_dtypes, load_arrays
from functree.io.checkpoints.folder import Folder, files, folder_at
from functree.io.checkpoints.manifest import Manifest
from functree.io.checkpoints.static_leaves import warn_of_changes
from functree.io.checkpoints.wanted import Wanted, wanted_arrays
from functree.io.laid_out import laid_out
from functree.labels.filters import FilterLike, as_filter
from functree.labels.leaves import Leaves
from functree.layout.layout import LayoutTree
from functree.processes.agreement import Agreement, Facts
from functree.processes.digest import digests_of
from functree.processes.exchange import text_of_first
from functree.tree.arrays import array_text
from functree.tree.paths import Path

T = TypeVar("T")


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
    """The tree that was saved. Its arrays are created sharded, on any number of devices and
    processes.

    Args:
        path: the folder of the checkpoint, or its address in a bucket.
        like: a tree like the one that was saved, abstract or with arrays: it gives the structure,
            and all that is static.
        layout: the layout of the tree. By default each array is sharded as the one in `like`.
        mesh: a mesh, or None for the current one.
        only: a filter of the arrays that are restored. Others are neither compared nor read, and
            come from `like`. A pattern, a class or a function in it that matches nothing, neither
            in `like` nor in the checkpoint, is an error.
        cast: whether an array is cast if `like` has another dtype. A value that this dtype does not
            hold, such as 300.7 as int8, is a warning by path; rounded floats are none.
        verify: whether the digests are computed again, and compared.

    Raises:
        CheckpointError: it is not a checkpoint; its arrays and those of `like` differ in path,
            shape, dtype, or kind of random key (the error lists all of them, and nothing is read);
            `only` names what is on neither side;
            an array in `like` has no sharding, and there is no layout; data have changed since they
            were saved.
        ShardingError: the layout does not fit the tree.

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
    check("nothing is restored", path=(path, FILE), cast=(cast, FLAG), verify=(verify, FLAG))
    check_tree("restore", like)
    place, chosen_filter = folder_at(path), None
    folder = place.path
    if only is not None and only is not ...:
        chosen_filter = as_filter(only)

    while True:
        with Agreement(f"{folder} is not restored") as agreement:
            manifest = read_manifest(place)
            leaves, shardings = laid_out(like, layout, mesh, chosen_filter)
            wanted = wanted_arrays(folder, manifest, leaves, shardings, chosen_filter, cast)
            _check_kept(leaves, wanted)
            agreement.compare(partial(_facts, manifest, wanted, verify))
        try:
            stored = _stored(folder, manifest, wanted)
            if verify:
                _verify(folder, wanted, stored)
        except CheckpointError:
            # Another process may have replaced the checkpoint meanwhile: then the new one is read.
            if text_of_first(str(_is_replaced(place, manifest))) == "False":
                raise
        else:
            if chosen_filter is None:
                warn_of_changes(manifest.static, like)
            arrays = _arrays(folder, wanted, stored)
            return leaves.skeleton.fill(
                [arrays.get(leaf.path, leaf.value) for leaf in leaves.leaves]
            )


def _check_kept(leaves: Leaves, wanted: Sequence[Wanted]) -> None:
    """Raise FunctreeError if an array that comes from `like` is deleted."""
    read_from_files = {one.leaf.path for one in wanted}
    kept = [leaf for leaf in leaves.leaves if leaf.path not in read_from_files]
    if any(is_deleted(leaf.value) for leaf in kept):
        paths, values = [leaf.path for leaf in kept], [leaf.value for leaf in kept]
        # Those that are read from the files are not there, and may be below the same key.
        raise refuse_deleted("restore", paths, values, "array of `like`", whole=False)


def _facts(manifest: Manifest, wanted: Sequence[Wanted], verify: bool) -> Facts:
    """What has to be the same in all processes."""
    return {
        "manifest": manifest.to_json().splitlines(),
        "like": list(map(_fact, wanted)),
        "verify": [str(verify)],
    }


def _fact(one: Wanted) -> str:
    sharding = "on the host" if one.sharding is None else sharding_text(one.sharding)
    return f"{path_text(one.leaf.path)}: {array_text(one.leaf.value)} {sharding}"


def _stored(folder: FilePath, manifest: Manifest, wanted: Sequence[Wanted]) -> dict[str, Any]:
    """What is stored of the arrays, by name; each is read once."""
    targets = {one.name: one.target for one in reversed(wanted)}
    # An array without elements is in the manifest alone.
    empty = {name: target for name, target in targets.items() if not target.size}
    full = {name: target for name, target in targets.items() if target.size}
    stored: dict[str, Any] = {}
    for name, target in empty.items():
        stored[name] = np.empty(target.shape, target.dtype)
    if manifest.arrays is not None:
        stored |= _loaded(folder, folder / manifest.arrays, full)
    elif full:
        raise CheckpointFileError(f"{folder} cannot be read: its manifest names no arrays")
    return stored


def _loaded(folder: FilePath, values: FilePath, targets: Mapping[str, Any]) -> dict[str, Any]:
    """Some arrays of a checkpoint.

    Raises:
        CheckpointError: one cannot be read. Orbax may not say which, so it is looked for by halves:
            in all processes, since orbax counts its calls, and they have to be as many in each.
    """
    try:
        with Agreement(f"{folder} is not restored"), files(f"{folder} cannot be read"):
            arrays = load_arrays(values, targets)
    except CheckpointError as error:
        names = list(targets)
        if len(names) == 1:
            remedy = "restore another checkpoint: the files of this one are damaged, or the disk is"
            problem = Problem(Path(names[0]), None, "", str(error), remedy)
            raise CheckpointFileError(f"{folder} cannot be restored", [problem]) from error
        for half in (names[: len(names) // 2], names[len(names) // 2 :]):
            _loaded(folder, values, {name: targets[name] for name in half})
        raise  # all could be read this time
    check_dtypes(arrays, targets)
    return arrays


def _verify(folder: FilePath, wanted: Sequence[Wanted], stored: Mapping[str, Any]) -> None:
    """Compare the digests of what was read with those of what was saved.

    Raises:
        CheckpointError: some differ.
    """
    # Each process has read for itself, so copies may differ.
    full = {name: value for name, value in stored.items() if value.size}
    digests, problems = digests_of(
        full, "restore another checkpoint: a process reads other values than the others"
    )
    without = 0
    for one in wanted:
        if one.name not in digests:
            continue
        if one.row.digest is None:
            without += 1
        elif (found := digests[one.name]) != one.row.digest:
            why = "its values are not those that were saved: "
            why += f"their digest is {found}, and was {one.row.digest}"
            problems.append(
                one.leaf.problem(
                    why, "restore another checkpoint: the files of this one have changed"
                )
            )
    if problems:
        raise CheckpointFileError(
            f"{count(len(problems), 'leaf')} of {folder} cannot be restored", problems
        )
    if without:
        warn(
            f"{folder} was saved with `verify=False`: {count(without, 'array')} cannot be verified"
        )


def _is_replaced(folder: Folder, manifest: Manifest) -> bool:
    try:
        return read_manifest(folder).arrays != manifest.arrays
    except CheckpointError:
        return False


def _arrays(
    folder: FilePath, wanted: Sequence[Wanted], stored: Mapping[str, Any]
) -> dict[Path, Any]:
    """The arrays by path. One array at several places of `like`, or of the saved tree, is one array
    again."""
    losses: list[Loss] = []
    made: dict[Any, Any] = {}
    used: set[str] = set()
    arrays: dict[Path, Any] = {}
    for one in wanted:
        value = one.leaf.value
        if isinstance(value, jax.ShapeDtypeStruct):
            key: Any = (one.name, one.sharding, value.dtype)
        else:
            # One array of numpy at two places is often nothing but zeros that were made once.
            key = id(value) if isinstance(value, jax.Array) else one.leaf.path
        if key not in made:
            array, lost = one.array(stored[one.name])
            losses.append(Loss(one.leaf.path, array.size, one.row.dtype, array.dtype, lost))
            # Two arrays on one buffer could not both be donated.
            made[key] = array.copy() if one.name in used else array
            used.add(one.name)
        arrays[one.leaf.path] = made[key]
    # Last: to look at a number waits for its device.
    warn_of_losses(
        f"{folder} is restored", losses, "give these arrays in `like` the dtype that was saved"
    )
    return arrays
