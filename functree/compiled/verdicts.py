"""A collective, and how the program is laid out ─► whether somebody has asked for it, and why it is
there.

Shardy's layouts are those from which the compiler starts. So the operation that a collective comes
from shows both: how its operands lie, and how its result has to.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace

from functree.compiled.collective import Cause, Collective
from functree.compiled.layouts import Layouts
from functree.compiled.provenance import Shape
from functree.compiled.shardy import CONSTRAINT, RESULT, LaidOut
from functree.devices.specs import mesh_axes, named_axes
from functree.tree.paths import Path

# So many operations before a constraint its arrays may be moved.
_FARTHEST = 8
# What makes an array of the same shape with other dimensions.
_TURNS = ("dot_general", "transpose")
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
_OPAQUE = "it is written: inside of `shard_map`, or as a collective"
_APART = "keep the parts in arrays of their own, or give them a dimension that is not sharded"
# What to do about operations that lose their layouts in any case, by StableHLO's names.
_HINTS = {
    "concatenate": f"arrays are joined along a sharded dimension: {_APART}",
    "dynamic_slice": f"a part of a sharded dimension is taken: {_APART}",
    "dynamic_update_slice": f"a part of a sharded dimension is replaced: {_APART}",
    "fft": "a transform needs its whole dimension: shard another one, or write it in `shard_map`",
    "gather": "a look-up in a sharded dimension: shard another dimension of the table",
    "reshape": "a reshape joins or splits a sharded dimension: let the sharded part come first",
    "reverse": "a sharded dimension is turned around: shard another one",
    "scatter": "values are put into a sharded dimension: shard another dimension",
    "slice": f"a part of a sharded dimension is taken: {_APART}",
    "sort": "sorting needs its whole dimension: sort each part in `shard_map`, and join the best",
    "top_k": "the largest of a sharded dimension: take those of each part in `shard_map` first",
}
# What needs the neighbouring part: its edge, which is asked for by what is computed.
_SHIFTS = (
    "concatenate", "conv", "dynamic_slice", "dynamic_update_slice", "pad", "reduce_window", "rev",
    "roll", "select_and", "slice",
)  # fmt: skip


class Verdicts:
    """The verdicts on the collectives of one program.

    Args:
        layouts: how it is laid out. Its first rows are the parameters of the program.
        data: the indices of the parameters that are data, and no part of a model.
    """

    def __init__(self, layouts: Layouts, data: Collection[int]):
        self._rows, self._sizes, self._data = layouts.rows, layouts.sizes, data
        self._batch = set[str]().union(*(named_axes(self._rows[i].spec) for i in data))
        self._results = [i for i, row in enumerate(self._rows) if row.op == RESULT]
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
        found = self._operation(one, name, parameters)
        if found is not None and name.endswith(")"):
            name = self._rows[found].name
        reason = _OPAQUE if "shard_map" in name else ""
        reason = reason or self._reason(one, _primitive(name), parameters, found)
        verdict = ASKED if reason else COMPILER
        if found is None:
            cause = Cause(_primitive(name), one.source, "", (), "", (), reason)
        else:
            cause = self._cause(found, reason)
        return replace(one, verdict=verdict, cause=cause)

    def _reason(
        self, one: Collective, primitive: str, parameters: Sequence[int], found: int | None
    ) -> str:
        """Why somebody has asked for a collective; empty if nobody has."""
        is_sum, axes = one.kind in _SUMS, set(one.mesh_axes or ())
        if found is not None and self._rows[found].op == CONSTRAINT:
            return "a constraint asks for it"
        if primitive in _WRITTEN:
            return _OPAQUE
        if one.kind == "collective-permute" and primitive.startswith(_SHIFTS):
            return "the neighbouring parts have to see each other's edges"
        if one.moves == "itself":
            return "its weight is sharded as the batch is" if self._is_fsdp(parameters) else ""
        if one.moves == "gradient" and (is_sum or self._is_fsdp(parameters)):
            return "a gradient is summed over the batch"
        if is_sum and primitive.startswith(_REDUCTIONS):
            return "it sums over a sharded dimension, or looks up in one"
        if is_sum and primitive in _PRODUCTS and (found is None or self._sums(found, axes)):
            # Of an activation and a weight, parts are only summed over an axis of the batch where
            # the batch was given up.
            if one.moves != "activation" or not self._batch & axes:
                return "a product sums over a sharded dimension"
        return ""

    def _is_fsdp(self, parameters: Sequence[int]) -> bool:
        """Whether parameters are weights that are sharded as the batch is, as by FSDP."""
        for i in parameters:
            if i in self._data or not self._batch & named_axes(self._rows[i].spec):
                return False
        return True

    def _operation(self, one: Collective, name: str, parameters: Sequence[int]) -> int | None:
        """The operation that a collective comes from; None if it is not found."""
        axes = set(one.mesh_axes or ())

        def takes(i: int) -> bool:
            return any(self._outside(j) in parameters for j in self._rows[i].operands)

        def fit(i: int) -> tuple[bool, ...]:
            row, moves_it = self._rows[i], one.moves == "itself"
            return (
                row.name == name,
                moves_it and takes(i),
                self._relays(i, axes),
                bool(row.operands),
            )

        places = self._by_place[one.source, _primitive(name)]
        if name.endswith(")"):
            # Combined of several: `jit(f)/(jvp()/reduce_sum:transpose(jvp())/dot_general)`.
            scope, _, parts = name.rpartition("/(")
            names = [f"{scope}/{part}" for part in parts[:-1].split(":")]
            alike = [i for i, row in enumerate(self._rows) if row.name in names]
            places = [i for i in alike if self._rows[i].bytes_of(self._sizes) == one.bytes]
        elif not name:
            # The compiler moves arguments and results where no operation is.
            places = self._results
        found = max(places, key=fit, default=None)
        if one.moves == "itself" and parameters and not (found is not None and takes(found)):
            # What it is moved for is some operations behind it.
            found, name = min(parameters), ""
        if found is None or (self._relays(found, axes) and name):
            return found
        return self._needs(found, one, name)

    def _needs(self, found: int, one: Collective, name: str) -> int:
        """The operation that a collective moves an array for: the one that is found, or one that
        uses it.

        What is moved for a constraint may be moved before what is constrained is computed, and what
        has no name before any operation. JAX 0.12 names the operation that makes the array, and JAX
        0.10 mostly the one that it is moved for. Sums and the edges of a shift belong to the
        operation that is named.
        """
        axes, relays = set(one.mesh_axes or ()), None
        is_own = one.kind in (*_SUMS, "collective-permute") or self._turns(found, axes)
        reached = found
        for _ in range(_FARTHEST):
            users = self._users[reached]
            if not users or (not name and self._rows[users[0]].op in _TURNS):
                break
            for i in users:
                is_constraint = self._rows[i].op in (CONSTRAINT, RESULT)
                if (is_constraint or not name) and self._relays(i, axes):
                    return i
                if relays is None and (self._relays(i, axes) or self._turns(i, axes)):
                    relays = i
            reached = users[0]
        if not name and self._users[found]:
            return self._users[found][0]
        return found if relays is None or not name or is_own else relays

    def _outside(self, i: int) -> int:
        """The row of what a loop carries, before the loop."""
        while self._rows[i].op == "while" and self._rows[i].operands:
            i = self._rows[i].operands[0]
        return i

    def _relays(self, i: int, axes: set[str]) -> bool:
        """Whether an operand is sharded by one of these mesh axes, and the result is not, or in
        another dimension of the same array."""
        row = self._rows[i]
        for operand in (self._rows[j] for j in row.operands):
            if axes & named_axes(operand.spec) - named_axes(row.spec):
                return True
            if row.op in _TURNS or operand.shape != row.shape:
                continue
            for before, after in zip(operand.spec.partitions, row.spec.partitions, strict=True):
                if axes & (set(mesh_axes(before)) - set(mesh_axes(after))):
                    return True
        return False

    def _turns(self, i: int, axes: set[str]) -> bool:
        """Whether one of these mesh axes shards an operand, and the result in a dimension of
        another size."""
        row = self._rows[i]
        for operand in (self._rows[j] for j in row.operands):
            for size, before in zip(operand.shape, operand.spec.partitions, strict=True):
                kept = set[str]()
                for other, after in zip(row.shape, row.spec.partitions, strict=True):
                    if other == size:
                        kept.update(mesh_axes(after))
                if axes & named_axes(row.spec) & set(mesh_axes(before)) - kept:
                    return True
        return False

    def _sums(self, i: int, axes: set[str]) -> bool:
        """Whether a product sums over a dimension that is sharded by one of these mesh axes: both
        operands are, or the result is not."""
        row = self._rows[i]
        given = [named_axes(self._rows[j].spec) & axes for j in row.operands]
        return all(given) or any(one - named_axes(row.spec) for one in given)

    def _cause(self, found: int, reason: str) -> Cause:
        row = self._rows[found]
        operands = [self._rows[i] for i in row.operands if self._rows[i].shape]
        origins = dict[str, None]()
        for other in (*operands, row):
            origins |= dict.fromkeys(other.origins.values())
        if row.op == CONSTRAINT and row.source is not None:
            origins[row.source] = None
        elif row.op == RESULT:
            origins[row.name] = None
        before, after = tuple(map(_laid_out, operands)), _laid_out(row)
        hint = "" if reason else self._hint(row, operands)
        return Cause(
            row.op, row.source, row.expression, before, after, tuple(origins), reason, hint
        )

    def _hint(self, row: LaidOut, operands: Sequence[LaidOut]) -> str:
        """What other code is needed for an operation that loses its layout; empty if no hint is
        known."""
        if row.op == "reshape":
            kept = set(zip(row.shape, row.spec.partitions, strict=True))
            for before in zip(operands[0].shape, operands[0].spec.partitions, strict=True):
                number = math.prod(self._sizes.get(axis, 1) for axis in mesh_axes(before[1]))
                new = [size for size in row.shape if size not in operands[0].shape]
                if before not in kept and new and new[0] % number:
                    return f"{number} does not divide {new[0]}: choose a number that it divides"
        return _HINTS.get(row.op, "")


def _primitive(name: str) -> str:
    """The name of JAX's primitive at the end of that of an operation."""
    return name.rpartition("/")[2]


