"""Whatever stands for a mesh ─► its sizes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

import functree as ft
from functree.devices.meshes import MeshView, current_mesh, mesh_view

P = PartitionSpec
AUTO = (AxisType.Auto,) * 2


def test_a_mesh_an_abstract_one_and_a_dict(mesh: Mesh) -> None:
    abstract = AbstractMesh((2, 4), ("data", "model"), axis_types=AUTO)
    for given, kept in ((mesh, mesh), (abstract, abstract), ({"data": 2, "model": 4}, None)):
        view = mesh_view(given)
        assert dict(view.sizes) == {"data": 2, "model": 4} and view.mesh is kept
        assert view.devices == 8 and str(view) == "(data=2, model=4)"
    assert mesh_view({}).devices == 1 and str(mesh_view({})) == "()"


@pytest.mark.parametrize(
    "bad", [{"data": 0}, {"data": -1}, {"data": 2.0}, {"data": True}, {3: 2}, {"data": None}]
)
def test_a_dict_that_is_no_mesh(bad: dict[Any, Any]) -> None:
    with pytest.raises(
        ft.ShardingError, match="a mesh as a dict has names and positive sizes, not"
    ):
        mesh_view(bad)


@pytest.mark.parametrize("bad", [3, "data", [2, 4], (("data", 2),)])
def test_what_is_no_mesh_at_all(bad: Any) -> None:
    with pytest.raises(
        ft.ShardingError,
        match="is not a mesh: give a `Mesh`, an `AbstractMesh`, or a dict of sizes",
    ):
        mesh_view(bad)


def test_no_mesh_at_all() -> None:
    assert current_mesh() is None
    with pytest.raises(
        ft.ShardingError,
        match=r"there is no mesh: pass `mesh=`, or enter `with jax.set_mesh\(mesh\):`",
    ):
        ft.plan(jnp.ones(4), P())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_current_mesh(kind: AxisType) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"), axis_types=(kind, kind))
    array = np.ones((4, 8), np.float32)
    with jax.set_mesh(mesh):
        assert current_mesh() == mesh
        plan = ft.plan(array, P("data"))
        traced = jax.jit(lambda x: ft.plan(x, P(None, "model")).mesh is not None)(array)
    assert plan.mesh == mesh and plan.shardings.mesh == mesh
    assert bool(traced)


def test_in_a_trace_the_mesh_is_abstract(mesh: Mesh) -> None:
    seen = []

    def f(x: jax.Array) -> jax.Array:
        seen.append(current_mesh())
        return x

    with jax.set_mesh(mesh):
        jax.jit(f)(np.ones(8, np.float32))
    assert len(seen) == 1 and dict(seen[0].shape) == {"data": 2, "model": 4}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_legacy_context_is_an_error(mesh: Mesh) -> None:
    with (
        mesh,
        pytest.raises(
            ft.ShardingError, match=r"`with mesh:`, which is deprecated.*write `with jax.set_mesh"
        ),
    ):
        ft.plan(jnp.ones(4), P())
    with mesh:  # a mesh that was given is as good as ever
        assert ft.plan(jnp.ones(4), P("data"), mesh).specs == P("data")


def test_manual_axes_are_an_error(mesh: Mesh) -> None:
    def body(x: jax.Array) -> jax.Array:
        ft.plan(x, P())
        return x

    with (
        jax.set_mesh(mesh),
        pytest.raises(ft.ShardingError, match=r"\(data, model\) are Manual and shapes are local"),
    ):
        jax.shard_map(body, in_specs=P("data"), out_specs=P("data"))(jnp.ones(8))


def test_a_view_is_what_it_shows() -> None:
    assert str(MeshView({"a": 1})) == "(a=1)"
