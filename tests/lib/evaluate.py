"""A traced program and arrays of numpy ─► its outputs, computed by numpy.

This is for programs with tiny arrays that run a few times: to compile one takes a thousand times as
long, and starts the devices. Floating-point numbers are computed in double precision, whatever the
program says. Random numbers are those of bits that are all zero.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from functree.tree.jaxprs import AnyJaxpr, called_program, is_random, scan_sizes

Arrays = list[Any]


def evaluate(program: AnyJaxpr, arrays: Sequence[Any]) -> Arrays:
    """The outputs of a program.

    Args:
        program: the program, as `jax.make_jaxpr` returns it.
        arrays: its inputs. A random key may have any value.

    Examples:
        >>> from tests.lib.evaluate import evaluate
        >>> program = jax.make_jaxpr(lambda x: jnp.sqrt(x) + 1)(jnp.ones(2))
        >>> evaluate(program, [np.array([4.0, 9.0])])
        [array([3., 4.])]
    """
    open_program: Any = getattr(program, "jaxpr", program)
    constants = getattr(program, "consts", ())
    known: dict[Any, Any] = {}
    known.update(zip(open_program.constvars, map(as_numpy, constants), strict=True))
    known.update(zip(open_program.invars, map(as_numpy, arrays), strict=True))
    for equation in open_program.eqns:
        outputs = _outputs(equation, _values(known, equation.invars))
        known.update(zip(equation.outvars, outputs, strict=True))
    return _values(known, open_program.outvars)


def as_numpy(value: Any) -> Any:
    """An array of numpy in the precision that is computed in; zeros for random keys."""
    if isinstance(value, jax.Array) and _is_key(value.dtype):
        return np.zeros(value.shape, np.uint32)
    value = np.asarray(value)
    return value.astype(_precise(value.dtype), copy=False)


@cache
def _precise(dtype: Any) -> Any:
    """The dtype that values of a dtype are computed in."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.complex128
    return np.float64 if jnp.issubdtype(dtype, jnp.floating) else dtype


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _values(known: Mapping[Any, Any], variables: Sequence[Any]) -> Arrays:
    values: Arrays = []
    for variable in variables:
        if isinstance(variable, Literal):
            type_: Any = variable.aval
            values.append(as_numpy(np.asarray(variable.val, type_.dtype)))
        else:
            values.append(known[variable])
    return values


def _outputs(equation: Any, inputs: Arrays) -> Arrays:
    """The outputs of one operation."""
    name, params = equation.primitive.name, equation.params
    if is_random(equation) or all(_is_key(variable.aval.dtype) for variable in equation.outvars):
        return [_zeros(variable.aval) for variable in equation.outvars]
    if name in _CONTROL:
        return _CONTROL[name](equation, inputs)
    called = called_program(equation)
    if called is not None:
        return evaluate(called, inputs)
    if name in _OPERATIONS:
        return [_OPERATIONS[name](*inputs)]
    if name in _WITH_PARAMETERS:
        return [_WITH_PARAMETERS[name](params, *inputs)]
    if name == "split":
        return np.split(inputs[0], np.cumsum(params["sizes"])[:-1], params["axis"])
    return _by_jax(equation, inputs)


def _zeros(aval: Any) -> Any:
    dtype = np.uint32 if _is_key(aval.dtype) else _precise(aval.dtype)
    return np.zeros(aval.shape, dtype)


