"""A layout, and the names of an array's dimensions ─► the mesh axes of a batch whose rule was
forgotten."""

from functools import lru_cache

from functree.devices.meshes import MeshView
from functree.devices.specs import axes_text, entry
from functree.layout.fsdp import fsdp_axes
from functree.layout.layout import Layout, walk
from functree.layout.rules import AxisRules
from functree.tree.axes import Axes

BATCH = "batch"
"""The name that the layers of `ft.nn` give to the dimension of the examples.

Other names are not asked about: `jax.vmap` hides the dimension of the examples, and then the first
name of a constraint is that of a dimension which is rightly whole.
"""


def forgotten_axes(layout: Layout, axes: Axes, mesh: MeshView) -> tuple[str, ...]:
    """The mesh axes over which an array is whole because the rule for its batch was forgotten.

    `FSDP` shards the parameters over them, so the batch is nearly always sharded over them too; no
    rule maps anything to them; and the name `batch` is covered by `...: None` alone.

    Args:
        layout: the layout.
        axes: the axes of the array.
        mesh: the mesh: an axis of size 1 shards nothing.
    """
    if BATCH not in axes:
        return ()
    return tuple([axis for axis in _unused_by_rules(layout) if mesh.sizes.get(axis, 1) > 1])


@lru_cache(maxsize=256)
def _unused_by_rules(layout: Layout) -> tuple[str, ...]:
    """The mesh axes of all `FSDP` in a layout to which no rule maps an axis, if none is for the
    batch."""
    if layout.rules is None:
        return ()
    used: set[str] = set()
    tables = [one for one in walk(layout.rules) if isinstance(one, AxisRules)]
    # Without `...: None` a name without a rule is an error.
    if not any(table.closed for table in tables):
        return ()
    for table in tables:
        if BATCH in table.mentioned:
            return ()
        for rule in table.table:
            used.update(rule.mesh_axes)
    return tuple([axis for axis in dict.fromkeys(fsdp_axes(layout)) if axis not in used])


def forgotten_text(what: str, forgotten: tuple[str, ...]) -> str:
    """What to say of arrays that are whole for want of a rule: `what` names them."""
    mesh_axes = axes_text(forgotten)
    return (
        f"`{BATCH}` has no rule but `...: None`, so {what} is whole along the mesh axis "
        f"`{mesh_axes}`, over which `FSDP` shards the parameters: a batch that is sharded over it "
        f'is gathered, and each device does all the work. Add `"{BATCH}": '
        f'{_written(forgotten)}` to the rules, or `"{BATCH}": None` if this is meant'
    )


def _written(mesh_axes: tuple[str, ...]) -> str:
    """Mesh axes as they are written in a rule, with the quotes of a table in Python."""
    written = entry(mesh_axes)
    if isinstance(written, str):
        return f'"{written}"'
    return repr(written)
