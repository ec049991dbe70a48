"""What a layout is refused for: the record of each problem, what each family says to do, and one rendering."""

from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

import functree as ft
from tests.lib.checks import refused
from tests.lib.meshes import SIZES
from tests.lib.trees import hold, module, x


class Physical(eqx.Module):
    w: Annotated[Float[Array, "embed hidden"], P(None, "stage")]


class Position(eqx.Module):
    weight: jax.Array


W = {"w": x(8, 6)}
EH = module("embed hidden", 8, 16)
RULES = ft.AxisRules({"embed": None, "hidden": "model"})
ALL = ft.FSDP("data", min_size=0)
SHARED = np.ones((4, 8), np.float32)
TIED = {"a": SHARED, "b": [SHARED]}
DEAD = ft.StateSharding({"nothing": P(), ...: P()})

# A tree and a layout ─► each problem: the path, or the part of the layout, and what is wrong.
REFUSED: dict[str, tuple[Any, Any, list[str]]] = {
    # Sizes that the mesh axes do not divide
    "a size by a spec": (W, P(None, "model"), ["w: dimension 1 has size 6; model=4 needs a multiple of 4"]),
    "a size by a rule": (module("embed hidden", 8, 6), RULES, [
        'w: "hidden" has size 6; rule hidden→model needs a multiple of model=4',
    ]),
    "sizes by FSDP": ({"w": x(3, 5)}, ALL, [
        "w: FSDP('data'): none of the dimensions it may shard (dimension 0=3, dimension 1=5) is a multiple of data=2",
    ]),
    "what is left to FSDP": (module("embed hidden", 3, 8), P(None, "model") | ALL, [
        "w: FSDP('data'): none of the dimensions it may shard (\"embed\"=3) is a multiple of data=2",
    ]),
    "what FSDP does otherwise": ({"w": x(3, 5)}, ft.FSDP("data", min_size=0, otherwise=P("data")), [
        "w: dimension 0 has size 3; data=2 needs a multiple of 2",
    ]),
    # Mesh axes
    "a mesh axis of a spec": (W, P("modle"), [
        "w: P('modle') names `modle`, but the mesh (data=2, model=4) has no such axis; did you mean `model`?",
    ]),
    "mesh axes of rules": (EH, ft.AxisRules({"embed": None, "hidden": "modle", "unused": "bogus"}), [
        "rule hidden→modle: the mesh (data=2, model=4) has no axis `modle`; did you mean `model`?",
        "rule unused→bogus: the mesh (data=2, model=4) has no axis `bogus`",
    ]),
    "a mesh axis of FSDP": (W, ft.FSDP("dta"), [
        "FSDP('dta'): the mesh (data=2, model=4) has no axis `dta`; did you mean `data`?",
    ]),
    "a mesh axis of an annotation": (Physical(x(8, 8)), ft.AxisRules({}), [
        "w: P(None, 'stage') names `stage`, but the mesh (data=2, model=4) has no such axis",
    ]),
    "a mesh axis twice": (W, P("data", "data"), [
        "w: mesh axis `data` is used twice, the second time by P('data', 'data') for dimension 1",
    ]),
    "a mesh axis by two layouts": (EH, P("data") | ft.StateSharding({...: P(None, "data")}), [
        "w: mesh axis `data` is used twice, the second time by P(None, 'data') for \"hidden\"",
    ]),
    # Entries of specs
    "rank": (W, P("data", None, None), ["w: P('data', None, None) has 3 entries for 2 dimensions"]),
    "unconstrained": (W, P(P.UNCONSTRAINED), [
        "w: entry 0 of the spec is `P.UNCONSTRAINED`, which does not define a sharding",
    ]),
    "unreduced": (W, P("data", unreduced={"model"}), [
        "w: P('data', unreduced={'model'}) describes partial sums, which exist only inside a computation",
    ]),
    "no mesh axis": (W, (lambda path, leaf: P(3)), ["w: P(3): 3 is not a mesh axis, a tuple of mesh axes, or `None`"]),
    "no spec": (W, (lambda path, leaf: None), ["w: <lambda> returned None, which is not a PartitionSpec"]),
    "all at once": (EH, P("data") | ft.StateSharding({...: P("model", P.UNCONSTRAINED, None)}), [
        "w: P('model', P.UNCONSTRAINED, None) has 3 entries for 2 dimensions",
        "w: \"embed\" is already sharded over data, but P('model', P.UNCONSTRAINED, None) shards it over model",
        "w: entry 1 of the spec is `P.UNCONSTRAINED`, which does not define a sharding",
    ]),
    # Names
    "a name without a rule": (EH, ft.AxisRules({"embed": None, "hiden": "model"}), [
        "w: no rule names `hidden`; did you mean the rule for `hiden`?",
    ]),
    "a name that only another branch names": (
        {"a": EH, "b": EH},
        ft.StateSharding({"a.**": ft.AxisRules({"embed": None, "hidden": None}), ...: ft.AxisRules({"embed": None})}),
        ["b.w: no rule names `hidden`"],
    ),
    "a mesh axis twice before rules": (EH, P("model", "model") | ft.AxisRules([("hidden", "model"), ("hidden", None), ("embed", None)]), [
        "w: mesh axis `model` is used twice, the second time by P('model', 'model') for \"hidden\"",
    ]),
    "a name behind FSDP, otherwise": (module("embed hidden", 3, 8), ft.AxisRules({"hidden": "model"}) | ft.FSDP("data", min_size=0, otherwise=P()), [
        "w: no rule names `embed`",
    ]),
    "a name whose rules are blocked": (EH, ft.AxisRules({"embed": "model", "hidden": "model"}), [
        'w: no rule for "hidden" applies: `model` already shards "embed", and no rule leaves "hidden" unsharded',
    ]),
    "a typo behind the ellipsis": (EH, ft.AxisRules({"hiden": "model", ...: None}), [
        'w: "hidden" has no rule except `...: None`, and no leaf has the axis `hiden`, which a rule names',
    ]),
    "no names": (W, ft.AxisRules({"a": "data", ...: None}), ["w: has no axis names, and rules shard axes by name"]),
    "no names in a class": ({"position": Position(x(4, 8))}, RULES, [
        "position.weight: has no axis names, and rules shard axes by name",
    ]),
    "a misfit": (module("embed hidden", 3, 8, 16), RULES, [
        'w: has 3 dimensions, but `Float[Array, "embed hidden"]` has 2',
    ]),
    "a misfit, by FSDP": (module("embed hidden", 3, 8, 16), ALL, [
        'w: has 3 dimensions, but `Float[Array, "embed hidden"]` has 2',
    ]),
    "names for another field": ([eqx.nn.Linear(4, 8, use_bias=False, key=jax.random.key(0))], ft.AxisRules({...: None}, names={eqx.nn.Linear: ft.names(wieght="out in")}), [
        "0: `ft.names` gives axes to `wieght`, but Linear has no such leaf; did you mean `weight`?",
        "0.weight: has no axis names, and rules shard axes by name",
    ]),
    "an axis of FSDP": (EH, ft.FSDP("data", axes="embd hidden", min_size=0), [
        "FSDP('data', min_size=0, axes=('embd', 'hidden')): no leaf has the axis `embd`; did you mean `embed`?",
    ]),
    # What an earlier layout has sharded
    "two specs": (EH, P("data") | ft.StateSharding({...: P("model")}), [
        "w: \"embed\" is already sharded over data, but P('model') shards it over model",
    ]),
    "a spec and rules": (EH, P("data") | ft.AxisRules({"embed": "model", "hidden": None}), [
        'w: "embed" is already sharded over data, but rule embed→model shards it over model',
    ]),
    # Filters
    "no filter": ({"a": x(4), "b": x(4)}, ft.StateSharding({"a": P(), Position: P()}), [
        "filter under(Position): matches no leaf",
        "b: no filter matches this leaf; the filters are 'a', under(Position)",
    ]),
    "no filters": (W, ft.StateSharding({}), ["w: no filter matches this leaf, since there are no filters"]),
    "a filter of nothing": (W, ft.StateSharding({"**.bais": P("data"), ...: P()}), [
        "filter '**.bais': matches no leaf",
    ]),
    "a filter of nothing in another": (W, ft.StateSharding({"w": ft.StateSharding({"**.bais": P(), ...: P()}), ...: P()}), [
        "filter '**.bais': matches no leaf",
    ]),
    "a filter of nothing before FSDP": (W, DEAD | ALL, ["filter 'nothing': matches no leaf"]),
    "a filter of nothing in one part": ({"a": x(4), "b": [x(4)]}, {"a": P(), "b": DEAD}, [
        "filter 'nothing', for `b`: matches no leaf",
    ]),
    "a filter of nothing in two parts": ({"a": x(4), "b": [x(4)], "c": x(4)}, {"a": DEAD, "b": DEAD, "c": P()}, [
        "filter 'nothing': matches no leaf",
    ]),
    "a hidden filter": ({"a": x(4), "b": x(4)}, ft.StateSharding({"*": P(), "b": P("data"), ...: P()}), [
        "filter 'b': is never used, since earlier filters match all leaves that it matches: '*' matches `b`",
    ]),
    # Others
    "no layout": ({"w": x(4), "n": 3}, {"w": None, "n": None}, ["w: no layout was given for this array (`None`)"]),
    "one array at two paths": (TIED, {"a": P("data"), "b": [P("model")]}, [
        "b.0: is the same array as `a`, which is laid out as P('data', None), not as P('model', None)",
    ]),
    "one array in two memories": (TIED, {"a": ft.on_host(P("data")), "b": P("data")}, [
        "b.0: is the same array as `a`, which is laid out as P('data', None) in pinned_host, not as P('data', None)",
    ]),
    "a plan of another tree": (W, ft.plan({"v": x(4)}, P(), SIZES), ["w: the plan has no row for this leaf"]),
    "a plan of live arrays": (W, ft.plan({"w": jnp.ones((8,6))}), [
        "w: the plan has no spec for this leaf: uncommitted, on the device cpu:0",
    ]),
}  # fmt: skip

