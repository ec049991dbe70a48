"""`Failure`: why a command cannot be carried out, in one line; and errors that become one."""

import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from functree.errors import FunctreeTypeError, RuleError, ShardingError, error_text

FINE, PROBLEMS, UNUSABLE, INTERRUPTED = 0, 1, 2, 130
"""The exit codes: all is well; the layout has problems; the command could not be carried out; an
interrupt ended it, as shells have it."""


class Failure(Exception):
    """Why a command cannot be carried out.

    Args:
        text: one line.
    """

    def __init__(self, text: str):
        line = " ".join(text.split())
        # What a terminal would obey, in the message of someone's error, is shown instead.
        super().__init__("".join(one if one.isprintable() else repr(one)[1:-1] for one in line))


@contextmanager
def refusing(what: str = "") -> Iterator[None]:
    """A context in which what functree does not take becomes a `Failure`, in the words of the
    command line; `what` is said before them."""
    try:
        yield
    except (FunctreeTypeError, RuleError, ShardingError) as error:
        text = str(error).removeprefix("explore: ").replace("target=", "--target ")
        raise Failure(f"{what}{text}") from error


class UsersCode(AbstractContextManager[Any]):
    """A context in which the user's own modules and functions are imported and run: what they raise
    becomes a `Failure`, whatever its class is, and so does the end of Python that they ask for. An
    interrupt passes.

    Args:
        what: what is said of them: `demo:train raised`.
        passes: the classes of errors that are not theirs.
    """

    def __init__(self, what: str, *passes: type[Exception]):
        self._what, self._passes = what, (Failure, *passes)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception | SystemExit) and not isinstance(error, self._passes):
            raise users_error(self._what, error) from error


def say(text: str) -> None:
    """Write a line to the standard error, if there is one."""
    if sys.stderr is not None:  # pyright: ignore[reportUnnecessaryComparison]  # closed by a shell
        sys.stderr.write(f"{text}\n")


def users_error(what: str, error: BaseException) -> Failure:
    """The failure of the user's own code, with the line of it that raised."""
    place = ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not _is_installed(frame.filename):
            place = f"{Path(frame.filename).name}:{frame.lineno}: "
            break
    return Failure(f"{what}: {place}{error_text(error)} (`--traceback` shows all)")


def _is_installed(file: str) -> bool:
    """Whether a file is one of functree, of another library or of Python."""
    folders = [Path(__file__).parents[1], *map(Path, sysconfig.get_paths().values())]
    # Code that was made of a text has no file.
    return file.startswith("<") or any(Path(file).is_relative_to(folder) for folder in folders)
