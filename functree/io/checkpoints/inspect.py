"""`ft.inspect` reads a checkpoint's metadata without loading its arrays."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from functree.argument_checks import FILE, check, shown
from functree.devices.meshes import MeshView, spec_text
from functree.errors import FunctreeTypeError, count, did_you_mean
from functree.io.checkpoints.folder import folder_at, read_manifest
from functree.io.checkpoints.manifest import SavedArray
from functree.layout.plan.plan import Plan
from functree.layout.plan.text import Row, plan_text
from functree.report.diff import Change, Diff, changes
from functree.report.table import bytes_text
from functree.tree.arrays import array_text
from functree.tree.paths import Path


@dataclass(frozen=True)
class Checkpoint:
    """The metadata of a checkpoint. `ft.inspect` builds it.

    Attributes:
        path: the checkpoint's folder.
        rows: one row for each saved array.
        step: the checkpoint's step if `ft.Checkpoints` saved it; otherwise None.
        meta: the `meta` that was saved with the checkpoint.
        sizes: the size of each mesh axis when the arrays were saved.

    Examples:
        >>> ft.save(folder / "saved", {"w": jnp.ones((4, 8)), "b": jnp.zeros(8)})
        >>> checkpoint = ft.inspect(folder / "saved")
        >>> checkpoint["w"].shape, checkpoint.total_bytes
        ((4, 8), 160)
    """

    path: FilePath
    rows: tuple[SavedArray, ...]
    step: int | None
    meta: Any
    sizes: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """The total size of all arrays in bytes. An array at several paths is counted once."""
        return sum(row.bytes for row in self.rows if row.same_as is None)

    def __getitem__(self, path: str | tuple[object, ...]) -> SavedArray:
        """Return the row at a path, which may be an `ft.Path`, a tuple or a string."""
        key = Path(path)
        for row in self.rows:
            if row.path == key:
                return row
        raise KeyError(
            f"there is no array at `{key}`{did_you_mean(key, [row.path for row in self.rows])}"
        )

    def __iter__(self) -> Iterator[SavedArray]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        rows = list(map(_plan_row, self.rows))
        return plan_text(rows, self._notes(), column="bytes")

    def __repr__(self) -> str:
        return f"<Checkpoint of {count(len(self.rows), 'array')} at {self.path}>"

    def diff(self, other: "Checkpoint | Plan") -> Diff:
        """Compare the checkpoint with another checkpoint, or with a plan.

        The comparison covers mesh sizes, arrays, axes and specs. Between two checkpoints, it also
        covers the digests of values.

        Raises:
            FunctreeError: if `other` is neither a checkpoint nor a plan.

        Examples:
            >>> ft.save(folder / "before", {"w": jnp.ones((4, 8))})
            >>> ft.save(folder / "after", {"w": jnp.zeros((4, 8))})
            >>> print(
            ...     ft.inspect(folder / "before").diff(ft.inspect(folder / "after"))
            ... )
            w: digest f8f5d28f → db0587f7
        """
        if not isinstance(other, Checkpoint | Plan):
            raise FunctreeTypeError(
                f"Checkpoint.diff takes a checkpoint or a plan, not {shown(other)}"
            )
        meshes: list[Change] = []
        if self.sizes != dict(other.sizes):
            meshes.append(Change(Path(), "mesh", self.sizes, dict(other.sizes)))
        # A plan has no values.
        has_values = isinstance(other, Checkpoint)
        differences = changes(
            {row.path: row for row in self.rows},
            {row.path: row for row in other.rows},
            lambda path: path,
            lambda _, row: _properties(row, has_values),
            lambda _, row: ("array", f"{array_text(row)} {_spec(row)}"),
        )
        return Diff((*meshes, *differences))

    def _notes(self) -> list[str]:
        """Return the lines below the table."""
        verified = sum(row.digest is not None for row in self.rows)
        notes = [f"{self.path}: {count(len(self.rows), 'array')}, {bytes_text(self.total_bytes)}"]
        if self.step is not None:
            notes.append(f"step {self.step}")
        notes.append(f"saved from the mesh {MeshView(self.sizes)}; {count(verified, 'digest')}")
        if self.meta is not None:
            notes.append(f"meta: {shown(self.meta)}")
        return notes


def inspect(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint's metadata without loading its arrays.

    Args:
        path: the folder of the checkpoint, or its address in a bucket.

    Raises:
        CheckpointError: if `path` is not a checkpoint.
        CheckpointError: if the manifest has changed since it was written.

    Examples:
        >>> ft.save(
        ...     folder / "inspected",
        ...     {"w": jnp.ones((4, 8), jnp.bfloat16)},
        ...     meta={"loss": 2.5},
        ... )
        >>> found = ft.inspect(folder / "inspected")
        >>> found["w"].dtype, found.meta
        (dtype(bfloat16), {'loss': 2.5})
    """
    check("inspect: invalid arguments", path=(path, FILE))
    folder = folder_at(path)
    manifest = read_manifest(folder)
    return Checkpoint(folder.path, manifest.rows, manifest.step, manifest.meta, manifest.sizes)


def _plan_row(row: SavedArray) -> Row:
    """Convert a row to a plan's row, with the bytes of the whole array."""
    # An array at several paths is counted only at its first path, as in `total_bytes`.
    reason, own_bytes = "", row.bytes
    if row.same_as is not None:
        reason, own_bytes = f"the same array as {row.same_as}", 0
    # The number of devices is not saved, so the row describes one unsharded copy.
    return Row(
        path=row.path,
        shape=row.shape,
        dtype=row.dtype,
        axes=row.axes,
        spec=row.spec,
        reason=reason,
        local_shape=row.shape,
        bytes_global=row.bytes,
        bytes_per_device=own_bytes,
        copies=1,
    )


def _spec(row: SavedArray | Row) -> str:
    return "-" if row.spec is None else spec_text(row.spec)


def _properties(row: Any, has_values: bool) -> dict[str, Any]:
    properties = {"array": array_text(row), "axes": str(row.axes), "spec": _spec(row)}
    if has_values:
        properties["digest"] = row.digest
    return properties
