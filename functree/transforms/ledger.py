"""`ft.ledger` and `ft.layouts` show how XLA compiles a function, whichever library jitted it.

A function, jitted or not, and its arguments ─► the `Ledger` of the compiled program, or the
`Layouts` of the lowered program.
"""

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from numbers import Number
from typing import Any, NamedTuple

import equinox as eqx
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.stages import Lowered
from jax.tree_util import keystr, tree_flatten_with_path, tree_map

from functree.argument_checks import FUNCTION, check
from functree.calls.function import Function
from functree.calls.program_ledger import heard_compiling, ledger_of
from functree.calls.signature import AnyFunction
from functree.compiled.layouts import Layouts, layouts_of, named
from functree.compiled.ledger import Ledger
from functree.compiled.shardy import ARGUMENT
from functree.devices.meshes import mesh_view
from functree.errors import FunctreeValueError
from functree.layout.layout import LayoutTree
from functree.transforms.jit.jit import jit
from functree.tree.arrays import AnyArray, Tree, is_array
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton


def ledger(
    fn: Callable[..., Tree],
    /,
    *args: Tree,
    in_shardings: LayoutTree = None,
    out_shardings: LayoutTree = None,
    mesh: Mesh | AbstractMesh | None = None,
    **kwargs: Tree,
) -> Ledger:
    """Compile a function and return the ledger of its program, without running it.

    Args:
        fn: a function. It may already be jitted with `ft.jit`, `jax.jit`, or another library whose
            jitted functions have a `lower` method.
        *args: the positional arguments of `fn`, which may be abstract.
        in_shardings: the layouts of the arguments, as in `ft.jit`. Omit them if the function is
            already jitted.
        out_shardings: the layout of the result. Omit it if the function is already jitted.
        mesh: the mesh of the program. For a function jitted by another library, `mesh` only names
            the mesh axes, and only if the program's shardings do not share one mesh.
        **kwargs: the keyword arguments of `fn`.

    Raises:
        FunctreeError: if `fn` is not a function.
        FunctreeError: if a layout is passed for a function that is already jitted.
        FunctreeError: if a mesh is passed for a function made with `ft.jit`.
        FunctreeError: if `mesh` has a different number of devices than the program.
        FunctreeError: if the compiler does not return the program's text.

    Examples:
        >>> mesh = ft.make_mesh(data=8)
        >>> x = jax.ShapeDtypeStruct((16, 4), "float32")
        >>> ledger = ft.ledger(
        ...     lambda x: x.sum(0), x, in_shardings=ft.P("data"), mesh=mesh
        ... )
        >>> ledger.collectives[0].kind
        'all-reduce'
    """
    call = call_of("ledger", fn, args, kwargs, in_shardings, out_shardings, mesh)
    return call.compiled()[0]


def layouts(
    fn: Callable[..., Tree],
    /,
    *args: Tree,
    in_shardings: LayoutTree = None,
    out_shardings: LayoutTree = None,
    mesh: Mesh | AbstractMesh | None = None,
    **kwargs: Tree,
) -> Layouts:
    """Return how each operation in a function is laid out, and why, without compiling the function.

    Args:
        fn: a function, as in `ft.ledger`.
        *args: the positional arguments of `fn`, which may be abstract.
        in_shardings: the layouts of the arguments, as in `ft.jit`. Omit them if the function is
            already jitted.
        out_shardings: the layout of the result. Omit it if the function is already jitted.
        mesh: the mesh of the program. `mesh` is ignored for a function jitted by another library.
        **kwargs: the keyword arguments of `fn`.

    Raises:
        FunctreeError: if `fn` is not a function.
        FunctreeError: if a layout is passed for a function that is already jitted.
        FunctreeError: if a mesh is passed for a function made with `ft.jit`.
        FunctreeError: if this version of JAX does not have Shardy's passes.

    Examples:
        >>> mesh = ft.make_mesh(data=2, model=4)
        >>> w = jax.ShapeDtypeStruct((64, 32), "float32")
        >>> x = jax.ShapeDtypeStruct((16, 64), "float32")
        >>> specs = (ft.P(None, "model"), ft.P("data"))
        >>> layouts = ft.layouts(
        ...     lambda w, x: x @ w, w, x, in_shardings=specs, mesh=mesh
        ... )
        >>> layouts.rows[-1].array, layouts.rows[-1].decided
        ('f32[16/data, 32/model]', 'data by x, model by w')
    """
    call = call_of("layouts", fn, args, kwargs, in_shardings, out_shardings, mesh)
    return call.layouts()


