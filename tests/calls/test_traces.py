"""What is remembered for a function: shared by all that wrap it with equal options, and gone with
it."""

import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import functree as ft
from tests.lib.checks import raises
from tests.lib.meshes import MESH

P = ft.P


class Scale(eqx.Module):
    factor: Any

    def __call__(self, x: Any) -> Any:
        return self.factor * x


def counted() -> tuple[Callable[..., Any], list[int]]:
    """A function, and a list that has an element for each time that it was traced."""
    traces: list[int] = []

    def double(x: Any, y: Any = 2.0) -> Any:
        traces.append(1)
        return x * y

    return double, traces


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "a spec": lambda: {"in_shardings": (P("data"), None), "mesh": MESH},
    "donated": lambda: {"donate": ["x"]},
    "static": lambda: {"static_argnames": "y"},
    "the compiler's": lambda: {"compiler_options": {"xla_cpu_enable_fast_math": True}},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_equal_options_share_a_trace(case: str):
    f, traces = counted()
    made = [ft.jit(f, **OPTIONS[case]()) for _ in range(3)]
    for jitted in made:
        assert np.array_equal(jitted(ft.shard(jnp.ones(8), P("data"), MESH)), np.full(8, 2.0))
    assert traces == [1]
    assert [len(jitted.compilations) for jitted in made] == [1, 1, 1]
    assert [jitted.compilations[0].shared for jitted in made] == [False, True, True]
    assert (
        str(made[2].compilations[0])
        == "compilation 1: the first (shared: compiled by another wrapper of this function)"
    )


@pytest.mark.parametrize("case", [case for case in OPTIONS if case != "nothing"])
def test_other_options_do_not(case: str):
    f, traces = counted()
    x = ft.shard(jnp.ones(8), P("data"), MESH)
    plain, other = ft.jit(f), ft.jit(f, **OPTIONS[case]())
    plain(x), other(ft.shard(jnp.ones(8), P("data"), MESH))
    assert len(traces) == 2 and not other.compilations[0].shared


def test_a_program_of_another_wrapper_for_an_equal_call_is_no_news():
    """The second wrapper compiles by `lower`, and then calls what the first has made."""
    f, _ = counted()
    x = ft.shard(jnp.ones(8), P("data"), MESH)
    first, second = ft.jit(f, mesh=MESH), ft.jit(f, mesh=MESH)
    first(x)
    jax.clear_caches()  # otherwise `lower` has nothing to compile
    second.lower(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)).compile()
    second(x)
    assert [str(one) for one in second.compilations] == ["compilation 1: the first"]


def test_the_wrappers_of_shard_map_and_init_share_too():
    f, traces = counted()
    for _ in range(3):
        mapped = ft.shard_map(
            f, mesh=MESH, in_specs={"x": P("data"), "y": P()}, out_specs=P("data")
        )
        mapped(jnp.ones(8), jnp.ones(()))
    assert traces == [1]
    make, traces = counted()
    for key in range(3):
        ft.init(make, P("data"), MESH)(jnp.full(8, key))
    assert traces == [1]


def test_what_is_bound_is_an_argument():
    traces = []

    def scaled(factor: Any, x: Any) -> Any:
        traces.append(1)
        return factor * x

    for factor in (2.0, 3.0):
        jitted = ft.jit(functools.partial(scaled, jnp.asarray(factor)))
        assert jitted(jnp.ones(3)).tolist() == [factor] * 3
    assert traces == [1]
    assert ft.jit(scaled)(jnp.asarray(2.0), jnp.ones(3)).tolist() == [2.0] * 3
    assert ft.jit(Scale(jnp.asarray(4.0)))(jnp.ones(2)).tolist() == [4.0, 4.0]
    assert ft.jit(Scale(jnp.asarray(5.0)))(jnp.ones(2)).tolist() == [5.0, 5.0]


