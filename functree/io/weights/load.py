"""Files of tensors, and their names ─► a tree of the user's own, or a published model, whose arrays
are born as a layout says."""

import dataclasses
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from functree.argument_checks import (
    FLAG,
    FLOATING,
    LOCAL_FILE,
    LOCAL_FOLDER,
    MAPPING,
    TEXTS,
    Takes,
    check,
    check_tree,
)
from functree.devices.meshes import MeshLike
from functree.devices.placement import sharding_text
from functree.errors import (
    FunctreeError,
    FunctreeValueError,
    Problem,
    ShardingError,
    count,
    path_text,
)
from functree.io.casts import Loss, warn_of_losses
from functree.io.extras import ForeignErrors
from functree.io.laid_out import ENABLE, is_enabled, laid_out, misplaced, not_enabled
from functree.io.weights.files import ALL_DTYPES, Tensor, files_of, is_folder, open_tensors
from functree.io.weights.fitting import Terms, Weight, fitted, unread_problems, untied
from functree.io.weights.table import Table, TensorName, names_of, refusal
from functree.labels.leaf import meeting
from functree.layout.layout import LayoutTree
from functree.nn.config import TransformerConfig
from functree.nn.families import PublishedConfig, read_config
from functree.nn.rope import frequencies_of
from functree.nn.transformer import Transformer
from functree.processes.agreement import Agreement, Facts
from functree.processes.check_processes import checksum, facts_of
from functree.processes.digest import digests_of
from functree.report.json_text import value_text
from functree.transforms.init import abstract
from functree.tree.arrays import dtype_text

T = TypeVar("T")

_Array = jax.Array | np.ndarray | np.generic
_File = str | os.PathLike[str]
_FILES = Takes(
    f"{LOCAL_FILE.text}; or of a folder, or a list of files",
    lambda value: isinstance(value, list) and all(map(LOCAL_FILE.is_type, value)),
    lambda value: len(value) > 0 and all(map(LOCAL_FILE.is_value, value)),
)
_TABLE = Takes(
    "a mapping from paths to names, or to functions that return one",
    lambda table: (
        MAPPING.fits(table)
        and all(isinstance(path, str) for path in table)
        and all(isinstance(name, str) or callable(name) for name in table.values())
    ),
)
# On which terms `load_tensors` and `load_weights` load
_OF_TENSORS = Terms(
    dtypes="like",
    dtype="to have it as {dtype}: cast=True",
    misfit="correct the name in `table`, or the shape in `like`",
    unread="give `table` rows for them, or leave them out: left_out=",
    lost="give these arrays in `like` the dtype of the files",
)
_OF_PUBLISHED = Terms(
    dtypes="files",
    dtype="say which dtype all its layers get, as `param_dtype=`",
    misfit="get files and a `config.json` that belong together: one of them is another model's",
    unread="",
    lost="give a `param_dtype=` that holds them, such as that of the files: None",
)


