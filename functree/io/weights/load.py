"""`load_tensors` and `load_weights` read safetensors files into sharded arrays."""

import dataclasses
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from functree.argument_checks import (
    LOCAL_FILE,
    LOCAL_FOLDER,
    MAPPING,
    TEXTS,
    Flag,
    FloatingDtype,
    Takes,
    check,
    check_tree,
    checked,
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
from functree.io.laid_out import (
    ENABLE,
    is_enabled,
    laid_out,
    like_value,
    misplaced,
    not_enabled,
)
from functree.io.weights.files import ALL_DTYPES, Tensor, files_of, open_tensors
from functree.io.weights.fitting import Terms, Weight, fitted, unread_problems
from functree.io.weights.table import Table, TensorName, names_of, refusal
from functree.labels.leaves import meeting
from functree.layout.layout import LayoutTree
from functree.nn.families import PublishedConfig, read_config
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
    f"the path of a folder, a list of files, or {LOCAL_FILE.text}",
    lambda value: isinstance(value, list) and len(value) > 0 and all(map(LOCAL_FILE.fits, value)),
)
_TABLE = Takes(
    "a mapping from paths to names",
    lambda table: (
        MAPPING.fits(table) and all(isinstance(text, str) for row in table.items() for text in row)
    ),
)
# The terms of `load_tensors` and `load_weights`
_OF_TENSORS = Terms(
    dtypes="like",
    dtype="pass `cast=True` to convert the tensor to {dtype}",
    misfit="correct the name in `table` (`.T` transposes the tensor), or the shape in `like`",
    unread="add rows for these tensors to `table`, or pass `left_out=`",
    lost="in `like`, give these arrays the dtypes of their tensors in the files",
)
_OF_PUBLISHED = Terms(
    dtypes="files",
    dtype="pass `param_dtype=` to load all tensors in one dtype",
    misfit="use files and a `config.json` from the same model",
    unread="",
    lost="pass a `param_dtype=` that can hold the values, or omit it to keep the files' dtype",
)


