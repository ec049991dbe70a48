"""`AxisRules`: Linen's algorithm, beside an oracle of it, and everything that Linen lets pass in
silence."""

from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

import functree as ft
from tests.layout.oracles import linen
from tests.lib.meshes import MESH, SIZES
from tests.lib.trees import module

P = PartitionSpec
Table = list[tuple[str, Any]]


# Linen's algorithm


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


def shortest(mesh_axes: tuple[str, ...]) -> Any:
    """The entry of a spec, as short as it can be written."""
    if len(mesh_axes) < 2:
        return mesh_axes[0] if mesh_axes else None
    return mesh_axes


@given(tables(), AXES, st.booleans())
def test_as_linen(table: Table, axes: tuple[str | None, ...], closed: bool) -> None:
    found = dict(zip(axes, linen(axes, table), strict=True))
    lost = {name for name, entry in found.items() if entry is None and name is not None}
    rules = ft.AxisRules([*table, (..., None)] if closed else table)
    if closed or not lost:
        for name, entry in zip(axes, rules.spec(ft.Axes(*axes)), strict=True):
            assert entry == shortest(found[name] or ())
        return
    with pytest.raises(ft.ShardingError) as caught:
        rules.spec(ft.Axes(*axes))
    mentioned = {name for name, _ in table}
    for name in lost:
        said = f'no rule for "{name}" applies' if name in mentioned else f"no rule names `{name}`"
        assert said in str(caught.value)
    assert len(caught.value.problems) == len(lost)


ORDER: dict[str, tuple[Any, str, P]] = {
    "a list": ({"a": ["x", "y"]}, "a", P(("x", "y"))),
    "nothing": ({"a": "x"}, "", P()),
    "one name twice, one mesh axis": ([("a", "x"), ("a", None)], "a a", P("x", None)),
    "one name twice, and a fallback": ([("a", "x"), ("a", "y")], "a a", P("x", "y")),
}


@pytest.mark.parametrize("case", ORDER)
def test_the_algorithm(case: str) -> None:
    table, axes, expected = ORDER[case]
    assert ft.AxisRules(table).spec(axes) == expected
    assert ft.AxisRules(table).spec(ft.Axes.parse(axes)) == expected
    plan = ft.plan(module(axes), ft.AxisRules(table), {"x": 2, "y": 2, "data": 2})
    assert plan["w"].spec == expected


def test_the_reason_names_the_rule_of_each_dimension() -> None:
    rules = ft.AxisRules([("batch", "data"), ("embed", "data"), ("embed", None), (..., None)])
    plan = ft.plan(module("batch seq embed"), rules, SIZES)
    assert plan["w"].reason == "batch→data, seq→None (...), embed→None"
    assert ft.plan(module(""), rules, SIZES)["w"].reason == "a scalar"
    for text in ("_", "8", "..."):
        plan = ft.plan(module(f"embed {text}", 4, 8), ft.AxisRules({"embed": None}), SIZES)
        assert plan["w"].reason == f"embed→None, `{text}` unsharded: no name"


def test_what_is_unused_is_listed() -> None:
    """What one part of a tree lacks, another may have."""
    rules = ft.AxisRules([("embed", None), ("b", "data"), ("hidden", "model"), ("b", "model")])
    tree = {"a": module("embed"), "b": module("hidden")}
    for layout in (rules, {"a": rules, "b": rules}, ft.StateSharding({"a.**": rules, ...: rules})):
        assert ft.plan(tree, layout, SIZES).unused == ("b",)
    plan = ft.plan(tree, {"a": rules, "b": ft.AxisRules({"hidden": None, "seq": None})}, SIZES)
    assert plan.unused == ("b", "seq")
    assert "not used by any leaf: b, seq" in str(plan) and "b, seq" in plan.html()


# Near misses behind `...`


def test_no_near_miss() -> None:
    """Where both names are in the tree, in a longer form too; and of names that are short or are not alike."""
    for name, other in (("layer1", "layer2"), ("head", "heads")):
        tree = {"a": module(name), "b": module(other)}
        rules = ft.AxisRules({name: "model", ...: None})
        for layout in (rules, {"a": rules, "b": rules}):
            assert ft.plan(tree, layout, SIZES)["b.w"].spec == P(None)
    rules = ft.AxisRules({"sep": "data", "hidden": "data", ...: None})
    for name in ("seq", "sepal", "hide"):
        assert ft.plan(module(name), rules, SIZES).unused == ("sep", "hidden")


