"""Tables of other libraries (docs/layout-tables.md): each layout, beside an oracle of the library's
own rule; and the errors and plans of functree where the library is silent.

The oracles are written from the libraries' sources, and know nothing of functree. A path is a text
with `/`, an array is a shape or the names of its dimensions, and a spec is a sequence with the mesh
axes of each dimension, which may be too short.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

import functree as ft
from tests.lib.checks import raises, refused
from tests.lib.meshes import SIZES

Shape = tuple[int, ...]
Pairs = Iterable[tuple[str, Any]]

# Oracles


# Tables, from the configurations of these libraries

LINEN = [("batch", "data"), ("mlp", "model"), ("heads", "model"), ("embed", "data")]

# By the dimensions along which activations and parameters are sharded.
T5X_EMBED: dict[tuple[int, int], list[tuple[str, str | None]]] = {
    (1, 1): [("embed", None)],
    (2, 1): [("embed", "model")],
    (1, 2): [("embed", "data")],
    (2, 2): [("embed", "model"), ("embed", "data")],
}
T5X_NONE = ["relpos_buckets", "abspos_buckets", "length", "layers", "stack", "mlp_activations"]


def t5x_rules(activations: int, parameters: int) -> list[tuple[str, str | None]]:
    """The pairs of `standard_logical_axis_rules` of T5X, which has `("embed", None)` further up."""
    rules: list[Any] = [("batch", "data"), ("vocab", "model"), ("mlp", "model"), ("heads", "model")]
    rules += [("kv", None), ("joined_kv", "model"), *T5X_EMBED[activations, parameters]]
    return [*rules, *((name, None) for name in T5X_NONE)]


TENSOR = ["tensor", "tensor_sequence", "autoregressive"]
CONTEXT = ["context", "context_usp_ulysses"]
MAXTEXT: list[tuple[str, Any]] = [
    ("vocab", TENSOR),
    ("embed_vocab", ["fsdp", "fsdp_transpose", *CONTEXT, "expert"]),
    ("heads", TENSOR),
    ("q_heads", TENSOR),
    ("kv_heads", TENSOR),
    ("kv", []),
    ("kv_head_dim", []),
    ("exp", "expert"),
    ("mlp_moe", ["fsdp_transpose", *TENSOR]),
    ("embed_moe", ["fsdp", "fsdp_transpose", *CONTEXT]),
    ("embed_moe", ["fsdp", *CONTEXT]),
    ("activation_mlp", ["tensor", "tensor_sequence"]),
    ("activation_batch", ["data", "fsdp", "fsdp_transpose", "expert"]),
    ("activation_length", CONTEXT),
    ("activation_embed", ["tensor"]),
    ("mlp", ["fsdp_transpose", *TENSOR]),
    ("embed", ["fsdp", "fsdp_transpose", *CONTEXT, "expert"]),
    ("embed", ["fsdp", *CONTEXT, "expert"]),
    ("norm", ["tensor"]),
    ("layers", "stage"),
]
MAXTEXT_MESH = dict.fromkeys(["data", "stage", "fsdp_transpose", *TENSOR, *CONTEXT], 1)
MAXTEXT_MESH |= {"fsdp": 2, "tensor": 2, "expert": 2}

EASYLM = [
    ("transformer/wte/embedding", P("mp", "fsdp")),
    ("attention/(wq|wk|wv)/kernel", P("fsdp", "mp")),
    ("attention/wo/kernel", P("mp", "fsdp")),
    ("feed_forward/w1/kernel", P("fsdp", "mp")),
    ("feed_forward/w2/kernel", P("mp", "fsdp")),
    ("feed_forward/w3/kernel", P("fsdp", "mp")),
    ("attention_norm/kernel", P(None)),
    ("ffn_norm/kernel", P(None)),
    ("transformer/ln_f/kernel", P(None)),
    ("lm_head/kernel", P("fsdp", "mp")),
    (".*", P(None)),
]

BIG_VISION = [(".*FREEZE_ME.*", "replicate"), (".*", 'fsdp(axis="fsdp")')]

KERAS = {
    ".*dense.*kernel": (None, "model"),
    ".*dense.*bias": ("model",),
    ".*conv2d.*kernel": (None, None, None, "model"),
    ".*conv2d.*bias": ("model",),
    "head/kernel": ("model", None),
}
# As a user of Keras before 3.14 wrote it.
OLD_KERAS = {key.removeprefix(".*"): axes for key, axes in KERAS.items()}

TP_PLAN = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}

# The layouts of the page


def easylm_layout(rules: Sequence[tuple[str, P]]) -> ft.StateSharding:
    found = [(ft.regex(pattern, "/"), spec) for pattern, spec in rules]
    return ft.StateSharding([(~ft.larger_than(1), P()), *found[:-1], (..., P())])


BIG_VISION_LAYOUT = ft.StateSharding(
    {
        ft.regex("^(?:.*FREEZE_ME.*)$", "/"): P(),
        ...: ft.FSDP("fsdp", min_size=2**20 + 1, otherwise=P()),
    }
)


def keras_layout(layout_map: Mapping[str, Any], form: str = "^(?:{})$") -> ft.StateSharding:
    found = [(ft.regex(form.format(key), "/"), P(*axes)) for key, axes in layout_map.items()]
    return ft.StateSharding([*found, (..., P())])


def tp_layout(tp_plan: Mapping[str, str]) -> ft.StateSharding:
    filters: dict[Any, P] = {}
    for module, style in tp_plan.items():
        column = style.startswith("colwise")
        filters[f"{module}.weight"] = P("model", None) if column else P(None, "model")
        if module.startswith("layers"):  # the head has none
            filters[f"{module}.bias"] = P("model") if column else P()
    return ft.StateSharding({**filters, ...: P()})


# Trees


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def nested(arrays: Mapping[str, Shape]) -> Any:
    """`{"layers/0/bias": (4,)}` as `{"layers": [{"bias": f32(4)}]}`."""
    tree: dict[str, Any] = {}
    for path, shape in arrays.items():
        *above, last = path.split("/")
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node[last] = f32(*shape)
    return with_lists(tree)


def with_lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    children = {key: with_lists(child) for key, child in node.items()}
    return list(children.values()) if all(map(str.isdigit, children)) else children


def named(**arrays: str) -> Any:
    """A module with one field of size 8 in each dimension for each of `query="embed heads"`."""
    body = {
        "__annotations__": {field: Float[Array, axes] for field, axes in arrays.items()},
        "__module__": __name__,
    }
    return type("Named", (eqx.Module,), body)(
        *[f32(*[8] * len(a.split())) for a in arrays.values()]
    )


T5_ARRAYS = {
    "embedding": "vocab embed",
    "logits": "embed vocab",
    "relative_bias": "heads relpos_buckets",
    "positions": "abspos_buckets embed",
    "query": "embed joined_kv",
    "out": "joined_kv embed",
    "query_split": "embed heads kv",
    "out_split": "heads kv embed",
    "wi": "embed mlp",
    "wi_fused": "embed mlp_activations mlp",
    "wo": "mlp embed",
    "wi_scanned": "embed layers mlp",
    "wo_stacked": "stack mlp embed",
    "norm": "embed",
    "norm_scanned": "embed layers",
    "ids": "batch length",
    "hidden": "batch length embed",
    "heads": "batch length heads kv",
    "ffn": "batch length mlp",
    "scores": "batch length vocab",
}
MAXTEXT_ARRAYS = {
    "embedding": "vocab embed_vocab",
    "query": "embed q_heads kv",
    "key": "embed kv_heads kv_head_dim",
    "value": "embed kv_heads kv_head_dim",
    "qkv": "embed heads kv",
    "out": "heads kv embed",
    "wi": "embed mlp",
    "wo": "mlp embed",
    "wi_fused": "embed num_activations mlp",
    "wi_scanned": "embed layers mlp",
    "norm": "norm",
    "norm_scanned": "norm layers",
    "experts_in": "exp embed_moe mlp_moe",
    "experts_out": "exp mlp_moe embed_moe",
    "gate": "embed_moe exp",
    "x": "activation_batch activation_length activation_embed",
    "h": "activation_batch activation_length activation_mlp",
    "mixed": "activation_embed activation_mlp",
}
EASYLM_ARRAYS: dict[str, Shape] = {
    "step": (),
    "scale": (1,),
    "gates": (1, 1),
    "params/transformer/wte/embedding": (64, 16),
    "params/transformer/wpe/embedding": (64, 16),
    "params/transformer/ln_f/kernel": (16,),
    "params/lm_head/kernel": (16, 64),
    "params/lm_head_norm/kernel": (16,),
    **{f"params/transformer/h/{i}/attention/w{x}/kernel": (16, 16) for i in (0, 1) for x in "qko"},
    **{
        f"params/transformer/h/{i}/feed_forward/w{n}/kernel": (16, 16)
        for i in (0, 1)
        for n in "123"
    },
    "params/transformer/h/0/attention_norm/kernel": (16,),
    "params/transformer/h/1/ffn_norm/kernel": (16,),
}
BIG_VISION_ARRAYS: dict[str, Shape] = {
    "FREEZE_ME/kernel": (2048, 4096),
    "img/FREEZE_ME/kernel": (2048, 4096),
    "img/FREEZE_ME_NOT": (2048, 4096),
    "img/FREEZE/ME": (2048, 4096),
    "img/embedding/kernel": (14, 14, 3, 4096),
    "img/embedding/bias": (4096,),
    "img/pos_embedding": (1, 256, 4096),
    "img/head/kernel": (4096, 2049),
    "llm/embedder": (65536, 2048),
    "llm/mlp/gating_einsum": (2, 2048, 4096),
    "llm/mlp/linear": (4096, 2048),
    "llm/mlp/small": (1024, 1024),
    "llm/mlp/just_larger": (1024, 1028),
    "llm/mlp/largest_is_odd": (2048, 4099),
    "llm/mlp/all_odd": (2049, 1001),
    "llm/attn/w": (8, 2048, 256),
    "llm/final_norm": (2048,),
    "t": (),
}
KERAS_ARRAYS: dict[str, Shape] = {
    **{
        f"dense{n}/{w}": s
        for n in ("", "_1", "_2")
        for w, s in [("kernel", (8, 16)), ("bias", (16,))]
    },
    "block/conv2d_1/kernel": (3, 3, 4, 8),
    "block/conv2d_1/bias": (8,),
    "block/conv3d/kernel": (3, 3, 3, 4, 8),
    "block/dense_3/kernel": (8, 16),
    "block/dense_3/kernel_scale": (8, 16),
    "block/norm/gamma": (16,),
    "block/norm/moving_mean": (16,),
    "embedding/embeddings": (64, 16),
    "head/kernel": (16, 64),
    "my_head/kernel": (16, 64),
    "head/bias": (64,),
}
TP_ARRAYS: dict[str, Shape] = {
    "embed_tokens/weight": (64, 16),
    "lm_head/weight": (64, 16),
    **{
        f"layers/{i}/{module}/{parameter}": shape
        for i in (0, 1)
        for module in (
            "self_attn/q_proj",
            "self_attn/k_proj",
            "self_attn/v_proj",
            "self_attn/o_proj",
        )
        for parameter, shape in [("weight", (32, 16)), ("bias", (32,))]
    },
    **{f"layers/0/mlp/{name}_proj/weight": (16, 32) for name in ("gate", "up", "down")},
    **{f"layers/0/mlp/{name}_proj/bias": (16,) for name in ("gate", "up", "down")},
    "layers/0/input_layernorm/weight": (16,),
}

# The layouts mean the same


class Source(NamedTuple):
    """A tree, its layout on a mesh, and the spec that the library has for each array."""

    tree: Any
    layout: ft.AxisRules | ft.StateSharding
    mesh: Mapping[str, int]
    expected: Mapping[str, Sequence[Any]]


def by_names(
    arrays: Mapping[str, str], table: Pairs, layout: Any, mesh: Mapping[str, int]
) -> Source:
    expected = {path: linen(axes.split(), table) for path, axes in arrays.items()}
    return Source(named(**arrays), layout, mesh, expected)


def by_paths(
    arrays: Mapping[str, Shape],
    oracle: Callable[[str, Shape], Sequence[Any]],
    layout: Any,
    **mesh: int,
) -> Source:
    expected = {path: oracle(path, shape) for path, shape in arrays.items()}
    return Source(nested(arrays), layout, mesh, expected)


def t5x(activations: int, parameters: int) -> Source:
    rules = t5x_rules(activations, parameters)
    last = [("embed", None)] if ("embed", None) not in rules else []
    return by_names(T5_ARRAYS, rules, ft.AxisRules([*rules, *last]), SIZES)


def maxtext_rules(*more: tuple[str, None]) -> ft.AxisRules:
    return ft.AxisRules([*((name, axes or None) for name, axes in MAXTEXT), *more])


# Blocked in `mixed`, and without a rule in `wi_fused`.
MAXTEXT_MORE = [("activation_embed", None), ("num_activations", None)]

SOURCES = {
    "Linen": by_names(T5_ARRAYS, LINEN, ft.AxisRules([*LINEN, (..., None)]), SIZES),
    "T5X 1 1": t5x(1, 1),
    "T5X 2 1": t5x(2, 1),
    "T5X 1 2": t5x(1, 2),
    "T5X 2 2": t5x(2, 2),
    "MaxText": by_names(MAXTEXT_ARRAYS, MAXTEXT, maxtext_rules(*MAXTEXT_MORE), MAXTEXT_MESH),
    "EasyLM": by_paths(
        EASYLM_ARRAYS, lambda *a: easylm(*a, EASYLM), easylm_layout(EASYLM), fsdp=2, mp=4
    ),
    "big_vision": by_paths(
        BIG_VISION_ARRAYS, lambda *a: big_vision(*a, BIG_VISION, 4), BIG_VISION_LAYOUT, fsdp=4
    ),
    "Keras": by_paths(
        KERAS_ARRAYS, lambda path, _: keras(path, KERAS), keras_layout(KERAS), batch=2, model=4
    ),
    "Keras before 3.14": by_paths(
        KERAS_ARRAYS,
        lambda path, _: keras(path, OLD_KERAS, re.search),
        keras_layout(OLD_KERAS, "{}"),
        batch=2,
        model=4,
    ),
    "Transformers": by_paths(
        TP_ARRAYS, lambda *a: transformers(*a, TP_PLAN), tp_layout(TP_PLAN), model=4
    ),
}


def cuts(spec: Sequence[Any], shape: Shape, mesh: Mapping[str, int]) -> list[tuple[str, ...]]:
    """For each dimension the mesh axes that cut it. One of size 1 cuts nothing."""
    padded = [*spec, *[None] * (len(shape) - len(spec))]
    entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in padded]
    return [tuple(axis for axis in entry if mesh[axis] > 1) for entry in entries]


@pytest.mark.parametrize("name", SOURCES)
def test_each_array_has_the_spec_of_the_library(name: str) -> None:
    tree, layout, mesh, expected = SOURCES[name]
    plan = ft.plan(tree, layout, mesh)
    rows = {"/".join(map(str, row.path)): row for row in plan}
    assert rows.keys() == expected.keys() and 15 <= len(rows) <= 25
    for path, row in rows.items():
        assert cuts(row.spec, row.shape, mesh) == cuts(expected[path], row.shape, mesh), path
    # The table says something: some dimensions are sharded, and some are not.
    dimensions = [entry for row in rows.values() for entry in cuts(row.spec, row.shape, mesh)]
    assert set(map(bool, dimensions)) == {True, False}


# Where the libraries are silent


def specs(tree: Any, layout: Any, mesh: Mapping[str, int] = SIZES) -> list[P]:
    return [row.spec for row in ft.plan(tree, layout, mesh)]


def test_linen_a_name_without_a_rule() -> None:
    assert linen(("embed", "heads", "kv"), LINEN) == [("data",), ("model",), None]
    tree = named(query="embed heads kv")
    assert "no rule names `kv`" in refused(tree, ft.AxisRules(LINEN))
    for allowed in (("kv", None), (..., None)):
        assert specs(tree, ft.AxisRules([*LINEN, allowed])) == [P("data", "model", None)]


def test_linen_a_mesh_axis_that_another_dimension_uses() -> None:
    assert linen(("batch", "embed"), LINEN) == [("data",), None]
    tree = named(x="batch embed")
    assert '"embed" has no rule left: `data` is used by "batch"' in refused(
        tree, ft.AxisRules(LINEN)
    )
    assert specs(tree, ft.AxisRules([*LINEN, ("embed", None)])) == [P("data", None)]


@pytest.mark.parametrize(
    ("activations", "parameters", "axes"),
    [(2, 1, "embed mlp"), (1, 2, "batch embed"), (2, 2, "batch mlp embed")],
)
def test_t5x_its_own_tables_leave_embed_whole(activations: int, parameters: int, axes: str) -> None:
    rules, tree = t5x_rules(activations, parameters), named(w=axes)
    assert linen(axes.split(), rules)[axes.split().index("embed")] is None
    assert '"embed" has no rule left' in refused(tree, ft.AxisRules(rules))


def test_t5x_an_additional_rule_that_never_applies() -> None:
    rules = [*t5x_rules(1, 1), ("embed", "data")]
    assert linen(("embed", "mlp"), rules) == [(), ("model",)]
    with raises("rule embed→data can never apply", error=ft.RuleError):
        ft.AxisRules(rules)


def test_maxtext_a_name_that_its_table_lacks() -> None:
    assert linen(("num_activations",), MAXTEXT) == [None]
    tree = named(wi="embed num_activations mlp")
    assert "no rule names `num_activations`" in refused(tree, maxtext_rules(), MAXTEXT_MESH)


def test_maxtext_an_empty_list() -> None:
    assert linen(("kv",), [("kv", [])]) == [()]
    with raises("rule kv→[]", "write `None` for unsharded", error=ft.RuleError):
        ft.AxisRules([("kv", [])])


def test_maxtext_a_mesh_axis_that_the_mesh_lacks() -> None:
    mesh = {"fsdp": 2, "tensor": 2}
    assert "has no axis `autoregressive`" in refused(named(w="embed mlp"), maxtext_rules(), mesh)


def test_easylm_a_misspelled_pattern() -> None:
    misspelled = [("atention/wq", P("mp", None)), (".*", P(None))]
    assert easylm("attention/wq", (8, 8), misspelled) == P(None)
    tree = nested({"attention/wq": (8, 8), "step": ()})
    text = refused(tree, easylm_layout(misspelled), {"mp": 4})
    assert "filter regex('atention/wq', separator='/')\n      matches no leaf" in text


def test_easylm_arrays_of_one_element() -> None:
    """A scalar is whole in both, and the plan says why. A spec for other such arrays is refused."""
    rules = [("w", P("mp", None)), (".*", P(None))]
    arrays: dict[str, Shape] = {"w": (8, 8), "wide": (1, 1), "w_step": ()}
    assert [easylm(path, shape, rules) for path, shape in arrays.items()] == [P("mp", None), (), ()]
    tree, layout = nested(arrays), ft.StateSharding({ft.regex("w", "/"): P("mp", None)})
    assert "1 leaf" in (text := refused(tree, layout, {"mp": 4}))
    assert "wide   f32[1, 1]\n      dimension 0 has size 1" in text
    plan = ft.plan(tree, easylm_layout(rules), {"mp": 4})
    assert [row.spec for row in plan] == [P("mp", None), P(), P(None, None)]
    assert ft.plan(nested({"w_step": ()}), layout, {"mp": 4})["w_step"].reason.endswith("a scalar")


def test_easylm_a_path_that_no_rule_matches_is_an_error_in_both() -> None:
    rules = [("wq", P("mp"))]
    with pytest.raises(ValueError, match="not found for param: wk"):
        easylm("wk", (8,), rules)
    layout = ft.StateSharding({ft.regex("wq", "/"): P("mp")})
    assert "no filter matches it" in refused(nested({"wq": (8,), "wk": (8,)}), layout, {"mp": 4})


def test_big_vision_sizes_that_the_axis_does_not_divide() -> None:
    assert big_vision("odd", (2049, 1001), BIG_VISION, 4) == ()
    tree, layout = nested({"odd": (2049, 1001)}), ft.FSDP("fsdp", min_size=2**20 + 1)
    assert "none of its unsharded dimensions" in refused(tree, layout, {"fsdp": 4})


def test_big_vision_a_path_that_no_pattern_matches() -> None:
    assert big_vision("head", (2048, 4096), [("img/.*", 'fsdp(axis="fsdp")')], 4) == ()
    tree = nested({"img/kernel": (2048, 4096), "head": (2048, 4096)})
    layout = ft.StateSharding({ft.regex("^(?:img/.*)$", "/"): ft.FSDP("fsdp")})
    assert "no filter matches it" in refused(tree, layout, {"fsdp": 4})


def test_big_vision_small_arrays_are_listed() -> None:
    assert big_vision("kernel", (1024, 1024), BIG_VISION, 4) == ()
    plan = ft.plan(
        nested({"kernel": (1024, 1024)}), ft.FSDP("fsdp", min_size=2**20 + 1), {"fsdp": 4}
    )
    assert "smaller than 1048577 elements" in plan["kernel"].reason
    assert "replicated over fsdp: 1 array, 4 MiB per device" in str(plan)


def test_big_vision_two_dimensions_of_one_size_differ() -> None:
    assert big_vision("square", (2048, 2048), BIG_VISION, 4) == (None, "fsdp")
    assert specs(nested({"square": (2048, 2048)}), ft.FSDP("fsdp"), {"fsdp": 4}) == [
        P("fsdp", None)
    ]


def test_keras_a_variable_that_no_key_matches() -> None:
    layout_map = {".*dense.*": (None, "model")}
    assert keras("embedding/embeddings", layout_map) == ()
    tree = nested({"dense/kernel": (8, 16), "embedding/embeddings": (64, 16)})
    layout = ft.StateSharding({ft.regex("^(?:.*dense.*)$", "/"): P(None, "model")})
    assert "embedding.embeddings   f32[64, 16]\n      no filter matches it" in refused(tree, layout)


def test_keras_a_key_that_matches_no_variable() -> None:
    """As one written for `re.search` does since Keras 3.14."""
    assert keras("block/dense/kernel", {"dense.*kernel": ("model",)}) == ()
    text = refused(
        nested({"block/dense/kernel": (8, 16)}), keras_layout({"dense.*kernel": ("model",)})
    )
    assert "filter regex('^(?:dense.*kernel)$', separator='/')\n      matches no leaf" in text


def test_keras_refuses_two_keys_for_one_path_and_here_the_first_decides() -> None:
    layout_map = {".*kernel": (None, "model"), ".*dense.*": ("model", None)}
    with pytest.raises(ValueError, match="matches multiple layout"):
        keras("dense/kernel", layout_map)
    tree = nested({"dense/kernel": (8, 16), "dense/scale": (8, 16)})
    assert specs(tree, keras_layout(layout_map)) == [P(None, "model"), P("model", None)]


def test_transformers_a_module_that_the_plan_does_not_name() -> None:
    """Transformers logs a warning."""
    assert transformers("embed_tokens/weight", (64, 16), TP_PLAN) == ()
    tree, mesh = nested({"embed_tokens/weight": (64, 16), "lm_head/weight": (64, 16)}), {"model": 4}
    plan = ft.plan(tree, tp_layout({"lm_head": "colwise"}), mesh)
    assert [row.copies for row in plan] == [4, 1]
    assert "replicated over model: 1 array, 4 KiB per device" in str(plan)
    layout = ft.StateSharding({"lm_head.weight": P("model")})
    assert "embed_tokens.weight   f32[64, 16]\n      no filter matches it" in refused(
        tree, layout, mesh
    )


def test_transformers_a_module_that_the_tree_lacks() -> None:
    """Transformers logs a warning."""
    tree, layout = nested({"lm_head/weight": (64, 16)}), tp_layout({"head": "colwise"})
    assert "filter 'head.weight'\n      matches no leaf" in refused(tree, layout, {"model": 4})


def test_transformers_sizes_that_the_devices_do_not_divide() -> None:
    """PyTorch cuts such an array into parts of different sizes."""
    tree, layout = nested({"lm_head/weight": (63, 16)}), tp_layout({"lm_head": "colwise"})
    assert "dimension 0 has size 63" in refused(tree, layout, {"model": 4})
