"""The ledger of what an optimizer moves: the parameter, and the phase."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers

import functree as ft
from functree.compiled.ledger import CompiledProgram, read_ledger
from tests.lib.meshes import MESH

# Phases and paths are read from the lines and scopes of the source.
pytestmark = pytest.mark.usefixtures("compiles_anew")

P = PartitionSpec
SHAPES = {"up": (16, 32), "down": (32, 24)}
SPECS = {"up": P("data", "model"), "down": P("model", "data")}
PARAMETERS = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in SHAPES.items()}
BATCH = jax.ShapeDtypeStruct((8, 16), "float32")


def loss(params: Any, x: Any) -> Any:
    return ((jax.nn.relu(x @ params["up"]) @ params["down"]) ** 2).mean()


def sharded(tree: Any) -> Any:
    """The shardings of a tree: of what has the shape of a parameter, those of that one."""

    def of(path: Any, x: Any) -> NamedSharding:
        name = ft.Path.of(path)[-1]
        fits = SHAPES.get(name) == x.shape
        return NamedSharding(MESH, SPECS[name] if fits else P())

    return jax.tree_util.tree_map_with_path(of, tree)


def ledger_of(tx: Any) -> ft.Ledger:
    """The ledger of a training step that also returns a running mean of its batches."""

    def step(params: Any, state: Any, mean: Any, x: Any) -> Any:
        mean = 0.9 * mean + 0.1 * x.mean(0)
        grads = jax.grad(loss)(params, x)
        grads = jax.lax.with_sharding_constraint(grads, sharded(grads))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, mean

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        state = jax.eval_shape(tx.init, PARAMETERS)
        of_params, of_state = sharded(PARAMETERS), sharded(state)
        of_batch = NamedSharding(MESH, P("data"))
        return ft.ledger(
            step,
            PARAMETERS,
            state,
            jax.ShapeDtypeStruct((16,), "float32"),
            BATCH,
            in_shardings=(of_params, of_state, NamedSharding(MESH, P()), of_batch),
            out_shardings=(of_params, of_state, None),
            mesh=MESH,
        )


NUMBERS = {"up": MuonDimensionNumbers(-2, -1), "down": MuonDimensionNumbers(-2, -1)}


def muon() -> Any:
    return optax.contrib.muon(0.1, ns_steps=2, muon_weight_dimension_numbers=NUMBERS)


def rows(ledger: ft.Ledger, phase: str = "update") -> list[tuple[Any, ...]]:
    """What is moved in a phase: kind, mesh axes, bytes and parameters, sorted."""
    found = []
    for one in ledger.collectives:
        if one.phase == phase:
            paths = " ".join(map(str, one.paths))
            found.append((one.kind, one.mesh_axes or (), one.bytes, paths))
    return sorted(found)


def test_partial_products_of_muon() -> None:
    """Each kind of array is of one size, which says of which parameter it is: products are 16 × 16
    and 24 × 24, their rows are sharded over `data`."""
    both = ("data", "model")
    up = [("all-gather", ("data",), 512), ("all-reduce", ("model",), 512)]
    down = [("all-gather", ("data",), 768), ("all-reduce", ("model",), 1152)]
    up.append(("collective-permute", both, 256))
    down.append(("collective-permute", both, 576))
    expected = {(*one, "up") for one in up} | {(*one, "down") for one in down}
    # The norms, by which matrices are divided.
    for axis in both:
        expected |= {("all-reduce", (axis,), 4, "up"), ("all-reduce", (axis,), 4, "down")}
    assert set(rows(ledger_of(muon()))) == expected


class Stacks(NamedTuple):
    """Two stacks of three layers, whose matrices are alike."""

    one: Any
    two: Any


def test_matrices_that_are_exchanged_together() -> None:
    layer = lambda key: ft.nn.Linear(8, 16, use_bias=False, key=key)  # noqa: E731
    model = ft.abstract(lambda key: Stacks(ft.stack(layer, 3, key), ft.stack(layer, 3, key)))(
        jax.random.key(0)
    )
    layout = ft.AxisRules({"embed": "data", "hidden": "model", "layers": None})
    dimensions = ft.nn.matrix_dimensions(model)
    tx = ft.muon(0.1, ns_steps=1, muon_weight_dimension_numbers=dimensions, layout=layout)

    def of_stacks(model: Stacks, x: Any) -> Any:
        weights = model.one.layer.weight, model.two.layer.weight
        return sum((jnp.einsum("be,leh->lbh", x, one) ** 2).mean() for one in weights)

    def step(model: Any, state: Any, x: Any) -> Any:
        updates, state = tx.update(ft.grad(of_stacks, layout=layout)(model, x), state, model)
        return optax.apply_updates(model, updates), state

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        of_state = ft.plan_optimizer(tx, model, layout, MESH)
        ledger = ft.ledger(
            step,
            model,
            jax.eval_shape(tx.init, model),
            jax.ShapeDtypeStruct((8, 8), "float32"),
            in_shardings=(layout, of_state, P("data")),
            out_shardings=(layout, of_state),
            mesh=MESH,
        )
    paths = "one.layer.weight two.layer.weight"
    assert rows(ledger) == [("all-to-all", ("data", "model"), 512, paths)] * 2


def test_norms_of_parameters_are_of_the_update() -> None:
    """LAMB divides the norm of a parameter by that of its update, and asks whether either is
    zero."""
    ledger = ledger_of(optax.lamb(0.1))
    expected = set()
    for axis in ("data", "model"):
        expected |= {("all-reduce", (axis,), 4, "up"), ("all-reduce", (axis,), 4, "down")}
    assert set(rows(ledger)) == expected
    # A mean of the batch has a new value too, but it is not made of a gradient.
    assert ("all-reduce", ("data",), 64, "") in rows(ledger, "forward")
    assert not [one for one in rows(ledger, "forward") if one[2] == 4]


def test_the_norm_of_all_gradients_is_of_nobody() -> None:
    found = rows(ledger_of(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))))
    assert {one[2:] for one in found} == {(4, "")}


PARTS = """
HloModule jit_step

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (w: f32[8], x: f32[8]) -> f32[8] {
  %w = f32[8]{0} parameter(0)
  %x = f32[8]{0} parameter(1)
  %zero = f32[] constant(0), metadata={op_name="jit(step)/transpose(jvp())/reduce_sum"}
  %gradient = f32[8]{0} multiply(%w, %x), metadata={op_name="jit(step)/transpose(jvp())/mul"}
  %norm = f32[] reduce(%gradient, %zero), dimensions={0}, to_apply=%add
  %both = (f32[], f32[]) all-reduce(%norm, %zero), replica_groups=[1,4]<=[4], to_apply=%add, \
metadata={op_name="jit(step)/(reduce_sum:reduce_sum)"}
  %first = f32[] get-tuple-element(%both), index=0
  %second = f32[] get-tuple-element(%both), index=1
  %third = f32[] all-reduce(%second), replica_groups=[1,4]<=[4], to_apply=%add, \
metadata={op_name="jit(step)/reduce_sum"}
  %total = f32[] add(%first, %third)
  %clip = f32[8]{0} broadcast(%total), dimensions={}
  %update = f32[8]{0} multiply(%gradient, %clip), metadata={op_name="jit(step)/mul"}
  ROOT %new = f32[8]{0} subtract(%w, %update), metadata={op_name="jit(step)/sub"}
}
"""


def test_the_part_of_a_norm_that_a_device_does_not_have() -> None:
    """Compilers write it as a constant, which no phase has computed."""
    paths = [ft.Path(("w",)), ft.Path(("x",))], [ft.Path(("w",))]
    ledger = read_ledger(CompiledProgram(PARTS, lambda: None, *paths, {"data": 4}, "cpu", None))
    assert [(one.op, one.phase) for one in ledger.collectives] == [
        ("both", "update"),
        ("both", "update"),
        ("third", "update"),
    ]


def test_a_bias_that_no_gradient_depends_on() -> None:
    """It is told from its momentum by the modules around it, here the outermost."""
    sizes = {"first": {"w": (16, 32), "b": (32,)}, "second": {"w": (32, 16)}, "out": {"b": (16,)}}
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, "float32"),
        sizes,
        is_leaf=lambda x: type(x) is tuple,
    )
    tx = optax.sgd(0.1, momentum=0.9)

    def linear(params: Any, x: Any, y: Any) -> Any:
        hidden = jax.nn.relu(x @ params["first"]["w"] + params["first"]["b"])
        return jnp.mean((hidden @ params["second"]["w"] + params["out"]["b"]) * y)

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        updates, state = tx.update(jax.grad(linear)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    state, batch = jax.eval_shape(tx.init, params), jax.ShapeDtypeStruct((64, 16), "float32")
    layouts = (P(), P(), P("data"), P("data"))
    with jax.numpy_rank_promotion("allow"):
        found = ft.ledger(step, params, state, batch, batch, in_shardings=layouts, mesh=MESH)
    assert {(str(one.path), one.bytes) for one in found.collectives} == {
        ("first.w", 2048), ("first.b", 128), ("second.w", 2048), ("out.b", 64)
    }  # fmt: skip


# What a loss is differentiated for, of parameters, their momentum and a mask or a scale of each.
COMPUTED = {
    "the weight": (lambda w, m, s: w, {"down", "up"}),
    "a pruned weight": (lambda w, m, s: w * s, {"down", "up"}),
    "a centered weight": (lambda w, m, s: w - w.mean(0, keepdims=True), {"down", "up"}),
    "a rounded weight": (lambda w, m, s: jnp.round(w / s) * s, {"down", "up"}),
    # A look ahead is as much the momentum's as the weight's.
    "Nesterov's look ahead": (lambda w, m, s: w - 0.9 * m, set()),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_the_gradient_of_a_computed_weight(name: str) -> None:
    """It is the weight's gradient, and no momentum's."""
    compute, wanted = COMPUTED[name]

    def step(w: Any, m: Any, s: Any, x: Any) -> Any:
        grads = jax.grad(loss)(jax.tree.map(compute, w, m, s), x)
        m = jax.tree.map(lambda a, b: 0.9 * a + b, m, grads)
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, m), m

    specs = {"up": P(None, "model"), "down": P("model", None)}
    arguments = (PARAMETERS, PARAMETERS, PARAMETERS, BATCH)
    ledger = ft.ledger(step, *arguments, in_shardings=(*[specs] * 3, P("data")), mesh=MESH)
    gradients = [one for one in ledger.collectives if one.phase == "backward"]
    assert len(gradients) == 2
    named = [(one.moves, *one.arguments, str(one.path)) for one in gradients if one.paths]
    assert sorted(named) == sorted(("gradient", "w", name) for name in wanted)
