"""`config.json` of a published model ─► a `TransformerConfig`; and where its files have each weight.

Each family is a table. What a table does not understand is refused: a config field that is passed over would load every
weight, and compute something else.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp

from functree.errors import FunctreeError, Problem, count, did_you_mean
from functree.nn.config import TransformerConfig
from functree.nn.rope import Llama3Rope
from functree.parameters import FILE, FUNCTION, MAPPING, TEXT, Takes, check, is_floating, is_number, is_size


class Field(NamedTuple):
    """What a family understands of a field in `config.json`.

    Attributes:
        text: the values that are understood, for messages.
        read: a function from the value to fields of a `TransformerConfig`; None if the value is not understood.
        absent: the fields if `config.json` does not have it; None if it has to.
    """

    text: str
    read: Callable[[Any], Mapping[str, Any] | None]
    absent: Mapping[str, Any] | None = None


def _is_json(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_json, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(one) for key, one in value.items())
    return value is None or isinstance(value, str | int | float | bool)


def _mapping(text: str, fits: Callable[[Any], bool]) -> Takes:
    """A mapping from texts to values that fit."""
    return Takes(
        text, lambda x: MAPPING.fits(x) and all(isinstance(name, str) and fits(value) for name, value in x.items())
    )


_OURS = Takes(
    "a field of `ft.nn.TransformerConfig`",
    lambda name: isinstance(name, str) and name in {field.name for field in dataclasses.fields(TransformerConfig)},
)
_OF_JSON = Takes("values that JSON has", lambda values: len(values) > 0 and all(map(_is_json, values)))
_FIELDS_BY_NAME = _mapping(
    "a mapping to what `WeightMap.sets`, `only` and `ignored` return", lambda value: isinstance(value, Field)
)
_TEXTS = _mapping("a mapping from paths to names", lambda value: isinstance(value, str))
_OPTIONS = Takes(
    "a mapping of fields of `ft.nn.TransformerConfig`", lambda x: MAPPING.fits(x) and all(map(_OURS.fits, x))
)


@dataclasses.dataclass(frozen=True)
class WeightMap:
    """A family of published models: what its `config.json` means, and what its files call each weight.

    `ft.nn.WeightMap.families` has those that `ft.load_weights` knows, by `model_type`. Add to it for another model.

    Args:
        fields: for each field of `config.json`, what is understood of it: `WeightMap.sets`, `WeightMap.only` or
            `WeightMap.ignored`. A field that is not here is refused.
        weights: for each leaf of the `Transformer`, by path, its name in the files. `{layer}` is the number of a layer.
            `.T` is behind the name if the file has (out, in) and not (in, out).
        options: fields of the `TransformerConfig` that all models of the family have.

    Examples:
        >>> llama = ft.nn.WeightMap.families["llama"]
        >>> fields = {**llama.fields, "clip_qkv": ft.nn.WeightMap.only(None)}
        >>> ft.nn.WeightMap.families["my_llama"] = dataclasses.replace(llama, fields=fields)
        >>> llama.weights["blocks.layer.mlp.up"]
        'model.layers.{layer}.mlp.up_proj.weight.T'
    """

    families: ClassVar[dict[str, "WeightMap"]] = {}

    fields: Mapping[str, Field]
    weights: Mapping[str, str]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        fields, weights, options = self.fields, self.weights, self.options
        check("no family", fields=(fields, _FIELDS_BY_NAME), weights=(weights, _TEXTS), options=(options, _OPTIONS))

    @staticmethod
    def sets(field: str, text: str, fits: Callable[[Any], bool], **absent: Any) -> Field:
        """A field whose value is that of a field of `TransformerConfig`.

        Args:
            field: the field of `TransformerConfig`.
            text: the values that are understood, for messages.
            fits: whether a value is one of them.
            **absent: what an absent field means, as `field=value`; without it the field has to be there.

        Raises:
            FunctreeError: there is no such field, or another value does not fit.
        """
        check("no such field", field=(field, _OURS), text=(text, TEXT), fits=(fits, FUNCTION))
        return Field(text, lambda value: {field: value} if fits(value) else None, absent or None)

    @staticmethod
    def only(*values: Any) -> Field:
        """A field that is understood with these values alone, the first of which it has if it is absent.

        Args:
            *values: the values, as JSON has them.

        Raises:
            FunctreeError: JSON has no such value.
        """
        check("no such field", values=(values, _OF_JSON))
        texts = [json.dumps(value) for value in values]  # `True` is 1 in Python
        return Field(" or ".join(texts), lambda value: {} if json.dumps(value) in texts else None, {})

    @staticmethod
    def ignored(text: str, fits: Callable[[Any], bool]) -> Field:
        """A field that says nothing of what is computed.

        Args:
            text: the values that are understood, for messages.
            fits: whether a value is one of them.

        Raises:
            FunctreeError: a value does not fit.
        """
        check("no such field", text=(text, TEXT), fits=(fits, FUNCTION))
        return Field(text, lambda value: {} if fits(value) else None, {})


def _size(field: str) -> Field:
    return WeightMap.sets(field, "a positive integer", is_size)


def _is_positive(value: Any) -> bool:
    return is_number(value) and value > 0


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_token(value: Any) -> bool:
    tokens = value if isinstance(value, list) else [value]
    return value is None or all(isinstance(one, int) and not isinstance(one, bool) for one in tokens)


_ROPE = 'of {"rope_type": "default"} or "llama3", with the fields of that alone'


def _rope(value: Any) -> Mapping[str, Any] | None:
    """`rope_parameters`, and `rope_scaling` of older files."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        return None
    given = dict(value)
    kind = given.pop("rope_type", given.pop("type", None))
    given.pop("type", None)
    theta = {"rope_theta": given.pop("rope_theta")} if "rope_theta" in given else {}
    if not all(map(_is_positive, [*theta.values(), *given.values()])):
        return None
    if kind in ("default", None) and not given:
        return {**theta, "rope_scaling": None}
    names = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    if kind != "llama3" or given.keys() != names or given["low_freq_factor"] >= given["high_freq_factor"]:
        return None
    if not is_size(given["original_max_position_embeddings"]):
        return None
    factors = (given["factor"], given["low_freq_factor"], given["high_freq_factor"])
    return {**theta, "rope_scaling": Llama3Rope(*factors, original=given["original_max_position_embeddings"])}


