"""An optimizer and its parameters ─► for each leaf of its state, the parameter that it follows.

That is not found by the types in the state, which differ for each optimizer. Its path shows which
parameter a leaf belongs to, and a leaf with the shape of its parameter has all dimensions of it.
For other leaves `tx.init` is traced a second time with parameters of other sizes, all of them
different. The sizes of the leaves then show which dimensions of the parameter they have.

A trace takes long, and most parameters of a large model are alike. So the second trace is of one
parameter of each kind where the optimizer allows it.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax

from functree.errors import FunctreeError, FunctreeTypeError
from functree.labels.leaf import FollowedLeaf, Leaf
from functree.labels.leaves import arrays_by_path
from functree.tree.arrays import AnyArray
from functree.tree.paths import Keys, Path
from functree.tree.skeleton.skeleton import Skeleton, read_abstract

T = TypeVar("T")

Shape = tuple[int, ...]


class Optimizer(Protocol):
    """An optimizer: optax's `GradientTransformation`, or any object with its `init`."""

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
        """The leaves that it updates, by path."""
        return {path: leaf for path, leaf in self.leaves.items() if leaf is not None}

    def tree(self, value: Callable[[Leaf], Any]) -> Any:
        """A tree with the structure of the model, with a value for each parameter and None for all
        else.

        `tx.init` is called with such a tree.
        """
        return self.skeleton.spread(self.each(value))

    def each(self, value: Callable[[Leaf], T]) -> tuple[T | None, ...]:
        """A value for each parameter, and None for the other arrays of the model."""
        return tuple(None if leaf is None else value(leaf) for leaf in self.leaves.values())


def check_optimizer(tx: Any, methods: Sequence[str] = ("init",)) -> None:
    """Raise FunctreeError if `tx` is not an optimizer; `methods` are those that are needed."""
    if all(callable(getattr(tx, method, None)) for method in methods):
        return
    text = repr(tx)
    if len(text) > 40:  # most likely a model, in swapped arguments
        text = f"a {type(tx).__name__}"
    wanted = "an optax GradientTransformation, which has `init` and `update`"
    raise FunctreeTypeError(f"{text} is not an optimizer: the argument `tx` is {wanted}")


StateArrays = Mapping[Path, Any]
"""The arrays of an optimizer's state by path. Only their shapes and dtypes are looked at."""

Owners = Mapping[Path, Sequence[Path]]
"""For the path of each leaf of a state, the parameters that it may belong to, the most likely one
first."""


# Steps by which the sizes of a parameter are changed. Parameters that need not be distinguished by
# their paths have different ones, and large steps are more likely to change a decision of the
# optimizer.
STEPS = 8


def find_followed(
    tx: Optimizer, trained: TrainedModel, leaves: Sequence[Leaf]
) -> Sequence[FollowedLeaf]:
    """What each leaf of an optimizer's state follows.

    Args:
        tx: the optimizer.
        trained: its parameters.
        leaves: the leaves of `tx.init(parameters)`.
    """
    check_optimizer(tx)
    state = {leaf.path: leaf.value for leaf in leaves}
    parameters = trained.parameters
    owners = owners_of(list(state), parameters)
    found: dict[Path, FollowedLeaf] = {}
    unclear: list[Path] = []
    for path, array in state.items():
        found[path] = _by_shape(array.shape, owners[path], parameters)
        if array.shape and (len(owners[path]) > 1 or not found[path].known):
            unclear.append(path)
    attempts = [(dict(zip(unclear, unclear, strict=True)), list(parameters))]
    alike = _alike(unclear, state, owners, parameters)
    some = list({owner: None for path in alike.values() for owner in owners[path]})
    # An optimizer that needs all parameters raises for some of them, or has other leaves.
    if 2 * len(some) <= len(parameters):
        attempts.insert(0, (alike, some))
    for like, chosen in attempts:
        if not unclear:
            break
        wanted = dict.fromkeys(like[path] for path in unclear)
        told = _by_sizes(tx, trained, state, owners, chosen, wanted)
        left: list[Path] = []
        for path in unclear:
            follows = told.get(like[path])
            if follows is not None:
                # Of leaves that are alike, each follows its own parameter.
                own = follows.path if like[path] == path else owners[path][0]
                found[path] = follows._replace(path=own)
            # What belongs to no parameter may depend on their number.
            if follows is None or not (follows.known or owners[path]):
                left.append(path)
        unclear = left
    return [found[leaf.path] for leaf in leaves]


