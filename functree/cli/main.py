"""The arguments of the command line ─► what is printed, and the exit code."""

import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

from functree.cli.commands import COMMANDS, Outcome
from functree.cli.factory import importing_from_here
from functree.cli.failure import INTERRUPTED, PROBLEMS, UNUSABLE, Failure, say
from functree.cli.parser import parsed
from functree.errors import FunctreeError, FunctreeWarning


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code.

    Args:
        arguments: the arguments; None for those of the process.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parsed(given, _version())
    command = f"functree {options.command}"
    try:
        if options.html is not None:
            _check_page(options.html)
        with importing_from_here(), _short_warnings(command), redirect_stdout(sys.stderr):
            # What the user's own functions print is not what was asked for.
            outcome = COMMANDS[options.command](options)
        _show(outcome, options.json, options.html)
        return outcome.code
    except Failure as failure:
        return _failed(command, failure, failure.code, options.traceback)
    except FunctreeError as error:
        # It lists what is wrong with the layout, a paragraph for each kind.
        return _failed(command, error, PROBLEMS, options.traceback)
    except jax.errors.JaxRuntimeError as error:
        return _failed(command, error, PROBLEMS, options.traceback)
    except KeyboardInterrupt:
        say(f"{command}: interrupted")
        return INTERRUPTED


def _version() -> str:
    try:
        return version("functree")
    except PackageNotFoundError:  # a checkout that is not installed
        return "(not installed)"


def _check_page(page: str) -> None:
    """Raise Failure if a page cannot be written: a program may take minutes to compile."""
    if not page or Path(page).is_dir():
        raise Failure(f"--html {page!r} is no file to write to")
    folder = Path(page).parent
    if not folder.is_dir():
        raise Failure(f"--html {page}: there is no folder {folder}")
    if not os.access(page if os.path.exists(page) else folder, os.W_OK):
        raise Failure(f"--html {page}: it may not be written")


def _show(outcome: Outcome, as_json: bool, page: str | None) -> None:
    if outcome.note:
        say(f"functree: {outcome.note}")
    report = outcome.report
    _print(report.to_json() if as_json else str(report))
    # Last, so that what was found out is seen wherever the page cannot be written.
    if page is not None:
        try:
            Path(page).write_text(report.html(), encoding="utf-8")
        except OSError as error:
            raise Failure(f"--html {page}: {error.strerror}") from error


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError as error:
        # Python would complain again when it closes the output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # As `| head` ends it.
        if not isinstance(error, BrokenPipeError):
            raise Failure(f"the output cannot be written: {error.strerror}") from error


def _failed(command: str, error: Exception, code: int, with_traceback: bool) -> int:
    if with_traceback:
        traceback.print_exception(error)
    if code == UNUSABLE:
        say(f"{command}: error: {error}")
    else:
        say(f"{command}: {error}")
    return code


@contextmanager
def _short_warnings(command: str) -> Iterator[None]:
    """A context in which our warnings are one line each, without the line of code."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", FunctreeWarning)

        def show(message: Warning | str, category: type[Warning], *where: object) -> None:
            say(f"{command}: warning: {' '.join(str(message).split())}")

        warnings.showwarning = show
        yield
