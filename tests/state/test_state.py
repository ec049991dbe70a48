"""Explicit state: refs in a model, values in a `State`, under layouts and transforms."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import NamedSharding
from jaxtyping import Float

import functree as ft
from functree.tree.axes import Axes
from tests.lib import checks
from tests.lib.checks import compilations
from tests.lib.meshes import MESH

P = ft.P
RULES = ft.AxisRules({"batch": "data", "embed": "model", "layers": None})
raises = partial(checks.raises, error=ft.StateError)


class Counter(eqx.Module):
    """Counts its calls, and sums what it sees."""

    scale: Float[Array, "embed"]
    calls: ft.StateRef
    total: ft.StateRef

    def __init__(self, size: int = 8):
        self.scale = jnp.ones(size)
        self.calls = ft.StateRef(0)
        self.total = ft.StateRef(jnp.zeros(size), axes="embed")

    def __call__(self, x: Array, state: ft.State) -> tuple[Array, ft.State]:
        y = x * self.scale
        state = state.set(self.calls, state[self.calls] + 1)
        return y, state.set(self.total, state[self.total] + y)


class Shared(eqx.Module):
    """A layer with state of its own, and some that it shares."""

    own: Counter
    all: ft.StateRef

    def __call__(self, x: Array, state: ft.State) -> tuple[Array, ft.State]:
        x, state = self.own(x, state)
        return x, state.set(
            self.all, state[self.all] * 2 + state[self.own.calls].astype(jnp.float32)
        )


# Refs and values


def test_paths_and_values():
    model, state = ft.make_state({"first": Counter(2), "then": [Counter(3)]})
    assert list(map(str, state)) == ["first.calls", "first.total", "then.0.calls", "then.0.total"]
    assert all(isinstance(path, ft.Path) for path in state) and len(state) == 4
    assert state[model["then"][0].total].shape == (3,)
    for key in ("then.0.total", ft.Path(("then", 0, "total")), ("then", 0, "total")):
        assert state[key] is state[model["then"][0].total]
    assert "first.calls" in state and "second" not in state
    assert [leaf.shape for leaf in jax.tree.leaves(model)] == [(2,), (3,)], (
        "the model holds no values"
    )
    assert repr(model["first"].calls) == "<StateRef int32[] at first.calls>"
    assert repr(Counter().calls) == "<StateRef int32[] without a path>"


def test_axes():
    tree = {"one": Counter(), "many": ft.stack(lambda key: Counter(), 3, jax.random.key(0))}
    model, state = ft.make_state(tree)
    axes = ft.tree_axes(state)
    assert axes["one.total"] == Axes("embed") and axes["one.calls"] == Axes()
    assert axes["many.layer.total"] == Axes("layers", "embed") and axes["many.layer.calls"] == Axes(
        "layers"
    )
    assert state["many.layer.total"].shape == (3, 8)
    assert isinstance(model["many"], ft.Stacked)


def test_one_ref_at_two_places_is_one_state():
    ref = ft.StateRef(jnp.zeros(3))
    model, state = ft.make_state({"a": [ref], "b": ref, "c": ft.StateRef(jnp.zeros(3))})
    assert list(map(str, state)) == ["a.0", "c"]
    state = state.set(model["b"], jnp.ones(3))
    assert state[model["a"][0]].tolist() == [1, 1, 1] and state[model["c"]].tolist() == [0, 0, 0]


def test_two_models_built_alike_are_one_structure_and_one_trace():
    (one, state), (other, same) = ft.make_state(Counter()), ft.make_state(Counter())
    assert jax.tree.structure((one, state)) == jax.tree.structure((other, same))
    f = ft.jit(lambda model, x, state: model(x, state))
    for model, s in ((one, state), (other, same)):
        f(model, jnp.ones(8), s)
    assert len(f.compilations) == 1
    third = ft.make_state({"at": Counter()})
    f(third[0]["at"], jnp.ones(8), third[1])
    assert len(f.compilations) == 2, "else this test tests nothing"


def test_a_state_is_an_immutable_mapping():
    model, state = ft.make_state(Counter())
    after = state.set(model.calls, 5)
    assert int(state[model.calls]) == 0 and int(after[model.calls]) == 5
    assert dict(after.items()).keys() == {ft.Path(("calls",)), ft.Path(("total",))}
    assert after.get("nothing") is None
    with pytest.raises(TypeError):
        state["calls"] = 3  # pyright: ignore
    with pytest.raises(AttributeError):
        state.new = 3  # pyright: ignore
    assert state == state and state != after and hash(state) != hash(after)
    assert repr(after).startswith("State({'calls': Array(5, dtype=int32), 'total': Array(")


def test_no_state():
    model, state = ft.make_state({"w": jnp.ones(2)})
    assert len(state) == 0 and model["w"].shape == (2,) and repr(state) == "State({})"


VALUES: dict[str, Any] = {
    "bool": True,
    "int": 3,
    "float": 0.5,
    "bfloat16": lambda: jnp.ones(3, jnp.bfloat16),
    "key": lambda: jax.random.key(3),
    "numpy": lambda: np.ones((2, 3), np.float32),
    "weak": lambda: jnp.where(True, 1.0, 2.0),
}


def value(name: str) -> Any:
    return VALUES[name]() if callable(VALUES[name]) else VALUES[name]


@pytest.mark.parametrize("name", VALUES)
def test_any_array_is_state_and_is_strong(name: str):
    model, state = ft.make_state({"it": ft.StateRef(value(name))})
    have = state["it"]
    assert isinstance(have, jax.Array) and not jax.typeof(have).weak_type
    f = ft.jit(lambda model, state: state.set(model["it"], state[model["it"]]), donate="state")
    after = f(model, f(model, state))
    assert after["it"].dtype == have.dtype and after["it"].shape == have.shape
    assert len(f.compilations) == 1


def test_a_new_value_is_strong_and_on_a_device():
    """A weak one, or one of numpy, would make the next step another program."""
    model, state = ft.make_state({"it": ft.StateRef(0.0)})
    for value in (jnp.where(True, 1.0, 2.0), np.float32(1), np.float64(1), 1, True):
        after = state.set(model["it"], value)["it"]
        assert isinstance(after, jax.Array) and not jax.typeof(after).weak_type
        assert after.dtype == jnp.float32 and after == 1


def test_one_value_for_two_refs_becomes_two_arrays():
    zeros = jnp.zeros(3)
    _, state = ft.make_state({"a": ft.StateRef(zeros), "b": ft.StateRef(zeros), "w": zeros})
    assert state["a"] is not state["b"] and state["a"] is not zeros
    assert len(ft.jit(lambda state: state, donate="state")(state)) == 2


# Misuse


def misuses() -> dict[str, tuple[Callable[[], Any], tuple[str, ...]]]:
    model, state = ft.make_state({"a": Counter(), "n": ft.StateRef(0)})
    ref, number = model["a"].total, model["n"]
    other, others = ft.make_state(
        {"b": Counter(), "a": {"total": ft.StateRef(jnp.zeros(3))}, "n": ft.StateRef(0.0)}
    )
    stacked, layers = ft.make_state(ft.stack(lambda key: Counter(), 3, jax.random.key(0)))
    keyed, keys = ft.make_state(ft.StateRef(jax.random.key(0)))
    keeps = "shape and dtype cannot change"
    foreign = "pass the state that `ft.make_state` returned with this model"
    return {
        "shape": (lambda: state.set(ref, jnp.ones(3)), ("at `a.total` is f32[8]", "new value is f32[3]", keeps)),
        "dtype": (lambda: state.set(ref, jnp.ones(8, jnp.int32)), ("`a.total`", "f32[8]", "i32[8]", keeps)),
        "no integer": (lambda: state.set(number, 1.5), ("`n` is i32[], but the new value is 1.5", keeps)),
        "no key": (lambda: keys.set(keyed, 3), ("is key<fry>[], but the new value is 3", keeps)),
        "None": (lambda: state.set(ref, None), ("`a.total`", "new value is None", keeps)),
        "unknown": (lambda: state[other["b"].total], ("no state at `b.total`; did you mean `a.total`?", foreign)),
        "another shape": (lambda: state[other["a"]["total"]], ("`a.total` is f32[8]", "ref declares f32[3]", foreign)),
        "another dtype": (lambda: others[number], ("`n` is f32[], but its ref declares i32[]", foreign)),
        "not made": (lambda: state[Counter().calls], ("has no path yet", "`model, state = ft.make_state(model)`")),
        "made twice": (lambda: ft.make_state(model), ("the StateRef at `a.calls` already has the path `a.calls`",)),
        "stacked": (lambda: layers[stacked.layer.total], ("`layer.total` is f32[3, 8]", "`stacked.scan(")),
        "a text": (lambda: state.set("a.total", 1), ("an `ft.State` takes a `StateRef`, not 'a.total'",)),  # pyright: ignore
        "a number as key": (lambda: state[0], ("an `ft.State` takes a `StateRef`, not 0",)),
        "update": (lambda: state.update({ft.Path(("a", "totl")): 1}), ("`a.totl`; did you mean `a.total`?",)),
        "no array": (lambda: ft.StateRef("text"), ("StateRef('text'): the initial value", "an array or a number")),
        "axes": (lambda: ft.StateRef(jnp.zeros(3), "a b"), ('axes="a b") names 2 dimensions', "has shape (3,)")),
    }  # fmt: skip


@pytest.mark.parametrize("name", misuses())
def test_misuse(name: str):
    misuse, fragments = misuses()[name]
    with raises(*fragments):
        misuse()


@pytest.mark.parametrize(("dtype", "number"), [("int32", 2**40), ("uint8", -1)], ids=str)
def test_an_integer_that_does_not_fit_is_jaxs_error(dtype: str, number: int):
    model, state = ft.make_state({"a": ft.StateRef(jnp.zeros((), dtype))})
    with pytest.raises(OverflowError):
        state.set(model["a"], number)
    with pytest.raises(OverflowError):
        ft.StateRef(2**40)


@pytest.mark.parametrize(
    ("dtype", "number"),
    [("uint8", 255), ("int8", -128), ("int4", -8), ("int4", True), ("float16", 65504),
     ("float16", float("-inf")), ("float32", float("nan")), ("complex64", 1j)],
    ids=str,
)  # fmt: skip
def test_a_number_becomes_an_array_of_the_dtype(dtype: str, number: complex):
    model, state = ft.make_state({"a": ft.StateRef(jnp.zeros((), dtype))})
    found = state.set(model["a"], number)["a"]
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.asarray(found.astype("complex64")), np.complex64(number))


@pytest.mark.parametrize("state", [None, 3, {}, ft.State], ids=str)
def test_no_state_for_layers_that_keep_some(state: Any):
    layer, x = ft.nn.BatchNorm(4), jnp.ones((3, 4))
    for call in (
        lambda: layer(x, state),
        lambda: ft.make_state(layer)[0](x, state, inference=True),
        lambda: ft.nn.Sequential([layer])(x, state=state),
    ):
        with raises("`model, state = ft.make_state(model)`", error=TypeError):
            call()


def test_an_unknown_path_is_a_key_error():
    _, state = ft.make_state(Counter())
    with raises("no state at `totl`; did you mean `total`?", error=KeyError):
        state["totl"]


# A tree like any other


def test_the_models_rules_and_filters_lay_it_out():
    _, state = ft.make_state({"a": Counter(), "b": Counter()})
    plan = ft.plan(state, RULES, MESH)
    assert [str(row.path) for row in plan] == list(map(str, state))
    assert plan["a.total"].spec == P("model") and plan["a.calls"].spec == P()
    assert plan.specs["b.total"] == P("model")
    layout = ft.StateSharding({"a.**": P(), "**.total": P("data"), ft.is_state: P()})
    found = {str(row.path): row.spec for row in ft.plan(state, layout, MESH)}
    assert found == {"a.calls": P(), "a.total": P(None), "b.calls": P(), "b.total": P("data")}
    with pytest.raises(
        ft.ShardingError,
        match=r'(?s)a\.total, b\.total   f32\[8\]   "embed".*no rule names `embed`',
    ):
        ft.plan(state, ft.AxisRules({"batch": "data"}), MESH)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_shard_init_and_abstract(explicit: bool):
    mesh = ft.make_mesh(data=2, model=4, explicit=explicit)
    wanted = NamedSharding(mesh, P("model"))

    def make(key: Array) -> Any:
        return ft.make_state(Counter())

    _, state = ft.make_state(Counter())
    _, born = ft.init(make, RULES, mesh)(jax.random.key(0))
    _, described = ft.abstract(make, RULES, mesh)(jax.random.key(0))
    for total in (ft.shard(state, RULES, mesh)["total"], born["total"], described["total"]):
        assert total.sharding == wanted and total.shape == (8,)
    assert isinstance(described["total"], jax.ShapeDtypeStruct)
    assert jax.tree.structure(born) == jax.tree.structure(state)
    model, made = ft.make_state(ft.abstract(Counter)())
    assert made.set(model.total, made["total"])["total"] == jax.ShapeDtypeStruct((8,), jnp.float32)


def test_split_packed_and_merged():
    _, state = ft.make_state({"a": Counter(), "b": Counter()})
    static, ints, rest = ft.split(state, "**.calls", ...)
    assert (
        ints["a.total"] is None and rest["a.calls"] is None and rest["b.total"] is state["b.total"]
    )
    merged = ft.merge(static, ints, rest)
    assert list(merged) == list(state) and all(merged[path] is state[path] for path in state)
    packed = ft.pack({"state": state, "n": 3})
    assert list(ft.unpack(packed)["state"]) == list(state)
    assert ft.plan(packed, RULES, MESH)["state.a.total"].spec == P("model")
    model, made = ft.make_state(Counter())
    y, after = ft.jit(lambda m, x, s: m(x, s))(ft.pack(model), jnp.ones(8), ft.pack(made))
    assert isinstance(after, ft.Packed) and int(after.tree["calls"]) == 1 and y.shape == (8,)


def test_what_is_state_is_not_trained():
    model, state = ft.make_state(Counter())
    before, tree = Counter(), {"model": model, "state": state}
    _, trained, stateful, rest = ft.split(tree, ft.is_trainable, ft.is_state, ...)
    assert [x.shape for x in jax.tree.leaves(trained)] == [(8,)] and trained[
        "model"
    ].scale is model.scale
    assert len(jax.tree.leaves(stateful["state"])) == 2 and jax.tree.leaves(rest) == []
    _, trained, stateful = ft.split(before, ft.is_trainable, ft.is_state)
    assert trained.total.init is None and stateful.total.init is not None and stateful.scale is None
    gradient = ft.grad(lambda tree: tree["model"](jnp.ones(8), tree["state"])[0].sum())(tree)
    assert gradient["state"]["total"] is None and gradient["model"].scale.shape == (8,)


# Under transforms


def test_made_under_vmap():
    models, states = eqx.filter_vmap(lambda key: ft.make_state(Counter()))(
        jax.random.split(jax.random.key(0), 3)
    )
    assert states["total"].shape == (3, 8)
    _, after = eqx.filter_vmap(lambda m, x, s: m(x, s))(models, jnp.ones((3, 8)), states)
    assert after["calls"].tolist() == [1, 1, 1]


def test_lax_scan_and_cond_and_grad():
    model, state = ft.make_state(Counter())

    def step(state: ft.State, x: Array) -> tuple[ft.State, Array]:
        return jax.lax.cond(x[0] > 1, lambda: model(x, state)[::-1], lambda: (state, x))

    after, _ = jax.lax.scan(step, state, jnp.arange(24.0).reshape(3, 8))
    assert int(after["calls"]) == 2
    loss = ft.value_and_grad(lambda m, x, s: (m(x, s)[0].sum(), m(x, s)[1]), has_aux=True)
    (value, after), gradient = loss(model, jnp.ones(8), state)
    assert float(value) == 8 and int(after["calls"]) == 1 and gradient.scale.tolist() == [1] * 8
    assert gradient.total.path == model.total.path


def layers(n: int = 3) -> ft.Stacked[Counter]:
    stack = ft.stack(lambda key: Counter(), n, jax.random.key(0))
    return eqx.tree_at(lambda s: s.layer.scale, stack, 1 + jnp.arange(n * 8.0).reshape(n, 8) / 10)


def by_hand(stack: Any, x: Array) -> tuple[Array, list[Array]]:
    """The result, and what each layer saw."""
    seen = []
    for scale in stack.layer.scale:
        seen.append(x := x * scale)
    return x, seen


@pytest.mark.parametrize("remat", [None, "full", "dots"], ids=str)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_state_for_each_layer(remat: Any, jit: bool):
    stack, state = ft.make_state(layers())

    def run(stack: Any, x: Array, state: ft.State) -> tuple[Array, ft.State]:
        return stack.scan(x, state=state, remat=remat)

    x, after = (ft.jit(run) if jit else run)(stack, jnp.ones(8), state)
    y, seen = by_hand(stack, jnp.ones(8))
    np.testing.assert_allclose(x, y, rtol=1e-6)
    np.testing.assert_allclose(after["layer.total"], jnp.stack(seen), rtol=1e-6)
    assert after["layer.calls"].tolist() == [1, 1, 1]

    def loss(stack: Any) -> Any:
        x, after = run(stack, jnp.ones(8), state)
        return x.sum(), after

    both = ft.grad(loss, has_aux=True)
    gradient, after = (ft.jit(both) if jit else both)(stack)
    want = jax.grad(lambda scale: jnp.prod(scale, axis=0).sum())(stack.layer.scale)
    np.testing.assert_allclose(gradient.layer.scale, want, rtol=1e-5)
    assert after["layer.calls"].tolist() == [1, 1, 1]


def shared_stack() -> Any:
    """Three layers, and a ref that stands outside of them too."""
    ref = ft.StateRef(1.0)
    stack = ft.stack(lambda key: Shared(Counter(), ref), 3, jax.random.key(0))
    return {"stack": stack, "to": ref}


def test_a_state_that_all_layers_share():
    model, state = ft.make_state(shared_stack())
    assert list(map(str, state)) == ["stack.layer.own.calls", "stack.layer.own.total", "to"]
    assert state["to"].shape == () and state[model["to"]].shape == ()
    run = ft.jit(lambda model, x, state: model["stack"].scan(x, state=state))
    _, after = run(model, jnp.ones(8), state)
    assert float(after["to"]) == ((1 * 2 + 1) * 2 + 1) * 2 + 1
    _, after = run(model, jnp.ones(8), after)
    assert float(after["to"]) == ((15 * 2 + 2) * 2 + 2) * 2 + 2


def test_what_a_layer_is_handed_counts_too():
    """A ref that comes by an argument, or that a function closes over, is no less the layer's."""

    class Uses(eqx.Module):
        scale: Array

        def __call__(self, x: Array, counter: Counter, state: ft.State) -> tuple[Array, ft.State]:
            return counter(x * self.scale, state)

    stack = ft.stack(lambda key: Uses(jnp.ones(())), 3, jax.random.key(0))
    model, state = ft.make_state({"stack": stack, "counter": Counter()})
    _, after = model["stack"].scan(jnp.ones(8), model["counter"], state=state)
    assert int(after["counter.calls"]) == 3 and after["counter.total"].tolist() == [3] * 8


