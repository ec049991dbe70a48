"""A traced function and its arguments ─► `Program`, which runs it and records its values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from functree.calls.function import Function
from functree.calls.program import around
from functree.testing.checksums import is_inexact
from functree.testing.intermediates import Record, Site, Watch, run
from functree.testing.steps import Body, body_of
from functree.tree.arrays import AnyArray, is_key
from functree.tree.paths import Path

Sampler = Callable[[Sequence[AnyArray]], Mapping[Site, jax.Array]]
"""Runs a program on arrays, and returns its records."""

# A program that only records is run once or twice, so that it is not worth being optimized. Other
# platforms have no such options, or others.
_QUICK: Mapping[str, dict[str, str | bool]] = {
    "cpu": {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": True}
}


@dataclass(frozen=True, eq=False)
class Program:
    """A function that was traced for some arguments.

    Attributes:
        body: its operations.
        arrays: the arrays of the arguments.
        paths: the path of each.
        mesh: the mesh to enter around a call; None if there is none.
    """

    body: Body
    arrays: Sequence[AnyArray]
    paths: tuple[Path, ...]
    mesh: Mesh | None

    @classmethod
    def of(cls, function: Function[..., Any], args: Sequence[Any]) -> "Program":
        """Trace a function. What it donates is not donated here."""
        traced = function.trace(*args)
        return cls(
            body_of(traced.jax.jaxpr), traced.arrays(tuple(args), {}), traced.paths, traced.entered
        )

    def watched(self, watch: Watch) -> Sampler:
        """Compile the function, so that it returns the records of its values and nothing else."""
        sites: list[Site] = []

        def recording(*arrays: jax.Array) -> list[Record]:
            _, records = run(self.body, arrays, watch)
            sites[:] = records
            return list(records.values())

        with around(self.mesh):
            lowered = jax.jit(recording, keep_unused=True).lower(*self.arrays)
            compiled = lowered.compile(_QUICK.get(jax.default_backend()))

        def sample(arrays: Sequence[AnyArray]) -> Mapping[Site, jax.Array]:
            return dict(zip(sites, compiled(*arrays), strict=True))

        return sample

    def perturbed(self, seed: int) -> list[AnyArray]:
        """The arrays, each number off by about as much as rounding makes of it.

        What the same program makes of these shows how much its values depend on rounding, and so on
        the order in which a sum is made.
        """
        rng = np.random.default_rng(seed)
        return [_perturbed(array, self._rounding, rng) for array in self.arrays]

    @property
    def _rounding(self) -> float:
        """The relative error of the coarsest dtype in which the function computes."""
        found = [float(jnp.finfo(jnp.float32).eps)]
        for step in self.body.all_steps():
            dtypes = [getattr(one, "dtype", None) for one in step.types]
            found.extend(rounding(one) for one in dtypes if one is not None)
        return max(found)


def rounding(dtype: np.dtype) -> float:
    """The relative error of a dtype; zero if it is exact."""
    return float(jnp.finfo(dtype).eps) if is_inexact(dtype) else 0.0


def _perturbed(array: AnyArray, amount: float, rng: np.random.Generator) -> AnyArray:
    if is_key(array.dtype) or not is_inexact(array.dtype):
        return array
    values = np.asarray(array)
    wide = values.astype(np.promote_types(np.float64, _numpy_dtype(values.dtype)))
    off = wide * (1 + amount * rng.uniform(-1, 1, values.shape))
    off = off.astype(values.dtype)
    if not isinstance(array, jax.Array):
        return off
    return jax.device_put(off, array.sharding)


def _numpy_dtype(dtype: np.dtype) -> np.dtype:
    """A dtype that numpy can promote: those of JAX, such as bfloat16, it cannot."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex64)
    return np.dtype(np.float32)
