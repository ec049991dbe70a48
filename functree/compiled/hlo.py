"""`Hlo` indexes the instructions in the text of a compiled program, in one pass.

An instruction's details are parsed on first use, since most are never used. The text comes from
`compiled.as_text()`, for CPUs, GPUs or TPUs. Instruction names are unique within a text.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from sys import intern
from typing import NamedTuple

# An instruction, or the head of a computation. A tuple type contains commas, spaces, comments
# (`/*index=5*/`) and layouts with parentheses, but nothing like `) word(`. One expression matches
# both instructions and heads, since one search of the text is faster than a search of each line.
# Possessive quantifiers and ASCII-only matching make the search faster still.
_LINE = re.compile(
    r"^(?: ++(ROOT )?+%?+([\w.\-]++) = (\(.*?\)|\S++) ([a-z][\w\-]*+)\((.*+)"
    r"|(ENTRY )?+%?+([\w.\-]++) \(.*\) -> .* \{)$",
    re.M | re.A,
)
_NAME = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_COMPUTATIONS = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation"
    r"|branch_computations|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
# An operation's name in the metadata may look like attributes.
_METADATA = re.compile(r', metadata=\{((?:[^"{}]++|"(?:[^"\\]++|\\.)*+")*+)\}')


# `replica_groups=mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'x'}` is one attribute.
_INSIDE = ", device_ids="


class ArrayType(NamedTuple):
    """The type of an array on one device.

    Attributes:
        dtype: the dtype as XLA writes it: `f32`, `bf16`, `pred`.
        shape: the shape on one device.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def is_token(self) -> bool:
        """Whether it is a token, which orders effects, and not an array."""
        return self.dtype == "token"

    @property
    def bytes(self) -> int:
        """The number of bytes, without padding."""
        return math.ceil(math.prod(self.shape) * _bits(self.dtype) / 8)


def _bits(dtype: str) -> int:
    """Return the number of bits in one element; 0 for types without elements, such as tokens."""
    number = re.search(r"\d+", dtype)  # the first: `f8e4m3fn` has 8 bits
    if number is not None:
        return int(number[0])
    return 8 if dtype == "pred" else 0


@lru_cache(maxsize=2048)  # the layers of a model have the same types
def _arrays(text: str) -> tuple[ArrayType, ...]:
    """Return the arrays in the text of a type."""
    arrays: list[ArrayType] = []
    for dtype, sizes in _ARRAY.findall(text):
        arrays.append(ArrayType(dtype, numbers(sizes)))
    return tuple(arrays)


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers in a text such as `2,4`; empty for the empty text of a scalar."""
    return tuple(map(int, filter(None, text.split(","))))


@dataclass(slots=True, eq=False, repr=False)
class Instruction:
    """An instruction of a compiled program.

    Attributes:
        name: its name.
        opcode: its operation: `all-gather`, `fusion`, `while`.
        computation: the name of the computation that contains it.
        type: the text of its result's type.
    """

    name: str
    opcode: str
    computation: str
    type: str
    _rest: str
    # Parsed from `_rest` on first use: walks read a few instructions often, and most instructions
    # never.
    _computations: list[str] | None = field(default=None, init=False)
    _operands: list[str] | None = field(default=None, init=False)

    @property
    def arrays(self) -> tuple[ArrayType, ...]:
        """The arrays of its result; nested tuples are flattened in order."""
        return _arrays(self.type)

    @property
    def argument(self) -> str:
        """The text in its parentheses: a `parameter`'s number, or a `constant`'s value."""
        return self._rest.partition(")")[0]

    @property
    def operands(self) -> list[str]:
        """The names of its operands."""
        if self._operands is None:
            self._operands = _NAME.findall(self._rest.partition(")")[0])
        return self._operands

    @property
    def computations(self) -> list[str]:
        """The names of the computations that it calls, such as a conditional's branches."""
        if self._computations is None:
            self._computations = []
            for text in _COMPUTATIONS.findall(_METADATA.sub("", self._rest)):
                self._computations += re.findall(r"[\w.\-]+", text)  # `%a` or `{%a, %b}`
        return self._computations

    def attribute(self, name: str) -> str | None:
        """Return the text of an attribute, such as `dimensions`; None if there is none."""
        text, wanted = self._rest, f", {name}="
        start, metadata = text.find(wanted), text.find(", metadata={")
        # An operation's name in the metadata may look like the attribute. The metadata is removed
        # only if it comes first, since removing it triples the time.
        if 0 <= metadata < start:
            text = _METADATA.sub("", text)
            start = text.find(wanted)
        if start < 0:
            return None
        start += len(wanted)
        return text[start : _end_of_value(text, start)]

    def mentions(self, text: str) -> bool:
        """Return whether a text occurs in its operands, attributes or metadata.

        This is faster than parsing them.
        """
        return text in self._rest

    @property
    def is_differentiated(self) -> bool:
        """Whether it is differentiated, or a part of a gradient.

        JAX puts `jvp(...)` or `transpose(jvp(...))` into the names of such operations.
        """
        return "jvp(" in self._rest

    def called(self, name: str) -> str:
        """Return the name of a computation that it calls, such as the `body` of a `while`."""
        return (self.attribute(name) or "").removeprefix("%")

    def metadata(self, name: str) -> str | None:
        """Return the text of a metadata entry, such as `op_name`; None if there is none."""
        start = self._rest.find(", metadata={")
        match = _entry(name).search(self._rest, start) if start >= 0 else None
        return None if match is None else match[1] or match[2]

    def __repr__(self) -> str:
        return f"<{self.opcode} {self.name}>"


