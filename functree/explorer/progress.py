"""`attempts` runs a function on many items, and displays the progress on standard error."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import jax

from functree.errors import USERS_ERRORS, FunctreeError

PATIENCE = 5.0
"""The seconds before the first line in a log."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def attempts(
    what: str,
    items: Sequence[_Item],
    name: Callable[[_Item], str],
    run: Callable[[_Item], _Result],
    wanted: bool,
) -> Iterator[tuple[_Item, _Result | Exception]]:
    """Yield each item with its result, or with the error of the compiler or of the user's code.

    An interrupt ends the iteration. A terminal shows the progress in one line, and a log in several
    lines.

    Args:
        what: the text, such as `explore: {} compiled`; the numbers replace the braces.
        items: the items.
        name: the function that names an item.
        run: the function to run on each item.
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
    task = bar.add_task("", total=len(items))
    with bar:
        for done, item in enumerate(items):
            bar.update(task, completed=done, description=name(item))
            # Lines in a log cannot be overwritten, so quick work logs nothing.
            is_long = (bar.tasks[0].elapsed or 0) >= PATIENCE
            if wanted and is_long and not console.is_interactive:
                console.print(bar.get_renderable())
            try:
                result = run(item)
            except KeyboardInterrupt:
                return
            except (FunctreeError, jax.errors.JaxRuntimeError, *USERS_ERRORS) as error:
                result = error
            yield item, result
