"""What fails in silence elsewhere, and is an error or right by construction here: the numbers of
`silent-failures.md` that are about running. Those about donation and rules are in
`test_donation.py` (22, 24, 29) and `test_jit_shardings.py` (21, 23, 31), those about statics in
`test_jit.py` (27, 28); 12 and 30 in `test_grad.py` too; 36 is in `test_processes.py`, and 38 in
`test_checkpoints_run.py`.
"""

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float, Int

import functree as ft
from tests.lib.checks import compilations
from tests.lib.meshes import MESH
from tests.lib.trees import BareMLP as MLP

P = PartitionSpec
CONFIG = ft.nn.TransformerConfig(32, 16, layers=2, heads=4, kv_heads=4, head_dim=4, hidden=32)
TENSOR = ft.AxisRules(
    {
        "batch": "data",
        "heads": "model",
        "kv_heads": "model",
        "hidden": "model",
        "vocab": "model",
        ...: None,
    }
)
BATCH = ft.AxisRules({"batch": "data", ...: None})
FSDP = ft.FSDP("data", min_size=64)
LAYOUTS = {"TP": TENSOR, "FSDP": BATCH | FSDP, "FSDP+TP": TENSOR | FSDP}
TX = optax.adam(1e-2)


def mlp() -> MLP:
    up, down = jax.random.normal(jax.random.key(0), (2, 8, 16))
    return MLP(up, down.T)


def mse(model: MLP, x: Array) -> Array:
    return jnp.mean(model(x) ** 2)


def assert_planned(tree: Any, plan: ft.Plan) -> None:
    arrays = [x for x in jax.tree.leaves(tree) if eqx.is_array(x)]
    for row, x in zip(plan.rows, arrays, strict=True):
        wanted = plan.sharding(row)
        kind = x.sharding.memory_kind or "device"
        assert x.sharding.is_equivalent_to(wanted, x.ndim), (row.path, x.sharding, wanted)
        assert kind == (wanted.memory_kind or "device"), (row.path, kind)


# Ten steps of adam, on a small layer and on a small transformer


class Task(NamedTuple):
    make: Callable[[Any], Any]
    loss: Callable[[Any, Array], Array]
    batch: Callable[[], np.ndarray]

    def step(self, model: Any, opt: Any, batch: Array) -> tuple[Any, Any, Array]:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            loss, grads = ft.value_and_grad(self.loss)(model, batch)
            updates, opt = TX.update(grads, opt, model)
            return optax.apply_updates(model, updates), opt, loss


def next_token_loss(model: ft.nn.Transformer, tokens: Int[Array, "batch seq"]) -> Array:
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def identity_loss(model: ft.nn.MLP, x: Float[Array, "batch seq embed"]) -> Array:
    return jnp.mean((model(x) - x) ** 2)


TASKS = {
    "layer": Task(
        lambda key: ft.nn.MLP(8, 16, key=key),
        identity_loss,
        lambda: np.random.default_rng(0).normal(size=(4, 3, 8)).astype(np.float32),
    ),
    "transformer": Task(
        lambda key: ft.nn.Transformer.create(CONFIG, key=key),
        next_token_loss,
        lambda: np.random.default_rng(0).integers(0, 32, (4, 9)).astype(np.int32),
    ),
}


def train(step: Any, model: Any, opt: Any, batch: Array) -> tuple[Any, Any, list[float]]:
    """Ten steps, of which the last nine compile nothing."""
    model, opt, loss = step(model, opt, batch)
    losses = [loss]
    with compilations() as heard:
        for _ in range(9):
            model, opt, loss = step(model, opt, batch)
            losses.append(loss)
    assert heard == [] and len(step.compilations) == 1
    return model, opt, [float(x) for x in losses]


@functools.cache
def model_of(task: str) -> Any:
    return jax.tree.map(np.asarray, jax.jit(TASKS[task].make)(jax.random.key(0)))


@functools.cache
def losses_alone(task: str) -> list[float]:
    """Ten steps on one device by plain JAX."""
    model, step, losses = jax.tree.map(jnp.asarray, model_of(task)), jax.jit(TASKS[task].step), []
    opt = jax.jit(TX.init)(model)
    for _ in range(10):
        model, opt, loss = step(model, opt, TASKS[task].batch())
        losses.append(float(loss))
    return losses