def test_layers_that_hold_nothing_but_state():
    class Count(eqx.Module):
        calls: ft.StateRef

        def __call__(self, x: Array, state: ft.State) -> tuple[Array, ft.State]:
            return x, state.set(self.calls, state[self.calls] + 1)

    stack, state = ft.make_state(ft.stack(lambda key: Count(ft.StateRef(0)), 3, jax.random.key(0)))
    assert stack.scan(jnp.ones(8), state=state)[1]["layer.calls"].tolist() == [1, 1, 1]


def test_stacks_in_a_stack():
    class Outer(eqx.Module):
        inner: ft.Stacked[Shared]
        all: ft.StateRef  # one for each outer layer, shared by its inner ones

        def __call__(self, x: Array, state: ft.State) -> tuple[Array, ft.State]:
            return self.inner.scan(x, state=state)

    def outer(key: Array) -> Outer:
        ref = ft.StateRef(1.0)
        return Outer(ft.stack(lambda key: Shared(Counter(), ref), 2, key), ref)

    stack, state = ft.make_state(ft.stack(outer, 3, jax.random.key(0), axis="groups"))
    shapes = {str(path): (x.shape, str(ft.tree_axes(state)[path])) for path, x in state.items()}
    assert shapes == {
        "layer.inner.layer.own.calls": ((3, 2), "groups layers"),
        "layer.inner.layer.own.total": ((3, 2, 8), "groups layers embed"),
        "layer.all": ((3,), "groups"),
    }
    _, after = ft.jit(lambda stack, x, state: stack.scan(x, state=state))(stack, jnp.ones(8), state)
    assert after["layer.inner.layer.own.calls"].tolist() == [[1, 1]] * 3
    assert after["layer.all"].tolist() == [(1 * 2 + 1) * 2 + 1] * 3


