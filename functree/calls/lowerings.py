"""How often JAX has made a program, in this thread: the only way to see a compilation that no trace announces.

Lowerings are counted, not compilations: of a program that the persistent cache holds, nothing else is heard.
"""

import threading

import jax


class Lowerings(threading.local):
    """A counter of programs."""

    count: int = 0


lowerings: Lowerings = Lowerings()


def _heard(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
        lowerings.count += 1


jax.monitoring.register_event_duration_secs_listener(_heard)
