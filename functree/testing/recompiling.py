"""A block of code ─► the assertion that nothing is compiled in it, or why something was."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from functree.calls.compilations import Compilation, observers
from functree.errors import count

# The event of a compilation by XLA. A program that comes from the compilation cache has it too: to
# look there takes time as well.
_COMPILED = "/jax/core/compile/backend_compile_duration"


@contextmanager
def assert_no_recompile() -> Iterator[None]:
    """Assert that nothing is compiled while the context is entered, in any thread.

    Raises:
        AssertionError: something was. The message says what, and of functions of functree why.

    Examples:
        >>> double = ft.jit(lambda x: 2 * x)
        >>> three, four = jnp.ones(3), jnp.ones(4)
        >>> _ = double(three)
        >>> with ft.testing.assert_no_recompile():
        ...     _ = double(three)
        >>> with ft.testing.assert_no_recompile():
        ...     _ = double(four)
        Traceback (most recent call last):
            ...
        AssertionError: 1 compilation
          <lambda>: compilation 2: x: shape (3,) → (4,)
    """
    # From two sides: functree's own functions tell why they compile, JAX only that something is
    # compiled, by whomever.
    explained: list[tuple[str, Compilation]] = []
    heard: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILED:
            heard.append(str(kwargs.get("fun_name")))

    def note(name: str, compilation: Compilation) -> None:
        # A shared one was compiled for another wrapper of the same function, and was found ready.
        if not compilation.shared:
            explained.append((name, compilation))

    jax.monitoring.register_event_duration_secs_listener(listen)
    observers.append(note)
    try:
        yield
    finally:
        observers.remove(note)
        jax.monitoring.unregister_event_duration_listener(listen)
    # JAX calls the program of `f` by the name `jit(f)`.
    known = {f"jit({name})" for name, _ in explained}
    lines = [f"  {name}: {compilation}" for name, compilation in explained]
    for name in heard:
        if name not in known:
            lines.append(f"  {name}: compiled by JAX, not by a function of functree")
    if lines:
        raise AssertionError("\n".join([count(len(lines), "compilation"), *lines]))
