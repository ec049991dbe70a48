"""A call ─► the group of calls that differ from it in their arrays alone, found quickly, and its arrays."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from functree.calls.static_arguments import check_static
from functree.tree.arrays import is_array
from functree.tree.leaves import read
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton

RECENT = 4  # groups that are tried before one is looked up, which takes far longer


class CallGroup:
    """The calls of one skeleton, and what is remembered for them.

    Attributes:
        skeleton: of the calls.
        heads: the place of the first array of each parameter.
        several_devices: whether such calls had arrays on several devices.
        bodies: what is traced, by whatever a trace depends on.
        programs: what is compiled, by whatever that depends on.
        last: the key and the program that were used last.
    """

    def __init__(self, skeleton: Skeleton):
        self.skeleton: Skeleton = skeleton
        # From the skeleton once: a call has no time to ask a property of a property.
        self.take: Any = skeleton.take
        self.build: Any = skeleton.build
        self.paths: tuple[Path, ...] = skeleton.paths
        self.heads: tuple[int, ...] = _heads(self.paths)
        self.several_devices: bool = False
        self.bodies: dict[Hashable, Any] = {}
        self.programs: dict[Hashable, Any] = {}
        self.last: tuple[Hashable, Any] | None = None


def _heads(paths: Sequence[Path]) -> tuple[int, ...]:
    first: dict[Any, int] = {}
    for i, path in enumerate(paths):
        first.setdefault(path[:1], i)
    return tuple(first.values())


class FoundCall(NamedTuple):
    """A call that has been taken apart.

    Attributes:
        group: of the call.
        arrays: in JAX's order.
        concrete: whether all of them are `jax.Array`s with values; else some are traced, abstract, or numpy's.
    """

    group: CallGroup
    arrays: Sequence[Any]
    concrete: bool


class CallGroups:
    """The groups of calls that a function has had."""

    def __init__(self) -> None:
        self._recent: list[CallGroup] = []
        self._known: dict[Skeleton, CallGroup] = {}
        self._concrete: frozenset[type] = frozenset()  # the class of JAX's arrays, once one has been seen

    def find(self, call: Any) -> FoundCall:
        """Take a call apart.

        Raises:
            FunctreeError: leaves that are neither arrays nor hashable, by path; what is no tree.
        """
        for group in self._recent:
            arrays = group.take(call)
            if arrays is not None:
                if self._concrete.issuperset(map(type, arrays)):
                    return FoundCall(group, arrays, True)
                if all(map(is_array, arrays)):
                    return self._with_kinds(group, arrays)
        return self._look_up(call)

    def _look_up(self, call: Any) -> FoundCall:
        try:
            skeleton = Skeleton.of(call)
        except (TypeError, ValueError, RecursionError, SystemError):
            read(call)  # says by path what is no tree
            raise
        group = self._known.get(skeleton)
        if group is None:
            check_static(skeleton)
            group = self._known[skeleton] = CallGroup(skeleton)
        # A new list, for another thread may be going through the old one.
        self._recent = [group, *(other for other in self._recent if other is not group)][:RECENT]
        return self._with_kinds(group, group.take(call))

    def _with_kinds(self, group: CallGroup, arrays: Sequence[Any]) -> FoundCall:
        kinds = {type(x) for x in arrays}
        unlike = (Tracer, jax.ShapeDtypeStruct, np.ndarray, np.generic)
        concrete = not any(issubclass(kind, unlike) for kind in kinds)
        if concrete:
            self._concrete |= kinds
        return FoundCall(group, arrays, concrete)
