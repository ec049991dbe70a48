"""The texts of `--layout`, `--rules` and `--fsdp` ─► layouts."""

import re
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from functree.cli.factory import named
from functree.cli.failure import Failure
from functree.errors import RuleError
from functree.layout.fsdp import FSDP
from functree.layout.layout import Layout, LayoutTree
from functree.layout.rules import AxisRules

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_RULE = re.compile(rf"\s*({_NAME}|\.\.\.)\s*=\s*({_NAME}(?:\+{_NAME})*)\s*")
_EXAMPLE = "write rules such as `--rules batch=data,hidden=model,...=none`"


def given_layout(options: Namespace) -> LayoutTree:
    """The layout of `plan` and `ledger`: `--layout`, or `--rules` and `--fsdp`; None without any.

    Raises:
        Failure: there are several, or one cannot be read.
    """
    written: list[str] = options.layout or []
    if len(written) > 1:
        raise Failure(f"--layout is given {len(written)} times: only `explore` takes several")
    short = short_layout(options.rules, options.fsdp)
    if not written:
        return short
    if short is not None:
        raise Failure("--layout is a whole layout, and so are --rules and --fsdp: give one of them")
    return named(written[0], "layout")


def given_layouts(options: Namespace) -> Mapping[str, LayoutTree]:
    """The layouts of `explore` by their names.

    Raises:
        Failure: there is none, two have one name, or one cannot be read.
    """
    found: list[tuple[str, str, LayoutTree]] = []
    for text in options.layout or []:
        value: Any = named(text, "layout")
        # A dict is one of candidates.
        several = value if isinstance(value, dict) else {text.partition(":")[2]: value}
        found += [(f"--layout {text}", name, one) for name, one in several.items()]
    short = short_layout(options.rules, options.fsdp)
    if short is not None:
        found.append(("--rules and --fsdp", "rules", short))
    layouts: dict[str, LayoutTree] = {}
    for option, name, one in found:
        if name in layouts:
            raise Failure(f"{option}: there is a layout `{name}` already")
        layouts[name] = one
    if not layouts:
        raise Failure("give a layout: `--layout module:name`, or `--rules batch=data,...=none`")
    return layouts


def short_layout(rules: str | None, fsdp: str | None) -> Layout | None:
    """The layout of `--rules batch=data,hidden=model,...=none` and `--fsdp data`.

    Raises:
        Failure: a text has another form.
    """
    parts: list[Layout] = []
    if rules is not None:
        parts.append(_made("--rules", rules, lambda: AxisRules(map(_rule, rules.split(",")))))
    if fsdp is not None:
        parts.append(_made("--fsdp", fsdp, lambda: FSDP(fsdp.split("+"))))
    if not parts:
        return None
    first, *others = parts
    return first | others[0] if others else first


def _rule(text: str) -> tuple[Any, Any]:
    """One rule: an axis, and a mesh axis, several of them joined by `+`, or `none`."""
    found = _RULE.fullmatch(text)
    if found is None:
        raise RuleError(f"{text!r} is no rule: {_EXAMPLE}")
    name: Any = ... if found[1] == "..." else found[1]
    if found[2] == "none":
        return name, None
    mesh_axes = tuple(found[2].split("+"))
    return name, mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes


def _made(option: str, text: str, make: Any) -> Layout:
    try:
        return make()
    except RuleError as error:
        raise Failure(f"{option} {text!r}: {error}") from error
