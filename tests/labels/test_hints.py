"""What a model says ─► its leaves' axes: every row of the table, in the forms in which people write
it."""

# ruff: noqa: UP006, UP007  (`List` and `Union` are forms under test)

import sys
import typing
from typing import (
    Annotated,
    Any,
    Generic,
    NamedTuple,
    TypeAlias,
    TypeVar,
    Union,
)

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray, PyTree, Scalar, Shaped

import functree as ft
from functree.errors import AxesError
from functree.labels.annotations.hints import Namespace, array_form
from functree.labels.leaves import read
from functree.tree.axes import Axes
from tests.labels import quoted_annotations as quoted
from tests.lib.trees import hold, linear, x

P = ft.P
T = TypeVar("T")
U = TypeVar("U")
Weight: TypeAlias = Float[Array, "embed hidden"]
Many: TypeAlias = list[T]
Nested = Union[Float[Array, "a b"], dict[str, "Nested"]]
Zig, Zag = "Zag", "Zig"


def told(annotation: Any, value: Any) -> Any:
    return ft.tree_axes(hold(annotation, value, __name__)).w


class Box(eqx.Module, Generic[T]):
    item: T


class Sub(Box[U], Generic[U]):
    more: U


class Plain(Box):
    pass


class Bound(Box[Float[Array, "p q"]]):
    pass


class BoundToArray(Box[Array]):
    """Hands an annotation without names up."""


class Mixin(eqx.Module, Generic[U]):
    mixed: U


class Layered(Box[list[U]], Generic[U]):
    """Hands a list of its own parameter up."""


class Wrapped(Box[Mixin[U]], Generic[U]):
    """Hands its parameter up in a generic class."""


class Reused(Box[list[T]], Generic[T]):
    """Hands a list of its parameter to a base whose parameter has the same name."""


class Loose(eqx.Module, Generic[T]):
    item: T | Float[Array, "x y z"]


class Mixed(Mixin[Float[Array, "m"]]):
    pass


class Joined(Bound, Mixed):
    """None of its bases has brackets."""


class Diamond(Bound, Plain):
    """`Box` is a base twice, and once without a value."""


class Pair(NamedTuple, Generic[T]):
    left: T
    right: Float[Array, "right"]


class Fields(eqx.Module):
    weight: Array
    bias: Array | None


class Either(eqx.Module):
    weight: Array | list[int]


KEY = jax.eval_shape(lambda: jax.random.key(0))
LINEAR = ft.names(weight="out in", bias="out")

