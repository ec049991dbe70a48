"""`compile_events` counts the programs that JAX lowers and compiles in the current thread.

The counts show whether a call lowered or compiled anything. Counting traces would not suffice,
since a compilation may reuse an earlier trace. Lowerings and compilations are both counted, since
each may occur without the other. For different devices, for example, JAX compiles the lowered
text that it kept, without lowering the program again.
"""

import threading
from collections import deque

import jax


class CompileEvents(threading.local):
    """The lowerings and compilations in one thread.

    Attributes:
        count: the number of lowerings and compilations.
        names: the names of the most recent programs, in order; None for a program without a name.
        compiled: the number of compilations, including hits in the persistent cache.
        cached: the number of hits in the persistent cache.
    """

    def __init__(self) -> None:
        self.count: int = 0
        self.compiled: int = 0
        self.cached: int = 0
        # Bounded, since it is never emptied. One call lowers and compiles far fewer programs than
        # the bound.
        self.names: deque[str | None] = deque(maxlen=256)

    @property
    def by_compiler(self) -> int:
        """The number of programs that the compiler compiled, excluding cache hits."""
        return self.compiled - self.cached

    def have(self, name: str, before: int) -> bool:
        """Return whether a function was lowered or compiled since the count was `before`.

        The name matters because JAX compiles its own functions too, such as one that moves arrays
        to a program's devices.
        """
        number = min(self.count - before, len(self.names))
        recent = list(self.names)[len(self.names) - number :]
        # A program without a name may belong to the function.
        return f"jit({name})" in recent or None in recent


compile_events: CompileEvents = CompileEvents()

_COMPILED = "/jax/core/compile/backend_compile_duration"
_CACHED = "/jax/compilation_cache/cache_hits"
_EVENTS = ("/jax/core/compile/jaxpr_to_mlir_module_duration", _COMPILED)


def _heard(event: str, duration_secs: float, **kwargs: str | int) -> None:
    """Count an event. JAX calls this in the thread that has just lowered or compiled."""
    if event not in _EVENTS:
        return
    compile_events.count += 1
    if event == _COMPILED:
        compile_events.compiled += 1
    name = kwargs.get("fun_name")
    compile_events.names.append(None if name is None else str(name))


def _found(event: str, **kwargs: str | int) -> None:
    """Count a program that was in the persistent cache."""
    if event == _CACHED:
        compile_events.cached += 1


# Registered once for all threads. JAX calls a listener in the compiling thread, which has its own
# counts.
jax.monitoring.register_event_duration_secs_listener(_heard)
jax.monitoring.register_event_listener(_found)
