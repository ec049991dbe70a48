"""A value ─► lines of text that are the same in all processes if the value is."""

import re
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from functree.devices.meshes import MeshLike, mesh_view
from functree.devices.specs import spec_text
from functree.errors import path_text
from functree.layout.layout import Layout
from functree.layout.plan.plan import Plan
from functree.layout.plan.row import Row
from functree.tree.arrays import AnyArray, Tree, array_text, is_array
from functree.tree.bits import is_key
from functree.tree.nodes import leaves_of

# The address of an object in its `repr`, which is another one in each process.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def facts_of(value: Any) -> list[str]:
    """The lines of a value.

    Args:
        value: a plan, a layout, a mesh, a lowered program, a text, or a tree of arrays and other
            values. An array of this process alone counts by its values, and one of all processes by
            how it is sharded.
    """
    if isinstance(value, Plan):
        # Not the whole table, which has reasons: a layout may say one thing in several ways.
        rows = list(map(_row_text, value.rows))
        return [*rows, *_mesh_lines(value.mesh or dict(value.sizes))]
    if isinstance(value, Mesh | AbstractMesh):
        return _mesh_lines(value)
    if isinstance(value, str):
        return value.splitlines()
    if isinstance(value, Layout | Sharding):
        return [_text(value)]
    as_text = getattr(value, "as_text", None)
    if callable(as_text):  # a lowered or compiled program, of functree, of JAX or of others
        return str(as_text()).splitlines()
    return list(_tree_lines(value))


def _row_text(row: Row) -> str:
    """The array of a row of a plan, and what is decided about it."""
    spec = "-"
    if row.spec is not None:
        spec = spec_text(row.spec)
    return f"{path_text(row.path)}: {array_text(row)} {spec} {row.memory_kind or ''}".rstrip()


def _mesh_lines(mesh: MeshLike) -> list[str]:
    """The sizes of a mesh, and its devices in their order."""
    lines = [f"mesh {mesh_view(mesh)}"]
    if isinstance(mesh, Mesh):
        # In another order, each process would send its part of an array to another place.
        lines.append(f"devices {[device.id for device in mesh.devices.flat]}")
    return lines


def _tree_lines(tree: Tree) -> Iterator[str]:
    for path, leaf in leaves_of(tree):
        if path:
            yield f"{path}: {_leaf_text(leaf)}"
        else:
            yield _leaf_text(leaf)  # the tree is this leaf alone


def _leaf_text(leaf: object) -> str:
    if not is_array(leaf):
        return _text(leaf)
    text = array_text(leaf)
    if _has_values_here(leaf):
        return f"{text} {_values_text(leaf)}"
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding):
        return f"{text} {spec_text(sharding.spec)}"
    return text


def _has_values_here(array: AnyArray) -> bool:
    """Whether an array is concrete, and all of its values are in this process."""
    if isinstance(array, jax.ShapeDtypeStruct):
        return False
    # Of an array of all processes a part is elsewhere, and JAX raises an error if it is read.
    return not isinstance(array, jax.Array) or array.is_fully_addressable


def _values_text(array: Any) -> str:
    """The values of an array of this process: as they are, or a checksum if they are many."""
    if is_key(array.dtype):
        array = jax.random.key_data(array)
    host = np.asarray(array)
    if host.size <= _FEW:
        return str(host.tolist())
    return f"with the checksum {checksum(host):08x}"


_FEW = 8  # the most values that a message shows


def checksum(array: np.ndarray) -> int:
    """A checksum of the values of an array."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _text(value: object) -> str:
    """The text of a value, without what differs between processes that have equal values."""
    # A function or a class by its name: the `repr` of a function has its address alone.
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str):
        return f"{getattr(value, '__module__', '')}.{name}"
    return _ADDRESS.sub("", repr(value))
