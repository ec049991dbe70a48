"""What the programs of others run under: JAX's own defaults, which they are written for."""

import sys
from collections.abc import Iterator

import jax
import pytest

collect_ignore = ["test_klax.py"] if sys.version_info < (3, 12) else []


@pytest.fixture(autouse=True)
def _defaults_of_jax() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
