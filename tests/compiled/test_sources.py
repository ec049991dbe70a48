"""Lines of source, and phases, of instructions of compiled programs."""

import sys
from pathlib import Path

import equinox as eqx
import pytest

import functree as ft
from functree.compiled.data_flow import DataFlow
from functree.compiled.hlo import Hlo
from functree.compiled.moved_arrays import moved_arrays
from functree.compiled.provenance import Phases, split
from functree.compiled.sources import Sources

HOME = Path(ft.__file__).parent
# Frames from outside to inside: the user's script, functree's machinery, a layer, what the layers
# share, a package.
TEXT = f"""HloModule jit_step, is_scheduled=true

FileNames
1 "/home/user/train.py"
2 "{HOME / "calls" / "function.py"}"
3 "{HOME / "nn" / "mlp.py"}"
4 "{HOME / "nn" / "weights.py"}"
5 "/venv/lib/python3.11/site-packages/equinox/_module.py"

FunctionNames
1 "<module>"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=53 end_line=53 column=14 end_column=14}}
2 {{file_name_id=2 function_name_id=1 line=83 end_line=83 column=15 end_column=15}}
3 {{file_name_id=3 function_name_id=1 line=72 end_line=72 column=15 end_column=15}}
4 {{file_name_id=4 function_name_id=1 line=29 end_line=29 column=15 end_column=15}}
5 {{file_name_id=5 function_name_id=1 line=9 end_line=9 column=15 end_column=15}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}
3 {{file_location_id=3 parent_frame_id=3}}
4 {{file_location_id=4 parent_frame_id=4}}
5 {{file_location_id=5 parent_frame_id=3}}
6 {{file_location_id=5}}


ENTRY %main (x: f32[4]) -> f32[4] {{
  ROOT %x = f32[4]{{0}} parameter(0), metadata={{op_name="x" stack_frame_id=4}}
}}
"""
LINES = {
    1: "/home/user/train.py:53",
    2: "/home/user/train.py:53",  # not where functree calls it
    3: f"{HOME / 'nn' / 'mlp.py'}:72",
    4: f"{HOME / 'nn' / 'mlp.py'}:72",  # not the product that all layers share
    5: "/home/user/train.py:53",  # not inside of a package
    6: "/venv/lib/python3.11/site-packages/equinox/_module.py:9",  # if there is nothing else
    7: None,
}


@pytest.mark.parametrize("frame", LINES)
def test_the_line_of_a_frame(frame: int) -> None:
    assert Sources(TEXT).of_frame(frame) == LINES[frame]


LAYERS = [
    one for one in vars(ft.nn).values() if isinstance(one, type) and issubclass(one, eqx.Module)
]


@pytest.mark.parametrize("layer", LAYERS)
def test_lines_of_every_layer_are_named(layer: type) -> None:
    file = sys.modules[layer.__module__].__file__
    text = TEXT.replace(str(HOME / "nn" / "weights.py"), str(file))
    assert Sources(text).of_frame(4) == f"{file}:29"


def test_the_line_of_an_instruction() -> None:
    instruction = Hlo(TEXT).instructions["x"]
    assert Sources(TEXT).line(instruction) == LINES[4]
    assert Sources("HloModule jit_step\n\n").line(instruction) is None  # a text without tables


NAMES = {
    "jit(f)/mul": ["jit(f)/mul"],
    "jit(f)/jvp(g)/(a:b)": ["jit(f)/jvp(g)/a", "jit(f)/jvp(g)/b"],
    "jit(f)/(transpose(jvp())/dot:jvp(jit(take))/gather)": [
        "jit(f)/transpose(jvp())/dot",
        "jit(f)/jvp(jit(take))/gather",
    ],
    "(ts.a:ts.b:ts.c)": ["ts.a", "ts.b", "ts.c"],
    "a:b": ["a:b"],  # the name of a user
    "": [""],
}


@pytest.mark.parametrize("name", NAMES)
def test_combined_names(name: str) -> None:
    assert split(name) == NAMES[name]


PHASES = """HloModule jit_step

ENTRY %main (x: f32[4], y: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %zero = f32[] constant(0), metadata={op_name="jit(step)/transpose(jvp())/mul"}
  %filled = f32[4]{0} broadcast(%zero), dimensions={}
  %y = f32[4]{0} parameter(1)
  %forward = f32[4]{0} all-reduce(%x), replica_groups={}, metadata={op_name="jit(step)/jvp()/dot"}
  %grad = f32[4]{0} negate(%forward), metadata={op_name="jit(step)/transpose(jvp())/neg"}
  %backward = f32[4]{0} all-reduce(%grad), replica_groups={}
  %again = f32[4]{0} all-reduce(%y), replica_groups={}, \
metadata={op_name="jit(step)/transpose(jvp())/checkpoint/rematted_computation/dot"}
  %square = f32[4]{0} multiply(%backward, %backward), metadata={op_name="jit(step)/mul"}
  %norm = f32[4]{0} all-reduce(%square), replica_groups={}, metadata={op_name="jit(step)/reduce_sum"}
  %early = f32[4]{0} all-reduce(%filled), replica_groups={}, metadata={op_name="jit(step)/iota"}
  %lost = f32[4]{0} all-reduce(%y), replica_groups={}
  %both = (f32[4]{0}, f32[4]{0}) all-reduce(%forward, %grad), replica_groups={}, \
metadata={op_name="jit(step)/(jvp()/dot:transpose(jvp())/neg)"}
  ROOT %sum = f32[4]{0} add(%norm, %early)
}
"""


def test_phases() -> None:
    flow = DataFlow(Hlo(PHASES))
    phases = Phases(flow, lambda moved: [])
    assert [
        (moved.instruction.name, moved.index, phases.phase(moved)) for moved in moved_arrays(flow)
    ] == [
        ("forward", 0, "forward"),
        ("backward", 0, "backward"),  # named by what it moves
        ("again", 0, "recompute"),
        ("norm", 0, "update"),
        ("early", 0, "forward"),  # a constant is of no phase, whatever its name says
        ("lost", 0, None),
        ("both", 0, "forward"),
        ("both", 1, "backward"),
    ]
