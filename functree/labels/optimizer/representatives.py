"""The parameters and the state of an optimizer ─► one parameter of each kind, and its leaves in the
state."""

from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import NamedTuple

from functree.labels.leaf import Leaf
from functree.labels.optimizer.owners import Owners, StateArrays
from functree.tree.paths import Keys, Path


class Representatives(NamedTuple):
    """One parameter of each kind.

    Attributes:
        parameters: their paths.
        leaves: for the path of each leaf of the state, the path of the leaf in the same place that
            belongs to the representative of its parameter. A leaf that belongs to no parameter
            represents itself.
    """

    parameters: frozenset[Path]
    leaves: Mapping[Path, Path]


def representatives(
    parameters: Mapping[Path, Leaf], state: StateArrays, owners: Owners
) -> Representatives | None:
    """Choose one parameter of each kind.

    Parameters are of one kind if their shapes and dtypes are equal, and if they have equal leaves
    in the state, in the same places.

    Returns:
        None if most parameters are of a kind of their own, or if it is not clear which parameter a
            leaf belongs to.
    """
    if any(len(several) > 1 for several in owners.values()):
        return None
    belonging: dict[Path, tuple[Path, _Affixes]] = {}
    # What each parameter has in the state.
    has: defaultdict[Path, list[Hashable]] = defaultdict(list)
    for path, array in state.items():
        for parameter in owners[path]:
            affixes = _Affixes.of(path, parameter)
            belonging[path] = parameter, affixes
            has[parameter].append((affixes, array.shape, array.dtype))
    first: dict[Hashable, Path] = {}
    chosen: dict[Path, Path] = {}  # the representative of each parameter
    for path, parameter in parameters.items():
        kind = parameter.shape, parameter.value.dtype, tuple(has[path])
        chosen[path] = first.setdefault(kind, path)
    if 2 * len(first) > len(parameters):
        return None
    leaves = {path: path for path in state}
    for path, (parameter, affixes) in belonging.items():
        leaves[path] = affixes.with_parameter(chosen[parameter])
    return Representatives(frozenset(first.values()), leaves)


class _Affixes(NamedTuple):
    """The keys before and after the path of the parameter, in the path of a leaf of the state."""

    before: Keys
    after: Keys

    @classmethod
    def of(cls, path: Path, parameter: Path) -> "_Affixes":
        """Those of a leaf of a parameter. The end of the parameter's path is enough, as for
        `optax.lookahead`."""
        for k in range(len(parameter)):
            own = parameter[k:]
            for start in range(len(path) - len(own) + 1):
                if path[start : start + len(own)] == own:
                    return cls(path[:start], path[start + len(own) :])
        return cls(path, ())

    def with_parameter(self, parameter: Path) -> Path:
        """The path of the same leaf of another parameter."""
        return Path((*self.before, *parameter, *self.after))
