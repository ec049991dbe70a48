"""A step and its arguments ─► the assertion that its state can be passed to the next step as it is."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.tree_util import tree_leaves

from functree.calls.call_groups import CallGroup
from functree.calls.compilations import Difference, Seen, differences
from functree.calls.function import Function
from functree.calls.signature import Signature
from functree.errors import FunctreeError
from functree.layout.placement import sharding_text
from functree.parameters import FUNCTION, check
from functree.transforms.jit.jit import jit
from functree.tree.nodes import children
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton


def assert_closed(step: Callable[..., Any], args: Sequence[Any]) -> None:
    """Assert that the state that a step returns is like the one that it takes, so that the next step compiles nothing.

    The state is every argument with donated arrays; if there is none, the first argument. It is compared with the part
    of the result that has its paths: structure, static values, shapes, dtypes, weak types, shardings. Nothing is run.

    Args:
        step: the step, which may be made by `ft.jit`.
        args: its arguments, which may be abstract.

    Raises:
        AssertionError: the state differs. The message has the paths.
        FunctreeError: `step` is not a function.

    Examples:
        >>> step = ft.jit(lambda state, x: {"w": state["w"] + x.mean(), "n": state["n"] + 1}, donate="state")
        >>> ft.testing.assert_closed(step, ({"w": jnp.ones(3), "n": jnp.zeros((), int)}, jnp.ones(4)))
        >>> ft.testing.assert_closed(lambda state: state.astype("bfloat16"), (jnp.ones(3),))
        Traceback (most recent call last):
            ...
        AssertionError: the state is not closed: the next step would compile again
          state: dtype f32 → bf16
    """
    check("assert_closed cannot check this", step=(step, FUNCTION))
    if not isinstance(args, tuple | list):
        raise FunctreeError("assert_closed takes the arguments as a tuple: `assert_closed(step, (state, batch))`")
    traced = (step if isinstance(step, Function) else jit(step)).trace(*args)
    compiled = traced.lower().compile()
    given, by_name = compiled.in_avals
    shardings, shardings_by_name = compiled.input_shardings
    donated, donated_by_name = compiled.args_info
    signature, _ = Signature.of(step.__wrapped__ if isinstance(step, Function) else step)
    names = [*signature.positional[: len(given)], *by_name]
    result = _abstract(traced.out_avals, compiled.output_shardings)
    before = list(map(_abstract, [*given, *by_name.values()], [*shardings, *shardings_by_name.values()]))
    infos = [*donated, *donated_by_name.values()]
    states = [i for i, info in enumerate(infos) if any(one.donated for one in tree_leaves(info))] or [0]
    found = [line for i in states for line in _lines(Path((names[i],)), before[i], result)]
    if found:
        raise AssertionError("\n".join(["the state is not closed: the next step would compile again", *found]))


def _abstract(avals: Any, shardings: Any) -> Any:
    """A tree of abstract values, with the shardings of another."""
    return jax.tree.map(
        lambda aval, one: jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=one, weak_type=aval.weak_type),
        avals,
        shardings,
    )


def _lines(name: Path, state: Any, result: Any) -> Iterator[str]:
    """What differs between a state and the part of a result that replaces it."""
    paths = set(Skeleton.of(state).paths)
    parts = list(_parts(result))
    # The part with the most paths of the state; of several the outermost.
    new = max(parts, key=lambda part: len(paths & set(Skeleton.of(part).paths)), default=None)
    if new is None or not paths & set(Skeleton.of(new).paths):
        yield f"  {name}: no part of the result has its paths"
        return
    for one in _differences(state, new):
        # An array that the step does not use has no sharding in the program.
        if one.kind == "sharding" and one.before == sharding_text(None):
            continue
        path = Path((*name, *one.path))
        yield f"  {Difference(path, *one[1:])}"


def _parts(tree: Any) -> Iterator[Any]:
    """A tree and all trees in it, the outermost first."""
    waiting = [tree]
    while waiting:
        node = waiting.pop(0)
        yield node
        waiting += [child for _, child in children(node) or ()]


def _differences(before: Any, after: Any) -> tuple[Difference, ...]:
    seen: list[Seen] = []
    for tree in (before, after):
        skeleton, arrays = Skeleton.apart(tree)
        seen.append(Seen.of(CallGroup(skeleton), arrays, None, None))
    return differences(seen[0].situation, seen[1].situation)
