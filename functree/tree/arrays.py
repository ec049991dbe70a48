"""A value ─► whether functree treats it as an array, and its text in messages."""

import re
from typing import Annotated, Any, Protocol, TypeGuard, Union

import jax
import numpy as np

Tree = Any
"""A pytree: modules, containers, arrays and other leaves. `Any`, since every value is one."""

TreeDef = Any
"""The structure of a tree. Type checkers do not take `jax.tree_util.PyTreeDef` as a type: to them
it is a variable."""

# Not with `|`, in which `pyright --verifytypes` finds type arguments of `jax.ShapeDtypeStruct`.
AnyArray = Union[jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct]  # noqa: UP007
"""An array with values, traced or abstract, of JAX or numpy."""

DType = Annotated[Any, "a dtype"]
"""The dtype of an array. JAX has no class for those of random keys and of numbers together."""


def is_array(value: object) -> TypeGuard[AnyArray]:
    """Whether a value is an array of JAX or numpy. Traced and abstract arrays and numpy scalars are
    arrays too.

    Python numbers are not arrays, and neither are numpy's arrays of objects, texts, dates or
    records, because JAX cannot hold them.
    """
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind not in "OUSMm" and not value.dtype.names
    return isinstance(value, jax.Array | jax.ShapeDtypeStruct)


class HasShape(Protocol):
    """An array, or what describes one."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> object: ...


def array_text(value: HasShape) -> str:
    """The dtype and shape of an array: `f32[512, 128]`."""
    return f"{dtype_text(value.dtype)}[{', '.join(map(str, value.shape))}]"


def value_text(value: object) -> str:
    """`f32[512, 128]` for an array, and the name of the class for any other value."""
    return array_text(value) if is_array(value) else type(value).__name__


def dtype_text(dtype: object) -> str:
    """A dtype as JAX abbreviates it: `f32`, `bf16`, `i32`, `u8`, `key<fry>`."""
    short = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}
    return re.sub(
        r"^(bfloat|float|uint|int|complex)(?=\d)", lambda match: short[match.group()], str(dtype)
    )
