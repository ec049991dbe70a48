"""The rows of a plan ─► the sizes of each axis, and those axes that have several in one module."""

from collections.abc import Iterable, Mapping, Sequence

from functree.errors import listed
from functree.layout.plan.row import Row
from functree.tree.paths import Path

AxisSizes = Mapping[str, Mapping[int, tuple[Path, ...]]]
"""For each axis its sizes, and for each of these the paths of the arrays that have it."""


HEADLINE = "axes with several sizes in one module (are their names transposed?):"
MOST = 8  # lines of a text; a network of many convolutions may have very many


def axis_sizes(rows: Iterable[Row]) -> AxisSizes:
    """The sizes of each axis, in the order of the rows."""
    found: dict[str, dict[int, dict[Path, None]]] = {}
    for row in rows:
        # Not strict: an annotation that does not fit has fewer or more axes than the array.
        for name, size in zip(row.axes, row.shape, strict=False):
            if name is not None:
                # A dict, since an array may have one axis for several dimensions.
                found.setdefault(name, {}).setdefault(size, {})[row.path] = None
    return {
        name: {size: tuple(paths) for size, paths in sizes.items()} for name, sizes in found.items()
    }


def several_sizes(rows: Iterable[Row]) -> list[str]:
    """A line for each axis with several sizes in one module, below a headline: `hidden: 32 in up, 8
    in down`.

    That is what an annotation looks like whose names are transposed. A mesh axis may divide both
    sizes, so nothing else shows it.
    """
    modules: dict[Path, list[Row]] = {}
    for row in rows:
        for module in _modules(row.path):
            modules.setdefault(module, []).append(row)
    found: dict[Path, dict[str, str]] = {}
    told: set[tuple[Path, str]] = set()
    # Innermost first: an axis is told where its sizes are nearest to each other.
    for module in sorted(modules, key=len, reverse=True):
        for name, sizes in axis_sizes(modules[module]).items():
            if len(sizes) > 1 and (module, name) not in told:
                told.add((Path(module[:-1]), name))
                found.setdefault(module, {})[f"{name} {sorted(sizes)}"] = _text(name, sizes)
    # Then in the order of the rows, and without repetition: the layers of a model, and the moments
    # of its parameters, have the same sizes.
    lines: dict[str, str] = {}
    for module in modules:
        for key, text in found.get(module, {}).items():
            lines.setdefault(key, text)
    texts = list(lines.values())
    if len(texts) > MOST:
        texts[MOST:] = [f"and {len(texts) - MOST} more, all in `.axis_sizes`"]
    return [HEADLINE, *texts] if texts else []


def _modules(path: Path) -> Sequence[Path]:
    """The module that an array is in, and the one that has this module in a field of its own.

    The elements of a list are not compared: layers one after another have different sizes.
    """
    if not path or isinstance(path[-1], int):
        return ()
    inner = Path(path[:-1])
    if not inner or isinstance(inner[-1], int):
        return (inner,)
    return inner, Path(inner[:-1])


def _text(name: str, sizes: Mapping[int, Sequence[Path]]) -> str:
    texts: list[str] = []
    for size, paths in sizes.items():
        texts.append(f"{size} in {listed(list(map(_folded, paths)), 2)}")
    return f"{name}: {', '.join(texts)}"


def _folded(path: Path) -> str:
    """The text of a path, with `*` for the index of a layer."""
    keys = ["*" if isinstance(key, int) else str(Path((key,))) for key in path]
    return ".".join(keys)
