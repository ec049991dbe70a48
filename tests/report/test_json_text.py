"""A named tuple or dataclass in JSON, and back, or which value is not of its type."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

import functree as ft
from functree.errors import FunctreeError, FunctreeTypeError, FunctreeValueError, Problem
from functree.report.json_text import json_of, read_json
from functree.tree.arrays import DType
from functree.tree.paths import Path
from tests.lib.checks import raises


@dataclass(frozen=True)
class Row:
    path: Path
    spec: PartitionSpec | None
    whole: bool


class Report(NamedTuple):
    sizes: Mapping[str, int]
    rows: tuple[Row, ...]
    note: str | None
    size: int
    since: str | None = None


ROW = {"path": "w", "spec": ["data", None, ["a", "b"]], "whole": True}
DATA = {
    "functree": "plan",
    "format": 1,
    "sizes": {"data": 2},
    "rows": [ROW],
    "note": None,
    "size": 2**70,
}
REPORT = Report({"data": 2}, (Row(Path("w"), ft.P("data", None, ("a", "b")), True),), None, 2**70)
# What `json.dumps` does not write
TEXTS = {
    '"more": {}': '"more": {"a": 1, "a": 2}',
    '"more": null': f'"more": {"[" * 10**5 + "]" * 10**5}',
}


def text(**changes: Any) -> str:
    """The JSON, with other values; a value that is `...` is left out."""
    return json.dumps({name: one for name, one in (DATA | changes).items() if one is not ...})


def test_what_is_written() -> None:
    assert json.loads(json_of("plan", REPORT)) == DATA
    assert json.loads(json_of("plan", REPORT._replace(since="3"))) == DATA | {"since": "3"}


GOOD: dict[str, tuple[dict[str, Any], Report]] = {
    "as it is": ({}, REPORT),
    "nothing in it": ({"sizes": {}, "rows": []}, REPORT._replace(sizes={}, rows=())),
    "what older ones do not have": ({"since": "3"}, REPORT._replace(since="3")),
    "another alternative": ({"note": "text"}, REPORT._replace(note="text")),
    "names that a later functree adds": (
        {"more": 1.5, "rows": [ROW | {"more": None}]},
        REPORT,
    ),
}


@pytest.mark.parametrize("case", GOOD)
def test_what_is_read(case: str) -> None:
    changes, report = GOOD[case]
    assert read_json(text(**changes), "plan", Report) == report
    assert read_json(json_of("plan", report), "plan", Report) == report


class Every(NamedTuple):
    axes: ft.Axes
    dtype: DType
    key: DType
    mesh: Mesh | AbstractMesh | None
    problem: Problem
    by_path: Mapping[Path, tuple[int, ...]]
    anything: Any = None


def test_each_type() -> None:
    every = Every(
        ft.Axes("a", None),
        jnp.dtype("bfloat16"),
        jax.random.key(0).dtype,
        AbstractMesh((2,), ("data",)),
        Problem(Path("a.b"), (2, 3), "w", "is wrong", "mend it"),
        {Path("a.0"): (1, 2)},
        {"a": [1.5, None]},
    )
    assert read_json(json_of("every", every), "every", Every) == every


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "of something else": (
        {"functree": "ledger"},
        'the text is not plan JSON: its `functree` is "ledger"',
    ),
    "of nothing": ({"functree": ...}, "not plan JSON"),
    "newer": (
        {"format": 3},
        "the JSON of this plan has format 3, but this version of functree reads up to format 1",
    ),
    "before the first": (
        {"format": 0},
        "has format 0, but this version of functree reads up to format 1",
    ),
    "without a format": ({"format": ...}, "has format None"),
    "without a name": ({"rows": ...}, "invalid plan JSON: it has no `rows`"),
    "without a name, inside": (
        {"rows": [ROW, {}]},
        "invalid plan JSON: `rows.1` has no `path`",
    ),
    "no list": ({"rows": {}}, "`rows` is {}, not of type list"),
    "no object": ({"sizes": []}, "`sizes` is [], not of type dict"),
    "no text": ({"rows": [ROW | {"path": 3}]}, "`rows.0.path` is 3, not of type str"),
    "no whole number": ({"sizes": {"a": 1, "b": 2.5}}, "`sizes.b` is 2.5, not of type int"),
    "true for a number": ({"sizes": {"a": True}}, "`sizes.a` is true, not of type int"),
    "a number for true": (
        {"rows": [ROW | {"whole": 1}]},
        "`rows.0.whole` is 1, not of type bool",
    ),
    "none of several": ({"note": 3}, "`note` is 3, not of type str"),
    "no size": ({"size": -1}, "`size` is -1, not a size"),
    "a size that no float has": ({"size": 10**400}, "`size` is 1000"),
    "a name twice": ({"more": {}}, 'not plan JSON: an object repeats the name "a"'),
    "too deep": ({"more": None}, "it is nested too deep"),
    "a wrong element of one of several": (
        {"rows": [ROW | {"spec": [["a", None]]}]},
        "`rows.0.spec.0.1` is null, not of type str",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(case: str) -> None:
    changes, message = BAD[case]
    given = text(**changes)
    for written, other in TEXTS.items():
        given = given.replace(written, other)
    with raises(message, error=FunctreeValueError):
        read_json(given, "plan", Report)


@pytest.mark.parametrize("dtype", ["float33", "(3,f4", "key<other>"])
def test_dtypes_that_there_are_not(dtype: str) -> None:
    every = json.dumps({"functree": "every", "format": 1, "axes": [], "dtype": dtype})
    with raises("invalid every JSON: ", dtype, error=FunctreeValueError):
        read_json(every, "every", Every)


@pytest.mark.parametrize("given", ["{", "", "[]", "3", "null", '"plan"', "{}"])
def test_what_is_no_json_of_functree(given: str) -> None:
    with raises("not ledger JSON", error=FunctreeValueError):
        read_json(given, "ledger", Report)


def test_what_is_no_text() -> None:
    with raises("expected the JSON text of a plan, not 3", error=FunctreeTypeError):
        read_json(3, "plan", Report)  # pyright: ignore[reportArgumentType]
    assert issubclass(FunctreeTypeError, FunctreeError)