def _laid_out(row: LaidOut) -> str:
    return f"{row.array} ({row.decided})" if row.decided else row.array


def data_of(
    parameters: Sequence[Path], shapes: Sequence[Shape], trained: Collection[int]
) -> set[int]:
    """The parameters that are data, and no part of a model.

    An argument is a model if one of its arrays is trained. It is one too if it has several arrays:
    more than those that are trained, or such that have no leading dimension in common, as those of
    a batch have. If none is a model, all are data.

    Args:
        parameters: the path of each parameter, which begins with its argument.
        shapes: their shapes.
        trained: those that have a counterpart among the results: a new value, a gradient.
    """
    by_argument = defaultdict[Hashable, list[int]](list)
    for i, path in enumerate(parameters):
        by_argument[path[0]].append(i)
    largest = max((len(by_argument[parameters[i][0]]) for i in trained), default=0)
    several: set[int] = set()
    for own in by_argument.values():
        leading = {shapes[i][0] for i in own if shapes[i]}
        if len(leading) > 1 or (len(own) > 1 and len(own) > largest):
            several.update(own)
    models = {parameters[i][0] for i in trained}
    if several and not several & set(trained):
        models.clear()
    models |= {parameters[i][0] for i in several}
    return {i for i, path in enumerate(parameters) if path[0] not in models}
