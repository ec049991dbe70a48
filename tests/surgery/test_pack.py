"""`pack` and `unpack`: the laws of the way there and back, and what a call costs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.tree_util import default_registry, keystr, tree_flatten_with_path, tree_structure
from jaxtyping import Array, Float

import functree as ft
from functree.labels.leaves import read
from functree.surgery.pack import Packed, pack, unpack
from tests.lib.checks import python_calls, raises
from tests.lib.trees import containers, same


class Layer(eqx.Module):
    weight: Float[Array, "embed hidden"]
    bias: Float[Array, "hidden"] | None
    act: Any
    name: str = eqx.field(static=True, default="layer")


SIZES = {"data": 2, "model": 2}
LAYER = Layer(jnp.arange(6.0).reshape(2, 3), None, jax.nn.relu)

LEAVES = st.one_of(
    st.sampled_from([np.arange(3), np.float32(2), np.ones((0, 2), bool), jnp.ones((2, 1))]),
    st.just(jax.ShapeDtypeStruct((2, 3), jnp.float32)),
    st.integers(0, 9).map(jax.random.key),
    st.sampled_from([None, True, 1, 0.5, "text", jax.nn.relu]),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: containers(inner) | st.builds(Layer, inner, inner, inner, st.sampled_from("ab")),
    max_leaves=12,
)


# Laws


@given(TREES)
def test_unpacking_undoes_packing(tree: Any):
    """And packing again gives an equal static, which is that of `split`."""
    one, other = pack(tree), pack(jax.tree.map(lambda x: x, tree))
    assert same(unpack(one), tree) and pack(one) is one
    assert one.static == other.static and hash(one.static) == hash(other.static)
    assert tree_structure(one) == tree_structure(other)
    static, part = ft.split(tree)
    assert one.static == static and hash(one.static) == hash(static)
    assert all(a is b for a, b in zip(one.arrays, jax.tree.leaves(part), strict=True))
    assert all(a is b for a, b in zip(one.arrays, jax.tree.leaves(one), strict=True))


@given(TREES)
def test_flattening_with_and_without_paths_agree(tree: Any):
    packed = pack(tree)
    with_paths, treedef = tree_flatten_with_path(packed)
    assert treedef == tree_structure(packed)
    assert all(a is b for (_, a), b in zip(with_paths, packed.arrays, strict=True))
    assert [keystr(path) for path, _ in with_paths] == [f".{path}" for path in packed.static.paths]


@given(TREES)
def test_jax_maps_over_the_arrays_alone(tree: Any):
    shapes = jax.tree.map(lambda x: ft.Axes(*(None,) * x.ndim), pack(tree))
    assert isinstance(shapes, Packed)
    assert [len(axes) for axes in shapes.arrays] == [x.ndim for x in pack(tree).arrays]
    cleared = jax.tree.map(lambda x: None, pack(tree)).tree
    assert not any(hasattr(x, "shape") for x in jax.tree.leaves(cleared))


# What is read through it


@given(TREES)
def test_a_packed_tree_is_read_as_the_tree_that_was_packed(tree: Any):
    packed = {"a": pack(tree), "b": pack([tree, 1, (pack(tree), "text")]), "c": np.ones(3)}
    found, plain = read(packed), read({"a": tree, "b": [tree, 1, (tree, "text")], "c": np.ones(3)})
    assert [x._replace(value=0) for x in found.leaves] == [
        x._replace(value=0) for x in plain.leaves
    ]
    flat, treedef = jax.tree.flatten(packed)
    assert found.skeleton.treedef == treedef
    assert all(
        flat[p] is x.value for p, x in zip(found.skeleton.indices, found.leaves, strict=True)
    )
    paths = found.skeleton.spread(x.path for x in found.leaves)
    assert isinstance(paths["b"], Packed)
    assert list(paths["b"].arrays) == [x.path for x in plain.leaves if x.path[0] == "b"]


@given(TREES)
def test_what_took_the_place_of_an_array_is_a_leaf(tree: Any):
    for other in ("text", None, ("text", np.ones(2))):
        packed = [
            jax.tree.map(lambda x, other=other: x if x.ndim else other, pack(tree)),
            np.ones(3),
        ]
        found, flat = read(packed), jax.tree.leaves(packed)
        assert found.skeleton.treedef.num_leaves == len(flat)
        assert [
            flat[p] is x.value for p, x in zip(found.skeleton.indices, found.leaves, strict=True)
        ] == [True for x in flat if hasattr(x, "shape")]


RULES = ft.AxisRules({"hidden": "model", "embed": None}) | ft.FSDP("data", min_size=0)


def test_shard_places_it_and_keeps_it_packed(mesh: jax.sharding.Mesh):
    model = Layer(jnp.ones((4, 8)), jnp.ones(8), jax.nn.relu)
    placed, plain = ft.shard(pack(model), RULES, mesh), ft.shard(model, RULES, mesh)
    assert isinstance(placed, Packed) and placed.static == pack(model).static
    assert [x.sharding for x in placed.arrays] == [plain.weight.sharding, plain.bias.sharding]


def test_a_problem_is_named_by_the_models_path():
    with raises(
        'model.0.weight   f32[2, 3]   "embed hidden"', "a multiple of", error=ft.ShardingError
    ):
        ft.plan({"model": pack([LAYER])}, RULES, SIZES)
    with raises("the axes of the tree cannot be determined", "m.0.weight", error=ft.AxesError):
        ft.tree_axes({"m": pack([Layer(np.ones(3), None, 1)])})


# What is static


def test_what_cannot_be_static_is_named():
    class Bad:
        __hash__ = None

    with raises("1 leaf cannot be static", "blocks.1.act   Bad", "nor hashable"):
        pack({"blocks": [LAYER, Layer(LAYER.weight, None, Bad())]})


# What a transform sees


def test_keys_name_the_paths_of_the_model():
    text = jax.jit(lambda state: state).lower(pack([LAYER])).as_text(debug_info=True)
    assert "state.0.weight" in text


def test_repr():
    for tree, text in (
        (LAYER, "<Packed Layer: 1 array>"),
        ([LAYER] * 2, "<Packed list: 2 arrays>"),
        (np.ones(2), "<Packed: 1 array>"),
    ):
        assert repr(pack(tree)) == text


def test_equal_only_to_itself():
    packed = pack(LAYER)
    assert packed == packed and packed != pack(LAYER) and len({packed, pack(LAYER)}) == 2


# What it costs


COSTS: dict[str, tuple[Callable[[Packed[Any]], Callable[[], Any]], int]] = {
    "flatten": (lambda packed: partial(default_registry.flatten, packed), 1),
    "unflatten": (lambda packed: partial(tree_structure(packed).unflatten, packed.arrays), 2),
    "hash": (lambda packed: partial(hash, tree_structure(packed)), 1),
    "compare": (lambda packed: partial(tree_structure(packed).__eq__, tree_structure(packed)), 1),
    "a compiled call": (lambda packed: partial(_compiled(packed), packed), 7),
}


def _compiled(packed: Packed[Any]) -> Callable[[Packed[Any]], Any]:
    f = jax.jit(lambda packed: packed)
    f(f(packed))
    return f


@pytest.mark.parametrize("operation", COSTS)
@pytest.mark.parametrize("size", [10, 1000])
def test_python_runs_no_more_for_more_arrays(operation: str, size: int):
    prepare, most = COSTS[operation]
    packed = pack([Layer(jnp.ones(1), None, "relu") for _ in range(size)])
    assert python_calls(prepare(packed)) <= most
