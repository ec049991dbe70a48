"""`plan`: every field of every row, what is checked, and the plan as a value and as a layout."""

import copy
import gc
import pickle
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray

import functree as ft
from tests.lib.checks import raises
from tests.lib.meshes import MESH, SIZES

P = PartitionSpec


class MLP(eqx.Module):
    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden embed"]
    steps: Int[Array, ""]
    key: PRNGKeyArray
    name: str = "mlp"


def mlp(embed: int = 6, hidden: int = 16) -> MLP:
    shapes = (embed, hidden), (hidden, embed)
    return MLP(
        jnp.ones(shapes[0]),
        jnp.ones(shapes[1], jnp.bfloat16),
        jnp.zeros((), jnp.int32),
        jax.random.key(0),
    )


RULES = ft.AxisRules({"hidden": ("data", "model"), "embed": None})


def described(row: ft.Row) -> tuple[Any, ...]:
    assert row.mesh is None  # it is the plan's
    return (str(row.path), row.shape, str(row.dtype), row.axes, *row[4:11])


# Rows


def test_every_field_of_every_row() -> None:
    plan = ft.plan(
        {"m": mlp(), "n": np.ones((4, 3), np.int8)}, {"m": RULES, "n": ft.on_host(P("data"))}, SIZES
    )
    hidden = "hidden→(data, model)"
    assert [described(row) for row in plan] == [
        ("m.up", (6, 16), "float32", ft.Axes("embed", "hidden"), P(None, ("data", "model")), f"embed→None, {hidden}",
         (6, 2), 384, 48, 1, None),
        ("m.down", (16, 6), "bfloat16", ft.Axes("hidden", "embed"), P(("data", "model"), None), f"{hidden}, embed→None",
         (2, 6), 192, 24, 1, None),
        ("m.steps", (), "int32", ft.Axes(), P(), "a scalar", (), 4, 4, 8, None),
        ("m.key", (), "key<fry>", ft.Axes(), P(), "a scalar", (), 8, 8, 8, None),
        ("n", (4, 3), "int8", ft.Axes(None, None), P("data", None), "P('data') as given",
         (2, 3), 12, 6, 4, "pinned_host"),
    ]  # fmt: skip
    assert plan.total_bytes == 384 + 192 + 4 + 8 + 12
    assert plan.bytes_per_device == 48 + 24 + 4 + 8 + 6
    assert plan.unused == ()
    assert plan.problems == ()
    assert dict(plan.sizes) == SIZES
    assert plan.mesh is None


def test_what_is_no_array_has_no_row() -> None:
    plan = ft.plan(
        {"a": 3, "b": None, "c": "text", "d": 2.5, "e": jnp.ones(2), "f": np.float32(1)}, P(), SIZES
    )
    assert [str(row.path) for row in plan] == ["e", "f"]
    assert plan.specs == {"a": None, "b": None, "c": None, "d": None, "e": P(None), "f": P()}
    empty = ft.plan({"a": 3}, P("data"), SIZES)
    assert len(empty) == 0 and empty.total_bytes == 0 and "0 arrays" in str(empty)


def test_a_row_by_path_tuple_and_text() -> None:
    plan = ft.plan(
        {"a.b": [jnp.ones(2), mlp()], "0": jnp.ones(3)}, {"a.b": [P(), RULES], "0": P()}, SIZES
    )
    row = plan['"a.b".1.up']
    assert row is plan[("a.b", 1, "up")] is plan[ft.Path(("a.b", 1, "up"))]
    assert plan[("0",)].shape == (3,) and plan['"0"'].shape == (3,)
    for path in ("up", ("a.b", 1), ("a.b", "1", "up"), "0", ()):
        with pytest.raises(KeyError, match="no array at"):
            plan[path]
    with raises("cannot make a path from 0", error=ft.RuleError):
        _ = plan[0]
    with pytest.raises(KeyError, match=r'did you mean `"a.b".1.up`'):
        plan['"a.b".1.pu']
    assert list(plan) == list(plan.rows) and len(plan) == 6


# Trees of specs and shardings


