"""A random model under a random legal layout computes what it computes unsharded."""

from itertools import pairwise

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array

import functree as ft
from functree.tree.axes import Names
from tests.lib.covering import examples

P = PartitionSpec
NAMES = ("embed", "hidden", "heads", "batch")
SIZES = ((2, 4), (8, 1), (1, 2))
MESHES = {
    sizes: jax.make_mesh(sizes, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    for sizes in SIZES
}


class Layer(eqx.Module):
    weight: Array
    bias: Array
    axes: tuple[str, str] = eqx.field(static=True)

    def __axis_names__(self) -> Names:
        return ft.names(weight=" ".join(self.axes), bias=self.axes[1])


class Model(eqx.Module):
    layers: list[Layer]

    def __call__(self, x: Array) -> Array:
        for layer in self.layers:
            x = jax.nn.relu(jnp.matmul(x, layer.weight, precision="highest") + layer.bias[None, :])
        return x


@st.composite
def models(draw: st.DrawFn) -> Model:
    """With small whole numbers, whose sums are exact in any order."""
    sizes = draw(st.lists(st.sampled_from([8, 16, 24]), min_size=2, max_size=4))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    layers = []
    for rows, columns in pairwise(sizes):
        axes = (draw(st.sampled_from(NAMES)), draw(st.sampled_from(NAMES)))
        weight, bias = random.integers(-2, 3, (rows, columns)), random.integers(-9, 10, columns)
        layers.append(Layer(jnp.asarray(weight, jnp.float32), jnp.asarray(bias, jnp.float32), axes))
    return Model(layers)


@st.composite
def legal_layouts(draw: st.DrawFn) -> ft.Layout:
    """Every size is a multiple of eight, and `...: None` closes what is blocked, so that each of
    these is legal."""
    targets = st.sampled_from(["data", "model", ("data", "model"), ("model", "data")])
    pairs = draw(st.lists(st.tuples(st.sampled_from(NAMES), targets), max_size=6))
    rules = ft.AxisRules([*pairs, (..., None)])
    kind = draw(st.sampled_from(["rules", "fsdp", "both", "filters"]))
    axis = draw(st.sampled_from(["data", "model", ("data", "model")]))
    fsdp = ft.FSDP(axis, min_size=draw(st.sampled_from([0, 100])))
    match kind:
        case "rules":
            return rules
        case "fsdp":
            return fsdp
        case "both":
            return rules | fsdp
    bias = draw(st.sampled_from([P(), P("data"), P(("model", "data"))]))
    return ft.StateSharding(
        {"**.bias": bias, ft.has_ndim(2): rules | fsdp, ...: P()}, unused="ignore"
    )


@jax.jit
def sharded(model: Model, x: Array) -> Array:
    return model(x)


# Each example compiles a program.
@examples(60)
@given(model=models(), layout=legal_layouts(), sizes=st.sampled_from(list(MESHES)))
def test_sharded_equals_unsharded(model: Model, layout: ft.Layout, sizes: tuple[int, int]):
    mesh = MESHES[sizes]
    x = (jnp.arange(4.0 * model.layers[0].weight.shape[0]) % 7 - 3).reshape(4, -1)
    want = np.asarray(x, np.float64)
    for layer in model.layers:
        want = np.maximum(
            want @ np.asarray(layer.weight, np.float64) + np.asarray(layer.bias, np.float64), 0
        )
    placed = ft.shard(model, layout, mesh)
    planned = ft.plan(model, layout, mesh)
    for array, row in zip(jax.tree.leaves(placed), planned, strict=True):
        assert array.sharding.spec == row.spec
        assert array.addressable_shards[0].data.shape == row.local_shape
    np.testing.assert_array_equal(sharded(placed, x), want)
