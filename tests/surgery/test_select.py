"""Model surgery: laws over random trees, tables of choices, changes, messages."""

import re
import typing
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from jaxtyping import Array, Float

import functree as ft
from functree.tree.nodes import nodes_at
from functree.tree.paths import Path
from tests.lib.checks import python_calls, raises
from tests.lib.trees import ARRAYS, Keyless, Leafy, Pair, containers, is_none, nodes, same

LEAVES = st.sampled_from([*ARRAYS, None, 1, True, 0.5, "text", abs, ()])
TREES = st.recursive(LEAVES, containers, max_leaves=12)
OF_THE_LEAF = st.sampled_from(
    ["**.0.**", "*", "**", "w.**", "**.w", re.compile(r".*\.left"), ft.has_ndim(1), ft.is_trainable,
     ~ft.has_dtype(jnp.floating), ft.larger_than(2), ft.glob("**.left") | ft.glob("**.right"), ...,
     ft.has_ndim(2) & (lambda path, leaf: len(path) % 2 == 0)],
)  # fmt: skip
FILTERS = OF_THE_LEAF | st.sampled_from(
    [Leafy, list, Keyless, Leafy | dict, typing.Union[Leafy, list]]  # noqa: UP007
)

# Laws


@st.composite
def selections(
    draw: st.DrawFn, trees: st.SearchStrategy[Any] = TREES
) -> tuple[Any, ft.Selection[Any]]:
    """A tree, and some nodes of it of which none lies in another."""
    tree = draw(trees)
    paths = [path for path, _ in nodes(tree)]
    drawn = draw(st.lists(st.sampled_from(paths), min_size=1, max_size=4, unique=True))
    return tree, ft.select(tree).where(lambda path, node: path in drawn)


@given(selections())
def test_set_of_get_is_the_identity(drawn: tuple[Any, ft.Selection[Any]]) -> None:
    tree, selection = drawn
    assert same(selection.set_each(list(selection)), tree)
    assert same(selection.apply(lambda part: part), tree)
    if selection.count() == 1:
        assert same(selection.set(selection.get()), tree)


@given(selections())
def test_get_of_set_is_what_was_set(drawn: tuple[Any, ft.Selection[Any]]) -> None:
    _, selection = drawn
    parts = list(selection)
    values = [object() for _ in selection]
    changed = selection.set_each(values)
    assert all(a is b for a, b in zip(nodes_at(changed, selection.paths()), values, strict=True))
    again = selection.set(values)
    assert all(part is values for part in nodes_at(again, selection.paths()))
    assert all(a is b for a, b in zip(selection, parts, strict=True))  # the tree is as it was


@given(selections())
def test_the_number_of_parts(drawn: tuple[Any, ft.Selection[Any]]) -> None:
    tree, selection = drawn
    assert selection.count() == len(selection) == len(selection.paths()) == len(list(selection))
    assert selection.expect(selection.count()) is selection
    assert all(a is b for a, b in zip(selection, nodes_at(tree, selection.paths()), strict=True))
    assert list(selection.paths()) == [path for path, _ in nodes(tree) if path in selection.paths()]


@given(selections())
def test_what_is_not_selected_is_the_same_object(drawn: tuple[Any, ft.Selection[Any]]) -> None:
    tree, selection = drawn
    changed = selection.set("new")
    chosen = selection.paths()
    for path, node in nodes(tree):
        inside = any(path[: len(one)] == one for one in chosen)
        above = any(one[: len(path)] == path for one in chosen)
        assert inside or above or nodes_at(changed, [path])[0] is node


@given(selections())
def test_partition_merges_back(drawn: tuple[Any, ft.Selection[Any]]) -> None:
    tree, selection = drawn
    chosen, rest = selection.partition()
    structure = jax.tree.structure(tree, is_leaf=is_none)
    assert all(jax.tree.structure(part, is_leaf=is_none) == structure for part in (chosen, rest))
    assert same(eqx.combine(chosen, rest), tree)
    inside = [leaf for part in selection for leaf in jax.tree.leaves(part)]
    assert [id(x) for x in inside] == [id(x) for x in jax.tree.leaves(chosen)]
    assert len(jax.tree.leaves(rest)) == len(jax.tree.leaves(tree)) - len(inside)


