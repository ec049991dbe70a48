"""A function of trees as a function from arrays to arrays."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_leaves import Leafy

from functree.tree.flat import Flat


def make(key: Any, size: int, name: str = "n") -> Any:
    w = jax.random.normal(key, (size,))
    return {"a": w, "b": [w, Leafy(w[:1], "static", name)], "n": size, "none": None, "np": np.float32(2)}


@pytest.mark.parametrize("key", [jax.random.key(0), np.zeros(2, np.uint32)], ids=["typed", "raw"])
def test_a_function(key: Any) -> None:
    flat = Flat(make, (key, 3), {"name": "m"})
    assert len(flat.arrays) == 1 and flat.__name__ == "make"
    values = jax.jit(flat)(flat.arrays)
    assert len(values) == 3  # `w` stands at two places
    result, expected = flat.result(values), make(jnp.asarray(key), 3, name="m")
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    assert result["n"] == 3 and result["b"][1].kept == "static" and result["b"][1].static == "m"
    assert result["a"] is result["b"][0]
    np.testing.assert_allclose(result["a"], expected["a"], rtol=1e-6)


def test_abstract() -> None:
    flat = Flat(make, (jax.ShapeDtypeStruct((2,), np.uint32), 3), {})
    assert [s.shape for s in flat.abstract()] == [(3,), (1,), ()]
    assert flat.result(flat.abstract())["b"][1].w.shape == (1,)


def test_fresh_gives_no_input_back_and_no_array_twice() -> None:
    x, y = jnp.ones(2), jnp.zeros(2)
    given = Flat(lambda x, y: [x, y + 1, x], (x, y), {}, fresh=True)
    out = given([x, y])
    assert [a.tolist() for a in out] == [[1, 1], [1, 1], [1, 1]]
    assert len({a.unsafe_buffer_pointer() for a in (x, *out)}) == 4
    kept = Flat(lambda x: x, (x,), {})
    assert kept([x])[0] is x
    key = jax.random.key(1)
    [copied] = Flat(lambda k: k, (key,), {}, fresh=True)([key])
    assert copied is not key and jnp.array_equal(jax.random.key_data(copied), jax.random.key_data(key))


def test_modules_in_and_out() -> None:
    layer = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    flat = Flat(lambda m: eqx.tree_at(lambda m: m.bias, m, m.bias + 1), (layer,), {})
    result = flat.result(jax.jit(flat)(flat.arrays))
    assert isinstance(result, eqx.nn.Linear) and jnp.array_equal(result.bias, layer.bias + 1)
    assert jnp.array_equal(result.weight, layer.weight)


def test_nothing_in_and_nothing_out() -> None:
    flat = Flat(lambda: {"n": 1}, (), {})
    assert flat([]) == [] and flat.abstract() == [] and flat.result([]) == {"n": 1}
