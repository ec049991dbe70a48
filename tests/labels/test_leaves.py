"""A tree ─► the axes of its arrays, in the tree's structure; and what is said where they cannot be
determined."""

import pickle
from collections import OrderedDict, defaultdict
from typing import Annotated, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Array, Float, PyTree

import functree as ft
from functree.errors import AxesError, FunctreeError
from functree.labels.leaves import read
from functree.tree.arrays import is_array
from functree.tree.axes import Axes
from functree.tree.interfaces import Stack
from functree.tree.skeleton.kinds import _place_of
from functree.tree.skeleton.skeleton import Skeleton
from tests.lib.checks import raises
from tests.lib.trees import Leafy, containers, hold, linear, nodes, same, x


class Block(eqx.Module):
    w: Float[Array, "embed hidden"]
    lin: eqx.nn.Linear


class Named(NamedTuple):
    w: Float[Array, "a"]
    b: "Float[Array, 'b']"


class Stacky(eqx.Module, Stack):
    """What `ft.Stacked` is, to a reader of trees."""

    layer: Any

    def stack_axes(self) -> tuple[str, ...]:
        return ("layers",)


# Laws

ARRAYS = st.sampled_from(
    [np.zeros((2, 3), np.float32), np.int32(4), x(), x(1, 2, 3), x(2, dtype=jnp.bfloat16)]
)
OTHERS = st.sampled_from(
    [None, 1, True, 1.0, "text", abs, np.array("text"), np.array([None]), np.dtype("f4")]
)
LEAVES = ARRAYS | OTHERS


TREES = st.recursive(LEAVES, containers, max_leaves=12)


@given(TREES)
def test_axes_have_the_structure_of_the_arrays(tree: Any) -> None:
    arrays = jax.tree.map(lambda leaf: leaf if is_array(leaf) else None, tree)
    if callable(tree) and not jax.tree.structure(tree).num_nodes > 1:
        with raises("tree_axes takes a tree of arrays", "is a function: call it first"):
            ft.tree_axes(tree)
        return
    axes = ft.tree_axes(tree)
    assert jax.tree.structure(axes) == jax.tree.structure(arrays)
    for leaf, names in zip(jax.tree.leaves(arrays), jax.tree.leaves(axes), strict=True):
        assert type(names) is Axes and names == Axes(*[None] * len(leaf.shape))


@given(TREES)
def test_the_walk_is_jaxs(tree: Any) -> None:
    """Paths, order and positions are those of `jax.tree_util.tree_flatten_with_path`."""
    everything = jax.tree_util.tree_flatten_with_path(tree)[0]
    found = read(tree)
    places = [i for i, (_, leaf) in enumerate(everything) if is_array(leaf)]
    assert list(found.skeleton.indices) == places and found.problems == ()
    assert found.paths == [ft.Path.of(everything[i][0]) for i in places]
    assert all(value is everything[i][1] for value, i in zip(found.values, places, strict=True))
    assert found.skeleton.treedef.num_leaves == len(everything)
    assert same(found.skeleton.fill(found.values), tree)


@given(TREES)
def test_within_names_the_nodes_around_a_leaf(tree: Any) -> None:
    around = {path: type(node) for path, node in nodes(tree)}
    for leaf in read(tree).leaves:
        assert leaf.within == tuple(around[leaf.path[:i]] for i in range(len(leaf.path)))


# Trees that are packed


class Holder(eqx.Module):
    block: ft.Packed[Block]
    state: ft.Buffer[ft.Packed[Block]]
    named: Annotated[ft.Packed[Leafy], ft.names({"w": "a b"})]
    tree: PyTree[Float[Array, "embed"]]
    stack: Any