# annotation, value, the axes of its leaves in order
TABLE: dict[str, tuple[Any, Any, list[str]]] = {
    "shaped twice": (Shaped[Float[Array, "c d"], "layer"], x(4, 2, 3), ["layer c d"]),
    "either array": (Float[Array | np.ndarray, "a"], x(2), ["a"]),
    "scalar": (Scalar, x(), [""]),
    # unions
    "or None": (Float[Array, "a b"] | None, x(2, 3), ["a b"]),
    "rank decides, two": (Union[Float[Array, "a"], Float[Array, "b c"]], x(2, 3), ["b c"]),
    "dtype decides, two": (Float[Array, "a"] | Int[Array, "b"], x(2, dtype=np.int32), ["b"]),
    "another dtype than annotated": (Float[Array, "a"], x(2, dtype=np.int32), ["a"]),
    "an array or a list": (Float[Array, "a"] | list[Float[Array, "b c"]], [x(1, 2)], ["b c"]),
    # tokens
    "size": (Float[Array, "dim=4 other=n"], x(4, 2), ["dim other"]),
    "unchecked": (Float[Array, "_pad _"], x(4, 2), ["pad _"]),
    "broadcast at 1": (Float[Array, "#b c"], x(1, 2), ["_ c"]),
    "broadcast at 0": (Float[Array, "#b"], x(0), ["b"]),
    "size broadcast": (Float[Array, "b=#4"], x(1), ["_"]),
    "expressions": (Float[Array, "a*b a+1 {self.n} min(a,b) a/b"], x(1, 2, 3, 4, 5), ["_ _ _ _ _"]),
    "expressions with signs": (Float[Array, "{n:d} {self.sizes[1:2]} {a@b}"], x(1, 2, 3), ["_ _ _"]),
    "named expressions": (Float[Array, "#dim=4 rows=a*b a==b a+b=6"], x(4, 5, 6, 7), ["dim rows _ _"]),
    "for each leaf": (Float[Array, "?x"], x(2), ["x"]),
    "variadic without a name": (Float[Array, "*_ a"], x(2, 3, 4), ["_ _ a"]),
    "dots, two": (Float[Array, "... a"], x(2, 3, 4), ["_ _ a"]),
    "variadic, one": (Float[Array, "*batch a"], x(2, 3), ["batch a"]),
    "variadic, two": (Float[Array, "*batch a"], x(2, 3, 4), ["_ _ a"]),
    "variadic alone, scalar": (Float[Array, "*shape"], x(), [""]),
    "variadic broadcast at 1": (Float[Array, "*#b a"], x(1, 3), ["_ a"]),
    # containers
    "tuple of any length": (tuple[Float[Array, "a"], ...], (x(2), x(3)), ["a", "a"]),
    "tuple with an int": (tuple[int, Float[Array, "b"]], (1, x(3)), ["b"]),
    "deep": (dict[str, list[tuple[Int[Array, ""], Float[Array, "a"]]]], {"k": [(x(), x(2))]}, ["", "a"]),
    "PyTree": (PyTree[Float[Array, "a"]], {"k": [x(2), (x(3), Box(x(4)))]}, ["a", "a", "a"]),
    "PyTree of a union": (PyTree[Float[Array, "a"] | Int[Array, "b"]], [x(2, dtype=np.int32), x(2)], ["b", "a"]),
    "PyTree beside an array": (Float[Array, "a"] | PyTree[Float[Array, "b c"]], [[x(2, 3)]], ["b c"]),
    "PyTree over annotated": (PyTree[Float[Array, "a"]], [Bound(x(2, 3))], ["p q"]),
    "PyTree of anything": (PyTree, [x(2)], ["_"]),
    "PyTree of dicts": (PyTree[dict[str, Float[Array, "a"]]], {"k": {"l": x(2)}}, ["a"]),
    "PyTree of lists": (PyTree[list[Float[Array, "a"]]], [[x(2)], [[x(3)]]], ["a", "a"]),
    "a dict beside a tuple": (tuple[Float[Array, "a"]] | dict[int, Float[Array, "b"]], {0: x(2)}, ["b"]),
    "a list of anything": (typing.List, [x(2)], ["_"]),
    "a mapping of anything, or None": (Union[typing.Mapping, None], {"k": x(2)}, ["_"]),
    # generics
    "Box": (Box[Float[Array, "a"]], Box(x(2)), ["a"]),
    "Box, nothing bound": (Box, Box(x(2)), ["_"]),
    "inherited": (Bound, Bound(x(2, 3)), ["p q"]),
    "inherited from two without brackets": (Joined, Joined(x(4), x(2, 3)), ["m", "p q"]),
    "inherited twice, once without brackets": (Diamond, Diamond(x(2, 3)), ["p q"]),
    "an alternative": (Loose[Float[Array, "a"]], Loose(x(2)), ["a"]),
    "an alternative, the other": (Loose[Float[Array, "a"]], Loose(x(2, 3, 4)), ["x y z"]),
    "handed up": (Layered[Float[Array, "a"]], Layered([x(2)]), ["a"]),
    "handed up under one name": (Reused[Float[Array, "a"]], Reused([x(2)]), ["a"]),
    "a list handed up, under the base": (Box[list[Float[Array, "a"]]], Layered([x(2)]), ["a"]),
    "a generic handed up": (Box[Mixin[Float[Array, "a"]]], Wrapped(Mixin(x(2))), ["a"]),
    "an array without names, under the base": (Box[Float[Array, "a"]], BoundToArray(x(2)), ["a"]),
    "another container than is handed up": (Box[Float[Array, "a"]], Layered([x(2)]), ["_"]),
    "subclass under a generic": (Box[Float[Array, "a"]], Sub(x(2), x(3)), ["a", "_"]),
    "under a generic of another class": (Mixin[Float[Array, "a"]] | Box[Float[Array, "b"]], Box(x(2)), ["b"]),
    "plain subclass under a generic": (Box[Float[Array, "a"]], Plain(x(2)), ["a"]),
    "generic named tuple": (Pair[Float[Array, "left"]], Pair(x(2), x(3)), ["left", "right"]),
    # aliases
    "generic alias": (Many[Float[Array, "a"]], [x(2)], ["a"]),
    "partly in quotes": (list["Weight"], [x(2, 3)], ["embed hidden"]),
    "a quoted alternative": (Union[Float[Array, "a"], "Weight"], x(2, 3), ["embed hidden"]),
    "recursive": (Nested, {"k": {"l": x(2, 3)}}, ["a b"]),
    # marks
    "Axes": (Annotated[Array, ft.Axes("a", None)], x(2, 3), ["a _"]),
    "Axes over jaxtyping": (Annotated[Float[Array, "x y"], ft.Axes("a", "b")], x(2, 3), ["a b"]),
    "Axes of a list's arrays": (Annotated[list[Array], ft.Axes("a")], [x(2)], ["a"]),
    "names": (Annotated[eqx.nn.Linear, LINEAR], linear(), ["out in", "out"]),
    "names around names": (
        Annotated[Annotated[eqx.nn.Linear, ft.names(weight="a b", bias="c")], LINEAR], linear(), ["out in", "out"]
    ),
    "names on a list": (Annotated[list[eqx.nn.Linear], LINEAR], [linear(), linear()], ["out in", "out"] * 2),
    "names of a dict of arrays": (Annotated[dict[str, Array], ft.names(w="a b", b="b")], {"w": x(2, 3), "b": x(3)},
        ["b", "a b"],
    ),
    "names over a module's own": (Annotated[Bound, ft.names(item="x y")], Bound(x(2, 3)), ["x y"]),
    "names through None": (Annotated[Fields, ft.names({"weight": "a", "bias.deep": "b"})], Fields(x(2), None), ["a"]),
    # keys
    "key": (PRNGKeyArray, KEY, [""]),
    "keys": (Key[Array, "n"], jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3)), ["n"]),
    # stacks
    "stack": (ft.Stacked[Bound], ft.Stacked(Bound(x(5, 2, 3))), ["layers p q"]),
    "stack of stacks": (
        ft.Stacked[ft.Stacked[Bound]],
        ft.Stacked(ft.Stacked(Bound(x(6, 5, 2, 3)), "inner"), "outer"),
        ["outer inner p q"],
    ),
    "stack with a variadic": (ft.Stacked[Float[Array, "*b a"]], ft.Stacked(x(5, 2, 3)), ["layers b a"]),
    "stack of a named module": (
        ft.Stacked[Annotated[Fields, ft.names(weight="a", bias="b")]],
        ft.Stacked(Fields(x(5, 2), x(5, 3))),
        ["layers a", "layers b"],
    ),
    "unannotated in a stack": (ft.Stacked[Fields], ft.Stacked(Fields(x(5, 2), None)), ["layers _"]),
    # nothing
    "callable": (typing.Callable[[Float[Array, "a"]], Float[Array, "b"]], x(2), ["_"]),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_table(case: str) -> None:
    annotation, value, expected = TABLE[case]
    axes = jax.tree.leaves(told(annotation, value))
    assert axes == [Axes.parse(text) for text in expected]
    assert all(type(a) is Axes for a in axes)


