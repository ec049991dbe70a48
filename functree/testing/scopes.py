"""`Pairs` matches the steps of two programs, on one device and on a mesh.

A `Place` finds the records of a body's values.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import cached_property

import numpy as np

from functree.testing.intermediates import KEPT_ITERATIONS, RAN, Site, manual_axes
from functree.testing.steps import Body, Step

Records = Mapping[Site, np.ndarray]
"""The records of a program by the sites of its values."""


@dataclass(frozen=True, eq=False)
class Around:
    """A step that runs a body.

    Attributes:
        body: the body that contains the step.
        index: the index of the step in the body.
        where: the iteration or branch, in words; empty for a shard_map.
    """

    body: Body
    index: int
    where: str


@dataclass(frozen=True, eq=False)
class Place:
    """The place of a body in its program, at one iteration of each loop around it.

    Attributes:
        at: the site of the body.
        axes: the sizes of the mesh axes that are Manual here.
        view: a pair for each loop around it, the outermost first. A pair holds the dimension of
            records for the loop's iterations, and the index in this dimension. Dimensions of outer
            loops are already removed.
        around: the steps around it, the outermost first.
    """

    at: Site = ()
    axes: Mapping[str, int] = field(default_factory=dict[str, int])
    view: tuple[tuple[int, int], ...] = ()
    around: tuple[Around, ...] = ()

    @property
    def where(self) -> list[str]:
        """The iterations and branches around the body, in words, the innermost first."""
        return [one.where for one in reversed(self.around) if one.where]

    def of(self, records: Records, *site: int) -> np.ndarray | None:
        """Return the record of a value from its site in the body, or None if there is none."""
        record = records.get((*self.at, *site))
        return None if record is None else self.viewed(record)

    def viewed(self, record: np.ndarray) -> np.ndarray:
        """Select this place's iterations from a record."""
        for dim, index in self.view:
            record = np.take(record, index, dim)
        return record

    def runs(
        self,
        body: Body,
        index: int,
        records: Records,
        count: Callable[[np.ndarray], int] = np.max,
    ) -> Iterator[tuple[int, "Place"]]:
        """Yield the index and the place of each body that a step runs, in the order of the runs.

        Args:
            body: the body at this place.
            index: the index of the step.
            records: the records of the program.
            count: a function from the numbers of runs on the devices to the number of runs to
                yield.
        """
        step = body.steps[index]
        if step.name == "shard_map":
            new = {axis: step.params["mesh"].shape[axis] for axis in manual_axes(step)}
            yield 0, replace(self._inside(body, index), axes={**self.axes, **new})
            return
        if step.name == "cond":
            for inner in range(len(step.bodies)):
                ran = self.of(records, index, inner, RAN)
                if ran is not None and count(ran):
                    yield inner, self._inside(body, index, inner, f"in branch {inner}")
            return
        if step.name == "scan":
            order = range(step.params["length"])
            slots = list(enumerate(order[::-1] if step.params["reverse"] else order, 1))
        else:
            ran = self.of(records, index, 0, RAN)
            last = 0 if ran is None else int(count(ran))
            slots = list(enumerate(range(min(last, KEPT_ITERATIONS)), 1))
            # The last slot belongs to the last iteration, if there are more iterations than slots.
            # Its inputs may already differ, so a search for differences stops before it, unless it
            # is the next iteration.
            if last == KEPT_ITERATIONS + 1 or (last > KEPT_ITERATIONS and count is np.max):
                slots.append((last, KEPT_ITERATIONS))
        for number, slot in slots:
            view = (*self.view, (len(self.axes), slot))
            place = self._inside(body, index, 0, f"in iteration {number}")
            yield 0, replace(place, view=view)

    def _inside(self, body: Body, index: int, inner: int = 0, where: str = "") -> "Place":
        """Return the place of a body that a step of this body runs."""
        around = (*self.around, Around(body, index, where))
        return replace(self, at=(*self.at, index, inner), around=around)


@dataclass(frozen=True, eq=False)
class Pairs:
    """The steps that two bodies have in common.

    The bodies come from one function, traced on one device and on a mesh, so most steps are the
    same. A function that reads the mesh may compute differently.

    Attributes:
        left: the body on one device.
        right: the body on the mesh.
        steps: the indices of each common step in the left and the right body.
    """

    left: Body
    right: Body
    steps: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, left: Body, right: Body) -> "Pairs":
        """Pair the steps of two bodies, except steps that only place arrays."""
        first, second = _keys(left), _keys(right)
        one, other = list(first), list(second)
        matcher = SequenceMatcher(None, list(first.values()), list(second.values()), autojunk=False)
        steps: list[tuple[int, int]] = []
        for a, b, size in matcher.get_matching_blocks():
            steps += zip(one[a : a + size], other[b : b + size], strict=True)
        return cls(left, right, tuple(steps))

    @cached_property
    def inner(self) -> dict[tuple[int, int], tuple["Pairs", ...]]:
        """The pairs of the inner bodies, for each pair of steps that have bodies."""
        pairs: dict[tuple[int, int], tuple[Pairs, ...]] = {}
        for i, j in self.steps:
            one, other = self.left.steps[i].bodies, self.right.steps[j].bodies
            if one and len(one) == len(other):
                pairs[i, j] = tuple(map(Pairs.of, one, other))
        return pairs

    @cached_property
    def left_of(self) -> dict[int, int]:
        """The indices of the paired left steps, by the right step's index."""
        return {j: i for i, j in self.steps}

    @cached_property
    def right_of(self) -> dict[int, int]:
        """The indices of the paired right steps, by the left step's index."""
        return dict(self.steps)

    def sites(self, at: Site = (), manual: bool = False) -> Iterator[tuple[Site, Step, Step, bool]]:
        """Yield all pairs, including pairs in inner bodies.

        Each item holds the site of the left step, both steps, and whether they are inside a
        shard_map.
        """
        for i, j in self.steps:
            one, other = self.left.steps[i], self.right.steps[j]
            yield (*at, i), one, other, manual
            within = manual or one.name == "shard_map"
            for k, inner in enumerate(self.inner.get((i, j), ())):
                yield from inner.sites((*at, i, k), within)


def _keys(body: Body) -> dict[int, Hashable]:
    """Return the key of each step by index. Paired steps have equal keys."""
    keys: dict[int, Hashable] = {}
    for index, step in enumerate(body.steps):
        if not step.places:
            # Without shapes, which are local in a shard_map.
            kinds = [
                (str(getattr(one, "dtype", one)), getattr(one, "ndim", 0)) for one in step.types
            ]
            keys[index] = step.name, step.source, tuple(kinds)
    return keys


@dataclass(frozen=True, eq=False)
class Scope:
    """A body on one device and on a mesh, at one iteration of each loop around it.

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
        """Return a step on the mesh."""
        return self.pairs.right.steps[index]

    def runs(self, i: int, j: int, left: Records, right: Records) -> Iterator["Scope"]:
        """Yield the scope of each body that paired steps run, as far as their runs are the same.

        Devices may run different branches, or a loop different numbers of times. The runs that all
        devices have in common are compared.
        """
        for (inner, one), (same, other) in zip(
            self.left.runs(self.pairs.left, i, left, np.min),
            self.right.runs(self.pairs.right, j, right, np.min),
            strict=False,
        ):
            if (inner, one.where) != (same, other.where):
                return
            yield Scope(self.pairs.inner[i, j][inner], one, other)
