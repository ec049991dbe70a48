"""`ft.export` exports a function from `ft.jit`, so that it can run without functree."""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.export
import numpy as np
from jax.sharding import NamedSharding

from functree.argument_checks import TEXTS, Takes, check, checked, shown
from functree.calls.program import around
from functree.calls.signature import Signature
from functree.devices.placement import is_deleted, refuse_deleted
from functree.errors import FunctreeTypeError, FunctreeValueError, Problem, count, did_you_mean
from functree.io.extras import ForeignErrors, import_extra
from functree.labels.leaves import Leaf, array_problem, read
from functree.transforms.jit.jitted import Jit
from functree.tree.arrays import AnyArray, array_text, is_array, is_key
from functree.tree.paths import Path

_BYTES = Takes("bytes", lambda value: isinstance(value, bytes | bytearray))


def _are_names(value: object) -> bool:
    if isinstance(value, Mapping) and not all(isinstance(one, str) for one in value.values()):
        return False
    return TEXTS.fits(value)


_NAMES = Takes("axis names, or a dict from axis names to expressions", _are_names)


class Exported:
    """An exported function. `ft.export` builds it.

    The function takes and returns separate arrays, in the order of their paths, since `jax.export`
    does not serialize modules. Callers do not need the modules' classes.

    Attributes:
        exported: the `jax.export.Exported`, with types, shardings and platforms.
        paths: the path of each argument; None after `deserialize`, since the bytes contain no
            paths.

    Examples:
        >>> double = ft.export(
        ...     ft.jit(lambda tree: {"y": 2 * tree["x"]}), {"x": jnp.arange(3.0)}
        ... )
        >>> double.paths
        (Path('tree.x'),)
        >>> ft.Exported.deserialize(double.serialize()).call(jnp.ones(3))
        (Array([2., 2., 2.], dtype=float32),)
    """

    def __init__(self, exported: jax.export.Exported, paths: tuple[Path, ...] | None = None):
        self.exported: jax.export.Exported = exported
        self.paths: tuple[Path, ...] | None = paths

    def call(self, *arrays: Any) -> tuple[jax.Array, ...]:
        """Call the exported function.

        Sharded arguments must be on a mesh with as many devices as the function was exported for.

        Returns:
            The arrays of the result, in the order of their paths.

        Raises:
            FunctreeError: if the number of arguments is wrong.
            FunctreeError: if an argument is not an array.
            FunctreeError: if an argument does not have the exported shape and dtype.
            FunctreeError: if an argument was deleted.
        """
        if len(arrays) != len(self.exported.in_avals):
            raise FunctreeTypeError(
                f"{self.exported.fun_name} takes {count(len(self.exported.in_avals), 'array')}, "
                f"but got {len(arrays)}: `print(exported)` lists the arrays"
            )
        if any(map(is_deleted, arrays)):
            raise refuse_deleted(self.exported.fun_name, self._known_paths(), arrays)
        if problems := list(self._misfits(arrays)):
            raise FunctreeTypeError(
                f"{self.exported.fun_name}: {count(len(problems), 'argument')} cannot be used",
                problems,
            )
        return tuple(self.exported.call(*arrays))

    def serialize(self) -> bytes:
        """Return the function as bytes. They end with a digest, which `deserialize` checks.

        `jax.export.deserialize` reads these bytes without functree, and ignores the digest.

        Raises:
            FunctreeError: if flatbuffers is not installed.
        """
        import_extra("flatbuffers", "export")
        data = bytes(self.exported.serialize())
        # The digest can follow the data, since flatbuffers stores the length of its data.
        return data + _MARK + _digest(data)

    @classmethod
    def deserialize(cls, data: bytes) -> "Exported":
        """Read an exported function from bytes.

        Raises:
            FunctreeError: if `data` is not an exported function.
            FunctreeError: if the bytes have changed since they were written.
            FunctreeError: if flatbuffers is not installed.
        """
        check("Exported.deserialize: invalid arguments", data=(data, _BYTES))
        import_extra("flatbuffers", "export")
        function = _checked(bytes(data))
        # For example, a newer JAX may have written these bytes.
        with ForeignErrors(FunctreeValueError, "these bytes are not an exported function"):
            return cls(jax.export.deserialize(bytearray(function)))

    def __str__(self) -> str:
        exported = self.exported
        paths = list(map(str, self._known_paths()))
        longest = max(map(len, paths), default=0)
        lines: list[str] = []
        for path, value in zip(paths, exported.in_avals, strict=True):
            lines.append(f"{path:{longest}}  {array_text(value)}")
        platforms, devices = ", ".join(exported.platforms), count(exported.nr_devices, "device")
        results = count(len(exported.out_avals), "result")
        lines += ["", f"{exported.fun_name} for {platforms} on {devices}; {results}"]
        return "\n".join(lines)

    def __repr__(self) -> str:
        arguments = count(len(self.exported.in_avals), "argument")
        return f"<Exported of {self.exported.fun_name}, {arguments}>"

    def _misfits(self, arrays: Sequence[object]) -> Iterator[Problem]:
        """Yield a problem for each argument without the exported shape and dtype."""
        # JAX's error would name only the argument's number.
        paths = self._known_paths()
        for path, array, wanted in zip(paths, arrays, self.exported.in_avals, strict=True):
            why = f"was exported as {array_text(wanted)}"
            if not is_array(array):
                yield Problem(path, None, shown(array), why, "pass an array")
            elif not _fits(array.shape, wanted.shape) or _dtype(array) != wanted.dtype:
                yield array_problem(path, array, why, "")

    def _known_paths(self) -> tuple[Path, ...]:
        """Return the paths, or the arguments' numbers if the paths are unknown."""
        return self.paths or tuple(Path((i,)) for i in range(len(self.exported.in_avals)))


