"""JSON of functree ─► plain values, of the types that its format says."""

import json
from typing import Any

from functree.errors import FunctreeError

Form = Any
"""What a value must be: a type; `None`; a tuple of forms, of which one fits; `[form]`, a list; an object, either
`{name: form, ...}` with these names at least, or `{...: form}` with any names."""


def loaded(text: str, kind: str, newest: int, form: Form) -> dict[str, Any]:
    """What JSON of functree says.

    Args:
        text: the JSON.
        kind: what it is of: `plan`, `ledger`.
        newest: the newest format that can be read.
        form: what the values must be.

    Raises:
        FunctreeError: it is not JSON; it is of something else; it is of a newer format; a value is missing, or of
            another type.
    """
    if not isinstance(text, str | bytes):
        raise FunctreeError(f"a {kind} is read from the text of its JSON, not from {text!r}")
    try:
        data = json.loads(text)
    except ValueError as error:
        raise FunctreeError(f"not the JSON of a {kind}: {error}") from error
    if not isinstance(data, dict) or data.get("functree") != kind:
        found = data.get("functree") if isinstance(data, dict) else None
        raise FunctreeError(f"the JSON is of a {found}, not of a {kind}" if found else f"not the JSON of a {kind}")
    if data.get("format") not in range(1, newest + 1):
        raise FunctreeError(
            f"the JSON of this {kind} has format {data.get('format')!r}, and this functree reads up to {newest}"
        )
    misfit = _misfit(data, form, "")
    if misfit is not None:
        raise FunctreeError(f"the JSON is not of a whole {kind}: {misfit}")
    return data


def _misfit(value: Any, form: Form, where: str) -> str | None:
    """The first value that is missing, or of another type, in a sentence; None if all fit."""
    if isinstance(form, tuple):
        found = [_misfit(value, one, where) for one in form]
        return None if None in found else found[0]
    kind = type(form) if isinstance(form, list | dict) else form
    if type(value) is not (type(None) if kind is None else kind):
        return f"`{where}` is {json.dumps(value)}, and not {_NAMES[kind]}"
    inside: list[tuple[Any, Any, Any]] = []  # name, value and form of what is in it
    if isinstance(form, list):
        inside = [(i, one, form[0]) for i, one in enumerate(value)]
    elif isinstance(form, dict):
        forms = dict.fromkeys(value, form[...]) if ... in form else form
        missing = [name for name in forms if name not in value]
        if missing:
            return f"`{where}` has no `{missing[0]}`" if where else f"it has no `{missing[0]}`"
        inside = [(name, value[name], one) for name, one in forms.items()]
    misfits = (_misfit(one, inner, f"{where}.{name}" if where else name) for name, one, inner in inside)
    return next((misfit for misfit in misfits if misfit is not None), None)


_NAMES = {int: "a whole number", str: "a text", bool: "true or false", list: "a list", dict: "an object", None: "null"}