@checked("load_tensors: invalid arguments")
def load_tensors(
    files: _File | Iterable[_File],
    like: T,
    table: Annotated[Mapping[str, str], _TABLE],
    layout: LayoutTree = None,
    mesh: MeshLike = None,
    *,
    left_out: Annotated[Collection[str], TEXTS] = (),
    cast: Flag = False,
) -> T:
    """Load safetensors files into your own tree, using a table of names.

    The arrays are created sharded, and each process reads only the slices that its devices hold. If
    a tensor joins neighboring dimensions of an array, such as heads and head size, the joined
    dimension is split. Dimensions of size 1 are dropped and added as needed. One error lists all
    problems, before any values are read.

    The names of tensors in `table` follow these rules:

    - `*` in a name stands for the text that the glob's `*` matched.
    - `{i}` in a glob matches a number, which the name may use in arithmetic, as in
      `"blocks.{i}.{j}.w": "layers.{2*i+j}.w"`.
    - `{layer}` and `{expert}` in a name stand for the indices of an array's leading dimensions, in
      this order. Each index has its own tensor.
    - `[0/3]` after a name selects the first of three equal parts of the tensor, and `[0:2/4]`
      selects the first two of four. The parts divide the first dimension that fits.
    - `.T` at the end of a name transposes the tensor, and `.transpose(2, 0, 1)` reorders its
      dimensions.

    Args:
        files: a file, several files, or a folder of files.
        like: a tree, which may be abstract. The result has the structure, shapes, dtypes and static
            leaves of `like`.
        table: a mapping from globs of paths to names of tensors. The first glob that matches a path
            gives the name of the path's tensor.
        layout: the layout of the tree. By default, each array is sharded as in `like`.
        mesh: a mesh, or None for the current mesh.
        left_out: patterns for the names of tensors that are not read, with `*` for any text.
        cast: whether tensors are cast to the dtypes in `like`. A warning lists the paths of arrays
            with values that the dtype cannot hold. Rounding floats causes no warning.

    Raises:
        FunctreeError: if no glob in `table` matches an array.
        FunctreeError: if an array's tensor is missing from the files.
        FunctreeError: if a tensor's shape does not fit its array.
        FunctreeError: if a tensor's dtype differs from its array's dtype, without `cast=True`.
        FunctreeError: if a tensor is neither read nor left out.
        FunctreeError: if a glob in `table` names no array.
        FunctreeError: if a pattern in `left_out` matches no unread tensor.
        FunctreeError: if an abstract array in `like` has no sharding, and there is no layout.
        FunctreeError: if a file is missing.
        FunctreeError: if a file is not a safetensors file.
        FunctreeError: if the processes have different files.
        ShardingError: if the layout does not fit the tree.

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
    check("load_tensors: invalid arguments", files=(given, _FILES))
    where = str(given[0]) if len(given) == 1 else f"{given[0]} and {len(given) - 1} more"
    with Agreement(_failure(where)), _reading(where):
        tensors = open_tensors(_opened(given), ALL_DTYPES)
    terms = _OF_TENSORS._replace(dtypes="cast") if cast else _OF_TENSORS
    return _loaded(where, like, layout, mesh, table, tensors, terms, left_out)


def _listed(files: Any) -> Any:
    """Return the argument `files` as a list, or unchanged if it is invalid."""
    if isinstance(files, str | bytes | os.PathLike):
        return [files]
    return list(files) if isinstance(files, Iterable) else files


def _opened(given: Sequence[_File]) -> list[FilePath]:
    """Return the given files, or the files in the given folder."""
    paths = list(map(FilePath, given))
    return files_of(paths[0]) if len(paths) == 1 and paths[0].is_dir() else paths


def _failure(where: object) -> str:
    return f"{where} cannot be loaded"


def _reading(where: object) -> ForeignErrors:
    return ForeignErrors(FunctreeError, f"{where} cannot be read")


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
    """Load a tree using a table, after all checks pass in all processes.

    Args:
        where: the files, for messages.
        like: the tree.
        layout: the tree's layout; by default, each array is sharded as in `like`.
        mesh: the mesh.
        table: the table of names.
        tensors: all tensors in the files.
        terms: the source of the dtypes, and the remedies.
        left_out: patterns for the tensors that are not read.
        others: problems that the caller found.
        facts: further facts that must be the same in all processes.

    Raises:
        FunctreeError: if an array, a tensor or the table has a problem.
        ShardingError: if the layout does not fit the tree.
    """
    failure = _failure(where)
    with Agreement(failure) as agreement:
        leaves, shardings = laid_out(like, layout, mesh)
        named, problems = names_of(leaves.leaves, table, failure)
        weights, unfit, asked = fitted(leaves.leaves, shardings, named, tensors, terms)
        problems += unfit
        for leaf, sharding in zip(leaves.leaves, shardings, strict=True):
            problems += misplaced(leaf, sharding)
        problems += meeting(leaves.leaves)
        problems += unread_problems(tensors, asked, left_out, terms.unread)
        problems += others
        if problems:
            raise refusal(failure, problems)
        with _reading(where):
            agreement.compare(lambda: {**facts, **_facts(weights)})
    return leaves.skeleton.fill(_read(where, weights, terms.lost))


def _facts(weights: Sequence[Weight]) -> Facts:
    """Return the facts that must be the same in all processes."""
    arrays: list[str] = []
    names: list[str] = []
    # Processes may read different files, perhaps of two models with the same shapes. Arrays would
    # then mix values of both models.
    beginnings: dict[str, str] = {}
    for weight in weights:
        path, sharding = path_text(weight.leaf.path), weight.sharding
        place = "on the host" if sharding is None else sharding_text(sharding)
        arrays.append(f"{path}: {dtype_text(weight.dtype)}{list(weight.leaf.shape)} {place}")
        names.append(f"{path}: {weight.row.text}")
        for name in weight.names:
            first = checksum(weight.tensors[name].beginning())
            beginnings[name] = f"{name}: the first values have checksum {first:08x}"
    return {"arrays": arrays, "names": names, "tensors": sorted(beginnings.values())}


def _read(where: str, weights: Sequence[Weight], remedy: str) -> list[_Array]:
    """Read the arrays. All processes must call this, with the same arrays.

    If `like` has one array at several paths with the same name, so does the result.

    Args:
        where: the files, for messages.
        weights: the arrays and their tensors.
        remedy: the remedy for values that a dtype cannot hold.

    Raises:
        FunctreeError: if a file cannot be read.
        FunctreeError: if the processes read different values.
    """
    once: dict[object, _Array] = {}
    own: list[object] = []
    losses: list[Loss] = []
    with Agreement(_failure(where)), _reading(where):
        for weight in weights:
            value = weight.leaf.value
            # A NumPy array at two paths is often a placeholder, such as zeros that were created
            # once. Two arrays that share a buffer could not both be donated.
            key: object = weight.leaf.path
            if isinstance(value, jax.Array):
                key = (weight.row.text, weight.sharding, id(value))
            own.append(key)
            if key not in once:
                array, loss = weight.array()
                once[key] = like_value(array, value)
                losses.append(loss)
    with Agreement(_failure(where)):  # a user may turn the warning into an error
        warn_of_losses(where, losses, remedy)
    # Each process has read its own files, so copies of a shard may differ. With one process, there
    # is nothing to compare, and digests would read the whole model.
    if jax.process_count() > 1:
        paths = [str(loss.path) for loss in losses]
        read = dict(zip(paths, once.values(), strict=True))
        _, differ = digests_of(read, "give all processes the same files")
        if differ:
            raise FunctreeError(f"{where}: the processes read different weights", differ)
    return [once[key] for key in own]


# Published models


@checked("load_weights: invalid arguments")
def load_weights(
    folder: Annotated[str | FilePath, LOCAL_FOLDER],
    layout: LayoutTree,
    mesh: Mesh | None = None,
    *,
    param_dtype: FloatingDtype | None = None,
    **fields: Any,
) -> Transformer:
    """Load a published model from `config.json` and `*.safetensors`.

    The supported families are llama, mistral, qwen2, qwen3, mixtral, qwen3_moe, olmo2 and olmoe.
    The arrays are created sharded, and each process reads only the slices that its devices hold.
    One error lists all problems, before any array of the model is created.

    Args:
        folder: the folder with the files.
        layout: the layout of the model.
        mesh: the mesh; by default the current mesh.
        param_dtype: the dtype of the parameters; by default the dtype in the files. A warning
            lists the paths of arrays with values that this dtype cannot hold. Float64 raises an
            error without `jax_enable_x64`.
        **fields: fields of the config: `compute_dtype` (by default float32), `remat`, `attention`,
            `context`, `microbatches`, `max_seq`, `capacity`, `dispatch` and `dot_general`.

    Raises:
        FunctreeError: if the family is unknown.
        FunctreeError: if a field of `config.json` is not supported.
        FunctreeError: if the value of a field is not supported.
        FunctreeError: if a weight is missing.
        FunctreeError: if a weight's shape does not fit the config.
        FunctreeError: if the tensors of a weight have different dtypes, without `param_dtype=`.
        FunctreeError: if the model does not use a tensor in the files.
        FunctreeError: if the config ties the table for the logits to the embedding, and the files
            contain both tables, with different values.
        FunctreeError: if the processes have different files.
        ShardingError: if the layout is None.
        ShardingError: if the layout does not fit the model.

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
    if layout is None:
        raise ShardingError(
            "load_weights: the layout is None: pass `ft.P()` to replicate the model"
        )
    if param_dtype is not None and not is_enabled(param_dtype):
        raise FunctreeValueError(f"{_failure(folder)}: {not_enabled(param_dtype)}; {ENABLE}")
    with Agreement(_failure(folder)):
        published = read_config(folder, fields)
        with _reading(folder):
            tensors = open_tensors(files_of(published.file.parent))
        _check_sizes(published, tensors)
        table = published.names(published.config, tensors)
        # The tensors' dtype is used, since `config.json` has the dtype used in training.
        config, embed = published.config, tensors.get(table.get("embed.weight", ""))
        if param_dtype is not None:
            config = dataclasses.replace(config, param_dtype=param_dtype)
        elif embed is not None and is_enabled(embed.dtype):
            config = dataclasses.replace(config, param_dtype=embed.dtype)
        redundant, others = _redundant(published, tensors, table.get("embed.weight", ""))
    # The plan is checked with an abstract model, so that a layout that does not fit is reported
    # before any array is read.
    model = abstract(Transformer.create)(config, key=jax.random.key(0))
    terms = _OF_PUBLISHED if param_dtype is None else _OF_PUBLISHED._replace(dtypes="cast")
    facts = {"config": facts_of(config)}
    return _loaded(
        str(folder), model, layout, mesh, table, tensors, terms, redundant, others, facts
    )


