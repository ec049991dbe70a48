"""A `Kind` finds the children of its nodes, and writes code that flattens and rebuilds the nodes.

The code for a tree is generated node by node from a sample (see `Form`). It reads each array with
one expression, and compares all static values on the way. It does not depend on the identity of the
sample's nodes. A tree that was changed in place, such as a list with a new element, is therefore
recognized as a different structure.
"""

import dataclasses
import functools
import operator
import re
import weakref
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import equinox as eqx
from jax.tree_util import default_registry, tree_flatten

from functree.errors import FunctreeTypeError
from functree.tree.arrays import AnyArray, Tree, TreeDef, is_array
from functree.tree.interfaces import PackedTree, StateMapping
from functree.tree.paths import Key, Keys, plain_key
from functree.tree.skeleton.code import Code
from functree.tree.skeleton.static_value import StaticValue, equal

T = TypeVar("T")

Children = Iterable[tuple[Key, Tree]]
"""The (key, child) pairs of a node. Keys are plain: field names, dict keys and indices."""


class Kind:
    """The rules for reading, flattening and building the nodes of one kind."""

    by_field: bool = False
    """Whether the keys of a node's children are field names, which a class may annotate."""

    def children(self, node: Tree) -> Children:
        """Return the (key, child) pairs in JAX's order, including children that are `None`."""
        return ()

    def paths(self, node: Tree) -> Iterable[tuple[Keys, Tree]]:
        """Return (keys, child) pairs in JAX's order.

        The keys lead from the node to the child in functree's paths.
        """
        return [((key,), child) for key, child in self.children(node)]

    def statics(self, node: Tree) -> Iterable[tuple[Keys, object]]:
        """Return the static data of a node as (keys, value) pairs."""
        return ()

    @abstractmethod
    def take(self, code: "TakeCode", sample: Tree, at: str) -> None:
        """Write code that flattens a node like the sample.

        Args:
            code: the code to extend.
            sample: a node with the expected structure.
            at: the name of the node in the generated code; for a leaf, its expression.
        """

    @abstractmethod
    def build(self, code: "BuildCode", sample: Tree) -> str:
        """Write code that builds a node like the sample, and return the node's expression."""


class ArrayKind(Kind):
    """The kind of arrays."""

    def take(self, code: "TakeCode", sample: Tree, at: str) -> None:
        # The code does not check for an array: the caller checks all arrays at once, for speed.
        code.array(at)

    def build(self, code: "BuildCode", sample: Tree) -> str:
        return code.array()


class NoneKind(Kind):
    """The kind of `None`, which JAX treats as a node without children."""

    def take(self, code: "TakeCode", sample: Tree, at: str) -> None:
        code.refuse_if(f"{at} is not None", f"type({at})")

    def build(self, code: "BuildCode", sample: Tree) -> str:
        return "None"


class StaticKind(Kind):
    """The kind of leaves that are not arrays."""

    def statics(self, node: Tree) -> Iterable[tuple[Keys, object]]:
        return (((), node),)

    def take(self, code: "TakeCode", sample: Tree, at: str) -> None:
        code.leaf(sample, at)

    def build(self, code: "BuildCode", sample: Tree) -> str:
        return code.value(sample)


class SequenceKind(Kind):
    """The kind of lists and tuples."""

    def children(self, node: Tree) -> Children:
        return enumerate(node)

    def take(self, code: "TakeCode", sample: Tree, at: str) -> None:
        code.type_of(sample, at)
        code.children(sample, at)

    def build(self, code: "BuildCode", sample: Tree) -> str:
        items = code.items(sample)
        # Each container is a statement, because Python refuses 200 nested brackets.
        if type(sample) is list:
            return code.assign(f"[{items}]")
        return code.assign(f"({items})")


