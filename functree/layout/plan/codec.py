"""A plan ─► JSON, and back."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from functree.errors import FunctreeValueError, Problem
from functree.layout.plan.row import Row
from functree.report.json_text import SIZE, loaded
from functree.tree.axes import Axes
from functree.tree.paths import Path

FORMAT = 1

_NAME, _SIZES = (str, None), {...: SIZE}
ARRAY_FORM: dict[str, Any] = {
    "path": str,
    "shape": [SIZE],
    "dtype": str,
    "axes": [_NAME],
    "spec": ([(str, None, [str])], None),
}
"""What JSON of functree says of an array first of all."""

_FORM = {
    "mesh": _SIZES,
    "rows": [
        {
            **ARRAY_FORM,
            "reason": str,
            "local_shape": [SIZE],
            "bytes_global": SIZE,
            "bytes_per_device": SIZE,
            "copies": SIZE,
            "memory_kind": _NAME,
            "mesh": (_SIZES, None),
        }
    ],
    "problems": [{"path": _NAME, "shape": ([SIZE], None), "what": str, "why": str, "remedy": str}],
    "unused": [str],
}
_ADDED = {"unused_names": [str], "follows": {...: str}}


class PlanParts(NamedTuple):
    """What JSON has of a plan: all but the structure of the tree and the devices of the mesh."""

    rows: Sequence[Row]
    sizes: Mapping[str, int]
    problems: Sequence[Problem]
    unused: Sequence[str]
    unused_names: Sequence[str]


def plan_json(parts: PlanParts) -> str:
    """A plan as JSON."""
    return json.dumps(
        {
            "functree": "plan",
            "format": FORMAT,
            "mesh": dict(parts.sizes),
            "rows": list(map(_row, parts.rows)),
            "problems": list(map(_problem, parts.problems)),
            "unused": list(parts.unused),
            "unused_names": list(parts.unused_names),
            # Apart from the rows, of which most have none.
            "follows": {str(row.path): str(row.follows) for row in parts.rows if row.follows},
        },
        indent=1,
    )


def read_plan(text: str) -> PlanParts:
    """The parts of a plan from its JSON.

    Raises:
        FunctreeError: the text is something else.
    """
    data = loaded(text, "plan", FORMAT, _FORM, _ADDED)
    rows = list(map(_read_row, data["rows"]))
    follows = data.get("follows", {})
    for i, row in enumerate(rows):
        followed = follows.get(str(row.path))
        if followed is not None:
            rows[i] = row._replace(follows=Path(followed))
    problems = list(map(_read_problem, data["problems"]))
    unused_names = data.get("unused_names", [])
    return PlanParts(rows, data["mesh"], problems, data["unused"], unused_names)


class HasArray(Protocol):
    """A row about an array: of a plan, or of something else."""

    @property
    def path(self) -> Path: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def axes(self) -> Axes: ...
    @property
    def spec(self) -> PartitionSpec | None: ...


def array_json(row: HasArray) -> dict[str, Any]:
    """The part of a row that is about the array, in the form `ARRAY_FORM`."""
    return {
        "path": str(row.path),
        "shape": list(row.shape),
        "dtype": str(row.dtype),
        "axes": list(row.axes),
        "spec": _entries(row.spec),
    }


def read_array(
    data: Mapping[str, Any],
) -> tuple[Path, tuple[int, ...], Any, Axes, PartitionSpec | None]:
    """The path, shape, dtype, axes and spec of an array from its JSON."""
    return (
        Path(data["path"]),
        tuple(data["shape"]),
        _dtype(data["dtype"]),
        Axes(*data["axes"]),
        _spec(data["spec"]),
    )


def _row(row: Row) -> dict[str, Any]:
    mesh = None
    if row.mesh is not None:
        mesh = dict(row.mesh.shape)
    return {
        **array_json(row),
        "reason": row.reason,
        "local_shape": list(row.local_shape),
        "bytes_global": row.bytes_global,
        "bytes_per_device": row.bytes_per_device,
        "copies": row.copies,
        "memory_kind": row.memory_kind,
        "mesh": mesh,
    }


def _entries(spec: PartitionSpec | None) -> list[Any] | None:
    """A spec in JSON: the entry of each dimension."""
    if spec is None:
        return None
    # JSON writes a tuple as a list.
    return list(spec)


def _spec(entries: Sequence[Any] | None) -> PartitionSpec | None:
    """The spec of such entries."""
    if entries is None:
        return None
    return PartitionSpec(*(tuple(entry) if isinstance(entry, list) else entry for entry in entries))


def _read_row(data: Mapping[str, Any]) -> Row:
    return Row(
        *read_array(data),
        data["reason"],
        tuple(data["local_shape"]),
        data["bytes_global"],
        data["bytes_per_device"],
        data["copies"],
        data["memory_kind"],
        _mesh(data["mesh"]),
    )


def _dtype(text: str) -> Any:
    """The dtype with this text, also that of random keys: `key<fry>`.

    Raises:
        FunctreeError: there is none.
    """
    if text.startswith("key<"):
        implementation = key_implementation(text)
        if implementation is None:
            raise FunctreeValueError(f"the JSON has random keys of an unknown kind: {text}")
        return jax.eval_shape(lambda: jax.random.key(0, impl=implementation)).dtype
    try:
        return jnp.dtype(text)
    # numpy reads more than names, such as `(3,)f4`, and raises errors of several classes.
    except (TypeError, ValueError, SyntaxError) as error:
        raise FunctreeValueError(
            f"the JSON is not of a whole plan: there is no dtype {text!r}"
        ) from error


def key_implementation(dtype: Any) -> str | None:
    """The name of the implementation of random keys with a dtype, or with its text `key<fry>`; None
    if unknown."""
    return _IMPLEMENTATIONS.get(str(dtype).removeprefix("key<").removesuffix(">"))


_IMPLEMENTATIONS = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}


def _mesh(sizes: Mapping[str, int] | None) -> Mesh | AbstractMesh | None:
    return None if sizes is None else AbstractMesh(tuple(sizes.values()), tuple(sizes))


def _problem(problem: Problem) -> dict[str, Any]:
    return {**problem._asdict(), "path": None if problem.path is None else str(Path(problem.path))}


def _read_problem(data: Mapping[str, Any]) -> Problem:
    path, shape = data["path"], data["shape"]
    return Problem(
        None if path is None else Path(path),
        None if shape is None else tuple(shape),
        data["what"],
        data["why"],
        data["remedy"],
    )