# One is the beginning or the plural of the other: perhaps another axis, so it is a warning.
LONGER_FORMS = [("heads", "head"), ("hidden", "hidden_dim"), ("entry", "entries")]


@pytest.mark.parametrize(("name", "rule"), LONGER_FORMS)
def test_a_longer_form_behind_the_ellipsis(name: str, rule: str) -> None:
    text = (
        rf'"{name}" has no rule except `\.\.\.: None`, so it is left unsharded in `a\.w`, `b\.w`, and '
        rf"no leaf has the axis `{rule}`, which a rule names: use the same name, `{name}` or `{rule}`, in the rule and in the axes, or add "
        rf'the rule `"{name}": None` if the two names mean different axes'
    )
    tree = {"a": module(name), "b": module(name)}
    with pytest.warns(ft.FunctreeWarning, match=text):
        found = ft.plan(tree, ft.AxisRules({rule: "data", ...: None}), SIZES)
    assert found["a.w"].spec == P(None)
    # The remedies, to the letter: neither warns.
    assert ft.plan(tree, ft.AxisRules({name: "data", ...: None}), SIZES)["a.w"].spec == P("data")
    both = ft.AxisRules({rule: "data", name: None, ...: None})
    assert ft.plan(tree, both, SIZES)["a.w"].spec == P(None)


def test_near_misses_are_of_the_whole_composition() -> None:
    """A name that one layout rules on has not fallen through the other."""
    near = ft.AxisRules({"hiden": "data", ...: None})
    for layout in (
        ft.AxisRules({"hidden": "model"}) | near,
        near | ft.AxisRules({"hidden": "model"}),
        near | P("data"),
        ft.AxisRules({"hiden": "data", "hidden": None, ...: None}),
    ):
        assert ft.plan(module("hidden"), layout, SIZES).unused == ("hiden",)


TRACED = ft.shard(jnp.ones((4, 2)), P(), MESH)


def test_a_longer_form_in_a_single_array() -> None:
    rules = ft.AxisRules({"heads": "model", ...: None})
    text = r"so it is left unsharded, and no leaf has the axis `heads`, which a rule names: use the same name, `head` or"
    for door in (
        lambda: rules.spec("head one"),
        lambda: ft.shard(jnp.ones((4, 2)), rules, MESH, axes="head two"),
        lambda: jax.jit(lambda x: ft.constrain(x, "head three", rules=rules)).trace(TRACED),
        # Again, although the spec is cached.
        lambda: jax.jit(lambda x: ft.constrain(x, "head three", rules=rules)).trace(TRACED),
    ):
        with pytest.warns(ft.FunctreeWarning, match=text):
            door()
    with pytest.raises(ft.ShardingError, match=r'"haeds" has no rule except `...: None`'):
        rules.spec("batch haeds")


# Mesh axes


def test_on_drops_such_rules_on_purpose() -> None:
    rules = ft.AxisRules(
        [("a", "expert"), ("a", "data"), ("b", ("model", "expert")), ("c", None), (..., None)]
    )
    on = rules.on(SIZES)
    assert on == ft.AxisRules([("a", "data"), ("c", None), ("b", None), (..., None)])
    assert ft.plan(module("b a"), on, SIZES)["w"].spec == P(None, "data")
    assert rules.on({"data": 1, "model": 1, "expert": 1}) == rules
    names = {eqx.nn.Linear: ft.names(weight="out in", bias="out")}
    assert ft.AxisRules({"out": "expert"}, names=names).on(SIZES).names == tuple(names.items())


def test_identity() -> None:
    rules = ft.AxisRules.identity(SIZES)
    assert rules == ft.AxisRules({"data": "data", "model": "model"})
    with jax.set_mesh(MESH):
        assert ft.AxisRules.identity(None) == rules
        assert ft.AxisRules({"a": "data", "b": "x"}).on(None) == ft.AxisRules(
            {"a": "data", "b": None}
        )


# One array, which is in no tree


