"""What the collectives of compiled programs move, in texts as other compilers write them; their replica
groups in all spellings, against groups that are written out by numpy."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from functree.compiled.data_flow import DataFlow
from functree.compiled.hlo import ArrayType, Hlo
from functree.compiled.moved_arrays import groups_of, mesh_axes_of, moved_arrays
from functree.compiled.uses import ParameterUses
from tests.lib.meshes import SIZES

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


SPELLINGS: dict[str, tuple[tuple[int, ...], ...] | None] = {
    "{{0,1},{2,3}}": ((0, 1), (2, 3)),
    "{{0,3,2},{1}}": ((0, 3, 2), (1,)),
    "{{0,4},{4,0}}": ((0, 4), (4, 0)),
    "{}": ((0, 1, 2, 3, 4, 5, 6, 7),),
    "[2,4]<=[8]": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "[4,2]<=[2,4]T(1,0)": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "[1,8]<=[8]": ((0, 1, 2, 3, 4, 5, 6, 7),),
    "mesh['data'=2,'model'=4] {'data'}": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_0','axis_1'}": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "mesh['data'=2,'model'=4] {'model','data'}": ((0, 4, 1, 5, 2, 6, 3, 7),),
    "mesh['x'=8] {'x':(1)2}": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "mesh['x'=8] {'x':(2)2}": ((0, 2), (1, 3), (4, 6), (5, 7)),
    "mesh['x'=8] {'x':(4)2}": ((0, 1), (2, 3), (4, 5), (6, 7)),
    "mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'x'}": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "mesh['y'=2,'x'=4] {'x':(2)2,'y'}": ((0, 4, 1, 5), (2, 6, 3, 7)),
    # Not known: nothing is guessed.
    "mesh['x'=8] {'y'}": None,
    "mesh['x'=8] {'x':(1)2,'x':(4)2}": ((0, 1, 4, 5), (2, 3, 6, 7)),
    "mesh['x'=2,'y'=2], device_ids=(3,1,2,0) {'y'}": None,
    "[2,2,2]<=[8]": None,
    "all of them": None,
}


@pytest.mark.parametrize(("text", "groups"), SPELLINGS.items(), ids=range(len(SPELLINGS)))
def test_each_spelling(text: str, groups: Any) -> None:
    assert groups_of(text, 8) == groups


MESHES = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 4), min_size=1, max_size=4)


@given(MESHES, st.data())
def test_all_spellings_of_some_axes_have_these_axes(
    sizes: dict[str, int], data: st.DataObject
) -> None:
    chosen = [name for name in sizes if data.draw(st.booleans(), label=name)]
    ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    kept = [i for i, name in enumerate(sizes) if name not in chosen]
    last = [i for i, name in enumerate(sizes) if name in chosen]
    rows = (
        ids.transpose(*kept, *last)
        .reshape(-1, math.prod([sizes[name] for name in chosen]))
        .tolist()
    )
    order = ",".join(map(str, [*kept, *last]))
    shape = f"{len(rows)},{len(rows[0])}"
    axes = ",".join(f"'{name}'={size}" for name, size in sizes.items())
    for text in (
        "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in rows) + "}",
        f"[{shape}]<=[{','.join(map(str, sizes.values()))}]T({order})",
        f"mesh[{axes}] {{{','.join(map(repr, chosen))}}}",
    ):
        groups = groups_of(text, ids.size)
        assert groups == tuple(map(tuple, rows)), text
        assert mesh_axes_of(groups, sizes) == tuple(name for name in chosen if sizes[name] > 1), (
            text
        )


# Groups, or the pairs of a permute, and the mesh axes that vary in them.
VARYING: list[tuple[Any, dict[str, int], tuple[str, ...] | None]] = [
    (((0, 2), (1, 3), (4, 6), (5, 7)), {"data": 8}, ("data",)),  # a part of an axis
    (((0, 1), (2, 3)), SIZES, ("model",)),
    (((0, 4), (4, 0), (1, 5), (5, 1)), SIZES, ("data",)),
    (((3, 4),), SIZES, ("data", "model")),
    ((), SIZES, ()),
    (((3,), ()), SIZES, ()),
    (((0, 8),), SIZES, None),  # a position that the mesh does not have
]


@pytest.mark.parametrize(("groups", "sizes", "axes"), VARYING)
def test_mesh_axes_that_vary(groups: Any, sizes: dict[str, int], axes: Any) -> None:
    assert mesh_axes_of(groups, sizes) == axes