class NamedTupleKind(Kind):
    """The kind of named tuples that JAX flattens like tuples: the elements are the children."""

    by_field = True

    def children(self, node: Tree) -> Children:
        # JAX's keys are not used: in JAX 0.10.2, all fields have the key of the first field.
        return zip(node._fields, elements(node), strict=True)

    def take(self, code: "TakeCode", sample: Tree, at: str) -> None:
        code.type_of(sample, at)
        if type(sample).__iter__ is not tuple.__iter__ or type(sample).__len__ is not tuple.__len__:
            at = code.assign(f"{code.value(elements)}({at})")
        code.children(elements(sample), at)

    def build(self, code: "BuildCode", sample: Tree) -> str:
        return code.assign(f"{code.value(type(sample))}({code.items(elements(sample))})")


class DictKind(Kind):
    """The kind of dicts, whose keys JAX sorts."""

    def children(self, node: Tree) -> Children:
        return [(key, node[key]) for key in sorted(node)]

    def take(self, code: "TakeCode", sample: Tree, at: str) -> None:
        code.type_of(sample, at)
        # A dict with the same length and different keys raises KeyError, which the generated
        # function handles.
        code.refuse_if(f"len({at}) != {len(sample)}", f"len({at})")
        code.dicts.append(at)
        for key in sorted(sample):
            code.visit(sample[key], f"{at}[{_key(code, key)}]")

    def build(self, code: "BuildCode", sample: Tree) -> str:
        items = [f"{_key(code, key)}: {code.visit(sample[key])}" for key in sorted(sample)]
        return code.assign("{" + ", ".join(items) + "}")


class RegisteredKind(Kind):
    """The kind of nodes whose class is registered with JAX, and that have no kind of their own.

    The generated code calls JAX to flatten one level.
    """

    def children(self, node: Tree) -> Children:
        level = default_registry.flatten_one_level_with_keys(node)
        if level is None:
            return ()
        return [(plain_key(key), child) for key, child in level[0]]

    def statics(self, node: Tree) -> Iterable[tuple[Keys, object]]:
        return (((), one_level(node)[1]),)

    def take(self, code: "TakeCode", sample: Tree, at: str) -> None:
        children, treedef = one_level(sample)
        code.type_of(sample, at)
        below, structure = code.name(), code.name()
        code.lines.append(f"{below}, {structure} = {code.value(one_level)}({at})")
        code.static(treedef, structure)
        code.children(children, below)

    def build(self, code: "BuildCode", sample: Tree) -> str:
        children, treedef = one_level(sample)
        items = code.items(children)
        return code.assign(f"{code.value(treedef)}.unflatten(({items}))")


class DefaultDictKind(RegisteredKind):
    """The kind of defaultdicts.

    Their children are read like a dict's children. JAX builds the defaultdicts, because only the
    treedef holds the factory of default values.
    """

    def children(self, node: Tree) -> Children:
        return DICT.children(node)


class StateKind(RegisteredKind):
    """The kind of functree's states.

    Each child has the path of its `StateRef` in the model. The path may have several keys.
    """

    def paths(self, node: StateMapping) -> Iterator[tuple[Keys, Tree]]:
        for entry, (_, child) in zip(node.entries(), self.children(node), strict=True):
            yield entry.path, child


class EquinoxStateKind(RegisteredKind):
    """The kind of Equinox's own states.

    Each value has the path of its `StateIndex` in the model.
    """

    def paths(self, node: eqx.nn.State) -> Iterator[tuple[Keys, Tree]]:
        _, treedef = one_level(node)
        # `eqx.nn.make_with_state` marks each index with its path in the model:
        # `Net.norms[0].batch_counter`.
        _, markers = treedef.node_data()
        for i, (marker, (_, child)) in enumerate(zip(markers, self.children(node), strict=True)):
            yield _place_of(marker) or (i,), child


_MARKER = re.compile(r"\w*((?:\.\w+|\[\d+\]|\['[^']*'\])*)")
_STEP = re.compile(r"\.(?P<name>\w+)|\[(?P<index>\d+)\]|\['(?P<key>[^']*)'\]")


