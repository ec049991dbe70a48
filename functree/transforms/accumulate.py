"""A gradient function ─► the same function over a batch, which it computes piece by piece."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from functree.argument_checks import FUNCTION, SIZE, check
from functree.calls.program import around
from functree.calls.signature import Signature
from functree.devices.deleted import check_deleted
from functree.devices.placement import explicit_mesh
from functree.devices.specs import mesh_axes
from functree.errors import FunctreeTypeError, FunctreeValueError, Problem, count
from functree.labels.leaf import Leaf, meeting
from functree.labels.leaves import read
from functree.transforms.jit.jit import jit
from functree.tree.arrays import Tree
from functree.tree.skeleton.abstract import read_abstract
from functree.tree.skeleton.skeleton import Skeleton

_P = ParamSpec("_P")
_T = TypeVar("_T")


def accumulate(fn: Callable[_P, _T], steps: int) -> Callable[_P, _T]:
    """Run a gradient function on the pieces of a batch, by a `lax.scan`, and average the results.

    It needs the memory of one piece only. If the loss is a mean over the batch, the result is that
    of the whole batch. No data moves between devices: piece `i` has every `steps`-th example of the
    batch, beginning with the `i`-th.

    Args:
        fn: `ft.value_and_grad(loss)` or `ft.grad(loss)`. Its first argument is the model. In all
            other arguments the leading dimension of each array is the batch. It is traced once.
        steps: the number of pieces.

    Returns:
        A function of the same arguments. Inexact arrays of its result are averaged, in float32 or
            wider. Everything else is taken from the last piece.

    Raises:
        FunctreeError: `steps` is not a positive integer; (when called) it does not divide the
            leading dimension of an array, or a piece cannot be sharded like the batch (this is
            checked on Explicit axes, where the types of arrays contain their shardings).

    Examples:
        >>> def loss(w, x):
        ...     return jnp.mean((x @ w) ** 2)
        >>> x = jnp.arange(12.0).reshape(4, 3)
        >>> value, gradient = ft.accumulate(ft.value_and_grad(loss), 2)(jnp.ones(3), x)
        >>> bool(jnp.allclose(gradient, ft.grad(loss)(jnp.ones(3), x)))
        True
    """
    check("accumulate cannot divide the batch", fn=(fn, FUNCTION), steps=(steps, SIZE))
    steps = int(steps)

    # Under jit it is traced once, and JAX uses this trace twice: for the shapes of the result, and
    # in the loop.
    inner = jit(fn, inline=True)
    signature, partial = Signature.of(fn)
    if not signature.positional:
        raise FunctreeTypeError(
            f"accumulate: {signature.name} has no positional parameter for the model"
        )
    model = signature.positional[0]

    @functools.wraps(fn)
    def accumulated(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not args:
            raise FunctreeTypeError("accumulate: pass the model as the first positional argument")
        bound = signature.bind(*partial.with_bound(args, kwargs))
        leaves = read(bound)
        check_deleted("accumulate", bound)
        # Arguments that are bound to the function (`self`, those of a partial) are not part of the
        # batch either.
        number = len(partial.args)
        fixed = {model, *signature.parameters[:number], *partial.kwargs}
        batch = [leaf for leaf in leaves.leaves if leaf.path[0] not in fixed]
        _check(batch, steps)

        def piece(i: jax.Array) -> Tree:
            taken = {leaf.path: _piece(leaf.value, i, steps) for leaf in batch}
            call = leaves.skeleton.fill(taken.get(leaf.path, leaf.value) for leaf in leaves.leaves)
            args, kwargs = signature.arguments(call)
            # `inner` adds the bound arguments itself.
            own = {name: value for name, value in kwargs.items() if name not in partial.kwargs}
            return inner(*args[number:], **own)

        def add(total: list[jax.Array], i: jax.Array) -> tuple[list[jax.Array], None]:
            _, new = Skeleton.apart(piece(i))
            return list(map(_add, total, new)), None

        def average(total: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
            if not jnp.issubdtype(like.dtype, jnp.inexact):
                return total
            return (total / steps).astype(like.dtype)

        # The loop carries the sum: stacked outputs would need the memory of the gradients of all
        # pieces.
        with around(explicit_mesh(leaves.values)):
            first = jnp.zeros((), jnp.int32)
            skeleton, like = read_abstract(lambda i: Skeleton.apart(piece(i)), first)
            zeros = list(map(_zeros, like))
            total, _ = jax.lax.scan(add, zeros, jnp.arange(steps, dtype=jnp.int32))
            return skeleton.fill(map(average, total, like))

    return accumulated


def _check(batch: Sequence[Leaf], steps: int) -> None:
    """Raise for all arrays of a batch that cannot be split into this number of pieces."""
    problems: list[Problem] = meeting(batch)
    for leaf in batch:
        if not leaf.shape:
            why = f"has no leading dimension to split into {steps} pieces"
            problems.append(leaf.problem(why, _REMEDY))
            continue
        size, parts = leaf.shape[0], _parts(leaf.value)
        if size % (steps * parts):
            why = f"its leading dimension of size {size} cannot be split into {steps} pieces"
            if parts > 1:
                why += f" on each of {parts} devices"
            problems.append(leaf.problem(why, _REMEDY))
    if problems:
        raise FunctreeValueError(
            f"accumulate: {count(len(problems), 'array')} cannot be split into pieces", problems
        )


_REMEDY = (
    "use a batch whose size `steps` divides; pass an array that is not part of it in the model or "
    "a closure"
)


def _parts(x: jax.Array) -> int:
    """The number of parts into which the leading dimension is sharded, by the type of the array."""
    sharding = jax.typeof(x).sharding
    # On Auto axes the type has an empty spec: the compiler may shard a piece in another way.
    entry = next(iter(sharding.spec), None)
    return math.prod(sharding.mesh.shape[axis] for axis in mesh_axes(entry))


def _piece(x: jax.Array, i: jax.Array, steps: int) -> jax.Array:
    """Every `steps`-th example from the i-th on.

    A contiguous piece of a sharded batch would be on a few devices only. This one has examples of
    every device, so it is sharded like the batch and no data moves.
    """
    apart = jnp.reshape(x, (x.shape[0] // steps, steps, *x.shape[1:]))
    return jax.lax.dynamic_index_in_dim(apart, i, axis=1, keepdims=False)


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    """The sum of no pieces. The carry of a scan must keep its type, with its sharding, and what
    varies in shard_map."""
    sharding = getattr(like, "sharding", None)
    if sharding is not None and AxisType.Explicit in sharding.mesh.axis_types:
        zeros = jnp.zeros(like.shape, _wide(like.dtype), out_sharding=sharding)
    else:
        zeros = jnp.zeros(like.shape, _wide(like.dtype))
    manual = like.manual_axis_type  # None outside of shard_map
    if manual is None or not manual.varying:
        return zeros
    return jax.lax.pcast(zeros, tuple(manual.varying), to="varying")


def _wide(dtype: np.dtype) -> np.dtype:
    """The dtype of a sum, float32 or wider: in a narrower one, small terms would be lost in
    rounding."""
    if jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits < 32:
        return np.dtype(np.float32)
    return dtype


def _add(total: jax.Array, new: Any) -> jax.Array:
    """The sum with one more piece. Arrays that are not inexact are not summed: the last piece's
    replaces the others."""
    if not jnp.issubdtype(new.dtype, jnp.inexact):
        return new
    return total + new.astype(total.dtype)
