"""`AxisRules`: Linen's algorithm, beside an oracle of it, and everything that Linen lets pass in
silence."""

import copy
import pickle
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Float

import functree as ft
from tests.lib.checks import refused as why
from tests.lib.meshes import MESH, SIZES

P = PartitionSpec
Table = list[tuple[str, Any]]


def leaf(axes: str, *shape: int) -> Any:
    """A module with one array `w` of these axes."""
    cls = type(
        "One", (eqx.Module,), {"__annotations__": {"w": Float[Array, axes]}, "__module__": __name__}
    )
    return cls(jax.ShapeDtypeStruct(shape or (8,) * len(axes.split()), jnp.float32))  # type: ignore[call-arg]


# Linen's algorithm


def linen(axes: tuple[str | None, ...], rules: Table) -> tuple[list[Any], set[str]]:
    """`flax.linen.logical_to_mesh_axes`, from its description: the entries, and the names that no
    rule placed."""
    unassigned = object()
    result: list[Any] = [unassigned] * len(axes)

    def used() -> set[str]:
        found: set[str] = set()
        for item in result:
            if isinstance(item, str):
                found.add(item)
            elif isinstance(item, tuple):
                found |= set(item)
        return found

    for name, target in rules:
        if name not in axes:
            continue
        at = axes.index(name)
        wanted = {target} if isinstance(target, str) else set(target or ())
        if result[at] is unassigned and not (wanted & used()):
            result[at] = target
    lost = {
        name
        for name, item in zip(axes, result, strict=True)
        if item is unassigned and name is not None
    }
    return [None if item is unassigned else item for item in result], lost


