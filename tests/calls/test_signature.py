"""What a function's annotations say: layouts by rules, and sizes that agree."""

import functools
from collections.abc import Callable
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

import functree as ft
from functree.calls.signature import Signature
from functree.labels.leaves import read
from functree.transforms.signature_layouts import AnnotationLayout, signature_layouts
from functree.transforms.typed import check_sizes
from tests.lib.checks import raises
from tests.lib.meshes import mesh_of

P = PartitionSpec
RULES = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None, "pad": None})
SIZES = {"data": 2, "model": 4}
BatchHidden = Float[Array, "batch hidden"]


class MLP(eqx.Module):
    up: Float[Array, "embed hidden"]

    def __call__(self, x: Float[Array, "batch embed"]) -> BatchHidden:
        return x @ self.up


# Layouts


SAID: list[tuple[Any, Any]] = [
    (Float[Array, "batch embed"], P("data", None)),
    ("BatchHidden", P("data", "model")),
    (Float[Array, "batch"] | None, P("data")),
    (Float[Array, ""], P()),
    (Float[Array, "batch 4 _pad"], P("data", None, None)),
    (Annotated[Float[Array, "a b"], P(None, "model")], P(None, "model")),
    (Annotated[Array, P("data")], P("data")),
    (tuple[Float[Array, "batch"], MLP], (P("data"), RULES)),
    (dict[str, Float[Array, "hidden"]], P("model")),
    (Any, RULES),
    (None, None),
    (int, None),
]


@pytest.mark.parametrize(("annotation", "layout"), SAID, ids=[str(said) for said, _ in SAID])
def test_layouts_of_annotations(annotation: Any, layout: Any):
    def f(x):
        return x

    f.__annotations__ = {"x": annotation, "return": annotation}
    assert signature_layouts(f, RULES) == ({"x": layout}, layout)


def test_variadic_parameters_have_one_layout_for_all():
    def f(*args: Float[Array, "batch"], **kwargs: Float[Array, "hidden"]) -> None: ...

    assert signature_layouts(f, RULES) == ({"args": P("data"), "kwargs": P("model")}, None)


def test_annotations_in_quotes_see_local_names():
    Local = Float[Array, "batch embed"]

    def f(x: "Local", y: "list[Local]") -> "Local":
        return Local and x

    assert signature_layouts(f, RULES) == (
        {"x": P("data", None), "y": P("data", None)},
        P("data", None),
    )


WAITING: list[tuple[Any, Any, Any]] = [
    (Float[Array, "*batch embed"], jnp.ones((4, 2)), P("data", None)),
    (Float[Array, "#batch embed"], jnp.ones((1, 2)), P(None, None)),
    (Float[Array, "batch embed"] | Float[Array, "hidden"], jnp.ones(4), P("model")),
    (Float[Array, "batch"] | Int[Array, "hidden"], jnp.ones(4, int), P("model")),
    (
        list[tuple[Float[Array, "batch"], Float[Array, "hidden"]]],
        [(np.ones(2), np.ones(4))],
        [(P("data"), P("model"))],
    ),
    (PyTree[Float[Array, "batch"]], {"a": [jnp.ones(2)]}, {"a": [P("data")]}),
    (
        Annotated[eqx.nn.Linear, ft.names(weight="hidden embed", bias="hidden")],
        None,
        (P("model", None), P("model")),
    ),
]


@pytest.mark.parametrize(
    ("annotation", "value", "specs"), WAITING, ids=[str(said) for said, *_ in WAITING]
)
def test_names_that_depend_on_the_array_wait_for_it(annotation: Any, value: Any, specs: Any):
    def f(x):
        return x

    f.__annotations__ = {"x": annotation}
    layout = signature_layouts(f, RULES)[0]["x"]
    assert isinstance(layout, AnnotationLayout) and "AxisRules" in repr(layout)
    again = signature_layouts(f, RULES)[0]["x"]
    assert (
        layout == again
        and hash(layout) == hash(again)
        and layout != AnnotationLayout(P(), layout.hint)
    )
    tree = eqx.nn.Linear(2, 4, key=jax.random.key(0)) if value is None else value
    found = ft.plan(tree, layout, {"data": 2, "model": 4}).specs
    assert (found if value is not None else (found.weight, found.bias)) == specs


def test_other_layouts_that_go_by_size_wait_too():
    layout = signature_layouts(MLP.__call__, RULES | ft.FSDP("data", min_size=0))[0]["x"]
    assert ft.plan(jnp.ones((4, 2)), layout, {"data": 2, "model": 4}).specs == P("data", None)


