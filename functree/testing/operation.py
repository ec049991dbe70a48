"""What is found out about an operation of a program ─► `Operation`, and its sentence."""

import linecache
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as File

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from functree.devices.specs import spec_text
from functree.testing.scopes import Around, Place
from functree.testing.steps import Body, Number, Source, Step
from functree.tree.arrays import array_text
from functree.tree.paths import Path


@dataclass(frozen=True)
class Operation:
    """An operation of a program, at which something goes wrong.

    Its text is a sentence.

    Attributes:
        name: the name of JAX's primitive: `dot_general`.
        source: the file and the line of it: `model.py:12`; empty if no line of the user's is around
            it.
        line: the text of this line.
        paths: the arrays of the arguments that it takes, as they are or after operations on them
            alone. Activations have none.
        shape: the shape of its result; in a shard_map that of the part on a device.
        dtype: the dtype of its result.
        layout: how the result lies on the mesh; empty if that is not known.
        difference: the largest difference of the result from that on one device; None if it is not
            known, or is not what goes wrong.
        what: what goes wrong, in words.
        where: the iteration of each loop, and the devices, in words; empty if there are none.

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
            text += f", of {' and '.join(f'`{path}`' for path in self.paths)}"
        text += f": {self.what}"
        if self.where:
            text += f", {self.where}"
        text += f"; its result is {array_text(self)}"
        if self.layout:
            text += f", {self.layout}"
        return text


def source_text(source: Source | None) -> tuple[str, str]:
    """The name of the file with the line, and the text of the line."""
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
    """An operation, without what goes wrong at it.

    Args:
        step: the operation.
        result: which of its results is wrong.
        body: the body in which it is.
        place: where that is.
        paths: the paths of the program's inputs; None for those that have none.
        array: the result, with a dimension for each loop around; None if it is not known.
        bad: whether it is wrong on each device of a shard_map, by its indices on the mesh.
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
    """The devices where something is bad; empty if it is so on all of them."""
    found = np.argwhere(bad)
    if not axes or bad.all() or not len(found):
        return []
    first = ", ".join(f"{axis}={at}" for axis, at in zip(axes, found[0], strict=True))
    if len(found) == 1:
        return [f"on the device ({first})"]
    return [f"on {len(found)} of {bad.size} devices, the first of which is ({first})"]


def _layout_text(array: jax.Array | None, place: Place) -> str:
    """How a value lies on the mesh, of which there is one for each iteration of the loops."""
    if place.axes:
        return "on each device"
    if array is None or not isinstance(array.sharding, NamedSharding):
        return ""
    return f"sharded {spec_text(PartitionSpec(*array.sharding.spec[len(place.view) :]))}"


def _paths_taken(
    step: Step, body: Body, around: Sequence[Around], paths: Sequence[Path | None]
) -> tuple[Path, ...]:
    """The arguments of a program that an operation takes, by the steps around its body."""
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
    """For each value that depends on inputs: the path of the only one; None if there are several.

    What is made of one argument alone is still this argument, such as a weight that is normalized.
    What is made of two is an activation, and has no name.
    """
    labels: dict[Number, Path | None] = dict(zip(body.inputs, inputs, strict=True))
    for step in body.steps:
        given = {labels[value] for value in step.ins if value in labels}
        if given:
            label = given.pop() if len(given) == 1 and not step.bodies else None
            labels.update(dict.fromkeys(step.outs, label))
    return labels
