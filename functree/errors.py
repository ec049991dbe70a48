"""Problems found in a tree or a layout ─► one exception whose text lists them all."""

import difflib
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Problem(NamedTuple):
    """One thing that is wrong, and what to do about it.

    Attributes:
        path: the leaf's path (an `ft.Path`), or `None` where no single leaf is at fault.
        shape: the leaf's shape, or `None`.
        what: what stands there, for a person: `f32[1001, 4096]  "hidden embed"`.
        why: what is wrong with it.
        remedy: what to write instead; may be empty.

    Examples:
        >>> Problem(None, None, "rule hiden→model", "no leaf has this axis", "").why
        'no leaf has this axis'
    """

    path: tuple[object, ...] | None
    shape: tuple[int, ...] | None
    what: str
    why: str
    remedy: str = ""


class FunctreeError(Exception):
    """Whatever functree refuses. `.problems` has one record for each thing at fault.

    Args:
        headline: the first line of the text.
        problems: the records, listed below the headline; without any, the headline is the only one.

    Examples:
        >>> ft.plan({"w": jnp.ones((3, 4))}, ft.P("data"), {"data": 2}, check=False).problems[0].why
        'dimension 0 has size 3; data=2 needs a multiple of 2'
    """

    problems: tuple[Problem, ...]

    def __init__(self, headline: str, problems: Iterable[Problem] = ()):
        problems = tuple(problems)
        super().__init__(_text(headline, problems) if problems else headline)
        self.problems = problems or (Problem(None, None, "", headline),)


class AxesError(FunctreeError):
    """An annotation and a leaf do not fit, or an annotation cannot be read.

    Examples:
        >>> ft.Axes("not an identifier")
        Traceback (most recent call last):
            ...
        functree.errors.AxesError: 'not an identifier' is not an axis name: names are Python identifiers...
    """


class RuleError(FunctreeError):
    """A layout that cannot mean anything, found when it is constructed.

    Examples:
        >>> ft.AxisRules({"hidden": ("model", "model")})
        Traceback (most recent call last):
            ...
        functree.errors.RuleError: rule hidden→(model, model): mesh axis `model` stands twice...
    """


class ShardingError(FunctreeError, ValueError):
    """A tree that cannot be laid out as asked; lists every leaf at fault.

    Examples:
        >>> ft.plan(jnp.ones((3, 4)), ft.P("data"), {"data": 2})
        Traceback (most recent call last):
            ...
        functree.errors.ShardingError: 1 leaf cannot be laid out on mesh (data=2)...
    """


class StateError(FunctreeError):
    """A piece of state that is unknown, of another model, or of the wrong shape or dtype.

    Examples:
        >>> issubclass(ft.StateError, ft.FunctreeError)
        True
    """


MAX_PATHS = 6  # of leaves that share one problem; the others are counted, and all are in `.problems`
MAX_GROUPS = 40


def _text(headline: str, problems: Sequence[Problem]) -> str:
    """The headline, one paragraph for each group of leaves with the same problems, and the remedies."""
    leaves: dict[tuple[str, str], dict[str, None]] = {}
    for p in problems:
        path = "" if p.path is None else str(p.path) or "(the array)"
        leaves.setdefault((path, p.what), {})[p.why] = None
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (path, what), whys in leaves.items():
        groups.setdefault((what, tuple(whys)), []).append(path)
    lines = [headline]
    for (what, whys), paths in list(groups.items())[:MAX_GROUPS]:
        lines += ["", "  " + "   ".join(filter(None, (_some(paths), what)))]
        lines += ["      " + line for why in whys for line in why.splitlines()]
    if len(groups) > MAX_GROUPS:
        lines += ["", f"  and {len(groups) - MAX_GROUPS} more kinds of problem, all in `.problems`"]
    remedies = list(dict.fromkeys(p.remedy for p in problems if p.remedy))
    if remedies:
        lines += ["", "Try: " + "\n     ".join(remedies[:MAX_PATHS])]
    return "\n".join(lines)


def _some(paths: Sequence[str]) -> str:
    named = list(dict.fromkeys(path for path in paths if path))
    rest = len(named) - MAX_PATHS
    return ", ".join(named[:MAX_PATHS]) + (f" and {rest} more" if rest > 0 else "")


def count(number: int, noun: str) -> str:
    """`1 leaf`, `2 leaves`."""
    plural = noun[:-1] + "ves" if noun.endswith("f") else noun + "s"
    return f"{number} {noun if number == 1 else plural}"


def near_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that is one edit or one swap of neighbours away, for names of four letters and more.

    One that begins with the other is another name (`head`, `heads`), not a typo.

    >>> near_name("hiden", ["embed", "hidden"]), near_name("head", ["heads"])
    ('hidden', None)
    """
    for other in known:
        short, long = sorted((name, other), key=len)
        if len(short) >= 4 and not long.startswith(short) and _one_edit(short, long):
            return other
    return None


def _one_edit(short: str, long: str) -> bool:
    if len(long) - len(short) > 1 or short == long:
        return False
    i = next((i for i, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    if len(short) < len(long):
        return short[i:] == long[i + 1 :]
    swapped = short[:i] + short[i : i + 2][::-1] + short[i + 2 :]
    return short[i + 1 :] == long[i + 1 :] or swapped == long


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """`; did you mean "hidden"?` for the nearest known name, or nothing.

    >>> did_you_mean("hiden", ["embed", "hidden"])
    '; did you mean `hidden`?'
    """
    near = difflib.get_close_matches(str(name), [str(k) for k in known], n=1, cutoff=0.6)
    return f"; did you mean `{near[0]}`?" if near else ""
