"""The arguments of which each layer of a stack gets its part ─► why they do not fit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from functree.errors import FunctreeTypeError, FunctreeValueError
from functree.transforms.stacked import check_each
from tests.lib.trees import x


def layer(h: Any, shared: Any = None, *, key: Any = None, mask: Any = None) -> Any:
    return h


def passing(h: Any, **more: Any) -> Any:
    return h


@pytest.mark.parametrize(
    ("fun", "each"),
    [
        (layer, {}),
        (layer, {"key": jax.random.split(jax.random.key(0), 3)}),
        (layer, {"key": x(3), "mask": [x(3, 4), jnp.ones((3, 1)), 5, None]}),
        (passing, {"anything": x(3, 2)}),
    ],
)
def test_what_fits(fun: Any, each: dict[str, Any]) -> None:
    check_each(fun, each, 3)


SHARED = "pass what all layers share by position, `scan(x, shared)`"
WRONG: dict[str, tuple[Any, str, str]] = {
    "fewer": (x(2, 4), "has leading size 2, and there are 3 layers", SHARED),
    "more": (x(4, 4), "has leading size 4, and there are 3 layers", SHARED),
    "the last dimension": (jnp.ones((4, 3)), "has leading size 4, and there are 3 layers", SHARED),
    "a number": (jnp.ones(()), "has no leading dimension, and there are 3 layers", SHARED),
    "one key": (
        jax.random.key(0),
        "has no leading dimension, and there are 3 layers",
        "split it, `jax.random.split(key, 3)`",
    ),
    "keys for fewer": (
        jax.random.split(jax.random.key(0), 2),
        "has leading size 2, and there are 3 layers",
        SHARED,
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_arrays_that_do_not_have_a_part_for_each(case: str) -> None:
    value, why, remedy = WRONG[case]
    with pytest.raises(FunctreeValueError, match="each layer needs its own part") as caught:
        check_each(layer, {"mask": {"of": value, "fits": x(3)}}, 3)
    (problem,) = caught.value.problems
    assert str(problem.path) == "each.mask.of"
    assert (problem.why, problem.remedy) == (why, remedy)


def test_a_name_that_a_layer_does_not_take() -> None:
    with pytest.raises(FunctreeTypeError) as caught:
        check_each(layer, {"maks": np.ones(3)}, 3)
    assert str(caught.value) == (
        "each={'maks': ...}: function has no parameter `maks`; did you mean `mask`?"
    )
