"""A table from patterns of paths to names in files ─► for each array the names of its tensors."""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from functree.argument_checks import shown
from functree.errors import FunctreeValueError, Problem, count
from functree.labels.leaf import Leaf
from functree.tree.globs import captured, capturing_pattern, match_text, meant_glob
from functree.tree.paths import Path, tokens

Table = Mapping[str, str | Callable[..., str]]

_NUMBER = re.compile(r"\{([^{}]*)\}")
# Either of these. In the braces `*` multiplies.
_SLOT = re.compile(rf"{_NUMBER.pattern}|(\.?)\*\*?")
_NAME = re.compile(r"[A-Za-z_]\w*")
_VARIABLE = re.compile(r"\{([A-Za-z_]\w*)\}")
# Numbers along leading dimensions of an array, unless the pattern has a number of this name.
_PLACES = ("layer", "expert")


# The text of a name


class Part(NamedTuple):
    """Some of the equal parts of a dimension of a tensor, side by side.

    Attributes:
        first: the first of them.
        stop: the one after the last.
        of: how many parts there are.
    """

    first: int
    stop: int
    of: int


WHOLE = Part(0, 1, 1)
_PART = re.compile(r"\[(\d+)(?::(\d+))?/(\d+)\]$")
_ORDER = re.compile(r"\.(?:T|transpose\((\d+(?:, *\d+)*)\))$")


