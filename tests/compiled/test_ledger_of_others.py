"""`ft.ledger`: of plain functions, of functions that JAX has jitted, and of what cannot be
named."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import functree as ft
from functree.compiled.ledger import CompiledProgram, read_ledger
from tests.lib.checks import raises
from tests.lib.meshes import EXPLICIT, MESH

pytestmark = pytest.mark.usefixtures("compiles_anew")

P = PartitionSpec
LAYOUT = {
    "Dense_0": {"kernel": P(None, "model"), "bias": P("model")},
    "Dense_1": {"kernel": P("model"), "bias": P()},
}
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


def loss(params: Any, x: Any, y: Any) -> Any:
    """A plain MLP, as Flax names its parameters."""
    hidden = jax.nn.relu(x @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"][None])
    return (
        (hidden @ params["Dense_1"]["kernel"] + params["Dense_1"]["bias"][None] - y) ** 2
    ).mean()


def step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
    """A training step in plain JAX and optax."""
    value, grads = jax.value_and_grad(loss)(params, x, y)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


def abstract() -> tuple[Any, Any, Any]:
    """Parameters, state of the optimizer, and a batch."""
    shapes = {
        "Dense_0": {"kernel": (64, 128), "bias": (128,)},
        "Dense_1": {"kernel": (128, 64), "bias": (64,)},
    }
    leaf = lambda x: isinstance(x, tuple)  # noqa: E731
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, "float32"), shapes, is_leaf=leaf
    )
    return params, jax.eval_shape(TX.init, params), jax.ShapeDtypeStruct((32, 64), "float32")


def on(mesh: Mesh, specs: Any) -> Any:
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
    )


def shardings(mesh: Mesh) -> tuple[Any, ...]:
    """Shardings of parameters, optimizer state and batch, written by hand."""
    adam = (optax.ScaleByAdamState(P(), LAYOUT, LAYOUT), optax.EmptyState())  # pyright: ignore[reportArgumentType]
    return on(mesh, (LAYOUT, (optax.EmptyState(), adam), P("data"), P("data")))


EXPECTED = {
    ("all-reduce", ("model",), "forward", 16 * 64 * 4, "Dense_1.kernel"),
    ("all-reduce", ("data",), "backward", 64 * 32 * 4, "Dense_0.kernel"),
    ("all-reduce", ("data",), "backward", 32 * 4, "Dense_0.bias"),
    ("all-reduce", ("data",), "backward", 32 * 64 * 4, "Dense_1.kernel"),
    ("all-reduce", ("data",), "backward", 64 * 4, "Dense_1.bias"),
    ("all-reduce", ("model",), "update", 4, ""),  # the norm of the gradients
    ("all-reduce", ("data",), "forward", 4, ""),  # the loss
}


def rows(ledger: ft.Ledger) -> set[Any]:
    return {
        (one.kind, one.mesh_axes, one.phase, one.bytes, ", ".join(map(str, one.paths)))
        for one in ledger.collectives
    }


MESHES = {
    "in order": MESH,
    "permuted": Mesh(np.array(jax.devices())[::-1].reshape(4, 2).T, ("data", "model")),
}


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_a_training_step_in_plain_jax(mesh: Mesh) -> None:
    params, opt_state, x = abstract()
    with jax.numpy_dtype_promotion("standard"):
        jitted = jax.jit(
            step, in_shardings=shardings(mesh), out_shardings=(*shardings(mesh)[:2], None)
        )
        ledger = ft.ledger(jitted, params, opt_state, x, x)
    assert rows(ledger) == EXPECTED and not ledger.not_understood and ledger.warnings_known
    assert {one.arguments for one in ledger.collectives if one.paths} == {("params",)}
    assert ledger.memory.arguments["params.Dense_0.kernel"] == 64 * 32 * 4
    assert ledger.memory.arguments["opt_state.1.0.mu.Dense_0.kernel"] == 64 * 32 * 4
    with raises("no argument at `params.Dense_0.bais`; did you mean `params", error=KeyError):
        ledger.memory.arguments["params.Dense_0.bais"]
    sources = {str(one.path): one.source for one in ledger.collectives}
    assert all(source and "test_ledger_of_others.py:" in source for source in sources.values())
    assert "0.1 % of these bytes could not be attributed to a parameter" in ledger.summary()


def dots(params: Any, x: Any) -> Any:
    return x + jax.nn.relu(x @ params["up"] + params["bias"][None]) @ params["down"]


SPECS = {"up": P(None, "model"), "bias": P("model"), "down": P("model")}
SHAPES = {
    "up": jax.ShapeDtypeStruct((64, 128), "float32"),
    "bias": jax.ShapeDtypeStruct((128,), "float32"),
    "down": jax.ShapeDtypeStruct((128, 64), "float32"),
}
BATCH = jax.ShapeDtypeStruct((32, 64), "float32")


def test_what_the_forward_pass_adds_to_an_argument_is_no_gradient_of_it() -> None:
    layouts = {"in_shardings": (SPECS, P("data")), "out_shardings": P("data"), "mesh": MESH}
    for fun in (dots, lambda params, x: {"up": dots(params, x)}):
        [moved] = ft.ledger(fun, SHAPES, BATCH, **layouts).collectives
        assert (moved.mesh_axes, str(moved.path), moved.phase) == (("model",), "down", "forward")


def test_gradients_without_names() -> None:
    """Two bare arrays, whose gradients are two bare results: nobody can tell which is whose, and
    nobody guesses."""

    def of(up: Any, down: Any, x: Any) -> Any:
        return ((jnp.tanh(x @ up) @ down) ** 2).mean()

    layouts = {"in_shardings": (P(), P(), P("data")), "out_shardings": P(), "mesh": MESH}
    gradients = jax.value_and_grad(of, argnums=(0, 1))
    ledger = ft.ledger(gradients, SHAPES["up"], SHAPES["down"], BATCH, **layouts)
    assert {one.paths for one in ledger.collectives} == {()} and ledger.attributed == 0
    assert "100.0 % of these bytes could not be attributed to a parameter" in ledger.summary()


def test_a_mesh_for_a_program_without_one() -> None:
    with raises(
        "ledger: the program was compiled for 1 device, but `mesh=` has 8: shard the arguments"
    ):
        ft.ledger(jax.jit(jnp.sin), BATCH, mesh=MESH)
    placed = jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(MESH, P("data")))
    other = ft.make_mesh(a=4, b=2)
    moved = ft.ledger(jax.jit(lambda x: x.sum()), placed, mesh=other).collectives
    assert [one.mesh_axes for one in moved] == [("data",)]  # that of its shardings


def ledger_of(text: str, parameters: str, outputs: str, **others: Any) -> ft.Ledger:
    """The ledger of a text, of whose memory the compiler has told nothing."""
    paths = [[ft.Path(path) for path in names.split()] for names in (parameters, outputs)]
    program = CompiledProgram(text, lambda: None, *paths, {"data": 4}, "cpu", None)
    return read_ledger(program._replace(**others))


SENT = "collective-broadcast(%x), channel_id=1, replica_groups={{0,1},{2,3}}"
SPELLED = "all-reduce(%x), channel_id=2, replica_groups=a new spelling"
TEXT = f"""HloModule jit_f