def _place_of(marker: object) -> Keys:
    """Return the keys in a marker, after the name of the model's class.

    A marker in a different form is itself the only key. The result is empty if the marker holds no
    path: the index is the model itself, or the model was made without `make_with_state`.
    """
    if not isinstance(marker, str):
        return ()
    known = _MARKER.fullmatch(marker)
    if known is None:
        return (marker,)
    keys: list[Key] = []
    for step in _STEP.finditer(known[1]):
        if step["index"] is not None:
            keys.append(int(step["index"]))
        else:
            keys.append(step[step.lastgroup or "name"])
    return tuple(keys)


class PackedKind(RegisteredKind):
    """The kind of packed trees. Each array keeps the path that it had before packing."""

    def paths(self, node: Tree) -> Iterator[tuple[Keys, Tree]]:
        return zip(node.static.paths, node.arrays, strict=True)

    def statics(self, node: Tree) -> Iterable[tuple[Keys, object]]:
        return (((), node.static),)

    def take(self, code: "TakeCode", sample: Tree, at: str) -> None:
        code.type_of(sample, at)
        code.static(sample.static, f"{at}.static")
        code.refuse_if(f"len({at}.arrays) != {len(sample.arrays)}", f"len({at}.arrays)")
        code.several(f"{at}.arrays", len(sample.arrays))

    def build(self, code: "BuildCode", sample: Tree) -> str:
        arrays = f"tuple({code.several(len(sample.arrays))})"
        return f"{code.value(type(sample))}({arrays}, {code.value(sample.static)})"


class ModuleKind(Kind):
    """The kind of Equinox modules."""

    by_field = True

    def children(self, node: Tree) -> Children:
        contents = _contents(node)
        try:
            return [(name, contents[name]) for name in _fields(type(node), False)]
        except KeyError:
            # A field has no value. Equinox omits such a field when it flattens a module.
            return REGISTERED.children(node)

    def statics(self, node: Tree) -> Iterable[tuple[Keys, object]]:
        contents = _contents(node)
        return [((name,), contents[name]) for name in _fields(type(node), True) if name in contents]

    def take(self, code: "TakeCode", sample: Tree, at: str) -> None:
        # A complete module is read from its `__dict__`, which is faster than Equinox's flattening.
        if not _complete(sample):
            REGISTERED.take(code, sample, at)
            return
        known = _contents(sample)
        code.type_of(sample, at)
        contents = code.assign(f"{code.value(_contents)}({at})")
        # A module that wraps a function also has the function's attributes, such as its name, and
        # is not complete.
        code.refuse_if(f"len({contents}) != {len(known)}", f"len({contents})")
        for name in _fields(type(sample), True):
            code.static(known[name], f"{contents}[{name!r}]")
        for name in _fields(type(sample), False):
            code.visit(known[name], f"{contents}[{name!r}]")

    def build(self, code: "BuildCode", sample: Tree) -> str:
        """Write code that builds a module as Equinox does, without `__init__`."""
        if not _complete(sample):
            return REGISTERED.build(code, sample)
        known, cls = _contents(sample), type(sample)
        # The children come first, since their statements must precede the module's statements.
        below: dict[str, str] = {}
        for name in _fields(cls, False):
            below[name] = code.visit(known[name])
        # `object.__new__` and assignments to `__dict__` bypass `__setattr__`, which raises because
        # modules are frozen.
        module = code.assign(f"{code.value(object.__new__)}({code.value(cls)})")
        contents = code.assign(f"{code.value(_contents)}({module})")
        for name in _fields(cls, True):
            below[name] = code.value(known[name])
        for name, expression in below.items():
            code.lines.append(f"{contents}[{name!r}] = {expression}")
        return module


# This function returns the `__dict__` of a module. It bypasses Equinox's `__getattribute__`, which
# binds methods and is slow.
_contents: Callable[[eqx.Module], dict[str, Tree]] = eqx.Module.__dict__["__dict__"].__get__


@functools.cache
def _fields(cls: type, static: bool) -> tuple[str, ...]:
    """Return the names of a module's static fields, or of its other fields."""
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    return tuple(f.name for f in fields if bool(f.metadata.get("static", False)) is static)


def _complete(module: eqx.Module) -> bool:
    """Return whether a module has a value for each field, and no other attributes.

    A module that wraps a function has other attributes.
    """
    cls = type(module)
    return _contents(module).keys() == {*_fields(cls, True), *_fields(cls, False)}