# Silent failure 11: a step that compiles twice.


@pytest.mark.slow
@pytest.mark.parametrize("told", ["in_shardings", "nothing"])
@pytest.mark.parametrize(
    ("task", "layout"),
    [("layer", "TP"), ("layer", "FSDP"), ("layer", "FSDP+TP"), ("transformer", "FSDP+TP")],
)
def test_silent_failure_11_ten_steps_compile_nothing_after_the_first(
    task: str, layout: str, told: str
):
    rules = LAYOUTS[layout]
    if task == "transformer" and told == "in_shardings":
        model = ft.init(TASKS[task].make, rules, MESH)(jax.random.key(0))
    else:
        model = ft.shard(model_of(task), rules, MESH)
    opt = ft.init_optimizer(TX, model, rules, MESH)
    plans = ft.plan(model, rules, MESH), ft.plan_optimizer(TX, model, rules, MESH)
    assert any(
        "data" in str(row.spec) or "model" in str(row.spec) for row in (*plans[0], *plans[1])
    )
    options = {"in_shardings": (*plans, P("data")), "mesh": MESH} if told == "in_shardings" else {}
    step = ft.jit(TASKS[task].step, rules=rules, donate=("model", "opt"), **options)
    model, opt, losses = train(step, model, opt, ft.shard(TASKS[task].batch(), P("data"), MESH))
    assert_planned(model, plans[0])
    assert_planned(opt, plans[1])
    np.testing.assert_allclose(losses, losses_alone(task), rtol=2e-4)


@pytest.mark.parametrize("donate", [(), ("model", "opt")], ids=["kept", "donated"])
def test_silent_failure_11_with_moments_in_host_memory(donate: Any):
    rules, task = LAYOUTS["FSDP+TP"], TASKS["layer"]
    model = ft.shard(model_of("layer"), rules, MESH)
    on_device = ft.plan_optimizer(TX, model, rules, MESH)
    host = ft.StateSharding(
        {"**.mu.**": ft.on_host(on_device), "**.nu.**": ft.on_host(on_device), ...: P()}
    )
    opt = ft.shard(ft.init_optimizer(TX, model, rules, MESH), host, MESH)
    plans = ft.plan(model, rules, MESH), ft.plan(opt, host, MESH)

    def step(model: Any, opt: Any, batch: Array) -> tuple[Any, Any, Array]:
        opt = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), opt)
        return task.step(model, opt, batch)

    options = {
        "in_shardings": (rules, host, P("data")),
        "out_shardings": (rules, host, None),
        "mesh": MESH,
    }
    jitted = ft.jit(step, rules=rules, donate=donate, **options)
    model, opt, losses = train(jitted, model, opt, ft.shard(task.batch(), P("data"), MESH))
    kinds = jax.tree.map(lambda x: x.sharding.memory_kind, opt[0])
    assert {*jax.tree.leaves(kinds.mu), *jax.tree.leaves(kinds.nu)} == {
        "pinned_host"
    } and kinds.count == "device"
    assert_planned(opt, plans[1])
    assert_planned(model, plans[0])
    np.testing.assert_allclose(losses, losses_alone("layer"), rtol=2e-4)


def test_silent_failure_11_moments_that_are_not_born_sharded():
    """Plain JAX: `jit(tx.init)` leaves the moments replicated, and the second step compiles
    again."""
    layout = ft.StateSharding({"up": P("data", "model"), "down": P("model", "data")})
    x = ft.shard(jnp.ones((4, 8)), P("data"), MESH)

    def step(model: MLP, opt: Any, x: Array) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):
            updates, opt = TX.update(jax.grad(mse)(model, x), opt, model)
            return optax.apply_updates(model, updates), opt

    def run(step: Any, model: MLP, opt: Any) -> tuple[int, Any]:
        with compilations() as heard:
            for _ in range(3):
                model, opt = step(model, opt, x)
        return len(heard), opt

    model = ft.shard(mlp(), layout, MESH)
    plain = jax.jit(TX.init)(model)
    assert plain[0].mu.up.sharding.is_fully_replicated
    count, _ = run(jax.jit(step, donate_argnums=(0, 1)), model, plain)
    assert count > 1, "else this test tests nothing"

    model = ft.shard(mlp(), layout, MESH)
    opt = ft.init_optimizer(TX, model, layout, MESH)
    plan = ft.plan_optimizer(TX, model, layout, MESH)
    assert_planned(opt, plan)
    count, opt = run(ft.jit(step, donate=("model", "opt")), model, opt)
    assert count == 1
    assert_planned(opt, plan)


