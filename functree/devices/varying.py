"""`without_varying` removes varying mesh axes from array types inside a shard_map."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec
from jaxtyping import Array, Shaped

_T = TypeVar("_T")
_Array = Shaped[Array, "..."]
_Axes = tuple[str, ...]


def varying_axes(x: _Array | ShapedArray) -> frozenset[str]:
    """Return the mesh axes along which an array varies, according to its type.

    `x` may be the type itself. Arrays vary only inside a shard_map with `check_vma=True`.

    Examples:
        >>> from functree.devices.varying import varying_axes
        >>> varying_axes(jnp.ones(3))
        frozenset()
    """
    kind: Any = x
    if not isinstance(x, ShapedArray):
        kind = jax.typeof(x)
    manual = kind.manual_axis_type  # None for an abstract array outside of shard_map
    if manual is None:
        return frozenset()
    return frozenset(manual.varying)


def varying_over(x: _Array, axes: Iterable[str]) -> _Array:
    """Cast an array to a type that varies along some mesh axes, even if its values do not.

    The derivative of this cast sums the gradient once over the devices along these mesh axes.

    Examples:
        >>> from functree.devices.varying import varying_over
        >>> varying_over(jnp.ones(2), [])
        Array([1., 1.], dtype=float32)
    """
    more = tuple(sorted(frozenset(axes) - varying_axes(x)))
    if not more:
        return x
    return jax.lax.pcast(x, more, to="varying")


def equally_varying(*arrays: _Array) -> tuple[_Array, ...]:
    """Cast arrays so that all of them vary along the same mesh axes.

    Each result varies along every mesh axis along which at least one of the arrays varies.

    JAX casts the operands of most of its own operations like this. For other operations and for
    custom derivatives, call this function.

    Examples:
        >>> from functree.devices.varying import equally_varying
        >>> [x.shape for x in equally_varying(jnp.ones(3), jnp.ones(2))]
        [(3,), (2,)]
    """
    axes = frozenset[str]().union(*map(varying_axes, arrays))
    return tuple(varying_over(x, axes) for x in arrays)


def without_varying(fun: Callable[..., _T]) -> Callable[..., _T]:
    """Wrap `fun` so that its arguments vary along no mesh axis of the enclosing shard_map.

    JAX cannot lower the derivative of a shard_map inside a shard_map with `check_vma=True`. The
    inner shard_map would return its residuals with a spec of all mesh axes along which their types
    vary. JAX refuses the outer mesh axes in this spec ("which is already bound by a parent"). JAX
    does not differentiate an inner shard_map with `check_vma=False` either, because the types of
    its results lose the outer mesh axes. This function therefore removes the outer mesh axes from
    the types of all arguments, and adds them to the types of all results.

    Only types change. This is correct if `fun` runs no collective over these mesh axes, since each
    device then computes its own values and gradients.

    Args:
        fun: a function of trees of arrays.

    Returns:
        The wrapped function. Its results vary along each mesh axis along which an argument varies.

    Examples:
        >>> from functree.devices.varying import without_varying
        >>> without_varying(jnp.sin)(jnp.zeros(2))
        Array([0., 0.], dtype=float32)
    """

    def run(*arguments: object) -> _T:
        found = map(varying_axes, jax.tree.leaves(arguments))
        axes = tuple(sorted(frozenset().union(*found)))
        if not axes:
            return fun(*arguments)

        def enter(x: _Array) -> _Array:
            # JAX's cast comes first, so that the gradient of a value that is equal on all devices
            # is summed over the devices.
            return _retyped.bind(varying_over(x, axes), varying=(), before=axes)

        def leave(x: _Array) -> _Array:
            # The derivative of JAX's cast would sum over the devices, whose results differ.
            return _retyped.bind(x, varying=axes, before=())

        return jax.tree.map(leave, fun(*jax.tree.map(enter, arguments)))

    return run


def unchecked(fun: Callable[..., _T]) -> Callable[..., _T]:
    """Wrap `fun` so that it runs as if in a shard_map with `check_vma=False`.

    The `check_vma` of the enclosing shard_map then has no effect on `fun`.

    Examples:
        >>> from functree.devices.varying import unchecked
        >>> unchecked(jnp.sin) is jnp.sin  # outside shard_map
        True
    """
    manual = frozenset(jax.sharding.get_abstract_mesh().manual_axes)
    if not manual:
        return fun
    # All these mesh axes are Manual already, so this shard_map only turns off the check.
    whole = PartitionSpec()
    return jax.shard_map(fun, in_specs=whole, out_specs=whole, axis_names=manual, check_vma=False)


# A primitive that changes an array's type, and does nothing in the compiled program. JAX has no
# operation that removes mesh axes from a type, since the type would be wrong for most arrays.

_retyped = Primitive("retyped")


@_retyped.def_impl
def _run(x: _Array, **_: _Axes) -> _Array:
    return x


@_retyped.def_abstract_eval
def _type(x: ShapedArray, *, varying: _Axes, before: _Axes) -> ShapedArray:
    return x.update(manual_axis_type=x.manual_axis_type.update(varying=frozenset(varying)))


def _transposed(x: _Array, *_: object, varying: _Axes, before: _Axes) -> list[_Array]:
    return [_retyped.bind(x, varying=before, before=varying)]


ad.deflinear2(_retyped, _transposed)
batching.defvectorized(_retyped)
mlir.register_lowering(_retyped, lambda context, x, **_: [x])