class LoweredCall(NamedTuple):
    """A lowered call of a function that functree or another library jitted.

    Attributes:
        name: the name of the function.
        lowered: JAX's lowered function.
        parameters: the path of each array of the call, in JAX's order.
        results: the path of each array of the result.
        layouts: a function that returns the layouts.
        compiled: a function that compiles the program, and returns its ledger and its text.
        of_arrays: a function that calls the jitted function with values for `arrays`.
        arrays: the arrays of the call, which may be abstract. Their order may differ from JAX's.
        mesh: the mesh to enter around a call, or None for the current mesh.
        fn: functree's function, or None if another library jitted it.
    """

    name: str
    lowered: Lowered
    parameters: Sequence[Path]
    results: Sequence[Path]
    layouts: Callable[[], Layouts]
    compiled: Callable[[], tuple[Ledger, str]]
    of_arrays: Callable[..., Tree]
    arrays: Sequence[AnyArray]
    mesh: Mesh | None = None
    fn: Function[..., Tree] | None = None


def call_of(
    what: str,
    fn: Any,
    args: Sequence[Tree],
    kwargs: dict[str, Tree],
    in_shardings: LayoutTree,
    out_shardings: LayoutTree,
    mesh: Mesh | AbstractMesh | None,
) -> LoweredCall:
    """Lower a call of a function. Jit the function first, unless it is already jitted.

    Raises:
        FunctreeError: if `fn` is not a function.
        FunctreeError: if a layout is passed for a function that is already jitted.
        FunctreeError: if a mesh is passed for a function made with `ft.jit`.
    """
    check(f"{what}: invalid arguments", fn=(fn, FUNCTION))
    # Equinox returns a jitted method as an `eqx.Partial`, which has no `lower` of its own.
    while isinstance(fn, eqx.Partial) and hasattr(fn.func, "lower"):
        fn, args, kwargs = fn.func, (*fn.args, *args), {**fn.keywords, **kwargs}
    # Other libraries have their own classes for jitted functions, all with a method `lower`.
    if not hasattr(fn, "lower"):
        fn = jit(fn, in_shardings=in_shardings, out_shardings=out_shardings, mesh=mesh)
    else:
        given = {"in_shardings": in_shardings, "out_shardings": out_shardings}
        # A mesh names the mesh axes of another library's program. A function made with `ft.jit` has
        # its own mesh.
        if isinstance(fn, Function):
            given["mesh"] = mesh
        options = [f"`{name}=`" for name, value in given.items() if value is not None]
        if options:
            raise FunctreeValueError(
                f"{what}: {_name(fn)} is already jitted: pass {' and '.join(options)} where you "
                "jit it"
            )
    if isinstance(fn, Function):
        return _own_call(fn, args, kwargs)
    used = None if mesh is None else mesh_view(mesh).mesh
    return _others_call(fn, args, kwargs, used)


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", repr(fn))


def _own_call(
    fn: Function[..., Tree], args: Sequence[Tree], kwargs: dict[str, Tree]
) -> LoweredCall:
    traced = fn.trace(*args, **kwargs)
    lowered = traced.lower()

    def compiled() -> tuple[Ledger, str]:
        stage = lowered.compile()
        return stage.ledger(), stage.as_text() or ""

    jitted, arrays = traced.of_arrays()
    return LoweredCall(
        _name(fn),
        lowered.jax,
        traced.paths,
        lowered.jax.out_info.paths(),
        lowered.layouts,
        compiled,
        inspect.unwrap(jitted),
        arrays,
        traced.entered,
        fn,
    )


