"""Python's source, written line by line ─► a function with a file name, so that tracebacks and profiles show it."""

import itertools
import linecache
import weakref
from collections.abc import Callable, Iterator
from typing import Any

_NUMBERS = itertools.count()


class Code:
    """The body of a function as it is written, and the values that it names."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.values: dict[str, Any] = {}
        self._names: Iterator[str] = (f"x{i}" for i in itertools.count())

    def name(self) -> str:
        """A name that nothing has yet."""
        return next(self._names)

    def value(self, value: Any) -> str:
        """The name of a value that the code uses."""
        name = self.name()
        self.values[name] = value
        return name

    def assign(self, expression: str) -> str:
        """Write an assignment; returns the name."""
        name = self.name()
        self.lines.append(f"{name} = {expression}")
        return name

    def function(self, head: str, what: str) -> Callable[[Any], Any]:
        """The finished function.

        Args:
            head: its name and parameters, `take(tree)`.
            what: for its file name, which tracebacks show: `Model`.
        """
        source = "\n    ".join((f"def {head}:", *self.lines)) + "\n"
        name = head.partition("(")[0]
        file = f"<functree: {name} {what} {next(_NUMBERS)}>"
        exec(compile(source, file, "exec"), self.values)
        function = self.values[name]
        # Where tracebacks look up the lines of a file that is not on disk; None: it never changes.
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        weakref.finalize(function, linecache.cache.pop, file, None)
        return function
