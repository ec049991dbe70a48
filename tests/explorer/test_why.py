"""`ft.why`: whatever jitted function it is given, its variants are the function's own program, and a
fix gives the figures of the program changed by hand."""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import ShapeDtypeStruct, lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

import functree as ft
from functree.calls.program_ledger import ledger_of
from functree.compiled.flops import count_flops
from functree.compiled.ledger import Ledger
from functree.explorer.edits import Edits, Variant
from functree.explorer.why import Why
from functree.transforms.ledger import LoweredCall, call_of
from tests.lib.checks import compilations
from tests.lib.meshes import MESH, lay

pytestmark = pytest.mark.usefixtures("compiles_anew")

P = PartitionSpec
why = partial(ft.why, progress=False)


def abstract(*shape: int, spec: P | None = None) -> ShapeDtypeStruct:
    sharding = None if spec is None else NamedSharding(MESH, spec)
    return ShapeDtypeStruct(shape, "float32", sharding=sharding)


def on(*specs: Any) -> Any:
    return jax.tree.map(
        lambda spec: NamedSharding(MESH, spec), specs, is_leaf=lambda one: isinstance(one, P)
    )


def line_of(text: str) -> str:
    """The first line of this file with a text."""
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(i for i, line in enumerate(lines, 1) if text in line)}"


# Programs. `wrong` lays out rows of the batch by the axis of the model.


def wrong(x: Any) -> Any:
    return ft.constrain(x, P("model", None))


def loss(w: Any, x: Any) -> Any:
    h = wrong(jax.nn.relu(x @ w["up"]))
    return jnp.mean((h @ w["down"]) ** 2)


def mended(w: Any, x: Any) -> Any:
    h = jax.nn.relu(x @ w["up"])
    return jnp.mean((h @ w["down"]) ** 2)


W = {"up": abstract(128, 256), "down": abstract(256, 128)}
X = abstract(64, 128)
TENSOR = {"up": P(None, "model"), "down": P("model", None)}
SPECS: Any = (TENSOR, P("data", None))


def scanned(w: Any, x: Any) -> Any:
    return lax.scan(lambda x, w: (wrong(jnp.tanh(x @ w)), jnp.sum(x)), x, w)


def rematerialized(w: Any, x: Any) -> Any:
    body = jax.checkpoint(lambda w, x: wrong(jnp.tanh(x @ w)))
    return jax.grad(lambda w: jnp.sum(body(w, x)))(w)


@jax.custom_vjp
def sine(x: Any) -> Any:
    return wrong(jnp.sin(x))


sine.defvjp(lambda x: (sine(x), x), lambda x, g: (wrong(g) * jnp.cos(x),))


def with_own_derivative(w: Any, x: Any) -> Any:
    return jax.grad(lambda w: jnp.sum(sine(x @ w)))(w)


def branched(w: Any, x: Any) -> Any:
    return lax.cond(x[0, 0] > 0.0, lambda x: wrong(x @ w), lambda x: x, x)


def nested(w: Any, x: Any) -> Any:
    layer = jax.jit(lambda x: wrong(jnp.tanh(x @ w)))
    return layer(layer(x))


def looped(w: Any, x: Any) -> Any:
    return lax.while_loop(lambda x: jnp.sum(x) < 9.0, lambda x: wrong(jnp.tanh(x @ w)), x)


def convolved(w: Any, x: Any) -> Any:
    """Its operations have named tuples among their parameters."""
    smooth = lax.conv_general_dilated(wrong(x @ w)[:, None], jnp.ones((1, 1, 3)), (1,), "SAME")
    return jnp.sort(jnp.take(smooth, jnp.arange(4), axis=0))


