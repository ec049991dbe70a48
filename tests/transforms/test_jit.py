"""`ft.jit`: what is traced and what is static, what may be jitted, and what is changed in place."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Float

import functree as ft
from functree.devices.meshes import named_axes
from functree.errors import FunctreeTypeError, FunctreeValueError
from tests.lib.checks import counted, raises, warns
from tests.lib.meshes import MESH
from tests.lib.structures import Pair

P = PartitionSpec


class Linear(eqx.Module):
    weight: Float[Array, "embed hidden"]
    scale: Any = 1
    name: Any = eqx.field(static=True, default="linear")

    def __call__(self, x: Array, times: Any = 1) -> Array:
        return times * (x @ self.weight)

    def shifted(self, x: Array, by: Any = 0.0) -> Array:
        return x @ self.weight + by

    @ft.jit
    def jitted(self, x: Array, by: Any = 0.0) -> Array:
        return x @ self.weight + by


class Point(NamedTuple):
    x: Any
    y: Any


def linear(**more: Any) -> Linear:
    return Linear(jnp.arange(8.0).reshape(2, 4), **more)


# What is traced

X = jnp.arange(4.0)
TRACED = {
    "array": (X, X + 1),
    "numpy": (np.arange(3.0, dtype=np.float32), np.ones(3, np.float32)),
    "numpy scalar": (np.float32(1), np.float32(2)),
    "key": (jax.random.key(0), jax.random.key(1)),
    "bfloat16": (jnp.ones(2, jnp.bfloat16), jnp.zeros(2, jnp.bfloat16)),
}


PLACES: dict[str, Callable[[Any], Any]] = {
    "bare": lambda x: x,
    "in a module": Linear,
    "packed": lambda x: ft.pack({"a": x}),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", TRACED)
def test_arrays_are_traced(kind: str, place: str):
    seen = []

    def body(tree: Any) -> Any:
        seen.append(jax.tree.leaves(tree)[0])
        return seen[-1]

    f = ft.jit(body)
    for value in TRACED[kind]:
        result = f(PLACES[place](value))
        assert isinstance(result, jax.Array) and result.dtype == value.dtype
        assert (result == value).all()
    assert len(seen) == 1 and isinstance(seen[0], jax.core.Tracer)
    assert len(f.compilations) == 1


# Static leaves: by type and value. Silent failure 28.

ONES = (1, True, 1.0, 1 + 0j)
HOLDERS = {
    "bare": lambda value: value,
    "in a list": lambda value: [value],
    "in a named tuple": lambda value: Point(X, value),
    "in a module": lambda value: linear(scale=value),
    "packed": lambda value: ft.pack(linear(scale=value)),
}


@pytest.mark.filterwarnings("ignore:.*recompiles a second time")
@pytest.mark.parametrize("holder", HOLDERS)
def test_silent_failure_28_ones_of_three_types_are_three(holder: str):
    seen: list[str] = []
    f, traces = counted(lambda tree, x: seen.append(repr(tree)) or (tree, x))
    for value in ONES:
        tree, _ = f(HOLDERS[holder](value), X)
        assert repr(ft.split(tree)[0]) == repr(ft.split(HOLDERS[holder](value))[0])
        again, _ = f(HOLDERS[holder](value), X)
        assert jax.tree.structure(again) == jax.tree.structure(tree)
    assert len(traces) == len(ONES) == len(set(seen))


STATIC = {
    "text": ("a", "b"),
    "function": (jnp.sin, jnp.cos),
    "zeros": (0.0, -0.0),
    "spec": (P("data"), P(None)),
    "nan": (0.5, float("nan")),
}


@pytest.mark.parametrize("kind", STATIC)
def test_other_leaves_are_static(kind: str):
    f, traces = counted(lambda leaf, x: (leaf, x))
    for leaf in STATIC[kind] * 2:
        found, _ = f([leaf], X)
        assert repr(found) == repr([leaf])
    assert len(traces) == 2 == len(f.compilations)


def test_a_static_leaf_that_cannot_be_hashed():
    f = ft.jit(lambda model, x: x)
    model = linear(scale={"a": [{1}, bytearray(b"x")]}, name=[3])
    for _ in range(2):
        with raises(
            "2 leaves cannot be static",
            "model.scale.a.0   set\n      is neither an array nor hashable",
            "model.scale.a.1   bytearray",
            "make the leaf an array or a hashable value",
            error=FunctreeTypeError,
        ):
            f(model, X)
    assert f.compilations == []


def test_static_data_without_a_hash():
    """A program for each value. A change in place goes unseen, as in JAX."""
    f, traces = counted(lambda pair: pair.first * float(len(pair.name)))
    names = ["a"]
    for data in (names, ["a"], names):
        assert f(Pair(X, 0, data))[0] == X[0]
    assert len(traces) == 1
    assert f(Pair(X, 0, ["a", "b"]))[0] == 2 * X[0] and len(traces) == 2
    names.append("b")
    assert f(Pair(X, 0, names))[0] == X[0] and len(traces) == 2


# What may be jitted


def test_bare_and_with_parentheses():
    @ft.jit
    def bare(x: Array) -> Array:
        """Doc."""
        return x * 2

    @ft.jit(static_argnames="n")
    def options(x: Array, n: int) -> Array:
        return x * n

    for found in (bare(X), ft.jit()(bare)(X), options(X, n=2)):
        np.testing.assert_array_equal(found, X * 2)
    assert bare.__name__ == "bare" and bare.__doc__ == "Doc." and bare.__wrapped__(3) == 6
    assert repr(bare).startswith("<ft.jit of bare")


CALLABLES: dict[str, Callable[[Linear], Any]] = {
    "module": lambda model: ft.jit(model),
    "bound method": lambda model: ft.jit(model.shifted),
    "method": lambda model: model.jitted,
    "partial": lambda model: ft.jit(functools.partial(Linear.shifted, model)),
    "partial by name": lambda model: ft.jit(functools.partial(lambda x, m: m.shifted(x), m=model)),
    "jax partial": lambda model: ft.jit(jax.tree_util.Partial(Linear.shifted, model)),
    "function": lambda model: functools.partial(ft.jit(Linear.shifted), model),
    "jit of jit": lambda model: functools.partial(ft.jit(ft.jit(Linear.shifted)), model),
}


@pytest.mark.parametrize("kind", CALLABLES)
def test_what_is_bound_is_traced(kind: str):
    model = linear()
    x = jnp.ones((3, 2))
    with jax.numpy_rank_promotion("allow"):
        f = CALLABLES[kind](model)
        np.testing.assert_allclose(f(x), x @ model.weight)
        constants = jax.make_jaxpr(f)(x).consts
        assert any(constant is model.weight for constant in constants), (
            "an argument, not a copy in a program"
        )


@pytest.mark.parametrize(
    "wrapper", [ft.jit, lambda f: ft.shard_map(f, in_specs=ft.P(), out_specs=ft.P())]
)
@pytest.mark.parametrize("kind", [staticmethod, classmethod, property])
def test_what_decorates_a_method_comes_above(wrapper: Any, kind: Any):
    remedy = f"put `@{kind.__name__}` above functree's decorators"
    with raises("it must be a function", remedy, error=FunctreeTypeError):
        wrapper(kind(lambda x: x))


class Remedies:
    double = staticmethod(ft.jit(lambda x: 2 * x))
    named = classmethod(ft.jit(lambda cls, x: {cls.__name__: x}))


def test_static_methods_and_class_methods():
    assert np.array_equal(Remedies().double(X), 2 * X)
    assert np.array_equal(Remedies().named(X)["Remedies"], X)


def noted(x: Any) -> Any:
    return 2 * x


noted.unit = "m"  # type: ignore[attr-defined]
WRAPPED = {
    "jit": ft.jit,
    "shard_map": lambda f: ft.shard_map(f, in_specs=ft.P(), out_specs=ft.P()),
    "typed": ft.typed,
    "grad": ft.grad,
    "jit of a grad": lambda f: ft.jit(ft.grad(f)),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_attributes_of_a_function_are_those_of_the_wrapper(wrapper: str):
    wrapped = WRAPPED[wrapper](noted)
    assert wrapped.unit == "m"
    assert wrapped.__name__ == wrapped.__wrapped__.__name__ == "noted"
    # The fields of a module are not those of its wrapper.
    assert not hasattr(WRAPPED[wrapper](linear()), "weight")


# Parameters


def test_names_and_positions_share_a_trace():
    f, traces = counted(lambda a, b, c: a - 2 * b + 3 * c)
    expected = f(X, X + 1, X + 2)
    for found in (f(X, X + 1, c=X + 2), f(c=X + 2, b=X + 1, a=X)):
        np.testing.assert_array_equal(found, expected)
    assert len(traces) == 1 == len(f.compilations)


@pytest.mark.parametrize(
    "default",
    [2.0, np.full(4, 2, np.float32), jnp.full(4, 2.0), None],
    ids=lambda d: type(d).__name__,
)
def test_defaults(default: Any):
    def body(x: Array, by: Any = default, *, more: Any = default) -> Array:
        return x if by is None else x * by * more

    f = ft.jit(body)
    expected = body(X)
    np.testing.assert_array_equal(f(X), expected)
    np.testing.assert_array_equal(f(X, default, more=default), expected)
    np.testing.assert_array_equal(f(X, more=default, by=default), expected)
    assert len(f.compilations) == 2, "as in JAX, a default is no argument"


def test_any_number_of_arguments():
    def body(a: Any, /, b: Any, *rest: Any, c: Any = 1, **named: Any) -> Any:
        return {"a": a, "b": b, "rest": rest, "c": c, "named": named}

    f = ft.jit(body)
    result = f(X, X + 1, X + 2, X + 3, c="c", x=X, a=5)
    expected = body(X, X + 1, X + 2, X + 3, c="c", x=X, a=5)
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    assert result["named"]["a"] == 5 and type(result["named"]["a"]) is int
    f(X, X + 1, X + 2, X + 3, x=X, a=5, c="c")
    assert len(f.compilations) == 1
    f(X, X + 1, X + 2)
    paths = {str(d.path) for d in f.compilations[1].differences}
    assert {"rest.1", "named.x", "named.a", "c"} <= paths


@pytest.mark.parametrize("options", [{"static_argnums": (-1,)}, {"static_argnames": "n"}], ids=str)
def test_static_parameters(options: Any):
    seen = []
    f = ft.jit(lambda x, n: (seen.append(n), x * 2)[1], **options)
    for n in [(X.shape, "a"), 3, (1, 2)]:
        f(X, n), f(X, n=n)
        assert seen[-1] == n and type(seen[-1]) is type(n)
    assert len(seen) == 3
    told = "cannot be static", "n   ", "static, but is not hashable", "make the argument hashable"
    for value in X, [3]:
        with raises(*told, error=FunctreeTypeError):
            f(X, value)


@pytest.mark.parametrize("option", ["static_argnums", "static_argnames", "donate"])
@pytest.mark.parametrize("none", [None, (), [], iter(())], ids=["None", "()", "[]", "iterator"])
def test_options_that_name_no_parameter(option: str, none: Any):
    f = ft.jit(lambda x: x * 2, **{option: none})
    np.testing.assert_array_equal(f(X), X * 2)
    np.testing.assert_array_equal(f(X), X * 2)


def test_static_names_among_any():
    def body(x: Array, **more: Any) -> Array:
        return x * 2 if more["mode"] == ("double",) else x + more["by"]

    f = ft.jit(body, static_argnames="mode")
    np.testing.assert_array_equal(f(X, mode=("double",), by=X), X * 2)
    np.testing.assert_array_equal(f(X, mode=("add",), by=X), X + X)


@pytest.mark.parametrize("option", ["static_argnums", "static_argnames", "donate"])
def test_parameters_that_there_are_not(option: str):
    def body(model: Any, batch: Any) -> Any: ...

    wrong: Any = 2 if option == "static_argnums" else "modle"
    near = "" if option == "static_argnums" else "; did you mean `model`?"
    told = f"{option}={wrong!r}: ", "body has no such parameter (model, batch", near
    with raises(*told, error=FunctreeValueError):
        ft.jit(body, **{option: wrong})


def test_gradients_of_integers_are_static():
    loss = jax.grad(lambda m: m["w"].sum() + m["n"].astype(float), allow_int=True)
    gradient = loss({"w": X, "n": jnp.int32(3)})
    f = ft.jit(lambda gradient: jax.tree.map(lambda x: x, gradient))
    for _ in range(2):
        found = f(loss({"w": X, "n": jnp.int32(3)}))
        assert found["n"].dtype == jax.dtypes.float0 and np.array_equal(found["w"], gradient["w"])
    assert len(f.compilations) == 1


class Hidden:
    """An array that JAX does not see."""

    def __init__(self, x: Any):
        self.x = x

    def __jax_array__(self) -> Any:
        return self.x


def test_an_array_that_jax_does_not_see_is_refused():
    f = ft.jit(lambda tree: jax.tree.leaves(tree)[0] * 2)
    told = "tree.a.0   Hidden\n      is a JAX value, but not an array"
    with raises(told, "use its arrays instead", error=FunctreeTypeError):
        f({"a": [Hidden(X)]})


REFUSED = {
    "backend": (
        "jit has no option `backend`",
        "jax.device_put",
        "with jax.default_device(device):",
    ),
    "abstracted_axes": (
        "jit has no option `abstracted_axes`",
        "a program is compiled for fixed sizes",
        "ft.export",
    ),
    "donate_argnums": ("jit has no option `donate_argnums`: pass names or positions to `donate=`",),
    "in_sharding": ("jit has no option `in_sharding`; did you mean `in_shardings`?",),
}


@pytest.mark.parametrize("option", REFUSED)
def test_options_that_are_refused(option: str):
    with raises(*REFUSED[option], error=FunctreeTypeError):
        ft.jit(lambda x: x, **{option: None})


def test_options_that_jax_has():
    f = ft.jit(
        lambda x, unused: x * 2,
        keep_unused=True,
        compiler_options={"xla_cpu_enable_fast_math": True},
    )
    np.testing.assert_array_equal(f(X, X), X * 2)
    with pytest.raises(Exception, match="xla_no_such_option"):
        ft.jit(lambda x: x, compiler_options={"xla_no_such_option": True})(X)
    for inline in (False, True):
        mine, plain = (
            str(jax.make_jaxpr(jit(lambda x: x * 2, inline=inline))(X)) for jit in (ft.jit, jax.jit)
        )
        assert ("jit[" in mine) == ("jit[" in plain)


# In-place changes. Silent failure 27.


class Bag(eqx.Module):
    items: list[Any]
    table: dict[str, Any]
    array: np.ndarray

    def total(self) -> Any:
        kept = [x for x in (*self.items, *self.table.values()) if x is not None]
        return sum((x.sum() for x in kept), jnp.sum(self.array))


CHANGES: dict[str, Callable[[Bag], Any]] = {
    "item removed": lambda bag: bag.items.__setitem__(0, None),
    "item replaced": lambda bag: bag.items.__setitem__(0, X * 7),
    "key renamed": lambda bag: bag.table.update(b=bag.table.pop("a") * 2),
    "array changed": lambda bag: bag.array.__setitem__(0, 100),
    "shape changed": lambda bag: bag.items.__setitem__(1, jnp.ones((3, 3))),
}


@pytest.mark.parametrize("how", ["argument", "callable"])
@pytest.mark.parametrize("change", CHANGES)
def test_silent_failure_27_changes_in_place_are_seen(change: str, how: str):
    bag = Bag([X, X * 2], {"a": X}, np.ones(2, np.float32))
    jitted = ft.jit(Bag.total) if how == "argument" else ft.jit(bag.total)
    call = functools.partial(jitted, bag) if how == "argument" else jitted
    for _ in range(2):
        np.testing.assert_allclose(call(), bag.total())
    CHANGES[change](bag)
    for _ in range(2):
        np.testing.assert_allclose(call(), bag.total())


WITHOUT_JIT: dict[str, Callable[[Any], Any]] = {
    "plain": ft.jit,
    "laid out": ft.jit(mesh=MESH, in_shardings=P("data"), out_shardings=P("data"), donate="x"),
    "init": lambda f: ft.init(f, P("data"), MESH),
}


@pytest.mark.parametrize("wrap", WITHOUT_JIT)
def test_without_jit_the_body_sees_values(wrap: str):
    """It is still traced on demand."""

    def f(x: Any) -> Any:
        return {"x": x} if x.sum() > 0 else {"x": -x}  # not possible with a traced array

    wrapped, x = WITHOUT_JIT[wrap](f), jnp.arange(8.0)
    with jax.disable_jit():
        assert np.array_equal(wrapped(x)["x"], x) and np.array_equal(wrapped(-x)["x"], x)
        compiled = WITHOUT_JIT[wrap](lambda x: x * 2).lower(x).compile()
    assert wrapped.compilations == []  # nothing was compiled
    assert np.array_equal(compiled(x), x * 2)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        wrapped(x)


# What a function closes over may be no tree

BIG = jnp.ones((600, 600))
ITSELF: list[Any] = [[BIG]]
ITSELF.append(ITSELF)
DEEP: Any = BIG
for _ in range(5000):
    DEEP = [DEEP]


def innermost(kept: Any) -> Any:
    while isinstance(kept, list):
        (kept,) = kept
    return kept


class Broken:
    """A node that can be flattened no more, as an `eqx.nn.State` of which a new one was made."""


def refuse(node: Any) -> Any:
    raise ValueError("it was used up")


jax.tree_util.register_pytree_node(Broken, refuse, refuse)


# What a function keeps, where the array in it is, and the array.
KEPT: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "keys of several types": ({1: BIG, "a": BIG}, "kept.1", lambda kept: kept["a"]),
    "itself": (ITSELF, "kept.0.0", lambda kept: kept[0][0]),
    "a deep list": (DEEP, "kept.0.0.0.0", innermost),
    "what cannot be flattened": ([Broken(), BIG], "kept.1", lambda kept: kept[1]),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_warning_breaks_no_program_that_runs(name: str):
    kept, path, array_of = KEPT[name]
    with warns("closes over an array of 1.4 MiB, float32[600, 600]", f"(`{path}"):
        found = ft.jit(lambda x: x + array_of(kept)[0, 0])(X)
    assert np.array_equal(found, X + 1)


@pytest.mark.filterwarnings("ignore:.*closes over an array:UserWarning")
def test_a_variable_that_is_assigned_later_breaks_no_program():
    def fun(x: Any) -> Any:
        return later if x.shape == (7,) else x + BIG[0, 0]

    later = ft.jit(fun)(X)
    assert np.array_equal(later, X + 1)


def test_an_array_bound_by_a_partial_is_changed_in_place():
    weight = np.ones(3, np.float32)
    f = ft.jit(functools.partial(lambda x, w: x * w, w=weight))
    assert f(jnp.ones(3)).sum() == 3
    weight[:] = 5
    assert f(jnp.ones(3)).sum() == 15
    assert len(f.compilations) == 1


@pytest.mark.parametrize("wrap", [
    lambda f: ft.jit(f), lambda f: ft.shard_map(f, mesh=MESH, in_specs=P("data"), out_specs=P("data")),
    lambda f: ft.init(f, P("data"), MESH),
], ids=["jit", "shard_map", "init"])  # fmt: skip
def test_without_jit_functions_are_still_traced_and_lowered_on_demand(wrap: Any):
    x = jnp.arange(8.0)
    with jax.disable_jit():
        wrapped = wrap(lambda x: x * 2)
        assert wrapped.eval_shape(x).shape == (8,)
        compiled = wrapped.lower(x).compile()
        assert np.array_equal(wrapped(x), x * 2)
    assert np.array_equal(compiled(x), x * 2)


# The gradients of grouped convolutions


def convolved(kernel: Array, images: Array) -> Array:
    layout, groups = ("NHWC", "HWIO", "NHWC"), images.shape[-1] // kernel.shape[2]
    y = jax.lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=layout, feature_group_count=groups
    )
    return jnp.sum(jnp.sin(y))


LINE = ft.make_mesh(data=8)
# The channels of a kernel's input, a mesh, the spec of the images, and whether there is a warning.
CONVOLUTIONS: dict[str, tuple[int, Any, P, bool]] = {
    "one group": (8, MESH, P("data"), False),
    "groups": (4, MESH, P("data"), True),
    "depthwise": (1, MESH, P("model"), True),
    "images over all axes": (1, MESH, P(("data", "model")), True),
    "one axis": (1, LINE, P("data"), False),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_gradients_of_grouped_convolutions(case: str):
    channels, mesh, spec, warned = CONVOLUTIONS[case]
    random = np.random.default_rng(0)
    kernel = random.normal(size=(3, 3, channels, 8)).astype(np.float32)
    images = random.normal(size=(16, 8, 8, 8)).astype(np.float32)
    gradient = ft.jit(ft.grad(convolved), in_shardings=(P(), spec), mesh=mesh)
    if warned:
        with warns("grouped convolution", "over all of the axes data, model"):
            found = gradient(kernel, images)
    else:
        found = gradient(kernel, images)
    # If XLA no longer multiplies the gradient, the warning can go.
    idle = set(mesh.shape) - set(named_axes(spec)) if warned else ()
    times = math.prod(mesh.shape[axis] for axis in idle)
    expected = times * np.asarray(jax.grad(convolved)(kernel, images))
    assert np.allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_inside_a_shard_map_nothing_partitions_a_convolution():
    def summed(kernel, images):
        return jax.lax.psum(convolved(kernel, images), "data")

    mapped = ft.shard_map(summed, mesh=MESH, in_specs=(P(), P("data")), out_specs=P())
    ft.jit(ft.grad(mapped), mesh=MESH).trace(jnp.ones((3, 3, 1, 8)), jnp.ones((16, 8, 8, 8)))