# What a layout has besides rules (a mesh, a memory kind, more sharded dimensions) is not lost,
# whatever is annotated.
HERE = NamedSharding(ft.make_mesh(data=2, model=4), P())
WITH_MORE: list[tuple[Any, Any, Any]] = [
    (Float[Array, "*batch hidden"], RULES | HERE, P("data", "model")),
    (Annotated[Float[Array, "batch hidden"], P("model")], RULES | HERE, P("model", None)),
    (Float[Array, "batch hidden"], ft.on_host(HERE), P(None, None)),
    (
        Annotated[Float[Array, "a b"], P("model")],
        ft.FSDP("data", min_size=0) | HERE,
        P("model", "data"),
    ),
]


@pytest.mark.parametrize(("annotation", "rules", "spec"), WITH_MORE, ids=str)
def test_nothing_of_another_layout_is_lost(annotation: Any, rules: Any, spec: P):
    def f(x):
        return x

    f.__annotations__ = {"x": annotation}
    layout = signature_layouts(f, rules)[0]["x"]
    plan = ft.plan(jnp.ones((4, 8)), layout)  # without a mesh: that of the layout
    (row,) = plan.rows
    assert plan.mesh == HERE.mesh and row.spec == spec
    assert row.memory_kind == ft.plan(jnp.ones((4, 8)), rules, check=False)[()].memory_kind


def test_a_layout_that_waits_names_axes_in_messages_and_rows():
    def f(x: PyTree[Float[Array, "batch"]]) -> None: ...

    layout = signature_layouts(f, RULES)[0]["x"]
    plan = ft.plan({"a": jnp.ones(3)}, layout, SIZES, check=False)
    assert plan["a"].axes == ft.Axes("batch")
    assert plan.problems[0].why == '"batch" has size 3; rule batch→data needs a multiple of data=2'


BAD = [
    (
        "Nowhere[Array]",
        r"f: the annotation of `x`, `Nowhere\[Array\]`, cannot be resolved: name 'Nowhere' is not defined",
    ),
]


@pytest.mark.parametrize(("annotation", "message"), BAD)
@pytest.mark.parametrize("where", ["x", "return"])
def test_annotations_that_say_nothing_clear(where: str, annotation: Any, message: str):
    def f(x):
        return x

    f.__annotations__ = {where: annotation}
    with pytest.raises(
        ft.AxesError, match=message.replace("`x`", "`x`" if where == "x" else "`result`")
    ):
        signature_layouts(f, RULES)


@pytest.mark.parametrize(
    ("annotation", "why"),
    [
        (Float[Array, "a b"] | Float[Array, "c d"], "a b"),
        (Float[Array, "batch@data"], "`batch@data` in a dimension string is not an axis name"),
    ],
)
def test_an_annotation_without_one_meaning_is_an_error_once_there_is_an_array(
    annotation: Any, why: str
):
    def f(x):
        return x

    f.__annotations__ = {"x": annotation}
    [plan] = [ft.plan(jnp.ones((4, 2)), signature_layouts(f, RULES)[0]["x"], SIZES, check=False)]
    assert why in plan.problems[0].why


# Calls


UNREADABLE = [
    "D['a']",
    "nowhere.at.all",
    "a b",
    "Float[Array, 3]",
]


@pytest.mark.parametrize("annotation", UNREADABLE)
def test_an_annotation_that_cannot_be_read_stops_nothing_that_needs_no_names(annotation: str):
    def f(x: Any) -> Any:
        return {"y": 2 * x}

    D: dict[str, Any] = {}
    f.__annotations__ = {"x": annotation, "return": annotation}
    assert ft.jit(f)(jnp.ones(2))["y"].tolist() == [2, 2] and not D
    mesh = ft.make_mesh(data=8)
    assert ft.init(f, P(), mesh)(jnp.ones(2))["y"].tolist() == [2, 2]
    mapped = ft.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"), shapes=None)
    assert mapped(jnp.ones(8))["y"].sum() == 16
    with pytest.raises(ft.FunctreeError):
        signature_layouts(f, RULES)


# Sizes


def checked(annotations: dict[str, Any], *values: Any) -> None:
    fun: Callable[..., Any] = eval(f"lambda {', '.join(annotations)}: None")
    fun.__annotations__ = annotations
    signature = Signature(fun)
    check_sizes("f", read(signature.bind(values, {})).leaves)


