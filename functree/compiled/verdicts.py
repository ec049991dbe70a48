"""`Verdicts` determines whether a collective was asked for, and finds its cause.

The compiler starts from Shardy's layouts. They contain the operation that a collective comes from,
with the shardings of its operands and the sharding that its result needs.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from itertools import chain
from operator import ne

from functree.compiled.collective import Cause, Collective
from functree.compiled.layouts import Layouts
from functree.compiled.provenance import Shape, split
from functree.compiled.shardy import CONSTRAINT, RESULT, LaidOut
from functree.devices.meshes import mesh_axes, named_axes
from functree.tree.paths import Path

# A constraint may cause a move up to this many operations earlier.
_FARTHEST = 8
# Operations that may move a dimension to a different position.
_TURNS = ("dot_general", "transpose")
ASKED, COMPILER = "asked", "compiler"

# JAX primitives for collectives that users write explicitly.
_WRITTEN = frozenset({
    "all_gather", "all_gather_invariant", "all_to_all", "pgather", "pmax", "pmin", "ppermute",
    "psum", "psum2", "psum_invariant", "psum_scatter", "ragged_all_to_all", "reduce_scatter",
    "reshard", "sharding_constraint",
})  # fmt: skip
_PRODUCTS = frozenset({"conv_general_dilated", "dot_general", "ragged_dot_general"})
_SUMS = ("all-reduce", "reduce-scatter")
# StableHLO's operations that sum over a dimension.
_SUMMING = ("convolution", "dot_general", "reduce")
# Prefixes of operations that sum over a dimension, or index it.
_REDUCTIONS = (
    "arg", "cum", "gather", "reduce", "scatter", "select_and_gather", "select_and_scatter", "split",
    "take", "top_k",
)  # fmt: skip
_OPAQUE = "it comes from a `shard_map` or an explicit collective"
_APART = "keep the parts in separate arrays, or stack them along an unsharded dimension"
# Advice for operations that always lose their sharding, by StableHLO's names.
_HINTS = {
    "concatenate": f"concatenates along a sharded dimension: {_APART}",
    "dynamic_slice": f"slices a sharded dimension: {_APART}",
    "dynamic_update_slice": f"updates a part of a sharded dimension: {_APART}",
    "fft": "transforms a sharded dimension: shard a different dimension, or write the FFT in "
    "`shard_map`",
    "gather": "indexes a sharded dimension: shard a different dimension of the table",
    "reshape": "merges or splits a sharded dimension: put the sharded part first",
    "reverse": "reverses a sharded dimension: shard a different dimension",
    "scatter": "updates elements of a sharded dimension: shard a different dimension",
    "slice": f"slices a sharded dimension: {_APART}",
    "sort": "sorts a sharded dimension: sort each shard in `shard_map`, then merge the results",
    "top_k": "searches a sharded dimension: call `top_k` on each shard in `shard_map` first",
}
# Of these, only the first operand is the array that is read or updated.
_PARTS = ("dynamic_update_slice", "gather", "scatter")
# Prefixes of operations that need the edges of neighboring shards. Their collectives count as asked
# for.
_SHIFTS = (
    "concatenate", "conv", "dynamic_slice", "dynamic_update_slice", "pad", "reduce_window", "rev",
    "roll", "select_and", "slice",
)  # fmt: skip


class Verdicts:
    """The verdicts on a program's collectives.

    Args:
        layouts: the program's layouts. The first rows are the program's parameters. If there are no
            rows, there are no verdicts.
        data: the indices of the parameters that are data, and not part of a model.
    """

    def __init__(self, layouts: Layouts, data: Collection[int]):
        self._rows, self._sizes, self._data = layouts.rows, layouts.sizes, data
        # The batch is the first sharded dimension of data. Mesh axes of the sequence may also shard
        # weights, as in FSDP, but mesh axes of a cache's heads do not.
        self._batch, self._fsdp_axes = set[str](), set[str]()
        for i in data:
            sharded = list(filter(None, self._rows[i].spec.partitions[:2]))
            self._batch.update(*map(mesh_axes, sharded[:1]))
            self._fsdp_axes.update(*map(mesh_axes, sharded))
        self._results = [i for i, row in enumerate(self._rows) if row.op == RESULT]
        self._by_source = defaultdict[str | None, list[int]](list)
        self._by_name = defaultdict[str, list[int]](list)
        self._by_shape = defaultdict[tuple[int, ...], set[int]](set)
        self._users = defaultdict[int, list[int]](list)
        # The operations that take each row, even in a loop.
        self._takers = defaultdict[int, set[int]](set)
        for i, row in enumerate(self._rows):
            self._by_source[row.source].append(i)
            self._by_name[row.name].append(i)
            self._by_shape[tuple(sorted(row.shape))].add(i)
            for operand in row.operands:
                self._users[operand].append(i)
                self._takers[self._outside(operand)].add(i)
        # An unrolled model has many operations on a line, and many collectives that come from these
        # operations. The operations are therefore compared once, and not for each collective.
        self._relayed: dict[int, set[str]] = {}
        self._ranked: dict[Hashable, list[int]] = {}

    def of(
        self, one: Collective, name: str, parameters: Sequence[int]
    ) -> tuple[str | None, Cause | None]:
        """Return the verdict on a collective, and its cause.

        Args:
            one: the collective.
            name: JAX's name for its operation: `jit(step)/jvp()/dot_general`.
            parameters: the indices of the parameters that it serves.
        """
        if one.mesh_axes is None or not self._rows:
            return None, None
        found = self._operation(one, name, parameters)
        if found is not None and len(split(name)) > 1:
            name = self._rows[found].name
        reason = self._reason(one, name, parameters, found)
        if found is None:
            cause = Cause(_primitive(name), one.source, "", (), "", (), reason)
        else:
            cause = self._cause(found, set(one.mesh_axes), reason)
        return ASKED if reason else COMPILER, cause

    def _reason(
        self, collective: Collective, name: str, parameters: Sequence[int], operation: int | None
    ) -> str:
        """Return why a collective is classified as asked for, or an empty string if it is not."""
        primitive, is_sum = _primitive(name), collective.kind in _SUMS
        axes = set(collective.mesh_axes or ())
        if "shard_map" in name:
            return _OPAQUE
        if operation is not None and self._rows[operation].op == CONSTRAINT:
            return "a constraint requires it"
        # JAX 0.12 names collectives after the operation that computes the array. If that is a
        # constraint, a later operation may need the array in a different sharding.
        is_before = operation is not None and primitive in ("reshard", CONSTRAINT)
        if primitive in _WRITTEN and not (is_before and self._keeps_spec(name)):
            return _OPAQUE
        if collective.kind == "collective-permute" and primitive.startswith(_SHIFTS):
            return "neighboring shards need each other's edges"
        is_fsdp = self._is_fsdp(parameters)
        if collective.moves == "itself" and is_fsdp:
            return "the weight is sharded over the batch's mesh axes"
        if collective.moves == "gradient" and (is_sum or is_fsdp):
            return "a gradient is summed over the batch"
        if is_sum and collective.moves != "itself" and primitive.startswith(_REDUCTIONS):
            return "it sums over a sharded dimension, or indexes one"
        if is_sum and primitive in _PRODUCTS and (operation is None or self._sums(operation, axes)):
            # A product of an activation and a weight is summed over the batch's axis only if the
            # batch lost that axis, which is the compiler's choice.
            if collective.moves != "activation" or not self._batch & axes:
                return "a product sums over a sharded dimension"
        return ""

    def _is_fsdp(self, parameters: Sequence[int]) -> bool:
        """Return whether parameters are weights sharded over the mesh axes of batch or sequence."""
        for i in parameters:
            if i in self._data or not self._fsdp_axes & named_axes(self._rows[i].spec):
                return False
        return True

    def _operation(
        self, collective: Collective, name: str, parameters: Sequence[int]
    ) -> int | None:
        """Find the operation that a collective comes from; None if there is none."""
        axes = set(collective.mesh_axes or ())
        if collective.moves == "gradient":
            shapes = [tuple(sorted(self._rows[p].shape)) for p in parameters]
            serving = set[int]().union(*(self._by_shape[shape] for shape in shapes))
        else:
            serving = set[int]().union(*(self._takers[p] for p in parameters))
        others = self._candidates(collective, name, axes)
        ranked = [*filter(serving.__contains__, others), *others]
        if collective.moves == "itself" and parameters and serving.isdisjoint(ranked[:1]):
            # The operation that needs the array comes later.
            return self._reached(min(parameters), axes, named=False)
        if not ranked:
            return None
        if collective.kind in _SUMS:
            return ranked[0]
        # Among operations with the same name, choose one whose result must be resharded.
        for i in ranked:
            reached = self._reached(i, axes, named=bool(name))
            if reached != i or self._relays(i, axes):
                return reached
        return ranked[0]

    def _candidates(self, collective: Collective, name: str, axes: set[str]) -> list[int]:
        """Return the operations that a collective may come from, the most likely first.

        For sums, these are all operations with the collective's name. Otherwise, operations that
        relay these mesh axes, or whose arrays have the collective's bytes, exclude all others.
        """

        def fits(i: int) -> bool:
            moved = [self._rows[i]]
            if not is_sum:
                moved += map(self._rows.__getitem__, self._rows[i].operands)
            found = {array.bytes_of(sizes) for array in moved for sizes in (self._sizes, whole)}
            return collective.bytes in found

        def rank(i: int) -> tuple[bool, ...]:
            row = self._rows[i]
            sums = is_sum and row.op in _SUMMING and self._sums(i, axes)
            return sums, fits(i), self._relays(i, axes), bool(row.operands)

        is_sum = collective.kind in _SUMS
        # The array may be sharded over these mesh axes only before it is moved, or afterwards.
        whole = {axis: size for axis, size in self._sizes.items() if axis not in axes}
        key = collective.source, name, frozenset(axes), collective.kind, collective.bytes
        if key not in self._ranked:
            places = self._places(collective, name)
            if not is_sum:
                places = [i for i in places if fits(i) or self._relays(i, axes)] or places
            self._ranked[key] = sorted(places, key=rank, reverse=True)
        return self._ranked[key]

    def _places(self, collective: Collective, name: str) -> list[int]:
        """Return the operations with a collective's name."""
        if not name:
            # A collective without an operation moves arguments or results.
            return self._results
        if len(split(name)) > 1:  # it covers several operations
            named = chain.from_iterable(self._by_name[one] for one in split(name))
            return [i for i in named if self._rows[i].bytes_of(self._sizes) == collective.bytes]
        on_line, primitive = self._by_source[collective.source], _primitive(name)
        return (
            [i for i in on_line if self._rows[i].name == name]
            or [i for i in on_line if _primitive(self._rows[i].name) == primitive]
            # The compilation cache may return a program with different lines.
            or self._by_name[name]
        )

    def _reached(self, i: int, axes: set[str], named: bool) -> int:
        """Find the operation that needs an operation's result in a different sharding.

        If there is none, return the given operation or, if it has no name, its first user.
        """
        row = self._rows[i]
        if named and self._relays(i, axes):
            return i
        # An operation that always loses its sharding is the cause, unless a constraint follows.
        # A sum does not need the unsharded array.
        passed = ("reduce",) if named else ("dot_general", "reduce")
        reached = i
        for _ in range(_FARTHEST):
            users = self._users[reached]
            # A constraint takes precedence over other users of the same value.
            for user in sorted(users, key=lambda j: self._rows[j].op not in (CONSTRAINT, RESULT)):
                op = self._rows[user].op
                if named and row.op in _HINTS and op not in (CONSTRAINT, RESULT):
                    continue
                if op not in passed and self._relays(user, axes):
                    return user
            if not users or self._rows[users[0]].op in _TURNS:
                break
            reached = users[0]
        # The compiler may gather an operand of a product instead of the product.
        products = [] if named else [j for j in self._users[i] if self._rows[j].op == "dot_general"]
        for j in chain(*(self._users[j] for j in products)):
            if self._rows[j].op == CONSTRAINT and self._relays(j, axes):
                return j
        return i if named or not self._users[i] else self._users[i][0]

    def _outside(self, i: int) -> int:
        """Return the row of a loop carry's initial value; return any other row unchanged."""
        while self._rows[i].op == "while" and self._rows[i].operands:
            i = self._rows[i].operands[0]
        return i

    def _relays(self, i: int, axes: set[str]) -> bool:
        """Return whether these mesh axes shard a dimension of an operand, but not of the result."""
        if i not in self._relayed:
            self._relayed[i] = self._relayed_by(self._rows[i])
        return not axes.isdisjoint(self._relayed[i])

    def _relayed_by(self, row: LaidOut) -> set[str]:
        """Return the mesh axes that shard a dimension of an operand, but not of the result."""
        relayed: set[str] = set()
        turns = row.op in (*_TURNS, "broadcast_in_dim")
        for k, operand in enumerate(map(self._rows.__getitem__, row.operands)):
            relayed |= named_axes(operand.spec) - named_axes(row.spec)
            is_image = k == 0 and row.op == "convolution" and _keeps_dimensions(operand, row)
            if turns or is_image or operand.shape == row.shape:
                relayed |= {axis for axis, _ in _positions(operand, turns) - _positions(row, turns)}
        return relayed

    def _keeps_spec(self, name: str) -> bool:
        """Return whether constraints with this name only compute an array; False without any."""
        kept: set[bool] = set()
        for row in map(self._rows.__getitem__, self._by_name[name]):
            kept.update(self._rows[j].spec == row.spec for j in row.operands)
        return kept == {True}

    def _sums(self, i: int, axes: set[str]) -> bool:
        """Return whether a product sums over a dimension that these mesh axes shard.

        If so, they shard all operands, or an operand but not the result.
        """
        row = self._rows[i]
        operand_axes = [named_axes(self._rows[j].spec) & axes for j in row.operands]
        return all(operand_axes) or any(used - named_axes(row.spec) for used in operand_axes)

    def _cause(self, index: int, axes: set[str], reason: str) -> Cause:
        relaid, hint = index, ""
        if not reason:
            relaid, hint = self._relaid_before(index, axes), self._hint(index)
        others = [*self._operands(index), self._rows[index], *self._operands(relaid)]
        # An operation with a hint loses its sharding anyway.
        if not hint:
            index = relaid
        operands, row = self._operands(index), self._rows[index]
        if not reason and not hint:
            row = self._constraint_after(index, axes)
        origins = dict[str, None]()
        for other in (*others, self._rows[relaid], row):
            origins |= dict.fromkeys(other.origins.values())
        if row.op == CONSTRAINT and row.source is not None:
            origins[row.source] = None
        elif row.op == RESULT:
            origins[row.name] = None
        before, after = tuple(map(_laid_out, operands)), _laid_out(row)
        return Cause(
            row.op, row.source, row.expression, before, after, tuple(origins), reason, hint
        )

    def _operands(self, i: int) -> list[LaidOut]:
        """Return the operands of an operation, without scalars."""
        return [self._rows[j] for j in self._rows[i].operands if self._rows[j].shape]

    def _constraint_after(self, i: int, axes: set[str]) -> LaidOut:
        """Return the constraint that determines which dimension of a result mesh axes shard.

        Return the operation itself if its operands, or no later constraint, determine this.
        """
        row = self._rows[i]
        turns = row.op in _TURNS
        gained = _positions(row, turns)
        for j in row.operands:
            gained -= _positions(self._rows[j], turns)
        lines = {row.origins[axis] for axis, _ in gained if axis in axes}
        for j in self._near(i, lambda j: self._users[j]) if lines else ():
            later = self._rows[j]
            if later.op == CONSTRAINT and later.source in lines:
                if sorted(later.shape) == sorted(row.shape):
                    return later
        return row

    def _relaid_before(self, i: int, axes: set[str]) -> int:
        """Return the nearest operation that relays mesh axes, or the operation itself.

        A disagreement between two layouts may be settled before the operation that combines the
        arrays. The compiler may still move the other array instead.
        """

        def operands(j: int) -> Sequence[int]:
            return () if self._rows[j].op in _SUMMING else self._rows[j].operands

        for j in self._near(i, operands):
            if operands(j) and self._relays(j, axes):
                return j
        return i

    def _near(self, i: int, neighbors: Callable[[int], Sequence[int]]) -> Iterator[int]:
        """Yield a row and the rows near it, by distance."""
        level = [i]
        for _ in range(_FARTHEST):
            yield from level
            level = list(dict.fromkeys(chain(*map(neighbors, level))))

    def _hint(self, i: int) -> str:
        """Return advice for an operation that always loses its sharding; empty if there is none."""
        row, operands = self._rows[i], self._operands(i)
        if row.op in _PARTS and operands and not named_axes(operands[0].spec):
            return ""
        if row.op == "reshape" and operands:
            kept = set(zip(row.shape, row.spec.partitions, strict=True))
            for before in zip(operands[0].shape, operands[0].spec.partitions, strict=True):
                number = math.prod(self._sizes.get(axis, 1) for axis in mesh_axes(before[1]))
                new = [size for size in row.shape if size not in operands[0].shape]
                if before not in kept and new and new[0] % number:
                    return f"{number} does not divide {new[0]}: choose a multiple of {number}"
        return _HINTS.get(row.op, "")


