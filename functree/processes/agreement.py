"""Code that all processes run ─► it succeeds in all of them, or raises the same error in all."""

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Self

import jax
import numpy as np
from jax.experimental import multihost_utils

from functree import errors
from functree.errors import FunctreeError, Problem, listed, users_frame

Facts = Mapping[str, Sequence[str]]
"""What has to be the same in all processes: for each name, lines of text."""


class Agreement:
    """A block of code that all processes run, which raises in all of them or in none.

    An error inside the block is raised in the other processes too, which would otherwise wait for
    this one without end. What was compared inside has to be the same in all processes:

        with Agreement("nothing is saved") as agreement:
            plan = make_plan()  # if one process raises an error here, all of them raise it
            agreement.compare(lambda: {"plan": facts_of(plan)})  # as if the plans differ

    All processes enter it at the same place of their programs, and talk to each other once, at its
    end. With a single process it does nothing.

    Args:
        failure: the beginning of the message: `the arrays cannot be placed`.

    Raises:
        FunctreeError: at the end of the block, if what was compared differs, or if there was an
            error in another process: of the same class as that error if it is one of functree.
    """

    def __init__(self, failure: str):
        self._failure = failure
        self._facts: dict[str, list[str]] = {}

    def compare(self, facts: Callable[[], Facts]) -> None:
        """Compare facts with those of the other processes, at the end of the block.

        Args:
            facts: returns the facts. It is not called if there is a single process, since to lower
                a program or to read arrays for their facts may take long.
        """
        if jax.process_count() > 1:
            for name, lines in facts().items():
                self._facts[name] = list(lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if jax.process_count() == 1:
            return
        if error is None:
            texts = _exchanged(json.dumps({"facts": self._facts}))
            if texts is not None:
                reports = list(map(json.loads, texts))
                _raise_failures(self._failure, reports)
                _raise_differences(self._failure, reports)
        elif isinstance(error, Exception):
            # The others raise it; in this process Python goes on to raise it after this.
            _exchanged(json.dumps({"class": type(error).__name__, "error": str(error)}))
        # Others, such as a KeyboardInterrupt, end this process, and JAX then ends the other ones.


def wait_in_all(failure: str, is_done: Callable[[], bool]) -> None:
    """Wait until something is done in all processes; an error in one of them ends the waiting.

    All processes call this at the same place of their programs.

    Args:
        failure: the beginning of the message.
        is_done: whether it is done in this process, after waiting for a moment.

    Raises:
        FunctreeError: `is_done` raised an error in one of the processes, as in an `Agreement`.
    """
    answers = ["False"]
    while "False" in answers:
        with Agreement(failure):
            mine = is_done()
        answers = texts_of_all(str(mine))


def processes_text(processes: Sequence[int]) -> str:
    """Some processes in messages: `process 1`, `processes 1, 2`."""
    if len(processes) == 1:
        return f"process {processes[0]}"
    return f"processes {listed(list(map(str, processes)))}"


def text_of_first(text: str) -> str:
    """The text of the first process, in all of them. Those of the others are ignored."""
    if jax.process_count() == 1:
        return text
    texts = _exchanged(text)
    if texts is None:
        return text
    return texts[0]


def _exchanged(text: str) -> list[str] | None:
    """The texts of all processes, in their order; None if all are the same."""
    # A lowered program has megabytes, and mostly all processes have the same: then 32 bytes of it
    # are sent.
    digests = _gathered(np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8))
    if (digests == digests[0]).all():
        return None
    return texts_of_all(text)


def texts_of_all(text: str) -> list[str]:
    """The texts of all processes, in their order."""
    if jax.process_count() == 1:
        return [text]
    mine = np.frombuffer(text.encode(), np.uint8)
    sizes = _gathered(np.array(mine.size, np.int32))
    # All have to send arrays of one size, and JAX compiles a program for each size, so it is a
    # power of two.
    padded = np.zeros(1 << int(sizes.max()).bit_length(), np.uint8)
    padded[: mine.size] = mine
    texts: list[str] = []
    for row, size in zip(_gathered(padded), sizes, strict=True):
        texts.append(row[:size].tobytes().decode())
    return texts


