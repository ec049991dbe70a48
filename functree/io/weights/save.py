"""A `Transformer` ─► the files of a published model: `config.json`, and `*.safetensors`."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path as FilePath
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from functree.argument_checks import LOCAL_FOLDER, Takes, check, shown
from functree.devices.specs import of_rank
from functree.errors import FunctreeError, FunctreeValueError, Problem
from functree.io.checkpoints.contents import not_saveable
from functree.io.extras import ForeignErrors, import_extra
from functree.io.weights.blocks import with_joined_heads
from functree.io.weights.files import DTYPES, INDEX
from functree.io.weights.table import WHOLE, TensorName, names_of
from functree.labels.leaf import Leaf
from functree.labels.leaves import read
from functree.layout.plan.make_plan import plan
from functree.nn.config import TransformerConfig
from functree.nn.families import CHOSEN, FIELDS, LLAMA_3, families, understood
from functree.nn.rope import Llama3Rope
from functree.nn.transformer import Transformer
from functree.processes.agreement import Agreement
from functree.processes.check_processes import facts_of
from functree.processes.digest import digests_of
from functree.transforms.init import abstract
from functree.tree.arrays import is_array, on_device, with_sharding
from functree.tree.paths import Keys, Path

_MODEL = Takes("an `ft.nn.Transformer`", lambda value: isinstance(value, Transformer))
# A larger model is split into several files, as published ones are.
MOST_BYTES = 5 * 10**9


def save_weights(folder: str | FilePath, model: Transformer) -> None:
    """Write a model as it would be published, so that `ft.load_weights` and others read it.

    The family is the one that computes the same: `qwen3` with norms of queries and keys, `qwen2`
    with biases, `mistral` with a window, else `llama`; with experts `qwen3_moe` if it has such
    norms, else `mixtral`; `olmo2` and `olmoe` with norms over all heads.

    Args:
        folder: a folder without weights; it is created.
        model: the model.

    Raises:
        FunctreeError: the folder has weights already; no family computes what the model does, such
            as with a user's attention function, a layer of another class, or integers as weights,
            which the error names by path; an array has no values, or is not one of all processes;
            the processes have other models.

    Examples:
        >>> sizes = dict(layers=2, heads=4, kv_heads=2, head_dim=2, hidden=16)
        >>> config = ft.nn.TransformerConfig(100, 8, **sizes)
        >>> model = ft.nn.Transformer.create(config, key=jax.random.key(0))
        >>> ft.save_weights(folder / "weights", model)
        >>> sorted(file.name for file in (folder / "weights").iterdir())
        ['config.json', 'model.safetensors']
    """
    check("no weights are saved", folder=(folder, LOCAL_FOLDER), model=(model, _MODEL))
    folder = FilePath(folder)
    failure = f"{folder}: no weights are saved"
    leaves = read(model).leaves
    # All that can be refused is, before the first file is made.
    with Agreement(failure) as agreement:
        safetensors = import_extra("safetensors.numpy", "weights")
        problems = [not_saveable(leaf) for leaf in leaves]
        if found := [problem for problem in problems if problem is not None]:
            raise FunctreeValueError(failure, found)
        family = family_of_model(model)
        names = _names(model, leaves, family, failure)
        # Not to be overwritten: the files of a larger model that was there would stay beside these.
        with ForeignErrors(FunctreeError, failure):
            there = _weights_in(folder)
        if there:
            raise FunctreeError(
                f"{folder} has {', '.join(there)} already: save to another folder, or remove them"
            )
        facts = {
            "folder": [str(folder)],
            "config": facts_of(model.config),
            "model": facts_of(plan(model)),
        }
        agreement.compare(lambda: facts)
    _, differ = digests_of({str(leaf.path): leaf.value for leaf in leaves})
    if differ:
        raise FunctreeError(failure, differ)
    files = _files(leaves)

    def write(run: Callable[[], None]) -> None:
        """Write a file in the first process; the others hear of it if that fails."""
        with Agreement(failure), ForeignErrors(FunctreeError, failure):
            if jax.process_index() == 0:
                run()

    # `config.json` is the last, and the index comes after the files that it names: a process that
    # is killed in between leaves what nobody takes for a model.
    write(lambda: folder.mkdir(parents=True, exist_ok=True))
    for file, own in files.items():
        tensors = _tensors(own, names)
        # Hugging Face's readers refuse a file without a format.
        write(partial(safetensors.save_file, tensors, folder / file, metadata={"format": "pt"}))
    if len(files) > 1:
        write(lambda: _write(folder / INDEX, _index(files, names)))
    write(lambda: _write(folder / "config.json", _config(family, model.config)))


def _weights_in(folder: FilePath) -> list[str]:
    """The names of the files of a model in a folder."""
    if not folder.is_dir():
        return []
    # All names, and not only those of files that can be read: what is written to a link that leads
    # nowhere would be a file in another folder.
    names = sorted(file.name for file in folder.iterdir())
    return [name for name in names if name == "config.json" or ".safetensors" in name]


def _names(
    model: Transformer, leaves: Sequence[Leaf], family: str, failure: str
) -> dict[Path, TensorName]:
    """The name of each array in a family, by path."""
    table = families[family][1](model.config, ())
    named, problems = names_of(leaves, table, failure)
    names = {path: name.name for path, name in named.items()}
    for leaf in leaves:
        name = names.get(leaf.path)
        if name is None or name.part != WHOLE or name.order:
            why = f'the table of `ft.nn.families["{family}"]` does not say how a file has it'
            problems.append(leaf.problem(why, "give it a name, which may end with `.T`"))
    if problems:
        raise FunctreeValueError(failure, problems)
    return names


def _files(leaves: Sequence[Leaf]) -> dict[str, list[Leaf]]:
    """The files, each with its arrays.

    It is one file, or several of at most `MOST_BYTES` or one array.
    """
    groups: list[list[Leaf]] = [[]]
    size = 0
    for leaf in leaves:
        if groups[-1] and size + leaf.value.nbytes > MOST_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(leaf)
        size += leaf.value.nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    files: dict[str, list[Leaf]] = {}
    for i, group in enumerate(groups):
        files[f"model-{i + 1:05}-of-{len(groups):05}.safetensors"] = group
    return files


def _tensors(leaves: Sequence[Leaf], names: Mapping[Path, TensorName]) -> dict[str, np.ndarray]:
    """The tensors of some arrays, by name: in the first process; others give it their parts."""
    tensors: dict[str, np.ndarray] = {}
    for leaf in leaves:
        name = names[leaf.path]
        parts: Iterable[jax.Array | np.ndarray] = [leaf.value]
        for _ in name.places:
            parts = (part for stack in parts for part in _layers(stack))
        axes = leaf.axes[len(name.places) :]
        for tensor, part in zip(name.tensors(leaf.shape), parts, strict=True):
            # In all processes: to gather an array is a collective.
            whole = _on_host(part)
            if jax.process_index() == 0:
                tensors[tensor] = as_published(whole, axes, name)
    return tensors


def as_published(array: np.ndarray, axes: Sequence[str | None], name: TensorName) -> np.ndarray:
    """The tensor for an array: published models join the heads with the size of one."""
    tensor = array.reshape(with_joined_heads(array.shape, axes))
    # Safetensors writes the memory of an array as it is: of a transposed view it would write the
    # untransposed values under the transposed shape.
    return np.ascontiguousarray(tensor if name.order is None else tensor.T)


def _on_host(array: jax.Array | np.ndarray) -> np.ndarray:
    """All of an array, in the memory of each process."""
    if isinstance(array, np.ndarray):
        return array
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def _layers(array: jax.Array | np.ndarray) -> Iterator[jax.Array | np.ndarray]:
    """The layers of a stacked array.

    One at a time: all of a large model would not fit onto a device.
    """
    if isinstance(array, np.ndarray):
        yield from array
        return
    array = on_device(array)
    if isinstance(array.sharding, NamedSharding):
        # The layers may be sharded themselves, and on Explicit axes JAX takes no slice of a
        # dimension that is.
        spec = PartitionSpec(None, *of_rank(array.sharding.spec, array.ndim)[1:])
        array = with_sharding(jnp.asarray, array.sharding.update(spec=spec), array)
    for i in range(array.shape[0]):
        yield _layer(array, i)


# The index is an array, so that all layers are one program.
@jax.jit
def _layer(array: jax.Array, i: int) -> jax.Array:
    return lax.dynamic_index_in_dim(array, i, keepdims=False)


def _index(files: Mapping[str, Sequence[Leaf]], names: Mapping[Path, TensorName]) -> dict[str, Any]:
    """The file of each tensor, as Hugging Face's readers look for it."""
    file_of: dict[str, str] = {}
    size = 0
    for file, leaves in files.items():
        for leaf in leaves:
            file_of.update(dict.fromkeys(names[leaf.path].tensors(leaf.shape), file))
            size += leaf.value.nbytes
    return {"metadata": {"total_size": size}, "weight_map": dict(sorted(file_of.items()))}


