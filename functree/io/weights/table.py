"""`names_of` finds each array's name in a table that maps patterns of paths to tensor names."""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from functree.errors import FunctreeValueError, Problem, count
from functree.labels.leaves import Leaf
from functree.tree.globs import captured, glob_pattern, match_text
from functree.tree.paths import Path, tokens

Table = Mapping[str, str]

_NUMBER = re.compile(r"\{([^{}]*)\}")
# An expression in braces, or a wildcard. Inside braces, `*` multiplies.
_SLOT = re.compile(rf"{_NUMBER.pattern}|(\.?)\*\*?")
_NAME = re.compile(r"[A-Za-z_]\w*")
_VARIABLE = re.compile(r"\{([A-Za-z_]\w*)\}")
# Names for indices of an array's leading dimensions, unless the pattern uses them for numbers.
_PLACES = ("layer", "expert")


# The text of a name


class Part(NamedTuple):
    """A range of the equal parts into which one dimension of a tensor is divided.

    Attributes:
        first: the index of the first part in the range.
        stop: the index after the last part in the range.
        of: the total number of parts.
    """

    first: int
    stop: int
    of: int


WHOLE = Part(0, 1, 1)
_PART = re.compile(r"\[(\d+)(?::(\d+))?/(\d+)\]$")
_ORDER = re.compile(r"\.(?:T|transpose\((\d+(?:, *\d+)*)\))$")


class TensorName(NamedTuple):
    """The name of a tensor in a table, such as `layers.{layer}.qkv.weight[0/3].T`.

    Attributes:
        name: the tensor's name in the files, which may contain `{layer}` and `{expert}`.
        part: the part of the tensor.
        order: the indices of the tensor's dimensions, in the array's order. An empty tuple
            reverses the dimensions, and None keeps their order.
    """

    name: str
    part: Part = WHOLE
    order: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, text: str) -> "TensorName":
        """Parse a name from a table.

        Examples:
            >>> from functree.io.weights.table import TensorName
            >>> TensorName.parse("qkv.weight[0:2/4].T")
            TensorName(name='qkv.weight', part=Part(first=0, stop=2, of=4), order=())
            >>> TensorName.parse("w.transpose(2, 0, 1)").order
            (2, 0, 1)
        """
        name, order, part = text, None, WHOLE
        if found := _ORDER.search(name):
            order = tuple(map(int, found[1].split(","))) if found[1] else ()
            name = name[: found.start()]
        if found := _PART.search(name):
            first, of = int(found[1]), int(found[3])
            part = Part(first, int(found[2]) if found[2] else first + 1, of)
            name = name[: found.start()]
        return cls(name, part, order)

    @property
    def places(self) -> list[str]:
        """Which of `layer` and `expert` the expressions in the name contain, in this order."""
        used = _NAME.findall(" ".join(_NUMBER.findall(self.name)))
        return [place for place in _PLACES if place in used]

    def tensors(self, shape: Sequence[int]) -> list[str]:
        """Return the names of the tensors that hold an array of this shape."""
        names: list[str] = []
        places = self.places
        for index in np.ndindex(*shape[: len(places)]):
            numbers = dict(zip(places, index, strict=True))
            names.append(_NUMBER.sub(partial(_filled, numbers=numbers), self.name))
        return names


# Index arithmetic

_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _filled(place: re.Match[str], numbers: Mapping[str, int]) -> str:
    """Compute an expression in braces: integer arithmetic with `+`, `-`, `*`, `//` and `%`.

    If an expression cannot be computed, only the known names are replaced, and the braces are kept.
    No tensor has such a name.
    """
    expression = _NAME.sub(lambda name: str(numbers.get(name[0], name[0])), place[1])
    try:
        return str(_computed(ast.parse(expression.strip(), mode="eval").body))
    except (ZeroDivisionError, SyntaxError, ValueError):
        return f"{{{expression}}}"


def _computed(node: ast.expr) -> int:
    match node:
        case ast.Constant(int() as number):
            return number
        case ast.BinOp(left, operation, right) if type(operation) in _OPERATIONS:
            return _OPERATIONS[type(operation)](_computed(left), _computed(right))
    raise ValueError(ast.unparse(node))


# The rows


