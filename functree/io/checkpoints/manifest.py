"""`Manifest`: what a checkpoint says about its arrays ─► JSON with a checksum, and back."""

import hashlib
import json
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from functree.errors import (
    CheckpointError,
    CheckpointFileError,
    FunctreeError,
    FunctreeValueError,
)
from functree.report.json_text import FORMAT, parsed, read_value, written
from functree.tree.arrays import DType
from functree.tree.axes import Axes
from functree.tree.paths import Path

BEGINNING = b'{\n "functree": "checkpoint",'
"""The first bytes of each manifest, by which it is known to be one of functree if it is damaged."""

VALUES = "arrays-[0-9a-f]{12}"
"""The names that functree gives to the folder of the values, as a regular expression."""


def new_values_name() -> str:
    """A name for the folder of values that no other has."""
    return f"arrays-{uuid.uuid4().hex[:12]}"


class SavedArray(NamedTuple):
    """What a checkpoint says about one array.

    Attributes:
        path: its path in the tree that was saved.
        shape: its shape.
        dtype: its dtype.
        axes: the names of its dimensions.
        spec: how it was sharded when it was saved; None if it had no spec.
        bytes: its bytes, those of one copy.
        digest: the digest of its values, as 8 hexadecimal digits; None if none was kept.
        same_as: the path of the array that it was the same array as, if it stood at several places;
            else None.
        buffer: whether it was annotated as an `ft.Buffer`.

    Examples:
        >>> ft.save(folder / "rows", {"w": jnp.ones((4, 8))})
        >>> row = ft.inspect(folder / "rows").rows[0]
        >>> row.path, row.shape, row.bytes
        (Path('w'), (4, 8), 128)
    """

    path: Path
    shape: tuple[int, ...]
    dtype: DType
    axes: Axes
    spec: PartitionSpec | None
    bytes: int
    digest: str | None = None
    same_as: Path | None = None
    buffer: bool = False


class Manifest(NamedTuple):
    """What a checkpoint says about itself.

    Attributes:
        rows: one for each array.
        arrays: the name of the folder inside the checkpoint that has their values; None if no array
            has a value.
        step: the step of `ft.Checkpoints`, or None.
        sizes: the sizes of the mesh axes on which the arrays lay.
        static: the static leaves of the tree, which are not saved, by path and as text. They come
            back from `like`, and one that differs there is warned about.
        meta: what the user saved with it.
    """

    rows: tuple[SavedArray, ...]
    arrays: str | None
    step: int | None
    sizes: Mapping[str, int]
    static: Mapping[str, str]
    meta: Any

    def of_values(self, arrays: str | None, digests: Mapping[str, str]) -> "Manifest":
        """The same with the name of the folder of the values, and with their digests by path."""
        rows: list[SavedArray] = []
        for row in self.rows:
            rows.append(row._replace(digest=digests.get(str(row.same_as or row.path))))
        return self._replace(arrays=arrays, rows=tuple(rows))

    def to_json(self) -> str:
        """The text of the manifest, with its checksum."""
        body = {"functree": "checkpoint", "format": FORMAT, **written(self)}
        return json.dumps({**body, "checksum": checksum(body)}, indent=1)

    @classmethod
    def from_json(cls, text: str, where: object) -> "Manifest":
        """The manifest of a text.

        Args:
            text: its JSON.
            where: the file, for messages.

        Raises:
            CheckpointError: the text is not that of a manifest, is of a newer format, or is not
                what was written.
        """
        try:
            body = parsed(text)
            kept = body.pop("checksum", None) if isinstance(body, dict) else None
            # Before anything else is looked at: if a bit of the format has flipped, the file is
            # damaged, and not of a newer version.
            if kept is not None and kept != checksum(body):
                raise CheckpointFileError(f"{where} is not what was written: its checksum differs")
            manifest = read_value(body, "checkpoint", cls)
            if kept is None:
                raise FunctreeValueError("it has no `checksum`")
            # What it names is read, and removed when the checkpoint is: never a path elsewhere.
            if manifest.arrays is not None and not re.fullmatch(VALUES, manifest.arrays):
                raise FunctreeValueError(f"{manifest.arrays!r} is not a folder of values")
            _check_rows(manifest.rows)
        except CheckpointError:
            raise
        except (FunctreeError, ValueError) as error:
            # A spec or a path that cannot be read, or text that is not JSON.
            raise CheckpointFileError(
                f"{where} is not the manifest of a checkpoint: {error}"
            ) from error
        return manifest


def checksum(body: Mapping[str, Any]) -> str:
    """A checksum of what a manifest says."""
    # Of the values and not of the text: it is in the same JSON, and who reads that has no text
    # without it.
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _check_rows(rows: Sequence[SavedArray]) -> None:
    """Raise FunctreeError for rows that do not fit each other, or say two things of one array."""
    # Of another program, or of somebody's hand, they may have a checksum that fits.
    known: dict[Path, SavedArray] = {}
    for row in rows:
        why, size = "", math.prod(row.shape) * row.dtype.itemsize
        first = row if row.same_as is None else known.get(row.same_as)
        if row.path in known:
            why = "there are two rows of it"
        elif row.bytes != size:
            why = f"it has {row.bytes} `bytes`, and an array of its shape and dtype has {size}"
        elif row.spec is not None and len(row.spec) > len(row.shape):
            why = f"its `spec` has {len(row.spec)} entries, and it has {len(row.shape)} dimensions"
        elif first is None or (first.shape, first.dtype) != (row.shape, row.dtype):
            why = f"`same_as` is {row.same_as}, and no row before it is of such an array"
        if why:
            raise FunctreeValueError(f"`{row.path}`: {why}")
        known[row.path] = row
