"""A value that is not a tree ─► a text of its contents, the same in all processes if they are."""

import copyreg
import zlib
from collections.abc import Callable, Iterable, Mapping, Set
from functools import cached_property, partial
from pickle import PickleError
from types import MethodType, ModuleType
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec, Sharding
from jax.tree_util import PyTreeDef

from functree.processes.own_arrays import any_array_text
from functree.tree.arrays import is_array


def value_text(value: object) -> str:
    """The text of a value, without what differs between processes that have equal values.

    Sets, mappings and objects have those of their contents. Their `repr` would not do: the order of
    a set depends on the hashes of its process, and objects may show their address, or nothing that
    they have. Functions and classes have their names.

    Examples:
        >>> from functree.processes.value_text import value_text
        >>> value_text({"b": frozenset({"y", "x"}), "a": (1, 2.0)})
        "{'a': (1, 2.0), 'b': frozenset{'x', 'y'}}"
    """
    try:
        return _Writer().text(value).replace("\n", "\\n")
    except RecursionError:  # nested too deeply, or what a library has made of many parts
        return class_text(type(value))


def class_text(cls: type) -> str:
    """The name of a class, with its module."""
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")


_PLAIN = (int, float, complex, bool, str, bytes, type(None), type(Ellipsis), range, slice)
# JAX and numpy write what these are made of.
_WRITTEN = (np.dtype, jax.Device, Sharding, PartitionSpec)

# What pickle's protocol raises for an object that it cannot keep.
_NOT_PICKLED = (TypeError, ValueError, AttributeError, NotImplementedError, PickleError)

_MOST_VALUES = 100_000  # in one value, which takes less than a second
_MOST_CHARACTERS = 2000


class _Writer:
    """Writes the text of a value, and of the values in it."""

    def __init__(self) -> None:
        self._around: list[int] = []  # the identities of the objects that this is in
        self._written = 0

    def text(self, value: Any) -> str:
        """The text of a value.

        Raises:
            RecursionError: it has too many values in it. Two objects in each of two in each of two
                would be written without end.
        """
        self._written += 1
        if self._written > _MOST_VALUES:
            raise RecursionError
        if type(value) in _PLAIN:
            return _short(repr(value))
        if is_array(value):
            return any_array_text(value)
        if isinstance(value, _WRITTEN):
            return str(value)
        if id(value) in self._around:
            return "(itself)"
        self._around.append(id(value))
        write = next((write for fits, write in _WRITERS if fits(value)), _Writer._object)
        text = write(self, value)
        self._around.pop()
        return _short(text)

    def _texts(self, values: Iterable[Any]) -> str:
        return ", ".join(map(self.text, values))

    def _named(self, value: Any) -> str:
        return f"{getattr(value, '__module__', None) or ''}.{value.__qualname__}".removeprefix(".")

    def _module(self, value: ModuleType) -> str:
        return value.__name__

    def _method(self, value: MethodType) -> str:
        return f"{self._named(value)} of {self.text(value.__self__)}"

    def _partial(self, value: "partial[Any]") -> str:
        return f"partial({self._texts((value.func, value.args, value.keywords))})"

    def _set(self, value: Set[Any]) -> str:
        return f"{class_text(type(value))}{{{', '.join(sorted(map(self.text, value)))}}}"

    def _mapping(self, value: Mapping[Any, Any]) -> str:
        # Dicts with the same items in another order are equal.
        texts = sorted(f"{self.text(key)}: {self.text(one)}" for key, one in value.items())
        return f"{_unusual(value, dict)}{{{', '.join(texts)}}}"

    def _list(self, value: list[Any]) -> str:
        return f"{_unusual(value, list)}[{self._texts(value)}]"

    def _tuple(self, value: tuple[Any, ...]) -> str:
        return f"{_unusual(value, tuple)}({self._texts(value)})"

    def _treedef(self, value: Any) -> str:
        return f"tree({self._texts((value.node_data(), value.children()))})"

    def _array_of_objects(self, value: np.ndarray) -> str:
        return self.text(value.tolist())

    def _object(self, value: object) -> str:
        """The text of any other object: its class, and what pickle and copy would make it of."""
        name = class_text(type(value))
        reduce = copyreg.dispatch_table.get(type(value))
        try:
            made = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except _NOT_PICKLED:
            # A lock, a file or a generator: nothing of it can be the same in another process.
            return name
        if isinstance(made, str):  # the name of a global value
            return f"{name} {made}"
        # The arguments of the function that makes it, and then its state and its items.
        arguments, *rest = made[1:]
        parts: list[Any] = [one for one in arguments if one is not type(value)]
        for part, read in zip(rest, (partial(_state, type(value)), list, dict), strict=False):
            if part is not None:
                parts.append(read(part))
        return f"{name}({self._texts(parts)})"


def _state(cls: type, state: object) -> object:
    """The state of an object without what follows from the rest of it, such as its hash, which is
    another one in each process."""
    if not isinstance(state, dict):
        return state
    kept: dict[object, object] = {}
    for name, value in state.items():
        if not isinstance(getattr(cls, str(name), None), cached_property):
            kept[name] = value
    return kept


def _unusual(value: object, usual: type) -> str:
    """The class of a container; empty if it is the usual one."""
    return "" if type(value) is usual else class_text(type(value))


def _short(text: str) -> str:
    """A text that is not too long for a message."""
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[:_MOST_CHARACTERS]}... with the checksum {zlib.crc32(text.encode()):08x}"


def _is_named(value: object) -> bool:
    # A function of JAX or of a user, jitted ones too: their `repr` is their address.
    return callable(value) and isinstance(getattr(value, "__qualname__", None), str)


def _of(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kind)


# The first that fits writes a value.
_WRITERS: tuple[tuple[Callable[[object], bool], Callable[[_Writer, Any], str]], ...] = (
    (_of(MethodType), _Writer._method),
    (_of(partial), _Writer._partial),
    (_of(ModuleType), _Writer._module),
    (_is_named, _Writer._named),
    (_of(PyTreeDef), _Writer._treedef),
    (_of(Set), _Writer._set),
    (_of(Mapping), _Writer._mapping),
    (_of(list), _Writer._list),
    (_of(tuple), _Writer._tuple),
    (_of(np.ndarray), _Writer._array_of_objects),
)
