"""A class ─► the hint of each of its fields; hints of inherited fields use the type parameters of
the class itself."""

import inspect
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from functree.labels.annotations.hints import NO_ENV, NOTHING, Env, Hint, Namespace, parse


class ClassHints(NamedTuple):
    """The hints of a class.

    Attributes:
        fields: the hint of each field that has one.
        bases: for each generic base class, the values that its type parameters have in this class.
    """

    fields: Mapping[str, Hint]
    bases: Mapping[type, Env]

    def env(self, cls: type, hint: Hint) -> Env:
        """The values of the type parameters of the class, for an instance whose annotation is
        `hint`."""
        parameters: tuple[TypeVar, ...] = getattr(cls, "__parameters__", ())
        if hint.references:
            # The annotation cannot be resolved, so the parameters are unknown too. Each leaf that
            # depends on one of them then reports the annotation that cannot be resolved.
            return dict.fromkeys(parameters, hint)
        for origin, args in hint.generics:
            if origin is not cls and not issubclass(cls, origin):
                continue
            given: Env = dict(zip(getattr(origin, "__parameters__", ()), args, strict=False))
            if origin is cls:
                return given
            # The annotation is `Box[X]`, and the value is an instance of a subclass of `Box`: the
            # subclass' parameters are the type variables in the arguments that it gives to `Box`.
            handed = self.bases.get(origin, {})
            values: dict[TypeVar, Hint] = {}
            for parameter, arg in given.items():
                if parameter in handed:
                    values |= _solved(handed[parameter], arg)
                else:
                    values[parameter] = arg
            return values
        return NO_ENV


_CLASSES: WeakKeyDictionary[type, ClassHints] = WeakKeyDictionary()


def class_hints(cls: type) -> ClassHints:
    """The hints of a class, read once. A name that cannot be resolved yet is looked up again when a
    leaf needs it."""
    found = _CLASSES.get(cls)
    if found is None:
        found = _CLASSES[cls] = _read(cls)
    return found


def _read(cls: type) -> ClassHints:
    bases = _bases(cls)
    hints: dict[str, Hint] = {}
    # Base classes first, so that a field that a subclass annotates again has the annotation of the
    # subclass. Each annotation is read in the module of the class that wrote it. The last class of
    # the order is `object`.
    for base in reversed(cls.__mro__[:-1]):
        namespace = _namespace(base)
        for name, annotation in inspect.get_annotations(base).items():
            hint = parse(annotation, namespace).looked_up().bind(bases.get(base, {}))
            hints.pop(name, None)
            if hint is not NOTHING:
                hints[name] = hint
    return ClassHints(hints, bases)


def _namespace(cls: type) -> Namespace:
    """The names that the annotations of a class may use: those of its module and its body, and its
    own name."""
    # Python keeps the parameters of `class Box[T]` in `__type_params__` only.
    parameters = {p.__name__: p for p in getattr(cls, "__type_params__", ())}
    return Namespace(cls.__module__, {**vars(cls), **parameters, cls.__name__: cls})


def _solved(pattern: Hint, value: Hint) -> dict[TypeVar, Hint]:
    """The values of the type variables in a pattern, such as `list[U]`, for which it says the same
    as another hint."""
    value = value.tried()
    variables = (one.what for one in pattern.references if one.is_variable)
    found: dict[TypeVar, Hint] = dict.fromkeys(variables, value)
    pairs: list[tuple[Hint | None, Hint | None]] = [
        (pattern.element, value.element),
        (pattern.below, value.below),
    ]
    pairs += zip(pattern.elements, value.elements, strict=False)
    for (cls, arguments), (other, values) in zip(pattern.generics, value.generics, strict=False):
        if cls is other:
            pairs += zip(arguments, values, strict=False)
    for ours, its in pairs:
        if ours is not None and its is not None:
            found |= _solved(ours, its)
    return found


def _bases(cls: type) -> dict[type, dict[TypeVar, Hint]]:
    """For each generic base, the values of its type parameters in this class (`class
    B(A[Float[Array, "p q"]])`)."""
    found: dict[type, dict[TypeVar, Hint]] = {}
    _add_bases(cls, {}, found)
    return found


def _add_bases(cls: type, env: Env, found: dict[type, dict[TypeVar, Hint]]) -> None:
    """Add the values for each generic base of a class whose own type parameters have the values
    `env`."""
    # `__orig_bases__` has the bases with their arguments. It is looked up in the class itself,
    # since a subclass without generic bases of its own would inherit the attribute.
    for base in vars(cls).get("__orig_bases__", cls.__bases__):
        origin: Any = typing.get_origin(base) or base
        if not isinstance(origin, type) or origin in (typing.Generic, typing.Protocol, object):
            continue
        args = [parse(arg, _namespace(cls)).bind(env) for arg in typing.get_args(base)]
        inner: dict[TypeVar, Hint] = dict(
            zip(getattr(origin, "__parameters__", ()), args, strict=False)
        )
        found.setdefault(origin, {}).update(inner)
        _add_bases(origin, inner, found)
