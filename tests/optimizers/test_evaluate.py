"""Programs computed by numpy, against JAX."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.lib.evaluate import evaluate

X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
Y = np.linspace(0.1, 3, 12, dtype=np.float32).reshape(3, 4)[:, ::-1].copy()
N = np.arange(-6, 6, dtype=np.int32).reshape(3, 4)
Z = (X + 1j * Y).astype(np.complex64)


@jax.custom_jvp
def cubed(x: Any) -> Any:
    return x**3


cubed.defjvp(lambda primals, tangents: (cubed(*primals), tangents[0]))


def counted(x: Any) -> Any:
    def body(carry: Any) -> Any:
        return carry[0] + 1, carry[1] * x + 1

    return lax.while_loop(lambda carry: carry[0] < 3, body, (0, x))


def scanned(x: Any, y: Any, reverse: bool) -> Any:
    def body(carry: Any, row: Any) -> Any:
        return carry * row + x[0], (carry, row.sum())

    return lax.scan(body, y[0], y, reverse=reverse)


# Functions of X, Y (positive), N (integers) and Z (complex).
CASES: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "arithmetic": lambda x, y, n, z: (x + y, x - y, x * y, x / y, -x, x**3, y**x, x % y, n * 2 - 1),
    "integers": lambda x, y, n, z: (lax.div(n, 4), lax.rem(n, 4), abs(n), n // 4, n % 4),
    "roots": lambda x, y, n, z: (jnp.sqrt(y), lax.rsqrt(y), jnp.cbrt(x), jnp.square(x)),
    "exponentials": lambda x, y, n, z: (jnp.exp(x), jnp.expm1(x), jnp.log(y), jnp.log1p(y)),
    "trigonometry": lambda x, y, n, z: (
        jnp.sin(x),
        jnp.cos(x),
        jnp.tan(x),
        jnp.tanh(x),
        jnp.arctan2(x, y),
    ),
    "rounding": lambda x, y, n, z: (jnp.floor(x), jnp.ceil(x), jnp.sign(x), jnp.abs(x)),
    "comparisons": lambda x, y, n, z: (
        x < y,
        x <= y,
        x > y,
        x >= y,
        x == y,
        x != y,
        jnp.isfinite(x / 0),
    ),
    "logic": lambda x, y, n, z: ((x > 0) & (y > 1), (x > 0) | (y > 1), ~(x > 0), (x > 0) ^ (y > 1)),
    "bits": lambda x, y, n, z: (n & 3, n | 3, n ^ 3, n.astype(jnp.uint32) >> jnp.uint32(2)),
    "choices": lambda x, y, n, z: (
        jnp.where(x > 0, x, y),
        jnp.clip(x, -1, 1),
        jnp.maximum(x, y),
        jnp.minimum(x, y),
    ),
    "complex": lambda x, y, n, z: (z * z, jnp.conj(z), z.real, z.imag, jnp.abs(z)),
    "activations": lambda x, y, n, z: (jax.nn.sigmoid(x), jax.nn.relu(x), jax.nn.silu(x)),
    "dtypes": lambda x, y, n, z: (n.astype(jnp.float32), x.astype(jnp.int32), x.astype(bool)),
    "reductions": lambda x, y, n, z: (
        x.sum(),
        x.max(0),
        x.min(1),
        y.prod(1),
        x.mean(),
        (x > 0).any(0),
        (y > 0).all(1),
    ),
    "norms": lambda x, y, n, z: (jnp.linalg.norm(x), jnp.linalg.norm(x, axis=0), jnp.sum(x**2)),
    "shapes": lambda x, y, n, z: (
        x.reshape(4, 3),
        x.T,
        x[None],
        x[1:, ::2],
        jnp.flip(x, 0),
        jnp.squeeze(x[:, :1]),
    ),
    "new": lambda x, y, n, z: (
        jnp.zeros((2, 3)),
        jnp.broadcast_to(x[0], (2, 4)),
        lax.iota(int, 4),
        jnp.eye(3),
    ),
    "joined": lambda x, y, n, z: (
        jnp.concatenate([x, y], 1),
        jnp.stack([x, y]),
        jnp.split(x, [1, 3], 1),
    ),
    "products": lambda x, y, n, z: (
        x @ y.T,
        jnp.einsum("ij,ij->i", x, y),
        jnp.einsum("ij,kj->ki", x, y),
        lax.dot_general(jnp.stack([x, y]), jnp.stack([y, x]), (((2,), (2,)), ((0,), (0,)))),
    ),
    "functions": lambda x, y, n, z: (jax.jit(jnp.sin)(x), jax.checkpoint(jnp.cos)(x), cubed(x)),
    "cond": lambda x, y, n, z: (
        lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
        lax.switch(n[2, 2], [jnp.sin, jnp.cos, jnp.tanh], x),
    ),
    "while": lambda x, y, n, z: counted(x),
    "scan": lambda x, y, n, z: (scanned(x, y, False), scanned(x, y, True)),
    "by JAX": lambda x, y, n, z: (lax.erf_inv(x / 3), jnp.sort(x), x.at[0].add(1), jnp.cumsum(x)),
    "constants": lambda x, y, n, z: (x + X, jnp.float32(2) * x, jnp.asarray(N)),
}


@pytest.fixture(scope="module")
def want() -> Any:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return jax.jit(lambda *args: {name: case(*args) for name, case in CASES.items()})(
            X, Y, N, Z
        )


@pytest.mark.parametrize("name", CASES)
def test_a_program_computed_by_numpy(name: str, want: Any):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        program = jax.make_jaxpr(CASES[name])(X, Y, N, Z)
    with np.errstate(all="ignore"):
        found = evaluate(program, [X, Y, N, Z])
    for have, wanted in zip(found, jax.tree.leaves(want[name]), strict=True):
        assert have.shape == wanted.shape
        if not jnp.issubdtype(wanted.dtype, jnp.inexact):
            assert have.dtype == wanted.dtype
        np.testing.assert_allclose(have, wanted, rtol=2e-5, atol=2e-6)


def test_floating_point_numbers_are_in_double_precision():
    program = jax.make_jaxpr(
        lambda x: x.astype(jnp.float16) + jnp.bfloat16(0.1).astype(jnp.float16)
    )(X)
    (found,) = evaluate(program, [X])
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, X.astype(np.float64) + float(jnp.bfloat16(0.1)))


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_random_numbers_are_those_of_zero_bits(make: Any):
    def draw(key: Any) -> Any:
        one, other = jax.random.split(key)
        return (
            jax.random.normal(one, (3,)),
            jax.random.normal(other, (2,)),
            jax.random.fold_in(key, 1),
        )

    program = jax.make_jaxpr(draw)(make(0))
    one, other, _ = evaluate(program, [make(7)])
    assert len({*one.tolist(), *other.tolist()}) == 1
    closed = jax.make_jaxpr(lambda: jax.random.uniform(make(3), (2,)))()
    assert evaluate(closed, [])[0].tolist() == [0, 0]


def test_a_loop_without_end_is_an_error():
    program = jax.make_jaxpr(lambda x: lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x * 1, x))(X)
    with pytest.raises(ValueError, match="a loop has not ended after 1000 iterations"):
        evaluate(program, [X])
