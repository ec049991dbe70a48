"""`config.json` of a published model ─► a `TransformerConfig`, and the name of each weight.

Each family is a table. What a table does not understand is refused: a config field that is passed
over would load every weight, and compute something else.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from functree.argument_checks import (
    FUNCTION,
    MAPPING,
    TEXT,
    TEXTS,
    Takes,
    check,
    is_floating,
    is_number,
    is_size,
)
from functree.nn.config import TransformerConfig
from functree.nn.rope import Llama3Rope


class Field(NamedTuple):
    """What a family understands of a field in `config.json`.

    Attributes:
        text: the values that are understood, for messages.
        read: a function from the value to fields of a `TransformerConfig`; None if the value is not
            understood.
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
        text,
        lambda x: (
            MAPPING.fits(x)
            and all(isinstance(name, str) and fits(value) for name, value in x.items())
        ),
    )


_OURS = Takes(
    "a field of `ft.nn.TransformerConfig`",
    TEXT.fits,
    lambda name: name in {field.name for field in dataclasses.fields(TransformerConfig)},
)
_OF_JSON = Takes(
    "values that JSON has",
    lambda values: all(map(_is_json, values)),
    lambda values: len(values) > 0,
)
_FIELDS_BY_NAME = _mapping(
    "a mapping to what `WeightMap.sets`, `only` and `ignored` return",
    lambda value: isinstance(value, Field),
)
NAMES = _mapping("a mapping from paths to names", lambda value: isinstance(value, str))
_LISTS = _mapping("a mapping from paths to lists of names", TEXTS.fits)
_OPTIONS = Takes(
    "a mapping of fields of `ft.nn.TransformerConfig`",
    lambda x: MAPPING.fits(x) and all(map(_OURS.is_type, x)),
    lambda x: all(map(_OURS.fits, x)),
)


@dataclasses.dataclass(frozen=True)
class WeightMap:
    """A family of published models: what its `config.json` means, and the names of its weights.

    `ft.nn.WeightMap.families` has those that `ft.load_weights` knows, by `model_type`. Add to it
    for another model.

    Args:
        fields: for each field of `config.json`, what is understood of it: `WeightMap.sets`,
            `WeightMap.only` or `WeightMap.ignored`. A field that is not here is refused.
        weights: for each leaf of the `Transformer`, by path, its name in the files. `{layer}` is
            the number of a layer, and `{expert}` that of an expert. `.T` is behind the name if the
            file has (out, in) and not (in, out).
        options: fields of the `TransformerConfig` that all models of the family have.
        others: for some leaves, other names that files may have instead. Without `{expert}` a
            tensor has all experts, as its first dimension. `[0/2]` before `.T` says that the leaf
            is the first of two parts of the tensor, along the dimension behind that; `[0:2/4]` that
            it is the first two of four.

    Raises:
        FunctreeError: an argument is not such a mapping.

    Examples:
        >>> llama = ft.nn.WeightMap.families["llama"]
        >>> fields = {**llama.fields, "clip_qkv": ft.nn.WeightMap.only(None)}
        >>> ft.nn.WeightMap.families["my_llama"] = dataclasses.replace(
        ...     llama, fields=fields
        ... )
        >>> llama.weights["blocks.layer.mlp.up"]
        'model.layers.{layer}.mlp.up_proj.weight.T'
    """

    families: ClassVar[dict[str, "WeightMap"]] = {}

    fields: Mapping[str, Field]
    weights: Mapping[str, str]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    others: Mapping[str, Sequence[str]] = dataclasses.field(
        default_factory=dict[str, Sequence[str]]
    )

    def __post_init__(self) -> None:
        fields, weights, options = self.fields, self.weights, self.options
        check(
            "no family",
            fields=(fields, _FIELDS_BY_NAME),
            weights=(weights, NAMES),
            options=(options, _OPTIONS),
            others=(self.others, _LISTS),
        )

    @staticmethod
    def sets(field: str, text: str, fits: Callable[[Any], bool], **absent: Any) -> Field:
        """A field whose value is that of a field of `TransformerConfig`.

        Args:
            field: the field of `TransformerConfig`.
            text: the values that are understood, for messages.
            fits: whether a value is one of them.
            **absent: what an absent field means, as `field=value`; without it the field has to be
                there.

        Raises:
            FunctreeError: there is no such field, or another value does not fit.

        Examples:
            >>> is_text = lambda value: isinstance(value, str)
            >>> ft.nn.WeightMap.sets("attention", "a text", is_text).read("xla")
            {'attention': 'xla'}
        """
        check("no such field", field=(field, _OURS), text=(text, TEXT), fits=(fits, FUNCTION))

        def read(value: Any) -> Mapping[str, Any] | None:
            return {field: value} if fits(value) else None

        return Field(text, read, absent or None)

    @staticmethod
    def only(*values: Any) -> Field:
        """A field that is understood with these values alone; if it is absent, it has the first.

        Args:
            *values: the values, as JSON has them.

        Raises:
            FunctreeError: JSON has no such value.

        Examples:
            >>> ft.nn.WeightMap.only(None, False).text
            'null or false'
        """
        check("no such field", values=(values, _OF_JSON))
        # As texts: `True` is 1 in Python, and in JSON it is not.
        texts = [json.dumps(value) for value in values]

        def read(value: Any) -> Mapping[str, Any] | None:
            return {} if json.dumps(value) in texts else None

        return Field(" or ".join(texts), read, {})

    @staticmethod
    def ignored(text: str, fits: Callable[[Any], bool]) -> Field:
        """A field that says nothing of what is computed.

        Args:
            text: the values that are understood, for messages.
            fits: whether a value is one of them.

        Raises:
            FunctreeError: a value does not fit.

        Examples:
            >>> ft.nn.WeightMap.ignored(
            ...     "a text", lambda value: isinstance(value, str)
            ... ).read("4.40")
            {}
        """
        check("no such field", text=(text, TEXT), fits=(fits, FUNCTION))

        def read(value: Any) -> Mapping[str, Any] | None:
            return {} if fits(value) else None

        return Field(text, read, {})


