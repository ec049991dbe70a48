"""`optimizer_state` traces an optimizer's state and labels its leaves.

An optimizer and its parameters ─► its abstract state, whose leaves follow the parameters.
An optimizer is traced only once for parameters with equal types.
"""

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
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
from functree.tree.axes import Axes
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import abstract_result


def optimizer_state(tx: Optimizer, trained: TrainedModel) -> Leaves:
    """Return the abstract leaves of `tx.init(parameters)`, with the parameters that they follow.

    Raises:
        FunctreeError: if `tx` is not an optimizer.
    """

    def trace() -> Leaves:
        check_optimizer(tx)
        return read(abstract_result(tx.init, trained.tree(lambda leaf: leaf.value)))

    # The key contains no axes, so parameters with different axes share a trace.
    state = remembered(tx, ("state", trained_type(trained)), trace)
    follows = followed_by(tx, trained, state.leaves)
    parameters = trained.parameters
    labeled: list[Leaf] = []
    for leaf, followed in zip(state.leaves, follows, strict=True):
        labeled.append(following(leaf, followed, parameters))
    # Problems with names are dropped: a copy of the model in the state may have leaves whose
    # shapes do not fit the model's annotations.
    return Leaves(tuple(labeled), (), state.skeleton)


def followed_by(
    tx: Optimizer, trained: TrainedModel, state: Sequence[Leaf]
) -> Sequence[FollowedLeaf]:
    """Return the parameters that the leaves of an existing state follow."""
    leaves = tuple((leaf.path, leaf.shape, leaf.value.dtype) for leaf in state)
    return remembered(
        tx, ("follows", trained_type(trained), leaves), lambda: find_followed(tx, trained, state)
    )


def following(leaf: Leaf, follows: FollowedLeaf, parameters: Mapping[Path, Leaf]) -> Leaf:
    """Give a leaf of an optimizer's state the axes of the parameter that it follows."""
    if follows.path is None:
        axes = Axes(*[None] * len(leaf.shape))
        return leaf._replace(axes=axes, misfit=None, follows=follows)
    axes = parameters[follows.path].axes
    if not follows.has_all_of(len(axes)):
        # A dimension that only the leaf has is unnamed.
        axes = Axes(*(None if dim is None else axes[dim] for dim in follows.dims))
    # `stacked` and `misfit` come from the annotations of a copy of the model, which do not apply
    # here.
    return leaf._replace(
        axes=axes, stacked=0, annotated=follows.known, misfit=None, follows=follows
    )


def trained_type(trained: TrainedModel) -> Hashable:
    """Return everything that a trace of `tx.init` depends on: parameter types and JAX settings."""
    settings = (
        _CONFIG.jax_enable_x64,
        _CONFIG.jax_default_prng_impl,
        _CONFIG.jax_numpy_dtype_promotion,
    )
    return trained.skeleton, trained.each(_array_type), settings


def _array_type(leaf: Leaf) -> Hashable:
    """Return a parameter's type as in JAX's trace caches, and its number of stack dimensions."""
    array = leaf.value
    return array.shape, array.dtype, getattr(array, "weak_type", False), leaf.stacked


_CONFIG: Any = jax.config  # type checkers do not find its options

# A state is planned repeatedly: to create it, to place it, and for the shardings of each function
# that takes it. The results of traces are therefore cached by `tx.init`, a function that only
# optimizers without state share.
_KNOWN: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = weakref.WeakKeyDictionary()
_REMEMBERED = 16  # the maximum number of results for each optimizer

T = TypeVar("T")


def remembered(tx: Any, key: Hashable, find: Callable[[], T], *, of_update: bool = False) -> T:
    """Return an optimizer's cached result for a key, or compute and cache it.

    Args:
        tx: the optimizer.
        key: the key.
        find: the function that computes the result.
        of_update: whether the result also depends on `update`. Optimizers without state share their
            `init`, so results that depend on `update` are cached for `update`, or for the optimizer
            itself if `update` is a method. An optimizer with methods may be changed in place, but
            only warnings and checks use these results.
    """
    owner = getattr(tx, "init", None)
    is_function = isinstance(owner, FunctionType)  # each access to a method makes a new object
    if of_update and is_function and isinstance(tx.update, FunctionType):
        owner, key = tx.update, (weakref.ref(owner), key)
    elif of_update and type(tx).__hash__ is object.__hash__:
        owner = tx
    elif of_update or not is_function:
        return find()
    results = _KNOWN.setdefault(owner, {})
    result = results.get(key)
    if result is None:
        result = find()
        if len(results) >= _REMEMBERED:
            results.clear()
        results[key] = result
    return result
