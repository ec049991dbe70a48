"""The kinds of nodes that trees are made of: each tells its children, and writes the code that takes such nodes apart.

The code for a whole tree is one function, written node by node from a sample. It reads each array by one expression,
and compares in passing all that is static. It remembers nothing of the sample: what is changed in place is seen.
"""

import dataclasses
import functools
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import equinox as eqx
from jax.tree_util import default_registry, tree_flatten

from functree.tree.arrays import is_array
from functree.tree.interfaces import PackedTree, StateMapping
from functree.tree.paths import plain_key
from functree.tree.skeleton.code import Code
from functree.tree.skeleton.static_value import StaticValue


class TakeCode(Code):
    """The body of a function from a tree to its arrays, which returns None for a tree of another structure."""

    def __init__(self) -> None:
        super().__init__()
        self.arrays: list[str] = []

    def visit(self, sample: Any, at: str) -> None:
        """Write the code for a node that is found by the expression `at`."""
        kind_of(sample).take(self, sample, at)

    def refuse_if(self, condition: str) -> None:
        """Trees of which this holds have another structure."""
        self.lines.append(f"if {condition}: return None")

    def static(self, value: Any, at: str) -> None:
        """What stands at `at` has to be this value."""
        found = self.assign(at)
        self.refuse_if(f"{found} is not {self.value(value)} and {self.value(StaticValue(value).differs)}({found})")

    def node(self, sample: Any, at: str) -> str:
        """The name of a node, which has to be of the sample's class."""
        node = self.assign(at)
        self.refuse_if(f"type({node}) is not {self.value(type(sample))}")
        return node

    def children(self, samples: Iterable[Any], at: str) -> None:
        """The children of a node, as a sequence at `at` has them."""
        samples = list(samples)
        self.refuse_if(f"len({at}) != {len(samples)}")
        names = [self.name() for _ in samples]
        if names:
            self.lines.append(f"{', '.join(names)}, = {at}")
        for child, name in zip(samples, names, strict=True):
            self.visit(child, name)


class BuildCode(Code):
    """The body of a function from arrays to a tree."""

    def __init__(self) -> None:
        super().__init__()
        self.arrays: int = 0

    def visit(self, sample: Any) -> str:
        """Write the code for a node; returns its expression."""
        return kind_of(sample).build(self, sample)

    def array(self) -> str:
        """The name of the next array."""
        self.arrays += 1
        return f"a{self.arrays - 1}"

    def items(self, samples: Iterable[Any]) -> str:
        """The expressions of some nodes, each with a comma behind it."""
        return "".join([f"{self.visit(sample)}, " for sample in samples])


