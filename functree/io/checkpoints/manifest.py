"""A `Manifest` describes a checkpoint's arrays. It is stored as JSON with a checksum."""

import hashlib
import json
import re
from collections.abc import Mapping
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
"""The first bytes of each manifest. They identify a manifest even if it is damaged."""

VALUES = "arrays-[0-9a-f]{12}"
"""A regular expression for the names of folders that hold values."""


class SavedArray(NamedTuple):
    """A row of a checkpoint's manifest. It describes one array.

    Attributes:
        path: the array's path in the saved tree.
        shape: its shape.
        dtype: its dtype.
        axes: the names of its dimensions.
        spec: the spec that the array was saved with; None if it had no spec.
        bytes: the size of one copy in bytes.
        digest: the digest of its values as 8 hexadecimal digits; None if no digest was saved.
        same_as: the array's first path, if `path` is a later path; otherwise None.
        buffer: whether the array is annotated as an `ft.Buffer`.

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
    """The description of a checkpoint's arrays and metadata.

    Attributes:
        rows: one row for each array.
        arrays: the name of the folder in the checkpoint that holds the values; None if no array
            has elements.
        step: the checkpoint's step if `ft.Checkpoints` saved it; otherwise None.
        sizes: the size of each mesh axis when the arrays were saved.
        static: the texts of the tree's static leaves by path. A restore takes these leaves from
            `like`, and warns about differences.
        meta: the user's `meta`.
    """

    rows: tuple[SavedArray, ...]
    arrays: str | None
    step: int | None
    sizes: Mapping[str, int]
    static: Mapping[str, str]
    meta: Any

    def of_values(self, arrays: str | None, digests: Mapping[str, str]) -> "Manifest":
        """Return a copy that names the folder with the values, and contains their digests."""
        rows: list[SavedArray] = []
        for row in self.rows:
            rows.append(row._replace(digest=digests.get(str(row.same_as or row.path))))
        return self._replace(arrays=arrays, rows=tuple(rows))

    def to_json(self) -> str:
        """Return the manifest's JSON, with its checksum."""
        body = {"functree": "checkpoint", "format": FORMAT, **written(self)}
        return json.dumps({**body, "checksum": checksum(body)}, indent=1)

    @classmethod
    def from_json(cls, text: str, where: object) -> "Manifest":
        """Read a manifest from JSON.

        Args:
            text: the JSON.
            where: the file, for messages.

        Raises:
            CheckpointError: if the text is not a manifest.
            CheckpointError: if the manifest has a newer format.
            CheckpointError: if the text has changed since it was written.
        """
        try:
            body = parsed(text)
            kept = body.pop("checksum", None) if isinstance(body, dict) else None
            # The checksum is checked first: if a bit of the format number has flipped, the file is
            # damaged, not newer.
            if kept is not None and kept != checksum(body):
                raise CheckpointFileError(
                    f"{where} has changed since it was written: its checksum does not match; "
                    "use another checkpoint"
                )
            manifest = read_value(body, "checkpoint", cls)
            if kept is None:
                raise FunctreeValueError("it has no `checksum`")
            # The named folder is read, and removed with the checkpoint, so it must be inside the
            # checkpoint.
            if manifest.arrays is not None and not re.fullmatch(VALUES, manifest.arrays):
                raise FunctreeValueError(f"`arrays` is {manifest.arrays!r}, not a folder of values")
        except CheckpointError:
            raise
        except (FunctreeError, ValueError) as error:
            # For example, a spec or path cannot be parsed, or the text is not JSON.
            raise CheckpointFileError(
                f"{where} is not the manifest of a checkpoint: {error}"
            ) from error
        return manifest


def checksum(body: Mapping[str, Any]) -> str:
    """Compute the checksum of a manifest's values."""
    # The checksum covers the values instead of the text, since the checksum is part of the same
    # JSON.
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
