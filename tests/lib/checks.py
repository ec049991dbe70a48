"""What tests ask again and again: is this raised, in these words; how often is that traced,
compiled, called."""

import functools
import gc
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import jax
import pytest

import functree as ft
from tests.lib.meshes import SIZES


def raises(*fragments: str, error: type[Exception] = ft.FunctreeError) -> Any:
    """As `pytest.raises`, of an error whose text has these fragments in this order."""
    return pytest.raises(error, match=_in_order(fragments))


def warns(*fragments: str) -> Any:
    """As `pytest.warns`, of a warning of functree whose text has these fragments in this order."""
    return pytest.warns(ft.FunctreeWarning, match=_in_order(fragments))


def _in_order(fragments: Iterable[str]) -> str:
    return "(?s)" + ".*".join(map(re.escape, fragments))


def refused(tree: Any, layout: Any, mesh: Any = SIZES) -> str:
    """The text of the `ShardingError` with which `ft.plan` refuses."""
    with pytest.raises(ft.ShardingError) as caught:
        ft.plan(tree, layout, mesh)
    return str(caught.value)


def counted(fun: Callable[..., Any], **options: Any) -> tuple[Any, list[int]]:
    """A jitted function, and how often its body was traced."""
    traces: list[int] = []

    @functools.wraps(fun)
    def body(*args: Any, **kwargs: Any) -> Any:
        traces.append(1)
        return fun(*args, **kwargs)

    return ft.jit(body, **options), traces


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The programs that JAX compiles meanwhile, as it reports them itself."""
    heard: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            heard.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield heard
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def python_calls(run: Callable[[], Any], of: FunctionType | None = None) -> int:
    """How many Python functions run in one call of `run`, or how often that one.

    Without the collector of garbage, which would run Python functions of JAX when its time comes.
    """
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call" and (of is None or frame.f_code is of.__code__)

    collecting = gc.isenabled()
    gc.disable()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
        if collecting:
            gc.enable()
    return calls
