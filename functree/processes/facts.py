"""A value ─► lines of text that are the same in all processes if the value is."""

import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding
from jax.tree_util import tree_flatten_with_path

from functree.errors import path_text
from functree.layout.layout import Layout
from functree.layout.meshes import mesh_view
from functree.layout.plan.plan import Plan
from functree.layout.specs import spec_text
from functree.tree.arrays import array_text, is_array
from functree.tree.bits import is_key
from functree.tree.paths import Path

# The address of an object, and what a process counts for itself.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def facts_of(value: Any) -> list[str]:
    """The lines of a value.

    Args:
        value: a plan, a layout, a mesh, a lowered program, a text, or a tree of arrays and other values. An array of
            this process alone counts by its values, and one of all processes by how it is sharded.
    """
    if isinstance(value, Plan):
        rows = [
            f"{path_text(row.path)}: {array_text(row)} {_spec(row)} {row.memory_kind or ''}".rstrip()
            for row in value.rows
        ]
        return [*rows, *_mesh_lines(value.mesh or dict(value.sizes))]
    if isinstance(value, Mesh | AbstractMesh):
        return _mesh_lines(value)
    if isinstance(value, str):
        return value.splitlines()
    if isinstance(value, Layout | Sharding):
        return [_text(value)]
    if isinstance(as_text := getattr(value, "as_text", None), Callable):
        return as_text().splitlines()
    return list(_tree_lines(value))


def _spec(row: Any) -> str:
    return "-" if row.spec is None else spec_text(row.spec)


def _mesh_lines(mesh: Any) -> list[str]:
    """The sizes of a mesh, and its devices in their order."""
    lines = [f"mesh {mesh_view(mesh)}"]
    if isinstance(mesh, Mesh):
        lines.append(f"devices {[device.id for device in mesh.devices.flat]}")
    return lines


def _tree_lines(tree: Any) -> Iterator[str]:
    for keys, leaf in tree_flatten_with_path(tree)[0]:
        path = Path.of(keys)
        yield f"{path}: {_leaf_text(leaf)}" if path else _leaf_text(leaf)


def _leaf_text(leaf: Any) -> str:
    if not is_array(leaf):
        return _text(leaf)
    sharding = getattr(leaf, "sharding", None)
    if isinstance(leaf, jax.ShapeDtypeStruct) or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
        spec = f" {spec_text(sharding.spec)}" if isinstance(sharding, NamedSharding) else ""
        return f"{array_text(leaf)}{spec}"
    return f"{array_text(leaf)} {values_text(leaf)}"


def values_text(array: Any) -> str:
    """The values of an array of this process: as they are, or a checksum if they are many."""
    if is_key(array.dtype):
        array = jax.random.key_data(array)
    host = np.asarray(array)
    if host.size <= _FEW:
        return str(host.tolist())
    return f"with the checksum {checksum(host):08x}"


_FEW = 8


def checksum(array: np.ndarray) -> int:
    """A checksum of the values of an array."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _text(value: Any) -> str:
    """The text of a value, without what differs from process to process although the value does not."""
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str):
        return f"{getattr(value, '__module__', '')}.{name}"
    return _ADDRESS.sub("", repr(value))