class Kind:
    """How the nodes of one kind are read, taken apart and built."""

    by_field: bool = False
    """Whether the keys of its children are names of fields, which a class may annotate."""

    def children(self, node: Any) -> Iterable[tuple[Any, Any]]:
        """(key, child) pairs in JAX's order; `None` is a child too."""
        return ()

    def paths(self, node: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """The same, with the keys from the node to the child as functree's paths have them."""
        return (((key,), child) for key, child in self.children(node))

    def statics(self, node: Any) -> Iterable[tuple[tuple[Any, ...], Any]]:
        """What a node holds besides its children: (keys, value) pairs."""
        return ()

    @abstractmethod
    def take(self, code: TakeCode, sample: Any, at: str) -> None:
        """Write the code that takes apart a node like the sample, found by the expression `at`."""

    @abstractmethod
    def build(self, code: BuildCode, sample: Any) -> str:
        """Write the code that builds a node like the sample; returns its expression."""


class ArrayKind(Kind):
    """An array."""

    def take(self, code: TakeCode, sample: Any, at: str) -> None:
        # What really stands there is for the caller to look at, for all arrays at once.
        code.arrays.append(at)

    def build(self, code: BuildCode, sample: Any) -> str:
        return code.array()


class NoneKind(Kind):
    """`None`, which JAX sees as a node without children."""

    def take(self, code: TakeCode, sample: Any, at: str) -> None:
        code.refuse_if(f"{at} is not None")

    def build(self, code: BuildCode, sample: Any) -> str:
        return "None"


class StaticKind(Kind):
    """A leaf that is no array."""

    def statics(self, node: Any) -> Iterable[tuple[tuple[Any, ...], Any]]:
        return (((), node),)

    def take(self, code: TakeCode, sample: Any, at: str) -> None:
        code.static(sample, at)

    def build(self, code: BuildCode, sample: Any) -> str:
        return code.value(sample)


class SequenceKind(Kind):
    """A list or a tuple."""

    def children(self, node: Any) -> Iterable[tuple[Any, Any]]:
        return enumerate(node)

    def take(self, code: TakeCode, sample: Any, at: str) -> None:
        code.children(sample, code.node(sample, at))

    def build(self, code: BuildCode, sample: Any) -> str:
        items = code.items(sample)
        return f"[{items}]" if type(sample) is list else f"({items})"


class NamedTupleKind(Kind):
    """A named tuple that JAX flattens as it flattens tuples."""

    by_field = True

    def children(self, node: Any) -> Iterable[tuple[Any, Any]]:
        # Not by JAX's keys: version 0.10.2 gives every field the key of the first.
        return zip(node._fields, node, strict=True)

    def take(self, code: TakeCode, sample: Any, at: str) -> None:
        code.children(sample, code.node(sample, at))

    def build(self, code: BuildCode, sample: Any) -> str:
        return f"{code.value(type(sample))}({code.items(sample)})"


class DictKind(Kind):
    """A dict, whose keys JAX sorts."""

    def children(self, node: Any) -> Iterable[tuple[Any, Any]]:
        return [(key, node[key]) for key in sorted(node)]

    def take(self, code: TakeCode, sample: Any, at: str) -> None:
        node = code.node(sample, at)
        code.refuse_if(f"len({node}) != {len(sample)}")
        keys = sorted(sample)
        for key in keys:
            code.visit(sample[key], f"{node}[{_key(code, key)}]")
        if not all(type(key) is str for key in keys):
            # {1: x} is not {True: x}. Last, for by now the keys are known to be equal, and so to have an order.
            code.static(tuple(keys), f"tuple(sorted({node}))")

    def build(self, code: BuildCode, sample: Any) -> str:
        items = [f"{_key(code, key)}: {code.visit(sample[key])}" for key in sorted(sample)]
        return "{" + ", ".join(items) + "}"


class RegisteredKind(Kind):
    """A node of any other class that is registered with JAX."""

    def children(self, node: Any) -> Iterable[tuple[Any, Any]]:
        level = default_registry.flatten_one_level_with_keys(node)
        return level[0] if level is not None else ()

    def paths(self, node: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
        return (((plain_key(key),), child) for key, child in self.children(node))

    def statics(self, node: Any) -> Iterable[tuple[tuple[Any, ...], Any]]:
        return (((), one_level(node)[1]),)

    def take(self, code: TakeCode, sample: Any, at: str) -> None:
        children, treedef = one_level(sample)
        node = code.node(sample, at)
        below, structure = code.name(), code.name()
        code.lines.append(f"{below}, {structure} = {code.value(one_level)}({node})")
        code.static(treedef, structure)
        code.children(children, below)

    def build(self, code: BuildCode, sample: Any) -> str:
        children, treedef = one_level(sample)
        return f"{code.value(treedef.unflatten)}(({code.items(children)}))"


class DefaultDictKind(RegisteredKind):
    """A defaultdict: JAX keeps its factory."""

    def children(self, node: Any) -> Iterable[tuple[Any, Any]]:
        return [(key, node[key]) for key in sorted(node)]


class StateKind(RegisteredKind):
    """State: each child has the path that its declaration has in the model."""

    def paths(self, node: StateMapping) -> Iterator[tuple[tuple[Any, ...], Any]]:
        return ((entry.path, child) for entry, (_, child) in zip(node.entries(), self.children(node), strict=True))


class PackedKind(RegisteredKind):
    """A packed tree: its arrays have the paths that they have in the tree."""

    def paths(self, node: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
        return zip(node.static.paths, node.arrays, strict=True)

    def statics(self, node: Any) -> Iterable[tuple[tuple[Any, ...], Any]]:
        return (((), node.static),)

    def take(self, code: TakeCode, sample: Any, at: str) -> None:
        node = code.node(sample, at)
        code.static(sample.static, f"{node}.static")
        code.refuse_if(f"len({node}.arrays) != {len(sample.arrays)}")
        code.arrays.append(f"*{node}.arrays")

    def build(self, code: BuildCode, sample: Any) -> str:
        return f"{code.value(type(sample))}(({code.items(sample.arrays)}), {code.value(sample.static)})"


class ModuleKind(Kind):
    """An Equinox module."""

    by_field = True

    def children(self, node: Any) -> Iterable[tuple[Any, Any]]:
        contents = _contents(node)
        try:
            return [(name, contents[name]) for name in _fields(type(node), False)]
        except KeyError:  # a field without a value, which Equinox leaves out
            return [(plain_key(key), child) for key, child in REGISTERED.children(node)]

    def statics(self, node: Any) -> Iterable[tuple[tuple[Any, ...], Any]]:
        contents = _contents(node)
        return [((name,), contents[name]) for name in _fields(type(node), True) if name in contents]

    def take(self, code: TakeCode, sample: Any, at: str) -> None:
        if not _complete(sample):
            REGISTERED.take(code, sample, at)
            return
        known = _contents(sample)
        contents = code.assign(f"{code.value(_contents)}({code.node(sample, at)})")
        # One that wraps a function holds more than its fields say.
        code.refuse_if(f"len({contents}) != {len(known)}")
        for name in _fields(type(sample), True):
            code.static(known[name], f"{contents}[{name!r}]")
        for name in _fields(type(sample), False):
            code.visit(known[name], f"{contents}[{name!r}]")

    def build(self, code: BuildCode, sample: Any) -> str:
        """As Equinox makes a module of its leaves: without `__init__`."""
        if not _complete(sample):
            return REGISTERED.build(code, sample)
        known, cls = _contents(sample), type(sample)
        below = [(name, code.visit(known[name])) for name in _fields(cls, False)]
        module = code.assign(f"{code.value(object.__new__)}({code.value(cls)})")
        contents = code.assign(f"{code.value(_contents)}({module})")
        below += [(name, code.value(known[name])) for name in _fields(cls, True)]
        code.lines += [f"{contents}[{name!r}] = {expression}" for name, expression in below]
        return module


# A module's `__dict__`, without the `__getattribute__` by which Equinox binds methods.
_contents: Callable[[Any], dict[str, Any]] = eqx.Module.__dict__["__dict__"].__get__


@functools.cache
def _fields(cls: type, static: bool) -> tuple[str, ...]:
    found = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    return tuple(f.name for f in found if bool(f.metadata.get("static", False)) is static)


def _complete(module: eqx.Module) -> bool:
    """Whether a module holds what its fields say and nothing else; one that wraps a function holds its name too."""
    cls = type(module)
    return _contents(module).keys() == {*_fields(cls, True), *_fields(cls, False)}


def _key(code: Code, key: Any) -> str:
    """The expression for a key of a dict."""
    return repr(key) if type(key) is str else code.value(key)


def one_level(node: Any) -> tuple[list[Any], Any]:
    """A node's children, and the structure of it alone."""
    return tree_flatten(node, is_leaf=lambda x: x is not node)


ARRAY, NONE, STATIC = ArrayKind(), NoneKind(), StaticKind()
SEQUENCE, DICT, DEFAULT_DICT, NAMED_TUPLE = SequenceKind(), DictKind(), DefaultDictKind(), NamedTupleKind()
MODULE, STATE, PACKED, REGISTERED = ModuleKind(), StateKind(), PackedKind(), RegisteredKind()
_CONTAINERS: dict[type, Kind] = {list: SEQUENCE, tuple: SEQUENCE, dict: DICT, defaultdict: DEFAULT_DICT}


def kind_of(node: Any) -> Kind:
    """The kind of a node or leaf."""
    if node is None:
        return NONE
    container = _CONTAINERS.get(type(node))
    if container is not None:
        return container
    if is_array(node):
        return ARRAY
    if isinstance(node, PackedTree):
        return PACKED
    if isinstance(node, StateMapping):
        return STATE
    if isinstance(node, eqx.Module):
        return MODULE
    if default_registry.flatten_one_level(node) is None:
        return STATIC
    if isinstance(node, tuple) and hasattr(type(node), "_fields") and _flattens_as_tuple(node):
        return NAMED_TUPLE
    return REGISTERED


def _flattens_as_tuple(node: tuple[Any, ...]) -> bool:
    """Whether a named tuple's children are its elements: its class may be registered with others, or another order."""
    children, _ = one_level(node)
    return len(children) == len(node) and all(a is b for a, b in zip(children, node, strict=True))
