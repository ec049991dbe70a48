"""An optimizer and its parameters ─► its abstract state and the origins of the leaves, traced once for equal shapes."""

import weakref
from collections.abc import Callable, Hashable, Sequence
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

import jax

from functree.layout.optimizer.origins import Optimizer, Origin, Trained, abstract_state, find_origins
from functree.tree.leaf import Leaf
from functree.tree.leaves import Leaves


class OptimizerState(NamedTuple):
    """The state of an optimizer.

    Attributes:
        leaves: the leaves of `tx.init(parameters)`, abstract, with the axes of their parameters.
        origins: the origin of each leaf.
    """

    leaves: Leaves
    origins: Sequence[Origin]


def optimizer_state(tx: Optimizer, trained: Trained) -> OptimizerState:
    """The abstract state of an optimizer, with the origins of its leaves.

    Raises:
        FunctreeError: `tx` is not an optimizer.
    """
    type_ = _type(trained)
    axes = tuple(None if leaf is None else leaf.axes for leaf in trained.leaves.values())

    def describe() -> OptimizerState:
        # By the type alone: under other names nothing is traced again.
        return _described(_remembered(tx, ("state", type_), lambda: _traced(tx, trained)), trained)

    return _remembered(tx, ("described", type_, axes), describe)


def origins_of(tx: Optimizer, trained: Trained, state: Sequence[Leaf]) -> Sequence[Origin]:
    """The origins of the leaves of a state that exists already; see `find_origins`."""
    leaves = tuple((leaf.path, leaf.shape, leaf.value.dtype) for leaf in state)
    return _remembered(tx, ("origins", _type(trained), leaves), lambda: find_origins(tx, trained, state))


def _traced(tx: Optimizer, trained: Trained) -> OptimizerState:
    """The state of an optimizer, whose leaves have no axes of their parameters yet."""
    leaves = abstract_state(tx, trained.tree(lambda leaf: leaf.value))
    return OptimizerState(leaves, find_origins(tx, trained, leaves.leaves))


def _described(state: OptimizerState, trained: Trained) -> OptimizerState:
    """The state of an optimizer with the axes of its parameters.

    Annotations say nothing about it: the leaves of its copies of the model may have other shapes. So the problems of
    names are left out as well.
    """
    leaves, origins = state
    parameters = trained.parameters
    described = [origin.describe(leaf, parameters) for leaf, origin in zip(leaves.leaves, origins, strict=True)]
    return OptimizerState(Leaves(tuple(described), (), leaves.skeleton), origins)


def _type(trained: Trained) -> Hashable:
    """All that a trace of `tx.init` depends on: the parameters without their values, and the settings of JAX."""
    arrays = [None if leaf is None else leaf.value for leaf in trained.leaves.values()]
    types = [None if x is None else (x.shape, x.dtype, getattr(x, "weak_type", False)) for x in arrays]
    settings = _CONFIG.jax_enable_x64, _CONFIG.jax_default_prng_impl, _CONFIG.jax_numpy_dtype_promotion
    return trained.skeleton, tuple(types), settings


_CONFIG: Any = jax.config  # its options are attributes that type checkers do not know

# A state is planned again and again: to make it, to place it, and for the shardings of each function that takes it. So
# what was traced is remembered by `tx.init`, which is another function for each optimizer that is made.
_KNOWN: weakref.WeakKeyDictionary[Callable[..., Any], dict[Hashable, Any]] = weakref.WeakKeyDictionary()
_REMEMBERED = 16  # for each optimizer

T = TypeVar("T")


def _remembered(tx: Optimizer, key: Hashable, find: Callable[[], T]) -> T:
    """What was found for an optimizer and a key, or is found now."""
    init = getattr(tx, "init", None)
    if not isinstance(init, FunctionType):  # a method is a new object each time
        return find()
    known = _KNOWN.setdefault(init, {})
    found = known.get(key)
    if found is None:
        found = find()
        if len(known) >= _REMEMBERED:
            known.clear()
        known[key] = found
    return found
