"""The text of a compiled program ─► `Hlo`: its instructions, indexed in one pass.

What is in an instruction is read when it is asked for: most of them are never asked. The text is
that of `compiled.as_text()`, in the language of XLA's compilers for CPUs, GPUs and TPUs. In such a
text the names of instructions are unique.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from sys import intern
from typing import NamedTuple

# An instruction, or the head of a computation. A tuple type has commas, spaces and comments
# (`/*index=5*/`) in it, and layouts with parentheses, but nothing like `) word(`. Both are one
# expression, since to search the whole text at once takes a third less than line by line; what is
# repeated gives nothing back, and letters are those of ASCII, which is a third less again.
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
# The name of an operation in it may look like attributes.
_METADATA = re.compile(r', metadata=\{((?:[^"{}]++|"(?:[^"\\]++|\\.)*+")*+)\}')


# `replica_groups=mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'x'}` is one attribute.
_INSIDE = ", device_ids="


class ArrayType(NamedTuple):
    """The type of an array on one device.

    Attributes:
        dtype: as XLA writes it: `f32`, `bf16`, `pred`.
        shape: the shape.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def is_token(self) -> bool:
        """Whether it is no array, but what orders effects."""
        return self.dtype == "token"

    @property
    def bytes(self) -> int:
        """The number of bytes, without padding."""
        return math.ceil(math.prod(self.shape) * _bits(self.dtype) / 8)


def _bits(dtype: str) -> int:
    """The bits of one element. Tokens and the like have none."""
    number = re.search(r"\d+", dtype)  # the first: `f8e4m3fn` has 8 bits
    if number is not None:
        return int(number[0])
    return 8 if dtype == "pred" else 0


@dataclass(slots=True, eq=False, repr=False)
class Instruction:
    """One instruction.

    Attributes:
        name: its name.
        opcode: what it does: `all-gather`, `fusion`, `while`.
        computation: the name of the computation that it is in.
        type: the text of the type of its result.
    """

    name: str
    opcode: str
    computation: str
    type: str
    _rest: str
    # What is read of `_rest` when it is first asked for is None before: walks ask again, and most
    # are never asked.
    _arrays: list[ArrayType] | None = field(default=None, init=False)
    _computations: list[str] | None = field(default=None, init=False)
    _operands: list[str] | None = field(default=None, init=False)

    @property
    def arrays(self) -> list[ArrayType]:
        """The arrays of its result, those of nested tuples in order."""
        if self._arrays is None:
            self._arrays = []
            for dtype, sizes in _ARRAY.findall(self.type):
                # Without the empty text that a scalar, `f32[]`, has in the place of its sizes.
                shape = tuple(map(int, filter(None, sizes.split(","))))
                self._arrays.append(ArrayType(dtype, shape))
        return self._arrays

    @property
    def argument(self) -> str:
        """The text in its parentheses: the number of a `parameter`, the value of a `constant`."""
        return self._rest.partition(")")[0]

    @property
    def operands(self) -> list[str]:
        """The names of its operands."""
        if self._operands is None:
            self._operands = _NAME.findall(self._rest.partition(")")[0])
        return self._operands

    @property
    def computations(self) -> list[str]:
        """The names of the computations that it calls: of a fusion, or the branches of a choice."""
        if self._computations is None:
            self._computations = []
            for text in _COMPUTATIONS.findall(_METADATA.sub("", self._rest)):
                self._computations += re.findall(r"[\w.\-]+", text)  # of one, or of `{%a, %b}`
        return self._computations

    def attribute(self, name: str) -> str | None:
        """The text of an attribute, such as `dimensions`; None if it does not have it."""
        text, wanted = self._rest, f", {name}="
        start, metadata = text.find(wanted), text.find(", metadata={")
        # The name of an operation in the metadata may have what looks like the attribute. It is
        # removed only if it is in front, since that takes twice as long as all else here.
        if 0 <= metadata < start:
            text = _METADATA.sub("", text)
            start = text.find(wanted)
        if start < 0:
            return None
        start += len(wanted)
        return text[start : _end_of_value(text, start)]

    def mentions(self, text: str) -> bool:
        """Whether a text is anywhere in its operands, attributes and metadata.

        This is faster than to read them.
        """
        return text in self._rest

    @property
    def is_differentiated(self) -> bool:
        """Whether it is differentiated, or a part of a gradient: JAX names these `jvp(...)` and
        `transpose(jvp(...))`."""
        return "jvp(" in self._rest

    def called(self, name: str) -> str:
        """The name of a computation that it calls: `body` or `condition` of a `while`."""
        return (self.attribute(name) or "").removeprefix("%")

    def metadata(self, name: str) -> str | None:
        """The text of an entry of its metadata, such as `op_name`; None if it does not have it."""
        metadata = _METADATA.search(self._rest)
        if metadata is None:
            return None
        found = _entry(name).search(metadata[1])
        if found is None:
            return None
        quoted, plain = found.groups()
        if quoted is None:
            return plain
        return quoted

    def __repr__(self) -> str:
        return f"<{self.opcode} {self.name}>"


@cache
def _entry(name: str) -> re.Pattern[str]:
    """What an entry of the metadata looks like."""
    return re.compile(rf'(?:^|\s){name}=(?:"((?:[^"\\]|\\.)*)"|(\S+))')


def _end_of_value(text: str, start: int) -> int:
    """Where the value of an attribute ends: before the next one, or at the end of the text."""
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
    """A compiled program.

    Args:
        text: the text of the program.

    Attributes:
        instructions: by name.
        computations: the instructions of each computation, in order, by its name.
        by_opcode: the instructions of each opcode.
        roots: the instruction that is the result of each computation.
        entry: the name of the computation of the whole program.
    """

    def __init__(self, text: str):
        self.instructions: dict[str, Instruction] = {}
        self.computations: dict[str, list[Instruction]] = {}
        by_opcode = defaultdict[str, list[Instruction]](list)
        self.by_opcode: Mapping[str, list[Instruction]] = by_opcode
        self.roots: dict[str, Instruction] = {}
        self.entry: str = ""
        current, own = "", list[Instruction]()  # the computation whose lines are read
        for root, name, type_, opcode, rest, entry, computation in _LINE.findall(text):
            if computation:
                current, own = computation, self.computations.setdefault(computation, [])
                if entry:
                    self.entry = computation
                continue
            one = self.instructions[name] = Instruction(name, intern(opcode), current, type_, rest)
            own.append(one)
            by_opcode[opcode].append(one)
            if root:
                self.roots[current] = one

    @property
    def parameters(self) -> list[Instruction]:
        """The parameters of the whole program in their order, without tokens."""
        found: list[Instruction] = []
        for one in self.computations[self.entry]:
            # Tokens are the parameters of ordered effects, and no arguments of the function.
            if one.opcode == "parameter" and not one.arrays[0].is_token:
                found.append(one)
        return sorted(found, key=lambda one: int(one.argument))
