"""`find_followed` finds the parameter that each leaf of an optimizer's state follows.

An optimizer and its parameters ─► a `FollowedLeaf` for each leaf of its state. `optimizer_state`
labels the leaves of the abstract state with them. An optimizer is traced only once for parameters
with equal types.

The classes of the state's nodes are not used, since they differ between optimizers. A leaf's path
shows which parameter it belongs to. A leaf with its parameter's shape has all of the parameter's
dimensions. For other leaves, `tx.init` is traced a second time, with all sizes of the parameters
changed to distinct ones. A leaf's new sizes then show which of the parameter's dimensions the leaf
has.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple, Protocol, TypeVar

import jax

from functree.errors import FunctreeError, FunctreeTypeError
from functree.labels.leaves import FollowedLeaf, Leaf, Leaves, arrays_by_path, read
from functree.tree.axes import Axes
from functree.tree.paths import Keys, Path
from functree.tree.skeleton.skeleton import Skeleton, abstract_result

T = TypeVar("T")

Shape = tuple[int, ...]


class Optimizer(Protocol):
    """An optimizer: optax's `GradientTransformation`, or any object with a similar `init`."""

    @property
    def init(self) -> Callable[..., Any]: ...


class TrainedModel(NamedTuple):
    """The parameters that an optimizer updates.

    Attributes:
        skeleton: the skeleton of the model.
        leaves: the leaves by path; None for arrays of the model that the optimizer does not update.
    """

    skeleton: Skeleton
    leaves: Mapping[Path, Leaf | None]

    @property
    def parameters(self) -> dict[Path, Leaf]:
        """The leaves that the optimizer updates, by path."""
        return {path: leaf for path, leaf in self.leaves.items() if leaf is not None}

    def tree(self, value: Callable[[Leaf], Any]) -> Any:
        """Return a tree like the model, with a value for each parameter and None for the rest.

        `tx.init` is called with such trees.
        """
        return self.skeleton.spread(self.each(value))

    def each(self, value: Callable[[Leaf], T]) -> tuple[T | None, ...]:
        """Return a value for each parameter, and None for the other arrays of the model."""
        # A list is faster than a generator, and each step outside `jit` runs this.
        return tuple([None if leaf is None else value(leaf) for leaf in self.leaves.values()])


def check_optimizer(tx: Any, methods: Sequence[str] = ("init",)) -> None:
    """Raise FunctreeError if `tx` is not an optimizer, or lacks one of these methods."""
    if all(callable(getattr(tx, method, None)) for method in methods):
        return
    raise FunctreeTypeError(
        f"an instance of {type(tx).__name__} is not an optimizer: the argument `tx` must be an "
        "optax GradientTransformation, which has `init` and `update`"
    )


StateArrays = Mapping[Path, Any]
"""The arrays of an optimizer's state by path. Only their shapes and dtypes matter."""

Owners = Mapping[Path, Sequence[Path]]
"""The parameters that each leaf of a state may belong to, likeliest first, by the leaf's path."""


# The number of different steps by which sizes are changed. Parameters that paths may not
# distinguish get different steps. There are few steps, since large steps are more likely to change
# a decision of the optimizer.
STEPS = 8


def find_followed(
    tx: Optimizer, trained: TrainedModel, leaves: Sequence[Leaf]
) -> Sequence[FollowedLeaf]:
    """Find the parameter that each leaf of an optimizer's state follows.

    Args:
        tx: the optimizer.
        trained: its parameters.
        leaves: the leaves of `tx.init(parameters)`.
    """
    check_optimizer(tx)
    state = {leaf.path: leaf.value for leaf in leaves}
    parameters = trained.parameters
    owners = owners_of(list(state), parameters)
    followed: dict[Path, FollowedLeaf] = {}
    unclear: list[Path] = []
    for path, array in state.items():
        followed[path] = _by_shape(array.shape, owners[path], parameters)
        if array.shape and (len(owners[path]) > 1 or not followed[path].known):
            unclear.append(path)
    if unclear:
        followed |= _by_sizes(tx, trained, state, owners, unclear)
    return [followed[leaf.path] for leaf in leaves]


