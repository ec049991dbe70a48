"""A collective, and how the program is laid out ─► whether somebody has asked for it, and why it is
there.

Shardy's layouts are those from which the compiler starts. So the operation that a collective comes
from shows both: how its operands lie, and how its result has to.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from functree.compiled.collective import Cause, Collective
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

    def judged(self, one: Collective, name: str, parameters: Sequence[int]) -> Collective:
        """A collective with its verdict and its cause.

        Args:
            one: the collective.
            name: the name that JAX gives its operation: `jit(step)/jvp()/dot_general`.
            parameters: the indices of the parameters that it serves.
        """
        if one.mesh_axes is None:
            return one
        verdict = self._verdict(one, name, parameters)
        return replace(one, verdict=verdict, cause=self._cause(one, name))

    def _verdict(self, one: Collective, name: str, parameters: Sequence[int]) -> str | None:
        """Whether somebody has asked for a collective; None if that cannot be told."""
        primitive, is_sum = _primitive(name), one.kind in _SUMS
        if "shard_map" in name or primitive in _WRITTEN:
            return ASKED
        if one.kind == "collective-permute" and primitive.startswith(_SHIFTS):
            return ASKED
        if one.moves == "itself":
            return self._of_parameters(parameters)
        if is_sum and (one.moves == "gradient" or primitive.startswith(_REDUCTIONS)):
            return ASKED
        # A product's parts are summed as the layout means it; but over an axis of the batch an
        # activation is only summed where the batch was given up.
        if is_sum and primitive in _PRODUCTS and not self._batch.intersection(one.mesh_axes):
            return ASKED
        return COMPILER

    def _of_parameters(self, parameters: Sequence[int]) -> str | None:
        """The verdict on parameters that are moved themselves: FSDP gathers weights, which are
        sharded as the batch is."""
        if self._data is None:
            return None
        for i in parameters:
            if i in self._data or not self._batch & named_axes(self._rows[i].spec):
                return COMPILER
        return ASKED

    def _cause(self, one: Collective, name: str) -> Cause | None:
        """The operation that a collective comes from; None if it is not found."""
        rows = self._by_place[one.source, _primitive(name)]
        found = max(rows, key=lambda row: self._fit(row, one, name), default=None)
        if found is None:
            return None
        before = tuple(_laid_out(self._rows[i]) for i in found.operands if self._rows[i].shape)
        return Cause(found.op, found.source, found.expression, before, _laid_out(found))

    def _fit(self, row: LaidOut, one: Collective, name: str) -> tuple[bool, bool, bool]:
        """How well an operation fits a collective: whether an operand is sharded by its mesh axes
        and the result is not, whether either is, and whether it has the whole name."""
        axes, own, given = set(one.mesh_axes or ()), named_axes(row.spec), set[str]()
        for i in row.operands:
            given |= named_axes(self._rows[i].spec)
        return bool(axes & given - own), bool(axes & (given | own)), row.name == name


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
