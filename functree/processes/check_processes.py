"""`check_processes` raises an error in all processes if one of them has different values.

It compares lines of text, which are equal if the values are equal.
"""

import dataclasses
import re
import zlib
from collections.abc import Iterator, Mapping, Set
from enum import Enum
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import PyTreeDef

from functree.devices.meshes import MeshLike, mesh_view, spec_text
from functree.errors import FunctreeTypeError, path_text
from functree.labels.filters import Filter
from functree.layout.layout import Layout
from functree.layout.plan.plan import Plan
from functree.layout.plan.text import array_of
from functree.processes.agreement import Agreement
from functree.tree.arrays import AnyArray, Tree, array_text, is_array, is_key
from functree.tree.nodes import walk
from functree.tree.paths import Keys, Path
from functree.tree.skeleton.kinds import LEAVES
from functree.tree.skeleton.skeleton import Skeleton


def check_processes(**values: object) -> None:
    """Check that values are the same in all processes.

    Processes with different shapes, programs or layouts silently compute wrong numbers, or wait for
    each other forever. All processes must call this function at the same point of their programs.
    With a single process, the function does nothing.

    Args:
        **values: plans, layouts, meshes, lowered programs (`f.lower(...)`), strings, numbers,
            arrays, sets, dataclasses, or trees of these. Arrays within one process are compared by
            value, arrays that span processes by sharding, and functions by name. The keys of a dict
            must be sortable, as in JAX.

    Raises:
        FunctreeError: if a value differs. All processes raise this error. The message names the
            differing process, and the leaf or the line.
        FunctreeError: if a process is at a different comparison.
        FunctreeError: if a process has ended.
        FunctreeError: if the processes have different numbers of devices.
        FunctreeTypeError: if a value has a type that cannot be compared.

    Examples:
        >>> ft.check_processes(
        ...     step=3, stop=False, layout=ft.AxisRules({"embed": "model"})
        ... )
    """
    with Agreement("check_processes") as agreement:
        agreement.compare(lambda: {name: facts_of(value) for name, value in values.items()})


def facts_of(value: Any, *, skip: bool = False) -> list[str]:
    """Describe a value in lines of text, which are equal in all processes if the values are equal.

    Args:
        value: a plan, a layout, a mesh, a lowered program, a string, or a tree of arrays and other
            values. Arrays within one process are compared by value, arrays that span processes by
            sharding.
        skip: whether values with unknown contents are compared by class.

    Raises:
        FunctreeTypeError: if a value cannot be compared, and `skip` is False.
    """
    if isinstance(value, Plan):
        # Reasons are left out, since layouts may lead to one plan for different reasons.
        rows = [f"{path_text(row.path)}: {array_of(row)}" for row in value.rows]
        return [*rows, _mesh_text(value.mesh or dict(value.sizes))]
    if isinstance(value, str) and "\n" in value:
        return value.split("\n")
    as_text = getattr(value, "as_text", None)
    if callable(as_text):  # a lowered or compiled program from functree, JAX or another library
        return str(as_text()).split("\n")
    return list(_tree_lines(value, skip))


def settings() -> list[str]:
    """Return the versions and the current settings of JAX on which a program depends.

    The settings include changes by context managers.
    """
    lines = [f"jax {jax.__version__}", f"jaxlib {_JAXLIB}"]
    values = jax.config.values
    for name in _SETTINGS:
        # Versions of JAX differ in their settings, and not all settings are attributes.
        lines.append(f"{name} = {getattr(jax.config, name, values.get(name))}")
    return lines


_JAXLIB = version("jaxlib")

# These settings change a program's values or collectives, even if its text is the same. Other
# settings may differ between processes, such as paths for logs and caches, or the GPUs in use.
_SETTINGS = tuple(
    """
    jax_enable_x64 jax_numpy_dtype_promotion jax_explicit_x64_dtypes jax_default_prng_impl
    jax_enable_custom_prng jax_legacy_prng_key jax_random_seed_offset jax_threefry_partitionable
    jax_threefry_gpu_kernel_lowering jax_high_dynamic_range_gumbel jax_default_matmul_precision
    jax_allow_f16_reductions jax_softmax_custom_jvp jax_disable_jit jax_debug_nans jax_debug_infs
    jax_use_shardy_partitioner jax_auto_pcast jax_disable_most_optimizations jax_optimization_level
    jax_exec_time_optimization_effort jax_memory_fitting_effort jax_memory_fitting_level
    jax_compiler_enable_remat_pass jax_enable_pgle
    """.split()
)


