"""A plan without a layout: how live arrays lie."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array

import functree as ft
from tests.lib.checks import raises
from tests.lib.meshes import mesh_of
from tests.lib.trees import mlp

P = PartitionSpec


def told(row: ft.Row) -> tuple[Any, ...]:
    return row.spec, row.reason, row.local_shape, row.bytes_per_device, row.copies, row.memory_kind


def test_arrays_on_several_shardings(mesh: Mesh) -> None:
    x = np.ones((4, 8), np.float32)
    put = jax.device_put
    tree = {
        "sharded": put(x, NamedSharding(mesh, P("data"))),
        "both": put(x, NamedSharding(mesh, P(None, ("data", "model")))),
        "whole": put(x, NamedSharding(mesh, P())),
        "host": put(x, NamedSharding(mesh, P("data"), memory_kind="pinned_host")),
        "single": put(x, SingleDeviceSharding(jax.devices()[3])),
        "uncommitted": jnp.asarray(x),
        "numpy": x,
        "abstract": jax.ShapeDtypeStruct((4, 8), jnp.float32),
        "born": jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=NamedSharding(mesh, P("model"))),
        "static": 3,
    }
    plan = ft.plan(tree)
    assert {str(row.path): told(row) for row in plan} == {
        "sharded": (P("data", None), "as it is sharded now", (2, 8), 64, 4, None),
        "both": (P(None, ("data", "model")), "as it is sharded now", (4, 1), 16, 1, None),
        "whole": (P(None, None), "as it is sharded now", (4, 8), 128, 8, None),
        "host": (P("data", None), "as it is sharded now", (2, 8), 64, 4, "pinned_host"),
        "single": (None, "committed to the device cpu:3", (4, 8), 128, 1, None),
        "uncommitted": (None, "uncommitted, on the device cpu:0", (4, 8), 128, 1, None),
        "numpy": (None, "a NumPy array in host memory", (4, 8), 128, 1, None),
        "abstract": (None, "abstract, with no sharding", (4, 8), 128, 1, None),
        "born": (P("model", None), "as it is sharded now", (1, 8), 32, 2, None),
    }
    assert plan.mesh == mesh and plan.problems == () and plan.total_bytes == 9 * 128
    assert plan.specs["sharded"] == P("data", None) and plan.specs["single"] is None
    assert "committed to the device cpu:3" in str(plan)
    with pytest.raises(ft.ShardingError, match="abstract has no PartitionSpec: abstract, with no"):
        _ = plan.shardings


def test_intent_and_fact() -> None:
    mesh = ft.make_mesh(data=2, model=4)
    model = mlp()
    intent = ft.plan(model, ft.AxisRules({"embed": "data", "hidden": "model"}), mesh)
    fact = ft.plan(ft.shard(model, intent))
    assert [(r.path, r.spec, r.local_shape, r.axes) for r in fact] == [
        (r.path, r.spec, r.local_shape, r.axes) for r in intent
    ]
    assert fact.shardings.up == intent.shardings.up
    assert ft.plan(model, fact)["up"].spec == P("data", "model")  # handed on
    assert ft.plan(model)["up"].spec is None and ft.plan(model).mesh is None


@pytest.mark.parametrize("explicit", [True, False])
def test_in_a_trace(explicit: bool) -> None:
    mesh, rows = mesh_of(explicit), []

    def f(x: Array) -> Array:
        rows.append(ft.plan(x)[()])
        return x

    x = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        jax.jit(f)(x)
        jax.shard_map(f, in_specs=P("data"), out_specs=P("data"))(x)
    outside, inside = map(told, rows)
    if explicit:
        assert outside == (P("data", None), "from its type", (2, 8), 64, 4, None)
    else:
        assert outside[:2] == (None, NOT_EXPLICIT)
    assert inside == (None, NOT_EXPLICIT, (2, 8), 64, 1, None)


NOT_EXPLICIT = (
    "traced, and not all mesh axes are Explicit, so its type does not contain its whole sharding"
)


def test_a_mesh_that_the_arrays_are_not_on(mesh: Mesh) -> None:
    tree = {"x": jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, P("data"))), "y": jnp.ones(2)}
    for same in (None, mesh, mesh.abstract_mesh, {"data": 2, "model": 4}):
        assert ft.plan(tree, mesh=same)["x"].spec == P("data", None)
    said = ("but `mesh` is (foo=2): leave `mesh` out", "pass a layout, too")
    with raises("the arrays are on the mesh (data=2, model=4), ", *said, error=ft.ShardingError):
        ft.plan(tree, mesh={"foo": 2})
    swapped = ft.make_mesh(data=2, model=4, devices=jax.devices()[::-1])
    with raises("the arrays are on the mesh (data=2, model=4) with different devices, but"):
        ft.plan(tree, mesh=swapped)
    assert dict(ft.plan({"y": jnp.ones(2)}, mesh={"foo": 2}).sizes) == {
        "foo": 2
    }  # it is on no mesh


def on_mesh(devices: Any, axis: str) -> Any:
    mesh = Mesh(np.array(devices), (axis,), axis_types=(AxisType.Auto,))
    return jax.device_put(np.ones((4, 8), np.float32), NamedSharding(mesh, P(axis)))


def test_arrays_on_several_meshes_are_told_apart() -> None:
    devices = jax.devices()
    tree = {
        "first": on_mesh(devices[:4], "data"),
        "same": on_mesh(devices[:4], "data"),
        "other axes": on_mesh(devices[4:6], "model"),
        "other devices": on_mesh(devices[4:], "data"),
        "other order": on_mesh(devices[3::-1], "data"),
    }
    plan = ft.plan(tree)
    assert plan.mesh == tree["first"].sharding.mesh
    # The shardings are those of the arrays, each on its own mesh.
    assert all(plan.shardings[key].is_equivalent_to(x.sharding, 2) for key, x in tree.items())
    now = "as it is sharded now"
    told = {row.path[0]: (row.mesh, row.reason) for row in plan}
    assert told["first"] == told["same"] == (None, now)
    for key, text in (
        ("other axes", "(model=2) of cpu:4, cpu:5"),
        ("other devices", "(data=4) of cpu:4, cpu:5, cpu:6, cpu:7"),
        ("other order", "(data=4) of cpu:3, cpu:2, cpu:1, cpu:0"),
    ):
        assert told[key] == (tree[key].sharding.mesh, f"{now}, on the mesh {text}")
    assert "on the mesh (model=2) of cpu:4, cpu:5" in str(plan)
    assert "replicated" not in plan.summary(), "each is sharded over the mesh that it is on"
    with raises(
        '"other axes"', "the plan places this leaf on a different mesh", "make a plan for each mesh"
    ):
        ft.plan(tree, plan)