SQUARE = abstract(128, 128)
COLUMNS: Any = (P(None, "model"), P("data", None))
PROGRAMS: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "a gradient": (jax.grad(loss), (W, X), SPECS),
    "scan": (scanned, (abstract(3, 128, 128), X), (P(None, None, "model"), P("data", None))),
    "remat": (rematerialized, (SQUARE, X), COLUMNS),
    "custom_vjp": (with_own_derivative, (SQUARE, X), COLUMNS),
    "cond": (branched, (SQUARE, X), COLUMNS),
    "jit": (nested, (SQUARE, X), COLUMNS),
    "while": (looped, (SQUARE, X), COLUMNS),
    "a convolution and a look-up": (convolved, (SQUARE, X), COLUMNS),
}


def call(fn: Any, *args: Any, **options: Any) -> LoweredCall:
    shardings = options.pop("in_shardings", None), options.pop("out_shardings", None)
    return call_of(
        "why", fn, args, options.pop("kwargs", {}), *shardings, options.pop("mesh", None)
    )


def variant_of(one: LoweredCall) -> Variant:
    variant = Variant.of(one.of_arrays, one.arrays, one.mesh)
    assert variant is not None
    return variant


def figures(ledger: Ledger, text: str) -> tuple[Any, ...]:
    moved = sorted(
        (one.kind, one.mesh_axes or (), one.bytes, one.count or 0) for one in ledger.collectives
    )
    memory = ledger.memory
    sizes = sum(memory.arguments.values()), memory.outputs, memory.aliases, memory.peak
    return moved, count_flops(text).total, sizes


def figures_of(variant: Variant, one: LoweredCall) -> tuple[Any, ...]:
    compiled = variant.lower().compile()
    ledger = ledger_of(
        compiled, one.name, one.parameters, one.results, None, None, of_program=False
    )
    return figures(ledger, compiled.as_text() or "")


class State(eqx.Module):
    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden embed"]


TX = optax.adam(1e-3)


def train(state: Any, x: Float[Array, "batch embed"]) -> Any:
    def of(model: State) -> Any:
        h = jax.nn.relu(x @ model.up)
        return jnp.mean((h @ model.down) ** 2)

    value, gradient = ft.value_and_grad(of)(state.model)
    with jax.numpy_dtype_promotion("standard"):  # of adam's bias correction
        return ft.apply_gradients(state, gradient), value


def train_state() -> Any:
    return ft.TrainState.create(State(abstract(128, 256), abstract(256, 128)), TX)


RULES = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})


def trained() -> LoweredCall:
    step = ft.jit(train, in_shardings=(RULES, RULES), donate="state", mesh=MESH)
    return call(step, train_state(), X)


def placed_mlp() -> tuple[Any, Any]:
    mlp = eqx.nn.MLP(128, 8, 64, 1, key=jax.random.key(0))
    params, static = eqx.partition(mlp, eqx.is_array)
    params = jax.tree.map(lay, params)
    return eqx.combine(params, static), lay(jnp.ones((64, 128)), "data")


def filtered() -> LoweredCall:
    return call(
        eqx.filter_jit(eqx.filter_grad(lambda mlp, x: jnp.sum(wrong(jax.vmap(mlp)(x)) ** 2.0))),
        *placed_mlp(),
    )


def called_module() -> LoweredCall:
    """The arrays of the module are none of the call's arguments."""
    mlp, _ = placed_mlp()
    sharded = NamedSharding(MESH, P("model"))
    mlp = eqx.tree_at(
        lambda mlp: mlp.layers[0].weight, mlp, replace_fn=lambda w: jax.device_put(w, sharded)
    )
    return call(eqx.filter_jit(mlp), lay(jnp.ones(128), "data"))


DOORS: dict[str, Callable[[], LoweredCall]] = {
    "ft.jit: donated state with rules": trained,
    "jax.jit": lambda: call(
        jax.jit(jax.grad(loss), in_shardings=on(*SPECS), out_shardings=on(TENSOR)[0]), W, X
    ),
    "jax.jit: static and by keyword": lambda: call(
        jax.jit(lambda x, n, *, w: wrong(x @ w) * n, static_argnums=1),
        abstract(64, 128, spec=P("data")),
        2.0,
        kwargs={"w": abstract(128, 128, spec=P(None, "model"))},
    ),
    "jax.jit: an argument is not used": lambda: call(
        jax.jit(lambda w, unused, x: wrong(x @ w), in_shardings=on(P(), P("model"), P("data"))),
        SQUARE,
        X,
        X,
    ),
    "eqx.filter_jit": filtered,
    "eqx.filter_jit: a module": called_module,
}