def _check_sizes(published: PublishedConfig, tensors: Mapping[str, Tensor]) -> None:
    """Raise a FunctreeError if the files have too few tensors or elements for the config.

    With impossible sizes, even creating an abstract model might take forever.
    """
    elements = sum(math.prod(tensor.shape) for tensor in tensors.values())
    # Each layer has its own tensors, and every other size occurs in a tensor's shape.
    most = {**dict.fromkeys(_SIZES, elements), "layers": len(tensors)}
    problems: list[Problem] = []
    for field, number in most.items():
        size = getattr(published.config, field)
        if size is not None and size > number:
            given = [name for name, value in published.given.items() if value == size]
            what = "/".join(f'"{name}"' for name in given) or field
            why = (
                f"the files contain only {count(len(tensors), 'tensor')}, with {elements:,} "
                "elements in total"
            )
            problems.append(Problem(None, None, f"{what}: {value_text(size)}", why))
    if problems:
        failure = f"the sizes in {published.file} do not fit the tensors in the files"
        raise FunctreeError(failure, dict.fromkeys(problems))  # two fields may have the same size


_SIZES = "vocab_size embed heads kv_heads head_dim hidden experts expert_hidden".split()


_FREQUENCIES = ".rotary_emb.inv_freq"
# The number of rows of two tables to compare at a time. Whole tables may need gigabytes.
_ROWS = 4096


