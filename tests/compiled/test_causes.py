"""The operation that a cause names: a constraint that comes later, an operation that comes earlier,
and one of several operations on one line."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import Array, ShapeDtypeStruct, lax
from jax.sharding import PartitionSpec as P

import functree as ft
from tests.why.program import text_of

pytestmark = pytest.mark.usefixtures("compiles_anew")

constrained = lax.with_sharding_constraint


class Case(NamedTuple):
    """A program, the verdict on what it moves most, and the cause."""

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    specs: tuple[P, ...]
    result: P
    verdict: str
    line: str  # a part of the cause's line
    origins: tuple[str, ...]  # each a part of an argument's path, or of a constraint's line
    after: str = ""


def batch_and_sequence_swapped(w: Array, x: Array) -> Array:
    h = jnp.tanh(x @ w)
    return jnp.sum(constrained(h, P(None, "data")))


def height_and_width_swapped(images: Array) -> Array:
    h = 2.0 * (images - jnp.mean(images, axis=-1, keepdims=True))
    h = constrained(h, P("data", "seq", "model"))
    return jax.nn.relu(h)


def constrained_before(w: Array, table: Array, x: Array) -> Array:
    h = constrained(x @ w, P("data"))
    return jnp.tanh(h + table)


def constrained_like_an_operand(x: Array, y: Array) -> Array:
    h = x + y
    return jnp.sum(constrained(2.0 * h, P("data")))


def looked_up_and_joined(table: Array, w: Array, ids: Array, features: Array) -> Array:
    return jnp.concatenate([table[ids.astype(int)], features], axis=-1) @ w


def gathered_after_a_product(w: Array, v: Array, x: Array) -> Array:
    keys = constrained(x @ w, P("data"))
    return jnp.einsum("bsd,btd->bst", x @ v, keys)


def relaid_after_a_constraint(x: Array, y: Array) -> Array:
    x = constrained(jax.nn.sigmoid(x), P("data"))
    return x * y


def convolve(x: Array, kernel: Array) -> Array:
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)


def convolved(first: Array, second: Array, x: Array, y: Array) -> Array:
    def loss(second: Array) -> Array:
        return jnp.mean((convolve(jnp.tanh(convolve(x, first)), second) - y) ** 2)

    return jax.grad(loss)(second)


ON_DATA, SECOND = P("data"), P(None, "data")
CASES = [
    Case(
        batch_and_sequence_swapped, ((64, 128), (16, 32, 64)), (P(), ON_DATA), P(), "compiler",
        'constrained(h, P(None, "data")', ("x", 'constrained(h, P(None, "data")'),
    ),
    Case(
        height_and_width_swapped, ((16, 32, 32, 8),), (P("data", "model", "seq"),),
        P("data", "seq", "model"), "compiler", "constrained(h", ("images", "constrained(h"),
    ),
    Case(
        constrained_before, ((64, 512), (128, 512), (128, 64)), (P(), SECOND, ON_DATA), ON_DATA,
        "asked", "h + table", ("table",),
    ),
    Case(
        constrained_like_an_operand, ((64, 128), (64, 128)), (ON_DATA, SECOND), P(), "compiler",
        "x + y", ("x", "y"),
    ),
    Case(
        looked_up_and_joined, ((64, 32), (64, 16), (512,), (512, 32)),
        (P(), P(), ON_DATA, P("model")), P("model"), "compiler", "table[ids", ("ids", "features"),
    ),
    Case(
        gathered_after_a_product, ((32, 64), (32, 64), (16, 32, 32)),
        (P(), P(), P("data", "seq")), P("data", "seq"), "asked", "constrained(x @ w",
        ("x", "constrained(x @ w"),
    ),
    Case(
        relaid_after_a_constraint, ((64, 128), (64, 128)), (ON_DATA, SECOND), SECOND, "compiler",
        "x * y", ("x", "y"),
    ),
    Case(
        convolved, ((3, 3, 4, 32), (3, 3, 32, 4), (16, 32, 32, 4), (16, 32, 32, 4)),
        (P(), P(), P("data", None, "seq"), P("data", "seq")), P(), "compiler",
        "lax.conv_general_dilated", ("x", "y"), "f32[16/data, 32/seq, 32, 4]",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.function.__name__)
def test_the_cause_of_what_is_moved_most(case: Case):
    shapes = [ShapeDtypeStruct(shape, "float32") for shape in case.shapes]
    mesh = ft.make_mesh(data=2, model=2, seq=2)
    ledger = ft.ledger(
        case.function, *shapes, in_shardings=case.specs, out_shardings=case.result, mesh=mesh
    )
    moved = [one for one in ledger.collectives if one.kind != "all-reduce"]
    largest = max(moved, key=lambda one: one.total)
    cause = largest.cause
    assert cause is not None
    assert largest.verdict == case.verdict, cause
    assert case.line in text_of(cause.source), cause
    assert cause.after.startswith(case.after), cause
    told = [f"{origin} {text_of(origin)}" for origin in cause.origins]
    for wanted in case.origins:
        assert any(wanted in text for text in told), (wanted, told)


def ledger_of(f: Callable[..., Any], specs: tuple[Any, ...], *shapes: tuple[int, ...]) -> ft.Ledger:
    arrays = [ShapeDtypeStruct(shape, "float32") for shape in shapes]
    mesh = ft.make_mesh(data=2, model=4)
    with jax.set_mesh(mesh):
        return ft.ledger(f, *arrays, in_shardings=specs, mesh=mesh)


def test_the_gradients_of_two_convolutions_are_asked_for():
    """The convolution for a kernel's gradient moves dimensions, and relays nothing."""

    def conv(x: Array, kernel: Array) -> Array:
        return lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def loss(up: Array, down: Array, up2: Array, down2: Array, x: Array) -> Array:
        x = x + conv(jax.nn.relu(conv(x, up)), down)
        x = x + conv(jax.nn.relu(conv(x, up2)), down2)
        return jnp.mean(x**2)

    up, down = P(None, None, None, "model"), P(None, None, "model")
    gradient, shapes = jax.grad(loss, (0, 1, 2, 3)), ((3, 3, 16, 32), (3, 3, 32, 16))
    ledger = ledger_of(gradient, (up, down, up, down, P("data")), *shapes, *shapes, (8, 16, 16, 16))
    assert {row.kind for row in ledger.collectives} == {"all-reduce"}
    assert {row.verdict for row in ledger.collectives} == {"asked"}


