"""`ft.jit`: a function over modules ─► the same, compiled; layouts in and out, state that stays where it was."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

from jax.sharding import AbstractMesh, Mesh

from functree.calls.signature import Signature
from functree.calls.traces import traces_of
from functree.errors import FunctreeError, RuleError, ShardingError, did_you_mean
from functree.layout.layout import LayoutLike, LayoutTree, as_layout
from functree.layout.meshes import mesh_view
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
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate: Any = (),
    keep_unused: bool = False,
    inline: bool = False,
    compiler_options: dict[str, Any] | None = None,
    **refused: Any,
) -> Jit[_P, _T]: ...
@overload
def jit(
    *,
    in_shardings: LayoutTree = None,
    out_shardings: LayoutTree = None,
    mesh: Mesh | AbstractMesh | None = None,
    rules: LayoutLike = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate: Any = (),
    keep_unused: bool = False,
    inline: bool = False,
    compiler_options: dict[str, Any] | None = None,
    **refused: Any,
) -> Callable[[Callable[_P, _T]], Jit[_P, _T]]: ...
def jit(
    fun: Any = None,
    *,
    in_shardings: LayoutTree = None,
    out_shardings: LayoutTree = None,
    mesh: Mesh | AbstractMesh | None = None,
    rules: LayoutLike = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate: Any = (),
    keep_unused: bool = False,
    inline: bool = False,
    compiler_options: dict[str, Any] | None = None,
    **refused: Any,
) -> Any:
    """Compile a function over modules, at no cost over `jax.jit` on the same tree.

    Rules read the annotations of the function's parameters and result, and of the modules among them.

    Arrays are traced (numpy's too); every other leaf is static, by type and value, Python numbers among them. What is
    bound to the function (`self`, a partial's arguments, a module that is called) are arguments too, and are traced.
    A call returns before the work is done. The function is traced once for each compilation.

    Args:
        fun: a function, a method, a partial, or a module that can be called.
        in_shardings: where the arguments lie: one entry for each positional parameter, or a dict by parameter name,
            each a layout or a prefix tree of layouts; or one layout for all. `None`: as it comes. Nothing that has
            its place is moved.
        out_shardings: where the result goes: a layout, or a prefix tree of layouts. `None`: the compiler's choice, or
            for a donated argument's match, its sharding.
        mesh: the mesh of the body; the current one if not given, or else that on which the arguments lie.
        rules: ambient in the body, as by `ft.axis_rules`.
        static_argnums: positions of parameters that are static, whatever they hold.
        static_argnames: their names.
        donate: names or positions of the parameters whose arrays may be overwritten; `...` for all. A part of the
            result that has a donated argument's structure, shapes and dtypes keeps that argument's shardings.
        keep_unused: as in `jax.jit`.
        inline: as in `jax.jit`.
        compiler_options: as in `jax.jit`.
        **refused: options of `jax.jit` that are written otherwise here; the message says how.

    Returns:
        The function, with `trace`, `lower` and `eval_shape` as `jax.jit` gives them, over modules; and `compilations`,
        a record of what made each compilation necessary.

    Raises:
        FunctreeError: an option that means nothing; (when called) a leaf that is neither an array nor hashable; an
            array that would be donated twice.
        RuleError: `in_shardings` without the parameters' structure.
        ShardingError: (when called) arguments that cannot lie so, or lie otherwise, by path; arrays on another mesh.

    Examples:
        >>> mesh = ft.make_mesh(data=2, model=4)
        >>> rules = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None, "seq": None})
        >>> model = ft.shard(ft.nn.MLP(8, 16, key=jax.random.key(0)), rules, mesh)
        >>> @ft.jit(rules=rules, donate="model")
        ... def step(model, x):
        ...     return jax.tree.map(lambda w: w - 0.1 * x.mean(), model), model(x).sum()
        >>> model, loss = step(model, jnp.ones((4, 2, 8)))
        >>> model.down.sharding.spec, len(step.compilations)
        (P('model', None), 1)
    """
    for name in refused:
        raise FunctreeError(_REFUSED.get(name, f"jit has no option `{name}`{did_you_mean(name, _OPTIONS)}"))
    if mesh is not None and mesh_view(mesh).mesh is None:
        raise ShardingError("jit runs on devices: give a `Mesh`, not sizes")
    layout = None if rules is None else as_layout(rules)
    own = {"keep_unused": keep_unused, "inline": inline, "compiler_options": compiler_options}

    def wrap(fun: Any) -> Any:
        if not callable(fun):
            raise FunctreeError(f"jit takes a function, not {fun!r}")
        signature, bound = Signature.of(fun)
        static = frozenset(
            [
                *_named(signature, "static_argnums", static_argnums),
                *_named(signature, "static_argnames", static_argnames),
            ]
        )
        donated = frozenset(signature.parameters if donate is ... else _named(signature, "donate", donate))
        for name in (name.rpartition(".")[2] for name in static):
            if isinstance(in_shardings, dict) and in_shardings.get(name) is not None:
                raise RuleError(f"in_shardings: `{name}` is static, so it has no sharding: leave it out")
        options = JitOptions(in_shardings, out_shardings, mesh, layout, donated, static, own)
        return Jit(fun, bound, traces_of(bound, signature, Jit, tuple(options)), options)

    return wrap if fun is None else wrap(fun)


_OPTIONS = (
    "in_shardings", "out_shardings", "mesh", "rules", "static_argnums", "static_argnames", "donate", "keep_unused",
    "inline", "compiler_options",
)  # fmt: skip
_BY_PLACE = "put the arrays where they should be (`jax.device_put`), or write `with jax.default_device(device):`"
_REFUSED = {
    "donate_argnums": "jit: write `donate=` with names or positions for donate_argnums",
    "donate_argnames": "jit: write `donate=` with names or positions for donate_argnames",
    "backend": f"jit has no `backend`: {_BY_PLACE}",
    "device": f"jit has no `device`: {_BY_PLACE}",
    "abstracted_axes": "jit has no `abstracted_axes`: sizes are part of a compiled program; `jax.export` has symbols",
}


def _named(signature: Signature, option: str, which: Any) -> Iterable[str]:
    """The names of the parameters that an option gives by name or position; `more.mode` for one among any names."""
    for one in (which,) if isinstance(which, int | str) else tuple(which):
        known = signature.parameters
        if isinstance(one, str) and (one in known or signature.by_name is not None):
            yield one if one in known else f"{signature.by_name}.{one}"
        elif type(one) is int and -len(signature.positional) <= one < len(signature.positional):
            yield signature.positional[one]
        else:
            every = "; `donate=...` is all of them" if option == "donate" else ""
            raise FunctreeError(
                f"{option}={one!r}: {signature.name} has no such parameter{did_you_mean(one, known)}; its parameters "
                f"are {', '.join(known) or 'none'}{every}"
            )
