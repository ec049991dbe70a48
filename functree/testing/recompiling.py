"""A step, or a block of code ─► the assertion that it compiles nothing again, or why it does."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax.tree_util import tree_leaves

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


def assert_closed(step: Callable[..., Any], args: Sequence[Any]) -> None:
    """Assert that the state that a step returns is like the one that it takes.

    Then the next step compiles nothing. The state is every argument with donated arrays; if there
    is none, the first argument. It is compared with the part of the result that has its paths:
    structure, static values, shapes, dtypes, weak types, shardings. Nothing is run.

    Args:
        step: the step, which may be made by `ft.jit`.
        args: its arguments, which may be abstract.

    Raises:
        AssertionError: the state differs. The message has the paths.
        FunctreeError: `step` is not a function.

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
    check("assert_closed cannot check this", step=(step, FUNCTION))
    if not isinstance(args, tuple | list):
        raise FunctreeTypeError(
            "assert_closed takes the arguments as a tuple: `assert_closed(step, (state, batch))`"
        )
    function = step if isinstance(step, Function) else jit(step)
    # Compiled, since only then it is known how the results are sharded: with no `out_shardings=`
    # that is the compiler's choice.
    traced = function.trace(*args)
    compiled = traced.lower().compile()
    # Abstract arrays are what every node takes in the place of its own: the types and shardings by
    # themselves are refused by those whose class checks what it holds.
    given, by_name = compiled.abstract_arguments
    signature, _ = Signature.of(function.__wrapped__)
    names = [*signature.positional[: len(given)], *by_name]
    arguments = dict(zip(names, [*given, *by_name.values()], strict=True))
    # The program knows only arrays. What else a state has is in the arguments themselves.
    for name, argument in zip(names, args, strict=False):
        arguments[name] = Skeleton.of(argument).fill(tree_leaves(arguments[name]))
    # What is donated is given away for its successor, so that it is the state.
    states = list(dict.fromkeys(path[0] for path in traced.donated))
    result = compiled.abstract_result(traced.jax.jaxpr.out_avals)
    found: list[str] = []
    for name in states or names[:1]:
        found += _lines(Path((name,)), arguments[name], result)
    if found:
        raise AssertionError(
            "\n".join(["the state is not closed: the next step would compile again", *found])
        )


def _lines(name: Path, state: Tree, result: Tree) -> Iterator[str]:
    """What differs between a state and the part of a result that replaces it."""
    # A step returns its state beside a loss, in a tuple or under a name of its own. So the part is
    # found by its paths: that with the most paths of the state; of several that with the fewest
    # others, since the loss beside a state may stand at a path that the state has too, such as
    # `1`; and of these the outermost.
    paths, new, most = set(arrays_by_path(state)), None, (0, 0)
    for part in _parts(result):
        own = set(arrays_by_path(part))
        shared = len(paths & own)
        if shared and (shared, -len(own)) > most:
            new, most = part, (shared, -len(own))
    if not most[0]:
        yield f"  {name}: no part of the result has its paths"
        return
    for one in _differences(state, new):
        # An array that the step does not use has no sharding in the program.
        if one.kind == "sharding" and one.before == sharding_text(None):
            continue
        path = Path((*name, *one.path))
        yield f"  {Difference(path, *one[1:])}"


def _parts(tree: Tree) -> Iterator[Tree]:
    """A tree and all trees in it, the outermost first."""
    waiting = [tree]
    while waiting:
        node = waiting.pop(0)
        yield node
        waiting += [child for _, child in children(node) or ()]


def _differences(before: Tree, after: Tree) -> tuple[Difference, ...]:
    """What would be the reasons for a compilation, of calls with these trees."""
    situations: list[Situation] = []
    for tree in (before, after):
        skeleton, arrays = Skeleton.apart(tree)
        # Without a mesh and rules, which are those of the call in both cases.
        situations.append(Situation.of(CallGroup(skeleton.learn(tree)), arrays, None, None))
    return differences(*situations)
