"""An optimizer and its parameters ─► for each leaf of its state, the dimensions of a parameter that it has.

What a leaf of the state stands for is not asked of its type: `tx.init` is traced again with every size changed and
different, and the sizes tell which dimensions of which parameter a leaf has.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import equinox as eqx
import jax

from functree.errors import FunctreeError
from functree.tree.axes import Axes
from functree.tree.leaf import Leaf
from functree.tree.leaves import Leaves, read
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton

Shape = tuple[int, ...]


class Optimizer(Protocol):
    """What is asked of an optimizer: optax's `GradientTransformation`, and whatever has its `init`."""

    @property
    def init(self) -> Callable[..., Any]: ...


class Origin(NamedTuple):
    """What one leaf of an optimizer's state comes from.

    Attributes:
        parameter: the path of the parameter, or None.
        dims: for each dimension of the leaf, the parameter's dimension that it is, or None.
        derived: False where the leaf depends on the parameters' shapes in a way that sizes cannot tell.
    """

    parameter: Path | None
    dims: tuple[int | None, ...]
    derived: bool = True

    def describe(self, leaf: Leaf, parameters: Mapping[Path, Leaf]) -> Leaf:
        """A leaf of the state, with the axes that it has from its parameter, whose path patterns see too."""
        if self.parameter is None:
            return leaf._replace(axes=Axes(*[None] * len(leaf.shape)), misfit=None)
        axes = parameters[self.parameter].axes
        kept = Axes(*[None if dim is None else axes[dim] for dim in self.dims])
        aliases = (leaf.path, self.parameter)
        return leaf._replace(axes=kept, aliases=aliases, misfit=None, annotated=self.derived, stacked=0)


class Trained(NamedTuple):
    """The parameters that an optimizer updates.

    Attributes:
        skeleton: of the model.
        leaves: by path, None for the arrays of the model that it does not update.
    """

    skeleton: Skeleton
    leaves: Mapping[Path, Leaf | None]

    @property
    def parameters(self) -> dict[Path, Leaf]:
        """Those that it updates."""
        return {path: leaf for path, leaf in self.leaves.items() if leaf is not None}

    def tree(self, value: Callable[[Leaf], Any]) -> Any:
        """A tree like the model with a value for each parameter, and None elsewhere: what the optimizer is given."""
        return self.skeleton.spread(None if leaf is None else value(leaf) for leaf in self.leaves.values())


def abstract_state(tx: Optimizer, params: Any) -> Leaves:
    """The leaves of `tx.init(params)`, abstract. Raises FunctreeError for what is no optimizer."""
    if not callable(getattr(tx, "init", None)):
        raise FunctreeError(f"{tx!r} is no optimizer: an optax GradientTransformation has `init` and `update`")
    return read(eqx.filter_eval_shape(tx.init, params))


def find_origins(tx: Optimizer, trained: Trained, state: Sequence[Leaf]) -> list[Origin]:
    """What each leaf of an optimizer's state comes from.

    Args:
        tx: the optimizer.
        trained: its parameters.
        state: the leaves of `tx.init(parameters)`, by their paths in the state.
    """
    tracer = _Tracer(tx, trained, state)
    rivals = dict.fromkeys(owner for several in tracer.owners.values() if len(several) > 1 for owner in several)
    steps = dict.fromkeys(tracer.parameters, 1) | {path: 1 + i % STEPS for i, path in enumerate(rivals)}
    changed, other = tracer.changed(steps)
    jumped = tracer.jumped(other)
    if jumped:  # by the next larger sizes; so such parameters get smaller ones
        changed, other = tracer.changed(steps | {path: -steps[path] for path in jumped})
        jumped = tracer.jumped(other)
    return [tracer.origin(leaf, changed, other, jumped) for leaf in state]


# By so many different steps the sizes of parameters change whose paths do not tell them apart.
STEPS = 8


