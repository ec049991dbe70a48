"""A published model's `config.json` becomes a `TransformerConfig` and a table of tensor names.

A family consists of two functions: one reads the fields of `config.json`, the other makes the table
of names. A field that the first function does not read causes an error. If the field were ignored,
all weights would load, but the model could compute different results.
"""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from functree.argument_checks import LOCAL_FILE, POSITIVE, SIZE, TEXT, check, is_floating, is_number
from functree.errors import (
    USERS_ERRORS,
    FunctreeError,
    FunctreeValueError,
    Problem,
    count,
    did_you_mean,
)
from functree.nn.config import TransformerConfig
from functree.nn.rope import Llama3Rope
from functree.report.json_text import parsed, value_text

_REQUIRED = object()


class ConfigReader:
    """A reader of a `config.json` that records which fields were read.

    For an unsupported value, it records a problem and continues with the default, so that one error
    lists all problems.

    Args:
        given: the fields in the file.

    Attributes:
        given: the fields in the file.
        names: the names of the fields that were read.
        problems: the problems with unsupported values and missing fields.
    """

    def __init__(self, given: Mapping[str, Any]):
        self.given = given
        self.problems: list[Problem] = []
        self.names: set[str] = {"model_type"}

    def __call__(
        self, name: str, text: str, fits: Callable[[Any], bool], default: Any = _REQUIRED
    ) -> Any:
        """Read the value of a field.

        Args:
            name: the name of the field.
            text: a description of the accepted values, for messages.
            fits: a function that returns whether a value is accepted.
            default: the value of an absent field; without a default, the field is required.
        """
        self.names.add(name)
        if name in self.given:
            value = self.given[name]
            if fits(value):
                return value
            why = f"this value is not supported: it must be {text}"
            self._refuse(f'"{name}": {value_text(value)}', why)
        elif default is _REQUIRED:
            self._refuse(f'"{name}"', "it is missing", f'add "{name}", {text}')
        return None if default is _REQUIRED else default

    def size(self, name: str, default: Any = _REQUIRED) -> Any:
        """Read a field with a positive integer; with a default of None, null is accepted too."""
        if default is None:
            return self(name, "a positive integer or null", SIZE.or_none().fits, None)
        return self(name, "a positive integer", SIZE.fits, default)

    def number(self, name: str, default: float) -> float:
        """Read a field with a positive number."""
        return self(name, "a positive number", POSITIVE.fits, default)

    def flag(self, name: str, default: bool) -> bool:
        """Read a boolean field."""
        return self(name, "true or false", lambda value: isinstance(value, bool), default)

    def only(self, name: str, value: Any, *others: Any) -> None:
        """Accept only the given values for a field; the first value is the default."""
        # Values are compared as JSON: `True` equals 1 in Python, but not in JSON.
        texts = list(map(json.dumps, (value, *others)))
        self(name, " or ".join(texts), lambda given: json.dumps(given) in texts, value)

    def unread_problems(self) -> list[Problem]:
        """Return a problem for each field that was not read."""
        problems: list[Problem] = []
        for name, value in self.given.items():
            if name not in self.names:
                why = f"this field is not supported{did_you_mean(name, self.names)}"
                what = f'"{name}": {value_text(value)}'
                problems.append(Problem(None, None, what, why, _NEW_FIELD))
        return problems

    def _refuse(self, what: str, why: str, remedy: str = "") -> None:
        self.problems.append(Problem(None, None, what, why, remedy))


_NEW_FIELD = (
    'if the field does not affect the result, accept it with `read.only("...", ...)` in your own '
    'family, `ft.nn.families["..."]`'
)


def _is_token(value: Any) -> bool:
    """Return whether a value is a token, a list of tokens (for chat models), or null."""
    tokens = value if isinstance(value, list) else [value]
    return value is None or set(map(type, tokens)) <= {int}


def _is_full_attention(value: Any) -> bool:
    """Return whether a value of `layer_types` gives no layer a window."""
    if value is None:
        return True
    return isinstance(value, list) and value.count("full_attention") == len(value)


SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "embed",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "hidden",
    "max_position_embeddings": "max_seq",
}
"""The size fields of every `config.json`, mapped to the fields of `TransformerConfig`."""

FIELDS = {
    **SIZES,
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embedding",
    "sliding_window": "window",
    "num_local_experts": "experts",
    "num_experts_per_tok": "top_k",
    "norm_topk_prob": "normalize",
}
"""The fields that `save_weights` copies from a `TransformerConfig`; a family uses some of them."""


# Configs. An absent field gets the default of Hugging Face's class, which may differ from our
# default. For example, its `rms_norm_eps` is 1e-6, and ours is 1e-5.


def _common(
    read: ConfigReader,
    architecture: str,
    *,
    kv_heads: Any = None,
    norm_eps: float = 1e-6,
    rope_theta: float = 1e4,
) -> dict[str, Any]:
    """Read the fields that all families share."""
    read.only("architectures", [f"{architecture}ForCausalLM"], None)
    read.only("hidden_act", "silu")
    read.only("attention_dropout", 0.0, 0)
    read.flag("use_cache", True)
    read.number("initializer_range", 0.02)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        read(name, "a token, a list of tokens, or null", _is_token, None)
    for name in ("transformers_version", "_name_or_path"):
        read(name, "a string", TEXT.fits, "")
    # Older files call the field "torch_dtype". The field contains the dtype used in training;
    # `load_weights` uses the dtypes of the tensors.
    floats = "a floating-point dtype"
    older = read("torch_dtype", floats, is_floating, jnp.float32)
    return {
        **{ours: read.size(theirs) for theirs, ours in SIZES.items()},
        "kv_heads": read.size("num_key_value_heads", kv_heads),
        "head_dim": read.size("head_dim", None),
        "norm_eps": read.number("rms_norm_eps", norm_eps),
        "tie_embedding": read.flag("tie_word_embeddings", False),
        "param_dtype": read("dtype", floats, is_floating, older),
        **_rope(read, rope_theta),
    }


def _rope(read: ConfigReader, default: float) -> dict[str, Any]:
    """Read the rotation from `rope_parameters`.

    Older files contain `rope_theta` and `rope_scaling` instead.
    """
    theta, scaling = _rotation(read("rope_parameters", _ROPE, _is_rotation, None)) or _PLAIN
    if read.given.get("rope_parameters") is None:
        theta, scaling = _rotation(read("rope_scaling", _ROPE, _is_rotation, None)) or _PLAIN
        theta = read.number("rope_theta", theta or default)
        return {"rope_theta": theta, "rope_scaling": scaling}
    # If a file contains the older fields too, a library's version determines which it reads.
    theta, same = theta or default, 'the same as in "rope_parameters"'
    read("rope_theta", same, lambda value: value == theta, None)
    read("rope_scaling", same, lambda value: _rotation(value) == (None, scaling), None)
    return {"rope_theta": theta, "rope_scaling": scaling}


_PLAIN = None, None
_ROPE = 'an object with "rope_type": "default" or "llama3", and no fields of other rope types'
LLAMA_3 = ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
"""The names of a `Llama3Rope`'s fields in a `config.json`, in the class's order."""


def _is_rotation(value: Any) -> bool:
    return _rotation(value) is not None


def _rotation(value: Any) -> tuple[float | None, Llama3Rope | None] | None:
    """Return a rotation's base and scaling, or None for an unsupported rotation, such as YaRN."""
    if value is None:
        return _PLAIN
    if not isinstance(value, dict):
        return None
    given = dict(value)
    # Some files have both "type" and "rope_type"; older files have only "type".
    older = given.pop("type", None)
    kind = given.pop("rope_type", older)
    if not all(map(POSITIVE.fits, given.values())):
        return None
    theta = given.pop("rope_theta", None)
    if kind in ("default", None) and not given:
        return theta, None
    if kind != "llama3" or given.keys() != set(LLAMA_3):
        return None
    factor, low, high, original = (given[name] for name in LLAMA_3)
    if low >= high or not SIZE.fits(original):
        return None
    return theta, Llama3Rope(factor, low, high, original)


