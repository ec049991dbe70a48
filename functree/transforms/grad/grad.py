"""A function ─► its gradient by the leaves that a filter matches, as a tree like the model, laid out like it."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves

from functree.errors import FunctreeError, RuleError, count
from functree.layout.layout import LayoutTree
from functree.transforms.grad.parameters import Parameters
from functree.tree.filters.filter import FilterLike, as_filter
from functree.tree.filters.predicates import is_trainable

_P = ParamSpec("_P")
_R = TypeVar("_R")


@overload
def value_and_grad(
    fn: Callable[_P, _R],
    wrt: FilterLike = ...,
    argnums: int | Sequence[int] = ...,
    has_aux: bool = ...,
    layout: LayoutTree = ...,
) -> Callable[_P, tuple[_R, Any]]: ...
@overload
def value_and_grad(
    fn: None = None,
    wrt: FilterLike = ...,
    argnums: int | Sequence[int] = ...,
    has_aux: bool = ...,
    layout: LayoutTree = ...,
) -> Callable[[Callable[_P, _R]], Callable[_P, tuple[_R, Any]]]: ...
def value_and_grad(
    fn: Any = None,
    wrt: FilterLike = is_trainable,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    layout: LayoutTree = None,
) -> Any:
    """A function that returns the value of `fn` and its gradient by what a filter matches, laid out like the model.

    On Auto axes a tracer does not know how its parameter lies, and a gradient that nobody constrains loses the mesh
    axes of FSDP in silence. So gradients are constrained to `layout`, or else by the ambient rules. On Explicit axes
    types carry the layout, and ambient rules add nothing. With neither, as with no mesh, gradients are JAX's own.

    Inside `ft.shard_map` a gradient by a parameter that all shards share is summed over them. Of a loss averaged on
    each of `n` shards that is `n` times the gradient of the mean. So a loss that differs between shards is refused
    there: return `jax.lax.pmean(loss, "data")`, or `psum` where the loss is a sum; the gradients need neither then.
    A parameter that was gathered by `all_gather` is not seen through: of it too, the gradient is the sum's. Where
    shard_map runs with `check_vma=False`, JAX gives each shard its own part of the gradient, and all are refused.

    Args:
        fn: returns a scalar, or with `has_aux` a pair of a scalar and anything. Its other arguments are of any kind.
            Without it, the result is a decorator.
        wrt: a filter; the leaves of the arguments that it matches are differentiated, the others are constants.
        argnums: the position of the argument, or several. It may be passed by its keyword.
        has_aux: whether `fn` returns `(value, aux)`.
        layout: of the argument, or a prefix tree of layouts; a tuple of these, one for each of several `argnums`.

    Returns:
        A function of `fn`'s parameters that returns `(fn's result, gradient)`. The gradient has the structure of the
        argument, with None where nothing was differentiated; with several `argnums` it is a tuple of such.

    Raises:
        RuleError: not a filter.
        FunctreeError: (when called) the filter matches nothing, or what is not inexact or is abstract; there is no such
            argument; inside shard_map, a gradient that would not be the loss's.
        ShardingError: (when called) the gradients cannot be laid out so. Ambient rules that do not place a gradient
            are an error too, as in `ft.constrain`: nothing stays whole because its axes have no names.

    Examples:
        >>> @ft.value_and_grad
        ... def loss(model, x):
        ...     return jnp.sum(model["scale"] * x ** model["power"])
        >>> value, gradient = loss({"scale": jnp.float32(3), "power": 2}, jnp.arange(3.0))
        >>> value, gradient
        (Array(15., dtype=float32), {'power': None, 'scale': Array(5., dtype=float32)})
        >>> bias = ft.value_and_grad(lambda layer, x: layer(x).sum(), wrt="bias")
        >>> bias(eqx.nn.Linear(2, 2, key=jax.random.key(0)), jnp.ones(2))[1].weight is None
        True
    """
    chosen = as_filter(wrt)
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    layouts = _one_each(layout, argnums)

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        @_like(fn)
        def value_and_gradient(*args: Any, **kwargs: Any) -> Any:
            call = _positional(fn, args, kwargs, numbers)
            each = zip(call.places, layouts, strict=True)
            parameters = [Parameters.of(call.args[i], i, chosen, layout) for i, layout in each]
            result, gradients = _differentiate(fn, call, parameters, has_aux)
            return result, gradients[0] if isinstance(argnums, int) else gradients

        return value_and_gradient

    return decorate if fn is None else decorate(fn)


@overload
def grad(
    fn: Callable[_P, Any],
    wrt: FilterLike = ...,
    argnums: int | Sequence[int] = ...,
    has_aux: bool = ...,
    layout: LayoutTree = ...,
) -> Callable[_P, Any]: ...
@overload
def grad(
    fn: None = None,
    wrt: FilterLike = ...,
    argnums: int | Sequence[int] = ...,
    has_aux: bool = ...,
    layout: LayoutTree = ...,
) -> Callable[[Callable[_P, Any]], Callable[_P, Any]]: ...
def grad(
    fn: Any = None,
    wrt: FilterLike = is_trainable,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    layout: LayoutTree = None,
) -> Any:
    """A function that returns the gradient of `fn` by what a filter matches, laid out like the model.

    Args:
        fn: as in `ft.value_and_grad`, which says what holds inside `ft.shard_map` too.
        wrt: a filter; the leaves of the arguments that it matches are differentiated.
        argnums: the position of the argument, or several.
        has_aux: whether `fn` returns `(value, aux)`; the result is `(gradient, aux)` then.
        layout: of the argument; else the ambient rules hold.

    Returns:
        A function of `fn`'s parameters that returns the gradient: the argument's structure, None where nothing was
        differentiated.

    Raises:
        RuleError: not a filter.
        FunctreeError: (when called) as in `ft.value_and_grad`.
        ShardingError: (when called) the gradients cannot be laid out so.

    Examples:
        >>> ft.grad(lambda model: model["w"] ** 2)({"w": jnp.float32(3), "name": "square"})
        {'name': None, 'w': Array(6., dtype=float32)}
        >>> mesh, rules = ft.make_mesh(data=8), ft.AxisRules({"embed": "data"})
        >>> class Scale(eqx.Module):
        ...     scale: Float[Array, "embed"]
        >>> model = ft.shard(Scale(jnp.ones(8)), rules, mesh)
        >>> with ft.axis_rules(rules):
        ...     jax.jit(ft.grad(lambda model: (model.scale ** 2).sum()))(model).scale.sharding.spec
        P('data',)
    """
    both = value_and_grad(None, wrt, argnums, has_aux, layout)

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        value_and_gradient = both(fn)

        @_like(fn)
        def gradient(*args: Any, **kwargs: Any) -> Any:
            result, gradients = value_and_gradient(*args, **kwargs)
            return (gradients, result[1]) if has_aux else gradients

        return gradient

    return decorate if fn is None else decorate(fn)


def _like(fn: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """As `functools.wraps`, without the fields of a callable module, and without the result's annotation."""

    def dress(wrapper: Callable[..., Any]) -> Callable[..., Any]:
        dressed: Any = wraps(fn, updated=())(wrapper)
        dressed.__annotations__ = {k: v for k, v in getattr(fn, "__annotations__", {}).items() if k != "return"}
        signature = _signature(fn)
        if signature is not None:
            dressed.__signature__ = signature.replace(return_annotation=inspect.Signature.empty)
        return dressed

    return dress


def _signature(fn: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(fn)
    except ValueError:  # a builtin does not tell
        return None


class _Call(NamedTuple):
    """The arguments of a call, the differentiated ones among the positional."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    places: tuple[int, ...]


def _positional(fn: Callable[..., Any], args: Any, kwargs: Any, argnums: Sequence[int]) -> _Call:
    """A call, with what was passed by keyword moved to the front where `argnums` needs it there."""
    signature = _signature(fn) if max(argnums, default=0) >= len(args) else None
    if signature is not None:
        bound = signature.bind(*args, **kwargs)
        args, kwargs = bound.args, bound.kwargs
    have = len(args)
    places = tuple(range(have)[i] for i in argnums if -have <= i < have)
    if not places or len(set(places)) < len(argnums):
        given = count(have, "positional argument")
        raise FunctreeError(f"argnums={argnums} and a call with {given}: name those that are there, each once")
    return _Call(args, kwargs, places)


def _one_each(layout: LayoutTree, argnums: int | Sequence[int]) -> tuple[Any, ...]:
    """The layout of each differentiated argument."""
    if isinstance(argnums, int):
        return (layout,)
    layouts = layout if type(layout) is tuple else (layout,) * len(argnums)
    if len(layouts) != len(argnums):
        raise RuleError(f"{count(len(layouts), 'layout')} for {count(len(argnums), 'argument')}: write one for each")
    return layouts


def _differentiate(
    fn: Callable[..., Any], call: _Call, parameters: Sequence[Parameters], has_aux: bool
) -> tuple[Any, tuple[Any, ...]]:
    """The result of a call, and the gradient by each of the parameters."""
    shards = _manual_axes()

    def of_arrays(several: Sequence[Sequence[Any]]) -> Any:
        full = list(call.args)
        for place, own, arrays in zip(call.places, parameters, several, strict=True):
            full[place] = own.with_arrays(arrays)
        result = fn(*full, **call.kwargs)
        if shards:
            _check_one_loss(result[0] if has_aux else result, parameters, several)
        return result

    result, found = jax.value_and_grad(of_arrays, has_aux=has_aux)([own.arrays for own in parameters])
    return result, tuple(own.gradient(arrays) for own, arrays in zip(parameters, found, strict=True))


# Inside shard_map


def _manual_axes() -> tuple[str, ...]:
    """The mesh axes of the shard_map around this trace. Raises where JAX does not know what varies along them."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if manual and not _varying(jax.lax.pcast(jnp.zeros(()), manual, to="varying")):
        raise FunctreeError(
            "inside shard_map(check_vma=False) each shard's gradient is its own part only, and nothing says so: leave "
            "`check_vma` at True, or take the gradient outside of shard_map"
        )
    return manual


def _varying(tree: Any) -> frozenset[str]:
    """The mesh axes along which something in a tree differs from shard to shard."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in tree_leaves(tree)))


def _check_one_loss(loss: Any, parameters: Sequence[Parameters], several: Sequence[Sequence[Any]]) -> None:
    """One loss for all shards, or parameters of each shard's own: else the gradient is of the sum of the losses."""
    spread = _varying(loss)
    axes = ", ".join(f'"{axis}"' for axis in sorted(spread))
    axes = f"({axes})" if len(spread) > 1 else axes
    why = "is the same on all shards, and its gradient would be that of the sum of their losses"
    remedy = f"return `jax.lax.pmean(loss, {axes})` for the mean, or `psum` for the sum"
    problems = [
        leaf.problem(why, remedy)
        for own, arrays in zip(parameters, several, strict=True)
        for leaf, array in zip(own.matched, arrays, strict=True)
        if spread - _varying(array)
    ]
    if problems:
        raise FunctreeError(f"the loss differs between the shards along {axes}", problems)
