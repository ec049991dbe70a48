"""An optimizer and its parameters ─► for each leaf of its state, the parameter that it follows.

That is not found by the types in the state, which differ for each optimizer. Instead `tx.init` is
traced a second time with parameters of other sizes, all of them different. The sizes of the leaves
then show which dimensions of which parameter each leaf has.

A trace takes long, and most parameters of a large model are alike. So the second trace is of one
parameter of each kind where the optimizer allows it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

import jax

from functree.errors import (
    FunctreeError,
    FunctreeTypeError,
)
from functree.labels.leaf import FollowedLeaf, Leaf
from functree.labels.leaves import Leaves, arrays_by_path, read
from functree.labels.optimizer.other_sizes import Shape, other_shapes
from functree.labels.optimizer.owners import STEPS, Owners, StateArrays, owners_of
from functree.labels.optimizer.representatives import Representatives, representatives
from functree.tree.arrays import AnyArray
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton, read_abstract

T = TypeVar("T")


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

    def with_shapes(self, shape: Callable[[Leaf], Shape]) -> Any:
        """The same with abstract parameters of other shapes."""

        def abstract(leaf: Leaf) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape(leaf), leaf.value.dtype)

        return self.tree(abstract)

    def each(self, value: Callable[[Leaf], T]) -> tuple[T | None, ...]:
        """A value for each parameter, and None for the other arrays of the model."""
        return tuple(None if leaf is None else value(leaf) for leaf in self.leaves.values())

    def only(self, paths: Iterable[Path]) -> "TrainedModel":
        """The same model, of which only the parameters at these paths are updated."""
        leaves: dict[Path, Leaf | None] = dict.fromkeys(self.leaves)
        for path in paths:
            leaves[path] = self.leaves[path]
        return self._replace(leaves=leaves)


def check_optimizer(tx: Any, methods: Sequence[str] = ("init",)) -> None:
    """Raise FunctreeError if `tx` is not an optimizer; `methods` are those that are needed."""
    if all(callable(getattr(tx, method, None)) for method in methods):
        return
    text = repr(tx)
    if len(text) > 40:  # most likely a model, in swapped arguments
        text = f"a {type(tx).__name__}"
    wanted = "an optax GradientTransformation, which has `init` and `update`"
    raise FunctreeTypeError(f"{text} is not an optimizer: the argument `tx` is {wanted}")


def abstract_state(tx: Optimizer, trained: TrainedModel) -> Leaves:
    """The leaves of `tx.init(parameters)`, abstract.

    Raises:
        FunctreeError: `tx` is not an optimizer.
    """
    check_optimizer(tx)
    params = trained.tree(lambda leaf: leaf.value)
    leaves, arrays = read_abstract(lambda params: _read(tx.init(params)), params)
    abstract = map(_with_value, leaves.leaves, arrays)
    return replace(leaves, leaves=tuple(abstract))


def _read(state: Any) -> tuple[Leaves, list[AnyArray]]:
    leaves = read(state)
    return leaves, leaves.values


def _with_value(leaf: Leaf, value: jax.ShapeDtypeStruct) -> Leaf:
    return leaf._replace(value=value)


def _abstract(tx: Optimizer, params: Any) -> StateArrays:
    """The arrays of `tx.init(params)`, whose names nobody asks for."""

    def by_path(params: Any) -> tuple[list[Path], list[AnyArray]]:
        found = arrays_by_path(tx.init(params))
        return list(found), list(found.values())

    paths, arrays = read_abstract(by_path, params)
    return dict(zip(paths, arrays, strict=True))


def find_followed(
    tx: Optimizer, trained: TrainedModel, state: StateArrays
) -> dict[Path, FollowedLeaf]:
    """What each leaf of an optimizer's state follows.

    Args:
        tx: the optimizer.
        trained: its parameters.
        state: the arrays of `tx.init(parameters)`.
    """
    check_optimizer(tx)
    owners = owners_of(list(state), trained.parameters)
    few = representatives(trained.parameters, state, owners)
    if few is not None:
        found = _by_few(tx, trained, state, owners, few)
        if found is not None:
            return found
    return _by_all(tx, trained, state, owners)


# What `tx.init` raises if it needs more parameters than it gets, or sizes that fit together.
_REFUSED = (TypeError, ValueError, LookupError, AttributeError)


def _by_few(
    tx: Optimizer,
    trained: TrainedModel,
    state: StateArrays,
    owners: Owners,
    few: Representatives,
) -> dict[Path, FollowedLeaf] | None:
    """What each leaf follows, by traces of `tx.init` with one parameter of each kind, and None
    instead of the others.

    Returns:
        None if the optimizer does not allow it: it raises, such as one with a tree of labels for
            all parameters; or its state for these parameters is not a part of its state for all of
            them.
    """
    reduced = trained.only(few.parameters)
    try:
        small = _abstract(tx, reduced.tree(lambda leaf: leaf.value))
    except _REFUSED:
        return None
    same = all(_is_like(array, small.get(few.leaves[path])) for path, array in state.items())
    if not same or small.keys() != set(few.leaves.values()):
        return None
    own: dict[Path, list[Path]] = {}
    for path in small:
        own[path] = [one for one in owners.get(path, ()) if one in few.parameters]
    follows = _by_all(tx, reduced, small, own)
    return {path: _for_leaf(follows[few.leaves[path]], owners[path]) for path in state}


def _is_like(array: Any, other: Any) -> bool:
    """Whether an array has the shape and dtype of another one."""
    return other is not None and array.shape == other.shape and array.dtype == other.dtype


def _for_leaf(follows: FollowedLeaf, owners: Sequence[Path]) -> FollowedLeaf:
    """What the leaf follows that is like another one, of another parameter."""
    if follows.path is None:
        return follows
    return follows._replace(path=owners[0])


def _by_all(
    tx: Optimizer, trained: TrainedModel, state: StateArrays, owners: Owners
) -> dict[Path, FollowedLeaf]:
    """What each leaf follows, by a trace of `tx.init` with other sizes of all parameters."""
    tracer = _Tracer(tx, trained, state, owners)
    # The path of a leaf may be that of several parameters. The sizes of such parameters are changed
    # by different steps, so that the sizes of the leaf show which of them it belongs to.
    rivals: dict[Path, None] = {}
    for several in tracer.owners.values():
        if len(several) > 1:
            rivals.update(dict.fromkeys(several))
    steps = dict.fromkeys(tracer.parameters, 1)
    for i, path in enumerate(rivals):
        steps[path] = 1 + i % STEPS
    changed, other = tracer.changed(steps)
    jumped = tracer.jumped(other)
    # With a larger size, a parameter may be over a threshold of the optimizer (127 to 128 for
    # adafactor), and have other leaves. Smaller sizes are tried for such parameters.
    if jumped:
        for path in jumped:
            steps[path] = -steps[path]
        changed, other = tracer.changed(steps)
        jumped = tracer.jumped(other)
    return {path: tracer.followed(path, changed, other, jumped) for path in state}


class _Tracer:
    """An optimizer, and what it is traced with.

    Attributes:
        tx: the optimizer.
        trained: its parameters.
        state: the arrays of its state for the real sizes.
        parameters: the leaves that it updates, by path.
        owners: for each leaf of the state, the parameters that it may belong to.
    """

    def __init__(self, tx: Optimizer, trained: TrainedModel, state: StateArrays, owners: Owners):
        self.tx, self.trained, self.state, self.owners = tx, trained, state, owners
        self.parameters: dict[Path, Leaf] = trained.parameters

    def changed(self, steps: Mapping[Path, int]) -> tuple[dict[Path, Shape], StateArrays]:
        """Other shapes of the parameters, and the arrays of the state for these.

        There are no arrays if `tx.init` raises for these shapes.

        Raises:
            FunctreeError: `tx.init` raises one.
        """
        shapes = other_shapes(self.parameters, steps)
        try:
            params = self.trained.with_shapes(lambda leaf: shapes[leaf.path])
            return shapes, _abstract(self.tx, params)
        except FunctreeError:
            # Many of these are ValueErrors too, but they are about a mistake, and not about sizes
            # that do not fit together.
            raise
        except (TypeError, ValueError):
            # An `init` that computes with two parameters, such as their product, needs sizes that
            # fit together; so does the class of a node that checks what it is built with.
            return shapes, {}

    def jumped(self, other: StateArrays) -> set[Path]:
        """The parameters whose state has other leaves, or leaves of other ranks, for the changed
        sizes."""
        jumped: set[Path] = set()
        for path, array in self.state.items():
            if path not in other or not _same_rank(array, other[path]):
                jumped.update(self.owners[path])
        return jumped

    def followed(
        self,
        path: Path,
        changed: Mapping[Path, Shape],
        other: StateArrays,
        jumped: set[Path],
    ) -> FollowedLeaf:
        """What a leaf follows: the first parameter that its path allows and its sizes confirm.

        Args:
            path: the path of a leaf of the state.
            changed: the changed shapes of the parameters.
            other: the arrays of the state for the changed shapes.
            jumped: the parameters whose state changed too much to be compared.
        """
        owners, shape = self.owners[path], self.state[path].shape
        like = path in other and _same_rank(self.state[path], other[path])
        if not like or not jumped.isdisjoint(owners):
            return self._by_shape(shape, owners)
        if not owners:
            # A leaf without a parameter still has to be checked for sizes that changed.
            return self._by_sizes(shape, other[path].shape, None, changed)
        found = [self._by_sizes(shape, other[path].shape, owner, changed) for owner in owners]
        return next((one for one in found if one.known), found[0])

    def _by_sizes(
        self, real: Shape, other: Shape, owner: Path | None, changed: Mapping[Path, Shape]
    ) -> FollowedLeaf:
        """What a leaf follows, by its sizes for the real and for the changed parameters.

        A leaf may have all dimensions of the parameter after some of its own, or some of the
        parameter's dimensions in their order and none of its own (except of size 1). Other leaves
        cannot be determined: the rank of galore may be equal to the smallest size of a parameter
        only by chance.
        """
        # A size that does not change does not come from a parameter.
        varies = [a != b for a, b in zip(real, other, strict=True)]
        nothing = (None,) * len(varies)
        if owner is None or not any(varies):
            return FollowedLeaf(owner, nothing, known=not any(varies))
        want, have = changed[owner], self.parameters[owner].shape
        # All dimensions of the parameter, after `lead` others that do not change (a history of
        # gradients).
        lead = len(varies) - len(want)
        if lead >= 0 and other[lead:] == want and real[lead:] == have and not any(varies[:lead]):
            return FollowedLeaf(owner, (*nothing[:lead], *range(len(want))))
        # Some dimensions of the parameter, as in a factored state. All changed sizes are different,
        # so a size of the leaf belongs to one dimension.
        dims: list[int | None] = []
        for size, other_size, varied in zip(real, other, varies, strict=True):
            if varied and other_size in want:
                dim = want.index(other_size)
                # The real size has to be that of the same dimension.
                fits = size == have[dim]
            else:
                dim = None
                fits = size == 1 and not varied
            if not fits:
                return FollowedLeaf(owner, nothing, known=False)
            dims.append(dim)
        kept = [dim for dim in dims if dim is not None]
        if kept != sorted(set(kept)):
            return FollowedLeaf(owner, nothing, known=False)
        return FollowedLeaf(owner, tuple(dims))

    def _by_shape(self, shape: Shape, owners: Sequence[Path]) -> FollowedLeaf:
        """What a leaf follows that has no other sizes to compare: it can only have the shape of
        its parameter."""
        owner = next(iter(owners), None)
        if owner is not None and shape == self.parameters[owner].shape:
            return FollowedLeaf(owner, tuple(range(len(shape))))
        # A scalar has no dimensions that would have to be determined.
        return FollowedLeaf(owner, (None,) * len(shape), known=not shape)


def _same_rank(one: Any, other: Any) -> bool:
    return len(one.shape) == len(other.shape)
