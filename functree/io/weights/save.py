"""`save_weights` writes a `Transformer` as `config.json` and `*.safetensors` files."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path as FilePath
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from functree.argument_checks import LOCAL_FOLDER, checked, shown
from functree.devices.meshes import of_rank
from functree.errors import FunctreeError, FunctreeValueError, Problem
from functree.io.checkpoints.contents import not_saveable
from functree.io.extras import ForeignErrors, import_extra
from functree.io.weights.files import DTYPES, INDEX
from functree.io.weights.table import WHOLE, TensorName, names_of
from functree.labels.leaves import Leaf, read
from functree.layout.decide import plan
from functree.nn.config import TransformerConfig
from functree.nn.families import CHOSEN, FIELDS, LLAMA_3, families, understood
from functree.nn.rope import Llama3Rope
from functree.nn.transformer import Model, Transformer
from functree.processes.agreement import Agreement
from functree.processes.check_processes import facts_of
from functree.processes.digest import digests_of
from functree.transforms.init import abstract
from functree.tree.arrays import is_array, on_device, with_sharding
from functree.tree.paths import Keys, Path

# Larger models are split into several files, as published models are.
MOST_BYTES = 5 * 10**9


@checked("save_weights: invalid arguments")
def save_weights(folder: Annotated[str | FilePath, LOCAL_FOLDER], model: Model) -> None:
    """Write a model in a published format, for `ft.load_weights` and other libraries.

    The files belong to the first family that performs the same computation as the model:

    - Without experts, `qk_norm=True` selects `qwen3`, and `qk_norm="all"` with `norms="after"`
      selects `olmo2`. Attention biases select `qwen2`, and a sliding window selects `mistral`.
      Other models use `llama`.
    - With experts, `qk_norm=True` selects `qwen3_moe`, and `qk_norm="all"` selects `olmoe`. Other
      models use `mixtral`.

    Args:
        folder: a folder that contains no weights and no `config.json`. It is created if it does not
            exist.
        model: the model.

    Raises:
        FunctreeError: if the folder already contains weights or a `config.json`.
        FunctreeError: if no family performs the same computation, for example because of your own
            attention function. The error lists the fields or parts that differ.
        FunctreeError: if an array has no values.
        FunctreeError: if an array is not on devices of all processes.
        FunctreeError: if the processes have different models.
        FunctreeError: if a file cannot be written.

    Examples:
        >>> sizes = dict(layers=2, heads=4, kv_heads=2, head_dim=2, hidden=16)
        >>> config = ft.nn.TransformerConfig(100, 8, **sizes)
        >>> model = ft.nn.Transformer.create(config, key=jax.random.key(0))
        >>> ft.save_weights(folder / "weights", model)
        >>> sorted(file.name for file in (folder / "weights").iterdir())
        ['config.json', 'model.safetensors']
    """
    folder = FilePath(folder)
    failure = f"the model cannot be saved to {folder}"
    leaves = read(model).leaves
    # All checks run before the first file is created.
    with Agreement(failure) as agreement:
        safetensors = import_extra("safetensors.numpy", "weights")
        if found := list(filter(None, map(not_saveable, leaves))):
            raise FunctreeValueError(failure, found)
        family = family_of_model(model)
        names = _names(model, leaves, family, failure)
        # Overwriting the files of a larger model would leave some of them.
        with ForeignErrors(FunctreeError, failure):
            there = _weights_in(folder)
        if there:
            raise FunctreeError(
                f"{folder} already contains {', '.join(there)}: save to another folder, or remove "
                "these files"
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
        """Call `run` in the first process. If it fails, all processes raise an error."""
        with Agreement(failure), ForeignErrors(FunctreeError, failure):
            if jax.process_index() == 0:
                run()

    # `config.json` is written last, and the index is written after the files that it names. If the
    # process is killed in between, no reader accepts the folder as a model.
    write(lambda: folder.mkdir(parents=True, exist_ok=True))
    for file, own in files.items():
        tensors = _tensors(own, names)
        # Hugging Face's readers refuse a file without this metadata.
        write(partial(safetensors.save_file, tensors, folder / file, metadata={"format": "pt"}))
    if len(files) > 1:
        write(lambda: _write(folder / INDEX, _index(files, names)))
    write(lambda: _write(folder / "config.json", _config(family, model.config)))


def _weights_in(folder: FilePath) -> list[str]:
    """List the names of a model's files in a folder."""
    if not folder.is_dir():
        return []
    # Broken links are listed too, since writing to one would create a file in another folder.
    names = sorted(file.name for file in folder.iterdir())
    return [name for name in names if name == "config.json" or ".safetensors" in name]