def _by_shape(
    shape: Shape, owners: Sequence[Path], parameters: Mapping[Path, Leaf]
) -> FollowedLeaf:
    """What a leaf follows, as far as its own shape shows it: all dimensions of its parameter if it
    has the same shape, and none if it is a scalar."""
    owner = next(iter(owners), None)
    if owner is not None and shape == parameters[owner].shape:
        return FollowedLeaf(owner, tuple(range(len(shape))))
    return FollowedLeaf(owner, (None,) * len(shape), known=not shape)


def _alike(
    paths: Sequence[Path],
    state: StateArrays,
    owners: Owners,
    parameters: Mapping[Path, Leaf],
) -> dict[Path, Path]:
    """For each leaf the first one that is like it: at the same place before and after the path of
    its parameter, with the same types of both.

    A leaf that may belong to several parameters, or to none, is like no other one.
    """
    first: dict[Hashable, Path] = {}
    alike: dict[Path, Path] = {}
    for path in paths:
        kind: Hashable = path
        if len(owners[path]) == 1:
            (owner,) = owners[path]
            types = [(one.shape, one.dtype) for one in (state[path], parameters[owner].value)]
            kind = _around(path, owner), *types
        alike[path] = first.setdefault(kind, path)
    return alike


def _around(path: Path, parameter: Path) -> Hashable:
    """The keys before and after the path of a parameter."""
    for start in range(len(path)):
        end = start + len(parameter)
        if path[start:end] == parameter:
            return path[:start], path[end:]
    return path


# What `tx.init` raises if it needs more parameters than it gets, or computes with two of them, such
# as their product, and needs sizes that fit together; or the class of a node that checks what it is
# built with.
_REFUSED = (TypeError, ValueError, LookupError, AttributeError)


def _by_sizes(
    tx: Optimizer,
    trained: TrainedModel,
    state: StateArrays,
    owners: Owners,
    chosen: Sequence[Path],
    paths: Collection[Path],
) -> dict[Path, FollowedLeaf]:
    """What some leaves follow, by the sizes that they have for other sizes of the parameters.
    Leaves that have other ranks then are left out.

    Args:
        tx: the optimizer.
        trained: its parameters.
        state: the arrays of its state for the real sizes.
        owners: for each leaf of the state, the parameters that it may belong to.
        chosen: the parameters that `tx.init` gets, with None for the others.
        paths: the leaves.

    Raises:
        FunctreeError: `tx.init` raises one, and was given all parameters.
    """
    every = trained.parameters
    parameters = {path: every[path] for path in chosen}
    # The sizes of the leaf show which of several parameters it belongs to.
    rivals = {one: None for path in paths if len(owners[path]) > 1 for one in owners[path]}
    steps = dict.fromkeys(chosen, 1) | {path: 1 + i % STEPS for i, path in enumerate(rivals)}
    found: dict[Path, FollowedLeaf] = {}
    for sign in (1, -1):
        shapes = other_shapes(parameters, {path: sign * step for path, step in steps.items()})
        try:
            other = _abstract(tx, trained, shapes)
        except _REFUSED as error:
            # Many FunctreeErrors are ValueErrors too, but they are about a mistake.
            if isinstance(error, FunctreeError) and len(chosen) == len(every):
                raise
            break
        # Leaves of other ranks cannot be compared. Nor can the others of their parameter, for which
        # the optimizer keeps something else then, or which were made under `vmap`.
        same = {path for path in other if path in state and other[path].ndim == state[path].ndim}
        jumped: set[Path] = set()
        for path in {*other, *paths} - same:
            jumped.update(owners.get(path, ()))
        for path in paths:
            is_comparable = path in same and jumped.isdisjoint(owners[path])
            if is_comparable and not (path in found and found[path].known):
                pairs = [(one, every[one].shape, shapes[one]) for one in owners[path]]
                found[path] = _compared(state[path].shape, other[path].shape, pairs)
        # With a larger size, a parameter may be over a threshold of the optimizer (127 to 128 for
        # adafactor), and have leaves of other ranks. Smaller sizes are tried then.
        if len(same) == len(other) and len(found) == len(paths):
            break
    return found


