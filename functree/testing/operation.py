"""An `Operation` describes where a program goes wrong, in one sentence."""

import linecache
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as File

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from functree.devices.meshes import spec_text
from functree.testing.scopes import Around, Place
from functree.testing.steps import Body, Number, Source, Step
from functree.tree.arrays import array_text
from functree.tree.paths import Path


@dataclass(frozen=True)
class Operation:
    """An operation of a program at which something goes wrong. `str` formats it as a sentence.

    Attributes:
        name: the name of JAX's primitive, such as `dot_general`.
        source: the file and line, such as `model.py:12`; empty if the operation does not come from
            a line of the user's code.
        line: the text of this line.
        paths: the paths of the argument arrays that the operation uses, even if other operations
            transformed them first. Activations have no path.
        shape: the shape of the result; in a shard_map, the shape of the shard on one device.
        dtype: the dtype of the result.
        layout: the sharding of the result, in words; empty if it is unknown.
        difference: the largest difference from the result on one device; None if it is unknown, or
            if the problem is not a difference.
        what: the problem, in words.
        where: the iterations, branches and devices, in words; empty if there are none.

    Examples:
        >>> print(
        ...     ft.testing.first_nonfinite(
        ...         lambda x: 1 / (x - 1), jnp.arange(3.0)
        ...     ).name
        ... )
        div
    """

    name: str
    source: str
    line: str
    paths: tuple[Path, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    layout: str
    difference: float | None
    what: str
    where: str = ""

    def __str__(self) -> str:
        place = f" at {self.source}" if self.source else ""
        text = f"`{self.name}`{place}"
        if self.line:
            text += f", in `{self.line}`"
        if self.paths:
            text += f", applied to {' and '.join(f'`{path}`' for path in self.paths)}"
        text += f": {self.what}"
        if self.where:
            text += f", {self.where}"
        text += f"; its result is {array_text(self)}"
        if self.layout:
            text += f", {self.layout}"
        return text


def source_text(source: Source | None) -> tuple[str, str]:
    """Return the file name and line number of a source, and the text of the line."""
    if source is None:
        return "", ""
    text = linecache.getline(source.file, source.line).strip()
    return f"{File(source.file).name}:{source.line}", text


def described(
    step: Step,
    result: int,
    body: Body,
    place: Place,
    paths: Sequence[Path | None],
    array: jax.Array | None = None,
    bad: np.ndarray | None = None,
) -> Operation:
    """Describe an operation, without its problem.

    Args:
        step: the operation.
        result: the index of the wrong result.
        body: the body of the operation.
        place: the place of the body.
        paths: the paths of the program's inputs; None for inputs without a path.
        array: the result, with a dimension for each loop around it; None if it is unknown.
        bad: for each device of a shard_map, whether the result is wrong there, by indices on the
            mesh.
    """
    source, line = source_text(step.source)
    where = place.where
    if bad is not None:
        where += _devices_text(bad, place.axes)
    return Operation(
        name=step.name,
        source=source,
        line=line,
        paths=_paths_taken(step, body, place.around, paths),
        shape=step.types[result].shape,
        dtype=step.types[result].dtype,
        layout=_layout_text(array, place),
        difference=None,
        what="",
        where=", ".join(where),
    )


def _devices_text(bad: np.ndarray, axes: Collection[str]) -> list[str]:
    """Format the devices with a bad result, or an empty list if all devices have a bad result."""
    found = np.argwhere(bad)
    if not axes or bad.all() or not len(found):
        return []
    first = ", ".join(f"{axis}={at}" for axis, at in zip(axes, found[0], strict=True))
    if len(found) == 1:
        return [f"on the device ({first})"]
    return [f"on {len(found)} of {bad.size} devices, the first of which is ({first})"]


def _layout_text(array: jax.Array | None, place: Place) -> str:
    """Format the sharding of a value, without the dimensions of loops."""
    if place.axes:
        return "on each device"
    if array is None or not isinstance(array.sharding, NamedSharding):
        return ""
    return f"sharded {spec_text(PartitionSpec(*array.sharding.spec[len(place.view) :]))}"


def _paths_taken(
    step: Step, body: Body, around: Sequence[Around], paths: Sequence[Path | None]
) -> tuple[Path, ...]:
    """Find the paths of the program's arguments that an operation uses.

    The paths are followed through the steps around the operation.
    """
    inputs = paths
    for one in around:
        labels = _labels(one.body, inputs)
        outer = one.body.steps[one.index]
        constants, carry, rest = outer.body_operands(list(map(labels.get, outer.ins)))
        inputs = [*constants, *[None] * len(carry), *rest]
    labels = _labels(body, inputs)
    found = dict.fromkeys(map(labels.get, step.ins))
    return tuple(path for path in found if path is not None)


def _labels(body: Body, inputs: Sequence[Path | None]) -> Mapping[Number, Path | None]:
    """Map each value made from one argument to the argument's path, and other values to None.

    A value made from one argument, such as a normalized weight, gets that argument's path. A value
    made from several arguments is an activation, which has no path.
    """
    labels: dict[Number, Path | None] = dict(zip(body.inputs, inputs, strict=True))
    for step in body.steps:
        given = {labels[value] for value in step.ins if value in labels}
        if given:
            label = given.pop() if len(given) == 1 and not step.bodies else None
            labels.update(dict.fromkeys(step.outs, label))
    return labels
