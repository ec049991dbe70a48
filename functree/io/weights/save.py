"""A `Transformer` ─► the files of a published model: `config.json`, and `*.safetensors`."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from functree.argument_checks import LOCAL_FOLDER, Takes, check
from functree.devices.specs import of_rank
from functree.errors import FunctreeError, FunctreeValueError
from functree.io.checkpoints.contents import not_saveable
from functree.io.extras import ForeignErrors, import_extra
from functree.io.weights.blocks import Weight, weights_of
from functree.io.weights.family import family_of_model
from functree.io.weights.files import INDEX
from functree.labels.leaves import read
from functree.layout.plan.make_plan import plan
from functree.nn.rope import Llama3Rope
from functree.nn.transformer import Transformer
from functree.nn.weight_map import WeightMap
from functree.processes.agreement import Agreement
from functree.processes.check_processes import facts_of
from functree.processes.digest import digests_of
from functree.tree.arrays import on_device, with_sharding

_MODEL = Takes("an `ft.nn.Transformer`", lambda value: isinstance(value, Transformer))
# A larger model is split into several files, as published ones are.
MOST_BYTES = 5 * 10**9


def save_weights(folder: str | Path, model: Transformer) -> None:
    """Write a model as it would be published, so that `ft.load_weights` and others read it.

    The family is the one that computes the same: `qwen3` with norms of queries and keys, `qwen2`
    with biases, `mistral` with a window, else `llama`; with experts `qwen3_moe` if it has such
    norms, else `mixtral`.

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
    folder = Path(folder)
    failure = f"{folder}: no weights are saved"
    leaves = read(model).leaves
    # All that can be refused is, before the first file is made.
    with Agreement(failure) as agreement:
        safetensors = import_extra("safetensors.numpy", "weights")
        problems = [not_saveable(leaf) for leaf in leaves]
        if found := [problem for problem in problems if problem is not None]:
            raise FunctreeValueError(failure, found)
        name = family_of_model(model)
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
    arrays = [leaf.value for leaf in leaves]
    _, differ = digests_of({str(leaf.path): leaf.value for leaf in leaves})
    if differ:
        raise FunctreeError(failure, differ)
    weights = list(weights_of(model, WeightMap.families[name]))
    files = _files(arrays)

    def write(run: Callable[[], None]) -> None:
        """Write a file in the first process; the others hear of it if that fails."""
        with Agreement(failure), ForeignErrors(FunctreeError, failure):
            if jax.process_index() == 0:
                run()

    # `config.json` is the last, and the index comes after the files that it names: a process that
    # is killed in between leaves what nobody takes for a model.
    write(lambda: folder.mkdir(parents=True, exist_ok=True))
    for file, own in files.items():
        tensors = _tensors([weights[i] for i in own], [arrays[i] for i in own])
        # Hugging Face's readers refuse a file without a format.
        write(partial(safetensors.save_file, tensors, folder / file, metadata={"format": "pt"}))
    if len(files) > 1:
        write(lambda: _write(folder / INDEX, _index(files, weights, arrays)))
    write(lambda: _write(folder / "config.json", _config(name, model)))


def _weights_in(folder: Path) -> list[str]:
    """The names of the files of a model in a folder."""
    if not folder.is_dir():
        return []
    # All names, and not only those of files that can be read: what is written to a link that leads
    # nowhere would be a file in another folder.
    names = sorted(file.name for file in folder.iterdir())
    return [name for name in names if name == "config.json" or ".safetensors" in name]


def _files(arrays: Sequence[jax.Array]) -> dict[str, list[int]]:
    """The files, each with the indices of its arrays.

    It is one file, or several of at most `MOST_BYTES` or one weight.
    """
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
    files: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        files[f"model-{i + 1:05}-of-{len(groups):05}.safetensors"] = group
    return files


def _tensors(weights: Sequence[Weight], arrays: Sequence[jax.Array]) -> dict[str, np.ndarray]:
    """The tensors of some weights, by name: in the first process; others give it their parts."""
    tensors: dict[str, np.ndarray] = {}
    for weight, array in zip(weights, arrays, strict=True):
        parts: Iterable[jax.Array | np.ndarray] = [array]
        for _ in range(weight.stacked):
            parts = (part for stack in parts for part in _layers(stack))
        for name, part in zip(weight.names, parts, strict=True):
            # In all processes: to gather an array is a collective.
            whole = _on_host(part)
            if jax.process_index() == 0:
                tensors[name] = weight.form.to_file(whole)
    return tensors


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


def _index(
    files: Mapping[str, Sequence[int]], weights: Sequence[Weight], arrays: Sequence[jax.Array]
) -> dict[str, Any]:
    """The file of each tensor, as Hugging Face's readers look for it."""
    file_of: dict[str, str] = {}
    for file, own in files.items():
        for i in own:
            file_of.update(dict.fromkeys(weights[i].names, file))
    return {
        "metadata": {"total_size": sum(array.nbytes for array in arrays)},
        "weight_map": dict(sorted(file_of.items())),
    }


def _write(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


_ARCHITECTURES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe",
}


def _config(name: str, model: Transformer) -> dict[str, Any]:
    """What `config.json` says of a model."""
    config, scaling = model.config, model.config.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default"}
    if isinstance(scaling, Llama3Rope):
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low,
            "high_freq_factor": scaling.high,
            "original_max_position_embeddings": scaling.original,
        }
    found = {
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
        # Of the arrays: `config.param_dtype` is that in which they were created.
        "dtype": str(model.embed.weight.dtype),
    }
    if name in ("mistral", "mixtral"):
        found["sliding_window"] = config.window
    hidden = config.hidden if config.expert_hidden is None else config.expert_hidden
    if name == "mixtral":
        found |= {"num_local_experts": config.experts, "num_experts_per_tok": config.top_k}
        found["intermediate_size"] = hidden
    if name == "qwen3_moe":
        # Readers of either age: the older ones call it "num_experts".
        found |= {"num_experts": config.experts, "num_local_experts": config.experts}
        found |= {"num_experts_per_tok": config.top_k, "moe_intermediate_size": hidden}
        found |= {"norm_topk_prob": config.normalize, "decoder_sparse_step": 1}
        found["mlp_only_layers"] = []
    return found
