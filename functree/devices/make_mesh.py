"""Names and sizes of mesh axes ─► a mesh of devices."""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from functree.argument_checks import is_size, shown
from functree.devices.meshes import Device
from functree.devices.targets import EXAMPLES, Target, target_devices
from functree.errors import ShardingError, did_you_mean


def make_mesh(
    *,
    explicit: bool = False,
    devices: Sequence[Device] | None = None,
    dcn: Mapping[str, int] | None = None,
    target: str | None = None,
    **sizes: int,
) -> Mesh:
    """A mesh of devices with named mesh axes.

    Args:
        explicit: whether the mesh axes are Explicit, so that shardings are part of the types of
            arrays. By default they are Auto (`jax.make_mesh` makes Explicit ones by default).
        devices: the devices; by default all devices.
        dcn: the factor of a mesh axis that crosses slices: `data=8, dcn={"data": 4}` is 4 slices of
            2 devices.
        target: an accelerator that is not there, for which programs are compiled and not run:
            `"tpu:v5e:16x16"` is a slice of 256 TPUs (extra `functree[tpu]`), `"cuda:h100:8"` 8 GPUs
            (extra `functree[cuda]`).
        **sizes: the sizes of the mesh axes by name, outermost first. Where they do not fit the axes
            of the torus of a TPU slice, a mesh axis may be a part of one.

    Raises:
        ShardingError: a size is not a positive integer, or the sizes do not fit the devices;
            `target` names no target, or its compiler is not installed.

    Examples:
        >>> dict(ft.make_mesh(data=2, model=4).shape)
        {'data': 2, 'model': 4}
    """
    _check_options(explicit, devices, dcn, target)
    _check_sizes(sizes)
    # NumPy integers count as integers: `np.prod` returns one.
    sizes = {name: int(size) for name, size in sizes.items()}
    found = _first_devices(sizes, devices, target)
    types = (AxisType.Explicit if explicit else AxisType.Auto,) * len(sizes)
    names, shape = tuple(sizes), tuple(sizes.values())
    if dcn:
        return Mesh(_grid(sizes, found, dcn), names, axis_types=types)
    try:
        return jax.make_mesh(shape, names, axis_types=types, devices=found)
    except NotImplementedError:
        # No order in which each mesh axis runs along whole axes of the torus of a TPU slice; so
        # some are split.
        grid = mesh_utils.create_device_mesh(shape, devices=found, allow_split_physical_axes=True)
        return Mesh(grid, names, axis_types=types)


def _check_sizes(sizes: Mapping[str, object]) -> None:
    if not sizes:
        raise ShardingError("a mesh needs at least one mesh axis: `ft.make_mesh(data=8)`")
    for name, size in sizes.items():
        if not is_size(size):
            raise ShardingError(f"mesh axis {name}={size!r}: a size must be a positive integer")


def _first_devices(
    sizes: Mapping[str, int], devices: Sequence[Device] | None, target: str | None
) -> list[Device]:
    """As many devices as a mesh of these sizes has: the first ones of those that are given."""
    needed = math.prod(sizes.values())
    requested = " × ".join(f"{name}={size}" for name, size in sizes.items())
    if target is not None:
        named = Target.read(target)
        # A part of a slice that is not there would be another slice: its name says what is meant.
        # The compiler is asked only then: for a number that was meant otherwise, it may not answer.
        if needed != named.size:
            raise ShardingError(
                f"{requested} is {needed} devices, but target={shown(target)} has {named.size}"
            )
        return list(target_devices(named))
    if devices is None:
        found = jax.devices()
    else:
        # Those of another mesh, `mesh.devices`, are an array of its shape.
        found = list(np.ravel(np.asarray(devices, dtype=object)))
    if needed > len(found):
        verb = "is" if len(found) == 1 else "are"
        flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
        raise ShardingError(
            f"{requested} needs {needed} devices, but there {verb} {len(found)}; "
            f"on a CPU, set {flag} before jax is imported"
        )
    return found[:needed]


def _check_options(explicit: object, devices: object, dcn: object, target: object) -> None:
    """Raise for an option with a value of the wrong type: `devices=8` is meant as a mesh axis."""
    for name, given, fits in (
        ("explicit", explicit, isinstance(explicit, bool)),
        ("devices", devices, devices is None or isinstance(devices, Sequence | np.ndarray)),
        ("dcn", dcn, dcn is None or isinstance(dcn, Mapping)),
        ("target", target, target is None or isinstance(target, str)),
    ):
        if not fits:
            remedy = f"; write {EXAMPLES}" if name == "target" else ""
            raise ShardingError(
                f"make_mesh({name}={given!r}): `{name}` is an option, so it cannot name a mesh axis"
                f"{remedy}"
            )
    if devices is not None and target is not None:
        raise ShardingError(
            "make_mesh takes `devices` or `target`, which has devices of its own, and not both"
        )


def _grid(
    sizes: Mapping[str, int], devices: Sequence[Device], dcn: Mapping[str, int]
) -> np.ndarray:
    """The devices of several slices, where only the `dcn` factor of an axis crosses slices."""
    for name, size in dcn.items():
        if name not in sizes:
            raise ShardingError(
                f"dcn names `{name}`, but the mesh has no such mesh axis{did_you_mean(name, sizes)}"
            )
        if not is_size(size) or sizes[name] % size:
            raise ShardingError(f"dcn={{{name!r}: {size!r}}} does not divide {name}={sizes[name]}")
    # Only devices of several TPU slices have different values of `slice_index`; elsewhere the
    # devices of a process are a slice.
    slices = {getattr(device, "slice_index", 0) for device in devices}
    by_slice = len(slices) > 1
    if not by_slice:
        slices = {device.process_index for device in devices}
    outer = [dcn.get(name, 1) for name in sizes]
    wanted = math.prod(outer)
    if wanted != len(slices):
        raise ShardingError(
            f"dcn={dict(dcn)} is for {wanted} slices, but the devices are on {len(slices)}"
        )
    inner = [size // over for size, over in zip(sizes.values(), outer, strict=True)]
    return mesh_utils.create_hybrid_device_mesh(
        inner, outer, devices=devices, process_is_granule=not by_slice
    )