@pytest.mark.parametrize("door", DOORS)
def test_a_variant_without_an_edit_is_the_function(door: str):
    one = DOORS[door]()
    assert figures_of(variant_of(one), one) == figures(*one.compiled())


@pytest.mark.parametrize("case", PROGRAMS)
def test_a_constraint_goes_wherever_it_is(case: str, monkeypatch: pytest.MonkeyPatch):
    """As if the user had written the program without it."""
    fn, args, specs = PROGRAMS[case]
    one = call(fn, *args, in_shardings=specs, mesh=MESH)
    variant = variant_of(one)
    constraints = list(variant.constraints())
    # JAX gives what the forward pass of a `custom_vjp` does the line of its call.
    first = [line_of("jnp.sum(sine(x @ w))")] if case == "custom_vjp" else []
    lines = [*first, line_of('return ft.constrain(x, P("model", None))')]
    assert list(dict.fromkeys(one.line for one in constraints)) == lines
    without = variant
    for constraint in constraints:
        without = without.without_constraint(constraint)
    assert list(without.constraints()) == []
    elsewhere = variant.without_constraint(constraints[0]._replace(line="elsewhere.py:1"))
    assert figures_of(elsewhere, one) == figures(*one.compiled())
    monkeypatch.setitem(globals(), "wrong", lambda x: x)
    jax.clear_caches()
    by_hand = call(fn, *args, in_shardings=specs, mesh=MESH)
    assert list(variant_of(by_hand).constraints()) == []
    assert figures_of(without, one) == figures(*by_hand.compiled())


def test_other_constraints_stay():
    def both(w: Any, x: Any) -> Any:
        return ft.constrain(wrong(x @ w), P(None, "data"))

    variant = variant_of(call(both, SQUARE, X, in_shardings=COLUMNS, mesh=MESH))
    first, second = variant.constraints()
    assert list(variant.without_constraint(first).constraints()) == [second]
    assert list(variant.without_constraint(second).constraints()) == [first]


@pytest.fixture(scope="module")
def found() -> Why:
    return why(jax.grad(loss), W, X, in_shardings=SPECS, mesh=MESH)


def test_the_first_fix_is_the_removal_of_the_constraint(found: Why):
    fix = found.fixes[0]
    assert fix.change == 'remove `ft.constrain(x, P("model", None))`'
    assert fix.source == line_of('return ft.constrain(x, P("model", None))')
    options = {"in_shardings": SPECS}
    before, after = (measured(jax.grad(fn), (W, X), options) for fn in (loss, mended))
    assert tuple(zip(before, after, strict=True)) == (fix.moved, fix.peak, fix.flops)


# Functions in which a spec or a result is wrong: the arguments, the options, the change that
# mends it, and the options after it.


def mixed(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.tanh(x @ w["up"]) @ w["down"])


def one_layer(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.tanh(x @ w["up"]))


TURNED = {"up": P("model", None), "down": P("model", None)}
MISTAKES: dict[str, tuple[Any, Any, Any, str, Any]] = {
    "a spec": (
        mixed,
        (W, X),
        {"in_shardings": (TURNED, P("data", None))},
        "shard `w.up` with P(None, 'model') instead of P('model', None)",
        {"in_shardings": SPECS},
    ),
    "a result": (
        jax.grad(one_layer),
        ({"up": W["up"]}, X),
        {
            "in_shardings": ({"up": COLUMNS[0]}, COLUMNS[1]),
            "out_shardings": {"up": P("model", None)},
        },
        "shard `result.up` with P(None, 'model'), like `w.up`",
        {"in_shardings": ({"up": COLUMNS[0]}, COLUMNS[1]), "out_shardings": {"up": COLUMNS[0]}},
    ),
}