def test_state_that_no_layer_knows_costs_the_backward_pass_nothing():
    def memory(size: int) -> int:
        model, state = ft.make_state({"stack": layers(16), "other": ft.StateRef(jnp.zeros(size))})

        def loss(model: Any, state: ft.State) -> Any:
            x, after = model["stack"].scan(jnp.ones(8), state=state, remat="full")
            return x.sum(), after

        f = ft.jit(ft.grad(loss, has_aux=True), donate="state")
        return f.lower(model, state).compile().memory_analysis().temp_size_in_bytes

    assert memory(2**16) - memory(2**4) < 4 * 2 * 2**16, "less than two copies for sixteen layers"


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_ten_steps_in_place(explicit: bool):
    mesh = ft.make_mesh(data=2, model=4, explicit=explicit)
    model, state = ft.shard(ft.make_state(Counter()), RULES, mesh)
    x = ft.shard(jnp.ones(8), RULES, mesh, axes="embed")

    step = ft.jit(lambda model, x, state: model(x, state)[1], donate="state", mesh=mesh)
    first = after = step(model, x, state)
    with compilations() as heard:
        for _ in range(9):
            after = step(model, x, after)
    assert heard == []
    assert len(step.compilations) == 1
    assert int(after["calls"]) == 10 and after["total"].tolist() == [10] * 8
    assert after["total"].sharding == NamedSharding(mesh, P("model"))
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert first["total"].is_deleted()
