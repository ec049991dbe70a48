"""`ft.jit(donate=...)`: state that keeps its shardings, and arrays that are not given away
twice."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float

import functree as ft
from tests.lib.checks import raises
from tests.lib.meshes import MESH, assert_lies, lay

P = PartitionSpec
SPECS = {"w": P("data", "model"), "b": P("model")}


class Model(eqx.Module):
    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden"]
    name: Any = eqx.field(static=True, default="model")


def model(w: Any = SPECS["w"], b: Any = SPECS["b"], **more: Any) -> Model:
    return Model(lay(jnp.arange(32.0).reshape(4, 8), *w), lay(jnp.ones(8), *b), **more)


def spread(tree: Any) -> Any:
    """An operation that the compiler does not keep sharded."""
    return jax.tree.map(lambda x: jnp.full_like(x, x.sum()), tree)


def assert_lies_as(tree: Any, other: Any) -> None:
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim), (x.sharding, y.sharding)


# What is donated


DONATED: list[tuple[Any, list[bool]]] = [
    # what is said, and whether the state and the other array are donated
    ((), [False, False]),
    ("state", [True, False]),
    (0, [True, False]),
    (-2, [True, False]),
    (("state", 0), [True, False]),
    ([1], [False, True]),
    (..., [True, True]),
]


@pytest.mark.parametrize(("donate", "deleted"), DONATED, ids=str)
def test_what_is_donated(donate: Any, deleted: list[bool]):
    f = ft.jit(lambda state, x: (spread(state), x + 1), donate=donate)
    state, x = model(), lay(jnp.ones(8))
    f(state, x)
    assert [state.w.is_deleted(), x.is_deleted()] == deleted
    assert state.b.is_deleted() == state.w.is_deleted()


def test_one_name_among_any():
    f = ft.jit(lambda **named: spread(named), donate="state")
    state, x = model(), lay(jnp.ones(8))
    f(state=state, x=x)
    assert state.w.is_deleted() and not x.is_deleted()


def test_a_bound_module():
    class Counter(Model):
        def next(self) -> "Counter":
            return jax.tree.map(lambda x: x + 1, self)

    counter = Counter(*jax.tree.leaves(model()))
    result = ft.jit(counter.next, donate="self")()
    assert counter.w.is_deleted() and isinstance(result, Counter)
    assert_lies(result.w, *SPECS["w"])


# State is closed. Silent failure 29.


def test_silent_failure_29_a_step_that_the_compiler_does_not_keep():
    state = model()
    plain = jax.jit(lambda state: spread(state), donate_argnums=0)(jax.tree.leaves(model()))
    assert plain[0].sharding.is_fully_replicated, "else this test tests nothing"
    f = ft.jit(spread, donate=0)
    for _ in range(3):
        state = f(state)
        assert_lies_as(state, model())
    assert len(f.compilations) == 1


FORMS: dict[str, tuple[Callable[[], tuple[Any, ...]], Callable[..., Any], Any]] = {
    # arguments, function, and for each array of the result whose sharding it has
    "alone": (lambda: (model(),), lambda m: spread(m), ["w", "b"]),
    "outermost first": (
        lambda: ([model(P("model"), P())], model()),
        lambda a, b: spread((b, [a[0]])),
        ["w", "b", P("model"), P()],
    ),
    "what holds it is no state": (lambda: (model(),), lambda m: spread([m, m.w]), ["w", "b", None]),
    "a bare array": (lambda: (model().w,), lambda m: spread(m), [None]),
    "another shape": (
        lambda: (model(),),
        lambda m: spread(eqx.tree_at(lambda m: m.b, m, m.b[:4])),
        [None, None],
    ),
    "another dtype": (
        lambda: (model(),),
        lambda m: spread(eqx.tree_at(lambda m: m.b, m, m.b.astype(jnp.bfloat16))),
        [None, None],
    ),
    "another class": (lambda: (model(),), lambda m: spread({"w": m.w, "b": m.b}), [None, None]),
    "another static": (
        lambda: (model(),),
        lambda m: spread(Model(m.w, m.b, name="other")),
        ["w", "b"],
    ),
    "twice": (lambda: (model(),), lambda m: spread([{"a": m}, [m]]), ["w", "b", "w", "b"]),
    "any names": (lambda: (model(),), lambda **m: (spread(m["state"]), 1), ["w", "b"]),
}


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("form", FORMS)
def test_what_is_closed(form: str):
    make, fun, expected = FORMS[form]
    args = make()
    f = ft.jit(fun, donate=...)
    result = f(state=args[0]) if form == "any names" else f(*args)
    found = [x for x in jax.tree.leaves(result) if eqx.is_array(x)]
    assert len(found) == len(expected)
    for x, said in zip(found, expected, strict=True):
        if said is None:
            assert x.sharding.is_fully_replicated
        else:
            assert_lies(x, *(SPECS[said] if isinstance(said, str) else said))


def test_only_donated_arguments_are_closed():
    result = ft.jit(lambda kept, given: (spread(kept), given), donate="given")(
        model(), {"x": lay(jnp.ones(8), "data")}
    )
    assert result[0].w.sharding.is_fully_replicated
    assert_lies(result[1]["x"], "data")


def test_out_shardings_win():
    state = model()
    layout = ft.StateSharding({"**.w": P("model"), ...: None})
    f = ft.jit(lambda m, x: (spread(m), x * 1), donate=0, out_shardings=(layout, None))
    result, _ = f(state, lay(jnp.ones(8), "data"))
    assert_lies(result.w, "model")
    assert_lies(result.b, "model")


def test_in_shardings_say_what_an_uncommitted_argument_keeps():
    f = ft.jit(lambda m: spread(m), donate=0, in_shardings=P("data"), mesh=MESH)
    result = f({"w": jnp.ones((4, 8))})
    assert_lies(result["w"], "data")
    again = f(result)
    assert_lies(again["w"], "data")


# Packed


def test_packed_arguments():
    packed, seen = ft.pack(model()), []

    def step(state: Any, x: Array) -> Any:
        seen.append(type(state))
        return spread(state), {"same": jax.tree.map(lambda w: w + 1, state)}, x.sum()

    f = ft.jit(step, donate="state")
    result, inner, _ = f(packed, lay(jnp.ones(8)))
    assert seen == [Model]
    assert isinstance(result, ft.Packed) and isinstance(inner["same"], ft.Packed)
    assert_lies_as(result.tree, model())
    assert packed.arrays[0].is_deleted()
    result, _, _ = f(result, lay(jnp.ones(8)))
    assert_lies_as(result.tree, model())
    assert len(f.compilations) == 1 == len(seen)


# Twice


# How the arrays are passed, what is donated, and the path of the second and of the first.
TWICE: dict[str, tuple[Callable[[Any], tuple[Any, Any]], Any, str, str]] = {
    "within an argument": (lambda x: ({"a": x, "b": x}, 1), ..., "s.b", "s.a"),
    "two donated arguments": (lambda x: ([x], {"b": x}), ..., "t.b", "s.0"),
    "donated and kept": (lambda x: ([x], x), "s", "t", "s.0"),
    "numpy": (lambda x: ({"a": (n := np.ones(8, np.float32)), "b": n}, 1), "s", "s.b", "s.a"),
}


def total(s: Any, t: Any) -> Any:
    return jax.tree.map(lambda x: x + 1, s), jax.tree.map(lambda x: x + 1, t)


@pytest.mark.parametrize("first", [True, False], ids=["first call", "later call"])
@pytest.mark.parametrize("how", TWICE)
def test_silent_failure_22_an_array_is_donated_twice(how: str, first: bool):
    make, donate, path, owner = TWICE[how]
    f, x = ft.jit(total, donate=donate), lay(jnp.ones(8), "data")
    if not first:
        f(*jax.tree.map(lambda x: x.copy() if eqx.is_array(x) else x, make(x)))
    with pytest.raises(ft.FunctreeError) as caught:
        f(*make(x))
    shared = "has the same buffer as" if first and how != "numpy" else "is the same array as"
    ending = "which is donated" if how == "donated and kept" else "and both are donated"
    assert str(caught.value) == (
        "total: 1 array shares memory with a donated array\n\n"
        f"  {path}   f32[8]\n      {shared} `{owner}`, {ending}\n\n"
        f"Try: pass the array once, or pass `ft.copy({path[0]}, untie=True)`, which gives each path "
        "its own array"
    )
    assert not x.is_deleted() and jax.sharding.get_mesh().empty
    assert len(f.compilations) == (0 if first else 1)
    # By the remedy. A copy that keeps the tie would be refused again.
    given = dict(zip("st", make(x), strict=True))
    given[path[0]] = ft.copy(given[path[0]], untie=True)
    arrays = [x for x in jax.tree.leaves(f(**given)) if eqx.is_array(x)]
    assert [float(x.sum()) for x in arrays] == [16.0, 16.0]


def test_silent_failure_24_two_arrays_on_one_buffer():
    x = lay(jnp.ones((8, 2)), "data")
    same = lay(x, "data", None)
    buffers = [one.addressable_shards[0].data.unsafe_buffer_pointer() for one in (x, same)]
    assert same is not x and buffers[0] == buffers[1]
    f = ft.jit(total, donate="s")
    with raises(
        "1 array shares memory with a donated array",
        "t.a   f32[8, 2]\n      has the same buffer as `s.0`",
    ):
        f([x], {"a": same})
    f([x.copy()], {"a": x.copy()})


# XLA fails if it may choose how a donated input is sharded, and the whole of it has the size of a
# part of an output.
COLLIDING = [((16, 16), P(None, "data")), ((16, 8), P("data", None))]
UNPLACED: dict[str, Callable[[Any], Any]] = {"numpy": np.asarray, "uncommitted": jnp.asarray}
BY: dict[str, tuple[bool, Callable[[Any], dict[str, Any]]]] = {
    "mesh=": (False, lambda specs: {"out_shardings": specs, "mesh": MESH}),
    "set_mesh": (True, lambda specs: {"out_shardings": specs}),
}


@pytest.mark.parametrize("kind", UNPLACED)
@pytest.mark.parametrize("by", BY)
def test_what_nobody_has_placed_is_not_donated_to_several_devices(kind: str, by: str):
    ambient, options = BY[by]
    arrays = [np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for shape, _ in COLLIDING]
    state = [
        UNPLACED[kind](x) for x in arrays
    ]  # before a mesh is entered, on which JAX would place it
    specs = [spec for _, spec in COLLIDING]
    f = ft.jit(lambda s: [2 * x for x in s], donate="s", **options(specs))
    with jax.set_mesh(MESH) if ambient else nullcontext():
        result = f(state)
        again = f(result)
    for x, one, two, spec in zip(arrays, result, again, specs, strict=True):
        assert one.is_deleted()  # which was placed
        assert np.array_equal(two, 4 * x) and two.sharding == NamedSharding(MESH, spec)
    if kind == "uncommitted":
        assert not any(x.is_deleted() for x in state)


@pytest.mark.parametrize(
    "options", [{}, {"mesh": ft.make_mesh(data=1, devices=jax.devices()[:1])}], ids=["", "mesh"]
)
def test_what_nobody_has_placed_is_donated_to_one_device(options: Any):
    x = jnp.ones((8, 4))
    ft.jit(lambda x: 2 * x, donate="x", **options)(x)
    assert x.is_deleted()


@pytest.mark.filterwarnings("ignore:.*uncommitted")
def test_a_state_in_which_an_array_is_not_placed_keeps_the_shardings_of_the_others():
    state = {
        "w": lay(jnp.ones((8, 4)), "data", "model"),
        "mu": jnp.ones((8, 4)),
        "count": jnp.zeros(()),
    }
    f = ft.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate="s")
    w = state["w"]
    result = f(state)
    assert w.is_deleted() and state["count"].is_deleted() and not state["mu"].is_deleted()
    assert result["w"].sharding == NamedSharding(MESH, P("data", "model"))
    mu = result["mu"]
    f(result)
    assert mu.is_deleted()


def test_an_abstract_state_keeps_the_sharding_that_it_is_given():
    f = ft.jit(lambda s: spread(s), donate="s")
    for spec in (P("data"), P(None, "model"), P("data")):
        abstract = {
            "w": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(MESH, spec))
        }
        [sharding] = jax.tree.leaves(f.lower(abstract).compile().output_shardings)
        assert sharding.is_equivalent_to(NamedSharding(MESH, spec), 2)


def test_an_array_may_be_kept_twice_beside_a_donated_one():
    x, other = lay(jnp.ones(8), "data"), lay(jnp.zeros(8), "data")
    same = lay(x, "data")
    for _ in range(2):
        ft.jit(total, donate="s")([other.copy()], {"a": x, "b": x, "c": same})
        assert not x.is_deleted() and not same.is_deleted()


def test_keys_and_empty_arrays_share_no_buffer():
    f = ft.jit(total_of_none, donate=...)
    f({"k": jax.random.key(0), "e": jnp.ones((0,)), "f": jnp.ones((0,))}, {"k": jax.random.key(1)})


def total_of_none(s: Any, t: Any) -> Any:
    return s, t


@pytest.mark.parametrize("arrays", ["jax", "numpy beside"])
@pytest.mark.parametrize("where", ["one device", "many"])
@pytest.mark.parametrize("function", ["same", "another that donates", "another", "one that places"])
@pytest.mark.filterwarnings("ignore:.*uncommitted", "ignore:.*each call places")
def test_a_donated_array_is_used_again(function: str, where: str, arrays: str):
    def put(x: Any) -> Any:
        return lay(x, "data") if where == "many" else x

    f = ft.jit(total, donate="s")
    s = {"a": put(jnp.ones(8)), "b": put(jnp.ones(4))}
    t = np.ones(8, np.float32) if arrays == "numpy beside" else put(jnp.ones(8))
    f(s, t)
    other = {
        "same": f,
        "another that donates": ft.jit(total, donate="s"),
        "another": ft.jit(total),
        "one that places": ft.jit(total, rules=P(), mesh=MESH, donate="s"),
    }[function]
    expected = raises(
        "total: 1 argument is deleted",
        "s   2 arrays\n      are all deleted",
        "if an array was donated, use the result of the call that donated it, or donate a copy (`ft.copy`) instead",
    )
    with expected:
        other(s, t)
    assert jax.sharding.get_mesh().empty, "`jax.set_mesh` sets the mesh before it is entered"


def test_an_array_that_was_not_donated_is_deleted():
    x = jnp.ones(3)
    x.delete()
    with raises(
        "<lambda>: 1 argument is deleted",
        "m   f32[3]\n      is deleted\n\nTry: if an array was donated",
    ) as caught:
        ft.jit(lambda m: m)(x)
    assert "was donated to" not in str(caught.value)


@pytest.mark.parametrize("around", [jax.jit, jax.grad], ids=lambda f: f.__name__)
def test_a_tracer_is_donated_twice(around: Any):
    """An error as well: `grad` runs at once what it differentiates, and JAX 0.10 ended the
    process."""
    f = ft.jit(total, donate=...)
    x = lay(jnp.ones(8))
    with raises(
        "total: 1 array shares memory with a donated array",
        "t.0   f32[",
        "is the same array as `s.0`",
    ):
        around(lambda x: f([x], [x])[0][0].sum())(x)


@pytest.mark.parametrize("around", [jax.vmap, jax.grad, jax.checkpoint], ids=lambda f: f.__name__)
def test_a_donating_function_in_an_eager_transform(around: Any):
    """Nothing is donated there: JAX 0.10 ended the process at the second call."""
    f, x = ft.jit(lambda x: x + 1, donate="x"), lay(jnp.ones((8, 4)), "data")
    for _ in range(3):
        around(lambda x: f(x).sum())(x)
    assert not x.is_deleted()
    f(x)
    assert x.is_deleted()


@pytest.mark.parametrize("spec", [None, P("data")], ids=["one device", "many"])
@pytest.mark.parametrize("beside", [None, np.ones(2, np.float32)], ids=["alone", "beside numpy"])
@pytest.mark.filterwarnings("ignore:.*uncommitted")
def test_a_function_first_called_in_a_trace_donates_outside(spec: Any, beside: Any):
    def new() -> Any:
        return jnp.ones((8, 4)) if spec is None else lay(jnp.ones((8, 4)), *spec)

    f, x = ft.jit(lambda x, y: x + 1, donate="x"), new()
    jax.jit(lambda z: f(x, beside) + z)(1.0)
    assert not x.is_deleted()
    f(x, beside)
    assert x.is_deleted()


def aligned(offset: int) -> Any:
    """A NumPy array `offset` bytes behind a multiple of 64. JAX uses the memory of an aligned one
    as it is."""
    memory = np.zeros(8 * 16 * 4 + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    return memory[start : start + 8 * 16 * 4].view(np.float32).reshape(8, 16)


def test_where_foreign_memory_cannot_be_told_the_remedy_is_a_copy():
    x = aligned(0)
    first, second = jax.device_put(x), jax.device_put(x)
    f = ft.jit(lambda a, b: (a + 1, b + 2), donate=...)
    with raises(
        "1 array shares memory with a donated array",
        "b   f32[8, 16]\n      has the same buffer as `a`",
        "pass `ft.copy(b, untie=True)`",
    ):
        f(first, second)
    second = ft.copy(second, untie=True)
    assert [float(y.sum()) for y in f(first, second)] == [128.0, 256.0] and not x.any()
