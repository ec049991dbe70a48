"""A function's annotations ─► what they say of its arguments and its result: layouts by rules, and sizes that agree."""

import functools
import inspect
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.tree_util import default_registry

from functree.errors import AxesError, FunctreeError
from functree.layout.checks import spec_of_axes
from functree.layout.layouts import Decision, Layout, Resolution, as_layout
from functree.layout.meshes import MeshView
from functree.layout.rules import AxisRules
from functree.tree.annotations import NOTHING, Hint
from functree.tree.axes import Names
from functree.tree.classes import class_hints
from functree.tree.leaf import Leaf
from functree.tree.naming import Scope, scoped_axes
from functree.tree.paths import Path
from functree.tree.reading import Reading, read_hint

RESULT = "result"  # what paths call it
_REQUIRED = inspect.Parameter.empty
_STATIC = (int, float, complex, bool, str, bytes, type(None), None)


class Signature:
    """A function as its annotations describe it. A call of it is a named tuple of its parameters' values.

    Such a tuple is a tree whose fields are annotated, so that what reads the axes of a module reads those of a call.

    Args:
        fun: a function, a method, a partial, or a module that can be called; what is bound to it are arguments too,
            `self` among them.

    Raises:
        FunctreeError: a function of C that does not tell its parameters.

    Attributes:
        name: of the function.
        positional: the parameters that are given by position, without those that are bound.
        by_name: the parameter that takes unknown names, or None.
        call: the class of its calls.
        result: the class of its results, with one field.
    """

    fun: Callable[..., Any]
    positional: tuple[str, ...]
    by_name: str | None
    call: Any
    result: Any

    def __init__(self, fun: Callable[..., Any]):
        self.fun, self._args, self._kwargs = unbound(fun)
        self.name: str = getattr(self.fun, "__qualname__", type(self.fun).__name__).rpartition("<locals>.")[2]
        self._signature = _signature(self.fun)
        parameters = list(self._signature.parameters.values())
        kinds = inspect.Parameter
        ordered = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD, kinds.VAR_POSITIONAL)
        bound = {p.name for p in parameters[: len(self._args)]} | set(self._kwargs)
        self.positional = tuple(p.name for p in parameters if p.kind in ordered and p.name not in bound)
        self.by_name = next((p.name for p in parameters if p.kind is kinds.VAR_KEYWORD), None)
        self._many = next((p.name for p in parameters if p.kind is kinds.VAR_POSITIONAL), None)
        self.call = _record(self.fun, {p.name: _annotation(self.fun, p) for p in parameters})
        by_position = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        self._simple = all(p.kind in by_position for p in parameters) and not self._kwargs
        self._defaults = tuple(p.default for p in parameters[len(self._args) :])
        returned = self._signature.return_annotation
        self.result = _record(self.fun, {RESULT: _resolved(self.fun, returned)})

    @property
    def parameters(self) -> tuple[str, ...]:
        """All of them, those that are bound first."""
        return self.call._fields

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call, defaults filled in. Raises TypeError as Python does."""
        if self._simple and not kwargs:
            if len(args) == len(self._defaults):
                return tuple.__new__(self.call, (*self._args, *args))
            values = (*args, *self._defaults[len(args) :])
            if len(values) == len(self._defaults) and not any(x is _REQUIRED for x in values[len(args) :]):
                return self.call(*self._args, *values)
        bound = self._signature.bind(*self._args, *args, **{**self._kwargs, **kwargs})
        bound.apply_defaults()
        return self.call(*bound.arguments.values())

    def each(self, call: Any) -> Iterator[tuple[Path, Any]]:
        """A call's arguments by path, one by one where a parameter takes any number of them."""
        for name, value in zip(self.parameters, call, strict=True):
            if name == self.by_name:
                yield from ((Path((name, key)), value[key]) for key in value)
            elif name == self._many:
                yield from ((Path((name, i)), one) for i, one in enumerate(value))
            else:
                yield Path((name,)), value

    def run(self, call: Any, fun: Callable[..., Any] | None = None) -> Any:
        """The result for a call, of the function or of one that takes the same."""
        args, kwargs = self.arguments(call)
        return (fun or self.fun)(*args, **kwargs)

    def arguments(self, call: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call as the function takes it."""
        bound = inspect.BoundArguments(self._signature, OrderedDict(zip(self.parameters, call, strict=True)))
        return bound.args, bound.kwargs

    def captured(self) -> Iterator[Any]:
        """What the function closes over, in the functions that it closes over too."""
        waiting, seen = [self.fun], set[int]()
        while waiting:
            fun = waiting.pop()
            for value in _nonlocals(fun).values():
                if isinstance(value, types.FunctionType) and id(value) not in seen:
                    seen.add(id(value))
                    waiting.append(value)
                yield value


def unbound(fun: Any) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """A callable ─► the function, and what is bound to it, by position and by name."""
    if isinstance(fun, functools.partial):
        inner, args, kwargs = unbound(fun.func)
        return inner, (*args, *fun.args), {**kwargs, **fun.keywords}
    if hasattr(fun, "__func__") and hasattr(fun, "__self__"):
        return fun.__func__, (fun.__self__,), {}
    if default_registry.flatten_one_level(fun) is not None:
        return type(fun).__call__, (fun,), {}
    if not callable(fun):
        raise TypeError(f"a function was expected, not {fun!r}")
    return fun, (), {}


def _signature(fun: Any) -> inspect.Signature:
    try:
        return inspect.signature(fun)
    except ValueError as error:
        raise FunctreeError(f"{fun!r} does not tell its parameters: wrap it, `lambda x: ...`") from error


def _record(fun: Any, annotations: Mapping[str, Any]) -> Any:
    """A class of named tuples. `typing.NamedTuple` refuses names that begin with an underscore."""
    members = {
        "__slots__": (),
        "__module__": getattr(fun, "__module__", __name__),
        "__annotations__": {name: said for name, said in annotations.items() if said is not inspect.Parameter.empty},
        "__new__": lambda cls, *values: tuple.__new__(cls, values),
        "_fields": tuple(annotations),
    }
    return type("Record", (tuple,), members)


def _annotation(fun: Any, parameter: inspect.Parameter) -> Any:
    said = _resolved(fun, parameter.annotation)
    if said is inspect.Parameter.empty:
        return said
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return tuple[said, ...]
    return dict[str, said] if parameter.kind is inspect.Parameter.VAR_KEYWORD else said


def _resolved(fun: Any, annotation: Any) -> Any:
    """An annotation in quotes looked up where the function stands; one that is not known there stays as it is."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, getattr(inspect.unwrap(fun), "__globals__", {}), _nonlocals(inspect.unwrap(fun)))
    except (NameError, AttributeError, SyntaxError, TypeError):
        return annotation


def _nonlocals(fun: Any) -> dict[str, Any]:
    code, cells = getattr(fun, "__code__", None), getattr(fun, "__closure__", None)
    found = {}
    for name, cell in zip(code.co_freevars, cells, strict=True) if code and cells else ():
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return found


# Layouts


def signature_layouts(fun: Callable[..., Any], rules: Any) -> tuple[dict[str, Any], Any]:
    """The layouts that a function's annotations and some rules give to its arguments and its result.

    Args:
        fun: a function, a method, a partial, or a module that can be called.
        rules: `AxisRules`, or another layout that goes by names.

    Returns:
        `(inputs, output)`: a layout, or a prefix tree of layouts, for each parameter by its name, and for the result.
        For `Float[Array, "batch embed"]` it is the `P` by the rules; for a tuple, one of each element; for a module, or
        where nothing is annotated, the rules themselves, which read the module's own annotations; for names that
        depend on the array (`"*batch embed"`), a layout that waits for it; for a number or a text, None.

    Raises:
        AxesError: an annotation that cannot be resolved, or whose alternatives an array cannot tell apart.
        RuleError: `rules` are no layout.
        ShardingError: names that no rule places.

    Examples:
        >>> def ffn(x: Float[Array, "batch embed"], up: Float[Array, "embed hidden"]) -> Float[Array, "batch hidden"]:
        ...     return x @ up
        >>> rules = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})
        >>> inputs, output = ft.signature_layouts(ffn, rules)
        >>> inputs, output
        ({'x': P('data', None), 'up': P(None, 'model')}, P('data', 'model'))
    """
    signature, layout = Signature(fun), as_layout(rules)

    def given(record: Any, name: str) -> Any:
        if record.__annotations__.get(name, ...) in _STATIC:
            return None
        hint = class_hints(record).fields.get(name, NOTHING)
        try:
            return _layout(_settled(hint), layout)
        except _Unclear as unclear:
            raise AxesError(f"{signature.name}: the annotation of `{name}`, `{hint.text}`, {unclear}") from None

    return {name: given(signature.call, name) for name in signature.parameters}, given(signature.result, RESULT)


class _Unclear(Exception):
    """What is wrong with an annotation, to be said with its place."""


def _settled(hint: Hint) -> Hint:
    try:
        return hint.settled
    except (NameError, AttributeError, SyntaxError, TypeError, LookupError, ValueError) as error:
        raise _Unclear(f"cannot be resolved: {error}") from error


def _layout(hint: Hint, rules: Layout) -> Any:
    """What one annotation says, as plainly as it can be said without the array."""
    if hint is NOTHING:
        return rules
    inner = [_layout(_settled(element), rules) for element in hint.elements]
    one = _layout(_settled(hint.element), rules) if hint.element else None
    anywhere = hint.below is not None and any(form.dtype for form in hint.below.forms)  # `PyTree[X]`
    if hint.names or hint.generics or anywhere or bool(hint.forms) + bool(hint.elements) + bool(hint.element) != 1:
        return ByHint(hint, rules)
    if hint.elements:
        return tuple(inner)
    if hint.element:
        return ByHint(hint, rules) if isinstance(one, tuple) else one
    return _array_layout(hint, rules)


def _array_layout(hint: Hint, rules: Layout) -> Any:
    """The spec of the one array that an annotation speaks of; where it depends on the array, what waits for it."""
    kinds: dict[Any, set[Any]] = {}
    for form in hint.forms:
        if form.wrong:
            raise _Unclear(f"cannot be read: {form.wrong}")
        kinds.setdefault((len(form.dims), form.dtype), set()).add((form.spec, *(dim.token for dim in form.dims)))
    if any(len(alternatives) > 1 for alternatives in kinds.values()):
        raise _Unclear("is ambiguous: alternatives of one rank and dtype name its dimensions differently")
    (axes, spec), *others = {(form.plain, form.spec) for form in hint.forms}
    if spec is not None and not others:
        return spec
    if axes is None or others or not isinstance(rules, AxisRules):
        return ByHint(hint, rules)
    return spec_of_axes(rules, axes, None, None)


@dataclass(frozen=True, repr=False, eq=False)
class ByHint(Layout):
    """Rules for leaves whose names an annotation gives when the arrays are there."""

    hint: Hint
    rules: Layout

    @property
    def given_names(self) -> Mapping[type, Names]:
        return self.rules.given_names

    def resolve(self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None) -> Resolution:
        return self.rules.resolve([self._named(leaf) for leaf in leaves], mesh, before)

    def _named(self, leaf: Leaf) -> Leaf:
        path = leaf.patterned[0]
        names = scoped_axes(path, [Scope(self.hint.names, 0, 0)]) if self.hint.names else None
        told = read_hint(Reading(), leaf.value, leaf.path, hint_at(self.hint, path), names, ())
        return leaf._replace(**told._asdict()) if told.annotated else leaf

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByHint) and (self.rules, _said(self.hint)) == (other.rules, _said(other.hint))

    def __hash__(self) -> int:
        return hash((self.hint.text, self.rules))

    def __repr__(self) -> str:
        return f"{self.rules!r} by `{self.hint.text}`"


def _said(hint: Hint | None) -> Any:
    """All that a hint says, to be compared."""
    if hint is None:
        return None
    generics = [(cls, *map(_said, args)) for cls, args in hint.generics]
    inner = (_said(hint.element), [*map(_said, hint.elements)], _said(hint.below), generics)
    return (hint.text, hint.forms, hint.names, hint.buffer, hint.later, inner)


def hint_at(hint: Hint, path: Path) -> Hint:
    """What an annotation says of a place in the containers below it."""
    for key in path:
        hint = hint.tried().child(key if isinstance(key, int) else None)
    return hint.tried()
