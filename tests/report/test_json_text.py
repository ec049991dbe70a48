"""JSON of functree ─► plain values, or which value is not of its type."""

import json
from typing import Any

import pytest

from functree.errors import FunctreeError, FunctreeTypeError, FunctreeValueError
from functree.report.json_text import SIZE, loaded
from tests.lib.checks import raises

FORM: Any = {
    "sizes": {...: int},
    "rows": [{"path": str, "spec": [(str, [str], None)], "whole": bool}],
    "note": (str, None),
    "size": SIZE,
}
ADDED = {"since": str}
ROW = {"path": "w", "spec": ["data", None, ["a", "b"]], "whole": True}
DATA = {
    "functree": "plan",
    "format": 2,
    "sizes": {"data": 2},
    "rows": [ROW],
    "note": None,
    "size": 2**70,
}
# What `json.dumps` does not write
TEXTS = {'"more": {}': '"more": {"a": 1, "a": 2}'}
for value, levels in (("null", 100), ("true", 10**5)):
    TEXTS[f'"more": {value}'] = f'"more": {"[" * levels + "]" * levels}'


def text(**changes: Any) -> str:
    """The JSON, with other values; a value that is `...` is left out."""
    return json.dumps({name: one for name, one in (DATA | changes).items() if one is not ...})


GOOD: dict[str, dict[str, Any]] = {
    "as it is": {},
    "the oldest format": {"format": 1},
    "nothing in it": {"sizes": {}, "rows": []},
    "what older ones do not have": {"since": "3"},
    "another alternative": {"note": "text"},
    "names that a later functree adds": {"more": 1.5, "rows": [ROW | {"more": None}]},
}


@pytest.mark.parametrize("case", GOOD)
def test_what_is_read(case: str) -> None:
    assert loaded(text(**GOOD[case]), "plan", 2, FORM, ADDED) == DATA | GOOD[case]
    assert loaded(text(**GOOD[case]).encode(), "plan", 2, FORM) == DATA | GOOD[case]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "of something else": ({"functree": "ledger"}, "the JSON is of a ledger, not of a plan"),
    "of nothing": ({"functree": ...}, "not the JSON of a plan"),
    "newer": ({"format": 3}, "the JSON of this plan has format 3, and this functree reads up to 2"),
    "before the first": ({"format": 0}, "has format 0, and this functree reads up to 2"),
    "a format that is no number": ({"format": "2"}, "has format '2'"),
    "without a format": ({"format": ...}, "has format None"),
    "without a name": ({"rows": ...}, "the JSON is not of a whole plan: it has no `rows`"),
    "without a name, inside": ({"rows": [ROW, {}]}, "not of a whole plan: `rows.1` has no `path`"),
    "no list": ({"rows": {}}, "`rows` is {}, and not a list"),
    "no object": ({"sizes": []}, "`sizes` is [], and not an object"),
    "no text": ({"rows": [ROW | {"path": 3}]}, "`rows.0.path` is 3, and not a text"),
    "no whole number": ({"sizes": {"a": 1, "b": 2.5}}, "`sizes.b` is 2.5, and not a whole number"),
    "true for a number": ({"sizes": {"a": True}}, "`sizes.a` is true, and not a whole number"),
    "null for a number": ({"sizes": {"a": None}}, "`sizes.a` is null, and not a whole number"),
    "a number for true": (
        {"rows": [ROW | {"whole": 1}]},
        "`rows.0.whole` is 1, and not true or fa",
    ),
    "none of several": ({"note": 3}, "`note` is 3, and not a text"),
    "none of several, inside": (
        {"rows": [ROW, ROW | {"spec": ["a", 3]}]},
        "`rows.1.spec.1` is 3, and not a text",
    ),
    "no size": ({"size": -1}, "`size` is -1, and not a size"),
    "a size that no float has": ({"size": 10**400}, "`size` is 1000"),
    "true for a size": ({"size": True}, "`size` is true, and not a size"),
    "a size that is no whole number": ({"size": 2.0}, "`size` is 2.0, and not a size"),
    "another type, of what older ones do not have": (
        {"since": 3},
        "the JSON is not of a whole plan: `since` is 3, and not a text",
    ),
    "a name twice": ({"more": {}}, 'not the JSON of a plan: an object has "a" twice'),
    "too deep": ({"more": None}, "it has values in one another, more than 100 times"),
    "far too deep": ({"more": True}, "it has values in one another, more than 100 times"),
    "a wrong element of one of several": (
        {"rows": [ROW | {"spec": [["a", None]]}]},
        '`rows.0.spec.0` is ["a", null], and not a text',
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(case: str) -> None:
    changes, message = BAD[case]
    given = text(**changes)
    for written, other in TEXTS.items():
        given = given.replace(written, other)
    with raises(message, error=FunctreeValueError):
        loaded(given, "plan", 2, FORM, ADDED)


@pytest.mark.parametrize("given", ["{", "", "[]", "3", "null", '"plan"', "{}"])
def test_what_is_no_json_of_functree(given: str) -> None:
    with raises("not the JSON of a ledger", error=FunctreeValueError):
        loaded(given, "ledger", 1, {})


def test_what_is_no_text() -> None:
    with raises("a plan is read from the text of its JSON, not from 3", error=FunctreeTypeError):
        loaded(3, "plan", 1, {})  # pyright: ignore[reportArgumentType]
    assert issubclass(FunctreeTypeError, FunctreeError)