def test_a_constraint_that_adds_a_mesh_axis_in_front_is_asked_for():
    def best(x: Array) -> Array:
        return lax.top_k(constrained(x, P(None, ("data", "model"))), 4)[0]

    rows = ledger_of(best, (P(None, "model"),), (32, 64)).collectives
    permutes = [row for row in rows if row.kind == "collective-permute"]
    assert permutes and {row.verdict for row in permutes} == {"asked"}


def test_an_operation_with_a_hint_is_the_cause_before_a_constraint():
    def joined(a: Array, b: Array) -> Array:
        both = jnp.concatenate([a, b], 0)
        return constrained(both, P("model", "data"))

    rows = ledger_of(joined, (P("data"), P("data")), (32, 64), (32, 64)).collectives
    causes = [row.cause for row in rows if row.cause is not None]
    assert [cause.op for cause in causes] == ["concatenate"] * len(rows)
    assert all("concatenates along a sharded dimension" in cause.hint for cause in causes)


def logits(up: Array, down: Array, head: Array, x: Array) -> Array:
    return (jax.nn.relu(x @ up) @ down) @ head


def looked_up(table: Array, ids: Array, x: Array) -> Array:
    return jax.nn.relu(table[ids.astype(int)] + x)


def two_layers(up: Array, down: Array, up2: Array, down2: Array, x: Array) -> Array:
    h = jax.nn.gelu(x @ up) @ down
    return jax.nn.gelu(h @ up2) @ down2