def measured(fn: Any, args: Any, options: Any) -> tuple[int, int, int]:
    """The moved bytes, the peak and the flops."""
    compiled = ft.jit(fn, mesh=MESH, **options).lower(*args).compile()
    moved, flops, sizes = figures(compiled.ledger(), compiled.as_text() or "")
    return sum(size * times for _, _, size, times in moved), sizes[-1], flops


@pytest.mark.parametrize("case", MISTAKES)
def test_layouts_that_are_wrong(case: str):
    fn, args, options, change, right = MISTAKES[case]
    answer = why(fn, *args, mesh=MESH, **options)
    [fix] = [fix for fix in answer.fixes if fix.change == change]
    before, after = (measured(fn, args, given) for given in (options, right))
    assert tuple(zip(before, after, strict=True)) == (fix.moved, fix.peak, fix.flops)


def test_what_follows_a_parameter():
    """The moments of an optimizer and the new state are laid out as the parameter."""
    wrong = {"model.up": P("model", None), "model.down": P("model", None), ...: P()}
    right = {**wrong, "model.up": P(None, "model")}
    given = [
        {"in_shardings": (ft.StateSharding(specs), P("data", None)), "donate": "state"}
        for specs in (wrong, right)
    ]
    args = train_state(), X
    answer = why(ft.jit(train, mesh=MESH, **given[0]), *args)
    change = "shard `state.model.up` with P(None, 'model') instead of P('model', None)"
    [fix] = [fix for fix in answer.fixes if fix.change == change]
    before, after = (measured(train, args, options) for options in given)
    assert tuple(zip(before, after, strict=True)) == (fix.moved, fix.peak, fix.flops)


def test_the_layout_of_data_is_never_changed():
    one = call(jax.grad(loss), W, X, in_shardings=SPECS, mesh=MESH)
    ledger, _ = one.compiled()
    origins = {by for row in ledger.collectives if row.cause for by in row.cause.origins}
    assert ledger.data == ("x",) and "x" in origins
    changes = [edit.change for edit in Edits(one, (W, X), {}, one.layouts(), ledger)]
    sharded = [change for change in changes if change.startswith("shard ")]
    assert sharded and all(change.startswith("shard `w.") for change in sharded)


def plain(w: Any, x: Any) -> Any:
    return jnp.mean((jax.nn.relu(x @ w["up"]) @ w["down"]) ** 2)


BLAMED: dict[str, tuple[Callable[..., Any], bool]] = {
    "chosen by the compiler": (loss, True),
    "asked for": (plain, False),
}


@pytest.mark.parametrize("name", BLAMED)
def test_blamed_is_the_origin_of_what_nobody_asked_for(name: str):
    fun, blamed = BLAMED[name]
    one = call(jax.grad(fun), W, X, in_shardings=SPECS, mesh=MESH)
    edits = Edits(one, (W, X), {}, one.layouts(), one.compiled()[0])
    of_weights = {(edit.place, edit.is_blamed) for edit in edits if edit.place.startswith("w.")}
    assert of_weights == {("w.up", blamed), ("w.down", blamed)}


def test_layers_share_edits():
    def deep(w: Any, x: Any) -> Any:
        return jnp.mean(plain(w[1], jax.nn.relu(x @ w[0]["up"]) @ w[0]["down"]))

    one = call(jax.grad(deep), (W, W), X, in_shardings=((TENSOR, TENSOR), P("data")), mesh=MESH)
    edits = list(Edits(one, ((W, W), X), {}, one.layouts(), one.compiled()[0]))
    assert {edit.place for edit in edits} == {"w.{0-1}.up", "w.{0-1}.down", "out_shardings="}
    assert len(edits) == len({edit.change for edit in edits})