def _write(file: FilePath, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _config(family: str, config: TransformerConfig) -> dict[str, Any]:
    """What `config.json` says of a model: of all fields that a family may have, those that this one
    reads."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if isinstance(config.rope_scaling, Llama3Rope):
        numbers = dataclasses.astuple(config.rope_scaling)
        rope = {"rope_type": "llama3", **dict(zip(LLAMA_3, numbers, strict=True))}
    hidden = config.hidden if config.expert_hidden is None else config.expert_hidden
    given = {
        "architectures": [f"{family.title().replace('_', '')}ForCausalLM"],
        "model_type": family,
        **{theirs: getattr(config, ours) for theirs, ours in FIELDS.items()},
        "hidden_act": "silu",
        "rope_parameters": {"rope_theta": config.rope_theta, **rope},
        # Where older readers look, which would take the neutral value and compute something else.
        "rope_theta": config.rope_theta,
        "rope_scaling": rope if config.rope_scaling else None,
        "dtype": str(config.param_dtype),
        "moe_intermediate_size": hidden,
        # Readers of either age: the older ones call it "num_experts".
        "num_experts": config.experts,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    if config.experts is None:
        given = {name: value for name, value in given.items() if "experts" not in name}
    read, _ = understood(family, given)
    if config.experts is not None and "moe_intermediate_size" not in read.names:
        given["intermediate_size"] = hidden
    return {name: value for name, value in given.items() if name in read.names}


# Which family computes what a model does

# Fields of layers that say nothing of what is computed, or are chosen by who loads the weights, as
# the dtype of activations and the capacity of experts are.
_FREE = ("axes", "axis", "compute_dtype", "dispatch", "capacity")
# Fields of the config that are so, and those that each family can have.
_NOT_COMPARED = (*CHOSEN, "param_dtype", "hidden", "expert_hidden")
_HEADLINE = "no published family computes what this model does"
_OPTIONS = "give it the options of one of these, or keep it by `ft.save`, which takes any model"
_REPLACE = "put the array or the layer that the family has there, such as by `ft.select`"
_PLAIN = (
    "if it computes what `jax.nn.dot_product_attention` does, move the arrays into a model with "
    '`attention="auto"`: `plain = ft.abstract(ft.nn.Transformer.create)(dataclasses.replace('
    'model.config, attention="auto"), key=jax.random.key(0))`, and `jax.tree.unflatten('
    "jax.tree.structure(plain), jax.tree.leaves(model))`"
)


def family_of_model(model: Transformer) -> str:
    """The family whose models compute as this one does.

    The files of a family have its arrays, its sizes and its numbers. So what is compared is all
    else: the class of each layer, whether each array is there, its shape and kind of dtype, and
    the numbers in the layers.

    Raises:
        FunctreeError: none does. The error lists all parts that differ, by path.
    """
    config = model.config
    # Not a subclass, which may compute other frequencies of the same numbers: it differs by path.
    if type(config.rope_scaling) is not Llama3Rope:
        config = dataclasses.replace(config, rope_scaling=None)
    name = _by_config(config)
    config = dataclasses.replace(config, attention="auto", dot_general=None)
    published = abstract(Transformer.create)(config, key=jax.random.key(0))
    if problems := list(_differences(model, published, ())):
        raise FunctreeValueError(_HEADLINE, problems)
    return name


def _by_config(config: TransformerConfig) -> str:
    """The first family that has the options of a config: what is written of it is read as the same
    config again."""
    differ: list[list[Problem]] = []  # of each family
    for family in families:
        read, found = understood(family, _config(family, config))
        if read.problems:  # such as that there is no number of experts
            continue
        own: list[Problem] = []
        for field in dataclasses.fields(config):
            given, theirs = getattr(config, field.name), found.get(field.name, field.default)
            if field.name not in _NOT_COMPARED and given != theirs:
                what, why = f"{field.name}={given!r}", f"{family} has {theirs!r}"
                own.append(Problem(None, None, what, why, _OPTIONS))
        if not own:
            return family
        differ.append(own)
    fewest = min(map(len, differ), default=0)
    nearest = [problem for own in differ if len(own) == fewest for problem in own]
    raise FunctreeValueError(_HEADLINE, nearest)


def _differences(given: object, published: object, keys: Keys) -> Iterator[Problem]:
    """What in a part of a model is not as in that of a published one."""
    if isinstance(published, eqx.Module):
        # A subclass may compute something else, and so may another layer with the same arrays.
        if type(given) is not type(published):
            why = f"the family has functree's {_text(published)} there"
            yield Problem(Path(keys), None, _text(given), why, _REPLACE)
            return
        for field in dataclasses.fields(published):
            if field.name not in _FREE:
                parts = getattr(given, field.name), getattr(published, field.name)
                yield from _differences(*parts, (*keys, field.name))
    elif is_array(published):
        yield from _differences_of_array(given, published.shape, keys)
    elif keys[-1] == "attention":
        # By its name it is one computation, by whatever kernel.
        if not isinstance(given, str):
            yield Problem(Path(keys), None, _text(given), "no family has it", _PLAIN)
    elif is_array(given) or isinstance(given, eqx.Module) or given != published:
        why = f"the family has {_text(published)} there, by the config"
        yield Problem(Path(keys), None, _text(given), why, _REPLACE)


def _differences_of_array(given: object, shape: tuple[int, ...], keys: Keys) -> Iterator[Problem]:
    """What is wrong with that which stands in the place of an array."""
    if not is_array(given):
        yield Problem(Path(keys), None, _text(given), "the family has an array there", _REPLACE)
    elif given.shape != shape:
        why = f"the family has the shape {shape} there"
        yield Problem(Path(keys), None, shown(given), why, _REPLACE)
    elif str(given.dtype) not in DTYPES.values():
        # Such as integers, which a reader would take without what they are multiplied by.
        why = f"weights are of {', '.join(DTYPES.values())}"
        remedy = 'convert it: `jax.tree.map(lambda x: x.astype("float32"), model)`'
        yield Problem(Path(keys), None, shown(given), why, remedy)


def _text(value: object) -> str:
    """A layer by its class, another value by itself."""
    return type(value).__name__ if isinstance(value, eqx.Module) else shown(value)
