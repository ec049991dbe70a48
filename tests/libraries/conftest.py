"""What the programs of others run under: JAX's own defaults, which they are written for."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def _defaults_of_jax() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