def _by_shape(
    shape: Shape, owners: Sequence[Path], parameters: Mapping[Path, Leaf]
) -> FollowedLeaf:
    """Return the parameter that a leaf follows, as far as the leaf's shape shows it.

    A leaf with its parameter's shape has all dimensions of the parameter. A scalar has none.
    """
    owner = next(iter(owners), None)
    if owner is not None and shape == parameters[owner].shape:
        return FollowedLeaf(owner, tuple(range(len(shape))))
    return FollowedLeaf(owner, (None,) * len(shape), known=not shape)


# `tx.init` raises these errors if it combines parameters whose sizes must match, as in a product. A
# node's class may also raise them when it checks its fields.
_REFUSED = (TypeError, ValueError, LookupError, AttributeError)


def _by_sizes(
    tx: Optimizer,
    trained: TrainedModel,
    state: StateArrays,
    owners: Owners,
    paths: Collection[Path],
) -> dict[Path, FollowedLeaf]:
    """Find the parameters that some leaves follow, by changing the sizes of the parameters.

    The result omits leaves whose rank changes, and all other leaves of their parameters.

    Args:
        tx: the optimizer.
        trained: its parameters.
        state: the arrays of its state for the real sizes.
        owners: for each leaf of the state, the parameters that it may belong to.
        paths: the paths of the leaves.

    Raises:
        FunctreeError: if `tx.init` raises a FunctreeError.
    """
    parameters = trained.parameters
    # The sizes of the leaf show which of several parameters it belongs to.
    rivals = {owner: None for path in paths if len(owners[path]) > 1 for owner in owners[path]}
    steps = dict.fromkeys(parameters, 1) | {path: 1 + i % STEPS for i, path in enumerate(rivals)}
    followed: dict[Path, FollowedLeaf] = {}
    for sign in (1, -1):
        shapes = other_shapes(parameters, {path: sign * step for path, step in steps.items()})
        changed = trained.tree(
            lambda leaf, shapes=shapes: jax.ShapeDtypeStruct(shapes[leaf.path], leaf.value.dtype)
        )
        try:
            other = arrays_by_path(abstract_result(tx.init, changed))
        except FunctreeError:
            raise  # many FunctreeErrors are ValueErrors, but they report a user's mistake
        except _REFUSED:
            break
        # Leaves whose rank changes cannot be compared. Neither can other leaves of their parameter:
        # the optimizer may now keep different arrays for the parameter, or the leaves were made
        # under `vmap`.
        same = {path for path in other if path in state and other[path].ndim == state[path].ndim}
        jumped: set[Path] = set()
        for path in {*other, *paths} - same:
            jumped.update(owners.get(path, ()))
        for path in paths:
            is_comparable = path in same and jumped.isdisjoint(owners[path])
            if is_comparable and not (path in followed and followed[path].known):
                pairs = [(x, parameters[x].shape, shapes[x]) for x in owners[path]]
                followed[path] = _compared(state[path].shape, other[path].shape, pairs)
        # A larger size may reach a threshold of the optimizer, such as 128 for adafactor, and
        # change the rank of leaves. In that case, smaller sizes are tried.
        if len(same) == len(other) and len(followed) == len(paths):
            break
    return followed


def _compared(
    real: Shape, other: Shape, owners: Sequence[tuple[Path, Shape, Shape]]
) -> FollowedLeaf:
    """Return the first parameter that the sizes of a leaf confirm as the followed one.

    Args:
        real: the shape of the leaf.
        other: its shape for the changed sizes of the parameters.
        owners: the parameters that it may belong to, with their real and changed shapes.
    """
    first = owners[0][0] if owners else None
    if real == other:
        # A size that stays the same does not come from a parameter.
        return FollowedLeaf(first, (None,) * len(real))
    for owner, have, want in owners:
        dims = _dims(real, other, have, want)
        if dims is not None:
            return FollowedLeaf(owner, dims)
    return FollowedLeaf(first, (None,) * len(real), known=False)


