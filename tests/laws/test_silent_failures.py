"""What fails in silence elsewhere and does not here, by the numbers of `silent-failures.md`. The
rest of them stands beside what it is about."""

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

import functree as ft
from tests.lib.checks import compilations, refused
from tests.lib.meshes import MESH, SIZES
from tests.lib.trees import BareMLP as MLP
from tests.lib.trees import x as abstract

P = PartitionSpec
TX = optax.adam(1e-2)
LAYOUT = ft.StateSharding({"up": P("data", "model"), "down": P("model", "data")})


# In a plan


def test_silent_failure_6_a_stack_without_its_name() -> None:
    bare = MLP(abstract(8, 8, 16), abstract(8, 16, 8))  # type: ignore[arg-type]
    rules = ft.AxisRules({"hidden": "model", "embed": "data", "layers": None})
    # The number of layers divides, so that a spec off by one would do.
    for layout in (rules, ft.FSDP("data", min_size=0)):
        text = refused({"blocks": bare}, layout)
        assert "blocks.up   f32[8, 8, 16]\n      has 3 dimensions, but `Float" in text
        assert (
            "several layers (made with `vmap` or `scan`), wrap their module in `ft.Stacked`" in text
        )
    stacked = ft.Stacked(bare, axis="layers")
    assert ft.plan(stacked, rules, SIZES)["layer.up"].spec == P(None, "data", "model")
    state = ft.plan_optimizer(TX, stacked, rules, SIZES)
    for moment in ("mu", "nu"):
        assert state[f"0.{moment}.layer.up"].spec == P(None, "data", "model")


def test_silent_failure_10_one_resolver_for_parameters_and_activations() -> None:
    rules = ft.AxisRules({"batch": "data", "embed": "data", "hidden": "model", ...: None})

    class Activations(eqx.Module):
        up: Float[Array, "embed hidden"]
        x: Float[Array, "batch embed"]

    for sizes in ({"data": 1, "model": 1}, {"data": 1, "model": 4}, {"data": 8, "model": 1}):
        mesh = Mesh(
            np.array(jax.devices()[: sizes["data"] * sizes["model"]]).reshape(*sizes.values()),
            tuple(sizes),
        )
        plan = ft.plan(Activations(jnp.ones((8, 16)), jnp.ones((8, 8))), rules, mesh)
        assert (
            plan["up"].spec == rules.spec("embed hidden", (8, 16), mesh) == P("data", "model")
        )  # axes of size 1 stay
        assert plan["x"].spec == rules.spec("batch embed", (8, 8), mesh) == P("data", None)
        with jax.set_mesh(mesh), ft.axis_rules(rules):
            assert (
                ft.spec("embed hidden") == plan["up"].spec
                and ft.spec("batch embed") == plan["x"].spec
            )
            x = jax.jit(lambda x: ft.constrain(x, "embed hidden"))(jnp.ones((8, 16)))
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, plan["up"].spec), 2)


# In steps


def step(model: MLP, opt: Any, x: Array) -> tuple[Any, Any]:
    with jax.numpy_dtype_promotion("standard"):
        gradients = jax.grad(lambda model: jnp.mean(model(x) ** 2))(model)
        updates, opt = TX.update(gradients, opt, model)
        return optax.apply_updates(model, updates), opt


def placed() -> MLP:
    up, down = jax.random.normal(jax.random.key(0), (2, 8, 16))
    return ft.shard(MLP(up, down.T), LAYOUT, MESH)


def assert_planned(tree: Any, plan: ft.Plan) -> None:
    for row, x in zip(plan.rows, jax.tree.leaves(tree), strict=True):
        assert x.sharding.is_equivalent_to(plan.sharding(row), x.ndim), row.path


def test_silent_failure_11_moments_that_are_not_born_sharded():
    """Plain JAX: `jit(tx.init)` leaves the moments replicated, and the second step compiles
    again."""
    x = ft.shard(jnp.ones((4, 8)), P("data"), MESH)

    def run(step: Any, opt: Any) -> tuple[int, Any]:
        model = placed()
        with compilations() as heard:
            for _ in range(3):
                model, opt = step(model, opt, x)
        return len(heard), opt

    plain = jax.jit(TX.init)(placed())
    assert plain[0].mu.up.sharding.is_fully_replicated
    count, _ = run(jax.jit(step, donate_argnums=(0, 1)), plain)
    assert count > 1, "else this test tests nothing"

    opt = ft.init_optimizer(TX, placed(), LAYOUT, MESH)
    plan = ft.plan_optimizer(TX, placed(), LAYOUT, MESH)
    assert_planned(opt, plan)
    count, opt = run(ft.jit(step, donate=("model", "opt")), opt)
    assert count == 1
    assert_planned(opt, plan)


@pytest.mark.filterwarnings("ignore:.*uncommitted")
def test_silent_failure_11_what_drifts_says_so():
    """State that is not committed moves with the first step; a record tells which, and why."""
    f = ft.jit(lambda state, x: {"m": state["m"] + x.sum(0)}, in_shardings=None)
    x = ft.shard(jnp.ones((4, 8)), P(None, "model"), MESH)
    f(f({"m": jnp.zeros(8)}, x), x)
    (change,) = f.compilations[1].differences
    assert (str(change.path), change.kind, change.before) == ("state.m", "sharding", "on cpu:0")


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
