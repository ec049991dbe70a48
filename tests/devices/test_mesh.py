"""`make_mesh`: sizes, axis types, and what it refuses."""

from types import SimpleNamespace

import jax
import pytest
from jax.sharding import AxisType, Mesh

import functree as ft
from functree.devices.make_mesh import _grid


def test_auto_unless_explicit():
    assert ft.make_mesh(data=2, model=4).axis_types == (AxisType.Auto, AxisType.Auto)
    assert ft.make_mesh(data=8, explicit=True).axis_types == (AxisType.Explicit,)


def test_axes_stand_in_the_order_written():
    mesh = ft.make_mesh(model=4, data=2)
    assert isinstance(mesh, Mesh) and mesh.axis_names == ("model", "data")
    assert dict(mesh.shape) == {"model": 4, "data": 2}


def test_takes_as_many_devices_as_it_needs():
    assert ft.make_mesh(data=2).size == 2
    assert list(ft.make_mesh(data=2, devices=jax.devices()[4:]).devices.flat) == jax.devices()[4:6]


def test_takes_the_devices_of_another_mesh():
    """Which are an array of its shape."""
    other = ft.make_mesh(data=2, model=4)
    mesh = ft.make_mesh(x=8, devices=other.devices)  # pyright: ignore[reportArgumentType]
    assert list(mesh.devices.flat) == list(other.devices.flat) and mesh.axis_names == ("x",)
    half = ft.make_mesh(x=2, devices=other.devices)  # pyright: ignore[reportArgumentType]
    assert list(half.devices.flat) == list(other.devices.flat)[:2]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"data": 4, "model": 4},
            "data=4 × model=4 needs 16 devices, but there are 8.*platform_device_count=16",
        ),
        ({"data": 0}, r"make_mesh\(data=0\): a size must be a positive integer"),
        ({"data": True}, r"make_mesh\(data=True\): a size must be a positive integer"),
        ({}, "at least one mesh axis"),
        (
            {"data": 8, "dcn": {"dta": 2}},
            "`dcn` names `dta`, which is not an axis of the mesh; did you mean `data`",
        ),
        ({"data": 8, "dcn": {"data": 3}}, "does not divide data=8"),
        ({"data": 8, "dcn": {"data": 2}}, "needs 2 slices, but the devices are on 1"),
    ],
)
def test_refuses(sizes, message: str):
    with pytest.raises(ft.ShardingError, match=message):
        ft.make_mesh(**sizes)


def test_refuses_options_of_the_wrong_type():
    message = r"the name of an option cannot name a mesh axis\)\n\n  devices=8"
    with pytest.raises(ft.FunctreeError, match=message) as refused:
        ft.make_mesh(data=2, devices=8, target=8)  # pyright: ignore[reportArgumentType]
    assert len(refused.value.problems) == 2


def test_dcn_crosses_slices_only_on_its_axis():
    """Two slices of four, described to the layout of devices as a TPU's would be."""
    devices = [
        SimpleNamespace(
            id=i, slice_index=i // 4, process_index=i // 4, platform="cpu", device_kind="cpu"
        )
        for i in range(8)
    ]
    grid = _grid({"data": 4, "model": 2}, devices, {"data": 2})
    slices = [[device.slice_index for device in row] for row in grid]
    assert slices == [[0, 0], [0, 0], [1, 1], [1, 1]]
