"""`ParameterLayouts` holds the layouts that an option gives to a function's parameters.

`in_shardings=` or `in_specs=` ─► a prefix tree of layouts for each call.
"""

from collections.abc import Sequence
from typing import Any

from functree.calls.signature import Signature
from functree.errors import RuleError, count, did_you_mean
from functree.labels.leaves import Leaves
from functree.labels.training_state import Scope
from functree.layout.layout import LayoutTree, Part, is_layout, meant_rules, read_for
from functree.tree.paths import Path


class ParameterLayouts:
    """The layouts that an option gives to the parameters of a function.

    Args:
        option: the name of the option, for errors.
        written: one layout per positional parameter, a dict of layouts by parameter name, or one
            layout for all parameters.
        signature: the signature of the function.
        otherwise: the layout of parameters that a dict does not name.

    Raises:
        RuleError: if a sequence does not have one entry per positional parameter.
        RuleError: if a dict names an unknown parameter.
        RuleError: if `written` has none of these forms.
    """

    def __init__(
        self, option: str, written: Any, signature: Signature, otherwise: LayoutTree = None
    ):
        self.signature: Signature = signature
        self.otherwise: LayoutTree = otherwise
        # None if one layout covers all parameters.
        self.by_name: dict[str, LayoutTree] | None = None
        if is_layout(written):
            self.otherwise = written
        elif isinstance(written, dict):
            self.by_name = dict(written)
            lost = [name for name in written if name not in signature.parameters]
            # With `**kwargs`, an argument may have any name.
            if lost and signature.by_name is None:
                near = did_you_mean(lost[0], signature.parameters)
                raise RuleError(
                    f"{option}: {signature.name} has no parameter {lost[0]!r} "
                    f"(parameters: {', '.join(signature.parameters) or 'none'}){near}"
                    f"{meant_rules(written)}"
                )
        elif isinstance(written, tuple | list):
            self.by_name = self._in_order(option, written)
        else:
            raise RuleError(
                f"{option}: {written!r} is not a layout, a sequence with one layout per positional "
                f"parameter, or a dict from parameter names to layouts{meant_rules(written)}"
            )

    def _in_order(self, option: str, written: Sequence[LayoutTree]) -> dict[str, LayoutTree]:
        """Map parameter names to layouts, given one layout per positional parameter."""
        positional = self.signature.positional
        if len(written) != len(positional):
            have = f"{option} has {count(len(written), 'layout')}"
            parameters = count(len(positional), "positional parameter")
            raise RuleError(
                f"{have}, but {self.signature.name} has {parameters} "
                f"({', '.join(positional) or 'none'}): give one layout for each "
                "parameter, and `None` for a parameter that is not an array"
            )
        return dict(zip(positional, written, strict=True))

    def has_entry(self, path: Path) -> bool:
        """Return whether the array at a path of a call has an entry; `None` is an entry."""
        if self.by_name is None or path[0] in self.by_name:
            return True
        return path[0] == self.signature.by_name and path[1] in self.by_name

    def prefix(self, call: Any) -> LayoutTree:
        """Return the layouts of a call, as a named tuple with the call's fields."""
        named = self.by_name or {}
        given = {name: named.get(name, self.otherwise) for name in call._fields}
        by_name, many = self.signature.by_name, self.signature.many
        # Each argument in `**kwargs` and `*args` has its own layout.
        if by_name is not None and is_layout(given[by_name]):
            names = call[call._fields.index(by_name)]
            given[by_name] = {name: named.get(name, given[by_name]) for name in names}
        if many is not None and is_layout(given[many]):
            given[many] = (given[many],) * len(call[call._fields.index(many)])
        return self.signature.call(*given.values())

    def read(self, call: Any) -> tuple[Leaves, list[Part]]:
        """Read the leaves of a call, and its layouts with the scope of each layout's filters."""
        leaves, parts = read_for(call, self.prefix(call))
        scoped: list[Part] = []
        parameters = self.signature.parameters
        for part in parts:
            argument, depth = 0, 1
            if part.path[0] in (self.signature.by_name, self.signature.many):
                depth = 2
            if part.path[0] == self.signature.by_name:
                argument = 1
            by_rules = not self.has_entry(part.path)
            scope = Scope(
                max(depth, len(part.path)),
                argument,
                parameters,
                shared=by_rules or self.by_name is None,
                by_rules=by_rules,
            )
            scoped.append(part._replace(scope=scope))
        return leaves, scoped
