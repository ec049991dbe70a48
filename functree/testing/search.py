"""`Search` finds the first operation whose values differ between one device and a mesh."""

import itertools
from dataclasses import dataclass

import numpy as np

from functree.devices.meshes import axes_text, mesh_axes, of_rank, spec_text
from functree.testing.checksums import is_inexact
from functree.testing.evidence import Checksums, Values
from functree.testing.intermediates import manual_axes
from functree.testing.relations import UNKNOWN, Kind, Relation, agree, relate
from functree.testing.scopes import Scope
from functree.testing.steps import Number, Step

_SUMS = frozenset({"psum", "psum2", "psum_invariant"})


@dataclass(frozen=True, eq=False)
class Finding:
    """The first operation whose values differ.

    Attributes:
        scope: the body that contains the operation.
        index: its index in the body.
        result: the index of the result that differs.
        relation: the relation between the parts on devices and the value on one device.
        note: the reason, in words; empty if it is unknown.
        only: `"mesh"` or `"device"` if only one of the programs has the operation.
    """

    scope: Scope
    index: int
    result: int
    relation: Relation
    note: str = ""
    only: str = ""

    @property
    def step(self) -> Step:
        """The step of the operation."""
        if self.only == "device":
            return self.scope.pairs.left.steps[self.index]
        return self.scope.step(self.index)


