"""Tables of other libraries (docs/layout-tables.md): each layout, beside an oracle of the library's
own rule; and the errors and plans of functree where the library is silent. Linen's rule, which T5X
and MaxText have too, is the oracle of `test_rules.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import functree as ft
from tests.layout.oracles import Shape, big_vision, easylm, keras
from tests.lib.checks import raises

# Tables, from the configurations of these libraries


EASYLM = [
    ("transformer/wte/embedding", P("mp", "fsdp")),
    ("attention/(wq|wk|wv)/kernel", P("fsdp", "mp")),
    ("attention/wo/kernel", P("mp", "fsdp")),
    ("feed_forward/w1/kernel", P("fsdp", "mp")),
    ("feed_forward/w2/kernel", P("mp", "fsdp")),
    ("feed_forward/w3/kernel", P("fsdp", "mp")),
    ("attention_norm/kernel", P(None)),
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


def keras_layout(layout_map: Mapping[str, Any]) -> ft.StateSharding:
    found = [(ft.regex(f"^(?:{key})$", "/"), P(*axes)) for key, axes in layout_map.items()]
    return ft.StateSharding([*found, (..., P())])


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


EASYLM_ARRAYS: dict[str, Shape] = {
    "step": (),
    "gates": (1, 1),
    "params/transformer/wte/embedding": (64, 16),
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
}
BIG_VISION_ARRAYS: dict[str, Shape] = {
    "FREEZE_ME/kernel": (2048, 4096),
    "img/FREEZE_ME/kernel": (2048, 4096),
    "img/embedding/kernel": (14, 14, 3, 4096),
    "img/head/kernel": (4096, 2049),
    "llm/mlp/gating_einsum": (2, 2048, 4096),
    "llm/mlp/small": (1024, 1024),
    "llm/mlp/largest_is_odd": (2048, 4099),
    "llm/mlp/all_odd": (2049, 1001),
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
    "head/kernel": (16, 64),
    "my_head/kernel": (16, 64),
    "head/bias": (64,),
}

# The layouts mean the same


class Source(NamedTuple):
    """A tree, its layout on a mesh, and the spec that the library has for each array."""

    tree: Any
    layout: ft.AxisRules | ft.StateSharding
    mesh: Mapping[str, int]
    expected: Mapping[str, Sequence[Any]]


def by_paths(
    arrays: Mapping[str, Shape],
    oracle: Callable[[str, Shape], Sequence[Any]],
    layout: Any,
    **mesh: int,
) -> Source:
    expected = {path: oracle(path, shape) for path, shape in arrays.items()}
    return Source(nested(arrays), layout, mesh, expected)


SOURCES = {
    "EasyLM": by_paths(
        EASYLM_ARRAYS, lambda *a: easylm(*a, EASYLM), easylm_layout(EASYLM), fsdp=2, mp=4
    ),
    "big_vision": by_paths(
        BIG_VISION_ARRAYS, lambda *a: big_vision(*a, BIG_VISION, 4), BIG_VISION_LAYOUT, fsdp=4
    ),
    "Keras": by_paths(
        KERAS_ARRAYS, lambda path, _: keras(path, KERAS), keras_layout(KERAS), batch=2, model=4
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
    assert rows.keys() == expected.keys()
    for path, row in rows.items():
        assert cuts(row.spec, row.shape, mesh) == cuts(expected[path], row.shape, mesh), path
    # The table says something: some dimensions are sharded, and some are not.
    dimensions = [entry for row in rows.values() for entry in cuts(row.spec, row.shape, mesh)]
    assert set(map(bool, dimensions)) == {True, False}


# Where the libraries are silent


def by_regex(**specs: P) -> ft.StateSharding:
    return ft.StateSharding({ft.regex(pattern, "/"): spec for pattern, spec in specs.items()})


MISSPELLED = [("atention/wq", P("mp", None)), (".*", P(None))]

# What the library does, as the oracle has it; and a tree, a layout of its table and a mesh, for which functree raises.
SILENT: dict[str, tuple[Any, Any, Any, Callable[[], Any], Mapping[str, int], str]] = {
    "EasyLM: a misspelled pattern": (
        easylm("attention/wq", (8, 8), MISSPELLED), P(None),
        nested({"attention/wq": (8, 8), "step": ()}), lambda: easylm_layout(MISSPELLED), {"mp": 4},
        "filter regex('atention/wq', separator='/')\n      matches no leaf",
    ),
    "EasyLM: an array of one element": (
        easylm("wide", (1, 1), [("w", P("mp", None))]), (),
        nested({"wide": (1, 1)}), lambda: by_regex(w=P("mp", None)), {"mp": 4}, "dimension 0 has size 1",
    ),
    "big_vision: sizes that the axis does not divide": (
        big_vision("odd", (2049, 1001), BIG_VISION, 4), (),
        nested({"odd": (2049, 1001)}), lambda: ft.FSDP("fsdp", min_size=2**20 + 1), {"fsdp": 4},
        "none of the dimensions it may shard",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SILENT)
def test_where_the_library_is_silent(case: str) -> None:
    found, expected, tree, layout, mesh, told = SILENT[case]
    assert found == expected
    with raises(told):
        ft.plan(tree, layout(), mesh)


def test_two_dimensions_of_one_size_differ() -> None:
    assert big_vision("square", (2048, 2048), BIG_VISION, 4) == (None, "fsdp")
    square = ft.plan(nested({"square": (2048, 2048)}), ft.FSDP("fsdp"), {"fsdp": 4})
    assert square["square"].spec == P("fsdp", None)
