"""A collective, and how the program is laid out ─► whether somebody has asked for it, and why it is
there.

Shardy's layouts are those from which the compiler starts. So the operation that a collective comes
from shows both: how its operands lie, and how its result has to.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from functree.compiled.collective import Cause, Collective
from functree.compiled.layouts import Layouts
from functree.compiled.shardy import ARGUMENT, LaidOut
from functree.devices.specs import named_axes

# So many operations before a constraint its arrays may be moved.
_FARTHEST = 8
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
        self._by_place = defaultdict[tuple[str | None, str], list[int]](list)
        self._users = defaultdict[int, list[int]](list)
        for i, row in enumerate(self._rows):
            self._by_place[row.source, _primitive(row.name)].append(i)
            for operand in row.operands:
                self._users[operand].append(i)

    def judged(self, one: Collective, name: str, parameters: Sequence[int]) -> Collective:
        """A collective with its verdict and its cause.

        Args:
            one: the collective.
            name: the name that JAX gives its operation: `jit(step)/jvp()/dot_general`.
            parameters: the indices of the parameters that it serves.
        """
        if one.mesh_axes is None:
            return one
        axes = set(one.mesh_axes)
        found = self._operation(one, name, parameters, axes)
        verdict = self._verdict(one, _primitive(name), parameters, found, axes)
        if "shard_map" in name:
            verdict = ASKED
        return replace(one, verdict=verdict, cause=None if found is None else self._cause(found))

    def _verdict(
        self,
        one: Collective,
        primitive: str,
        parameters: Sequence[int],
        found: int | None,
        axes: set[str],
    ) -> str | None:
        """Whether somebody has asked for a collective; None if that cannot be told."""
        is_sum = one.kind in _SUMS
        if primitive in _WRITTEN or (found is not None and self._rows[found].op in _WRITTEN):
            return ASKED
        if one.kind == "collective-permute" and primitive.startswith(_SHIFTS):
            return ASKED
        if one.moves == "itself":
            return self._of_parameters(parameters)
        if one.moves == "gradient" and (is_sum or self._of_parameters(parameters) == ASKED):
            return ASKED
        if is_sum and primitive.startswith(_REDUCTIONS):
            return ASKED
        # A product's parts are summed as the layout means it: over the mesh axes of the dimension
        # that is summed. But over an axis of the batch an activation is only summed where the batch
        # was given up.
        if is_sum and primitive in _PRODUCTS and not self._batch & axes:
            return ASKED if found is None or self._loses(found, axes) else COMPILER
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

    def _operation(
        self, one: Collective, name: str, parameters: Sequence[int], axes: set[str]
    ) -> int | None:
        """The operation that a collective comes from; None if it is not found."""

        def fit(i: int) -> tuple[bool, bool, bool]:
            operands = self._rows[i].operands
            takes = one.moves == "itself" and any(p in operands for p in parameters)
            return self._rows[i].name == name, takes, self._loses(i, axes)

        places = self._by_place[one.source, _primitive(name)]
        found = max(places, key=fit, default=None)
        if found is None or self._loses(found, axes):
            return found
        # What is moved for a constraint may be moved before what is constrained is computed.
        reached = found
        for _ in range(_FARTHEST):
            users = self._users[reached]
            for i in users:
                if self._rows[i].op in _WRITTEN and self._loses(i, axes):
                    return i
            if not users:
                break
            reached = users[0]
        return found

    def _loses(self, i: int, axes: set[str]) -> bool:
        """Whether an operand is sharded by one of these mesh axes, and the result is not."""
        row = self._rows[i]
        given = set[str]().union(*(named_axes(self._rows[j].spec) for j in row.operands))
        return bool(axes & given - named_axes(row.spec))

    def _cause(self, found: int) -> Cause:
        row = self._rows[found]
        operands = [self._rows[i] for i in row.operands if self._rows[i].shape]
        origins = dict[str, None]()
        for other in (*operands, row):
            origins |= dict.fromkeys(
                by for by in other.origins.values() if by != other.name or other.op == ARGUMENT
            )
        before = tuple(map(_laid_out, operands))
        return Cause(row.op, row.source, row.expression, before, _laid_out(row), tuple(origins))


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
