"""Arrays that are deleted ─► an error with their paths."""

import jax
import jax.numpy as jnp
import numpy as np
from trees import x

import functree as ft
from functree.devices.deleted import is_deleted, refuse_deleted
from functree.errors import FunctreeError


def gone() -> jax.Array:
    array = jnp.ones((2, 3))
    array.delete()
    return array


def test_what_is_deleted() -> None:
    assert is_deleted(gone())
    for other in (jnp.ones(2), np.ones(2), x(2), 3, None):
        assert not is_deleted(other)
    traced: list[bool] = []
    jax.jit(lambda array: traced.append(is_deleted(array)))(jnp.ones(2))
    assert traced == [False]


def test_one() -> None:
    paths = [ft.Path(("state", "w")), ft.Path(("state", "b")), ft.Path(("x",))]
    error = refuse_deleted("step", paths, [gone(), jnp.ones(2), np.ones(2)])
    assert type(error) is FunctreeError
    assert str(error).startswith("step: 1 argument is deleted")
    (problem,) = error.problems
    assert str(problem.path) == "state.w" and problem.shape == (2, 3)
    assert problem.why == "is deleted"
    assert problem.remedy == (
        "if it was donated, use what that call returned, or donate a copy (`ft.copy`) to keep it"
    )


def test_several() -> None:
    paths = [ft.Path(("a",)), ft.Path(("b",)), ft.Path(("c",))]
    error = refuse_deleted("step", paths, [gone(), jnp.ones(2), gone()])
    assert str(error).startswith("step: 2 arguments are deleted")
    assert [str(problem.path) for problem in error.problems] == ["a", "c"]
