"""`Memory`: what a compiled program needs on one device."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from functree.errors import did_you_mean
from functree.tree.paths import Path


class BytesByPath(Mapping[Path, int]):
    """Bytes by path. A path may be given as its text.

    Args:
        sizes: the bytes by path.
    """

    def __init__(self, sizes: Mapping[Path, int]):
        self._sizes: dict[Path, int] = dict(sizes)

    def __getitem__(self, path: Any) -> int:
        key = Path(path)  # of a text too, such as `model.blocks.0.w`
        if key not in self._sizes:
            raise KeyError(f"no argument at `{key}`{did_you_mean(key, self._sizes)}")
        return self._sizes[key]

    def __iter__(self) -> Iterator[Path]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __repr__(self) -> str:
        return repr({str(path): size for path, size in self._sizes.items()})


@dataclass(frozen=True)
class Memory:
    """What a compiled program needs on one device, in bytes.

    Attributes:
        arguments: the bytes of each array of the arguments, by its path, which begins with the name
            of the function's parameter. An array that the program does not use is not part of it.
        outputs: the bytes of the result.
        aliases: the bytes of the result that are in the memory of donated arguments.
        temporaries: the bytes of what is computed in between.
        peak: the most bytes at one time in the main memory, as the compiler says. The one for
            CPUs leaves out temporaries, so there it is the sum; the one for TPUs adds what is in
            their fast memory and in that of the host, so there it is at most the sum without these.
    """

    arguments: Mapping[Path, int] = field(hash=False)
    outputs: int
    aliases: int
    temporaries: int
    peak: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", BytesByPath(self.arguments))
