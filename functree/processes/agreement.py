"""Code that all processes run ─► it succeeds in all of them, or raises the same error in all."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Self

import jax

from functree.errors import FunctreeError, Problem
from functree.processes.exchange import (
    Place,
    Told,
    exchanged,
    is_known_to_all,
    known_to_all,
    processes_text,
    texts_of_all,
)

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
    end. One inside another is possible: what all have raised at the end of the inner one is not
    told again. With a single process it does nothing.

    Args:
        failure: the beginning of the message: `the arrays cannot be placed`.
        name: what compares; by default the function that the user's program has called.
        remedy: what else may be the matter, if what was compared differs.

    Raises:
        FunctreeError: at the end of the block, if what was compared differs, if another process
            compares something else, or if there was an error in it: of the same class as that error
            if it is one of functree.
    """

    def __init__(self, failure: str, name: str | None = None, remedy: str = ""):
        self._failure, self._name = failure, name
        self._remedy = " ".join(filter(None, (remedy, _REMEDY)))
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
        if jax.process_count() == 1 or is_known_to_all(error):
            return
        place = Place.next(self._failure, self._name)
        if error is None:
            told = exchanged(place, {"facts": self._facts})
            if told is not None:
                _raise_differences(place, told, self._remedy)
        elif isinstance(error, Exception):
            # In this process Python goes on to raise it after this, whatever the others tell.
            with suppress(FunctreeError):
                exchanged(place, {"class": type(error).__name__, "error": str(error)})
            known_to_all(error)
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


def _raise_differences(place: Place, told: Sequence[Told], remedy: str) -> None:
    """Raise for the names whose lines are not the same in all processes."""
    reports = [one.report for one in told]
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
            problems.append(Problem(None, None, name, text, remedy))
    if problems:
        lines = [[one.line] for one in told]
        others = [process for process, own in enumerate(lines) if own != lines[0]]
        if others:
            # No mistake by itself. But if they differ too, one is probably a call behind.
            text = _difference(lines, 0, others)
            problems.append(Problem(None, None, "line", text, remedy))
        headline = f"{place.failure}: the {len(reports)} processes differ in {place}"
        raise known_to_all(FunctreeError(headline, problems))


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
        begin = _first_difference(here, there)
        text += [
            f"process {usual}: {_excerpt(here, begin)}",
            f"process {others[0]}: {_excerpt(there, begin)}",
        ]
    if len(different) > _MOST_LINES:
        text.append(f"and in {len(different) - _MOST_LINES} more lines")
    return "\n".join(text)


def _first_difference(here: str, there: str) -> int:
    """The index of the first character that differs."""
    for index, (one, other) in enumerate(zip(here, there, strict=False)):
        if one != other:
            return index
    return min(len(here), len(there))


_WIDTH = 300


def _excerpt(line: str, index: int) -> str:
    """What is around an index of a line. In a program a constant is one line, however large."""
    if len(line) <= _WIDTH:
        return line
    begin = max(0, min(index - _WIDTH // 3, len(line) - _WIDTH))
    before = "..." if begin else ""
    after = "..." if begin + _WIDTH < len(line) else ""
    return f"{before}{line[begin : begin + _WIDTH]}{after}"
