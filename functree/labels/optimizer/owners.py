"""The paths of an optimizer's state ─► for each of them, the parameters that the leaf may belong
to."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from functree.tree.paths import Keys, Path

# The number of parameters that need not be distinguished by their paths. Their sizes are changed by
# different steps instead, and large steps are more likely to change a decision of the optimizer.
STEPS = 8

StateArrays = Mapping[Path, Any]
"""The arrays of an optimizer's state by path. Only their shapes and dtypes are looked at."""

Owners = Mapping[Path, Sequence[Path]]
"""For the path of each leaf of a state, the parameters that it may belong to, the most likely one
first."""


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
