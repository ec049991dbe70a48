"""Which parameters and outputs a moved array has to do with, in texts of programs."""

import pytest

from functree.compiled.data_flow import DataFlow
from functree.compiled.hlo import Hlo
from functree.compiled.moved_arrays import MovedArray, moved_arrays
from functree.compiled.uses import ParameterUses


def multiplied(uses: ParameterUses, moved: MovedArray) -> set[int]:
    """The parameters that were multiplied, or looked up in, to make a moved array."""
    return {i for product in uses.made_by(moved) for i in product.parameters}


# As a TPU multiplies by a weight whose shards travel around a ring: fetched in pieces, and joined
# by padding.
RING = """HloModule jit_step

%joining (a: f32[2,4], b: f32[2,4]) -> f32[4,4] {
  %a = f32[2,4]{1,0} parameter(0)
  %b = f32[2,4]{1,0} parameter(1)
  %least = f32[] constant(-inf)
  %upper = f32[4,4]{1,0} pad(%a, %least), padding=0_2x0_0
  %lower = f32[4,4]{1,0} pad(%b, %least), padding=2_0x0_0
  %wide = f32[4,4]{1,0} convert(%upper)
  ROOT %whole = f32[4,4]{1,0} maximum(%wide, %lower)
}

ENTRY %main (w: f32[2,4], x: f32[8,4], v: f32[8,8]) -> f32[8,4] {
  %w = f32[2,4]{1,0} parameter(0)
  %x = f32[8,4]{1,0} parameter(1)
  %v = f32[8,8]{1,0} parameter(2)
  %one.start = ((f32[2,4]{1,0}), f32[1,4]{1,0}, s32[]) slice-start(%w), slice={[0:1], [0:4]}
  %one = f32[1,4]{1,0} slice-done(%one.start)
  %two.start = ((f32[2,4]{1,0}), f32[1,4]{1,0}, s32[]) slice-start(%w), slice={[1:2], [0:4]}
  %two = f32[1,4]{1,0} slice-done(%two.start)
  %fetched = f32[2,4]{1,0} custom-call(%one, %two), custom_call_target="ConcatBitcast"
  %passed = f32[2,4]{1,0} collective-permute(%fetched), source_target_pairs={{0,1},{1,0}}
  %whole = f32[4,4]{1,0} fusion(%fetched, %passed), kind=kLoop, calls=%joining
  %product = f32[8,4]{1,0} dot(%x, %whole), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %sum = f32[8,4]{1,0} all-reduce(%product), replica_groups=[1,8]<=[8], to_apply=%add
  %sorted = f32[8,4]{1,0} sort(%sum), dimensions={0}, to_apply=%less
  %gathered = f32[8,4]{1,0} all-gather(%sorted), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %result = f32[8,4]{1,0} dot(%v, %gathered), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_a_weight_that_travels_around_a_ring() -> None:
    flow = DataFlow(Hlo(RING))
    uses, moved = ParameterUses(flow), {one.kind: one for one in moved_arrays(flow)}
    assert uses.weights(moved["collective-permute"]) == {0}
    assert multiplied(uses, moved["all-reduce"]) == {0, 1} and not uses.weights(moved["all-reduce"])
    # What is sorted belongs to nothing before it, and is multiplied by a parameter behind it.
    gathered = moved["all-gather"]
    assert (
        not uses.weights(gathered)
        and not multiplied(uses, gathered)
        and uses.factors(gathered) == {2}
    )
    # The loss, too, is multiplied by what follows from it: only what is moved itself counts, and
    # not a sum of it.
    assert not uses.factors(moved["all-reduce"])


# A scatter as some compilers write it: a loop over the rows, each added where its token says.
LOOP = """HloModule jit_step

%less (a: (s32[], f32[16,4], f32[8,4], s32[8])) -> pred[] {
  %a = (s32[], f32[16,4]{1,0}, f32[8,4]{1,0}, s32[8]{0}) parameter(0)
  %counted = s32[] get-tuple-element(%a), index=0
  %end = s32[] constant(8)
  ROOT %on = pred[] compare(%counted, %end), direction=LT
}

%adding (b: (s32[], f32[16,4], f32[8,4], s32[8])) -> (s32[], f32[16,4], f32[8,4], s32[8]) {
  %b = (s32[], f32[16,4]{1,0}, f32[8,4]{1,0}, s32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %sums = f32[16,4]{1,0} get-tuple-element(%b), index=1
  %rows = f32[8,4]{1,0} get-tuple-element(%b), index=2
  %tokens = s32[8]{0} get-tuple-element(%b), index=3
  %zero = s32[] constant(0)
  %one = s32[] constant(1)
  %token = s32[1]{0} dynamic-slice(%tokens, %i), dynamic_slice_sizes={1}
  %place = s32[] bitcast(%token)
  %row = f32[1,4]{1,0} dynamic-slice(%rows, %i, %zero), dynamic_slice_sizes={1,4}
  %old = f32[1,4]{1,0} dynamic-slice(%sums, PLACE, %zero), dynamic_slice_sizes={1,4}
  %sum = f32[1,4]{1,0} add(%old, %row)
  %new = f32[16,4]{1,0} dynamic-update-slice(%sums, %sum, PLACE, %zero)
  %next = s32[] add(%i, %one)
  ROOT %state = (s32[], f32[16,4]{1,0}, f32[8,4]{1,0}, s32[8]{0}) tuple(%next, %new, %rows, %tokens)
}

ENTRY %main (table: f32[16,4], grads: f32[8,4], ids: s32[8]) -> f32[16,4] {
  %table = f32[16,4]{1,0} parameter(0)
  %grads = f32[8,4]{1,0} parameter(1)
  %ids = s32[8]{0} parameter(2)
  %nothing = f32[] constant(0)
  %first = s32[] constant(0)
  %zeros = f32[16,4]{1,0} broadcast(%nothing), dimensions={}
  %activations = f32[8,4]{1,0} all-reduce(%grads), replica_groups={}
  %start = (s32[], f32[16,4]{1,0}, f32[8,4]{1,0}, s32[8]{0}) tuple(%first, %zeros, %activations, %ids)
  %loop = (s32[], f32[16,4]{1,0}, f32[8,4]{1,0}, s32[8]{0}) while(%start), condition=%less, body=%adding
  %gradient = f32[16,4]{1,0} get-tuple-element(%loop), index=1
  %whole = f32[16,4]{1,0} all-reduce(%gradient), replica_groups={}
  ROOT %updated = f32[16,4]{1,0} add(%table, %whole)
}
"""


@pytest.mark.parametrize(
    ("place", "outputs"), [("%place", set()), ("%i", {0})], ids=["where it says", "in order"]
)
def test_a_place_that_is_read_from_an_array_is_a_lookup(place: str, outputs: set[int]) -> None:
    """What is added at such places is another array; in the order of a loop it is the rows of the
    same one."""
    flow = DataFlow(Hlo(LOOP.replace("PLACE", place)))
    uses, moved = ParameterUses(flow), {one.instruction.name: one for one in moved_arrays(flow)}
    assert uses.outputs(moved["activations"]) == outputs and uses.outputs(moved["whole"]) == {0}
