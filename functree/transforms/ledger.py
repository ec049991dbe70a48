"""A function, jitted or not, and its arguments ─► the `Layouts` of its lowered program, and the
`Ledger` of its compiled one."""

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import groupby
from numbers import Number
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.stages import Lowered
from jax.tree_util import keystr, tree_flatten_with_path

from functree.argument_checks import FUNCTION, check
from functree.calls.callbacks import check_callbacks
from functree.calls.function import Function
from functree.calls.program_ledger import heard_compiling, ledger_of
from functree.calls.signature import AnyFunction
from functree.compiled.layouts import Layouts, layouts_of, named
from functree.compiled.ledger import Ledger
from functree.compiled.shardy import ARGUMENT
from functree.devices.meshes import MeshLike, mesh_view
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
    """Compile a function, and return the ledger of its program. Nothing is run.

    Args:
        fn: a function; or what `ft.jit`, `jax.jit` or another library has made of one, with a
            method `lower`.
        *args: its arguments, which may be abstract.
        in_shardings: the layouts of the arguments, as in `ft.jit`. Not for a function that is
            jitted already.
        out_shardings: the layout of the result, likewise.
        mesh: the mesh; of a function that is jitted already, the mesh whose axes the ledger names,
            if its shardings are not on one.
        **kwargs: its arguments by name.

    Raises:
        FunctreeError: `fn` is not a function; it is jitted already, and a layout is given; the
            compiler gives no text.

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
    """How each operation of a function will be laid out, and who has decided so. Nothing is
    compiled.

    Args:
        fn: a function, as in `ft.ledger`.
        *args: its arguments, which may be abstract.
        in_shardings: the layouts of the arguments, as in `ft.jit`. Not for a function that is
            jitted already.
        out_shardings: the layout of the result, likewise.
        mesh: the mesh, likewise.
        **kwargs: its arguments by name.

    Raises:
        FunctreeError: `fn` is not a function; it is jitted already, and a layout is given; this
            version of JAX does not have the passes of Shardy.

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
    """A call of a jitted function, which may be one of another library.

    Attributes:
        name: the name of the function.
        lowered: JAX's lowered function.
        parameters: the path of each array of the call, in JAX's order.
        results: the path of each array of the result.
        layouts: finds its layouts.
        compiled: compiles it, for its ledger and the text of its program.
        of_arrays: calls the jitted function with the arrays of the call.
        arrays: these arrays, which may be abstract, in an order of their own.
        mesh: the mesh to enter around a call; None for the current one.
        fn: the function of functree; None if it is that of another library.
    """

    name: str
    lowered: Lowered
    parameters: Sequence[Path]
    results: Sequence[Path]
    layouts: Callable[[], Layouts]
    compiled: Callable[[], tuple[Ledger, str]]
    of_arrays: Callable[..., Tree]
    arrays: Sequence[AnyArray]
    mesh: Mesh | None
    fn: Function[..., Tree] | None


def call_of(
    what: str,
    fn: Any,
    args: Sequence[Tree],
    kwargs: dict[str, Tree],
    in_shardings: LayoutTree,
    out_shardings: LayoutTree,
    mesh: Mesh | AbstractMesh | None,
) -> LoweredCall:
    """The call of a function, which is jitted if it is not.

    Raises:
        FunctreeError: it is not a function; it is jitted, and a layout is given.
    """
    check(f"{what} cannot compile so", fn=(fn, FUNCTION))
    # A method that Equinox has jitted: by itself the partial is a module with fields of its own.
    while isinstance(fn, eqx.Partial) and hasattr(fn.func, "lower"):
        fn, args, kwargs = fn.func, (*fn.args, *args), {**fn.keywords, **kwargs}
    # By what it can do: other libraries have classes of their own for jitted functions.
    if not hasattr(fn, "lower"):
        fn = jit(fn, in_shardings=in_shardings, out_shardings=out_shardings, mesh=mesh)
    elif in_shardings is not None or out_shardings is not None:
        raise FunctreeValueError(
            f"{what}: {_name(fn)} is jitted already: give the layouts where it is jitted"
        )
    if isinstance(fn, Function):
        return _own_call(fn, args, kwargs)
    return _others_call(fn, args, kwargs, mesh)


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
    fn: Any, args: Sequence[Tree], kwargs: dict[str, Tree], mesh: MeshLike
) -> LoweredCall:
    """The call of a function that another library has jitted."""
    wrapped = _lowered(fn, args, kwargs)
    # A wrapper around JAX's stages, such as that of Flax, has them inside.
    lowered = getattr(wrapped, "lowered", wrapped)
    known: dict[Path, Path] = {}
    if wrapped is not lowered:
        known = _paths_in_call(fn, wrapped, lowered, args, kwargs)
    parameters = _parameters(fn, lowered, len(args), known)
    entries, _ = tree_flatten_with_path(lowered.out_info)
    # Flax returns its modules too, in the trees in which they came.
    results = [known.get(path, path) for path in (Path.of(path) for path, _ in entries)]

    @functools.cache
    def found_layouts() -> Layouts:
        found = layouts_of(lowered, results)
        own = None if known else fn
        used = _used(found, _ends_of_names(own, lowered, len(args)))
        return named(found, [parameters[i] for i in used]) or found

    def compiled() -> tuple[Ledger, str]:
        return _others_ledger(_name(fn), wrapped, parameters, results, mesh, found_layouts)

    skeleton, arrays = Skeleton.apart((tuple(args), kwargs))

    def of_arrays(*arrays: AnyArray) -> Tree:
        positional, by_name = skeleton.fill(arrays)
        return Skeleton.apart(fn(*positional, **by_name))[1]

    return LoweredCall(
        _name(fn),
        lowered,
        parameters,
        results,
        found_layouts,
        compiled,
        of_arrays,
        arrays,
        None,
        None,
    )


