"""A function of local arrays ─► a function of global ones, laid out by specs, layouts, or its own annotations."""

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar, overload

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.tree_util import tree_leaves

from functree.errors import FunctreeError, ShardingError, did_you_mean
from functree.layout.meshes import NO_MESH, MeshView, current_mesh, mesh_view, tracing
from functree.transforms.entries import Entries
from functree.transforms.shard_program import Options, Place, Program, Shapes
from functree.transforms.signature import Signature
from functree.transforms.structures import Structures

_P = ParamSpec("_P")
_T = TypeVar("_T")


@overload
def shard_map(
    fun: Callable[_P, _T],
    *,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
    rules: Any = None,
    axis_names: Collection[str] | None = None,
    check_vma: bool = True,
    shapes: Shapes = "global",
) -> Callable[_P, _T]: ...
@overload
def shard_map(
    fun: None = None,
    *,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
    rules: Any = None,
    axis_names: Collection[str] | None = None,
    check_vma: bool = True,
    shapes: Shapes = "global",
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]: ...
def shard_map(
    fun: Any = None,
    *,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
    rules: Any = None,
    axis_names: Collection[str] | None = None,
    check_vma: bool = True,
    shapes: Shapes = "global",
    **refused: Any,
) -> Any:
    """Run a function on each device's part of its arrays.

    The function sees local arrays and may use collectives (`jax.lax.psum(x, "model")`). Modules and containers go in
    and out; what is no array, a Python number too, is carried through as it is, and is static: another value is
    another program. One program is compiled for each structure, shapes and mesh; the function is traced once for each,
    as under `jax.jit`, outputs' layouts included. A function that closes over traced values is traced on each call.

    Args:
        fun: a function, a method, a partial, or a module that can be called. What is bound to it are arguments too,
            `self` among them.
        mesh: a mesh; the current one if not given, or else that on which the arguments lie.
        in_specs: where the arguments go: one entry for each positional parameter, or a dict by parameter name, each
            entry a layout or a prefix tree of layouts; or one layout for all. `*args` has one entry for all, and
            `None` stands for what is no array.
        out_specs: where the parts of the result come from, likewise; a layout sees the result as one device has it.
        rules: for whatever `in_specs` and `out_specs` do not say: by the annotations of the function and of the modules
            that it takes. They are ambient in the body.
        axis_names: the mesh axes to be manual; all that are not yet, if not given. Rules lose the others.
        check_vma: as in JAX: check that what `out_specs` call equal on several devices is so, and let autodiff insert
            the collectives for that.
        shapes: what the sizes in the annotations speak of: `"global"`, the arrays as they go in and out; `"local"`,
            those that the body sees; None for no check.

    Returns:
        A function of the same signature. Under other transforms it is an ordinary part of their program.

    Raises:
        FunctreeError: an option that means nothing.
        RuleError: (when called) `in_specs` that do not have the parameters' or a tree's structure.
        ShardingError: (when called) arrays that nobody laid out or that cannot be laid out so, by path; no mesh.
        AxesError: (when called) arrays that are not as annotated: the argument, the axis, both sizes.

    Gradients:
        A mean over a local batch is a local mean: take `jax.lax.pmean` of it before `jax.grad`, inside the function.
        With `check_vma=True` the gradient with respect to a whole parameter is summed over the devices on its own;
        the gradient of a *local* mean is so the number of devices times too large, and with `check_vma=False` it is
        one device's. Taken outside of the function it is right in both.

    Examples:
        >>> rules = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})
        >>> @ft.shard_map(mesh=ft.make_mesh(data=2, model=4), rules=rules)
        ... def ffn(
        ...     x: Float[Array, "batch embed"], up: Float[Array, "embed hidden"], down: Float[Array, "hidden embed"]
        ... ) -> Float[Array, "batch embed"]:
        ...     return jax.lax.psum(jax.nn.relu(x @ up) @ down, "model")
        >>> y = ffn(jnp.ones((4, 6)), jnp.ones((6, 8)), down=jnp.ones((8, 6)))
        >>> y.sharding.shard_shape(y.shape)
        (2, 6)
    """
    for name in refused:
        raise FunctreeError(_REFUSED.get(name, f"shard_map has no option `{name}`"))
    options = (mesh, in_specs, out_specs, rules, axis_names, check_vma, shapes)
    return _mapped(fun, options) if fun is not None else lambda fun: _mapped(fun, options)


