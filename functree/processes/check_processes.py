"""Values of all processes ─► an error in all that says which process differs, and in what."""

from functree.processes.agreement import Agreement
from functree.processes.facts import facts_of


def check_processes(**values: object) -> None:
    """Check that some values are the same in all processes.

    Processes with other shapes, programs or layouts compute a wrong number without a word, or wait
    for each other for ever. All processes have to call this at the same place of their programs. It
    takes a few milliseconds. With one process there is nothing to check.

    Args:
        **values: plans, layouts, meshes, lowered programs (`f.lower(...)`), texts, numbers, arrays,
            sets, mappings, objects, or trees of them. Arrays of this process alone count by their
            values, those of all processes by their shardings; objects by what they contain, and
            functions by their names.

    Raises:
        FunctreeError: in all processes, if some differ: the message names the process, and the leaf
            or the line; if one of them compares something else meanwhile; if they have unequal
            numbers of devices, or one has ended.

    Examples:
        >>> ft.check_processes(
        ...     step=3, stop=False, layout=ft.AxisRules({"embed": "model"})
        ... )
    """
    with Agreement("check_processes") as agreement:
        agreement.compare(lambda: {name: facts_of(value) for name, value in values.items()})