def _primitive(name: str) -> str:
    """Return the JAX primitive at the end of an operation's name."""
    return name.rpartition("/")[2]


def _positions(row: LaidOut, turns: bool) -> set[tuple[str, int]]:
    """Return each mesh axis with the dimension that it shards.

    Args:
        row: an array.
        turns: whether dimensions are identified by their sizes, and not by their indices.
    """
    positions: set[tuple[str, int]] = set()
    for dim, (size, axes) in enumerate(zip(row.shape, row.spec.partitions, strict=True)):
        positions.update((axis, size if turns else dim) for axis in mesh_axes(axes))
    return positions


def _keeps_dimensions(images: LaidOut, result: LaidOut) -> bool:
    """Return whether a convolution changes only the channels of its images.

    The convolution for a kernel's gradient has other dimensions than its operands.
    """
    batch, *others = map(ne, images.shape, result.shape)
    return not batch and sum(others) < 2


def _laid_out(row: LaidOut) -> str:
    return f"{row.array} ({row.decided})" if row.decided else row.array


def data_of(
    parameters: Sequence[Path], shapes: Sequence[Shape], trained: Collection[int]
) -> set[int]:
    """Find the parameters that are data, and not part of a model.

    An argument is a model if its arrays, unlike a batch's, differ in leading size. It is also a
    model if it has several arrays, and more than any trained argument. A trained argument is also a
    model, unless these two rules find models and none of these is trained. If no argument is a
    model, all arguments are data.

    Args:
        parameters: the path of each parameter, which begins with its argument.
        shapes: the shape of each parameter.
        trained: the parameters that have a counterpart among the results: a new value or a
            gradient.
    """
    by_argument = defaultdict[Hashable, list[int]](list)
    for i, path in enumerate(parameters):
        by_argument[path[0]].append(i)
    largest = max((len(by_argument[parameters[i][0]]) for i in trained), default=0)
    several: set[int] = set()
    for indices in by_argument.values():
        leading = {shapes[i][0] for i in indices if shapes[i]}
        if len(leading) > 1 or (len(indices) > 1 and len(indices) > largest):
            several.update(indices)
    models = {parameters[i][0] for i in trained}
    if several and not several & set(trained):
        models.clear()
    models |= {parameters[i][0] for i in several}
    return {i for i, path in enumerate(parameters) if path[0] not in models}