class TensorName(NamedTuple):
    """What a table says about a tensor: `layers.{layer}.qkv.weight[0/3].T`.

    Attributes:
        name: its name, in which `{layer}` and `{expert}` may be.
        part: the part of it that is meant.
        order: the dimensions of the tensor in the order of the array's; all reversed if empty; None
            if they are as they are.
    """

    name: str
    part: Part = WHOLE
    order: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, text: str) -> "TensorName":
        """What a text says.

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
        """The leading dimensions that have a tensor for each of their elements."""
        used = _NAME.findall(" ".join(_NUMBER.findall(self.name)))
        return [place for place in _PLACES if place in used]

    def tensors(self, shape: Sequence[int]) -> list[str]:
        """The names of the tensors that have an array of a shape."""
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
    """What an expression in braces computes; if it needs other numbers than these, the rest of it
    in braces.

    Raises:
        SyntaxError, ValueError, ZeroDivisionError: it is no arithmetic.
    """
    expression = _NAME.sub(lambda name: str(numbers.get(name[0], name[0])), place[1])
    if _NAME.search(expression):
        return f"{{{expression}}}"
    return str(_computed(ast.parse(expression.strip(), mode="eval").body))


def _computed(node: ast.expr) -> int:
    match node:
        case ast.Constant(int() as number):
            return number
        case ast.BinOp(left, operation, right) if type(operation) in _OPERATIONS:
            return _OPERATIONS[type(operation)](_computed(left), _computed(right))
    raise ValueError(ast.unparse(node))


# The rows


class Named(NamedTuple):
    """The name of an array, and the row of the table that gives it.

    Attributes:
        text: the name, with `.T` and such after it.
        name: what this says.
        pattern: the pattern of the row.
        row: the name in the row, in which wildcards may be; that of the array for a function.
    """

    text: str
    name: TensorName
    pattern: str
    row: str


class _Row(NamedTuple):
    """A row of a table.

    Attributes:
        pattern: the pattern as it is written.
        name: the name in the row, or a function that makes it.
        glob: the pattern with `*` for each number.
        numbers: for each wildcard of this the name of the number; empty for one that is `*` or `**`
            in the pattern too.
    """

    pattern: str
    name: str | Callable[..., str]
    glob: str
    numbers: Sequence[str]

    @classmethod
    def of(cls, pattern: str, name: str | Callable[..., str]) -> "_Row":
        """A row. Raises RuleError if the pattern is no glob."""
        if "{" not in pattern:
            return cls(pattern, name, pattern, [""] * capturing_pattern(pattern).groups)
        glob, numbers = "", list[str]()
        for part in tokens(pattern):
            number = _VARIABLE.fullmatch(part)
            glob = f"{glob}.{'*' if number else part}".removeprefix(".")
            groups = capturing_pattern(glob).groups
            numbers += [number[1] if number else ""] * (groups - len(numbers))
        return cls(pattern, name, glob, numbers)

    @property
    def text(self) -> str:
        """The row as it is written."""
        if isinstance(self.name, str):
            return row_text(self.pattern, self.name)
        return f'"{self.pattern}": {getattr(self.name, "__name__", shown(self.name))}'

    def problems(self) -> Iterator[Problem]:
        """Why the row fits no tree. What a function returns is known for an array only."""
        if not isinstance(self.name, str):
            return
        theirs = sum(found[1] is None for found in _SLOT.finditer(self.name))
        ours = self.numbers.count("")
        if ours != theirs:
            why = f"the pattern has {ours} of `*`, and the name has {theirs}"
            remedy = "write as many in a name as in its pattern: each stands for the same text"
            yield Problem(None, None, self.text, why, remedy)
        yield from self.misread(self.name)

    def misread(self, text: object) -> Iterator[Problem]:
        """Why the text of a name says nothing."""
        if not isinstance(text, str):
            yield Problem(None, None, self.text, f"returns {shown(text)}, and not a name")
            return
        part = TensorName.parse(text).part
        if not part.first < part.stop <= part.of:
            why = f"of {part.of} parts there are 0 to {part.of - 1}, and none is asked for"
            remedy = "`[0/3]` is the first of 3 parts, and `[0:2/4]` the first two of 4"
            yield Problem(None, None, self.text, why, remedy)
        numbers = dict.fromkeys([*self.numbers, *_PLACES], 1)
        for place in _NUMBER.finditer(text):
            try:
                is_number = not _NUMBER.match(_filled(place, numbers))
            except (SyntaxError, ValueError, ZeroDivisionError):
                is_number = False
            if not is_number:
                why = f"`{place[0]}` is no number of the pattern, `{{layer}}` or `{{expert}}`"
                remedy = 'name the numbers, as in `"blocks.{i}.{j}.w": "layers.{2*i+j}.w"`'
                yield Problem(None, None, self.text, why, remedy)

    def name_at(self, path: str) -> str | None:
        """The name for a path, as `match_text` has it; None if the pattern does not match it."""
        found = capturing_pattern(self.glob).fullmatch(path)
        if found is None:
            return None
        wildcards: list[str] = []
        numbers: dict[str, int] = {}
        values: list[str | int] = []
        for number, text in zip(self.numbers, captured(found), strict=True):
            if not number:
                wildcards.append(text)
            elif text.isdigit():
                numbers[number] = int(text)
            else:
                return None
            values.append(int(text) if number else text)
        if not isinstance(self.name, str):
            return self.name(*values)
        rest = iter(wildcards)

        def fill(slot: re.Match[str]) -> str:
            if slot[1] is not None:
                return _filled(slot, numbers)
            # `**` may stand for no part at all, and then it has no dot either.
            text = next(rest)
            return slot[2] + text if text else ""

        return _SLOT.sub(fill, self.name).removeprefix(".")


def refusal(failure: str, problems: Sequence[Problem]) -> FunctreeValueError:
    """The error for all that does not fit."""
    return FunctreeValueError(f"{failure}: {count(len(problems), 'problem')}", problems)


def row_text(pattern: str, name: str) -> str:
    """A row of a table as it is written."""
    return f'"{pattern}": "{name}"'


def names_of(
    leaves: Sequence[Leaf], table: Table, failure: str
) -> tuple[dict[Path, Named], list[Problem]]:
    """The name of each array that has one, by the first pattern that matches its path; and a
    problem for each row by which none is named.

    Raises:
        RuleError: a pattern is no glob.
        FunctreeValueError: a name has another number of wildcards than its pattern, or asks for a
            part or a number that there cannot be; the error lists all.
    """
    rows = [_Row.of(pattern, name) for pattern, name in table.items()]
    if problems := [problem for row in rows for problem in row.problems()]:
        raise refusal(failure, problems)
    named: dict[Path, Named] = {}
    matching: set[str] = set()
    for leaf in leaves:
        path = match_text(leaf.path)
        for row in rows:
            text = row.name_at(path)
            if text is None:
                continue
            matching.add(row.pattern)
            if leaf.path in named:
                continue
            written = row.name
            if not isinstance(written, str):
                problems += row.misread(text)
                written = text = str(text)
            named[leaf.path] = Named(text, TensorName.parse(text), row.pattern, written)
    if problems:
        raise refusal(failure, problems)
    return named, list(_unused(rows, leaves, matching, {name.pattern for name in named.values()}))


def _unused(
    rows: Sequence[_Row], leaves: Sequence[Leaf], matching: set[str], used: set[str]
) -> Iterator[Problem]:
    """A problem for each row by which no array is named."""
    for row in rows:
        if row.pattern not in matching:
            near = meant_glob(row.glob, [leaf.path for leaf in leaves])
            yield Problem(None, None, row.text, f"matches no array{near}")
        elif row.pattern not in used:
            why = "matches only arrays that an earlier pattern names"
            yield Problem(None, None, row.text, why, "write the narrower pattern first")
