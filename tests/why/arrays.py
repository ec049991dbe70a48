"""Abstract arrays, layouts, and what several programs compute with them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct
from jax.sharding import NamedSharding


def floats(*shape: int, sharding: NamedSharding | None = None) -> ShapeDtypeStruct:
    return ShapeDtypeStruct(shape, "float32", sharding=sharding)


def ints(*shape: int, sharding: NamedSharding | None = None) -> ShapeDtypeStruct:
    return ShapeDtypeStruct(shape, "int32", sharding=sharding)


def shapes(**sizes: tuple[int, ...]) -> dict[str, ShapeDtypeStruct]:
    return {name: floats(*shape) for name, shape in sizes.items()}


def laid(given: Any, returned: Any = None) -> dict[str, Any]:
    """The layouts of a function: of its arguments, and of its result."""
    return {"in_shardings": given, "out_shardings": returned}


def normed(x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def descend(parameters: Any, gradients: Any, rate: float = 0.1) -> Any:
    """One step of gradient descent."""
    return jax.tree.map(lambda p, g: p - rate * g, parameters, gradients)
