"""`Code` turns lines of Python into a function with a file name, which tracebacks show."""

import itertools
import linecache
import weakref
from collections.abc import Callable, Iterator
from typing import Any

_NUMBERS = itertools.count()


class Code:
    """The body of a generated function, and the values that it uses.

    Args:
        outer: the code that may include this code. The two never use the same name.
    """

    def __init__(self, outer: "Code | None" = None) -> None:
        self.lines: list[str] = []
        self.values: dict[str, Any] = {}
        self._names: Iterator[int] = itertools.count() if outer is None else outer._names

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

    def add(self, inner: "Code") -> None:
        """Add code that was made with this code as its outer code."""
        self.lines += inner.lines
        self.values |= inner.values

    def function(self, head: str, what: str) -> Callable[..., Any]:
        """Compile the function.

        Args:
            head: its name and parameters: `take(tree)`.
            what: a text for its file name, which tracebacks show: `Model`.
        """
        source = "\n    ".join((f"def {head}:", *self.lines)) + "\n"
        name = head.partition("(")[0]
        file = f"<functree: {name} {what} {next(_NUMBERS)}>"
        exec(compile(source, file, "exec"), self.values)
        function = self.values[name]
        # Tracebacks look up a file's lines in this cache. The modification time is None, so the
        # entry is valid without a file on disk. The entry is removed with the function.
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        weakref.finalize(function, linecache.cache.pop, file, None)
        return function
