"""Which parameters and outputs a moved array has to do with, in texts of programs."""

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