AB, DATA = Float[Array, "a b"], P("data")
SPECS: dict[str, tuple[Any, Any, str, P]] = {
    "of an array": (Annotated[AB, P(None, "model")], x(2, 4), "a b", P(None, "model")),
    "without names": (Annotated[Array, DATA], x(2, 4), "_ _", DATA),
    "of a quoted name": (Annotated["Weight", DATA], x(2, 4), "embed hidden", DATA),
    "of a quoted class": (Annotated["Fields", DATA], Fields(x(2, 4), None), "_ _", DATA),
    "of a layer in a tuple": (Annotated[tuple[int, Fields], DATA], (1, Fields(x(2, 4), None)), "_ _", DATA),
    "of a layer in a generic": (Annotated[Box[Fields], DATA], Box(Fields(x(2, 4), None)), "_ _", DATA),
    "of a layer with an array or numbers": (Annotated[Either, DATA], Either(x(2, 4)), "_ _", DATA),
    "around another": (Annotated[Annotated[AB, P("model")], DATA], x(2, 4), "a b", DATA),
    "of a layer or None": (Annotated[Fields | None, DATA], Fields(x(2, 4), None), "_ _", DATA),
    "of one alternative": (Annotated[AB, DATA] | Float[Array, "c"], x(2, 4), "a b", DATA),
    "of a list": (Annotated[list[AB], DATA], [x(2, 4)], "a b", DATA),
    "of a generic": (Annotated[Box[AB], DATA], Box(x(2, 4)), "a b", DATA),
    "beside names": (Annotated[Box[Annotated[AB, DATA]], ft.names(item="c d")], Box(x(2, 4)), "c d", DATA),
}  # fmt: skip