def _size(field: str) -> Field:
    return WeightMap.sets(field, "a positive integer", is_size)


_SIZE_TEXT = "a positive integer or null"


def _is_size_or_none(value: Any) -> bool:
    return value is None or is_size(value)


def _is_positive(value: Any) -> bool:
    return is_number(value) and value > 0


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_token(value: Any) -> bool:
    """Whether a value is a token, several (models for chats end a text by any of two), or null."""
    if value is None:
        return True
    tokens = value if isinstance(value, list) else [value]
    return all(isinstance(one, int) and not isinstance(one, bool) for one in tokens)


_LLAMA_3 = {
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
}  # fmt: skip
_ROPE = 'of {"rope_type": "default"} or "llama3", with the fields of that alone'


def _rope(value: Any) -> Mapping[str, Any] | None:
    """`rope_parameters`, and `rope_scaling` of older files, as fields of a config.

    What is not understood, such as the factors of YaRN, is None, and refused by its name.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        return None
    given = dict(value)
    # Some files have both names, and older ones only "type".
    older = given.pop("type", None)
    kind = given.pop("rope_type", older)
    found: dict[str, Any] = {}
    if "rope_theta" in given:
        found["rope_theta"] = given.pop("rope_theta")
    if not all(map(_is_positive, [*found.values(), *given.values()])):
        return None
    if kind in ("default", None) and not given:
        return {**found, "rope_scaling": None}
    if kind != "llama3" or given.keys() != _LLAMA_3:
        return None
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    original = given["original_max_position_embeddings"]
    if low >= high or not is_size(original):
        return None
    return {**found, "rope_scaling": Llama3Rope(given["factor"], low, high, original)}


def _is_full_attention(value: Any) -> bool:
    """Whether no layer has a window."""
    return value is None or (
        isinstance(value, list) and all(one == "full_attention" for one in value)
    )


# What all families have. Where a field is absent, it means what Hugging Face's class takes by
# default, and not what our own config does: `rms_norm_eps` is 1e-6.
_FIELDS: dict[str, Field] = {
    "vocab_size": _size("vocab_size"),
    "hidden_size": _size("embed"),
    "num_hidden_layers": _size("layers"),
    "num_attention_heads": _size("heads"),
    "intermediate_size": _size("hidden"),
    "max_position_embeddings": _size("max_seq"),
    "num_key_value_heads": WeightMap.sets("kv_heads", _SIZE_TEXT, _is_size_or_none, kv_heads=None),
    "head_dim": WeightMap.sets("head_dim", _SIZE_TEXT, _is_size_or_none, head_dim=None),
    "rms_norm_eps": WeightMap.sets("norm_eps", "a positive number", _is_positive, norm_eps=1e-6),
    "tie_word_embeddings": WeightMap.sets(
        "tie_embedding", "true or false", _is_flag, tie_embedding=False
    ),
    "rope_theta": WeightMap.sets(
        "rope_theta", "a positive number", _is_positive, rope_theta=10_000.0
    ),
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
    "transformers_version": WeightMap.ignored("a text", TEXT.fits),
    "_name_or_path": WeightMap.ignored("a text", TEXT.fits),
    "use_cache": WeightMap.ignored("true or false", _is_flag),
}
# The files have matrices as PyTorch does, (out, in): hence `.T`.
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
# Qwen's windows are for some layers only, and off in all published models.
_NO_WINDOW = {
    "use_sliding_window": WeightMap.only(False),
    "use_mrope": WeightMap.only(False),
    "sliding_window": WeightMap.ignored(_SIZE_TEXT, _is_size_or_none),
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
_WINDOW = {
    "sliding_window": WeightMap.sets("window", _SIZE_TEXT, _is_size_or_none),
}
_QWEN_3 = {"attention_bias": WeightMap.only(False)}
_COEFFICIENTS = {
    "router_aux_loss_coef": WeightMap.ignored("a number", is_number),
    "output_router_logits": WeightMap.ignored("true or false", _is_flag),
}
# What is not in a file is what Hugging Face's class takes by default, and for these it is another
# value than for all others.
_MIXTRAL = {
    "num_key_value_heads": _size("kv_heads"),
    "num_local_experts": _size("experts"),
    "num_experts_per_tok": _size("top_k"),
    "rms_norm_eps": WeightMap.sets("norm_eps", "a positive number", _is_positive, norm_eps=1e-5),
    "rope_theta": WeightMap.sets(
        "rope_theta", "a positive number", _is_positive, rope_theta=1_000_000.0
    ),
    # Noise that is for training only.
    "router_jitter_noise": WeightMap.ignored("a number", is_number),
    "sliding_window": WeightMap.sets("window", _SIZE_TEXT, _is_size_or_none, window=None),
    **_COEFFICIENTS,
}
_QWEN_3_MOE = {
    "num_key_value_heads": _size("kv_heads"),
    # Newer files have the second name.
    "num_experts": WeightMap.sets("experts", "a positive integer", is_size, experts=128),
    "num_local_experts": WeightMap.sets("experts", "a positive integer", is_size, experts=128),
    "num_experts_per_tok": WeightMap.sets("top_k", "a positive integer", is_size, top_k=8),
    "moe_intermediate_size": WeightMap.sets(
        "expert_hidden", "a positive integer", is_size, expert_hidden=768
    ),
    "norm_topk_prob": WeightMap.sets("normalize", "true or false", _is_flag, normalize=False),
    # Experts in each layer.
    "decoder_sparse_step": WeightMap.only(1),
    "mlp_only_layers": WeightMap.only([], None),
    **_COEFFICIENTS,
}
_MLP = "blocks.layer.mlp"


def _of_experts(router: str, each: str, gate: str, up: str, down: str) -> dict[str, str]:
    """The names of tensors of which there is one for each expert."""
    names = dict(_WEIGHTS)
    names[f"{_MLP}.router"] = f"model.layers.{{layer}}.{router}.weight.T"
    for ours, theirs in (("gate", gate), ("up", up), ("down", down)):
        names[f"{_MLP}.{ours}"] = f"model.layers.{{layer}}.{each}.{{expert}}.{theirs}.weight.T"
    return names


def _of_all_experts(*modules: str) -> dict[str, list[str]]:
    """The names of tensors that have all experts of a layer: gate and up are one of them."""
    names: dict[str, list[str]] = {}
    for module in modules:
        first = f"model.layers.{{layer}}.{module}"
        names.setdefault(f"{_MLP}.router", []).append(f"{first}.gate.weight.T")
        names.setdefault(f"{_MLP}.gate", []).append(f"{first}.experts.gate_up_proj[0/2].T")
        names.setdefault(f"{_MLP}.up", []).append(f"{first}.experts.gate_up_proj[1/2].T")
        names.setdefault(f"{_MLP}.down", []).append(f"{first}.experts.down_proj.T")
        for ours in ("gate", "up", "down"):
            each = f"{first}.experts.{{expert}}.{ours}_proj.weight.T"
            names[f"{_MLP}.{ours}"].append(each)
    return names


WeightMap.families |= {
    "llama": WeightMap({**_FIELDS, **_LLAMA, **_architecture("Llama")}, _WEIGHTS),
    "mistral": WeightMap({**_FIELDS, **_WINDOW, **_architecture("Mistral")}, _WEIGHTS),
    "qwen2": WeightMap(
        {**_FIELDS, **_NO_WINDOW, **_architecture("Qwen2")},
        _WEIGHTS | _BIASES,
        {"attention_bias": True},
    ),
    "qwen3": WeightMap(
        {**_FIELDS, **_NO_WINDOW, **_QWEN_3, **_architecture("Qwen3")},
        _WEIGHTS | _HEAD_NORMS,
        {"qk_norm": True},
    ),
}
WeightMap.families |= {
    "mixtral": WeightMap(
        {**_FIELDS, **_MIXTRAL, **_architecture("Mixtral")},
        _of_experts(
            "block_sparse_moe.gate", "block_sparse_moe.experts", gate="w1", up="w3", down="w2"
        ),
        others=_of_all_experts("block_sparse_moe", "mlp"),
    ),
    "qwen3_moe": WeightMap(
        {**_FIELDS, **_NO_WINDOW, **_QWEN_3, **_QWEN_3_MOE, **_architecture("Qwen3Moe")},
        _of_experts("mlp.gate", "mlp.experts", gate="gate_proj", up="up_proj", down="down_proj")
        | _HEAD_NORMS,
        {"qk_norm": True},
        _of_all_experts("mlp"),
    ),
}
