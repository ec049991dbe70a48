"""The number of programs that JAX has lowered in this thread, which shows whether a call has compiled something.

A compilation need not trace the function again, so traces cannot be counted instead. Lowerings are counted and not
compilations, because a program from the persistent cache is lowered but not compiled.
"""

import threading

import jax


class Lowerings(threading.local):
    """A counter of programs, one for each thread."""

    count: int = 0


lowerings: Lowerings = Lowerings()


def _heard(event: str, duration_secs: float, **kwargs: str | int) -> None:
    """Count a lowering. JAX calls this in the thread that lowers, when it has finished."""
    if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
        lowerings.count += 1


jax.monitoring.register_event_duration_secs_listener(_heard)