def _compared(
    real: Shape, other: Shape, owners: Sequence[tuple[Path, Shape, Shape]]
) -> FollowedLeaf:
    """What a leaf follows: the first parameter that its sizes confirm.

    Args:
        real: the shape of the leaf.
        other: its shape for the other sizes of the parameters.
        owners: the parameters that it may belong to, with their real and their other shapes.
    """
    first = owners[0][0] if owners else None
    if real == other:
        # A size that does not change does not come from a parameter.
        return FollowedLeaf(first, (None,) * len(real))
    for owner, have, want in owners:
        dims = _dims(real, other, have, want)
        if dims is not None:
            return FollowedLeaf(owner, dims)
    return FollowedLeaf(first, (None,) * len(real), known=False)


def _abstract(tx: Optimizer, trained: TrainedModel, shapes: Mapping[Path, Shape]) -> StateArrays:
    """The arrays of `tx.init` for some parameters with other shapes, without their names."""

    def abstract(leaf: Leaf) -> jax.ShapeDtypeStruct | None:
        shape = shapes.get(leaf.path)
        return None if shape is None else jax.ShapeDtypeStruct(shape, leaf.value.dtype)

    def by_path(params: Any) -> tuple[list[Path], list[AnyArray]]:
        found = arrays_by_path(tx.init(params))
        return list(found), list(found.values())

    paths, arrays = read_abstract(by_path, trained.tree(abstract))
    return dict(zip(paths, arrays, strict=True))


def _dims(real: Shape, other: Shape, have: Shape, want: Shape) -> tuple[int | None, ...] | None:
    """The dimensions of a parameter that a leaf has, by the sizes of both; None if they cannot be
    determined.

    A leaf may have all dimensions of the parameter after some of its own, or some of the
    parameter's dimensions in their order and none of its own (except of size 1). The rank of galore
    may be equal to the smallest size of a parameter only by chance.

    Args:
        real: the shape of the leaf.
        other: its shape for the other sizes of the parameter.
        have: the shape of the parameter.
        want: the other shape of the parameter, whose sizes are all different.
    """
    # A history of gradients has all dimensions, after others that do not change.
    lead = len(real) - len(have)
    if lead >= 0 and (real[lead:], other[lead:]) == (have, want) and real[:lead] == other[:lead]:
        return (*[None] * lead, *range(len(have)))
    dims: list[int | None] = []
    for size, other_size in zip(real, other, strict=True):
        if size == other_size == 1:
            dims.append(None)
        # The real size has to be that of the same dimension too.
        elif other_size in want and have[want.index(other_size)] == size:
            dims.append(want.index(other_size))
        else:
            return None
    kept = [dim for dim in dims if dim is not None]
    if kept != sorted(set(kept)):
        return None
    return tuple(dims)


# Other sizes, by which the dimensions of parameters can be told apart


def other_shapes(parameters: Mapping[Path, Leaf], steps: Mapping[Path, int]) -> dict[Path, Shape]:
    """Other shapes of parameters. In each of them all sizes are different from each other and from
    the real ones, but all parameters of a stack have the same number of layers.

    Optimizers decide by sizes: adafactor factors large dimensions, and the two largest ones. So the
    sizes are close to the real ones, and in the same order.

    Args:
        parameters: the leaves by path.
        steps: by how much the sizes of each are changed, at least; negative for smaller sizes.
    """
    stacks = _stacks(parameters.values(), min(steps.values(), default=1))
    shapes: dict[Path, Shape] = {}
    for path, leaf in parameters.items():
        shape, step = leaf.shape, steps[path]
        other = list(shape)
        for stack in enumerate(shape[: leaf.stacked]):
            other[stack[0]] = stacks[stack]
        # In the order of the sizes, so that one that is changed by more than the step stays after
        # the one before it.
        dims = range(leaf.stacked, len(shape))
        for i in sorted(dims, key=lambda i: (shape[i], i), reverse=step < 0):
            other[i] = _other_size(shape[i], step, {*shape, *other})
        shapes[path] = tuple(other)
    return shapes