class _Tracer:
    """An optimizer, traced for parameters of other sizes."""

    def __init__(self, tx: Optimizer, trained: Trained, state: Sequence[Leaf]):
        self.tx, self.trained, self.state = tx, trained, state
        self.parameters: dict[Path, Leaf] = trained.parameters
        self.owners: dict[Path, list[Path]] = _owners([leaf.path for leaf in state], self.parameters)

    def changed(self, steps: Mapping[Path, int]) -> tuple[dict[Path, Shape], dict[Path, Leaf]]:
        """Other sizes for the parameters, and the leaves of the state for them; none if it cannot be made of these."""
        shapes = {path: _distinct(leaf.shape, steps[path]) for path, leaf in self.parameters.items()}
        params = self.trained.tree(lambda leaf: jax.ShapeDtypeStruct(shapes[leaf.path], leaf.value.dtype))
        try:
            state = abstract_state(self.tx, params)
        except (TypeError, ValueError):  # an `init` that computes with the parameters needs sizes that fit together
            return shapes, {}
        return shapes, {leaf.path: leaf for leaf in state.leaves}

    def jumped(self, other: Mapping[Path, Leaf]) -> set[Path]:
        """The parameters whose state has other leaves or ranks for other sizes: the optimizer decided otherwise."""
        odd = [leaf.path for leaf in self.state if leaf.path not in other or not _same_rank(leaf, other[leaf.path])]
        return {owner for path in odd for owner in self.owners[path]}

    def origin(
        self, leaf: Leaf, changed: Mapping[Path, Shape], other: Mapping[Path, Leaf], jumped: Collection[Path]
    ) -> Origin:
        """What a leaf comes from, by the first parameter that its sizes speak of."""
        owners = self.owners[leaf.path]
        if leaf.path not in other or any(owner in jumped for owner in owners):
            return self._by_shape(leaf, owners)
        found = [self._by_sizes(leaf, other[leaf.path], owner, changed) for owner in owners or (None,)]
        return next((origin for origin in found if origin.derived), found[0])

    def _by_sizes(self, real: Leaf, other: Leaf, owner: Path | None, changed: Mapping[Path, Shape]) -> Origin:
        """What a leaf comes from, told by its sizes for the real parameters and for the changed ones.

        It may have all the parameter's dimensions behind some of its own, or some of them in their order and none of
        its own. Others cannot be determined: galore's rank is the parameter's smallest size, or not, as it happens.
        """
        varies = [a != b for a, b in zip(real.shape, other.shape, strict=True)]
        nothing = (None,) * len(varies)
        if owner is None or not any(varies):
            return Origin(owner, nothing, derived=not any(varies))
        want, have = changed[owner], self.parameters[owner].shape
        lead = len(varies) - len(want)
        if lead >= 0 and other.shape[lead:] == want and real.shape[lead:] == have and not any(varies[:lead]):
            return Origin(owner, (*nothing[:lead], *range(len(want))))
        dims = tuple(want.index(n) if v and n in want else None for n, v in zip(other.shape, varies, strict=True))
        told = [
            size == 1 and not varied if dim is None else size == have[dim]
            for dim, size, varied in zip(dims, real.shape, varies, strict=True)
        ]
        kept = [dim for dim in dims if dim is not None]
        if all(told) and kept == sorted(set(kept)):
            return Origin(owner, dims)
        return Origin(owner, nothing, derived=False)

    def _by_shape(self, leaf: Leaf, owners: Sequence[Path]) -> Origin:
        """Where other sizes do not help: only what has its parameter's shape is known."""
        owner = owners[0] if owners else None
        if owner is not None and leaf.shape == self.parameters[owner].shape:
            return Origin(owner, tuple(range(len(leaf.shape))))
        return Origin(owner, (None,) * len(leaf.shape), derived=not leaf.shape)


def _same_rank(one: Leaf, other: Leaf) -> bool:
    return len(one.shape) == len(other.shape)


def _distinct(shape: Sequence[int], step: int) -> Shape:
    """Sizes that all differ from each other and from the real ones, in the same order and close to them.

    Optimizers decide by size (adafactor factors what is large, and by the order of sizes), so both are kept.
    """
    out, taken = list(shape), set(shape)
    way = 1 if step > 0 else -1
    for i in sorted(range(len(shape)), key=lambda i: (shape[i], i), reverse=way < 0):
        size = shape[i] + step
        while size > 0 and size in taken:
            size += way
        while size <= 0 or size in taken:  # nothing below is left
            size += 1
        out[i] = size
        taken.add(size)
    return tuple(out)


# Whose a leaf is


def _owners(paths: Sequence[Path], parameters: Collection[Path]) -> dict[Path, list[Path]]:
    """For each leaf of the state, the parameters that its path may speak of, the likeliest first.

    `0.mu.w` speaks of `w`, `0.mu.w.1` too. What is in front stands before a tree of parameters, so every leaf behind
    it must be at a parameter's path. Of several fronts, the one with the most parameters behind it counts first, of
    equals the shortest: so `0.mu.w` is of `w` and not of a parameter `mu`, and `0.mu.a.w` of `a.w` and not of `w`.
    """
    matches = {path: [_first_of(path[k:], parameters) for k in range(len(path) + 1)] for path in paths}
    failing = {path[:k] for path, found in matches.items() for k, match in enumerate(found) if match is None}
    behind: defaultdict[tuple[Any, ...], set[Path]] = defaultdict(set)
    for path, found in matches.items():
        for k, match in enumerate(found):
            if match is not None and path[:k] not in failing:
                behind[path[:k]].add(match)
    owners: dict[Path, list[Path]] = {}
    for path, found in matches.items():
        fronts = sorted((-len(behind[path[:k]]), k) for k in range(len(found)) if path[:k] in behind)
        owners[path] = list(dict.fromkeys(match for _, k in fronts if (match := found[k]) is not None))
    return owners | _owners_below([path for path, several in owners.items() if not several], parameters)


def _first_of(keys: tuple[Any, ...], parameters: Collection[Path]) -> Path | None:
    """The longest parameter's path that some keys begin with."""
    return next((Path(keys[:n]) for n in range(len(keys), -1, -1) if keys[:n] in parameters), None)


def _owners_below(paths: Sequence[Path], parameters: Collection[Path]) -> dict[Path, list[Path]]:
    """For leaves of a part of the parameters (`lookahead` gives its inner optimizer one half): those that end alike.

    Not where they are so many that their sizes do not tell them apart.
    """
    endings: defaultdict[tuple[Any, ...], list[Path]] = defaultdict(list)
    for path in parameters if paths else ():
        for k in range(1, len(path)):
            endings[path[k:]].append(path)
    found = {path: next((endings[path[k:]] for k in range(len(path)) if path[k:] in endings), []) for path in paths}
    return {path: several if len(several) <= STEPS else [] for path, several in found.items()}
