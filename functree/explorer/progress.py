"""How many candidates are compiled ─► a line on the standard error, if it takes long."""

import os
import sys
import threading
import time
from types import TracebackType

PATIENCE = 5.0
"""The seconds after which something is said."""

TICK = 1.0
"""The seconds between two lines on a terminal, where each takes the place of the one before."""


class Progress:
    """Says how far an exploration has come, and how much time is left, while it is entered.

    A program may take minutes to compile, so the line is written by a thread.

    Args:
        total: the number of candidates to compile.
        wanted: whether anything is said.
    """

    def __init__(self, total: int, wanted: bool):
        self._total, self._wanted = total, wanted
        self._start: float = time.monotonic()
        self._began: float = self._start  # with the candidate that is compiled now
        self._done: int = 0
        self._now: str = ""
        self._said: str | None = None  # the candidate that the last line names
        self._over: threading.Event = threading.Event()
        self._thread: threading.Thread = threading.Thread(target=self._run, daemon=True)
        self._lock: threading.Lock = threading.Lock()

    def __enter__(self) -> "Progress":
        if self._wanted and sys.stderr is not None:  # pyright: ignore[reportUnnecessaryComparison]
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._said is not None and _is_terminal():
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()

    def step(self, done: int, following: str) -> None:
        """Note what is compiled now, after so many others."""
        with self._lock:
            self._done, self._now, self._began = done, following, time.monotonic()
        if self._thread.ident is not None and self._since() >= PATIENCE:
            self._write()

    def _run(self) -> None:
        wait = PATIENCE
        while not self._over.wait(wait):
            self._write()
            wait = TICK

    def _since(self) -> float:
        return time.monotonic() - self._start

    def _write(self) -> None:
        """Write the line; in a log only if it names another candidate than the one before."""
        with self._lock:
            on_terminal = _is_terminal()
            if not self._now or (self._said == self._now and not on_terminal):
                return
            self._said = self._now
            text = f"{self._line()}\n"
            if on_terminal:
                # A line that is longer than the terminal could not be overwritten.
                columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
                text = f"\r\033[K{self._line()[: columns - 1]}"
            try:
                sys.stderr.write(text)
                sys.stderr.flush()
            except OSError:  # nobody reads it any more
                self._over.set()

    def _line(self) -> str:
        left = ""
        if self._done:
            each = (self._began - self._start) / self._done
            spent = time.monotonic() - self._began
            seconds = each * (self._total - self._done) - min(spent, each)
            left = f", {duration_text(seconds)} left"
        return f"explore: {self._done} of {self._total} compiled{left}; now {self._now}"


def _is_terminal() -> bool:
    """Whether a line can be overwritten."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def duration_text(seconds: float) -> str:
    """A duration as text.

    >>> duration_text(40), duration_text(200)
    ('40 s', '3 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"