def load_tensors(
    files: _File | Iterable[_File],
    like: T,
    table: Mapping[str, str | Callable[..., str]],
    layout: LayoutTree = None,
    mesh: MeshLike = None,
    *,
    left_out: Collection[str] = (),
    cast: bool = False,
) -> T:
    """A tree of your own with the values of safetensors files, by a table of names.

    The arrays are created sharded, and a process reads only the slices that its devices keep. A
    tensor that joins neighbouring dimensions of an array, such as the heads with
    the size of one, is split as the array is. Dimensions of size one are dropped and added.

    Args:
        files: a file, several, or the folder that they are in.
        like: a tree, abstract or with arrays: it gives the structure, shapes and dtypes, and all
            that is static.
        table: from globs of paths to names of tensors; the first that matches a path gives its
            name. `*` in a name is the text that `*` of the glob stands for. `{i}` in a glob stands
            for a number, which the name may compute with: `"blocks.{i}.{j}.w"` and
            `"layers.{2*i+j}.w"`. `{layer}`, and `{expert}` after it, are the numbers along leading
            dimensions of the array, of which each has a tensor. `[0/3]` after a name is the first
            of three equal parts of the tensor, `[0:2/4]` are two of four, along the first dimension
            that fits. After that, `.T` is the transpose, and `.transpose(2, 0, 1)` another order of
            the dimensions. Instead of a name there may be a function, which takes the texts and
            numbers that the glob stands for.
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
        table=(table, _TABLE),
        left_out=(left_out, TEXTS),
        cast=(cast, FLAG),
    )
    where = str(given[0]) if len(given) == 1 else f"{given[0]} and {len(given) - 1} more"
    with Agreement(_failure(where)), _reading(where):
        tensors = open_tensors(_opened(given), ALL_DTYPES)
    terms = _OF_TENSORS._replace(dtypes="cast") if cast else _OF_TENSORS
    return _loaded(where, like, layout, mesh, table, tensors, terms, left_out)


def _listed(files: Any) -> Any:
    """The given files as a list."""
    if isinstance(files, str | bytes | os.PathLike):
        return [files]
    return list(files) if isinstance(files, Iterable) else files


def _opened(given: Sequence[_File]) -> list[FilePath]:
    """The files that are read: those of a folder, or the given ones."""
    paths = list(map(FilePath, given))
    return files_of(paths[0]) if len(paths) == 1 and is_folder(paths[0]) else paths


def _failure(where: object) -> str:
    return f"{where}: no weights are loaded"


def _reading(where: object) -> ForeignErrors:
    return ForeignErrors(FunctreeError, f"{where}: the weights cannot be read")


def _loaded(
    where: str,
    like: T,
    layout: LayoutTree,
    mesh: MeshLike,
    table: Table,
    tensors: Mapping[str, Tensor],
    terms: Terms,
    left_out: Collection[str] = (),
    others: Iterable[Problem] = (),
    facts: Facts = MappingProxyType({}),
) -> T:
    """A tree like `like`, read by a table. Nothing is read before all of it fits, in all processes.

    Args:
        where: what the tensors are in, for messages.
        like: the tree.
        layout: its layout; without one each array is sharded as the one in `like`.
        mesh: the mesh.
        table: the table of names.
        tensors: all tensors in the files.
        terms: what is cast, and what messages say to do.
        left_out: patterns for the tensors that nothing is read from.
        others: what else is wrong.
        facts: what else has to be the same in all processes.

    Raises:
        FunctreeError: something does not fit.
        ShardingError: the layout does not fit the tree.
    """
    failure = _failure(where)
    with Agreement(failure) as agreement:
        leaves, shardings = laid_out(like, layout, mesh)
        named, problems = names_of(leaves.leaves, table, failure)
        weights, unfit, asked = fitted(leaves.leaves, shardings, named, tensors, terms)
        problems += unfit
        for leaf, sharding in zip(leaves.leaves, shardings, strict=True):
            problems += misplaced(leaf, sharding)
        problems += untied(leaves.leaves, named)
        problems += meeting(leaves.leaves)
        problems += unread_problems(tensors, asked, left_out, terms.unread)
        problems += others
        if problems:
            raise refusal(failure, problems)
        with _reading(where):
            agreement.compare(lambda: {**facts, **_facts(weights)})
    return leaves.skeleton.fill(_read(where, weights, terms.lost))


def _facts(weights: Sequence[Weight]) -> Facts:
    """What has to be the same in all processes."""
    arrays: list[str] = []
    names: list[str] = []
    # Each machine may have files of its own: of another model of the same shapes, perhaps. Its
    # devices would be given parts of that one.
    beginnings: dict[str, str] = {}
    for weight in weights:
        path, sharding = path_text(weight.leaf.path), weight.sharding
        place = "on the host" if sharding is None else sharding_text(sharding)
        arrays.append(f"{path}: {dtype_text(weight.dtype)}{list(weight.leaf.shape)} {place}")
        names.append(f"{path}: {weight.row.text}")
        for name in weight.names:
            first = checksum(weight.tensors[name].beginning())
            beginnings[name] = f"{name} begins with {first:08x}"
    return {"arrays": arrays, "names": names, "tensors": sorted(beginnings.values())}


def _read(where: str, weights: Sequence[Weight], remedy: str) -> list[_Array]:
    """The arrays. One array at several places of `like` is one array again. All processes call
    this, with the same arrays.

    Args:
        where: what they are read from, for messages.
        weights: how each is read.
        remedy: what to do about values that a dtype does not hold.

    Raises:
        FunctreeError: a file cannot be read; or the processes have read other values.
    """
    once: dict[object, _Array] = {}
    own: list[object] = []
    losses: list[Loss] = []
    with Agreement(_failure(where)), _reading(where):
        for weight in weights:
            value = weight.leaf.value
            # One array of numpy at two places is often nothing but zeros that were made once. Two
            # arrays on one buffer could not both be donated.
            is_one = isinstance(value, jax.Array)
            own.append(id(value) if is_one else weight.leaf.path)
            if own[-1] not in once:
                array, loss = weight.array()
                once[own[-1]] = _as_in(value, array)
                losses.append(loss)
    with Agreement(_failure(where)):  # it is an error where the user makes warnings errors
        warn_of_losses(where, losses, remedy)
    # Each process has read its own files: copies of one part may have come from different ones.
    # With one process there is nothing to compare, and the digests would read all of the model.
    if jax.process_count() > 1:
        paths = [str(loss.path) for loss in losses]
        read = dict(zip(paths, once.values(), strict=True))
        _, differ = digests_of(read, "give all processes the same files")
        if differ:
            raise FunctreeError(f"{where}: the processes read other weights", differ)
    return [once[key] for key in own]


def _as_in(value: object, array: jax.Array | np.ndarray) -> _Array:
    """An array that was read, of the kind that it has in `like`."""
    if isinstance(array, jax.Array):
        return array
    if isinstance(value, jax.Array):
        return jnp.asarray(array)
    return array[()] if isinstance(value, np.generic) else array


# Published models


def load_weights(
    folder: str | FilePath,
    layout: LayoutTree,
    mesh: Mesh | None = None,
    *,
    param_dtype: DTypeLike | None = None,
    **fields: Any,
) -> Transformer:
    """A published model, from `config.json` and `*.safetensors`: llama, mistral, qwen2, qwen3,
    mixtral, qwen3_moe, olmo2 and olmoe.

    The arrays are created sharded, and of each file only the slices are read that this process'
    devices keep.

    Args:
        folder: the folder with the files.
        layout: the layout of the model.
        mesh: the mesh; by default the ambient one.
        param_dtype: the dtype of the parameters; by default those of the files. A value that it
            does not hold, but would be an infinity, is a warning by path. Float64 is an error
            without `jax_enable_x64`.
        **fields: `compute_dtype` (by default float32), `remat`, `attention`, `max_seq`,
            `capacity`, `dispatch` and `dot_general` of the config.

    Raises:
        FunctreeError: the family is unknown, a field of `config.json` is not understood, a weight
            is missing, has another shape, or is not read; the error lists all of them. Or the
            processes have other files.
        ShardingError: the layout does not fit.

    Examples:
        >>> sizes = dict(layers=2, heads=4, kv_heads=2, head_dim=2, hidden=16)
        >>> config = ft.nn.TransformerConfig(100, 8, **sizes)
        >>> model = ft.nn.Transformer.create(config, key=jax.random.key(0))
        >>> ft.save_weights(folder / "published", model)
        >>> loaded = ft.load_weights(
        ...     folder / "published", ft.P(), ft.make_mesh(data=8)
        ... )
        >>> loaded.blocks.layer.attn.query.shape, loaded.config.layers
        ((2, 8, 4, 2), 2)
    """
    check(
        "no weights are loaded",
        folder=(folder, LOCAL_FOLDER),
        param_dtype=(param_dtype, FLOATING.or_none()),
    )
    if layout is None:
        raise ShardingError("no weights are loaded: the layout is None; write `P()` to replicate")
    if param_dtype is not None and not is_enabled(param_dtype):
        raise FunctreeValueError(f"{_failure(folder)}: {not_enabled(param_dtype)}; {ENABLE}")
    with Agreement(_failure(folder)):
        published = read_config(folder, fields)
        with _reading(folder):
            tensors = open_tensors(files_of(published.file.parent))
        _check_sizes(published, tensors)
        table = published.names(published.config, tensors)
        # By the tensors: what `config.json` says is the dtype of the training.
        config, embed = published.config, tensors.get(table.get("embed.weight", ""))
        if param_dtype is not None:
            config = dataclasses.replace(config, param_dtype=param_dtype)
        elif embed is not None and is_enabled(embed.dtype):
            config = dataclasses.replace(config, param_dtype=embed.dtype)
        repeated = dict(_repeated(published, tensors))
    others = [problem for problem in repeated.values() if problem is not None]
    # Abstract, and planned and compared before a tensor is read: a layout that does not fit is an
    # error after a second, and not after the first 100 GB.
    model = abstract(Transformer.create)(config, key=jax.random.key(0))
    terms = _OF_PUBLISHED if param_dtype is None else _OF_PUBLISHED._replace(dtypes="cast")
    facts = {"config": facts_of(config)}
    return _loaded(
        str(folder), model, layout, mesh, table, tensors, terms, list(repeated), others, facts
    )


def _check_sizes(published: PublishedConfig, tensors: Mapping[str, Tensor]) -> None:
    """Raise for sizes of a config that nothing in the files can have.

    Even abstract, a model of such sizes may take for ever.
    """
    elements = sum(math.prod(tensor.shape) for tensor in tensors.values())
    # A layer has a tensor of its own, and every other size is in the shape of one.
    most = {**dict.fromkeys(_SIZES, elements), "layers": len(tensors)}
    problems: list[Problem] = []
    for field, number in most.items():
        size = getattr(published.config, field)
        if size is not None and size > number:
            given = [name for name, value in published.given.items() if value == size]
            what = "/".join(f'"{name}"' for name in given) or field
            why = f"the files have {count(len(tensors), 'tensor')} with {elements:,} elements"
            problems.append(Problem(None, None, f"{what}: {value_text(size)}", why))
    if problems:
        failure = f"{published.file}: sizes that the files do not have"
        raise FunctreeError(failure, dict.fromkeys(problems))  # two fields may be one size


_SIZES = "vocab_size embed heads kv_heads head_dim hidden experts expert_hidden".split()


# Tensors that say again what a model has. Older files have the frequencies of the rotation, and the
# table of the logits even where it is the table of the embedding. Readers pass over both; here they
# have to be what the model computes with.

_FREQUENCIES = ".rotary_emb.inv_freq"
# They were kept in the dtype of the weights: bfloat16 has 8 bits.
_TOLERANCE = 2.0**-7
# So many rows of two tables are compared at a time: whole, they may be gigabytes.
_ROWS = 4096


def _repeated(
    published: PublishedConfig, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Problem | None]]:
    """The names of such tensors, each with its problem if it says something else."""
    config = published.config
    names = published.names(dataclasses.replace(config, tie_embedding=False), tensors)
    table, head = names.get("embed.weight", ""), TensorName.parse(names.get("unembed.weight", ""))
    for name, tensor in tensors.items():
        if name.endswith(_FREQUENCIES):
            is_same = _are_frequencies(tensor, config)
            why = "it has other frequencies than the config says", "correct the config"
        elif config.tie_embedding and name == head.name and table in tensors:
            # The table of the embedding is never transposed: (vocab, embed).
            is_same = _are_equal(tensors[table], tensor, transposed=head.order is None)
            why = (
                f"the config ties it to {table}, which has other values",
                'write "tie_word_embeddings": false if it is meant, or remove the tensor',
            )
        else:
            continue
        yield name, None if is_same else Problem(None, None, name, *why)


def _are_frequencies(tensor: Tensor, config: TransformerConfig) -> bool:
    expected = np.asarray(frequencies_of(config.head_dim, config.rope_theta, config.rope_scaling))
    if tensor.shape != expected.shape:
        return False
    found = tensor.read([slice(None)]).astype(np.float32)
    return bool(np.allclose(found, expected, rtol=_TOLERANCE, atol=0))


def _are_equal(table: Tensor, other: Tensor, transposed: bool) -> bool:
    """Return whether a table is equal to another one, which may be (embed, vocab)."""
    shape = other.shape[::-1] if transposed else other.shape
    if table.shape != shape:
        return False
    columns = slice(None)
    for first in range(0, shape[0], _ROWS):
        some = slice(first, min(first + _ROWS, shape[0]))
        found = other.read([columns, some]).T if transposed else other.read([some, columns])
        if not np.array_equal(table.read([some, columns]), found):
            return False
    return True
