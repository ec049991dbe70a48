"""One exception lists all problems of a call: problems ─► an error and its text."""

import difflib
import inspect
import warnings
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import NamedTuple


class Problem(NamedTuple):
    """A mistake in a leaf, a rule or an argument, with its remedy.

    Attributes:
        path: the leaf's path (an `ft.Path`), or `None` if the problem does not concern a single
            leaf.
        shape: the leaf's shape, or `None`.
        what: a description of the leaf, rule or argument, such as
            `f32[1001, 4096]  "hidden embed"`.
        why: the mistake.
        remedy: the change that fixes it; may be empty.

    Examples:
        >>> Problem(
        ...     None, None, "rule hiden→model", "no leaf has this axis", ""
        ... ).why
        'no leaf has this axis'
    """

    path: tuple[object, ...] | None
    shape: tuple[int, ...] | None
    what: str
    why: str
    remedy: str = ""


USERS_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, BufferError, LookupError),
    *(NameError, RuntimeError, StopIteration, TypeError, ValueError),
)
"""Exceptions that user code, such as a function or an `__eq__` method, may raise when it fails.

Other exceptions propagate: `KeyboardInterrupt`, `MemoryError`, and classes that users derive
directly from `Exception`.
"""


def error_text(error: BaseException) -> str:
    """Format an error as its class and the first line of its text, for a message."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}".removesuffix(": ")


class FunctreeError(Exception):
    """The base class of all errors that functree raises.

    Its attribute `problems` holds one record for each mistake.

    Args:
        headline: the first line of the text.
        problems: the records, which the text lists below the headline. If there are none,
            `.problems` holds a single record made from the headline.

    Examples:
        >>> ft.plan(
        ...     {"w": jnp.ones((3, 4))}, ft.P("data"), {"data": 2}, check=False
        ... ).problems[0].why
        'dimension 0 has size 3; data=2 needs a multiple of 2'
    """

    problems: tuple[Problem, ...]

    def __init__(self, headline: str, problems: Iterable[Problem] = ()):
        problems = tuple(problems)
        super().__init__(_text(headline, problems) if problems else headline)
        self.problems = problems or (Problem(None, None, "", headline),)


class FunctreeWarning(UserWarning):
    """The category of all functree warnings.

    They concern code that runs, but probably not as intended.
    `warnings.simplefilter("error", ft.FunctreeWarning)` turns these warnings into errors.

    Examples:
        >>> issubclass(ft.FunctreeWarning, UserWarning)
        True
    """


def listed(texts: Sequence[str], most: int = 4) -> str:
    """Join the first few texts, and count the rest: `a, b and 3 more`."""
    rest = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {rest} more" if rest > 0 else "")


def warn(text: str) -> None:
    """Warn at the line of the user's call, which is the first frame outside functree and JAX."""
    warnings.warn(text, FunctreeWarning, stacklevel=users_frame()[0])


def users_frame() -> tuple[int, FrameType | None]:
    """Find the first frame outside functree and JAX.

    Returns:
        The frame's distance from the caller, and the frame, or None if there is no such frame.
    """
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _SKIPPED:
        level, frame = level + 1, frame.f_back
    return level, frame


_SKIPPED = ("functree", "jax", "contextlib")


class FunctreeTypeError(FunctreeError, TypeError):
    """An error for an argument with a wrong type."""


class FunctreeValueError(FunctreeError, ValueError):
    """An error for an argument with a valid type and an invalid value."""


class FunctreeArgumentError(FunctreeTypeError, FunctreeValueError):
    """An error for arguments that their parameters do not accept, because of type or value."""


class AxesError(FunctreeError, ValueError):
    """An error for axis names that cannot be parsed, or an annotation that does not fit its leaf.

    Examples:
        >>> ft.Axes("not an identifier")
        Traceback (most recent call last):
            ...
        functree.errors.AxesError: 'not an identifier' is not an axis name...
    """


class RuleError(FunctreeError, ValueError):
    """An error for a layout, filter or path that is invalid or does not match its tree.

    Most mistakes raise this error when the object is created.

    Examples:
        >>> ft.AxisRules({"hidden": ("model", "model")})
        Traceback (most recent call last):
            ...
        functree.errors.RuleError: rule hidden→(model, model): mesh axis `model`
        is named twice...
    """


class ShardingError(FunctreeError, ValueError):
    """An error for a tree that cannot be laid out as requested, or for an unsuitable mesh.

    The error lists every leaf with a problem.

    Examples:
        >>> ft.plan(jnp.ones((3, 4)), ft.P("data"), {"data": 2})
        Traceback (most recent call last):
            ...
        functree.errors.ShardingError: 1 leaf cannot be laid out on mesh
        (data=2)...
    """


class StateError(FunctreeError):
    """An error for a piece of state that is unknown, or has the wrong shape or dtype.

    The usual cause is a state that belongs to a different model.

    Examples:
        >>> issubclass(ft.StateError, ft.FunctreeError)
        True
    """


class CheckpointError(FunctreeError):
    """An error for a checkpoint that cannot be written, read, or restored into a tree.

    The error is also an `OSError` if its cause is a file that is missing or damaged, already
    exists, or cannot be read or written. Its `__cause__` is the operating system's error, if there
    is one.

    Examples:
        >>> ft.restore(folder, {})
        Traceback (most recent call last):
            ...
        functree.errors.CheckpointFileError: ... is not a checkpoint: it contains no
        functree.json
        >>> ft.save(folder / "w", {"w": jnp.ones(3)})
        >>> ft.restore(folder / "w", {"v": jnp.ones(3)})
        Traceback (most recent call last):
            ...
        functree.errors.CheckpointError: 2 leaves cannot be restored from ...
    """


