"""`ft.equinox_names`: every layer of `eqx.nn`, found by enumeration, has names for each of its
leaves."""

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import Array
from jax.sharding import PartitionSpec as P

import functree as ft
from tests.lib.checks import raises

KEY = jax.random.key(0)
NN = eqx.nn


def linear() -> eqx.nn.Linear:
    return NN.Linear(4, 6, key=KEY)


LINEAR = {"weight": "out_features in_features", "bias": "out_features"}
IN_LAYER = {f"layer.{name}": axes for name, axes in LINEAR.items()}


def convolution(n: int, start: str = "") -> dict[str, str]:
    return {
        f"{start}weight": " ".join(["out_channels in_channels", *["_"] * n]),
        f"{start}bias": " ".join(["out_channels", *["_"] * n]),
    }


# A layer of each class, and the axes of its arrays. The names are literals, and those of the
# constructors' parameters.
LAYERS: dict[type, tuple[Callable[[], Any], dict[str, str]]] = {
    NN.Linear: (linear, LINEAR),
    NN.MLP: (
        lambda: NN.MLP(4, 6, 8, 2, key=KEY),
        {f"layers.{i}.{name}": axes for i in range(3) for name, axes in LINEAR.items()},
    ),
    NN.MultiheadAttention: (
        lambda: NN.MultiheadAttention(2, 8, use_query_bias=True, key=KEY),
        {
            "query_proj.weight": LINEAR["weight"], "query_proj.bias": LINEAR["bias"],
            "key_proj.weight": LINEAR["weight"], "value_proj.weight": LINEAR["weight"],
            "output_proj.weight": LINEAR["weight"],
        },
    ),
    NN.Conv: (lambda: NN.Conv(2, 4, 6, 3, key=KEY), convolution(2)),
    NN.ConvTranspose: (lambda: NN.ConvTranspose(2, 4, 6, 3, key=KEY), convolution(2)),
    NN.Embedding: (lambda: NN.Embedding(10, 4, key=KEY), {"weight": "num_embeddings embedding_size"}),
    NN.GRUCell: (
        lambda: NN.GRUCell(4, 6, key=KEY),
        {"weight_ih": "_ input_size", "weight_hh": "_ hidden_size", "bias": "_", "bias_n": "hidden_size"},
    ),
    NN.LSTMCell: (
        lambda: NN.LSTMCell(4, 6, key=KEY),
        {"weight_ih": "_ input_size", "weight_hh": "_ hidden_size", "bias": "_"},
    ),
    NN.LayerNorm: (lambda: NN.LayerNorm(4), {"weight": "shape", "bias": "shape"}),
    NN.RMSNorm: (lambda: NN.RMSNorm((4, 5)), {"weight": "_ _", "bias": "_ _"}),
    NN.GroupNorm: (lambda: NN.GroupNorm(2, 4), {"weight": "channels", "bias": "channels"}),
    NN.BatchNorm: (
        lambda: NN.BatchNorm(4, "batch", mode="ema"),
        {
            "weight": "input_size", "bias": "input_size",
            "ema_state_index.init.0": "input_size", "ema_state_index.init.1": "input_size",
        },
    ),
    NN.PReLU: (lambda: NN.PReLU(jnp.ones((4, 5))), {"negative_slope": "_ _"}),
    NN.WeightNorm: (lambda: NN.WeightNorm(linear()), {**IN_LAYER, "g": "_ _"}),
    NN.SpectralNorm: (
        lambda: NN.SpectralNorm(linear(), "weight", key=KEY),
        {**IN_LAYER, "uv_index.init.0": "_", "uv_index.init.1": "_"},
    ),
    NN.StateIndex: (lambda: NN.StateIndex(jnp.ones((3, 4))), {"init": "_ _"}),
    NN.Sequential: (
        lambda: NN.Sequential([linear(), NN.Lambda(jax.nn.relu)]),
        {f"layers.0.{name}": axes for name, axes in LINEAR.items()},
    ),
    NN.Shared: (
        lambda: NN.Shared([linear(), linear()], lambda two: two[1].weight, lambda two: two[0].weight),
        {"pytree.0.weight": LINEAR["weight"], "pytree.0.bias": "out_features", "pytree.1.bias": "out_features"},
    ),
}  # fmt: skip
for rank in (1, 2, 3):
    for cls in (getattr(NN, f"Conv{rank}d"), getattr(NN, f"ConvTranspose{rank}d")):
        LAYERS[cls] = (partial(cls, 4, 6, 3, key=KEY), convolution(rank))
POOLS = [
    getattr(NN, f"{kind}Pool{n}d")
    for kind in ("Avg", "Max", "AdaptiveAvg", "AdaptiveMax")
    for n in (1, 2, 3)
]
WITHOUT_ARRAYS: dict[type, Callable[[], Any]] = {
    NN.Dropout: lambda: NN.Dropout(0.5),
    NN.Identity: lambda: NN.Identity(),
    NN.Lambda: lambda: NN.Lambda(jnp.sin),
    NN.RotaryPositionalEmbedding: lambda: NN.RotaryPositionalEmbedding(4),
    NN.Pool: lambda: NN.Pool(0, jax.lax.add, 1, 2),
    NN.AdaptivePool: lambda: NN.AdaptivePool(2, 1, jnp.max),
    **{pool: partial(pool, 2) for pool in POOLS},
}  # fmt: skip
ABSTRACT = {NN.StatefulLayer}


