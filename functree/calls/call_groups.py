"""A call of a function ─► its arrays, and its group: all calls with the same structure and static
values. The groups of a function with some options are its `Traces`."""

import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, Sharding

from functree.calls.signature import AnyFunction, Partial, Signature
from functree.calls.static_arguments import check_static
from functree.devices.placement import is_concrete, mesh_of
from functree.errors import FunctreeError
from functree.labels.leaves import read, too_deep
from functree.tree.arrays import AnyArray, Tree, abstract, is_array
from functree.tree.paths import Path
from functree.tree.skeleton.kinds import Form, Refusal, form_of
from functree.tree.skeleton.skeleton import Skeleton
from functree.tree.skeleton.static_value import StaticValue


class CallGroup:
    """The calls with one skeleton, and their traces and programs.

    Attributes:
        skeleton: the skeleton of the calls.
        paths: the path of each array.
        others: for a call that `take` refuses, a group that it may belong to.
        heads: the index of the first array of each parameter.
        several_devices: whether a call of the group has had arrays on several devices.
        bodies: the traced functions, by everything that a trace depends on.
        programs: the compiled programs, by everything that a compilation depends on.
        last: the key and the program of the last call.
        shardings: the shardings of the arrays of the last call, and the same without repetition.
        placements: the shardings of arguments that nobody has placed, by all that decides them.
    """

    def __init__(self, skeleton: Skeleton):
        self.skeleton: Skeleton = skeleton
        self.paths: tuple[Path, ...] = skeleton.paths
        self.others: dict[Refusal, CallGroup] = {}
        self.heads: tuple[int, ...] = _heads(self.paths)
        self.several_devices: bool = False
        # What is kept here is made by wrappers, each of which keeps something else.
        self.bodies: dict[Hashable, Any] = {}
        self.programs: dict[Hashable, Any] = {}
        self.last: tuple[Hashable, Any] | None = None
        self.shardings: tuple[tuple[Sharding, ...], frozenset[Sharding]] = (), frozenset()
        self.placements: dict[Hashable, Any] = {}
        self._form: Form | None = None

    def take(self, call: Tree) -> list[Tree] | Refusal:
        """The arrays of a call in JAX's order, or a refusal of a call that is not of this group.

        It does not check that what it returns as arrays are arrays. The first use generates a
        function, which is far faster and replaces this one.
        """
        skeleton, arrays = Skeleton.apart(call)
        if skeleton != self.skeleton:
            return ()
        self._form = form_of(call)  # kept, so that others find it
        vars(self)["take"] = self._form.take
        return arrays

    def see_devices(self, arrays: Iterable[AnyArray]) -> None:
        """Note whether a call has arrays on several devices."""
        if any(x.sharding.num_devices > 1 for x in arrays if is_concrete(x)):
            self.several_devices = True


def _heads(paths: Sequence[Path]) -> tuple[int, ...]:
    """The index of the first array of each parameter."""
    first: dict[Hashable, int] = {}
    for i, path in enumerate(paths):
        first.setdefault(path[:1], i)
    return tuple(first.values())


class FlatCall(NamedTuple):
    """A call, and its arrays.

    Attributes:
        call: the call, a named tuple of the arguments.
        group: the group of the call.
        arrays: the arrays of the call, in JAX's order. Some of them may have been placed, and are
            others than in `call` then.
        concrete: whether all of them are `jax.Array`s with values; otherwise some are traced,
            abstract, or of numpy.
    """

    call: Tree
    group: CallGroup
    arrays: Sequence[AnyArray]
    concrete: bool

    def kinds(self) -> tuple[Hashable, ...]:
        """What a layout depends on: the types of the arrays, their shardings, and whether they are
        committed."""
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

        To read it of all arrays would cost a few percent of a call on one device, so there it is
        read of the first array of each parameter only. All that matters to a program on one device
        is in the types of the arrays.
        """
        if not self.concrete:
            meshes = tuple(map(mesh_of, self.arrays))
            distinct = frozenset(meshes)
            if len(distinct) == 1:
                return distinct
            # The key tells which arrays are on a mesh. Of the others, a program replicates those
            # that are uncommitted, and refuses those that are committed to a device.
            apart = [x for x, mesh in zip(self.arrays, meshes, strict=True) if mesh is None]
            return meshes, tuple([x.committed for x in apart if is_concrete(x)])
        if not self.group.several_devices:
            return tuple([_SHARDING(self.arrays[i]) for i in self.group.heads])
        every = tuple(map(_SHARDING, self.arrays))
        # Most calls have the sharding objects of the last call. To compare them takes less time
        # than to hash them.
        last, distinct = self.group.shardings
        if every != last:
            distinct = frozenset(every)
            self.group.shardings = every, distinct
        return distinct, self._committed(distinct)

    def abstract(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The arrays without their values, with their shardings as far as they are known."""
        # An array of numpy has no sharding, and that of a traced one is not known.
        return tuple([abstract(jax.typeof(x), getattr(x, "sharding", None)) for x in self.arrays])

    def _committed(self, shardings: Collection[Sharding]) -> tuple[bool, ...]:
        """Whether each array is committed; empty if all are, because they are on a mesh."""
        # An array with a `NamedSharding` is always committed, and to read `committed` of each array
        # costs time.
        if _NAMED.issuperset(map(type, shardings)):
            return ()
        return tuple(map(_COMMITTED, self.arrays))


