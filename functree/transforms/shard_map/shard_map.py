"""A function of local arrays ─► a function of global ones, laid out by specs, layouts, or its own annotations."""

from collections.abc import Callable, Collection
from typing import Any, ParamSpec, TypeVar, overload

from functree.calls.signature import Signature
from functree.calls.traces import traces_of
from functree.errors import FunctreeError, ShardingError
from functree.layout.layout import LayoutLike, LayoutTree, as_layout
from functree.layout.meshes import MeshLike, mesh_view
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
    fun: Any = None,
    *,
    mesh: MeshLike = None,
    in_specs: LayoutTree = None,
    out_specs: LayoutTree = None,
    rules: LayoutLike = None,
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
        A function of the same signature, with `trace`, `lower`, `eval_shape` and `compilations` as `ft.jit` has them.
        Under other transforms it is an ordinary part of their program.

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
    if shapes not in ("global", "local", None):
        raise FunctreeError(f'shard_map: shapes={shapes!r} is none of "global", "local", None')
    if isinstance(axis_names, str):
        raise FunctreeError(f"shard_map: axis_names={axis_names!r} is a text: write a set, {{{axis_names!r}}}")
    its_mesh = None if mesh is None else mesh_view(mesh).mesh
    if mesh is not None and its_mesh is None:
        raise ShardingError("shard_map runs on devices: give a `Mesh`, not sizes")
    manual = None if axis_names is None else tuple(axis_names)
    layout = None if rules is None else as_layout(rules)
    options = MapOptions(its_mesh, in_specs, out_specs, layout, manual, check_vma, shapes)

    def wrap(fun: Any) -> Any:
        signature, bound = Signature.of(fun)
        return Mapped(fun, bound, traces_of(bound, signature, Mapped, tuple(options)), options)

    return wrap if fun is None else wrap(fun)


_REFUSED = {
    "check_rep": "shard_map: write `check_vma=` for check_rep",
    "auto": "shard_map: write `axis_names=`, the mesh axes that become manual, for auto, those that do not",
}
