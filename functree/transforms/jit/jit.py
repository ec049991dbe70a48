"""A function of modules, and the options of `ft.jit` ─► the compiled function."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
    """The options of `ft.jit` as they are written."""

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
@checked("jit cannot compile so")
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
    """Compile a function of modules. A call costs no more than one of `jax.jit` with the same tree.

    Rules read the annotations of the function's parameters and result, and of the modules in them.

    Arrays are traced, NumPy's too. Every other leaf is static, by type and value; this includes
    Python numbers. Static data of modules is compared by `==`, as in JAX. What is bound to the
    function (`self`, the arguments of a partial, a module that is called) is an argument too, and
    its arrays are traced. As in JAX, a call returns before the computation is done. The function is
    traced once for each compilation.

    Args:
        fun: a function, a method, a partial, or a callable module.
        in_shardings: the layouts of the arguments: one entry for each positional parameter, or a
            dict by parameter name, each entry a layout or a prefix tree of layouts; or one layout
            for all. `None`: any sharding. Only uncommitted arrays are moved.
        out_shardings: the layout of the result, or a prefix tree of layouts. `None`: the compiler
            chooses; but a part that replaces a donated argument keeps its shardings.
        mesh: the mesh of the body. If it is not given, it is the current mesh, or else the mesh of
            the arguments.
        rules: the ambient rules in the body, as by `ft.axis_rules`. Arguments that nobody has
            placed (uncommitted, abstract, NumPy's) and that have no entry in `in_shardings` are
            placed by them: leaves of modules and of a training state as by `ft.shard`, bare arrays
            by their annotations and the `AxisRules` alone.
        static_argnums: positions of parameters that are static, whatever their values are; `None`
            for none.
        static_argnames: names of such parameters.
        donate: names or positions of the parameters whose arrays may be overwritten; `...` for all,
            `None` for none. A part of the result with the structure, shapes and dtypes of a donated
            argument keeps the shardings of that argument. An array that nobody has placed is copied
            to several devices, and is not overwritten.
        keep_unused: as in `jax.jit`.
        inline: as in `jax.jit`.
        compiler_options: as in `jax.jit`.
        check_processes: with several processes, whether each compilation is compared in all of them
            before it runs. Processes with other shapes or programs would compute a wrong number, or
            wait for each other for ever.
        **refused: options of `jax.jit` that have another name here; the error says which.

    Returns:
        The compiled function. It has `trace`, `lower` and `eval_shape` as in `jax.jit`, but for
            modules, and `compilations`, a record of each compilation and its cause.

    Raises:
        FunctreeError: `fun` is not a function, or has no signature that Python can read; an option
            is unknown, or names an unknown parameter; a parameter is both static and donated; (when
            called) a leaf is neither an array nor hashable, an argument is deleted, an array is
            donated twice, the result is a generator, or the processes differ.
        RuleError: `in_shardings` does not have the structure of the parameters, or has a layout for
            a static one; `rules` is not a layout.
        ShardingError: `mesh` is not a mesh, or only has sizes; (when called) a layout does not fit
            an argument, an argument is sharded otherwise, or an array is on another mesh; the
            message has the paths.

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
        raise FunctreeTypeError(
            _REFUSED.get(
                name, f"jit has no option `{name}`{did_you_mean(name, JitKeywords.__annotations__)}"
            )
        )
    # A plan needs no more than sizes, but a program is compiled for devices.
    if mesh is not None and mesh_view(mesh).mesh is None:
        raise ShardingError("jit runs on devices: give a `Mesh`, not sizes")
    layout = None if rules is None else as_layout(rules)
    # Copies, because the traces are shared by the options as they are now.
    layouts = copied(in_shardings), copied(out_shardings)
    own: dict[str, object] = {"keep_unused": keep_unused, "inline": inline}
    if compiler_options is not None:
        own["compiler_options"] = dict(compiler_options)

    def wrap(fun: Callable[_P, _T]) -> Jit[_P, _T]:
        signature, partial = Signature.of(fun)
        static = _named(signature, "static_argnums", static_argnums)
        static |= _named(signature, "static_argnames", static_argnames)
        donated = frozenset(signature.parameters)
        # `...` means all that can be donated, so a static parameter is no mistake there.
        if donate is not ...:
            donated = _named(signature, "donate", donate)
            _check_not_static(donated, static)
        options = JitOptions(*layouts, mesh, layout, donated, static, own)
        kind = CheckedJit if check_processes else Jit
        return kind.made(fun, signature, partial, options)

    return wrap if fun is None else wrap(fun)


def _check_not_static(donated: Iterable[str], static: Collection[str]) -> None:
    """Raise FunctreeError for parameters that are both donated and static."""
    for name in sorted(donated):
        # `more` is all of `**more`, and `more.mode` is one argument in it.
        if name in static or name.partition(".")[0] in static:
            raise FunctreeValueError(
                f"donate={name!r}: `{name}` is static, so it has no array that can be donated: "
                "leave it out of `donate`, or out of `static_argnums` and `static_argnames`"
            )


# `jax.jit` has these, and its users look for them here.
_USE_DEVICE_PUT = (
    "move the arrays to the device (`jax.device_put`), or use `with jax.default_device(device):`"
)
_REFUSED = {
    "donate_argnums": "jit: use `donate=`, with names or positions, instead of donate_argnums",
    "donate_argnames": "jit: use `donate=`, with names or positions, instead of donate_argnames",
    "backend": f"jit has no `backend`: {_USE_DEVICE_PUT}",
    "device": f"jit has no `device`: {_USE_DEVICE_PUT}",
    "abstracted_axes": (
        "jit has no `abstracted_axes`: sizes are part of a compiled program; `jax.export` has "
        "symbolic sizes"
    ),
}


def _named(
    signature: Signature, option: str, which: int | str | Iterable[int | str] | None
) -> frozenset[str]:
    """The names of the parameters that an option gives by name or position; `more.mode` for one
    among `**more`."""
    # `jax.jit` takes None for no parameters, too.
    if which is None:
        which = ()
    elif isinstance(which, str) or not isinstance(which, Iterable):
        which = (which,)
    names: set[str] = set()
    known, positional = signature.parameters, signature.positional
    for one in which:
        if isinstance(one, str) and one in known:
            names.add(one)
        # With `**more` any name may be that of an argument, which only a call shows.
        elif isinstance(one, str) and signature.by_name is not None:
            names.add(f"{signature.by_name}.{one}")
        # A negative one counts from the end, as in `jax.jit`.
        elif POSITION.fits(one) and one in range(-len(positional), len(positional)):
            names.add(positional[int(one)])
        else:
            near, parameters = did_you_mean(one, known), ", ".join(known) or "none"
            every = "; `donate=...` donates all of them" if option == "donate" else ""
            raise FunctreeValueError(
                f"{option}={one!r}: {signature.name} has no such parameter{near}; its parameters "
                f"are {parameters}{every}"
            )
    return frozenset(names)