def _llama(read: ConfigReader) -> dict[str, Any]:
    fields = _common(read, "Llama")
    read.only("attention_bias", False)
    read.only("mlp_bias", False)
    read.only("pretraining_tp", 1)
    return fields


def _mistral(read: ConfigReader) -> dict[str, Any]:
    # Required, since an absent window means 4,096 in Hugging Face's class.
    window = read("sliding_window", "a positive integer or null", SIZE.or_none().fits)
    return {**_common(read, "Mistral"), "window": window}


def _qwen(read: ConfigReader, architecture: str, kv_heads: Any = None) -> dict[str, Any]:
    # Qwen's windows apply to some layers only, and are off in all published models.
    read.only("use_sliding_window", False)
    read.only("use_mrope", False)
    read.size("sliding_window", None)
    read("max_window_layers", "an integer", lambda value: isinstance(value, int), 0)
    read("layer_types", 'a list whose entries are all "full_attention"', _is_full_attention, None)
    return _common(read, architecture, kv_heads=kv_heads)


def _qwen2(read: ConfigReader) -> dict[str, Any]:
    return {**_qwen(read, "Qwen2"), "attention_bias": True}


def _qwen3(read: ConfigReader) -> dict[str, Any]:
    read.only("attention_bias", False)
    return {**_qwen(read, "Qwen3"), "qk_norm": True}


def _of_training(read: ConfigReader) -> None:
    """Read the experts' config fields that do not affect the logits."""
    read("router_aux_loss_coef", "a number", is_number, 0)
    read.flag("output_router_logits", False)


def _mixtral(read: ConfigReader) -> dict[str, Any]:
    _of_training(read)
    read("router_jitter_noise", "a number", is_number, 0)  # noise in training only
    return {
        **_common(read, "Mixtral", kv_heads=_REQUIRED, norm_eps=1e-5, rope_theta=1e6),
        "window": read.size("sliding_window", None),
        "experts": read.size("num_local_experts"),
        "top_k": read.size("num_experts_per_tok"),
    }


def _qwen3_moe(read: ConfigReader) -> dict[str, Any]:
    _of_training(read)
    read.only("attention_bias", False)
    # All layers have experts.
    read.only("decoder_sparse_step", 1)
    read.only("mlp_only_layers", [], None)
    return {
        **_qwen(read, "Qwen3Moe", kv_heads=_REQUIRED),
        "qk_norm": True,
        # Newer files use the first name. The shapes of the weights reveal a wrong number.
        "experts": read.size("num_local_experts", read.size("num_experts", 128)),
        "top_k": read.size("num_experts_per_tok", 8),
        "expert_hidden": read.size("moe_intermediate_size", 768),
        "normalize": read.flag("norm_topk_prob", False),
    }


def _olmo(read: ConfigReader, architecture: str) -> dict[str, Any]:
    read.only("attention_bias", False)
    return {**_common(read, architecture, norm_eps=1e-5), "qk_norm": "all"}


def _olmo2(read: ConfigReader) -> dict[str, Any]:
    return {**_olmo(read, "Olmo2"), "norms": "after"}


def _olmoe(read: ConfigReader) -> dict[str, Any]:
    _of_training(read)
    read.only("clip_qkv", None)
    return {
        **_olmo(read, "Olmoe"),
        "experts": read.size("num_experts", 64),
        "top_k": read.size("num_experts_per_tok", 8),
        "normalize": read.flag("norm_topk_prob", False),
    }


# Tables of names. Files contain PyTorch's matrices, (out, in), which `.T` transposes.


