"""A class ─► what its annotations say of each field, inherited ones in terms of the class's own type parameters."""

import inspect
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from functree.tree.annotations.hints import NO_ENV, NOTHING, Env, Hint, Namespace, parse


class ClassHints(NamedTuple):
    """What a class says.

    Attributes:
        fields: of each field.
        bases: for each generic base, what that one's type parameters are in this class.
    """

    fields: Mapping[str, Hint]
    bases: Mapping[type, Env]

    def env(self, cls: type, hint: Hint) -> Env:
        """The type parameters of the class, where the annotation of the place that an instance stands in has them."""
        parameters: tuple[TypeVar, ...] = getattr(cls, "__parameters__", ())
        if hint.later:
            return {variable: hint for variable in parameters}  # unknown; the leaves will say so
        for origin, args in hint.generics:
            if origin is not cls and not issubclass(cls, origin):
                continue
            given: Env = dict(zip(getattr(origin, "__parameters__", ()), args, strict=False))
            if origin is cls:
                return given
            # `Box[X]` holds an instance of a subclass: its parameters are those that it hands to `Box`.
            handed = self.bases.get(origin, {})
            return {v: arg for p, arg in given.items() for v in (_variables(handed[p]) if p in handed else [p])}
        return NO_ENV


_CLASSES: WeakKeyDictionary[type, ClassHints] = WeakKeyDictionary()


def class_hints(cls: type) -> ClassHints:
    """What a class says, read once. A name that cannot be resolved yet is looked up again when a leaf needs it."""
    found = _CLASSES.get(cls)
    if found is None:
        found = _CLASSES[cls] = _read(cls)
    return found


def _read(cls: type) -> ClassHints:
    bases = _bases(cls)
    hints: dict[str, Hint] = {}
    for base in reversed(cls.__mro__[:-1]):
        namespace = _namespace(base)
        for name, annotation in inspect.get_annotations(base).items():
            hints[name] = parse(annotation, namespace).looked_up().bind(bases.get(base, {}))
    return ClassHints({name: hint for name, hint in hints.items() if hint is not NOTHING}, bases)


def _namespace(cls: type) -> Namespace:
    parameters = {p.__name__: p for p in getattr(cls, "__type_params__", ())}
    return Namespace(cls.__module__, {**vars(cls), **parameters, cls.__name__: cls})


def _variables(hint: Hint) -> list[TypeVar]:
    return [later.what for later in hint.later if isinstance(later.what, TypeVar)]


def _bases(cls: type) -> dict[type, dict[TypeVar, Hint]]:
    """For each generic base, what its type parameters are in this class (`class B(A[Float[Array, "p q"]])`)."""
    found: dict[type, dict[TypeVar, Hint]] = {}

    def visit(current: type, env: Env) -> None:
        for base in vars(current).get("__orig_bases__", current.__bases__):
            origin: Any = typing.get_origin(base) or base
            if not isinstance(origin, type) or origin in (typing.Generic, typing.Protocol, object):
                continue
            args = [parse(arg, _namespace(current)).bind(env) for arg in typing.get_args(base)]
            inner: dict[TypeVar, Hint] = dict(zip(getattr(origin, "__parameters__", ()), args, strict=False))
            found.setdefault(origin, {}).update(inner)
            visit(origin, inner)

    visit(cls, {})
    return found