@given(
    st.lists(TREES, min_size=1, max_size=4) | st.lists(TREES, min_size=1, max_size=4).map(tuple),
    st.data(),
)
def test_remove_undoes_insert(elements: Any, data: st.DataObject) -> None:
    tree = {"here": Leafy(elements, "beside")}
    chosen = data.draw(st.lists(st.sampled_from(range(len(elements))), min_size=1, unique=True))
    selection = (
        ft.select(tree).at("here.w").where(lambda path, node: len(path) == 1 and path[0] in chosen)
    )
    assert selection.count() == len(chosen)
    new = object()
    for behind, insert in enumerate([selection.insert_before, selection.insert_after]):
        inserted = insert(new)
        assert type(inserted["here"].w) is type(elements)
        places = [i for i, x in enumerate(inserted["here"].w) if x is new]
        assert places == [i + n + behind for n, i in enumerate(sorted(chosen))]
        assert same(ft.select(inserted).where(lambda path, node: node is new).remove(), tree)


@given(TREES.filter(lambda tree: tree is not abs), FILTERS)  # `ft.plan` refuses a function
def test_filters_are_those_of_split_and_of_layouts(tree: Any, chosen: Any) -> None:
    selection = ft.select(tree).where(chosen)
    try:
        first = ft.split(tree, chosen, *([] if chosen is ... else [...]))[1]
    except ft.FunctreeError as error:
        assert "no array of the tree" in str(error)
        reject()  # `where` accepts such patterns
    flat = jax.tree_util.tree_flatten_with_path(first)[0]
    assert selection.paths() == tuple(Path.of(keys) for keys, _ in flat)
    assert all(part is leaf for part, (_, leaf) in zip(selection, flat, strict=True))
    if chosen is not ...:
        layout = ft.StateSharding({chosen: ft.P(), ...: ft.P()}, unused="ignore")
        rows = ft.plan(tree, layout, {})
        decided = [row.path for row in rows if not row.reason.startswith("...: ")]
        assert list(selection.paths()) == decided


@given(
    TREES,
    st.sampled_from(
        [Leafy, list, dict, Pair, np.ndarray, type(None), int, Leafy | tuple, (Leafy, dict)]
    ),
)
def test_under_selects_the_outermost(tree: Any, cls: Any) -> None:
    found = ft.select(tree).under(cls).paths()
    assert ft.select(tree).where(lambda path, node: isinstance(node, cls)).paths() == found
    instances = [path for path, node in nodes(tree) if isinstance(node, cls)]
    outermost = [
        path for path in instances if not any(path[:n] in instances for n in range(len(path)))
    ]
    assert list(found) == outermost


# A class would be looked for above the parts too: a filter sees all that a leaf lies in.
@given(selections(), OF_THE_LEAF)
def test_a_second_choice_is_made_in_each_part(
    drawn: tuple[Any, ft.Selection[Any]], chosen: Any
) -> None:
    _, selection = drawn
    parts = zip(selection.paths(), selection, strict=True)
    below = [(path, ft.select(part).where(chosen).paths()) for path, part in parts]
    assert list(selection.where(chosen).paths()) == [
        Path((*path, *rest)) for path, rests in below for rest in rests
    ]


# Tables


class Norm(eqx.Module):
    scale: Float[Array, "embed"]


class Dense(eqx.Module):
    weight: Float[Array, "embed hidden"]
    bias: Float[Array, "hidden"] | None
    name: str = eqx.field(static=True, default="dense")


class Named(NamedTuple):
    first: Any
    second: Any


class Model(eqx.Module):
    layers: list[Any]
    pair: tuple[Any, ...]
    heads: dict[str, Any]
    named: Named
    act: Callable[..., Any]


def dense(bias: bool = True) -> Dense:
    return Dense(np.ones((2, 3), np.float32), np.zeros(3, np.float32) if bias else None)


def model() -> Model:
    return Model(
        [dense(), Norm(np.ones(2, np.float32)), dense(bias=False)],
        (Norm(np.ones(4, np.float32)), ()),
        {"z": dense(), "a.b": Norm(np.ones(5, np.float32)), "empty": ()},
        Named(np.arange(2), None),
        jax.nn.relu,
    )


def texts(selection: ft.Selection[Any]) -> list[str]:
    return list(map(str, selection.paths()))


