"""A function and its options ─► its `Traces`: the groups of its calls, with their programs."""

import weakref
from collections.abc import Callable, Hashable
from typing import Any

from functree.calls.call_groups import CallGroups
from functree.calls.signature import AnyFunction, Partial, Signature
from functree.errors import FunctreeError
from functree.tree.arrays import Tree
from functree.tree.skeleton.skeleton import Skeleton


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
