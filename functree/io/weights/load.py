"""The files of a published model ─► a `Transformer`, whose arrays are born as a layout says."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from functree.argument_checks import FLOATING, LOCAL_FOLDER, check
from functree.errors import FunctreeError, Problem, ShardingError, count
from functree.io.extras import ForeignErrors
from functree.io.laid_out import laid_out
from functree.io.weights.files import Tensor, files_of, open_tensors
from functree.io.weights.fitting import Terms
from functree.io.weights.load_tensors import Loading
from functree.io.weights.table import TensorName
from functree.layout.layout import LayoutTree
from functree.nn.config import TransformerConfig
from functree.nn.families import PublishedConfig, read_config
from functree.nn.rope import frequencies_of
from functree.nn.transformer import Transformer
from functree.processes.agreement import Agreement
from functree.processes.check_processes import facts_of
from functree.report.json_text import value_text
from functree.transforms.init import abstract

_TERMS = Terms(
    dtypes="files",
    dtype="say which dtype all its layers get, as `param_dtype=`",
    unread="",
    lost="give a `param_dtype=` that holds them, such as that of the files: None",
)


def load_weights(
    folder: str | FilePath,
    layout: LayoutTree,
    mesh: Mesh | None = None,
    *,
    param_dtype: DTypeLike | None = None,
    **fields: Any,
) -> Transformer:
    """A published model, from `config.json` and `*.safetensors`: llama, mistral, qwen2, qwen3,
    mixtral and qwen3_moe.

    The arrays are created sharded, and of each file only the slices are read that this process'
    devices keep.

    Args:
        folder: the folder with the files.
        layout: the layout of the model.
        mesh: the mesh; by default the ambient one.
        param_dtype: the dtype of the parameters; by default those of the files. A value that it
            does not hold, but would be an infinity, is a warning by path.
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
    failure = f"{folder}: no weights are loaded"
    with Agreement(failure) as agreement:
        published = read_config(folder, fields)
        with ForeignErrors(FunctreeError, f"{folder}: the weights cannot be read"):
            tensors = open_tensors(files_of(published.file.parent))
        _check_sizes(published, tensors)
        table = published.names(published.config, tensors)
        # By the tensors: what `config.json` says is the dtype of the training.
        config, embed = published.config, tensors.get(table.get("embed.weight", ""))
        if param_dtype is not None:
            config = dataclasses.replace(config, param_dtype=param_dtype)
        elif embed is not None:
            config = dataclasses.replace(config, param_dtype=embed.dtype)
        # Abstract, and planned and compared before a tensor is read: a layout that does not fit is
        # an error after a second, and not after the first 100 GB.
        model = abstract(Transformer.create)(config, key=jax.random.key(0))
        leaves, shardings = laid_out(model, layout, mesh)
        repeated = dict(_repeated(published, tensors))
        others = [problem for problem in repeated.values() if problem is not None]
        terms = _TERMS if param_dtype is None else _TERMS._replace(dtypes="cast")
        loading = Loading.of(
            leaves, shardings, table, tensors, list(repeated), terms, failure, others
        )
        agreement.compare(lambda: {"config": facts_of(config), **loading.facts()})
    return leaves.skeleton.fill(loading.read(str(folder)))


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
        raise FunctreeError(f"{published.file}: sizes that the files do not have", problems)


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
    table, head = names.get("embed.weight"), TensorName.parse(names.get("unembed.weight", ""))
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
    """Whether a table is equal to another one, which may be (embed, vocab)."""
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
