"""Whatever stands for a mesh ─► the sizes of its axes, and the mesh itself where there is one."""

import functools
import math
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.interpreters import pxla
from jax.sharding import AbstractMesh, Mesh

from functree.errors import ShardingError


class MeshView(NamedTuple):
    """A mesh as a plan sees it: no device is touched."""

    sizes: Mapping[str, int]
    mesh: Mesh | AbstractMesh | None = None

    def __str__(self) -> str:
        return f"({', '.join(f'{name}={size}' for name, size in self.sizes.items())})"

    @property
    def devices(self) -> int:
        """How many there are."""
        return math.prod(self.sizes.values())


MeshLike = Mesh | AbstractMesh | Mapping[str, int] | None
"""What is taken as a mesh; `None` is the current one."""

NO_MESH = "pass `mesh=`, or enter `with jax.set_mesh(mesh):`"


def mesh_view(mesh: MeshLike) -> MeshView:
    """A `Mesh`, an `AbstractMesh`, a dict of sizes, or None for the current mesh ─► its view.

    Raises:
        ShardingError: there is no current mesh, or the value is none.
    """
    if mesh is None:
        mesh = current_mesh()
        if mesh is None:
            raise ShardingError(f"there is no mesh: {NO_MESH}")
        manual = getattr(mesh, "manual_axes", ())
        if manual:
            raise ShardingError(
                f"inside shard_map the mesh axes ({', '.join(manual)}) are Manual and shapes are local: lay arrays out "
                "outside of it, and write `ft.constrain` for the axes that are left"
            )
    if isinstance(mesh, Mesh | AbstractMesh):
        return MeshView(dict(mesh.shape), mesh)
    if isinstance(mesh, Mapping):
        for name, size in mesh.items():
            if not isinstance(name, str) or type(size) is not int or size < 1:
                raise ShardingError(f"a mesh as a dict has names and positive sizes, not {name!r}: {size!r}")
        return MeshView(dict(mesh))
    raise ShardingError(f"{mesh!r} is no mesh: give a `Mesh`, an `AbstractMesh`, or a dict of sizes")


def current_mesh() -> Mesh | AbstractMesh | None:
    """The mesh of `jax.set_mesh`; while tracing, the abstract one, with what is manual marked so.

    Raises:
        ShardingError: a mesh was entered by the deprecated `with mesh:`, which JAX's types do not see.
    """
    abstract = jax.sharding.get_abstract_mesh()
    if not abstract.empty:
        return abstract if abstract.manual_axes else _with_devices(abstract)
    if _legacy_mesh():
        raise ShardingError(
            "a mesh was entered by `with mesh:`, which is deprecated and which JAX's types do not see: "
            "write `with jax.set_mesh(mesh):`"
        )
    return None


def _with_devices(abstract: AbstractMesh) -> Mesh | AbstractMesh:
    """The mesh behind the abstract one. JAX gives it outside of a trace only, and has no other way to ask."""
    if tracing():
        return abstract
    mesh = jax.sharding.get_mesh()
    return mesh if isinstance(mesh, Mesh) and dict(mesh.shape) == dict(abstract.shape) else abstract


def abstract_mesh(mesh: Mesh | AbstractMesh) -> AbstractMesh:
    """A mesh without its devices."""
    return mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh


def tracing() -> bool:
    """Whether a trace is under way, be it of an eager `grad` or `vmap`; JAX has no other public way to ask."""
    try:
        jax.sharding.get_mesh()
    except ValueError:
        return True
    return False


def _legacy_mesh() -> bool:
    resources = _thread_resources()
    return resources is not None and not resources.env.physical_mesh.empty


@functools.cache
def _thread_resources() -> Any:
    """What `with mesh:` sets, for the current thread; None once JAX has dropped it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return getattr(pxla, "thread_resources", None)
