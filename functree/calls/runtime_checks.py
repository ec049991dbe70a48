"""`run_checked` raises Equinox's own error if an Equinox check in a program fails.

One such check is `eqx.error_if`. Equinox raises its error from a callback in the program. JAX wraps
this error in an error with a much longer text. JAX raises the longer error where the result is
used, which may be in a different function. `run_checked` raises Equinox's error in the call, as
`eqx.filter_jit` does.
"""

import logging
from collections.abc import Callable, Sequence

import equinox as eqx
import jax

from functree.calls.output import Output
from functree.tree.arrays import Tree
from functree.tree.jaxprs import AnyJaxpr, all_equations

# The texts around the message in JAX's error. Equinox has no public names for them.
_BEGINNING, _END = "_EquinoxRuntimeError: ", "\n\n\n-----"

# JAX logs the traceback of a failed callback here, with Equinox's advice to use `eqx.filter_jit`.
_LOG = logging.getLogger("jax._src.callback")


def has_checks(program: AnyJaxpr) -> bool:
    """Return whether a function, or a function that it calls, has Equinox checks."""
    for equation in all_equations(program):
        if equation.primitive.name == "pure_callback" and _is_check(equation.params["callback"]):
            return True
    return False


def _is_check(callback: object) -> bool:
    """Return whether a callback belongs to Equinox. A user's callback does not make a call wait."""
    fun = getattr(callback, "callback_func", callback)
    return str(getattr(fun, "__module__", "")).startswith("equinox.")


def run_checked(run: Callable[..., Output], arguments: Sequence[Tree], name: str) -> Output:
    """Run a program with checks, and wait for the checks as `eqx.filter_jit` does.

    Without the wait, the error would be raised where the result is used.

    Raises:
        EquinoxRuntimeError: if a check fails; the message is short.
    """
    _LOG.addFilter(_is_no_failure)
    try:
        output = run(*arguments)
        # Wait for the first device first, since it runs the callback. If the callback fails, the
        # other simulated CPU devices wait for the first until XLA aborts the process.
        local = [value for value in output.values if value.addressable_shards]
        jax.block_until_ready([value.addressable_data(0) for value in local])
        jax.block_until_ready(local)
    except (RuntimeError, ValueError) as error:
        raise_failed(error, name)
        raise
    finally:
        _LOG.removeFilter(_is_no_failure)
    return output


def raise_failed(error: RuntimeError | ValueError, name: str) -> None:
    """Raise Equinox's error if a failed check caused JAX's error.

    JAX raises a ValueError if the program ends before the call returns.
    """
    _, found, rest = str(error).partition(_BEGINNING)
    if not found:
        return
    message, _, _ = rest.partition(_END)
    # `from None`, since JAX's error repeats this message in a much longer text.
    raise eqx.EquinoxRuntimeError(
        f"{message}\n\nThis check failed in {name}. Set the environment variable "
        "`EQX_ON_ERROR=breakpoint` to open a debugger at the check."
    ) from None


def _is_no_failure(record: logging.LogRecord) -> bool:
    return "pure_callback failed" not in record.getMessage()
