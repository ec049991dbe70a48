"""Assertions check that a step or a block of code is not compiled again, or report the reason."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from functree.argument_checks import FUNCTION, check
from functree.calls.call_groups import CallGroup
from functree.calls.compilations import (
    Compilation,
    Difference,
    Situation,
    differences,
    observers,
)
from functree.calls.function import Function
from functree.calls.signature import Signature
from functree.devices.placement import sharding_text
from functree.errors import FunctreeTypeError, count
from functree.labels.leaves import arrays_by_path
from functree.transforms.jit.jit import jit
from functree.tree.arrays import Tree
from functree.tree.nodes import children
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton

# JAX's event for a compilation by XLA. JAX also records it for a compilation-cache hit, which takes
# time too.
_COMPILED = "/jax/core/compile/backend_compile_duration"


@contextmanager
def assert_no_recompile() -> Iterator[None]:
    """Assert that nothing is compiled inside a `with` block, in any thread.

    Raises:
        AssertionError: if a function was compiled. The message names the function, and gives the
            reason if functree compiled it.

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
        AssertionError: 1 compilation inside `assert_no_recompile()`
          <lambda>: compilation 2: x: shape (3,) → (4,)
    """
    # Two sources: functree's functions give reasons for their compilations. JAX reports all
    # compilations, without reasons.
    explained: list[tuple[str, Compilation]] = []
    heard: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILED:
            heard.append(str(kwargs.get("fun_name")))

    def note(name: str, compilation: Compilation) -> None:
        # A shared program was already compiled for another wrapper of the same function.
        if not compilation.shared:
            explained.append((name, compilation))

    jax.monitoring.register_event_duration_secs_listener(listen)
    observers.append(note)
    try:
        yield
    finally:
        observers.remove(note)
        jax.monitoring.unregister_event_duration_listener(listen)
    # JAX names the program `jit(f)`, where `f` is the function's name.
    known = {f"jit({name})" for name, _ in explained}
    lines = [f"  {name}: {compilation}" for name, compilation in explained]
    for name in heard:
        if name not in known:
            lines.append(f"  {name}: compiled by JAX directly, not through functree")
    if lines:
        raise AssertionError(
            "\n".join(
                [f"{count(len(lines), 'compilation')} inside `assert_no_recompile()`", *lines]
            )
        )


def assert_closed(step: Callable[..., Any], args: Sequence[Any]) -> None:
    """Assert that a step returns a state like its input, so that the next step is not recompiled.

    The state is every argument with donated arrays, or the first argument if nothing is donated.
    The state is compared with the part of the result that has the same paths. Structure, static
    values, shapes, dtypes, weak types and shardings must be equal. The step is compiled, but not
    run.

    Args:
        step: the step. It is wrapped in `ft.jit`, unless it already is.
        args: its arguments as a tuple or a list; they may be abstract.

    Raises:
        AssertionError: if the returned state differs. The message lists the paths that differ.
        FunctreeError: if `step` is not a function.
        FunctreeError: if `args` is neither a tuple nor a list.

    Examples:
        >>> def step(state, x):
        ...     return {"w": state["w"] + x.mean(), "n": state["n"] + 1}
        >>> state = {"w": jnp.ones(3), "n": jnp.zeros((), int)}
        >>> ft.testing.assert_closed(
        ...     ft.jit(step, donate="state"), (state, jnp.ones(4))
        ... )
        >>> ft.testing.assert_closed(
        ...     lambda state: state.astype("bfloat16"), (jnp.ones(3),)
        ... )
        Traceback (most recent call last):
            ...
        AssertionError: the state is not closed: the next step would compile again
          state: dtype f32 → bf16
    """
    check("assert_closed: invalid arguments", step=(step, FUNCTION))
    if not isinstance(args, tuple | list):
        raise FunctreeTypeError(
            "assert_closed: pass the arguments as a tuple: `assert_closed(step, (state, batch))`"
        )
    function = step if isinstance(step, Function) else jit(step)
    # The step must be compiled: without `out_shardings=`, the compiler chooses the result's
    # shardings.
    traced = function.trace(*args)
    compiled = traced.lower().compile()
    # Abstract arrays are compared, since every node accepts them. Classes that check their fields
    # refuse bare types and shardings.
    call = compiled.abstract_call
    arguments = dict(zip(call._fields, call, strict=True))
    signature, _ = Signature.of(function.__wrapped__)
    # An argument with donated arrays is replaced by its successor, so it is state.
    states = list(dict.fromkeys(path[0] for path in traced.donated))
    result = compiled.abstract_result(traced.jax.jaxpr.out_avals)
    lines: list[str] = []
    for name in states or signature.positional[:1]:
        lines += _lines(Path((name,)), arguments[name], result)
    if lines:
        raise AssertionError(
            "\n".join(["the state is not closed: the next step would compile again", *lines])
        )


def _lines(name: Path, state: Tree, result: Tree) -> Iterator[str]:
    """Yield the differences between a state and the part of the result that replaces it."""
    # A step may return its state in a tuple with a loss, or under a new name. The part of the
    # result with the most of the state's paths replaces the state. Among several such parts, the
    # part with the fewest other paths is chosen, since the path of a loss, such as `1`, may occur
    # in the state too. If several parts remain, the outermost part is chosen.
    paths = set(arrays_by_path(state))

    def fit(part: Tree) -> tuple[int, int]:
        own = set(arrays_by_path(part))
        return len(paths & own), -len(own)

    new = max(_parts(result), key=fit)
    if not fit(new)[0]:
        yield f"  {name}: no part of the result has the state's paths"
        return
    for difference in _differences(state, new):
        # The program has no sharding for an array that the step does not use.
        if difference.kind == "sharding" and difference.before == sharding_text(None):
            continue
        path = Path((*name, *difference.path))
        yield f"  {Difference(path, *difference[1:])}"


def _parts(tree: Tree) -> Iterator[Tree]:
    """Yield a tree and all trees inside it, the outermost first."""
    waiting = [tree]
    while waiting:
        node = waiting.pop(0)
        yield node
        waiting += [child for _, child in children(node) or ()]


def _differences(before: Tree, after: Tree) -> tuple[Difference, ...]:
    """Return the differences for which a call with the second tree would be compiled again."""
    situations: list[Situation] = []
    for tree in (before, after):
        skeleton, arrays = Skeleton.apart(tree)
        # Mesh and rules are the same in both calls, so they are left out.
        situations.append(Situation.of(CallGroup(skeleton.learn(tree)), arrays, None, None))
    return differences(*situations)
