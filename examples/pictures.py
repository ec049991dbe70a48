"""The tours in this folder print their values through this module.

With `--html FILE`, a tour also writes a page with treescope's pictures. A tour creates
`show = Show(__doc__)`, calls `show("[33] x", x)` for each value, and ends with `show.save()`.
"""

import argparse
import html
import math
from pathlib import Path
from typing import Any, TypeGuard

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

import functree as ft

try:
    import treescope
except ImportError:
    treescope = None


class Show:
    """The output of a tour, with the option `--html` of its command line."""

    def __init__(self, doc: str | None):
        about = (doc or "").strip()
        parser = argparse.ArgumentParser(
            description=about, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument(
            "--html", type=Path, metavar="FILE", help="write a page with treescope's pictures"
        )
        self.file: Path | None = parser.parse_args().html
        if self.file is not None and not self.file.absolute().parent.is_dir():
            parser.error(f"there is no folder {str(self.file.parent)!r}")
        self.page = [
            "<!DOCTYPE html>",
            '<meta charset="utf-8">',
            f"<title>{about.splitlines()[0]}</title>",
        ]

    def __call__(self, name: str, value: Any) -> None:
        """Print a value as text, and add its picture to the page."""
        print(f"\n{name}: {_text(value)}")
        if _is_array(value) and isinstance(value.sharding, NamedSharding) and value.ndim in (1, 2):
            jax.debug.visualize_array_sharding(value)
        elif isinstance(value, NamedSharding) and len(value.spec) in (1, 2):
            jax.debug.visualize_sharding(_parts(value), value)
        if self.file is not None and treescope is not None:
            with treescope.active_autovisualizer.set_scoped(treescope.ArrayAutovisualizer()):
                self.page += [f"<h3>{html.escape(name)}</h3>", str(treescope.render_to_html(value))]

    def section(self, title: str) -> None:
        """Begin a section with this heading."""
        print(f"\n\n{title}\n{'=' * len(title)}")
        self.page.append(f"<h2>{html.escape(title)}</h2>")

    def save(self) -> None:
        """Write the page if `--html` was given."""
        if self.file is not None and treescope is None:
            print(
                f"\n{self.file} is not written: treescope is not installed. "
                "Try: pip install functree[examples]"
            )
        elif self.file is not None:
            self.file.write_text("\n".join(self.page), encoding="utf-8")
            print(f"\nPictures: {self.file}")


def _is_array(value: Any) -> TypeGuard[jax.Array]:
    return isinstance(value, jax.Array)


def _parts(sharding: NamedSharding) -> tuple[int, ...]:
    """Return a shape that the sharding divides and that is large enough for a picture."""
    shape: list[int] = []
    for entry in sharding.spec:
        axes = (entry,) if isinstance(entry, str) else entry or ()
        parts = math.prod(sharding.mesh.shape[axis] for axis in axes)
        shape.append(parts * max(1, 8 // parts))
    return tuple(shape)


def _text(value: Any) -> str:
    """Return a table for a tree of arrays or a plan, and one line for other values."""
    if _is_array(value):
        small = f" = {np.asarray(value)}" if value.ndim == 0 else ""
        where = (
            f" as {value.sharding.spec}"
            if isinstance(value.sharding, NamedSharding)
            else " on one device"
        )
        return f"{value.dtype}{list(value.shape)}{where}{small}"
    if isinstance(value, NamedSharding):
        return f"{value.spec} on {value.mesh}"
    if isinstance(value, Mesh):
        return f"{value}, devices {np.vectorize(lambda device: device.id)(value.devices).tolist()}"
    if isinstance(value, ft.State) or not any(map(_is_array, jax.tree.leaves(value))):
        return f"\n{value}" if isinstance(value, ft.Plan) else str(value)
    return f"\n{ft.plan(value)}"