def test_shardings_have_memory_kinds_and_need_a_mesh(mesh: Mesh) -> None:
    tree = {"a": jnp.ones((4, 8)), "b": jnp.ones(8)}
    plan = ft.plan(tree, {"a": P("data"), "b": ft.on_host(P("model"))}, mesh)
    assert plan.shardings == {
        "a": NamedSharding(mesh, P("data", None)), "b": NamedSharding(mesh, P("model"), memory_kind="pinned_host"),
    }  # fmt: skip
    placed = jax.device_put(tree, plan.shardings)
    assert placed["b"].sharding.memory_kind == "pinned_host"
    with raises(
        "made for the sizes (data=2, model=4) only, without devices: make a plan with a `Mesh`"
    ):
        _ = ft.plan(tree, P(), SIZES).shardings


# What is wrong


def test_check_collects_or_raises() -> None:
    tree = {"a": jnp.ones((3, 8)), "b": jnp.ones(4), "c": jnp.ones(5)}
    layout = {"a": P("data", "x"), "b": P("data"), "c": P("data", "data")}
    plan = ft.plan(tree, layout, SIZES, check=False)
    assert [(str(p.path), p.what) for p in plan.problems] == [("a", "f32[3, 8]")] * 2 + [
        ("c", "f32[5]")
    ] * 2
    assert plan["c"].local_shape == (3,)  # the largest part
    assert "PROBLEM a: dimension 0 has size 3;" in str(plan)
    with pytest.raises(ft.ShardingError) as caught:
        _ = ft.plan(tree, layout, MESH, check=False).shardings
    assert caught.value.problems == plan.problems


def test_one_array_at_two_paths() -> None:
    """`tests/layout/test_refused.py` has what is wrong with it."""
    shared = jnp.ones((4, 8))
    tree = {"a": shared, "b": [shared]}
    plan = ft.plan(tree, {"a": P("data"), "b": P("data", None)}, SIZES)
    assert plan["a"].spec == plan["b.0"].spec == P("data", None)
    struct = jax.ShapeDtypeStruct((4,), jnp.float32)  # one description of two arrays
    assert ft.plan([struct, struct], [P("data"), P()], SIZES)["0"].spec == P("data")
    number = np.float32(1)  # a value, and no array in some memory
    moved = ft.plan([number, number], [P(), ft.on_host(P())], SIZES)
    assert moved["1"].memory_kind == "pinned_host"
    for layout in ([P("data"), None], [None, P("data")]):  # `None` asks for nothing
        (problem,) = ft.plan([shared, shared], layout, SIZES, check=False).problems
        assert problem.why == "no layout was given for this array (`None`)"


# The mesh


def test_the_current_mesh(mesh: Mesh) -> None:
    with jax.set_mesh(mesh):
        plan = ft.plan(mlp(), RULES)
    assert plan == ft.plan(mlp(), RULES, mesh) and plan.mesh == mesh


def test_layouts_that_bring_two_meshes(mesh: Mesh) -> None:
    other = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    tree = {"a": jnp.ones(8), "b": jnp.ones(8)}
    layout = {"a": NamedSharding(mesh, P("data")), "b": NamedSharding(other, P("data"))}
    with raises(
        "for mesh (data=8), but the tree is laid out on mesh (data=2", error=ft.ShardingError
    ):
        ft.plan(tree, layout)
    assert ft.plan(tree, {"a": layout["a"], "b": P()}).mesh == mesh
    with jax.set_mesh(mesh), pytest.raises(ft.ShardingError, match="use the same mesh"):
        ft.plan(tree, {"a": P(), "b": layout["b"]}, mesh)


# As a layout


def test_a_plan_is_a_layout(mesh: Mesh) -> None:
    plan = ft.plan(mlp(), ft.on_host(RULES), mesh)
    again = ft.plan(mlp(), plan)
    assert again == plan and again.mesh == mesh and again["up"].memory_kind == "pinned_host"
    assert ft.plan({"x": mlp()}, {"x": plan})["x.up"].spec == plan["up"].spec
    assert ft.plan(mlp(), ft.StateSharding({"up": plan, ...: P()}))["up"].spec == plan["up"].spec
    # the sizes are those of the tree that it is handed on to, and are checked
    with pytest.raises(ft.ShardingError, match=r'dimension 1 has size 12|"hidden" has size 12'):
        ft.plan(mlp(6, 12), plan)
    with pytest.raises(ft.ShardingError, match="use the same mesh"):
        ft.plan(mlp(), plan, {"data": 8})
    # sizes alone are no mesh: such a plan goes anywhere its specs do
    by_sizes = ft.plan(mlp(), RULES, SIZES)
    assert ft.plan(mlp(), by_sizes, {"data": 1, "model": 2})["up"].local_shape == (6, 8)


