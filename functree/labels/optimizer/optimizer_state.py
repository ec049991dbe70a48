"""An optimizer and its parameters ─► its abstract state, whose leaves follow the parameters; traced
once for equal shapes."""

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any, TypeVar

import jax

from functree.labels.leaf import FollowedLeaf, Leaf
from functree.labels.leaves import Leaves, read
from functree.labels.optimizer.followed_parameters import (
    Optimizer,
    TrainedModel,
    check_optimizer,
    find_followed,
)
from functree.tree.arrays import AnyArray, Tree
from functree.tree.axes import Axes
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import read_abstract


def optimizer_state(tx: Optimizer, trained: TrainedModel) -> Leaves:
    """The leaves of `tx.init(parameters)`, abstract. Each follows a parameter, or none.

    Raises:
        FunctreeError: `tx` is not an optimizer.
    """
    type_ = trained_type(trained)
    axes = trained.each(lambda leaf: leaf.axes)

    def trace() -> tuple[Leaves, Sequence[FollowedLeaf]]:
        state = _abstract_state(tx, trained)
        return state, find_followed(tx, trained, state.leaves)

    def label() -> Leaves:
        # By the type alone: under other names nothing is traced again.
        state, follows = remembered(tx, ("state", type_), trace)
        parameters = trained.parameters
        labelled = [
            following(leaf, one, parameters)
            for leaf, one in zip(state.leaves, follows, strict=True)
        ]
        # Without the problems of names: the leaves of copies of the model may have other shapes
        # than its annotations say.
        return Leaves(tuple(labelled), (), state.skeleton)

    return remembered(tx, ("labelled", type_, axes), label)


def _abstract_state(tx: Optimizer, trained: TrainedModel) -> Leaves:
    """The leaves of `tx.init(parameters)`, abstract."""
    check_optimizer(tx)

    def read_state(params: Tree) -> tuple[Leaves, list[AnyArray]]:
        leaves = read(tx.init(params))
        return leaves, leaves.values

    leaves, arrays = read_abstract(read_state, trained.tree(lambda leaf: leaf.value))
    pairs = zip(leaves.leaves, arrays, strict=True)
    return replace(leaves, leaves=tuple(leaf._replace(value=value) for leaf, value in pairs))


def followed_by(
    tx: Optimizer, trained: TrainedModel, state: Sequence[Leaf]
) -> Sequence[FollowedLeaf]:
    """What the leaves of a state follow that exists already."""
    leaves = tuple((leaf.path, leaf.shape, leaf.value.dtype) for leaf in state)
    return remembered(
        tx, ("follows", trained_type(trained), leaves), lambda: find_followed(tx, trained, state)
    )


def following(leaf: Leaf, follows: FollowedLeaf, parameters: Mapping[Path, Leaf]) -> Leaf:
    """A leaf of an optimizer's state with the axes of the parameter that it follows."""
    if follows.path is None:
        axes = Axes(*[None] * len(leaf.shape))
        return leaf._replace(axes=axes, misfit=None, follows=follows)
    axes = parameters[follows.path].axes
    if not follows.has_all_of(len(axes)):
        # A dimension of the leaf's own has no name.
        axes = Axes(*(None if dim is None else axes[dim] for dim in follows.dims))
    # Not stacked and without a misfit: those of a copy of the model are of its annotations, which
    # say nothing here.
    return leaf._replace(
        axes=axes, stacked=0, annotated=follows.known, misfit=None, follows=follows, unread=None
    )


def trained_type(trained: TrainedModel) -> Hashable:
    """All that a trace of `tx.init` depends on: the parameters without their values, and the
    settings of JAX."""
    settings = (
        _CONFIG.jax_enable_x64,
        _CONFIG.jax_default_prng_impl,
        _CONFIG.jax_numpy_dtype_promotion,
    )
    return trained.skeleton, trained.each(_array_type), settings


def _array_type(leaf: Leaf) -> Hashable:
    """The type of a parameter, as JAX caches traces by it, and the dimensions of it that are those
    of stacks."""
    array = leaf.value
    return array.shape, array.dtype, getattr(array, "weak_type", False), leaf.stacked


_CONFIG: Any = jax.config  # its options are attributes that type checkers do not know

# A state is planned again and again: to make it, to place it, and for the shardings of each
# function that takes it. So what was traced is remembered by `tx.init`, which is another function
# for each optimizer that is made.
_KNOWN: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = weakref.WeakKeyDictionary()
_REMEMBERED = 16  # for each optimizer

T = TypeVar("T")


def remembered(tx: Any, key: Hashable, find: Callable[[], T], *, of_update: bool = False) -> T:
    """What was found about the `init` of an optimizer for a key, or is found now.

    Args:
        tx: the optimizer.
        key: the key.
        find: finds it.
        of_update: whether it depends on the `update` too. Optimizers without state share their
            `init`. For an object whose `update` is a method it is remembered by the object,
            although that may be changed in place: only warnings and checks depend on it.
    """
    owner = getattr(tx, "init", None)
    is_function = isinstance(owner, FunctionType)  # a method is a new object each time
    if of_update and is_function and isinstance(tx.update, FunctionType):
        owner, key = tx.update, (weakref.ref(owner), key)
    elif of_update and type(tx).__hash__ is object.__hash__:
        owner = tx
    elif of_update or not is_function:
        return find()
    known = _KNOWN.setdefault(owner, {})
    found = known.get(key)
    if found is None:
        found = find()
        if len(known) >= _REMEMBERED:
            known.clear()
        known[key] = found
    return found