class Search:
    """A search for the first difference.

    Outside shard_maps, each value is whole, so the first value that differs is the answer. Inside
    shard_maps, some values may differ legitimately, such as the terms of a sum, a device's index or
    a local maximum. There, the search traces a wrong result back to a step with correct inputs.

    Args:
        sums: the checksums of both programs.
        values: complete values of some steps, which are compared instead of their checksums.
    """

    def __init__(self, sums: Checksums, values: Values | None = None):
        self._left, self._right = sums.left, sums.right
        self._compared = (values or sums).compared

    def first(self, scope: Scope) -> Finding | None:
        """Return the first difference in a body outside shard_maps, or None if there is none."""
        for _, j in scope.pairs.steps:
            for result, value in enumerate(scope.step(j).outs):
                differs = self._relation(scope, j, result).kind is Kind.OTHER
                if differs or self._copies(scope, j, result):
                    return self.explained(scope, value)
        for one, other in zip(scope.pairs.left.outputs, scope.pairs.right.outputs, strict=False):
            finding = self._wrong_output(scope, one, other)
            if finding is not None:
                return finding
        return None

    def _relation(self, scope: Scope, j: int, result: int) -> Relation:
        """Return the relation between the parts of a result and the value on one device."""
        compared = self._compared(scope, j, result)
        return UNKNOWN if compared is None else relate(*compared, scope.axes)

    def _of_value(self, scope: Scope, value: Number) -> Relation:
        """Return the relation for a value of the body on the mesh."""
        made = scope.pairs.right.makers.get(value)
        return UNKNOWN if made is None else self._relation(scope, *made)

    def _wrong_output(self, scope: Scope, one: Number, other: Number) -> Finding | None:
        """Return the finding for a wrong output whose steps are not paired, or None."""
        maker, its = scope.pairs.left.makers.get(one), scope.pairs.right.makers.get(other)
        if maker is None or its is None:
            return None
        kind = scope.pairs.left.steps[maker[0]].types[maker[1]]
        if kind.shape != scope.step(its[0]).types[its[1]].shape:
            return self.explained(scope, other)
        left = scope.left.of(self._left, *maker)
        right = scope.right.of(self._right, *its)
        if scope.pairs.right_of.get(maker[0]) == its[0] or left is None or right is None:
            return None
        whole, size = left
        # The output's dependence on rounding is unknown, so the margin is wide.
        margin = 1e-3 * size if is_inexact(whole.dtype) else np.zeros(whole.shape)
        if agree(whole, right, margin):
            return None
        return self.explained(scope, other)

    # From a value that differs to the operation at fault

    def explained(self, scope: Scope, value: Number) -> Finding | None:
        """Return the finding for a value of the body on the mesh that differs."""
        index, result, unpaired = self._origin(scope, value)
        i = scope.pairs.left_of.get(index)
        only_left = self._only_left(scope, i)
        if unpaired or only_left is not None or i is None:
            return self._structural(scope, index, result, unpaired, only_left)
        inner = self._inside(scope, i, index, result)
        if inner is not None:
            return inner
        relation = self._relation(scope, index, result)
        return Finding(scope, index, result, relation, self._note(scope, index, relation))

    def _origin(self, scope: Scope, value: Number) -> tuple[int, int, set[int]]:
        """Find the first step with correct inputs that a value depends on, and the step's result.

        Also return the unpaired steps on the way to it.
        """
        found: list[tuple[bool, int, int, set[int]]] = []
        seen, left = set[Number](), [value]
        while left:
            one = left.pop()
            if one in seen:
                continue
            seen.add(one)
            index, result = scope.pairs.right.makers[one]
            causes, unpaired = self._causes(scope, scope.step(index))
            left.extend(causes)
            if not causes:
                # Terms of a sum are not wrong by themselves, so other values come first.
                are_terms = bool(self._relation(scope, index, result).missing)
                found.append((are_terms, index, result, unpaired))
        if found:
            return min(found, key=lambda one: one[:3])[1:]
        # If each cause has another cause, only the value itself is left.
        return *scope.pairs.right.makers[value], set()

    def _causes(self, scope: Scope, step: Step) -> tuple[set[Number], set[int]]:
        """Find the wrong inputs of a step, looking through values that cannot be compared.

        Also return the unpaired steps on the way.
        """
        body, causes, unpaired = scope.pairs.right, set[Number](), set[int]()
        seen, left = set[tuple[Number, bool]](), [(value, step) for value in step.ins]
        while left:
            value, taker = left.pop()
            summed = taker.name in _SUMS
            # A value that depends on no input may depend on the device's index, and then
            # differs between devices.
            if (value, summed) in seen or value not in body.makers or value not in body.dependent:
                continue
            seen.add((value, summed))
            index, result = body.makers[value]
            i = scope.pairs.left_of.get(index)
            known = self._relation(scope, index, result)
            if known.kind is Kind.UNKNOWN and not _misshapen(scope, i, index, result):
                if i is None and not scope.step(index).places:
                    unpaired.add(index)
                left.extend((one, scope.step(index)) for one in scope.step(index).ins)
            # The inputs of a sum over devices may be terms, which do not make the sum wrong.
            elif known.kind is not Kind.SAME and not (known.missing and summed):
                causes.add(value)
        return causes, unpaired

    def _only_left(self, scope: Scope, i: int | None) -> int | None:
        """Return the first step that only the left program has and on which step `i` depends.

        Return None if there is no such step.
        """
        if i is None:
            return None
        body, found = scope.pairs.left, list[int]()
        seen, left = set[Number](), list(body.steps[i].ins)
        while left:
            value = left.pop()
            if value in seen or value not in body.makers:
                continue
            seen.add(value)
            index, result = body.makers[value]
            j = scope.pairs.right_of.get(index)
            if j is not None:
                if self._relation(scope, j, result).kind is not Kind.UNKNOWN:
                    continue
            elif not body.steps[index].places:
                found.append(index)
            left.extend(body.steps[index].ins)
        return min(found, default=None)

    def _structural(
        self, scope: Scope, index: int, result: int, unpaired: set[int], only_left: int | None
    ) -> Finding:
        """Return the finding for a place where the programs have different operations."""
        if index not in scope.pairs.left_of:
            unpaired = {*unpaired, index}
        if not unpaired and only_left is not None:
            return Finding(scope, only_left, 0, UNKNOWN, only="device")
        first = min(unpaired)
        return Finding(scope, first, result if first == index else 0, UNKNOWN, only="mesh")

    def _note(self, scope: Scope, j: int, relation: Relation) -> str:
        """Explain a difference, or return an empty string."""
        step = scope.step(j)
        if relation.missing:
            return f"its {relation.missing} over {axes_text(relation.over)} is missing"
        if not scope.axes:
            return ""
        if step.name in _SUMS:
            return self._summed_twice(scope, step)
        if step.draws:
            return "each device draws its own random numbers"
        if any(value not in scope.pairs.right.dependent for value in step.ins):
            return "it depends on the index of the device"
        return ""

    def _summed_twice(self, scope: Scope, step: Step) -> str:
        """Explain a sum of values that are equal along its mesh axes, or terms of another sum."""
        relation = self._of_value(scope, step.ins[0])
        axes = [axis for axis in step.params["axes"] if axis in scope.axes]
        cut = set(itertools.chain(*relation.assignment))
        if relation.kind is Kind.SAME and cut.isdisjoint(axes):
            over = axes_text(axes)
            return f"it sums over {over}, but its input already has equal values along {over}"
        if relation.missing:
            terms = f"terms of a {relation.missing} over {axes_text(relation.over)}"
            return f"it sums over {axes_text(axes)}, but its inputs are {terms}"
        return ""

    # Inside a step's bodies

    def _inside(self, scope: Scope, i: int, j: int, result: int) -> Finding | None:
        """Return the finding in the bodies of a step, or None if the step itself is at fault."""
        if (i, j) not in scope.pairs.inner:
            return None
        for inner in scope.runs(i, j, self._left, self._right):
            if scope.step(j).name == "shard_map":
                return self._in_shard_map(scope, inner, j, result)
            finding = self._in_body(inner)
            if finding is not None:
                return finding
        return None

    def _in_body(self, scope: Scope) -> Finding | None:
        """Return the finding in an inner body."""
        if not scope.axes:
            return self.first(scope)
        for value in scope.pairs.right.outputs:
            relation = self._of_value(scope, value)
            if relation.kind not in (Kind.SAME, Kind.UNKNOWN):
                return self.explained(scope, value)
        return None

    def _in_shard_map(self, scope: Scope, inner: Scope, j: int, result: int) -> Finding | None:
        value = inner.pairs.right.outputs[result]
        if value not in inner.pairs.right.makers:
            return None
        spec = scope.step(j).params["out_specs"][result]
        relation = self._of_value(inner, value)
        if relation.kind is not Kind.SAME:
            return self.explained(inner, value)
        wanted = spec_text(of_rank(spec, len(relation.assignment)))
        note = f"it is correct in the body, sharded {relation}, but `out_specs` has {wanted}"
        if str(relation) == wanted:
            note = f"its copies along {axes_text(self._copies(scope, j, result))} differ"
        return Finding(scope, j, result, relation, note)

    def _copies(self, scope: Scope, j: int, result: int) -> tuple[str, ...]:
        """Return the mesh axes along which copies of a shard_map's result differ."""
        step = scope.step(j)
        if step.name != "shard_map":
            return ()
        body = step.bodies[0]
        made = body.makers.get(body.outputs[result])
        if made is None:
            return ()
        record = scope.right.of(self._right, j, 0, *made)
        if record is None:
            return ()
        sizes = step.params["mesh"].shape
        named = set(itertools.chain(*map(mesh_axes, step.params["out_specs"][result])))
        found: list[str] = []
        for dim, axis in enumerate(manual_axes(step), start=len(scope.axes)):
            first = np.take(record, [0], dim)
            margin = 1e-4 * abs(np.nan_to_num(record)).max(initial=0)
            copies = np.broadcast_to(first, record.shape)
            if axis not in named and sizes[axis] > 1 and not agree(copies, record, margin):
                found.append(axis)
        return tuple(found)


def _misshapen(scope: Scope, i: int | None, j: int, result: int) -> bool:
    """Return whether a shard_map's result has a different shape than on one device."""
    step = scope.step(j)
    if i is None or scope.axes or step.name != "shard_map":
        return False
    one, other = scope.pairs.left.steps[i].types[result], step.types[result]
    # Residuals for its backward pass exist once for each device.
    spec = step.params["out_specs"][result]
    if len(spec) == 1 and set(mesh_axes(spec[0])) == set(manual_axes(step)):
        return False
    return one.shape != other.shape
