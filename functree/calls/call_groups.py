"""`CallGroups` flattens a call and finds its group: the calls with the same skeleton.

A call of a function ─► its arrays and its `CallGroup`. `Traces` holds the groups for one function
with one set of options.
"""

import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, Sharding

from functree.calls.signature import AnyFunction, Partial, Signature, check_static
from functree.devices.placement import is_concrete, mesh_of
from functree.labels.leaves import read, too_deep
from functree.tree.arrays import AnyArray, Tree, abstract, is_array
from functree.tree.paths import Path
from functree.tree.skeleton.kinds import Form, Refusal, form_of
from functree.tree.skeleton.skeleton import Skeleton
from functree.tree.skeleton.static_value import StaticValue


class CallGroup:
    """The calls that share one skeleton, with their traces and programs.

    Attributes:
        skeleton: the skeleton of the calls.
        paths: the path of each array.
        others: for each refusal by `take`, the group that the refused call may belong to.
        heads: the index of the first array of each parameter.
        several_devices: whether any call of the group had arrays on several devices.
        bodies: the traced functions, keyed by everything that a trace depends on.
        programs: the compiled programs, keyed by everything that a compilation depends on.
        last: the key and the program of the last call.
        shardings: the shardings of the last call's arrays, as a tuple and as a set.
        placements: the shardings of uncommitted arguments, keyed by all that determines them.
    """

    def __init__(self, skeleton: Skeleton):
        self.skeleton: Skeleton = skeleton
        self.paths: tuple[Path, ...] = skeleton.paths
        self.others: dict[Refusal, CallGroup] = {}
        self.heads: tuple[int, ...] = _heads(self.paths)
        self.several_devices: bool = False
        # Each kind of wrapper fills these dictionaries with entries of its own type.
        self.bodies: dict[Hashable, Any] = {}
        self.programs: dict[Hashable, Any] = {}
        self.last: tuple[Hashable, Any] | None = None
        self.shardings: tuple[tuple[Sharding, ...], frozenset[Sharding]] = (), frozenset()
        self.placements: dict[Hashable, Any] = {}
        self._form: Form | None = None

    def take(self, call: Tree) -> list[Tree] | Refusal:
        """Return a call's arrays in JAX's order, or a refusal if the call is not in this group.

        This method does not check that the returned leaves are arrays. The first call generates a
        faster function, which replaces the method.
        """
        skeleton, arrays = Skeleton.apart(call)
        if skeleton != self.skeleton:
            return ()
        self._form = form_of(call)  # kept alive, so that other trees can reuse it
        vars(self)["take"] = self._form.take
        return arrays

    def see_devices(self, arrays: Iterable[AnyArray]) -> None:
        """Set `several_devices` if a call has arrays on several devices."""
        if any(x.sharding.num_devices > 1 for x in arrays if is_concrete(x)):
            self.several_devices = True


def _heads(paths: Sequence[Path]) -> tuple[int, ...]:
    """Return the index of the first array of each parameter."""
    first: dict[Hashable, int] = {}
    for i, path in enumerate(paths):
        first.setdefault(path[:1], i)
    return tuple(first.values())


