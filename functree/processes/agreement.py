"""An `Agreement` makes a block of code succeed in all processes, or fail in all of them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, zip_longest
from typing import Self

import jax

from functree.errors import FunctreeError, Problem, count
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
"""Lines of text by name, which must be the same in all processes."""


class Agreement:
    """A context manager whose block raises an error in all processes or in none.

    An error in one process is also raised in the others, which would otherwise wait for that
    process forever. Facts that the block compares must be the same in all processes:

        with Agreement("the state cannot be saved") as agreement:
            plan = make_plan()  # if one process raises an error here, all of them raise it
            agreement.compare(lambda: {"plan": facts_of(plan)})  # all raise if the plans differ

    All processes must enter the block at the same point of their programs. They communicate once,
    at the end of the block. Blocks can be nested: an error that an inner block raised in all
    processes is not sent again. With a single process, an `Agreement` does nothing.

    Args:
        failure: the beginning of the message, such as `the arrays cannot be placed`.
        name: the function that compares; by default the function that the user's program called.
        remedy: an additional remedy for facts that differ.

    Raises:
        FunctreeError: if the facts differ at the end of the block.
        FunctreeError: if another process is at a different comparison.
        FunctreeError: if another process raised an error. If functree defines the class of that
            error, this error has the same class.
    """

    def __init__(self, failure: str, name: str | None = None, remedy: str = ""):
        self._failure, self._name = failure, name
        self._remedy = " ".join(filter(None, (remedy, _REMEDY)))
        self._facts: dict[str, list[str]] = {}

    def compare(self, facts: Callable[[], Facts]) -> None:
        """Compare facts between processes at the end of the block.

        Args:
            facts: a function that returns the facts. With a single process it is not called, since
                reading arrays or lowering a program may take a long time.
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
            # Python raises the original error in this process, whatever the others report.
            with suppress(FunctreeError):
                exchanged(place, {"class": type(error).__name__, "error": str(error)})
            known_to_all(error)
        # A KeyboardInterrupt ends this process, and JAX then ends the others.


def wait_in_all(failure: str, is_done: Callable[[], bool]) -> None:
    """Wait until `is_done` returns True in all processes. An error in one process ends the wait.

    All processes must call this function at the same point of their programs.

    Args:
        failure: the beginning of the message.
        is_done: a function that waits briefly, then returns whether this process is done.

    Raises:
        FunctreeError: if `is_done` raises an error in one of the processes.
    """
    answers = ["False"]
    while "False" in answers:
        with Agreement(failure):
            mine = is_done()
        answers = texts_of_all(str(mine))


def _raise_differences(place: Place, told: Sequence[Told], remedy: str) -> None:
    """Raise FunctreeError if facts differ between processes."""
    # Calls from different program lines are not a mistake by themselves. If facts differ too, one
    # process probably skipped a call.
    facts = [{**report["facts"], "line": [where.line]} for report, where in told]
    problems: list[Problem] = []
    for name in dict.fromkeys(chain.from_iterable(facts)):
        lines = [one.get(name, ["(nothing)"]) for one in facts]
        # The most common lines are assumed to be correct. If several are equally common, the lines
        # of the first such process are.
        usual = max(lines, key=lines.count)
        others = [process for process, texts in enumerate(lines) if texts != usual]
        if others:
            text = _difference(lines, lines.index(usual), others)
            problems.append(Problem(None, None, name, text, remedy))
    if any(problem.what != "line" for problem in problems):
        headline = f"{place.failure}: the {len(told)} processes differ in {place}"
        raise known_to_all(FunctreeError(headline, problems))


_REMEDY = "run the same program in all processes, with the same configuration and the same seeds"
_MOST_LINES = 4


def _difference(lines: Sequence[list[str]], usual: int, others: Sequence[int]) -> str:
    """List the processes that differ from the majority, and lines in which the first one differs.

    Args:
        lines: the lines of each process.
        usual: a process of the majority.
        others: the processes that differ from the majority.
    """
    different: list[str] = []
    for here, there in zip_longest(lines[usual], lines[others[0]], fillvalue="(nothing)"):
        if here != there:
            different += [
                f"process {usual}: {_excerpt(here, there)}\n"
                f"process {others[0]}: {_excerpt(there, here)}"
            ]
    verb = "differs" if len(others) == 1 else "differ"
    text = [f"{processes_text(others)} {verb} from process {usual}:", *different[:_MOST_LINES]]
    if len(different) > _MOST_LINES:
        text.append(f"and in {count(len(different) - _MOST_LINES, 'more line')}")
    return "\n".join(text)


_WIDTH = 300


def _excerpt(line: str, other: str) -> str:
    """Shorten a line to the text around the first character that differs from the other line.

    A program may contain very long lines.
    """
    if len(line) <= _WIDTH:
        return line
    same = 0
    for left, right in zip(line, other, strict=False):
        if left != right:
            break
        same += 1
    begin = max(0, same - _WIDTH // 3)
    return f"...{line[begin : begin + _WIDTH]}..."