def _names(
    model: Transformer, leaves: Sequence[Leaf], family: str, failure: str
) -> dict[Path, TensorName]:
    """Return each array's tensor name in a family, by path.

    Raises:
        FunctreeValueError: if the family's table does not name a whole tensor for an array.
        FunctreeValueError: if a row of the table names no array.
    """
    table = families[family][1](model.config, ())
    named, problems = names_of(leaves, table, failure)
    names = {path: name.name for path, name in named.items()}
    for leaf in leaves:
        name = names.get(leaf.path)
        if name is None or name.part != WHOLE or name.order:
            why = (
                f'the table of `ft.nn.families["{family}"]` does not name a whole tensor for this '
                "array"
            )
            remedy = "give the array a tensor name in the table; only `.T` may follow the name"
            problems.append(leaf.problem(why, remedy))
    if problems:
        raise FunctreeValueError(failure, problems)
    return names


def _files(leaves: Sequence[Leaf]) -> dict[str, list[Leaf]]:
    """Divide the arrays into files.

    Each file has at most `MOST_BYTES` bytes, unless it contains a single, larger array.
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
    """Gather arrays as tensors, by name. Only the first process returns any tensors."""
    tensors: dict[str, np.ndarray] = {}
    for leaf in leaves:
        name = names[leaf.path]
        parts: Iterable[jax.Array | np.ndarray] = [leaf.value]
        for _ in name.places:
            parts = (part for stack in parts for part in _layers(stack))
        axes = leaf.axes[len(name.places) :]
        for tensor, part in zip(name.tensors(leaf.shape), parts, strict=True):
            # All processes gather the array, since gathering is a collective.
            whole = _on_host(part)
            if jax.process_index() == 0:
                tensors[tensor] = as_published(whole, axes, name)
    return tensors


def as_published(array: np.ndarray, axes: Sequence[str | None], name: TensorName) -> np.ndarray:
    """Convert an array to a published tensor, which joins heads with the head size."""
    tensor = array.reshape(_with_joined_heads(array.shape, axes))
    # Safetensors writes an array's memory. For a transposed view, it would write untransposed
    # values with the transposed shape.
    return np.ascontiguousarray(tensor if name.order is None else tensor.T)


def _with_joined_heads(shape: Sequence[int], axes: Sequence[str | None]) -> list[int]:
    """Join `head_dim` with the dimension before it in a shape, as published models do."""
    sizes: list[int] = []
    for size, axis in zip(shape, axes, strict=True):
        # If `head_dim` comes first, the array is the scale of a norm over one head.
        if axis == "head_dim" and sizes:
            sizes[-1] *= size
        else:
            sizes.append(size)
    return sizes


def _on_host(array: jax.Array | np.ndarray) -> np.ndarray:
    """Gather an array into the host memory of each process."""
    if isinstance(array, np.ndarray):
        return array
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def _layers(array: jax.Array | np.ndarray) -> Iterator[jax.Array | np.ndarray]:
    """Yield the layers of a stacked array.

    It yields one layer at a time, since all layers of a large model may not fit on a device.
    """
    if isinstance(array, np.ndarray):
        yield from array
        return
    array = on_device(array)
    if isinstance(array.sharding, NamedSharding):
        # JAX cannot slice a dimension that is sharded over Explicit mesh axes.
        spec = PartitionSpec(None, *of_rank(array.sharding.spec, array.ndim)[1:])
        array = with_sharding(jnp.asarray, array.sharding.update(spec=spec), array)
    for i in range(array.shape[0]):
        yield _layer(array, i)


# The index is traced, so that one compiled program serves all layers.
@jax.jit
def _layer(array: jax.Array, i: int) -> jax.Array:
    return lax.dynamic_index_in_dim(array, i, keepdims=False)


def _index(files: Mapping[str, Sequence[Leaf]], names: Mapping[Path, TensorName]) -> dict[str, Any]:
    """Return the content of the index, in Hugging Face's format: the file of each tensor."""
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
    """Return the content of `config.json`: the fields that the family reads."""
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
        # Older readers read this field. Without it, they would use the default and compute a
        # different result.
        "rope_theta": config.rope_theta,
        "rope_scaling": rope if config.rope_scaling else None,
        "dtype": str(config.param_dtype),
        "moe_intermediate_size": hidden,
        # Older readers call this field "num_experts".
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


# The family of a model.

