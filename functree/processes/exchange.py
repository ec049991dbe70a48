"""`exchanged` sends JSON between processes, and checks that they are at the same comparison."""

import hashlib
import inspect
import itertools
import json
import logging
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from functree import errors
from functree.errors import FunctreeError, Problem, listed, users_frame

_E = TypeVar("_E", bound=BaseException)


class Place(NamedTuple):
    """A point in a program at which a process compares facts with the other processes.

    Attributes:
        failure: the beginning of messages, such as `the arrays cannot be placed`.
        name: the function that compares, such as `ft.shard`.
        number: how many comparisons this process has made, including this one.
        line: the line of the user's program, such as `train.py:81`; empty if there is none.
    """

    failure: str
    name: str
    number: int
    line: str

    @classmethod
    def next(cls, failure: str, name: str | None = None) -> Self:
        """Return the place of the comparison that begins now.

        Args:
            failure: the beginning of messages.
            name: the function that compares; by default the function that the user's program
                called.
        """
        frame, called = inspect.currentframe(), ""
        _, users = users_frame()
        while frame is not None and frame is not users:
            module = frame.f_globals.get("__name__", "")
            # A decorator that checks arguments is around the function that the user called.
            if module.startswith("functree.") and module != "functree.argument_checks":
                called = frame.f_code.co_qualname
            frame = frame.f_back
        line = ""
        if users is not None:
            line = f"{users.f_code.co_filename}:{users.f_lineno}"
        # Users never write `Checkpoints.__exit__`, so messages name `ft.Checkpoints`.
        return cls(failure, name or "ft." + _SPECIAL.sub("", called), next(_numbers), line)

    def __str__(self) -> str:
        return f"comparison {self.number} (`{self.name}`)"

    @property
    def at_line(self) -> str:
        """The comparison, and the line of the user's program if there is one."""
        return f"{self} at {self.line}" if self.line else str(self)


_SPECIAL = re.compile(r"\.__\w+__$")
_numbers = itertools.count(1)


Report = Mapping[str, Any]
"""The JSON that a process sends to the others. An error is `{"class": ..., "error": ...}`."""


Told = tuple[Report, Place]
"""A message from one process to the others: what it reports, and where."""


def exchanged(place: Place, report: Report) -> list[Told] | None:
    """Exchange reports between all processes.

    All communication begins here, with an array of fixed size. Processes at different comparisons
    therefore get an error instead of waiting in collectives that do not match.

    Returns:
        One message for each process, in order, or None if all messages are equal.

    Raises:
        FunctreeError: if the processes have unequal numbers of devices.
        FunctreeError: if a process has ended.
        FunctreeError: if a process reports an error.
        FunctreeError: if a process is at a different comparison.
    """
    _check_devices(place)
    # The first message is a digest of 32 bytes, since the text of a lowered program may be
    # megabytes long, and is usually equal in all processes.
    # The line is not compared: machines may keep the program in different folders.
    compared = json.dumps([place.name, place.number, report])
    digests = _gathered(place, np.frombuffer(hashlib.sha256(compared.encode()).digest(), np.uint8))
    if (digests == digests[0]).all():
        return None
    mine = np.frombuffer(json.dumps([report, place]).encode(), np.uint8)
    sizes = _gathered(place, np.array(mine.size, np.int32))
    # All processes must send arrays of the same size. Powers of two limit the number of sizes for
    # which JAX compiles.
    padded = np.zeros(1 << int(sizes.max()).bit_length(), np.uint8)
    padded[: mine.size] = mine
    told: list[Told] = []
    for row, size in zip(_gathered(place, padded), sizes, strict=True):
        reported, where = json.loads(row[:size].tobytes())
        told.append((reported, Place(*where)))
    _raise_failures(place, told)
    _check_together(place, told)
    return told