class FlatCall(NamedTuple):
    """A call and its arrays.

    Attributes:
        call: the call, a named tuple of the arguments.
        group: the group of the call.
        arrays: the arrays of the call, in JAX's order. An array that functree placed differs from
            its counterpart in `call`.
        concrete: whether all arrays are `jax.Array`s with values. Otherwise, some are traced,
            abstract or NumPy arrays.
    """

    call: Tree
    group: CallGroup
    arrays: Sequence[AnyArray]
    concrete: bool

    def kinds(self) -> tuple[Hashable, ...]:
        """Return the arrays' types, shardings and commitment, which determine the layouts."""
        if not self.concrete:
            return tuple(map(_kind, self.arrays))
        shardings = tuple(map(_SHARDING, self.arrays))
        return tuple(map(_AVAL, self.arrays)), shardings, self._committed(shardings)

    def all_placed(self) -> bool:
        """Return whether all arrays are on a mesh."""
        return self.concrete and _NAMED.issuperset(map(type, map(_SHARDING, self.arrays)))

    def on_no_mesh(self) -> bool:
        """Return whether all arrays have values and none is on a mesh."""
        return self.concrete and NamedSharding not in set(map(type, map(_SHARDING, self.arrays)))

    def placement(self) -> Hashable:
        """Return the meshes and devices of the arrays, as far as they are cheap to read.

        On one device, reading the shardings of all arrays would take a few percent of a call's
        time, so only the first array of each parameter is read. Apart from these shardings, a
        program on one device depends only on the types of the arrays.
        """
        if not self.concrete:
            meshes = tuple(map(mesh_of, self.arrays))
            distinct = frozenset(meshes)
            if len(distinct) == 1:
                return distinct
            # The key records which arrays are on a mesh. A program replicates the other arrays if
            # they are uncommitted, and refuses them if they are committed to a device.
            apart = [x for x, mesh in zip(self.arrays, meshes, strict=True) if mesh is None]
            return meshes, tuple([x.committed for x in apart if is_concrete(x)])
        if not self.group.several_devices:
            return tuple([_SHARDING(self.arrays[i]) for i in self.group.heads])
        every = tuple(map(_SHARDING, self.arrays))
        # Most calls have the same sharding objects as the last call. Comparing them is faster than
        # hashing them.
        last, distinct = self.group.shardings
        if every != last:
            distinct = frozenset(every)
            self.group.shardings = every, distinct
        return distinct, self._committed(distinct)

    def abstract(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the arrays as abstract arrays, with their shardings where these are known."""
        # A NumPy array has no sharding, and a traced array's sharding is unknown.
        return tuple([abstract(jax.typeof(x), getattr(x, "sharding", None)) for x in self.arrays])

    def _committed(self, shardings: Collection[Sharding]) -> tuple[bool, ...]:
        """Return whether each array is committed, or an empty tuple if all are on a mesh."""
        # An array with a `NamedSharding` is always committed, and reading `committed` for every
        # array takes time.
        if _NAMED.issuperset(map(type, shardings)):
            return ()
        return tuple(map(_COMMITTED, self.arrays))


_AVAL, _SHARDING, _COMMITTED = attrgetter("aval"), attrgetter("sharding"), attrgetter("committed")
_NAMED = frozenset({NamedSharding})


def _kind(array: AnyArray) -> tuple[Hashable, ...]:
    """Return an array's entry in `kinds`, for a traced, abstract, concrete or NumPy array."""
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
            FunctreeError: if leaves are neither arrays nor hashable; the error lists their paths.
            FunctreeError: if JAX cannot flatten the call.
        """
        ends: list[tuple[CallGroup, Refusal]] = []
        try:
            # Most calls belong to the last call's group, or to a group that has followed it before.
            # Refusals lead from the first group to each group that was called twice.
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
        """Find a call's group by following refusals from one group to the next.

        Returns:
            The flat call, or None if no known group takes the call. In that case, the last group
            is added to `ends` with its refusal.
        """
        # This takes at most one step per group. The number of steps is fixed at the start, because
        # another thread may add a group meanwhile.
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
            group.take(call)  # generates the group's code
        return self._with_kinds(call, group, arrays)

    def _with_kinds(self, call: Tree, group: CallGroup, arrays: Sequence[AnyArray]) -> FlatCall:
        """Return a flat call, and remember the classes of its arrays if all are concrete."""
        kinds = set(map(type, arrays))
        unlike = (Tracer, jax.ShapeDtypeStruct, np.ndarray, np.generic)
        concrete = not any(issubclass(kind, unlike) for kind in kinds)
        if concrete:
            self._concrete |= kinds
        return FlatCall(call, group, arrays, concrete)


# Objects that wrappers share


class Traces:
    """The traces and programs that wrappers of one function with equal options share.

    Attributes:
        signature: the signature of the function.
        groups: the groups of its calls, with their traces and programs.
        fun: a function that returns the user's function, which it references weakly.
    """

    def __init__(self, fun: AnyFunction, signature: Signature):
        self.signature: Signature = signature
        self.groups: CallGroups = CallGroups()
        self.fun: Callable[[], AnyFunction] = _reference(fun)


def _reference(fun: AnyFunction) -> Callable[[], AnyFunction]:
    """Return a weak reference to a function, or a strong one if weak ones are not supported."""
    try:
        weak = weakref.ref(fun)
    except TypeError:  # some functions that are written in C
        return lambda: fun
    # The reference never returns None, since each wrapper keeps its function alive.
    reference: Any = weak
    return reference


# The keys are a function, then the options. The values do not keep the function alive.
_SHARED = weakref.WeakKeyDictionary[AnyFunction, dict[Hashable, Traces]]()


def traces_of(partial: Partial, signature: Signature, *options: Tree) -> Traces:
    """Return the traces of a function for some options. Equal options give the same object.

    Args:
        partial: the function and the arguments bound to it.
        signature: the signature of the function.
        options: a tree of hashable values, which may contain prefix trees of layouts. Traces are
            not shared if an option is unhashable.
    """
    # Equal callables may behave differently (`F(1)` and `F(True)`), so only callables that equal no
    # other are shared.
    if type(partial.fun).__eq__ is not object.__eq__:
        return Traces(partial.fun, signature)
    # The options are compared as a skeleton, in which 1 and True differ. Trees of layouts are
    # compared by structure and leaves.
    try:
        skeleton, _ = Skeleton.apart(options)
        for _, option in skeleton.others:
            hash(option)
        shared = _SHARED.setdefault(partial.fun, {})
    except (TypeError, ValueError):
        return Traces(partial.fun, signature)
    key = (skeleton, len(partial.args), frozenset(partial.kwargs))
    traces = shared.get(key)
    if traces is None:
        traces = shared[key] = Traces(partial.fun, signature)
    return traces
