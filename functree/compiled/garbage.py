"""`without_collector` pauses Python's garbage collector while a large program is read."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Pause Python's garbage collector.

    The collector would repeatedly scan all operations of a large program, although none is in a
    reference cycle. The pause halves the time for 50,000 instructions.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
