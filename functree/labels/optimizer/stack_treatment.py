"""`warn_of_stacks` warns if an optimizer treats stacks differently from their layers.

It traces two updates: one of the stacks, and one that is mapped over their layers. If both programs
compute a leaf in the same way, the optimizer treats the leaf as separate layers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.extend.core import Literal

from functree.errors import USERS_ERRORS, FunctreeError, listed, warn
from functree.labels.leaves import Leaf, read
from functree.labels.optimizer.followed_parameters import (
    TrainedModel,
    owners_of,
    remembered,
    trained_type,
)
from functree.labels.optimizer.layers import mapped_init, mapped_update
from functree.tree.arrays import AnyArray, Tree
from functree.tree.interfaces import Stack
from functree.tree.jaxprs import NOTHING, Sources, dependencies, is_random
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton, abstract_result


def warn_of_stacks(tx: Any, trained: TrainedModel) -> None:
    """Warn if an optimizer treats stacks differently from their layers.

    The warning appears once for each optimizer and set of parameter types.
    """
    stacked = [leaf for leaf in trained.parameters.values() if leaf.stacked]
    if not stacked or not callable(getattr(tx, "update", None)):
        return
    leaves: list[Leaf] = []

    def find() -> bool:
        leaves.extend(treated_differently(tx, trained))
        return True

    remembered(tx, ("stacks", trained_type(trained)), find, of_update=True)
    if leaves:
        warn(_text(leaves))


def _text(leaves: Sequence[Leaf]) -> str:
    stacks = list(dict.fromkeys(str(_stack_path(leaf)) or "(the model)" for leaf in leaves))
    named = "the stack " if len(stacks) == 1 else "the stacks "
    named += listed([f"`{stack}`" for stack in stacks])
    arrays = listed([f"`{leaf.path}`" for leaf in leaves], 2)
    return (
        f"the optimizer treats {named} differently from separate layers: it treats the stack "
        f"dimension of {arrays} like any other dimension. "
        "Use `ft.layerwise(tx)`, which treats each layer as its own leaf. Outside "
        "`ft.layerwise`, chain the transformations that combine all leaves: "
        "`optax.chain(optax.clip_by_global_norm(1.0), ft.layerwise(tx))`"
    )


def _stack_path(leaf: Leaf) -> Path:
    """Return the path of the outermost stack that contains a leaf."""
    for i, cls in enumerate(leaf.within):
        if issubclass(cls, Stack):
            return Path(leaf.path[:i])
    return Path()


def treated_differently(tx: Any, trained: TrainedModel) -> Sequence[Leaf]:
    """Return the leaves of stacks whose update differs from the update of their layers.

    The comparison skips optimizers that combine several leaves, or whose `update` needs more
    arguments. It also skips a model with a single parameter, whose norm may be intended as a global
    norm. Random numbers do not count as a difference.
    """
    if len(trained.parameters) == 1:
        return ()
    params = trained.tree(lambda leaf: leaf.value)
    update = optax.with_extra_args_support(tx).update

    def layers_init(params: Tree) -> Tree:
        return mapped_init(tx, read(params))

    def layers_update(updates: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        return mapped_update(tx, read(updates), state, read(params), {})

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        try:
            whole = traced_update(tx.init, update, params, params)
            outputs = zip(whole.outputs, whole.depends_on(), strict=True)
            if any(on - {owner} for (_, owner), on in outputs):
                return ()
            layers = traced_update(layers_init, layers_update, params, params)
        # `update` may need other arguments, and the trace is only for a warning.
        except (*USERS_ERRORS, FunctreeError):
            return ()
    of_stack, of_layers = _computed(whole), _computed(layers)
    different: list[Leaf] = []
    for leaf in trained.parameters.values():
        if leaf.stacked and of_stack.get(leaf.path) != of_layers.get(leaf.path):
            different.append(leaf)
    return different


def _computed(traced: "TracedUpdate") -> dict[Path, Sources]:
    """Return the inputs and operations that each update is computed from."""
    sources = [frozenset({path}) for path, _ in traced.inputs]
    computed = dependencies(traced.program, sources, _operation)
    outputs = zip(traced.outputs, computed, strict=True)
    return {Path(path[1:]): on for (path, _), on in outputs if path[0] == UPDATES}


# Operations that only move or repeat elements. A mapped program has them in different places.
_MOVES = frozenset({
    "broadcast_in_dim", "copy", "copy_p", "expand_dims", "reshape", "squeeze", "transpose",
})  # fmt: skip


def _operation(equation: Any) -> Sources:
    """Return an operation's identity, regardless of the order of its dimensions."""
    name = equation.primitive.name
    if name in _MOVES:
        return NOTHING
    if is_random(equation):
        return frozenset({"random"})
    literals = [str(operand.val) for operand in equation.invars if isinstance(operand, Literal)]
    # A sum over the layers has more terms than a sum in each layer.
    operands, results = map(_elements, (equation.invars, equation.outvars))
    return frozenset({(name, *literals, operands / max(results, 1))})