NAMES = ("batch", "seq", "embed", "hidden", "heads")
MESH_AXES = ("data", "model", "expert", "stage")
TARGETS = st.one_of(
    st.none(),
    st.sampled_from(MESH_AXES),
    st.lists(st.sampled_from(MESH_AXES), min_size=2, max_size=3, unique=True).map(tuple),
)
# Linen has no names twice in one array
AXES = st.lists(st.sampled_from(NAMES), max_size=4, unique=True).flatmap(
    lambda names: st.permutations([*names, None]).map(tuple)
)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Rules in an order that names come again in; none behind one that closes its name."""
    closed: set[str] = set()
    table = []
    for name, target in draw(st.lists(st.tuples(st.sampled_from(NAMES), TARGETS), max_size=8)):
        if name not in closed:
            table.append((name, target))
        if target is None:
            closed.add(name)
    return table


@given(tables(), AXES, st.booleans())
def test_as_linen(table: Table, axes: tuple[str | None, ...], closed: bool) -> None:
    entries, lost = linen(axes, table)
    rules = ft.AxisRules([*table, (..., None)] if closed else table)
    if closed or not lost:
        assert rules.spec(ft.Axes(*axes)) == P(*entries)
        return
    with pytest.raises(ft.ShardingError) as caught:
        rules.spec(ft.Axes(*axes))
    mentioned = {name for name, _ in table}
    for name in lost:
        said = f'"{name}" has no rule left' if name in mentioned else f"no rule names `{name}`"
        assert said in str(caught.value)
    assert len(caught.value.problems) == len(lost)


ORDER: dict[str, tuple[Any, str, P]] = {
    "the table's order, not the array's": (
        {"batch": "data", "embed": "data", ...: None},
        "embed batch",
        P(None, "data"),
    ),
    "a parameter by the same table": (
        {"batch": "data", "embed": "data", ...: None},
        "embed hidden",
        P("data", None),
    ),
    "a fallback": ([("a", "x"), ("b", "x"), ("b", "y")], "a b", P("x", "y")),
    "no fallback needed": ([("a", "x"), ("b", "x"), ("b", "y")], "b", P("x")),
    "a fallback in between": ([("b", "x"), ("a", "x"), ("a", "y")], "a b", P("y", "x")),
    "the first that is free": ([("a", "x"), ("a", "y")], "a", P("x")),
    "a tuple": ({"a": ("x", "y"), "b": None}, "a b", P(("x", "y"), None)),
    "a tuple is free only as a whole": (
        [("a", "x"), ("b", ("x", "y")), ("b", None)],
        "a b",
        P("x", None),
    ),
    "a tuple of one": ({"a": ("x",)}, "a", P("x")),
    "a list": ({"a": ["x", "y"]}, "a", P(("x", "y"))),
    "None closes": ([("a", "x"), ("b", "x"), ("b", None)], "a b", P("x", None)),
    "... closes what is blocked": ([("a", "x"), ("b", "x"), (..., None)], "a b", P("x", None)),
    "... closes what is not mentioned": ({"a": "x", ...: None}, "other a", P(None, "x")),
    "unnamed dimensions are whole": ({"a": "x"}, "_ a _", P(None, "x", None)),
    "nothing": ({"a": "x"}, "", P()),
    "one name twice, one mesh axis": ([("a", "x"), ("a", None)], "a a", P("x", None)),
    "one name twice, and a fallback": ([("a", "x"), ("a", "y")], "a a", P("x", "y")),
}


@pytest.mark.parametrize("case", ORDER)
def test_the_algorithm(case: str) -> None:
    table, axes, expected = ORDER[case]
    assert ft.AxisRules(table).spec(axes) == expected
    assert ft.AxisRules(table).spec(ft.Axes.parse(axes)) == expected
    shape = (8,) * len(expected)
    assert (
        ft.plan(leaf(axes, *shape), ft.AxisRules(table), {"x": 2, "y": 2, "data": 2}).rows[0].spec
        == expected
    )


def test_the_reason_names_the_rule_of_each_dimension() -> None:
    rules = ft.AxisRules([("batch", "data"), ("embed", "data"), ("embed", None), (..., None)])
    plan = ft.plan(leaf("batch seq embed"), rules, SIZES)
    assert plan["w"].reason == "batch→data, seq→None (...), embed→None"
    assert ft.plan(leaf(""), rules, SIZES)["w"].reason == "a scalar"


# What Linen lets pass in silence


def test_a_name_that_no_rule_mentions() -> None:
    text = why(leaf("embed hidden"), ft.AxisRules({"embed": None, "hiden": "model"}))
    assert "no rule names `hidden`; did you mean the rule for `hiden`?" in text
    assert 'Try: add a rule for "hidden", or `"hidden": None` to leave it unsharded' in text
    assert 'w   f32[8, 8]   "embed hidden"' in text
    assert "did you mean" not in why(
        leaf("embed vocab"), ft.AxisRules({"embed": None, "hidden": "model"})
    )
    assert ft.plan(leaf("embed hidden"), ft.AxisRules({"hidden": "model", ...: None}), SIZES)[
        "w"
    ].spec == P(None, "model")


def test_a_name_whose_rules_are_all_blocked() -> None:
    blocked: Table = [("embed", "model"), ("vocab", "model")]
    text = why(leaf("embed vocab"), ft.AxisRules(blocked))
    assert (
        '"vocab" has no rule left: `model` is used by "embed", and no rule lets "vocab" be unsharded'
        in text
    )
    assert 'add `("vocab", None)` after its rules to leave it unsharded' in text
    for closing in ([("vocab", None)], [(..., None)]):
        assert ft.plan(leaf("embed vocab"), ft.AxisRules([*blocked, *closing]), SIZES)[
            "w"
        ].spec == P("model", None)
    assert '`data` is used by "a"' in why(
        leaf("a b"), ft.AxisRules([("a", "data"), ("b", ("model", "data"))])
    )


def test_a_size_that_does_not_divide() -> None:
    text = why(
        leaf("hidden embed", 1001, 4096),
        ft.AxisRules({"hidden": "model", "embed": None}),
        {"data": 4, "model": 2},
    )
    assert text == (
        "1 leaf cannot be laid out on mesh (data=4, model=2)\n"
        "\n"
        '  w   f32[1001, 4096]   "hidden embed"\n'
        '      "hidden" has size 1001; rule hidden→model needs a multiple of model=2\n'
        "\n"
        'Try: pad "hidden" to 1002, leave this leaf unsharded by a path filter (`StateSharding`), or every "hidden" by '
        '`"hidden": None`'
    )
    both = why(leaf("a", 12), ft.AxisRules({"a": ("data", "model")}))
    assert (
        '"a" has size 12; rule a→(data, model) needs a multiple of (data, model)=8' in both
        and 'pad "a" to 16' in both
    )
    # always: also when `...` is there, when another layout follows, and for a size of one
    assert "has size 1;" in why(leaf("a", 1), ft.AxisRules({"a": "data", ...: None}))
    assert "has size 3;" in why(
        leaf("a", 3), ft.AxisRules([("a", "data"), ("a", None)]) | ft.FSDP("model", min_size=0)
    )
    assert ft.plan(leaf("a b", 0, 3), ft.AxisRules({"a": "data", "b": None}), SIZES)[
        "w"
    ].local_shape == (0, 3)


def test_all_that_is_wrong_with_a_tree_in_one_error() -> None:
    tree = [leaf("hidden embed", 6, 3), leaf("hidden vocab", 8, 8), leaf("hiden", 8)]
    rules = ft.AxisRules([("embed", "data"), ("hidden", "model"), ("vocab", "model")])
    with pytest.raises(ft.ShardingError) as caught:
        ft.plan(tree, rules, SIZES)
    assert str(caught.value).startswith("3 leaves cannot be laid out on mesh (data=2, model=4)\n")
    assert [(str(p.path), p.shape) for p in caught.value.problems] == [
        ("0.w", (6, 3)),
        ("0.w", (6, 3)),
        ("1.w", (8, 8)),
        ("2.w", (8,)),
    ]


def test_unused_rules_are_listed() -> None:
    plan = ft.plan(
        leaf("embed"),
        ft.AxisRules([("embed", None), ("b", "data"), ("a", "data"), ("b", "model")]),
        SIZES,
    )
    assert plan.unused == ("b", "a")
    assert "no leaf needed: b, a" in str(plan) and "b, a" in plan.html()


def test_what_one_part_of_a_tree_lacks_another_may_have() -> None:
    rules = ft.AxisRules({"embed": None, "hidden": "model", "seq": None})
    tree = {"a": leaf("embed"), "b": leaf("hidden")}
    assert ft.plan(tree, {"a": rules, "b": rules}, SIZES).unused == ("seq",)
    assert ft.plan(tree, ft.StateSharding({"a.**": rules, ...: rules}), SIZES).unused == ("seq",)


# Near misses behind `...`


def test_a_typo_does_not_hide_behind_the_ellipsis() -> None:
    text = why(leaf("embed hidden"), ft.AxisRules({"hiden": "model", ...: None}))
    assert '"hidden" has no rule but `...: None`, and no leaf has the axis of rule `hiden`' in text
    assert 'write the same name in both, or add `"hidden": None` if they are different axes' in text
    assert 'w   f32[8, 8]   "embed hidden"' in text
    written = ft.AxisRules({"hiden": "model", "hidden": None, ...: None})
    assert ft.plan(leaf("embed hidden"), written, SIZES).unused == ("hiden",)


def test_no_near_miss_where_both_names_are_in_the_tree() -> None:
    tree = {"a": leaf("layer1"), "b": leaf("layer2")}
    rules = ft.AxisRules({"layer1": "model", ...: None})
    assert ft.plan(tree, rules, SIZES)["b.w"].spec == P(None)
    assert ft.plan(tree, {"a": rules, "b": rules}, SIZES)["b.w"].spec == P(None)


@pytest.mark.parametrize("name", ["seq", "sepal", "hide", "mlp", "headings"])
def test_no_near_miss_of_other_names(name: str) -> None:
    table = {"heads": "data", "sep": "data", "hidden": "data", ...: None}
    assert ft.plan(leaf(name), ft.AxisRules(table), SIZES)["w"].spec == P(None)


# One is the beginning or the plural of the other: perhaps another axis, so it is a warning.
LONGER_FORMS = [
    ("heads", "head"),
    ("head", "heads"),
    ("hidden_dim", "hidden"),
    ("hidden", "hidden_dim"),
    ("vocab", "vocabs"),
    ("entry", "entries"),
    ("embedding", "embed"),
]


@pytest.mark.parametrize(("name", "rule"), LONGER_FORMS)
def test_a_longer_form_behind_the_ellipsis(name: str, rule: str) -> None:
    text = (
        rf'"{name}" has no rule but `\.\.\.: None`, so it is left unsharded in `a\.w`, `b\.w`, and '
        rf"no leaf has the axis of rule `{rule}`: write the same name in both, or add "
        rf'`"{name}": None` to the rules if they are different axes'
    )
    tree = {"a": leaf(name), "b": leaf(name)}
    with pytest.warns(ft.FunctreeWarning, match=text):
        found = ft.plan(tree, ft.AxisRules({rule: "data", ...: None}), SIZES)
    assert found["a.w"].spec == P(None)
    # The remedies, to the letter: neither warns.
    assert ft.plan(tree, ft.AxisRules({name: "data", ...: None}), SIZES)["a.w"].spec == P("data")
    both = ft.AxisRules({rule: "data", name: None, ...: None})
    assert ft.plan(tree, both, SIZES)["a.w"].spec == P(None)


def test_a_longer_form_that_a_leaf_has_is_another_axis() -> None:
    tree = {"a": leaf("head"), "b": leaf("heads")}
    assert ft.plan(tree, ft.AxisRules({"head": "data", ...: None}), SIZES)["b.w"].spec == P(None)


LONGER_FORM_DOORS = {
    "plan": lambda tree, rules: ft.plan(tree, rules, MESH),
    "shard": lambda tree, rules: ft.shard(tree, rules, MESH),
    "init": lambda tree, rules: ft.init(lambda: tree, rules, MESH).plan(),
    "filters": lambda tree, rules: ft.plan(tree, ft.StateSharding({"w": rules, ...: P()}), MESH),
    "composition": lambda tree, rules: ft.plan(tree, rules | ft.FSDP("data"), MESH),
    "in_shardings": lambda tree, rules: ft.jit(lambda m: m, in_shardings=rules, mesh=MESH).trace(
        tree
    ),
    "rules=": lambda tree, rules: ft.jit(lambda m: m, rules=rules, mesh=MESH).trace(tree),
    "in_specs": lambda tree, rules: ft.shard_map(
        lambda m: m, mesh=MESH, in_specs=rules, out_specs=P()
    ).trace(tree),
    "plan_optimizer": lambda tree, rules: ft.plan_optimizer(optax.sgd(0.1), tree, rules, MESH),
}


@pytest.mark.parametrize("door", LONGER_FORM_DOORS)
def test_a_longer_form_at_every_door(door: str) -> None:
    with pytest.warns(ft.FunctreeWarning, match="no leaf has the axis of rule `head`"):
        tree = jax.tree.map(lambda x: jnp.ones(x.shape), leaf("heads"))
        LONGER_FORM_DOORS[door](tree, ft.AxisRules({"head": "data", ...: None}))


def test_near_misses_are_of_the_whole_composition() -> None:
    text = why(leaf("embed hidden"), ft.AxisRules({"hiden": "model"}) | ft.AxisRules({...: None}))
    assert '"hidden" has no rule but `...: None`, and no leaf has the axis of rule `hiden`' in text
    # a name that the one rules on has not fallen through the other
    assert ft.plan(
        leaf("hidden"),
        ft.AxisRules({"hidden": "model"}) | ft.AxisRules({"hiden": "data", ...: None}),
        SIZES,
    )
    assert ft.plan(
        leaf("hidden"),
        ft.AxisRules({"hiden": "data", ...: None}) | ft.AxisRules({"hidden": "model"}),
        SIZES,
    )
    assert ft.plan(
        leaf("hidden"), ft.AxisRules({"hiden": "data", ...: None}) | P("data"), SIZES
    ).unused == ("hiden",)


def test_a_single_array_has_near_misses_too() -> None:
    rules = ft.AxisRules({"hidden": "model", ...: None})
    for mesh in (None, SIZES):
        with pytest.raises(ft.ShardingError, match=r'"hiden" has no rule but `...: None`'):
            rules.spec("batch hiden", mesh=mesh)


TRACED = ft.shard(jnp.ones((4, 2)), P(), MESH)


def test_a_longer_form_in_a_single_array() -> None:
    rules = ft.AxisRules({"heads": "model", ...: None})
    text = r"so it is left unsharded, and no leaf has the axis of rule `heads`: write the same name"
    for door in (
        lambda: rules.spec("head one"),
        lambda: ft.shard(jnp.ones((4, 2)), rules, MESH, axes="head two"),
        lambda: jax.jit(lambda x: ft.constrain(x, "head three", rules=rules)).trace(TRACED),
    ):
        with pytest.warns(ft.FunctreeWarning, match=text):
            door()
    assert rules.spec("heads one") == P("model", None)
    closed = ft.AxisRules({"heads": "model", "head": None, ...: None})
    assert closed.spec("head one") == P(None, None)


# Mesh axes


def test_a_mesh_axis_that_the_mesh_lacks() -> None:
    rules = ft.AxisRules({"embed": None, "hidden": "modle", "unused": "bogus"})
    with pytest.raises(ft.ShardingError) as caught:
        ft.plan(leaf("embed hidden"), rules, SIZES)
    text = str(caught.value)
    assert (
        "rule hidden→modle\n      the mesh (data=2, model=4) has no axis `modle`; did you mean `model`?"
        in text
    )
    assert "rule unused→bogus\n      the mesh (data=2, model=4) has no axis `bogus`" in text
    assert (
        "name an axis of the mesh, or leave such rules out: `rules.on(mesh)`, before `| FSDP"
        in text
    )
    assert len(caught.value.problems) == 2  # once for each rule, not for each leaf


def test_on_drops_such_rules_on_purpose() -> None:
    rules = ft.AxisRules(
        [("a", "expert"), ("a", "data"), ("b", ("model", "expert")), ("c", None), (..., None)]
    )
    on = rules.on(SIZES)
    assert on == ft.AxisRules([("a", "data"), ("c", None), ("b", None), (..., None)])
    assert ft.plan(leaf("b a"), on, SIZES)["w"].spec == P(None, "data")
    assert rules.on({"data": 1, "model": 1, "expert": 1}) == rules
    names = {eqx.nn.Linear: ft.names(weight="out in", bias="out")}
    assert ft.AxisRules({"out": "expert"}, names=names).on(SIZES).names == tuple(names.items())


def test_on_and_identity_take_any_mesh(mesh: Mesh) -> None:
    abstract = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    for given_mesh in (mesh, abstract, SIZES):
        assert ft.AxisRules.identity(given_mesh) == ft.AxisRules({"data": "data", "model": "model"})
        assert ft.AxisRules({"a": "data", "b": "x"}).on(given_mesh) == ft.AxisRules(
            {"a": "data", "b": None}
        )
    with jax.set_mesh(mesh):
        assert ft.AxisRules.identity(None).spec("model data") == P("model", "data")


def test_spec_checks_what_it_is_given() -> None:
    rules = ft.AxisRules({"batch": "data", "hidden": "model"})
    assert rules.spec("hidden batch") == P("model", "data")
    assert rules.spec("hidden", shape=(6,)) == P("model")  # nothing to divide by
    assert rules.spec("hidden", shape=(8,), mesh=SIZES) == P("model")
    assert ft.AxisRules({"a": "nowhere"}).spec("a") == P("nowhere")
    with pytest.raises(
        ft.ShardingError,
        match=r'"hidden" has size 6; rule hidden→model needs a multiple of model=4',
    ):
        rules.spec("hidden", shape=(6,), mesh=SIZES)
    with pytest.raises(
        ft.ShardingError, match='"batch hidden" names 2 dimensions, and the shape \\(8,\\) has 1'
    ):
        rules.spec("batch hidden", shape=(8,))
    with pytest.raises(ft.ShardingError, match=r"the mesh \(data=2\) has no axis `model`"):
        rules.spec("hidden", mesh={"data": 2})
    with pytest.raises(ft.ShardingError, match='"embed" cannot be laid out'):
        rules.spec("embed")
    with pytest.raises(ft.AxesError, match="is not an axis name"):
        rules.spec("not-a-name")


# Which names


def test_an_unannotated_leaf() -> None:
    text = why({"w": jnp.ones((4, 4))}, ft.AxisRules({"a": "data", ...: None}))
    assert "has no axis names, and rules shard axes by name" in text
    for remedy in (
        'annotate it (`Float[Array, "..."]`)',
        "give `names=` to the rules",
        "by a path filter",
    ):
        assert remedy in text
    assert (
        ft.plan({"step": jnp.ones(())}, ft.AxisRules({"a": "data"}), SIZES)["step"].spec == P()
    )  # rank 0


class Weight(eqx.Module):
    w: Float[Array, "embed hidden"]


def test_arrays_without_names_may_be_left_to_another_layout() -> None:
    """Those of a class that cannot be annotated: `FSDP` shards them, and by default they are an error."""
    tree = {"named": Weight(jnp.ones((4, 8))), "bare": jnp.ones((6, 8))}
    rules = ft.AxisRules({"embed": None, "hidden": "model"}, unnamed=P())
    plan = ft.plan(tree, rules, SIZES)
    assert plan.specs["bare"] == P(None, None)
    assert plan["bare"].reason == "no axis names (unnamed=P())"
    plan = ft.plan(tree, rules | ft.FSDP("data", min_size=0), SIZES)
    assert plan["bare"].spec == P(None, "data") and plan["named.w"].spec == P("data", "model")
    assert rules == eval(repr(rules), {"AxisRules": ft.AxisRules, "P": P})
    assert rules != ft.AxisRules({"embed": None, "hidden": "model"})
    assert rules.on({"data": 2}).unnamed == P()
    for unnamed in (P("data"), None, "warn", P(None)):
        with pytest.raises(ft.RuleError, match=r'unnamed=.*: write `P\(\)`, or "error"'):
            ft.AxisRules({"embed": None}, unnamed=unnamed)  # pyright: ignore


def test_names_are_part_of_the_rules() -> None:
    linear = eqx.nn.Linear(4, 8, key=jax.random.key(0))
    given_names = {eqx.nn.Linear: ft.names(weight="out in", bias="out")}
    rules = ft.AxisRules({"out": "model", "in": None}, names=given_names)
    plan = ft.plan([linear], rules, SIZES)
    assert plan["0.weight"].axes == ft.Axes("out", "in")
    assert plan["0.weight"].spec == P("model", None) and plan["0.bias"].spec == P("model")
    assert rules != ft.AxisRules({"out": "model", "in": None})
    assert ft.plan([linear], rules | ft.FSDP("data", min_size=0), SIZES)["0.weight"].spec == P(
        "model", "data"
    )
    assert ft.plan([linear], ft.on_host(rules), SIZES)["0.weight"].spec == P("model", None)
    assert ft.plan([linear], ft.StateSharding({...: rules}), SIZES)["0.weight"].spec == P(
        "model", None
    )
    other = ft.AxisRules({"o": "model"}, names={eqx.nn.Linear: ft.names(weight="o i", bias="o")})
    with pytest.raises(ft.RuleError, match="two layouts name Linear differently"):
        ft.plan([linear], rules | other, SIZES)


def test_names_for_a_field_that_is_not_there() -> None:
    linear = eqx.nn.Linear(4, 8, key=jax.random.key(0))
    rules = ft.AxisRules({...: None}, names={eqx.nn.Linear: ft.names(wieght="out in", bias="out")})
    text = why([linear], rules)
    assert "gives axes to `wieght`, but Linear has no such leaf" in text and "`weight`" in text
    assert text.startswith("1 leaf cannot be laid out")  # `weight`; the module is no leaf


def test_a_dimension_that_fsdp_has_sharded_needs_no_rule_that_is_left() -> None:
    layout = ft.FSDP("data", min_size=0) | ft.AxisRules({"a": "model", "b": "model"})
    assert ft.plan(leaf("a b", 4, 8), layout, SIZES)["w"].spec == P("model", "data")


class Physical(eqx.Module):
    w: Annotated[Float[Array, "embed hidden"], P(None, "model")]
    v: Float[Array, "embed hidden"]


def test_the_physical_spec_of_an_annotation_wins() -> None:
    tree = Physical(jnp.ones((4, 8)), jnp.ones((4, 8)))
    rules = ft.AxisRules({"embed": "data", "hidden": None})
    plan = ft.plan(tree, rules, SIZES)
    assert plan["w"].spec == P(None, "model") and plan["v"].spec == P("data", None)
    assert plan["w"].reason == "its annotation" and plan["w"].axes == ft.Axes("embed", "hidden")
    # with no rule for its names; behind another layout, whose rules it wins over too
    tree = eqx.tree_at(lambda t: t.v, tree, None)
    assert ft.plan(tree, ft.AxisRules({}), SIZES)["w"].spec == P(None, "model")
    for layout in (
        rules | rules,
        ft.FSDP("data") | ft.AxisRules({"embed": None, "hidden": "data"}),
    ):
        assert ft.plan(tree, layout, SIZES)["w"].spec == P(None, "model")
    assert ft.plan(tree, rules | ft.FSDP("data", min_size=0), SIZES)["w"].spec == P("data", "model")
    assert "P(None, 'model') names `model`, and the mesh (data=2) has no such axis" in why(
        tree, ft.AxisRules({}), {"data": 2}
    )


class Two(eqx.Module):
    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden"]


def test_an_optimizer_state_by_rules_says_what_to_use() -> None:
    model = Two(jnp.ones((256, 512)), jnp.ones(512))
    rules = ft.AxisRules({"embed": "data", "hidden": "model"})
    with jax.numpy_dtype_promotion("standard"):
        adam, factored = optax.adam(1e-3).init(model), optax.adafactor(1e-3).init(model)  # type: ignore[arg-type]
    assert ft.plan(adam, rules, SIZES)["0.mu.w"].spec == P(
        "data", "model"
    )  # fits: no word about it
    with pytest.raises(ft.ShardingError) as caught:
        ft.plan(factored, rules, SIZES)
    for problem in caught.value.problems:
        assert problem.remedy.endswith("; for an optimizer's state use `ft.plan_optimizer`")
    assert "plan_optimizer" in why(factored, ft.FSDP("data", min_size=0))
    # elsewhere, nobody has an optimizer
    assert "plan_optimizer" not in why(Two(jnp.ones(3), jnp.ones(3)), rules)
    assert "plan_optimizer" not in why([leaf("embed", 3)], rules)


# Construction, and values

NONSENSE: dict[str, tuple[Any, str]] = {
    "a number": (5, "rules are a mapping or (name, mesh axes) pairs; 5 is neither"),
    "None": (None, "rules are a mapping or (name, mesh axes) pairs; None is neither"),
    "a text": ("ab", "rules are a mapping or (name, mesh axes) pairs; 'ab' is neither"),
    "no pairs": (["batch"], "'batch' is neither"),
    "three": ([("batch", "data", "model")], "('batch', 'data', 'model') is neither"),
    "a name that is none": ({"a b": "data"}, "'a b' is not an axis name"),
    "the text of no name": (
        {"_": "data"},
        "'_' is not an axis name: the left side of a rule is an identifier (not `_`)",
    ),
    "a number as name": ({3: "data"}, "3 is not an axis name"),
    "None as name": ({None: "data"}, "None is not an axis name"),
    "a number as mesh axis": (
        {"a": 3},
        "rule a→3: the right side is a mesh axis, a tuple of them, or `None`",
    ),
    "a spec": ({"a": P("data")}, "the right side is a mesh axis"),
    "a dict": ({"a": {"data": 1}}, "the right side is a mesh axis"),
    "True": ({"a": True}, "the right side is a mesh axis"),
    "no mesh axes": (
        {"a": ()},
        "rule a→(): mesh axes are non-empty names; write `None` for unsharded",
    ),
    "an empty mesh axis": ({"a": ""}, "mesh axes are non-empty names"),
    "None among mesh axes": ({"a": ("data", None)}, "mesh axes are non-empty names"),
    "nested": ({"a": (("data",),)}, "mesh axes are non-empty names"),
    "twice": (
        {"a": ("data", "data")},
        "rule a→(data, data): mesh axis `data` is named twice; name it once",
    ),
    "... first": (
        {...: None, "a": "data"},
        "`...` may only be the last rule: a rule after it would never apply",
    ),
    "... twice": ([(..., None), (..., None)], "`...` may only be the last rule"),
    "... to an axis": (
        {...: "data"},
        "`...: 'data'`: only `...: None` is possible; name the axis that is to be",
    ),
    "behind None": (
        [("a", None), ("a", "data")],
        "rule a→data can never apply: `('a', None)` is before it",
    ),
    "None twice": ([("a", None), ("a", None)], "rule a→None can never apply"),
}


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_is_refused_at_construction(case: str) -> None:
    table, said = NONSENSE[case]
    with pytest.raises(ft.RuleError) as caught:
        ft.AxisRules(table)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "names", [5, [], {"Linear": ft.names(w="a")}, {eqx.nn.Linear: {"w": "a"}}, {eqx.nn.Linear: "a"}]
)
def test_nonsense_as_names(names: Any) -> None:
    with pytest.raises(ft.RuleError, match=r"`names=` maps classes to `ft.names"):
        ft.AxisRules({"a": None}, names=names)


def test_rules_are_values() -> None:
    names = {eqx.nn.Linear: ft.names(weight="a b", bias="a")}
    make = [
        lambda: ft.AxisRules({"a": "data", "b": None}),
        lambda: ft.AxisRules({"b": None, "a": "data"}),
        lambda: ft.AxisRules({"a": "data", "b": None, ...: None}),
        lambda: ft.AxisRules({"a": ("data", "model"), "b": None}),
        lambda: ft.AxisRules({"a": "data", "b": None}, names=names),
        lambda: ft.AxisRules([("a", "data"), ("a", "model"), ("b", None)]),
        lambda: ft.AxisRules({}),
    ]
    for i, left in enumerate(make):
        for j, right in enumerate(make):
            assert (left() == right()) == (i == j)
            assert i != j or hash(left()) == hash(right())
        again = [pickle.loads(pickle.dumps(left())), copy.deepcopy(left())]
        again.append(
            eval(
                repr(left()),
                {"AxisRules": ft.AxisRules, "names": ft.names, "Linear": eqx.nn.Linear},
            )
        )
        assert all(x == left() and hash(x) == hash(left()) for x in again)
    assert (
        ft.AxisRules({"a": ("data",)})
        == ft.AxisRules([["a", "data"]])
        == ft.AxisRules({"a": "data"})
    )
    assert ft.AxisRules({"a": "data"}) != "a"
    other_order = [
        {eqx.nn.Conv: ft.names(weight="c"), **names},
        {**names, eqx.nn.Conv: ft.names(weight="c")},
    ]
    one, other = [ft.AxisRules({"a": "data"}, names=given) for given in other_order]
    assert one == other and hash(one) == hash(other)
    with pytest.raises(AttributeError, match="cannot assign"):
        ft.AxisRules({}).closed = True


def test_the_repr() -> None:
    assert (
        repr(ft.AxisRules({"a": ("x", "y"), "b": None, ...: None}))
        == "AxisRules({'a': ('x', 'y'), 'b': None, ...: None})"
    )
    assert repr(ft.AxisRules([("a", "x"), ("a", None)])) == "AxisRules([('a', 'x'), ('a', None)])"


def test_a_mesh_axis_of_size_one_stays_in_the_spec() -> None:
    rules = ft.AxisRules({"a": "data", "b": "model"})
    assert ft.plan(leaf("a b", 3, 4), rules, {"data": 1, "model": 2})["w"].spec == P(
        "data", "model"
    )
    assert np.prod(ft.plan(leaf("a b", 3, 4), rules, {"data": 1, "model": 2})["w"].local_shape) == 6


@pytest.mark.parametrize("layout", [ft.AxisRules({"embed": None}), ft.FSDP("data", min_size=0)])
def test_a_leaf_is_not_blamed_for_one_before_it(layout: ft.Layout):
    class Scales(eqx.Module):
        first: Float[Array, "embed"]
        second: Float[Array, ""]

    problems = ft.plan(
        Scales(jnp.ones(()), jnp.ones(())), layout, {"data": 2}, check=False
    ).problems
    assert [str(problem.path) for problem in problems] == ["first"]


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_without_a_name_is_not_without_an_annotation(names: str):
    rules, arrays = (
        ft.AxisRules({"embed": None}),
        {names[0]: leaf("_ _", 4, 8), names[1]: jnp.ones((4, 8))},
    )
    problems = ft.plan(arrays, rules, SIZES, check=False).problems
    assert [str(problem.path) for problem in problems] == [names[1]]


def test_each_reason_has_its_own_words():
    tree = {
        "any": leaf("embed _", 4, 8),
        "number": leaf("embed 8", 4, 8),
        "dots": leaf("embed ...", 4, 8),
    }
    plan = ft.plan(tree, ft.AxisRules({"embed": None}), SIZES)
    assert [plan[(name, "w")].reason for name in tree] == [
        "embed→None, `_` unsharded: no name",
        "embed→None, `8` unsharded: no name",
        "embed→None, `...` unsharded: no name",
    ]


class Position(eqx.Module):
    weight: jax.Array


def test_the_remedy_names_the_class_and_the_field() -> None:
    rules = ft.AxisRules({"seq": None, "embed": "model"})
    with pytest.raises(ft.ShardingError) as caught:
        ft.plan({"position": Position(jnp.ones((4, 8)))}, rules, SIZES)
    assert 'give `names={Position: ft.names(weight="...")}` to the rules' in str(caught.value)
    named = ft.AxisRules(
        {"seq": None, "embed": "model"}, names={Position: ft.names(weight="seq embed")}
    )
    plan = ft.plan({"position": Position(jnp.ones((4, 8)))}, named, SIZES)
    assert plan["position.weight"].spec == P(None, "model")