def _key(code: Code, key: Key) -> str:
    """Return the expression of a dict key: a string literal, or the name of a value."""
    if type(key) is str:
        return repr(key)
    return code.value(key)


def one_level(node: Tree) -> tuple[list[Tree], TreeDef]:
    """Flatten one level: return a node's children, and the treedef of the node alone."""
    return tree_flatten(node, is_leaf=lambda x: x is not node)


ARRAY, NONE, STATIC = ArrayKind(), NoneKind(), StaticKind()
# The kind of a node at which a walk stops, because the walk's caller asked for the node.
FOUND = Kind()
LEAVES: frozenset[Kind] = frozenset({ARRAY, NONE, STATIC, FOUND})
SEQUENCE, NAMED_TUPLE = SequenceKind(), NamedTupleKind()
DICT, DEFAULT_DICT = DictKind(), DefaultDictKind()
MODULE, STATE, PACKED, REGISTERED = ModuleKind(), StateKind(), PackedKind(), RegisteredKind()
EQUINOX_STATE = EquinoxStateKind()
_CONTAINERS: dict[type, Kind] = {
    list: SEQUENCE,
    tuple: SEQUENCE,
    dict: DICT,
    defaultdict: DEFAULT_DICT,
}


def kind_of(node: Tree) -> Kind:
    """Return the kind of a node or leaf."""
    if node is None:
        return NONE
    # The exact class is compared, since in JAX a subclass of list or dict is a leaf, or is
    # registered with its own flattening.
    container = _CONTAINERS.get(type(node))
    if container is not None:
        return container
    # This check precedes the `isinstance` checks of arrays and modules, which are slow for a new
    # class. Each function has a new class of named tuples for its calls.
    if isinstance(node, tuple) and hasattr(type(node), "_fields") and _flattens_as_tuple(node):
        return NAMED_TUPLE
    if is_array(node):
        return ARRAY
    if isinstance(node, PackedTree):
        return PACKED
    if isinstance(node, StateMapping):
        return STATE
    if isinstance(node, eqx.Module):
        return MODULE
    if isinstance(node, eqx.nn.State):
        return EQUINOX_STATE
    if default_registry.flatten_one_level(node) is None:
        return STATIC
    return REGISTERED


def _flattens_as_tuple(node: tuple[Tree, ...]) -> bool:
    """Return whether the children of a named tuple are its elements.

    They are not if its class is registered with a different flattening.
    """
    children, _ = one_level(node)
    items = elements(node)
    return len(children) == len(items) and all(map(operator.is_, children, items))


def elements(node: tuple[T, ...]) -> tuple[T, ...]:
    """Return the elements of a named tuple.

    As in JAX, a `__len__` or `__iter__` of its class is ignored.
    """
    return tuple(tuple.__iter__(node))


# A subtree with at least this number of arrays has its own form. Each form adds a function call.
LARGE = 12
# The maximum number of forms that are cached for each class.
_REMEMBERED = 16


class Form:
    """The generated functions for trees with one structure and equal static values.

    A form holds no arrays.

    Args:
        sample: a tree with this structure.
        code: the code of `take`, written from the sample.

    Attributes:
        take: a function from a tree to its arrays, in JAX's order. For a different structure, it
            returns a `Refusal`. It does not check that values at the paths of arrays are arrays.
        build: a function from arrays, in JAX's order, to a tree.
        size: the number of arrays.
    """

    def __init__(self, sample: Tree, code: "TakeCode"):
        what = type(sample).__name__
        self.size: int = code.size
        self.take: Callable[[Tree], list[AnyArray] | Refusal] = code.finished(what)
        build = BuildCode(code.parts)
        # `visit` is not called here, since it looks for the form of a subtree.
        build.lines.append(f"return {kind_of(sample).build(build, sample)}")
        self.build: Callable[[Sequence[AnyArray]], Tree] = build.function("build(arrays)", what)
        # This list keeps the forms of subtrees alive, so that other trees can use them.
        self._parts: list[Form] = [form for _, form in code.parts.values()]

    def fits(self, tree: Tree) -> bool:
        """Return whether a tree has this form."""
        try:
            arrays = self.take(tree)
        except FunctreeTypeError:
            # The static data of the tree cannot be compared with this form's static data.
            return False
        return type(arrays) is list and all(map(is_array, arrays))