@pytest.mark.parametrize("case", SPECS)
def test_a_physical_spec(case: str) -> None:
    annotation, value, axes, spec = SPECS[case]
    [leaf] = read(hold(annotation, value, __name__)).leaves
    assert leaf.spec == spec and str(leaf.axes) == axes and leaf.annotated


A = Float[Array, "a"]
# Annotation, value ─► whether its leaves are buffers. A union with a buffer is one, whichever
# alternative the array is: it may not be trained.
BUFFERS: dict[str, tuple[Any, Any, list[bool]]] = {
    "an array": (ft.Buffer[A], x(2), [True]),
    "a module": (ft.Buffer[Fields], Fields(x(2), x(3)), [True, True]),
    "inside of axes": (Annotated[ft.Buffer[Array], ft.Axes("a")], x(2), [True]),
    "a union": (AB | ft.Buffer[A], x(2), [True]),
    "a union, the other": (ft.Buffer[A] | AB, x(2, 4), [True]),
    "beside one": (tuple[ft.Buffer[A], A], (x(2), x(2)), [True, False]),
}


@pytest.mark.parametrize("case", BUFFERS)
def test_buffers(case: str) -> None:
    annotation, value, expected = BUFFERS[case]
    assert [leaf.buffer for leaf in read(hold(annotation, value, __name__)).leaves] == expected


def test_what_is_unnamed_and_why() -> None:
    """Each dimension that an annotation leaves whole has what is written there."""
    [leaf] = read(hold(Float[Array, "4 a ... b*c #d"], x(4, 2, 3, 5, 1))).leaves
    assert leaf.unnamed == ("4", "", "...", "b*c", "#d")
    [leaf] = read(hold(ft.Stacked[Float[Array, "4 a"]], ft.Stacked(x(7, 4, 2)))).leaves
    assert leaf.unnamed == ("", "4", "") and leaf.stacked == 1
    [leaf] = read(hold(Float[Array, "a"], x(4))).leaves
    assert leaf.unnamed == ()
    [leaf] = read(hold(Annotated[Fields, ft.names(weight="_ a")], Fields(x(1, 2), None))).leaves
    assert leaf.unnamed == ("_", "")


# Strings