# As a value


def test_equal_by_value(mesh: Mesh) -> None:
    plan = ft.plan(mlp(), RULES, mesh)
    assert plan == ft.plan(mlp(), RULES, mesh) and hash(plan) == hash(ft.plan(mlp(), RULES, mesh))
    others = [
        (mlp(), RULES, SIZES),
        (mlp(), P(), mesh),
        (mlp(12), RULES, mesh),
        ([mlp()], RULES, mesh),
    ]
    assert all(plan != ft.plan(*other) for other in others) and plan != "a plan"
    with pytest.raises(AttributeError, match="cannot assign"):
        plan.rows = ()
    assert repr(plan) == "<Plan of 4 arrays on mesh (data=2, model=4)>"


def test_it_lets_the_arrays_go_and_can_be_copied() -> None:
    arrays = [jnp.ones((4, 8)), jnp.ones(4)]
    alive = list(map(weakref.ref, arrays))
    plan = ft.plan({"w": arrays[0], "b": [arrays[1]]}, P("data"), SIZES)
    assert plan.specs["w"] == P("data", None)  # builds what it remembers of the tree
    del arrays
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
    for again in (copy.copy(plan), copy.deepcopy(plan)):
        assert again == plan and again.specs == plan.specs


def test_random_keys_in_json():
    plan = ft.plan({"key": jax.random.key(0, impl="unsafe_rbg")}, P(), {"data": 2})
    read = ft.Plan.from_json(plan.to_json())
    assert read["key"] == plan["key"]
    assert read == plan == ft.Plan.from_json(read.to_json())


def test_a_plan_for_devices_is_not_that_of_its_json():
    """JSON has the sizes of a mesh and not its devices, and a layout with a mesh is for that one."""
    plan = ft.plan({"w": jnp.ones(8)}, P("data"), ft.make_mesh(data=8))
    read = ft.Plan.from_json(plan.to_json())
    assert read != plan and read.rows == plan.rows and read.mesh is None


def test_a_plan_of_the_model_alone_is_not_for_moments():
    """Adafactor keeps the rows and columns of a matrix. They follow its dimensions."""
    model = {"w": jnp.ones((8, 16))}
    ts = ft.TrainState.create(model, optax.adafactor(1e-3, min_dim_size_to_factor=2))
    found = ft.plan(ts, ft.plan(model, P("data", "model"), SIZES), SIZES)
    assert {row.spec for row in found if row.shape == (8,)} == {P("data")}
    assert {row.spec for row in found if row.shape == (16,)} == {P("model")}


def test_a_moment_on_another_mesh_follows_its_parameter(mesh: Mesh):
    ts = ft.TrainState.create({"w": jnp.ones(8)}, optax.adam(1e-3), layout=P("data"), mesh=mesh)
    elsewhere = ft.shard(jnp.ones(8), P("x"), ft.make_mesh(x=8))
    moved = eqx.tree_at(lambda ts: ts.opt_state[0].mu["w"], ts, elsewhere)
    moment = ft.plan(ts, ft.plan(moved), mesh)["opt_state.0.mu.w"]
    assert moment.spec == P("data") and moment.reason == "follows model.w"


def test_a_plan_of_modules_is_pickled_without_its_tree() -> None:
    model = eqx.nn.Linear(4, 8, key=jax.random.key(0))
    plan = ft.plan(model, P("data"), {"data": 2})
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan and again["weight"] == plan["weight"]
    assert ft.plan(model, again, {"data": 2}).specs.weight == plan.specs.weight
    with pytest.raises(ft.ShardingError, match="use it as a layout"):
        _ = again.specs