FLOATS = Float[Array, "batch embed"]
NAMED = Annotated[Float[Array, "a b"], ft.names({"**": "x y batch"})]
AGREE: list[tuple[list[Any], list[Any]]] = [
    ([FLOATS, FLOATS], [(2, 3), (2, 3)]),
    ([Float[Array, "a b"], Float[Array, "b a"]], [(2, 3), (3, 2)]),
    ([Float[Array, "#a b"], Float[Array, "a b"]], [(1, 3), (2, 3)]),
    ([Float[Array, "_a b"], Float[Array, "_a b"]], [(1, 3), (2, 3)]),
    ([Float[Array, "4 b"], Float[Array, "b=3"]], [(4, 3), (3,)]),
    ([Float[Array, "a*b"], Float[Array, "a b"]], [(6,), (2, 3)]),
    ([Float[Array, "... b"], Float[Array, "b ..."]], [(2, 2, 3), (3, 5)]),
    ([Float[Array, "a"] | None, Float[Array, "a b"] | Float[Array, "a"]], [(2,), (2, 3)]),
    ([Annotated[Array, ft.Axes("_a")]] * 2, [(5,), (5,)]),
    ([NAMED, FLOATS], [(5, 6, 2), (2, 3)]),
]


def ones(shape: Any) -> Any:
    """An array, or a list of them."""
    return [ones(each) for each in shape] if isinstance(shape, list) else jnp.ones(shape)


@pytest.mark.parametrize(("hints", "shapes"), AGREE)
def test_sizes_that_agree(hints: list[Any], shapes: list[Any]):
    checked(dict(zip("xy", hints, strict=True)), *map(ones, shapes))


# The annotations and the shapes of `x` and `y`, and what is wrong where.
DIFFER: list[tuple[list[Any], list[Any], str, str]] = [
    ([FLOATS, FLOATS], [(2, 3), (2, 4)], "y", '"embed" has size 4 here, and 3 in `x`'),
    ([Float[Array, "a a"], FLOATS], [(2, 3), (2, 3)], "x", '"a" has size 3 here, and 2 in `x`'),
    ([FLOATS, Float[Array, "dim=4"]], [(2, 3), (5,)], "y", '"dim=4" requires size 4, but the size'),
    (
        [FLOATS, Float[Array, "batch*embed"]],
        [(2, 3), (5,)],
        "y",
        '"batch*embed" requires size 6, but the size',
    ),
    ([FLOATS, FLOATS], [(2, 3), (2,)], "y", "has 1 dimension, but `Float"),
    (
        [FLOATS, Int[Array, "batch"]],
        [(2, 3), (2,)],
        "y",
        "its dtype is float32, but the annotation",
    ),
    (
        [Annotated[Array, ft.Axes("_a")]] * 2,
        [(5,), (4,)],
        "y",
        '"_a" has size 4 here, and 5 in `x`',
    ),
    ([FLOATS, "Nowhere"], [(2, 3), (2,)], "y", "its annotation `Nowhere` cannot be resolved"),
    # Axes by `ft.names` in an annotation replace those that it has otherwise, and are of the
    # function itself too.
    ([NAMED, FLOATS], [(5, 6, 7), (2, 3)], "y", '"batch" has size 2 here, and 7 in `x`'),
    (
        [Annotated[list[Array], ft.names({"0": "batch"})], FLOATS],
        [[(5,)], (2, 3)],
        "y",
        '"batch" has size 2 here, and 5 in `x.0`',
    ),
]


@pytest.mark.parametrize(("hints", "shapes", "path", "why"), DIFFER)
def test_sizes_that_differ(hints: list[Any], shapes: list[Any], path: str, why: str):
    with raises("f: 1 array does not match its annotation", error=ft.AxesError) as caught:
        checked(dict(zip("xy", hints, strict=True)), *map(ones, shapes))
    (problem,) = caught.value.problems
    assert str(problem.path) == path and problem.why.startswith(why)


def test_all_mismatches_are_told():
    with pytest.raises(ft.AxesError) as error:
        checked(
            {"x": FLOATS, "y": FLOATS, "z": list[FLOATS]},
            jnp.ones((2, 3)),
            jnp.ones((4, 5)),
            [jnp.ones((2, 4))],
        )
    assert [str(p.path) for p in error.value.problems] == ["y", "y", "z.0"]


def test_names_of_modules_are_their_own():
    hints = {"x": Float[Array, "batch embed"], "m": MLP, "p": tuple[Float[Array, "embed"], Any]}
    checked(hints, jnp.ones((2, 3)), MLP(jnp.ones((7, 8))), (jnp.ones(3), MLP(jnp.ones((9, 9)))))


def test_names_of_each_leaf():
    trees = [{"a": jnp.ones(2), "b": jnp.ones(3)}] * 2
    hint = PyTree[Float[Array, "?size"]]
    checked({"x": hint, "y": hint}, *trees)
    with pytest.raises(ft.AxesError, match=r'(?s)y\.a.*"size" has size 3 here, and 2 in `x\.a`'):
        checked({"x": hint, "y": hint}, trees[0], {"a": jnp.ones(3), "b": jnp.ones(3)})


