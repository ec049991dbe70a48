"""What may not come out of a compiled function: what would outlive the trace."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import functree as ft
from functree.calls.body import Output
from tests.lib.checks import raises
from tests.lib.meshes import MESH
from tests.lib.trees import Leafy

A = jnp.ones(2)


def test_a_traced_array_in_a_static_field_is_refused():
    def body(x: jax.Array) -> Output:
        kept = Leafy(x, x)
        object.__setattr__(kept, "static", x)  # Equinox would warn
        return Output.of({"kept": [kept], "fine": Leafy(x, None)}, "make")

    with raises(
        "make: the result has 1 value that a compiled function cannot return",
        "kept.0.static",
        "without `static=True`",
    ):
        jax.eval_shape(body, A)


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
        "the result has 1 value that a compiled function cannot return",
        f"result.a.0   {kind}",
        "computes its elements lazily",
        "return a list or an array",
    ):
        WRAPPERS[wrapper](lambda x: {"a": [LATER[kind](x)]})(jnp.ones(2))
