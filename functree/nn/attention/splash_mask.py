"""A length and a window ─► the mask of JAX's kernel for TPUs, whose blocks cost next to nothing."""

import functools
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Array, Bool, Int

_Ids = TypeVar("_Ids", np.ndarray, Array)


@dataclass(frozen=True)
class CausalMask:
    """Which keys each query attends to: those that are not after it, in its window.

    It has what the kernel's own `CausalMask` and `LocalMask` have. These compute each block of the
    mask as an array, for the kernel to see which blocks are empty or full: of 131,072 tokens that
    takes minutes. Here only blocks that are neither are computed, each that differs once, and what
    the kernel asks of the others costs nothing.

    Attributes:
        length: the number of keys.
        window: how many keys a query attends to at most, its own among them; None for all.
        first: the index of the first query; the others are all that follow it.

    Examples:
        >>> from functree.nn.attention.splash_mask import CausalMask
        >>> CausalMask(4, window=2)[0:4, 0:4].astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [0, 1, 1, 0],
               [0, 0, 1, 1]])
    """

    length: int
    window: int | None = None
    first: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of queries and keys."""
        return self.length - self.first, self.length

    @property
    def q_sequence(self) -> Int[np.ndarray, "queries"]:
        """The index of each query."""
        return np.arange(self.first, self.length, dtype=np.int32)

    def mask_function(self, queries: _Ids, keys: _Ids) -> _Ids:
        """Which keys queries attend to, by the indices of both; the kernel traces it."""
        visible = queries >= keys
        if self.window is not None:
            visible &= queries - keys < self.window
        return visible

    def __getitem__(self, block: tuple[slice, slice]) -> Bool[np.ndarray, "queries keys"]:
        """A block of the mask."""
        queries, keys = range(self.first, self.length)[block[0]], range(self.length)[block[1]]
        reaches = self.length if self.window is None else self.window
        shape = len(queries), len(keys)
        if keys[0] > queries[-1] or queries[0] - keys[-1] >= reaches:
            return _uniform(shape, False)
        if keys[-1] <= queries[0] and queries[-1] - keys[0] < reaches:
            return _uniform(shape, True)
        return _partial(shape, queries[0] - keys[0], self.window)


class _Uniform(np.ndarray):
    """An array of flags that are all the same, of which the kernel asks whether any or all are
    set, once for each block."""

    def any(self, *args: Any, **kwargs: Any) -> Any:
        return self.flat[0]

    def all(self, *args: Any, **kwargs: Any) -> Any:
        return self.flat[0]


@functools.cache
def _uniform(shape: tuple[int, int], value: bool) -> Bool[np.ndarray, "queries keys"]:
    return np.broadcast_to(np.asarray(value), shape).view(_Uniform)


@functools.lru_cache(maxsize=16)
def _partial(
    shape: tuple[int, int], ahead: int, window: int | None
) -> Bool[np.ndarray, "queries keys"]:
    """A block whose first query is so many tokens after its first key."""
    queries, keys = (np.arange(size, dtype=np.int32) for size in shape)
    mask = CausalMask(max(shape), window)
    return mask.mask_function(queries[:, None] + ahead, keys[None])