def _others_ledger(
    name: str,
    lowered: Any,
    parameters: Sequence[Path],
    results: Sequence[Path],
    mesh: MeshLike,
    layouts: Callable[[], Layouts],
) -> tuple[Ledger, str]:
    """The ledger and the text of what another library's lowered function compiles to."""
    with heard_compiling() as heard:
        stage = lowered.compile()
    compiled = getattr(stage, "compiled", stage)
    used = None if mesh is None else mesh_view(mesh).mesh
    ledger = ledger_of(
        compiled,
        name,
        parameters,
        results,
        used,
        heard.warnings,
        layouts=layouts,
        of_program=False,
    )
    return ledger, compiled.as_text() or ""


def _parameters(
    fn: Any, lowered: Lowered, positional: int, known: Mapping[Path, Path]
) -> list[Path]:
    """The path of each array of a call, in JAX's order."""
    entries, _ = tree_flatten_with_path(lowered.in_avals)
    # If some arguments are static, JAX does not say which ones: the others have their positions.
    traced = len(lowered.in_avals[0])
    beginnings = _beginnings(fn if traced == positional else None, traced)
    found: list[Path] = []
    for path in (Path.of(path) for path, _ in entries):
        which, first, *rest = path
        beginning = beginnings[first] if which == 0 else (first,)
        found.append(known.get(path) or Path((*beginning, *rest)))
    return found


def _ends_of_names(fn: AnyFunction | None, lowered: Lowered, positional: int) -> list[str]:
    """How JAX's name of each array of a call ends: `['up']` of `params['up']`; of the arguments of
    a function whose signature is known, all of it."""
    traced = len(lowered.in_avals[0])
    beginnings = _beginnings(fn, traced) if fn is not None and traced == positional else None
    found: list[str] = []
    for path, _ in tree_flatten_with_path(lowered.in_avals)[0]:
        which, first, *_ = Path.of(path)
        end = keystr(path[2:])
        if which == 0 and beginnings is not None:
            name, *index = beginnings[first]
            end = name + "".join(f"[{i}]" for i in index) + end
        found.append(end)
    return found


def _used(layouts: Layouts, ends: Sequence[str]) -> list[int]:
    """The indices of the arrays of a call that its program has, by the ends of JAX's names: JAX
    leaves out those that are not used. Empty if it is not certain."""
    names = [row.name for row in layouts if row.op == ARGUMENT]
    if len(names) == len(ends):
        return list(range(len(names)))
    earliest = _earliest(names, ends)
    backwards = _earliest(names[::-1], ends[::-1])
    latest = [len(ends) - 1 - i for i in reversed(backwards)]
    return earliest if earliest == latest else []


def _earliest(names: Sequence[str], ends: Sequence[str]) -> list[int]:
    """The earliest ends of these names, in their order."""
    left = iter(enumerate(ends))
    return [next((i for i, end in left if name.endswith(end)), -1) for name in names]


def _lowered(fn: Any, args: Sequence[Tree], kwargs: dict[str, Tree]) -> Any:
    """What another library's jitted function lowers to, whose stages may be its own."""
    if not isinstance(fn, jax.stages.Wrapped):
        return fn.lower(*args, **kwargs)
    traced = fn.trace(*args, **kwargs)
    # Only JAX's own has the program; that of Flax has it inside, as something of its own.
    if isinstance(traced, jax.stages.Traced):
        given = [getattr(one, "sharding", None) for one in jax.tree.leaves((args, kwargs))]
        check_callbacks(_name(fn), traced.jaxpr, given)
    return traced.lower()


# The paths of arrays in the call. Another library hands JAX other trees than those of the call:
# `eqx.filter_jit` a tuple of leaves, `nnx.jit` the variables of each module.


Beginning = tuple[Hashable, ...]
"""The beginning of the paths of an argument's arrays: `("x",)`, or `("rest", 1)` for the second of
`*rest`."""


