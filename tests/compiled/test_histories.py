"""What the values of a compiled program are made of, from all of its results at once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from functree.compiled.data_flow import DataFlow, HloValue, bits_of
from functree.compiled.hlo import Hlo, Instruction

X = jax.ShapeDtypeStruct((8,), "float32")


def rotated(x: Any, y: Any, z: Any) -> Any:
    """In a loop each carry is made of the one before: after three iterations of all arguments."""

    def body(carry: Any, _: Any) -> Any:
        a, b, c = carry
        return (a, jnp.cos(b * a), c - b), a

    return jax.lax.scan(body, (x, y, z), length=5)


def normalized(*xs: Any) -> Any:
    """An update by the norm of all gradients, which is made of everything."""
    # The compiler would compute it for each result.
    norm = jax.lax.optimization_barrier(sum(jnp.sum(jnp.sin(x) ** 2) for x in xs))
    return [jnp.where(norm > 1, x - x / norm, x) for x in xs]


def flow_of(fun: Any, number: int) -> DataFlow:
    return DataFlow(Hlo(jax.jit(fun).lower(*[X] * number).compile().as_text() or ""))


def passes(one: Instruction) -> bool:
    return one.opcode != "parameter"


@pytest.mark.parametrize("conditions", [False, True])
@pytest.mark.parametrize("fun", [rotated, normalized])
def test_histories_at_once_are_those_of_each(fun: Any, conditions: bool):
    flow = flow_of(fun, 3)
    results = [value for value, _ in flow.results]
    found = flow.reached(results, passes, conditions=conditions)
    for i, result in enumerate(results):
        _, passed = flow.history([result], passes, conditions=conditions)
        assert {value for value, bits in found.items() if i in bits_of(bits)} == passed


class Counted(DataFlow):
    """Counts the values that are looked at."""

    steps = 0

    def _made_of(
        self, value: HloValue, passes: Callable[[Instruction], bool], conditions: bool
    ) -> list[HloValue]:
        self.steps += 1
        return super()._made_of(value, passes, conditions)


def test_the_time_grows_with_the_program_and_not_with_its_square():
    flow = Counted(flow_of(normalized, 32).hlo)
    results = [value for value, _ in flow.results]
    flow.reached(results, passes, conditions=True)
    steps, flow.steps = flow.steps, 0
    for result in results:
        flow.history([result], passes, conditions=True)
    assert steps <= len(flow.hlo.instructions) < flow.steps