@pytest.mark.filterwarnings("ignore:.*nobody has placed")
def test_silent_failure_11_what_drifts_says_so():
    """State that is not committed moves with the first step; a record tells which, and why."""
    f = ft.jit(lambda state, x: {"m": state["m"] + x.sum(0)}, in_shardings=None)
    x = ft.shard(jnp.ones((4, 8)), P(None, "model"), MESH)
    f(f({"m": jnp.zeros(8)}, x), x)
    (change,) = f.compilations[1].differences
    assert (str(change.path), change.kind, change.before) == ("state.m", "sharding", "on cpu:0")


def test_silent_failure_12_gradients_keep_the_fsdp_axis():
    layout = ft.StateSharding({"up": P("data", "model"), "down": P("model", "data")})
    model, x = ft.shard(mlp(), layout, MESH), ft.shard(jnp.ones((4, 8)), P("data"), MESH)
    grads = ft.jit(ft.grad(mse, layout=layout))(model, x)
    for name in ("up", "down"):
        mine, weight = getattr(grads, name), getattr(model, name)
        assert mine.sharding.is_equivalent_to(weight.sharding, 2)
        np.testing.assert_allclose(
            mine, getattr(jax.grad(mse)(mlp(), jnp.ones((4, 8))), name), rtol=1e-5
        )


def test_silent_failure_15_another_shape_does_not_reuse_shardings():
    """scalax keys its cache by static arguments alone."""
    layout = ft.FSDP("data", min_size=32, axes=None)
    f = ft.jit(lambda w: {"w": w["w"] * 2}, in_shardings=(layout,), out_shardings=layout, mesh=MESH)
    shapes = {
        (4, 8): P(None, "data"),
        (8, 4): P("data", None),
        (2, 2): P(None, None),
        (16,): P(None),
        (64,): P("data"),
    }
    for _ in range(2):
        for shape, spec in shapes.items():
            x = ft.shard({"w": jnp.ones(shape)}, layout, MESH)
            assert f(x)["w"].sharding.is_equivalent_to(NamedSharding(MESH, spec), len(shape))
    assert len(f.compilations) == len(shapes)


def ready(x: Any) -> Any:
    return ft.shard(jnp.asarray(x), P("data"), MESH)


class Scaler(MLP):
    def scaled(self, x: Array, *, by: Array, how: str = "mul") -> Array:
        return self(x) * by if how == "mul" else self(x) + by


X = np.ones((4, 8), np.float32)
CALLS: dict[str, Callable[[Any], Any]] = {
    "by name, with shardings": lambda m: ft.jit(
        lambda model, x, by: model.scaled(x, by=by),
        in_shardings={"x": P("data"), "by": P("data")},
        mesh=MESH,
    )(by=ready(X), x=ready(X), model=m),
    "static, with shardings": lambda m: ft.jit(
        lambda model, x, by, how: model.scaled(x, by=by, how=how),
        in_shardings=(None, P("data"), P("data"), None),
        static_argnames="how",
        mesh=MESH,
    )(m, ready(X), how="mul", by=ready(X)),
    "a bound method, with shardings": lambda m: ft.jit(
        m.scaled, in_shardings={"x": P("data"), "by": P("data")}, mesh=MESH
    )(ready(X), by=ready(X)),
    "a bound method, one layout for all": lambda m: ft.jit(
        m.scaled, in_shardings=(P("data"),), mesh=MESH
    )(x=ready(X), by=ready(X)),
    "by name, donated": lambda m: ft.jit(lambda m, x, by: m.scaled(x, by=by), donate="x")(
        by=ready(X), x=ready(X), m=m
    ),
}


