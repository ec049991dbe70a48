"""The text of a compiled program ─► its `Hlo`: the instructions, indexed in one pass and read when they are asked for.

The text is that of `compiled.as_text()`, in the language of XLA's compilers for CPUs, GPUs and TPUs. In such a text the
names of instructions are unique.
"""

import math
import re
from sys import intern
from typing import NamedTuple

# An instruction, or the head of a computation. A tuple type has commas, spaces and comments (`/*index=5*/`) in it, and
# layouts with parentheses, but nothing like `) word(`.
_LINE = re.compile(
    r"^(?: +(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)|(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{)$", re.M
)
_NAME = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_COMPUTATIONS = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations|called_computations)"
    r"=(\{[^}]*\}|%?[\w.\-]+)"
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
    number = re.search(r"\d+", dtype)
    return int(number[0]) if number is not None else 8 * (dtype == "pred")


class Instruction:
    """One instruction.

    Attributes:
        name: its name.
        opcode: what it does: `all-gather`, `fusion`, `while`.
        computation: the name of the computation that it is in.
        type: the text of the type of its result.
    """

    # What begins with `_` but `_rest` is read when it is first asked for: walks ask again, and most are never asked.
    __slots__ = ("_arrays", "_computations", "_operands", "_rest", "computation", "name", "opcode", "type")

    def __init__(self, name: str, opcode: str, computation: str, type_: str, rest: str):
        self.name: str = name
        self.opcode: str = opcode
        self.computation: str = computation
        self.type: str = type_
        self._rest: str = rest

    @property
    def arrays(self) -> list[ArrayType]:
        """The arrays of its result, those of nested tuples in order."""
        try:
            return self._arrays
        except AttributeError:
            found = _ARRAY.findall(self.type)
            self._arrays = [ArrayType(dtype, tuple(map(int, filter(None, shape.split(","))))) for dtype, shape in found]
            return self._arrays

    @property
    def argument(self) -> str:
        """The text in its parentheses: the number of a `parameter`, the value of a `constant`."""
        return self._rest.partition(")")[0]

    @property
    def operands(self) -> list[str]:
        """The names of its operands."""
        try:
            return self._operands
        except AttributeError:
            self._operands = _NAME.findall(self.argument)
            return self._operands

    @property
    def computations(self) -> list[str]:
        """The names of the computations that it calls: those of a fusion, the branches of a conditional."""
        try:
            return self._computations
        except AttributeError:
            found = _COMPUTATIONS.findall(_METADATA.sub("", self._rest))
            self._computations = [name for text in found for name in re.findall(r"[\w.\-]+", text)]
            return self._computations

    def attribute(self, name: str) -> str | None:
        """The text of an attribute, such as `dimensions`; None if it does not have it."""
        text, wanted = self._rest, f", {name}="
        start, metadata = text.find(wanted), text.find(", metadata={")
        if 0 <= metadata < start:
            text = _METADATA.sub("", text)
            start = text.find(wanted)
        if start < 0:
            return None
        start += len(wanted)
        depth, quoted = 0, False
        for end in range(start, len(text)):
            letter = text[end]
            if letter == '"' and text[end - 1] != "\\":
                quoted = not quoted
            elif not quoted and letter in "{[(":
                depth += 1
            elif not quoted and letter in "}])":
                depth -= 1
            elif not quoted and not depth and text.startswith(", ", end) and not text.startswith(_INSIDE, end):
                return text[start:end]
        return text[start:]

    def mentions(self, text: str) -> bool:
        """Whether a text is anywhere in its operands, attributes and metadata, which is faster than to read them."""
        return text in self._rest

    def called(self, name: str) -> str:
        """The name of a computation that it calls: `body` or `condition` of a `while`."""
        return (self.attribute(name) or "").removeprefix("%")

    def metadata(self, name: str) -> str | None:
        """The text of an entry of its metadata: `op_name`, `stack_frame_id`; None if it does not have it."""
        known = _METADATA.search(self._rest)
        found = known and re.search(rf'(?:^|\s){name}=(?:"((?:[^"\\]|\\.)*)"|(\S+))', known[1])
        if not found:
            return None
        return found[1] if found[1] is not None else found[2]

    def __repr__(self) -> str:
        return f"<{self.opcode} {self.name}>"


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
        self.by_opcode: dict[str, list[Instruction]] = {}
        self.roots: dict[str, Instruction] = {}
        self.entry: str = ""
        current, own = "", list[Instruction]()
        for root, name, type_, opcode, rest, entry, computation in _LINE.findall(text):
            if computation:
                current, own = computation, self.computations.setdefault(computation, [])
                self.entry = computation if entry else self.entry
                continue
            one = self.instructions[name] = Instruction(name, intern(opcode), current, type_, rest)
            own.append(one)
            self.by_opcode.setdefault(opcode, []).append(one)
            if root:
                self.roots[current] = one

    @property
    def parameters(self) -> list[Instruction]:
        """The parameters of the whole program in their order, without tokens: those of ordered effects come first."""
        found = [one for one in self.computations[self.entry] if one.opcode == "parameter"]
        return [one for one in sorted(found, key=lambda one: int(one.argument)) if not one.arrays[0].is_token]