def _others_call(
    fn: Any, args: Sequence[Tree], kwargs: dict[str, Tree], mesh: Mesh | AbstractMesh | None
) -> LoweredCall:
    """Lower a call of a function that another library jitted."""
    wrapped = fn.lower(*args, **kwargs)
    # A library may wrap JAX's stages, as Flax does.
    lowered = getattr(wrapped, "lowered", wrapped)
    known = _paths_in_call(fn, wrapped, lowered, args, kwargs)
    parameters, names = _parameters(fn, lowered, len(args), known)
    entries, _ = tree_flatten_with_path(lowered.out_info)
    # Flax's program also returns its input modules, in the same trees.
    results = [known.get(Path.of(keys), Path.of(keys)) for keys, _ in entries]

    module = lowered.compiler_ir("stablehlo")

    @functools.cache
    def found_layouts() -> Layouts:
        unnamed = layouts_of(module, results)
        return named(unnamed, [parameters[i] for i in _used(unnamed, names)]) or unnamed

    def compiled() -> tuple[Ledger, str]:
        with heard_compiling() as heard:
            stage = wrapped.compile()
        stage = getattr(stage, "compiled", stage)
        ledger = ledger_of(
            stage,
            _name(fn),
            parameters,
            results,
            mesh,
            heard.warnings,
            layouts=found_layouts,
            of_program=False,
        )
        return ledger, stage.as_text() or ""

    of_arrays, arrays = _of_arrays(fn, args, kwargs)
    return LoweredCall(
        _name(fn),
        lowered,
        parameters,
        results,
        found_layouts,
        compiled,
        of_arrays,
        arrays,
    )


def _of_arrays(
    fn: Any, args: Sequence[Tree], kwargs: dict[str, Tree]
) -> tuple[Callable[..., Tree], list[AnyArray]]:
    """Return a function from the arrays of a call to the arrays of its result, and the former."""
    skeleton, arrays = Skeleton.apart((tuple(args), kwargs))

    def of_arrays(*arrays: AnyArray) -> Tree:
        positional, by_name = skeleton.fill(arrays)
        return Skeleton.apart(fn(*positional, **by_name))[1]

    return of_arrays, arrays


def _parameters(
    fn: Any, lowered: Lowered, positional: int, known: Mapping[Path, Path]
) -> tuple[list[Path], list[str]]:
    """Return the path of each array of a call, in JAX's order, and the end of JAX's name for it.

    JAX's name is `params['up']` for the array at `params.up`. If the function's signature does not
    apply to JAX's trees, only `['up']` is known.
    """
    # JAX does not record which arguments are static. If some are, paths begin with a position.
    traced = len(lowered.in_avals[0])
    beginnings = _beginnings(fn if traced == positional else None, traced)
    paths, names = list[Path](), list[str]()
    for keys, _ in tree_flatten_with_path(lowered.in_avals)[0]:
        path = Path.of(keys)
        which, first, *rest = path
        beginning = beginnings[first] if which == 0 else (first,)
        paths.append(known.get(path) or Path((*beginning, *rest)))
        name, *index = beginning
        if known or traced != positional:
            name, index = "", []
        names.append(name + "".join(f"[{i}]" for i in index) + keystr(keys[2:]))
    return paths, names


def _used(layouts: Layouts, names: Sequence[str]) -> list[int]:
    """Return the indices of the arrays in a call that its program uses.

    JAX drops unused arrays, so the remaining arrays are recognized by their names. If the names are
    ambiguous, the list is empty.
    """
    in_program = [row.name for row in layouts if row.op == ARGUMENT]
    if len(in_program) == len(names):
        return list(range(len(names)))
    used: list[int] = []
    for name in in_program:
        end = max(filter(name.endswith, names), key=len, default="")
        if names.count(end) != 1:
            return []
        used.append(names.index(end))
    return used


# The paths of arrays in the call
#
# Other libraries pass different trees to JAX: `eqx.filter_jit` passes a tuple of leaves, and
# `nnx.jit` the variables of each module.


Beginning = tuple[Hashable, ...]
"""The keys with which the paths of an argument's arrays begin: `("x",)`, or `("rest", 1)` for the
second argument in `*rest`."""


