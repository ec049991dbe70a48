"""A program with checks of Equinox, such as `eqx.error_if` ─► Equinox' error when one of them
fails.

Equinox raises such an error from a callback in the program. JAX makes an error of its own of it, of
two kilobytes, and raises it where the result is used, which may be in another function. Under
`eqx.filter_jit` it is Equinox' error, raised by the call.
"""

import logging
from collections.abc import Callable, Sequence

import equinox as eqx
import jax

from functree.calls.output import Output
from functree.tree.arrays import Tree
from functree.tree.jaxprs import AnyJaxpr, all_equations

# How the message begins in JAX's error, and what follows it. Equinox has no public names for these.
_BEGINNING, _END = "_EquinoxRuntimeError: ", "\n\n\n-----"

# Here JAX writes the traceback of a callback that has failed, with Equinox' advice to use
# `eqx.filter_jit`.
_LOG = logging.getLogger("jax._src.callback")


def has_checks(program: AnyJaxpr) -> bool:
    """Whether a function, or one that it calls, has checks of Equinox."""
    for equation in all_equations(program):
        if equation.primitive.name == "pure_callback" and _is_check(equation.params["callback"]):
            return True
    return False


def _is_check(callback: object) -> bool:
    """Whether the function of a callback is one of Equinox. A user's own does not make a call
    wait."""
    fun = getattr(callback, "callback_func", callback)
    return str(getattr(fun, "__module__", "")).startswith("equinox.")


def run_checked(run: Callable[..., Output], arguments: Sequence[Tree], name: str) -> Output:
    """Run a program with checks, and wait until they have run, as `eqx.filter_jit` does. Otherwise
    the error would come where the result is used.

    Raises:
        EquinoxRuntimeError: a check has failed; the message is short.
    """
    _LOG.addFilter(_is_no_failure)
    try:
        output = run(*arguments)
        # First on the first device, which runs the callback. If it fails, the other devices of a
        # CPU wait for it until XLA ends the process.
        own = [value for value in output.values if value.addressable_shards]
        jax.block_until_ready([value.addressable_data(0) for value in own])
        jax.block_until_ready(own)
    except (RuntimeError, ValueError) as error:
        raise_failed(error, name)
        raise
    finally:
        _LOG.removeFilter(_is_no_failure)
    return output


def raise_failed(error: RuntimeError | ValueError, name: str) -> None:
    """Raise Equinox' error if JAX's is about a check that has failed. JAX raises a ValueError if
    the program has ended before the call returns."""
    _, found, rest = str(error).partition(_BEGINNING)
    if not found:
        return
    message, _, _ = rest.partition(_END)
    # `from None`, since the other one has all of it too, among much else.
    raise eqx.EquinoxRuntimeError(
        f"{message}\n\nThis is a check in {name}. The environment variable "
        "`EQX_ON_ERROR=breakpoint` opens a debugger where it is made."
    ) from None


def _is_no_failure(record: logging.LogRecord) -> bool:
    return "pure_callback failed" not in record.getMessage()
