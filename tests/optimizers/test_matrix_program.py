"""The update of a matrix in three pieces: what enters and leaves the one on whole matrices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from functree.optimizers.matrix_program import Division, MatrixProgram

M, N = 3, 5
X = np.random.default_rng(0).standard_normal((4, M, N)).astype(np.float32)


def divided(fun: Callable[..., Any], *arrays: Any, random: int = 0) -> Division | None:
    """The pieces of a function of arrays of one parameter; the last `random` ones are keys."""
    program = MatrixProgram(jax.make_jaxpr(fun)(*arrays))
    inputs = program.program.jaxpr.invars
    own, keys = inputs[: len(inputs) - random], inputs[len(inputs) - random :]
    return program.divide(program.program.jaxpr.outvars, own, keys)


def shapes(variables: Any, layered: Any) -> list[Any]:
    return [one.aval.shape for one in variables if one in layered]


def orthogonal(x: Any) -> Any:
    """What Muon does, once."""
    x = x / (jnp.linalg.norm(x) + 1e-8)
    return 2 * x - x @ x.T @ x


def muon(g: Any, m: Any, p: Any) -> Any:
    m = 0.9 * m + g
    return -0.1 * (orthogonal(0.9 * m + g) + 0.01 * p), m


def adaptive(g: Any, m: Any, p: Any) -> Any:
    m = 0.9 * m + g
    y = orthogonal(m)
    return (m * y).sum() * y, m


def trust(g: Any, m: Any, p: Any) -> Any:
    u = orthogonal(g) + 0.1 * p
    return u * jnp.linalg.norm(p) / jnp.linalg.norm(u), m


def statistics(g: Any, m: Any, p: Any, left: Any) -> Any:
    left = 0.9 * left + g @ g.T
    return 0.1 * (jnp.linalg.inv(left + jnp.eye(M)) @ g) + p, m, left


def looped(g: Any, m: Any, p: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda _, x: orthogonal(x), g) * 2, m + g


def conditional(g: Any, m: Any, p: Any) -> Any:
    return jax.lax.cond(p.sum() > 0, orthogonal, lambda x: x, g), m


WHOLE = (M, N)


@pytest.mark.parametrize(
    ("fun", "more", "entering", "leaving"),
    [
        (muon, [], [WHOLE], [WHOLE]),
        (jax.jit(muon), [], [WHOLE], [WHOLE]),
        # The moments are there anyway, so that their product with the result is not moved.
        (adaptive, [], [WHOLE], [WHOLE]),
        # The parameter enters once, and not its squares besides.
        (trust, [], [WHOLE, WHOLE], [WHOLE]),
        (statistics, [(M, M)], [WHOLE, (M, M)], [(M, M), WHOLE]),
        (looped, [], [WHOLE], [WHOLE]),
        (conditional, [], [WHOLE, WHOLE], [WHOLE]),
    ],
)
def test_what_enters_and_leaves(
    fun: Any, more: list[Any], entering: list[Any], leaving: list[Any]
) -> None:
    arrays = [X[0], X[1], X[2], *(np.eye(*shape, dtype=np.float32) for shape in more)]
    division = divided(fun, *arrays)
    assert division is not None
    assert sorted(shapes(division.whole.inputs, division.layered)) == sorted(entering)
    assert sorted(shapes(division.whole.outputs, division.layered)) == sorted(leaving)


@pytest.mark.parametrize(
    ("fun", "more"),
    [(muon, []), (adaptive, []), (trust, []), (statistics, [(M, M)]), (looped, [])],
)
def test_the_pieces_compute_what_the_function_does(fun: Any, more: list[Any]) -> None:
    arrays = [X[:2], X[1:3], X[2:], *(np.stack([np.eye(*s, dtype=np.float32)] * 2) for s in more)]
    program = MatrixProgram(jax.make_jaxpr(fun)(*(x[0] for x in arrays)))
    inputs, outputs = program.program.jaxpr.invars, program.program.jaxpr.outvars
    division = program.divide(outputs, inputs, [])
    assert division is not None

    @jax.jit
    def both(*arrays: Any) -> Any:
        values = dict(zip(inputs, arrays, strict=True))
        for piece in (division.before, division.whole, division.after):
            values.update(piece.run(values, division.layered, 1))
        return [values[one] for one in outputs], jax.vmap(fun)(*arrays)

    for found, expected in zip(*both(*arrays), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "fun",
    [
        lambda g, m: (0.1 * g, m),
        lambda g, m: (g / jnp.linalg.norm(g), m),
        lambda g, m: (g * jnp.vdot(g, m), m),  # a product, but of vectors
    ],
)
def test_without_matrices_there_is_nothing_to_divide(fun: Any) -> None:
    assert divided(fun, X[0], X[1]) is None


def test_random_numbers_are_no_reason_to_move_what_they_are_added_to() -> None:
    def noisy(g: Any, m: Any, key: Any) -> Any:
        m = 0.9 * m + g + jax.random.normal(key, g.shape)
        return orthogonal(m), m

    division = divided(noisy, X[0], X[1], jax.random.key(0), random=1)
    assert division is not None
    assert shapes(division.whole.inputs, division.layered) == [WHOLE]
    assert shapes(division.whole.outputs, division.layered) == [WHOLE]


def test_pieces_that_compute_the_same_are_of_one_kind() -> None:
    def two(g: Any, h: Any, scale: Any) -> Any:
        return orthogonal(g) * scale, orthogonal(h) * scale, h @ h.T

    program = MatrixProgram(jax.make_jaxpr(two)(X[0], X[1], 1.0))
    inputs, outputs = program.program.jaxpr.invars, program.program.jaxpr.outvars
    kinds = []
    for i, j in ((0, 0), (1, 1), (2, 1)):
        division = program.divide([outputs[i]], [inputs[j]], [])
        assert division is not None
        kinds.append(division.whole.kind(division.layered))
    assert kinds[0] == kinds[1] != kinds[2]


@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False}, {"ns_coeffs": "dion"}, {"preconditioning": "aol"}]
)
def test_muon_of_optax(options: Any) -> None:
    tx = optax.contrib.muon(0.1, weight_decay=0.1, **options)
    leaves, tree = jax.tree.flatten((X[0], tx.init(X[0]), X[1]))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        update = lambda *x: jax.tree.leaves(tx.update(*tree.unflatten(x)))  # noqa: E731
        program = MatrixProgram(jax.make_jaxpr(update)(*leaves))
    inputs = [one for one in program.program.jaxpr.invars if one.aval.shape == WHOLE]
    outputs = [one for one in program.program.jaxpr.outvars if one.aval.shape == WHOLE]
    division = program.divide(outputs, inputs, [])
    assert division is not None
    assert shapes(division.whole.inputs, division.layered) == [WHOLE]
    assert shapes(division.whole.outputs, division.layered) == [WHOLE]
