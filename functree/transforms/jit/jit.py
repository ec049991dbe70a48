"""A function of modules, and layouts ─► the compiled function, whose donated state keeps its shardings."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

from jax.sharding import AbstractMesh, Mesh

from functree.calls.signature import Signature
from functree.calls.traces import traces_of
from functree.errors import FunctreeError, ShardingError, did_you_mean
from functree.layout.layout import LayoutLike, LayoutTree, as_layout
from functree.layout.meshes import mesh_view
from functree.layout.prefix import copied
from functree.parameters import FLAG, FUNCTION, MAPPING, POSITION, check
from functree.transforms.jit.checked import CheckedJit
from functree.transforms.jit.jitted import Jit, JitOptions

_P = ParamSpec("_P")
_T = TypeVar("_T")


@overload
def jit(
    fun: Callable[_P, _T],
    *,
    in_shardings: LayoutTree = None,
    out_shardings: LayoutTree = None,
    mesh: Mesh | AbstractMesh | None = None,
    rules: LayoutLike = None,
    static_argnums: int | Sequence[int] | None = (),
    static_argnames: str | Sequence[str] | None = (),
    donate: Any = (),
    keep_unused: bool = False,
    inline: bool = False,
    compiler_options: dict[str, Any] | None = None,
    check_processes: bool = False,
    **refused: Any,
) -> Jit[_P, _T]: ...
@overload
def jit(
    *,
    in_shardings: LayoutTree = None,
    out_shardings: LayoutTree = None,
    mesh: Mesh | AbstractMesh | None = None,
    rules: LayoutLike = None,
    static_argnums: int | Sequence[int] | None = (),
    static_argnames: str | Sequence[str] | None = (),
    donate: Any = (),
    keep_unused: bool = False,
    inline: bool = False,
    compiler_options: dict[str, Any] | None = None,
    check_processes: bool = False,
    **refused: Any,
) -> Callable[[Callable[_P, _T]], Jit[_P, _T]]: ...
def jit(
    fun: Any = None,
    *,
    in_shardings: LayoutTree = None,
    out_shardings: LayoutTree = None,
    mesh: Mesh | AbstractMesh | None = None,
    rules: LayoutLike = None,
    static_argnums: int | Sequence[int] | None = (),
    static_argnames: str | Sequence[str] | None = (),
    donate: Any = (),
    keep_unused: bool = False,
    inline: bool = False,
    compiler_options: dict[str, Any] | None = None,
    check_processes: bool = False,
    **refused: Any,
) -> Any:
    """Compile a function of modules. A call costs no more than one of `jax.jit` with the same tree.

    Rules read the annotations of the function's parameters and result, and of the modules in them.

    Arrays are traced, NumPy's too. Every other value is static, by type and value; this includes Python numbers. What
    is bound to the function (`self`, the arguments of a partial, a module that is called) is an argument too, and its
    arrays are traced. As in JAX, a call returns before the computation is done. The function is traced once for each
    compilation.

    Args:
        fun: a function, a method, a partial, or a callable module.
        in_shardings: the layouts of the arguments: one entry for each positional parameter, or a dict by parameter
            name, each entry a layout or a prefix tree of layouts; or one layout for all. `None`: any sharding. Only
            uncommitted arrays are moved.
        out_shardings: the layout of the result, or a prefix tree of layouts. `None`: the compiler chooses; but a part
            that replaces a donated argument keeps its shardings.
        mesh: the mesh of the body. If it is not given, it is the current mesh, or else the mesh of the arguments.
        rules: the ambient rules in the body, as by `ft.axis_rules`. Arguments that nobody has placed (uncommitted,
            abstract, NumPy's) and that have no entry in `in_shardings` are placed by them: leaves of modules and of a
            training state as by `ft.shard`, bare arrays by their annotations and the `AxisRules` alone.
        static_argnums: positions of parameters that are static, whatever their values are; `None` for none.
        static_argnames: names of such parameters.
        donate: names or positions of the parameters whose arrays may be overwritten; `...` for all, `None` for none. A
            part of the result with the structure, shapes and dtypes of a donated argument keeps the shardings of that
            argument. An array that nobody has placed is copied to several devices, and is not overwritten.
        keep_unused: as in `jax.jit`.
        inline: as in `jax.jit`.
        compiler_options: as in `jax.jit`.
        check_processes: with several processes, whether each compilation is compared in all of them before it runs.
            Processes with other shapes or programs would compute a wrong number, or wait for each other for ever.
        **refused: options of `jax.jit` that have another name here; the error says which.

    Returns:
        The compiled function. It has `trace`, `lower` and `eval_shape` as in `jax.jit`, but for modules, and
        `compilations`, a record of each compilation and its cause.

    Raises:
        FunctreeError: `fun` is not a function, or has no signature that Python can read; an option is unknown, or names
            an unknown parameter; a parameter is both static and donated; (when called) a leaf is neither an array nor
            hashable, an argument is deleted, an array is donated twice, the result is a generator, or the processes
            differ.
        RuleError: `in_shardings` does not have the structure of the parameters, or has a layout for a static one;
            `rules` is not a layout.
        ShardingError: `mesh` is not a mesh, or only has sizes; (when called) a layout does not fit an argument, an
            argument is sharded otherwise, or an array is on another mesh; the message has the paths.

    Examples:
        >>> mesh = ft.make_mesh(data=2, model=4)
        >>> rules = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None, "seq": None})
        >>> model = ft.shard(ft.nn.MLP(8, 16, key=jax.random.key(0)), rules, mesh)
        >>> @ft.jit(rules=rules, donate="model")
        ... def step(model, x: Float[Array, "batch seq embed"]):
        ...     return jax.tree.map(lambda w: w - 0.1 * x.mean(), model), model(x).sum()
        >>> model, loss = step(model, jnp.ones((4, 2, 8)))
        >>> model.down.sharding.spec, len(step.compilations)
        (P('model', None), 1)
    """
    for name in refused:
        raise FunctreeError(_REFUSED.get(name, f"jit has no option `{name}`{did_you_mean(name, _OPTIONS)}"))
    if mesh is not None and mesh_view(mesh).mesh is None:
        raise ShardingError("jit runs on devices: give a `Mesh`, not sizes")
    check(
        "jit cannot compile so",
        fun=(fun, FUNCTION.or_none()),
        keep_unused=(keep_unused, FLAG),
        inline=(inline, FLAG),
        compiler_options=(compiler_options, MAPPING.or_none()),
        check_processes=(check_processes, FLAG),
    )
    layout = None if rules is None else as_layout(rules)
    # Copies, because the traces are shared by the options as they are now.
    layouts = copied(in_shardings), copied(out_shardings)
    compiler = None if compiler_options is None else dict(compiler_options)
    own = {"keep_unused": keep_unused, "inline": inline, "compiler_options": compiler}

    def wrap(fun: Any) -> Any:
        signature, bound = Signature.of(fun)
        static = frozenset(_named(signature, "static_argnums", static_argnums))
        static |= frozenset(_named(signature, "static_argnames", static_argnames))
        donated = frozenset(signature.parameters if donate is ... else _named(signature, "donate", donate))
        if donate is not ...:
            _check_not_static(donated, static)
        options = JitOptions(*layouts, mesh, layout, donated, static, own)
        kind = CheckedJit if check_processes else Jit
        return kind(fun, bound, traces_of(bound, signature, Jit, tuple(options)), options)

    return wrap if fun is None else wrap(fun)


def _check_not_static(donated: Iterable[str], static: Collection[str]) -> None:
    """Raise FunctreeError for parameters that are both donated and static."""
    for name in sorted(donated):
        # `more` is all of `**more`, and `more.mode` is one argument in it.
        if name in static or name.partition(".")[0] in static:
            raise FunctreeError(
                f"donate={name!r}: `{name}` is static, so it has no array that can be donated: leave it out of "
                "`donate`, or out of `static_argnums` and `static_argnames`"
            )


_OPTIONS = (
    "in_shardings", "out_shardings", "mesh", "rules", "static_argnums", "static_argnames", "donate", "keep_unused",
    "inline", "compiler_options", "check_processes",
)  # fmt: skip
_USE_DEVICE_PUT = "move the arrays to the device (`jax.device_put`), or use `with jax.default_device(device):`"
_REFUSED = {
    "donate_argnums": "jit: use `donate=`, with names or positions, instead of donate_argnums",
    "donate_argnames": "jit: use `donate=`, with names or positions, instead of donate_argnames",
    "backend": f"jit has no `backend`: {_USE_DEVICE_PUT}",
    "device": f"jit has no `device`: {_USE_DEVICE_PUT}",
    "abstracted_axes": (
        "jit has no `abstracted_axes`: sizes are part of a compiled program; `jax.export` has symbolic sizes"
    ),
}


def _listed(which: Any) -> tuple[Any, ...]:
    """The names or positions that an option gives: one, several, or, as in `jax.jit`, `None` for none."""
    if which is None:
        return ()
    if isinstance(which, str) or not isinstance(which, Iterable):
        return (which,)
    return tuple(which)


def _named(signature: Signature, option: str, which: Any) -> Iterable[str]:
    """The names of the parameters that an option gives by name or position; `more.mode` for one among `**more`."""
    known = signature.parameters
    for one in _listed(which):
        if isinstance(one, str) and (one in known or signature.by_name is not None):
            yield one if one in known else f"{signature.by_name}.{one}"
        elif POSITION.fits(one) and one in range(-len(signature.positional), len(signature.positional)):
            yield signature.positional[int(one)]
        else:
            every = "; `donate=...` donates all of them" if option == "donate" else ""
            raise FunctreeError(
                f"{option}={one!r}: {signature.name} has no such parameter{did_you_mean(one, known)}; its parameters "
                f"are {', '.join(known) or 'none'}{every}"
            )
