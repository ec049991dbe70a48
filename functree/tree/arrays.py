"""What counts as an array, and the text of one in messages."""

import re
from typing import Any

import jax
import numpy as np


def is_array(value: Any) -> bool:
    """Whether a value is an array: of JAX or numpy, traced and abstract ones and numpy scalars too.

    Not Python numbers, and not numpy's arrays of objects, texts, dates or records, which JAX cannot hold.
    """
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind not in "OUSMm" and not value.dtype.names
    return isinstance(value, jax.Array | jax.ShapeDtypeStruct)


def array_text(value: Any) -> str:
    """`f32[512, 128]`."""
    return f"{dtype_text(value.dtype)}[{', '.join(map(str, value.shape))}]"


def value_text(value: Any) -> str:
    """`f32[512, 128]` for an array, else the name of its class."""
    return array_text(value) if is_array(value) else type(value).__name__


def dtype_text(dtype: Any) -> str:
    """`f32`, `bf16`, `i32`, `u8`, `key<fry>`: a dtype as JAX's own texts shorten it."""
    short = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}
    return re.sub(r"^(bfloat|float|uint|int|complex)(?=\d)", lambda match: short[match.group()], str(dtype))
