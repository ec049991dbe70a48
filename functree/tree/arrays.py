"""`is_array` recognizes arrays that JAX supports; other functions describe and convert arrays."""

import functools
import re
from collections.abc import Callable
from typing import Annotated, Any, Protocol, TypeGuard, Union

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

Tree = Any
"""A pytree: modules, containers, arrays and other leaves. Its type is `Any`, since every value is a
pytree."""

TreeDef = Any
"""The structure of a tree. Type checkers treat `jax.tree_util.PyTreeDef` as a variable, not as a
type."""

# With `|`, `pyright --verifytypes` would report missing type arguments of `jax.ShapeDtypeStruct`.
AnyArray = Union[jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct]  # noqa: UP007
"""A JAX or NumPy array: concrete, traced or abstract."""

DType = Annotated[Any, "a dtype"]
"""The dtype of an array. In JAX, dtypes of numbers and of random keys share no class."""


def is_array(value: object) -> TypeGuard[AnyArray]:
    """Return whether a value is a JAX or NumPy array.

    Traced arrays, abstract arrays and NumPy scalars count as arrays. Python numbers do not, and
    neither do NumPy arrays that JAX does not support.
    """
    # This runs for each leaf, and joining the classes with `|` would take longer than the check.
    if isinstance(value, _NUMPY_ARRAYS):
        return _is_held(value)
    return isinstance(value, _JAX_ARRAYS)


_NUMPY_ARRAYS = (np.ndarray, np.generic)
_JAX_ARRAYS = (jax.Array, jax.ShapeDtypeStruct)


def _is_held(array: np.ndarray | np.generic) -> bool:
    """Return whether JAX supports a NumPy array."""
    dtype = array.dtype
    # JAX supports neither extended floats ("g", "G") nor variable-length strings ("T"). The kinds
    # exclude objects, strings and dates. `np.void` (records and raw bytes) has the same kind as
    # bfloat16, so its type is compared.
    is_known = dtype.char not in "gGT" and dtype.kind not in "OUSMm" and dtype.type is not np.void
    return is_known and dtype.isnative and not isinstance(array, np.ma.MaskedArray)


def unheld(value: object) -> tuple[str, str] | None:
    """Return the reason why JAX does not support a NumPy array or scalar, and the remedy.

    The result is None for all other values.
    """
    if not isinstance(value, np.ndarray | np.generic) or _is_held(value):
        return None
    if isinstance(value, str | bytes):
        return None  # a NumPy string is also a Python string
    if isinstance(value, np.ma.MaskedArray):
        return (
            "is a masked array, which JAX does not support",
            "use `.filled(...)`, or pass `.data` and `.mask`",
        )
    if value.dtype.kind in "fciub" and not value.dtype.isnative:
        why = f"has dtype {value.dtype.str}, whose byte order JAX does not support"
        return why, 'convert the array: `x.astype(x.dtype.newbyteorder("="))`'
    why = f"has dtype {value.dtype}, which JAX does not support"
    if value.dtype.char in "gG":
        return why, "convert the array: `x.astype(np.float64)`, or `x.astype(np.complex128)`"
    return why, "convert the array to numbers: for dates, use `.view(np.int64)`"


def is_unheld_number(value: object) -> bool:
    """Return whether a value is a NumPy array of numbers that JAX does not support.

    Such a value is meant as an array, not as a static leaf.
    """
    return isinstance(value, np.ndarray | np.generic) and (
        value.dtype.kind in "fciub" and unheld(value) is not None
    )


class HasShape(Protocol):
    """An array or its description: anything with a shape and a dtype."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> object: ...


def array_text(value: HasShape) -> str:
    """Format the dtype and shape of an array: `f32[512, 128]`."""
    return f"{dtype_text(value.dtype)}[{', '.join(map(str, value.shape))}]"


def value_text(value: object) -> str:
    """Format an array as `f32[512, 128]`, and any other value as the name of its class."""
    return array_text(value) if is_array(value) else type(value).__name__


def dtype_text(dtype: object) -> str:
    """Abbreviate a dtype as JAX does: `f32`, `bf16`, `i32`, `u8`, `key<fry>`."""
    short = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}
    return re.sub(
        r"^(bfloat|float|uint|int|complex)(?=\d)", lambda match: short[match.group()], str(dtype)
    )


def abstract(kind: Any, sharding: Sharding | None = None) -> jax.ShapeDtypeStruct:
    """Make an abstract array from an array's JAX type (`jax.typeof`), including its weak type."""
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding, weak_type=kind.weak_type)


def is_key(dtype: DTypeLike) -> bool:
    """Return whether a dtype belongs to typed random keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def unsigned(dtype: DTypeLike) -> jnp.dtype:
    """Return the unsigned integer dtype with as many bits as a dtype of real numbers."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.dtype(f"uint{jnp.iinfo(dtype).bits}")
    return jnp.dtype(f"uint{jnp.finfo(dtype).bits}")


def bits(array: jax.Array) -> jax.Array:
    """Return the bits of each element of an array of real numbers, as unsigned integers."""
    return jax.lax.bitcast_convert_type(array, unsigned(array.dtype))


def on_device(array: jax.Array) -> jax.Array:
    """Move an array into the default memory of its devices, where operations can use it."""
    if array.sharding.memory_kind in (None, "device"):
        return array
    return jax.device_put(array, array.sharding.with_memory_kind("device"))


@functools.cache
def keys_of(impl: str) -> Callable[[jax.Array], jax.Array]:
    """Return the function that makes typed keys of a PRNG implementation from raw key data.

    The function is cached, so that JAX compiles it once.
    """
    return functools.partial(jax.random.wrap_key_data, impl=impl)


def with_sharding(fun: Callable[..., jax.Array], sharding: Sharding, *args: jax.Array) -> jax.Array:
    """Call a function of arrays and give its result a sharding.

    The sharding may include devices of other processes.
    """
    kind = sharding.memory_kind
    if kind in (None, "device"):
        return _jitted(fun, sharding)(*args)
    return jax.device_put(_jitted(fun, sharding.with_memory_kind("device"))(*args), sharding)


@functools.lru_cache(maxsize=256)
def _jitted(fun: Callable[..., jax.Array], sharding: Sharding) -> Callable[..., jax.Array]:
    return jax.jit(fun, out_shardings=sharding)
