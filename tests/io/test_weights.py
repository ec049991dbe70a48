"""Published weights: the reference's logits, born sharded, read by blocks, written as they were;
what is refused."""

import dataclasses
import functools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import functree as ft
from functree.io.weights import load as loader
from functree.io.weights import save
from tests.io.reads import blocks_read
from tests.lib.checks import raises

MODELS = Path(__file__).parents[1] / "fixtures" / "hf"
KEY = jax.random.key(0)
TOKENS = np.load(MODELS / "tokens.npy")
TENSOR = {"heads": "model", "kv_heads": "model", "hidden": "model", "vocab": "model"}
LAYOUT = ft.AxisRules({"batch": "data", **TENSOR, ...: None}) | ft.FSDP("data", min_size=0)
NAMES = """
    llama llama3_rope llama_sharded llama_tied mistral mistral_sw qwen2 qwen3 mixtral qwen3_moe
    qwen3_moe_raw olmo2 olmoe
""".split()


def mesh_of(data: int, model: int) -> jax.sharding.Mesh:
    return ft.make_mesh(data=data, model=model, devices=jax.devices()[: data * model])


def load(folder: Path, data: int = 2, model: int = 2, **options: Any) -> ft.nn.Transformer:
    return ft.load_weights(folder, LAYOUT, mesh_of(data, model), **options)


def logits(model: ft.nn.Transformer, tokens: Any = TOKENS) -> Any:
    with jax.default_matmul_precision("highest"):
        return ft.jit(lambda model, tokens: model(tokens))(model, tokens)


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder's files, by safetensors alone."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "np") as handle:
            found |= {name: handle.get_tensor(name) for name in handle.keys()}
    return found


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_reference_s(name: str) -> None:
    folder, expected = MODELS / name, np.load(MODELS / f"{name}.logits.npy")
    _, names = ft.nn.families[json.loads((folder / "config.json").read_text())["model_type"]]
    config = ft.nn.config_from_json(folder)
    like = ft.abstract(ft.nn.Transformer.create)(config, key=KEY)
    with jax.set_mesh(mesh_of(1, 1)):
        found = [logits(ft.load_weights(folder, ft.P()))]
        table = names(config, tensors(folder))
        found.append(logits(ft.load_tensors(folder, like, table, ft.P())))
    mesh = mesh_of(2, 2)
    with ft.axis_rules(LAYOUT):
        found.append(logits(load(MODELS / name), ft.shard(TOKENS, ft.P("data"), mesh)))
    for one in found:
        assert np.abs(one - expected).max() < 5e-6 * np.abs(expected).max()


def joined(name: str) -> dict[str, np.ndarray]:
    """The tensors of a fixture, in the spelling in which one tensor has all experts of a layer."""
    given = tensors(MODELS / name)
    theirs = ("w1", "w3", "w2") if name == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    module = "block_sparse_moe" if name == "mixtral" else "mlp"
    found = {key: one for key, one in given.items() if ".experts." not in key}
    for layer in range(3):
        first = f"model.layers.{layer}.{module}"
        gate, up, down = (
            np.stack([given[f"{first}.experts.{i}.{one}.weight"] for i in range(6)])
            for one in theirs
        )
        found[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], 1)
        found[f"model.layers.{layer}.mlp.experts.down_proj"] = down
        found[f"model.layers.{layer}.mlp.gate.weight"] = found.pop(f"{first}.gate.weight")
    return found


def renamed(name: str) -> dict[str, np.ndarray]:
    """The tensors of Mixtral's fixture by the names that the other family has."""
    found = {}
    for key, one in tensors(MODELS / name).items():
        key = key.replace("block_sparse_moe", "mlp")
        for old, new in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
            key = key.replace(f".{old}.", f".{new}.")
        found[key] = one
    return found


