"""What `in_shardings=` and `in_specs=` say ─► a layout, or a prefix tree of layouts, for a call."""

from typing import Any

from functree.calls.signature import Signature
from functree.errors import RuleError, count, did_you_mean
from functree.layout.layout import is_layout


class ParameterLayouts:
    """The layouts that an option gives to the parameters of a function.

    Args:
        option: its name.
        written: one entry for each positional parameter, a dict by parameter name, or one layout for all.
        signature: of the function.
        otherwise: the layout of the parameters that it does not name.

    Raises:
        RuleError: another number of entries than parameters, an unknown name, or something that is no layout.
    """

    def __init__(self, option: str, written: Any, signature: Signature, otherwise: Any = None):
        self.signature: Signature = signature
        self.otherwise: Any = otherwise
        self.by_name: dict[str, Any] | None = None
        self.all: Any = None
        if is_layout(written):
            self.all = written
        elif isinstance(written, dict):
            self.by_name = dict(written)
            lost = [] if signature.by_name else [name for name in written if name not in signature.parameters]
            if lost:
                near = did_you_mean(lost[0], signature.parameters)
                raise RuleError(
                    f"{option}: {signature.name} has no parameter {lost[0]!r}{near}; its parameters are "
                    f"{', '.join(signature.parameters) or 'none'}"
                )
        elif isinstance(written, tuple | list):
            self.by_name = self._in_order(option, written)
        else:
            raise RuleError(
                f"{option}: {written!r} is neither a layout, nor one for each positional parameter, nor a dict by name"
            )

    def _in_order(self, option: str, written: Any) -> dict[str, Any]:
        positional = self.signature.positional
        if len(written) != len(positional):
            raise RuleError(
                f"{option} has {count(len(written), 'layout')}, and {self.signature.name} has "
                f"{count(len(positional), 'positional parameter')} ({', '.join(positional) or 'none'}): give each one, "
                "`None` for what is no array"
            )
        return dict(zip(positional, written, strict=True))

    def prefix(self, call: Any) -> Any:
        """The layouts of a call."""
        if self.by_name is None:
            return self.all
        given, by_name = dict(self.by_name), self.signature.by_name
        if by_name is not None and by_name not in given:
            given[by_name] = {name: given.get(name, self.otherwise) for name in call[call._fields.index(by_name)]}
        return self.signature.call(*(given.get(name, self.otherwise) for name in call._fields))
