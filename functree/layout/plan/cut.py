"""An array and its spec ─► the array as it is cut: `f32[32000/model, 512/data]`."""

from functree.devices.specs import mesh_axes, of_rank, spec_text
from functree.layout.plan.row import Row
from functree.tree.arrays import dtype_text

NO_SPEC = "no spec"


def cut_text(row: Row) -> str:
    """The array of a row as it is cut: each size with the mesh axes that divide it.

    Several mesh axes stand behind one another, the outermost first: `64/data/model`.
    """
    text = f"{dtype_text(row.dtype)}[{', '.join(cut_sizes(row))}]"
    if row.spec is None:
        text += f" {NO_SPEC}"
    elif row.spec.unreduced or row.spec.reduced:
        text += f" {spec_text(row.spec)}"
    if row.memory_kind is not None:
        text += f" {row.memory_kind}"
    return text


def cut_sizes(row: Row) -> list[str]:
    """The text of each size of an array: `32000/model`."""
    sizes = list(map(str, row.shape))
    if row.spec is None:
        return sizes
    # A plan with problems may have a spec with more entries than the array has dimensions.
    entries = of_rank(row.spec, len(sizes)).partitions
    for dim, written in enumerate(entries[: len(sizes)]):
        for axis in mesh_axes(written):
            sizes[dim] += f"/{axis}"
    return sizes
