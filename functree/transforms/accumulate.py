"""A gradient function ─► the same over a batch taken in pieces, one after another."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.tree_util import tree_map

from functree.calls.signature import Signature
from functree.errors import FunctreeError, Problem, count
from functree.layout.specs import mesh_axes
from functree.transforms.jit.jit import jit
from functree.tree.arrays import is_array
from functree.tree.leaf import Leaf
from functree.tree.leaves import read

_P = ParamSpec("_P")
_T = TypeVar("_T")


def accumulate(fn: Callable[_P, _T], steps: int) -> Callable[_P, _T]:
    """Run a gradient function on a batch in pieces, by a `lax.scan`, and average what it returns.

    The memory is that of one piece. For losses that are means over the batch the result is that of the whole batch.
    Each device keeps its part of the batch: piece `i` has every `steps`-th example of it, from the `i`-th on.

    Args:
        fn: `ft.value_and_grad(loss)` or `ft.grad(loss)`: of the model, and then of arguments whose arrays all have the
            batch as their leading dimension. It is traced once.
        steps: how many pieces.

    Returns:
        A function of the same arguments. Inexact arrays of the result are averaged, in float32 at least; all else is
        the last piece's.

    Raises:
        FunctreeError: `steps` is no positive integer; (when called) it does not divide an array's leading dimension, or
            (on Explicit axes, whose types tell) a piece is not divided over the devices.

    Examples:
        >>> def loss(w, x):
        ...     return jnp.mean((x @ w) ** 2)
        >>> x = jnp.arange(12.0).reshape(4, 3)
        >>> value, gradient = ft.accumulate(ft.value_and_grad(loss), 2)(jnp.ones(3), x)
        >>> bool(jnp.allclose(gradient, ft.grad(loss)(jnp.ones(3), x)))
        True
    """
    if type(steps) is not int or steps < 1:
        raise FunctreeError(f"accumulate(steps={steps!r}): the number of pieces is a positive integer")

    inner: Any = jit(fn, inline=True)  # so that JAX remembers its trace: one for its result's shapes and for the loop
    signature, bound = Signature.of(fn)
    if not signature.positional:
        raise FunctreeError(f"accumulate: {signature.name} takes no model by position")
    model = signature.positional[0]

    @functools.wraps(fn)
    def accumulated(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not args:
            raise FunctreeError("accumulate: the model is the first argument, and is given by position")
        leaves = read(signature.bind(*bound.call(args, kwargs)))
        # What is bound to the function is no batch either.
        fixed = {model, *signature.parameters[: len(bound.args)], *bound.kwargs}
        batch = [leaf for leaf in leaves.leaves if leaf.path[0] not in fixed]
        _check(batch, steps)

        def piece(i: Any) -> Any:
            taken = {leaf.path: _piece(leaf.value, i, steps) for leaf in batch}
            call = leaves.skeleton.fill(taken.get(leaf.path, leaf.value) for leaf in leaves.leaves)
            args, kwargs = signature.arguments(call)
            return inner(
                *args[len(bound.args) :], **{name: x for name, x in kwargs.items() if name not in bound.kwargs}
            )

        def add(total: Any, i: Any) -> tuple[Any, None]:
            return tree_map(_added, total, eqx.filter(piece(i), is_array)), None

        # To stack what the pieces give would take the memory of all their gradients: the loop carries the sum.
        like, rest = eqx.partition(eqx.filter_eval_shape(piece, jnp.zeros((), jnp.int32)), is_array)
        total, _ = jax.lax.scan(add, tree_map(_zeros, like), jnp.arange(steps, dtype=jnp.int32))
        return eqx.combine(tree_map(lambda x, like: _averaged(x, steps, like.dtype), total, like), rest)

    return accumulated


def _check(batch: Sequence[Leaf], steps: int) -> None:
    problems: list[Problem] = []
    for leaf in batch:
        if not leaf.shape:
            problems.append(leaf.problem(f"it has no leading dimension, to be taken in {steps} pieces", _REMEDY))
            continue
        parts = _parts(leaf.value)
        if leaf.shape[0] % (steps * parts):
            pieces = f"{steps} pieces" + (f" on each of {parts} devices" if parts > 1 else "")
            problems.append(leaf.problem(f"its leading dimension is {leaf.shape[0]}, to be taken in {pieces}", _REMEDY))
    if problems:
        raise FunctreeError(f"accumulate: {count(len(problems), 'array')} cannot be taken in pieces", problems)


_REMEDY = "give a batch whose size `steps` divides; pass what is no batch in the model, or close over it"


def _parts(x: Any) -> int:
    """Over how many devices the type of an array says that its leading dimension is split."""
    sharding: Any = jax.typeof(x).sharding
    entry = next(iter(sharding.spec), None)
    return math.prod(sharding.mesh.shape[axis] for axis in mesh_axes(entry))


def _piece(x: Any, i: Any, steps: int) -> Any:
    """Every `steps`-th example from the i-th on: so a batch that is split over devices stays so, and nothing moves."""
    apart = jnp.reshape(x, (x.shape[0] // steps, steps, *x.shape[1:]))
    return jax.lax.dynamic_index_in_dim(apart, i, axis=1, keepdims=False)


def _zeros(like: Any) -> Any:
    sharding = getattr(like, "sharding", None)
    if sharding is not None and AxisType.Explicit in sharding.mesh.axis_types:
        return jnp.zeros(like.shape, _wide(like.dtype), out_sharding=sharding)
    return jnp.zeros(like.shape, _wide(like.dtype))


def _wide(dtype: Any) -> Any:
    """The dtype of a sum: in a narrow one, what many small pieces add is lost."""
    narrow = jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits < 32
    return jnp.float32 if narrow else dtype


def _added(total: Any, new: Any) -> Any:
    """The sum so far and one more piece; what is not inexact is the last piece's."""
    return total + new.astype(total.dtype) if jnp.issubdtype(new.dtype, jnp.inexact) else new


def _averaged(total: Any, steps: int, dtype: Any) -> Any:
    return (total / steps).astype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else total
