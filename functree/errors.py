"""Problems found in a tree or a layout ─► one exception whose text lists them all."""

import difflib
import inspect
import warnings
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import NamedTuple


class Problem(NamedTuple):
    """One thing that is wrong, and what to do about it.

    Attributes:
        path: the leaf's path (an `ft.Path`), or `None` if the problem is not about a single leaf.
        shape: the leaf's shape, or `None`.
        what: a text for the leaf or rule that the problem is about: `f32[1001, 4096]  "hidden
            embed"`.
        why: what is wrong with it.
        remedy: what to change; may be empty.

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
"""What a user's function, or a method of a user's class such as `__eq__`, raises when it cannot do
what is asked of it. Not all that Python has: an interrupt, or a full memory, is not theirs, and an
exception of the user's own says what its author meant."""


def error_text(error: BaseException) -> str:
    """The class and the first line of an error, for a message about it."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}".removesuffix(": ")


class FunctreeError(Exception):
    """The base class of all errors of functree. `.problems` has one record for each thing that is
    wrong.

    Args:
        headline: the first line of the text.
        problems: the records, listed below the headline. If there are none, `.problems` has one
            record, made from the headline.

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
    """The category of all warnings of functree: of what runs, and costs more than it looks.

    `warnings.simplefilter("error", ft.FunctreeWarning)` makes them errors.

    Examples:
        >>> issubclass(ft.FunctreeWarning, UserWarning)
        True
    """


def listed(texts: Sequence[str], most: int = 4) -> str:
    """The first few texts, and the number of the others: `a, b and 3 more`."""
    rest = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {rest} more" if rest > 0 else "")


def warn(text: str) -> None:
    """Warn at the line of the user's call: at the first frame that is not in functree or JAX."""
    warnings.warn(text, FunctreeWarning, stacklevel=users_frame()[0])


