"""A step and its arguments ─► the assertion that the state it returns is like the one it takes."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.tree_util import tree_leaves

from functree.argument_checks import FUNCTION, check
from functree.calls.call_groups import CallGroup
from functree.calls.compilations import Difference, Situation, differences
from functree.calls.function import Function
from functree.calls.signature import Signature
from functree.devices.placement import sharding_text
from functree.errors import FunctreeTypeError
from functree.labels.leaves import arrays_by_path
from functree.transforms.jit.jit import jit
from functree.tree.arrays import Tree
from functree.tree.nodes import children
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton


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
    if isinstance(step, Function):
        function, plain = step, step.__wrapped__
    else:
        function, plain = jit(step), step
    # Compiled, since only then it is known how the results are sharded: with no `out_shardings=`
    # that is the compiler's choice.
    traced = function.trace(*args)
    compiled = traced.lower().compile()
    # Abstract arrays are what every node takes in the place of its own: the types and shardings by
    # themselves are refused by those whose class checks what it holds.
    given, by_name = compiled.abstract_arguments
    signature, _ = Signature.of(plain)
    names = [*signature.positional[: len(given)], *by_name]
    arguments = dict(zip(names, [*given, *by_name.values()], strict=True))
    # The program knows only arrays. What else a state has is in the arguments themselves.
    for name, argument in zip(names, args, strict=False):
        arguments[name] = Skeleton.of(argument).fill(tree_leaves(arguments[name]))
    # What is donated is given away for its successor, so that it is the state.
    donated = {path[0] for path in traced.donated}
    states = [name for name in names if name in donated]
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
