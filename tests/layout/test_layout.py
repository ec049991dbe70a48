"""What stands for a layout, alone and joined by `|`."""

import copy
import pickle
import re
from collections import OrderedDict
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

import functree as ft
from functree.errors import MAX_PATHS
from functree.layout.layout import as_layout
from tests.lib.checks import raises
from tests.lib.meshes import SIZES
from tests.lib.trees import MLP, module, x

P = PartitionSpec


class Two(eqx.Module):
    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden"]


def two(embed: int = 4, hidden: int = 8) -> Two:
    return Two(jnp.ones((embed, hidden)), jnp.ones(hidden))


def specs(tree: Any, layout: Any, mesh: Any = SIZES) -> list[P]:
    return [row.spec for row in ft.plan(tree, layout, mesh)]


# NamedSharding, callables, None


def test_a_named_sharding_brings_its_mesh_and_memory(mesh: Mesh) -> None:
    plan = ft.plan(
        {"w": jnp.ones((4, 8))}, NamedSharding(mesh, P("data"), memory_kind="pinned_host")
    )
    assert plan.mesh == mesh
    assert plan["w"].spec == P("data", None)
    assert plan["w"].memory_kind == "pinned_host"
    assert plan.shardings["w"] == NamedSharding(mesh, P("data", None), memory_kind="pinned_host")


@pytest.mark.parametrize("kind", [None, "device"])
def test_a_named_sharding_in_default_memory_is_as_its_spec(mesh: Mesh, kind: str | None) -> None:
    named = NamedSharding(mesh, P("data"), memory_kind=kind)
    x = jnp.ones((4, 8))
    plan = ft.plan({"w": x, "tied": x}, {"w": named, "tied": P("data")}, mesh)
    assert [row.memory_kind for row in plan] == [None, None]
    assert ft.plan(x, ft.on_host(P()) | named)[()].memory_kind == "pinned_host"
    assert ft.plan(x, ft.on_host(P()) | named)[()].spec == P("data", None)


def test_a_callable_sees_path_and_leaf() -> None:
    seen = []

    def by_rank(path: ft.Path, leaf: Any) -> P:
        seen.append((path, leaf.shape))
        return P("data") if leaf.ndim == 2 else P()

    plan = ft.plan({"a": two()}, {"a": by_rank}, SIZES)
    assert seen == [
        (ft.Path(("w",)), (4, 8)),
        (ft.Path(("b",)), (8,)),
    ]  # below the subtree that it stands over
    assert [row.spec for row in plan] == [P("data", None), P(None)]
    # Arrays that are alike but for their paths.
    assert specs([x(4), x(4)], lambda path, leaf: P("data" if path == (1,) else None)) == [
        P(None),
        P("data"),
    ]
    assert plan["a.w"].reason == "P('data') by test_a_callable_sees_path_and_leaf.<locals>.by_rank"


def by_table(path: ft.Path, leaf: Any) -> Any:
    return {"w": P(None, "model")}[path[-1]]


def by_search(path: ft.Path, leaf: Any) -> Any:
    return next(spec for name, spec in {"b": P()}.items() if name == path[-1])


# A function that raises, the path of the leaf, what is told, and its cause.
FAILING: dict[str, tuple[Any, str, str, type[Exception]]] = {
    "gelu": (jax.nn.gelu, "w", "gelu raised TypeError: ", TypeError),
    "own": (by_table, "b", "by_table raised KeyError: 'b'", KeyError),
    "next of nothing": (by_search, "w", "by_search raised StopIteration", StopIteration),
}


@pytest.mark.parametrize("case", FAILING)
def test_a_layout_function_that_raises(case: str) -> None:
    """As a layout, in others, and where problems are collected."""
    function, path, told, cause = FAILING[case]
    rules = ft.AxisRules({"embed": None, "hidden": None})
    for layout in (
        function,
        ft.StateSharding({"**": function, ...: P()}),
        rules | function,
        ft.on_host(function),
    ):
        with pytest.raises(ft.ShardingError, match=r"the layout function .* failed") as caught:
            ft.plan(two(), layout, SIZES, check=False)
        (problem,) = caught.value.problems
        assert str(problem.path) == path and problem.why.startswith(told)
        assert "write a layout function that takes a leaf's path and array" in problem.remedy
        assert isinstance(caught.value.__cause__, cause)


