"""A body on one device and the same on a mesh ─► `Scope`: where records of its values are."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from functree.testing.intermediates import KEPT_ITERATIONS, RAN, Site, manual_axes
from functree.testing.pairs import Pairs
from functree.testing.steps import Body, Step

Records = Mapping[Site, np.ndarray]
"""What a program has recorded, by the places of its values."""

_NO_AXES: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Around:
    """A step that runs a body.

    Attributes:
        body: the body in which the step is.
        index: its index there.
        inner: the index of the body that it runs.
        where: which iteration, or which branch; empty for a shard_map.
    """

    body: Body
    index: int
    inner: int
    where: str


@dataclass(frozen=True, eq=False)
class Scope:
    """A body on one device and the same on a mesh, at one iteration of each loop around it.

    Attributes:
        pairs: the bodies.
        left: the place of the body on one device.
        right: the place of the body on the mesh.
        axes: the sizes of the mesh axes that are Manual here.
        view: for each loop around it, from the outside: the dimension that records have for its
            iterations, once those of the loops before are gone, and the index in it.
        around: the steps around it on the mesh, from the outside.
    """

    pairs: Pairs
    left: Site = ()
    right: Site = ()
    axes: Mapping[str, int] = field(default_factory=lambda: _NO_AXES)
    view: tuple[tuple[int, int], ...] = ()
    around: tuple[Around, ...] = ()

    def viewed(self, record: np.ndarray) -> np.ndarray:
        """A record at these iterations."""
        for dim, index in self.view:
            record = np.take(record, index, dim)
        return record

    def step(self, index: int) -> Step:
        """A step on the mesh."""
        return self.pairs.right.steps[index]

    def _inside(self, i: int, j: int, inner: int, where: str = "") -> "Scope":
        around = Around(self.pairs.right, j, inner, where)
        return replace(
            self,
            pairs=self.pairs.inner[i, j][inner],
            left=(*self.left, i, inner),
            right=(*self.right, j, inner),
            around=(*self.around, around),
        )

    def in_shard_map(self, i: int, j: int) -> "Scope":
        """The body of a shard_map."""
        step = self.step(j)
        new = {axis: step.params["mesh"].shape[axis] for axis in manual_axes(step)}
        return replace(self._inside(i, j, 0), axes={**self.axes, **new})

    def in_iterations(self, i: int, j: int, left: Records, right: Records) -> Iterator["Scope"]:
        """The body of a loop at each iteration that both loops have, in the order in which they
        run."""
        one = self._iterations((*self.left, i), self.pairs.left.steps[i], left)
        other = self._iterations((*self.right, j), self.step(j), right)
        total = max(len(one), len(other))
        for number, (index, same) in enumerate(zip(one, other, strict=False), 1):
            if index != same:
                return
            scope = self._inside(i, j, 0, f"in iteration {number} of {total}")
            yield replace(scope, view=(*self.view, (len(self.axes), index)))

    def _iterations(self, at: Site, step: Step, records: Records) -> range:
        """The index in a record of each iteration that is recorded, in the order in which they
        run."""
        if step.name == "scan":
            order = range(step.params["length"])
            return order[::-1] if step.params["reverse"] else order
        count = self.viewed(records[*at, 0, RAN])
        return range(min(int(count.min()), KEPT_ITERATIONS))

    def in_branch(self, i: int, j: int, left: Records, right: Records) -> "Scope | None":
        """The branch of a conditional that ran; None if devices ran different ones."""
        for inner in range(len(self.pairs.inner[i, j])):
            one = self.viewed(left[*self.left, i, inner, RAN])
            other = self.viewed(right[*self.right, j, inner, RAN])
            if one.all() and other.all():
                return self._inside(i, j, inner, f"in branch {inner}")
        return None