def _redundant(
    published: PublishedConfig, tensors: Mapping[str, Tensor], embed: str
) -> tuple[list[str], list[Problem]]:
    """Return the names of the redundant tensors that some files contain, and their problems.

    Older files contain the rotary frequencies, which are ignored. Some files contain the table for
    the logits even if the config ties it to the embedding. The tables must then be equal.

    Args:
        published: the config.
        tensors: all tensors in the files.
        embed: the name of the embedding's table.
    """
    names = [name for name in tensors if name.endswith(_FREQUENCIES)]
    problems: list[Problem] = []
    untied = dataclasses.replace(published.config, tie_embedding=False)
    head = TensorName.parse(published.names(untied, tensors).get("unembed.weight", "")).name
    if published.config.tie_embedding and head in tensors and embed in tensors:
        names.append(head)
        if not _are_equal(tensors[embed], tensors[head]):
            why = f"`config.json` ties it to {embed}, which has different values"
            remedy = 'set "tie_word_embeddings": false in `config.json`, or remove the tensor'
            problems.append(Problem(None, None, head, why, remedy))
    return names, problems


def _are_equal(table: Tensor, other: Tensor) -> bool:
    """Return whether two (vocab, embed) tables are equal."""
    if table.shape != other.shape:
        return False
    for first in range(0, table.shape[0], _ROWS):
        rows = [slice(first, min(first + _ROWS, table.shape[0])), slice(None)]
        if not np.array_equal(table.read(rows), other.read(rows)):
            return False
    return True
