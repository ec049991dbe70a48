"""`listening` collects the compiler's warnings from standard error.

XLA reports an involuntary rematerialization or a slow compilation only as a line on file descriptor
2. During a compilation, that descriptor is therefore a pipe, and a thread immediately forwards its
contents. There is one pipe per process, even if several threads compile: two pipes would each
restore the other's descriptor. The TPU compiler writes to files instead.
"""

import os
import re
import select
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class CompilerOutput:
    """The text written to standard error while a context was active.

    Attributes:
        warnings: the compiler's warnings. None while the context is active, if standard error
            cannot be redirected, or if `TF_CPP_MIN_LOG_LEVEL` silences warnings. If several threads
            compile at once, each gets all warnings.
    """

    def __init__(self) -> None:
        self.warnings: tuple[str, ...] | None = None
        self.chunks: list[bytes] = []


@contextmanager
def listening() -> Iterator[CompilerOutput]:
    """Collect the compiler's warnings. All text written to standard error is still forwarded."""
    output = CompilerOutput()
    sizes = {file: file.stat().st_size for file in _log_files()}
    reader = _STANDARD_ERROR.enter(output)
    try:
        yield output
    finally:
        if reader is not None:
            _STANDARD_ERROR.leave(output, reader)
        if reader is not None and not _SILENCED:
            # Read only the new text: the compiler appends to one log file per process.
            for file in _log_files():
                output.chunks.append(file.read_bytes()[sizes.get(file, 0) :])
            text = b"".join(output.chunks).decode(errors="replace")
            output.warnings = tuple(warnings_in(text))


def _log_files() -> list[Path]:
    """Find this process's warning logs. Only the TPU compiler writes them."""
    folder = Path(os.environ.get("TPU_LOG_DIR", "/tmp/tpu_logs"))
    return list(folder.glob(f"*.log.WARNING.*.{os.getpid()}"))


class _StandardError:
    """Standard error, redirected to a pipe while there are listeners."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._reader: _Reader | None = None

    def enter(self, output: CompilerOutput) -> "_Reader | None":
        """Add a listener and return the reader; None if standard error cannot be redirected."""
        with self._changing:
            if self._reader is None:
                self._reader = self._redirect()
            if self._reader is not None:
                with self._reader.reading:
                    self._reader.listeners.append(output)
            return self._reader

    def leave(self, output: CompilerOutput, reader: "_Reader") -> None:
        """Stop listening once all earlier text has been read.

        The last listener restores standard error.
        """
        with self._changing, reader.reading:
            reader.read_on()
            if len(reader.listeners) == 1:
                # The pipe is read immediately before and after this call. If another thread writes
                # two lines in between, the second may overtake the first. No system call can
                # prevent that, and no line is lost.
                os.dup2(reader.original, 2)
                reader.read_on()
                os.close(reader.write)
                self._reader = None
            reader.listeners.remove(output)

    def forget(self) -> None:
        """Restore standard error in a process that was forked while there were listeners."""
        # A forked process has no thread that reads the pipe, and no other thread that could release
        # the lock.
        self._changing = threading.Lock()
        if self._reader is not None:
            os.dup2(self._reader.original, 2)
        self._reader = None

    def _redirect(self) -> "_Reader | None":
        if not hasattr(select, "poll"):  # on Windows, nothing shows whether a pipe is empty
            return None
        try:
            original = os.dup(2)
        except OSError:  # a process without standard error
            return None
        read, write = os.pipe()
        reader = _Reader(read, write, original)
        os.dup2(write, 2)
        return reader


_CAPACITY = 65536  # the capacity of a pipe on Linux
# JAX reads the level when it is imported; the default is 1. At level 2, XLA writes only errors.
_SILENCED = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") not in ("", "0", "1")


class _Reader(threading.Thread):
    """A thread that forwards the contents of a pipe.

    The thread lives until every writer has closed the pipe. A process that was started during the
    redirection is also a writer, since the pipe is its standard error.

    Attributes:
        original: the file descriptor of the original standard error.
        write: this process's write end of the pipe.
        reading: the lock that is held while text is read and forwarded. For the thread that holds
            the lock, all text is either still in the pipe or already forwarded.
        listeners: the outputs that collect the text.
    """

    def __init__(self, read: int, write: int, original: int):
        super().__init__(daemon=True, name="functree: standard error")
        self._read, self.write, self.original = read, write, original
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
        """Read the text written so far. The caller holds `reading`."""
        # Other threads may keep writing, so stop after one full pipe.
        rest = _CAPACITY
        while rest > 0 and self._written(0):
            rest -= self._take()

    def _take(self) -> int:
        """Read, collect and forward text; return the number of bytes, which is 0 at the end."""
        data = os.read(self._read, _CAPACITY)
        for output in self.listeners:
            output.chunks.append(data)
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self.original, rest) :]
        except OSError:
            # The original cannot be written to, for example because it is a pipe without a reader.
            # The text would be lost without the redirection, too.
            pass
        return len(data)

    def _written(self, milliseconds: int | None) -> bool:
        """Return whether the pipe contains unread text, or has ended.

        Args:
            milliseconds: how long to wait; None to wait without a limit.
        """
        poll = select.poll()  # `select.select` rejects descriptors above 1023
        poll.register(self._read, select.POLLIN)
        return bool(poll.poll(milliseconds))


_STANDARD_ERROR = _StandardError()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_STANDARD_ERROR.forget)

_HEAD = re.compile(r"^[IWEF]\d{4} [\d:.]+ +\d+ [\w.]+:\d+\] ?(.*)$")
# The warnings worth reporting. The others concern the compiler, and users cannot act on them.
_TOLD = re.compile(
    r"involuntary full rematerialization"
    r"|very slow compile"
    r"|constant folding an instruction is taking"
    r"|can't reduce memory use",
    re.IGNORECASE,
)
# This part is removed: users cannot act on it, and a `Ledger` shows the cost.
_TAIL = re.compile(r"\. As the last resort, SPMD will replicate.*")


def warnings_in(text: str) -> Sequence[str]:
    """Return the compiler's warnings, without duplicates, timestamps and source locations.

    Args:
        text: the text written to standard error.
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
    """Return the first line with text. Compilers frame some messages with asterisks."""
    for line in lines:
        text = line.strip()
        if text.strip("*"):
            return text
    return ""
