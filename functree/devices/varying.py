"""A function inside a shard_map ─► the same, on arrays whose types do not say where they vary."""

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
    """The mesh axes along which an array varies by its type; `x` may be the type itself.

    There are some inside a shard_map with `check_vma=True` only.

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
    """An array whose type says that it varies along some mesh axes, whether its values do or not.

    Its gradient is summed over the devices along them once, by the derivative of this cast.

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
    """Arrays whose types vary along the same mesh axes: those along which any of them does.

    JAX casts operands of its own operations so; some of them, and derivatives of one's own, ask for
    it.

    Examples:
        >>> from functree.devices.varying import equally_varying
        >>> [x.shape for x in equally_varying(jnp.ones(3), jnp.ones(2))]
        [(3,), (2,)]
    """
    axes = frozenset[str]().union(*map(varying_axes, arrays))
    return tuple(varying_over(x, axes) for x in arrays)


def without_varying(fun: Callable[..., _T]) -> Callable[..., _T]:
    """`fun`, which gets arrays whose types vary along no mesh axis of the shard_map around it.

    JAX cannot lower the derivative of a shard_map inside another one with `check_vma=True`: what
    the inner one computes for its backward pass would leave it by a spec of all mesh axes along
    which its type varies, among them those of the outer one ("which is already bound by a parent").
    Nor does it differentiate an inner one with `check_vma=False`, whose results have lost these
    axes. So they are taken from the types of all arguments first, and given to all results.

    Only types change. It is right for a `fun` that has no collective over these mesh axes: then
    what each device computes is its own, and so are the gradients.

    Args:
        fun: a function of trees of arrays.

    Returns:
        The function. Its results vary along each mesh axis along which an argument does.

    Examples:
        >>> from functree.devices.varying import without_varying
        >>> without_varying(jnp.sin)(jnp.zeros(2))
        Array([0., 0.], dtype=float32)
    """

    def run(*arguments: object) -> _T:
        found = [varying_axes(x) for x in jax.tree.leaves(arguments)]
        axes = tuple(sorted(frozenset().union(*found)))
        if not axes:
            return fun(*arguments)

        def enter(x: _Array) -> _Array:
            # Cast by JAX first, so that the gradient of what is equal on all devices is summed.
            return _retyped.bind(varying_over(x, axes), varying=(), before=axes)

        def leave(x: _Array) -> _Array:
            # Not by JAX's cast: its derivative would be a sum over devices, whose results differ.
            return _retyped.bind(x, varying=axes, before=())

        return jax.tree.map(leave, fun(*jax.tree.map(enter, arguments)))

    return run


def unchecked(fun: Callable[..., _T]) -> Callable[..., _T]:
    """`fun` as in the body of a shard_map with `check_vma=False`, whatever the one around it has.

    Examples:
        >>> from functree.devices.varying import unchecked
        >>> unchecked(jnp.sin) is jnp.sin  # in no shard_map
        True
    """
    manual = frozenset(jax.sharding.get_abstract_mesh().manual_axes)
    if not manual:
        return fun
    # All these axes are Manual already, so it is a map over nothing, without the check.
    whole = PartitionSpec()
    return jax.shard_map(fun, in_specs=whole, out_specs=whole, axis_names=manual, check_vma=False)


# What changes the type of an array, and is nothing in the compiled program. JAX has no operation
# that takes mesh axes from a type, since of most arrays it would be a lie.

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