_AVAL, _SHARDING, _COMMITTED = attrgetter("aval"), attrgetter("sharding"), attrgetter("committed")
_NAMED = frozenset({NamedSharding})


def _kind(array: AnyArray) -> tuple[Hashable, ...]:
    """The same for an array that may be traced, abstract or of numpy, which has no sharding of its
    own."""
    if isinstance(array, jax.ShapeDtypeStruct):
        return array.shape, array.dtype, array.weak_type, array.sharding
    if is_concrete(array):
        return jax.typeof(array), (array.sharding, array.committed)
    return jax.typeof(array), None


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

    def find(self, call: Tree) -> FlatCall:
        """Flatten a call and find its group.

        Raises:
            FunctreeError: leaves are neither arrays nor hashable (the error lists them by path), or
                the call is not a tree.
        """
        ends: list[tuple[CallGroup, Refusal]] = []
        try:
            # Most calls are of the group of the last call, or of one that has followed it before.
            # From the first group there is a way to each group that was called twice.
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
            group.others[refusal] = found.group
        return found

    def _follow(
        self, group: CallGroup | None, call: Tree, ends: list[tuple[CallGroup, Refusal]]
    ) -> FlatCall | None:
        """Find the group of a call, from one group to the next by what each of them refuses the
        call for.

        Returns:
            None if the way ends; the group at its end is added to `ends`, with its refusal.
        """
        # At most as many steps as there are groups. Their number, because another thread may add
        # one meanwhile.
        for _ in range(len(self._known)):
            if group is None:
                break
            arrays = group.take(call)
            if isinstance(arrays, list):
                if self._concrete.issuperset(map(type, arrays)):
                    return FlatCall(call, group, arrays, True)
                if all(map(is_array, arrays)):
                    return self._with_kinds(call, group, arrays)
                index = next(i for i, array in enumerate(arrays) if not is_array(array))
                refusal = "no array", index, StaticValue(arrays[index])
            else:
                refusal = arrays
            following = group.others.get(refusal)
            if following is None and refusal:
                ends.append((group, refusal))
            group = following
        return None

    def _look_up(self, call: Tree) -> FlatCall:
        """Find the group of a call by its skeleton, or make a new group."""
        skeleton, arrays = Skeleton.apart(call)
        group = self._known.get(skeleton)
        if group is None:
            check_static(skeleton.learn(call))
            group = self._known[skeleton] = CallGroup(skeleton)
            self._first = self._first or group
        else:
            group.take(call)  # generates its code
        return self._with_kinds(call, group, arrays)

    def _with_kinds(self, call: Tree, group: CallGroup, arrays: Sequence[AnyArray]) -> FlatCall:
        """A call whose arrays have classes that have not been seen before, or are not all
        concrete."""
        kinds = {type(x) for x in arrays}
        unlike = (Tracer, jax.ShapeDtypeStruct, np.ndarray, np.generic)
        concrete = not any(issubclass(kind, unlike) for kind in kinds)
        if concrete:
            self._concrete |= kinds
        return FlatCall(call, group, arrays, concrete)


# What wrappers share


class Traces:
    """The traces and programs of a function, shared by all wrappers of it that have equal options.

    Attributes:
        signature: the signature of the function.
        groups: the groups of its calls, with their traces and programs.
        fun: returns the function. The reference is weak.
    """

    def __init__(self, fun: AnyFunction, signature: Signature):
        self.signature: Signature = signature
        self.groups: CallGroups = CallGroups()
        self.fun: Callable[[], AnyFunction] = _reference(fun)


def _reference(fun: AnyFunction) -> Callable[[], AnyFunction]:
    """A weak reference to a function, or a strong one if it has no weak references."""
    try:
        weak = weakref.ref(fun)
    except TypeError:  # some functions that are written in C
        return lambda: fun
    # It does not return None while it is used: a wrapper that is called holds its function.
    reference: Any = weak
    return reference


# By the identity of a function, because equal callables may differ (`F(1)` and `F(True)`), and then
# by options. The values do not hold the function.
_SHARED: dict[int, dict[Hashable, Traces]] = {}


def _shared(fun: AnyFunction) -> dict[Hashable, Traces]:
    """The traces of a function by options, deleted together with it. TypeError if it has no hash or
    weak references."""
    hash(fun)  # an object without a hash may be changed between two wrappers
    found = _SHARED.get(id(fun))
    if found is None:
        weakref.finalize(fun, _SHARED.pop, id(fun), None)
        found = _SHARED[id(fun)] = {}
    return found


def traces_of(partial: Partial, signature: Signature, *options: Tree) -> Traces:
    """The traces of a function with some options. The same function with equal options has the same
    object.

    Args:
        partial: the function and the arguments bound to it.
        signature: the signature of the function.
        options: a tree of hashable values, which may contain prefix trees of layouts. If they
            cannot be hashed, the traces are not shared.
    """
    # The options are compared as a skeleton, so that 1 and True are different and trees of layouts
    # are compared by their structure and leaves.
    try:
        skeleton, _ = Skeleton.apart(options)
        skeleton.check_hashable()
        shared = _shared(partial.fun)
    except (TypeError, ValueError, FunctreeError):
        return Traces(partial.fun, signature)
    key = (skeleton, len(partial.args), frozenset(partial.kwargs))
    found = shared.get(key)
    if found is None:
        found = shared[key] = Traces(partial.fun, signature)
    return found
