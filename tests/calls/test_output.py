"""What comes out of a compiled function: its arrays, and the rest as static data."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import functree as ft
from functree.calls.output import Output
from tests.lib.checks import raises
from tests.lib.meshes import MESH
from tests.lib.trees import Leafy, Pair

A, B = jnp.ones(2), jnp.zeros(3)
RESULTS: dict[str, tuple[Any, int]] = {  # a result, and how many different arrays it has
    "an array": (A, 1),
    "None": (None, 0),
    "no array": ({"a": "text", "b": 3}, 0),
    "two": ({"a": A, "b": [B, None, "text"]}, 2),
    "one at two places": ([A, {"again": A}], 1),
    "two at four": (Pair([A, B], Leafy(B, A, static=4)), 2),
}


@pytest.mark.parametrize("case", RESULTS)
def test_taken_apart_and_built_again(case: str):
    tree, different = RESULTS[case]
    arrays = [x for x in jax.tree.leaves(tree) if eqx.is_array(x)]
    for output, count in (
        (Output.of(tree, "f"), len(arrays)),
        (Output.of(tree, "f").distinct(), different),
    ):
        assert len(output.values) == count
        assert jax.tree.structure(output.tree) == jax.tree.structure(tree)
        assert all(
            x is y for x, y in zip(jax.tree.leaves(output.tree), jax.tree.leaves(tree), strict=True)
        )
        again = jax.jit(lambda output: output)(output)
        assert (
            isinstance(again, Output)
            and again.skeleton == output.skeleton
            and again.which == output.which
        )
        assert jax.tree.structure(again.tree) == jax.tree.structure(tree)


def test_others_for_its_values():
    output = Output.of([A, B, A, "text"], "f")
    assert output.like("abc") == ["a", "b", "c", "text"]
    assert [str(path) for path in output.distinct().paths()] == ["0", "1"], "the first of each"
    assert output.distinct().which == (0, 1, 0) and output.distinct().like("ab") == [
        "a",
        "b",
        "a",
        "text",
    ]


def test_its_arrays_are_numbered():
    keys = [
        str(keys[0])
        for keys, _ in jax.tree_util.tree_leaves_with_path(Output.of({"b": A, "a": B}, "f"))
    ]
    assert keys == [".0", ".1"]


def test_a_traced_array_in_a_static_field_is_refused():
    def body(x: jax.Array) -> Output:
        kept = Leafy(x, x)
        object.__setattr__(kept, "static", x)  # Equinox would warn
        return Output.of({"kept": [kept], "fine": Leafy(x, None)}, "make")

    with raises(
        "make: the result has 1 static value that would outlive the trace",
        "kept.0.static",
        "without `static=True`",
    ):
        jax.eval_shape(body, A)


def test_a_function_that_closes_over_a_traced_array_is_refused():
    with raises(
        "_closures: the result has 1 static value",
        "outlive",
        "b.0",
        "closes over a traced array, `x`",
        "make it an array of the result",
    ):
        ft.jit(_closures)(jnp.ones(2))


async def _coroutine(x: Any) -> Any:
    return 2 * x


LATER = {"coroutine": _coroutine, "map": lambda x: map(jnp.sin, [x])}
WRAPPERS = {
    "jit": ft.jit,
    "init": lambda f: ft.init(f, ft.P(), MESH),
    "shard_map": lambda f: ft.shard_map(f, mesh=MESH, in_specs=ft.P(), out_specs=ft.P()),
}


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited", "ignore:Python iterable type")
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", LATER)
def test_what_computes_after_the_trace_is_refused(kind: str, wrapper: str):
    with raises(
        "1 static value that would outlive the trace",
        f"result.a.0   {kind}",
        "computes when it is used",
        "return a list or an array",
    ):
        WRAPPERS[wrapper](lambda x: {"a": [LATER[kind](x)]})(jnp.ones(2))


def _closures(x: Any) -> Any:
    def f() -> Any:
        return x

    return {"a": x, "b": [f], "c": (jnp.tanh, "text")}