def passing(fun: Any) -> Any:
    @functools.wraps(fun)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fun(*args, **kwargs)

    return wrapper


class Unsigned:
    """A callable whose signature cannot be asked for."""

    @property
    def __signature__(self) -> Any:
        raise TypeError("no signature")

    def __call__(self, x: Any) -> Any:
        return 2 * x


@pytest.mark.parametrize("fun", [int, max, Unsigned()], ids=["int", "max", "Unsigned"])
def test_a_callable_without_a_signature(fun: Any):
    wrappers: list[Any] = [ft.jit, lambda fun: signature_layouts(fun, RULES)]
    if not isinstance(fun, type):  # `typed` takes no class at all
        wrappers.append(ft.typed)
    for wrapper in wrappers:
        with raises(f"{fun!r} has no signature: wrap it in a function, `lambda x: ...`"):
            wrapper(fun)


def scaled_sum(x: Any, y: Any, scale: Any = 2.0, mask: Any = None) -> Any:
    return (jnp.dot(x, y) * scale).sum() if mask is None else (jnp.dot(x, y) * mask).sum()


def flagged(x: Any, *, flag: Any = True) -> Any:
    return x.sum() if flag else -x.sum()  # the default is no traced value


# What passes on the arguments that it is given: an argument more or less is another call of it.
PASSING: dict[str, tuple[Any, Any]] = {
    "vmap": (jax.vmap(scaled_sum, in_axes=(0, None)), [4.0, 4.0, 4.0]),
    "ft.jit": (ft.jit(scaled_sum), 12.0),
    "passing": (passing(scaled_sum), 12.0),
    "shard_map": (
        jax.shard_map(jnp.dot, mesh=mesh_of({"data": 8}), in_specs=P(), out_specs=P()),
        [2.0, 2.0, 2.0],
    ),
    "checkpoint of a reduction": (jax.checkpoint(jnp.sum), 6.0),
    "jit with a flag": (jax.jit(flagged), 6.0),
}


@pytest.mark.parametrize("case", PASSING)
def test_defaults_are_not_passed_to_what_passes_arguments_on(case: str):
    fun, expected = PASSING[case]
    x, y = jnp.ones((3, 2)), jnp.ones(2)
    args = (x,) if case in ("checkpoint of a reduction", "jit with a flag") else (x, y)
    f = ft.jit(fun)
    for _ in range(2):
        np.testing.assert_array_equal(f(*args), expected)
    assert len(f.compilations) == 1
    np.testing.assert_array_equal(f.lower(*args).compile()(*args), expected)


def test_defaults_are_not_passed_by_accumulate():
    summed = ft.accumulate(jax.vmap(scaled_sum, in_axes=(None, 0)), 2)
    np.testing.assert_array_equal(summed(jnp.ones(2), jnp.ones((4, 2))), [4.0, 4.0])


def test_another_argument_is_another_call():
    f = ft.jit(jax.vmap(scaled_sum))
    x = jnp.ones((3, 2))
    f(x, x)
    np.testing.assert_array_equal(f(x, x, scale=jnp.full(3, 5.0)), [10.0] * 3)
    assert str(f.compilations[1]) == "compilation 2: scale: structure nothing → an array"


def test_a_parameter_called_self():
    f = ft.jit(lambda self: self * 2)
    x = jnp.ones(2)
    assert np.array_equal(f(self=x), 2 * x) and f.eval_shape(self=x).shape == (2,)
    assert np.array_equal(f.lower(self=x).compile()(self=x), 2 * x)


OF_NO_MODULE = """
from __future__ import annotations

def double(x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
    return 2 * x


def total(x: Float[Array, "batch embed"]):
    return double(x).sum()
"""


def test_functions_of_code_without_a_name() -> None:
    """As `exec` makes them, which some runners of notebooks do."""
    namespace: dict[str, Any] = {"Array": Array, "Float": Float, "__builtins__": __builtins__}
    exec(OF_NO_MODULE, namespace)
    double, total = namespace["double"], namespace["total"]
    assert double.__module__ is None
    rules = ft.AxisRules({"batch": "data", ...: None})
    mesh = ft.make_mesh(data=8)
    x = ft.shard(jnp.ones((8, 4)), rules, mesh, axes="batch embed")
    for function in (
        ft.jit(double, rules=rules),
        ft.shard_map(double, rules=rules, mesh=mesh),
        ft.typed(double),
        ft.jit(ft.grad(total, layout=P("data")), rules=rules),
    ):
        assert float(function(x)[0, 0]) == 2


def test_a_wrapper_of_a_module_has_none_of_its_fields():
    wrapped = ft.jit(MLP(jnp.ones((4, 8))))
    assert "up" not in vars(wrapped)