@pytest.mark.parametrize("first", ["bound", "plain"])
@pytest.mark.parametrize("by", ["name", "position"])
def test_what_is_bound_is_no_parameter(by: str, first: str):
    """Positional layouts are for the parameters that are left: with equal options they are
    others."""
    f, _ = counted()
    bound = functools.partial(f, y=3.0) if by == "name" else functools.partial(f, 3.0)
    options = {"in_shardings": (P("data"),), "mesh": MESH}
    for kind in (first, "plain" if first == "bound" else "bound"):
        if kind == "bound":
            assert ft.jit(bound, **options)(jnp.ones(8)).tolist() == [3.0] * 8
        else:
            with raises("in_shardings has 1 layout, but ", "has 2 positional parameters (x, y)"):
                ft.jit(f, **options)(jnp.ones(8))


def test_options_that_cannot_be_hashed_are_not_shared():
    f, traces = counted()

    class Layout(list):
        def __call__(self, path: Any, leaf: Any) -> Any:
            return P("data")

    for _ in range(2):
        ft.jit(f, in_shardings=(Layout(), None), mesh=MESH)(ft.shard(jnp.ones(8), P("data"), MESH))
    assert len(traces) == 2


@pytest.mark.parametrize(
    "wrap", [ft.jit, lambda f: ft.init(f, P(), MESH), lambda f: ft.jit(f, donate="x")]
)
def test_a_function_that_is_gone_takes_its_traces_along(wrap: Callable[[Any], Any]):
    big = jnp.ones(1000)

    def f(x: Any) -> Any:
        return x + big

    wrap(f)(jnp.ones(1000))
    alive = weakref.ref(f)
    del f
    gc.collect()
    assert alive() is None


@dataclasses.dataclass(frozen=True)
class Times:
    """A callable that is no tree, and equal to another one with an equal factor."""

    factor: Any

    def __call__(self, x: Any) -> Any:
        return x * self.factor if self.factor is not True else -x


@pytest.mark.parametrize("bind", [lambda f: f, functools.partial])
@pytest.mark.parametrize(
    "wrap",
    [
        ft.jit,
        lambda f: ft.init(f, P(), MESH),
        lambda f: ft.shard_map(f, mesh=MESH, in_specs=P(), out_specs=P()),
    ],
)
def test_equal_callables_are_two_functions(wrap: Callable[[Any], Any], bind: Callable[[Any], Any]):
    x = np.ones(2, np.float32)
    assert Times(1) == Times(True)
    one, true = Times(1), Times(True)
    assert [wrap(bind(f))(x).tolist() for f in (one, true)] == [[1, 1], [-1, -1]]
    first, second = Times(2), Times(2)
    kept = wrap(bind(first)), wrap(bind(second))
    assert kept[0](x).tolist() == [2, 2]
    del first, kept
    last = wrap(bind(second))
    gc.collect()
    assert last(x).tolist() == [2, 2]


CHANGED: dict[str, Any] = {
    "in_shardings": lambda f, layouts: ft.jit(f, in_shardings=(layouts, None), mesh=MESH),
    "out_shardings": lambda f, layouts: ft.jit(f, out_shardings=layouts, mesh=MESH),
    "in_specs": lambda f, layouts: ft.shard_map(
        f, in_specs=(layouts, None), out_specs=P("data"), mesh=MESH
    ),
    "out_specs": lambda f, layouts: ft.shard_map(
        f, in_specs=(P(), None), out_specs=layouts, mesh=MESH
    ),
    "init": lambda f, layouts: ft.init(f, layouts, MESH),
}


@pytest.mark.parametrize("option", CHANGED)
def test_layouts_that_are_changed_after_wrapping(option: str):
    def f(tree: Any, y: Any = 2.0) -> Any:
        return {"a": [2 * tree["a"][0]]}

    layouts: Any = {"a": [P("data")]}
    first = CHANGED[option](f, layouts)
    layouts["a"][0] = P("model")
    tree = {"a": [ft.shard(jnp.arange(8.0), P("data"), MESH)]}
    if option in ("out_specs", "init"):
        tree = {"a": [jnp.arange(8.0)]}
    expected = jax.tree.leaves(
        CHANGED[option](lambda tree, y=2.0: f(tree, y), {"a": [P("data")]})(tree)
    )[0]
    for jitted in (first, CHANGED[option](f, {"a": [P("data")]})):
        (found,) = jax.tree.leaves(jitted(tree))
        assert np.array_equal(found, expected) and found.sharding.is_equivalent_to(
            expected.sharding, 1
        )