# The marker between a function's bytes and their digest.
_MARK = b"\0functree:sha256:"


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _checked(data: bytes) -> bytes:
    """Check the digest at the end of a function's bytes, and return the bytes without it.

    Raises:
        FunctreeError: if the bytes do not end with their digest.
    """
    # The digest is checked first. JAX trusts offsets and sizes in the bytes, so one flipped bit may
    # crash the process.
    function, _, digest = data.rpartition(_MARK)
    if _digest(function) != digest:
        raise FunctreeValueError(
            f"these bytes are not an exported function: the data ({count(len(data), 'byte')}) do "
            "not end with their digest from `ft.Exported.serialize`, so they are damaged, or come "
            "from `jax.export`; if you trust them, read them with "
            "`jax.export.deserialize(bytearray(data))`"
        )
    return function


def _fits(shape: Sequence[int], wanted: Sequence[object]) -> bool:
    """Return whether a shape fits the exported shape, whose sizes may be symbolic."""
    if len(shape) != len(wanted):
        return False
    # JAX checks that symbolic sizes agree with each other.
    for size, one in zip(shape, wanted, strict=True):
        if isinstance(one, int) and one != size:
            return False
    return True


def _dtype(array: AnyArray) -> np.dtype:
    """Return the dtype that JAX gives an array, such as float32 instead of float64."""
    if is_key(array.dtype):
        return array.dtype
    return jax.dtypes.canonicalize_dtype(array.dtype)


