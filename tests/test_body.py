"""The arguments of a compiled function: arrays that are kept, and arrays that are donated."""

import inspect
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import pytest

import functree as ft
from functree.calls.body import Arguments, Arrays, Body
from functree.calls.output import Output

PATHS = [ft.Path(keys) for keys in [("state", "w"), ("x",), ("more", "mode", 0), ("more", "rate"), ("state", "b")]]
# What is donated, and the places of its arrays.
DONATED: list[tuple[set[str], tuple[int, ...]]] = [
    (set(), ()),
    ({"x"}, (1,)),
    ({"state"}, (0, 4)),
    ({"more.mode"}, (2,)),
    ({"more.mode", "more.rate"}, (2, 3)),
    ({"more"}, (2, 3)),
    ({"w", "state.w.0", "rate"}, ()),
    ({"state", "x", "more"}, (0, 1, 2, 3, 4)),
]


@pytest.mark.parametrize(("names", "places"), DONATED, ids=range(len(DONATED)))
def test_arrays_are_split_and_joined(names: set[str], places: tuple[int, ...]):
    arguments = Arguments(PATHS, frozenset(names))
    assert arguments.donated == places and sorted((*arguments.kept, *places)) == [0, 1, 2, 3, 4]
    kept, donated = arguments.split("abcde")
    assert list(donated.values) == ["abcde"[i] for i in places]
    assert list(kept.values) == [letter for i, letter in enumerate("abcde") if i not in places]
    assert arguments.join(kept, donated) == list("abcde")
    assert list(arguments.take_donated("abcde")) == list(donated.values)
    assert list(arguments.take_kept("abcde")) == list(kept.values)


@pytest.mark.parametrize(("names", "places"), DONATED, ids=range(len(DONATED)))
def test_they_are_nodes_with_paths(names: set[str], places: tuple[int, ...]):
    arguments = Arguments(PATHS, frozenset(names))
    values = [jnp.float32(i) for i in range(5)]
    found = [(str(keys[-1]), leaf) for keys, leaf in jax.tree_util.tree_leaves_with_path(arguments.split(values)[1])]
    assert found == [(f".{PATHS[i]}", values[i]) for i in places]
    again = jax.tree.map(lambda x: x + 1, arguments.split(values))
    assert isinstance(again[0], Arrays) and arguments.join(*again) == [x + 1 for x in values]
    assert jax.tree.structure(arguments.split(values)) == jax.tree.structure(arguments.split(values[::-1]))


def test_what_jax_traces():
    def step(x: float) -> float:
        return x

    def compute(arrays: Sequence[jax.Array]) -> Output:
        return Output.of({"sum": sum(arrays[1:], arrays[0]), "first": arrays[0]}, "f")

    body = Body(compute, Arguments(PATHS, frozenset({"x"})), lambda: step, "Model.step")
    assert body.__name__ == body.__qualname__ == "step" and body.__wrapped__ is step
    assert list(inspect.signature(body).parameters) == ["kept", "donated"]
    result = jax.jit(body)(*body.arguments.split([jnp.float32(i) for i in range(1, 6)]))
    assert result.tree == {"sum": 15.0, "first": 1.0}
