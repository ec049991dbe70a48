"""A node of a tree ─► its `Kind`: how its children are found, and the code that flattens and
rebuilds such nodes.

The code for a tree is written node by node from a sample (see `Form`). It reads each array by one
expression, and compares all static values on the way. It does not depend on the identity of the
nodes of the sample, so a tree that was changed in place (a list with another element) is recognized
as another structure.
"""

import dataclasses
import functools
import operator
import re
import weakref
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import equinox as eqx
from jax.tree_util import default_registry, tree_flatten

from functree.errors import FunctreeTypeError
from functree.tree.arrays import AnyArray, Tree, TreeDef, is_array
from functree.tree.interfaces import PackedTree, StateMapping
from functree.tree.paths import Key, Keys, plain_key
from functree.tree.skeleton.code import Code
from functree.tree.skeleton.static_value import StaticValue, equal

T = TypeVar("T")

Children = Iterable[tuple[Any, Tree]]
"""(key, child) pairs of a node. A key is plain, or of one of JAX's classes for keys."""


class Kind:
    """How the nodes of one kind are read, flattened and built."""

    by_field: bool = False
    """Whether the keys of its children are names of fields, which a class may annotate."""

    def children(self, node: Tree) -> Children:
        """(key, child) pairs in JAX's order; `None` is a child too."""
        return ()

    def paths(self, node: Tree) -> Iterator[tuple[Keys, Tree]]:
        """(keys, child) pairs in JAX's order, with the keys from the node to the child in
        functree's paths."""
        return (((plain_key(key),), child) for key, child in self.children(node))

    def statics(self, node: Tree) -> Iterable[tuple[Keys, object]]:
        """The static data of a node: (keys, value) pairs."""
        return ()

    @abstractmethod
    def take(self, code: "TakeCode", sample: Tree, at: str) -> None:
        """Write the code that flattens a node like the sample.

        Args:
            code: the code.
            sample: a node with the structure that is expected.
            at: the name of the node in the generated code; for a leaf its expression.
        """

    @abstractmethod
    def build(self, code: "BuildCode", sample: Tree) -> str:
        """Write the code that builds a node like the sample; returns the expression of the node."""


class ArrayKind(Kind):
    """An array."""

    def take(self, code: "TakeCode", sample: Tree, at: str) -> None:
        # Not checked to be an array: the caller checks all arrays at once, which is faster.
        code.array(at)

    def build(self, code: "BuildCode", sample: Tree) -> str:
        return code.array()


class NoneKind(Kind):
    """`None`, which JAX treats as a node without children."""

    def take(self, code: "TakeCode", sample: Tree, at: str) -> None:
        code.refuse_if(f"{at} is not None", f"type({at})")

    def build(self, code: "BuildCode", sample: Tree) -> str:
        return "None"


class StaticKind(Kind):
    """A leaf that is not an array."""

    def statics(self, node: Tree) -> Iterable[tuple[Keys, object]]:
        return (((), node),)

    def take(self, code: "TakeCode", sample: Tree, at: str) -> None:
        code.leaf(sample, at)

    def build(self, code: "BuildCode", sample: Tree) -> str:
        return code.value(sample)


class SequenceKind(Kind):
    """A list or a tuple."""

    def children(self, node: Tree) -> Children:
        return enumerate(node)

    def take(self, code: "TakeCode", sample: Tree, at: str) -> None:
        code.type_of(sample, at)
        code.children(sample, at)

    def build(self, code: "BuildCode", sample: Tree) -> str:
        items = code.items(sample)
        # Each container is a statement: Python refuses an expression with 200 nested brackets.
        if type(sample) is list:
            return code.assign(f"[{items}]")
        return code.assign(f"({items})")


class NamedTupleKind(Kind):
    """A named tuple that JAX flattens like a tuple, so that its elements are its children."""

    by_field = True

    def children(self, node: Tree) -> Children:
        # The keys of JAX are not used: in version 0.10.2 each field has the key of the first field.
        return zip(node._fields, elements(node), strict=True)

    def take(self, code: "TakeCode", sample: Tree, at: str) -> None:
        code.type_of(sample, at)
        if type(sample).__iter__ is not tuple.__iter__ or type(sample).__len__ is not tuple.__len__:
            at = code.assign(f"{code.value(elements)}({at})")
        code.children(elements(sample), at)

    def build(self, code: "BuildCode", sample: Tree) -> str:
        return code.assign(f"{code.value(type(sample))}({code.items(elements(sample))})")


class DictKind(Kind):
    """A dict. JAX sorts its keys."""

    def children(self, node: Tree) -> Children:
        return [(key, node[key]) for key in sorted(node)]

    def take(self, code: "TakeCode", sample: Tree, at: str) -> None:
        code.type_of(sample, at)
        # A dict of the same length with other keys raises KeyError, which the generated function
        # handles.
        code.refuse_if(f"len({at}) != {len(sample)}", f"len({at})")
        code.dicts.append(at)
        for key in sorted(sample):
            code.visit(sample[key], f"{at}[{_key(code, key)}]")

    def build(self, code: "BuildCode", sample: Tree) -> str:
        items = [f"{_key(code, key)}: {code.visit(sample[key])}" for key in sorted(sample)]
        return code.assign("{" + ", ".join(items) + "}")


