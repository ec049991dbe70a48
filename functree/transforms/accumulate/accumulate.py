"""A gradient function ─► the same function over a batch, which it computes in micro-batches."""

import functools
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from functree.argument_checks import FLAG, FUNCTION, SIZE, TEXT, TEXTS, Takes, check
from functree.calls.static_arguments import check_wrapped
from functree.devices.meshes import compiling
from functree.errors import FunctreeTypeError
from functree.transforms.accumulate.call import Call, GradientFunction, Role
from functree.transforms.accumulate.loop import averaged
from functree.transforms.jit.jit import jit

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _is_names(value: object) -> bool:
    """Whether a value is a name, or several."""
    return TEXT.fits(value) or TEXTS.fits(value)


_NAMES = Takes("the name of a parameter, or several in a tuple", _is_names)
_NAMES_OR_NONE = Takes("the name of a parameter, several in a tuple", _is_names).or_none()
_MESH_AXES = Takes("the name of a mesh axis, several in a tuple", _is_names).or_none()


def accumulate(
    fn: Callable[_P, _T],
    steps: int,
    *,
    batch: str | Iterable[str] | None = None,
    keys: str | Iterable[str] = (),
    carry: str | Iterable[str] = (),
    weighted: bool = False,
    over: str | Iterable[str] | None = None,
) -> Callable[_P, _T]:
    """Run a gradient function over a batch in micro-batches, by one `lax.scan`, and average the
    results.

    It needs the memory of one micro-batch only. If the loss is a mean over the batch, the result is
    that of the whole batch. Micro-batch `i` has the examples `i`, `i + steps`, …, so each device
    keeps its own examples, and none of them moves.

    Without `over=`, the gradients are reduced over devices in every micro-batch. With it, they are
    reduced once.

    Args:
        fn: `ft.value_and_grad(loss)` or `ft.grad(loss)`. It is traced once.
        steps: the number of micro-batches.
        batch: the names of the parameters that are divided: each array in them has the batch as its
            leading dimension. By default these are all but the differentiated ones (`argnums=`),
            and those in `keys` and `carry`. Of another function than functree's gradients, the
            first parameter counts as the differentiated one.
        keys: the names of parameters whose random keys are split, typed or raw ones: micro-batch
            `i` gets `jax.random.split(key, steps)[i]`; with `over=`, each shard gets a key of its
            own. An array of keys, one for each example, is part of the batch.
        carry: the names of parameters, such as `state`, that each micro-batch takes from the one
            before. `fn` returns the next value as its aux, for several names a tuple of them. The
            result has the last value.
        weighted: `fn` returns sums, and its aux is the weight of the micro-batch, such as its
            number of tokens; with `carry`, `(weight, carried)`. The sums are divided by the sum of
            the weights, so a masked mean is exact for every `steps` and on every mesh. The result
            has the sum of the weights.
        over: the mesh axes of the batch. The loop runs on each shard of these axes by itself.
            Parameters that are sharded over them are gathered once before it. The gradients are
            reduced once after it, and scattered where the parameter is sharded. So each device
            needs memory for the gathered parameters and their gradients. The loss has to be a mean
            over examples, or `weighted`. In the function, these mesh axes are those of a
            `shard_map`. Without a mesh, it has no effect.

    Returns:
        A function of the same parameters. Inexact arrays of its result are averaged, in float32 or
            wider. Everything else comes from the last micro-batch.

    Raises:
        FunctreeError: if `steps` is not a positive integer; if a name is not that of a parameter;
            if `weighted`, `carry` or `over` is used with a function that is not a gradient of
            functree; (when called) if `steps`, or the shards, do not divide the leading dimension
            of an array; if no array is divided; if a value in `keys` is not a key; if `fn` does not
            return the weight or the carried values as its aux, or returns them with other types.
        ShardingError: (when called) if the mesh does not have the axes in `over`; if it is not
            known how the parameters are sharded; if a carried value differs between the shards.

    Warns:
        FunctreeWarning: a random key among the arguments is the same in each micro-batch.

    Examples:
        >>> def loss(w, x):
        ...     return jnp.mean((x @ w) ** 2)
        >>> x = jnp.arange(12.0).reshape(4, 3)
        >>> value, gradient = ft.accumulate(ft.value_and_grad(loss), 2)(
        ...     jnp.ones(3), x
        ... )
        >>> bool(jnp.allclose(gradient, ft.grad(loss)(jnp.ones(3), x)))
        True

        A mean over the tokens that are not masked:

        >>> def total(w, x, mask):
        ...     return jnp.sum((x @ w) ** 2 * mask), jnp.sum(mask)
        >>> step = ft.accumulate(
        ...     ft.grad(total, has_aux=True), 2, weighted=True
        ... )
        >>> gradient, tokens = step(
        ...     jnp.ones(3), x, jnp.array([1.0, 0.0, 1.0, 1.0])
        ... )
        >>> print(tokens)
        3.0

        A layer with state, and dropout with a mask of its own in each micro-batch:

        >>> layer, state = ft.make_state(ft.nn.BatchNorm(3))
        >>> def loss(layer, state, x, key):
        ...     y, state = layer(x, state)
        ...     return jnp.mean(ft.nn.Dropout(0.5)(y, key=key) ** 2), state
        >>> step = ft.accumulate(
        ...     ft.grad(loss, has_aux=True), 2, keys="key", carry="state"
        ... )
        >>> gradient, state = step(layer, state, x, jax.random.key(0))
        >>> print(state[layer.mean].round(4))
        [0.0897 0.1096 0.1295]
    """
    check(
        "accumulate cannot divide the batch",
        fn=(fn, FUNCTION),
        steps=(steps, SIZE),
        batch=(batch, _NAMES_OR_NONE),
        keys=(keys, _NAMES),
        carry=(carry, _NAMES),
        weighted=(weighted, FLAG),
        over=(over, _MESH_AXES),
    )
    number, axes = int(steps), () if over is None else _names(over)
    check_wrapped("accumulate", fn)
    divided = None if batch is None else _names(batch)
    names = {Role.BATCH: divided, Role.KEY: _names(keys), Role.CARRIED: _names(carry)}
    function = GradientFunction.of(fn, names, bool(weighted))
    if axes and not function.is_known:
        raise FunctreeTypeError(
            f"accumulate: over= needs to know where in the result of {function.signature.name} the "
            "gradients are: use `ft.grad` or `ft.value_and_grad`"
        )

    @functools.wraps(fn)
    def in_micro_batches(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return averaged(Call.of(function, args, kwargs), number, axes)

    # A call that is not compiled is compiled here, once for all calls.
    compiled = functools.cache(lambda: jit(in_micro_batches))

    @functools.wraps(fn)
    def accumulated(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        run = in_micro_batches if compiling() else compiled()
        return run(*args, **kwargs)

    return accumulated


def _names(given: str | Iterable[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)