def _dims(real: Shape, other: Shape, have: Shape, want: Shape) -> tuple[int | None, ...] | None:
    """Determine which dimensions of a parameter a leaf has, from the sizes of both.

    Two forms of leaves are accepted. In the first, the leaf's own dimensions come before all
    dimensions of the parameter. In the second, the leaf has some of the parameter's dimensions in
    order, and its own dimensions have size 1. Other matches may be accidental: the rank in GaLore
    may equal the smallest size of a parameter.

    Args:
        real: the shape of the leaf.
        other: its shape for the changed sizes of the parameter.
        have: the shape of the parameter.
        want: the changed shape of the parameter, whose sizes are distinct.

    Returns:
        The dimensions, or None if they cannot be determined.
    """
    # A history of gradients has all dimensions, after leading dimensions that do not change.
    lead = len(real) - len(have)
    if lead >= 0 and (real[lead:], other[lead:]) == (have, want) and real[:lead] == other[:lead]:
        return (*[None] * lead, *range(len(have)))
    dims: list[int | None] = []
    for size, other_size in zip(real, other, strict=True):
        if size == other_size == 1:
            dims.append(None)
        # The real size must also match the same dimension.
        elif other_size in want and have[want.index(other_size)] == size:
            dims.append(want.index(other_size))
        else:
            return None
    kept = [dim for dim in dims if dim is not None]
    if kept != sorted(set(kept)):
        return None
    return tuple(dims)


# Changed sizes, which distinguish the dimensions of parameters


def other_shapes(parameters: Mapping[Path, Leaf], steps: Mapping[Path, int]) -> dict[Path, Shape]:
    """Choose changed shapes for parameters.

    In each shape, the sizes differ from each other and from the real sizes. All parameters of a
    stack keep the same number of layers. Some optimizers use sizes: adafactor factors the two
    largest dimensions if they are large. The new sizes are therefore close to the real ones, and in
    the same order.

    Args:
        parameters: the leaves by path.
        steps: the least change of each parameter's sizes; negative for smaller sizes.
    """
    stacks = _stacks(parameters.values(), min(steps.values(), default=1))
    shapes: dict[Path, Shape] = {}
    for path, leaf in parameters.items():
        shape, step = leaf.shape, steps[path]
        other = list(shape)
        for stack in enumerate(shape[: leaf.stacked]):
            other[stack[0]] = stacks[stack]
        # Dimensions are changed in the order of their sizes, so that the new sizes keep this order
        # even if some change by more than the step.
        dims = range(leaf.stacked, len(shape))
        for i in sorted(dims, key=lambda i: (shape[i], i), reverse=step < 0):
            other[i] = _other_size(shape[i], step, {*shape, *other})
        shapes[path] = tuple(other)
    return shapes


def _stacks(leaves: Iterable[Leaf], step: int) -> dict[tuple[int, int], int]:
    """Choose a changed size for each dimension of a stack, by its index and its real size.

    An optimizer may map a function over the layers, which requires the same number of layers in
    all arrays. So there is one changed size for each real size. A nested stack may have the same
    real size as its outer stack. The index distinguishes the two.
    """
    taken: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for leaf in leaves:
        for stack in enumerate(leaf.shape[: leaf.stacked]):
            taken[stack].update(leaf.shape)
    new: dict[tuple[int, int], int] = {}
    for stack, sizes in taken.items():
        new[stack] = _other_size(stack[1], 1 if step > 0 else -1, {*sizes, *new.values()})
    return new


