"""What a user can write for a mesh ─► a `MeshView`: the sizes of its axes, and maybe the mesh."""

import functools
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.interpreters import pxla
from jax.sharding import AbstractMesh, AxisType, Mesh

from functree.argument_checks import is_size
from functree.errors import ShardingError


class MeshView(NamedTuple):
    """The part of a mesh that a plan needs. A plan uses no devices.

    Attributes:
        sizes: the size of each mesh axis.
        mesh: the mesh, or None if only sizes were given.
    """

    sizes: Mapping[str, int]
    mesh: Mesh | AbstractMesh | None = None

    def __str__(self) -> str:
        return f"({', '.join(f'{name}={size}' for name, size in self.sizes.items())})"

    @property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(self.sizes.values())


MeshLike = Mesh | AbstractMesh | Mapping[str, int] | None
"""What a user can write for a mesh; `None` is the current mesh."""

NO_MESH = "pass `mesh=`, or enter `with jax.set_mesh(mesh):`"


def mesh_view(mesh: MeshLike) -> MeshView:
    """A `Mesh`, an `AbstractMesh`, a dict of sizes, or None for the current mesh ─► its view.

    Raises:
        ShardingError: there is no current mesh, or the value is not a mesh.
    """
    if mesh is None:
        mesh = current_mesh()
        if mesh is None:
            raise ShardingError(f"there is no mesh: {NO_MESH}")
        manual = getattr(mesh, "manual_axes", ())
        if manual:
            raise ShardingError(
                f"inside shard_map the mesh axes ({', '.join(manual)}) are Manual and shapes are "
                "local: lay arrays out outside of it, and use `ft.constrain` for the other mesh "
                "axes"
            )
    if isinstance(mesh, Mesh | AbstractMesh):
        return MeshView(dict(mesh.shape), mesh)
    if isinstance(mesh, Mapping):
        for name, size in mesh.items():
            if not isinstance(name, str) or not is_size(size):
                raise ShardingError(
                    f"a mesh as a dict has names and positive sizes, not {name!r}: {size!r}"
                )
        # NumPy integers count as integers: `np.prod` returns one.
        return MeshView({name: int(size) for name, size in mesh.items()})
    raise ShardingError(
        f"{mesh!r} is not a mesh: give a `Mesh`, an `AbstractMesh`, or a dict of sizes"
    )


def agreed_mesh(mesh: MeshLike, own: Iterable[Mesh | AbstractMesh | None]) -> MeshView:
    """The mesh that was given, or else the first one that a layout has of its own.

    Args:
        mesh: the mesh that was given; None if there was none.
        own: those of the layout: of a `NamedSharding`, of a plan.

    Raises:
        ShardingError: there is no mesh, or two meshes are different.
    """
    known = [one for one in own if one is not None]
    if mesh is None and known:
        mesh = known[0]
    view = mesh_view(mesh)
    for other in known:
        if not agrees(view, other):
            its = compared_text(other, view)
            raise ShardingError(
                f"the layout is for the mesh {its}, but the tree is laid out on {view}: "
                "use one mesh"
            )
    return view


def devices_along(axes: Iterable[str]) -> int:
    """The number of devices along some axes of the current mesh, for what is traced under one.

    Examples:
        >>> from functree.devices.meshes import devices_along
        >>> with jax.set_mesh(ft.make_mesh(data=2, model=4)):
        ...     devices_along(["data", "model"])
        8
    """
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape[axis] for axis in axes)


def platform() -> str:
    """The platform of the current mesh, or else the default one.

    Examples:
        >>> from functree.devices.meshes import platform
        >>> platform()
        'cpu'
    """
    # Of the mesh first: the program may be compiled for devices that are not there. Its abstract
    # device is a part of the key of every trace, so a trace is not taken for another platform.
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def agrees(view: MeshView, other: Mesh | AbstractMesh) -> bool:
    """Whether a mesh may be the one of the view."""
    if dict(other.shape) != dict(view.sizes):
        return False
    # An abstract mesh has no devices that could be compared.
    if not isinstance(view.mesh, Mesh) or not isinstance(other, Mesh):
        return True
    return other == view.mesh


def compared_text(other: Mesh | AbstractMesh, view: MeshView) -> str:
    """The text of a mesh that does not agree with a view."""
    its = mesh_view(other)
    if its.sizes == view.sizes:
        return f"{its}, of other devices"
    return str(its)


def current_mesh() -> Mesh | AbstractMesh | None:
    """The mesh of `jax.set_mesh` or of the `ft.jit` that is being traced, or None.

    Under a trace whose devices are not known it is abstract. In the body of a shard_map it is too,
    and its Manual axes are marked.

    Raises:
        ShardingError: a mesh was entered by the deprecated `with mesh:`, which the types of arrays
            do not show.
    """
    abstract = jax.sharding.get_abstract_mesh()
    if abstract.manual_axes:
        return abstract
    if not abstract.empty:
        return _with_devices(abstract)
    if _legacy_mesh():
        # Not "there is no mesh", which would be confusing inside of a `with mesh:`.
        raise ShardingError(
            "a mesh was entered by `with mesh:`, which is deprecated and has no effect on the "
            "types of arrays: write `with jax.set_mesh(mesh):`"
        )
    return None


