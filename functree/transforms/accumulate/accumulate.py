"""A gradient function ─► the same function over a batch, which it computes piece by piece."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal, ParamSpec, TypeVar

from functree.argument_checks import FUNCTION, SIZE, TEXT, TEXTS, Takes, check
from functree.calls.program import around
from functree.devices.meshes import compiling
from functree.devices.placement import explicit_mesh
from functree.errors import ShardingError, warn
from functree.transforms.accumulate.draws import DIFFERS, warn_same_draws
from functree.transforms.accumulate.loop import InParts, mean_over_pieces
from functree.transforms.accumulate.piece import operands_of, traced_piece
from functree.transforms.accumulate.placement import Placement
from functree.transforms.accumulate.roles import Arguments, Call, Role
from functree.transforms.grad.known_gradient import known_gradient
from functree.transforms.jit.jit import jit
from functree.tree.arrays import Tree

_P = ParamSpec("_P")
_T = TypeVar("_T")

_NAMES = Takes(
    "the name of a parameter, or several in a tuple",
    lambda value: TEXT.fits(value) or TEXTS.fits(value),
)
_GATHER = Takes(
    '"each" or "once"',
    lambda value: isinstance(value, str),
    lambda value: value in ("each", "once"),
)


def accumulate(
    fn: Callable[_P, _T],
    steps: int,
    *,
    keys: str | Iterable[str] = (),
    carry: str | Iterable[str] = (),
    gather: Literal["each", "once"] = "each",
) -> Callable[_P, _T]:
    """Run a gradient function on the pieces of a batch, by a `lax.scan`, and average the results.

    It needs the memory of one piece only. If the loss is a mean over the batch, the result is that
    of the whole batch. No data moves between devices: piece `i` has every `steps`-th example of the
    batch, beginning with the `i`-th.

    Where the parameters are not sharded over the mesh axes of the batch, a compiled program sums
    their gradients over these axes once, behind the loop. (The devices keep their own parts of the
    sums of products that a gradient is made of. What JAX's program does not show as such a sum, for
    example in a `while` loop, in a kernel, or inside of a `shard_map`, is summed in each piece.)
    For that, it has to be known where the batch and the parameters are: see `gather`.

    Args:
        fn: `ft.value_and_grad(loss)` or `ft.grad(loss)`. Its first argument is the model. In all
            other arguments the leading dimension of each array is the batch. It is traced once.
        steps: the number of pieces.
        keys: the names of parameters whose random keys are split, typed keys or raw ones: piece `i`
            gets `jax.random.split(key, steps)[i]`. An array of keys, one for each example, is a
            part of the batch.
        carry: the names of parameters, such as `state`, that each piece takes from the one before.
            `fn` returns the next value as its aux, for several names a tuple of them; with other
            aux it returns `(aux, carried)`. The result has the last value.
        gather: `"each"`: parameters that are sharded over the mesh axes of the batch, as by
            `ft.FSDP`, are gathered in each piece, and their gradients summed in each piece.
            `"once"`: they are gathered before the loop, and their gradients summed behind it. The
            values are the same; as many bytes are moved as for one piece, and each device holds the
            whole parameters and their gradients. The layout of the parameters is that of `fn`
            (`layout=`), else the ambient one; the mesh axes of the batch are those of the
            annotations of `fn` by the rules, else those of `ft.FSDP` in this layout. On Explicit
            axes the types have both.

    Returns:
        A function of the same arguments. Inexact arrays of its result are averaged, in float32 or
            wider. Everything else is taken from the last piece.

    Raises:
        FunctreeError: `steps` is not a positive integer, or a name is not that of a parameter;
            (when called) `steps` does not divide the leading dimension of an array, or a piece
            cannot be sharded like the batch (this is checked on Explicit axes, where the types of
            arrays contain their shardings); what is in `keys` is no key; `fn` does not return what
            is in `carry`, or with other types.
        ShardingError: (when called) with `gather="once"`, it is not known where the batch or the
            parameters are.

    Warns:
        FunctreeWarning: all pieces draw the same random numbers, from a key that is neither in
            `keys` nor a part of the batch: dropout would have the same mask in each piece.
            (When compiled on a mesh) it is not known where the batch or the parameters are, so that
            gradients may be summed in each piece.

    Examples:
        >>> def loss(w, x):
        ...     return jnp.mean((x @ w) ** 2)
        >>> x = jnp.arange(12.0).reshape(4, 3)
        >>> value, gradient = ft.accumulate(ft.value_and_grad(loss), 2)(
        ...     jnp.ones(3), x
        ... )
        >>> bool(jnp.allclose(gradient, ft.grad(loss)(jnp.ones(3), x)))
        True

        A layer with state, and dropout with a mask of its own in each piece:

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
        keys=(keys, _NAMES),
        carry=(carry, _NAMES),
        gather=(gather, _GATHER),
    )
    # Under jit it is traced once: JAX has the trace in a cache when the loop is traced, and in the
    # next call.
    inner = jit(fn)
    arguments = Arguments.of(fn, _names(keys), _names(carry))

    @functools.wraps(fn)
    def accumulated(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        call = Call.of(arguments, args, kwargs, int(steps))
        with around(explicit_mesh(call.leaves.values)):
            return _over_pieces(inner, call, int(steps), gather == "once")

    return accumulated


def _names(given: str | Iterable[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _over_pieces(fn: Callable[..., Any], call: Call, steps: int, once: bool) -> Tree:
    """The result of a gradient function over the batch of a call."""
    gradient = known_gradient(fn)
    operands = operands_of(call, steps)
    placement: Placement | None = None
    # A call that is not compiled is no program in which a sum could be moved.
    if once or compiling():
        placement = Placement.of(call, gradient)
    unknown = placement.unknown(call) if placement is not None else None
    if once and placement is not None:
        if unknown is not None:
            raise ShardingError(f'accumulate: gather="once" does not know {unknown}')
        operands = placement.gathered(operands)
    elif unknown is not None:
        warn(
            f"accumulate: gradients may be summed over devices in each of the {steps} pieces, "
            f"since it is not known {unknown}"
        )
    piece, operands = traced_piece(fn, call, operands, steps, gradient)
    warn_same_draws(call.arguments.signature.name, piece.function, _origins(call), steps)
    in_parts: InParts | None = None
    # The gradient of a parameter that is sharded over the mesh axes of the batch would be whole on
    # each device until the loop is over. That is the memory that `gather="once"` asks for.
    if placement is not None and compiling() and (once or placement.replicates):
        in_parts = InParts.of(piece, call, placement, steps)
    return piece.skeleton.fill(mean_over_pieces(piece, operands, steps, in_parts))


def _origins(call: Call) -> list[str]:
    """What the operands of a piece are. Its number picks the part of those that differ."""
    origins = [DIFFERS]
    for leaf, role in zip(call.leaves.leaves, call.roles, strict=True):
        origins.append(DIFFERS if role is Role.CARRIED else f"`{leaf.path}`")
    return origins
