"""`Value`: the base of immutable values that have their own constructor; and texts of dicts."""

from abc import abstractmethod
from collections.abc import Iterable


class Value:
    """An immutable, hashable value, equal to another one of its class that has the same parts.

    A subclass names its attributes in `__slots__`, sets them once in its constructor by `_set`, and
    returns from `_parts` what it is compared by. For a class whose constructor only stores its
    arguments, a frozen dataclass is shorter.
    """

    __slots__ = ()

    def _set(self, **attributes: object) -> None:
        """Set attributes, past `__setattr__`. Only a constructor may call this."""
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    @abstractmethod
    def _parts(self) -> tuple[object, ...]:
        """What the value is compared and hashed by."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __setstate__(self, state: tuple[None, dict[str, object]]) -> None:
        # pickle and copy call this. Their default sets the slots one by one by `setattr`, which
        # raises here.
        _, slots = state
        self._set(**slots)

    def __eq__(self, other: object) -> bool:
        # Not by `isinstance`: a subclass may mean something else by the same parts.
        if not isinstance(other, Value) or type(self) is not type(other):
            return False
        return self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash((type(self), self._parts()))


def dict_text(pairs: Iterable[tuple[str, str]]) -> str:
    """The text of a dict, from the texts of its keys and values."""
    return "{" + ", ".join(map(": ".join, pairs)) + "}"