class RegisteredKind(Kind):
    """A node of any other class that is registered with JAX. The generated code calls JAX for one
    level of it."""

    def children(self, node: Tree) -> Children:
        level = default_registry.flatten_one_level_with_keys(node)
        if level is None:
            return ()
        return level[0]

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
    """A defaultdict. Its treedef has the factory, so it is built by JAX, but it is read like a
    dict."""

    def children(self, node: Tree) -> Children:
        return DICT.children(node)


class StateKind(RegisteredKind):
    """A state. Each child has the path of its declaration in the model, which may be several
    keys."""

    def paths(self, node: StateMapping) -> Iterator[tuple[Keys, Tree]]:
        for entry, (_, child) in zip(node.entries(), self.children(node), strict=True):
            yield entry.path, child


class EquinoxStateKind(RegisteredKind):
    """Equinox' own state. Each value has the path of the `StateIndex` that declares it in the
    model."""

    def paths(self, node: eqx.nn.State) -> Iterator[tuple[Keys, Tree]]:
        _, treedef = one_level(node)
        # `eqx.nn.make_with_state` marks each index by its place, as a text:
        # `Net.norms[0].batch_counter`.
        _, markers = treedef.node_data()
        for i, (marker, (_, child)) in enumerate(zip(markers, self.children(node), strict=True)):
            yield _place_of(marker) or (i,), child


_MARKER = re.compile(r"\w*((?:\.\w+|\[\d+\]|\['[^']*'\])*)")
_STEP = re.compile(r"\.(?P<name>\w+)|\[(?P<index>\d+)\]|\['(?P<key>[^']*)'\]")


def _place_of(marker: object) -> Keys:
    """The keys in a marker, behind the name of the class of the model; the marker itself if it has
    another form.

    Empty for an index without a place: it is the model itself, or the model was made by other
    means.
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
    """A packed tree. Its arrays have the paths that they have in the tree that was packed."""

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
    """An Equinox module."""

    by_field = True

    def children(self, node: Tree) -> Children:
        contents = _contents(node)
        try:
            return [(name, contents[name]) for name in _fields(type(node), False)]
        except KeyError:
            # A field has no value, and Equinox leaves it out when it flattens a module.
            return [(plain_key(key), child) for key, child in REGISTERED.children(node)]

    def statics(self, node: Tree) -> Iterable[tuple[Keys, object]]:
        contents = _contents(node)
        return [((name,), contents[name]) for name in _fields(type(node), True) if name in contents]

    def take(self, code: "TakeCode", sample: Tree, at: str) -> None:
        # A module with all its fields is read from its `__dict__`. Equinox's own flattening is
        # slower.
        if not _complete(sample):
            REGISTERED.take(code, sample, at)
            return
        known = _contents(sample)
        code.type_of(sample, at)
        contents = code.assign(f"{code.value(_contents)}({at})")
        # A module that wraps a function has attributes of the function too, such as its name, and
        # is not complete.
        code.refuse_if(f"len({contents}) != {len(known)}", f"len({contents})")
        for name in _fields(type(sample), True):
            code.static(known[name], f"{contents}[{name!r}]")
        for name in _fields(type(sample), False):
            code.visit(known[name], f"{contents}[{name!r}]")

    def build(self, code: "BuildCode", sample: Tree) -> str:
        """As Equinox builds a module from its leaves: without `__init__`."""
        if not _complete(sample):
            return REGISTERED.build(code, sample)
        known, cls = _contents(sample), type(sample)
        # The children first, because they are written as statements before those of the module
        # itself.
        below: dict[str, str] = {}
        for name in _fields(cls, False):
            below[name] = code.visit(known[name])
        # `object.__new__` and the assignments to `__dict__` go past `__setattr__`, which raises:
        # modules are frozen.
        module = code.assign(f"{code.value(object.__new__)}({code.value(cls)})")
        contents = code.assign(f"{code.value(_contents)}({module})")
        for name in _fields(cls, True):
            below[name] = code.value(known[name])
        for name, expression in below.items():
            code.lines.append(f"{contents}[{name!r}] = {expression}")
        return module


# A function from a module to its `__dict__`, past `__getattribute__`, by which Equinox binds
# methods and which is slow.
_contents: Callable[[eqx.Module], dict[str, Tree]] = eqx.Module.__dict__["__dict__"].__get__


@functools.cache
def _fields(cls: type, static: bool) -> tuple[str, ...]:
    """The names of a module's static fields, or of its other fields."""
    found = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    return tuple(f.name for f in found if bool(f.metadata.get("static", False)) is static)


def _complete(module: eqx.Module) -> bool:
    """Whether a module has a value for each field and no other attributes, as one that wraps a
    function has."""
    cls = type(module)
    return _contents(module).keys() == {*_fields(cls, True), *_fields(cls, False)}


def _key(code: Code, key: Key) -> str:
    """The expression of a key of a dict: a literal for a string, or else the name of a value."""
    if type(key) is str:
        return repr(key)
    return code.value(key)