@pytest.mark.parametrize(
    ("name", "spelled"),
    [("mixtral", joined), ("qwen3_moe", joined), ("mixtral", renamed)],
)
def test_other_spellings_of_experts(name: str, spelled: Any, tmp_path: Path) -> None:
    layout = ft.AxisRules({"experts": "data", "hidden": "model", ...: None})
    expected = ft.load_weights(MODELS / name, layout, mesh_of(2, 2))
    shutil.copy(MODELS / name / "config.json", tmp_path)
    save_file(spelled(name), tmp_path / "model.safetensors")
    with blocks_read() as blocks:
        found = ft.load_weights(tmp_path, layout, mesh_of(2, 2))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.sharding == other.sharding and np.array_equal(one, other)
    # Each device has read its own parts; what all devices have is read once.
    kept = 0
    for leaf in jax.tree.leaves(found):
        shards = leaf.addressable_shards[: 1 if leaf.is_fully_replicated else None]
        kept += sum(shard.data.nbytes for shard in shards)
    assert sum(block.nbytes for block in blocks) == kept


def test_bfloat16_is_the_other_file_rounded() -> None:
    exact, rounded = load(MODELS / "llama_sharded"), load(MODELS / "llama_bf16")
    assert (
        rounded.config.param_dtype == jnp.bfloat16 and rounded.config.compute_dtype == jnp.float32
    )
    cast = load(MODELS / "llama_sharded", param_dtype=jnp.bfloat16)
    wide = load(MODELS / "llama_bf16", param_dtype=jnp.float32)
    for one, two, three, four in zip(
        *map(jax.tree.leaves, (exact, rounded, cast, wide)), strict=True
    ):
        assert one.dtype == four.dtype == jnp.float32 and two.dtype == three.dtype == jnp.bfloat16
        assert np.array_equal(np.asarray(one).astype(two.dtype), two) and np.array_equal(two, three)
        assert np.array_equal(np.asarray(two).astype(np.float32), four)
    tokens = ft.shard(TOKENS, ft.P("data"), mesh_of(2, 2))
    np.testing.assert_array_equal(logits(rounded, tokens), logits(wide, tokens))
    narrow = load(MODELS / "llama_bf16", compute_dtype=jnp.bfloat16)
    assert logits(narrow, tokens).dtype == jnp.bfloat16


@pytest.mark.parametrize(("data", "model"), [(1, 1), (4, 2)])
def test_only_the_blocks_of_a_device_are_read(data: int, model: int) -> None:
    with blocks_read() as blocks:
        leaves = jax.tree.leaves(load(MODELS / "llama", data, model))
    kept = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    assert sum(block.nbytes for block in blocks) == kept


SAVED = [("llama", 5 * 10**9), *((name, 30_000) for name in [*NAMES, "llama_bf16"])]


@pytest.mark.parametrize(("name", "most_bytes"), SAVED)
def test_saved_and_loaded_again(
    name: str, most_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "MOST_BYTES", most_bytes)
    model = load(MODELS / name)
    ft.save_weights(tmp_path / "new", model)
    again = load(tmp_path / "new", 4, 2)
    assert again.config == model.config
    files = list((tmp_path / "new").glob("*.safetensors"))
    assert (len(files) > 1) == (most_bytes == 30_000)
    for one, two in zip(jax.tree.leaves(model), jax.tree.leaves(again), strict=True):
        assert one.dtype == two.dtype and np.array_equal(one, two)
    written = json.loads((tmp_path / "new" / "config.json").read_text())
    # Where readers of either age look; the older ones take 10,000 for what is not there.
    assert (
        written["rope_theta"] == written["rope_parameters"]["rope_theta"] == model.config.rope_theta
    )
    assert (written["rope_scaling"] or {}).get("factor") == written["rope_parameters"].get("factor")
    expected, found = tensors(MODELS / name), tensors(tmp_path / "new")
    assert found.keys() == expected.keys()
    assert all(found[key].tobytes() == expected[key].tobytes() for key in expected)


def on_explicit_axes(model: ft.nn.Transformer) -> Any:
    """Its three layers are sharded."""
    mesh = jax.make_mesh((3, 2), ("data", "model"), devices=jax.devices()[:6])
    return ft.shard(model, ft.AxisRules({"layers": "data", "hidden": "model", ...: None}), mesh)


def in_host_memory(model: ft.nn.Transformer) -> Any:
    def moved(x: jax.Array) -> jax.Array:
        return jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))

    return jax.tree.map(moved, model)