def test_results_without_layouts() -> None:
    """They are laid out like the arguments that they replace, and no result with a layout is."""
    fn, arguments, specs = jax.grad(loss), (W, X), SPECS
    one = call(fn, *arguments, in_shardings=specs, mesh=MESH)
    edits = Edits(one, arguments, {}, one.layouts(), one.compiled()[0])
    [edit] = [edit for edit in edits if edit.place == "out_shardings="]
    assert edit.change == "pass the layouts of the replaced arguments as `out_shardings=`"
    compiled = edit.lower().compile()
    expected = call(fn, *arguments, in_shardings=specs, out_shardings=specs[0], mesh=MESH)
    assert figures(*expected.compiled()) == figures(
        ledger_of(compiled, one.name, one.parameters, one.results, None, None, of_program=False),
        compiled.as_text() or "",
    )
    edits = Edits(expected, arguments, {}, expected.layouts(), expected.compiled()[0])
    assert "out_shardings=" not in {edit.place for edit in edits}


def moved(fn: Any, args: Any, specs: Any) -> int:
    ledger = ft.ledger(fn, *args, in_shardings=specs, out_shardings=P(), mesh=MESH)
    return sum(row.total for row in ledger.collectives)


def cs(x: Any, *spec: Any) -> Any:
    return ft.constrain(x, P(*spec))


def test_one_constraint_of_a_helper_or_of_a_line() -> None:
    """The edit removes the constraint that it names, and the figure is that of its removal."""

    def gated(w: Any, x: Any) -> Any:
        h, g = x @ w["up"], x @ w["up"]
        h, g = cs(h, "data", "model"), cs(g, "model", None)
        return jnp.mean((h * g) @ w["down"])

    def right(w: Any, x: Any) -> Any:
        h, g = x @ w["up"], x @ w["up"]
        return jnp.mean((cs(h, "data", "model") * g) @ w["down"])

    def inline(w: Any, x: Any) -> Any:
        h, g = x @ w["up"], x @ w["up"]
        h, g = ft.constrain(h, P("data", "model")), ft.constrain(g, P("model", None))
        return jnp.mean((h * g) @ w["down"])

    by_hand = moved(right, (W, X), SPECS)
    helper = why(gated, W, X, in_shardings=SPECS, out_shardings=P(), mesh=MESH).fixes[0]
    assert helper.change == "remove `ft.constrain(x, P(*spec))` where it is P('model', None)"
    assert helper.moved == (moved(gated, (W, X), SPECS), by_hand)
    line = why(inline, W, X, in_shardings=SPECS, out_shardings=P(), mesh=MESH).fixes[0]
    removed = """remove `ft.constrain(g, P("model", None))` where it is P('model', None)"""
    assert (line.change, line.moved[1]) == (removed, by_hand)


def test_all_constraints_of_a_line() -> None:
    """The arrays of a tree have different specs, and only together is the constraint wrong."""
    swapped = {"up": P("model", None), "down": P(None, "model")}

    def relaid(w: Any, x: Any) -> Any:
        grads = jax.grad(right_loss)(w, x)
        grads = {k: ft.constrain(grads[k], swapped[k]) for k in grads}
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, grads)

    def by_hand(w: Any, x: Any) -> Any:
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, jax.grad(right_loss)(w, x))

    def right_loss(w: Any, x: Any) -> Any:
        return jnp.mean((jax.nn.relu(x @ w["up"]) @ w["down"]) ** 2)

    laid: dict[str, Any] = {"in_shardings": SPECS, "out_shardings": TENSOR, "mesh": MESH}
    fix = why(relaid, W, X, **laid).fixes[0]
    assert fix.change == "remove `ft.constrain(grads[k], swapped[k])`"
    ledger = ft.ledger(by_hand, W, X, **laid)
    assert fix.moved[1] == sum(row.total for row in ledger.collectives) < fix.moved[0]