def _by_jax(equation: Any, inputs: Arrays) -> Arrays:
    """The outputs of an operation that is not in the tables, computed by JAX on the processor."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        arrays = [
            jnp.asarray(value.astype(variable.aval.dtype))
            for value, variable in zip(inputs, equation.invars, strict=True)
        ]
        found: Any = equation.primitive.bind(*arrays, **equation.params)
    return list(map(as_numpy, found if equation.primitive.multiple_results else [found]))


# Control flow

_MOST_ITERATIONS = 1000


def _cond(equation: Any, inputs: Arrays) -> Arrays:
    branches = equation.params["branches"]
    chosen = min(max(int(inputs[0]), 0), len(branches) - 1)
    return evaluate(branches[chosen], inputs[1:])


def _while(equation: Any, inputs: Arrays) -> Arrays:
    params = equation.params
    before = params["cond_nconsts"]
    first = before + params["body_nconsts"]
    of_condition, of_body, carry = inputs[:before], inputs[before:first], inputs[first:]
    for _ in range(_MOST_ITERATIONS):
        if not evaluate(params["cond_jaxpr"], [*of_condition, *carry])[0]:
            return carry
        carry = evaluate(params["body_jaxpr"], [*of_body, *carry])
    raise ValueError(f"a loop has not ended after {_MOST_ITERATIONS} iterations")


def _scan(equation: Any, inputs: Arrays) -> Arrays:
    sizes, length = scan_sizes(equation), equation.params["length"]
    first = sizes.constants + sizes.carried
    constants, carry = inputs[: sizes.constants], inputs[sizes.constants : first]
    collected: list[Arrays] = []
    order = range(length)
    for i in reversed(order) if equation.params["reverse"] else order:
        slices = [array[i] for array in inputs[first:]]
        outputs = evaluate(equation.params["jaxpr"], [*constants, *carry, *slices])
        carry = outputs[: sizes.carried]
        collected.append(outputs[sizes.carried :])
    if equation.params["reverse"]:
        collected.reverse()
    return [*carry, *map(np.stack, zip(*collected, strict=True))]


_CONTROL: Mapping[str, Callable[[Any, Arrays], Arrays]] = {
    "cond": _cond,
    "while": _while,
    "scan": _scan,
}

# Operations on each element, by their names in JAX


def _same(x: Any) -> Any:
    return x


def _divided(x: Any, y: Any) -> Any:
    if np.issubdtype(x.dtype, np.integer):
        return np.trunc(x / y).astype(x.dtype)
    return np.divide(x, y)


def _selected(which: Any, *cases: Any) -> Any:
    return np.choose(which.astype(int), cases)


_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "abs": np.abs,
    "add": np.add,
    "add_any": np.add,
    "and": np.bitwise_and,
    "atan2": np.arctan2,
    "cbrt": np.cbrt,
    "ceil": np.ceil,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "conj": np.conj,
    "copy": _same,
    "copy_p": _same,
    "cos": np.cos,
    "div": _divided,
    "eq": np.equal,
    "exp": np.exp,
    "expm1": np.expm1,
    "floor": np.floor,
    "ge": np.greater_equal,
    "gt": np.greater,
    "imag": np.imag,
    "is_finite": np.isfinite,
    "le": np.less_equal,
    "log": np.log,
    "log1p": np.log1p,
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "pow": np.power,
    "real": np.real,
    "rem": np.fmod,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "select_n": _selected,
    "shift_left": np.left_shift,
    "shift_right_logical": np.right_shift,
    "sign": np.sign,
    "sin": np.sin,
    "sqrt": np.sqrt,
    "square": np.square,
    "stop_gradient": _same,
    "sub": np.subtract,
    "tan": np.tan,
    "tanh": np.tanh,
    "xor": np.bitwise_xor,
}

# Operations with parameters

Params = Mapping[str, Any]


def _broadcast(params: Params, x: Any) -> Any:
    shape = [1] * len(params["shape"])
    for dim, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
        shape[dim] = size
    return np.broadcast_to(x.reshape(shape), params["shape"])


def _bitcast(params: Params, x: Any) -> Any:
    new = np.dtype(params["new_dtype"])
    if not np.issubdtype(x.dtype, np.integer) or x.dtype.itemsize != new.itemsize:
        raise TypeError(f"the bits of {x.dtype} are not those of {new}")
    return as_numpy(x.view(new))


def _iota(params: Params) -> Any:
    shape, dim = params["shape"], params["dimension"]
    along = [1] * len(shape)
    along[dim] = shape[dim]
    return np.broadcast_to(np.arange(shape[dim]).reshape(along), shape).astype(params["dtype"])


def _slice(params: Params, x: Any) -> Any:
    steps = params["strides"] or [1] * x.ndim
    limits = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
    return x[tuple(slice(*one) for one in limits)]


def _dot(params: Params, x: Any, y: Any) -> Any:
    (contracted_x, contracted_y), (batch_x, batch_y) = params["dimension_numbers"]
    names_x, names_y = list(range(x.ndim)), list(range(x.ndim, x.ndim + y.ndim))
    for i, j in [
        *zip(contracted_x, contracted_y, strict=True),
        *zip(batch_x, batch_y, strict=True),
    ]:
        names_y[j] = names_x[i]
    free_x = [names_x[i] for i in range(x.ndim) if i not in (*contracted_x, *batch_x)]
    free_y = [names_y[j] for j in range(y.ndim) if j not in (*contracted_y, *batch_y)]
    return np.einsum(x, names_x, y, names_y, [*(names_x[i] for i in batch_x), *free_x, *free_y])


def _reduction(function: Callable[..., Any]) -> Callable[[Params, Any], Any]:
    return lambda params, x: function(x, axis=tuple(params["axes"]))


_WITH_PARAMETERS: Mapping[str, Callable[..., Any]] = {
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda params, *xs: np.concatenate(xs, params["dimension"]),
    "convert_element_type": lambda params, x: x.astype(_precise(params["new_dtype"])),
    "dot_general": _dot,
    "expand_dims": lambda params, x: np.expand_dims(x, tuple(params["dimensions"])),
    "integer_pow": lambda params, x: x ** params["y"],
    "iota": _iota,
    "reduce_and": _reduction(np.logical_and.reduce),
    "reduce_max": _reduction(np.max),
    "reduce_min": _reduction(np.min),
    "reduce_or": _reduction(np.logical_or.reduce),
    "reduce_precision": lambda params, x: x,
    "reduce_prod": _reduction(np.prod),
    "reduce_sum": _reduction(np.sum),
    "reshape": lambda params, x: x.reshape(params["new_sizes"]),
    "rev": lambda params, x: np.flip(x, params["dimensions"]),
    "slice": _slice,
    "squeeze": lambda params, x: np.squeeze(x, tuple(params["dimensions"])),
    "transpose": lambda params, x: np.transpose(x, params["permutation"]),
}
