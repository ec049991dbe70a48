"""A function of `ft.jit` ─► bytes that run in a process without functree, on the same shardings."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.export
from jax.sharding import NamedSharding

from functree.calls.flat import FlatProgram
from functree.calls.function import BoundFunction
from functree.calls.program import around
from functree.calls.signature import Signature
from functree.errors import FunctreeError, Problem, count, did_you_mean
from functree.io.extras import foreign, needed
from functree.layout.plan.fold import bytes_text
from functree.layout.table import columns
from functree.parameters import TEXTS, Takes, check, shown
from functree.transforms.jit.jitted import Jit
from functree.tree.arrays import array_text, is_array
from functree.tree.bits import is_key
from functree.tree.leaf import Leaf, array_problem
from functree.tree.leaves import read
from functree.tree.paths import Path

_BYTES = Takes("bytes", lambda value: isinstance(value, bytes | bytearray))
_NAMES = Takes(
    "names of axes, or a dict from them to expressions",
    lambda value: TEXTS.fits(value) and (not isinstance(value, Mapping) or all(map(_is_text, value.values()))),
)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


class Exported:
    """An exported function; made by `ft.export`. Its arguments are arrays, in the order of their paths.

    Attributes:
        exported: JAX's `jax.export.Exported`, with types, shardings and platforms.
        paths: the path of each argument; None if it was read from bytes, which do not have them.

    Examples:
        >>> double = ft.export(ft.jit(lambda tree: {"y": 2 * tree["x"]}), {"x": jnp.arange(3.0)})
        >>> double.paths
        (Path('tree.x'),)
        >>> ft.Exported.deserialize(double.serialize()).call(jnp.ones(3))
        (Array([2., 2., 2.], dtype=float32),)
    """

    def __init__(self, exported: jax.export.Exported, paths: tuple[Path, ...] | None = None):
        self.exported: jax.export.Exported = exported
        self.paths: tuple[Path, ...] | None = paths

    def call(self, *arrays: Any) -> tuple[jax.Array, ...]:
        """Run it. Sharded arguments have to be on a mesh with as many devices as it was exported for.

        Returns:
            The arrays of the result, in the order of their paths.

        Raises:
            FunctreeError: it has another number of arguments, or one of another shape or dtype.
        """
        if len(arrays) != len(self.exported.in_avals):
            raise FunctreeError(
                f"{self.exported.fun_name} takes {len(self.exported.in_avals)} arrays, in the order of their paths, "
                f"and {len(arrays)} were given: {self._names() or 'see `exported.in_avals`'}"
            )
        if problems := list(self._misfits(arrays)):
            raise FunctreeError(
                f"{self.exported.fun_name} cannot run: {count(len(problems), 'argument')} differ", problems
            )
        return tuple(self.exported.call(*arrays))

    def serialize(self) -> bytes:
        """The bytes, which `jax.export.deserialize` reads too, without functree.

        Raises:
            FunctreeError: flatbuffers is not installed.
        """
        needed("flatbuffers", "export")
        return bytes(self.exported.serialize())

    @classmethod
    def deserialize(cls, data: bytes) -> "Exported":
        """The function of some bytes.

        Raises:
            FunctreeError: they are not bytes, or not those of a function; flatbuffers is not installed.
        """
        check("nothing is read", data=(data, _BYTES))
        needed("flatbuffers", "export")
        with foreign(FunctreeError, "these bytes are not an exported function"):
            return cls(jax.export.deserialize(bytearray(data)))

    def __str__(self) -> str:
        exported = self.exported
        size = f"{exported.nr_devices} device" + ("s" if exported.nr_devices != 1 else "")
        lines = columns(("argument", "array"), (46, 24), "bytes")
        for i, value in enumerate(exported.in_avals):
            path = str(i) if self.paths is None else str(self.paths[i])
            lines += columns((path, array_text(value)), (46, 24), _bytes(value))
        note = f"{exported.fun_name} for {', '.join(exported.platforms)} on {size}; {len(exported.out_avals)} results"
        return "\n".join([*(line.rstrip() for line in lines), "", note])

    def __repr__(self) -> str:
        return f"<Exported of {self.exported.fun_name}, {len(self.exported.in_avals)} arguments>"

    def _misfits(self, arrays: Sequence[Any]) -> Iterator[Problem]:
        """The arguments that are not as they were exported."""
        for i, (array, wanted) in enumerate(zip(arrays, self.exported.in_avals, strict=True)):
            path = Path((i,)) if self.paths is None else self.paths[i]
            if not is_array(array):
                yield Problem(path, None, shown(array), f"was exported as {array_text(wanted)}", "give an array")
                continue
            sizes = [(one, size) for one, size in zip(array.shape, wanted.shape, strict=False) if isinstance(size, int)]
            same = array.ndim == wanted.ndim and all(one == size for one, size in sizes)
            if not same or _dtype(array) != wanted.dtype:
                yield array_problem(path, array, f"was exported as {array_text(wanted)}", "")

    def _names(self) -> str:
        return ", ".join(map(str, self.paths or ()))


def _dtype(array: Any) -> Any:
    """The dtype that an array has for JAX."""
    return array.dtype if is_key(array.dtype) else jax.dtypes.canonicalize_dtype(array.dtype)


def _bytes(value: Any) -> str:
    """The bytes of an array; its shape if that has symbolic sizes."""
    if all(isinstance(size, int) for size in value.shape):
        return bytes_text(value.size * value.dtype.itemsize)
    return "-"


def export(
    f: Any,
    *args: Any,
    platforms: Sequence[str] | None = None,
    symbolic: Collection[str] | Mapping[str, str] | None = None,
) -> Exported:
    """Export a function of `ft.jit`, with the shardings of its arguments and of its result.

    What was donated is not donated by the exported function. Give it to the `jax.jit` around the call:
    `jax.jit(exported.call, donate_argnums=...)`.

    Args:
        f: a function of `ft.jit`, or a method.
        *args: its arguments: arrays, or abstract ones with shardings.
        platforms: `("cpu", "tpu", "cuda")`; by default that of this process.
        symbolic: the axes whose sizes stay open, by the names in the annotations of the parameters: `["batch"]`, or
            with an expression of JAX's symbolic sizes, `{"batch": "8*b"}`.

    Raises:
        FunctreeError: `f` is not a function of `ft.jit`; no argument has such an axis.

    Examples:
        >>> @ft.jit
        ... def f(w: Float[Array, "embed hidden"], x: Float[Array, "batch embed"]):
        ...     return x @ w
        >>> exported = ft.export(f, jnp.ones((4, 8)), jnp.ones((2, 4)), platforms=("cpu", "tpu"), symbolic=["batch"])
        >>> exported.call(jnp.ones((4, 8)), jnp.ones((5, 4)))[0].shape
        (5, 8)
    """
    name = getattr(f, "__name__", None) or shown(f)
    function = f.__func__ if isinstance(f, BoundFunction) else f
    if not isinstance(function, Jit):
        raise FunctreeError(f"export takes a function of `ft.jit`: write `ft.export(ft.jit({name}), ...)`")
    check(
        f"{name} cannot be exported so",
        platforms=(platforms, TEXTS.or_none()),
        symbolic=(symbolic, _NAMES.or_none()),
    )
    if symbolic is not None:
        args = _with_symbols(f, args, symbolic)
    traced = f.trace(*args)
    program: FlatProgram = traced.of_arrays()
    with around(traced.entered):
        exported = jax.export.export(program.jitted, platforms=platforms)(*program.arguments)
    return Exported(exported, program.paths)


def _with_symbols(f: Any, args: tuple[Any, ...], symbolic: Collection[str] | Mapping[str, str]) -> tuple[Any, ...]:
    """The arguments, with symbolic sizes for some axes."""
    signature, bound = Signature.of(f)
    call = signature.bind(*bound.call(args, {}))
    tree = read(call)
    expressions = symbolic if isinstance(symbolic, Mapping) else {name: name for name in symbolic}
    known = dict.fromkeys(name for leaf in tree.leaves for name in leaf.axes if name is not None)
    problems = [
        Problem(None, None, f'"{name}"', f"no argument has this axis{did_you_mean(name, known)}", _ANNOTATE)
        for name in expressions
        if name not in known
    ]
    if problems:
        raise FunctreeError(f"{f.__name__} cannot be exported so", problems)
    scope = jax.export.SymbolicScope()
    sizes = {name: jax.export.symbolic_shape(text, scope=scope)[0] for name, text in expressions.items()}
    positional, _ = signature.arguments(tree.skeleton.fill([_with_sizes(leaf, sizes) for leaf in tree.leaves]))
    return positional[len(bound.args) :]


_ANNOTATE = 'name the axes of the parameter: `x: Float[Array, "batch embed"]`'


def _with_sizes(leaf: Leaf, sizes: Mapping[str, Any]) -> Any:
    """An argument; an abstract one if it has an axis of symbolic size."""
    if not any(name in sizes for name in leaf.axes):
        return leaf.value
    shape = [sizes.get(name, size) if name else size for name, size in zip(leaf.axes, leaf.shape, strict=True)]
    sharding = getattr(leaf.value, "sharding", None)
    placed = sharding if isinstance(sharding, NamedSharding) else None
    return jax.ShapeDtypeStruct(tuple(shape), leaf.value.dtype, sharding=placed)
