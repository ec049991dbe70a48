"""The arguments of a compiled function: the arrays of each parameter, with their paths."""

import inspect
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import pytest

import functree as ft
from functree.calls.body import Arguments, Arrays, Body, donated_indices
from functree.calls.call_groups import Traces
from functree.calls.output import Output
from functree.calls.signature import Signature

PATHS = [
    ft.Path(keys)
    for keys in [("state", "w"), ("state", "b"), ("x",), ("more", "mode", 0), ("more", "rate")]
]
# What is donated, and the places of its arrays.
DONATED: list[tuple[set[str], tuple[int, ...]]] = [
    (set(), ()),
    ({"x"}, (2,)),
    ({"more.mode"}, (3,)),
    ({"more.mode", "more.rate"}, (3, 4)),
    ({"w", "state.w.0", "rate"}, ()),
    ({"state", "x", "more"}, (0, 1, 2, 3, 4)),
]


@pytest.mark.parametrize(("names", "places"), DONATED, ids=range(len(DONATED)))
def test_arrays_are_split_and_joined(names: set[str], places: tuple[int, ...]):
    arguments = Arguments(PATHS, donated_indices(PATHS, names))
    assert arguments.donated == places and sorted((*arguments.kept, *places)) == [0, 1, 2, 3, 4]
    split = arguments.split("abcde")
    donated = [letter for i in arguments.donated_arguments for letter in split[i].values]
    assert donated == ["abcde"[i] for i in places]
    assert arguments.join(split) == list("abcde")
    # `**more` has two arguments if a part of it is donated.
    partly = names == {"more.mode"}
    assert arguments.names == ["state", "x", "more", *["more_"] * partly]


@pytest.mark.parametrize(("names", "places"), DONATED, ids=range(len(DONATED)))
def test_they_are_nodes_with_paths(names: set[str], places: tuple[int, ...]):
    arguments = Arguments(PATHS, donated_indices(PATHS, names))
    values = [jnp.float32(i) for i in range(5)]
    found = [
        (name.rstrip("_") + jax.tree_util.keystr(keys), leaf)
        for name, argument in zip(arguments.names, arguments.split(values), strict=True)
        for keys, leaf in jax.tree_util.tree_leaves_with_path(argument)
    ]
    assert found == [(str(path), value) for path, value in zip(PATHS, values, strict=True)]
    again = jax.tree.map(lambda x: x + 1, arguments.split(values))
    assert isinstance(again[0], Arrays) and arguments.join(again) == [x + 1 for x in values]
    assert jax.tree.structure(arguments.split(values)) == jax.tree.structure(
        arguments.split(values[::-1])
    )


def test_what_jax_traces():
    def step(x: float) -> float:
        return x

    def compute(arrays: Sequence[jax.Array]) -> Output:
        return Output.of({"sum": sum(arrays[1:], arrays[0]), "first": arrays[0]}, "f")

    traces = Traces(step, Signature(step))
    body = Body(compute, Arguments(PATHS, donated_indices(PATHS, {"x"})), traces)
    assert body.__name__ == body.__qualname__ == "step" and body.__wrapped__ is step
    assert list(inspect.signature(body).parameters) == ["state", "x", "more"]
    result = jax.jit(body)(*body.arguments.split([jnp.float32(i) for i in range(1, 6)]))
    assert result.tree == {"sum": 15.0, "first": 1.0}


def test_equal_labels_are_one_object():
    """JAX compares the arguments of a function that it traces with those of all others before."""
    one, other = (Arguments(PATHS, ()).split(range(5)) for _ in range(2))
    assert [a.labels for a in one] == [b.labels for b in other]
    assert one[0].labels.keys == (".w", ".b")