COLUMN, ROW = P(None, "model"), P("model", None)
# A program, the specs of its arguments and its result, and its shapes; what moves most over a mesh axis,
# and its cause.
FITTING: dict[str, tuple[Any, ...]] = {
    "the product that makes as many bytes, of several on a line": (
        logits, (COLUMN, ROW, COLUMN, P("data")), P(),
        ((64, 256), (256, 64), (64, 1024), (64, 64)), "model", "all-gather", {"head"}, "f32[64",
    ),
    "the indices that are relaid where they become a column": (
        looked_up, (ROW, P(None, "data"), P("data")), P("data"),
        ((1024, 64), (16, 32), (16, 32, 64)), "data", "all-to-all", {"ids"}, "f32[16/data, 32, 64]",
    ),
    "the layer whose weight is laid out wrongly": (
        two_layers, (COLUMN, COLUMN, COLUMN, ROW, P("data")), P(),
        ((64, 256), (256, 64), (64, 256), (256, 64), (128, 64)), "model", "all-gather",
        {"up", "down"}, "f32[128/data, 64/model] (data by x, model by down)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FITTING)
def test_the_cause_fits_what_is_moved(case: str) -> None:
    function, specs, result, shapes, axis, kind, origins, after = FITTING[case]
    arrays = [ShapeDtypeStruct(shape, "float32") for shape in shapes]
    mesh = ft.make_mesh(data=2, model=4)
    ledger = ft.ledger(function, *arrays, in_shardings=specs, out_shardings=result, mesh=mesh)
    rows = [one for one in ledger.collectives if (one.kind, one.mesh_axes) == (kind, (axis,))]
    cause = max(rows, key=lambda one: one.total).cause
    assert cause is not None
    assert cause.after.startswith(after), cause
    assert origins <= set(cause.origins), cause


def decode(w: dict[str, Array], cache: Array, x: Array) -> Array:
    scores = jnp.einsum("btd,dhe,bshe->bhts", x, w["query"], cache)
    return jnp.einsum("bhts,bshe,hed->btd", jax.nn.softmax(scores), cache, w["out"])


def test_the_heads_of_a_cache_are_no_batch() -> None:
    """A cache is data that heads shard, too. The sum over them is that of tensor parallelism."""
    specs = {"query": P(None, "model"), "out": P("model")}, P("data", None, "model"), P("data")
    query, out, cache, x = (
        ShapeDtypeStruct(shape, "float32")
        for shape in ((64, 8, 16), (8, 16, 64), (8, 64, 8, 16), (8, 1, 64))
    )
    arguments = {"query": query, "out": out}, cache, x
    ledger = ft.ledger(decode, *arguments, in_shardings=specs, mesh=ft.make_mesh(data=2, model=4))
    assert ledger.data == ("cache", "x")
    [row] = ledger.collectives
    assert (row.kind, row.mesh_axes, row.verdict) == ("all-reduce", ("model",), "asked")


def test_no_advice_about_an_array_that_is_not_sharded() -> None:
    """If a table is whole on each device, its update gathers the rows. The table is not at fault."""

    def put(table: Array, rows: Array, ids: Array) -> Array:
        return table.at[ids.astype(int)].set(jnp.tanh(rows))

    for spec, advice in ((P(), ""), (P("model"), "updates elements of a sharded dimension")):
        ledger = ledger_of(put, (spec, P("data"), P()), (64, 16), (8, 16), (8,))
        causes = [row.cause for row in ledger.collectives if row.cause is not None]
        assert causes and {cause.op for cause in causes} == {"scatter"}
        assert all(cause.hint.startswith(advice) for cause in causes)
        assert bool(advice) == any(cause.hint for cause in causes)


def test_a_sum_in_another_precision_belongs_to_the_product_that_sums() -> None:
    """The CPU compiler sums bfloat16 as float32: as many bytes as the hidden activation has."""

    def apply(up: Array, down: Array, x: Array) -> Array:
        return jax.nn.relu(x @ up) @ down

    arrays = [ShapeDtypeStruct(shape, "bfloat16") for shape in ((256, 512), (512, 256), (64, 256))]
    specs, mesh = (COLUMN, ROW, P("data")), ft.make_mesh(data=2, model=4)
    [row] = ft.ledger(apply, *arrays, in_shardings=specs, mesh=mesh).collectives
    assert (row.kind, row.verdict) == ("all-reduce", "asked")
    assert row.cause is not None and row.cause.expression == "jax.nn.relu(x @ up) @ down"


def test_weights_that_are_sharded_over_the_sequence_are_asked_for() -> None:
    def loss(w: dict[str, Array], x: Array) -> Array:
        return jnp.mean((jax.nn.relu(x @ w["up"]) @ w["down"]) ** 2)

    w = {"up": (64, 256), "down": (256, 64)}
    arrays = {name: ShapeDtypeStruct(shape, "float32") for name, shape in w.items()}
    laid = {name: P("seq") for name in w}
    ledger = ft.ledger(
        jax.grad(loss), arrays, ShapeDtypeStruct((64, 64, 64), "float32"),
        in_shardings=(laid, P("data", "seq")), out_shardings=laid,
        mesh=ft.make_mesh(data=2, seq=4),
    )  # fmt: skip
    gathers = [row for row in ledger.collectives if row.kind == "all-gather"]
    assert gathers and {row.verdict for row in gathers} == {"asked"}
