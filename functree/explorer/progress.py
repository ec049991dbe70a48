"""`shown_progress` displays the progress of long-running work on standard error."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 5.0
"""The seconds before the first line in a log."""


@contextmanager
def shown_progress(what: str, total: int, wanted: bool) -> Iterator[Callable[[int, str], None]]:
    """Show the progress of a long task: in one line of a terminal, or in several lines of a log.

    Yield a function to call before each part, with the number of parts done and the part's name.

    Args:
        what: the text, such as `explore: {} compiled`; the numbers replace the braces.
        total: the number of parts.
        wanted: whether to show anything.
    """
    # Importing rich is slow, and only long work needs it.
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
        # Lines in a log cannot be overwritten, so quick work logs nothing.
        is_long = (bar.tasks[0].elapsed or 0) >= PATIENCE
        if wanted and is_long and not console.is_interactive:
            console.print(bar.get_renderable())

    with bar:
        yield show
