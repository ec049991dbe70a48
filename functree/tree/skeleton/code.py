"""Python source, line by line ─► a function with a file name, which tracebacks show."""

import itertools
import linecache
import weakref
from collections.abc import Callable, Iterator
from typing import Any

_NUMBERS = itertools.count()


class Code:
    """The body of a function that is being generated, and the values that it uses.

    Args:
        outer: the code that this may become a part of; their names are different.
    """

    def __init__(self, outer: "Code | None" = None) -> None:
        self.lines: list[str] = []
        self.values: dict[str, Any] = {}
        self._names: Iterator[int] = itertools.count() if outer is None else outer._names

    def name(self) -> str:
        """A new name."""
        return f"x{next(self._names)}"

    def value(self, value: object) -> str:
        """Add a value that the code uses, as a global variable of the function; returns its
        name."""
        name = self.name()
        self.values[name] = value
        return name

    def assign(self, expression: str) -> str:
        """Add an assignment to a new name; returns the name."""
        name = self.name()
        self.lines.append(f"{name} = {expression}")
        return name

    def add(self, inner: "Code") -> None:
        """Add code that was written with this one as its outer code."""
        self.lines += inner.lines
        self.values |= inner.values

    def function(self, head: str, what: str) -> Callable[..., Any]:
        """The finished function.

        Args:
            head: its name and parameters: `take(tree)`.
            what: a text for its file name, which tracebacks show: `Model`.
        """
        source = "\n    ".join((f"def {head}:", *self.lines)) + "\n"
        name = head.partition("(")[0]
        file = f"<functree: {name} {what} {next(_NUMBERS)}>"
        exec(compile(source, file, "exec"), self.values)
        function = self.values[name]
        # Tracebacks look up the lines of a file here. None in the place of the modification time:
        # the entry is valid although there is no file on disk. The entry is removed together with
        # the function.
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        weakref.finalize(function, linecache.cache.pop, file, None)
        return function