def _beginnings(fn: AnyFunction | None, number: int) -> list[Beginning]:
    """The beginnings of the paths of that many positional arguments: by the signature of a
    function, or by position if there is none that Python can read."""
    by_position: list[Beginning] = [("args", i) for i in range(number)]
    if fn is None:
        return by_position
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return by_position
    found: list[Beginning] = []
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            found.append((parameter.name,))
        elif parameter.kind is parameter.VAR_POSITIONAL:
            found.extend((parameter.name, i) for i in range(number - len(found)))
    return found or by_position


class _Given(NamedTuple):
    """A leaf of a call.

    Attributes:
        argument: the position or the name of its argument.
        path: its path in the call.
        leaf: the leaf.
    """

    argument: int | str
    path: Path
    leaf: object


def _paths_in_call(
    fn: AnyFunction,
    wrapped: object,
    lowered: Lowered,
    args: Sequence[Tree],
    kwargs: Mapping[str, Tree],
) -> dict[Path, Path]:
    """The path of each array in the call, by its path in the trees that JAX has; empty if the paths
    are not known.

    Args:
        fn: the jitted function.
        wrapped: what the library has made of JAX's lowered function.
        lowered: JAX's lowered function.
        args: the positional arguments of the call.
        kwargs: the others.
    """
    call: list[_Given] = []
    for i, (beginning, value) in enumerate(zip(_beginnings(fn, len(args)), args, strict=False)):
        call.extend(_leaves(i, beginning, value))
    for key in sorted(kwargs):
        call.extend(_leaves(key, (key,), kwargs[key]))
    # Equinox hands JAX the leaves themselves, in an order of its own, by this function.
    preprocess = getattr(wrapped, "preprocess", None)
    if preprocess is None:
        return _by_order(lowered, call)
    info = getattr(wrapped, "info", None)
    return _by_identity(fn, call, args, kwargs, lambda *args: preprocess(info, *args))


def _leaves(argument: int | str, beginning: Beginning, value: Tree) -> Iterator[_Given]:
    for path, leaf in tree_flatten_with_path(value)[0]:
        yield _Given(argument, Path((*beginning, *Path.of(path))), leaf)


def _by_identity(
    fn: AnyFunction,
    call: Sequence[_Given],
    args: Sequence[Tree],
    kwargs: Mapping[str, Tree],
    handed: Callable[[Sequence[Tree], Mapping[str, Tree]], Tree],
) -> dict[Path, Path]:
    """The paths, from a function that returns what JAX gets for a call."""
    paths: dict[int, Path] = {}
    fun = getattr(fn, "__wrapped__", None)
    # A module that is called has arrays of its own, below the first parameter of its method.
    own, *_ = inspect.signature(type(fun).__call__).parameters
    for one in _leaves(own, (own,), fun):
        paths.setdefault(id(one.leaf), one.path)
    # A new array for each one, since an array may be at several paths. And in the place of each
    # argument a list of its leaves, so that no node of the user's is built with them.
    new: dict[int | str, list[object]] = {i: [] for i in (*range(len(args)), *kwargs)}
    for one in call:
        mark = np.empty(0) if isinstance(one.leaf, jax.Array | np.ndarray) else one.leaf
        new[one.argument].append(mark)
        if mark is not one.leaf:
            paths[id(mark)] = one.path
    tree = handed([new[i] for i in range(len(args))], {key: new[key] for key in kwargs})
    found: dict[Path, Path] = {}
    for path, leaf in tree_flatten_with_path((tree, {}))[0]:
        if id(leaf) in paths:
            found[Path.of(path)] = paths[id(leaf)]
    return found


def _by_order(lowered: Lowered, call: Sequence[_Given]) -> dict[Path, Path]:
    """The paths, if JAX has the leaves in the order of the call, as those of Flax' modules are; an
    array that is at several of their paths, once."""
    entries, _ = tree_flatten_with_path(lowered.in_avals)
    found = [Path.of(path) for path, _ in entries]
    wanted = _form([path[:2] for path in found], [aval for _, aval in entries])
    # JAX traces numbers too, but not those of static arguments.
    arrays = [one for one in call if is_array(one.leaf)]
    traced = [one for one in call if is_array(one.leaf) or isinstance(one.leaf, Number)]
    for given in (traced, arrays, _once(traced), _once(arrays)):
        # Otherwise JAX has something else, and no name is guessed.
        if _form([one.argument for one in given], [one.leaf for one in given]) == wanted:
            return dict(zip(found, [one.path for one in given], strict=True))
    return {}


def _once(given: Sequence[_Given]) -> list[_Given]:
    """The leaves, each array only at the first of its paths."""
    first = {id(one.leaf): one for one in reversed(given) if is_array(one.leaf)}
    return [one for one in given if first.get(id(one.leaf), one) is one]


def _form(arguments: Sequence[Hashable], leaves: Sequence[object]) -> tuple[object, ...]:
    """What is the same for leaves in the same order: the number of each argument's leaves, and
    their shapes."""
    sizes = [len(list(run)) for _, run in groupby(arguments)]
    return sizes, [getattr(leaf, "shape", ()) for leaf in leaves]
