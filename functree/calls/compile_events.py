"""The programs that JAX has lowered or compiled in this thread, which show whether a call has done
so.

A compilation need not trace the function again, so traces cannot be counted instead. Neither of the
two is enough: a program from the persistent cache is lowered and not compiled, and for other
devices a program is compiled again from the lowered text that JAX has kept.
"""

import threading
from collections import deque

import jax


class CompileEvents(threading.local):
    """The lowerings and compilations in one thread.

    Attributes:
        count: their number.
        names: the names of the last programs, in order; None for one without a name.
        compiled: the number of compilations, also those that were found in the persistent cache.
        cached: the number of programs that were found there.
    """

    def __init__(self) -> None:
        self.count: int = 0
        self.compiled: int = 0
        self.cached: int = 0
        # Bounded, since it is never emptied. A call lowers and compiles far fewer programs.
        self.names: deque[str | None] = deque(maxlen=256)

    @property
    def by_compiler(self) -> int:
        """The number of programs that the compiler has compiled."""
        return self.compiled - self.cached

    def have(self, name: str, before: int) -> bool:
        """Whether a function has been lowered or compiled since the count was `before`.

        JAX compiles functions of its own too, such as one that moves arrays to the devices of a
        program.
        """
        number = min(self.count - before, len(self.names))
        recent = list(self.names)[len(self.names) - number :]
        # A program without a name may be that of the function.
        return f"jit({name})" in recent or None in recent


compile_events: CompileEvents = CompileEvents()

_COMPILED = "/jax/core/compile/backend_compile_duration"
_CACHED = "/jax/compilation_cache/cache_hits"
_EVENTS = ("/jax/core/compile/jaxpr_to_mlir_module_duration", _COMPILED)


def _heard(event: str, duration_secs: float, **kwargs: str | int) -> None:
    """Note an event. JAX calls this in the thread that lowers or compiles, when it has finished."""
    if event not in _EVENTS:
        return
    compile_events.count += 1
    if event == _COMPILED:
        compile_events.compiled += 1
    name = kwargs.get("fun_name")
    compile_events.names.append(None if name is None else str(name))


def _found(event: str, **kwargs: str | int) -> None:
    """Note that a program was in the persistent cache."""
    if event == _CACHED:
        compile_events.cached += 1


# Once, for all threads: JAX calls them in the thread that compiles, which counts for itself.
jax.monitoring.register_event_duration_secs_listener(_heard)
jax.monitoring.register_event_listener(_found)