def test_annotations_around_a_packed_tree_and_in_it() -> None:
    block = Block(x(2, 3), linear())
    parts = [block, block, Leafy(x(2, 3), 1), [x(2), (x(3),)]]
    packed = read(Holder(*map(ft.pack, parts), Stacky(ft.pack(Block(x(5, 2, 3), None)))))
    assert packed.problems == ()
    axes = {str(leaf.path): str(leaf.axes) for leaf in packed.leaves}
    assert axes["stack.layer.w"] == "layers embed hidden" and axes["named.w"] == "a b"
    assert axes["block.w"] == "embed hidden" and axes["tree.1.0"] == "embed"
    buffers = {str(leaf.path) for leaf in packed.leaves if leaf.buffer}
    assert buffers == {"state.w", "state.lin.weight", "state.lin.bias"}


def test_names_for_what_lies_in_a_packed_tree() -> None:
    class Trainer(eqx.Module):
        model: Any

        def __axis_names__(self) -> Any:
            return ft.names({"model.w": "a b", "model.lost": "d"})

    for model in (Leafy(x(2, 3), "kept"), ft.pack(Leafy(x(2, 3), "kept"))):
        found = read([Trainer(model)])
        assert [leaf.axes for leaf in found.leaves] == [Axes("a", "b")]
        assert ["`model.lost`" in problem.why for problem in found.problems] == [True]


# Trees of all kinds


def test_an_array_is_known_by_its_dtype_not_its_class() -> None:
    """What one numpy array is says nothing of the next."""
    text = np.array("text")
    assert ft.tree_axes([text, np.ones(2), text]) == [None, Axes(None), None]
    assert ft.tree_axes([np.str_("s"), np.float32(1)]) == [None, Axes()]


def test_a_tree_that_contains_itself() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(
        FunctreeError, match="type list cannot be flattened: it contains itself, or is nested"
    ):
        ft.tree_axes(tree)


def test_keys_without_an_order() -> None:
    with raises("JAX sorts its keys: '<' not supported", "`OrderedDict`") as error:
        ft.tree_axes({"a": [{1: x(), "b": x()}]})
    assert error.value.problems[0].path == ("a", 0)
    with raises("JAX sorts its keys", "`OrderedDict`") as error:
        ft.tree_axes([defaultdict(list, {1: x(), "b": x()})])
    assert error.value.problems[0].path == (0,)
    with raises("keys of one type"):
        ft.jit(lambda tree: tree)({1: jnp.ones(2), "b": jnp.ones(2)})
    ordered = OrderedDict({1: x(), "b": x(2)})
    assert ft.tree_axes(ordered) == OrderedDict({1: Axes(), "b": Axes(None)})


# `ft.names`, in annotations, in modules and in `names=`


