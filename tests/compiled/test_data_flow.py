"""How often the computations of a compiled program run, and what its values are made of."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from functree.compiled.data_flow import DataFlow, HloValue, bits_of, runs, trip_count
from functree.compiled.hlo import Hlo, Instruction

P = jax.sharding.PartitionSpec


def psum(x: Any) -> Any:
    return jax.lax.psum(jnp.sin(x), "data") / 8


def scanned(x: Any, length: int) -> Any:
    return jax.lax.scan(lambda x, _: (psum(x), None), x, length=length)[0]


def once(x: Any, n: Any) -> Any:
    return psum(x)


def in_a_scan(x: Any, n: Any) -> Any:
    return scanned(x, 5)


def in_two_scans(x: Any, n: Any) -> Any:
    return jax.lax.scan(lambda x, _: (scanned(x, 3), None), x, length=7)[0]


def from_two_to_eleven_in_threes(x: Any, n: Any) -> Any:
    return jax.lax.while_loop(lambda s: s[0] < 11, lambda s: (s[0] + 3, psum(s[1])), (2, x))[1]


def down_from_nine_in_twos(x: Any, n: Any) -> Any:
    return jax.lax.while_loop(lambda s: s[0] > 0, lambda s: (s[0] - 2, psum(s[1])), (9, x))[1]


def down_to_three(x: Any, n: Any) -> Any:
    return jax.lax.while_loop(lambda s: 3 <= s[0], lambda s: (s[0] - 2, psum(s[1])), (9, x))[1]


def upwards_for_ever(x: Any, n: Any) -> Any:
    return jax.lax.while_loop(lambda s: s[0] > 0, lambda s: (s[0] + n, psum(s[1])), (9, x))[1]


def data_dependent(x: Any, n: Any) -> Any:
    return jax.lax.fori_loop(0, n, lambda _, x: psum(x), x)


def until_it_is_small(x: Any, n: Any) -> Any:
    return jax.lax.while_loop(lambda x: x.sum() > 1, psum, x)


def a_known_loop_in_one_of_unknown_length(x: Any, n: Any) -> Any:
    return jax.lax.fori_loop(0, n, lambda _, x: scanned(x, 4), x)


def in_a_branch(x: Any, n: Any) -> Any:
    return jax.lax.cond(n > 3, psum, jnp.cos, x)


# How often the collective of each function runs.
PROGRAMS: dict[Callable[[Any, Any], Any], int | None] = {
    once: 1,
    in_a_scan: 5,
    in_two_scans: 21,
    from_two_to_eleven_in_threes: 3,
    down_from_nine_in_twos: 5,
    down_to_three: 4,
    upwards_for_ever: None,
    data_dependent: None,
    until_it_is_small: None,
    a_known_loop_in_one_of_unknown_length: None,
    in_a_branch: 1,
}


def compiled(fun: Callable[[Any, Any], Any]) -> str:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(
        fun, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=False
    )
    return jax.jit(mapped).lower(jnp.ones((8, 4)), jnp.int32(3)).compile().as_text() or ""


@pytest.mark.parametrize("fun", PROGRAMS, ids=lambda fun: fun.__name__)
@pytest.mark.parametrize("known", [True, False], ids=["written", "read"])
def test_how_often_a_collective_runs(fun: Callable[[Any, Any], Any], known: bool) -> None:
    text = compiled(fun)
    if not known:  # as the compiler for TPUs leaves it out
        text = re.sub(r'"known_\w+":\{[^}]*\},?', "", text)
    hlo = Hlo(text)
    times = runs(DataFlow(hlo))
    collectives = [one for one in hlo.instructions.values() if one.opcode.startswith("all-reduce")]
    assert [times[one.computation] for one in collectives] == [PROGRAMS[fun]]


def test_a_loop_that_is_not_understood_has_no_length() -> None:
    text = re.sub(r'"known_\w+":\{[^}]*\},?', "", compiled(in_a_scan))
    (loop,) = [one for one in Hlo(text).instructions.values() if one.opcode == "while"]
    assert trip_count(DataFlow(Hlo(text)), loop) == 5
    test = re.compile(r"direction=LT")
    changed = [
        test.sub("direction=NE", text),
        re.sub(r"(= s32\[\] )constant\(5\)", r"\1negate(%gone)", text),
    ]
    for other in changed:
        assert other != text and trip_count(DataFlow(Hlo(other)), loop) is None


TWICE = """HloModule jit_f

%layer (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %sum = f32[8]{0} all-reduce(%x), replica_groups={{0,1}}
}

ENTRY %main (y: f32[8]) -> f32[8] {
  %y = f32[8]{0} parameter(0)
  %once = f32[8]{0} call(%y), to_apply=%layer
  ROOT %again = f32[8]{0} call(%once), to_apply=%layer
}
"""


def test_a_computation_that_is_called_twice_runs_twice() -> None:
    assert runs(DataFlow(Hlo(TWICE))) == {"main": 1, "layer": 2}


NESTED = """HloModule jit_f

ENTRY %main (a: f32[4], b: f32[8]) -> f32[8] {
  %a = f32[4]{0} parameter(0)
  %b = f32[8]{0} parameter(1)
  %inner = (f32[4]{0}, f32[8]{0}) tuple(%a, %b)
  %outer = (f32[4]{0}, (f32[4]{0}, f32[8]{0})) tuple(%a, %inner)
  %pair = (f32[4]{0}, f32[8]{0}) get-tuple-element(%outer), index=1
  ROOT %found = f32[8]{0} get-tuple-element(%pair), index=1
}
"""


def test_a_part_of_a_part_of_a_tuple_has_its_source() -> None:
    hlo = Hlo(NESTED)
    found, b = HloValue(hlo.instructions["found"]), HloValue(hlo.instructions["b"])
    assert DataFlow(hlo).source(found) == b


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
