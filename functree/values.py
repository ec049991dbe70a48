"""The base of the values that are written by a constructor of their own: immutable, compared by their parts."""

from abc import abstractmethod
from typing import Any


class Value:
    """An immutable value, hashable, equal to another of its class that has the same parts.

    A subclass names its attributes in `__slots__`, sets them once by `_set`, and says by `_parts` what it is compared
    by. Where the constructor does nothing but keep its arguments, a frozen dataclass is shorter.
    """

    __slots__ = ()

    def _set(self, **attributes: Any) -> None:
        """Set attributes; for the constructor."""
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    @abstractmethod
    def _parts(self) -> tuple[Any, ...]:
        """What the value is compared and hashed by."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        # What pickle and copy call: by default they would set the slots one by one.
        self._set(**state[1])

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._parts() == other._parts()  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self), self._parts()))
