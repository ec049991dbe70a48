"""JSON of functree ─► plain values, of the types that its format says."""

import json
from collections.abc import Mapping
from typing import Any

from functree.errors import FunctreeTypeError, FunctreeValueError

Form = Any
"""What a value must be: a type; `None`; `SIZE`; a tuple of forms, of which one fits; `[form]`, a
list; an object, either `{name: form, ...}` with these names at least, or `{...: form}` with any
names."""


class _Size:
    """The form of a number of elements, bytes or devices."""

    # More than all of an array can have in any case, and a float has it.
    LIMIT = 2**100

    @classmethod
    def fits(cls, value: Any) -> bool:
        return type(value) is int and 0 <= value < cls.LIMIT


SIZE = _Size()
"""A whole number, at least 0 and less than 2¹⁰⁰."""

MOST_LEVELS = 100
"""How many lists and objects may be in one another.

Python reads JSON with one call inside another, and what was read is written and shown likewise.
This is far from what Python allows, and far more than anybody writes.
"""


def parsed(text: str | bytes) -> Any:
    """What a text says that is JSON.

    Raises:
        ValueError: it is not JSON; its values are in one another more than `MOST_LEVELS` times; an
            object has a name twice, so that readers differ in which of the values they take.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise _too_deep() from None
    inside = [value]
    for _ in range(MOST_LEVELS):
        inside = [one for outer in inside for one in _containers(outer)]
        if not inside:
            return value
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"it has values in one another, more than {MOST_LEVELS} times")


def _containers(value: Any) -> list[Any]:
    """The lists and objects in a value."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return []
    return [one for one in value if isinstance(one, list | dict)]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"an object has {json.dumps(name)} twice")
            seen.add(name)
    return found


def value_text(value: Any) -> str:
    """A value of JSON in messages: what is longer than a line or two is cut."""
    text = json.dumps(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


_MOST_SHOWN = 200


def loaded(
    text: str, kind: str, newest: int, form: Form, added: Mapping[str, Form] | None = None
) -> dict[str, Any]:
    """What JSON of functree says.

    Args:
        text: the JSON.
        kind: what it is of: `plan`, `ledger`.
        newest: the newest format that can be read.
        form: what the values must be.
        added: what those must be that earlier versions did not write.

    Raises:
        FunctreeError: it is not JSON; it is of something else; it is of a newer format; a value is
            missing, or of another type.
    """
    if not isinstance(text, str | bytes):
        raise FunctreeTypeError(f"a {kind} is read from the text of its JSON, not from {text!r}")
    try:
        data = parsed(text)
    except ValueError as error:
        raise FunctreeValueError(f"not the JSON of a {kind}: {error}") from error
    # Plans, ledgers and checkpoints name themselves, so that one is not taken for the other.
    found = None
    if isinstance(data, dict):
        found = data.get("functree")
    if not found:
        raise FunctreeValueError(f"not the JSON of a {kind}")
    if found != kind:
        name = found if isinstance(found, str) else value_text(found)
        raise FunctreeValueError(f"the JSON is of a {name}, not of a {kind}")
    given = data.get("format")
    if given not in range(1, newest + 1):
        readable = f"this functree reads up to {newest}"
        raise FunctreeValueError(f"the JSON of this {kind} has format {given!r}, and {readable}")
    forms = {name: one for name, one in (added or {}).items() if name in data}
    misfit = _misfit(data, form, "") or _misfit_inside(data, forms, "")
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
    if form is SIZE:
        return None if SIZE.fits(value) else f"`{where}` is {value_text(value)}, and not a size"
    kind = _kind(form)
    # Not by `isinstance`: to Python, true is a number.
    if type(value) is not kind:
        return f"`{where}` is {value_text(value)}, and not {_NAMES[kind]}"
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
