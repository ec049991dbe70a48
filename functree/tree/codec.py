"""A tree ─► its `Form`, and code, written once for a form, that takes such trees apart and puts them together.

JAX flattens a module by a Python function for each node, and Equinox' fields are slow to read. A wrapper that is
called thousands of times with trees of one form knows beforehand what it will find: it reads each array by one
expression, and compares in passing all that is static. Nothing is remembered of the tree itself, so what is changed in
place is seen.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
from jax.tree_util import default_registry, tree_flatten

from functree.tree.exact import Exact
from functree.tree.leaves import is_array, read
from functree.tree.pack import Packed
from functree.tree.paths import Path


class Form(NamedTuple):
    """A tree without its arrays: hashable, equal by value and type.

    Attributes:
        kind: how its root is taken apart.
        cls: the class of its root.
        keys: the names of its children, where they have names.
        static: what else the root holds.
        children: their forms.
    """

    kind: str
    cls: Any = None
    keys: tuple[Any, ...] = ()
    static: tuple[tuple[Any, Exact], ...] = ()
    children: tuple["Form", ...] = ()

    @property
    def arrays(self) -> int:
        """How many arrays such a tree has."""
        return sum(form.arrays for form in self.children) if self.kind != "array" else 1

    def statics(self, path: Path = Path()) -> Iterator[tuple[Path, Exact]]:  # noqa: B008
        """What is static in such a tree, by path: leaves and fields."""
        for name, value in self.static if self.kind != "dict" else ():
            yield (path / name if self.kind == "module" else path), value
        names = self.keys or getattr(self.cls, "_fields", range(len(self.children)))
        for name, child in zip(names, self.children, strict=True):
            yield from child.statics(path / name)


_ARRAY, _NONE = Form("array"), Form("none")


def form_of(tree: Any) -> Form:
    """The form of a tree.

    Raises:
        FunctreeError: a dict whose keys have no order, a tree that contains itself.
    """
    try:
        return _form(tree)
    except (TypeError, RecursionError):
        read(tree)  # says it by path
        raise


def _form(tree: Any) -> Form:
    cls = type(tree)
    if tree is None:
        return _NONE
    if cls is list or cls is tuple:
        return Form("sequence", cls, children=tuple(map(_form, tree)))
    if is_array(tree):
        return _ARRAY
    if isinstance(tree, eqx.Module) and _complete(tree):
        values = _contents(tree)
        static = tuple((name, Exact(values[name])) for name in _fields(cls, True))
        names = _fields(cls, False)
        return Form("module", cls, names, static, tuple(_form(values[name]) for name in names))
    if isinstance(tree, tuple) and hasattr(cls, "_fields"):
        return Form("named tuple", cls, children=tuple(map(_form, tree)))
    if isinstance(tree, dict) and cls is dict:
        keys = tuple(sorted(tree))
        typed = () if all(type(key) is str for key in keys) else (("keys", Exact(keys)),)  # {1: x} is not {True: x}
        return Form("dict", cls, keys, typed, tuple(_form(tree[key]) for key in keys))
    if isinstance(tree, Packed):
        return Form("packed", cls, (), (("static", Exact(tree.static)),), (_ARRAY,) * len(tree.arrays))
    if default_registry.flatten_one_level(tree) is None:
        return Form("static", cls, (), (("value", Exact(tree)),))
    children, treedef = _level(tree)
    return Form("node", cls, (), (("treedef", Exact(treedef)),), tuple(map(_form, children)))


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


def _level(node: Any) -> tuple[list[Any], Any]:
    """A node's children, and the structure of it alone."""
    return tree_flatten(node, is_leaf=lambda x: x is not node)


def taker(form: Form) -> Callable[[Any], list[Any] | None]:
    """A function from a tree to its arrays, in JAX's order; from a tree of another form to None.

    It does not look at what stands in an array's place: that is for the caller, for all of them at once.
    """
    return _Taker().function(form)


def builder(form: Form) -> Callable[[Sequence[Any]], Any]:
    """A function from arrays, in JAX's order, to the tree of a form."""
    return _Builder().function(form)