@checked("export: invalid options")
def export(
    f: Any,
    *args: Any,
    platforms: Annotated[Sequence[str], TEXTS] | None = None,
    symbolic: Annotated[Collection[str] | Mapping[str, str], _NAMES] | None = None,
) -> Exported:
    """Export a function from `ft.jit`, with the shardings of its arguments and result.

    The exported function does not preserve donation. Wrap the call to donate arguments:
    `jax.jit(exported.call, donate_argnums=...)`.

    Args:
        f: a function or a method from `ft.jit`.
        *args: its arguments, which may be abstract arrays with shardings.
        platforms: the platforms on which the function can run, such as `("cpu", "tpu", "cuda")`;
            by default this process's platform.
        symbolic: the names of axes whose sizes are not fixed, as written in the parameters'
            annotations: `["batch"]`. A dict maps the names to JAX's symbolic expressions:
            `{"batch": "8*b"}`.

    Raises:
        FunctreeError: if `f` is not a function from `ft.jit`.
        FunctreeError: if `symbolic` names an axis that no argument has.

    Examples:
        >>> @ft.jit
        ... def f(
        ...     w: Float[Array, "embed hidden"], x: Float[Array, "batch embed"]
        ... ):
        ...     return x @ w
        >>> arrays = jnp.ones((4, 8)), jnp.ones((2, 4))
        >>> exported = ft.export(
        ...     f, *arrays, platforms=("cpu", "tpu"), symbolic=["batch"]
        ... )
        >>> exported.call(jnp.ones((4, 8)), jnp.ones((5, 4)))[0].shape
        (5, 8)
    """
    name = getattr(f, "__name__", None) or shown(f)
    if not isinstance(f, Jit):
        raise FunctreeTypeError(
            f"export takes a function from `ft.jit`: write `ft.export(ft.jit({name}), ...)`"
        )
    if symbolic is not None:
        args = _with_symbols(f, args, symbolic)
    traced = f.trace(*args)
    # The program takes arrays, since nodes such as modules cannot be serialized.
    program, arrays = traced.of_arrays()
    # `jax.export` traces the function again, so its mesh and rules must be ambient.
    with around(traced.entered):
        exported = jax.export.export(program, platforms=platforms)(*arrays)
    return Exported(exported, traced.paths)


def _with_symbols(
    f: Any, args: tuple[Any, ...], symbolic: Collection[str] | Mapping[str, str]
) -> tuple[Any, ...]:
    """Replace the sizes of some axes in the arguments with symbolic sizes."""
    signature, bound = Signature.of(f)
    call = signature.bind(*bound.with_bound(args, {}))
    tree = read(call)
    if isinstance(symbolic, Mapping):
        expressions = dict(symbolic)
    else:
        expressions = {name: name for name in symbolic}
    known = dict.fromkeys(name for leaf in tree.leaves for name in leaf.axes if name is not None)
    problems: list[Problem] = []
    for name in expressions:
        if name not in known:
            why = f"no argument has this axis{did_you_mean(name, known)}"
            problems.append(Problem(None, None, f'"{name}"', why, _ANNOTATE))
    if problems:
        raise FunctreeValueError(f"export: invalid options for {f.__name__}", problems)
    # In one scope, sizes with the same name are equal.
    scope = jax.export.SymbolicScope()
    sizes: dict[str, object] = {}
    for name, text in expressions.items():
        (sizes[name],) = jax.export.symbolic_shape(text, scope=scope)
    arguments = [_with_sizes(leaf, sizes) for leaf in tree.leaves]
    positional, _ = signature.arguments(tree.skeleton.fill(arguments))
    # Leave out the bound arguments of a method or partial, which `trace` adds again.
    return positional[len(bound.args) :]


_ANNOTATE = 'annotate the parameter with its axes: `x: Float[Array, "batch embed"]`'


def _with_sizes(leaf: Leaf, sizes: Mapping[str, object]) -> AnyArray:
    """Return an argument, as an abstract array if one of its axes has a symbolic size."""
    if not any(name in sizes for name in leaf.axes):
        return leaf.value
    shape: list[Any] = []
    for name, size in zip(leaf.axes, leaf.shape, strict=True):
        shape.append(size if name is None else sizes.get(name, size))
    # A sharding over a mesh applies to any size. A single device's sharding is dropped, as for an
    # uncommitted array.
    sharding = getattr(leaf.value, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        sharding = None
    return jax.ShapeDtypeStruct(tuple(shape), leaf.value.dtype, sharding=sharding)
