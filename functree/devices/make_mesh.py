"""`make_mesh` builds a mesh: names and sizes of mesh axes ─► a mesh of devices."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from functree.argument_checks import TEXT, Flag, Takes, checked, is_size, shown
from functree.devices.meshes import Device
from functree.devices.targets import Target, target_devices
from functree.errors import ShardingError, count, did_you_mean

_DEVICES = Takes("a sequence of devices", lambda value: isinstance(value, Sequence | np.ndarray))
_FACTORS = Takes("a dict of factors", lambda value: isinstance(value, Mapping))


@checked("make_mesh: invalid options (the name of an option cannot name a mesh axis)")
def make_mesh(
    *,
    explicit: Flag = False,
    devices: Annotated[Sequence[Device], _DEVICES] | None = None,
    dcn: Annotated[Mapping[str, int], _FACTORS] | None = None,
    target: Annotated[str, TEXT] | None = None,
    **sizes: int,
) -> Mesh:
    """Build a mesh of devices with named mesh axes.

    Args:
        explicit: whether the mesh axes are Explicit, so that shardings are part of array types. By
            default they are Auto. The default of `jax.make_mesh` is Explicit.
        devices: the available devices, the first of which are used; by default all devices.
        dcn: the factors of the mesh axes' sizes that cross slices, by name. A factor is 1 by
            default. For example, `data=8, dcn={"data": 4}` means 4 slices of 2 devices.
        target: the name of an accelerator that you don't have, for compiling programs only.
            `"tpu:v5e:16x16"` is a slice of 256 TPUs (extra `functree[tpu]`), and `"cuda:h100:8"`
            is 8 GPUs (extra `functree[cuda]`).
        **sizes: the sizes of the mesh axes by name, outermost first. If the sizes do not fit the
            dimensions of a TPU slice's torus, a mesh axis may cover only part of a dimension.

    Raises:
        ShardingError: if no mesh axis is given.
        ShardingError: if a size is not a positive integer.
        ShardingError: if the sizes do not fit the devices.
        ShardingError: if `dcn` does not fit the mesh axes or the slices.
        ShardingError: if both `devices` and `target` are passed.
        ShardingError: if `target` is invalid.
        ShardingError: if the compiler for `target` is not installed, or cannot be loaded.
        FunctreeError: if an option has a value of the wrong type.

    Examples:
        >>> dict(ft.make_mesh(data=2, model=4).shape)
        {'data': 2, 'model': 4}
    """
    if devices is not None and target is not None:
        raise ShardingError(
            "make_mesh: pass `devices` or `target`, not both, since a target has its own devices"
        )
    if not sizes:
        raise ShardingError("make_mesh: pass at least one mesh axis, as in `ft.make_mesh(data=8)`")
    for name, size in sizes.items():
        if not is_size(size):
            raise ShardingError(f"make_mesh({name}={size!r}): a size must be a positive integer")
    # NumPy integers are accepted, since `np.prod` returns one.
    sizes = {name: int(size) for name, size in sizes.items()}
    chosen = _first_devices(sizes, devices, target)
    types = (AxisType.Explicit if explicit else AxisType.Auto,) * len(sizes)
    names, shape = tuple(sizes), tuple(sizes.values())
    if dcn:
        return Mesh(_grid(sizes, chosen, dcn), names, axis_types=types)
    try:
        return jax.make_mesh(shape, names, axis_types=types, devices=chosen)
    except NotImplementedError:
        # JAX cannot assign whole dimensions of the TPU slice's torus to each mesh axis, so some
        # dimensions are split.
        grid = mesh_utils.create_device_mesh(shape, devices=chosen, allow_split_physical_axes=True)
        return Mesh(grid, names, axis_types=types)


def _first_devices(
    sizes: Mapping[str, int], devices: Sequence[Device] | None, target: str | None
) -> list[Device]:
    """Return as many of the first devices as a mesh of these sizes needs."""
    needed = math.prod(sizes.values())
    requested = " × ".join(f"{name}={size}" for name, size in sizes.items())
    if target is not None:
        named = Target.read(target)
        # A mesh on part of a target is refused, since the smaller slice has its own name. This
        # check runs before the compiler, which may hang on a mistyped large number.
        if needed != named.size:
            raise ShardingError(
                f"make_mesh: {requested} needs {count(needed, 'device')}, but "
                f"target={shown(target)} has {named.size}: use sizes whose product "
                f"is {named.size}, or a different target"
            )
        return list(target_devices(named))
    if devices is None:
        available = jax.devices()
    else:
        # `devices` may be another mesh's `devices`, an array with the shape of that mesh.
        available = list(np.ravel(np.asarray(devices, dtype=object)))
    if needed > len(available):
        remedy = "pass more devices, or use smaller sizes"
        if devices is None:
            flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
            remedy = (
                f"use smaller sizes, pass `target=`, or on a CPU, set {flag} before importing jax"
            )
        verb = "is" if len(available) == 1 else "are"
        raise ShardingError(
            f"make_mesh: {requested} needs {count(needed, 'device')}, but there {verb} "
            f"{len(available)}: {remedy}"
        )
    return available[:needed]


def _grid(
    sizes: Mapping[str, int], devices: Sequence[Device], dcn: Mapping[str, int]
) -> np.ndarray:
    """Arrange devices so that only the `dcn` factor of a mesh axis crosses slices."""
    for name, size in dcn.items():
        if name not in sizes:
            raise ShardingError(
                f"make_mesh: `dcn` names `{name}`, which is not an axis of the mesh"
                f"{did_you_mean(name, sizes)}"
            )
        if not is_size(size) or sizes[name] % size:
            raise ShardingError(
                f"make_mesh: dcn={{{name!r}: {size!r}}} does not divide {name}={sizes[name]}: "
                f"use a positive integer that divides {sizes[name]}"
            )
    # Only devices of several TPU slices differ in `slice_index`. Otherwise, the devices of each
    # process are treated as a slice.
    slices = {getattr(device, "slice_index", 0) for device in devices}
    by_slice = len(slices) > 1
    if not by_slice:
        slices = {device.process_index for device in devices}
    outer = [dcn.get(name, 1) for name in sizes]
    wanted = math.prod(outer)
    if wanted != len(slices):
        raise ShardingError(
            f"make_mesh: dcn={dict(dcn)} needs {count(wanted, 'slice')}, but the devices are on "
            f"{count(len(slices), 'slice')}: use factors whose product is {len(slices)}"
        )
    inner = [size // over for size, over in zip(sizes.values(), outer, strict=True)]
    return mesh_utils.create_hybrid_device_mesh(
        inner, outer, devices=devices, process_is_granule=not by_slice
    )
