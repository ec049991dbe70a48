"""`Code` turns lines of Python into a function."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any


class Code:
    """The body of a generated function, and the values that it uses."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.values: dict[str, Any] = {}
        self._names: Iterator[int] = itertools.count()

    def name(self) -> str:
        """Return a new name."""
        return f"x{next(self._names)}"

    def value(self, value: object) -> str:
        """Add a value to the function's global variables, and return its name."""
        name = self.name()
        self.values[name] = value
        return name

    def assign(self, expression: str) -> str:
        """Add an assignment to a new name, and return the name."""
        name = self.name()
        self.lines.append(f"{name} = {expression}")
        return name

    def function(self, head: str, what: str) -> Callable[..., Any]:
        """Compile the function.

        Args:
            head: its name and parameters: `take(tree)`.
            what: a text for its file name, which tracebacks show: `Model`.
        """
        source = "\n    ".join((f"def {head}:", *self.lines)) + "\n"
        name = head.partition("(")[0]
        exec(compile(source, f"<functree: {name} {what}>", "exec"), self.values)
        return self.values[name]