class Named(NamedTuple):
    """The name of an array in a table, with the row that gives the name.

    Attributes:
        text: the name, with suffixes such as `.T`.
        name: the parsed name.
        row: the name in the row, with wildcards.
    """

    text: str
    name: TensorName
    row: str


class _Row(NamedTuple):
    """A row of a table.

    Attributes:
        pattern: the pattern as written in the table.
        name: the name in the row.
        glob: the pattern with `*` for each number.
        numbers: for each wildcard of `glob`, the name of the number that it replaces, or an empty
            string if `pattern` contains the wildcard.
    """

    pattern: str
    name: str
    glob: str
    numbers: Sequence[str]

    @classmethod
    def of(cls, pattern: str, name: str) -> "_Row":
        """Build a row.

        Raises:
            RuleError: if the pattern is not a valid glob.
        """
        glob, numbers = "", list[str]()
        for part in tokens(pattern):
            number = _VARIABLE.fullmatch(part)
            glob = f"{glob}.{'*' if number else part}".removeprefix(".")
            groups = glob_pattern(glob).groups
            numbers += [number[1] if number else ""] * (groups - len(numbers))
        return cls(pattern, name, glob, numbers)

    def problem(self, why: str, remedy: str) -> Problem:
        """Make a `Problem` about the row."""
        return Problem(None, None, f'"{self.pattern}": "{self.name}"', why, remedy)

    def problems(self) -> Iterator[Problem]:
        """Yield the row's problems that do not depend on the tree."""
        theirs = sum(found[1] is None for found in _SLOT.finditer(self.name))
        ours = self.numbers.count("")
        if ours != theirs:
            why = f"the pattern has {ours} `*`, but the name has {theirs}"
            remedy = (
                "write as many `*` in the name as in the pattern: each `*` stands for the same "
                "text in both"
            )
            yield self.problem(why, remedy)
        part = TensorName.parse(self.name).part
        if not part.first < part.stop <= part.of:
            why = f"the range is empty, or exceeds the {part.of} parts, which are numbered from 0"
            remedy = "write `[0/3]` for the first of 3 parts, or `[0:2/4]` for the first two of 4"
            yield self.problem(why, remedy)

    def name_at(self, path: str) -> str | None:
        """Return the name for the `match_text` of a path, or None if the pattern does not match."""
        found = glob_pattern(self.glob).fullmatch(path)
        if found is None:
            return None
        wildcards: list[str] = []
        numbers: dict[str, int] = {}
        for number, text in zip(self.numbers, captured(found), strict=True):
            if not number:
                wildcards.append(text)
            elif text.isdigit():
                numbers[number] = int(text)
            else:
                return None
        rest = iter(wildcards)

        def fill(slot: re.Match[str]) -> str:
            if slot[1] is not None:
                return _filled(slot, numbers)
            # If `**` matches nothing, the dot before it is dropped too.
            text = next(rest)
            return slot[2] + text if text else ""

        return _SLOT.sub(fill, self.name).removeprefix(".")


def refusal(failure: str, problems: Sequence[Problem]) -> FunctreeValueError:
    """Build one error that lists all problems."""
    return FunctreeValueError(f"{failure}: {count(len(problems), 'problem')}", problems)


def names_of(
    leaves: Sequence[Leaf], table: Table, failure: str
) -> tuple[dict[Path, Named], list[Problem]]:
    """Find the name of each array from the first pattern that matches its path.

    Returns:
        The names by path, and a problem for each row that names no array.

    Raises:
        RuleError: if a pattern is not a glob.
        FunctreeValueError: if a name and its pattern have different numbers of wildcards.
        FunctreeValueError: if the range of parts in a name is invalid.
    """
    rows = [_Row.of(pattern, name) for pattern, name in table.items()]
    if problems := [problem for row in rows for problem in row.problems()]:
        raise refusal(failure, problems)
    named: dict[Path, Named] = {}
    used: set[str] = set()
    for leaf in leaves:
        path = match_text(leaf.path)
        for row in rows:
            text = row.name_at(path)
            if text is not None:
                named[leaf.path] = Named(text, TensorName.parse(text), row.name)
                used.add(row.pattern)
                break
    for row in rows:
        if row.pattern not in used:
            why = "matches no array, or only arrays that earlier patterns match"
            problems.append(row.problem(why, "correct or remove the pattern, or move it up"))
    return named, problems
