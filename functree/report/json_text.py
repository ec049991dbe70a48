"""Named tuples and dataclasses are written as JSON, and read back using their fields' types."""

import inspect
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from functree.errors import FunctreeTypeError, FunctreeValueError
from functree.tree.arrays import DType
from functree.tree.axes import Axes
from functree.tree.paths import Path

T = TypeVar("T")

FORMAT = 1
"""The version of the format. It increases if older versions of functree cannot read the JSON."""


def parsed(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: if the text is not JSON.
        ValueError: if the JSON is nested too deep for Python.
        ValueError: if an object repeats a name. JSON readers differ in which value they use.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"an object repeats the name {json.dumps(name)}")
    return values


def value_text(value: Any) -> str:
    """Format a JSON value for a message, truncated to 200 characters."""
    text = json.dumps(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


_MOST_SHOWN = 200


def json_of(kind: str, value: Any) -> str:
    """Write a named tuple or dataclass as JSON: an object with its fields.

    Args:
        kind: the kind of value, such as `plan` or `ledger`.
        value: the value.
    """
    return json.dumps({"functree": kind, "format": FORMAT, **written(value)}, indent=1)


def written(value: Any) -> Any:
    """Convert a value to JSON types. Fields with the default None are left out if they are None."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Path():
            return str(value)
        case Axes() | PartitionSpec():
            return list(map(written, value))
        case Mesh() | AbstractMesh():
            return dict(value.shape)
        case Mapping():
            return {str(key): written(item) for key, item in value.items()}
    defaults = _defaults(type(value))
    if defaults is None and isinstance(value, tuple | list):
        return list(map(written, value))
    if defaults is None:
        return str(value)  # a dtype
    fields: dict[str, Any] = {}
    for name, default in defaults.items():
        field = getattr(value, name)
        if field is not None or default is not None:
            fields[name] = written(field)
    return fields


def read_json(text: str, kind: str, cls: type[T]) -> T:
    """Read a value of a class from functree's JSON.

    Args:
        text: the JSON.
        kind: the kind of value, such as `plan` or `ledger`.
        cls: a named tuple or a dataclass. The types of its fields define the expected JSON.

    Raises:
        FunctreeError: if the text is not JSON.
        FunctreeError: if the JSON is of a different kind.
        FunctreeError: if this version of functree cannot read the JSON's format.
        FunctreeError: if a value is missing or has the wrong type.
    """
    if not isinstance(text, str | bytes):
        raise FunctreeTypeError(f"from_json: expected the JSON text of a {kind}, not {text!r}")
    try:
        data = parsed(text)
    except ValueError as error:
        raise FunctreeValueError(f"the text is not {kind} JSON: {error}") from error
    return read_value(data, kind, cls)


def read_value(data: Any, kind: str, cls: type[T]) -> T:
    """Read a value of a class from parsed JSON, as `read_json` does."""
    # Plans, ledgers and checkpoints state their kind, so one cannot be mistaken for another.
    given = data.get("functree") if isinstance(data, dict) else None
    if given != kind:
        raise FunctreeValueError(
            f"the text is not {kind} JSON: its `functree` is {value_text(given)}"
        )
    version = data.get("format")
    if version not in range(1, FORMAT + 1):
        readable = f"this version of functree reads up to format {FORMAT}"
        raise FunctreeValueError(f"the JSON of this {kind} has format {version!r}, but {readable}")
    try:
        return _read(data, cls, "")
    except FunctreeValueError as error:
        raise FunctreeValueError(f"invalid {kind} JSON: {error}") from error


def _read(value: Any, hint: Any, where: str) -> Any:
    """Read a value of a type from JSON; `where` is its place, such as `rows.3.path`."""
    if hint is Any:
        return value
    if hint == DType:
        return _dtype(_plain(value, str, where))
    if hint in (Path, tuple[object, ...]):  # a problem's path is a tuple
        return Path(_plain(value, str, where))
    if hint is Axes:
        return Axes(*_read(value, tuple[str | None, ...], where))
    if hint is PartitionSpec:
        return PartitionSpec(*_read(value, tuple[str | tuple[str, ...] | None, ...], where))
    if hint in (Mesh, AbstractMesh):
        sizes = _read(value, Mapping[str, int], where)
        return AbstractMesh(tuple(sizes.values()), tuple(sizes))
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        return _read_one_of(value, get_args(hint), where)
    match get_origin(hint), get_args(hint):
        case (origin, (key, inner)) if origin is Mapping:
            _plain(value, dict, where)
            return {_read(k, key, where): _read(x, inner, _at(where, k)) for k, x in value.items()}
        case (origin, (inner, _)) if origin is tuple:
            _plain(value, list, where)
            return tuple([_read(x, inner, _at(where, i)) for i, x in enumerate(value)])
    defaults = _defaults(hint)
    if defaults is None:
        return _plain(value, hint, where)
    _plain(value, dict, where)
    fields: dict[str, Any] = {}
    # Unknown names are ignored, so that later versions can add fields without a new format.
    for name, default in defaults.items():
        if name in value:
            fields[name] = _read(value[name], _hints(hint)[name], _at(where, name))
        elif default is inspect.Parameter.empty:
            raise FunctreeValueError(f"{f'`{where}`' if where else 'it'} has no `{name}`")
    return hint(**fields)


def _read_one_of(value: Any, hints: Sequence[Any], where: str) -> Any:
    """Read a value of one of several types."""
    if value is None and type(None) in hints:
        return None
    first, *others = [hint for hint in hints if hint is not type(None)]
    for hint in others:
        if isinstance(value, list) and get_origin(hint) is tuple:
            return _read(value, hint, where)
    return _read(value, first, where)


def _plain(value: Any, kind: type, where: str) -> Any:
    """Check a value's plain type, and return the value.

    An integer must also be a size, since integers count elements, bytes or devices.
    """
    # `isinstance` would accept booleans as integers.
    if type(value) is not kind:
        raise FunctreeValueError(f"`{where}` is {value_text(value)}, not of type {kind.__name__}")
    # The bound exceeds the size of any array, and a float can still represent it.
    if kind is int and not 0 <= value < 2**100:
        raise FunctreeValueError(f"`{where}` is {value_text(value)}, not a size")
    return value


def _at(where: str, name: object) -> str:
    return f"{where}.{name}".removeprefix(".")


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


@cache
def _defaults(cls: Any) -> dict[str, Any] | None:
    """Map a named tuple's or dataclass's fields to defaults, or return None for other types."""
    if not isinstance(cls, type) or not (is_dataclass(cls) or hasattr(cls, "_fields")):
        return None
    parameters = inspect.signature(cls).parameters
    return {name: parameter.default for name, parameter in parameters.items()}


def _dtype(text: str) -> Any:
    """Parse the text of a dtype, including the dtypes of random keys: `key<fry>`."""
    if text.startswith("key<"):
        implementation = key_implementation(text)
        if implementation is None:
            raise FunctreeValueError(f"unknown kind of random key: {text}")
        return jax.eval_shape(lambda: jax.random.key(0, impl=implementation)).dtype
    try:
        return jnp.dtype(text)
    # NumPy parses more than names, such as `(3,)f4`, and raises several classes of errors.
    except (TypeError, ValueError, SyntaxError) as error:
        raise FunctreeValueError(f"unknown dtype {text!r}") from error


def key_implementation(dtype: Any) -> str | None:
    """Return the implementation of a random key's dtype or of its text, or None if unknown."""
    return _IMPLEMENTATIONS.get(str(dtype).removeprefix("key<").removesuffix(">"))


_IMPLEMENTATIONS = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}