def _raise_failures(place: Place, told: Sequence[Told]) -> None:
    """Raise FunctreeError if a process reports an error."""
    failed = [process for process, (report, _) in enumerate(told) if "error" in report]
    if failed:
        # The message shows the first of several errors, since they are usually the same.
        report, _ = told[failed[0]]
        # An error whose class functree defines keeps that class, so that it is caught in all
        # processes or in none. Constructors of other classes may take different arguments.
        kind: type[FunctreeError] = getattr(errors, report["class"], FunctreeError)
        who = f"{processes_text(failed)} of {len(told)}"
        text = f"{place.failure}: {who} failed with {report['class']}:\n{report['error']}"
        raise known_to_all(kind(text))


def _check_together(place: Place, told: Sequence[Told]) -> None:
    """Raise FunctreeError if the processes are at different comparisons."""
    if len({(where.name, where.number) for _, where in told}) == 1:
        return
    problems: list[Problem] = []
    for process, (_, where) in enumerate(told):
        why = f"is at {where.at_line}"
        problems.append(Problem(None, None, f"process {process}", why, _TOGETHER))
    headline = f"{place.failure}: the {len(told)} processes made different calls"
    raise known_to_all(FunctreeError(headline, problems))


_TOGETHER = (
    "make the same calls in the same order in all processes: one process made a call that another "
    "did not, here or earlier"
)


# Stored in the error itself, since built-in exceptions do not support weak references.
_KNOWN = "_known_to_all_processes"


def known_to_all(error: _E) -> _E:
    """Mark an error as known to the other processes, and return it."""
    vars(error)[_KNOWN] = True
    return error


def is_known_to_all(error: BaseException | None) -> bool:
    """Return whether an error is marked as known to the other processes."""
    return hasattr(error, _KNOWN)


def texts_of_all(text: str) -> list[str]:
    """Return the text of each process, in order."""
    if jax.process_count() == 1:
        return [text]
    place = Place.next("the processes cannot communicate")
    told = exchanged(place, {"text": text})
    if told is None:
        return [text] * jax.process_count()
    return [report["text"] for report, _ in told]


def text_of_first(text: str) -> str:
    """Return the first process's text in all processes."""
    return texts_of_all(text)[0]


def processes_text(processes: Sequence[int]) -> str:
    """Format processes for messages: `process 1`, `processes 1, 2`."""
    if len(processes) == 1:
        return f"process {processes[0]}"
    return f"processes {listed(list(map(str, processes)))}"


def _check_devices(place: Place) -> None:
    """Raise FunctreeError if the processes have unequal numbers of devices.

    Such processes cannot gather arrays. JAX lists all devices in each process, so this check needs
    no communication.
    """
    counts = Counter(device.process_index for device in jax.devices())
    numbers = [counts[process] for process in range(jax.process_count())]
    if len(set(numbers)) > 1:
        text = (
            f"{place.failure}: the processes have different numbers of devices, "
            f"{listed(list(map(str, numbers)))}: give all processes the same number of devices"
        )
        raise known_to_all(FunctreeError(text))


def _gathered(place: Place, value: np.ndarray) -> np.ndarray:
    """Gather the values of all processes along a new leading dimension."""
    # A process that does not arrive may just be late, which is not an error. The others therefore
    # log where they wait.
    text = (
        f"process {jax.process_index()} of {jax.process_count()} has waited {LONG:g} s for the "
        f"others in {place.at_line}: check that all processes reach this call"
    )
    warning = threading.Timer(LONG, _LOG.warning, [text])
    warning.daemon = True  # so that an ending process does not wait for it
    warning.start()
    try:
        return np.asarray(multihost_utils.process_allgather(value))
    except jax.errors.JaxRuntimeError as error:
        # Only this error reveals that another process has ended.
        text = (
            f"{place.failure}: not all processes reached {place}. A process has ended, is late, or "
            "cannot be reached: read the output of each process\n"
            f"{str(error).splitlines()[0]}"
        )
        raise known_to_all(FunctreeError(text)) from error
    finally:
        warning.cancel()


LONG = 60.0
"""The seconds after which a process that waits for the others logs where it waits."""

_LOG = logging.getLogger("functree")