# JAX knows the devices of the current mesh outside of a trace only. An abstract mesh alone does not
# say where an array without a sharding is put: a constraint on it has no effect if nothing else in
# the program is on a mesh. A user context is part of the key of every trace that JAX caches.
_DEVICES = jax.make_user_context(None)


@contextmanager
def traced_under(mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """Make a mesh the current one while a function is traced, with its devices if it has any."""
    with ExitStack() as stack:
        stack.enter_context(jax.sharding.use_abstract_mesh(abstract_mesh(mesh)))
        if isinstance(mesh, Mesh):
            stack.enter_context(_DEVICES(mesh))
        yield


def _with_devices(abstract: AbstractMesh) -> Mesh | AbstractMesh:
    """The current mesh with its devices, if they are known."""
    if tracing():
        known: Mesh | None = _DEVICES.value
    else:
        known = jax.sharding.get_mesh()
    # `jax.sharding.use_abstract_mesh` may have set an abstract mesh that is not the abstract mesh
    # of this one.
    if not isinstance(known, Mesh) or tuple(known.shape.items()) != tuple(abstract.shape.items()):
        return abstract
    # `auto_axes` and `explicit_axes` change the types of the axes, and not the devices.
    if known.axis_types != abstract.axis_types:
        return _with_types(known, abstract.axis_types)
    return known


# Each trace asks for it, and to make a mesh of thousands of devices takes long.
@functools.lru_cache(maxsize=16)
def _with_types(mesh: Mesh, axis_types: tuple[AxisType, ...]) -> Mesh:
    return Mesh(mesh.devices, mesh.axis_names, axis_types)


def without_devices(mesh: Mesh | AbstractMesh) -> str | None:
    """Why nothing can be run on a mesh, and what to do; None if it has devices.

    The devices of a topology (`ft.make_mesh(..., target=)`, `jax.experimental.topologies`) are only
    compiled for.
    """
    if isinstance(mesh, AbstractMesh):
        return f"{mesh_view(mesh)} has no devices: {NO_MESH} with a `Mesh`"
    if not _is_compiled_for(mesh):
        return None
    kind = mesh.devices.flat[0].device_kind
    return f"{mesh_view(mesh)} has devices ({kind}) that are only compiled for: {_ONLY_COMPILED}"


_ONLY_COMPILED = (
    "use `.lower(...).compile()` or `ft.ledger`; to run, make the mesh without `target=`"
)


@functools.lru_cache(maxsize=64)
def _is_compiled_for(mesh: Mesh) -> bool:
    """Whether the devices of a mesh are not there."""
    device = mesh.devices.flat[0]
    if device in jax.devices():
        return False
    try:
        return device not in jax.devices(device.platform)
    except RuntimeError:  # this platform is not on this machine
        return True


def abstract_mesh(mesh: Mesh | AbstractMesh) -> AbstractMesh:
    """A mesh without its devices."""
    if isinstance(mesh, Mesh):
        return mesh.abstract_mesh
    return mesh


def tracing() -> bool:
    """Whether a function is being traced; an eager `grad` or `vmap` counts too."""
    # `get_mesh` raises during a trace. JAX has no other public function that tells this.
    try:
        jax.sharding.get_mesh()
    except ValueError:
        return True
    return False


def compiling() -> bool:
    """Whether a function is being traced into a program; an eager `grad` or `vmap` does not
    count."""
    # What has no traced operand is computed at once in an eager transform. JAX has no public
    # function that tells this. In a program it is one number that nothing uses.
    return isinstance(jnp.zeros(()), Tracer)


def _legacy_mesh() -> bool:
    """Whether a mesh was entered by the deprecated `with mesh:`."""
    resources = _thread_resources()
    return resources is not None and not resources.env.physical_mesh.empty


@functools.cache
def _thread_resources() -> Any:
    """The object in which `with mesh:` sets the thread's mesh; None once JAX has removed it."""
    # Cached, since even the access to the attribute warns. The object itself is thread-local, so it
    # may be shared.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return getattr(pxla, "thread_resources", None)


Device = Any
"""A device of JAX. Type checkers do not take `jax.Device` as a type: to them it is a variable."""

# What TPUs call themselves, and what everybody else calls them.
_TPUS = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}


def backend_text(device: Device) -> str:
    """The name of a device's platform and kind.

    >>> backend_text(jax.devices()[0])
    'cpu'
    """
    kind = str(device.device_kind)
    match device.platform:
        case "tpu":
            return f"tpu {_TPUS.get(kind, kind.removeprefix('TPU').strip())}"
        case "gpu" | "cuda":  # "NVIDIA H100 80GB HBM3"
            return " ".join(["cuda", *kind.removeprefix("NVIDIA ").lower().split(" ")[:1]])
    return str(device.platform)