def users_frame() -> tuple[int, FrameType | None]:
    """The first frame that is not in functree or JAX, and its distance from the caller; None if
    there is none."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _SKIPPED:
        level, frame = level + 1, frame.f_back
    return level, frame


_SKIPPED = ("functree", "jax", "contextlib")


class FunctreeTypeError(FunctreeError, TypeError):
    """A parameter was given a value of a wrong type."""


class FunctreeValueError(FunctreeError, ValueError):
    """A parameter was given a value of a right type that is not one of those it takes."""


class AxesError(FunctreeError, ValueError):
    """An annotation does not fit its leaf, or an annotation cannot be read.

    Examples:
        >>> ft.Axes("not an identifier")
        Traceback (most recent call last):
            ...
        functree.errors.AxesError: 'not an identifier' is not an axis name...
    """


class RuleError(FunctreeError, ValueError):
    """A layout, filter or path is invalid for every tree. Raised when it is created.

    Examples:
        >>> ft.AxisRules({"hidden": ("model", "model")})
        Traceback (most recent call last):
            ...
        functree.errors.RuleError: rule hidden→(model, model): mesh axis `model`
        is named twice...
    """


class ShardingError(FunctreeError, ValueError):
    """A tree cannot be laid out as asked. The error lists every leaf that has a problem.

    Examples:
        >>> ft.plan(jnp.ones((3, 4)), ft.P("data"), {"data": 2})
        Traceback (most recent call last):
            ...
        functree.errors.ShardingError: 1 leaf cannot be laid out on mesh
        (data=2)...
    """


class StateError(FunctreeError):
    """A piece of state is unknown, belongs to another model, or has the wrong shape or dtype.

    Examples:
        >>> issubclass(ft.StateError, ft.FunctreeError)
        True
    """


class CheckpointError(FunctreeError):
    """A checkpoint cannot be written or read, or does not fit the tree that it is restored into.

    It is also an `OSError` if the files are at fault: they are missing, damaged or already there,
    or cannot be read or written. An error of the operating system is its `__cause__`.

    Examples:
        >>> ft.restore(folder, {})
        Traceback (most recent call last):
            ...
        functree.errors.CheckpointFileError: ... is not a checkpoint: it has no
        functree.json
        >>> ft.save(folder / "w", {"w": jnp.ones(3)})
        >>> ft.restore(folder / "w", {"v": jnp.ones(3)})
        Traceback (most recent call last):
            ...
        functree.errors.CheckpointError: 2 leaves cannot be restored from ...
    """


class CheckpointFileError(CheckpointError, OSError):
    """A checkpoint cannot be written or read because of its files."""


# A large model has thousands of leaves, and one mistake often affects all of them. The text names
# only the first few; `.problems` has them all.
MAX_PATHS = 6  # named for each group of leaves with the same problems; the other leaves are counted
MAX_GROUPS = 40


class ProblemGroup(NamedTuple):
    """Leaves with the same problems.

    Attributes:
        paths: the texts of their paths, empty for what is no leaf.
        what: what they are.
        whys: what is wrong with them.
    """

    paths: Sequence[str]
    what: str
    whys: Sequence[str]

    @property
    def named(self) -> str:
        """The first few paths, and the number of the others; empty for what is no leaf."""
        return listed(list(dict.fromkeys(filter(None, self.paths))), MAX_PATHS)

    @property
    def subject(self) -> str:
        """The paths, and what is there."""
        return "   ".join(filter(None, (self.named, self.what)))


def problem_groups(problems: Iterable[Problem]) -> list[ProblemGroup]:
    """The problems, told once for all leaves that have the same ones."""
    # The dicts are ordered sets: one leaf may have the same problem from two layouts, and it is
    # listed once.
    leaves: dict[tuple[str, str], dict[str, None]] = {}
    for p in problems:
        leaves.setdefault((path_text(p.path), p.what), {})[p.why] = None
    # A leaf with two problems is one entry with both, so leaves are grouped by all of their
    # problems together.
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (path, what), whys in leaves.items():
        groups.setdefault((what, tuple(whys)), []).append(path)
    return [ProblemGroup(paths, what, whys) for (what, whys), paths in groups.items()]


def _text(headline: str, problems: Sequence[Problem]) -> str:
    """The headline, one paragraph for each group of leaves with the same problems, and the
    remedies."""
    groups, lines = problem_groups(problems), [headline]
    for group in groups[:MAX_GROUPS]:
        lines += ["", f"  {group.subject}"]
        for text in group.whys:
            lines += [f"      {line}" for line in text.splitlines()]
    if len(groups) > MAX_GROUPS:
        lines += ["", f"  and {len(groups) - MAX_GROUPS} more kinds of problem, all in `.problems`"]
    remedies = list(dict.fromkeys(line for p in problems for line in p.remedy.splitlines()))
    if remedies:
        lines += ["", "Try: " + "\n     ".join(remedies[:MAX_PATHS])]
    return "\n".join(lines)


def path_text(path: tuple[object, ...] | None) -> str:
    """A path as it is printed; empty for a problem that is not about a single leaf."""
    if path is None:
        return ""
    # The path of a tree that is a single array is empty, and so is its text.
    return str(path) or "(the array)"


def count(number: int, noun: str) -> str:
    """A number with its noun: `1 leaf`, `2 leaves`."""
    plural = noun[:-1] + "ves" if noun.endswith("f") else noun + "s"
    return f"{number} {noun if number == 1 else plural}"


def near_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that differs by one edit or one swap of neighbouring letters, for names of
    four letters or more.

    If one of the two names begins with the other (`head`, `heads`), they are different names and
    not a typo.

    >>> near_name("hiden", ["embed", "hidden"]), near_name("head", ["heads"])
    ('hidden', None)
    """
    for other in known:
        short, long = sorted((name, other), key=len)
        if len(short) >= 4 and not long.startswith(short) and _one_edit(short, long):
            return other
    return None


def longer_form(name: str, known: Iterable[str]) -> str | None:
    """The known name of which a name is a longer form, or which is one of it: one of the two begins
    with the other or is its plural, and both have four letters or more.

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
        # `category` and `categories`.
        if long.startswith(short) or (short[-1] == "y" and long == f"{short[:-1]}ies"):
            return other
    return None


def _one_edit(short: str, long: str) -> bool:
    """Whether one inserted or changed letter, or one swap of neighbours, makes the longer name of
    the shorter one."""
    if len(long) - len(short) > 1 or short == long:
        return False
    # The first letter that differs: an edit can only be there.
    i = next((i for i, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    if len(short) < len(long):
        return short[i:] == long[i + 1 :]
    swapped = short[:i] + short[i : i + 2][::-1] + short[i + 2 :]
    return short[i + 1 :] == long[i + 1 :] or swapped == long


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """The text `; did you mean ...?` with the nearest known name, or an empty text if no name is
    near.

    >>> did_you_mean("hiden", ["embed", "hidden"])
    '; did you mean `hidden`?'
    """
    near = nearest(name, known, 1)
    return f"; did you mean `{near[0]}`?" if near else ""


def nearest(name: object, known: Iterable[object], most: int, *, cutoff: float = 0.6) -> list[str]:
    """The known names that are near, the nearest first.

    Args:
        name: the name.
        known: the known ones.
        most: how many of them at most.
        cutoff: how near they have to be; 1 is the same.
    """
    return difflib.get_close_matches(str(name), [str(k) for k in known], n=most, cutoff=cutoff)
