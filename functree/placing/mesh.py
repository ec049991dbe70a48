"""Names and sizes of mesh axes ─► a mesh of devices."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from functree.compiled.targets.target import target_devices
from functree.errors import ShardingError, did_you_mean


def make_mesh(
    *,
    explicit: bool = False,
    devices: Sequence[Any] | None = None,
    dcn: Mapping[str, int] | None = None,
    target: str | None = None,
    **sizes: int,
) -> Mesh:
    """A mesh of devices with named mesh axes.

    Args:
        explicit: whether the mesh axes are Explicit, so that shardings are part of the types of arrays. By default they
            are Auto (`jax.make_mesh` makes Explicit ones by default).
        devices: the devices; by default all devices.
        dcn: the factor of a mesh axis that crosses slices: `data=8, dcn={"data": 4}` is 4 slices of 2 devices.
        target: an accelerator that is not there, for which programs are compiled and not run: `"tpu:v5e:16x16"` is a
            slice of 256 TPUs (extra `functree[tpu]`), `"cuda:h100:8"` 8 GPUs (extra `functree[cuda]`).
        **sizes: the sizes of the mesh axes by name, outermost first. Where they do not fit the axes of the torus of a
            TPU slice, a mesh axis may be a part of one.

    Raises:
        ShardingError: a size is not a positive integer, or the sizes do not fit the devices; `target` names no target,
            or its compiler is not installed.

    Examples:
        >>> dict(ft.make_mesh(data=2, model=4).shape)
        {'data': 2, 'model': 4}
    """
    _check_options(explicit, devices, dcn, target)
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ShardingError(f"mesh axis {name}={size!r}: a size must be a positive integer")
    if not sizes:
        raise ShardingError("a mesh needs at least one mesh axis: `ft.make_mesh(data=8)`")
    needed = math.prod(sizes.values())
    requested = " × ".join(f"{name}={size}" for name, size in sizes.items())
    if target is not None:
        devices = target_devices(target)
        if needed != len(devices):
            raise ShardingError(f"{requested} is {needed} devices, but target={target!r} has {len(devices)}")
    found = list(jax.devices() if devices is None else np.ravel(np.asarray(devices, dtype=object)))
    have = len(found)
    if needed > have:
        raise ShardingError(
            f"{requested} needs {needed} devices, but there {'is' if have == 1 else 'are'} {have}; on a CPU, set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={needed} before jax is imported"
        )
    grid = _grid(sizes, found[:needed], dcn) if dcn else None
    types = (AxisType.Explicit if explicit else AxisType.Auto,) * len(sizes)
    if grid is not None:
        return Mesh(grid, tuple(sizes), axis_types=types)
    try:
        return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=found[:needed])
    except NotImplementedError:
        # No order in which each mesh axis runs along whole axes of the torus of a TPU slice; so some are split.
        shape = tuple(sizes.values())
        grid = mesh_utils.create_device_mesh(shape, devices=found[:needed], allow_split_physical_axes=True)
        return Mesh(grid, tuple(sizes), axis_types=types)


def _check_options(explicit: object, devices: object, dcn: object, target: object) -> None:
    """Raise for an option that has a value of the wrong type: `devices=8` is meant as a size of a mesh axis."""
    for name, given, fits in (
        ("explicit", explicit, isinstance(explicit, bool)),
        ("devices", devices, devices is None or isinstance(devices, Sequence | np.ndarray)),
        ("dcn", dcn, dcn is None or isinstance(dcn, Mapping)),
        ("target", target, target is None or isinstance(target, str)),
    ):
        if not fits:
            raise ShardingError(f"make_mesh({name}={given!r}): `{name}` is an option, so it cannot name a mesh axis")
    if devices is not None and target is not None:
        raise ShardingError("make_mesh takes `devices` or `target`, which has devices of its own, and not both")


def _grid(sizes: Mapping[str, int], devices: Sequence[Any], dcn: Mapping[str, int]) -> np.ndarray[Any, Any]:
    """The devices of several slices, arranged so that only the `dcn` factor of a mesh axis crosses slices."""
    for name, size in dcn.items():
        if name not in sizes:
            raise ShardingError(f"dcn names `{name}`, but the mesh has no such mesh axis{did_you_mean(name, sizes)}")
        if type(size) is not int or size < 1 or sizes[name] % size:
            raise ShardingError(f"dcn={{{name!r}: {size!r}}} does not divide {name}={sizes[name]}")
    # Only devices of several TPU slices have different values of `slice_index`; elsewhere a process is a granule.
    by_slice = len({getattr(d, "slice_index", 0) for d in devices}) > 1
    slices = {(d.slice_index if by_slice else d.process_index) for d in devices}
    outer = [dcn.get(name, 1) for name in sizes]
    if math.prod(outer) != len(slices):
        raise ShardingError(f"dcn={dict(dcn)} is for {math.prod(outer)} slices, but the devices are on {len(slices)}")
    inner = [size // over for size, over in zip(sizes.values(), outer, strict=True)]
    return mesh_utils.create_hybrid_device_mesh(inner, outer, devices=devices, process_is_granule=not by_slice)