def _beginnings(fn: AnyFunction | None, number: int) -> list[Beginning]:
    """Return the keys with which the paths of each positional argument begin.

    A path begins with a name from the function's signature. If Python cannot read the signature,
    the path begins with a position.
    """
    by_position: list[Beginning] = [("args", i) for i in range(number)]
    if fn is None:
        return by_position
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return by_position
    by_name: list[Beginning] = []
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            by_name.append((parameter.name,))
        elif parameter.kind is parameter.VAR_POSITIONAL:
            by_name.extend((parameter.name, i) for i in range(number - len(by_name)))
    return by_name or by_position


_Leaves = Iterable[tuple[Path, Any]]
"""The leaves of a call, with their paths in it."""


def _paths_in_call(
    fn: AnyFunction,
    wrapped: object,
    lowered: Lowered,
    args: Sequence[Tree],
    kwargs: Mapping[str, Tree],
) -> dict[Path, Path]:
    """Map the paths in JAX's trees to the paths in the call.

    The map is empty if the paths in the call are unknown, or if JAX itself jitted the function.

    Args:
        fn: the jitted function.
        wrapped: the library's wrapper around JAX's lowered function, or that function.
        lowered: JAX's lowered function.
        args: the positional arguments of the call.
        kwargs: the keyword arguments of the call.
    """
    if wrapped is lowered:
        return {}
    # Equinox uses this function to pass the leaves to JAX, in Equinox's own order.
    preprocess = getattr(wrapped, "preprocess", None)
    if preprocess is None:
        return _by_order(lowered, list(_given(fn, args, kwargs)))
    # A new array marks each leaf, since one array may be at several paths.
    args, kwargs = tree_map(lambda x: np.empty(0) if is_array(x) else x, (tuple(args), kwargs))
    paths = {id(leaf): path for path, leaf in _given(fn, args, kwargs)}
    # A called module has arrays too. Their paths begin with the name of the first parameter of
    # `__call__`.
    fun = getattr(fn, "__wrapped__", None)
    module, *_ = inspect.signature(type(fun).__call__).parameters
    for path, leaf in _leaves((module,), fun):
        paths.setdefault(id(leaf), path)
    entries, _ = tree_flatten_with_path(
        (preprocess(getattr(wrapped, "info", None), args, kwargs), {})
    )
    return {Path.of(keys): paths[id(x)] for keys, x in entries if is_array(x) and id(x) in paths}


def _given(fn: AnyFunction, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> _Leaves:
    """Yield the leaves of a call."""
    for beginning, value in zip(_beginnings(fn, len(args)), args, strict=False):
        yield from _leaves(beginning, value)
    for key in sorted(kwargs):
        yield from _leaves((key,), kwargs[key])


def _leaves(beginning: Beginning, value: Tree) -> _Leaves:
    for path, leaf in tree_flatten_with_path(value)[0]:
        yield Path((*beginning, *Path.of(path))), leaf


def _by_order(lowered: Lowered, call: _Leaves) -> dict[Path, Path]:
    """Map JAX's paths to the call's paths by position, if both list leaves of the same shapes.

    If the shapes differ, the map is empty. JAX also traces Python numbers, except in static
    arguments. Paths in Flax's modules can be mapped too, although JAX gets a variable at several
    paths only once.
    """
    entries, _ = tree_flatten_with_path(lowered.in_avals)
    wanted = [aval.shape for _, aval in entries]
    traced = [given for given in call if is_array(given[1]) or isinstance(given[1], Number)]
    arrays = [given for given in traced if is_array(given[1])]
    for leaves in (traced, arrays, _once(traced), _once(arrays)):
        if [np.shape(leaf) for _, leaf in leaves] == wanted:
            pairs = zip(entries, leaves, strict=True)
            return {Path.of(keys): path for (keys, _), (path, _) in pairs}
    return {}


def _once(given: Sequence[tuple[Path, Any]]) -> list[tuple[Path, Any]]:
    """Return the leaves, with each array only at its first path."""
    first = {id(leaf): path for path, leaf in reversed(given) if is_array(leaf)}
    return [(path, leaf) for path, leaf in given if first.get(id(leaf), path) == path]
