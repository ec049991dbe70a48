"""The text for a tensor in a table of names ─► its name, or those of all layers; whether it is
transposed; and which part of it is meant."""

import re
from collections.abc import Sequence
from typing import NamedTuple

_PART = re.compile(r"\[(\d+)(?::(\d+))?/(\d+)\]$")
_PLACES = ("{layer}", "{expert}")


class Part(NamedTuple):
    """Some of the equal parts of a dimension of a tensor, side by side.

    Attributes:
        first: the first of them.
        stop: the one behind the last.
        of: how many parts there are.
    """

    first: int
    stop: int
    of: int

    @property
    def is_there(self) -> bool:
        """Whether there are such parts."""
        return self.first < self.stop <= self.of


WHOLE = Part(0, 1, 1)


class TensorName(NamedTuple):
    """What a table says of a tensor: `layers.{layer}.qkv.weight[0/3].T`.

    Attributes:
        name: its name, in which `{layer}` and `{expert}` may be.
        transposed: whether it is the transpose of ours.
        part: the part of it that is meant.
    """

    name: str
    transposed: bool
    part: Part

    @classmethod
    def parse(cls, text: str) -> "TensorName":
        """What a text says.

        Examples:
            >>> from functree.io.weights.tensor_names import TensorName
            >>> name = TensorName.parse("qkv.weight[0:2/4].T")
            >>> name.name, name.transposed, name.part
            ('qkv.weight', True, Part(first=0, stop=2, of=4))
        """
        name = text.removesuffix(".T")
        transposed, part = name != text, WHOLE
        if found := _PART.search(name):
            first, of = int(found[1]), int(found[3])
            part = Part(first, int(found[2]) if found[2] else first + 1, of)
            name = name[: found.start()]
        return cls(name, transposed, part)

    @property
    def stacked(self) -> int:
        """How many leading dimensions of ours have a tensor for each of their elements."""
        return sum(place in self.name for place in _PLACES)

    def of_layers(self, shape: Sequence[int]) -> tuple[list[str], int]:
        """The names of the tensors that have an array of a shape, and how many of its leading
        dimensions they are over."""
        # A file has a tensor for each layer, perhaps for each expert of it, and our array all of
        # them.
        names, stacked = [self.name], 0
        for place in _PLACES:
            if place in self.name:
                sizes = range(shape[stacked])
                names = [one.replace(place, str(i)) for one in names for i in sizes]
                stacked += 1
        return names, stacked
