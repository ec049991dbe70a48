"""How far long work is ─► a line on the standard error that changes, or lines in a log."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 5.0
"""The seconds after which something is said in a log."""


@contextmanager
def shown_progress(what: str, total: int, wanted: bool) -> Iterator[Callable[[int, str], None]]:
    """A context in which the standard error says how far long work is. It gives the function to
    call before each part, with the number of those before it and its name.

    Args:
        what: what is said: `explore: {} compiled`, with the numbers in the place of the braces.
        total: the number of parts.
        wanted: whether anything is said.
    """
    # Rich takes long to import, and only such work needs it.
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.table import Column

    console = Console(stderr=True, force_jupyter=False)
    numbers = "{task.completed} of {task.total}"
    text = f"{what.format(numbers)}; now {{task.description}}"
    bar = Progress(
        TextColumn(text, markup=False, table_column=Column()),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        speed_estimate_period=math.inf,  # a single program may take minutes
        disable=not (wanted and console.is_interactive),
    )
    task = bar.add_task("", total=total)

    def show(done: int, name: str) -> None:
        bar.update(task, completed=done, description=name)
        # In a log a line cannot be overwritten, so it says nothing of what is quick.
        is_long = (bar.tasks[0].elapsed or 0) >= PATIENCE
        if wanted and is_long and not console.is_interactive:
            console.print(bar.get_renderable())

    with bar:
        yield show
