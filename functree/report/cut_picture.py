"""An array that is cut over a mesh ─► a picture of its blocks, in the colours of their devices."""

import html
import math
from collections.abc import Mapping, Sequence
from itertools import product

MOST = 8
"""The number of blocks along a dimension, and of devices in a block, that are drawn."""
WIDE, HIGH = 76, 48
_AREA = 72.0, 44.0  # of an array with two dimensions


class Pictures:
    """Pictures of arrays on one mesh. Arrays that are cut alike share a picture.

    A block has the colour of the device that has it, and diagonal stripes of all devices that have
    a copy.

    Args:
        sizes: the sizes of the mesh axes.
        prefix: the beginning of the names of the pictures in the page, which has no other ones.
    """

    def __init__(self, sizes: Mapping[str, int], prefix: str):
        self._sizes: dict[str, int] = dict(sizes)
        self._prefix: str = prefix
        self._symbols: dict[str, str] = {}  # their names, by what is drawn
        self._stripes: dict[tuple[int, ...], str] = {}  # their names, by the devices

    def of(self, shape: Sequence[int], cuts: Sequence[tuple[str, ...]]) -> str:
        """The picture of an array.

        Args:
            shape: its shape.
            cuts: for each dimension, the mesh axes that cut it.
        """
        rows, columns = _drawn(shape, cuts)
        down = [axis for dim in rows for axis in cuts[dim]]
        across = [axis for dim in columns for axis in cuts[dim]]
        parts = _parts(down, self._sizes), _parts(across, self._sizes)
        shown_down, shown_across = (min(number, MOST) for number in parts)
        width, height = _extent([shape[dim] for dim in (*rows, *columns[:1])])
        left, top = (WIDE - width) / 2, (HIGH - height) / 2
        wide, high = width / shown_across, height / shown_down
        gap = 1.5 if min(wide, high) > 4 else 0.5
        content = f"<title>{html.escape(_title(math.prod(parts), cuts, self._sizes))}</title>"
        for i, j in product(range(shown_down), range(shown_across)):
            at = {**_position(i, down, self._sizes), **_position(j, across, self._sizes)}
            content += (
                f'<rect x="{left + j * wide:.4g}" y="{top + i * high:.4g}" '
                f'width="{wide - gap:.4g}" height="{high - gap:.4g}" '
                f'fill="{self._fill(_devices(at, self._sizes))}"/>'
            )
        return self._shared(content)

    def unknown(self, shape: Sequence[int]) -> str:
        """The picture of an array of which it is not known how it is cut."""
        width, height = _extent([size for size in shape if size > 1][-2:])
        x, y = (WIDE - width) / 2, (HIGH - height) / 2
        return self._shared(
            f'<rect x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}" '
            'fill="none" stroke="currentColor" stroke-dasharray="3 3" opacity=".5"/>'
        )

    def definitions(self) -> str:
        """The pictures themselves, which must be in the page once."""
        content = ""
        for devices, name in self._stripes.items():
            stops = ""
            for i, device in enumerate(devices):
                # Each colour from one point to another, without a transition.
                for end in (i, i + 1):
                    stops += (
                        f'<stop offset="{end / len(devices):.3g}" '
                        f'stop-color="{device_colour(device, self._sizes)}"/>'
                    )
            content += f'<linearGradient id="{name}" y2="1">{stops}</linearGradient>'
        for drawn, name in self._symbols.items():
            content += f'<symbol id="{name}" viewBox="0 0 {WIDE} {HIGH}">{drawn}</symbol>'
        # Not by `hidden`: what is not displayed cannot be used elsewhere either.
        return f'<svg class="symbols" aria-hidden="true">{content}</svg>'

    def _fill(self, devices: tuple[int, ...]) -> str:
        if len(devices) == 1:
            return device_colour(devices[0], self._sizes)
        name = self._stripes.setdefault(devices, f"{self._prefix}s{len(self._stripes)}")
        return f"url(#{name})"

    def _shared(self, drawn: str) -> str:
        name = self._symbols.setdefault(drawn, f"{self._prefix}{len(self._symbols)}")
        return f'<svg role="img"><use href="#{name}"/></svg>'


def device_colour(device: int, sizes: Mapping[str, int]) -> str:
    """The colour of a device: a hue for its position along all mesh axes but the first, and darker
    along the first."""
    first, *others = [size for size in sizes.values() if size > 1] or [1]
    inner = math.prod(others)
    if not others:
        first, inner = 1, first
    outer, hue = divmod(device, inner)
    lightness = 62 - 26 * outer / max(first - 1, 1)
    return f"hsl({205 + 300 * hue / inner:.0f} 62% {lightness:.0f}%)"


def _drawn(shape: Sequence[int], cuts: Sequence[tuple[str, ...]]) -> tuple[list[int], list[int]]:
    """The dimensions that are rows and columns of the picture: those that are cut, and then the
    largest. Cut dimensions beyond two are drawn along the columns too."""
    chosen = [dim for dim in range(len(shape)) if cuts[dim]]
    others = [dim for dim in range(len(shape)) if not cuts[dim] and shape[dim] > 1]
    others.sort(key=lambda dim: shape[dim], reverse=True)
    chosen += others[: max(0, 2 - len(chosen))]
    chosen.sort()
    if len(chosen) < 2:
        return [], chosen
    return chosen[:1], chosen[1:]


def _extent(sizes: Sequence[int]) -> tuple[float, float]:
    """The width and the height of the picture of an array: longer where it has more elements, as
    far as that can be drawn."""
    wide, high = _AREA
    if not sizes:
        return 14, 14
    if len(sizes) == 1:
        return wide, 14
    down, across = sizes
    ratio = math.log2(max(across, 1) / max(down, 1))
    # A factor of 16 is drawn as one of 2.
    squeeze = 2 ** min(abs(ratio) / 4, 1)
    return (wide, high / squeeze) if ratio > 0 else (wide / squeeze, high)


def _parts(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes.get(axis, 1) for axis in axes)


def _position(index: int, axes: Sequence[str], sizes: Mapping[str, int]) -> dict[str, int]:
    """The position of a block along the mesh axes that cut a dimension, of which the last varies
    fastest."""
    found: dict[str, int] = {}
    for axis in reversed(axes):
        index, found[axis] = divmod(index, sizes.get(axis, 1))
    return found


def _devices(at: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The devices that have a block; of many, `MOST` from the first to the last."""
    ranges = [[at[axis]] if axis in at else range(size) for axis, size in sizes.items()]
    found: list[int] = []
    for position in product(*ranges):
        device = 0
        for index, size in zip(position, sizes.values(), strict=True):
            device = device * size + index
        found.append(device)
    last = len(found) - 1
    if last >= MOST:
        found = [found[round(i * last / (MOST - 1))] for i in range(MOST)]
    return tuple(found)


def _title(blocks: int, cuts: Sequence[tuple[str, ...]], sizes: Mapping[str, int]) -> str:
    used = {axis for axes in cuts for axis in axes}
    copies = [axis for axis, size in sizes.items() if size > 1 and axis not in used]
    if not copies:
        return f"{blocks} blocks, one on each device"
    what = "whole" if blocks == 1 else f"{blocks} blocks"
    return f"{what}, on {_parts(copies, sizes)} devices each: copies over {', '.join(copies)}"