def made(make: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Equinox's own, of BatchNorm
        return make()


def test_every_layer_is_in_the_table():
    layers = {
        cls for _, cls in inspect.getmembers(NN, inspect.isclass) if issubclass(cls, eqx.Module)
    }
    assert layers - LAYERS.keys() - WITHOUT_ARRAYS.keys() - ABSTRACT == set()
    for make in WITHOUT_ARRAYS.values():
        assert not [x for x in jax.tree.leaves(made(make)) if eqx.is_array(x)]


@pytest.mark.parametrize("cls", LAYERS, ids=lambda cls: cls.__name__)
def test_each_leaf_has_axes_and_is_taken_by_rules(cls: type):
    make, expected = LAYERS[cls]
    plan = ft.plan(made(make), ft.AxisRules({...: None}, names=ft.equinox_names), {"model": 2})
    assert {str(row.path): str(row.axes) for row in plan if row.shape} == expected
    assert plan.unused_names == ()  # the layers that the tree does not have are not listed


def test_names_of_the_user_beside_them():
    own = {NN.Linear: ft.names(weight="hidden embed", bias="hidden"), NN.GRUCell: ft.names()}
    rules = ft.AxisRules({"hidden": "model", ...: None}, names={**ft.equinox_names, **own})
    plan = ft.plan([linear(), NN.Conv2d(4, 6, 3, key=KEY)], rules, {"model": 2})
    assert plan["0.weight"].spec == P("model", None)
    assert str(plan["1.weight"].axes) == "out_channels in_channels _ _"
    assert plan.unused_names == ("GRUCell",)  # which is the user's own


def test_layers_in_one_array_are_an_error():
    """Of `MLP(scan=True)` the arrays of the layers in the middle are one array."""
    scanned = NN.MLP(4, 6, 8, 3, scan=True, key=KEY)
    with raises("layers.1.weight", "has 3 dimensions", error=ft.AxesError):
        ft.tree_axes(scanned, ft.equinox_names)
    names = ft.names({"layers.*.weight": "... out in", "layers.*.bias": "... out"})
    axes = ft.tree_axes(scanned, {**ft.equinox_names, NN.MLP: names})
    assert [str(one) for one in jax.tree.leaves(axes)][:4] == ["out in", "out", "_ out in", "_ out"]


# Stacks that `eqx.filter_vmap` of a constructor has made


class Mixer(eqx.Module):
    inside: eqx.nn.Linear
    scale: Array

    def __init__(self, key: Array):
        self.inside = eqx.nn.Linear(8, 16, key=key)
        self.scale = jnp.ones(16)


class Deep(eqx.Module):
    mixers: Mixer
    head: eqx.nn.Linear

    def __init__(self, key: Array):
        self.mixers = eqx.filter_vmap(Mixer)(jax.random.split(key, 4))
        self.head = eqx.nn.Linear(16, 8, key=key)


def test_a_stack_of_a_class_that_is_not_ours() -> None:
    names = {Mixer: ft.names("layers", scale="channels"), **ft.equinox_names}
    deep = jax.eval_shape(Deep, jax.random.key(0))
    axes = ft.tree_axes(deep, names)
    assert str(axes.mixers.inside.weight) == "layers out_features in_features"
    assert str(axes.mixers.inside.bias) == "layers out_features"
    assert str(axes.mixers.scale) == "layers channels"
    assert str(axes.head.weight) == "out_features in_features"
    with raises("mixers.inside.weight", '`names={cls: ft.names("layers")}`', error=ft.AxesError):
        ft.tree_axes(deep, ft.equinox_names)
    rules = ft.AxisRules({"out_features": "model", ...: None}, names=names)
    plan = ft.plan(deep, rules | ft.FSDP("data", min_size=0), {"data": 4, "model": 2})
    # The stack itself is never sharded: a scan would gather all layers for each.
    assert plan["mixers.inside.weight"].spec == ft.P(None, "model", "data")
    assert not plan.unused_names


def test_a_stack_in_an_annotation() -> None:
    class Holder(eqx.Module):
        mixers: Annotated[Mixer, ft.names("layers", {"inside.*": "..."}, scale="channels")]
        table: Annotated[list[Array], ft.names("layers", {"*": "vocab"})]

    mixers = jax.eval_shape(
        lambda key: eqx.filter_vmap(Mixer)(key), jax.random.split(jax.random.key(0), 4)
    )
    axes = ft.tree_axes(Holder(mixers, [jnp.ones((4, 3))]))
    assert str(axes.mixers.scale) == "layers channels"
    assert str(axes.table[0]) == "layers vocab"


def test_the_text_of_a_stack() -> None:
    for given in (ft.names("layers"), ft.names("runs layers", weight="a b")):
        assert eval(repr(given), {"names": ft.names}) == given
    assert ft.names("layers") != ft.names()
    for wrong in ("", "layers _", "..."):
        with raises("axis", error=ft.AxesError):
            ft.names(wrong)
    for wrong in ("a ... b ...", "... a/b", "a ...b"):
        with raises("is not an axis name", error=ft.AxesError):
            ft.names(weight=wrong)
    with raises("names: invalid argument 3: pass a mapping from globs to axes", error=ft.AxesError):
        ft.names(3)  # pyright: ignore