def form_of(tree: Tree) -> Form:
    """Return the form of a tree, and generate it unless an existing form fits."""
    known = _known(tree)
    if known is not None:
        return known
    return _remembered(tree, TakeCode(tree))


# The forms by the class of their trees. Only the users of a form keep it alive.
_FORMS: weakref.WeakKeyDictionary[type, list[weakref.ref[Form]]] = weakref.WeakKeyDictionary()


def _known(tree: Tree) -> Form | None:
    """Return the form of a tree if it exists and is still in use."""
    for reference in _FORMS.get(type(tree), ()):
        form = reference()
        if form is not None and form.fits(tree):
            return form
    return None


def _remembered(sample: Tree, code: "TakeCode") -> Form:
    """Make a form, and cache it as the first form of its class."""
    form = Form(sample, code)
    others = [other for other in _FORMS.get(type(sample), ()) if other() is not None]
    _FORMS[type(sample)] = [weakref.ref(form), *others][:_REMEMBERED]
    return form


Refusal = tuple[Hashable, ...]
"""The result of `take` for a tree of a different structure.

It holds the number of the check that refused the tree, and the value that the check found.

All functions check the nodes of a tree in the same order. A function of another form that expects
the found value can therefore refuse the tree only in a later check.
"""

# A subtree of a sample and its form, by the subtree's id. The subtree is kept, so that no other
# object gets its id.
_Parts = dict[int, tuple[Tree, Form]]


