"""`TrainState`: one layout for the model lays out the whole, and a training step keeps it so."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Float, Int, PRNGKeyArray

import functree as ft
from tests.lib.checks import raises
from tests.lib.meshes import EXPLICIT, MESH, SIZES, assert_lies

P = ft.P
RULES = ft.AxisRules({"batch": "data", "hidden": "model", ...: None})
FSDP = ft.FSDP("data", min_size=0, otherwise=P())


@pytest.fixture(autouse=True)
def _optax_promotes() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"):
        yield


class Net(eqx.Module):
    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden embed"]
    bias: Float[Array, "hidden"]
    steps: Int[Array, ""]
    activation: Callable[[Array], Array] = jax.nn.tanh

    def __call__(self, x: Array) -> Array:
        return self.activation(x @ self.up + self.bias[None]) @ self.down


def net(key: Array | None = None, dtype: Any = jnp.float32) -> Net:
    one, two = jax.random.split(jax.random.key(0) if key is None else key)
    up, down = jax.random.normal(one, (16, 32), dtype), jax.random.normal(two, (32, 16), dtype)
    return Net(up, down, jnp.zeros(32, dtype), jnp.array(0))


X = jax.random.normal(jax.random.key(5), (8, 16))


def loss(model: Any, x: Any = X) -> Array:
    return jnp.mean(model(x.astype(model.up.dtype)).astype(jnp.float32) ** 2)


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def kinds(params: Any) -> Any:
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", params)


def adafactor() -> Any:
    return optax.adafactor(1e-2, min_dim_size_to_factor=4)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "adam": lambda: optax.adam(1e-2),
    "adafactor": adafactor,
    "lbfgs": lambda: optax.lbfgs(0.1, memory_size=3, linesearch=None),
    "partition": lambda: optax.partition(
        {"matrix": adafactor(), "vector": optax.adam(1e-2)}, kinds
    ),
    "masked": lambda: optax.masked(optax.adam(1e-2), matrices),
    "MultiSteps": lambda: optax.MultiSteps(adafactor(), 2),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "with_ema": lambda: ft.with_ema(adafactor(), 0.9),
    "sm3": lambda: optax.sm3(1e-2),  # whose state has a list of arrays for each parameter
}
LAYOUTS: dict[str, Any] = {
    "rules": RULES,
    "rules | fsdp": RULES | FSDP,
    "specs": ft.StateSharding({"up": P("data", "model"), "bias": P("model"), "**": P()}),
    "a tree": ft.StateSharding.from_specs(Net(P("data"), P("model"), P("model"), P(), None)),  # pyright: ignore
    "patterns": ft.StateSharding({"bias": P("model"), "**.down": P(("data", "model")), ...: RULES}),
    "on host": ft.on_host(RULES),
}


# The law


def rows_of(plan: ft.Plan, below: str = "") -> dict[str, Any]:
    """The rows below a path: what is said of each, without what the mesh makes of it."""
    prefix = ft.Path.parse(below) if below else ft.Path()
    return {
        str(ft.Path(row.path[len(prefix) :])): (
            row.shape,
            row.spec,
            row.axes,
            row.local_shape,
            row.memory_kind,
            re.sub(r"^follows (.*\.)?model\.", "follows ", row.reason),
        )
        for row in plan
        if row.path[: len(prefix)] == prefix
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_plan_of_the_whole_is_the_plan_of_the_optimizer(name: str, layout: str):
    tx, model, chosen = OPTIMIZERS[name](), net(), LAYOUTS[layout]
    ts = ft.TrainState.create(model, tx, key=jax.random.key(0))
    plan = ft.plan(ts, chosen, SIZES)
    assert rows_of(plan, "opt_state") == rows_of(ft.plan_optimizer(tx, model, chosen, SIZES))
    assert rows_of(plan, "model") == rows_of(ft.plan(model, chosen, SIZES))
    assert [(plan[field].spec, plan[field].reason) for field in ("step", "key")] == [
        (P(), "does not depend on the parameters' shapes")
    ] * 2
    assert jax.tree.structure(plan.specs) == jax.tree.structure(
        jax.tree.map(lambda x: P(), eqx.filter(ts, eqx.is_array))
    )
    if layout not in ("rules", "patterns"):
        return
    # A plan of the whole, and its specs, are layouts for it too.
    again = ft.plan(ts, plan, SIZES)
    assert [(row.path, row.spec, row.axes) for row in again] == [
        (row.path, row.spec, row.axes) for row in plan
    ]
    assert ft.plan(ts, ft.StateSharding.from_specs(plan.specs), SIZES).specs == plan.specs
    packed, nested = ft.plan(ft.pack(ts), chosen, SIZES), ft.plan([{"a": (ts,)}, ts], chosen, SIZES)
    assert rows_of(packed) == rows_of(nested, "1") == rows_of(nested, "0.a.0") == rows_of(plan)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_explicit_axes_it_lies_as_planned(name: str):
    """Optimizers that compute their first state from the parameters, too."""
    tx = OPTIMIZERS[name]()
    ts = ft.TrainState.create(ft.shard(net(), RULES, EXPLICIT), tx)
    plan = ft.plan(ts, RULES, EXPLICIT)
    for row, x in zip(plan, jax.tree.leaves(eqx.filter(ts, eqx.is_array)), strict=True):
        assert_lies(x, *row.spec, mesh=EXPLICIT)


def specs(layout: Any, tx: Any = None, model: Any = None) -> dict[str, Any]:
    ts = ft.TrainState.create(
        net() if model is None else model, optax.adam(1.0) if tx is None else tx
    )
    return {str(row.path): row.spec for row in ft.plan(ts, layout, SIZES)}


BOTH = ft.glob("**.bias") | ft.glob("opt_state.0.nu.up")
BIAS, UP = P("model"), ft.StateSharding({"up": P("data"), ...: P()})
SHARDED_UP, WHOLE_UP = P("data", None), P(None, None)
# Filters; and of a parameter by its name the spec, and those of its two moments.
FILTERS: dict[str, tuple[Any, str, list[Any]]] = {
    "a path of the whole": ({"model.bias": BIAS, ...: P()}, "bias", [BIAS] * 3),
    "a path of the model": ({"bias": BIAS, ...: P()}, "bias", [BIAS] * 3),
    "all of the optimizer": ({"opt_state.**": P(), ...: UP}, "up", [SHARDED_UP, WHOLE_UP, WHOLE_UP]),
    "one moment": ({"opt_state.0.mu.up": P(), ...: UP}, "up", [SHARDED_UP, WHOLE_UP, SHARDED_UP]),
    "not the others": (
        {~(ft.glob("step") | ft.glob("model.**")) & ft.glob("opt_state.**"): P(), ...: UP},
        "up", [SHARDED_UP, WHOLE_UP, WHOLE_UP],
    ),
    # `**.bias` is meant for the model, also beside a pattern that is meant for the state.
    "either, for the model": ({BOTH: BIAS, ...: UP}, "bias", [BIAS] * 3),
    "either, for the state": ({BOTH: BIAS, ...: UP}, "up", [SHARDED_UP, SHARDED_UP, P("model", None)]),
}  # fmt: skip


@pytest.mark.parametrize("case", FILTERS)
def test_a_filter_reaches_the_parameters_and_their_moments(case: str):
    layout, name, expected = FILTERS[case]
    found = specs(ft.StateSharding(layout))
    paths = (f"model.{name}", f"opt_state.0.mu.{name}", f"opt_state.0.nu.{name}")
    assert [found[path] for path in paths] == expected


def test_a_pattern_of_the_model_does_not_name_the_optimizers_state_by_its_length():
    found = specs(
        ft.StateSharding({"*": P(), ...: P("data")}), optax.scale_by_schedule(lambda _: 1.0)
    )
    assert found["opt_state.count"] == P() and found["model.up"] == P(None, None)


def test_a_named_part_on_the_host_and_composed():
    layout = ft.StateSharding(
        {"opt_state.**": ft.on_host(P()), "step": ft.on_host(P()), ...: RULES}
    )
    for whole in (layout, layout | ft.FSDP("data", min_size=2**30)):
        plan = ft.plan(ft.TrainState.create(net(), adafactor()), whole, SIZES)
        host = {str(row.path).partition(".")[0] for row in plan if row.memory_kind == "pinned_host"}
        assert host == {"opt_state", "step"} and plan["model.up"].spec == P(None, "model")
    ts = ft.shard(ft.TrainState.create(net(), optax.adam(1.0)), layout, MESH)
    assert ts.opt_state[0].mu.up.sharding.memory_kind == "pinned_host"
    assert ts.model.up.sharding.memory_kind != "pinned_host"


def test_what_cannot_be_derived_says_which_pattern():
    with raises(
        "opt_state.0.mu",
        "cannot be determined",
        "StateSharding({'opt_state.**'",
        error=ft.ShardingError,
    ):
        specs(RULES, optax.flatten(optax.adam(1.0)))
    layout = ft.StateSharding({"opt_state.**": P(), ...: RULES})
    assert specs(layout, optax.flatten(optax.adam(1.0)))["opt_state.0.mu"] == P(None)


# Made


class Normed(eqx.Module):
    up: Float[Array, "embed hidden"]
    norm: ft.nn.BatchNorm

    def __call__(self, x: Array, state: ft.State) -> tuple[Array, ft.State]:
        return self.norm(x @ self.up, state)


def normed() -> Normed:
    return Normed(jnp.ones((16, 32)), ft.nn.BatchNorm(32, axes="hidden"))


def test_a_model_that_declares_state():
    ts = ft.init(lambda: ft.TrainState.create(normed(), optax.adam(1e-2)), RULES, MESH)()
    assert list(map(str, ts.state)) == ["norm.mean", "norm.var"]
    assert ts.state["norm.mean"].sharding == NamedSharding(MESH, P("model"))
    layout = {"norm.mean": P("data"), "state.norm.var": P("model"), ...: RULES}
    plan = ft.plan(ts, ft.StateSharding(layout), MESH)
    assert plan["state.norm.mean"].spec == P("data") and plan["state.norm.var"].spec == P("model")

    @ft.jit(rules=RULES, donate="ts")
    def step(ts: Any, x: Array) -> Any:
        def loss(model: Any) -> Any:
            y, state = model(x, ts.state)
            return jnp.mean((y - 1) ** 2), state

        (_, state), gradients = ft.value_and_grad(loss, has_aux=True)(ts.model)
        return ft.apply_gradients(ts, gradients, state=state)

    x = ft.shard(X, P("data"), MESH)
    for _ in range(3):
        ts = step(ts, x)
    assert len(step.compilations) == 1
    assert_lies(ts.state["norm.mean"], "model")
    assert float(jnp.abs(ts.state["norm.mean"]).max()) > 0
    model, state = ft.make_state(normed())
    assert ft.TrainState.create(model, optax.sgd(1.0), state=state).state is state
    with raises("the StateRef at `norm.mean` already has the path", error=ft.StateError):
        ft.TrainState.create(model, optax.sgd(1.0))


def test_frozen_parts():
    tx, wrt = optax.adam(1e-2), ft.is_trainable & ~ft.glob("down")
    ts = ft.TrainState.create(net(), tx, wrt=wrt)
    assert ts.opt_state[0].mu.down is None
    after = ft.apply_gradients(ts, ft.grad(loss, wrt=ts.wrt)(ts.model))
    assert after.model.down is ts.model.down and after.model.steps is ts.model.steps
    assert not np.array_equal(after.model.up, ts.model.up)
    same = ft.apply_gradients(
        ts, ft.grad(loss)(ts.model)
    )  # a gradient for what is frozen is left alone
    assert same.model.down is ts.model.down and np.array_equal(same.model.up, after.model.up)
    plan = ft.plan(ts, RULES | FSDP, SIZES)
    assert rows_of(plan, "opt_state") == rows_of(
        ft.plan_optimizer(tx, net(), RULES | FSDP, SIZES, wrt=wrt)
    )


# Updated


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_plain_optax(name: str):
    ts = ft.TrainState.create(net(), OPTIMIZERS[name]())
    tx = OPTIMIZERS[name]()
    params, rest = eqx.partition(net(), eqx.is_inexact_array)
    state = tx.init(params)
    for i in range(3):
        gradients = ft.grad(loss)(ts.model)
        ts = ft.apply_gradients(ts, gradients)
        updates, state = tx.update(
            jax.grad(lambda p: loss(eqx.combine(p, rest)))(params), state, params
        )
        params = optax.apply_updates(params, updates)
        assert int(ts.step) == i + 1
    for x, y in zip(
        jax.tree.leaves(eqx.filter(ts.model, eqx.is_inexact_array)),
        jax.tree.leaves(params),
        strict=True,
    ):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    assert ts.model.activation is jax.nn.tanh and int(ts.model.steps) == 0


def test_lbfgs_with_what_its_linesearch_takes():
    params = {"w": jnp.arange(1.0, 5.0)}
    value = lambda params: jnp.sum((params["w"] - 3) ** 2)  # noqa: E731
    ts = ft.TrainState.create(params, optax.lbfgs())

    @ft.jit(donate="ts")
    def step(ts: Any) -> Any:
        v, gradients = ft.value_and_grad(value)(ts.model)
        return ft.apply_gradients(ts, gradients, value=v, grad=gradients, value_fn=value)

    for _ in range(5):
        ts = step(ts)
    np.testing.assert_allclose(ts.model["w"], 3.0, atol=1e-4)
    assert len(step.compilations) == 1


def test_dtypes_stay():
    ts = ft.TrainState.create(net(dtype=jnp.bfloat16), optax.adam(1e-2, mu_dtype=jnp.float32))
    after = ft.apply_gradients(ts, ft.grad(loss)(ts.model))
    assert after.model.up.dtype == jnp.bfloat16 and not np.array_equal(after.model.up, ts.model.up)
    kept = jax.tree.map(lambda x: x.dtype, eqx.filter(ts.opt_state, eqx.is_array))
    assert jax.tree.map(lambda x: x.dtype, eqx.filter(after.opt_state, eqx.is_array)) == kept


def test_missing_gradients_are_named():
    ts = ft.TrainState.create(net(), optax.sgd(1.0))
    told = "2 parameters cannot be updated", "down", "has no gradient", "bias", "ft.grad(loss, wrt="
    with raises(*told):
        ft.apply_gradients(ts, ft.grad(loss, wrt="up")(ts.model))
    wrong = eqx.tree_at(lambda g: g.up, ft.grad(loss)(ts.model), jnp.ones((16, 3)))
    said = (
        "differs in shape from its gradient, f32[16, 3]",
        "Try: pass the gradient of this model, from `ft.grad`",
    )
    with raises("1 parameter cannot be updated", "up   f32[16, 32]", *said) as caught:
        ft.apply_gradients(ts, wrong)
    assert "filter" not in str(caught.value)
    with raises("a dict cannot be flattened", "JAX sorts its keys: '<' not supported"):
        ft.apply_gradients(ts, {"up": jnp.ones(3), 1: jnp.ones(3)})


def test_state_is_handed_on():
    ts = ft.TrainState.create(normed(), optax.sgd(1.0))
    gradients = jax.tree.map(jnp.zeros_like, eqx.filter(ts.model, eqx.is_array))
    assert ft.apply_gradients(ts, gradients).state is ts.state
    state = ts.state.set(ts.model.norm.mean, jnp.ones(32))
    assert ft.apply_gradients(ts, gradients, state=state).state is state
    has = "but the model has a State of `norm.mean`, `norm.var`: pass the state of this model"
    for other, got in OTHER_STATES:
        with raises(f"apply_gradients got {got}, {has}", error=ft.StateError):
            ft.apply_gradients(ts, gradients, state=other)
    without = ft.TrainState.create({"w": jnp.ones(2)}, optax.sgd(1.0))
    with raises(
        "apply_gradients got a State of", "but the model has no state: ", error=ft.StateError
    ):
        ft.apply_gradients(without, {"w": jnp.ones(2)}, state=ts.state)


OTHER_STATES: list[tuple[Any, str]] = [
    (ft.make_state({"a": ft.StateRef(jnp.ones(5000))})[1], "a State of `a`"),
    (ft.make_state({"norm": {"mean": ft.StateRef(0.0), "var": ft.StateRef(0.0)}})[1],
     "a State of `norm.mean`, `norm.var`"),
    (ft.make_state([ft.StateRef(0) for _ in range(9)])[1], "a State of `0`, `1`, `2`, `3` and 5 more"),
    (ft.make_state({})[1], "an empty State"),
]  # fmt: skip


# The average


def test_the_average_by_hand():
    ts = ft.TrainState.create(net(), ft.with_ema(optax.adam(1e-1), decay=0.75))
    want = ts.model.up
    for _ in range(4):
        ts = ft.apply_gradients(ts, ft.grad(loss)(ts.model))
        want = 0.75 * want + 0.25 * ts.model.up
    found = ft.averaged(ts)
    np.testing.assert_allclose(found.up, want, rtol=1e-5)
    assert found.activation is jax.nn.tanh and found.steps is ts.model.steps


def test_the_average_of_bfloat16_moves():
    """A thousandth of a step is nothing in bfloat16."""
    ts = ft.TrainState.create({"w": jnp.ones(2, jnp.bfloat16)}, ft.with_ema(optax.sgd(1.0), 0.999))
    for _ in range(8):
        ts = ft.apply_gradients(ts, {"w": -jnp.ones(2, jnp.bfloat16) / 8})
    want = 1.0
    for i in range(1, 9):
        want = 0.999 * want + 0.001 * (1 + i / 8)
    np.testing.assert_allclose(ts.opt_state.average["w"], want, rtol=1e-6)
    assert ft.averaged(ts)["w"].dtype == jnp.bfloat16


def test_the_average_inside_of_others_and_misuse():
    tx = optax.chain(
        optax.clip(1.0), optax.masked(ft.with_ema(optax.sgd(1.0), 0.5), {"a": True, "b": False})
    )
    ts = ft.TrainState.create({"a": jnp.zeros(2), "b": jnp.zeros(1)}, tx)
    ts = ft.apply_gradients(ts, {"a": -jnp.ones(2), "b": jnp.ones(1)})
    assert ft.averaged(ts)["a"].tolist() == [0.5, 0.5] and ft.averaged(ts)["b"] is ts.model["b"]
    with raises("the optimizer keeps no average of the parameters", "ft.with_ema(tx)"):
        ft.averaged(ft.TrainState.create(net(), optax.sgd(1.0)))
    with raises("keeps 2 averages"):
        ft.averaged(ft.TrainState.create(net(), twice()))
    for decay in (1, -0.1, float("nan")):
        with raises(
            "with_ema: invalid arguments",
            f"decay={decay!r}",
            "it must be at least 0 and less than 1",
        ):
            ft.with_ema(optax.sgd(1.0), decay)
    tx = ft.with_ema(optax.sgd(1.0))
    with raises("with_ema needs the parameters", "`tx.update(gradients, state, params)`"):
        tx.update({"w": jnp.ones(1)}, tx.init({"w": jnp.ones(1)}))


def twice() -> Any:
    return optax.chain(ft.with_ema(optax.sgd(1.0)), ft.with_ema(optax.identity()))


def test_the_average_is_no_second_name_of_the_parameters():
    ts = ft.TrainState.create(net(), ft.with_ema(optax.sgd(0.1)))
    after = ft.jit(lambda ts: ft.apply_gradients(ts, ft.grad(loss)(ts.model)), donate="ts")(ts)
    assert int(after.step) == 1 and ts.opt_state.average.up.is_deleted()


# Steps


TX = adafactor()


def test_the_optimizers_state_in_host_memory_trains(mesh: Mesh):
    """Nothing is computed in host memory: the update brings it to the device, and the closed state
    goes back."""
    rules = ft.AxisRules({"batch": "data", "embed": None, "hidden": "model"})
    layout = ft.StateSharding({"opt_state.**": ft.on_host(P()), ...: rules})
    x = ft.shard(jnp.ones((4, 8)), P("data"), mesh)

    @ft.jit(rules=layout, donate="ts")
    def step(ts: Any, x: Any) -> Any:
        loss, grads = ft.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(ts.model)
        return ft.apply_gradients(ts, grads), loss

    losses = {}
    for name, where in (("host", layout), ("device", rules)):
        make = ft.init(
            lambda key: ft.TrainState.create(ft.nn.Linear(8, 16, key=key), TX), where, mesh
        )
        ts, losses[name] = make(jax.random.key(0)), []
        for _ in range(3):
            with jax.numpy_dtype_promotion("standard"):
                ts, loss = step(ts, x)
            losses[name].append(float(loss))
        kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(ts.opt_state)}
        assert kinds == ({"pinned_host"} if name == "host" else {"device"})
    assert losses["host"] == losses["device"] and losses["host"][2] < losses["host"][0]
    assert len(step.compilations) == 2


TX = optax.adam(1e-2)


# Models with Equinox' own state


class OwnState(eqx.Module):
    """With a state of several leaves for each layer, and a parameter whose type is weak."""

    linear: eqx.nn.Linear
    norms: list[eqx.nn.BatchNorm]
    spectral: eqx.nn.SpectralNorm[eqx.nn.Linear]
    act: eqx.nn.PReLU

    def __init__(self, key: PRNGKeyArray):
        keys = jax.random.split(key, 3)
        self.linear = eqx.nn.Linear(4, 8, key=keys[0])
        self.norms = [
            eqx.nn.BatchNorm(8, "batch", mode="batch"),
            eqx.nn.BatchNorm(8, "batch", mode="ema"),
        ]
        self.spectral = eqx.nn.SpectralNorm(eqx.nn.Linear(8, 8, key=keys[1]), "weight", key=keys[2])
        self.act = eqx.nn.PReLU(0.2)

    def __call__(self, x: Array, state: eqx.nn.State) -> tuple[Array, eqx.nn.State]:
        x = self.act(self.linear(x))
        for norm in self.norms:
            x, state = norm(x, state)
        return self.spectral(x, state)


def own_loss(model: OwnState, state: eqx.nn.State, x: Array) -> tuple[Array, eqx.nn.State]:
    y, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
    return jnp.mean(y**2), state


OWN_LAYOUTS = {
    "rules": ft.AxisRules({"out_features": "model", ...: None}, names=ft.equinox_names),
    "rules and FSDP": ft.AxisRules({"out_features": "model", ...: None}, names=ft.equinox_names)
    | ft.FSDP("data"),
    "FSDP": ft.FSDP("data", min_size=0),
    "filters": ft.StateSharding({"linear.weight": P("model"), "state.**": P(), ...: P()}),
}


@pytest.mark.parametrize("name", OWN_LAYOUTS)
def test_a_model_with_equinox_own_state(name: str):
    layout, mesh, tx = OWN_LAYOUTS[name], ft.make_mesh(data=2, model=4), optax.adam(1e-2, eps=1e-3)
    x = jax.random.normal(jax.random.key(1), (8, 4))
    # With a larger `eps`, because the gradient of a bias before a norm is nothing but rounding.

    # By hand, in plain Equinox.
    model, state = eqx.nn.make_with_state(OwnState)(jax.random.key(0))
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def by_hand(model: Any, state: Any, opt_state: Any) -> Any:
        (loss, state), grads = eqx.filter_value_and_grad(own_loss, has_aux=True)(model, state, x)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, opt_state, loss

    expected = []
    for _ in range(3):
        model, state, opt_state, loss = by_hand(model, state, opt_state)
        expected.append(float(loss))

    @ft.jit(donate="ts")
    def step(ts: Any, x: Array) -> Any:
        (loss, after), grads = ft.value_and_grad(own_loss, has_aux=True)(ts.model, ts.state, x)
        return ft.apply_gradients(ts, grads, state=after), loss

    new_model, new_state = eqx.nn.make_with_state(OwnState)(jax.random.key(0))
    ts = ft.TrainState.create(new_model, tx, layout=layout, mesh=mesh, state=new_state)
    plan, losses = ft.plan(ts, layout, mesh), []
    for _ in range(3):
        ts, loss = step(ts, ft.shard(x, P(), mesh))
        losses.append(float(loss))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(ts.state), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert len(step.compilations) == 1, "no type is weak"
    assert [row.spec for row in ft.plan(ts).rows] == [row.spec for row in plan.rows]


def test_state_of_equinox_that_is_not_given_is_an_error():
    model, state = eqx.nn.make_with_state(OwnState)(jax.random.key(0))
    remedy = "`eqx.nn.make_with_state` and pass its state, as in `TrainState.create(model, tx, state=state)`, or use a layer"
    with raises("is an `eqx.nn.StateIndex`", remedy, error=ft.StateError):
        ft.TrainState.create(model, TX)
    with raises("`batch_counter` is an `eqx.nn.StateIndex`", remedy, error=ft.StateError):
        ft.make_state(eqx.nn.BatchNorm(3, "batch", mode="batch"))
    with raises("state=", "it must be an `ft.State` or an `eqx.nn.State`, or None"):
        ft.TrainState.create(model, TX, state={})  # type: ignore[arg-type]
    ts = ft.TrainState.create(model, TX, state=state)
    gradients = ft.grad(lambda m: jnp.sum(m.linear.weight))(ts.model)
    with raises("got an empty State, but the model has a State", error=ft.StateError):
        ft.apply_gradients(ts, gradients, state=ft.State((), {}))


def test_a_weak_parameter_at_two_places_stays_one_array():
    weak = jnp.asarray(0.2)
    ts = ft.TrainState.create({"a": weak, "b": weak, "w": jnp.ones(3)}, TX)
    assert weak.weak_type and ts.model["a"] is ts.model["b"] and not ts.model["a"].weak_type
    model = {"w": jnp.ones(3)}
    assert ft.TrainState.create(model, TX).model is model
    abstract = ft.abstract(lambda: ft.TrainState.create({"a": jnp.asarray(0.2)}, TX))()
    assert not abstract.model["a"].weak_type
    weak_shape = jax.ShapeDtypeStruct((), jnp.float32, weak_type=True)
    assert not ft.TrainState.create({"a": weak_shape}, TX).model["a"].weak_type


class Counting(eqx.Module):
    w: Array
    index: eqx.nn.StateIndex

    def __init__(self):
        self.w, self.index = jnp.ones(2), eqx.nn.StateIndex(jnp.asarray(0.2))


def test_weak_types_of_a_state_do_not_compile_a_step_twice():
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, jnp.where(state > 3, 1.0, 2.0)  # weak, as Python's numbers are

    tx = optax.GradientTransformation(lambda params: jnp.float32(0), update)
    model, state = eqx.nn.make_with_state(Counting)()
    ts = ft.TrainState.create(model, tx, state=state)
    step = ft.jit(lambda ts: ft.apply_gradients(ts, ft.grad(lambda m: m.w.sum())(ts.model)))
    assert not any(jax.typeof(x).weak_type for x in jax.tree.leaves(ts.state))
    for _ in range(2):
        ts = step(ts)
    assert len(step.compilations) == 1


LAYER = ft.nn.Linear(2, 2, key=jax.random.key(0))
MISUSE: dict[str, tuple[Callable[[], Any], str]] = {
    "swapped": (
        lambda: ft.TrainState.create(TX, LAYER),  # type: ignore[arg-type]
        "an instance of Linear is not an optimizer: the argument `tx` must be an optax GradientTransformation, which has",
    ),
    "swapped for a plan": (lambda: ft.plan_optimizer(LAYER, TX, P(), SIZES), "an instance of Linear is not an optimizer"),  # type: ignore[arg-type]
    "nothing to train": (
        lambda: ft.TrainState.create(net(), TX, wrt=ft.larger_than(10**6)),
        "no array of Net matches wrt=larger_than(1000000), so there is nothing to train",
    ),
    "nothing matched": (
        lambda: ft.TrainState.create(net(), TX, wrt="nothing"), "glob('nothing') matches no leaf of Net"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISUSE)
def test_misuse(case: str):
    run, said = MISUSE[case]
    with raises(said):
        run()


def test_a_field_that_a_subclass_adds_is_laid_out_by_the_layout():
    """And not whole, as what a layout for the model says nothing of."""

    ts = Averaging(ft.TrainState.create(ft.nn.Linear(8, 16, key=jax.random.key(0)), TX))
    plan = ft.plan(ts, ft.AxisRules({"embed": None, "hidden": "model"}), {"model": 4}, check=False)
    assert plan["target.weight"].spec == plan["model.weight"].spec == P(None, "model")
    assert plan["step"].spec == P()


class Averaging(ft.TrainState[Any]):
    """A subclass with a field of its own, which its own constructor fills."""

    target: Any
    name: str = eqx.field(static=True)
    told: str = eqx.field(static=True, init=False)

    def __init__(self, ts: ft.TrainState[Any]):
        self.step, self.model, self.opt_state = ts.step, ts.model, ts.opt_state
        self.state, self.key, self.tx, self.wrt = ts.state, ts.key, ts.tx, ts.wrt
        self.target, self.name, self.told = ts.model, "mine", "once"


@pytest.mark.parametrize("jit", [False, True])
def test_a_subclass_stays_one(jit: bool):
    ts = Averaging(ft.TrainState.create(net(), optax.sgd(0.5), key=jax.random.key(1)))

    def step(ts: Averaging) -> Averaging:
        return ft.apply_gradients(ts, ft.grad(loss)(ts.model))

    after = (ft.jit(step) if jit else step)(ts)
    assert type(after) is Averaging and jax.tree.structure(after) == jax.tree.structure(ts)
    assert (after.name, after.told, after.wrt, after.step) == ("mine", "once", ts.wrt, 1)
    assert jnp.array_equal(after.target.up, ts.model.up)
    plain = ft.apply_gradients(ft.TrainState.create(net(), optax.sgd(0.5)), ft.grad(loss)(ts.model))
    assert jnp.allclose(after.model.up, plain.model.up, atol=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_abstract_model_has_an_abstract_training_state(optimizer: str):
    tx = OPTIMIZERS[optimizer]()
    ts = ft.TrainState.create(ft.abstract(net)(), tx)
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves(ts))
    concrete = ft.TrainState.create(net(), tx)
    assert described(ts) == described(concrete)


def test_one_abstract_parameter_is_enough():
    ts = ft.TrainState.create(
        {"a": jnp.ones(2), "b": jax.ShapeDtypeStruct((3,), jnp.float32)}, optax.adam(1e-3)
    )
    assert isinstance(ts.opt_state[0].mu["a"], jax.ShapeDtypeStruct) and isinstance(
        ts.step, jax.ShapeDtypeStruct
    )


def described(tree: Any) -> list[Any]:
    arrays = [x for x in jax.tree.leaves(tree) if hasattr(x, "shape")]
    return [(x.shape, x.dtype, bool(getattr(x, "weak_type", False))) for x in arrays]