def test_future_annotations() -> None:
    inner = quoted.Inner(jnp.ones((2, 3)), jnp.ones(3))
    model = quoted.Outer(
        alias=jnp.ones((2, 3)), inner=inner, inners=[inner, quoted.Child(jnp.ones((4, 2)), None)],
        own=None, lin=linear(), mean=jnp.ones(2), table={"t": jnp.ones((4, 2))}, missing=inner, loose=[inner],
    )  # fmt: skip
    axes = ft.tree_axes(model)
    weights = [axes.alias, axes.inner.w, axes.inners[0].w, axes.missing.w, axes.loose[0].w]
    assert weights == [Axes("embed", "hidden")] * 5
    assert axes.inners[1].w == Axes("vocab", "embed") and axes.inners[1].b is None
    assert axes.lin.weight == Axes("out", "in") and axes.table["t"] == Axes("vocab", "embed")
    assert [str(leaf.path) for leaf in read(model).leaves if leaf.buffer] == ["mean"]
    assert axes.inner.size is None
    # Generic classes and named tuples.
    assert ft.tree_axes(quoted.BoxOfWeights(x(2, 3), [x(4, 5)])).items == [Axes("p", "q")]
    assert told(quoted.Box[Float[Array, "a"]], quoted.Box(x(2), [x(3)])).items == [Axes("a")]
    assert ft.tree_axes(quoted.Pair(x(2), x(3))) == quoted.Pair(Axes("a"), Axes("b"))


UNKNOWN = "name 'Unknown' is not defined"
# Annotation, value ─► the part that cannot be resolved, and why.
NOWHERE: dict[str, tuple[Any, Any, str, str]] = {
    "in a list": (list["Unknown"], [x(2)], "Unknown", UNKNOWN),
    "in a generic": (Box["Unknown"], Box(x(2)), "Unknown", UNKNOWN),
    "with a spec": (Annotated["Unknown", P("data")], x(2), "Unknown", UNKNOWN),
    "no expression": ("Float[Array", x(2), "Float[Array", "was never closed"),
    "an error": ("1 / 0", x(2), "1 / 0", "division by zero"),
    "a circle": ("Zig", x(2), "Zig", "maximum recursion depth exceeded"),
}


@pytest.mark.parametrize("case", NOWHERE)
def test_a_name_that_leads_nowhere(case: str) -> None:
    annotation, value, part, why = NOWHERE[case]
    remedy = "write an annotation that Python can evaluate: define or import its names in the"
    with pytest.raises(AxesError) as error:
        ft.tree_axes(hold(annotation, value, __name__))
    [problem] = error.value.problems
    assert problem.path is not None and problem.path[0] == "w" and problem.shape == (2,)
    assert problem.why.startswith(f"its annotation `{part}` cannot be resolved: ")
    assert why in problem.why and problem.remedy.startswith(remedy)


def test_a_message_has_the_annotation_as_it_is_written() -> None:
    with pytest.raises(AxesError, match=r"has 1 dimension, but `Weight` has 2"):
        told("Weight", x(2))


def test_an_unknown_name_over_modules_that_speak_for_themselves() -> None:
    assert told("Unknown", Bound(x(2, 3))).item == Axes("p", "q")
    assert told("list[Unknown]", [Bound(x(2, 3))])[0].item == Axes("p", "q")


def test_a_failure_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    module = object.__new__(quoted.ForwardRef)
    object.__setattr__(module, "w", x(2))
    object.__setattr__(module, "ws", [x(3)])
    for _ in range(2):
        with pytest.raises(AxesError, match="'Soon' is not defined"):
            ft.tree_axes(module)
    monkeypatch.setattr(quoted, "Soon", Float[Array, "soon"], raising=False)
    assert ft.tree_axes(module).w == Axes("soon") and ft.tree_axes(module).ws == [Axes("soon")]
    monkeypatch.delattr(quoted, "Soon")
    assert ft.tree_axes(module).w == Axes("soon")  # a success is


def test_a_class_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    find = Namespace.find
    monkeypatch.setattr(
        Namespace, "find", lambda self, text: asked.append(text) or find(self, text)
    )
    fields = {"w": "Weight", "v": list["Weight"]}
    cls = type("Fresh", (eqx.Module,), {"__annotations__": fields, "__module__": __name__})
    module = object.__new__(cls)
    object.__setattr__(module, "w", x(2, 3))
    object.__setattr__(module, "v", [x(2, 3), x(4, 5)])
    for _ in range(3):
        ft.tree_axes([module, module])
    assert asked == ["Weight", "Weight"]


