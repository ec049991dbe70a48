"""Lines of source, and phases, of instructions of compiled programs."""

import sys
from pathlib import Path

import equinox as eqx
import jax
import pytest

import functree as ft
from functree.compiled.data_flow import DataFlow
from functree.compiled.hlo import Hlo
from functree.compiled.moved_arrays import moved_arrays
from functree.compiled.provenance import Provenance, Shapes, split
from functree.compiled.sources import Lines, Sources
from tests.lib.meshes import MESH

HOME = Path(ft.__file__).parent
PACKAGES = "/venv/lib/python3.11/site-packages"
# From outside to inside: the user's script, functree's machinery, a layer of functree, what its
# layers share, and then code of installed packages.
FILES = [
    "/home/user/train.py",
    f"{HOME / 'calls' / 'function.py'}",
    f"{HOME / 'nn' / 'mlp.py'}",
    f"{HOME / 'nn' / 'weights.py'}",
    f"{PACKAGES}/equinox/_module.py",
    f"{PACKAGES}/equinox/nn/_linear.py",
    f"{PACKAGES}/equimo/layers/mlp.py",
    f"{PACKAGES}/jax/_src/numpy/lax_numpy.py",
    f"{PACKAGES}/optax/_src/transform.py",
    "/home/user/layers.py",
]


def text_of(*files: str) -> str:
    """The text of a program with one instruction, whose frames are line 1 of the first file, line 2
    of the second one inside of it, and so on."""
    names = "\n".join(f'{i} "{file}"' for i, file in enumerate(files, 1))
    places = "\n".join(
        f"{i} {{file_name_id={i} function_name_id=1 line={i} end_line={i} column=1 end_column=2}}"
        for i in range(1, len(files) + 1)
    )
    # The number of the frame around a frame is printed one too high.
    frames = "\n".join(
        f"{i} {{file_location_id={i} parent_frame_id={i}}}" for i in range(1, len(files) + 1)
    )
    return f"""HloModule jit_step, is_scheduled=true

FileNames
{names}

FunctionNames
1 "<module>"

FileLocations
{places}

StackFrames
{frames}


ENTRY %main (x: f32[4]) -> f32[4] {{
  ROOT %x = f32[4]{{0}} parameter(0), metadata={{op_name="x" stack_frame_id={len(files)}}}
}}
"""


USER, MACHINERY, MLP, SHARED, MODULE, LINEAR, FOREIGN, NUMPY, OPTAX, OWN_LAYER = FILES
# Files from outside to inside: the file of the source, and the file that calls it.
CHOSEN = {
    "the user's code": ([USER], USER, None),
    "the innermost of it": ([USER, OWN_LAYER], OWN_LAYER, None),
    "not where functree calls it": ([USER, MACHINERY], USER, None),
    "a layer of functree": ([USER, MACHINERY, MLP], MLP, USER),
    "not the product that its layers share": ([USER, MLP, SHARED], MLP, USER),
    "not inside of a transform of Equinox": ([USER, MODULE], USER, None),
    "not inside of a layer of Equinox": ([USER, MODULE, LINEAR, NUMPY], USER, None),
    "a package that calls one": ([USER, MODULE, FOREIGN, LINEAR, NUMPY], FOREIGN, USER),
    "another package": ([USER, MACHINERY, FOREIGN, NUMPY], FOREIGN, USER),
    "not inside of an optimizer": ([USER, OPTAX], USER, None),
    "the user's layer in a package": ([USER, FOREIGN, OWN_LAYER, NUMPY], OWN_LAYER, None),
    "a package in the user's layer": ([USER, OWN_LAYER, FOREIGN], FOREIGN, OWN_LAYER),
    "a package that nobody is known to call": ([MACHINERY, FOREIGN], FOREIGN, None),
    "JAX, if there is nothing else": ([MACHINERY, NUMPY], NUMPY, None),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_the_lines_of_a_frame(case: str) -> None:
    files, source, called_from = CHOSEN[case]

    def line(file: str | None) -> str | None:
        return None if file is None else f"{file}:{files.index(file) + 1}"

    lines = Sources(text_of(*files)).of_frame(len(files))
    assert lines is not None and (lines.source, lines.called_from) == (
        line(source),
        line(called_from),
    )


LAYERS = [
    one for one in vars(ft.nn).values() if isinstance(one, type) and issubclass(one, eqx.Module)
]


@pytest.mark.parametrize("layer", LAYERS)
def test_lines_of_every_layer_are_named(layer: type) -> None:
    file = str(sys.modules[layer.__module__].__file__)
    assert Sources(text_of(USER, file)).of_frame(2) == Lines(f"{file}:2", f"{USER}:1")


def test_the_lines_of_an_instruction() -> None:
    text = text_of(USER, MLP)
    instruction = Hlo(text).instructions["x"]
    assert Sources(text).of(instruction) == Lines(f"{MLP}:2", f"{USER}:1")
    assert Sources(text).of_frame(3) is None
    assert Sources("HloModule jit_step\n\n").of(instruction) is None  # a text without tables


@pytest.mark.usefixtures("compiles_anew")
def test_a_model_of_equinox() -> None:
    """Each of its collectives comes from the line that calls the model."""

    def loss(model: eqx.nn.MLP, x: jax.Array) -> jax.Array:
        y = jax.vmap(model)(x)
        return (y**2).mean()

    model = eqx.filter_eval_shape(eqx.nn.MLP, 64, 64, 256, 1, key=jax.random.key(0))
    layout = ft.FSDP("model", min_size=1024)
    gradients = ft.jit(ft.value_and_grad(loss), in_shardings=(layout, ft.P("data")), mesh=MESH)
    ledger = gradients.lower(model, jax.ShapeDtypeStruct((16, 64), "float32")).compile().ledger()
    line = loss.__code__.co_firstlineno + 1
    places = {bool(one.paths): one.source for one in ledger.collectives if one.phase == "forward"}
    assert places == {True: f"{__file__}:{line}", False: f"{__file__}:{line + 1}"}
    assert {one.called_from for one in ledger.collectives} == {None}


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
    shapes = Shapes([(4,), (4,)], [()])  # the result is no new value of a parameter
    provenance = Provenance(flow, [ft.Path("x"), ft.Path("y")], [ft.Path("z")], shapes)
    assert [
        (moved.instruction.name, moved.index, provenance.phase(moved))
        for moved in moved_arrays(flow)
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