def one_level(node: Tree) -> tuple[list[Tree], TreeDef]:
    """The children of a node, and the treedef of this node alone."""
    return tree_flatten(node, is_leaf=lambda x: x is not node)


ARRAY, NONE, STATIC = ArrayKind(), NoneKind(), StaticKind()
# A node at which a walk ends, because it is what the walk is for.
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
    """The kind of a node or leaf."""
    if node is None:
        return NONE
    # By the exact class: a subclass of list or dict is a leaf for JAX, or is registered with a
    # flattening of its own.
    container = _CONTAINERS.get(type(node))
    if container is not None:
        return container
    # First, because a function has a class of its own for its calls, and for each new class Python
    # asks all arrays and all modules whether it is a subclass of them.
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
    """Whether the children of a named tuple are its elements. Its class may be registered with
    another flattening."""
    children, _ = one_level(node)
    own = elements(node)
    return len(children) == len(own) and all(map(operator.is_, children, own))


def elements(node: tuple[T, ...]) -> tuple[T, ...]:
    """The elements of a named tuple. The class may have a length and an iteration of its own; JAX
    does not use them."""
    return tuple(tuple.__iter__(node))


# The number of arrays from which a part of a tree has a form of its own. A form costs 0.2 µs in
# each call.
LARGE = 12
# The number of forms that are remembered for each class.
_REMEMBERED = 16


class Form:
    """The generated functions of trees with one structure and equal static values. It holds no
    arrays.

    Args:
        sample: a tree with this structure.
        code: the code of `take`, written from the sample.

    Attributes:
        take: a function from a tree to its arrays, in JAX's order. For another tree it returns a
            `Refusal`. It does not check that the values in the place of arrays are arrays.
        build: a function from arrays, in JAX's order, to a tree.
        size: the number of arrays.
    """

    def __init__(self, sample: Tree, code: "TakeCode"):
        what = type(sample).__name__
        self.size: int = code.size
        self.take: Callable[[Tree], list[AnyArray] | Refusal] = code.finished(what)
        build = BuildCode(code.parts)
        # Not `visit`, for which the sample would be a part of itself.
        build.lines.append(f"return {kind_of(sample).build(build, sample)}")
        self.build: Callable[[Sequence[AnyArray]], Tree] = build.function("build(arrays)", what)
        # They are remembered by others as long as this form exists.
        self._parts: list[Form] = [form for _, form in code.parts.values()]

    def fits(self, tree: Tree) -> bool:
        """Whether a tree has this form."""
        try:
            arrays = self.take(tree)
        except FunctreeTypeError:
            # Its static data cannot be compared with the static data of another function's trees.
            return False
        return type(arrays) is list and all(map(is_array, arrays))


def form_of(tree: Tree) -> Form:
    """The form of a tree. It is generated unless there is a tree with this form already."""
    known = _known(tree)
    if known is not None:
        return known
    return _remembered(tree, TakeCode(tree))


# The forms by the class of their trees. The forms belong to those who use them.
_FORMS: weakref.WeakKeyDictionary[type, list[weakref.ref[Form]]] = weakref.WeakKeyDictionary()


def _known(tree: Tree) -> Form | None:
    """The form of a tree, if it was generated before and is still in use."""
    for reference in _FORMS.get(type(tree), ()):
        form = reference()
        if form is not None and form.fits(tree):
            return form
    return None


def _remembered(sample: Tree, code: "TakeCode") -> Form:
    """A new form, as the first one of its class."""
    form = Form(sample, code)
    others = [other for other in _FORMS.get(type(sample), ()) if other() is not None]
    _FORMS[type(sample)] = [weakref.ref(form), *others][:_REMEMBERED]
    return form


Refusal = tuple[Hashable, ...]
"""What `take` returns for a tree of another structure: the number of the check that refused it, and
what it found.

All functions check the nodes of a tree in the same order. So a function whose own trees have what
was found there refuses the tree, if it does, by a later check.
"""

# A part of a sample and its form, by the identity of the part. The part is kept, so that its
# identity stays its own.
_Parts = dict[int, tuple[Tree, Form]]


class TakeCode(Code):
    """The body of a function from a tree to its arrays. For a tree of another structure it returns
    a `Refusal`.

    Args:
        sample: a tree with the structure that is expected.
        outer: the code that this may become a part of.
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
        """Write the code for a node. A large part of a tree is taken apart by its own form.

        Args:
            sample: a node with the structure that is expected.
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
        self.parts |= inner.parts

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
    """The body of a function from arrays to a tree, in which parts that have forms are built by
    these."""

    def __init__(self, parts: _Parts) -> None:
        super().__init__()
        self.size: int = 0  # the number of arrays so far
        self._parts = parts

    def visit(self, sample: Tree) -> str:
        """Write the code that builds a node like the sample; returns the expression of the node."""
        part, form = self._parts.get(id(sample), (None, None))
        if form is None or part is not sample:
            return kind_of(sample).build(self, sample)
        return self.assign(f"{self.value(form.build)}({self.several(form.size)})")

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