def of_numpy(model: ft.nn.Transformer) -> Any:
    return jax.tree.map(np.asarray, model)


@pytest.mark.parametrize("place", [on_explicit_axes, in_host_memory, of_numpy])
def test_saved_from_anywhere(place: Any, tmp_path: Path) -> None:
    ft.save_weights(tmp_path, place(load(MODELS / "llama")))
    expected, found = tensors(MODELS / "llama"), tensors(tmp_path)
    assert found.keys() == expected.keys()
    assert all(found[key].tobytes() == expected[key].tobytes() for key in expected)


def test_without_values(tmp_path: Path) -> None:
    model = load(MODELS / "llama")
    with raises("the model cannot be saved to ", "embed.weight", "is abstract, and has no values"):
        ft.save_weights(tmp_path / "new", ft.abstract(lambda: model)())
    assert not (tmp_path / "new").exists()


# What is refused


@pytest.fixture
def copied(tmp_path: Path) -> Iterator[Path]:
    """A model whose files a test may change."""
    folder = tmp_path / "model"
    shutil.copytree(MODELS / "llama", folder)
    yield folder


def changed(folder: Path, **changes: Any) -> None:
    """Write the file of a model with other tensors; `None` leaves one out. `__` is a dot."""
    found = tensors(folder) | {name.replace("__", "."): value for name, value in changes.items()}
    save_file(
        {name: value for name, value in found.items() if value is not None},
        folder / "model.safetensors",
    )


GATE = "model.layers.1.mlp.gate_proj.weight"
SEVERAL = {GATE: None, "model.norm.weight": np.ones(3, "f"), "more": np.ones(1, "f")}


def test_what_is_refused(copied: Path) -> None:
    changed(copied, **SEVERAL)
    with pytest.raises(ft.FunctreeError) as caught:
        load(copied)
    told = f"""\
{copied} cannot be loaded: 3 problems

  blocks.layer.mlp.gate   f32[3, 32, 48]   "layers embed hidden"
      the files have no `model.layers.1.mlp.gate_proj.weight`

  norm.scale   f32[32]   "embed"
      the files have `model.norm.weight` as f32[3], which does not fit f32[32]

  more
      no array uses this tensor

Try: use files and a `config.json` from the same model"""
    assert str(caught.value) == told


def test_layers_of_several_dtypes(copied: Path) -> None:
    changed(copied, **{GATE: tensors(copied)[GATE].astype("float16")})
    why = f"the files have `{GATE}` as f16[48, 32], but the array's first tensor as f32"
    with raises("1 problem\n", why, "pass `param_dtype=` to load all tensors in one dtype"):
        load(copied)
    gate = load(copied, param_dtype=jnp.float32).blocks.layer.mlp.gate
    assert gate.dtype == jnp.float32
    expected = load(MODELS / "llama").blocks.layer.mlp.gate
    np.testing.assert_allclose(gate, expected, rtol=1e-3, atol=1e-5)


def test_frequencies_in_older_files(copied: Path) -> None:
    names = [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(3)]
    changed(copied, **dict.fromkeys(names, np.ones(4, np.float32)))
    np.testing.assert_array_equal(load(copied).norm.scale, load(MODELS / "llama").norm.scale)


def test_the_table_of_the_logits_beside_a_tied_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_ROWS", 7)
    shutil.copytree(MODELS / "llama_tied", tmp_path / "model")
    folder = tmp_path / "model"
    table = tensors(folder)["model.embed_tokens.weight"]
    changed(folder, **{"lm_head.weight": table})
    loaded = load(folder)
    assert loaded.unembed is None
    for leaf, expected in zip(
        jax.tree.leaves(loaded), jax.tree.leaves(load(MODELS / "llama_tied")), strict=True
    ):
        np.testing.assert_array_equal(leaf, expected)
    other = table.copy()
    other[-1, -1] += 1
    for wrong in (other, table[1:], table.T):
        changed(folder, **{"lm_head.weight": np.ascontiguousarray(wrong)})
        with raises(
            "lm_head.weight",
            "`config.json` ties it to model.embed_tokens.weight, which has different values",
            'set "tie_word_embeddings": false in `config.json`, or remove the tensor',
        ):
            load(folder)
    # The remedy.
    changed(folder, **{"lm_head.weight": other})
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    untied = load(folder).unembed
    assert untied is not None
    np.testing.assert_array_equal(untied.weight, other.T)


