"""`ft.jit` compiles a function whose arguments may be modules.

A function, and the options of `ft.jit` ─► the compiled function.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import EllipsisType
from typing import Annotated, ParamSpec, TypedDict, TypeVar, Unpack, overload

from jax.sharding import AbstractMesh, Mesh

from functree.argument_checks import FUNCTION, MAPPING, POSITION, Flag, checked
from functree.calls.signature import Signature
from functree.devices.meshes import mesh_view
from functree.errors import FunctreeTypeError, FunctreeValueError, ShardingError, did_you_mean
from functree.layout.layout import LayoutLike, LayoutTree, as_layout, copied
from functree.transforms.jit.jitted import CheckedJit, Jit, JitOptions

_P = ParamSpec("_P")
_T = TypeVar("_T")

ParametersLike = int | str | Iterable[int | str] | EllipsisType | None
"""Names or positions of parameters; `...` for all, `None` for none."""


class JitKeywords(TypedDict, total=False):
    """The options of `ft.jit`, as users write them."""

    in_shardings: LayoutTree
    out_shardings: LayoutTree
    mesh: Mesh | AbstractMesh | None
    rules: LayoutLike
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Sequence[str] | None
    donate: ParametersLike
    keep_unused: bool
    inline: bool
    compiler_options: Mapping[str, object] | None
    check_processes: bool


@overload
def jit(fun: Callable[_P, _T], **options: Unpack[JitKeywords]) -> Jit[_P, _T]: ...
@overload
def jit(
    fun: None = None, **options: Unpack[JitKeywords]
) -> Callable[[Callable[_P, _T]], Jit[_P, _T]]: ...
@checked("jit: invalid arguments")
def jit(
    fun: Annotated[Callable[_P, _T], FUNCTION] | None = None,
    *,
    in_shardings: LayoutTree = None,
    out_shardings: LayoutTree = None,
    mesh: Mesh | AbstractMesh | None = None,
    rules: LayoutLike = None,
    static_argnums: int | Sequence[int] | None = (),
    static_argnames: str | Sequence[str] | None = (),
    donate: ParametersLike = (),
    keep_unused: Flag = False,
    inline: Flag = False,
    compiler_options: Annotated[Mapping[str, object], MAPPING] | None = None,
    check_processes: Flag = False,
    **refused: object,
) -> Jit[_P, _T] | Callable[[Callable[_P, _T]], Jit[_P, _T]]:
    """Compile a function whose arguments may be modules.

    A call costs no more than a `jax.jit` call with the same tree.

    Rules use the axis names in the annotations of the function's parameters and result, and in the
    annotations of modules.

    JAX and NumPy arrays are traced. Every other leaf, even a Python number, is static, and is
    compared by type and value. Static data of modules is compared with `==`, as in JAX. Values that
    are bound to the function (`self`, the arguments of a partial, a callable module) are arguments
    too, so their arrays are traced. As in JAX, a call returns before the computation is done. The
    function is traced once for each compilation.

    Below, "uncommitted arrays" include NumPy arrays, and abstract arrays without a sharding.

    Args:
        fun: a function, a method, a partial, or a callable module.
        in_shardings: the layouts of the arguments. Pass one entry for each positional parameter, or
            a dict by parameter name. Each entry is a layout or a prefix tree of layouts. A single
            layout applies to all arguments, and `None` accepts any sharding. Only uncommitted
            arrays are moved.
        out_shardings: the layout of the result, or a prefix tree of layouts. With `None`, the
            compiler chooses the shardings, but a part that replaces a donated argument keeps the
            shardings of that argument.
        mesh: the mesh of the body. The default is the current mesh, or otherwise the mesh of the
            arguments.
        rules: the ambient rules in the body, as if it ran under `ft.axis_rules`. They also place
            uncommitted arguments that have no entry in `in_shardings`. Leaves of modules and of
            training states are placed as `ft.shard` would place them. An array that is itself an
            argument is placed with a pattern that names it, or otherwise with its annotation and
            the `AxisRules`. Without a mesh, `rules` have no effect, and `ft.jit` warns if there are
            several devices.
        static_argnums: the positions of parameters that are static, whatever their values; `None`
            for none.
        static_argnames: the names of parameters that are static.
        donate: the names or positions of parameters whose arrays may be overwritten; `...` for all,
            `None` for none. A part of the result with the structure, shapes and dtypes of a donated
            argument keeps the shardings of that argument. On several devices, an uncommitted array
            is copied, and is not overwritten.
        keep_unused: as in `jax.jit`.
        inline: as in `jax.jit`.
        compiler_options: as in `jax.jit`.
        check_processes: whether several processes compare each new program before it runs. Without
            this check, processes with different shapes or programs compute wrong numbers, or wait
            for each other forever.
        **refused: options of `jax.jit` that `ft.jit` lacks. The error names the alternative.

    Returns:
        The compiled function. Its methods `trace`, `lower` and `eval_shape` are like JAX's, but
            accept modules. `compilations` records each compilation and its cause.

    Raises:
        FunctreeError: if `fun` is not a function.
        FunctreeError: if Python cannot read the signature of `fun`.
        FunctreeError: if an option is unknown.
        FunctreeError: if an option names an unknown parameter.
        FunctreeError: (when called) if a leaf is neither an array nor hashable.
        FunctreeError: (when called) if an argument is deleted.
        FunctreeError: (when called) if a donated array is passed twice.
        FunctreeError: (when called) if the result is a generator.
        FunctreeError: (when called) with `check_processes`, if the settings, the arguments or the
            program differ between processes.
        RuleError: if `in_shardings` does not have the structure of the parameters.
        RuleError: if `rules` is not a layout.
        ShardingError: if `mesh` is not a mesh.
        ShardingError: if `mesh` has only sizes.
        ShardingError: (when called) if a layout does not fit an argument or the result.
        ShardingError: (when called) if an argument is sharded differently than `in_shardings`
            requires.
        ShardingError: (when called) if an argument is on a different mesh.

    Examples:
        >>> mesh = ft.make_mesh(data=2, model=4)
        >>> rules = ft.AxisRules(
        ...     {"batch": "data", "hidden": "model", "embed": None, "seq": None}
        ... )
        >>> model = ft.shard(ft.nn.MLP(8, 16, key=jax.random.key(0)), rules, mesh)
        >>> @ft.jit(rules=rules, donate="model")
        ... def step(model, x: Float[Array, "batch seq embed"]):
        ...     return jax.tree.map(lambda w: w - 0.1 * x.mean(), model), model(
        ...         x
        ...     ).sum()
        >>> model, loss = step(model, jnp.ones((4, 2, 8)))
        >>> model.down.sharding.spec, len(step.compilations)
        (P('model', None), 1)
    """
    for name in refused:
        advice = _REFUSED.get(name, did_you_mean(name, JitKeywords.__annotations__))
        raise FunctreeTypeError(f"jit has no option `{name}`{advice}")
    # Sizes are enough for a plan, but a program is compiled for devices.
    if mesh is not None and mesh_view(mesh).mesh is None:
        raise ShardingError("jit: `mesh` has only sizes: pass a `Mesh` with devices")
    layout = None if rules is None else as_layout(rules)
    # The layouts are copied: wrappers with equal options share traces, so options must not change.
    layouts = copied(in_shardings), copied(out_shardings)
    jax_options: dict[str, object] = {"keep_unused": keep_unused, "inline": inline}
    if compiler_options is not None:
        jax_options["compiler_options"] = dict(compiler_options)

    def wrap(fun: Callable[_P, _T]) -> Jit[_P, _T]:
        signature, partial = Signature.of(fun)
        static = _named(signature, "static_argnums", static_argnums)
        static |= _named(signature, "static_argnames", static_argnames)
        donated = frozenset(signature.parameters)
        if donate is not ...:
            donated = _named(signature, "donate", donate)
        options = JitOptions(*layouts, mesh, layout, donated, static, jax_options)
        kind = CheckedJit if check_processes else Jit
        return kind.made(fun, signature, partial, options)

    return wrap if fun is None else wrap(fun)


# `jax.jit` has these options, so users may try them here.
_DEVICE = (
    ": move the arrays to the device (`jax.device_put`), or use `with jax.default_device(device):`"
)
_REFUSED = {
    **dict.fromkeys(
        ("donate_argnums", "donate_argnames"), ": pass names or positions to `donate=`"
    ),
    "backend": _DEVICE,
    "device": _DEVICE,
    "abstracted_axes": (
        ", since a program is compiled for fixed sizes: export the function with symbolic sizes, "
        "`ft.export(f, ..., symbolic=...)`"
    ),
}


def _named(
    signature: Signature, option: str, which: int | str | Iterable[int | str] | None
) -> frozenset[str]:
    """Return the names of the parameters that an option lists by name or position.

    An argument `mode` in `**more` is named `more.mode`.
    """
    # As in `jax.jit`, None means no parameters.
    if which is None:
        which = ()
    elif isinstance(which, str) or not isinstance(which, Iterable):
        which = (which,)
    names: set[str] = set()
    known, positional = signature.parameters, signature.positional
    for parameter in which:
        if isinstance(parameter, str) and parameter in known:
            names.add(parameter)
        # With `**more`, a call may pass an argument with any name.
        elif isinstance(parameter, str) and signature.by_name is not None:
            names.add(f"{signature.by_name}.{parameter}")
        # A negative position counts from the end, as in `jax.jit`.
        elif POSITION.fits(parameter) and parameter in range(-len(positional), len(positional)):
            names.add(positional[int(parameter)])
        else:
            raise FunctreeValueError(
                f"jit: {option}={parameter!r}: {signature.name} has no such parameter "
                f"({', '.join(known) or 'none'}){did_you_mean(parameter, known)}"
            )
    return frozenset(names)