class CheckpointFileError(CheckpointError, OSError):
    """An error for a checkpoint that cannot be written or read because of its files."""


# A large model has thousands of leaves, and one mistake often affects all of them. The text names
# only the first few, and `.problems` holds all of them.
MAX_PATHS = 6  # paths named in each group of leaves with the same problems
MAX_GROUPS = 40


class ProblemGroup(NamedTuple):
    """Leaves with the same problems.

    Attributes:
        paths: the text of each leaf's path; an empty string for a problem without a leaf.
        what: the description that the leaves share.
        whys: the mistakes.
    """

    paths: Sequence[str]
    what: str
    whys: Sequence[str]

    @property
    def named(self) -> str:
        """The first few paths and a count of the rest; empty if there is no leaf."""
        return listed(list(dict.fromkeys(filter(None, self.paths))), MAX_PATHS)

    @property
    def subject(self) -> str:
        """The paths and the description of their leaves."""
        return "   ".join(filter(None, (self.named, self.what)))


def problem_groups(problems: Iterable[Problem]) -> list[ProblemGroup]:
    """Group the leaves that have the same problems."""
    # The inner dicts are ordered sets: if two layouts report the same problem for one leaf, it is
    # listed once.
    leaves: dict[tuple[str, str], dict[str, None]] = {}
    for p in problems:
        leaves.setdefault((path_text(p.path), p.what), {})[p.why] = None
    # Leaves are grouped by all of their problems, so a leaf with two problems is in one group.
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (path, what), whys in leaves.items():
        groups.setdefault((what, tuple(whys)), []).append(path)
    return [ProblemGroup(paths, what, whys) for (what, whys), paths in groups.items()]


def _text(headline: str, problems: Sequence[Problem]) -> str:
    """Write the headline, a paragraph for each group of leaves, and the remedies."""
    groups, lines = problem_groups(problems), [headline]
    for group in groups[:MAX_GROUPS]:
        lines += ["", f"  {group.subject}"]
        for text in group.whys:
            lines += [f"      {line}" for line in text.splitlines()]
    if len(groups) > MAX_GROUPS:
        more = count(len(groups) - MAX_GROUPS, "more kind")
        lines += ["", f"  and {more} of problem: see `.problems`"]
    remedies = list(dict.fromkeys(line for p in problems for line in p.remedy.splitlines()))
    if remedies:
        lines += ["", "Try: " + "\n     ".join(remedies[:MAX_PATHS])]
    return "\n".join(lines)


def path_text(path: tuple[object, ...] | None) -> str:
    """Return the text of a path, or `""` for a problem that does not concern a single leaf."""
    if path is None:
        return ""
    # The path of a tree's root is empty, and so is its text.
    return str(path) or "(the root)"


def count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 leaf`, `2 leaves`."""
    plural = noun[:-1] + "ves" if noun.endswith("f") else noun + "s"
    return f"{number} {noun if number == 1 else plural}"


def near_name(name: str, known: Iterable[str]) -> str | None:
    """Find the known name that a misspelled name probably stands for.

    Both names have at least four letters. They differ by one inserted or changed letter, or by a
    swap of two neighboring letters. If one of the two names begins with the other (`head`,
    `heads`), they are treated as different names, not as a typo.

    >>> near_name("hiden", ["embed", "hidden"]), near_name("head", ["heads"])
    ('hidden', None)
    """
    for other in known:
        short, long = sorted((name, other), key=len)
        if len(short) >= 4 and not long.startswith(short) and _one_edit(short, long):
            return other
    return None


def longer_form(name: str, known: Iterable[str]) -> str | None:
    """Find the known name that is a longer or shorter form of a name.

    One of the two names begins with the other or is its plural. Both have at least four letters.

    >>> (
    ...     longer_form("head", ["embed", "heads"]),
    ...     longer_form("hidden_dim", ["hidden"]),
    ... )
    ('heads', 'hidden')
    """
    for other in known:
        short, long = sorted((name, other), key=len)
        if len(short) < 4 or short == long:
            continue
        # The second case is `category` and `categories`.
        if long.startswith(short) or (short[-1] == "y" and long == f"{short[:-1]}ies"):
            return other
    return None


def _one_edit(short: str, long: str) -> bool:
    """Return whether one edit turns the shorter name into the longer one.

    An edit inserts or changes a letter, or swaps two neighboring letters.
    """
    if len(long) - len(short) > 1 or short == long:
        return False
    # An edit can only be at the first letter that differs.
    i = next((i for i, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    if len(short) < len(long):
        return short[i:] == long[i + 1 :]
    swapped = short[:i] + short[i : i + 2][::-1] + short[i + 2 :]
    return short[i + 1 :] == long[i + 1 :] or swapped == long


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """Return `; did you mean ...?` with the nearest known name, or `""` if no name is near.

    >>> did_you_mean("hiden", ["embed", "hidden"])
    '; did you mean `hidden`?'
    """
    near = nearest(name, known, 1)
    return f"; did you mean `{near[0]}`?" if near else ""


def nearest(name: object, known: Iterable[object], most: int, *, cutoff: float = 0.6) -> list[str]:
    """List the known names that resemble a name, the nearest first.

    Args:
        name: the name to compare.
        known: the names to choose from.
        most: the maximum number of names in the result.
        cutoff: the minimum similarity, from 0 to 1, where 1 means equal.
    """
    # One part of a layout may know a name that another part lacks.
    others = [text for text in map(str, known) if text != str(name)]
    return difflib.get_close_matches(str(name), others, n=most, cutoff=cutoff)