class NotForThis(Exception):
    """An exception of the user's own."""


def test_an_exception_of_the_users_own_is_passed_on() -> None:
    def refusing(path: ft.Path, leaf: Any) -> Any:
        raise NotForThis(path)

    for run in (lambda: ft.plan(two(), refusing, SIZES), lambda: ft.split(two(), refusing, ...)):
        with pytest.raises(NotForThis, match="w"):
            run()


def test_what_is_no_layout() -> None:
    # Here it may be no tree of layouts.
    told = r"is not a layout: write `P.* a `Plan`, or a callable `\(path, leaf\) -> P`$"
    for bad in ("data", int):
        for make in (
            as_layout,
            lambda x: ft.StateSharding({...: x}),
            lambda x: ft.FSDP("data") | x,
            lambda x: x | ft.FSDP("a"),
        ):
            with pytest.raises(ft.RuleError, match=told):
                make(bad)


# `|`


def test_then_shards_only_what_first_left_whole() -> None:
    rules = ft.AxisRules({"hidden": "model", "embed": None})
    assert specs(two(), rules | ft.FSDP("data", min_size=0)) == [P("data", "model"), P("model")]
    by_path = ft.StateSharding({"w": P(None, "model"), "b": P()})
    assert specs(two(), by_path | ft.FSDP("data", min_size=0)) == [P("data", "model"), P("data")]
    after = ft.FSDP("data", min_size=0) | ft.StateSharding({"w": P("model"), "b": P()})
    assert specs(two(), after) == [P("model", "data"), P("data")]
    assert specs(jnp.ones((4, 8)), as_layout(P("data")) | P("data", "model")) == [
        P("data", "model")
    ]  # the same is no conflict


def test_brackets_do_not_matter() -> None:
    a, b, c = ft.AxisRules({"embed": None, "hidden": "model"}), ft.FSDP("data", min_size=0), P()
    assert (a | b) | c == a | (b | c) and hash((a | b) | c) == hash(a | (b | c))


def test_names_are_checked_against_the_composition() -> None:
    tree = module("embed hidden", 4, 8)
    hidden, embed = ft.AxisRules({"hidden": "model"}), ft.AxisRules({"embed": "data"})
    assert specs(tree, hidden | embed) == specs(tree, embed | hidden) == [P("data", "model")]
    assert specs(tree, hidden | ft.AxisRules({...: None})) == [P(None, "model")]
    assert specs(tree, ft.AxisRules({...: None}) | hidden) == [P(None, "model")]
    # a spec speaks of every dimension
    assert (
        specs(tree, P("data") | hidden) == specs(tree, hidden | P("data")) == [P("data", "model")]
    )
    # rules see that a mesh axis is taken
    assert specs(tree, P("data") | ft.AxisRules({"hidden": "data", "embed": None})) == [
        P("data", None)
    ]
    # each blocked name is told once, with the layout that it could go by
    one = ft.AxisRules([("hidden", "model"), ("embed", "model")])
    (problem,) = ft.plan(tree, one | ft.AxisRules({"other": "data"}), SIZES, check=False).problems
    assert problem.why.startswith('no rule for "embed" applies')
    assert specs(tree, one | ft.AxisRules({"embed": "data"})) == [P("data", "model")]


def test_none_cannot_be_joined() -> None:
    for make in (lambda: ft.FSDP("data") | None, lambda: None | ft.FSDP("data")):
        with raises("`None` is not a layout: remove `None`, or write `P()`", error=ft.RuleError):
            make()


def test_joined_shardings_bring_their_mesh(mesh: Mesh) -> None:
    plan = ft.plan(jnp.ones((4, 8)), NamedSharding(mesh, P("data")) | ft.FSDP("model", min_size=0))
    assert plan.mesh == mesh and plan[()].spec == P("data", "model")


# Values


