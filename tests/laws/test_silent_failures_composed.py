"""Silent failures under composition: what holds for a function holds for it in every transform.

Each test runs in all transforms of JAX, eager ones among them. The numbers are those of the list of
silent failures.
"""

from collections import namedtuple
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

import functree as ft
from tests.laws.transforms import EAGER_GRADIENTS, GRADIENTS, SPEC, TRANSFORMS
from tests.lib.checks import raises
from tests.lib.meshes import EXPLICIT, MESH

P = PartitionSpec
X = jnp.arange(64.0).reshape(8, 8)
RULES = ft.AxisRules({"rows": "data", "cols": "model"})
OTHERS = ft.AxisRules({"rows": "model", "cols": "data"})
# In the body of a shard_map arrays are local, and layouts are an error that says so.
GLOBAL = [name for name in TRANSFORMS if name != "shard_map"]


MESHES = {"Auto": MESH, "Explicit": EXPLICIT}
# On Explicit axes the caller cannot differentiate outside of a mesh.
CELLS = [
    (name, axes) for name in GLOBAL for axes in MESHES if axes == "Auto" or name not in GRADIENTS
]


def lies(x: Array, spec: P, mesh: Any = MESH) -> None:
    assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim), x.sharding


def expected(transform: str, scale: float) -> np.ndarray:
    """The result for a function that multiplies by `scale`: its gradients are those of the sum of
    its squares."""
    x = np.asarray(X)
    if transform == "custom_vjp":  # whose rule applies the function to the cotangent
        return 2 * scale * x * scale
    return 2 * scale**2 * x if transform in GRADIENTS else scale * x


@pytest.mark.parametrize(("transform", "axes"), CELLS)
def test_silent_failure_32_a_mesh_that_an_inner_function_knows(transform: str, axes: str):
    mesh = MESHES[axes]
    f = ft.jit(lambda x: ft.constrain(x * 2, SPEC), mesh=mesh)
    found = TRANSFORMS[transform](f, X, mesh)
    assert np.array_equal(found, expected(transform, 2))
    lies(found, SPEC, mesh)


@pytest.mark.parametrize("transform", GLOBAL)
def test_silent_failure_9_one_array_at_two_paths_with_two_specs(transform: str):
    f = ft.jit(
        lambda tree: tree["a"] * 2,
        in_shardings={"tree": {"a": P("data"), "b": P("model")}},
        mesh=MESH,
    )
    with raises("tree.b   f32[8, 8]", "is the same array as `tree.a`", error=ft.ShardingError):
        TRANSFORMS[transform](lambda x: f({"a": x, "b": x}), X, MESH)


@pytest.mark.parametrize(("transform", "axes"), CELLS)
def test_silent_failure_12_a_gradient_keeps_the_fsdp_axis(transform: str, axes: str):
    mesh = MESHES[axes]
    f = ft.jit(ft.grad(lambda w: (w**2).sum(), layout=ft.FSDP("data", min_size=0)), mesh=mesh)
    found = TRANSFORMS[transform](f, X, mesh)
    assert np.array_equal(found, expected(transform, 2))
    if transform not in GRADIENTS:
        lies(found, P("data"), mesh)


@pytest.mark.parametrize("transform", GLOBAL)
def test_silent_failure_21_an_array_that_is_committed_to_another_sharding(transform: str):
    """An error that names it. What is behind a tracer is not known, so a tracer is constrained."""
    f = ft.jit(lambda x: x * 2, in_shardings=SPEC, mesh=MESH)
    x = ft.shard(X, P(None, "data"), MESH)
    if transform in ("eager", "lower", "custom_vjp"):
        with raises(
            "x   f32[8, 8]",
            "is sharded P(None, 'data') but `in_shardings` asks for P('data', 'model')",
        ):
            TRANSFORMS[transform](f, x, MESH)
    else:
        assert np.array_equal(TRANSFORMS[transform](f, x, MESH), expected(transform, 2))


@pytest.mark.parametrize("transform", GLOBAL)
def test_silent_failure_23_ambient_rules_that_change(transform: str):
    f = ft.jit(lambda x: ft.constrain(x * 2, "rows cols"), mesh=MESH)
    x = ft.shard(X, P(), MESH)
    for rules, spec in ((RULES, SPEC), (OTHERS, P("model", "data")), (RULES, SPEC)):
        with ft.axis_rules(rules):
            found = TRANSFORMS[transform](f, x, MESH)
        assert np.array_equal(found, expected(transform, 2))
        if transform not in EAGER_GRADIENTS:
            lies(found, spec)


@pytest.mark.parametrize("transform", GLOBAL)
def test_silent_failure_24_two_arrays_on_one_buffer(transform: str):
    """Called with values, it is an error. In a transform nothing is donated, however often it is
    called."""
    x = ft.shard(X, P("data"), MESH)
    same = jax.device_put(x, NamedSharding(MESH, P("data", None)))
    f = ft.jit(lambda x, y: (x * 2, y * 2), donate=...)
    if transform in ("eager", "lower", "custom_vjp"):
        with raises(
            "y   f32[8, 8]\n      is the same buffer as `x`, and both are donated", "`ft.copy(y, "
        ):
            f(x, same)
    for _ in range(2):
        inside = TRANSFORMS["jax.jit" if transform in ("eager", "lower") else transform]
        if transform != "custom_vjp":
            found = inside(lambda x: f(x, same)[0], x, MESH)
            assert np.array_equal(
                found, expected("jax.jit" if transform in ("eager", "lower") else transform, 2)
            )
    assert not x.is_deleted() and not same.is_deleted()


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_silent_failure_28_ones_of_three_types_are_three(transform: str):
    f = ft.jit(lambda x, one: x * {int: 2.0, bool: 3.0, float: 4.0}[type(one)])
    for one, scale in ((1, 2.0), (True, 3.0), (1.0, 4.0), (1, 2.0)):
        found = TRANSFORMS[transform](lambda x, one=one: f(x, one), X, MESH)
        assert np.array_equal(found, expected(transform, scale))


class Pair(NamedTuple):
    first: Any
    second: Any


class Keyed:
    def __init__(self, first: Any, second: Any):
        self.first, self.second = first, second


jax.tree_util.register_pytree_node(
    Keyed, lambda k: ((k.second, k.first), None), lambda _, c: Keyed(c[1], c[0])
)
Reversed = namedtuple("Reversed", ["first", "second"])
jax.tree_util.register_pytree_node(
    Reversed, lambda r: ((r.second, r.first), None), lambda _, c: Reversed(c[1], c[0])
)


@pytest.mark.parametrize("cls", [Pair, Keyed, Reversed])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_silent_failure_39_leaves_are_taken_in_the_order_of_their_registration(
    transform: str, cls: Any
):
    f = ft.jit(lambda tree: tree["nested"].first * 2 + 0 * tree["nested"].second)
    found = TRANSFORMS[transform](lambda x: f({"nested": cls(x, jnp.ones_like(x))}), X, MESH)
    assert np.array_equal(found, expected(transform, 2))
    placed = ft.shard(cls(jnp.zeros((8, 2)), jnp.ones((4, 8))), P("data"), MESH)
    assert placed.first.shape == (8, 2) and not placed.first.any() and placed.second.all()
    _, part = ft.split(cls(jnp.zeros(2), jnp.ones(3)))
    assert part.first.shape == (2,) and part.second.shape == (3,)