def test_a_spec_of_axes() -> None:
    rules = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None, ...: None})
    for given_shape in ((4, 3), None):
        for mesh in (SIZES, None):
            assert rules.spec("batch _", given_shape, mesh) == P("data", None)
    assert rules.spec("hidden", shape=(6,)) == P("model")  # nothing to divide by
    assert ft.AxisRules({"a": "nowhere"}).spec("a") == P("nowhere")
    assert ft.AxisRules({"a": "nowhere"}).on(SIZES).spec("a", (3,), SIZES) == P(None)
    with pytest.raises(ft.AxesError, match="is not an axis name"):
        rules.spec("not-a-name")


# The rules, axes, shape and mesh ─► the first line, what each problem is about, and what is wrong.
NOWHERE = {"batch": "dta", "hidden": "model"}
OF_AXES: dict[str, tuple[Any, str, Any, Any, str, list[tuple[str, str]]]] = {
    "all at once": (
        NOWHERE, "hidden c", (3, 3), SIZES,
        '"hidden c" cannot be laid out on mesh (data=2, model=4)',
        [
            ("rule batch→dta", "the mesh (data=2, model=4) has no axis `dta`; did you mean `data`?"),
            ('"hidden c" of shape (3, 3)', "no rule names `c`"),
            ('"hidden c" of shape (3, 3)', '"hidden" has size 3; rule hidden→model needs a multiple of model=4'),
        ],
    ),
    "without a mesh": (NOWHERE, "c", None, None, '"c" cannot be laid out', [('"c"', "no rule names `c`")]),
    "of another rank": (
        NOWHERE, "batch hidden", (4,), SIZES,
        '"batch hidden" names 2 dimensions, but the shape (4,) has 1: name each dimension',
        [("", '"batch hidden" names 2 dimensions, but the shape (4,) has 1: name each dimension')],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OF_AXES)
def test_what_is_wrong_with_axes(case: str) -> None:
    """Of an array that has no path, and may have no shape."""
    table, axes, shape, mesh, headline, told = OF_AXES[case]
    with pytest.raises(ft.ShardingError) as caught:
        ft.AxisRules(table).spec(axes, shape, mesh)
    assert str(caught.value).split("\n")[0] == headline
    assert [(problem.what, problem.why) for problem in caught.value.problems] == told
    for problem in caught.value.problems:
        assert problem.path is None and problem.shape in (None, shape)


def test_what_a_spec_depends_on() -> None:
    """Each beside the others, in turn and again: another mesh, shape, name or layout."""
    rules = ft.AxisRules({"batch": "data", "hidden": "model"})
    other = ft.AxisRules({"batch": "model", "hidden": None})
    for _ in range(2):
        assert rules.spec("batch hidden", (6, 8), SIZES) == P("data", "model")
        with pytest.raises(ft.ShardingError, match="a multiple of data=4"):
            rules.spec("batch hidden", (6, 8), {"data": 4, "model": 2})
        assert rules.spec("batch hidden", (6, 8)) == P("data", "model")
        with pytest.raises(ft.ShardingError, match="a multiple of data=2"):
            rules.spec("batch hidden", (3, 8), SIZES)
        assert rules.spec("hidden batch", (8, 6), SIZES) == P("model", "data")
        assert other.spec("batch hidden", (4, 8), SIZES) == P("model", None)


# Which names


def test_arrays_without_names_may_be_left_to_another_layout() -> None:
    """Those of a class that cannot be annotated: `FSDP` shards them, and by default they are an error."""
    tree = {"named": module("embed hidden", 4, 8), "bare": jnp.ones((6, 8)), "number": jnp.ones(())}
    rules = ft.AxisRules({"embed": None, "hidden": "model"}, unnamed=P())
    plan = ft.plan(tree, rules, SIZES)
    assert plan.specs["bare"] == P(None, None)
    assert plan["bare"].reason == "no axis names (unnamed=P())"
    assert plan["number"].reason == "a scalar"
    plan = ft.plan(tree, rules | ft.FSDP("data", min_size=0), SIZES)
    assert plan["bare"].spec == P(None, "data") and plan["named.w"].spec == P("data", "model")
    assert rules.on({"data": 2}).unnamed == P()
    for unnamed in (P("data"), None, "warn", P(None)):
        with pytest.raises(ft.RuleError, match=r'unnamed=.* is invalid: write `P\(\)` or "error"'):
            ft.AxisRules({"embed": None}, unnamed=unnamed)  # pyright: ignore


def test_names_are_part_of_the_rules() -> None:
    linear = eqx.nn.Linear(4, 8, key=jax.random.key(0))
    given_names = {eqx.nn.Linear: ft.names(weight="out in", bias="out")}
    rules = ft.AxisRules({"out": "model", "in": None}, names=given_names)
    plan = ft.plan([linear], rules, SIZES)
    assert plan["0.weight"].axes == ft.Axes("out", "in")
    assert plan["0.weight"].spec == P("model", None) and plan["0.bias"].spec == P("model")
    assert rules != ft.AxisRules({"out": "model", "in": None})
    for layout in (rules | ft.FSDP("model"), ft.on_host(rules), ft.StateSharding({...: rules})):
        assert ft.plan([linear], layout, SIZES)["0.weight"].spec == P("model", None)
    other = ft.AxisRules({"o": "model"}, names={eqx.nn.Linear: ft.names(weight="o i", bias="o")})
    with pytest.raises(ft.RuleError, match="two layouts name the axes of Linear differently"):
        ft.plan([linear], rules | other, SIZES)


def test_a_dimension_that_fsdp_has_sharded_needs_no_rule_that_is_left() -> None:
    layout = ft.FSDP("data", min_size=0) | ft.AxisRules({"a": "model", "b": "model"})
    assert ft.plan(module("a b", 4, 8), layout, SIZES)["w"].spec == P("model", "data")


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
    for layout in (ft.AxisRules({}), rules | rules):
        assert ft.plan(tree, layout, SIZES)["w"].spec == P(None, "model")
    # A spec that is given replaces it.
    assert ft.plan(tree, P("data"), SIZES)["w"].spec == P("data", None)
    for layout in (rules | ft.FSDP("data", min_size=0), ft.FSDP("data", min_size=0)):
        assert ft.plan(tree, layout, SIZES)["w"].spec == P("data", "model")


# Construction, and values

NONSENSE: dict[str, tuple[Any, str]] = {
    "a number": (5, "AxisRules takes a mapping or (axis, mesh axes) pairs; 5 is neither"),
    "three": ([("batch", "data", "model")], "('batch', 'data', 'model') is not a pair"),
    "no name": ({"_": "data"}, "'_' is not an axis name: write an identifier (not `_`), or `...`, on the left side"),
    "a number as mesh axis": ({"a": 3}, "rule a→3: write a mesh axis, a tuple of mesh axes, or `None` on the right side"),
    "no mesh axes": ({"a": ()}, "rule a→(): write a mesh axis, a tuple of mesh axes, or `None`"),
    "None among mesh axes": ({"a": ("data", None)}, "write a mesh axis, a tuple of mesh axes, or `None`"),
    "twice": ({"a": ("data", "data")}, "rule a→(data, data): mesh axis `data` is named twice: name it once"),
    "... first": ({...: None, "a": "data"}, "`...` must be the last rule, since no rule after it would apply: move"),
    "... to an axis": ({...: "data"}, "AxisRules: `...: 'data'` is invalid, since `...` allows only `None`: name each axis that you want"),
    "behind None": ([("a", None), ("a", "data")], "rule a→data can never apply, since `('a', None)` comes first: remove one"),
}  # fmt: skip


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_is_refused_at_construction(case: str) -> None:
    table, said = NONSENSE[case]
    with pytest.raises(ft.RuleError) as caught:
        ft.AxisRules(table)
    assert said in str(caught.value)


def test_equal_rules() -> None:
    """However they are written, and in whatever order `names=` is."""
    rules = ft.AxisRules({"a": "data"})
    assert ft.AxisRules({"a": ("data",)}) == ft.AxisRules([["a", "data"]]) == rules != "a"
    linear, conv = ft.names(weight="a b", bias="a"), ft.names(weight="c")
    one = ft.AxisRules({"a": "data"}, names={eqx.nn.Conv: conv, eqx.nn.Linear: linear})
    other = ft.AxisRules({"a": "data"}, names={eqx.nn.Linear: linear, eqx.nn.Conv: conv})
    assert one == other and hash(one) == hash(other)