# Fields of layers that do not affect the result, or that users choose when they load weights, such
# as the dtype of activations and the capacity of experts.
_FREE = ("axes", "axis", "compute_dtype", "dispatch", "capacity")
# Fields of the config that users choose when they load weights, or that every family supports.
_NOT_COMPARED = (*CHOSEN, "param_dtype", "hidden", "expert_hidden")
_HEADLINE = "save_weights: no published family computes the same function as this model"
_PUBLISHED = "a published model with this config has"
_OPTIONS = "use options that one of these families supports, or save the model with `ft.save`"
_REPLACE = "use `ft.select` to replace this part with the published model's array or layer"
_PLAIN = 'if it computes standard attention, move the arrays into a model with `attention="auto"`'


def family_of_model(model: Transformer) -> str:
    """Find the first family that performs the same computation as a model.

    The files contain only the config and the arrays. The rest of the model must equal a published
    model with this config: the class of each layer, the numbers in the layers, and the paths and
    shapes of the arrays. The arrays must have a floating-point dtype.

    Raises:
        FunctreeError: if no family supports the config. The error lists the fields that differ.
        FunctreeError: if parts of the model differ. The error lists these parts, by path.
    """
    config = model.config
    # A subclass may compute different frequencies. `_differences` reports it with its path.
    if type(config.rope_scaling) is not Llama3Rope:
        config = dataclasses.replace(config, rope_scaling=None)
    name = _by_config(config)
    config = dataclasses.replace(config, attention="auto", dot_general=None)
    published = abstract(Transformer.create)(config, key=jax.random.key(0))
    if problems := list(_differences(model, published, ())):
        raise FunctreeValueError(_HEADLINE, problems)
    return name


def _by_config(config: TransformerConfig) -> str:
    """Find the first family that can store a config in `config.json`.

    Reading the stored fields back must give an equal config, except for `_NOT_COMPARED`.

    Raises:
        FunctreeValueError: if there is no such family. The error lists the differences from
            the first family that differs in the fewest fields.
    """
    differ: list[list[Problem]] = []  # one list for each family
    for family in families:
        read, found = understood(family, _config(family, config))
        if read.problems:  # for example, the number of experts is missing
            continue
        own: list[Problem] = []
        for field in dataclasses.fields(config):
            given, theirs = getattr(config, field.name), found.get(field.name, field.default)
            if field.name not in _NOT_COMPARED and given != theirs:
                what, why = f"{field.name}={given!r}", f"it is {theirs!r} in {family} models"
                own.append(Problem(None, None, what, why, _OPTIONS))
        if not own:
            return family
        differ.append(own)
    raise FunctreeValueError(_HEADLINE, min(differ, key=len, default=[]))


def _differences(given: object, published: object, keys: Keys) -> Iterator[Problem]:
    """Yield the differences between a part of a model and the same part of a published model."""
    if isinstance(published, eqx.Module):
        # A subclass may compute a different result, as may another layer with the same arrays.
        if type(given) is not type(published):
            why = f"{_PUBLISHED} functree's {_text(published)} at this path"
            yield Problem(Path(keys), None, _text(given), why, _REPLACE)
            return
        for field in dataclasses.fields(published):
            if field.name not in _FREE:
                parts = getattr(given, field.name), getattr(published, field.name)
                yield from _differences(*parts, (*keys, field.name))
    elif is_array(published):
        yield from _differences_of_array(given, published.shape, keys)
    elif keys[-1] == "attention":
        # All kernels that have a name perform the same computation.
        if not isinstance(given, str):
            why = "no published family uses this attention function"
            yield Problem(Path(keys), None, _text(given), why, _PLAIN)
    elif is_array(given) or isinstance(given, eqx.Module) or given != published:
        why = f"{_PUBLISHED} {_text(published)} at this path"
        yield Problem(Path(keys), None, _text(given), why, _REPLACE)


def _differences_of_array(given: object, shape: tuple[int, ...], keys: Keys) -> Iterator[Problem]:
    """Yield a problem if a value does not match a published model's array at the same path."""
    if not is_array(given) or given.shape != shape:
        why = f"{_PUBLISHED} an array of shape {shape} at this path"
        yield Problem(Path(keys), None, _text(given), why, _REPLACE)
    elif str(given.dtype) not in DTYPES.values():
        # For example, readers would load quantized integers without their scales.
        why = f"the dtype must be one of {', '.join(DTYPES.values())}"
        remedy = 'convert the arrays: `jax.tree.map(lambda x: x.astype("float32"), model)`'
        yield Problem(Path(keys), None, shown(given), why, remedy)


def _text(value: object) -> str:
    """Format a layer as the name of its class, and any other value with `shown`."""
    return type(value).__name__ if isinstance(value, eqx.Module) else shown(value)
