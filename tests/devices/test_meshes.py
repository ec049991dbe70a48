"""Whatever stands for a mesh ─► its sizes."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

import functree as ft
from functree.devices.meshes import (
    agreed_mesh,
    backend_text,
    current_mesh,
    mesh_view,
    traced_under,
    without_devices,
)

P = PartitionSpec
AUTO = (AxisType.Auto,) * 2
DEVICES = np.array(jax.devices())


def test_a_mesh_an_abstract_one_and_a_dict(mesh: Mesh) -> None:
    abstract = AbstractMesh((2, 4), ("data", "model"), axis_types=AUTO)
    for given, kept in ((mesh, mesh), (abstract, abstract), ({"data": 2, "model": 4}, None)):
        view = mesh_view(given)
        assert dict(view.sizes) == {"data": 2, "model": 4} and view.mesh is kept
        assert view.devices == 8 and str(view) == "(data=2, model=4)"
    assert mesh_view({}).devices == 1 and str(mesh_view({})) == "()"


@pytest.mark.parametrize("bad", [{"data": 0}, {"data": 2.0}, {"data": True}, {3: 2}])
def test_a_dict_that_is_no_mesh(bad: dict[Any, Any]) -> None:
    with pytest.raises(
        ft.ShardingError, match="a dict of mesh sizes must map names to positive integers, but"
    ):
        mesh_view(bad)


@pytest.mark.parametrize("bad", [3, (("data", 2),)])
def test_what_is_no_mesh_at_all(bad: Any) -> None:
    with pytest.raises(
        ft.ShardingError,
        match="is not a mesh: pass a `Mesh`, an `AbstractMesh`, or a dict of sizes",
    ):
        mesh_view(bad)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_legacy_context_is_an_error(mesh: Mesh) -> None:
    with (
        mesh,
        pytest.raises(
            ft.ShardingError, match=r"`with mesh:` is deprecated.*write `with jax.set_mesh"
        ),
    ):
        ft.plan(jnp.ones(4), P())
    with mesh:  # a mesh that was given is as good as ever
        assert ft.plan(jnp.ones(4), P("data"), mesh).specs == P("data")


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
    "given, and not that of a layout": (ABSTRACT, [MESH], ABSTRACT),
    "given with devices": (MESH, [ABSTRACT], MESH),
    "sizes": (SIZES, [MESH, ABSTRACT, OTHER], None),
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
        "(data=4, model=4), but the tree is laid out on mesh (data=2",
    ),
    "another size than the first's": (
        None,
        [LARGER, None, MESH],
        "mesh (data=2, model=4), but",
    ),
    "fewer axes": (
        {"data": 2},
        [MESH],
        "(data=2, model=4), but the tree is laid out on mesh (data=2)",
    ),
    "other devices": (MESH, [OTHER], "mesh (data=2, model=4) with different devices, but the tree"),
}


@pytest.mark.parametrize("case", DISAGREE)
def test_meshes_that_do_not_agree(case: str) -> None:
    given, own, fragment = DISAGREE[case]
    with pytest.raises(ft.ShardingError) as error:
        agreed_mesh(given, own)
    assert str(error.value).startswith("the layout is for mesh ")
    assert fragment in str(error.value) and str(error.value).endswith(
        ": use the same mesh for both"
    )
    if case == "another size":
        assert "devices" not in str(error.value)


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
        "the mesh (data=2, model=4) has no devices: pass `mesh=`, or enter `with jax.set_mesh(mesh):`"
        ", where `mesh` is a `Mesh`"
    )


def test_integers_of_numpy_are_integers():
    count = np.prod([2, 4])
    assert ft.make_mesh(data=count).shape == ft.make_mesh(data=8).shape
    plan = ft.plan({"w": jnp.ones((16, 8))}, ft.P("data"), {"data": count})
    assert plan == ft.plan({"w": jnp.ones((16, 8))}, ft.P("data"), {"data": 8})
    assert plan.to_json()
    for flag in (True, np.bool_(True)):
        with pytest.raises(ft.FunctreeError):
            ft.make_mesh(data=flag)


@pytest.mark.parametrize(
    ("platform", "kind", "text"),
    [
        ("cpu", "cpu", "cpu"),
        ("tpu", "TPU v4", "tpu v4"),
        ("tpu", "TPU v5 lite", "tpu v5e"),
        ("tpu", "TPU v5", "tpu v5p"),
        ("gpu", "NVIDIA H100 80GB HBM3", "cuda h100"),
        ("cuda", "NVIDIA A100-SXM4-80GB", "cuda a100-sxm4-80gb"),
    ],
)
def test_the_name_of_what_a_program_is_compiled_for(platform: str, kind: str, text: str) -> None:
    assert backend_text(SimpleNamespace(platform=platform, device_kind=kind)) == text
