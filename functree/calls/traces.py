"""A function and its options ─► what is remembered for them: the groups of its calls, their traces and programs."""

import weakref
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

from functree.calls.call_groups import CallGroups
from functree.calls.signature import Bound, Signature
from functree.errors import FunctreeError
from functree.tree.skeleton.skeleton import Skeleton


class Traces:
    """What is remembered for a function under equal options, however often it is wrapped.

    Attributes:
        signature: of the function.
        groups: of its calls, with their traces and programs.
        fun: gives the function, which it does not keep alive.
    """

    def __init__(self, bound: Bound, signature: Signature):
        self.signature: Signature = signature
        self.groups: CallGroups = CallGroups()
        self.fun: Callable[[], Any] = _reference(bound.fun)


def _reference(fun: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(fun)
    except TypeError:  # some functions of C
        return lambda: fun


# By function, and then by the options. No value holds its function, so that one which is gone takes its traces along.
_SHARED: WeakKeyDictionary[Any, dict[Hashable, Traces]] = WeakKeyDictionary()


def traces_of(bound: Bound, signature: Signature, *options: Any) -> Traces:
    """What is remembered for a function under some options: the same object wherever they are equal.

    Args:
        bound: the function.
        signature: of the function.
        options: a tree of hashable values, prefix trees of layouts among them; what cannot be hashed is not shared.
    """
    try:
        skeleton = Skeleton.of(options)
        skeleton.check_hashable()
        shared = _SHARED.setdefault(bound.fun, {})
    except (TypeError, ValueError, FunctreeError):
        return Traces(bound, signature)
    key = (skeleton, len(bound.args), frozenset(bound.kwargs))
    found = shared.get(key)
    if found is None:
        found = shared[key] = Traces(bound, signature)
    return found
