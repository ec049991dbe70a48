"""Safetensors files and a table of names ─► a tree of the user's own, whose arrays are born as a
layout says."""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from functree.argument_checks import FLAG, LOCAL_FILE, TEXTS, Takes, check, check_tree
from functree.devices.meshes import MeshLike
from functree.devices.placement import sharding_text
from functree.errors import FunctreeError, FunctreeValueError, path_text
from functree.io.extras import ForeignErrors
from functree.io.laid_out import laid_out, misplaced
from functree.io.weights.arrays import Created, beginnings, read_arrays
from functree.io.weights.blocks import Weight
from functree.io.weights.files import ALL_DTYPES, Tensor, files_of, is_folder, open_tensors
from functree.io.weights.fitting import fitted, unread_problems, untied
from functree.io.weights.table import Named, check_table, names_of
from functree.labels.leaf import meeting
from functree.labels.leaves import Leaves
from functree.layout.layout import LayoutTree
from functree.nn.weight_map import NAMES
from functree.processes.agreement import Agreement, Facts
from functree.tree.arrays import array_text
from functree.tree.paths import Path

T = TypeVar("T")

_File = str | os.PathLike[str]
_FILES = Takes(
    f"{LOCAL_FILE.text}; or of a folder, or a list of files",
    lambda value: isinstance(value, list) and all(map(LOCAL_FILE.is_type, value)),
    lambda value: len(value) > 0 and all(map(LOCAL_FILE.is_value, value)),
)


def load_tensors(
    files: _File | Iterable[_File],
    like: T,
    names: Mapping[str, str],
    layout: LayoutTree = None,
    mesh: MeshLike = None,
    *,
    left_out: Collection[str] = (),
    cast: bool = False,
) -> T:
    """A tree of your own with the values of safetensors files, by a table of names.

    The arrays are created sharded, and of each file only the slices are read that this process'
    devices keep. A tensor that joins neighbouring dimensions of an array, such as the heads with
    the size of one, is split as the array is.

    Args:
        files: a file, several, or the folder that they are in.
        like: a tree, abstract or with arrays: it gives the structure, shapes and dtypes, and all
            that is static.
        names: from globs of paths to names of tensors; the first that matches a path gives its
            name. The text that a wildcard of the glob stands for is put in the place of that of the
            name. `{layer}`, and `{expert}` behind it, are the numbers along leading dimensions of
            the array, of which each has a tensor. `[0/3]` behind a name is the first of three equal
            parts of the tensor, `[0:2/4]` are two of four, along the first dimension that fits.
            `.T` behind that is the transpose.
        layout: the layout of the tree. By default each array is sharded as the one in `like`.
        mesh: a mesh, or None for the current one.
        left_out: patterns for the names of tensors that nothing is read from, with `*` for any
            text.
        cast: whether an array is cast if `like` has another dtype than the files. A value that this
            dtype does not hold is a warning by path; rounded floats are none.

    Raises:
        FunctreeError: an array has no name, or one that the files do not have; a tensor has another
            shape or dtype, or is not read; a pattern matches nothing; an array in `like` has no
            sharding, and there is no layout. The error lists all of them, and nothing is read. Or a
            file is not one of safetensors; the processes have other files.
        ShardingError: the layout does not fit the tree.

    Examples:
        >>> from safetensors.numpy import save_file
        >>> save_file({"fc.weight": np.ones((8, 16), "float32")}, folder / "fc")
        >>> like = {"w": jax.ShapeDtypeStruct((16, 8), "float32")}
        >>> loaded = ft.load_tensors(
        ...     folder / "fc",
        ...     like,
        ...     {"w": "fc.weight.T"},
        ...     ft.P("data"),
        ...     ft.make_mesh(data=8),
        ... )
        >>> loaded["w"].shape, loaded["w"].sharding.spec
        ((16, 8), P('data', None))
    """
    check_tree("load_tensors", like)
    given = _listed(files)
    check(
        "no weights are loaded",
        files=(given, _FILES),
        names=(names, NAMES),
        left_out=(left_out, TEXTS),
        cast=(cast, FLAG),
    )
    where = str(given[0]) if len(given) == 1 else f"{given[0]} and {len(given) - 1} more"
    failure = f"{where}: no weights are loaded"
    with Agreement(failure) as agreement:
        check_table(names, failure)
        with ForeignErrors(FunctreeError, f"{where}: the weights cannot be read"):
            tensors = open_tensors(_opened(given), ALL_DTYPES)
        leaves, shardings = laid_out(like, layout, mesh)
        asked = _Asked(names, left_out, cast, failure)
        found = _Found.of(leaves, shardings, tensors, asked)
        agreement.compare(found.facts)
    return leaves.skeleton.fill(found.read(where))


