"""A `Failure` ends a command, and gives the reason in one line."""

import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from functree.errors import FunctreeTypeError, RuleError, ShardingError, error_text

FINE, PROBLEMS, UNUSABLE, INTERRUPTED = 0, 1, 2, 130
"""The exit codes for success, problems, a command that failed, and an interrupt.

Problems mean that the layout has mistakes, or that no program fits in device memory. Shells also
use 130 for an interrupt."""


class Failure(Exception):
    """An error that ends a command.

    Args:
        text: the reason. Its lines are joined into one.
    """

    def __init__(self, text: str):
        line = " ".join(text.split())
        # A user's error may contain control characters, which a terminal must not execute.
        super().__init__("".join(one if one.isprintable() else repr(one)[1:-1] for one in line))


@contextmanager
def refusing(what: str = "") -> Iterator[None]:
    """Convert functree's errors into a `Failure`.

    The failure's text begins with `what`, and names options as the command line does.
    """
    try:
        yield
    except (FunctreeTypeError, RuleError, ShardingError) as error:
        text = str(error).removeprefix("explore: ").replace("target=", "--target ")
        raise Failure(f"{what}{text}") from error


class UsersCode(AbstractContextManager[Any]):
    """A context manager for importing or running the user's code.

    Any `Exception` that the code raises becomes a `Failure`, and so does `SystemExit`.
    `KeyboardInterrupt` propagates.

    Args:
        what: the beginning of the message, such as `demo:train raised`.
        passes: further classes of errors that propagate.
    """

    def __init__(self, what: str, *passes: type[Exception]):
        self._what, self._passes = what, (Failure, *passes)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception | SystemExit) and not isinstance(error, self._passes):
            raise users_error(self._what, error) from error


def say(text: str) -> None:
    """Write a line to standard error, if it is open."""
    if sys.stderr is not None:  # pyright: ignore[reportUnnecessaryComparison]  # closed by a shell
        sys.stderr.write(f"{text}\n")


def users_error(what: str, error: BaseException) -> Failure:
    """Describe an error in the user's code, with the line of that code that raised it."""
    place = ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not _is_installed(frame.filename):
            place = f"{Path(frame.filename).name}:{frame.lineno}: "
            break
    return Failure(f"{what}: {place}{error_text(error)} (add `--traceback` to see the traceback)")


def _is_installed(file: str) -> bool:
    """Return whether a file belongs to functree, another library or Python."""
    folders = [Path(__file__).parents[1], *map(Path, sysconfig.get_paths().values())]
    # Code compiled from a string has no file.
    return file.startswith("<") or any(map(Path(file).is_relative_to, folders))
