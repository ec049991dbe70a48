"""`config.json` of published models: what is understood, and what is refused by name."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import functree as ft
from tests.lib.checks import raises

MODELS = Path(__file__).parents[1] / "fixtures" / "hf"
SIZES = {
    "vocab_size": 96,
    "embed": 32,
    "layers": 3,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "hidden": 48,
}
COMMON: dict[str, Any] = {**SIZES, "max_seq": 64, "norm_eps": 1e-6}
QWEN_3_MOE = {"qk_norm": True, "experts": 6, "top_k": 3, "expert_hidden": 24}
EXPECTED: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 5e4},
    "llama_bf16": {"rope_theta": 5e4, "param_dtype": jnp.bfloat16},
    "llama_sharded": {"rope_theta": 5e4},
    "llama_tied": {"tie_embedding": True},
    "llama3_rope": {"rope_theta": 5e5, "rope_scaling": ft.nn.Llama3Rope(8, 1, 4, 16)},
    "mistral": {},
    "mistral_sw": {"window": 4},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True},
    "mixtral": {"rope_theta": 1e6, "experts": 6, "top_k": 2},
    "qwen3_moe": QWEN_3_MOE,
    "qwen3_moe_raw": QWEN_3_MOE | {"normalize": False},
    "olmo2": {"rope_theta": 5e5, "qk_norm": "all", "norms": "after"},
    "olmoe": {"hidden": 24, "qk_norm": "all", "experts": 6, "top_k": 3, "normalize": False},
}


def written(folder: Path, name: str, **changes: Any) -> Path:
    """A `config.json` with other fields; `...` leaves one out."""
    given = json.loads((MODELS / name / "config.json").read_text()) | changes
    file = folder / "config.json"
    file.write_text(json.dumps({key: value for key, value in given.items() if value is not ...}))
    return file


@pytest.mark.parametrize("name", EXPECTED)
def test_configs(name: str) -> None:
    expected = ft.nn.TransformerConfig(**COMMON | EXPECTED[name])
    assert ft.nn.config_from_json(MODELS / name) == expected
    assert ft.nn.config_from_json(str(MODELS / name / "config.json")) == expected
    chosen: dict[str, Any] = {
        "compute_dtype": jnp.bfloat16,
        "remat": "full",
        "attention": "xla",
        "max_seq": 16,
    }
    assert ft.nn.config_from_json(MODELS / name, **chosen) == dataclasses.replace(
        expected, **chosen
    )


OLDER = {
    "rope at the top": (
        {"rope_parameters": ..., "rope_theta": 5e4, "rope_scaling": None},
        {"rope_theta": 5e4},
    ),
    "scaling by its old name": (
        {
            "rope_parameters": ...,
            "rope_theta": 5e5,
            "rope_scaling": {
                "type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
        EXPECTED["llama3_rope"],
    ),
    "defaults": (
        {
            "num_key_value_heads": ...,
            "head_dim": ...,
            "rms_norm_eps": ...,
            "rope_parameters": ...,
            "dtype": ...,
        },
        {"kv_heads": 4, "rope_theta": 1e4},
    ),
    "torch_dtype": (
        {"dtype": ..., "torch_dtype": "float16"},
        {"rope_theta": 5e4, "param_dtype": jnp.float16},
    ),
    "where it was once": ({"_name_or_path": "meta-llama/Llama-2-7b-hf"}, {"rope_theta": 5e4}),
}


@pytest.mark.parametrize("case", OLDER)
def test_older_files(case: str, tmp_path: Path) -> None:
    changes, expected = OLDER[case]
    file = written(tmp_path, "llama", **changes)
    assert ft.nn.config_from_json(file) == ft.nn.TransformerConfig(**COMMON | expected)


FIELDS = [
    (name, field)
    for name in ("llama", "llama3_rope", "mistral_sw", "qwen2", "qwen3", "olmo2", "olmoe")
    for field in json.loads((MODELS / name / "config.json").read_text())
]


@pytest.mark.parametrize(("name", "field"), FIELDS, ids=lambda value: value)
@pytest.mark.parametrize("value", [{"not": "understood"}, "nonsense"], ids=["object", "text"])
def test_each_field_with_a_value_that_is_not_understood(
    name: str, field: str, value: Any, tmp_path: Path
) -> None:
    if (field, value) == ("transformers_version", "nonsense"):
        value = 5
    text = '"model_type": ' if field == "model_type" else f'"{field}": {json.dumps(value)}'
    with raises(text, error=ft.FunctreeError):
        ft.nn.config_from_json(written(tmp_path, name, **{field: value}))


# Values that a wrong type is not among: the test above has those, for each field.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a flag for a number": ("llama", {"pretraining_tp": True}, '"pretraining_tp": true'),
    "a bias of the output too": ("qwen3", {"attention_bias": True}, "not supported: it must be false"),
    "layers of two kinds": (
        "qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, '"layer_types": ['
    ),
    "no heads of keys, which means 8": (
        "mixtral", {"num_key_value_heads": ...}, 'add "num_key_value_heads"'
    ),
    "no heads of keys, which means 4": (
        "qwen3_moe", {"num_key_value_heads": ...}, 'add "num_key_value_heads"'
    ),
    "no window, which means 4,096": ("mistral", {"sliding_window": ...}, "it is missing"),
    "another rotation": (
        "llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, '"rope_type": "yarn"'
    ),
    "factors that are equal": (
        "llama3_rope",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 4.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
            }
        },
        '"rope_parameters": {"rope_type": "llama3"',
    ),
    "a factor too many": (
        "llama3_rope",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "factor": 2.0}},
        '"rope_parameters": {"rope_type": "default"',
    ),
    "a misspelled field": ("llama", {"vocab_sise": 96}, "did you mean `vocab_size`?"),
    "two values for one": (
        "llama", {"rope_theta": 1.0}, '"rope_theta": 1.0'
    ),
    "two scalings": (
        "llama3_rope", {"rope_scaling": {"rope_type": "default"}}, 'the same as in "rope_parameters"'
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, tmp_path: Path) -> None:
    name, changes, said = REFUSED[case]
    with raises(said, error=ft.FunctreeError):
        ft.nn.config_from_json(written(tmp_path, name, **changes))


def test_other_families() -> None:
    with raises(
        'config.json: "model_type": "gpt2" is not one of llama, mistral, qwen2, qwen3',
        "add two functions to `ft.nn.families`",
        error=ft.FunctreeError,
    ):
        ft.nn.config_from_json(MODELS / "gpt2")


def test_all_problems_at_once(tmp_path: Path) -> None:
    file = written(tmp_path, "llama", hidden_act="gelu", mlp_bias=True, clip_qkv=8.0)
    with raises(
        "cannot create a TransformerConfig: 3 problems",
        '"hidden_act"',
        '"mlp_bias"',
        '"clip_qkv": 8.0',
        error=ft.FunctreeError,
    ):
        ft.nn.config_from_json(file)


def test_files_that_are_none(tmp_path: Path) -> None:
    with raises("config.json: there is no such file", error=ft.FunctreeError):
        ft.nn.config_from_json(tmp_path)
    for text, said in (("{", "config.json is not JSON: "), ("[]", "must contain a JSON object")):
        (tmp_path / "config.json").write_text(text)
        with raises(said, error=ft.FunctreeError):
            ft.nn.config_from_json(tmp_path)


def test_a_field_that_the_weights_decide() -> None:
    with raises(
        "embed=",
        "the published model determines it",
        "pass only compute_dtype, remat",
        error=ft.FunctreeError,
    ):
        ft.nn.config_from_json(MODELS / "llama", embed=64)


def test_a_family_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama, names = ft.nn.families["llama"]

    def mine(read: Any) -> dict[str, Any]:
        read.only("clip_qkv", None)
        read("act", "any", bool, None)
        return {**llama(read), "qk_norm": True}

    monkeypatch.setitem(ft.nn.families, "mine", (mine, names))
    file = written(tmp_path, "llama", model_type="mine", clip_qkv=None, act="silu")
    assert ft.nn.config_from_json(file).qk_norm
    with raises('"clip_qkv": 8.0', "not supported: it must be null", error=ft.FunctreeError):
        ft.nn.config_from_json(written(tmp_path, "llama", model_type="mine", clip_qkv=8.0))
    with raises('"more": 1', "this field is not supported", error=ft.FunctreeError):
        ft.nn.config_from_json(written(tmp_path, "llama", model_type="mine", more=1))