def _other_size(real: int, step: int, taken: Collection[int]) -> int:
    """Return the first size from `real + step` on, in the step's direction, that is not taken."""
    way = 1 if step > 0 else -1
    size = real + step
    while size > 0 and size in taken:
        size += way
    # No smaller size is left. A larger one breaks the order, but sizes must be positive and
    # distinct.
    while size <= 0 or size in taken:
        size += 1
    return size


# The parameters that a leaf may belong to, by its path


def owners_of(paths: Sequence[Path], parameters: Collection[Path]) -> dict[Path, list[Path]]:
    """Return the parameters that each leaf of the state may belong to, the most likely first.

    Only paths are compared. The state contains trees of parameters, so the path of a leaf is a
    prefix (`0.mu`), followed by the path of a parameter (`w`). Further keys may follow if a
    parameter has several leaves (`0.mu.w.1`). The length of the prefix is unknown. A beginning of a
    path is a prefix only if every leaf after it is at the path of a parameter.

    If several prefixes are possible, the prefix with the most parameters after it comes first. The
    shorter one wins a tie. So `0.mu.w` belongs to `w`, not to a parameter `mu`, and `0.mu.a.w`
    belongs to `a.w`, not to `w`.
    """
    # For each leaf, the parameter whose path follows each beginning of the leaf's path.
    matches: dict[Path, dict[Keys, Path]] = {}
    # The parameters after each beginning.
    parameters_after: defaultdict[Keys, set[Path]] = defaultdict(set)
    # The beginnings that are not prefixes: a leaf after them is not at the path of a parameter.
    failing: set[Keys] = set()
    for path in paths:
        by_beginning = matches[path] = {}
        for k in range(len(path) + 1):
            match = _first_of(path[k:], parameters)
            if match is None:
                failing.add(path[:k])
            else:
                by_beginning[path[:k]] = match
                parameters_after[path[:k]].add(match)
    owners: dict[Path, list[Path]] = {}
    for path, by_beginning in matches.items():
        prefixes = [prefix for prefix in by_beginning if prefix not in failing]
        # The best comes first. Sorting is stable, so the order by length breaks ties.
        prefixes.sort(key=lambda prefix: len(parameters_after[prefix]), reverse=True)
        owners[path] = list(dict.fromkeys(map(by_beginning.__getitem__, prefixes)))
    lost = [path for path, several in owners.items() if not several]
    return owners | _owners_below(lost, parameters)


def _first_of(keys: Keys, parameters: Collection[Path]) -> Path | None:
    """Return the longest path of a parameter that some keys begin with."""
    for n in range(len(keys), -1, -1):
        if keys[:n] in parameters:
            return Path(keys[:n])
    return None


def _owners_below(paths: Sequence[Path], parameters: Collection[Path]) -> dict[Path, list[Path]]:
    """Return the parameters whose paths end like a leaf's path, for leaves without a prefix.

    `optax.lookahead` updates pairs of parameters, such as `fast.w` and `slow.w`, and initializes
    its inner optimizer with one parameter of each pair. So the paths in its state end with `w`
    alone. If too many parameters have the same end, sizes cannot distinguish them, and the leaf has
    no owner.
    """
    if not paths:
        return {}
    endings: defaultdict[Keys, list[Path]] = defaultdict(list)
    for path in parameters:
        for k in range(1, len(path)):
            endings[path[k:]].append(path)
    owners: dict[Path, list[Path]] = {}
    for path in paths:
        # The longest end of the path that is also the end of a parameter's path.
        rivals = next((endings[path[k:]] for k in range(len(path)) if path[k:] in endings), [])
        if len(rivals) > STEPS:
            rivals = []
        owners[path] = rivals
    return owners


# The state's leaves


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
    leaves = tuple([(leaf.path, leaf.value.shape, leaf.value.dtype) for leaf in state])
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
        axes = Axes(*[None if dim is None else axes[dim] for dim in follows.dims])
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
