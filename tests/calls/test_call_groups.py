"""A call ─► its group, and its arrays."""

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import functree as ft
from functree.calls.call_groups import CallGroups
from functree.tree.skeleton.skeleton import Skeleton
from tests.lib.checks import raises
from tests.lib.meshes import lay
from tests.lib.trees import Leafy

A = jnp.ones(2)


GROUPS: dict[str, list[Any]] = {
    "length": [[A] * n for n in range(1, 40)],
    "the last static value": [[*[A, 0] * 10, n] for n in range(40)],
    "a key below": [{"a": A, "b": [{str(n): A}]} for n in range(40)],
    "a class": [[A, A], (A, A), {"a": A, "b": A}, Leafy(A, A)],
    "a large part": [{"a": [[A] * 20] * n + [m]} for n in range(5) for m in range(4)],
}


@pytest.mark.parametrize("what", GROUPS)
def test_one_group_leads_to_another(what: str, monkeypatch: pytest.MonkeyPatch):
    groups, calls = CallGroups(), GROUPS[what]
    made = [groups.find(call).group for call in calls]
    assert len(set(map(id, made))) == len(calls)
    shuffled = list(zip(calls, made, strict=True)) * 3
    for _ in range(3):
        random.Random(0).shuffle(shuffled)
        assert all(groups.find(call).group is group for call, group in shuffled)
    looked_up: list[Any] = []
    apart = Skeleton.apart
    monkeypatch.setattr(Skeleton, "apart", lambda tree: looked_up.append(tree) or apart(tree))
    assert all(groups.find(call).group is group for call, group in shuffled)
    assert looked_up == []
    assert max(len(group.others) for group in made) <= len(calls) + 1


@pytest.mark.filterwarnings("ignore:.*uncommitted")
@pytest.mark.parametrize("options", [{}, {"donate": "x"}], ids=["", "donated"])
@pytest.mark.parametrize("beside", [A, np.ones(2, np.float32)], ids=["array", "numpy"])
def test_an_array_is_refused_that_is_committed_where_one_before_it_was_not(
    beside: Any, options: Any
):
    """They have the same type and sharding, and the second cannot be on the mesh of `w`."""
    f = ft.jit(lambda w, x, beside: (w * 2, x + 1, beside), **options)
    w = lay(jnp.ones(8), "data")
    f(w, jnp.ones(8), beside)
    with raises("1 argument is not on it", "x   f32[8]\n      is committed to cpu:0 only"):
        f(w, jax.device_put(jnp.ones(8), jax.devices()[0]), beside)


class Fresh:
    """Static data that is equal only to itself, and new each time that its node is flattened."""


class Node:
    def __init__(self, x: Any):
        self.x = x


jax.tree_util.register_pytree_node(
    Node, lambda node: ((node.x,), Fresh()), lambda _, children: Node(*children)
)


@pytest.mark.parametrize("make", [lambda: Node(A), lambda: {float("nan"): A}], ids=["node", "key"])
def test_a_call_that_its_own_code_does_not_take(make: Any):
    groups = CallGroups()
    for _ in range(2):
        found = groups.find([make()])
        assert len(found.arrays) == 1 and found.arrays[0] is A and found.concrete
    f = ft.jit(lambda tree: [2 * x for x in jax.tree.leaves(tree)])
    assert np.array_equal(f(make())[0], 2 * A) and np.array_equal(f(make())[0], 2 * A)


@pytest.mark.filterwarnings("ignore:Python iterable type")
@pytest.mark.parametrize("static", [(), "x"], ids=["", "static"])
def test_what_a_trace_would_use_up_is_no_argument(static: Any):
    f = ft.jit(lambda x: jax.tree.map(jnp.add, *x), static_argnames=static)
    why = "would be exhausted by the trace, and its arrays would be constants of the program"
    with raises("1 leaf cannot be static", "x   map", why, "pass a list or an array"):
        f(map(jnp.sin, [A]))


def test_another_thread_may_add_a_group_meanwhile():
    groups = CallGroups()
    calls = [[A, n] for n in range(4)]
    for call in calls * 3:
        groups.find(call)
    first = groups.find(calls[0]).group
    taken = first.take

    def take(call: Any) -> Any:
        groups._known[Skeleton.of([A, object()])] = first  # as another thread would
        return taken(call)

    vars(first)["take"] = take
    assert [groups.find(call).group.skeleton for call in calls] == [
        Skeleton.of(call) for call in calls
    ]
