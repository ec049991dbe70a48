"""Instructions as XLA's compilers write them, and as they are read; and that no line of a program
is missed."""

import re
from typing import Any

import pytest

from functree.compiled.hlo import ArrayType, Hlo, Instruction
from tests.lib.training import training_step

# Of programs for a CPU, a TPU and a GPU.
TEXT = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}, num_partitions=8

FileNames
1 "/a/train = f(x).py"

%add.clone (x.1: f32[], y.1: f32[]) -> f32[] {
  %x.1 = f32[] parameter(0)
  %y.1 = f32[] parameter(1)
  ROOT %add.2 = f32[] add(%x.1, %y.1), metadata={op_name="add"}
}

%body.5_spmd (arg: (s32[], /*index=1*/f32[8])) -> (s32[], f32[8]) {
  %arg = (s32[]{:T(128)}, /*index=1*/f32[8]{0:T(8,128)(2,1)S(1)}) parameter(0)
  %get-tuple-element.1 = f32[8]{0} get-tuple-element(%arg), index=1
  %constant.7 = s32[] constant(-3)
  ROOT %all-reduce.25 = (f32[8,32]{1,0:T(8,128)S(1)}, bf16[4]{0}) all-reduce(%get-tuple-element.1, /*index=1*/%arg), \
channel_id=6, replica_groups=mesh['data'=2,'model'=4] {'data','model'}, use_global_device_ids=true, \
to_apply=%add.clone, frontend_attributes={chain_id="3"}, metadata={op_name="jit(step)/dot, calls=%no (\\"q\\")" \
stack_frame_id=17}, backend_config={"known_trip_count":{"n":"3"},"a":[1,{"b":"}"}]}
}

ENTRY %main.30_spmd (param.3: f32[8]) -> pred[] {
  %param.3 = f32[8]{0} parameter(0), sharding={devices=[8,1]<=[8]}, metadata={op_name="x"}
  %start = ((f32[2]{0}), f32[16]{0}) all-gather-start(%param.3), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
  %while.1 = (s32[], f32[8]{0}) while(%start), condition=%add.clone, body=%body.5_spmd
  %conditional = f32[] conditional(%while.1, %start), branch_computations={%add.clone, %body.5_spmd}
  %sum = f32[] all-reduce(%param.3), channel_id=8, replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}, \
use_global_device_ids=true
  ROOT compare.1 = pred[] compare(%param.3, %param.3), direction=LT
}
"""


def of(name: str) -> Instruction:
    return Hlo(TEXT).instructions[name]


def test_computations() -> None:
    hlo = Hlo(TEXT)
    assert (
        list(hlo.computations) == ["add.clone", "body.5_spmd", "main.30_spmd"]
        and hlo.entry == "main.30_spmd"
    )
    assert [one.name for one in hlo.computations["main.30_spmd"]] == [
        "param.3", "start", "while.1", "conditional", "sum", "compare.1",
    ]  # fmt: skip
    roots = {name: root.name for name, root in hlo.roots.items()}
    assert roots == {
        "add.clone": "add.2",
        "body.5_spmd": "all-reduce.25",
        "main.30_spmd": "compare.1",
    }
    assert {one.computation for one in hlo.computations["body.5_spmd"]} == {"body.5_spmd"}


# What is read of an instruction, and what it is.
READ: list[tuple[str, str, Any]] = [
    ("all-reduce.25", "opcode", "all-reduce"),
    ("all-reduce.25", "operands", ["get-tuple-element.1", "arg"]),
    ("all-reduce.25", "arrays", (ArrayType("f32", (8, 32)), ArrayType("bf16", (4,)))),
    ("all-reduce.25", "computations", ["add.clone"]),
    ("start", "arrays", (ArrayType("f32", (2,)), ArrayType("f32", (16,)))),
    ("arg", "arrays", (ArrayType("s32", ()), ArrayType("f32", (8,)))),
    ("while.1", "computations", ["add.clone", "body.5_spmd"]),
    ("conditional", "computations", ["add.clone", "body.5_spmd"]),
    ("conditional", "operands", ["while.1", "start"]),
    ("constant.7", "argument", "-3"),
    ("y.1", "argument", "1"),
]


@pytest.mark.parametrize(("name", "what", "expected"), READ, ids=range(len(READ)))
def test_what_an_instruction_says(name: str, what: str, expected: Any) -> None:
    assert getattr(of(name), what) == expected


ATTRIBUTES: list[tuple[str, str, str | None]] = [
    ("all-reduce.25", "channel_id", "6"),
    ("all-reduce.25", "replica_groups", "mesh['data'=2,'model'=4] {'data','model'}"),
    ("all-reduce.25", "to_apply", "%add.clone"),
    ("all-reduce.25", "frontend_attributes", '{chain_id="3"}'),
    ("all-reduce.25", "backend_config", '{"known_trip_count":{"n":"3"},"a":[1,{"b":"}"}]}'),
    ("all-reduce.25", "calls", None),  # only a part of the name of the operation
    ("start", "replica_groups", "[4,2]<=[2,4]T(1,0)"),
    ("start", "dimensions", "{0}"),
    ("sum", "replica_groups", "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}"),
    ("sum", "use_global_device_ids", "true"),
    ("compare.1", "direction", "LT"),
    ("compare.1", "index", None),
]


@pytest.mark.parametrize(("name", "attribute", "text"), ATTRIBUTES, ids=range(len(ATTRIBUTES)))
def test_attributes(name: str, attribute: str, text: str | None) -> None:
    assert of(name).attribute(attribute) == text


def test_metadata() -> None:
    one = of("all-reduce.25")
    assert (
        one.metadata("op_name") == r"jit(step)/dot, calls=%no (\"q\")"
        and one.metadata("stack_frame_id") == "17"
    )
    assert one.metadata("source_file") is None and of("start").metadata("op_name") is None
    assert (
        of("while.1").called("body") == "body.5_spmd"
        and of("while.1").called("condition") == "add.clone"
    )


BYTES = {
    ("f32", (8, 32)): 1024, ("bf16", (3,)): 6, ("pred", (5,)): 5, ("s4", (3,)): 2, ("u8", ()): 1, ("c64", (2,)): 16,
    ("f8e4m3fn", (7,)): 7, ("s32", (0, 4)): 0, ("token", ()): 0,
}  # fmt: skip


@pytest.mark.parametrize(("type_", "expected"), BYTES.items(), ids=str)
def test_bytes(type_: tuple[str, tuple[int, ...]], expected: int) -> None:
    assert ArrayType(*type_).bytes == expected


def test_no_instruction_of_a_program_is_missed() -> None:
    text = training_step("FSDP+TP")[0].as_text()
    hlo = Hlo(text)
    lines = re.findall(r"^ +(?:ROOT )?%?\S+ = ", text, re.MULTILINE)
    assert len(hlo.instructions) == len(lines) > 500
    assert (
        len(hlo.computations)
        == len(re.findall(r"^(?:ENTRY )?%?\S+ \(.*\{$", text, re.MULTILINE))
        == len(hlo.roots)
    )
    for one in hlo.instructions.values():
        assert all(name in hlo.instructions for name in one.operands), one
        assert all(name in hlo.computations for name in one.computations), one