def _stacks(leaves: Iterable[Leaf], step: int) -> dict[tuple[int, int], int]:
    """The other size of each dimension of a stack, by its index and its real size.

    There is one for each real size, since an optimizer may map a function over the layers, and then
    all arrays must have as many of them. A stack in a stack may have the same size, and its
    dimensions are still told apart.
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
    """A size that is not taken, the next one from a real size on."""
    way = 1 if step > 0 else -1
    size = real + step
    while size > 0 and size in taken:
        size += way
    # There is no smaller size left. This changes the order, but sizes must be positive and
    # different.
    while size <= 0 or size in taken:
        size += 1
    return size


# The parameters that a leaf may belong to, by its path


def owners_of(paths: Sequence[Path], parameters: Collection[Path]) -> dict[Path, list[Path]]:
    """For each leaf of the state, the parameters that it may belong to by its path, the most likely
    one first.

    The state contains trees of parameters, so the path of a leaf is a prefix (`0.mu`), then the
    path of a parameter (`w`), and then the keys of several leaves for one parameter, if there are
    any (`0.mu.w.1`). It is not known where the prefix ends. But every leaf after a prefix must be
    at the path of a parameter, or else it is not a prefix. If several prefixes are possible, the
    one with the most parameters after it comes first, and then the shorter one. So `0.mu.w` belongs
    to `w` and not to a parameter `mu`, and `0.mu.a.w` to `a.w` and not to `w`.
    """
    # For each leaf: the parameter whose path comes next, after each beginning of the leaf's path.
    matches: dict[Path, dict[Keys, Path]] = {}
    # The parameters after each beginning, and the beginnings that are not prefixes: a leaf after
    # them is not at the path of a parameter.
    behind: defaultdict[Keys, set[Path]] = defaultdict(set)
    failing: set[Keys] = set()
    for path in paths:
        found = matches[path] = {}
        for k in range(len(path) + 1):
            match = _first_of(path[k:], parameters)
            if match is None:
                failing.add(path[:k])
            else:
                found[path[:k]] = match
                behind[path[:k]].add(match)
    owners: dict[Path, list[Path]] = {}
    for path, found in matches.items():
        prefixes = [prefix for prefix in found if prefix not in failing]
        # The best first. They are in the order of their lengths, and sorting is stable.
        prefixes.sort(key=lambda prefix: len(behind[prefix]), reverse=True)
        owners[path] = list(dict.fromkeys(map(found.__getitem__, prefixes)))
    lost = [path for path, several in owners.items() if not several]
    return owners | _owners_below(lost, parameters)


def _first_of(keys: Keys, parameters: Collection[Path]) -> Path | None:
    """The longest path of a parameter that some keys begin with."""
    for n in range(len(keys), -1, -1):
        if keys[:n] in parameters:
            return Path(keys[:n])
    return None


def _owners_below(paths: Sequence[Path], parameters: Collection[Path]) -> dict[Path, list[Path]]:
    """For leaves that have no prefix: the parameters whose paths have the same end.

    `optax.lookahead` has the parameters `fast.w` and `slow.w`, and initializes its inner optimizer
    with one half of them, so that the paths in its state end with `w` only. If there are too many
    parameters with the same end, their sizes do not distinguish them, and the leaf has no owner.
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
        found = next((endings[path[k:]] for k in range(len(path)) if path[k:] in endings), [])
        if len(found) > STEPS:
            found = []
        owners[path] = found
    return owners
