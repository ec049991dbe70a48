"""What XLA says on the standard error of the process while it compiles ─► its warnings.

XLA tells nobody else of an involuntary rematerialization or a slow compilation: it writes a line to
file descriptor 2. So that descriptor is a pipe while something compiles, and a thread passes on
what comes through it at once. There is one pipe for the process, however many threads compile: two
of them would each restore what the other one had set. The compiler for TPUs writes to files
instead.
"""

import os
import re
import select
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from functree.devices.targets import log_folders


class CompilerOutput:
    """What was written to standard error while a context was entered.

    Attributes:
        warnings: the warnings of the compiler; None as long as the context is entered, and if the
            process has no standard error that could be listened to, or `TF_CPP_MIN_LOG_LEVEL`
            silences them. Of several threads that compile at once each gets all of them.
    """

    def __init__(self) -> None:
        self.warnings: tuple[str, ...] | None = None
        self.chunks: list[bytes] = []


@contextmanager
def listening() -> Iterator[CompilerOutput]:
    """Listen to the compiler; what others write to standard error is passed on too."""
    output = CompilerOutput()
    sizes = {file: file.stat().st_size for file in _log_files()}
    reader = _STANDARD_ERROR.enter(output)
    try:
        yield output
    finally:
        if reader is not None:
            _STANDARD_ERROR.leave(output, reader)
        if reader is not None and not _SILENCED:
            # Of a log only what was written meanwhile: the compiler appends to one file for all
            # programs of a process.
            for file in _log_files():
                output.chunks.append(file.read_bytes()[sizes.get(file, 0) :])
            text = b"".join(output.chunks).decode(errors="replace")
            output.warnings = tuple(warnings_in(text))


def _log_files() -> list[Path]:
    """The logs of this process with warnings."""
    files: list[Path] = []
    for folder in log_folders:
        files += folder.glob(f"*.log.WARNING.*.{os.getpid()}")
    return files


class _StandardError:
    """Standard error as a pipe, for as long as somebody listens."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._reader: _Reader | None = None

    def enter(self, output: CompilerOutput) -> "_Reader | None":
        """Begin to listen; None if that is not possible."""
        with self._changing:
            if self._reader is None:
                self._reader = self._redirect()
            if self._reader is not None:
                with self._reader.reading:
                    self._reader.listeners.append(output)
            return self._reader

    def leave(self, output: CompilerOutput, reader: "_Reader") -> None:
        """Stop listening, when all that was written before has been read.

        The last one restores standard error.
        """
        with self._changing, reader.reading:
            reader.read_on()
            if len(reader.listeners) == 1:
                # The pipe is read right before and right after: another thread must write twice in
                # between for its second line to overtake the first. No system call can exclude
                # that, and nothing is lost by it.
                os.dup2(reader.original, 2)
                reader.read_on()
                reader.close()
                self._reader = None
            reader.listeners.remove(output)

    def forget(self) -> None:
        """Restore standard error in a process that was forked while somebody listened."""
        # A forked process has no thread that would read from the pipe. And the lock may be one that
        # another thread held, which is not there to release it.
        self._changing = threading.Lock()
        if self._reader is not None:
            os.dup2(self._reader.original, 2)
        self._reader = None

    def _redirect(self) -> "_Reader | None":
        if not hasattr(select, "poll"):  # on Windows a pipe cannot be asked whether it is empty
            return None
        try:
            original = os.dup(2)
        except OSError:  # a process without standard error
            return None
        read, write = os.pipe()
        reader = _Reader(read, write, original)
        os.dup2(write, 2)
        return reader


_CAPACITY = 65536  # of a pipe of Linux
# The level is read when JAX is imported: at 2 XLA writes errors only. The default of JAX is 1.
_SILENCED = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") not in ("", "0", "1")


class _Reader(threading.Thread):
    """A thread that passes on what comes through a pipe.

    It lives until every writer has closed the pipe: a process that was started meanwhile has it as
    its standard error.

    Attributes:
        original: the file descriptor that standard error was before.
        reading: held while something is read and passed on, so that who holds it knows that
            everything is either still in the pipe or passed on.
        listeners: who gets what is read.
    """

    def __init__(self, read: int, write: int, original: int):
        super().__init__(daemon=True, name="functree: standard error")
        self._read, self._write, self.original = read, write, original
        self.reading: threading.Lock = threading.Lock()
        self.listeners: list[CompilerOutput] = []
        self.start()

    def run(self) -> None:
        ended = False
        while not ended:
            self._written(None)
            with self.reading:
                ended = self._written(0) and self._take() == 0
        os.close(self._read)
        os.close(self.original)

    def read_on(self) -> None:
        """Read what has been written; only while `reading` is held."""
        # Of a pipe that is never empty, because others write on, as much is read as it can hold.
        rest = _CAPACITY
        while rest > 0 and self._written(0):
            rest -= self._take()

    def _take(self) -> int:
        """Read, tell the listeners, pass it on; the number of bytes, 0 at the end of the pipe."""
        data = os.read(self._read, _CAPACITY)
        for output in self.listeners:
            output.chunks.append(data)
        self._pass_on(data)
        return len(data)

    def _pass_on(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self.original, rest) :]
        except OSError:
            # The original is closed, for example a pipe that nobody reads: without us this would be
            # lost too.
            pass

    def close(self) -> None:
        """Close the pipe from this side."""
        os.close(self._write)

    def _written(self, milliseconds: int | None) -> bool:
        """Whether something in the pipe has not been read.

        Args:
            milliseconds: how long to wait until something is; None for ever.
        """
        poll = select.poll()  # `select.select` takes no descriptor above 1023
        poll.register(self._read, select.POLLIN)
        return bool(poll.poll(milliseconds))


_STANDARD_ERROR = _StandardError()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_STANDARD_ERROR.forget)

_HEAD = re.compile(r"^[IWEF]\d{4} [\d:.]+ +\d+ [\w.]+:\d+\] ?(.*)$")
# What is worth telling: the others are about the compiler itself, and a user can do nothing about
# them.
_TOLD = re.compile(
    r"involuntary full rematerialization"
    r"|very slow compile"
    r"|constant folding an instruction is taking"
    r"|can't reduce memory use",
    re.IGNORECASE,
)
# What the user cannot change; `Ledger` says what it costs.
_TAIL = re.compile(r"\. As the last resort, SPMD will replicate.*")


def warnings_in(text: str) -> Sequence[str]:
    """The warnings of the compiler, each once, without their time and place.

    Args:
        text: what was written to standard error.
    """
    found: dict[str, None] = {}  # a set that keeps their order
    lines = text.splitlines()
    for i, line in enumerate(lines):
        head = _HEAD.match(line)
        if head is None:
            continue
        message = head[1].strip()
        if not message or message.endswith(":"):
            message = f"{message} {_first_text(lines[i + 1 : i + 4])}".strip()
        if _TOLD.search(message):
            found[_TAIL.sub("", message)] = None
    return list(found)


def _first_text(lines: Sequence[str]) -> str:
    """The first line that is neither empty nor of stars, with which a compiler frames a message."""
    for line in lines:
        text = line.strip()
        if text.strip("*"):
            return text
    return ""
