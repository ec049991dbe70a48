"""`rules.toml`: what each text says, what is said of a wrong one, and that reading undoes
writing."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import functree as ft
from functree.layout.rules_file import layout_of_text, rules_text
from tests.lib.checks import raises

P = ft.P

# A text, and the layout that it says.
TEXTS: dict[str, tuple[str, Any]] = {
    "rules": (
        'batch = "data"\nvocab = ["model", "data"]\nembed = false\n"..." = false\n',
        ft.AxisRules({"batch": "data", "vocab": ("model", "data"), "embed": None, ...: None}),
    ),
    "in the order of the file": (
        'b = "model"\na = "model"\n',
        ft.AxisRules([("b", "model"), ("a", "model")]),
    ),
    "with fallbacks": (
        'rules = [["hidden", "model"], ["hidden", false], ["...", false]]\n',
        ft.AxisRules([("hidden", "model"), ("hidden", None), (..., None)]),
    ),
    "with FSDP": (
        'batch = "data"\n\n[fsdp]\naxis = "data"\n',
        ft.AxisRules({"batch": "data"}) | ft.FSDP("data"),
    ),
    "with FSDP over several mesh axes": (
        'batch = "data"\n\n[fsdp]\naxis = ["data", "model"]\nmin_size = 0\n',
        ft.AxisRules({"batch": "data"}) | ft.FSDP(("data", "model"), min_size=0),
    ),
    "FSDP alone": ('[fsdp]\naxis = "data"\n', ft.FSDP("data")),
    "no rules": ("rules = []\n", ft.AxisRules({})),
    "filters": (
        'filters = [["**.bias", []], ["head.**", ["model", false, ["a", "b"]]]]\nbatch = "data"\n',
        ft.StateSharding(
            {
                "**.bias": P(),
                "head.**": P("model", None, ("a", "b")),
                ...: ft.AxisRules({"batch": "data"}),
            }
        ),
    ),
    "filters before FSDP": (
        'filters = [["**.bias", []]]\n\n[fsdp]\naxis = "data"\n',
        ft.StateSharding({"**.bias": P(), ...: ft.FSDP("data")}),
    ),
    "an axis that is called as a key is": (
        'rules = [["rules", "model"], ["fsdp", false]]\n',
        ft.AxisRules({"rules": "model", "fsdp": None}),
    ),
    "other letters": ('"größe" = "módel"\n', ft.AxisRules({"größe": "módel"})),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text(name: str, tmp_path: Path) -> None:
    text, layout = TEXTS[name]
    (tmp_path / "rules.toml").write_text(text, encoding="utf-8")
    assert ft.read_rules(tmp_path / "rules.toml") == layout
    written = rules_text(layout)
    assert layout_of_text(written, "again") == layout
    if name != "filters before FSDP":
        # As a person writes it, but for an empty line between filters and a table.
        assert written == text


WRONG: dict[str, tuple[str, str]] = {
    "not TOML": ("batch = data", "r.toml: not TOML: Invalid value (at line 1, column 9)"),
    "nothing": ("# later\n", 'r.toml: it has no rules: write `batch = "data"`'),
    "a number": (
        'batch = "data"\nembed = 1\n',
        'r.toml:2: `embed` is "axis", ["axis", "other"] or false, not 1',
    ),
    "true": ("embed = true\n", 'r.toml:1: `embed` is "axis", ["axis", "other"] or false, not true'),
    "no mesh axes": ("embed = []\n", 'r.toml:1: `embed` is "axis", ["axis", "other"] or false'),
    "an empty mesh axis": ('embed = ""\n', "r.toml:1: rule embed→'': mesh axes are non-empty"),
    "no axis name": ('\n"a b" = "data"\n', "r.toml:2: 'a b' is not an axis name"),
    "a mesh axis twice": (
        'x = "data"\nembed = ["data", "data"]\n',
        "r.toml:2: rule embed→(data, data): mesh axis `data` is named twice",
    ),
    "others not last": (
        '"..." = false\nembed = "data"\n',
        "r.toml:1: `...` may only be the last rule",
    ),
    "others sharded": (
        '"..." = "data"\n',
        'r.toml:1: "..." is `false`, not "data": name the axis that is to be sharded',
    ),
    "a rule that never applies": (
        'rules = [["a", false], ["a", "data"]]\n',
        "r.toml:1: rule a→data can never apply",
    ),
    "rules beside rules": (
        'batch = "data"\nrules = [["a", "b"]]\n',
        "r.toml:1: `batch` stands beside `rules`, which has all rules as pairs",
    ),
    "rules as a table": (
        '[rules]\nbatch = "data"\n',
        'r.toml:1: `rules` is a list of pairs, such as `rules = [["hidden", "model"]]`',
    ),
    "no pairs": (
        'rules = ["hidden", "model"]\n',
        'r.toml:1: an entry of `rules` is a pair such as ["hidden", "model"], not "hidden"',
    ),
    "filters misspelled": (
        'filter = [["**.bias", []]]\nbatch = "data"\n',
        'r.toml:1: `filter` is "axis", ["axis", "other"] or false, not [["**.bias", []]]; did you mean `filters`?',
    ),
    "filters alone": ('filters = [["**", []]]\n', "r.toml:1: filters stand before rules"),
    "no filters": (
        'a = "b"\nfilters = []\n',
        'r.toml:2: `filters` has none: write `filters = [["**.bias", []]]`',
    ),
    "a spec of one entry": (
        'filters = [["**.bias", "model"]]\na = "b"\n',
        'r.toml:1: the spec of "**.bias" is a list with an entry for each dimension, not "model"',
    ),
    "a wrong entry": (
        'filters = [["**.bias", [1]]]\na = "b"\n',
        'r.toml:1: `**.bias` is "axis", ["axis", "other"] or false, not 1',
    ),
    "FSDP misspelled": (
        '[FSDP]\naxis = "data"\n',
        'r.toml:1: `FSDP` is "axis", ["axis", "other"] or false, not {"axis": "data"}',
    ),
    "FSDP as a rule": ('fsdp = "data"\n', "r.toml:1: `fsdp` is a table: `[fsdp]`"),
    "FSDP without an axis": ("[fsdp]\nmin_size = 3\n", "r.toml:1: [fsdp] needs a mesh axis"),
    "an unknown option": (
        '[fsdp]\naxis = "data"\nminsize = 3\n',
        "r.toml:3: [fsdp] has `axis` and `min_size`, and no `minsize`; did you mean `min_size`?",
    ),
    "rules below the table": (
        '[fsdp]\naxis = "data"\nhidden = "model"\n',
        "r.toml:3: [fsdp] has `axis` and `min_size`, and no `hidden`; rules stand above the first table",
    ),
    "an axis of FSDP that is none": (
        "[fsdp]\naxis = false\n",
        'r.toml:2: `axis` is "data" or ["data", "model"], not false',
    ),
    "a size that is none": ('[fsdp]\naxis = "d"\nmin_size = -1\n', "r.toml:1: FSDP: min_size=-1"),
    "a table in a rule": (
        '[model]\nhidden = "x"\n',
        'r.toml:1: `model` is "axis", ["axis", "other"] or false, not {"hidden": "x"}',
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_text(name: str) -> None:
    text, message = WRONG[name]
    with raises(message, error=ft.RuleError) as caught:
        layout_of_text(text, "r.toml")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_bytes(b"batch = '\xff'")
    with raises("rule.toml: no such file or directory; did you mean `rules.toml`?"):
        ft.read_rules(tmp_path / "rule.toml")
    with raises("rules.toml: not UTF-8, which a TOML file is"):
        ft.read_rules(tmp_path / "rules.toml")
    with raises("a.toml: no such file or directory"):
        ft.read_rules(tmp_path / "nowhere" / "a.toml")
    with raises("is a directory"):
        ft.read_rules(tmp_path)
    with raises("read_rules has nothing to read", "the path of a file", error=ft.FunctreeError):
        ft.read_rules(ft.AxisRules({"a": "x"}))  # pyright: ignore


# What the grammar has no words for.
UNWRITTEN: dict[str, tuple[Any, str]] = {
    "names": (
        ft.AxisRules({"a": "x"}, names={ft.nn.MLP: ft.names(up="a _")}),
        "`names=` of MLP cannot be written: a rules.toml has no classes",
    ),
    "axes of FSDP": (ft.FSDP("x", axes="a"), "[fsdp] has no `axes`"),
    "otherwise": (ft.FSDP("x", otherwise=P()), "[fsdp] has no `otherwise`"),
    "unused": (
        ft.StateSharding({"a": P(), ...: ft.FSDP("x")}, unused="ignore"),
        "a rules.toml has no `unused`",
    ),
    "filters without rules": (
        ft.StateSharding({"a": P()}),
        "its filters are not followed by rules",
    ),
    "a last spec": (
        ft.StateSharding({"a": P(), ...: P("x")}),
        "a rules.toml has filters, rules and one [fsdp], in this order",
    ),
    "a filter that is no pattern": (
        ft.StateSharding({ft.has_ndim(1): P(), ...: ft.FSDP("x")}),
        "in a rules.toml filters are patterns and specs",
    ),
    "a layout behind a filter": (
        ft.StateSharding({"a": ft.FSDP("y"), ...: ft.FSDP("x")}),
        "in a rules.toml filters are patterns and specs",
    ),
    "unconstrained": (
        ft.StateSharding({"a": P(P.UNCONSTRAINED), ...: ft.FSDP("x")}),
        "a rules.toml has mesh axes, and `false`",
    ),
    "FSDP first": (
        ft.FSDP("x") | ft.AxisRules({"a": "y"}),
        "a rules.toml has filters, rules and one [fsdp], in this order",
    ),
    "FSDP twice": (
        ft.AxisRules({"a": "y"}) | ft.FSDP("x") | ft.FSDP("z"),
        "a rules.toml has filters, rules and one [fsdp], in this order",
    ),
    "in host memory": (ft.on_host(ft.AxisRules({"a": "y"})), "cannot be written"),
    "half of a character": (ft.AxisRules({"a": "\ud800"}), "cannot be written"),
}


@pytest.mark.parametrize("name", UNWRITTEN)
def test_what_cannot_be_written_is_said(name: str) -> None:
    layout, message = UNWRITTEN[name]
    with raises(message, error=ft.RuleError):
        rules_text(layout)


# Reading undoes writing

NAMES = st.sampled_from(["batch", "embed", "rules", "fsdp", "filters", "größe", "_x", "axis", "a1"])
MESH_AXES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
ENTRIES = (
    st.none() | MESH_AXES | st.lists(MESH_AXES, min_size=1, max_size=3, unique=True).map(tuple)
)


@st.composite
def tables(draw: Any) -> ft.AxisRules:
    rules: list[tuple[Any, Any]] = []
    for name in draw(st.lists(NAMES, max_size=6)):
        # A rule after one that leaves the axis unsharded is refused.
        if (name, None) not in rules:
            rules.append((name, draw(ENTRIES)))
    if draw(st.booleans()):
        rules.append((..., None))
    return ft.AxisRules(rules)


FSDPS = st.builds(
    ft.FSDP,
    st.lists(MESH_AXES, min_size=1, max_size=3, unique=True),
    min_size=st.sampled_from([0, 7, 2**18]),
)
PATTERNS = st.sampled_from(["**.bias", "a.*", 'a."b.c"', "größe.**"])


@st.composite
def layouts(draw: Any) -> Any:
    layout = draw(tables() | FSDPS | st.builds(lambda rules, fsdp: rules | fsdp, tables(), FSDPS))
    if draw(st.booleans()):
        return layout
    patterns = draw(st.lists(PATTERNS, min_size=1, max_size=3, unique=True))
    filters: list[tuple[Any, Any]] = []
    for pattern in patterns:
        filters.append((pattern, P(*draw(st.lists(ENTRIES, max_size=3)))))
    return ft.StateSharding([*filters, (..., layout)])


@given(layouts())
def test_reading_undoes_writing(layout: Any) -> None:
    assert layout_of_text(rules_text(layout), "r.toml") == layout
