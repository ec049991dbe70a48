"""A `rules.toml` ─► the layout that it says, and a layout ─► the text of a `rules.toml`.

The grammar, in which the order of rules is that of the file:

    batch = "data"                  # an axis, and the mesh axis that shards it
    vocab = ["model", "data"]       # several mesh axes
    embed = false                   # unsharded
    "..." = false                   # all other axes; last

    rules = [["hidden", "model"], ["hidden", false]]  # instead of these: with fallbacks
    filters = [["**.bias", []], ["head.**", ["model", false]]]  # before the rules

    [fsdp]                          # adds `| FSDP("data", min_size=1024)`
    axis = "data"
    min_size = 1024
"""

import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from jax.sharding import PartitionSpec

from functree.argument_checks import FILE, check
from functree.errors import RuleError, did_you_mean
from functree.layout.fsdp import FSDP
from functree.layout.layout import Composition, Layout, SpecLayout, as_layout
from functree.layout.rules import AxisRules
from functree.layout.state_sharding import StateSharding

T = TypeVar("T")

_KEYS = ("rules", "filters", "fsdp")
_OPTIONS = ("axis", "min_size")
_OTHERS = "..."
_FORMS = '"axis", ["axis", "other"] or false'


def read_rules(path: str | os.PathLike[str]) -> Layout:
    """The layout that a `rules.toml` says: the file that the command line takes as `--rules`, and
    that `row.rules_file` of `ft.explore` writes.

    Args:
        path: the path of the file.

    Raises:
        RuleError: the file cannot be read, or does not follow the grammar; the message is one line,
            with the file, the line and the key.

    Examples:
        >>> text = 'rules = [["batch", "data"], ["hidden", "model"]]'
        >>> _ = (folder / "rules.toml").write_text(text)
        >>> rules = ft.read_rules(folder / "rules.toml")
        >>> rules.spec("batch hidden")
        P('data', 'model')
    """
    check("read_rules has nothing to read", path=(path, FILE))
    file = Path(path)
    try:
        # Some editors begin a file with a mark, which this encoding leaves out.
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise RuleError(f"{file}: not UTF-8, which a TOML file is: {error}") from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise RuleError(f"{file}: {reason}{_near_file(file)}") from error
    return layout_of_text(text, str(file))


def _near_file(file: Path) -> str:
    """The text `; did you mean ...?` with a file of a similar name."""
    try:
        names = [one.name for one in file.parent.iterdir()]
    except OSError:
        return ""
    return did_you_mean(file.name, [name for name in names if name != file.name])