ENTRY %main (x: f32[8,4]) -> (f32[8,4], f32[8,4]) {{
  %x = f32[8,4]{{1,0}} parameter(0)
  %sent = f32[8,4]{{1,0}} {SENT}
  %sum = f32[8,4]{{1,0}} {SPELLED}
  ROOT %both = (f32[8,4]{{1,0}}, f32[8,4]{{1,0}}) tuple(%sent, %sum)
}}
"""
ONLY_SENT, ONLY_SPELLED = TEXT.replace(SPELLED, "negate(%x)"), TEXT.replace(SENT, "negate(%x)")
NOTHING = ONLY_SENT.replace(SENT, "negate(%x)")


def test_what_is_not_understood_is_said() -> None:
    ledger = ledger_of(TEXT, "x", "0 1")
    assert ledger.not_understood == (
        "collective-broadcast (sent) is an unknown kind of collective and is left out",
        "the device groups of sum do not fit the mesh, or have an unknown format",
    )
    [one] = ledger.collectives
    assert (one.op, one.mesh_axes, one.group_size) == ("sum", None, None)
    assert all("not understood" in text for text in (str(ledger), ledger.html()))
    assert ledger.memory.peak == 128 + 256
    without_mesh = ledger_of(TEXT, "x", "0 1", sizes={}).not_understood[1]
    assert "the program's mesh is unknown, so mesh axes have no names" in without_mesh


@pytest.mark.parametrize(
    ("text", "idle"), [(NOTHING, ("data",)), (TEXT, ()), (ONLY_SENT, ()), (ONLY_SPELLED, ())]
)
def test_a_mesh_axis_is_not_called_idle_if_something_unknown_may_use_it(text: str, idle: Any):
    ledger = ledger_of(text, "x", "0 1", sharded=frozenset())
    assert ledger.idle == idle and bool(ledger.not_understood) == (text != NOTHING)


RAGGED = """HloModule jit_f