def test_models_with_equal_paths_are_changed_together() -> None:
    """A result may replace the parameter of either, so the edit names both."""

    def both(teacher: Any, student: Any, x: Any) -> Any:
        return jnp.mean((plain(teacher, x) - plain(student, x)) ** 2)

    laid, mended_w = {**TENSOR, "down": P(None, "model")}, {**TENSOR, "down": P("model", None)}
    step = jax.grad(both, argnums=1)
    given: dict[str, Any] = {"in_shardings": (laid, laid, P("data")), "mesh": MESH}
    fix = why(step, W, W, X, **given, out_shardings=laid, compilations=4).fixes[0]
    assert "`teacher.down` and `student.down` with P('model', None)" in fix.change
    given["in_shardings"] = (mended_w, mended_w, P("data"))
    by_hand = ft.ledger(step, W, W, X, **given, out_shardings=mended_w)
    assert fix.moved[1] == sum(row.total for row in by_hand.collectives)


def test_a_result_keeps_the_layout_of_its_argument() -> None:
    """A step whose averages are replicated takes them replicated, too."""

    def step(w: Any, mean: Any, x: Any) -> Any:
        w = jax.tree.map(lambda a, b: a - 0.1 * b, w, jax.grad(loss)(w, x))
        return w, jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, mean, w)

    whole = jax.tree.map(lambda _: P(), W)
    one = call(
        step, W, W, X, in_shardings=(TENSOR, whole, P("data")), out_shardings=(TENSOR, whole),
        mesh=MESH,
    )  # fmt: skip
    edits = Edits(one, (W, W, X), {}, one.layouts(), one.compiled()[0])
    assert not [edit.change for edit in edits if "result" in edit.place]


def test_a_batch_with_as_many_arrays_as_the_model_is_data():
    def of(w: Any, batch: Any) -> Any:
        return loss(w, batch["x"]) * jnp.mean(batch["y"])

    specs = TENSOR, P("data", None)
    ledger = ft.ledger(jax.grad(of), W, {"x": X, "y": X}, in_shardings=specs, mesh=MESH)
    assert ledger.data == ("batch",)


def test_rows(found: Why):
    ledger = ft.ledger(jax.grad(loss), W, X, in_shardings=SPECS, mesh=MESH)
    totals = [row.collective.total for row in found.rows]
    assert totals == sorted((one.total for one in ledger.collectives), reverse=True)
    assert {row.verdict for row in found.rows} == {"avoidable", "asked"}
    assert found.data == ("x",) and " compiled; data: x " in words(found)
    for row in found.rows:
        assert row.cause is not None and row.reason
        assert row.verdict == "asked" or row.reason == "not asked for"


@pytest.mark.parametrize("most", [1, 2])
def test_compilations_are_bounded(most: int):
    def fresh(w: Any, x: Any) -> Any:  # which JAX has not compiled
        return loss(w, x) * most

    with compilations() as heard:
        answer = why(jax.grad(fresh), W, X, in_shardings=SPECS, mesh=MESH, compilations=most)
    assert answer.compiled <= most and len(heard) == 1 + answer.compiled
    assert answer.tried >= answer.compiled


def test_tried_are_the_edits_that_give_a_program():
    """Ten heads divide two devices and not four: some rules cannot be tried."""
    rules = ft.AxisRules({"heads": "data", ...: None})

    def attend(w: Float[Array, "embed heads"], x: Float[Array, "batch embed"]) -> Array:
        return jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)

    given = abstract(128, 10), X
    step = ft.jit(attend, rules=rules, in_shardings=(rules, P("model", None)), mesh=MESH)
    one = call(step, *given)
    edits = list(Edits(one, given, {}, one.layouts(), one.compiled()[0]))
    failed = 0
    for edit in edits:
        with suppress(ft.FunctreeError, ValueError):
            edit.lower()
            continue
        failed += 1
    assert failed and why(step, *given).tried == len(edits) - failed


class Up(eqx.Module):
    w: Float[Array, "embed hidden"]


