"""A function, jitted or not, and its arguments ─► the `Ledger` of its compiled program."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
from jax.sharding import AbstractMesh, Mesh
from jax.tree_util import tree_flatten_with_path

from functree.argument_checks import FUNCTION, check
from functree.calls.callbacks import check_callbacks
from functree.calls.function import Function
from functree.calls.program_ledger import heard_compiling, ledger_of
from functree.calls.signature import AnyFunction
from functree.compiled.ledger import Ledger
from functree.devices.meshes import MeshLike, mesh_view
from functree.errors import FunctreeValueError
from functree.layout.layout import LayoutTree
from functree.transforms.jit.jit import jit
from functree.transforms.ledger_paths import Beginning, paths_in_call, positional
from functree.tree.arrays import Tree
from functree.tree.paths import Path


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
    check("ledger cannot compile so", fn=(fn, FUNCTION))
    # A method that Equinox has jitted: by itself the partial is a module with fields of its own.
    while isinstance(fn, eqx.Partial) and hasattr(fn.func, "lower"):
        fn, args, kwargs = fn.func, (*fn.args, *args), {**fn.keywords, **kwargs}
    # By what it can do: other libraries have classes of their own for jitted functions.
    if not hasattr(fn, "lower"):
        fn = jit(fn, in_shardings=in_shardings, out_shardings=out_shardings, mesh=mesh)
    elif in_shardings is not None or out_shardings is not None:
        name = getattr(fn, "__name__", repr(fn))
        raise FunctreeValueError(
            f"ledger: {name} is jitted already: give the layouts where it is jitted"
        )
    if isinstance(fn, Function):
        return fn.lower(*args, **kwargs).compile().ledger()
    return _of_others(fn, args, kwargs, mesh)


def _of_others(fn: Any, args: Sequence[Tree], kwargs: dict[str, Tree], mesh: MeshLike) -> Ledger:
    """The ledger of a function that another library has jitted."""
    name = getattr(fn, "__name__", repr(fn))
    lowered = _lowered(fn, args, kwargs, name)
    with heard_compiling() as heard:
        wrapped = lowered.compile()
    # A wrapper around JAX's stages, such as that of Flax, has them inside.
    compiled = getattr(wrapped, "compiled", wrapped)
    # An argument that the program does not use has None instead of a sharding.
    entries, _ = tree_flatten_with_path(compiled.input_shardings, is_leaf=lambda one: one is None)
    results, _ = tree_flatten_with_path(compiled.output_shardings)
    beginnings = _beginnings(fn, len(args), len(compiled.input_shardings[0]))
    known = paths_in_call(fn, wrapped, compiled, args, kwargs)
    parameters: list[Path] = []
    for path in (Path.of(path) for path, _ in entries):
        parameters.append(known.get(path) or _argument_path(path, beginnings))
    # Flax returns its modules too, in the trees in which they came.
    outputs = [known.get(path, path) for path in (Path.of(path) for path, _ in results)]
    used = None
    if mesh is not None:
        used = mesh_view(mesh).mesh
    return ledger_of(compiled, name, parameters, outputs, used, heard.warnings, of_program=False)


def _lowered(fn: Any, args: Sequence[Tree], kwargs: dict[str, Tree], name: str) -> Any:
    """What another library's jitted function lowers to, whose stages may be its own."""
    if not isinstance(fn, jax.stages.Wrapped):
        return fn.lower(*args, **kwargs)
    traced = fn.trace(*args, **kwargs)
    # Only JAX's own has the program; that of Flax has it inside, as something of its own.
    if isinstance(traced, jax.stages.Traced):
        given = [getattr(one, "sharding", None) for one in jax.tree.leaves((args, kwargs))]
        check_callbacks(name, traced.jaxpr, given)
    return traced.lower()


def _beginnings(fn: AnyFunction, given: int, traced: int) -> list[Beginning]:
    """The beginnings of the paths of the arguments that are passed by position.

    If some of them are static, JAX does not say which ones. Then arguments are named by their
    positions, as they are if the function has no signature that Python can read.
    """
    by_position: list[Beginning] = [("args", i) for i in range(traced)]
    if given != traced:
        return by_position
    return positional(fn, given) or by_position


def _argument_path(path: Path, beginnings: Sequence[Beginning]) -> Path:
    """The path of an array in `(args, kwargs)` ─► its path in the function's arguments."""
    which, first, *rest = path
    if which == 0:
        return Path((*beginnings[first], *rest))
    return Path((first, *rest))