class _Code:
    """Python's source, as it is written, and the values that it names."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.values: dict[str, Any] = {"contents": _contents, "level": _level, "new": object.__new__}
        self.names: Iterator[str] = (f"x{i}" for i in range(10**9))

    def value(self, value: Any) -> str:
        """The name of a value that the code uses."""
        name = next(self.names)
        self.values[name] = value
        return name

    def define(self, head: str) -> Callable[[Any], Any]:
        source = "\n    ".join((f"def generated({head}):", *self.lines))
        exec(source, self.values)
        return self.values["generated"]


class _Taker(_Code):
    def __init__(self) -> None:
        super().__init__()
        self.arrays: list[str] = []

    def function(self, form: Form) -> Callable[[Any], list[Any] | None]:
        self.lines.append("try:")
        self.visit(form, "tree")
        self.lines += [f"    return [{', '.join(self.arrays)}]", "except KeyError:", "    return None"]
        return self.define("tree")

    def same(self, condition: str) -> None:
        self.lines.append(f"    if {condition}: return None")

    def visit(self, form: Form, at: str) -> None:
        if form.kind == "array":
            self.arrays.append(at)
        elif form.kind == "none":
            self.same(f"{at} is not None")
        elif form.kind == "static":
            self.static(form.static[0][1], at)
        else:
            node = next(self.names)
            self.lines.append(f"    {node} = {at}")
            self.same(f"type({node}) is not {self.value(form.cls)}")
            self.node(form, node)

    def static(self, value: Exact, at: str) -> None:
        found = next(self.names)
        self.lines.append(f"    {found} = {at}")
        self.same(f"{found} is not {self.value(value.value)} and {self.value(value.differs)}({found})")

    def node(self, form: Form, node: str) -> None:
        """What lies below a node of the right class."""
        if form.kind == "packed":
            self.static(form.static[0][1], f"{node}.static")
            self.same(f"len({node}.arrays) != {len(form.children)}")
            self.arrays.append(f"*{node}.arrays")
        elif form.kind == "module":
            at = next(self.names)
            self.lines.append(f"    {at} = contents({node})")
            self.same(f"len({at}) != {len(form.keys) + len(form.static)}")
            for name, value in form.static:
                self.static(value, f"{at}[{name!r}]")
            self.items(form, at)
        elif form.kind == "dict":
            self.same(f"len({node}) != {len(form.keys)}")
            self.items(form, node)
            for _, keys in form.static:  # last: by now they are known to be equal, and so to have an order
                self.static(keys, f"tuple(sorted({node}))")
        else:
            if form.kind == "node":
                at = next(self.names)
                self.lines.append(f"    {node}, {at} = level({node})")
                self.static(form.static[0][1], at)
            self.same(f"len({node}) != {len(form.children)}")
            below = [next(self.names) for _ in form.children]
            if below:
                self.lines.append(f"    {', '.join(below)}, = {node}")
            for child, at in zip(form.children, below, strict=True):
                self.visit(child, at)

    def items(self, form: Form, at: str) -> None:
        for key, child in zip(form.keys, form.children, strict=True):
            self.visit(child, f"{at}[{key!r}]" if type(key) is str else f"{at}[{self.value(key)}]")


class _Builder(_Code):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def function(self, form: Form) -> Callable[[Sequence[Any]], Any]:
        tree = self.visit(form)
        arrays = "".join(f"a{i}, " for i in range(self.count))
        self.lines = [f"{arrays}= arrays" if arrays else "() = arrays", *self.lines, f"return {tree}"]
        return self.define("arrays")

    def visit(self, form: Form) -> str:
        """The expression for a tree."""
        if form.kind == "array":
            self.count += 1
            return f"a{self.count - 1}"
        if form.kind == "none":
            return "None"
        if form.kind == "static":
            return self.value(form.static[0][1].value)
        if form.kind == "module":
            return self.module(form)
        below = [self.visit(child) for child in form.children]
        items = "".join(f"{x}, " for x in below)
        if form.kind == "dict":
            return "{" + ", ".join(f"{self.value(k)}: {x}" for k, x in zip(form.keys, below, strict=True)) + "}"
        if form.kind == "sequence":
            return f"[{items}]" if form.cls is list else f"({items})"
        if form.kind == "named tuple":
            return f"{self.value(form.cls)}({items})"
        if form.kind == "packed":
            return f"{self.value(Packed)}(({items}), {self.value(form.static[0][1].value)})"
        return f"{self.value(form.static[0][1].value.unflatten)}(({items}))"

    def module(self, form: Form) -> str:
        """A module is made as Equinox makes it of its leaves: without `__init__`."""
        below = [self.visit(child) for child in form.children]
        module, inside = next(self.names), next(self.names)
        self.lines += [f"{module} = new({self.value(form.cls)})", f"{inside} = contents({module})"]
        self.lines += [f"{inside}[{name!r}] = {x}" for name, x in zip(form.keys, below, strict=True)]
        self.lines += [f"{inside}[{name!r}] = {self.value(value.value)}" for name, value in form.static]
        return module
