"""A `MeshView` describes any `mesh=` argument: the sizes of its mesh axes, and the mesh, if any.

The module also reads, builds and formats specs: a `PartitionSpec` ─► its mesh axes and its text.
"""

import functools
import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.interpreters import pxla
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from functree.argument_checks import is_size
from functree.errors import ShardingError
from functree.tree.arrays import AnyArray


class MeshView(NamedTuple):
    """The part of a mesh that a plan needs: the sizes of the mesh axes. No devices are needed.

    Attributes:
        sizes: the size of each mesh axis.
        mesh: the mesh, or None if only sizes were given.
    """

    sizes: Mapping[str, int]
    mesh: Mesh | AbstractMesh | None = None

    def __str__(self) -> str:
        # A plan may treat some mesh axes as having one device.
        sizes = self.sizes if self.mesh is None else self.mesh.shape
        return f"({', '.join(f'{name}={size}' for name, size in sizes.items())})"

    @property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(self.sizes.values())

    def parts(self, dimensions: Iterable[Sequence[str]]) -> list[int]:
        """Return the number of shards of each dimension, given the mesh axes that shard it."""
        return [parts_over(axes, self.sizes) for axes in dimensions]

    def divided(
        self, shape: Sequence[int], dimensions: Iterable[Sequence[str]]
    ) -> tuple[tuple[int, ...], int]:
        """Divide an array over the devices, given the mesh axes that shard each dimension.

        Returns:
            The shape of the shard on one device, and the number of devices that hold each shard.
        """
        parts = self.parts(dimensions)
        # Sizes are rounded up: with `check=False`, a plan may have sizes that the mesh axes do not
        # divide.
        local = tuple([-(-size // number) for size, number in zip(shape, parts, strict=True)])
        return local, max(1, self.devices // math.prod(parts))


MeshLike = Mesh | AbstractMesh | Mapping[str, int] | None
"""The values that an argument `mesh` accepts. `None` means the current mesh."""

NO_MESH = "pass `mesh=`, or enter `with jax.set_mesh(mesh):`"


def mesh_view(mesh: MeshLike) -> MeshView:
    """Return the view of a mesh, of a dict of sizes, or of the current mesh (None).

    Raises:
        ShardingError: if there is no current mesh.
        ShardingError: if mesh axes of the current mesh are Manual.
        ShardingError: if the value is not a mesh, or is a dict with an invalid name or size.
    """
    if mesh is None:
        mesh = current_mesh()
        if mesh is None:
            raise ShardingError(f"there is no mesh: {NO_MESH}")
        manual = getattr(mesh, "manual_axes", ())
        if manual:
            raise ShardingError(
                f"inside shard_map, shapes are local along Manual mesh axes ({', '.join(manual)}): "
                "lay out arrays outside shard_map, and use `ft.constrain` for the other mesh axes"
            )
    if isinstance(mesh, Mesh | AbstractMesh):
        return MeshView(dict(mesh.shape), mesh)
    if isinstance(mesh, Mapping):
        for name, size in mesh.items():
            if not isinstance(name, str) or not is_size(size):
                raise ShardingError(
                    "a dict of mesh sizes must map names to positive integers, but this dict maps "
                    f"{name!r} to {size!r}"
                )
        # NumPy integers are accepted, since `np.prod` returns one.
        return MeshView({name: int(size) for name, size in mesh.items()})
    raise ShardingError(
        f"{mesh!r} is not a mesh: pass a `Mesh`, an `AbstractMesh`, or a dict of sizes"
    )


def agreed_mesh(mesh: MeshLike, own: Iterable[Mesh | AbstractMesh | None]) -> MeshView:
    """Return the view of the given mesh, or otherwise of the layout's mesh or the current mesh.

    Args:
        mesh: the given mesh, or None.
        own: the meshes in the layout, from a `NamedSharding` or a plan.

    Raises:
        ShardingError: if there is no mesh.
        ShardingError: if two meshes differ.
    """
    known = [one for one in own if one is not None]
    if mesh is None and known:
        mesh = known[0]
    view = mesh_view(mesh)
    for other in known:
        if not agrees(view, other):
            its = compared_text(other, view)
            raise ShardingError(
                f"the layout is for mesh {its}, but the tree is laid out on mesh {view}: "
                "use the same mesh for both"
            )
    return view


def local_view(mesh: MeshLike, own: Iterable[Mesh | AbstractMesh | None] = ()) -> MeshView:
    """Return the view of `agreed_mesh`, in which Manual mesh axes have size 1.

    Shapes are local along these mesh axes.
    """
    view = agreed_mesh(mesh, own)
    manual = getattr(view.mesh, "manual_axes", ())
    if not manual:
        return view
    return MeshView({**view.sizes, **dict.fromkeys(manual, 1)}, view.mesh)


def devices_along(axes: Iterable[str]) -> int:
    """Count the devices along some mesh axes of the current mesh.

    Examples:
        >>> from functree.devices.meshes import devices_along
        >>> with jax.set_mesh(ft.make_mesh(data=2, model=4)):
        ...     devices_along(["data", "model"])
        8
    """
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape[axis] for axis in axes)


def platform() -> str:
    """Return the platform of the current mesh, or otherwise JAX's default platform.

    Examples:
        >>> from functree.devices.meshes import platform
        >>> platform()
        'cpu'
    """
    # The mesh's platform takes precedence, since the program may be compiled for devices that you
    # don't have. The abstract device is part of every trace's key, so a trace is not reused on
    # another platform.
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def agrees(view: MeshView, other: Mesh | AbstractMesh) -> bool:
    """Return whether a mesh has the view's sizes, and the view's devices if both have devices."""
    if dict(other.shape) != dict(view.sizes):
        return False
    # An abstract mesh has no devices to compare.
    if not isinstance(view.mesh, Mesh) or not isinstance(other, Mesh):
        return True
    return other == view.mesh


def compared_text(other: Mesh | AbstractMesh, view: MeshView) -> str:
    """Format a mesh that does not agree with a view, for messages."""
    its = mesh_view(other)
    if its.sizes == view.sizes:
        return f"{its} with different devices"
    return str(its)


def current_mesh() -> Mesh | AbstractMesh | None:
    """Return the mesh of `jax.set_mesh` or of the `ft.jit` that is being traced, or None.

    The mesh is abstract in a trace without known devices, and in the body of a shard_map, where
    some of its mesh axes are Manual.

    Raises:
        ShardingError: if a mesh was entered with the deprecated `with mesh:`.
    """
    abstract = jax.sharding.get_abstract_mesh()
    if abstract.manual_axes:
        return abstract
    if not abstract.empty:
        return _with_devices(abstract)
    if _legacy_mesh():
        # The error "there is no mesh" would be confusing inside `with mesh:`.
        raise ShardingError(
            "`with mesh:` is deprecated and has no effect on array types: "
            "write `with jax.set_mesh(mesh):`"
        )
    return None


# Inside a trace, JAX's current mesh has no devices. A constraint on an abstract mesh has no effect
# unless the program contains an array that is on a mesh, so this context stores the devices too. A
# user context is part of the key of every trace that JAX caches.
_DEVICES = jax.make_user_context(None)


@contextmanager
def traced_under(mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """Make a mesh and its devices, if any, current while a function is traced.

    Raises:
        ShardingError: if the mesh of an outer trace has a different number of devices.
    """
    outer = jax.sharding.get_abstract_mesh()
    # JAX's own message would mention a context that the user did not enter.
    if tracing() and not outer.empty and outer.size != mesh.size:
        raise ShardingError(
            f"a function on mesh {mesh_view(mesh)} is called in a function on mesh "
            f"{mesh_view(outer)}: one program has one number of devices, so leave `mesh=` out"
        )
    with ExitStack() as stack:
        stack.enter_context(jax.sharding.use_abstract_mesh(abstract_mesh(mesh)))
        if isinstance(mesh, Mesh):
            stack.enter_context(_DEVICES(mesh))
        yield


def _with_devices(abstract: AbstractMesh) -> Mesh | AbstractMesh:
    """Return the current mesh with its devices, if they are known."""
    if tracing():
        known: Mesh | None = _DEVICES.value
    else:
        known = jax.sharding.get_mesh()
    # `jax.sharding.use_abstract_mesh` may have set a different abstract mesh.
    if not isinstance(known, Mesh) or tuple(known.shape.items()) != tuple(abstract.shape.items()):
        return abstract
    # `auto_axes` and `explicit_axes` change the types of mesh axes, but not the devices.
    if known.axis_types != abstract.axis_types:
        return _with_types(known, abstract.axis_types)
    return known


# Every trace needs this mesh, and building a mesh of thousands of devices is slow.
@functools.lru_cache(maxsize=16)
def _with_types(mesh: Mesh, axis_types: tuple[AxisType, ...]) -> Mesh:
    return Mesh(mesh.devices, mesh.axis_names, axis_types)


def without_devices(mesh: Mesh | AbstractMesh) -> str | None:
    """Explain why programs cannot run on a mesh, with the remedy, or return None if they can.

    The devices of a topology (`ft.make_mesh(..., target=)`, `jax.experimental.topologies`) are
    compile-only.
    """
    if isinstance(mesh, AbstractMesh):
        return f"the mesh {mesh_view(mesh)} has no devices: {NO_MESH}, where `mesh` is a `Mesh`"
    if not _is_compiled_for(mesh):
        return None
    kind = mesh.devices.flat[0].device_kind
    return f"the mesh {mesh_view(mesh)} has compile-only devices ({kind}): {_ONLY_COMPILED}"


_ONLY_COMPILED = (
    "use `.lower(...).compile()` or `ft.ledger`; to run programs, make the mesh without `target=`"
)


@functools.lru_cache(maxsize=64)
def _is_compiled_for(mesh: Mesh) -> bool:
    """Return whether the devices of a mesh are compile-only."""
    device = mesh.devices.flat[0]
    if device in jax.devices():
        return False
    try:
        return device not in jax.devices(device.platform)
    except RuntimeError:  # this machine does not have the platform
        return True


def abstract_mesh(mesh: Mesh | AbstractMesh) -> AbstractMesh:
    """Return a mesh without its devices."""
    if isinstance(mesh, Mesh):
        return mesh.abstract_mesh
    return mesh


def tracing() -> bool:
    """Return whether a function is being traced, including by an eager `grad` or `vmap`."""
    # `get_mesh` raises an error during a trace. JAX has no other public test.
    try:
        jax.sharding.get_mesh()
    except ValueError:
        return True
    return False


def compiling() -> bool:
    """Return whether a function is being traced into a program, not by an eager transform."""
    # An eager transform computes operations without traced operands immediately. JAX has no public
    # test for this, so this function creates an array, which is an unused constant in a program.
    return isinstance(jnp.zeros(()), Tracer)


def _legacy_mesh() -> bool:
    """Return whether the deprecated `with mesh:` entered a mesh."""
    resources = _thread_resources()
    return resources is not None and not resources.env.physical_mesh.empty


@functools.cache
def _thread_resources() -> Any:
    """Return the object in which `with mesh:` sets the thread's mesh, or None if JAX removed it."""
    # The object is cached because reading the attribute warns. The object itself is thread-local,
    # so threads may share the cache.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return getattr(pxla, "thread_resources", None)


Device = Any
"""A JAX device. Type checkers treat `jax.Device` as a variable, so they reject it as a type."""

# The device kinds that TPUs report, and their usual names.
_TPUS = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}


def backend_text(device: Device) -> str:
    """Format the platform and the kind of a device.

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


# Specs

Entry = str | tuple[str, ...] | None
"""One entry of a spec: a mesh axis, several mesh axes, or `None` for an unsharded dimension."""


def mesh_axes(entry: object) -> tuple[str, ...]:
    """Return the mesh axes in an entry of a spec. `None` and `P.UNCONSTRAINED` contain none."""
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, tuple):
        return entry
    return ()


def entry(axes: Sequence[str]) -> Entry:
    """Return the entry of a spec for some mesh axes."""
    if not axes:
        return None
    if len(axes) == 1:
        return axes[0]
    return tuple(axes)


def spec_of(dimensions: Iterable[Sequence[str]]) -> PartitionSpec:
    """Return the spec of an array, given the mesh axes that shard each dimension."""
    return PartitionSpec(*map(entry, dimensions))


def named_axes(spec: PartitionSpec) -> set[str]:
    """Return all mesh axes that a spec names."""
    return {axis for one in spec.partitions for axis in mesh_axes(one)}


def without(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """Return a spec without some mesh axes."""
    entries: list[Entry] = []
    for one in spec.partitions:
        kept = [axis for axis in mesh_axes(one) if axis not in axes]
        entries.append(entry(kept))
    return PartitionSpec(*entries)


def of_rank(spec: PartitionSpec, ndim: int) -> PartitionSpec:
    """Return a spec with one entry for each dimension."""
    return PartitionSpec(*spec.partitions, *[None] * (ndim - len(spec.partitions)))


def parts_over(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Return the number of shards that mesh axes divide an array into.

    A mesh axis without a size is ignored. If a mesh lacks it, this is reported separately.
    """
    return math.prod([sizes.get(axis, 1) for axis in axes])


def typed_spec(array: AnyArray) -> PartitionSpec | None:
    """Return the spec in an array's type, with one entry for each dimension.

    The spec names only Explicit mesh axes. It is None if the array's mesh has no such axes.
    """
    sharding = jax.typeof(array).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return of_rank(sharding.spec, array.ndim)


def axes_text(axes: Sequence[str]) -> str:
    """Format mesh axes for messages: `data`, `(data, model)`, or `None`."""
    if not axes:
        return "None"
    if len(axes) == 1:
        return axes[0]
    return f"({', '.join(axes)})"


def spec_text(spec: PartitionSpec) -> str:
    """Format a spec as a user writes it: `P('data', None)`."""
    parts: list[str] = []
    for one in spec.partitions:
        if one is PartitionSpec.UNCONSTRAINED:
            parts.append("P.UNCONSTRAINED")  # its `repr` lacks the `P.`
        else:
            parts.append(repr(one))
    if spec.unreduced:
        parts.append(f"unreduced={set(spec.unreduced)!r}")
    if spec.reduced:
        parts.append(f"reduced={set(spec.reduced)!r}")
    return f"P({', '.join(parts)})"


def invalid_entry(spec: PartitionSpec) -> str | None:
    """Explain which entry of a spec is invalid, or return None if all entries are valid."""
    # JAX does not check the values in a spec.
    for item in spec.partitions:
        if item is None or item is PartitionSpec.UNCONSTRAINED:
            continue
        names = item if isinstance(item, tuple) else (item,)
        if not all(isinstance(name, str) for name in names):
            return f"{item!r} is not a mesh axis, a tuple of mesh axes, or `None`"
    return None
