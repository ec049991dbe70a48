"""What is read of files of weights meanwhile."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import numpy as np

from functree.io.weights.files import Tensor


@contextmanager
def blocks_read() -> Iterator[list[np.ndarray]]:
    """The blocks that are read of all tensors."""
    blocks: list[np.ndarray] = []
    read = Tensor.read

    def remember(self: Tensor, index: Sequence[slice]) -> np.ndarray:
        block = read(self, index)
        blocks.append(block)
        return block

    with mock.patch.object(Tensor, "read", remember):
        yield blocks