def _mesh_text(mesh: MeshLike) -> str:
    """Format the sizes of a mesh, and its devices in order."""
    text = f"mesh {mesh_view(mesh)}"
    if isinstance(mesh, Mesh):
        # If the order differed, processes would send shards of an array to the wrong devices.
        text += f", devices {[device.id for device in mesh.devices.flat]}"
    return text


def _tree_lines(tree: Tree, skip: bool) -> Iterator[str]:
    for path, node, kind in walk(tree):
        if kind in LEAVES:
            yield _line(path, node, skip)
            continue
        # The class distinguishes a tuple from a list. An empty container yields no other line.
        yield _line(path, type(node), skip)
        for keys, static in kind.statics(node):
            yield _line((*path, *keys), static, skip)


def _line(path: Keys, value: Any, skip: bool) -> str:
    where = str(Path(path))
    try:
        text = value_text(value)
    except FunctreeTypeError as error:
        if not skip:
            raise FunctreeTypeError(f"{where or 'the value'}: {error}") from None
        text = value_text(type(value))
    text = text.replace("\n", "\\n")
    return f"{where}: {text}" if where else text


# Values whose `repr` is the same in all processes.
_PLAIN = (
    *(int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice, re.Pattern),
    *(np.dtype, PartitionSpec, Sharding, jax.Device, Enum, Filter, Layout),
)


def value_text(value: Any) -> str:
    """Format a value as text that is equal in all processes if the values are equal.

    Functions and classes are represented by their names. Sets and dicts are sorted, since their
    order differs between processes.

    Raises:
        FunctreeTypeError: if the value is an object whose contents are unknown.

    Examples:
        >>> from functree.processes.check_processes import value_text
        >>> value_text({"b": frozenset({"y", "x"}), "a": (1, 2.0)})
        "dict{'a': tuple(1, 2.0), 'b': frozenset{'x', 'y'}}"
    """
    if is_array(value):
        return _array_text(value)
    if isinstance(value, Mesh | AbstractMesh):
        return _mesh_text(value)
    kind = _name(type(value))
    match value:
        case partial():
            return f"partial({_texts((value.func, value.args, value.keywords))})"
        case Set():
            return f"{kind}{{{', '.join(sorted(map(value_text, value)))}}}"
        case Mapping():
            items = sorted(f"{value_text(key)}: {value_text(one)}" for key, one in value.items())
            return f"{kind}{{{', '.join(items)}}}"
        case list() | tuple():
            return f"{kind}({_texts(value)})"
        case Skeleton():
            statics = [(str(Path(keys)), static) for keys, static in value.statics]
            return f"tree({_texts((value.paths, statics))})"
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, PyTreeDef):
        return f"tree({_texts((value.node_data(), value.children()))})"
    # The `repr` of a function, even of a jitted function, contains its address.
    if callable(value) and isinstance(getattr(value, "__qualname__", None), str):
        return _name(value)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        fields = [f"{name}={value_text(getattr(value, name))}" for name in names]
        return f"{kind}({', '.join(fields)})"
    raise FunctreeTypeError(
        f"{kind} objects cannot be compared between processes: pass their contents as numbers, "
        "strings, arrays, or trees of these"
    )


def _texts(values: Any) -> str:
    return ", ".join(map(value_text, values))


def _name(value: Any) -> str:
    module = getattr(value, "__module__", None) or ""
    return f"{module}.{value.__qualname__}".removeprefix(".").removeprefix("builtins.")


def _array_text(array: AnyArray) -> str:
    """Format an array with its values if they are all in this process, otherwise with its spec."""
    if has_values_here(array):
        return own_text(array)
    sharding = getattr(array, "sharding", None)
    if isinstance(sharding, NamedSharding):
        return f"{array_text(array)} {spec_text(sharding.spec)}"
    return array_text(array)


def has_values_here(array: AnyArray) -> bool:
    """Return whether an array is concrete, with all its values in this process."""
    if isinstance(array, jax.ShapeDtypeStruct | Tracer):
        return False
    # JAX raises an error if an array with shards in other processes is read.
    return not isinstance(array, jax.Array) or array.is_fully_addressable


def own_text(array: AnyArray) -> str:
    """Format an array's type and values, or its type and a checksum if there are many values."""
    text = array_text(array)
    words: Any = array
    if is_key(array.dtype):
        words = jax.random.key_data(words)
    host = np.asarray(words)
    if host.size <= _FEW:
        return f"{text} {host.tolist()}"
    return f"{text} with the checksum {checksum(host):08x}"


_FEW = 8  # the largest number of values that a message shows


def checksum(array: np.ndarray) -> int:
    """Compute a checksum of an array's values."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