class TakeCode(Code):
    """The body of a function from a tree to its arrays.

    For a tree of a different structure, the function returns a `Refusal`.

    Args:
        sample: a tree with the expected structure.
        outer: the code that may include this code.
    """

    def __init__(self, sample: Tree, outer: Code | None = None) -> None:
        super().__init__(outer)
        self.root: str = self.name()  # the name of the tree
        self.arrays: list[str] = []  # the expressions of the arrays, in JAX's order
        self.size: int = 0  # the number of arrays so far
        self.dicts: list[str] = []  # the names of nodes that are dicts
        self.parts: _Parts = {}
        kind_of(sample).take(self, sample, self.root)

    def visit(self, sample: Tree, at: str) -> None:
        """Write the code for a node. A large subtree is flattened by its own form.

        Args:
            sample: a node with the expected structure.
            at: the expression of the node in the generated code.
        """
        kind = kind_of(sample)
        if kind in LEAVES:
            kind.take(self, sample, at)
            return
        form = _known(sample)
        if form is None:
            inner = TakeCode(sample, self)
            if inner.size < LARGE:
                self.include(inner, at)
                return
            form = _remembered(sample, inner)
        self.parts[id(sample)] = sample, form
        arrays = self.assign(f"{self.value(form.take)}({at})")
        self.refuse_if(f"type({arrays}) is tuple", arrays)
        self.several(arrays, form.size)

    def array(self, at: str) -> None:
        """Add the expression that reads an array."""
        self.arrays.append(at)
        self.size += 1

    def several(self, at: str, number: int) -> None:
        """Add the expression of a list or tuple of arrays."""
        self.arrays.append(f"*{at}")
        self.size += number

    def include(self, inner: "TakeCode", at: str) -> None:
        """Add the code for a subtree, whose expression is `at`."""
        self.lines.append(f"{inner.root} = {at}")
        self.add(inner)
        self.arrays += inner.arrays
        self.size += inner.size
        self.dicts += inner.dicts
        self.parts |= inner.parts

    def refuse_if(self, condition: str, found: str) -> None:
        """Refuse trees for which a condition is true.

        Args:
            condition: the expression of the condition.
            found: the expression of the value that differs. The value must be hashable.
        """
        self.lines.append(f"if {condition}: return {next(self._names)}, {found}")

    def leaf(self, value: object, at: str) -> None:
        """Refuse trees whose leaf at the expression `at` differs. The leaf must not be an array."""
        differs = self.value(StaticValue(value).differs)
        self._refuse_others(value, at, f"{differs}({{found}})")

    def static(self, value: object, at: str) -> None:
        """Refuse trees in which the expression `at` gives different static data for a node."""
        self._refuse_others(value, at, f"not {self.value(equal)}({{known}}, {{found}})")

    def _refuse_others(self, value: object, at: str, differs: str) -> None:
        """Refuse trees in which the expression `at` has a different value.

        Args:
            value: the expected value.
            at: the expression of the value.
            differs: the expression of the comparison, in which `{known}` and `{found}` stand for
                the expected and the actual value.
        """
        known, found = self.value(value), self.assign(at)
        # Most static values are the same object in every tree, and `is` needs no call.
        differs = f"{found} is not {known} and {differs.format(known=known, found=found)}"
        self.refuse_if(differs, f"{self.value(StaticValue)}({found})")

    def type_of(self, sample: Tree, node: str) -> None:
        """Refuse trees in which a node has a different class."""
        self.refuse_if(f"type({node}) is not {self.value(type(sample))}", f"type({node})")

    def children(self, samples: Iterable[Tree], at: str) -> None:
        """Write the code for the children of a node.

        Args:
            samples: the children of the sample.
            at: the expression for a list or tuple of the children.
        """
        samples = list(samples)
        # This check precedes the unpacking, which raises an error for a different number of values.
        self.refuse_if(f"len({at}) != {len(samples)}", f"len({at})")
        names = [self.name() for _ in samples]
        if names:
            # With the comma, a single name unpacks too.
            self.lines.append(f"{', '.join(names)}, = {at}")
        for child, name in zip(samples, names, strict=True):
            self.visit(child, name)

    def finished(self, what: str) -> Callable[[Tree], list[AnyArray] | Refusal]:
        """Compile the function under a file name that contains the class of the tree."""
        lines = [f"    {line}" for line in (*self.lines, f"return [{', '.join(self.arrays)}]")]
        # A KeyError means that a module lacks a field, or that a dict has different keys, so the
        # structure differs.
        found = f"{self.value(_keys)}({self.value(tuple(self.dicts))}, locals())"
        self.lines[:] = [
            "try:",
            *lines,
            "except KeyError:",
            f"    return {next(self._names)}, {found}",
        ]
        return self.function(f"take({self.root})", what)


def _keys(dicts: Iterable[str], found: Mapping[str, Iterable[Key]]) -> Hashable:
    """Return the keys of the dicts that a function reached, for a `Refusal`.

    Args:
        dicts: the names of local variables that are dicts.
        found: the function's local variables.
    """
    return tuple(frozenset(found[name]) for name in dicts if name in found)


class BuildCode(Code):
    """The body of a function from arrays to a tree.

    Subtrees with forms are built by their forms.
    """

    def __init__(self, parts: _Parts) -> None:
        super().__init__()
        self.size: int = 0  # the number of arrays so far
        self._parts = parts

    def visit(self, sample: Tree) -> str:
        """Write code that builds a node like the sample, and return the node's expression."""
        part, form = self._parts.get(id(sample), (None, None))
        if form is None or part is not sample:
            return kind_of(sample).build(self, sample)
        return self.assign(f"{self.value(form.build)}({self.several(form.size)})")

    def array(self) -> str:
        """Return the expression of the next array. Arrays are visited in JAX's order."""
        self.size += 1
        return f"arrays[{self.size - 1}]"

    def several(self, number: int) -> str:
        """Return the expression of the next arrays, as a list or tuple."""
        self.size += number
        return f"arrays[{self.size - number}:{self.size}]"

    def items(self, samples: Iterable[Tree]) -> str:
        """Return the expressions of some nodes, each followed by a comma.

        With the comma, a single expression makes a tuple too.
        """
        return "".join([f"{self.visit(sample)}, " for sample in samples])
