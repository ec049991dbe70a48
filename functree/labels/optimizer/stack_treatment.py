"""An optimizer and its parameters ─► a warning about the stacks that it treats differently from
their layers.

The update of a stack is traced, and the update of its layers that is mapped over them. If both
programs compute the same for a leaf, the optimizer does not care about stacks.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import optax
from jax.extend.core import Literal

from functree.errors import USERS_ERRORS, FunctreeError, listed, warn
from functree.labels.leaf import Leaf
from functree.labels.leaves import arrays_by_path
from functree.labels.optimizer.followed_parameters import TrainedModel, owners_of
from functree.labels.optimizer.layers import mapped_init, mapped_update
from functree.labels.optimizer.optimizer_state import remembered, trained_type
from functree.tree.arrays import AnyArray, Tree
from functree.tree.interfaces import Stack
from functree.tree.jaxprs import NOTHING, Reader, Sources, dependencies, is_random
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton, abstract_result


def warn_of_stacks(tx: Any, trained: TrainedModel) -> None:
    """Warn if an optimizer treats stacks differently from their layers, once for an optimizer and
    parameters of some shapes."""
    stacked = [leaf for leaf in trained.parameters.values() if leaf.stacked]
    if not stacked or not callable(getattr(tx, "update", None)):
        return
    told: list[Leaf] = []

    def find() -> bool:
        told.extend(treated_differently(tx, trained))
        return True

    remembered(tx, ("stacks", trained_type(trained)), find, of_update=True)
    if told:
        warn(_text(told))


def _text(leaves: Sequence[Leaf]) -> str:
    stacks = list(dict.fromkeys(str(_stack_path(leaf)) or "(the model)" for leaf in leaves))
    named = "the stack " if len(stacks) == 1 else "the stacks "
    named += listed([f"`{stack}`" for stack in stacks])
    arrays = listed([f"`{leaf.path}`" for leaf in leaves], 2)
    return (
        f"the optimizer treats {named} differently from the layers in it: it takes {arrays} for "
        "leaves with one more dimension. "
        "With `ft.layerwise(tx)` each layer is its own leaf. What looks at all leaves at once "
        "belongs outside: `optax.chain(optax.clip_by_global_norm(1.0), ft.layerwise(tx))`"
    )


def _stack_path(leaf: Leaf) -> Path:
    """The path of the outermost stack that a leaf is in."""
    for i, cls in enumerate(leaf.within):
        if issubclass(cls, Stack):
            return Path(leaf.path[:i])
    return Path()


def treated_differently(tx: Any, trained: TrainedModel) -> Sequence[Leaf]:
    """The leaves of stacks whose update is not that of their layers.

    An optimizer that looks at several leaves at once is not compared, nor one whose `update` needs
    more arguments. A single array is not compared either: its norm may be meant as a global one.
    Random numbers make no difference.
    """
    if len(trained.parameters) == 1:
        return ()
    params = trained.tree(lambda leaf: leaf.value)
    update = optax.with_extra_args_support(tx).update
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        try:
            whole = traced_update(tx.init, update, params, params)
            outputs = zip(whole.outputs, whole.depends_on(), strict=True)
            if any(on - {owner} for (_, owner), on in outputs):
                return ()
            layers = traced_update(
                partial(mapped_init, tx), partial(mapped_update, tx), params, params
            )
        # It was not meant to run, and may need other arguments.
        except (*USERS_ERRORS, FunctreeError):
            return ()
    same, other = _computed(whole), _computed(layers)
    found: list[Leaf] = []
    for leaf in trained.parameters.values():
        if leaf.stacked and same.get(leaf.path) != other.get(leaf.path):
            found.append(leaf)
    return found


def _computed(traced: "TracedUpdate") -> dict[Path, Sources]:
    """What each update is computed of: the inputs, and the operations."""
    sources = [frozenset({path}) for path, _ in traced.inputs]
    found = dependencies(traced.program, sources, Reader(adds=_operation))
    outputs = zip(traced.outputs, found, strict=True)
    return {Path(path[1:]): on for (path, _), on in outputs if path[0] == UPDATES}


# Operations that only move or repeat elements. A mapped program has them at other places.
_MOVES = frozenset({
    "broadcast_in_dim", "copy", "copy_p", "expand_dims", "reshape", "squeeze", "transpose",
})  # fmt: skip


def _operation(equation: Any) -> Sources:
    """An operation, without how its dimensions are ordered."""
    name = equation.primitive.name
    if name in _MOVES:
        return NOTHING
    if is_random(equation):
        return frozenset({"random"})
    literals = [str(one.val) for one in equation.invars if isinstance(one, Literal)]
    return frozenset({(name, *literals, _extent(equation))})


def _extent(equation: Any) -> Hashable:
    """Over how many elements an operation computes each of its results."""
    params = equation.params
    if not equation.invars:
        return None
    shape = equation.invars[0].aval.shape
    if "dimension_numbers" in params and equation.primitive.name == "dot_general":
        (axes, _), _ = params["dimension_numbers"]
    elif "axes" in params:
        axes = params["axes"]
    else:
        axes = [params[key] for key in ("axis", "dimension") if isinstance(params.get(key), int)]
    return tuple(sorted(shape[axis] for axis in axes))


# The program of an update

UPDATES, STATE, PARAMETERS, ARGUMENTS = range(4)
"""The first key of the paths in a `TracedUpdate`."""

Owned = tuple[Path, Path | None]
"""A path, and the parameter that the array belongs to."""


class TracedUpdate(NamedTuple):
    """The traced `update` of an optimizer.

    Attributes:
        program: the program.
        inputs: each input by its path in the gradients, the state, the parameters and the other
            arguments.
        outputs: each output by its path in the updates and the state.
    """

    program: Any
    inputs: Sequence[Owned]
    outputs: Sequence[Owned]

    def depends_on(self) -> list[Sources]:
        """The parameters that each output depends on."""
        sources = [NOTHING if one is None else frozenset({one}) for _, one in self.inputs]
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
        init: its `init`.
        update: its `update`.
        updates: the gradients, which may be abstract like all other arguments.
        params: the parameters, or None.
        extra: other arguments of `update`.
    """
    state = abstract_result(init, updates if params is None else params)
    given = updates, state, params, extra or {}
    skeleton, types = Skeleton.apart(given)
    parameters = {*arrays_by_path(updates), *arrays_by_path(params)}
    outputs: list[Owned] = []

    def run(*arrays: Any) -> list[AnyArray]:
        updates, state, params, extra = skeleton.fill(arrays)
        result = update(updates, state, params, **extra)
        outputs[:] = _owned(result, parameters)
        return Skeleton.apart(result)[1]

    program = jax.make_jaxpr(run)(*types)
    return TracedUpdate(program, _owned(given, parameters), outputs)


def _owned(trees: Sequence[Tree], parameters: set[Path]) -> list[Owned]:
    """The path of each array in some trees, the first of which are updates and a state, and the
    parameter that it belongs to."""
    owners = owners_of(list(arrays_by_path(trees[STATE])), parameters)
    owned: list[Owned] = []
    for path in arrays_by_path(tuple(trees)):
        owner: Path | None = Path(path[1:])
        if path[0] == STATE:
            owner = next(iter(owners[owner]), None)
        elif path[0] == ARGUMENTS:
            below = Path(path[2:])
            owner = below if below in parameters else None
        owned.append((path, owner))
    return owned