@pytest.mark.parametrize("text", ['{"weight_map": 1}', '{"weight_map": {"a": 1}}', "[]"])
def test_an_index_that_is_none(text: str, copied: Path) -> None:
    (copied / "model.safetensors.index.json").write_text(text)
    with raises('must have a "weight_map" that maps each weight to its file'):
        load(copied)


@pytest.mark.parametrize("wrong", ["int32", "fp32", 3])
def test_a_dtype_that_weights_cannot_have(wrong: Any) -> None:
    with raises(f"param_dtype={wrong!r}"):
        load(MODELS / "llama", param_dtype=wrong)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises("`safetensors` is not installed: run `pip install 'functree[weights]'`"):
        load(MODELS / "llama")


def test_float64_is_never_shortened_unasked(copied: Path) -> None:
    lacks = ["JAX does not support float64 without `jax_enable_x64`", "('jax_enable_x64', True)"]
    changed(copied, **{name: one.astype("float64") for name, one in tensors(copied).items()})
    with raises("embed.weight", "as f64[96, 32]: ", *lacks, "pass `param_dtype=`"):
        load(copied)
    with raises(*lacks):
        load(copied, param_dtype="float64")
    assert load(copied, param_dtype="float32").norm.scale.dtype == np.float32
    names: Any = {"x": "model.norm.weight"}
    like = {"x": jax.ShapeDtypeStruct((32,), "float64")}
    with raises(*lacks):
        ft.load_tensors(copied, like, names, ft.P(), mesh_of(2, 1), left_out=["*"])
    of_numpy = ft.load_tensors(copied, {"x": np.zeros(32)}, names, left_out=["*"])
    assert of_numpy["x"].dtype == np.float64


def test_what_is_not_saved(tmp_path: Path) -> None:
    model = load(MODELS / "llama")
    ft.save_weights(tmp_path, model)
    with raises(
        "already contains config.json, model.safetensors",
        "save to another folder",
    ):
        ft.save_weights(tmp_path, model)
    sizes: Any = dict(embed=8, layers=1, heads=2, kv_heads=2, head_dim=4, hidden=8)
    other_options = "use options that one of these families supports, or save the model"
    options: Any = {"window": 4, "qk_norm": True}
    config = ft.nn.TransformerConfig(16, **sizes, **options)
    said = (
        "qk_norm=True",
        "it is False in mistral models",
        other_options,
    )
    with raises("no published family computes the same function as this model", *said):
        ft.save_weights(tmp_path / "new", ft.nn.Transformer.create(config, key=KEY))
    assert not (tmp_path / "new").exists()


class _Relu(ft.nn.MLP):
    def __call__(self, x: Any) -> Any:
        return jax.nn.relu(x @ self.gate) @ self.down


class _Frequencies(ft.nn.Llama3Rope):
    def __call__(self, frequencies: Any) -> Any:
        return frequencies / 2


def _another(layer: Any, cls: type, **fields: Any) -> Any:
    """A layer with other fields, unchecked, of a class that may be another."""
    found = object.__new__(cls)
    for field in dataclasses.fields(layer):
        value = fields.get(field.name, getattr(layer, field.name))
        object.__setattr__(found, field.name, value)
    return found


def _mine(query: Any, key: Any, value: Any, is_causal: bool) -> Any:
    return jax.nn.dot_product_attention(query, key, value, is_causal=is_causal)


