"""`grad` differentiates a function with respect to the leaves of the model that a filter matches.

A function and a filter ─► a function that returns the gradient, laid out like the model.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves

from functree.argument_checks import FUNCTION, POSITIONS, Flag, checked, shown
from functree.calls.program import around
from functree.calls.signature import inspected, wrapper_updates
from functree.devices.placement import check_deleted, explicit_mesh
from functree.devices.varying import varying_axes
from functree.errors import (
    FunctreeError,
    FunctreeTypeError,
    FunctreeValueError,
    Problem,
    RuleError,
    count,
)
from functree.labels.filters import FilterLike, as_filter
from functree.labels.predicates import is_trainable
from functree.layout.layout import LayoutTree
from functree.transforms.grad.gradient_types import (
    Gradient,
    GradientAndAux,
    KnownGradient,
    ValueAndGradient,
    known,
    known_gradient,
)
from functree.transforms.grad.parameters import Parameters, check_differentiated

_P = ParamSpec("_P")
_R = TypeVar("_R")


# For other `argnums`, the type of the gradient cannot be expressed.
@overload
def value_and_grad(
    fn: Callable[_P, _R],
    wrt: FilterLike = ...,
    argnums: Literal[0] = ...,
    has_aux: bool = ...,
    layout: LayoutTree = ...,
) -> ValueAndGradient[_P, _R]: ...
@overload
def value_and_grad(
    fn: Callable[_P, _R],
    wrt: FilterLike = ...,
    argnums: int | Sequence[int] = ...,
    has_aux: bool = ...,
    layout: LayoutTree = ...,
) -> Callable[_P, tuple[_R, Any]]: ...
@checked("grad: invalid arguments")
def value_and_grad(
    fn: Annotated[Callable[_P, Any], FUNCTION],
    wrt: FilterLike = is_trainable,
    argnums: Annotated[int | Sequence[int], POSITIONS] = 0,
    has_aux: Flag = False,
    layout: LayoutTree = None,
) -> Any:
    """Build a function that returns the value of `fn` and its gradient, laid out like the model.

    The gradient is taken with respect to the leaves that a filter matches.

    On Auto axes, the type of a traced parameter has no sharding, and an unconstrained gradient
    silently loses the mesh axes of FSDP. Gradients are therefore constrained to `layout` if it is
    given. Otherwise, under ambient rules, they are sharded like their parameters. On Explicit
    axes, the types contain shardings, so ambient rules are not needed. Without a layout or rules,
    or without a mesh, JAX's gradients are returned unchanged.

    Inside `ft.shard_map`, JAX sums the gradient of a shared parameter over all shards. If the loss
    on each of `n` shards is the mean over its examples, the sum is `n` times the gradient of the
    overall mean. A loss that differs between shards therefore raises an error if a parameter is
    shared. Return `jax.lax.pmean(loss, "data")`, or `psum` if the loss is a sum. The gradients then
    need no reduction. The check cannot detect a parameter that was gathered with `all_gather`: its
    gradient is still the gradient of the summed losses. `check_vma=False` always raises an error,
    since each shard then computes only its own part of the gradient.

    Args:
        fn: a function that returns a scalar, or with `has_aux` a pair of a scalar and any other
            value. Its arguments may have any type.
        wrt: a filter. The argument's leaves that match this filter are differentiated. All other
            leaves are constants.
        argnums: the position of the differentiated argument, or several positions. The argument
            may be passed by keyword.
        has_aux: whether `fn` returns `(value, aux)`.
        layout: the layout of the argument, or a prefix tree of layouts. With several `argnums`,
            pass one layout for all arguments, or a tuple with one layout for each argument.

    Returns:
        A function with `fn`'s parameters that returns `(fn's result, gradient)`. The gradient has
            the structure of the argument, with None for each leaf that was not differentiated. With
            several `argnums`, the result contains a tuple with one gradient for each argument.

    Raises:
        RuleError: if `wrt` is not a filter.
        RuleError: if `layout` is a tuple without one layout for each of `argnums`.
        RuleError: (when called) if a pattern in `wrt` matches no leaf.
        FunctreeError: if `fn` is not a function.
        FunctreeError: if `fn` is written in C and has no signature.
        FunctreeError: (when called) if an array is deleted.
        FunctreeError: (when called) with `has_aux`, if `fn` does not return a pair.
        FunctreeError: (when called) if the filter matches no leaf.
        FunctreeError: (when called) if the filter matches a leaf that is abstract or not inexact.
        FunctreeError: (when called) if the call has no argument at a position in `argnums`.
        FunctreeError: (when called) inside shard_map, if the loss differs between shards that share
            a parameter.
        FunctreeError: (when called) if the call is inside a shard_map with `check_vma=False`.
        ShardingError: (when called) if the layout does not fit the gradients.

    Examples:
        >>> @ft.value_and_grad
        ... def loss(model, x):
        ...     return jnp.sum(model["scale"] * x ** model["power"])
        >>> value, gradient = loss(
        ...     {"scale": jnp.float32(3), "power": 2}, jnp.arange(3.0)
        ... )
        >>> value, gradient
        (Array(15., dtype=float32), {'power': None, 'scale': Array(5.,
        dtype=float32)})
        >>> bias = ft.value_and_grad(lambda layer, x: layer(x).sum(), wrt="bias")
        >>> bias(eqx.nn.Linear(2, 2, key=jax.random.key(0)), jnp.ones(2))[
        ...     1
        ... ].weight is None
        True
    """
    chosen = as_filter(wrt)
    several = isinstance(argnums, Sequence)
    numbers = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)
    layouts = _one_each(layout, argnums)

    @_like(fn)
    def value_and_gradient(*args: Any, **kwargs: Any) -> Any:
        call = _positional(fn, args, kwargs, numbers)
        by_position = dict(zip(inspected(fn).parameters, call.args, strict=False))
        check_deleted("grad", {**by_position, **call.kwargs})
        each = zip(call.places, layouts, strict=True)
        parameters = [Parameters.of(call.args[i], i, chosen, layout) for i, layout in each]
        check_differentiated(wrt, parameters)
        result, gradients = _differentiate(fn, call, parameters, has_aux)
        return result, gradients if several else gradients[0]

    return known(value_and_gradient, KnownGradient(numbers, layouts, has_aux, True, several))


@overload
def grad(
    fn: Callable[_P, Any],
    wrt: FilterLike = ...,
    argnums: Literal[0] = ...,
    has_aux: Literal[False] = ...,
    layout: LayoutTree = ...,
) -> Gradient[_P]: ...
@overload
def grad(
    fn: Callable[_P, tuple[Any, _R]],
    wrt: FilterLike = ...,
    argnums: Literal[0] = ...,
    *,
    has_aux: Literal[True],
    layout: LayoutTree = ...,
) -> GradientAndAux[_P, _R]: ...
@overload
def grad(
    fn: Callable[_P, Any],
    wrt: FilterLike = ...,
    argnums: int | Sequence[int] = ...,
    has_aux: bool = ...,
    layout: LayoutTree = ...,
) -> Callable[_P, Any]: ...
def grad(
    fn: Callable[_P, Any],
    wrt: FilterLike = is_trainable,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    layout: LayoutTree = None,
) -> Any:
    """Build a function that returns the gradient of `fn`, laid out like the model.

    The gradient is taken with respect to the leaves that a filter matches. See `ft.value_and_grad`
    for how gradients are sharded, and for the differences inside `ft.shard_map`.

    Args:
        fn: a function that returns a scalar, as in `ft.value_and_grad`.
        wrt: a filter. The argument's leaves that match this filter are differentiated.
        argnums: the position of the differentiated argument, or several positions.
        has_aux: whether `fn` returns `(value, aux)`. The result is then `(gradient, aux)`.
        layout: the layout of the argument. Without it, gradients are sharded like their parameters
            under ambient rules.

    Returns:
        A function with `fn`'s parameters that returns the gradient. The gradient has the structure
        of the argument, with None for each leaf that was not differentiated.

    Raises:
        RuleError: if `wrt` is not a filter.
        RuleError: if `layout` is a tuple without one layout for each of `argnums`.
        RuleError: (when called) if a pattern in `wrt` matches no leaf.
        FunctreeError: if `ft.value_and_grad` would raise this error.
        ShardingError: (when called) if the layout does not fit the gradients.

    Examples:
        >>> ft.grad(lambda model: model["w"] ** 2)(
        ...     {"w": jnp.float32(3), "name": "square"}
        ... )
        {'name': None, 'w': Array(6., dtype=float32)}
        >>> mesh, rules = ft.make_mesh(data=8), ft.AxisRules({"embed": "data"})
        >>> class Scale(eqx.Module):
        ...     scale: Float[Array, "embed"]
        >>> model = ft.shard(Scale(jnp.ones(8)), rules, mesh)
        >>> with ft.axis_rules(rules):
        ...     jax.jit(ft.grad(lambda model: (model.scale**2).sum()))(
        ...         model
        ...     ).scale.sharding.spec
        P('data',)
    """
    value_and_gradient = value_and_grad(fn, wrt, argnums, has_aux, layout)

    @_like(fn)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        result, gradients = value_and_gradient(*args, **kwargs)
        return (gradients, result[1]) if has_aux else gradients

    record = known_gradient(value_and_gradient)
    return gradient if record is None else known(gradient, record._replace(with_value=False))


def _like(fn: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator like `functools.wraps(fn)` that drops `fn`'s return annotation.

    The annotation is wrong for the wrapper, whose result differs from `fn`'s.
    """

    def decorate(wrapper: Callable[..., Any]) -> Callable[..., Any]:
        wrapped: Any = wraps(fn, updated=wrapper_updates(fn))(wrapper)
        wrapped.__annotations__ = {
            k: v for k, v in getattr(fn, "__annotations__", {}).items() if k != "return"
        }
        wrapped.__signature__ = inspected(fn).replace(return_annotation=inspect.Signature.empty)
        return wrapped

    return decorate


class _Call(NamedTuple):
    """The arguments of a call. The differentiated ones are positional, at `places`."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    places: tuple[int, ...]


def _positional(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], argnums: Sequence[int]
) -> _Call:
    """Make keyword arguments of a call positional if `argnums` refers to them."""
    if max(argnums, default=0) >= len(args):
        bound = inspected(fn).bind(*args, **kwargs)
        args, kwargs = bound.args, bound.kwargs
    have = len(args)
    places = tuple(range(have)[i] for i in argnums if -have <= i < have)
    if not places or len(set(places)) < len(argnums):
        given = count(have, "positional argument")
        raise FunctreeValueError(
            f"grad: argnums={argnums} does not fit a call with {given}: "
            "pass one position, counted from 0, for each differentiated argument"
        )
    return _Call(args, kwargs, places)


def _one_each(layout: LayoutTree, argnums: int | Sequence[int]) -> tuple[LayoutTree, ...]:
    """Return the layout of each differentiated argument."""
    if not isinstance(argnums, Sequence):
        return (layout,)
    layouts = layout if type(layout) is tuple else (layout,) * len(argnums)
    if len(layouts) != len(argnums):
        have, want = count(len(layouts), "layout"), count(len(argnums), "differentiated argument")
        raise RuleError(f"grad: got {have} for {want}: pass one layout for each")
    return layouts


def _differentiate(
    fn: Callable[..., Any], call: _Call, parameters: Sequence[Parameters], has_aux: bool
) -> tuple[Any, tuple[Any, ...]]:
    """Return the result of a call, and the gradient for each differentiated argument."""
    manual = _manual_axes()

    def of_arrays(arrays_of_each: Sequence[Sequence[Any]]) -> Any:
        args = list(call.args)
        for place, argument, arrays in zip(call.places, parameters, arrays_of_each, strict=True):
            args[place] = argument.with_arrays(arrays)
        result = fn(*args, **call.kwargs)
        if has_aux and not (isinstance(result, tuple | list) and len(result) == 2):
            raise FunctreeTypeError(
                "grad: with has_aux=True, the function must return `(value, aux)`, "
                f"not {shown(result)}"
            )
        if manual:
            _check_one_loss(result[0] if has_aux else result, parameters, arrays_of_each)
        return result

    mesh = explicit_mesh(array for argument in parameters for array in argument.arrays)
    with around(mesh):
        result, gradients = jax.value_and_grad(of_arrays, has_aux=has_aux)(
            [argument.arrays for argument in parameters]
        )
    return result, tuple(
        argument.gradient(arrays) for argument, arrays in zip(parameters, gradients, strict=True)
    )


# Inside shard_map


def _manual_axes() -> tuple[str, ...]:
    """Return the mesh axes of the shard_map around this trace.

    Raises:
        FunctreeError: if the shard_map has `check_vma=False`.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    # With `check_vma=False`, types do not record varying mesh axes, so the cast has no effect.
    if manual and not varying_axes(jax.lax.pcast(jnp.zeros(()), manual, to="varying")):
        raise FunctreeError(
            "grad: inside shard_map(check_vma=False), each shard computes only its own part of "
            "the gradient, and JAX does not sum the parts: leave `check_vma` at True, or take the "
            "gradient outside of shard_map. If you use `jax.pmap`, replace it with `ft.shard_map`, "
            "or use `jax.grad` and `jax.lax.pmean` inside it"
        )
    return manual


def _varying(tree: Any) -> frozenset[str]:
    """Return the mesh axes along which an array of a tree may differ between shards."""
    return frozenset[str]().union(*map(varying_axes, tree_leaves(tree)))


def _check_one_loss(
    loss: Any, parameters: Sequence[Parameters], arrays_of_each: Sequence[Sequence[Any]]
) -> None:
    """Raise FunctreeError for parameters that shards share, if each shard computes its own loss.

    JAX sums the gradient of such a parameter over the shards. The result is the gradient of the
    summed losses.
    """
    varying = _varying(loss)
    axes = ", ".join(f'"{axis}"' for axis in sorted(varying))
    if len(varying) > 1:
        axes = f"({axes})"
    why = "is shared between shards, so its gradient would be the gradient of the sum of all losses"
    remedy = f"return `jax.lax.pmean(loss, {axes})` for the mean, or `psum` for the sum"
    problems: list[Problem] = []
    for argument, arrays in zip(parameters, arrays_of_each, strict=True):
        for leaf, array in zip(argument.matched, arrays, strict=True):
            if not varying <= _varying(array):
                problems.append(leaf.problem(why, remedy))
    if problems:
        raise FunctreeError(f"grad: the loss differs between shards along {axes}", problems)
