"""The bodies of a program on one device and of the same on a mesh ─► the steps that both have, and
where records of their values are."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import cached_property

import numpy as np

from functree.testing.intermediates import RAN, Site, manual_axes, slots
from functree.testing.steps import Body, Step

Records = Mapping[Site, np.ndarray]
"""What a program has recorded, by the places of its values."""


@dataclass(frozen=True, eq=False)
class Around:
    """A step that runs a body.

    Attributes:
        body: the body in which the step is.
        index: its index there.
        where: which iteration, or which branch; empty for a shard_map.
    """

    body: Body
    index: int
    where: str


@dataclass(frozen=True, eq=False)
class Place:
    """Where a body is in its program, at one iteration of each loop around it.

    Attributes:
        at: its site.
        axes: the sizes of the mesh axes that are Manual here.
        view: for each loop around it, from the outside: the dimension that records have for its
            iterations, once those of the loops before are gone, and the index in it.
        around: the steps around it, from the outside.
    """

    at: Site = ()
    axes: Mapping[str, int] = field(default_factory=dict[str, int])
    view: tuple[tuple[int, int], ...] = ()
    around: tuple[Around, ...] = ()

    @property
    def where(self) -> list[str]:
        """The iterations and branches around, in words, from the inside."""
        return [one.where for one in reversed(self.around) if one.where]

    def of(self, records: Records, *site: int) -> np.ndarray | None:
        """The record of a value, by its site in the body; None if there is none."""
        record = records.get((*self.at, *site))
        return None if record is None else self.viewed(record)

    def viewed(self, record: np.ndarray) -> np.ndarray:
        """A record at these iterations."""
        for dim, index in self.view:
            record = np.take(record, index, dim)
        return record

    def inside(self, body: Body, index: int, inner: int = 0, where: str = "") -> "Place":
        """The place of a body that a step of this body runs."""
        around = (*self.around, Around(body, index, where))
        return replace(self, at=(*self.at, index, inner), around=around)

    def in_shard_map(self, body: Body, index: int) -> "Place":
        """The place of the body of a shard_map."""
        step = body.steps[index]
        new = {axis: step.params["mesh"].shape[axis] for axis in manual_axes(step)}
        return replace(self.inside(body, index), axes={**self.axes, **new})

    def in_iteration(self, body: Body, index: int, slot: int, where: str) -> "Place":
        """The place of the body of a loop, whose iterations records have in a dimension."""
        view = (*self.view, (len(self.axes), slot))
        return replace(self.inside(body, index, 0, where), view=view)


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
        first, second = _keys(left), _keys(right)
        one, other = list(first), list(second)
        common = _common(list(first.values()), list(second.values()))
        return cls(left, right, tuple((one[a], other[b]) for a, b in common))

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

    def sites(self, at: Site = (), manual: bool = False) -> Iterator[tuple[Site, Step, Step, bool]]:
        """Each pair, those of inner bodies too, with the place of its step on one device, and
        whether a shard_map is around."""
        for i, j in self.steps:
            one, other = self.left.steps[i], self.right.steps[j]
            yield (*at, i), one, other, manual
            within = manual or one.name == "shard_map"
            for k, inner in enumerate(self.inner.get((i, j), ())):
                yield from inner.sites((*at, i, k), within)


def _keys(body: Body) -> dict[int, Hashable]:
    """What the steps of a body have in common with those in their pairs, by index."""
    found: dict[int, Hashable] = {}
    for index, step in enumerate(body.steps):
        if not step.places:
            # Not their shapes: in a shard_map these are local.
            kinds = [
                (str(getattr(one, "dtype", one)), getattr(one, "ndim", 0)) for one in step.types
            ]
            found[index] = step.name, step.source, tuple(kinds)
    return found


def _common(one: Sequence[Hashable], other: Sequence[Hashable]) -> list[tuple[int, int]]:
    """The positions of a longest common subsequence."""
    # Most bodies are equal, and what is equal at both ends takes no search.
    most = min(len(one), len(other))
    start = next((i for i in range(most) if one[i] != other[i]), most)
    rest = most - start
    end = next((i for i in range(rest) if one[-1 - i] != other[-1 - i]), rest)
    pairs = list(zip(range(start), range(start), strict=True))
    middle, beside = one[start : len(one) - end], other[start : len(other) - end]
    for a, b, size in SequenceMatcher(None, middle, beside, autojunk=False).get_matching_blocks():
        a, b = a + start, b + start
        pairs += zip(range(a, a + size), range(b, b + size), strict=True)
    ends = range(len(one) - end, len(one)), range(len(other) - end, len(other))
    return [*pairs, *zip(*ends, strict=True)]


@dataclass(frozen=True, eq=False)
class Scope:
    """A body on one device and the same on a mesh, at one iteration of each loop around it.

    Attributes:
        pairs: the bodies.
        left: the place of the body on one device.
        right: the place of the body on the mesh.
    """

    pairs: Pairs
    left: Place = Place()
    right: Place = Place()

    @property
    def axes(self) -> Mapping[str, int]:
        """The sizes of the mesh axes that are Manual here."""
        return self.right.axes

    def step(self, index: int) -> Step:
        """A step on the mesh."""
        return self.pairs.right.steps[index]

    def in_shard_map(self, i: int, j: int) -> "Scope":
        """The body of a shard_map."""
        return Scope(
            self.pairs.inner[i, j][0],
            self.left.in_shard_map(self.pairs.left, i),
            self.right.in_shard_map(self.pairs.right, j),
        )

    def in_iterations(self, i: int, j: int, left: Records, right: Records) -> Iterator["Scope"]:
        """The body of a loop at each iteration that both loops have, in the order in which they
        run."""
        # Devices may run a loop more or less often.
        ran = [self.left.of(left, i, 0, RAN), self.right.of(right, j, 0, RAN)]
        one, other = (0 if count is None else int(count.min()) for count in ran)
        first = slots(self.pairs.left.steps[i], one)
        second = slots(self.step(j), other)
        if len(first) != len(second) and self.step(j).name == "scan":
            return
        total = max(len(first), len(second))
        for number, (slot, same) in enumerate(zip(first, second, strict=False), 1):
            if slot != same:
                return
            where = f"in iteration {number} of {total}"
            yield Scope(
                self.pairs.inner[i, j][0],
                self.left.in_iteration(self.pairs.left, i, slot, where),
                self.right.in_iteration(self.pairs.right, j, slot, where),
            )

    def in_branch(self, i: int, j: int, left: Records, right: Records) -> "Scope | None":
        """The branch of a conditional that ran; None if devices ran different ones."""
        for inner, pairs in enumerate(self.pairs.inner[i, j]):
            ran = [self.left.of(left, i, inner, RAN), self.right.of(right, j, inner, RAN)]
            if all(one is not None and one.all() for one in ran):
                where = f"in branch {inner}"
                return Scope(
                    pairs,
                    self.left.inside(self.pairs.left, i, inner, where),
                    self.right.inside(self.pairs.right, j, inner, where),
                )
        return None
