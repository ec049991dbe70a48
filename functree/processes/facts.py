"""A value ─► lines of text that are the same in all processes if the value is."""

from collections.abc import Hashable, Iterator
from importlib.metadata import version
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from functree.devices.meshes import MeshLike, mesh_view
from functree.devices.specs import spec_text
from functree.errors import path_text
from functree.layout.plan.plan import Plan
from functree.layout.plan.row import Row
from functree.processes.value_text import class_text, value_text
from functree.tree.arrays import Tree, array_text
from functree.tree.nodes import walk
from functree.tree.paths import Keys, Path
from functree.tree.skeleton.kinds import FOUND, LEAVES, Kind, kind_of


def facts_of(value: Any) -> list[str]:
    """The lines of a value.

    Args:
        value: a plan, a layout, a mesh, a lowered program, a text, or a tree of arrays and other
            values. An array of this process alone counts by its values, and one of all processes by
            how it is sharded. Other values count by their contents.
    """
    if isinstance(value, Plan):
        # Not the whole table, which has reasons: a layout may say one thing in several ways.
        rows = list(map(_row_text, value.rows))
        return [*rows, *_mesh_lines(value.mesh or dict(value.sizes))]
    if isinstance(value, Mesh | AbstractMesh):
        return _mesh_lines(value)
    if isinstance(value, str) and "\n" in value:
        return value.split("\n")
    as_text = getattr(value, "as_text", None)
    if callable(as_text):  # a lowered or compiled program, of functree, of JAX or of others
        return str(as_text()).split("\n")
    return list(_tree_lines(value))


def settings() -> list[str]:
    """What a program depends on besides what it is made of: versions, and JAX' configuration."""
    lines = [f"jax {jax.__version__}", f"jaxlib {version('jaxlib')}"]
    for name, value in zip(_SETTINGS, configuration(), strict=True):
        lines.append(f"{name} = {value}")
    return lines


def configuration() -> tuple[Hashable, ...]:
    """JAX' configuration as it is now, within a `with jax.enable_x64(True):` too."""
    values: list[Hashable] = []
    for name in _SETTINGS:
        # Each version of JAX has others, and not all of them are attributes.
        values.append(getattr(jax.config, name, jax.config.values.get(name)))
    return tuple(values)


# Those that change the values or the collectives of a program, also where its text is the same. The
# others may differ: where to log and to cache, which GPUs are those of the process.
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
    for path, node, kind in walk(tree, _kind_at):
        if kind in LEAVES:
            yield _line(path, value_text(node))
            continue
        # With its class, since a tuple is not a list, and one without children has no other line.
        yield _line(path, class_text(type(node)))
        for keys, static in kind.statics(node):
            yield _line((*path, *keys), value_text(static))


def _line(path: Keys, text: str) -> str:
    if not path:
        return text  # that of the tree itself
    return f"{'.'.join(map(_key_text, path))}: {text}"


def _kind_at(path: Keys, node: Tree) -> Kind:
    return FOUND if _has_no_order(node) else kind_of(node)


def _has_no_order(node: Tree) -> bool:
    """Whether a node is a dict that JAX cannot sort, or sorts in another order in each process,
    such as one of sets. It is no tree then, but a value."""
    if not isinstance(node, dict):
        return False
    kinds = set(map(type, node))
    return len(kinds) > 1 or not kinds <= {str, int}


def _key_text(key: object) -> str:
    if isinstance(key, str | int):
        return str(Path((key,)))
    return f"[{value_text(key)}]"  # such as that of a user's node
