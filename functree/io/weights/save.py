"""A `Transformer` ─► the files of a published model: `config.json`, and `*.safetensors`."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from functree.errors import FunctreeError
from functree.io.extras import needed
from functree.io.saveable import not_saveable
from functree.io.weights.files import INDEX
from functree.io.weights.load import Weight, weights_of
from functree.layout.plan.resolver import plan
from functree.layout.specs import of_rank
from functree.nn.config import TransformerConfig
from functree.nn.rope import Llama3Rope
from functree.nn.transformer import Transformer
from functree.nn.weight_map import WeightMap
from functree.parameters import FOLDER, Takes, check
from functree.processes.agreement import agreed
from functree.processes.facts import facts_of
from functree.processes.same_copies import digests_of
from functree.tree.bits import on_device, with_sharding
from functree.tree.leaves import read

_MODEL = Takes("an `ft.nn.Transformer`", lambda value: isinstance(value, Transformer))
#: A larger model is split into several files, as published ones are.
MOST_BYTES = 5 * 10**9


def save_weights(folder: str | Path, model: Transformer) -> None:
    """Write a model as it would be published, so that `ft.load_weights` and others read it.

    The family is the one that computes the same: `qwen3` with norms of queries and keys, `qwen2` with biases, `mistral`
    with a window, else `llama`.

    Args:
        folder: a folder without weights; it is created.
        model: the model.

    Raises:
        FunctreeError: the folder has weights already; no family computes what the model does; an array has no values,
            or is not one of all processes; the processes have other models.
    """
    check("no weights are saved", folder=(folder, FOLDER), model=(model, _MODEL))
    folder = Path(folder)
    failure = f"{folder}: no weights are saved"
    leaves = read(model).leaves

    def prepare() -> tuple[tuple[str, Any], Any]:
        safetensors, name = needed("safetensors.numpy", "weights"), _family(model.config)
        if problems := [problem for leaf in leaves if (problem := not_saveable(leaf)) is not None]:
            raise FunctreeError(failure, problems)
        if found := sorted(file.name for file in (*folder.glob("config.json"), *folder.glob("*.safetensors*"))):
            raise FunctreeError(f"{folder} has {', '.join(found)} already: save to another folder, or remove them")
        facts = {"folder": [str(folder)], "config": facts_of(model.config), "model": facts_of(plan(model))}
        return (name, safetensors), lambda: facts

    name, safetensors = agreed(failure, prepare)
    arrays = [leaf.value for leaf in leaves]
    _, differ = digests_of({str(leaf.path): leaf.value for leaf in leaves})
    if differ:
        raise FunctreeError(failure, differ)
    weights = list(weights_of(model, WeightMap.families[name]))
    files = _files(arrays)

    def write(run: Callable[[], None]) -> None:
        """Write a file in the first process; the others hear of it if that fails."""
        agreed(failure, lambda: (run() if jax.process_index() == 0 else None, dict))

    write(lambda: folder.mkdir(parents=True, exist_ok=True))
    for file, own in files.items():
        tensors = _tensors([weights[i] for i in own], [arrays[i] for i in own])
        write(partial(safetensors.save_file, tensors, folder / file, metadata={"format": "pt"}))
    if len(files) > 1:
        write(lambda: _write(folder / INDEX, _index(files, weights, arrays)))
    write(lambda: _write(folder / "config.json", _config(name, model)))


def _files(arrays: Sequence[jax.Array]) -> dict[str, list[int]]:
    """The files, each with the indices of its arrays: one, or several of at most `MOST_BYTES` or one weight."""
    groups: list[list[int]] = [[]]
    size = 0
    for i, array in enumerate(arrays):
        if groups[-1] and size + array.nbytes > MOST_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(i)
        size += array.nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i + 1:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups)}


def _tensors(weights: Sequence[Weight], arrays: Sequence[jax.Array]) -> dict[str, np.ndarray]:
    """The tensors of some weights, by name: in the first process, which writes; the others give it their parts."""
    tensors: dict[str, np.ndarray] = {}
    for weight, array in zip(weights, arrays, strict=True):
        for name, part in zip(weight.names, _layers(array) if weight.stacked else [array], strict=True):
            whole = _on_host(part)
            if jax.process_index() == 0:
                tensors[name] = weight.form.to_file(whole)
    return tensors


def _on_host(array: jax.Array | np.ndarray) -> np.ndarray:
    if isinstance(array, np.ndarray):  # each process has all of it
        return array
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def _layers(array: jax.Array | np.ndarray) -> Iterator[jax.Array | np.ndarray]:
    """The layers of a stacked array, one at a time: all of a large model would not fit onto a device."""
    if isinstance(array, np.ndarray):
        yield from array
        return
    array = on_device(array)
    if isinstance(array.sharding, NamedSharding):  # on explicit axes JAX slices no sharded dimension
        spec = PartitionSpec(None, *of_rank(array.sharding.spec, array.ndim)[1:])
        array = with_sharding(jnp.asarray, array.sharding.update(spec=spec), array)
    for i in range(array.shape[0]):
        yield _layer(array, i)


@jax.jit
def _layer(array: jax.Array, i: int) -> jax.Array:
    return lax.dynamic_index_in_dim(array, i, keepdims=False)


def _index(
    files: Mapping[str, Sequence[int]], weights: Sequence[Weight], arrays: Sequence[jax.Array]
) -> dict[str, Any]:
    named = {name: file for file, own in files.items() for i in own for name in weights[i].names}
    return {
        "metadata": {"total_size": sum(array.nbytes for array in arrays)},
        "weight_map": dict(sorted(named.items())),
    }


def _write(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _family(config: TransformerConfig) -> str:
    """The family whose models compute as this one does.

    Raises:
        FunctreeError: none does.
    """
    special = {"qwen3": config.qk_norm, "qwen2": config.attention_bias, "mistral": config.window is not None}
    named = [name for name, is_so in special.items() if is_so]
    why = ""
    if len(named) > 1:
        why = f"it has what only {' and only '.join(named)} has"
    elif not isinstance(config.rope_scaling, Llama3Rope | None):
        why = f"no family has rope_scaling={config.rope_scaling!r}"
    if why:
        raise FunctreeError(f"no published family computes what this model does: {why}")
    return next(iter(named), "llama")


_ARCHITECTURES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def _config(name: str, model: Transformer) -> dict[str, Any]:
    """What `config.json` says of a model."""
    config, scaling = model.config, model.config.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default"}
    if isinstance(scaling, Llama3Rope):
        rope = {"rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low}
        rope |= {"high_freq_factor": scaling.high, "original_max_position_embeddings": scaling.original}
    return {
        "architectures": [f"{_ARCHITECTURES[name]}ForCausalLM"],
        "model_type": name,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.hidden,
        "max_position_embeddings": config.max_seq,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, **rope},
        # Where older readers look, which would take the neutral value and compute something else.
        "rope_theta": config.rope_theta,
        "rope_scaling": rope if scaling else None,
        "tie_word_embeddings": config.tie_embedding,
        "dtype": str(model.embed.weight.dtype),
        **({"sliding_window": config.window} if name == "mistral" else {}),
    }
