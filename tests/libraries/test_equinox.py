"""What the cookbook says of the dtypes of Equinox' own layers."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

SIZE = 4096
NORMS = {"LayerNorm": eqx.nn.LayerNorm, "RMSNorm": eqx.nn.RMSNorm}


@pytest.mark.parametrize("parameters", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", NORMS)
def test_norms_compute_in_float32_and_return_the_dtype_of_their_input(
    name: str, parameters: Any
) -> None:
    """A sum of 4096 squares in bfloat16 would stop at 256 times the first."""
    norm = NORMS[name](SIZE, dtype=parameters)
    x = (jnp.arange(SIZE) % 2 * 3 - 1).astype(jnp.bfloat16)  # -1 and 2
    y = norm(x)
    assert y.dtype == jnp.bfloat16
    wanted = NORMS[name](SIZE)(x.astype(jnp.float32))
    np.testing.assert_allclose(y.astype(jnp.float32), wanted, rtol=1e-2)


def test_a_layer_with_float32_weights_makes_its_output_float32() -> None:
    layer = eqx.nn.Linear(8, 8, key=jax.random.key(0))
    assert layer(jnp.ones(8, jnp.bfloat16)).dtype == jnp.float32
