"""Python source, line by line ─► a function with a file name, which tracebacks and profiles show.

`TakeCode` is the body of a function from a tree to its arrays, and `BuildCode` that of one from
arrays to a tree. The kinds of nodes write into them, node by node.
"""

import itertools
import linecache
import weakref
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

from functree.tree.arrays import AnyArray, Tree
from functree.tree.paths import Key
from functree.tree.skeleton.static_value import StaticValue, equal

_NUMBERS = itertools.count()

Refusal = tuple[Hashable, ...]
"""What `take` returns for a tree of another structure: the number of the check that refused it, and
what it found.

All functions check the nodes of a tree in the same order. So a function whose own trees have what
was found there refuses the tree, if it does, by a later check.
"""


class Code:
    """The body of a function that is being generated, and the values that it uses.

    Args:
        outer: the code that this may become a part of; their names are different.
    """

    def __init__(self, outer: "Code | None" = None) -> None:
        self.lines: list[str] = []
        self.values: dict[str, Any] = {}
        self._names: Iterator[int] = itertools.count() if outer is None else outer._names

    def name(self) -> str:
        """A new name."""
        return f"x{next(self._names)}"

    def value(self, value: object) -> str:
        """Add a value that the code uses, as a global variable of the function; returns its
        name."""
        name = self.name()
        self.values[name] = value
        return name

    def assign(self, expression: str) -> str:
        """Add an assignment to a new name; returns the name."""
        name = self.name()
        self.lines.append(f"{name} = {expression}")
        return name

    def add(self, inner: "Code") -> None:
        """Add code that was written with this one as its outer code."""
        self.lines += inner.lines
        self.values |= inner.values

    def function(self, head: str, what: str) -> Callable[..., Any]:
        """The finished function.

        Args:
            head: its name and parameters: `take(tree)`.
            what: a text for its file name, which tracebacks show: `Model`.
        """
        source = "\n    ".join((f"def {head}:", *self.lines)) + "\n"
        name = head.partition("(")[0]
        file = f"<functree: {name} {what} {next(_NUMBERS)}>"
        exec(compile(source, file, "exec"), self.values)
        function = self.values[name]
        # Tracebacks look up the lines of a file here. None in the place of the modification time:
        # the entry is valid although there is no file on disk. The entry is removed together with
        # the function.
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        weakref.finalize(function, linecache.cache.pop, file, None)
        return function


class TakeCode(Code):
    """The body of a function from a tree to its arrays. For a tree of another structure it returns
    a `Refusal`."""

    def __init__(self, outer: Code | None = None) -> None:
        super().__init__(outer)
        self.root: str = self.name()  # the name of the tree
        self.arrays: list[str] = []  # the expressions of the arrays, in JAX's order
        self.size: int = 0  # the number of arrays so far
        self.dicts: list[str] = []  # the names of nodes that are dicts

    @abstractmethod
    def visit(self, sample: Tree, at: str) -> None:
        """Write the code for a node.

        Args:
            sample: a node with the structure that is expected.
            at: the expression of the node in the generated code.
        """

    def array(self, at: str) -> None:
        """Add an array, by its expression."""
        self.arrays.append(at)
        self.size += 1

    def several(self, at: str, number: int) -> None:
        """Add arrays, by the expression of a list or tuple of them."""
        self.arrays.append(f"*{at}")
        self.size += number

    def include(self, inner: "TakeCode", at: str) -> None:
        """Add the code for a part that is at the expression `at`."""
        self.lines.append(f"{inner.root} = {at}")
        self.add(inner)
        self.arrays += inner.arrays
        self.size += inner.size
        self.dicts += inner.dicts

    def refuse_if(self, condition: str, found: str) -> None:
        """Refuse trees for which a condition is true; `found` is an expression of what differs,
        which has a hash."""
        self.lines.append(f"if {condition}: return {next(self._names)}, {found}")

    def leaf(self, value: object, at: str) -> None:
        """Refuse trees in which the expression `at` is another leaf; not for arrays."""
        differs = self.value(StaticValue(value).differs)
        self._refuse_others(value, at, f"{differs}({{found}})")

    def static(self, value: object, at: str) -> None:
        """Refuse trees in which the expression `at` has other static data of a node."""
        self._refuse_others(value, at, f"not {self.value(equal)}({{known}}, {{found}})")

    def _refuse_others(self, value: object, at: str, differs: str) -> None:
        """Refuse trees in which the expression `at` has another value, as the expression `differs`
        of both tells."""
        known, found = self.value(value), self.assign(at)
        # Most static values are the same object in every tree, and `is` takes no call.
        differs = f"{found} is not {known} and {differs.format(known=known, found=found)}"
        self.refuse_if(differs, f"{self.value(StaticValue)}({found})")

    def type_of(self, sample: Tree, node: str) -> None:
        """Refuse trees in which a node has another class."""
        self.refuse_if(f"type({node}) is not {self.value(type(sample))}", f"type({node})")

    def children(self, samples: Iterable[Tree], at: str) -> None:
        """Write the code for the children of a node; the expression `at` is a list or tuple of
        them."""
        samples = list(samples)
        # Checked before they are unpacked, because unpacking another number of values raises.
        self.refuse_if(f"len({at}) != {len(samples)}", f"len({at})")
        names = [self.name() for _ in samples]
        if names:
            # The comma makes a single name unpack too.
            self.lines.append(f"{', '.join(names)}, = {at}")
        for child, name in zip(samples, names, strict=True):
            self.visit(child, name)

    def finished(self, what: str) -> Callable[[Tree], list[AnyArray] | Refusal]:
        """The finished function, with the class of the tree in its file name."""
        lines = [f"    {line}" for line in (*self.lines, f"return [{', '.join(self.arrays)}]")]
        # A module without one of its fields, or a dict with other keys, raises KeyError: it has
        # another structure.
        found = f"{self.value(_keys)}({self.value(tuple(self.dicts))}, locals())"
        self.lines[:] = [
            "try:",
            *lines,
            "except KeyError:",
            f"    return {next(self._names)}, {found}",
        ]
        return self.function(f"take({self.root})", what)


def _keys(dicts: Iterable[str], found: Mapping[str, Iterable[Key]]) -> Hashable:
    """The keys of the dicts that a function has come to, among its local variables, for a
    `Refusal`."""
    return tuple(frozenset(found[name]) for name in dicts if name in found)


class BuildCode(Code):
    """The body of a function from arrays to a tree."""

    def __init__(self) -> None:
        super().__init__()
        self.size: int = 0  # the number of arrays so far

    @abstractmethod
    def visit(self, sample: Tree) -> str:
        """Write the code that builds a node like the sample; returns the expression of the node."""

    def array(self) -> str:
        """The expression of the next array. Arrays are visited in JAX's order."""
        self.size += 1
        return f"arrays[{self.size - 1}]"

    def several(self, number: int) -> str:
        """The expression of the next arrays, as a list or tuple."""
        self.size += number
        return f"arrays[{self.size - number}:{self.size}]"

    def items(self, samples: Iterable[Tree]) -> str:
        """The expressions of some nodes, each with a comma after it, so that one of them is a tuple
        too."""
        return "".join([f"{self.visit(sample)}, " for sample in samples])
