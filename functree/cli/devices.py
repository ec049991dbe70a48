"""`--devices` and `--target` ─► the devices that JAX has, before it makes them."""

import math
import os
import re
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from functree.cli.failure import Failure
from functree.devices.make_mesh import make_mesh
from functree.devices.targets import Target
from functree.errors import ShardingError, count
from functree.explorer.candidate import mesh_text

_FLAG = "--xla_force_host_platform_device_count"


def prepare(devices: int | None, *, only_compile: bool) -> None:
    """Ask JAX for simulated devices, or for none but the CPU.

    Args:
        devices: the number of simulated devices; None if they were not asked for.
        only_compile: whether no device of this machine is needed, so that accelerators are left to
            others.

    Raises:
        Failure: JAX has its devices already, and they are fewer.
    """
    if devices is not None:
        # JAX reads it when it makes its devices, and not when it is imported.
        others = re.sub(rf"{_FLAG}=\S+", "", os.environ.get("XLA_FLAGS", ""))
        os.environ["XLA_FLAGS"] = f"{others} {_FLAG}={devices}".strip()
        jax.config.update("jax_platforms", "cpu")
        if len(jax.devices()) < devices:
            raise Failure(
                f"--devices {devices}: JAX has made its devices already, and there are "
                f"{len(jax.devices())}"
            )
    elif only_compile and not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")


def mesh_of(sizes: Mapping[str, int], target: str | None, devices: int | None) -> Mesh:
    """The mesh of these sizes.

    Args:
        sizes: the sizes of the mesh axes.
        target: `--target`.
        devices: `--devices`.

    Raises:
        Failure: it does not fit the target, or there are too few devices.
    """
    named: dict[str, Any] = dict(sizes)
    check_devices(sizes, None if target is None else Target.read(target), devices)
    try:
        return make_mesh(target=target, **named)
    except ShardingError as error:  # about the names of its axes, or the compiler of the target
        raise Failure(str(error).replace("target=", "--target ")) from error


def check_devices(
    mesh: Mapping[str, int] | int, target: Target | None, devices: int | None
) -> None:
    """Raise Failure for the sizes of a mesh, or a number of devices, that are not as many as those
    of the target, or more than there are."""
    if isinstance(mesh, Mapping):
        needed = math.prod(mesh.values())
        asked = f"--mesh {mesh_text(mesh)} is {count(needed, 'device')}"
    else:
        needed, asked = mesh, f"--mesh {mesh} is {count(mesh, 'device')}"
    if target is not None:
        if needed != target.size:
            raise Failure(f"{asked}, and --target {target.text} has {target.size}")
        return
    have = len(jax.devices())
    if needed <= have:
        return
    if devices is not None:
        raise Failure(f"{asked}, and --devices {devices}: write `--devices {needed}`")
    add = f"add `--devices {needed}` to simulate them, or `--target tpu:v5e:2x4`"
    raise Failure(f"{asked}, and there {'is' if have == 1 else 'are'} {have}: {add}")
