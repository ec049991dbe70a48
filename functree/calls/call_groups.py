"""A call ─► its arrays, and its group: all calls with the same structure and static values."""

from collections.abc import Collection, Hashable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from functree.calls.static_arguments import check_static
from functree.layout.placement import is_concrete, mesh_of
from functree.tree.arrays import is_array
from functree.tree.leaves import read, too_deep
from functree.tree.paths import Path
from functree.tree.skeleton.code import Refusal, refused
from functree.tree.skeleton.form import Form, form_of
from functree.tree.skeleton.skeleton import Skeleton


class CallGroup:
    """The calls with one skeleton, and their traces and programs.

    Attributes:
        skeleton: the skeleton of the calls.
        others: for a call that `take` refuses, a group that it may belong to.
        heads: the index of the first array of each parameter.
        several_devices: whether a call of the group has had arrays on several devices.
        bodies: the traced functions, by everything that a trace depends on.
        programs: the compiled programs, by everything that a compilation depends on.
        last: the key and the program of the last call.
        shardings: the shardings of the arrays of the last call, and the same without repetition.
        targets: where arguments that nobody has placed are placed, by everything that this depends on.
    """

    def __init__(self, skeleton: Skeleton):
        self.skeleton: Skeleton = skeleton
        self.others: dict[Refusal, CallGroup] = {}
        self.paths: tuple[Path, ...] = skeleton.paths
        self.heads: tuple[int, ...] = _heads(self.paths)
        self.several_devices: bool = False
        self.bodies: dict[Hashable, Any] = {}
        self.programs: dict[Hashable, Any] = {}
        self.last: tuple[Hashable, Any] | None = None
        self.shardings: tuple[tuple[Any, ...], frozenset[Any]] = (), frozenset()
        self.targets: dict[Hashable, Any] = {}
        self._form: Form | None = None

    def take(self, call: Any) -> list[Any] | Refusal:
        """The arrays of a call in JAX's order, or a refusal of a call that is not of this group.

        It does not check that the values in the place of arrays are arrays. The first use generates a function, which
        is far faster and takes the place of this one.
        """
        skeleton, arrays = Skeleton.apart(call)
        if skeleton != self.skeleton:
            return ()
        self._form = form_of(call)  # kept, so that others find it
        vars(self)["take"] = self._form.take
        return arrays


def _heads(paths: Sequence[Path]) -> tuple[int, ...]:
    """The index of the first array of each parameter."""
    first: dict[Any, int] = {}
    for i, path in enumerate(paths):
        first.setdefault(path[:1], i)
    return tuple(first.values())


class FoundCall(NamedTuple):
    """A flattened call.

    Attributes:
        group: the group of the call.
        arrays: the arrays of the call, in JAX's order.
        concrete: whether all of them are `jax.Array`s with values; otherwise some are traced, abstract, or of numpy.
    """

    group: CallGroup
    arrays: Sequence[Any]
    concrete: bool

    def kinds(self) -> tuple[Any, ...]:
        """What a layout depends on: the types of the arrays, their shardings, and whether they are committed."""
        if not self.concrete:
            return tuple(map(_kind, self.arrays))
        shardings = tuple(map(_SHARDING, self.arrays))
        return tuple(map(_AVAL, self.arrays)), shardings, self._committed(shardings)

    def all_placed(self) -> bool:
        """Whether all arrays are on a mesh."""
        return self.concrete and _NAMED.issuperset(map(type, map(_SHARDING, self.arrays)))

    def on_no_mesh(self) -> bool:
        """Whether all arrays have values, and none is on a mesh."""
        return self.concrete and NamedSharding not in set(map(type, map(_SHARDING, self.arrays)))

    def placement(self) -> Hashable:
        """On which meshes and devices the arrays are, as far as it can be read without a cost.

        To read it of all arrays would cost a few percent of a call on one device, so there it is read of the first
        array of each parameter only. All that matters to a program on one device is in the types of the arrays.
        """
        if not self.concrete:
            return frozenset(map(mesh_of, self.arrays))
        if not self.group.several_devices:
            return tuple([self.arrays[i].sharding for i in self.group.heads])
        every = tuple(map(_SHARDING, self.arrays))
        # Most calls have the sharding objects of the last call. To compare them takes less time than to hash them.
        last, distinct = self.group.shardings
        if every != last:
            distinct = frozenset(every)
            self.group.shardings = every, distinct
        return distinct, self._committed(distinct)

    def _committed(self, shardings: Collection[Any]) -> tuple[bool, ...]:
        """Whether each array is committed; empty if all are, because they are on a mesh."""
        # An array with a `NamedSharding` is always committed, and to read `committed` of each array costs time.
        return () if _NAMED.issuperset(map(type, shardings)) else tuple(map(_COMMITTED, self.arrays))


