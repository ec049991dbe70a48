"""What each process found by itself ─► the same in all of them, or one error in all of them that says which differs."""

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from functree import errors
from functree.errors import FunctreeError, Problem, listed, users_frame

T = TypeVar("T")

Facts = Mapping[str, Sequence[str]]
"""What must be the same in all processes: for each name, lines of text."""


def agreed(what: str, local: Callable[[], tuple[T, Callable[[], Facts]]]) -> T:
    """The result of a function of each process, once all processes have been found to say the same of it.

    All processes call this at the same place of their programs. With a single process it only calls the function.

    Args:
        what: what was to be done, for the message: `the arrays cannot be placed`.
        local: returns the result, and a function that returns the facts about it.

    Raises:
        FunctreeError: the facts differ; or the function raised an error in one of the processes: then the others raise
            one that names it, of the same class if that is one of functree.
    """
    if jax.process_count() == 1:
        return local()[0]
    with _telling_errors():
        result, facts = local()
        said = {"facts": {name: list(lines) for name, lines in facts().items()}}
    texts = _exchanged(json.dumps(said))
    if texts is not None:
        reports = list(map(json.loads, texts))
        _raise_failures(what, reports)
        _raise_differences(what, [report["facts"] for report in reports])
    return result


def wait_in_all(what: str, is_done: Callable[[], bool]) -> None:
    """Wait until something is done in all processes. An error in one of them ends the waiting of all.

    All processes call this at the same place of their programs.

    Args:
        what: what was to be done, for the message.
        is_done: whether it is done in this process, after waiting for a moment.

    Raises:
        FunctreeError: `is_done` raised an error in one of the processes, as in `agreed`.
    """
    done = [False]
    while not all(done):
        mine = agreed(what, lambda: (is_done(), dict))
        done = [text == "True" for text in texts_of_all(str(mine))]


class _telling_errors:
    """An error that is raised inside is told to the other processes, which wait to hear from this one."""

    def __enter__(self) -> None:
        """Nothing is to be done."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            _exchanged(json.dumps({"class": type(error).__name__, "error": str(error)}))


def named(processes: Sequence[int]) -> str:
    """Some processes in messages: `process 1`, `processes 1, 2`."""
    texts = list(map(str, processes))
    return f"process {texts[0]}" if len(texts) == 1 else f"processes {listed(texts)}"


def chosen(name: str) -> str:
    """What the first process says; the others give a text that does not matter, of any length."""
    if jax.process_count() == 1:
        return name
    texts = _exchanged(name)
    return name if texts is None else texts[0]


def _exchanged(text: str) -> list[str] | None:
    """The texts of all processes, in their order; None if all are the same."""
    digests = _gathered(np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8))
    return None if (digests == digests[0]).all() else texts_of_all(text)


def texts_of_all(text: str) -> list[str]:
    """What each process says, in their order."""
    if jax.process_count() == 1:
        return [text]
    mine = np.frombuffer(text.encode(), np.uint8)
    sizes = _gathered(np.array(mine.size, np.int32))
    padded = np.zeros(1 << int(sizes.max()).bit_length(), np.uint8)  # of few lengths: each is compiled once
    padded[: mine.size] = mine
    return [row[:size].tobytes().decode() for row, size in zip(_gathered(padded), sizes, strict=True)]


def _gathered(value: np.ndarray) -> np.ndarray:
    """The values of all processes, behind a leading dimension of the processes."""
    said = threading.Timer(LONG, _LOG.warning, [_waiting_text()])
    said.daemon = True
    said.start()
    try:
        return np.asarray(multihost_utils.process_allgather(value))
    finally:
        said.cancel()


LONG = 60.0
"""After how many seconds of waiting for the others a process says where it waits."""

_LOG = logging.getLogger("functree")


def _waiting_text() -> str:
    who, (_, frame) = f"process {jax.process_index()} of {jax.process_count()}", users_frame()
    where = "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"
    return f"{who} has waited for the others for {LONG:g} s{where}: does each of them come there?"


def _raise_failures(what: str, reports: Sequence[Mapping[str, Any]]) -> None:
    """Raise in this process, which has no error of its own, if some of the others have one."""
    failed = {process: report for process, report in enumerate(reports) if "error" in report}
    if failed:
        report = next(iter(failed.values()))
        who = named(list(failed))
        kind = getattr(errors, report["class"], FunctreeError)
        raise kind(f"{what}: {who} of {len(reports)} failed with {report['class']}:\n{report['error']}")


def _raise_differences(what: str, facts: Sequence[Facts]) -> None:
    """Raise for the names whose lines are not the same in all processes."""
    problems = []
    for name in dict.fromkeys(name for one in facts for name in one):
        lines = [list(one.get(name, ["(nothing)"])) for one in facts]
        usual = max(lines, key=lines.count)  # the first of those that most processes have
        others = [process for process, one in enumerate(lines) if one != usual]
        if others:
            problems.append(Problem(None, None, name, _difference(lines, lines.index(usual), others), _REMEDY))
    if problems:
        raise FunctreeError(f"{what}: the {len(facts)} processes differ", problems)


_REMEDY = "all processes have to run the same program, with the same configuration and the same seeds"
_MOST_LINES = 4


def _difference(lines: Sequence[list[str]], usual: int, others: Sequence[int]) -> str:
    """Which processes differ from most of them, and in which lines."""
    who = f"{named(others)} {'differs' if len(others) == 1 else 'differ'}"
    pairs = zip_longest(lines[usual], lines[others[0]], fillvalue="(nothing)")
    different = [(i, pair) for i, pair in enumerate(pairs, 1) if pair[0] != pair[1]]
    where = f", first in line {different[0][0]} of {len(lines[usual])}" if len(lines[usual]) > 1 else ""
    text = [f"{who} from process {usual}{where}:"]
    for _, (here, there) in different[:_MOST_LINES]:
        text += [f"process {usual}: {here}", f"process {others[0]}: {there}"]
    if len(different) > _MOST_LINES:
        text.append(f"and in {len(different) - _MOST_LINES} more lines")
    return "\n".join(text)