# Where surgery has put something ─► what it has put there, of what was there; and what is said.
UNPUBLISHED: dict[str, tuple[str, Any, str]] = {
    "an int8 norm": (
        "norm.scale",
        lambda x: x.astype("int8"),
        "the dtype must be one of float64, float32",
    ),
    "another shape": (
        "norm.scale",
        lambda x: x[:1],
        "a published model with this config has an array of shape (32,) at this path",
    ),
    "no array": (
        "norm.scale",
        lambda x: 1.0,
        "a published model with this config has an array of shape (32,) at this path",
    ),
    "a subclass": (
        "blocks.layer.mlp",
        lambda x: _another(x, _Relu),
        "a published model with this config has functree's MLP at this path",
    ),
    "a bias": (
        "blocks.layer.attn.query_bias",
        lambda x: jnp.zeros((3, 4, 8)),
        "a published model with this config has None at this path",
    ),
    "another eps": (
        "blocks.layer.attn_norm.eps",
        lambda x: 0.5,
        "a published model with this config has 1e-06 at this path",
    ),
    "an attention function": (
        "blocks.layer.attn.attention",
        lambda x: _mine,
        "no published family uses this attention function",
    ),
    "other frequencies": (
        "blocks.layer.attn.rope_scaling",
        lambda x: _Frequencies(8, 1, 4, 16),
        "a published model with this config has None at this path",
    ),
}


# What is said to do about some of these.
REMEDIES = {
    "an int8 norm": 'jax.tree.map(lambda x: x.astype("float32"), model)',
    "no array": "use `ft.select` to replace this part",
    "an attention function": 'attention="auto"',
}


@pytest.mark.parametrize("case", UNPUBLISHED)
def test_what_no_family_computes(case: str, tmp_path: Path) -> None:
    path, replace, why = UNPUBLISHED[case]
    parent, _, name = path.rpartition(".")
    model = load(MODELS / "llama")
    layer = functools.reduce(getattr, parent.split("."), model) if parent else model
    changed = _another(layer, type(layer), **{name: replace(getattr(layer, name))})
    if parent:
        changed = eqx.tree_at(
            lambda model: functools.reduce(getattr, parent.split("."), model), model, changed
        )
    with raises("no published family computes the same function as this model") as error:
        ft.save_weights(tmp_path / "new", changed)
    assert not (tmp_path / "new").exists()
    [problem] = error.value.problems
    assert str(problem.path) == path and problem.why.startswith(why), problem
    assert REMEDIES.get(case, "") in str(error.value)


def test_surgery_that_another_family_computes(tmp_path: Path) -> None:
    """The config is read from the layers, so what surgery has put there is saved as it is."""
    model = load(MODELS / "llama")
    attn = _another(model.blocks.layer.attn, ft.nn.Attention, rope_theta=7.0, window=3)
    model = eqx.tree_at(lambda model: model.blocks.layer.attn, model, attn)
    ft.save_weights(tmp_path, model)
    again = load(tmp_path)
    assert again.config == model.config
    assert (again.config.rope_theta, again.config.window) == (7.0, 3)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "mistral"


def test_what_says_nothing_of_what_is_computed(tmp_path: Path) -> None:
    """Names of axes, dtypes of activations, and kernels by their name."""
    config = dataclasses.replace(
        load(MODELS / "llama").config, attention="xla", remat="full", compute_dtype=jnp.bfloat16
    )
    model = ft.nn.Transformer.create(config, key=KEY)
    model = eqx.tree_at(lambda m: m.norm, model, ft.nn.RMSNorm(32, 1e-6, axes="width"))
    model = eqx.tree_at(lambda m: m.blocks, model, ft.Stacked(model.blocks.layer, axis="depth"))
    ft.save_weights(tmp_path, model)
    np.testing.assert_array_equal(load(tmp_path).embed.weight, model.embed.weight)


def test_a_config_is_refused_before_a_weight_is_read(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"clip_qkv": 8.0}))
    for weights in copied.glob("*.safetensors"):
        weights.unlink()
    with raises('"clip_qkv": 8.0'):
        load(copied)


def test_layouts_that_do_not_fit() -> None:
    with raises(
        '"kv_heads" has size 2; rule kv_heads→model needs a multiple of model=4',
        error=ft.ShardingError,
    ):
        load(MODELS / "llama", 1, 4)
    with raises("mesh", error=ft.ShardingError):
        ft.load_weights(MODELS / "llama", LAYOUT)