def _elements(variables: Sequence[Any]) -> int:
    """Return the number of elements of the largest array."""
    return max((math.prod(variable.aval.shape) for variable in variables), default=0)


# The program of an update

UPDATES, STATE, PARAMETERS, ARGUMENTS = range(4)
"""The possible first keys of the paths in a `TracedUpdate`."""

Owned = tuple[Path, Path | None]
"""The path of an array, and the parameter that it belongs to."""


class TracedUpdate(NamedTuple):
    """The traced `update` of an optimizer.

    Attributes:
        program: the program.
        inputs: the path of each input in the gradients, the state, the parameters or the other
            arguments, with its parameter.
        outputs: the path of each output in the updates or the state, with its parameter.
    """

    program: Any
    inputs: Sequence[Owned]
    outputs: Sequence[Owned]

    def depends_on(self) -> list[Sources]:
        """Return the parameters that each output depends on."""
        sources = [NOTHING if owner is None else frozenset({owner}) for _, owner in self.inputs]
        return dependencies(self.program, sources)


def traced_update(
    init: Callable[..., Tree],
    update: Callable[..., tuple[Tree, Tree]],
    updates: Tree,
    params: Tree | None,
    extra: Mapping[str, Tree] | None = None,
) -> TracedUpdate:
    """Trace the update of an optimizer.

    Args:
        init: the optimizer's `init`.
        update: the optimizer's `update`.
        updates: the gradients. They may be abstract, like all other arguments.
        params: the parameters, or None.
        extra: other arguments of `update`.
    """
    state = abstract_result(init, updates if params is None else params)
    given = updates, state, params, extra or {}
    skeleton, types = Skeleton.apart(given)
    paths = skeleton.learn(given).paths
    parameters = {Path(path[1:]) for path in paths if path[0] in (UPDATES, PARAMETERS)}
    outputs: list[Owned] = []

    def run(*arrays: Any) -> list[AnyArray]:
        updates, state, params, extra = skeleton.fill(arrays)
        result = tuple(update(updates, state, params, **extra))  # possibly a named tuple
        new, values = Skeleton.apart(result)
        outputs[:] = _owned(new.learn(result).paths, parameters)
        return values

    program = jax.make_jaxpr(run)(*types)
    return TracedUpdate(program, _owned(paths, parameters), outputs)


def _owned(paths: Sequence[Path], parameters: set[Path]) -> list[Owned]:
    """Return each path with its parameter. The first key of a path names its tree, as `STATE`."""
    owners = owners_of([Path(path[1:]) for path in paths if path[0] == STATE], parameters)
    owned: list[Owned] = []
    for path in paths:
        owner: Path | None = Path(path[1:])
        if path[0] == STATE:
            owner = next(iter(owners[owner]), None)
        elif path[0] == ARGUMENTS:
            below = Path(path[2:])
            owner = below if below in parameters else None
        owned.append((path, owner))
    return owned