def _is_full_attention(value: Any) -> bool:
    return value is None or (isinstance(value, list) and set(value) <= {"full_attention"})


#: What all families have.
_FIELDS: dict[str, Field] = {
    "vocab_size": _size("vocab_size"),
    "hidden_size": _size("embed"),
    "num_hidden_layers": _size("layers"),
    "num_attention_heads": _size("heads"),
    "intermediate_size": _size("hidden"),
    "max_position_embeddings": _size("max_seq"),
    "num_key_value_heads": WeightMap.sets("kv_heads", "a positive integer", is_size, kv_heads=None),
    "head_dim": WeightMap.sets(
        "head_dim", "a positive integer or null", lambda x: x is None or is_size(x), head_dim=None
    ),
    "rms_norm_eps": WeightMap.sets("norm_eps", "a positive number", _is_positive, norm_eps=1e-6),
    "tie_word_embeddings": WeightMap.sets("tie_embedding", "true or false", _is_flag, tie_embedding=False),
    "rope_theta": WeightMap.sets("rope_theta", "a positive number", _is_positive, rope_theta=10_000.0),
    "rope_parameters": Field(_ROPE, _rope, {}),
    "rope_scaling": Field(_ROPE, _rope, {}),
    "hidden_act": WeightMap.only("silu"),
    "attention_dropout": WeightMap.only(0.0, 0),
    "dtype": WeightMap.ignored("a dtype of floating-point numbers", is_floating),
    "torch_dtype": WeightMap.ignored("a dtype of floating-point numbers", is_floating),
    "bos_token_id": WeightMap.ignored("tokens or null", _is_token),
    "eos_token_id": WeightMap.ignored("tokens or null", _is_token),
    "pad_token_id": WeightMap.ignored("tokens or null", _is_token),
    "initializer_range": WeightMap.ignored("a positive number", _is_positive),
    "transformers_version": WeightMap.ignored("a text", lambda value: isinstance(value, str)),
    "use_cache": WeightMap.ignored("true or false", _is_flag),
}
_WEIGHTS = {
    "embed.weight": "model.embed_tokens.weight",
    "blocks.layer.attn_norm.scale": "model.layers.{layer}.input_layernorm.weight",
    "blocks.layer.attn.query": "model.layers.{layer}.self_attn.q_proj.weight.T",
    "blocks.layer.attn.key": "model.layers.{layer}.self_attn.k_proj.weight.T",
    "blocks.layer.attn.value": "model.layers.{layer}.self_attn.v_proj.weight.T",
    "blocks.layer.attn.out": "model.layers.{layer}.self_attn.o_proj.weight.T",
    "blocks.layer.mlp_norm.scale": "model.layers.{layer}.post_attention_layernorm.weight",
    "blocks.layer.mlp.gate": "model.layers.{layer}.mlp.gate_proj.weight.T",
    "blocks.layer.mlp.up": "model.layers.{layer}.mlp.up_proj.weight.T",
    "blocks.layer.mlp.down": "model.layers.{layer}.mlp.down_proj.weight.T",
    "norm.scale": "model.norm.weight",
    "unembed.weight": "lm_head.weight.T",
}
_BIASES = {
    "blocks.layer.attn.query_bias": "model.layers.{layer}.self_attn.q_proj.bias",
    "blocks.layer.attn.key_bias": "model.layers.{layer}.self_attn.k_proj.bias",
    "blocks.layer.attn.value_bias": "model.layers.{layer}.self_attn.v_proj.bias",
}
_HEAD_NORMS = {
    "blocks.layer.attn.query_norm.scale": "model.layers.{layer}.self_attn.q_norm.weight",
    "blocks.layer.attn.key_norm.scale": "model.layers.{layer}.self_attn.k_norm.weight",
}
#: Qwen's windows are for some layers only, and off in all published models.
_NO_WINDOW = {
    "use_sliding_window": WeightMap.only(False),
    "sliding_window": WeightMap.ignored("a positive integer or null", lambda value: value is None or is_size(value)),
    "max_window_layers": WeightMap.ignored("an integer", lambda value: isinstance(value, int)),
    "layer_types": WeightMap.ignored('a list of "full_attention"', _is_full_attention),
}