def _names(config: TransformerConfig, tensors: Collection[str] = ()) -> dict[str, str]:
    """Return the table of names for families without experts."""
    layer, attention = "model.layers.{layer}", "model.layers.{layer}.self_attn"
    norms = "input_layernorm", "post_attention_layernorm"
    if config.norms == "after":
        norms = "post_attention_layernorm", "post_feedforward_layernorm"
    names = {
        "embed.weight": "model.embed_tokens.weight",
        "blocks.layer.attn_norm.scale": f"{layer}.{norms[0]}.weight",
        "blocks.layer.mlp_norm.scale": f"{layer}.{norms[1]}.weight",
        "norm.scale": "model.norm.weight",
    }
    for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o")):
        names[f"blocks.layer.attn.{ours}"] = f"{attention}.{theirs}_proj.weight.T"
        if config.attention_bias and ours != "out":
            names[f"blocks.layer.attn.{ours}_bias"] = f"{attention}.{theirs}_proj.bias"
        if config.qk_norm and ours in ("query", "key"):
            names[f"blocks.layer.attn.{ours}_norm.scale"] = f"{attention}.{theirs}_norm.weight"
    if config.experts is None:
        for part in ("gate", "up", "down"):
            names[f"blocks.layer.mlp.{part}"] = f"{layer}.mlp.{part}_proj.weight.T"
    if not config.tie_embedding:
        names["unembed.weight"] = "lm_head.weight.T"
    return names


def _names_of_experts(
    config: TransformerConfig, tensors: Collection[str] = (), module: str = "mlp"
) -> dict[str, str]:
    """Return the table of names for families with experts.

    Files contain one tensor per expert, or one tensor for all experts.
    """
    first = f"model.layers.{{layer}}.{module}"
    names = _names(config) | {"blocks.layer.mlp.router": f"{first}.gate.weight.T"}
    if f"model.layers.0.{module}.experts.gate_up_proj" in tensors:
        parts = {"gate": "gate_up_proj[0/2].T", "up": "gate_up_proj[1/2].T", "down": "down_proj.T"}
    else:
        parts = {part: f"{{expert}}.{part}_proj.weight.T" for part in ("gate", "up", "down")}
    for part, name in parts.items():
        names[f"blocks.layer.mlp.{part}"] = f"{first}.experts.{name}"
    return names


def _names_of_mixtral(config: TransformerConfig, tensors: Collection[str] = ()) -> dict[str, str]:
    """Return the table of names for Mixtral.

    Newer files use the names that other families with experts use.
    """
    if "model.layers.0.mlp.gate.weight" in tensors:
        return _names_of_experts(config, tensors)
    names = _names_of_experts(config, tensors, "block_sparse_moe")
    for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        row = names[f"blocks.layer.mlp.{part}"]
        names[f"blocks.layer.mlp.{part}"] = row.replace(f"{part}_proj", name)
    return names


ConfigFunction = Callable[[ConfigReader], dict[str, Any]]
NamesFunction = Callable[[TransformerConfig, Collection[str]], dict[str, str]]

families: dict[str, tuple[ConfigFunction, NamesFunction]] = {
    "llama": (_llama, _names),
    "mistral": (_mistral, _names),
    "qwen2": (_qwen2, _names),
    "qwen3": (_qwen3, _names),
    "mixtral": (_mixtral, _names_of_mixtral),
    "qwen3_moe": (_qwen3_moe, _names_of_experts),
    "olmo2": (_olmo2, _names),
    "olmoe": (_olmoe, _names_of_experts),
}
"""The families of published models that `ft.load_weights` supports, by `model_type`.

To load another model with the same layers, add its family to this dict.

A family consists of two functions. The first takes a reader of `config.json`, and returns the
fields of the `ft.nn.TransformerConfig`. A field that this function does not read, such as
`clip_qkv`, causes an error. Call the reader in these ways:

- `read.size(name)`, `read.number(name, default)` and `read.flag(name, default)` return the value of
  a field. A field without a default is required.
- `read.only(name, value, *others)` accepts only these values; the first is the default.
- `read(name, text, fits, default)` returns a value for which the function `fits` is true; `text`
  describes these values in messages.

The second function takes the config and the names of the tensors in the files. When a model is
saved, the collection of names is empty. The function returns a table that maps the paths of the
`Transformer` to names of tensors, in the form that `ft.load_tensors` accepts.

    >>> llama, names = ft.nn.families["llama"]
    >>> def my_llama(read):
    ...     read.only("clip_qkv", None)
    ...     return {**llama(read), "qk_norm": read.flag("use_qk_norm", False)}
    >>> ft.nn.families["my_llama"] = my_llama, names
"""