# What each family says to do, by one of its cases; the whole text below has others.
REMEDIES = {
    "a size by a spec": "pad dimension 1 to 8, or write `None` in the spec to leave it unsharded",
    "sizes by FSDP": (
        "pad one of these dimensions, raise `min_size`, or pass `otherwise=P()` to skip leaves that FSDP cannot "
        "shard"
    ),
    "a mesh axis of a spec": "use an axis that the mesh has",
    "a mesh axis of FSDP": "use an axis that the mesh has",
    "a mesh axis twice": "use the mesh axis once: it can shard only one dimension of an array",
    "rank": "write at most one entry for each dimension",
    "unconstrained": "write a mesh axis or `None`",
    "unreduced": "write a spec without `unreduced` and `reduced`",
    "no mesh axis": "write names of mesh axes, or `None`",
    "mesh axes of rules": "use an axis that the mesh has",
    "no spec": "return `P(...)` for every leaf, or `P()` to replicate it",
    "a name without a rule": 'use the same name, `hidden` or `hiden`, in the rule and in the axes, or add `"hidden": None` to leave `hidden` unsharded',
    "a name behind FSDP, otherwise": 'add a rule for `embed`, or `"embed": None` to leave `embed` unsharded',
    "a typo behind the ellipsis": 'use the same name, `hidden` or `hiden`, in the rule and in the axes, or add the rule `"hidden": None` if the two names mean different axes',
    "no names": (
        'annotate the array (`Float[Array, "<axes>"]`), pass `names=` to the rules, lay the array out with a path filter, '
        "or pass `unnamed=P()` to the rules to leave it unsharded"
    ),
    "no names in a class": (
        'annotate the array (`Float[Array, "<axes>"]`), pass `names={Position: ft.names(weight="<axes>")}` to the rules, lay '
        "the array out with a path filter, or pass `unnamed=P()` to the rules to leave it unsharded"
    ),
    "names for another field": "name a leaf of Linear: `weight`, `bias`",
    "an axis of FSDP": "correct the name in `axes=`",
    "two specs": "after `|`, shard only dimensions that the earlier layouts leave unsharded",
    "no filters": "add a filter for this leaf, or `...: P()` as the last filter",
    "a filter of nothing": 'correct the filter, remove it, or write `unused="ignore"`',
    "a hidden filter": "remove the filter, or move it before the earlier filters if it should apply to these leaves",
    "no layout": "write `P()` to replicate this array",
    "one array at two paths": "give both paths the same spec, or put a separate array at each path",
    "a plan of another tree": "use a plan of the tree that contains this leaf",
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    tree, layout, told = REFUSED[case]
    with pytest.raises(ft.ShardingError) as caught:
        ft.plan(tree, layout, SIZES)
    problems = caught.value.problems
    assert [f"{p.what if p.path is None else p.path}: {p.why}" for p in problems] == told
    if case in REMEDIES:
        assert problems[0].remedy == REMEDIES[case]
    assert all(problem.remedy for problem in problems)


def test_all_that_is_wrong_with_a_tree_in_one_error() -> None:
    """The whole text for several leaves, and for the layout itself."""
    tree = [module("hidden embed", 6, 3), module("hidden vocab", 8, 8), module("hiden", 8)]
    rules = ft.AxisRules(
        [("embed", "data"), ("hidden", "model"), ("vocab", "model"), ("x", "stage")]
    )
    with pytest.raises(ft.ShardingError) as caught:
        ft.plan(tree, rules, SIZES)
    assert str(caught.value) == (
        "3 leaves cannot be laid out on mesh (data=2, model=4)\n"
        "\n"
        "  rule x→stage\n"
        "      the mesh (data=2, model=4) has no axis `stage`\n"
        "\n"
        '  0.w   f32[6, 3]   "hidden embed"\n'
        '      "hidden" has size 6; rule hidden→model needs a multiple of model=4\n'
        '      "embed" has size 3; rule embed→data needs a multiple of data=2\n'
        "\n"
        '  1.w   f32[8, 8]   "hidden vocab"\n'
        '      no rule for "vocab" applies: `model` already shards "hidden", and no rule leaves "vocab" unsharded\n'
        "\n"
        '  2.w   f32[8]   "hiden"\n'
        "      no rule names `hiden`; did you mean the rule for `hidden`?\n"
        "\n"
        "Try: use an axis that the mesh has, add the missing axis to the mesh with size 1, or drop the rule with `rules.on(mesh)`, which must precede any `|`\n"
        '     pad "hidden" to 8, leave this leaf unsharded with a path filter (`StateSharding`), or leave every "hidden" unsharded with `"hidden": None`\n'
        '     pad "embed" to 4, leave this leaf unsharded with a path filter (`StateSharding`), or leave every "embed" unsharded with `"embed": None`\n'
        '     after the rules for "vocab", add `("vocab", None)` to leave it unsharded, or add a fallback to another mesh axis\n'
        '     use the same name, `hiden` or `hidden`, in the rule and in the axes, or add `"hiden": None` to leave `hiden` unsharded'
    )
    assert caught.value.problems == ft.plan(tree, rules, SIZES, check=False).problems
    assert [(str(p.path), p.shape) for p in caught.value.problems] == [
        ("None", None),
        ("0.w", (6, 3)),
        ("0.w", (6, 3)),
        ("1.w", (8, 8)),
        ("2.w", (8,)),
    ]


def test_what_is_at_fault_is_counted() -> None:
    """A module is no leaf, and a layout may be at fault alone."""
    for case, told in (
        ("names for another field", "1 leaf cannot be laid out on mesh (data=2, model=4)\n"),
        ("a filter of nothing", "the layout does not fit the tree on mesh (data=2, model=4)\n"),
    ):
        tree, layout, _ = REFUSED[case]
        assert refused(tree, layout).startswith(told)


def test_a_leaf_is_not_blamed_for_one_before_it() -> None:
    """Leaves may share a decision, and leaves of a class that is annotated a spelling."""

    class Scales(eqx.Module):
        first: Float[Array, "embed"]
        second: Float[Array, ""]

    for layout in (ft.AxisRules({"embed": None}), ALL):
        problems = ft.plan(Scales(x(), x()), layout, SIZES, check=False).problems
        assert [str(problem.path) for problem in problems] == ["first"]
    for one, other in ("ab", "ba"):
        arrays = {one: module("_ _", 4, 8), other: x(4, 8)}
        problems = ft.plan(arrays, RULES, SIZES, check=False).problems
        assert [str(problem.path) for problem in problems] == [other]


def test_a_spec_of_what_is_no_mesh_axis() -> None:
    """Where it is written, and else where it is found."""
    spec = P(("data", 3))  # pyright: ignore
    told = "is not a mesh axis, a tuple of mesh axes, or `None`"
    for make in (lambda: ft.plan(W, spec, SIZES), lambda: ft.StateSharding({...: spec})):
        with pytest.raises(ft.RuleError, match=told):
            make()
    assert told in refused(hold(Annotated[Float[Array, "a"], spec], x(4)), ft.AxisRules({}))