def _architecture(name: str) -> dict[str, Field]:
    return {"architectures": WeightMap.only([f"{name}ForCausalLM"], None)}


_LLAMA = {
    "attention_bias": WeightMap.only(False),
    "mlp_bias": WeightMap.only(False),
    "pretraining_tp": WeightMap.only(1),
}
_WINDOW = {"sliding_window": WeightMap.sets("window", "a positive integer or null", lambda x: x is None or is_size(x))}
_QWEN_3 = {"attention_bias": WeightMap.only(False)}
WeightMap.families |= {
    "llama": WeightMap({**_FIELDS, **_LLAMA, **_architecture("Llama")}, _WEIGHTS),
    "mistral": WeightMap({**_FIELDS, **_WINDOW, **_architecture("Mistral")}, _WEIGHTS),
    "qwen2": WeightMap(
        {**_FIELDS, **_NO_WINDOW, **_architecture("Qwen2")}, _WEIGHTS | _BIASES, {"attention_bias": True}
    ),
    "qwen3": WeightMap(
        {**_FIELDS, **_NO_WINDOW, **_QWEN_3, **_architecture("Qwen3")}, _WEIGHTS | _HEAD_NORMS, {"qk_norm": True}
    ),
}

#: The fields that one chooses when a model is loaded; the others are those of the weights.
_CHOSEN = ("compute_dtype", "remat", "attention", "max_seq")


