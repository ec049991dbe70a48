"""`laid_out` uses a layout or `like` to find the sharding of each array that is read."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, Sharding

from functree.devices.meshes import MeshLike, without_devices
from functree.errors import Problem
from functree.labels.filters import Filter
from functree.labels.leaves import Leaf, Leaves, read
from functree.layout.decide import plan_leaves
from functree.layout.decision import refuse
from functree.layout.layout import LayoutTree, read_on_mesh
from functree.processes.agreement import processes_text
from functree.tree.arrays import is_key
from functree.tree.paths import Path


def laid_out(
    like: Any, layout: LayoutTree, mesh: MeshLike, only: Filter | None = None
) -> tuple[Leaves, list[Sharding | None]]:
    """Return the arrays in `like` and their shardings.

    The shardings come from the layout. Without a layout, they come from the arrays in `like`. The
    sharding is None for an array that is uncommitted or has no sharding.

    Args:
        like: the tree.
        layout: its layout, or None.
        mesh: the mesh, or None for the current mesh.
        only: a filter for the arrays that the layout must fit. With a layout, all arrays that the
            filter does not match get the sharding None.

    Raises:
        ShardingError: if the layout does not fit the arrays that `only` matches.
    """
    if layout is None:
        leaves = read(like)
        return leaves, [_own_sharding(leaf.value) for leaf in leaves.leaves]
    leaves, parts, view = read_on_mesh(like, layout, mesh)
    planned = plan_leaves(leaves, parts, view, check=False)
    others: set[Path] = set()
    if only is not None:
        others.update(leaf.path for leaf in leaves.leaves if not only(leaf))
    if problems := [problem for problem in planned.problems if problem.path not in others]:
        raise refuse(problems, planned.view)
    shardings: list[Sharding | None] = []
    for row in planned.rows:
        shardings.append(None if row.path in others else planned.sharding(row))
    return leaves, shardings


def _own_sharding(value: Any) -> Sharding | None:
    """Return an array's sharding, or None if the array is uncommitted or has no sharding."""
    if isinstance(value, Tracer) or not isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return None
    return value.sharding if getattr(value, "committed", True) else None


def misplaced(leaf: Leaf, sharding: Sharding | None) -> Iterator[Problem]:
    """Yield a problem if an array cannot be created with its sharding."""
    value = leaf.value
    if isinstance(value, Tracer):
        yield leaf.problem("is traced in `like`", "read it outside `jit`")
    elif sharding is None and isinstance(value, jax.ShapeDtypeStruct):
        why = "has no sharding in `like`, and there is no layout"
        how = "pass `layout=` and a mesh, or build `like` with them"
        yield leaf.problem(why, f"{how}: `ft.abstract(make, layout, mesh)`")
    elif sharding is None and isinstance(value, np.ndarray | np.generic):
        return
    elif isinstance(sharding, NamedSharding) and (missing := without_devices(sharding.mesh)):
        yield leaf.problem(f"cannot be created: {missing}", "")
    elif (where := partly(sharding)) is not None:
        yield leaf.problem(where, "pass a layout with a mesh of all devices")
    elif not is_enabled(value.dtype):
        yield leaf.problem(not_enabled(value.dtype), ENABLE)


def partly(value: object) -> str | None:
    """Describe which processes have an array's or sharding's devices, or return None if all do."""
    sharding = getattr(value, "sharding", value)
    if jax.process_count() == 1 or not isinstance(sharding, jax.sharding.Sharding):
        return None
    there = sorted({device.process_index for device in sharding.device_set})
    if len(there) == jax.process_count():
        return None
    owners = processes_text(there)
    return f"is only on devices of {owners}, but there are {jax.process_count()} processes"


def like_value(array: Any, like: object) -> Any:
    """Convert an array that was read to its kind in `like`: a JAX or NumPy array, or a scalar."""
    if isinstance(array, jax.Array):
        return array
    if isinstance(like, jax.Array):
        return jnp.asarray(array)
    return array[()] if isinstance(like, np.generic) else array


def is_enabled(dtype: Any) -> bool:
    """Return whether JAX's configuration enables a dtype. JAX disables 64-bit dtypes by default."""
    return is_key(dtype) or jax.dtypes.canonicalize_dtype(dtype) == dtype


def not_enabled(dtype: Any) -> str:
    """Explain that JAX's configuration does not enable a dtype."""
    return f"JAX does not support {np.dtype(dtype)} without `jax_enable_x64`"


ENABLE = "enable it: `jax.config.update('jax_enable_x64', True)`"