AT: dict[str, tuple[Any, list[str]]] = {
    "text": ("layers.0.weight", ["layers.0.weight"]),
    "quoted": ('heads."a.b"', ['heads."a.b"']),
    "the whole": ("", [""]),
    "field of a named tuple": ("named.second", ["named.second"]),
    "accessor": (lambda m: m.layers[1].scale, ["layers.1.scale"]),
    "accessor, the whole": (lambda m: m, [""]),
    "accessor, an empty tuple": (lambda m: m.pair[1], ["pair.1"]),
    "accessor, tuple of parts": (lambda m: (m.heads["z"], m.layers[0]), ["heads.z", "layers.0"]),
    "accessor, one part twice": (lambda m: (m.act, m.act), ["act"]),
}


@pytest.mark.parametrize("case", AT)
def test_at(case: str) -> None:
    where, paths = AT[case]
    tree = model()
    selection = ft.select(tree).at(where)
    assert texts(selection) == paths
    assert all(a is b for a, b in zip(selection, nodes_at(tree, selection.paths()), strict=True))


def test_at_below_another_choice() -> None:
    tree = model()
    layers = ft.select(tree).under(Dense)
    assert texts(layers.at("bias")) == texts(layers.at(lambda layer: layer.bias)) == [
        "layers.0.bias", "layers.2.bias", "heads.z.bias",
    ]  # fmt: skip


def test_innermost() -> None:
    tree = [[1, [2]], {"a": [[3], 4]}, (5,)]
    lists = ft.select(tree).under(list)
    assert texts(lists) == [""] and texts(lists.innermost()) == ["0.1", "1.a.0"]
    inside = ft.select(tree).at("1").where(lambda path, node: isinstance(node, list))
    assert texts(inside) == ["1.a"] and texts(inside.innermost()) == ["1.a.0"]
    # What has no parts inside stays.
    assert texts(ft.select(model()).where("**.bias").innermost()) == [
        "layers.0.bias",
        "heads.z.bias",
    ]
    assert ft.select(tree).under(dict).innermost().set(0) == [[1, [2]], 0, (5,)]
    with raises("no part of the list is selected"):
        ft.select(tree).under(str).innermost().set(0)


def test_innermost_of_an_exact_choice_is_an_error() -> None:
    """It would silently be the outermost."""
    whole = ft.select([1, [2, [3]]])
    for exact in (whole, whole.under(list).at("1"), whole.under(list).innermost()):
        with raises("call `.innermost()` right after one of them"):
            exact.innermost()


def test_apply_with_the_path() -> None:
    tree = {"a": 1, "b": [2, 3]}
    named = ft.select(tree).under(int).apply(lambda path, x: (str(path), x), with_path=True)
    assert named == {"a": ("a", 1), "b": [("b.0", 2), ("b.1", 3)]}


def test_with_the_path_is_said_by_a_flag() -> None:
    chosen: Any = ft.select({"a": 1}).under(int)
    with raises("with_path='yes'", error=TypeError):
        chosen.apply(lambda path, x: x, with_path="yes")


def test_paths_of_a_later_choice_begin_at_the_earlier() -> None:
    seen: list[str] = []

    def note(path: Path, node: Any) -> bool:
        seen.append(str(path))
        return False

    ft.select(model()).at("layers.0").where(note)
    assert seen == ["", "weight", "bias"]
    assert texts(ft.select(model()).at("heads").where("z.*")) == ["heads.z.weight", "heads.z.bias"]


# Changes


X, Y = np.full(2, 1), np.full(2, 2)
NEW = np.full(2, 9)
TREE: dict[str, Any] = {
    "list": [X, Y], "tuple": (X, Y), "dict": {"b": X, "a": Y}, "ordered": OrderedDict(b=X, a=Y),
    "default": defaultdict(list, b=X, a=Y),
}  # fmt: skip
FIRST = {"list": 0, "tuple": 0, "dict": "b", "ordered": "b", "default": "b"}
REMOVED: dict[str, Any] = {
    "list": [Y], "tuple": (Y,), "dict": {"a": Y}, "ordered": OrderedDict(a=Y), "default": defaultdict(list, a=Y),
}  # fmt: skip


@pytest.mark.parametrize("kind", REMOVED)
def test_remove(kind: str) -> None:
    changed = ft.select(TREE).at(ft.Path((kind, FIRST[kind]))).remove()
    assert same(changed[kind], REMOVED[kind]) and type(changed[kind]) is type(TREE[kind])
    if kind == "default":
        assert changed[kind].default_factory is list
    assert len(TREE[kind]) == 2


def test_a_dict_keeps_its_order() -> None:
    tree = {"z": X, "m": [X], "a": Y}
    assert (
        list(ft.select(tree).at("m").set(1))
        == list(ft.select(tree).at("m.0").remove())
        == ["z", "m", "a"]
    )
    assert list(ft.select(tree).at("m").remove()) == ["z", "a"]