_AVAL, _SHARDING, _COMMITTED = attrgetter("aval"), attrgetter("sharding"), attrgetter("committed")
_NAMED = frozenset({NamedSharding})


def _kind(array: Any) -> tuple[Any, ...]:
    """The same for an array that may be traced, abstract or of numpy, which has no sharding of its own."""
    if isinstance(array, jax.ShapeDtypeStruct):
        return array.shape, array.dtype, array.weak_type, array.sharding
    return jax.typeof(array), (array.sharding, array.committed) if is_concrete(array) else None


class CallGroups:
    """The groups of the calls of one function."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all groups, with their traces and programs."""
        self._first: CallGroup | None = None
        self._last: CallGroup | None = None
        self._known: dict[Skeleton, CallGroup] = {}
        # The classes of JAX's concrete arrays. They are private, so they are collected from calls.
        self._concrete: frozenset[type] = frozenset()

    def find(self, call: Any) -> FoundCall:
        """Flatten a call and find its group.

        Raises:
            FunctreeError: leaves are neither arrays nor hashable (the error lists them by path), or the call is not a
                tree.
        """
        ends: list[tuple[CallGroup, Refusal]] = []
        try:
            # Most calls are of the group of the last call, or of one that has followed it before. From the first group
            # there is a way to each group that was called twice.
            found = self._follow(self._last, call, ends)
            if found is None and self._first is not self._last:
                found = self._follow(self._first, call, ends)
            if found is None:
                found = self._look_up(call)
        except RecursionError:
            raise too_deep(call) from None
        except (TypeError, ValueError, SystemError):
            read(call)  # raises an error with the path of the node that JAX cannot flatten
            raise
        self._last = found.group
        for group, refusal in ends:
            # More of them than groups: they are of static values that are new in every call.
            if len(group.others) > len(self._known):
                group.others.clear()
            group.others[refusal] = found.group
        return found

    def _follow(self, group: CallGroup | None, call: Any, ends: list[tuple[CallGroup, Refusal]]) -> FoundCall | None:
        """Find the group of a call, from one group to the next by what each of them refuses the call for.

        Returns:
            None if the way ends; the group at its end is added to `ends`, with its refusal.
        """
        # At most as many steps as there are groups. Their number, because another thread may add one meanwhile.
        for _ in range(len(self._known)):
            if group is None:
                break
            arrays = group.take(call)
            if isinstance(arrays, list):
                if self._concrete.issuperset(map(type, arrays)):
                    return FoundCall(group, arrays, True)
                if all(map(is_array, arrays)):
                    return self._with_kinds(group, arrays)
                place = list(map(is_array, arrays)).index(False)
                refusal = "no array", place, refused(arrays[place])
            else:
                refusal = arrays
            following = group.others.get(refusal)
            if following is None and refusal:
                ends.append((group, refusal))
            group = following
        return None

    def _look_up(self, call: Any) -> FoundCall:
        """Find the group of a call by its skeleton, or make a new group."""
        skeleton, arrays = Skeleton.apart(call)
        group = self._known.get(skeleton)
        if group is None:
            check_static(skeleton.learn(call))
            group = self._known[skeleton] = CallGroup(skeleton)
            self._first = self._first or group
        else:
            group.take(call)  # generates its code
        return self._with_kinds(group, arrays)

    def _with_kinds(self, group: CallGroup, arrays: Sequence[Any]) -> FoundCall:
        """A call whose arrays have classes that have not been seen before, or are not all concrete."""
        kinds = {type(x) for x in arrays}
        unlike = (Tracer, jax.ShapeDtypeStruct, np.ndarray, np.generic)
        concrete = not any(issubclass(kind, unlike) for kind in kinds)
        if concrete:
            self._concrete |= kinds
        return FoundCall(group, arrays, concrete)
