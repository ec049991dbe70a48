"""JSON of functree ─► plain values, of the types that its format says."""

import json
from collections.abc import Mapping
from typing import Any

from functree.errors import FunctreeTypeError, FunctreeValueError

Form = Any
"""What a value must be: a type; `None`; a tuple of forms, of which one fits; `[form]`, a list; an
object, either `{name: form, ...}` with these names at least, or `{...: form}` with any names."""


def loaded(text: str, kind: str, newest: int, form: Form) -> dict[str, Any]:
    """What JSON of functree says.

    Args:
        text: the JSON.
        kind: what it is of: `plan`, `ledger`.
        newest: the newest format that can be read.
        form: what the values must be.

    Raises:
        FunctreeError: it is not JSON; it is of something else; it is of a newer format; a value is
            missing, or of another type.
    """
    if not isinstance(text, str | bytes):
        raise FunctreeTypeError(f"a {kind} is read from the text of its JSON, not from {text!r}")
    try:
        data = json.loads(text)
    except ValueError as error:
        raise FunctreeValueError(f"not the JSON of a {kind}: {error}") from error
    # Plans, ledgers and checkpoints name themselves, so that one is not taken for the other.
    found = None
    if isinstance(data, dict):
        found = data.get("functree")
    if not found:
        raise FunctreeValueError(f"not the JSON of a {kind}")
    if found != kind:
        raise FunctreeValueError(f"the JSON is of a {found}, not of a {kind}")
    given = data.get("format")
    if given not in range(1, newest + 1):
        readable = f"this functree reads up to {newest}"
        raise FunctreeValueError(f"the JSON of this {kind} has format {given!r}, and {readable}")
    misfit = _misfit(data, form, "")
    if misfit is not None:
        raise FunctreeValueError(f"the JSON is not of a whole {kind}: {misfit}")
    return data


def _misfit(value: Any, form: Form, where: str) -> str | None:
    """The first value that is missing, or of another type, in a sentence; None if all fit.

    Args:
        value: a value of the JSON.
        form: what it must be.
        where: its place, such as `rows.3.path`; empty for the whole.
    """
    if isinstance(form, tuple):
        misfits = [_misfit(value, one, where) for one in form]
        if None in misfits:
            return None
        # `(str, None)`: that it is not null is not what is wrong with a value that is there.
        return misfits[0]
    kind = _kind(form)
    # Not by `isinstance`: to Python, true is a number.
    if type(value) is not kind:
        return f"`{where}` is {json.dumps(value)}, and not {_NAMES[kind]}"
    if isinstance(form, list):
        return _misfit_inside(value, dict.fromkeys(range(len(value)), form[0]), where)
    if not isinstance(form, dict):
        return None
    if ... in form:
        return _misfit_inside(value, dict.fromkeys(value, form[...]), where)
    # Other names than these are passed over, so that a later functree can add one without a new
    # format.
    for name in form:
        if name not in value and where:
            return f"`{where}` has no `{name}`"
        if name not in value:
            return f"it has no `{name}`"
    return _misfit_inside(value, form, where)


def _misfit_inside(value: Any, forms: Mapping[Any, Form], where: str) -> str | None:
    """As `_misfit`, of what is in a list or an object: the form of each index, or of each name."""
    for name, form in forms.items():
        misfit = _misfit(value[name], form, f"{where}.{name}".removeprefix("."))
        if misfit is not None:
            return misfit
    return None


def _kind(form: Form) -> type:
    if form is None:
        return type(None)
    if isinstance(form, list | dict):
        return type(form)
    return form


_NAMES = {
    int: "a whole number",
    str: "a text",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    type(None): "null",
}