def layout_of_text(text: str, file: str) -> Layout:
    """The layout that the text of a `rules.toml` says; `file` is its name in messages."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RuleError(f"{file}: not TOML: {error}") from error
    return _Reader(text, file).layout(data)


class _Reader:
    """What makes a layout of the values of one file, and knows where they are in it."""

    def __init__(self, text: str, file: str):
        self._text, self._file = text, file

    def layout(self, data: Mapping[str, Any]) -> Layout:
        """The layout of the whole file."""
        rules = self._rules(data)
        fsdp = self._fsdp(data["fsdp"]) if "fsdp" in data else None
        base: Layout | None = rules if fsdp is None else fsdp
        if rules is not None and fsdp is not None:
            base = rules | fsdp
        if base is None and "filters" in data:
            raise self.error("filters", "filters stand before rules, and there are none")
        if base is None:
            raise RuleError(f'{self._file}: it has no rules: write `batch = "data"`')
        if "filters" not in data:
            return base
        pairs = [*self._filters(data["filters"]), (..., base)]
        return self._made("filters", partial(StateSharding, pairs))

    def error(self, key: str, why: str) -> RuleError:
        """The error about a key, with its line."""
        name = re.escape(key)
        # A key may stand in a pair of either quotes, and a table in brackets.
        found = re.search(rf"^\s*\[*\s*(?:{name}|\"{name}\"|'{name}')\s*(?:=|\])", self._text, re.M)
        line = ""
        if found is not None:
            line = f":{self._text.count(chr(10), 0, found.end()) + 1}"
        return RuleError(f"{self._file}{line}: {why}")

    def _made(self, key: str, make: Callable[[], T]) -> T:
        """A layout, whose own errors have the file and the line of a key."""
        try:
            return make()
        except RuleError as error:
            raise self.error(key, str(error)) from error

    def _rules(self, data: Mapping[str, Any]) -> AxisRules | None:
        """The table of rules; None if the file has none."""
        keys = [key for key in data if key not in _KEYS]
        if "rules" not in data:
            if not keys:
                return None
            pairs = [(key, data[key]) for key in keys]
        elif keys:
            raise self.error(
                keys[0], f"`{keys[0]}` stands beside `rules`, which has all rules as pairs"
            )
        else:
            pairs = self._pairs("rules", data["rules"], '["hidden", "model"]')
        rules: list[tuple[Any, Any]] = []
        for key, value in pairs:
            where = "rules" if "rules" in data else key
            if key == _OTHERS and value is not False:
                why = f'"..." is `false`, not {_shown(value)}: name the axis that is to be sharded'
                raise self.error(where, why)
            rule = (... if key == _OTHERS else key, self._mesh_axes(where, key, value))
            # One by one, so that an error has the line of its rule.
            self._made(where, partial(AxisRules, [rule]))
            rules.append(rule)
        # What is wrong with them together: `...` is not last, or a rule can never apply.
        return self._made("rules" if "rules" in data else _OTHERS, partial(AxisRules, rules))

    def _pairs(self, key: str, value: Any, example: str) -> list[tuple[str, Any]]:
        """A list of pairs, of which the first is a text."""
        pairs: list[tuple[str, Any]] = []
        if not isinstance(value, list):
            raise self.error(key, f"`{key}` is a list of pairs, such as `{key} = [{example}]`")
        for one in value:
            if not isinstance(one, list) or len(one) != 2 or not isinstance(one[0], str):
                why = f"an entry of `{key}` is a pair such as {example}, not {_shown(one)}"
                raise self.error(key, why)
            pairs.append((one[0], one[1]))
        return pairs

    def _mesh_axes(self, where: str, name: str, value: Any) -> str | tuple[str, ...] | None:
        """The right side of a rule, and an entry of a spec."""
        if value is False:
            return None
        if isinstance(value, str):
            return value
        if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
            return tuple(value)
        near = ""
        # A misspelled `filters` is an axis name too, but the value tells what it was meant for.
        if isinstance(value, list | dict):
            near = did_you_mean(name, _KEYS)
        raise self.error(where, f"`{name}` is {_FORMS}, not {_shown(value)}{near}")

    def _fsdp(self, table: Any) -> FSDP:
        if not isinstance(table, dict):
            raise self.error("fsdp", '`fsdp` is a table: `[fsdp]`, and below it `axis = "data"`')
        for key in table:
            if key in _OPTIONS:
                continue
            near = did_you_mean(key, _OPTIONS)
            if not near:
                near = "; rules stand above the first table"
            raise self.error(key, f"[fsdp] has `axis` and `min_size`, and no `{key}`{near}")
        if "axis" not in table:
            raise self.error("fsdp", '[fsdp] needs a mesh axis: `axis = "data"`')
        axis = table["axis"]
        if not isinstance(axis, str | list):
            raise self.error("axis", f'`axis` is "data" or ["data", "model"], not {_shown(axis)}')
        options: dict[str, Any] = {}
        if "min_size" in table:
            options["min_size"] = table["min_size"]
        return self._made("fsdp", partial(FSDP, axis, **options))

    def _filters(self, value: Any) -> list[tuple[str, PartitionSpec]]:
        """The filters, each with its spec."""
        filters: list[tuple[str, PartitionSpec]] = []
        example = '["**.bias", []]'
        for pattern, spec in self._pairs("filters", value, example):
            if not isinstance(spec, list):
                why = f"the spec of {_shown(pattern)} is a list with an entry for each dimension"
                raise self.error("filters", f"{why}, not {_shown(spec)}")
            entries = [self._mesh_axes("filters", pattern, entry) for entry in spec]
            filters.append((pattern, PartitionSpec(*entries)))
        if not filters:
            raise self.error("filters", f"`filters` has none: write `filters = [{example}]`")
        return filters


def _shown(value: Any) -> str:
    """A value in messages, in a line."""
    return json.dumps(value, ensure_ascii=False, default=str)[:80]


def rules_text(layout: Layout) -> str:
    """The text of the `rules.toml` of a layout, from which the same layout is read.

    Raises:
        RuleError: the layout has something that the grammar has no words for.
    """
    lines: list[str] = []
    base = layout
    if isinstance(layout, StateSharding):
        base, lines = _filter_lines(layout)
    if isinstance(base, Composition):
        parts: Sequence[Layout] = base.parts
    else:
        parts = (base,)
    match parts:
        case (AxisRules() as rules,):
            lines += _rule_lines(rules)
        case (FSDP() as fsdp,):
            lines += _fsdp_lines(fsdp)
        case (AxisRules() as rules, FSDP() as fsdp):
            lines += [*_rule_lines(rules), "", *_fsdp_lines(fsdp)]
        case _:
            why = "a rules.toml has filters, rules and one [fsdp], in this order"
            raise RuleError(f"{layout!r} cannot be written: {why}")
    text = "\n".join([*lines, ""])
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RuleError(f"{layout!r} cannot be written: {error}") from error
    return text


def _rule_lines(rules: AxisRules) -> list[str]:
    if rules.names:
        classes = ", ".join(cls.__name__ for cls, _ in rules.names)
        raise RuleError(f"`names=` of {classes} cannot be written: a rules.toml has no classes")
    pairs = [(_OTHERS if name is ... else name, value) for name, value in rules.pairs]
    names = [name for name, _ in pairs]
    if pairs and len(set(names)) == len(names) and not set(names) & set(_KEYS):
        return [f"{_key(name)} = {_value(value)}" for name, value in pairs]
    # A rule with fallbacks, or an axis that is called as a key of the file is.
    entries = ", ".join(f"[{_quoted(name)}, {_value(value)}]" for name, value in pairs)
    return [f"rules = [{entries}]"]


def _fsdp_lines(fsdp: FSDP) -> list[str]:
    for option in ("axes", "otherwise"):
        if getattr(fsdp, option) is not None:
            raise RuleError(f"{fsdp!r} cannot be written: [fsdp] has no `{option}`")
    lines = ["[fsdp]", f"axis = {_value(fsdp.axis)}"]
    if fsdp.min_size != FSDP(fsdp.axis).min_size:
        lines.append(f"min_size = {fsdp.min_size}")
    return lines


def _filter_lines(layout: StateSharding) -> tuple[Layout, list[str]]:
    """The layout of the last `...`, and the line of the filters before it."""
    if layout.unused != "error":
        raise RuleError(f"{layout!r} cannot be written: a rules.toml has no `unused`")
    *filters, last = zip(layout.filters, map(as_layout, layout.layouts), strict=True)
    if last[0] is not ... or not filters:
        raise RuleError(f"{layout!r} cannot be written: its filters are not followed by rules")
    entries: list[str] = []
    for pattern, spec in filters:
        if not isinstance(pattern, str) or not isinstance(spec, SpecLayout) or spec.mesh:
            raise RuleError(
                f"{layout!r} cannot be written: in a rules.toml filters are patterns and specs, "
                f"not {pattern!r}: {spec!r}"
            )
        written = ", ".join(map(_value, spec.spec.partitions))
        entries.append(f"[{_quoted(pattern)}, [{written}]]")
    return last[1], [f"filters = [{', '.join(entries)}]"]


def _key(name: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_-]+", name):
        return name
    return _quoted(name)


def _value(value: Any) -> str:
    """Mesh axes as the grammar writes them."""
    if value is None:
        return "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, tuple) and value and all(isinstance(one, str) for one in value):
        return f"[{', '.join(map(_quoted, value))}]"
    raise RuleError(f"{value!r} cannot be written: a rules.toml has mesh axes, and `false`")


def _quoted(text: str) -> str:
    # As JSON, in which one character may stand that TOML does not allow.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