class Halves(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear


class Mine(eqx.nn.Linear):
    """A subclass, which has the names of its base."""


class Own(eqx.Module):
    weight: Array
    axes: str = eqx.field(static=True)

    def __axis_names__(self) -> Any:
        return ft.names(weight=self.axes)


class NamedField(eqx.Module):
    named: Annotated[eqx.nn.Linear, ft.names(weight="mine _")]
    other: eqx.nn.Linear


class Inner(eqx.Module):
    lin: Annotated[eqx.nn.Linear, ft.names(weight="inner _")]


class Outer(eqx.Module):
    inner: Annotated[Inner, ft.names({"lin.weight": "outer _", "**.bias": "bias"})]


class AnyField(eqx.Module):
    of: Annotated[Any, ft.names(weight="mine _", bias="b")]


LINEAR = ft.names(weight="out in", bias="out")
OF_LINEAR = {eqx.nn.Linear: LINEAR}
MINE = Mine(2, 3, key=jax.random.key(0))
# A weight in whose place are several arrays, as in an optimizer's state or after quantization.
SEVERAL = eqx.tree_at(lambda linear: linear.weight, linear(), (x(3, 2), {"scale": x(3)}))

# Tree, `names=` ─► the axes of its leaves in order.
NAMES: dict[str, tuple[Any, Any, list[str]]] = {
    "of a class": ([linear(), {"k": linear(False)}], OF_LINEAR, ["out in", "out", "out in"]),
    "of a base class": (MINE, OF_LINEAR, ["out in", "out"]),
    # And only these: what they do not name has no name.
    "the nearest class": (MINE, {**OF_LINEAR, Mine: ft.names(weight="o i")}, ["o i", "_"]),
    "of a field, which leaves some": (
        NamedField(linear(), linear()),
        OF_LINEAR,
        ["mine _", "out", "out in", "out"],
    ),
    "the innermost field": (Outer(Inner(linear())), OF_LINEAR, ["inner _", "bias"]),
    "beside an array": (AnyField({"lin": linear(), "w": x(2)}), None, ["mine _", "b", "_"]),
    "in a dict with a default": (AnyField(defaultdict(list, a=linear())), None, ["mine _", "b"]),
    "of the module": ([Own(x(2, 3), "a b"), Own(x(2, 3), "c d")], None, ["a b", "c d"]),
    "before those of the module": (Own(x(2, 3), "a b"), {Own: ft.names(weight="x y")}, ["x y"]),
    "the first pattern": (
        linear(),
        {eqx.nn.Linear: ft.names({"w*": "a _", "*": "b"})},
        ["a _", "b"],
    ),
    "of an array that is several": (SEVERAL, OF_LINEAR, ["_ _", "_", "out"]),
}


@pytest.mark.parametrize("case", NAMES)
def test_names(case: str) -> None:
    tree, names, expected = NAMES[case]
    leaves = read(tree, names)
    assert [str(leaf.axes) for leaf in leaves.leaves] == expected
    assert not leaves.problems


class Mixed(eqx.Module):
    block: Halves
    other: eqx.nn.Linear


@pytest.mark.parametrize(("names", "expected"), [
    ({eqx.nn.Linear: LINEAR, Halves: ft.names({"down.weight": "b a"})}, ["out in", "b a", "out in"]),
    ({eqx.nn.Linear: LINEAR, Halves: ft.names({"down.*": "", "down.weight": "b a"})}, None),
    (
        {eqx.nn.Linear: LINEAR, Halves: ft.names({"down.weight": "b a"}), Mixed: ft.names({"**.down.weight": "c d"})},
        ["out in", "c d", "out in"],
    ),
    ({Mixed: ft.names({"block.**.weight": "x y"}), Halves: ft.names({"*.weight": "b a"})}, ["x y", "x y", "_ _"]),
], ids=["both", "wrong rank", "three", "by pattern"])  # fmt: skip
def test_silent_failure_40_the_outermost_class_names_a_leaf(
    names: Any, expected: list[str] | None
) -> None:
    tree = Mixed(Halves(linear(), linear()), linear())
    if expected is None:
        with pytest.raises(AxesError, match=r"block\.down\.weight"):
            ft.tree_axes(tree, names)
        return
    axes = ft.tree_axes(tree, names)
    found = [axes.block.up.weight, axes.block.down.weight, axes.other.weight]
    assert found == [Axes.parse(text) for text in expected]


@pytest.mark.parametrize(("names", "unused"), [
    ({eqx.nn.Linear: LINEAR}, []),
    ({eqx.nn.Linear: LINEAR, eqx.nn.LSTMCell: LINEAR}, ["LSTMCell"]),
    ({eqx.nn.Linear: LINEAR, Halves: ft.names({"*.weight": "b a", "*.bias": "b"})}, []),
    ({eqx.nn.Linear: LINEAR, Mixed: ft.names({"**.weight": "b a", "**.bias": "b"})}, ["Linear"]),
    ({eqx.nn.LSTMCell: LINEAR}, ["LSTMCell"]),
], ids=["none", "a class that is not there", "some of its leaves", "all by an outer class", "alone"])  # fmt: skip
def test_names_that_name_nothing_are_told(names: Any, unused: list[str]) -> None:
    tree, sizes = Mixed(Halves(linear(), linear()), linear()), {"data": 1}
    plan = ft.plan(tree, ft.AxisRules({...: None}, names=names), sizes, check=False)
    assert list(plan.unused_names) == unused and plan.unused == ()
    told = f"not used by any leaf: {', '.join(f'names= of {name}' for name in unused)}"
    assert (told in str(plan)) == (told in plan.html()) == bool(unused)


@pytest.mark.parametrize(("names", "wrong"), [
    ({eqx.nn.Linear: {"weight": "a b"}}, "not <class"), ({"Linear": ft.names()}, "not 'Linear'"),
    ([eqx.nn.Linear], "is not a mapping"),
])  # fmt: skip
def test_bad_names(names: Any, wrong: str) -> None:
    says = "`names=` must map classes to `ft.names(...)`"
    with raises(says, wrong, error=AxesError):
        ft.tree_axes(linear(), names)
    with raises(says, wrong, error=ft.RuleError):
        ft.AxisRules({}, names=names)


# What cannot be determined


class Wrong(eqx.Module):
    w: Float[Array, "embed hidden"] | Float[Array, "embed"]
    tie: Float[Array, "a b"] | Float[Array, "c d"]
    lin: Annotated[eqx.nn.Linear, ft.names(weigth="out in", bias="out")]


AB, CHANGE = Float[Array, "a b"], "change the annotation or the array"
OF_STACK = "after the axes `layers` of its stack"
MORE = (
    "if the array holds several layers (made with `vmap` or `scan`), wrap their module in `ft.Stacked` or create it with "
    "`ft.stack`, or name the axis of the stack for the module's class (`names={cls: ft.names(\"layers\")}`); otherwise "
    "change the annotation or the array (or the axes of its `StateRef`), name its dimensions in the layout "
    "(`names={cls: ft.names(...)}`), or lay it out with a spec (`P(...)`)"
)  # fmt: skip
TIE = "give the alternatives different ranks or dtypes, or name the axes with `Annotated[Array, ft.Axes(...)]`"

# Annotation, value ─► the path, what is wrong there, and the remedy.
ERRORS: dict[str, tuple[Any, Any, str, str, str]] = {
    "rank": (AB, x(2), "w", 'has 1 dimension, but `Float[Array, "a b"]` has 2', CHANGE),
    "rank of a union": (
        AB | Float[Array, "c"] | None, x(), "w",
        'has 0 dimensions, but `Float[Array, "a b"] | Float[Array, "c"]` has 1 or 2', CHANGE,
    ),
    "more dimensions": (AB, x(4, 2, 3), "w", 'has 3 dimensions, but `Float[Array, "a b"]` has 2', MORE),
    "in a stack": (
        Stacky, Stacky(Named(x(5, 2, 2), x(5, 3))), "w.layer.w",
        f'has 3 dimensions, but `Float[Array, "a"]` has 1 {OF_STACK}', MORE,
    ),
    # More than the annotation has, but the dimensions of the stacks come first.
    "too few in two stacks": (
        Stacky, Stacky(Stacky(Block(x(5, 6, 2), None))), "w.layer.layer.w",
        'has 3 dimensions, but `Float[Array, "embed hidden"]` has 2 after the axes `layers layers` of its stack', CHANGE,
    ),
    "a tie": (
        AB | Float[Array, "c d"], x(2, 3), "w",
        'its annotation `Float[Array, "a b"] | Float[Array, "c d"]` allows "a b" or "c d" for an array of this rank and dtype', TIE,
    ),
    "names of no field": (
        Annotated[eqx.nn.Linear, ft.names(weigth="out in", bias="out")], linear(), "w",
        "`ft.names` gives axes to `weigth`, but Linear has no such leaf; did you mean `weight`?", "name a leaf of Linear: `weight`, `bias`",
    ),
    "names on an array": (
        Annotated[Array, ft.names(weight="a")], x(2), "w",
        "`ft.names` gives axes to `weight`, but ShapeDtypeStruct has no such leaf", "write `Annotated[Array, ft.Axes(...)]`",
    ),
    "names of another rank": (Annotated[eqx.nn.Linear, ft.names(weight="out")], linear(), "w.weight", 'has 2 dimensions, but `"out"` has 1', MORE),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    annotation, value, *expected = ERRORS[case]
    with pytest.raises(AxesError) as error:
        ft.tree_axes(hold(annotation, value))
    (problem,) = error.value.problems
    assert [str(problem.path), problem.why, problem.remedy] == expected


def test_errors_are_collected() -> None:
    wrong = object.__new__(Wrong)
    for name, value in {"w": x(1, 2, 3), "tie": x(2, 3), "lin": linear()}.items():
        object.__setattr__(wrong, name, value)
    # A module is not a leaf.
    with pytest.raises(AxesError, match="the axes of the tree cannot be determined") as error:
        ft.tree_axes({"model": [wrong, wrong]})
    paths = {str(problem.path) for problem in error.value.problems}
    assert paths == {f"model.{i}.{name}" for i in (0, 1) for name in ("w", "tie", "lin")}


class OtherName(eqx.Module):
    w: Array

    def __axis_names__(self) -> Any:
        return ft.names(v="a")


def test_names_for_the_root() -> None:
    headline, own = (
        "the axes of the tree cannot be determined\n\n  OtherName\n",
        OtherName(x(2)),
    )
    with raises(headline, "but OtherName has no such leaf", error=AxesError):
        ft.tree_axes(own)
    with raises(
        "the layout does not fit the tree", "\n\n  m   OtherName\n", error=ft.ShardingError
    ):
        ft.plan({"m": own}, ft.P(), {"data": 2})


def states(*refs: ft.StateRef) -> Any:
    """The state of an ensemble of three models."""
    return eqx.filter_vmap(lambda key: ft.make_state(list(refs))[1])(jnp.arange(3))


def test_state_of_another_rank_than_its_refs() -> None:
    named = states(ft.StateRef(jnp.ones(4), "embed"), ft.StateRef(jnp.ones(4)), ft.StateRef(0.0))
    found = read({"s": named}).leaves
    assert [leaf.misfit[0] for leaf in found if leaf.misfit] == [
        'has 2 dimensions, but `"embed"` has 1',
        'has 2 dimensions, but `"_"` has 1',
        'has 1 dimension, but `""` has 0',
    ]
    assert [leaf.axes for leaf in found] == [(None, None), (None, None), (None,)]
    said = "if the array holds several layers"
    for layout in (ft.AxisRules({"embed": None}), ft.FSDP("data", min_size=0)):
        with raises("3 leaves cannot be laid out", "s.0   f32[3, 4]\n", said, "(`P(...)`)"):
            ft.plan({"s": named}, layout, {"data": 3})
    assert ft.plan({"s": named}, ft.P("data"), {"data": 3})["s.0"].spec == ft.P("data", None)


def test_state_without_dimensions_has_all_of_its_names() -> None:
    refs = [ft.StateRef(jnp.zeros(())), ft.StateRef(jnp.zeros(2)), ft.StateRef(jnp.zeros(2), "a")]
    found = read(ft.make_state(refs)[1]).leaves
    assert [leaf.annotated for leaf in found] == [True, False, True]


def test_state_as_one_layer_of_a_stack_has_it() -> None:
    """Its entries are those of all layers, and its values those of one."""

    def refs(key: Any) -> ft.StateRef:
        return ft.StateRef(jnp.ones(4), "embed")

    key, rules = jax.random.key(0), ft.AxisRules({"embed": "data", ...: None})
    _, state = ft.make_state(ft.stack(lambda key: ft.stack(refs, 2, key), 3, key, axis="groups"))
    for cut, axes in enumerate([("groups", "layers", "embed"), ("layers", "embed"), ("embed",)]):
        sliced = jax.tree.map(lambda x, cut=cut: x[(0,) * cut], state)
        (leaf,) = read(sliced).leaves
        assert (leaf.axes, leaf.stacked, leaf.misfit) == (axes, len(axes) - 1, None)
        spec = ft.P(*[None] * (len(axes) - 1), "data")
        assert ft.plan(sliced, rules, {"data": 2})[leaf.path].spec == spec


# Axes and names themselves

IDENTIFIERS = st.from_regex(r"[a-zäλ][a-z0-9_]{0,6}|_[a-z0-9_]{1,6}", fullmatch=True)


@given(st.lists(IDENTIFIERS | st.none(), max_size=5))
def test_axes_read_back(names: list[str | None]) -> None:
    axes = Axes(*names)
    assert Axes.parse(str(axes)) == axes == Axes.of(str(axes)) == Axes.of(axes) == tuple(names)
    assert hash(axes) == hash(Axes(*names)) and eval(repr(axes), {"Axes": Axes}) == axes
    again = pickle.loads(pickle.dumps(axes))
    assert again == axes and type(again) is Axes


@pytest.mark.parametrize("name", ["", "a b", "_", "4", "a.b", 4, True])
def test_what_is_no_axis_name(name: Any) -> None:
    with raises(f"{name!r} is not an axis name: use a Python identifier", error=AxesError):
        Axes(name)


def test_names_are_values() -> None:
    names = ft.names({"*_proj.weight": "heads embed"}, bias="heads")
    assert names == ft.names({"*_proj.weight": ft.Axes("heads", "embed")}, bias="heads")
    again = pickle.loads(pickle.dumps(names))
    assert names == again and hash(names) == hash(again)
    assert names != ft.names(bias="heads") and names != "names"
    assert repr(names) == "names({'*_proj.weight': 'heads embed', 'bias': 'heads'})"
    assert eval(repr(names), {"names": ft.names}) == names
    with pytest.raises(AttributeError, match="cannot assign"):
        names.pairs = ()


@pytest.mark.parametrize(("patterns", "error", "says"), [
    ({"weight": "a-b"}, AxesError, "'a-b' is not an axis name"),
    ({"weight": 3}, AxesError, "invalid axes 3: pass a string such as `'batch embed'`, or `ft.Axes`"),
    ({3: "a"}, AxesError, "names: the key 3 is not a string: use globs as keys"),
    ({"a..b": "a"}, ft.RuleError, "'a..b' is not a path"),
])  # fmt: skip
def test_bad_patterns(patterns: Any, error: type[Exception], says: str) -> None:
    with raises(says, error=error):
        ft.names(patterns)


def test_the_spec_of_an_annotation_whose_names_are_given_from_outside() -> None:
    """That of the alternative which fits."""

    class Either(eqx.Module):
        w: (
            Annotated[Float[Array, "a"], ft.P("data")]
            | Annotated[Float[Array, "a b"], ft.P(None, "model")]
        )

    names = {Either: ft.names(w="c d")}
    for value, spec in ((x(2, 3), ft.P(None, "model")), (x(2), ft.P("data"))):
        (leaf,) = read(Either(value)).leaves
        assert leaf.spec == spec and leaf.misfit is None
    (leaf,) = read(Either(x(2, 3)), names).leaves
    assert str(leaf.axes) == "c d" and leaf.spec == ft.P(None, "model")


def test_the_spec_of_an_annotation_speaks_of_one_layer_of_a_stack():
    class Dense(eqx.Module):
        kernel: Annotated[Float[Array, "features depth"], ft.P(None, "model")]
        gate: Array

    stacked = ft.stack(lambda key: Dense(jnp.ones((3, 8)), jnp.ones(())), 2, jax.random.key(0))
    twice = ft.Stacked(jax.tree.map(lambda x: x[None], stacked), axis="groups")
    for tree, path, lead in ((stacked, "layer", 1), (twice, "layer.layer", 2)):
        plan = ft.plan(tree, ft.AxisRules({...: None}), {"model": 4})
        assert plan[f"{path}.kernel"].spec == ft.P(*[None] * lead, None, "model")
        # A scalar of each layer has the stack's axis, and no other to be named.
        assert plan[f"{path}.gate"].spec == ft.P(*[None] * lead)
    sharded = ft.plan(stacked, ft.AxisRules({"layers": "data", ...: None}), {"data": 2, "model": 4})
    assert sharded["layer.gate"].spec == ft.P("data")


# Equinox' own state has the paths of its declarations


class Inner(eqx.Module):
    norms: list[eqx.nn.BatchNorm]
    by_name: dict[str, eqx.nn.SpectralNorm[eqx.nn.Linear]]
    own: eqx.nn.StateIndex[Any]

    def __init__(self, key: Any):
        self.norms = [eqx.nn.BatchNorm(3, "batch", mode="batch") for _ in range(2)]
        linear = eqx.nn.Linear(2, 3, key=key)
        self.by_name = {"a b": eqx.nn.SpectralNorm(linear, "weight", key=key)}
        self.own = eqx.nn.StateIndex({"count": jnp.zeros(2)})


class Outer(eqx.Module):
    inner: tuple[Inner, ...]

    def __init__(self, key: Any):
        self.inner = (Inner(key),)


OWN = [
    "inner.0.norms.0.batch_counter", "inner.0.norms.0.batch_state_index.0", "inner.0.norms.0.batch_state_index.1",
    "inner.0.norms.1.batch_counter", "inner.0.norms.1.batch_state_index.0", "inner.0.norms.1.batch_state_index.1",
    'inner.0.by_name."a b".uv_index.0', 'inner.0.by_name."a b".uv_index.1', "inner.0.own.count",
]  # fmt: skip


def test_equinox_state_has_the_paths_of_the_model() -> None:
    """A canary too: Equinox writes the place of each index as its marker."""
    model, state = eqx.nn.make_with_state(Outer)(jax.random.key(0))
    assert [str(leaf.path) for leaf in read(state).leaves] == OWN
    assert Skeleton.of(state).learn(state).paths == tuple(leaf.path for leaf in read(state).leaves)
    assert all(leaf.annotated and not any(leaf.axes) for leaf in read({"s": state}).leaves)
    layout = ft.StateSharding({"**.own.count": ft.P("data"), ...: ft.P()})
    specs = {str(row.path): row.spec for row in ft.plan(state, layout, {"data": 2})}
    assert specs["inner.0.own.count"] == ft.P("data")
    assert ft.select({"m": model, "s": state}).where("**.own.count").count() == 1
    f = ft.jit(lambda state: state)
    assert jax.tree.structure(f(state)) == jax.tree.structure(state)


@pytest.mark.parametrize(("marker", "keys"), [
    ("Net.a[0].b", ("a", 0, "b")), ("Net['a b'][''].c", ("a b", "", "c")), ("list[1]", (1,)), ("Net", ()), ("", ()),
    ("Net.a[<flat index 0>]", ("Net.a[<flat index 0>]",)), ('Net["it\'s"]', ('Net["it\'s"]',)), (object(), ()),
])  # fmt: skip
def test_the_marker_of_an_index_as_a_path(marker: Any, keys: tuple[Any, ...]) -> None:
    assert _place_of(marker) == keys


def test_equinox_state_whose_indices_have_no_place() -> None:
    """As of a model that was made by other means than `eqx.nn.make_with_state`."""
    _, state = eqx.nn.make_with_state(lambda: [eqx.nn.StateIndex(jnp.zeros(2))])()
    assert [str(leaf.path) for leaf in read(state).leaves] == ["0"]
    bare = eqx.nn.State([eqx.nn.StateIndex(jnp.zeros(2)), {"x": eqx.nn.StateIndex(jnp.zeros(3))}])
    assert [str(leaf.path) for leaf in read(bare).leaves] == ["0", "1"]
    assert Skeleton.of(bare).learn(bare).paths == tuple(leaf.path for leaf in read(bare).leaves)


# Training states


def test_the_outermost_training_states() -> None:
    """The outer one says what all of its leaves follow: those of the inner one are its parameters,
    or are not trained."""
    sgd = optax.sgd(1.0)
    inner = ft.TrainState.create({"w": jnp.ones(2)}, sgd)
    outer = ft.TrainState.create({"game": inner}, sgd)
    assert read(inner).training == {(): inner}
    found = read([{"a": outer, "b": x(2)}, inner]).training
    assert list(found.items()) == [((0, "a"), outer), ((1,), inner)]
    assert list(read({"packed": ft.pack({"ts": inner})}).training) == [("packed", "ts")]
