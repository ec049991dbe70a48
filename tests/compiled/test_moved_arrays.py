"""What the collectives of compiled programs move, in texts as other compilers write them."""

from functree.compiled.data_flow import DataFlow
from functree.compiled.hlo import ArrayType, Hlo
from functree.compiled.moved_arrays import moved_arrays
from functree.compiled.uses import ParameterUses

# As TPUs write asynchronous collectives and reduce-scatters, and as GPUs write starts and ends.
OTHERS = """HloModule jit_step

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused_computation.1 (p.1: bf16[8,4]) -> (bf16[8,4], bf16[64,4], u32[]) {
  %p.1 = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(0)
  %gather.1 = bf16[64,4]{1,0} all-gather(%p.1), channel_id=7, replica_groups=[1,8]<=[8], dimensions={0}, \
frontend_attributes={chain_id="3"}
  ROOT %begin = (bf16[8,4]{1,0}, bf16[64,4]{1,0}, u32[]{:S(2)}) custom-call(%gather.1), \
custom_call_target="AsyncCollectiveStart"
}

%fused_computation.2 (p.2: bf16[8,4]) -> bf16[64,4] {
  %p.2 = bf16[8,4]{1,0} parameter(0)
  %gather.2 = bf16[64,4]{1,0} all-gather(%p.2), channel_id=7, replica_groups=[1,8]<=[8], dimensions={0}, \
frontend_attributes={chain_id="3"}
  ROOT %end = bf16[64,4]{1,0} custom-call(%p.2, %gather.2), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.5 (p.3: f32[64,4]) -> (f32[8,4], f32[8,2]) {
  %p.3 = f32[64,4]{1,0} parameter(0)
  %reduced = (f32[64,4]{1,0}, f32[64,2]{1,0}) all-reduce(%p.3, %p.3), replica_groups=[1,8]<=[8], to_apply=%add
  %one = f32[64,4]{1,0} get-tuple-element(%reduced), index=0
  %part = f32[8,4]{1,0} dynamic-slice(%one), dynamic_slice_sizes={8,4}
  %other = f32[8,2]{1,0} dynamic-slice(%one), dynamic_slice_sizes={8,2}
  ROOT %parts = (f32[8,4]{1,0}, f32[8,2]{1,0}) tuple(%part, %other)
}

ENTRY %main (x: bf16[8,4], y: f32[64,4]) -> bf16[64,4] {
  %x = bf16[8,4]{1,0} parameter(0)
  %y = f32[64,4]{1,0} parameter(1)
  %chain = (bf16[8,4]{1,0}, bf16[64,4]{1,0}, u32[]{:S(2)}) fusion(%x), kind=kCustom, calls=%fused_computation.1
  %scattered = (f32[8,4]{1,0}, f32[8,2]{1,0}) fusion(%y), kind=kCustom, calls=%all-reduce-scatter.5
  %start = ((f32[64,4]{1,0}, f32[2]{0}), (f32[64,32]{1,0}, f32[16]{0})) all-gather-start(%y, %y), \
replica_groups=[1,8]<=[8], dimensions={1}
  %done = (f32[64,32]{1,0}, f32[16]{0}) all-gather-done(%start)
  %sums = ((f32[9]{0}), f32[9]{0}) all-reduce-start(%y), replica_groups=[2,4]<=[8], to_apply=%add
  %summed = f32[9]{0} all-reduce-done(%sums)
  %permuted = f32[64,4]{1,0} collective-permute(%y), source_target_pairs={{0,1},{1,0}}
  ROOT %result = bf16[64,4]{1,0} fusion(%x), kind=kCustom, calls=%fused_computation.2
}
"""


def test_what_other_compilers_write_counts_once() -> None:
    found = [
        (moved.kind, moved.instruction.name, moved.index, moved.type)
        for moved in moved_arrays(DataFlow(Hlo(OTHERS)))
    ]
    assert found == [
        ("all-gather", "gather.1", 0, ArrayType("bf16", (64, 4))),
        ("reduce-scatter", "reduced", 0, ArrayType("f32", (8, 4))),
        ("reduce-scatter", "reduced", 1, ArrayType("f32", (8, 2))),
        ("all-gather", "start", 0, ArrayType("f32", (64, 32))),
        ("all-gather", "start", 1, ArrayType("f32", (16,))),
        ("all-reduce", "sums", 0, ArrayType("f32", (9,))),
        ("collective-permute", "permuted", 0, ArrayType("f32", (64, 4))),
    ]
    assert {moved.count for moved in moved_arrays(DataFlow(Hlo(OTHERS)))} == {1}


# As CUDA's compiler joins gradients to move them at once, and as an array is moved in a piece for
# each device.
JOINED = """HloModule jit_step

ENTRY %main (x: f32[6,4], y: f32[8], z: f32[4,4]) -> (f32[24], f32[8], f32[4,4]) {
  %x = f32[6,4]{1,0} parameter(0)
  %y = f32[8]{0} parameter(1)
  %z = f32[4,4]{1,0} parameter(2)
  %flat = f32[24]{0} bitcast(%x)
  %joined = f32[32]{0} concatenate(%flat, %y), dimensions={0}
  %start = ((f32[32]{0}), f32[32]{0}) all-reduce-start(%joined), replica_groups=[1,8]<=[8], to_apply=%add
  %done = f32[32]{0} all-reduce-done(%start)
  %first = f32[24]{0} slice(%done), slice={[0:24]}
  %second = f32[8]{0} slice(%done), slice={[24:32]}
  %one = f32[1,4]{1,0} slice(%z), slice={[0:1], [0:4]}
  %two = f32[1,4]{1,0} slice(%z), slice={[1:2], [0:4]}
  %pieces = (f32[1,4]{1,0}, f32[1,4]{1,0}) all-to-all(%one, %two), replica_groups={{0,1},{2,3},{4,5},{6,7}}
  %piece = f32[1,4]{1,0} get-tuple-element(%pieces), index=0
  ROOT %results = (f32[24]{0}, f32[8]{0}, f32[1,4]{1,0}) tuple(%first, %second, %piece)
}
"""


def test_what_is_joined_is_split() -> None:
    flow = DataFlow(Hlo(JOINED))
    found = [(moved.kind, moved.index, moved.arrays, moved.type) for moved in moved_arrays(flow)]
    assert found == [
        ("all-reduce", 0, 2, ArrayType("f32", (24,))),
        ("all-reduce", 1, 2, ArrayType("f32", (8,))),
        ("all-to-all", 0, 1, ArrayType("f32", (2, 1, 4))),
    ]
    uses = ParameterUses(flow)
    assert [sorted(uses.weights(moved)) for moved in moved_arrays(flow)] == [[0], [1], [2]]
    assert [sorted(uses.outputs(moved)) for moved in moved_arrays(flow)] == [[0], [1], [2]]
