"""The base class of immutable values with a constructor of their own: `Value`, compared by its parts."""

from abc import abstractmethod
from typing import Any


class Value:
    """An immutable, hashable value that is equal to another value of its class with the same parts.

    A subclass names its attributes in `__slots__`, sets them once in its constructor by `_set`, and returns from
    `_parts` what it is compared by. For a class whose constructor only stores its arguments, a frozen dataclass is
    shorter.
    """

    __slots__ = ()

    def _set(self, **attributes: Any) -> None:
        """Set attributes, past `__setattr__`. Only a constructor may call this."""
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
        # pickle and copy call this. Their default sets the slots one by one by `setattr`, which raises here.
        self._set(**state[1])

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._parts() == other._parts()  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self), self._parts()))
