"""Two bodies of one function ─► the steps that both of them have, in pairs."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property

from functree.testing.intermediates import Site
from functree.testing.steps import Body, Step


@dataclass(frozen=True, eq=False)
class Pairs:
    """The steps that two bodies have in common.

    The bodies are of one function, traced on one device and on a mesh. So most steps are the same.
    A function may ask for the mesh, though, and then do something else.

    Attributes:
        left: the body on one device.
        right: the body on the mesh.
        steps: the indices of each step that both have, in the left body and in the right one.
    """

    left: Body
    right: Body
    steps: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, left: Body, right: Body) -> "Pairs":
        """Pair two bodies. Steps that only say where an array is are in no pair."""
        first = [i for i, step in enumerate(left.steps) if not step.places]
        second = [j for j, step in enumerate(right.steps) if not step.places]
        one, other = [_key(left.steps[i]) for i in first], [_key(right.steps[j]) for j in second]
        pairs = tuple((first[a], second[b]) for a, b in _common(one, other))
        return cls(left, right, pairs)

    @cached_property
    def inner(self) -> dict[tuple[int, int], tuple["Pairs", ...]]:
        """For each pair of steps that have bodies: the pairs in these."""
        found: dict[tuple[int, int], tuple[Pairs, ...]] = {}
        for i, j in self.steps:
            one, other = self.left.steps[i].bodies, self.right.steps[j].bodies
            if one and len(one) == len(other):
                found[i, j] = tuple(map(Pairs.of, one, other))
        return found

    @cached_property
    def left_of(self) -> dict[int, int]:
        """For each step of the right body that is in a pair: the other one."""
        return {j: i for i, j in self.steps}

    @cached_property
    def right_of(self) -> dict[int, int]:
        """For each step of the left body that is in a pair: the other one."""
        return dict(self.steps)

    def sites(
        self, left: Site = (), right: Site = (), manual: bool = False
    ) -> Iterator[tuple[Site, Step, Site, Step, bool]]:
        """Each pair, those of inner bodies too, with the places of its steps, and whether a
        shard_map is around."""
        for i, j in self.steps:
            one, other = self.left.steps[i], self.right.steps[j]
            yield (*left, i), one, (*right, j), other, manual
            within = manual or one.name == "shard_map"
            for k, inner in enumerate(self.inner.get((i, j), ())):
                yield from inner.sites((*left, i, k), (*right, j, k), within)


def _key(step: Step) -> Hashable:
    """What steps of a pair have in common. Not their shapes: in a shard_map these are local."""
    kinds = tuple((str(getattr(one, "dtype", one)), getattr(one, "ndim", 0)) for one in step.types)
    return step.name, step.source, kinds


def _common(one: Sequence[Hashable], other: Sequence[Hashable]) -> list[tuple[int, int]]:
    """The positions of a longest common subsequence."""
    # Most bodies are equal, and what is equal at both ends takes no search.
    most = min(len(one), len(other))
    start = next((i for i in range(most) if one[i] != other[i]), most)
    rest = most - start
    end = next((i for i in range(rest) if one[-1 - i] != other[-1 - i]), rest)
    pairs = [(i, i) for i in range(start)]
    middle, beside = one[start : len(one) - end], other[start : len(other) - end]
    for a, b, size in SequenceMatcher(None, middle, beside, autojunk=False).get_matching_blocks():
        pairs.extend((start + a + i, start + b + i) for i in range(size))
    pairs.extend((len(one) - i, len(other) - i) for i in range(end, 0, -1))
    return pairs