def is_bias(path: Any, leaf: Any) -> bool:
    return path[-1] == "bias"


# All different. `tests/laws/test_layout_laws.py` draws others.
VALUES: list[ft.Layout] = [
    ft.AxisRules({}),
    ft.AxisRules({"a": "data", "b": None}),
    ft.AxisRules({"b": None, "a": "data"}),
    ft.AxisRules({"a": "data", "b": None, ...: None}),
    ft.AxisRules({"a": ("data", "model"), "b": None}),
    ft.AxisRules([("a", "data"), ("a", "model"), ("b", None)]),
    ft.AxisRules({"a": "data"}, names={eqx.nn.Linear: ft.names(weight="a b", bias="a")}),
    ft.AxisRules({"a": "data"}, unnamed=P()),
    ft.FSDP("data"),
    ft.FSDP("model"),
    ft.FSDP("data", min_size=3),
    ft.FSDP("data", axes="a b"),
    ft.FSDP("data", otherwise=P("model", ("a", "b"))),
    ft.AxisRules({"a": "data"}) | ft.FSDP("data") | P(),
    ft.FSDP("data") | ft.AxisRules({"a": "data"}) | P(),
    ft.on_host(P("data")),
    ft.StateSharding({"a": P()}, unused="warn"),
    ft.StateSharding({"a": None, ...: P()}),
    ft.StateSharding([("a", P()), ("a", P("data"))], unused="ignore"),
    ft.StateSharding({"a.*": P("data"), "**.bias": P()}),
    ft.StateSharding({"**.bias": P(), "a.*": P("data")}),
    ft.StateSharding({'a."b.c"': P(), 'a."0"': P(), ft.Path(("a", 0)): P()}),
    ft.StateSharding([(eqx.nn.Linear, P()), (eqx.nn.Linear | eqx.nn.Conv, P("data"))]),
    ft.StateSharding({ft.glob("a") & ft.has_axis("embed") | ~ft.has_ndim(2): P()}),
    ft.StateSharding({ft.larger_than(3) & (ft.is_buffer | ft.is_trainable): P()}),
    ft.StateSharding({re.compile(r"a\.b", re.IGNORECASE): P(), ft.has_dtype(jnp.floating): P()}),
    ft.StateSharding({is_bias: lambda path, leaf: P()}),
]
NAMESPACE = {name: getattr(ft, name) for name in dir(ft)} | {
    "Linear": eqx.nn.Linear,
    "Conv": eqx.nn.Conv,
    "floating": jnp.floating,
    "re": re,
}


def test_layouts_are_values() -> None:
    for i, layout in enumerate(VALUES):
        assert [layout == other for other in VALUES] == [i == j for j in range(len(VALUES))]
        copies = [copy.copy(layout), copy.deepcopy(layout)]
        if layout is not VALUES[-1]:  # functions have no text, and a lambda no pickle
            copies += [pickle.loads(pickle.dumps(layout)), eval(repr(layout), NAMESPACE)]
        for again in copies:
            assert again == layout and hash(again) == hash(layout) and repr(again) == repr(layout)
    for layout, field in ((VALUES[0], "closed"), (VALUES[8], "min_size"), (VALUES[16], "filters")):
        with pytest.raises(AttributeError, match="cannot assign"):
            setattr(layout, field, ())


# Host memory


def test_on_host(mesh: Mesh) -> None:
    rules = ft.AxisRules({"hidden": "model", "embed": None})
    plan = ft.plan({"a": two(), "b": two()}, {"a": ft.on_host(rules), "b": rules}, mesh)
    assert [row.memory_kind for row in plan] == ["pinned_host"] * 2 + [None] * 2
    assert ft.on_host(P()) == ft.on_host(P()) != P()
    for nothing in (None, 3):
        with pytest.raises(ft.RuleError, match=f"{nothing}`? is not "):
            ft.on_host(nothing)  # type: ignore[arg-type]
    # joined, with host memory said by either
    for layout in (
        ft.on_host(P("data")) | P(None, "model"),
        P("data") | ft.on_host(P(None, "model")),
        ft.on_host(P("data")) | plan_of(mesh),
    ):
        found = ft.plan(jnp.ones((4, 8)), layout, mesh)[()]
        assert (found.spec, found.memory_kind) == (P("data", "model"), "pinned_host")


