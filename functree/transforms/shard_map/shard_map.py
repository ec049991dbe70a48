"""A function of local arrays, and the options of `ft.shard_map` ─► a function of global arrays."""

from collections.abc import Callable, Collection
from typing import ParamSpec, TypeVar, overload

from functree.argument_checks import FLAG, FUNCTION, TEXTS, check, parameter_error, shown
from functree.devices.meshes import MeshLike, mesh_view
from functree.errors import FunctreeTypeError, ShardingError
from functree.layout.layout import LayoutLike, LayoutTree, as_layout, copied
from functree.transforms.shard_map.mapped import MapOptions, Mapped, Shapes

_P = ParamSpec("_P")
_T = TypeVar("_T")


@overload
def shard_map(
    fun: Callable[_P, _T],
    *,
    mesh: MeshLike = None,
    in_specs: LayoutTree = None,
    out_specs: LayoutTree = None,
    rules: LayoutLike = None,
    axis_names: Collection[str] | None = None,
    check_vma: bool = True,
    shapes: Shapes = "global",
) -> Mapped[_P, _T]: ...
@overload
def shard_map(
    fun: None = None,
    *,
    mesh: MeshLike = None,
    in_specs: LayoutTree = None,
    out_specs: LayoutTree = None,
    rules: LayoutLike = None,
    axis_names: Collection[str] | None = None,
    check_vma: bool = True,
    shapes: Shapes = "global",
) -> Callable[[Callable[_P, _T]], Mapped[_P, _T]]: ...
def shard_map(
    fun: Callable[_P, _T] | None = None,
    *,
    mesh: MeshLike = None,
    in_specs: LayoutTree = None,
    out_specs: LayoutTree = None,
    rules: LayoutLike = None,
    axis_names: Collection[str] | None = None,
    check_vma: bool = True,
    shapes: Shapes = "global",
    **refused: object,
) -> Mapped[_P, _T] | Callable[[Callable[_P, _T]], Mapped[_P, _T]]:
    """Run a function on each device with its shards of the arrays.

    The function sees local arrays and may use collectives (`jax.lax.psum(x, "model")`). It may take
    and return modules and containers. Values that are not arrays, Python numbers included, are
    passed through and are static: another value needs another program. One program is compiled for
    each structure, shapes and mesh, and the function is traced once for each, as under `jax.jit`;
    the layouts of the result need no second trace. A function that closes over traced values is
    traced on each call.

    Args:
        fun: a function, a method, a partial, or a callable module. What is bound to it, such as
            `self`, is an argument too.
        mesh: a mesh. If it is not given, it is the current mesh, or else the mesh of the arguments.
        in_specs: the layouts of the arguments: one entry for each positional parameter, or a dict
            by parameter name, each entry a layout or a prefix tree of layouts; or one layout for
            all. `*args` has a single entry. `None` is the entry of a value that is not an array,
            and of arrays on Explicit axes, whose types have their specs.
        out_specs: the layout of the result, or a prefix tree of layouts. A layout sees the local
            result.
        rules: the layout where `in_specs` or `out_specs` is not given, by the annotations of the
            function and of its modules. They are ambient in the body.
        axis_names: the mesh axes that become Manual; by default all that are not Manual yet. Rules
            lose the others.
        check_vma: as in JAX: check that a result which `out_specs` say is replicated is the same on
            all devices, and let autodiff insert the collectives that this needs.
        shapes: which sizes the annotations mean: `"global"`, those of the arguments and results
            outside; `"local"`, those of the arrays in the body; None for no check.

    Returns:
        A function of the same signature, with `trace`, `lower`, `eval_shape` and `compilations` as
            in `ft.jit`. Under other transforms it becomes a part of their program.

    Raises:
        FunctreeError: an option is unknown or has a wrong value.
        RuleError: (when called) `in_specs` does not have the structure of the parameters or of a
            tree.
        ShardingError: (when called) an array has no layout or its layout does not fit, by path;
            there is no mesh.
        AxesError: (when called) an array is not as annotated; the message has the argument, the
            axis and both sizes.

    Gradients:
        A mean over a local batch is a local mean: inside the function, take `jax.lax.pmean` of it
        before `jax.grad`. With `check_vma=True`, JAX sums the gradient with respect to a replicated
        parameter over the devices. So the gradient of a *local* mean is too large, by the number of
        devices. With `check_vma=False` it is the gradient of one device only. A gradient that is
        taken outside of the function is right in both cases.

    Examples:
        >>> rules = ft.AxisRules(
        ...     {"batch": "data", "hidden": "model", "embed": None}
        ... )
        >>> @ft.shard_map(mesh=ft.make_mesh(data=2, model=4), rules=rules)
        ... def ffn(
        ...     x: Float[Array, "batch embed"],
        ...     up: Float[Array, "embed hidden"],
        ...     down: Float[Array, "hidden embed"],
        ... ) -> Float[Array, "batch embed"]:
        ...     return jax.lax.psum(jax.nn.relu(x @ up) @ down, "model")
        >>> y = ffn(jnp.ones((4, 6)), jnp.ones((6, 8)), down=jnp.ones((8, 6)))
        >>> y.sharding.shard_shape(y.shape)
        (2, 6)
    """
    for name in refused:
        raise FunctreeTypeError(_REFUSED.get(name, f"shard_map has no option `{name}`"))
    # By type first: `in` would compare an array element by element.
    if not (shapes is None or isinstance(shapes, str)) or shapes not in ("global", "local", None):
        raise parameter_error(
            f'shard_map: shapes={shown(shapes)} is not one of "global", "local", None',
            right_type=isinstance(shapes, str),
        )
    # A string is a collection of strings too, of its characters.
    if isinstance(axis_names, str):
        raise FunctreeTypeError(
            f"shard_map: axis_names={axis_names!r} is a string: use a set, {{{axis_names!r}}}"
        )
    check(
        "shard_map cannot map so",
        fun=(fun, FUNCTION.or_none()),
        axis_names=(axis_names, TEXTS.or_none()),
        check_vma=(check_vma, FLAG),
    )
    # `mesh_view` also takes None, as the current mesh; here None means the mesh of each call.
    given_mesh, layout = None, None
    if mesh is not None:
        given_mesh = mesh_view(mesh).mesh
        if given_mesh is None:
            raise ShardingError("shard_map runs on devices: give a `Mesh`, not sizes")
    if rules is not None:
        layout = as_layout(rules)
    # Copies, because the traces are shared by the options as they are now.
    layouts = copied(in_specs), copied(out_specs)
    manual = None if axis_names is None else tuple(axis_names)
    options = MapOptions(given_mesh, *layouts, layout, manual, check_vma, shapes)

    def wrap(fun: Callable[_P, _T]) -> Mapped[_P, _T]:
        return Mapped.of(fun, options)

    return wrap if fun is None else wrap(fun)


# Earlier versions of JAX had these.
_REFUSED = {
    "check_rep": "shard_map: use `check_vma=` instead of check_rep",
    "auto": (
        "shard_map: use `axis_names=`, the mesh axes that become manual, instead of auto, those "
        "that do not"
    ),
}
