"""The number of programs that JAX has lowered or compiled in this thread, which shows whether a call has done so.

A compilation need not trace the function again, so traces cannot be counted instead. Neither of the two is enough: a
program from the persistent cache is lowered and not compiled, and for other devices a program is compiled again from
the lowered text that JAX has kept.
"""

import threading

import jax


class CompileEvents(threading.local):
    """A counter of lowerings and compilations, one for each thread."""

    count: int = 0


compile_events: CompileEvents = CompileEvents()

_EVENTS = ("/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration")


def _heard(event: str, duration_secs: float, **kwargs: str | int) -> None:
    """Count an event. JAX calls this in the thread that lowers or compiles, when it has finished."""
    if event in _EVENTS:
        compile_events.count += 1


jax.monitoring.register_event_duration_secs_listener(_heard)