@cache
def _entry(name: str) -> re.Pattern[str]:
    """Return the pattern of a metadata entry."""
    return re.compile(rf'[\s{{]{name}=(?:"((?:[^"\\]++|\\.)*+)"|([^\s}}]+))')


def _end_of_value(text: str, start: int) -> int:
    """Find the end of an attribute's value: the next attribute, or the end of the text."""
    depth, quoted = 0, False
    for end in range(start, len(text)):
        letter = text[end]
        if letter == '"' and text[end - 1] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif letter in "{[(":
            depth += 1
        elif letter in "}])":
            depth -= 1
        elif depth == 0 and text.startswith(", ", end) and not text.startswith(_INSIDE, end):
            return end
    return len(text)


class Hlo:
    """The instructions and computations of a compiled program.

    Args:
        text: the text of the program.

    Attributes:
        instructions: the instructions by name.
        computations: the instructions of each computation in order, by its name.
        by_opcode: the instructions with each opcode.
        roots: the instruction that returns each computation's result, by the computation's name.
        entry: the name of the entry computation.
    """

    def __init__(self, text: str):
        self.instructions: dict[str, Instruction] = {}
        self.computations: dict[str, list[Instruction]] = {}
        by_opcode = defaultdict[str, list[Instruction]](list)
        self.by_opcode: Mapping[str, list[Instruction]] = by_opcode
        self.roots: dict[str, Instruction] = {}
        self.entry: str = ""
        current, instructions = "", list[Instruction]()  # the computation that is being read
        for root, name, type_, opcode, rest, entry, computation in _LINE.findall(text):
            if computation:
                current, instructions = computation, self.computations.setdefault(computation, [])
                if entry:
                    self.entry = computation
                continue
            instruction = self.instructions[name] = Instruction(
                name, intern(opcode), current, type_, rest
            )
            instructions.append(instruction)
            by_opcode[opcode].append(instruction)
            if root:
                self.roots[current] = instruction

    @property
    def parameters(self) -> list[Instruction]:
        """The parameters of the program in order, without tokens."""
        parameters: list[Instruction] = []
        for instruction in self.computations[self.entry]:
            # Tokens belong to ordered effects, and are not arguments of the function.
            if instruction.opcode == "parameter" and not instruction.arrays[0].is_token:
                parameters.append(instruction)
        return sorted(parameters, key=lambda instruction: int(instruction.argument))