def plan_of(mesh: Mesh) -> ft.Plan:
    return ft.plan(jnp.ones((4, 8)), P(None, "model"), mesh)


# Prefix trees


TREES: dict[str, tuple[Any, Any, list[P]]] = {
    "one for all": ({"a": x(4), "b": [x(4)]}, P("data"), [P("data"), P("data")]),
    "module": (
        MLP(x(4, 8), x(8, 4)),
        MLP(P("data"), P(), None, None),  # type: ignore[arg-type]
        [P("data", None), P(None, None)],
    ),
    "a layout over None": ({"a": None, "b": x(4)}, {"a": P("data"), "b": P()}, [P(None)]),
    "every kind of layout": (
        (module("embed hidden", 4, 8), x(8, 4), {"bias": x(4)}, x(4), x(8, 8)),
        (
            ft.AxisRules({"embed": "data", "hidden": "model"}),
            P("model"),
            ft.StateSharding({"bias": P("data")}),
            lambda path, leaf: P("model"),
            ft.FSDP("data", min_size=0) | ft.FSDP("model", min_size=0),
        ),
        [P("data", "model"), P("model", None), P("data"), P("model"), P("data", "model")],
    ),
}


@pytest.mark.parametrize("case", TREES)
def test_a_prefix_tree(case: str) -> None:
    tree, layout, expected = TREES[case]
    assert specs(tree, layout) == expected


def test_paths_start_below_the_layout() -> None:
    tree = {"model": {"w": x(4), "b": x(4)}, "other": {"w": x(4)}}
    layout = ft.StateSharding({"w": P("data"), ...: P()})
    assert specs(tree, {"model": layout, "other": P("model")}) == [P(None), P("data"), P("model")]
    with pytest.raises(ft.ShardingError, match="filter 'w'\n      matches no leaf"):
        ft.plan(tree, layout, SIZES)  # now the path is `model.w`


WRONG: dict[str, tuple[Any, Any, str]] = {
    "another key": (
        {"a": x(4)},
        {"b": P()},
        "at the root: `b` is only in the layouts; `a` is only in the tree: use the keys of the tree",
    ),
    "keys in another order": (
        OrderedDict(a=x(4), b=x(4)), OrderedDict(b=P(), a=P()),
        "the layouts have the keys of the tree in a different order (`b`, `a` instead of `a`, `b`)",
    ),
    "many keys": ({f"k{i}": x(4) for i in range(MAX_PATHS + 5)}, {}, " and 5 more are only in the tree"),
    "another container": ({"a": (x(4),)}, {"a": [P()]}, "at `a`: the layouts are a list, but the tree is a tuple"),
    "below a leaf": ({"a": x(4)}, {"a": [P()]}, "at `a`: the layouts are a list, but the tree is a leaf"),
    "no layout": ({"a": x(4)}, {"a": 3}, "at `a`: 3 is not a layout: write `P(...)`, "),
    "no tree of layouts": ({"a": x(4)}, {"a": 3}, "or a callable `(path, leaf) -> P`, or a tree of layouts"),
    "no layout at all": (x(4), 3, "at the root: 3 is not a layout"),
    "an invalid spec": ({"a": x(4)}, {"a": P(3)}, "at `a`: P(3): 3 is not a mesh axis"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_tree_of_layouts_has_the_structure_of_the_tree(case: str) -> None:
    tree, layout, said = WRONG[case]
    with pytest.raises(ft.RuleError) as caught:
        ft.plan(tree, layout, SIZES)
    assert said in str(caught.value)


def test_what_is_wrong_with_a_layout_is_said_once() -> None:
    rules = ft.AxisRules({"embed": "dtaa", "hidden": None})
    one = module("embed hidden", 4, 8)
    tree = [one, one, {"again": one}]
    problems = ft.plan(tree, [rules, rules, rules], SIZES, check=False).problems
    assert [problem.path for problem in problems].count(None) == 1