UP = ft.AxisRules({"embed": "model", "hidden": None})
UNPLACED, GIVEN = Up(abstract(128, 256)), Up(jnp.ones((128, 256)))
# What the layout of the model is after `embed` has no mesh axis: only the rules' own is changed.
PLACED: dict[str, tuple[Up, Any]] = {
    "abstract": (UNPLACED, P(None, None)),
    "abstract, on a mesh": (ft.abstract(lambda: GIVEN, UP, MESH)(), P(None, None)),
    "on a mesh": (ft.shard(GIVEN, UP, MESH), P(None, None)),
    "with a shorter spec": (
        jax.device_put(GIVEN, NamedSharding(MESH, PartitionSpec("model"))),
        P(None, None),
    ),
    "otherwise on a mesh": (ft.shard(GIVEN, P("data"), MESH), P("data", None)),
}


@pytest.mark.parametrize("case", PLACED)
def test_a_changed_rule_lays_out_what_the_rules_have_laid_out(case: str):
    up, expected = PLACED[case]
    step = ft.jit(jax.grad(lambda up, x: jnp.sum((x @ up.w) ** 2)), rules=UP, mesh=MESH)
    given = up, ft.shard(jnp.ones((64, 128)), P("data"), MESH)
    one = call(step, *given)
    edits = Edits(one, given, {}, one.layouts(), one.compiled()[0])
    [edit] = [e for e in edits if e.change == "change the rule for `embed` from 'model' to None"]
    model, _ = jax.tree.leaves(edit.lower().compile().input_shardings)
    assert model.is_equivalent_to(NamedSharding(MESH, expected), 2)


def test_of_placed_arrays_without_names_nothing_is_warned():
    step = ft.jit(jax.grad(lambda m, x: jnp.sum((x @ m["w"]) ** 2)), rules=UP, mesh=MESH)
    given = ft.shard({"w": GIVEN.w}, P(), MESH), ft.shard(jnp.ones((64, 128)), P("data"), MESH)
    assert why(step, *given).tried > 0  # a warning would be an error


def test_forgotten_rules() -> None:
    """Without `rules=`, no layer constrains an activation, and the batch is gathered."""
    layout = ft.AxisRules({"batch": "data", ...: None}) | ft.FSDP("data", min_size=0)

    def make(key: Any) -> Any:
        return ft.nn.Embedding(256, 64, key=key), ft.nn.MLP(64, 256, key=key)

    def loss(model: Any, tokens: Any) -> Any:
        embed, mlp = model
        return jnp.mean(mlp(embed(tokens)) ** 2)

    laid = partial(
        ft.jit, ft.grad(loss), in_shardings=(layout, P("data")), out_shardings=layout, mesh=MESH
    )
    arguments = ft.abstract(make)(jax.random.key(0)), ShapeDtypeStruct((64, 64), "int32")
    fix = why(laid(), *arguments, compilations=2).fixes[0]
    assert fix.change == f"also pass `rules={layout!r}`"
    passed = ft.ledger(laid(rules=layout), *arguments)
    moved = sum(row.total for row in passed.collectives)
    assert fix.moved[1] == moved < 0.6 * fix.moved[0]
    assert fix.peak[1] == passed.memory.peak
    assert "rules=" not in str(why(laid(rules=layout), *arguments, compilations=1))


def test_each_layout_with_rules_may_be_the_forgotten_one() -> None:
    """Which of two layouts was meant is not guessed from their order."""
    layouts = (
        ft.AxisRules({"embed": "model", ...: None}),
        ft.AxisRules({"batch": "data", ...: None}),
    )

    def apply(mlp: Any, x: Float[Array, "batch embed"]) -> Any:
        return jnp.sum(mlp(x))

    fn = ft.jit(apply, in_shardings=layouts, mesh=MESH)
    arguments = ft.nn.MLP(64, 256, key=jax.random.key(0)), X.update(shape=(64, 64))
    one = call(fn, *arguments)
    edits = Edits(one, arguments, {}, one.layouts(), one.compiled()[0])
    changes = {edit.change for edit in edits if edit.place == "rules="}
    assert changes == {f"also pass `rules={layout!r}`" for layout in layouts}


def words(answer: ft.Why) -> str:
    return " ".join(str(answer).split())


