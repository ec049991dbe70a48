"""Candidates ─► in words, why each is where it is in a ranking."""

from collections.abc import Iterator, Sequence

from functree.errors import ProblemGroup, count, listed, problem_groups
from functree.explorer.candidate import Candidate, mesh_text


def why_worse(one: Candidate, best: Candidate) -> str:
    """Why a candidate has a worse score than the best one; empty for the best one."""
    if not one.score or not best.score or one is best:
        return ""
    compute = (one.compute_seconds or 0) - (best.compute_seconds or 0)
    wire = (one.wire_seconds or 0) - (best.wire_seconds or 0)
    parts: list[str] = []
    # What is less than a hundredth of the score explains nothing.
    if compute > one.score / 100:
        parts.append(f"{seconds_text(compute)} more to compute")
    if wire > one.score / 100:
        most = next(iter(one.wire_bytes), None)
        over = "" if most is None else f", most over {axes_text(most)}"
        parts.append(f"{seconds_text(wire)} more on the links{over}")
    text = f"{one.score / best.score:.2f} × the best"
    if parts:
        text += f": {' and '.join(parts)}"
    return text


def tie_text(best: Sequence[Candidate]) -> str:
    """The sentence about a tie; empty if there is none."""
    if len(best) < 2:
        return ""
    named = listed([name_of(one) for one in best], 6)
    return (
        f"a tie: {named} are within 15 % of the best score, which does not tell which of them is "
        "faster: measure these"
    )


def name_of(one: Candidate) -> str:
    """What a candidate is called in sentences: `fsdp on data=8`."""
    return f"{one.layout_name} on {mesh_text(one.mesh)}"


def problem_lines(one: Candidate) -> Iterator[str]:
    """Why a candidate cannot run: a line for each problem and all arrays that have it; of many the
    first few."""
    groups = problem_groups(one.problems)
    for group in groups[:MOST]:
        yield _group_text(group)
    more = len(groups) - MOST
    if more > 0:
        yield f"and {count(more, 'more problem')} (`row.problems`)"


MOST = 3
"""The number of problems of a candidate that are printed."""


def _group_text(group: ProblemGroup) -> str:
    """Arrays and what is wrong with them, in one line."""
    text, subject = "; ".join(group.whys), group.subject
    if subject:
        text = f"{subject}: {text}"
    return " ".join(text.split())


def axes_text(axes: str | tuple[str, ...]) -> str:
    """Mesh axes in words: `data`, `data and model`."""
    if isinstance(axes, str):
        return axes
    return " and ".join(axes)


def seconds_text(seconds: float) -> str:
    """A part of a score as text, with two digits.

    >>> seconds_text(2.345), seconds_text(0.0123), seconds_text(0.0000456)
    ('2.3 s', '12 ms', '46 µs')
    """
    if seconds >= 1:
        return f"{seconds:.2g} s" if seconds < 100 else f"{seconds:.0f} s"
    if seconds >= 1e-3:
        return _digits(seconds * 1e3, "ms")
    return _digits(seconds * 1e6, "µs")


def _digits(number: float, unit: str) -> str:
    if number >= 10:
        return f"{number:.0f} {unit}"
    return f"{number:.1f} {unit}"