def _listed(files: Any) -> Any:
    """The given files as a list."""
    if isinstance(files, str | bytes | os.PathLike):
        return [files]
    return list(files) if isinstance(files, Iterable) else files


def _opened(given: Sequence[_File]) -> list[FilePath]:
    """The files that are read: those of a folder, or the given ones."""
    paths = list(map(FilePath, given))
    return files_of(paths[0]) if len(paths) == 1 and is_folder(paths[0]) else paths


class _Asked(NamedTuple):
    """What is asked for; the attributes are parameters of `load_tensors`, and the beginning of its
    messages."""

    names: Mapping[str, str]
    left_out: Collection[str]
    cast: bool
    failure: str


class _Found(NamedTuple):
    """The arrays that are loaded.

    Attributes:
        leaves: those of `like`.
        shardings: where each is created; None for an array of numpy, and for one that is not
            committed to a device.
        named: the name of each.
        weights: how each is read.
        tensors: those that are read, by name.
    """

    leaves: Leaves
    shardings: Sequence[Sharding | None]
    named: Mapping[Path, Named]
    weights: Sequence[Weight]
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(
        cls,
        leaves: Leaves,
        shardings: Sequence[Sharding | None],
        tensors: Mapping[str, Tensor],
        asked: _Asked,
    ) -> "_Found":
        """What is loaded, from all tensors in the files.

        Raises:
            FunctreeValueError: something does not fit.
        """
        named, problems = names_of(leaves.leaves, asked.names)
        fitting = fitted(leaves.leaves, named, tensors, asked.cast)
        problems += fitting.problems
        for leaf, sharding in zip(leaves.leaves, shardings, strict=True):
            problems += misplaced(leaf, sharding)
        problems += untied(leaves.leaves, named)
        problems += meeting(leaves.leaves)
        problems += unread_problems(tensors, fitting.asked, asked.left_out)
        if problems:
            raise FunctreeValueError(asked.failure, problems)
        read = {name: tensors[name] for name in tensors if name in fitting.asked}
        return cls(leaves, shardings, named, fitting.weights, read)

    def facts(self) -> Facts:
        """What has to be the same in all processes."""
        arrays: list[str] = []
        texts: list[str] = []
        for leaf, sharding in zip(self.leaves.leaves, self.shardings, strict=True):
            where = "on the host" if sharding is None else sharding_text(sharding)
            arrays.append(f"{path_text(leaf.path)}: {array_text(leaf.value)} {where}")
            texts.append(f"{path_text(leaf.path)}: {self.named[leaf.path].text}")
        return {"arrays": arrays, "names": texts, "tensors": beginnings(self.tensors)}

    def read(self, where: str) -> list[jax.Array | np.ndarray | np.generic]:
        """The arrays, from what the files have. One array at several places of `like` is one array
        again."""
        first: dict[object, int] = {}
        created: list[Created] = []
        places: list[int] = []
        rows = zip(self.leaves.leaves, self.shardings, self.weights, strict=True)
        for leaf, sharding, weight in rows:
            # One array of numpy at two places is often nothing but zeros that were made once.
            is_one = isinstance(leaf.value, jax.Array)
            place = first.setdefault(
                (id(leaf.value), sharding) if is_one else leaf.path, len(created)
            )
            if place == len(created):
                created.append(Created(weight, sharding, leaf.value.dtype))
            places.append(place)
        remedy = "give these arrays in `like` the dtype of the files"
        arrays = read_arrays(where, created, self.tensors, remedy)
        # Once each: two arrays on one buffer could not both be donated.
        values = [leaf.value for leaf in self.leaves.leaves]
        once = {place: _as_in(values[i], arrays[place]) for i, place in enumerate(places)}
        return [once[place] for place in places]


def _as_in(value: object, array: jax.Array | np.ndarray) -> jax.Array | np.ndarray | np.generic:
    """An array that was read, of the kind that it has in `like`."""
    if isinstance(array, jax.Array):
        return array
    if isinstance(value, jax.Array):
        return jnp.asarray(array)
    return array[()] if isinstance(value, np.generic) else array