_REFUSED = {
    "check_rep": "shard_map: write `check_vma=` for check_rep",
    "auto": "shard_map: write `axis_names=`, the mesh axes that become manual, for auto, those that do not",
}


def _mapped(fun: Any, options: Any) -> Any:
    mapped = Mapped(fun, *options)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return mapped(args, kwargs)

    return functools.update_wrapper(wrapper, fun, updated=())


class Mapped:
    """A function with what `shard_map` was told of it, and a program for each structure of its calls."""

    signature: Signature
    mesh: Mesh | AbstractMesh | None
    rules: Any
    axis_names: Collection[str] | None
    in_specs: Entries
    options: Options

    def __init__(
        self,
        fun: Callable[..., Any],
        mesh: Any,
        in_specs: Any,
        out_specs: Any,
        rules: Any,
        axis_names: Collection[str] | None,
        check_vma: bool,
        shapes: Shapes,
    ):
        if shapes not in ("global", "local", None):
            raise FunctreeError(f'shard_map: shapes={shapes!r} is none of "global", "local", None')
        if isinstance(axis_names, str):
            raise FunctreeError(f"shard_map: axis_names={axis_names!r} is a text: write a set, {{{axis_names!r}}}")
        self.signature = Signature(fun)
        self.mesh = mesh if mesh is None else mesh_view(mesh).mesh
        if mesh is not None and self.mesh is None:
            raise ShardingError("shard_map runs on devices: give a `Mesh`, not sizes")
        self.rules, self.axis_names = rules, axis_names
        self.in_specs = Entries("in_specs", rules if in_specs is None else in_specs, self.signature, rules)
        self.options = Options(self.signature, rules if out_specs is None else out_specs, rules, check_vma, shapes)
        self.structures: Structures = Structures()

    def __call__(self, args: Sequence[Any], kwargs: Any) -> Any:
        call = self.signature.bind(args, kwargs)
        structure, arrays, concrete = self.structures.find(call)
        place = self.place(arrays)
        key = (place, *map(_CONCRETE if concrete else _situation, arrays))
        program = structure.programs.get(key)
        if program is None:
            program = structure.programs[key] = Program(self.options, call, self.in_specs.prefix(call), place)
        # What is compiled once must not hold a tracer: JAX would hand it to the next call.
        traced = any(isinstance(x, Tracer) for value in self.signature.captured() for x in tree_leaves(value))
        result = program.run(arrays) if traced else program.jitted(arrays)
        return result.tree[0]

    def place(self, leaves: Iterable[Any]) -> Place:
        """The mesh of a call, and the axes that become manual."""
        name, here = self.signature.name, jax.sharding.get_abstract_mesh()
        mesh = self.mesh if self.mesh is not None else current_mesh()
        mesh = mesh if mesh is not None else _mesh_of(leaves)
        if mesh is None:
            raise ShardingError(f"{name}: there is no mesh: {NO_MESH}")
        view = MeshView(dict(mesh.shape))
        if here.manual_axes:
            if dict(mesh.shape) != dict(here.shape):
                around = MeshView(dict(here.shape))
                raise ShardingError(f"{name}: it is for {view}, inside a shard_map over {around}: leave `mesh=` out")
            mesh = here
        elif isinstance(mesh, AbstractMesh) and not tracing():
            raise ShardingError(f"{name}: {view} has no devices to run on: {NO_MESH} with a `Mesh`")
        free = [axis for axis in mesh.axis_names if axis not in here.manual_axes]
        wanted = list(self.axis_names or free)
        for axis in wanted:
            if axis not in free:
                why = "manual already" if axis in here.manual_axes else f"no axis of it{did_you_mean(axis, free)}"
                raise ShardingError(f"{name}: `{axis}` in `axis_names`, on the mesh {view}, is {why}")
        if not wanted:
            raise ShardingError(f"{name}: all axes of the mesh {view} are manual already")
        return Place(mesh, frozenset(wanted))


def _mesh_of(leaves: Iterable[Any]) -> Mesh | None:
    """The mesh on which some arrays lie."""
    shardings = (leaf.sharding for leaf in leaves if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer))
    return next((s.mesh for s in shardings if isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh)), None)


# What a program depends on in a concrete array.
_CONCRETE = attrgetter("aval", "sharding", "committed")


def _situation(leaf: Any) -> Any:
    """The same for an array that may be traced, abstract or numpy's."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    return _CONCRETE(leaf) if concrete else (jax.typeof(leaf), type(leaf))