def _gathered(value: np.ndarray) -> np.ndarray:
    """The values of all processes, behind a leading dimension of the processes."""
    # A process that never comes here is no error that could be raised: it may only be late. So
    # the others log where they wait.
    warning = threading.Timer(LONG, _LOG.warning, [_waiting_text()])
    warning.daemon = True  # so that a process that ends meanwhile does not wait for it
    warning.start()
    try:
        return np.asarray(multihost_utils.process_allgather(value))
    finally:
        warning.cancel()


LONG = 60.0
"""After how many seconds of waiting for the others a process says where it waits."""

_LOG = logging.getLogger("functree")


def _waiting_text() -> str:
    who = f"process {jax.process_index()} of {jax.process_count()}"
    where = ""
    _, frame = users_frame()
    if frame is not None:
        where = f" at {frame.f_code.co_filename}:{frame.f_lineno}"
    return f"{who} has waited for the others for {LONG:g} s{where}: does each of them come there?"


def _raise_failures(failure: str, reports: Sequence[Mapping[str, Any]]) -> None:
    """Raise in this process, which has no error of its own, if some of the others have one."""
    failed = [process for process, report in enumerate(reports) if "error" in report]
    if failed:
        # Of several errors the first: mostly they are the same.
        report = reports[failed[0]]
        # An error of functree is raised as one of its class, so that who catches it does so in all
        # processes. A class that is not ours may need other arguments than a text.
        kind = getattr(errors, report["class"], FunctreeError)
        who = f"{processes_text(failed)} of {len(reports)}"
        raise kind(f"{failure}: {who} failed with {report['class']}:\n{report['error']}")


def _raise_differences(failure: str, reports: Sequence[Mapping[str, Any]]) -> None:
    """Raise for the names whose lines are not the same in all processes."""
    problems: list[Problem] = []
    names: dict[str, None] = {}  # a set that keeps their order
    for report in reports:
        names.update(dict.fromkeys(report["facts"]))
    for name in names:
        lines = [report["facts"].get(name, ["(nothing)"]) for report in reports]
        # Most processes are taken to be right; where as many have one as the other, the first.
        usual = max(lines, key=lines.count)
        others = [process for process, own in enumerate(lines) if own != usual]
        if others:
            text = _difference(lines, lines.index(usual), others)
            problems.append(Problem(None, None, name, text, _REMEDY))
    if problems:
        raise FunctreeError(f"{failure}: the {len(reports)} processes differ", problems)


_REMEDY = (
    "all processes have to run the same program, with the same configuration and the same seeds"
)
_MOST_LINES = 4


def _difference(lines: Sequence[list[str]], usual: int, others: Sequence[int]) -> str:
    """Which processes differ from most of them, and in which lines the first of these does.

    Args:
        lines: those of each process.
        usual: a process that has what most have.
        others: the processes that differ from it.
    """
    different: list[tuple[int, str, str]] = []
    pairs = zip_longest(lines[usual], lines[others[0]], fillvalue="(nothing)")
    for number, (here, there) in enumerate(pairs, start=1):
        if here != there:
            different.append((number, here, there))
    verb = "differs" if len(others) == 1 else "differ"
    title = f"{processes_text(others)} {verb} from process {usual}"
    if len(lines[usual]) > 1:
        title += f", first in line {different[0][0]} of {len(lines[usual])}"
    text = [f"{title}:"]
    for _, here, there in different[:_MOST_LINES]:
        text += [f"process {usual}: {here}", f"process {others[0]}: {there}"]
    if len(different) > _MOST_LINES:
        text.append(f"and in {len(different) - _MOST_LINES} more lines")
    return "\n".join(text)
