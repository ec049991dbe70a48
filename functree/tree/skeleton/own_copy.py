"""A static value ─► an equal one that shares nothing with it that can be changed in place."""

import copy
import operator
from collections import OrderedDict, defaultdict
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np
from jax.tree_util import PyTreeDef, default_registry

from functree.errors import USERS_ERRORS
from functree.tree.arrays import TreeDef
from functree.tree.skeleton.static_value import is_hashable, is_plain_tuple, same_value

T = TypeVar("T")


def own_copy(static: T) -> T:
    """A copy of a static value that can be changed in place, such as a list, an array of numpy, or
    a config without a hash; every other value itself.

    Two trees must not share what can be changed in one of them, and a program must not be used for
    a value that was changed after it was compiled.
    """
    return _copy(static)


# With `Any`, since each branch returns the type that it has asked for.
def _copy(static: Any) -> Any:
    cls = type(static)
    # Before its hash, which does not have the static data of the nodes.
    if cls is PyTreeDef:
        return _structure(static)
    if is_hashable(static):
        return static
    if cls is list:
        return list(map(_copy, static))
    if is_plain_tuple(cls):
        # Not by its constructor: that of a named tuple takes the elements one by one.
        return tuple.__new__(cls, map(_copy, static))
    if cls is dict:
        return {key: _copy(value) for key, value in static.items()}
    if cls is np.ndarray:
        # Not `copy()`, after which an array of objects has the same objects.
        return copy.deepcopy(static)
    # These cannot be changed. A copy would be one more array on the device.
    if isinstance(static, jax.Array | eqx.Module):
        return static
    return _copy_of_object(static)


def _copy_of_object(static: Any) -> Any:
    """A copy of an object of a class that is not known here, if its own `==` takes the copy for
    equal; else the object itself, as JAX keeps it."""
    try:
        copied = copy.deepcopy(static)
        equal = same_value(copied, static)
    # A lock, for one, cannot be copied.
    except (*USERS_ERRORS, copy.Error):
        return static
    return copied if equal else static


# Their static data are keys, which have a hash, in a list that JAX makes.
_DICTS = (dict, OrderedDict, defaultdict)


def _structure(treedef: TreeDef) -> TreeDef:
    """A treedef whose nodes have copies of their static data. It is made without the classes of
    the nodes; these are not asked to build anything."""
    data = treedef.node_data()
    if data is None:  # a leaf
        return treedef
    cls, static = data
    children = treedef.children()
    copies = list(map(_structure, children))
    own = static if cls in _DICTS else _copy(static)
    if own is static and all(map(operator.is_, children, copies)):
        return treedef
    return PyTreeDef.from_node_data_and_children(default_registry, (cls, own), copies)