@pytest.mark.parametrize("how", CALLS)
def test_silent_failure_20_calls_of_all_kinds(how: str):
    model = Scaler(mlp().up, mlp().down)
    result = CALLS[how](ft.shard(model, P(), MESH))
    np.testing.assert_allclose(result, model(jnp.asarray(X)), rtol=1e-5)
    assert result.sharding.is_equivalent_to(NamedSharding(MESH, P("data")), 2)


@pytest.mark.parametrize("option", ["device", "backend"])
def test_silent_failure_20_a_device(option: str):
    text = f"jit has no `{option}`: move the arrays to the device (`jax.device_put`), or use `with jax.def"
    with pytest.raises(ft.FunctreeError, match=re.escape(text)):
        ft.jit(mse, **{option: jax.devices()[1]})
    with jax.default_device(jax.devices()[1]):
        assert ft.jit(lambda x: x * 2)(np.ones(2, np.float32)).devices() == {jax.devices()[1]}


def test_silent_failure_30_a_loss_averaged_in_shards():
    """The gradient of a loss that is averaged over shards is that of the whole loss, taken outside
    of `shard_map`."""
    mesh = ft.make_mesh(data=8)
    w, x = jnp.arange(4.0), jax.random.normal(jax.random.key(1), (16, 4))

    @ft.shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    def loss(w: Array, x: Array) -> Array:
        return jax.lax.pmean(jnp.mean((x @ w) ** 2), "data")

    found = ft.jit(ft.grad(loss))(w, x)
    np.testing.assert_allclose(found, jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), rtol=1e-5)


# Asynchronous


def test_silent_failure_16_a_restored_tree_lies_as_it_did_and_nothing_is_swapped(tmp_path: Path):
    """Arrays of one shape are told apart by path, whatever the order of the fields; each is sharded
    as it was."""
    saved = {"a": np.zeros((8, 4), np.float32), "b": np.ones((8, 4), np.float32)}
    placed = ft.shard(saved, {"a": P("data"), "b": P(None, "model")}, MESH)
    ft.save(tmp_path / "c", placed)

    class Swapped(eqx.Module):
        b: Any
        a: Any

    like = Swapped(b=placed["b"] * 0, a=placed["a"] + 1)
    for found in (ft.restore(tmp_path / "c", like), vars(ft.restore(tmp_path / "c", like))):
        one, other = (found["a"], found["b"]) if isinstance(found, dict) else (found.a, found.b)
        assert np.array_equal(one, saved["a"]) and np.array_equal(other, saved["b"])
        assert one.sharding == placed["a"].sharding and other.sharding == placed["b"].sharding


@pytest.mark.parametrize(
    ("like", "said"),
    [(jnp.ones((8, 4), jnp.bfloat16), "was saved as f32"), (None, "no such array")],
)
def test_silent_failure_35_another_dtype_or_a_missing_leaf(like: Any, said: str, tmp_path: Path):
    ft.save(tmp_path / "c", {"w": jnp.ones((8, 4))})
    with pytest.raises(ft.CheckpointError, match=said):
        ft.restore(tmp_path / "c", {"w": like})


@pytest.mark.parametrize(
    "field", [{"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, {"sliding_window": 4}]
)
def test_silent_failure_37_a_config_that_the_loader_does_not_know(
    field: dict[str, Any], tmp_path: Path
):
    """All weights would load, and the model compute something else."""
    model = Path(__file__).parents[1] / "fixtures" / "hf" / "llama"
    config = json.loads((model / "config.json").read_text()) | field
    shutil.copytree(model, tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ft.FunctreeError, match=next(iter(field))):
        ft.load_weights(tmp_path / "m", P(), MESH)


def test_a_call_returns_before_the_work_is_done():
    """Calls that wait would never give a pending result, whatever there is to do, and however busy
    the machine."""

    def work(state: dict[str, Array], times: Array) -> dict[str, Array]:
        return {"x": jax.lax.fori_loop(0, times, lambda _, x: jnp.tanh(x @ x), state["x"])}

    f = ft.jit(work)
    state = {"x": jnp.full((256, 256), 0.01)}

    lengths = (jnp.int32(2**n) for n in range(4, 14))
    assert any(not f(state, times)["x"].is_ready() for times in lengths)
    assert len(f.compilations) == 1
