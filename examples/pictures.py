"""What a tour shows: as text on the terminal, and with `--html FILE` as a page of pictures too, drawn by treescope.

The tours in this folder share it: `show = Show(__doc__)`, `show("[33] x", x)` for each thing, `show.save()` at the end.
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
    """Shows one thing after another; reads the command line, which has the option `--html`."""

    def __init__(self, doc: str | None):
        about = (doc or "").strip()
        parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--html", type=Path, metavar="FILE", help="write the pictures to a page (by treescope)")
        self.file: Path | None = parser.parse_args().html
        if self.file is not None and not self.file.absolute().parent.is_dir():
            parser.error(f"there is no folder {str(self.file.parent)!r}")
        self.page = ["<!DOCTYPE html>", '<meta charset="utf-8">', f"<title>{about.splitlines()[0]}</title>"]

    def __call__(self, name: str, value: Any) -> None:
        """Text on the terminal; a picture on the page."""
        print(f"\n{name}: {_text(value)}")
        if _is_array(value) and isinstance(value.sharding, NamedSharding) and value.ndim in (1, 2):
            jax.debug.visualize_array_sharding(value)
        elif isinstance(value, NamedSharding) and len(value.spec) in (1, 2):
            jax.debug.visualize_sharding(_parts(value), value)
        if self.file is not None and treescope is not None:
            with treescope.active_autovisualizer.set_scoped(treescope.ArrayAutovisualizer()):
                self.page += [f"<h3>{html.escape(name)}</h3>", str(treescope.render_to_html(value))]

    def section(self, title: str) -> None:
        """A heading."""
        print(f"\n\n{title}\n{'=' * len(title)}")
        self.page.append(f"<h2>{html.escape(title)}</h2>")

    def save(self) -> None:
        """Write the page, if it was asked for."""
        if self.file is not None and treescope is None:
            print(f"\nNo {self.file}: treescope is missing; pip install functree[examples]")
        elif self.file is not None:
            self.file.write_text("\n".join(self.page), encoding="utf-8")
            print(f"\nThe pictures: {self.file}")


def _is_array(value: Any) -> TypeGuard[jax.Array]:
    return isinstance(value, jax.Array)


def _parts(sharding: NamedSharding) -> tuple[int, ...]:
    """A shape that a sharding splits, and that makes a picture of fair size."""
    axes = [() if entry is None else (entry,) if isinstance(entry, str) else entry for entry in sharding.spec]
    parts = [math.prod(sharding.mesh.shape[axis] for axis in entry) for entry in axes]
    return tuple(part * max(1, 8 // part) for part in parts)


def _text(value: Any) -> str:
    """A plan's table for what holds arrays, and a line for all else."""
    if _is_array(value):
        small = f" = {np.asarray(value)}" if value.ndim == 0 else ""
        lies = f" as {value.sharding.spec}" if isinstance(value.sharding, NamedSharding) else " on one device"
        return f"{value.dtype}{list(value.shape)}{lies}{small}"
    if isinstance(value, NamedSharding):
        return f"{value.spec} on {value.mesh}"
    if isinstance(value, Mesh):
        return f"{value}, devices {np.vectorize(lambda device: device.id)(value.devices).tolist()}"
    if isinstance(value, ft.State) or not any(map(_is_array, jax.tree.leaves(value))):
        return f"\n{value}" if isinstance(value, ft.Plan) else str(value)
    return f"\n{ft.plan(value)}"
