"""The types of the package's signatures ─► the types that a reader of the reference can use.

A signature shows `int` for `Size`, which is an `Annotated[int, ...]` with a check of functree. It
shows `T` for the type variable `_T`, and the value of a private alias. Parameters that only catch
misspelled keywords, and values with private names, are left out.
"""

import re
from dataclasses import fields, replace
from typing import Any

import griffe

_STRING = re.compile(r"""(["']).*?\1""")
_PRIVATE = re.compile(r"(?<![\w.])_\w")


class PlainSignatures(griffe.Extension):
    """Rewrite the annotations of all functions and attributes."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrite a package that griffe has read."""
        _rewrite(pkg, pkg)


def _rewrite(scope: griffe.Object, package: griffe.Module) -> None:
    for member in scope.members.values():
        if isinstance(member, griffe.Function):
            _rewrite_function(member, package)
        elif isinstance(member, griffe.Attribute):
            if "Annotated" not in str(member.value):
                member.annotation = _plain(member.annotation, package)
            if _PRIVATE.search(_STRING.sub("", str(member.value))):
                member.value = None
        elif isinstance(member, griffe.Module | griffe.Class):
            _rewrite(member, package)


def _rewrite_function(function: griffe.Function, package: griffe.Module) -> None:
    kept = [each for each in function.parameters if each.name != "refused"]
    function.parameters = griffe.Parameters(*kept)
    for parameter in kept:
        parameter.annotation = _plain(parameter.annotation, package)
    function.returns = _plain(function.returns, package)
    for overload in function.overloads or ():
        _rewrite_function(overload, package)


def _plain(expression: Any, package: griffe.Module) -> Any:
    """Expand the `Annotated`s and the private names of an expression."""
    if isinstance(expression, list | tuple):
        return type(expression)(_plain(each, package) for each in expression)
    if isinstance(expression, griffe.ExprName):
        return _value_of_name(expression, package)
    if not isinstance(expression, griffe.Expr):
        return expression
    if isinstance(expression, griffe.ExprAttribute):  # `_P.args`
        first, *rest = expression.values
        return replace(expression, values=[_plain(first, package), *rest])
    if isinstance(expression, griffe.ExprSubscript) and str(expression.left) == "Annotated":
        return _plain(expression.slice.elements[0], package)
    values = {
        field.name: _plain(getattr(expression, field.name), package)
        for field in fields(expression)
        if field.name != "parent"
    }
    return replace(expression, **values)


def _value_of_name(name: griffe.ExprName, package: griffe.Module) -> Any:
    path = name.canonical_path
    if not path.startswith(f"{package.path}."):
        return name
    try:
        alias = package.modules_collection[path]
    except KeyError:  # a name inside of a function
        return name
    value = alias.value if alias.is_attribute else None
    if str(value).startswith("Annotated["):
        return _plain(value, package)
    if not name.name.startswith("_"):
        return name
    if str(value).startswith(("TypeVar", "ParamSpec")):
        return griffe.ExprName(name.name.lstrip("_"))  # in no scope, where `P` may be a spec
    return _plain(value, package)
