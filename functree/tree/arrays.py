"""A value ─► whether it is an array that JAX can hold, its text in messages, and its bits."""

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
"""A pytree: modules, containers, arrays and other leaves. `Any`, since every value is one."""

TreeDef = Any
"""The structure of a tree. Type checkers do not take `jax.tree_util.PyTreeDef` as a type: to them
it is a variable."""

# Not with `|`, in which `pyright --verifytypes` finds type arguments of `jax.ShapeDtypeStruct`.
AnyArray = Union[jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct]  # noqa: UP007
"""An array with values, traced or abstract, of JAX or numpy."""

DType = Annotated[Any, "a dtype"]
"""The dtype of an array. JAX has no common class for the dtypes of numbers and of random keys."""


def is_array(value: object) -> TypeGuard[AnyArray]:
    """Whether a value is an array of JAX or numpy. Traced and abstract arrays and numpy scalars are
    arrays too.

    Python numbers are not arrays, and neither are NumPy arrays that JAX cannot hold.
    """
    # This runs for each leaf, and to join the classes by `|` would take longer than the check.
    if isinstance(value, _NUMPY_ARRAYS):
        return _is_held(value)
    return isinstance(value, _JAX_ARRAYS)


_NUMPY_ARRAYS = (np.ndarray, np.generic)
_JAX_ARRAYS = (jax.Array, jax.ShapeDtypeStruct)


def _is_held(array: np.ndarray | np.generic) -> bool:
    """Whether JAX can hold a NumPy array."""
    dtype = array.dtype
    # Numbers of more than 8 bytes and texts of any length; objects, texts and dates; records, and
    # bytes without a meaning, which have the kind of bfloat16.
    is_known = dtype.char not in "gGT" and dtype.kind not in "OUSMm" and dtype.type is not np.void
    return is_known and dtype.isnative and not isinstance(array, np.ma.MaskedArray)


def unheld(value: object) -> tuple[str, str] | None:
    """Why JAX cannot hold a NumPy array or scalar, and what to do; None for all other values."""
    if not isinstance(value, np.ndarray | np.generic) or _is_held(value):
        return None
    if isinstance(value, str | bytes):
        return None  # a text of NumPy is a text of Python too
    if isinstance(value, np.ma.MaskedArray):
        return (
            "has a mask, which JAX arrays do not have",
            "use `.filled(...)`, or `.data` and `.mask`",
        )
    if value.dtype.kind in "fciub" and not value.dtype.isnative:
        why = f"has the dtype {value.dtype.str}, whose byte order JAX does not have"
        return why, 'convert it: `x.astype(x.dtype.newbyteorder("="))`'
    why = f"has the dtype {value.dtype}, which JAX does not have"
    if value.dtype.char in "gG":
        return why, "convert it: `x.astype(np.float64)`, or `np.complex128`"
    return why, "convert it to numbers, such as `.view(np.int64)` of dates"


def is_unheld_number(value: object) -> bool:
    """Whether a value is a NumPy array of numbers that JAX cannot hold: it is meant as an array."""
    return isinstance(value, np.ndarray | np.generic) and (
        value.dtype.kind in "fciub" and unheld(value) is not None
    )


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


def abstract(kind: Any, sharding: Sharding | None = None) -> jax.ShapeDtypeStruct:
    """An array without values, of JAX's type of an array (`jax.typeof`), weak if that is."""
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding, weak_type=kind.weak_type)


def is_key(dtype: DTypeLike) -> bool:
    """Whether a dtype is that of typed random keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def unsigned(dtype: DTypeLike) -> jnp.dtype:
    """The unsigned integers with as many bits as a dtype of real numbers has."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.dtype(f"uint{jnp.iinfo(dtype).bits}")
    return jnp.dtype(f"uint{jnp.finfo(dtype).bits}")


def bits(array: jax.Array) -> jax.Array:
    """The bits of each element of an array of real numbers."""
    return jax.lax.bitcast_convert_type(array, unsigned(array.dtype))


def on_device(array: jax.Array) -> jax.Array:
    """An array in the memory of its devices, where it can be computed with."""
    if array.sharding.memory_kind in (None, "device"):
        return array
    return jax.device_put(array, array.sharding.with_memory_kind("device"))


@functools.cache
def keys_of(impl: str) -> Callable[[jax.Array], jax.Array]:
    """The function from words to typed keys of an implementation; one function, so that it is
    compiled once."""
    return functools.partial(jax.random.wrap_key_data, impl=impl)


def with_sharding(fun: Callable[..., jax.Array], sharding: Sharding, *args: jax.Array) -> jax.Array:
    """The result of a function of arrays, with a sharding; also if other processes have parts of
    it."""
    kind = sharding.memory_kind
    if kind in (None, "device"):
        return _jitted(fun, sharding)(*args)
    return jax.device_put(_jitted(fun, sharding.with_memory_kind("device"))(*args), sharding)


@functools.lru_cache(maxsize=256)
def _jitted(fun: Callable[..., jax.Array], sharding: Sharding) -> Callable[..., jax.Array]:
    return jax.jit(fun, out_shardings=sharding)