def test_nothing_is_found():
    answer = why(lambda w, x: jnp.sum(x @ w), SQUARE, X, in_shardings=COLUMNS, mesh=MESH)
    assert answer.fixes == () and "; no fix found; " in words(answer)
    alone = why(jnp.sin, jnp.ones(3))
    assert words(alone) == (
        "sin moves 0 B to each device: 0 B asked for, 0 B avoidable, 0 B by the compiler's choice; "
        "no fix found; 0 edits tried, 0 compiled"
    )


def test_a_hint_where_no_edit_helps():
    def ordered(w: Any, x: Any) -> Any:
        return jnp.sort(x @ w, axis=1), jnp.sum(wrong(jnp.sin(x)) ** 2.0)

    answer = why(ordered, SQUARE, X, in_shardings=COLUMNS, mesh=MESH)
    verdicts = {row.cause.op: row.verdict for row in answer.rows if row.cause}
    # The fix for the constraint leaves what is moved for the sort.
    assert answer.fixes and verdicts["sort"] == "compiler" and "avoidable" in verdicts.values()
    [hint] = answer.hints
    assert hint.startswith("`jnp.sort(x @ w, axis=1)` at ") and "sort each shard" in hint
    assert "\n\nhints:\n    `jnp.sort(" in str(answer) and "sort each shard" in answer.html()


def test_a_constraint_whose_source_is_not_known():
    typed: dict[str, Any] = {"jnp": jnp, "ft": ft, "P": P}
    text = "def typed(x):\n    return jnp.sum(ft.constrain(jnp.sin(x), P('model', None)) ** 2.0)\n"
    exec(compile(text, "<stdin>", "exec"), typed)
    answer = why(typed["typed"], X, in_shardings=P("data"), mesh=MESH)
    assert [(fix.change, fix.source) for fix in answer.fixes] == [
        ("remove the constraint", "<stdin>:2")
    ]


def test_text_page_and_json(found: Why):
    text, page, data = str(found), found.html(), json.loads(found.to_json())
    assert text.startswith("loss moves ") and " avoidable, " in text
    assert "fixes, each compiled:" in text and "1. remove `ft.constrain(" in text
    assert ": avoidable: not asked for" in text
    assert all(len(line) <= 100 for line in text.splitlines()[1:])
    assert "moved " in str(found.fixes[0]) and repr(found).startswith("<Why of loss: ")
    assert page.startswith("<!doctype html>") and "http" not in page
    assert "Why loss moves arrays" in page and page.count("<table") == 1
    assert "remove <code>ft.constrain(x, P(&quot;model&quot;, None))</code>" in page
    fragment = found._repr_html_()
    assert "<html" not in fragment and "avoidable" in fragment
    assert (data["functree"], data["name"], data["data"]) == ("why", "loss", ["x"])
    assert len(data["rows"]) == len(found.rows)
    assert data["fixes"][0]["change"] == found.fixes[0].change


def test_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("functree.explorer.progress.PATIENCE", 0.0)
    ft.why(jax.grad(loss), W, X, in_shardings=SPECS, mesh=MESH, compilations=1, progress=True)
    said = capsys.readouterr().err
    assert "why: 0 of " in said and " ranked; now remove `ft.constrain(" in said
    assert "why: 0 of 1 compiled; now remove `ft.constrain(" in said
    why(jax.grad(loss), W, X, in_shardings=SPECS, mesh=MESH, compilations=1)
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "")


def test_the_hint_about_a_reshape_that_a_mesh_axis_does_not_divide():
    def heads(w: Any, x: Any) -> Any:
        return jnp.sin((x @ w).reshape(16, 6, 8))

    args = jax.ShapeDtypeStruct((32, 48), "float32"), jax.ShapeDtypeStruct((16, 32), "float32")
    ledger = ft.ledger(heads, *args, in_shardings=(P(None, "model"), P("data")), mesh=MESH)
    hints = {one.cause.hint for one in ledger.collectives if one.cause is not None}
    assert "4 does not divide 6: choose a multiple of 4" in hints
