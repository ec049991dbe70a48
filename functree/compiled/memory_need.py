"""The bytes that a program needs on one device ─► in words, what they are, and what makes them
fewer."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax.sharding import PartitionSpec

from functree.devices.specs import named_axes
from functree.report.table import bytes_text
from functree.tree.paths import Path

# What is less than a hundredth of the need is not worth a word, and the figures of compilers are
# rounded.
_PART = 100


class MemoryNeed(NamedTuple):
    """What a program needs on one device, in bytes.

    Attributes:
        needed: all of it; None if that is not known.
        available: what there is; None if that is not known.
        arguments: those that it uses.
        loose_arguments: of these, those of which it is not known how they are sharded, whole.
        results: those that are not in the memory of donated arguments.
        loose_results: of these, those of which it is not known how they are sharded, whole.
        kept: of the arguments, those that are not donated and have the shape and dtype of a result.
        is_padded: whether arrays may take more than their bytes.
    """

    needed: int | None
    available: int | None
    arguments: int
    loose_arguments: int = 0
    results: int = 0
    loose_results: int = 0
    kept: int = 0
    is_padded: bool = False

    @property
    def others(self) -> int | None:
        """What is not in the arguments; None if that is not known."""
        if self.needed is None or self.is_much(self.loose_arguments):
            return None
        return max(0, self.needed - self.arguments)

    @property
    def temporaries(self) -> int | None:
        """What is neither in the arguments nor in results; None if that is not known."""
        if self.others is None or self.is_much(self.loose_results):
            return None
        return max(0, self.others - self.results)

    def is_much(self, size: int) -> bool:
        """Whether a part of the need is worth a word."""
        return size > 0 and (self.needed is None or size * _PART >= self.needed)

    @property
    def arguments_fit(self) -> bool:
        """Whether the arguments alone would fit, as far as that is known."""
        if self.available is None or self.is_much(self.loose_arguments):
            return True
        return self.arguments <= self.available


def arguments_text(need: MemoryNeed) -> str:
    """What the arguments are: `22.4 GiB on each device`."""
    most = "at most " if need.is_much(need.loose_arguments) else ""
    return f"{most}{bytes_text(need.arguments)} on each device"


def others_text(need: MemoryNeed) -> str:
    """What the need is besides the arguments: `the other 18 GiB are its results and temporaries`;
    empty if it is nothing, or not known."""
    if need.others is None or not need.is_much(need.others):
        return ""
    parts: list[str] = []
    if need.temporaries is None:
        parts.append("results")
    elif need.is_much(need.results):
        parts.append(f"results ({bytes_text(min(need.results, need.others))})")
    if need.temporaries is None or need.is_much(need.temporaries):
        parts.append("temporaries")
        # It cannot be told from these.
        parts += ["padding"] * need.is_padded
    *first, last = parts
    text = f"{', '.join(first)} and {last}" if first else last
    return f"the other {bytes_text(need.others)} are its {text}"


def remedies(need: MemoryNeed, uncut: Mapping[Path, Sequence[str]]) -> list[str]:
    """What makes a program fit, that about the largest part first.

    Args:
        need: what it needs.
        uncut: for the largest arguments, the mesh axes over which they are not cut.
    """
    temporaries = need.others if need.temporaries is None else need.temporaries
    found: list[tuple[int, str]] = []
    arguments = _SHARD_ARGUMENTS if need.is_much(need.loose_arguments) else shard_more(uncut)
    # Before they fit nothing else helps, and where they are a small part they are left as they are.
    if not need.arguments_fit:
        found.append((need.needed or need.arguments, arguments))
    elif need.others is None or 4 * need.arguments >= need.others:
        found.append((need.arguments, arguments))
    if need.is_much(need.kept):
        found.append((need.kept, _DONATE.format(bytes_text(need.kept))))
    if need.is_much(need.loose_results):
        found.append((need.loose_results, _SHARD_RESULTS))
    if temporaries is None or need.is_much(temporaries):
        found.append((temporaries or 0, FEWER_TEMPORARIES))
    return [text for _, text in sorted(found, key=lambda one: -one[0])]


_DONATE = (
    "donate the arguments that are not needed afterwards (`donate=`): {} of them are not donated, "
    "and have the shapes and dtypes of results, which take memory of their own"
)
_SHARD_ARGUMENTS = (
    "say how the arguments are sharded (`in_shardings=`), which is left to the compiler now"
)
_SHARD_RESULTS = (
    "say how the results are sharded (`out_shardings=`), which is left to the compiler now"
)
FEWER_TEMPORARIES = (
    "for fewer temporaries, recompute in the backward pass (`remat=`, `jax.checkpoint`), take a "
    "smaller batch on each device or in each piece (`ft.accumulate`), and a loss that never holds "
    "all logits (`ft.nn.cross_entropy`)"
)


def shard_more(uncut: Mapping[Path, Sequence[str]]) -> str:
    """The remedy for large arguments, with the mesh axes that do not cut them."""
    if not uncut:
        return "shard the largest arguments over more devices"
    if not any(uncut.values()):
        return "take more devices, or smaller arguments: the largest are cut over all mesh axes"
    paths: dict[str, list[str]] = {}
    for path, axes in uncut.items():
        if axes:
            paths.setdefault(" and ".join(axes), []).append(f"`{path}`")
    texts: list[str] = []
    for axes, named in paths.items():
        verb = "is" if len(named) == 1 else "are"
        texts.append(f"{' and '.join(named)} {verb} not cut over {axes}")
    return f"shard the largest arguments over more mesh axes: {', '.join(texts)}"


def decisive(sizes: Mapping[Path, int]) -> list[Path]:
    """The largest few of some arguments. Of the others it makes no difference how they are cut."""
    largest = sorted(sizes, key=lambda path: -sizes[path])[:_NAMED]
    return [path for path in largest if 10 * sizes[path] >= sizes[largest[0]]]


_NAMED = 2


def uncut_axes(
    specs: Mapping[Path, PartitionSpec], sizes: Mapping[str, int]
) -> dict[Path, list[str]]:
    """The mesh axes of several devices over which arrays are not cut, for each array."""
    uncut: dict[Path, list[str]] = {}
    for path, spec in specs.items():
        used = named_axes(spec)
        uncut[path] = [axis for axis, size in sizes.items() if size > 1 and axis not in used]
    return uncut