# Reading a file

# The fields that a user may choose when a model is loaded; the published model determines the
# others.
CHOSEN = (
    "compute_dtype",
    "remat",
    "attention",
    "context",
    "microbatches",
    "max_seq",
    "capacity",
    "dispatch",
    "dot_general",
)


def config_from_json(path: str | Path, **fields: Any) -> TransformerConfig:
    """Read the config of a published model.

    Args:
        path: the model's `config.json`, or the folder that contains it.
        **fields: your own values for `compute_dtype`, `remat`, `attention`, `context`,
            `microbatches`, `max_seq`, `capacity`, `dispatch` or `dot_general`.

    Returns:
        The config. Its `param_dtype` is the "dtype" in the file.

    Raises:
        FunctreeError: if the file does not exist or cannot be read.
        FunctreeError: if the file is not JSON.
        FunctreeError: if the model's family is unknown.
        FunctreeError: if fields are missing. The error lists all of them.
        FunctreeError: if fields or their values are not supported. The error lists all of them.

    Examples:
        >>> config = ft.nn.config_from_json("no such folder")
        Traceback (most recent call last):
            ...
        functree.errors.FunctreeError: no such folder/config.json: there is no
        such file
    """
    check("config_from_json: invalid arguments", path=(path, LOCAL_FILE))
    return read_config(path, fields).config


class PublishedConfig(NamedTuple):
    """The contents of a `config.json`.

    Attributes:
        file: the file.
        given: the fields in the file.
        config: the config that these fields describe.
        names: the family's function that makes the table of names.
    """

    file: Path
    given: Mapping[str, Any]
    config: TransformerConfig
    names: NamesFunction


def read_config(path: str | Path, fields: Mapping[str, Any]) -> PublishedConfig:
    """Read a `config.json`; see `config_from_json` for arguments and errors."""
    file, given = _read_file(path)
    family = given.get("model_type")
    if family not in list(families):
        raise FunctreeValueError(
            f'{file}: "model_type": {value_text(family)} is not one of {", ".join(families)}. For '
            "another family, add two functions to `ft.nn.families`"
        )
    read, options = understood(family, given)
    problems = [*read.problems, *read.unread_problems()]
    for name in fields:
        if name not in CHOSEN:
            why, remedy = "the published model determines it", f"pass only {', '.join(CHOSEN)}"
            problems.append(Problem(None, None, f"{name}=", why, remedy))
    if problems:
        failure = f"{file}: cannot create a TransformerConfig: {count(len(problems), 'problem')}"
        raise FunctreeValueError(failure, problems)
    # Fields that are absent or null get Hugging Face's values.
    if options["kv_heads"] is None:
        options["kv_heads"] = options["heads"]
    if options["head_dim"] is None:
        options["head_dim"] = options["embed"] // options["heads"]
    config = TransformerConfig(**{**options, **fields})
    return PublishedConfig(file, given, config, families[family][1])


def understood(family: str, given: Mapping[str, Any]) -> tuple[ConfigReader, dict[str, Any]]:
    """Read a `config.json` with a family's function, and return the reader and the result."""
    read = ConfigReader(given)
    try:
        return read, families[family][0](read)
    except USERS_ERRORS:
        # The function may have failed because of a missing value, for which `read` has already
        # recorded a problem.
        if not read.problems:
            raise
    return read, {}


def _read_file(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """Read a `config.json`, and return its path and its fields."""
    file = Path(path)
    if file.suffix != ".json":
        file /= "config.json"
    try:
        if not file.is_file():  # reading a pipe would wait for a writer
            raise FunctreeError(f"{file}: there is no such file")
        given = parsed(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise FunctreeError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise FunctreeValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise FunctreeValueError(f"{file} must contain a JSON object with the fields of a config")
    return file, given
