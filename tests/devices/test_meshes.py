"""Whatever stands for a mesh ─► its sizes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

import functree as ft
from functree.devices.meshes import (
    MeshView,
    agreed_mesh,
    current_mesh,
    mesh_view,
    traced_under,
    without_devices,
)

P = PartitionSpec
AUTO = (AxisType.Auto,) * 2
EXPLICIT = (AxisType.Explicit,) * 2
DEVICES = np.array(jax.devices())


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


# The mesh of a layout

MESH = Mesh(DEVICES.reshape(2, 4), ("data", "model"), axis_types=AUTO)
OTHER = Mesh(DEVICES[::-1].reshape(2, 4), ("data", "model"), axis_types=AUTO)
ABSTRACT = AbstractMesh((2, 4), ("data", "model"), axis_types=AUTO)
LARGER = AbstractMesh((4, 4), ("data", "model"), axis_types=AUTO)
SIZES = {"data": 2, "model": 4}

# The mesh that was given, those of the layouts ─► the mesh on which they agree.
AGREED: dict[str, tuple[Any, list[Any], Any]] = {
    "given": (MESH, [], MESH),
    "of a layout": (None, [None, MESH, None], MESH),
    "the first of the layouts": (None, [ABSTRACT, MESH], ABSTRACT),
    "the same": (MESH, [MESH, None, MESH], MESH),
    "given, and not that of a layout": (ABSTRACT, [MESH], ABSTRACT),
    "given with devices": (MESH, [ABSTRACT], MESH),
    "sizes": (SIZES, [MESH, ABSTRACT, OTHER], None),
    "sizes in another order": ({"model": 4, "data": 2}, [MESH], None),
}


@pytest.mark.parametrize("case", AGREED)
def test_the_mesh_on_which_all_agree(case: str) -> None:
    given, own, expected = AGREED[case]
    view = agreed_mesh(given, own)
    assert view.mesh is expected and dict(view.sizes) == SIZES


DISAGREE: dict[str, tuple[Any, list[Any], str]] = {
    "another size": (
        MESH,
        [MESH, LARGER],
        "(data=4, model=4), but the tree is laid out on (data=2",
    ),
    "another size than the first's": (
        None,
        [LARGER, None, MESH],
        "the mesh (data=2, model=4), but",
    ),
    "fewer axes": ({"data": 2}, [MESH], "(data=2, model=4), but the tree is laid out on (data=2)"),
    "other devices": (MESH, [OTHER], "the mesh (data=2, model=4), of other devices, but the tree"),
    "other devices than the first's": (None, [MESH, ABSTRACT, OTHER], "of other devices"),
}


@pytest.mark.parametrize("case", DISAGREE)
def test_meshes_that_do_not_agree(case: str) -> None:
    given, own, fragment = DISAGREE[case]
    with pytest.raises(ft.ShardingError) as error:
        agreed_mesh(given, own)
    assert str(error.value).startswith("the layout is for the mesh ")
    assert fragment in str(error.value) and str(error.value).endswith(": use one mesh")
    if case == "another size":
        assert "devices" not in str(error.value)


def test_no_mesh_of_a_layout_either() -> None:
    with pytest.raises(ft.ShardingError, match="there is no mesh: pass `mesh=`"):
        agreed_mesh(None, [None])


def meshes_of_a_trace(mesh: Any, enter: Any) -> list[Any]:
    """What the current mesh is in a trace under a mesh, and in a function that is entered there."""
    seen: list[Any] = []

    def f(x: jax.Array) -> jax.Array:
        seen.append(current_mesh())
        return enter(x, lambda: seen.append(current_mesh()))

    with traced_under(mesh):
        jax.jit(f)(np.ones((8, 8), np.float32))
    return seen


def test_in_a_trace_whose_devices_are_known() -> None:
    outside, inside = meshes_of_a_trace(MESH, lambda x, note: note() or x)
    assert outside is MESH and inside is MESH
    outside, inside = meshes_of_a_trace(ABSTRACT, lambda x, note: note() or x)
    assert outside == inside == ABSTRACT


def test_other_types_of_axes_have_the_same_devices() -> None:
    def enter(x: jax.Array, note: Any) -> jax.Array:
        def body(x: jax.Array) -> jax.Array:
            note()
            return x

        return jax.sharding.explicit_axes(body, axes=("data", "model"), in_sharding=(P("data"),))(x)

    outside, inside = meshes_of_a_trace(MESH, enter)
    assert outside is MESH
    assert isinstance(inside, Mesh) and inside.axis_types == EXPLICIT
    assert (inside.devices == MESH.devices).all() and inside.axis_names == MESH.axis_names


def test_another_abstract_mesh_has_no_devices() -> None:
    other = AbstractMesh((8,), ("z",), axis_types=AUTO[:1])

    def enter(x: jax.Array, note: Any) -> jax.Array:
        with jax.sharding.use_abstract_mesh(other):
            note()
        return x

    outside, inside = meshes_of_a_trace(MESH, enter)
    assert outside is MESH and inside == other and not isinstance(inside, Mesh)


def test_meshes_on_which_nothing_can_run() -> None:
    assert without_devices(MESH) is None and without_devices(OTHER) is None
    assert without_devices(ABSTRACT) == (
        "(data=2, model=4) has no devices: pass `mesh=`, or enter `with jax.set_mesh(mesh):` "
        "with a `Mesh`"
    )


def test_integers_of_numpy_are_integers():
    count = np.prod([2, 4])
    assert ft.make_mesh(data=count).shape == ft.make_mesh(data=8).shape
    plan = ft.plan({"w": jnp.ones((16, 8))}, ft.P("data"), {"data": count})
    assert plan == ft.plan({"w": jnp.ones((16, 8))}, ft.P("data"), {"data": 8})
    assert plan.to_json()
    assert ft.FSDP("data", min_size=count) == ft.FSDP("data", min_size=8)
    assert ft.has_ndim(np.int64(2)) == ft.has_ndim(2)
    assert repr(ft.FSDP("data", min_size=count)) == "FSDP('data', min_size=8)"
    for flag in (True, np.bool_(True)):
        with pytest.raises(ft.FunctreeError):
            ft.make_mesh(data=flag)