ENTRY %main (x: f32[8,4], out: f32[16,4], n: s32[4]) -> (f32[64,4]) {
  %x = f32[8,4]{1,0} parameter(0)
  %out = f32[16,4]{1,0} parameter(1)
  %n = s32[4]{0} parameter(2)
  %sent = f32[16,4]{1,0} ragged-all-to-all(%x, %out, %n, %n, %n, %n), channel_id=1, replica_groups={{0,1,2,3}}
  %token = token[] after-all()
  %printed = (f32[16,4]{1,0}, u32[], token[]) send(%sent, %token), channel_id=2, is_host_transfer=true
  %all = f32[64,4]{1,0} all-gather(%sent), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %result = (f32[64,4]{1,0}) tuple(%all)
}
"""


def test_a_ragged_exchange_counts_and_a_print_is_no_collective() -> None:
    ledger = ledger_of(RAGGED, "x out n", "0")
    assert ledger.totals()["ragged-all-to-all", ("data",)] == 16 * 4 * 4
    assert [one.arguments for one in ledger.collectives] == [("x",), ("x", "out")]
    assert ledger.not_understood == ()


class Statistics:
    """What the compiler for TPUs says: 40 bytes in the main memory, 15 in the host's, and the rest
    in the fast one."""

    argument_size_in_bytes, output_size_in_bytes, temp_size_in_bytes = 20, 16, 4
    host_argument_size_in_bytes, host_output_size_in_bytes, host_temp_size_in_bytes = 2, 7, 8
    alias_size_in_bytes, host_alias_size_in_bytes = 0, 2
    peak_memory_in_bytes = 128


@pytest.mark.parametrize("backend, peak", [("tpu v5e", 40), ("cuda h100", 128), ("cpu", 55)])
def test_the_peak_is_that_of_the_main_memory(backend: str, peak: int) -> None:
    ledger = ledger_of(NOTHING, "x", "0 1", memory=Statistics, backend=backend)
    assert ledger.memory.peak == peak


def test_of_two_meshes_of_one_size_the_given_one_decides() -> None:
    other = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    arrays = [
        jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(mesh, P(axis)))
        for mesh, axis in ((MESH, "model"), (other, "a"))
    ]
    for mesh in (MESH, other):
        fun = jax.jit(lambda x, y: (x + 1, y.sum()))
        assert ft.ledger(fun, *arrays, mesh=mesh).sizes == dict(mesh.shape)


OTHER_RESULT = """HloModule jit_f

ENTRY %main (w: f32[8], x: f32[8]) -> (f32[8], f32[8]) {
  %w = f32[8]{0} parameter(0)
  %x = f32[8]{0} parameter(1)
  %grad = f32[8]{0} all-reduce(%x), channel_id=2, replica_groups={{0,1}}
  %new = f32[8]{0} add(%w, %grad)
  ROOT %both = (f32[8]{0}, f32[8]{0}) custom-call(%new, %w), custom_call_target="AsyncCollectiveDone"
}
"""


def test_a_program_whose_result_is_no_tuple() -> None:
    ledger = ledger_of(OTHER_RESULT, "w x", "0.w 1", sizes={"data": 2})
    assert [one.arguments for one in ledger.collectives] == [("x",)] and ledger.memory.outputs == 64


def test_a_program_with_other_parameters_than_the_function() -> None:
    with raises(
        "ledger: cannot match the program's parameters with the function's arrays: the program has 1 parameter, but the function has 0 arrays"
    ):
        ledger_of(TEXT, "", "0 1")


def test_on_one_device() -> None:
    ledger = ft.ledger(jax.jit(jnp.sin), jnp.ones(3))
    assert not ledger.collectives and ledger.sizes == {} and ledger.attributed == 1
    assert "cpu: 0 B moved to each device" in str(ledger) and not ledger.totals()


@pytest.mark.parametrize("mesh", [MESH, EXPLICIT], ids=["auto", "explicit"])
def test_on_the_current_mesh(mesh: Mesh) -> None:
    w, x = (
        jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(mesh, P("model")))
        for _ in range(2)
    )
    with jax.set_mesh(mesh):
        for fun in (lambda w: ft.constrain(w, P()), jax.jit(lambda w: ft.constrain(w, P()))):
            moved = ft.ledger(fun, w).collectives
            assert [(one.kind, one.mesh_axes, one.arguments) for one in moved] == [
                ("all-gather", ("model",), ("w",))
            ]
    # Without a mesh of its own it is that of the arguments.
    assert ft.ledger(lambda w, x: w + x, w, x).sizes == {"data": 2, "model": 4}


def test_what_cannot_be_compiled() -> None:
    with raises("sin is already jitted: pass `in_shardings=` where you jit it"):
        ft.ledger(jax.jit(jnp.sin), jnp.ones(3), in_shardings=P())
    for door in (ft.ledger, ft.layouts, ft.why):
        with raises("is already jitted: pass `mesh=` where you jit it"):
            door(ft.jit(lambda x: 2 * x), jnp.ones(3), mesh=MESH)
        with raises("3 is not a mesh"):
            door(jax.jit(jnp.sin), jnp.ones(3), mesh=3)
    with raises("ledger: invalid arguments", "a function"):
        ft.ledger(3)  # pyright: ignore[reportArgumentType]