def config_from_json(path: str | Path, **fields: Any) -> TransformerConfig:
    """The config of a published model.

    Args:
        path: its `config.json`, or the folder with it.
        **fields: other values for `compute_dtype`, `remat`, `attention` or `max_seq`.

    Raises:
        FunctreeError: there is no such file; the family is unknown; a field is missing or not understood. The error
            lists all of them.

    Examples:
        >>> config = ft.nn.config_from_json("no such folder")
        Traceback (most recent call last):
            ...
        functree.errors.FunctreeError: no such folder/config.json: there is no such file
    """
    check("no config can be read", path=(path, FILE))
    file, given = read_config(path)
    family = family_of(file, given)
    problems = [
        Problem(None, None, f"{name}=", "it is decided by the weights", f"one of {', '.join(_CHOSEN)}")
        for name in fields
        if name not in _CHOSEN
    ]
    found: dict[str, Any] = {}
    said_by: dict[str, str] = {}
    for name, field in family.fields.items():
        if name not in given and field.absent is not None:
            found.update(field.absent)
        elif name not in given:
            problems.append(Problem(None, None, f'"{name}"', "it is missing", f"write {field.text}"))
    for name, value in given.items():
        if name == "model_type":
            continue
        field = family.fields.get(name)
        means = None if field is None else field.read(value)
        if field is None:
            problems.append(_unknown(name, value, family))
        elif means is None:
            text = f'"{name}": {json.dumps(value)}'
            problems.append(Problem(None, None, text, f"it is understood as {field.text} only"))
        else:
            for key in means:
                if key in said_by and means[key] != found[key]:
                    problems.append(Problem(None, None, f'"{name}"', f'it says another {key} than "{said_by[key]}"'))
                said_by[key] = name
            found.update(means)
    if problems:
        raise FunctreeError(f"{file}: {count(len(problems), 'field')} not understood", problems)
    found |= {**family.options, "param_dtype": given.get("dtype") or given.get("torch_dtype") or jnp.float32}
    if found["kv_heads"] is None:
        found["kv_heads"] = found["heads"]
    if found["head_dim"] is None:
        found["head_dim"] = found["embed"] // found["heads"]
    return TransformerConfig(**(found | fields))


def read_config(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """A `config.json`, and what it says.

    Raises:
        FunctreeError: there is no such file, or it is not an object of JSON.
    """
    file = Path(path)
    if file.suffix != ".json":
        file /= "config.json"
    if not file.is_file():
        raise FunctreeError(f"{file}: there is no such file")
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FunctreeError(f"{file} is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise FunctreeError(f"{file}: it has to be an object, with a field for each size")
    return file, given


def family_of(file: Path, given: Mapping[str, Any]) -> WeightMap:
    """The family that a `config.json` names.

    Raises:
        FunctreeError: it is unknown.
    """
    name = given.get("model_type")
    if not isinstance(name, str) or name not in WeightMap.families:
        known = ", ".join(WeightMap.families)
        raise FunctreeError(
            f'{file}: "model_type": {json.dumps(name)} is none of {known}; for another family add a table to '
            "`ft.nn.WeightMap.families`"
        )
    return WeightMap.families[name]


def _unknown(name: str, value: Any, family: WeightMap) -> Problem:
    why = f"no such field is understood{did_you_mean(name, family.fields)}"
    remedy = (
        'if it changes nothing, add it to the family: `ft.nn.WeightMap.families["..."]`, with `WeightMap.only(...)`'
    )
    return Problem(None, None, f'"{name}": {json.dumps(value)}', why, remedy)