def test_remove_from_several_at_once() -> None:
    tree = {"a": [0, 1, [2, 3]], "b": {"c": (4, 5), "d": 6}}
    odd = ft.select(tree).where(lambda path, node: isinstance(node, int) and node % 2 == 1)
    assert odd.remove() == {"a": [0, [2]], "b": {"c": (4,), "d": 6}}
    assert ft.select(tree).at(lambda t: (t["a"][2], t["b"]["c"])).remove() == {
        "a": [0, 1],
        "b": {"d": 6},
    }
    assert ft.select([0, 1]).under(int).remove() == []


# Edges


CHANGES: dict[str, Callable[[Any], Any]] = {
    "set": lambda s: s.set(1), "set_each": lambda s: s.set_each([]), "apply": lambda s: s.apply(lambda x: 1 / 0),
    "remove": lambda s: s.remove(), "insert_after": lambda s: s.insert_after(1),
    "insert_before": lambda s: s.insert_before(1),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_to_change_nothing_is_an_error(change: str) -> None:
    with raises("no part of the Model is selected, so nothing can be changed", "`.count()`"):
        CHANGES[change](ft.select(model()).under(eqx.nn.Linear))


def test_an_empty_selection_can_be_looked_at() -> None:
    tree = model()
    nothing = ft.select(tree).under(eqx.nn.Linear)
    assert list(nothing) == [] and nothing.paths() == () and nothing.count() == 0 and not nothing
    assert jax.tree.leaves(nothing.partition()[0]) == [] and same(nothing.partition()[1], tree)
    assert repr(nothing) == "<0 parts of Model>"


def test_the_whole_is_selected() -> None:
    tree = model()
    whole = ft.select(tree)
    assert whole.get() is tree and whole.paths() == (Path(),) and whole.set(3) == 3
    assert whole.apply(lambda m: m.act) is jax.nn.relu and same(whole.partition()[0], tree)
    assert repr(whole) == "<1 part of Model: the whole tree>"
    assert repr(whole.where(...)).endswith(
        " layers.0.bias, layers.1.scale, layers.2.weight and 5 more>"
    )


def test_one_array_at_two_places() -> None:
    shared = jnp.ones(2)
    tree = {"a": shared, "b": [shared]}
    assert texts(ft.select(tree).at(lambda t: t["b"][0])) == ["b.0"]
    changed = ft.select(tree).at("b.0").set(NEW)
    assert changed["a"] is shared and changed["b"] == [NEW]
    assert ft.select(tree).where(lambda path, node: node is shared).count() == 2


def test_equal_small_values_are_told_apart() -> None:
    tree = [1, (1, None), None]
    assert texts(ft.select(tree).at(lambda t: (t[1][0], t[2]))) == ["1.0", "2"]
    assert ft.select(tree).at(lambda t: t[1][0]).set(2) == [1, (2, None), None]


def test_a_stack_is_changed_as_a_whole() -> None:
    stack = ft.stack(lambda key: ft.nn.MLP(2, 4, key=key), 3, jax.random.key(0))
    tree = {"blocks": stack}
    assert texts(ft.select(tree).under(ft.nn.MLP)) == texts(ft.select(tree).at(lambda t: t["blocks"].layer)) == [
        "blocks.layer",
    ]  # fmt: skip
    gate = ft.select(tree).where(ft.has_axis("layers") & ft.glob("**.gate"))
    zeroed = gate.apply(jnp.zeros_like)["blocks"]
    assert zeroed.axis == "layers" and len(zeroed) == 3 and not zeroed.layer.gate.any()


def test_state_is_selected_by_the_models_paths() -> None:
    _, state = ft.make_state({"first": ft.nn.BatchNorm(2), "second": ft.nn.BatchNorm(3)})
    assert [x.shape for x in ft.select({"s": state}).where("s.*.var")] == [(2,), (3,)]
    assert ft.select(state).at("second.var").get() is state["second.var"]
    changed = ft.select({"s": state}).at("s.second.var").apply(jnp.zeros_like)["s"]
    assert not changed["second.var"].any() and changed["first.var"] is state["first.var"]
    assert ft.select(state).where(ft.is_state).count() == 4
    chosen, rest = ft.select(state).where("first.**").partition()
    assert same(eqx.combine(chosen, rest), state) and rest["first.mean"] is None


def test_what_is_packed_is_selected_by_the_trees_paths() -> None:
    tree = model()
    packed = ft.pack(tree)
    selection = ft.select([packed]).where("**.bias")
    assert selection.count() == ft.select(tree).where("**.bias").count() == 2
    changed = selection.apply(lambda x: x + 1)[0].tree
    assert changed.layers[0].bias.all() and changed.layers[0].weight is tree.layers[0].weight
    assert ft.select(packed).at("layers.0.bias").get() is tree.layers[0].bias
    assert ft.select(packed).where(Norm).count() == 3


def test_traced_and_abstract_trees() -> None:
    @jax.jit
    def double(tree: Any) -> Any:
        return ft.select(tree).where("a.**").apply(lambda x: x + x)

    assert double({"a": [jnp.ones(2)], "b": jnp.ones(2)})["a"][0].tolist() == [2, 2]


# Messages

CASES: dict[str, tuple[Callable[[ft.Selection[Any]], Any], tuple[str, ...]]] = {
    "get of several": (
        lambda s: s.under(Norm).get(),
        ("select: expected 1 part, but found 3", 'layers.1, pair.0, heads."a.b"   Norm', "select fewer"),
    ),
    "expect": (
        lambda s: s.where("**.bias").expect(3),
        ("expected 3 parts, but found 2", "layers.0.bias, heads.z.bias   f32[3]"),
    ),
    "set_each": (
        lambda s: s.under(Norm).set_each([1]),
        ("set_each: got 1 value for 3 parts", 'layers.1, pair.0, heads."a.b"   Norm', "Try: pass one"),
    ),
    "nothing at a path": (
        lambda s: s.at("layers.0.weigth"),
        ("at: `layers.0.weigth` does not exist", "`layers.0` has no `weigth`", "did you mean `weight`?"),
    ),
    "at: a slice": (lambda s: s.at(lambda m: [m.pair[:1]]), ("returned (Norm(", "which is not a part of the tree")),
    "at: no parts": (lambda s: s.at(lambda m: ()), ("the function returned ()",)),
    "at: one in another": (
        lambda s: s.at(lambda m: (m.layers[0].bias, m.layers)),
        ("`layers.0.bias` is inside `layers`", "return only one of them"),
    ),
    "under a number": (lambda s: s.under(3), ("under: 3 is not a class", "pass a class")),
    "under a class with arguments": (lambda s: s.under(list[int]), ("under: list[int] is not a class", "without type arguments")),
    "remove a field": (
        lambda s: s.at(lambda m: (m.act, m.named.second)).remove(),
        ("cannot remove 2 parts", "is not an element of a list, a tuple or a dict", "named.second   NoneType", "`.set(value)`"),
    ),
    "remove the whole": (lambda s: s.remove(), ("cannot remove 1 part", "Model", "is not an element")),
    "insert beside a field": (
        lambda s: s.where("**.bias").insert_after(1),
        ("cannot insert next to 2 parts", "layers.0.bias, heads.z.bias   f32[3]", "is not an element of a list or a tuple"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_messages(case: str) -> None:
    call, told = CASES[case]
    with raises(*told):
        call(ft.select(model()))


def test_many_parts_are_found_in_one_walk() -> None:
    """The time for each part does not depend on their number."""
    few, many = ([Leafy(jnp.ones(1), n) for n in range(size)] for size in (50, 500))

    def calls(tree: list[Any]) -> int:
        chosen = ft.select(tree).under(Leafy)
        return sum(python_calls(run) for run in (
            lambda: chosen.at("w").apply(lambda x: x),
            lambda: chosen.at(lambda leafy: leafy.w).count(),
            lambda: chosen.where("w").count(),
            lambda: chosen.remove(),
            lambda: chosen.insert_after(None),
            lambda: ft.select(tree).at(lambda tree: [leafy.w for leafy in tree]).count(),
        ))  # fmt: skip

    assert calls(many) < 12 * calls(few)


def test_a_path_is_not_the_text_of_a_key_of_a_dict() -> None:
    """As it may be in a state, whose keys are paths."""
    tree = {"a.b": 1, "a": {"b": 2, "c.d": 3}}
    assert ft.select(tree).at("a.b").get() == 2
    assert ft.select(tree).at(ft.Path(("a.b",))).get() == 1
    assert ft.select(tree).at('a."c.d"').paths() == (ft.Path(("a", "c.d")),)
    with raises("`a.c.d` does not exist, since `a` has no `c`"):
        ft.select(tree).at("a.c.d")