def test_type_aliases() -> None:
    """Python 3.12's statement where there is one; the older form, which says the same,
    everywhere."""
    namespace: dict[str, Any] = dict(globals())
    source = 'W: TypeAlias = Float[Array, "a b"]\nTree = Union[W, dict[str, "Tree"]]\nPairOf = tuple[T, list[T]]\n'
    if sys.version_info >= (3, 12):
        source = (
            'type W = Float[Array, "a b"]\ntype Tree = W | dict[str, Tree]\ntype PairOf[X] = tuple[X, list[X]]\n'
            "type Deep[X] = X | list[Deep[X]]\ntype Lost = list[Unknown]\ntype Self = Self\n"
            "class Quoted695[X](eqx.Module):\n    item: 'list[X]'\n"
        )
    exec(source, namespace)
    matrix, found = x(2, 3), Axes("embed", "hidden")
    assert told(namespace["W"], matrix) == Axes("a", "b")
    assert told(namespace["PairOf"][Weight], (matrix, [matrix])) == (found, [found])
    if sys.version_info >= (3, 12):
        assert told(namespace["Tree"], {"k": {"l": matrix}})["k"] == {"l": Axes("a", "b")}
        assert told(namespace["Deep"][Weight], [[matrix]]) == [[found]]
        assert told(namespace["W"] | None, matrix) == Axes("a", "b")
        cls = namespace["Quoted695"]
        assert told(cls[Weight], cls([matrix])).item == [found]
        with pytest.raises(AxesError, match="'Unknown' is not defined"):
            told(namespace["Lost"], [x(2)])
        with pytest.raises(AxesError, match="maximum recursion depth exceeded"):
            told(namespace["Self"], [x(2)])


def test_what_is_remembered_of_a_hint_is_for_this_hint() -> None:
    """Hints made for one place of a tree live shortly: another must not be taken for them, at the
    same address."""
    trees = [
        hold(Loose[h], Loose(x(2, 2))) for h in (Float[Array, "a b"], Float[Array, "c d"])
    ] * 100
    assert [axes.w.item for axes in ft.tree_axes(trees)] == [Axes("a", "b"), Axes("c", "d")] * 100


def test_what_is_remembered_of_a_hint_is_for_one_stack() -> None:
    """One layer alone and one in a stack may have the same annotation, shape and dtype, and other
    axes."""
    alone = hold(Float[Array, "*dims"], x(2))
    tree = [alone, ft.Stacked(alone), ft.Stacked(alone, "stages")]
    assert [leaf.axes for leaf in read(tree).leaves] == [("dims",), ("layers",), ("stages",)]


# Dimension strings


@pytest.mark.parametrize("token", ["a@data", "a:data", "a@data:2"])
def test_no_sharding_language_in_a_string(token: str) -> None:
    with pytest.raises(AxesError) as error:
        told(Float[Array, f"{token} b"], x(2, 3))
    [problem] = error.value.problems
    written = f'`Float[Array, "{token} b"]`'
    assert problem.why == f"`{token}` in a dimension string is not an axis name: {written}"
    assert "choose mesh axes with rules" in problem.remedy


TOKENS = [
    "a", "dim=4", "_pad", "_", "#b", "?x", "4", "a*b", "{self.n}", "*batch", "...", "*_", "*#b", "#dim=4", "dim=#4",
    "a+b=6", "rows=a*b", "rows=_", "a==b",
]  # fmt: skip


@pytest.mark.parametrize("token", TOKENS)
def test_canary_of_jaxtyping(token: str) -> None:
    """jaxtyping takes each token, keeps the text, and means by it as many dimensions as we do."""
    hint = Float[Array, f"first {token}"]
    assert isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)
    assert hint.dim_str == f"first {token}" and hint.dtype is Float and hint.array_type is jax.Array
    ours = array_form(hint.dim_str, hint.dtype)
    if token.isidentifier() or token in ("4", "*batch", "...", "*_", "dim=4", "#b", "dim=#4"):
        for ndim in range(5):
            fits = isinstance(np.ones((4,) * ndim, np.float32), Float[np.ndarray, hint.dim_str])
            assert fits == ours.fits(ndim)
