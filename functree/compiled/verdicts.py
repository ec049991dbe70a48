"""A collective, and how the program is laid out ─► whether somebody has asked for it, and why it is
there.

Shardy's layouts are those from which the compiler starts. So the operation that a collective comes
from shows both: how its operands lie, and how its result has to.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from functree.compiled.collective import Cause
from functree.compiled.layouts import LaidOut, Layouts
from functree.devices.specs import named_axes

ASKED, COMPILER = "asked", "compiler"

# What a user writes, by the names of JAX's primitives.
_WRITTEN = frozenset({
    "all_gather", "all_gather_invariant", "all_to_all", "pgather", "pmax", "pmin", "ppermute",
    "psum", "psum2", "psum_invariant", "psum_scatter", "ragged_all_to_all", "reduce_scatter",
    "reshard", "sharding_constraint",
})  # fmt: skip
_PRODUCTS = frozenset({"conv_general_dilated", "dot_general", "ragged_dot_general"})
_SUMS = ("all-reduce", "reduce-scatter")
# What sums over a dimension, or looks up in one.
_REDUCTIONS = (
    "arg", "cum", "gather", "reduce", "scatter", "select_and_gather", "select_and_scatter", "split",
    "take", "top_k",
)  # fmt: skip
# What needs the neighbouring part: its edge, which is asked for by what is computed.
_SHIFTS = (
    "concatenate", "conv", "dynamic_slice", "dynamic_update_slice", "pad", "reduce_window", "rev",
    "roll", "select_and", "slice",
)  # fmt: skip


class Moved(NamedTuple):
    """What is known of a collective.

    Attributes:
        kind: as in `Collective`, and so are the next ones.
        mesh_axes: over which it moves.
        moves: what it moves for a parameter.
        source: its line.
        name: the name that JAX gives the operation: `jit(step)/jvp()/dot_general`.
        parameters: the indices of the parameters that it serves.
    """

    kind: str
    mesh_axes: tuple[str, ...]
    moves: str | None
    source: str | None
    name: str
    parameters: Sequence[int]


class Verdicts:
    """The verdicts on the collectives of one program.

    Args:
        layouts: how it is laid out. Its first rows are the parameters of the program.
        data: the indices of the parameters that are data, and no part of a model; None if that is
            not known.
    """

    def __init__(self, layouts: Layouts, data: Collection[int] | None):
        self._rows, self._data = layouts.rows, data
        self._batch: set[str] = set()
        for i in data or ():
            self._batch |= named_axes(self._rows[i].spec)
        self._by_place = defaultdict[tuple[str | None, str], list[LaidOut]](list)
        for row in self._rows:
            self._by_place[row.source, _primitive(row.name)].append(row)

    def verdict(self, moved: Moved) -> str | None:
        """Whether somebody has asked for a collective; None if that cannot be told."""
        primitive = _primitive(moved.name)
        if "shard_map" in moved.name or primitive in _WRITTEN:
            return ASKED
        if moved.moves == "itself":
            return self._of_parameters(moved, primitive)
        is_shift = moved.kind == "collective-permute" and primitive.startswith(_SHIFTS)
        if is_shift or (moved.kind in _SUMS and primitive.startswith(_REDUCTIONS)):
            return ASKED
        if moved.kind not in _SUMS:
            return COMPILER
        if moved.moves == "gradient":
            return ASKED
        if primitive not in _PRODUCTS:
            return COMPILER
        # An activation whose batch was given up is summed by the axis of the batch.
        return COMPILER if self._batch.intersection(moved.mesh_axes) else ASKED

    def _of_parameters(self, moved: Moved, primitive: str) -> str | None:
        """The verdict on parameters that are moved themselves: FSDP gathers weights."""
        if self._data is None:
            return None
        for i in moved.parameters:
            is_shift = moved.kind == "collective-permute" and primitive.startswith(_SHIFTS)
            if i in self._data and not is_shift:
                return COMPILER
            if i not in self._data and not self._batch & named_axes(self._rows[i].spec):
                return COMPILER
        return ASKED

    def cause(self, moved: Moved) -> Cause | None:
        """The operation that a collective comes from; None if it is not found."""
        rows = self._by_place[moved.source, _primitive(moved.name)]
        found = max(rows, key=lambda row: self._fit(row, moved), default=None)
        if found is None or not any(self._fit(found, moved)):
            return None
        before = tuple(_laid_out(self._rows[i]) for i in found.operands if self._rows[i].shape)
        return Cause(found.op, found.source, found.expression, before, _laid_out(found))

    def _fit(self, row: LaidOut, moved: Moved) -> tuple[bool, bool]:
        """How well an operation fits a collective: whether an operand has its mesh axes and the
        result has not, and whether it has its whole name."""
        axes = set(moved.mesh_axes)
        own = named_axes(row.spec)
        given: set[str] = set()
        for i in row.operands:
            given |= named_axes(self._rows[i].spec)
        return bool(axes & given - own), bool(axes & (given | own)) and row.name == moved.name


def _primitive(name: str) -> str:
    """The name of JAX's primitive at the end of that of an operation."""
    return name.rpartition("/")[2]


def _laid_out(row: LaidOut) -> str:
    return f"{row.array} ({row.decided})" if row.decided else row.array


def data_of(arguments: Sequence[str], trained: Collection[int]) -> set[int] | None:
    """The parameters that are data: those in arguments of which none is trained.

    Args:
        arguments: the name of the argument of each parameter.
        trained: the parameters that have a counterpart among the results: a new value, a gradient.

    Returns:
        Their indices. None if it cannot be told: nothing is trained, and no argument has several
        arrays, as a model has.
    """
    sizes: Mapping[str, int] = {name: list(arguments).count(name) for name in set(arguments)}
    models = {arguments[i] for i in trained}
    if not models:
        models = {name for name, size in sizes.items() if size > 1}
    if not models:
        return None
    return {i for i, name in enumerate(arguments) if name not in models}
