"""`plan_optimizer` and `init_optimizer` for every optimizer that optax exports, against literal
specs."""

import dataclasses
import functools
import gc
import re
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

import functree as ft
from tests.lib.meshes import MESH, SIZES, mesh_of
from tests.lib.optimizers import (
    EXPORTED,
    NAMES,
    NO_OPTIMIZERS,
    WITH,
    adam,
    build,
    given,
    kinds,
    two,
    vectors,
)

P = PartitionSpec
S = jax.ShapeDtypeStruct


class Net(eqx.Module):
    up: Float[Array, "embed hidden"]
    bias: Float[Array, "hidden"]
    square: Float[Array, "heads embed"]
    table: Float[Array, "vocab embed"]
    cube: Float[Array, "layers embed hidden"]
    gain: Float[Array, ""]
    activation: Callable[[Array], Array] = jax.nn.relu
    missing: Float[Array, "hidden"] | None = None


RULES = ft.AxisRules(
    {"hidden": "model", "heads": "model", "vocab": "model", "layers": None, "embed": "data"}
)

# The oracle: what each parameter is, and where it goes. `table` and `cube` are large enough for
# adafactor.
SHAPES = {
    "up": (16, 8),
    "bias": (8,),
    "square": (8, 8),
    "table": (256, 128),
    "cube": (3, 128, 256),
    "gain": (),
}
SPECS: dict[str, P] = {
    "up": P("data", "model"),
    "bias": P("model"),
    "square": P("model", "data"),
    "table": P("model", "data"),
    "cube": P(None, "data", "model"),
    "gain": P(),
}
# Of what has neither a parameter's shape nor its shape behind leading dimensions: (field,
# parameter, ...).
FACTORED: dict[tuple[Any, ...], P] = {
    ("v_row", "table"): P("data"),
    ("v_col", "table"): P("model"),
    ("v_row", "cube"): P(None, "data"),
    ("v_col", "cube"): P(None, "model"),
    ("mu", "up", 0): P("data"),
    ("mu", "up", 1): P("model"),
    ("mu", "square", 0): P("model"),
    ("mu", "square", 1): P("data"),
    ("mu", "table", 0): P("model"),
    ("mu", "table", 1): P("data"),
    ("mu", "cube", 0): P(None),
    ("mu", "cube", 1): P("data"),
    ("mu", "cube", 2): P("model"),
}
DICT: dict[str, Any] = {name: S(shape, jnp.float32) for name, shape in SHAPES.items()}
NET = Net(**DICT)
DICT_LAYOUT = dict(SPECS)


def concrete(shape: tuple[int, ...], seed: int = 0) -> Array:
    return jax.random.normal(jax.random.key(seed), shape)


def concrete_net() -> Net:
    values: dict[str, Any] = {
        name: concrete(shape, i) for i, (name, shape) in enumerate(SHAPES.items())
    }
    return Net(**values)


NOT_DERIVABLE = ("flatten", "galore", "scale_by_galore")


def arrays(model: Any) -> Any:
    return jax.tree.map(lambda x: x if eqx.is_array(x) or isinstance(x, S) else None, model)


def test_every_export_is_known():
    assert not NO_OPTIMIZERS - set(EXPORTED), "optax no longer exports these"
    assert not set(WITH) - set(NAMES), "optax no longer exports these"
    assert len(NAMES) >= 130
    for name in NAMES:
        assert callable(build(name).init), name


# Every optimizer: rows, shapes, specs


def want(path: ft.Path, shape: tuple[int, ...]) -> P:
    """The literal oracle: a parameter's spec for its shape, behind whole leading dimensions; else
    FACTORED."""
    at = next((i for i, key in enumerate(path) if key in SPECS), None)
    if at is None or shape == (1,):
        return P(*[None] * len(shape))
    name = path[at]
    lead = len(shape) - len(SHAPES[name])
    if lead >= 0 and shape[lead:] == SHAPES[name]:
        return P(*[None] * lead, *SPECS[name])
    # Without the place in a list of models, as in `mu.3.up`.
    field = next(key for key in reversed(path[:at]) if isinstance(key, str))
    return FACTORED[field, *path[at:]] if shape else P()


@pytest.mark.parametrize("copies", [1, 4], ids=["one of each kind", "four of each kind"])
@pytest.mark.parametrize("name", sorted(set(NAMES) - set(NOT_DERIVABLE)))
def test_every_optimizer_is_laid_out(name: str, copies: int):
    tx, model = build(name), given(name, NET if copies == 1 else [NET] * copies)
    plan = ft.plan_optimizer(tx, model, RULES, SIZES)
    state = jax.eval_shape(tx.init, arrays(model))
    expected = [
        (ft.Path.of(path), x.shape, x.dtype) for path, x in jax.tree.leaves_with_path(state)
    ]
    expected = [(p, shape, dtype, want(p, shape)) for p, shape, dtype in expected]
    assert [(row.path, row.shape, row.dtype, row.spec) for row in plan] == expected
    assert jax.tree.structure(plan.specs) == jax.tree.structure(state)


@pytest.mark.parametrize("name", NOT_DERIVABLE)
def test_what_cannot_be_derived_is_an_error_that_names_otherwise(name: str):
    tx = build(name)
    with pytest.raises(ft.ShardingError) as caught:
        ft.plan_optimizer(tx, DICT, DICT_LAYOUT, SIZES)
    state = {
        ft.Path.of(path): x for path, x in jax.tree.leaves_with_path(jax.eval_shape(tx.init, DICT))
    }
    assert caught.value.problems
    for problem in caught.value.problems:
        assert problem.path is not None and problem.shape == state[ft.Path(problem.path)].shape
        assert str(ft.Path(problem.path)) in str(caught.value)
        assert problem.why == (
            "depends on the shapes of the parameters in a way that cannot be determined, "
            "so it cannot get the spec of a parameter"
        )
        assert "`otherwise=P()`" in problem.remedy
    plan = ft.plan_optimizer(tx, DICT, DICT_LAYOUT, SIZES, otherwise=P())
    failed = {problem.path for problem in caught.value.problems}
    for row in plan:
        assert row.shape == state[row.path].shape
        if row.path in failed:
            assert (
                row.spec == P(*[None] * len(row.shape)) and row.reason == "otherwise: P() as given"
            )
    assert len(plan) == len(state)


def test_a_rank_that_depends_on_sizes_cannot_be_derived():
    """Of a leaf that belongs to no parameter too."""

    def init(params: Any) -> Any:
        return {"table": jnp.zeros((2,) * (1 + params["w"].shape[0] % 2))}

    tx = optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))
    for size in (4, 5):
        with pytest.raises(ft.ShardingError, match="a way that cannot be determined"):
            ft.plan_optimizer(tx, {"w": S((size, 8), jnp.float32)}, P(), SIZES)


def test_galores_own_dimensions_are_never_taken_for_a_parameters():
    """A rank that is the smallest size looks like that size."""
    for shape, rank in (
        ((16, 8), 128),
        ((8, 16), 128),
        ((64, 32), 4),
        ((32, 64), 4),
        ((256, 256), 128),
    ):
        params = {"w": S(shape, jnp.float32)}
        with pytest.raises(ft.ShardingError, match="otherwise"):
            ft.plan_optimizer(
                optax.contrib.galore(1e-3, rank=rank), params, P("data", "model"), SIZES
            )
    # Of a square parameter, and at its full rank, each leaf has the shape of the parameter.
    specs = specs_of(optax.contrib.galore(1e-3), {"w": S((8, 8), jnp.float32)}, P("data", "model"))
    assert specs["0.projector.w"] == specs["0.base_optimizer_state.mu.w"] == P("data", "model")


def test_otherwise_is_any_layout_and_sees_the_paths_of_the_state():
    layout = ft.StateSharding({"0.projector.table": P("data"), "**.up": P(None, "model"), ...: P()})
    plan = ft.plan_optimizer(
        optax.contrib.scale_by_galore(rank=4), DICT, DICT_LAYOUT, SIZES, otherwise=P("data")
    )
    assert plan["projector.table"].spec == P("data", None)
    params = {"w": S((64, 2), jnp.float32)}
    flat = ft.plan_optimizer(
        optax.flatten(optax.trace(0.9)), params, P(), SIZES, otherwise=P("data")
    )
    assert [(row.shape, row.spec) for row in flat] == [((128,), P("data"))]
    plan = ft.plan_optimizer(
        optax.contrib.galore(1e-3, rank=4), DICT, DICT_LAYOUT, SIZES, otherwise=layout
    )
    assert plan["0.projector.table"].spec == P("data", None)
    assert plan["0.base_optimizer_state.mu.up"].spec == P(None, "model")
    with pytest.raises(ft.ShardingError, match="data=2 needs a multiple of 2"):
        odd = {"w": S((3, 3), jnp.float32)}
        ft.plan_optimizer(optax.flatten(adam()), odd, P(), SIZES, otherwise=P("data"))


@pytest.mark.parametrize("otherwise", [{"w": P()}, [P()], 3])
def test_otherwise_is_one_layout(otherwise: Any):
    with pytest.raises(ft.RuleError, match=r"is not a layout: .*a callable \(path, leaf\) -> P$"):
        ft.plan_optimizer(adam(), DICT, DICT_LAYOUT, SIZES, otherwise=otherwise)


@pytest.mark.parametrize("unused", ["error", "warn", "ignore"])
def test_a_filter_of_otherwise_that_matches_nothing_is_reported(unused: Any):
    layout = ft.StateSharding({"**.projj": P("data"), ...: P()}, unused=unused)
    tx = optax.contrib.scale_by_galore(rank=4)
    message = r"filter '\*\*\.projj'\s+matches no leaf"
    expected = {
        "error": pytest.raises(ft.ShardingError, match=message),
        "warn": pytest.warns(ft.FunctreeWarning, match=message),
        "ignore": nullcontext(),
    }[unused]
    with expected:
        ft.plan_optimizer(tx, DICT, DICT_LAYOUT, SIZES, otherwise=layout)


def test_otherwise_by_rules_needs_names():
    with pytest.raises(ft.ShardingError, match="has no axis names"):
        ft.plan_optimizer(optax.contrib.galore(1e-3), DICT, DICT_LAYOUT, SIZES, otherwise=RULES)


# Families, spelled out


def specs_of(tx: Any, model: Any = NET, layout: Any = RULES, **kwargs: Any) -> dict[str, P | None]:
    return {
        str(row.path): row.spec for row in ft.plan_optimizer(tx, model, layout, SIZES, **kwargs)
    }


def test_adafactor_keeps_the_right_dimensions():
    plan = ft.plan_optimizer(optax.adafactor(1e-3), NET, RULES, SIZES)
    assert (plan["0.v_row.table"].shape, plan["0.v_row.table"].spec) == ((128,), P("data"))
    assert (plan["0.v_col.table"].shape, plan["0.v_col.table"].spec) == ((256,), P("model"))
    assert plan["0.v_row.cube"].axes == ft.Axes("layers", "embed")
    assert plan["0.v_row.cube"].reason == "as cube, its dimensions 0, 1"
    assert plan["0.v_row.up"].reason == "does not depend on the parameters"
    assert plan["0.v.up"].spec == SPECS["up"] and plan["0.v.table"].shape == (1,)


@pytest.mark.parametrize(
    "shape", [(128, 256), (256, 128), (128, 128), (127, 128), (129, 128), (128, 127), (127, 127)]
)
def test_adafactor_next_to_its_threshold(shape: tuple[int, ...]):
    params = {
        "w": S(shape, jnp.float32),
        "v": S((128, 127), jnp.float32),
        "u": S((128, 200), jnp.float32),
    }
    tx = optax.adafactor(1e-3)
    plan = ft.plan_optimizer(
        tx, params, {"w": P("x", "y"), "v": P("x", "y"), "u": P("x", "y")}, {"x": 1, "y": 1}
    )
    factored = min(shape) >= 128
    rows, cols = sorted(
        range(2), key=lambda d: shape[d]
    )  # v_row keeps the smaller dimension; of equals, the first
    assert plan["0.v_row.w"].spec == (P("xy"[rows]) if factored else P(None))
    assert plan["0.v_col.w"].spec == (P("xy"[cols]) if factored else P(None))
    assert plan["0.v.w"].spec == (P(None) if factored else P("x", "y"))
    assert plan["0.v_row.u"].spec == P("x") and plan["0.v.v"].spec == P("x", "y")


def test_sm3_has_one_dimension_each():
    specs = specs_of(optax.sm3(1e-3))
    assert [specs[f"0.mu.cube.{i}"] for i in range(3)] == [P(None), P("data"), P("model")]
    assert specs["0.nu.cube"] == SPECS["cube"]


def test_lbfgs_memory_is_behind_unsharded_dimensions():
    plan = ft.plan_optimizer(optax.lbfgs(1e-3, memory_size=8), NET, RULES, SIZES)
    row = plan["0.diff_params_memory.up"]
    assert (row.shape, row.spec) == ((8, 16, 8), P(None, "data", "model"))
    assert row.axes == ft.Axes(None, "embed", "hidden")
    assert plan["0.diff_updates_memory.bias"].spec == P(None, "model")
    assert plan["0.weights_memory"].reason == "does not depend on the parameters"


def test_muon_and_its_adam():
    specs = specs_of(optax.contrib.muon(1e-3))
    matrices, rest = "inner_states.muon.inner_state.0.mu", "inner_states.adam.inner_state.0.mu"
    assert {name: specs[f"{matrices}.{name}"] for name in ("up", "square", "table")} == {
        name: SPECS[name] for name in ("up", "square", "table")
    }
    assert specs[f"{rest}.bias"] == P("model") and specs[f"{rest}.cube"] == SPECS["cube"]
    assert f"{matrices}.bias" not in specs


def nested() -> Any:
    inner = optax.chain(
        optax.clip(1.0),
        optax.masked(optax.lbfgs(1e-3, linesearch=None), vectors),
        optax.inject_hyperparams(optax.adamw)(learning_rate=optax.cosine_decay_schedule(1e-3, 10)),
    )
    return optax.MultiSteps(optax.partition({"vector": inner, "matrix": optax.sm3(1e-3)}, kinds), 3)


COMBINATIONS: dict[str, tuple[Callable[[], Any], dict[str, P]]] = {
    "masked": (lambda: optax.masked(adam(), vectors), {"inner_state.0.mu.bias": P("model")}),
    "masked, not as a function": (
        lambda: optax.masked(
            optax.adafactor(1e-3), jax.tree.map(lambda x: x.ndim == 2, arrays(NET))
        ),
        {"inner_state.0.v_col.table": P("model"), "inner_state.0.v.up": P("data", "model")},
    ),
    "multi_transform": (
        lambda: optax.multi_transform(two(), kinds),
        {
            "inner_states.vector.inner_state.0.mu.bias": P("model"),
            "inner_states.matrix.inner_state.0.v_row.cube": P(None, "data"),
        },
    ),
    "MultiSteps": (
        lambda: optax.MultiSteps(optax.adafactor(1e-3), 2),
        {
            "acc_grads.table": P("model", "data"),
            "inner_opt_state.0.v_row.table": P("data"),
            "mini_step": P(),
        },
    ),
    "inject_hyperparams": (
        lambda: optax.inject_hyperparams(optax.sm3)(learning_rate=1e-3),
        {"hyperparams.learning_rate": P(), "inner_state.0.mu.table.1": P("data")},
    ),
    "chain of chains": (
        lambda: optax.chain(
            optax.chain(optax.clip(1.0), adam()), optax.add_decayed_weights(0.1), optax.ema(0.9)
        ),
        {"0.1.0.mu.up": P("data", "model"), "2.ema.cube": P(None, "data", "model"), "2.count": P()},
    ),
    "nested": (
        nested,
        {
            "acc_grads.square": P("model", "data"),
            "inner_opt_state.inner_states.matrix.inner_state.0.mu.cube.2": P("model"),
            "inner_opt_state.inner_states.vector.inner_state.1.inner_state.0.diff_params_memory.bias": P(
                None, "model"
            ),
            "inner_opt_state.inner_states.vector.inner_state.2.inner_state.0.nu.bias": P("model"),
            "inner_opt_state.inner_states.vector.inner_state.2.hyperparams.learning_rate": P(),
        },
    ),
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_combinations(name: str):
    make, expected = COMBINATIONS[name]
    with jax.numpy_dtype_promotion(
        "standard"
    ):  # schedules promote, and inject_hyperparams calls them to begin with
        specs = specs_of(make())
        state = jax.eval_shape(make().init, arrays(NET))
    assert {path: specs[path] for path in expected} == expected
    assert len(specs) == len(jax.tree.leaves(state))


# Parameters of other kinds, and names that could be mistaken


def test_parameters_in_dicts_lists_and_bare():
    w, b = S((8, 4), jnp.float32), S((4,), jnp.float32)
    specs = specs_of(adam(), {"layers": [{"w": w}, {"w": w, "b": b}], "none": None}, P("model"))
    assert specs["0.mu.layers.0.w"] == specs["0.nu.layers.1.w"] == P("model", None)
    assert specs["0.mu.layers.1.b"] == P("model") and specs["0.count"] == P() and len(specs) == 7
    assert specs_of(adam(), w, P("model")) == {
        "0.count": P(),
        "0.mu": P("model", None),
        "0.nu": P("model", None),
    }
    assert specs_of(optax.sm3(1e-3), (w,), P("model", "data")) == {
        "0.mu.0.0": P("model"),
        "0.mu.0.1": P("data"),
        "0.nu.0": P("model", "data"),
    }
    assert specs_of(adam(), {}, P("model")) == {"0.count": P()}


def test_a_parameter_called_as_the_state_is():
    """Every parameter has one shape: only its path tells whose a leaf is."""
    w = S((8, 8), jnp.float32)
    x, y = P("data", None), P("model", None)
    specs = specs_of(adam(), {"mu": w, "nu": w, "count": w}, {"mu": x, "nu": y, "count": x})
    assert specs["0.mu.mu"] == specs["0.nu.mu"] == x
    assert specs["0.mu.nu"] == specs["0.nu.nu"] == y and specs["0.count"] == P()
    specs = specs_of(adam(), {"mu": {"w": w}, "w": w}, {"mu": {"w": x}, "w": y})
    assert specs["0.mu.mu.w"] == specs["0.nu.mu.w"] == x
    assert specs["0.mu.w"] == specs["0.nu.w"] == y
    # A state with one field: all its leaves are below the name of the parameter `trace`.
    specs = specs_of(optax.trace(0.9), {"trace": w, "w": w}, {"trace": x, "w": y})
    assert specs == {"trace.trace": x, "trace.w": y}
    specs = specs_of(optax.trace(0.9), {"trace": {"w": w}, "w": w}, {"trace": {"w": x}, "w": y})
    assert specs == {"trace.trace.w": x, "trace.w": y}
    masked = optax.masked(optax.trace(0.9), {"a": {"w": True}, "w": False})
    assert specs_of(masked, {"a": {"w": w}, "w": w}, {"a": {"w": x}, "w": y}) == {
        "inner_state.trace.a.w": x
    }


def test_lists_of_equal_parameters_whose_state_is_lists():
    """`0.mu.1.0` of sm3 is of parameter 1, and not of parameter 0 behind `0.mu.1`."""
    w, x, y = S((8,), jnp.float32), P("data"), P("model")
    specs = specs_of(optax.sm3(1e-3), [w, w], [x, y])
    assert specs == {"0.mu.0.0": x, "0.mu.1.0": y, "0.nu.0": x, "0.nu.1": y}


def test_labels_called_as_other_parameters_are():
    w = S((8, 8), jnp.float32)
    tx = optax.partition({"b": optax.trace(0.9), "w": optax.trace(0.9)}, {"w": "b", "b": "w"})
    specs = specs_of(tx, {"w": w, "b": w}, {"w": P("data", None), "b": P("model", None)})
    assert specs == {
        "inner_states.b.inner_state.trace.w": P("data", None),
        "inner_states.w.inner_state.trace.b": P("model", None),
    }


def test_keys_that_are_numbers_or_no_identifiers():
    w = S((8, 4), jnp.float32)
    specs = specs_of(
        optax.sm3(1e-3),
        {0: w, 1: w},
        ft.StateSharding({"0": P("data", None), ...: P(None, "data")}),
    )
    assert specs["0.nu.0"] == P("data", None) and specs["0.nu.1"] == P(None, "data")
    assert [specs[f"0.mu.{p}.{i}"] for p in (0, 1) for i in (0, 1)] == [
        P("data"),
        P(None),
        P(None),
        P("data"),
    ]
    specs = specs_of(
        optax.trace(0.9), {"a.b": w, "0": w}, {"a.b": P("data", None), "0": P(None, "data")}
    )
    assert specs == {'trace."a.b"': P("data", None), 'trace."0"': P(None, "data")}


class Partly(eqx.Module):
    w: Float[Array, "embed hidden"]
    running: ft.Buffer[Float[Array, "hidden"]]
    step: Int[Array, ""]
    size: int = eqx.field(static=True)
    activation: Callable[[Array], Array] = jax.nn.relu


PARTS: Any = (S((4, 8), jnp.float32), S((8,), jnp.float32), S((), jnp.int32))
PARTLY = Partly(*PARTS, size=3)


def test_wrt_says_what_is_trained():
    assert specs_of(optax.trace(0.9), PARTLY) == {"trace.w": P("data", "model")}
    everything = {"trace.w": P("data", "model"), "trace.running": P("model"), "trace.step": P()}
    assert specs_of(optax.trace(0.9), PARTLY, wrt=...) == everything
    assert specs_of(optax.trace(0.9), PARTLY, wrt=ft.is_buffer) == {"trace.running": P("model")}
    assert specs_of(optax.trace(0.9), PARTLY, wrt="running") == {"trace.running": P("model")}
    with pytest.raises(ft.FunctreeError, match="nothing to train: no array of Partly matches wrt="):
        specs_of(optax.trace(0.9), PARTLY, wrt=ft.larger_than(10**9))
    with pytest.raises(
        ft.RuleError, match=r"wrt='nothing': glob\('nothing'\) matches no leaf of Partly"
    ):
        specs_of(optax.trace(0.9), PARTLY, wrt="nothing")


def test_half_of_the_parameters_for_an_inner_optimizer():
    """`lookahead`: its inner state is that of the fast half, whose sizes tell it from the slow
    one."""
    w: Any = S((8, 4), jnp.float32)
    params = optax.LookaheadParams({"w": w, "b": w}, {"w": w, "b": w})
    tx = optax.lookahead(adam(), 5, 0.5)
    specs = specs_of(tx, params, ft.StateSharding({"*.w": P("data"), "*.b": P("model")}))
    assert specs["fast_state.0.mu.w"] == P("data", None) and specs["fast_state.0.nu.b"] == P(
        "model", None
    )
    specs = specs_of(tx, params, ft.StateSharding({"fast.**": P("data"), "slow.**": P("model")}))
    assert specs["fast_state.0.mu.w"] == specs["fast_state.0.nu.b"] == P("data", None)


def test_an_init_that_stands_no_other_sizes():
    def init(params: Any) -> Any:
        return {"m": params, "product": params["a"] @ params["b"]}

    params = {"a": S((8, 4), jnp.float32), "b": S((4, 2), jnp.float32)}
    tx = optax.GradientTransformation(init, no_update)
    with pytest.raises(ft.ShardingError, match=r"product   f32\[8, 2\]") as caught:
        specs_of(tx, params, P("data"))
    assert len(caught.value.problems) == 1
    assert specs_of(tx, params, P("data"), otherwise=P("model"))["product"] == P("model", None)


def test_an_init_whose_sizes_have_to_fit_together():
    """It raises for all other sizes, so only the real ones are known: a leaf with the shape of its
    parameter is like it, and of another one nothing can be said."""

    def init(params: Any) -> Any:
        return {
            "product": params["a"] @ params["b"],
            "m": params,
            "row": jax.tree.map(lambda x: x[:1], params),
            "count": jnp.zeros(()),
        }

    params = {"a": S((4, 5), jnp.float32), "b": S((5, 3), jnp.float32)}
    tx = optax.GradientTransformation(init, no_update)
    layout = {"a": P("data"), "b": P(None, "data")}
    with pytest.raises(ft.ShardingError) as caught:
        ft.plan_optimizer(tx, params, layout, {"data": 1})
    assert [str(one.path) for one in caught.value.problems] == ["product", "row.a", "row.b"]
    plan = ft.plan_optimizer(tx, params, layout, {"data": 1}, otherwise=P())
    assert plan["m.a"].spec == P("data", None) and plan["m.b"].spec == P(None, "data")
    assert plan["count"].reason == "does not depend on the parameters"


def test_an_error_of_functree_in_an_init_is_not_taken_for_sizes_that_do_not_fit():
    def init(params: Any) -> Any:
        if params["a"].shape != (8, 4):
            raise ft.ShardingError("the state is for 8 rows")
        return {"m": params, "row": params["a"][0]}

    tx = optax.GradientTransformation(init, no_update)
    with pytest.raises(ft.ShardingError, match="the state is for 8 rows"):
        specs_of(tx, {"a": S((8, 4), jnp.float32)}, P("data"))


def test_sizes_of_one_and_zero():
    params = {
        "one": S((1, 1), jnp.float32),
        "none": S((0, 4), jnp.float32),
        "row": S((1, 8), jnp.float32),
    }
    specs = specs_of(
        optax.adafactor(1e-3),
        params,
        {"one": P(), "none": P(None, "model"), "row": P(None, "model")},
    )
    assert specs["0.v.none"] == P(None, "model") and specs["0.v.row"] == P(None, "model")
    assert specs["0.v.one"] == P(None, None)


def by_width(width: Callable[[Any], tuple[int, ...]]) -> Any:
    return optax.GradientTransformation(
        lambda params: jax.tree.map(lambda x: jnp.zeros(width(x)), params), no_update
    )


def no_update(updates: Any, state: Any, params: Any = None) -> Any:
    return updates, state


def test_of_an_optimizer_that_optax_does_not_have():
    params = {"w": S((8, 4), jnp.float32)}
    layout = P("data", "model")
    assert specs_of(by_width(lambda x: (1, x.shape[1])), params, layout) == {"w": P(None, "model")}
    assert specs_of(by_width(lambda x: (x.shape[0], 1)), params, layout) == {"w": P("data", None)}
    assert specs_of(by_width(lambda x: (2, *x.shape)), params, layout) == {
        "w": P(None, "data", "model")
    }
    assert specs_of(by_width(lambda x: (5,)), params, layout) == {"w": P(None)}
    for width in (
        lambda x: (x.shape[0], x.shape[0]),  # a preconditioner: one mesh axis cannot split both
        lambda x: (x.shape[0], 3),
        lambda x: (x.size,),
        lambda x: (x.shape[1], x.shape[0]),
        lambda x: (*x.shape, 2),
        lambda x: (x.shape[0], *x.shape),  # a history as long as the parameter
        lambda x: (3 * x.shape[0], *x.shape),
        lambda x: (2 * x.shape[1] - 1,),  # relative positions: 9 as the parameter has rows then
    ):
        with pytest.raises(
            ft.ShardingError, match=r"w   f32\[.*\n.*cannot be determined"
        ) as caught:
            specs_of(by_width(width), params, layout)
        assert "otherwise=P()" in str(caught.value)


def test_what_is_wrong_with_otherwise_itself():
    params, otherwise = {"w": S((8, 4), jnp.float32)}, ft.AxisRules({"embed": "dta", ...: None})
    with pytest.raises(ft.ShardingError) as caught:
        specs_of(by_width(lambda x: (x.size,)), params, P("data"), otherwise=otherwise)
    whys = [problem.why for problem in caught.value.problems]
    assert any("the mesh (data=2, model=4) has no axis `dta`" in why for why in whys), whys


def test_an_optimizer_whose_state_has_other_leaves_for_other_sizes():
    def init(params: Any) -> Any:
        square = jax.tree.map(lambda x: jnp.zeros(x.shape), params)
        return {"m": square, "extra": square} if params["w"].shape == (8, 8) else {"m": square}

    tx = optax.GradientTransformation(init, no_update)
    specs = specs_of(tx, {"w": S((8, 8), jnp.float32)}, P("data"))
    assert specs == {"m.w": P("data", None), "extra.w": P("data", None)}


def test_an_optimizer_whose_state_has_other_ranks_for_other_sizes():
    """Whether they are larger or smaller: then a leaf with the shape of its parameter is like it."""

    def init(params: Any) -> Any:
        flat = jax.tree.map(lambda x: jnp.zeros(x.shape if x.shape[0] == 8 else x.size), params)
        return {"m": flat, "sum": jax.tree.map(lambda x: jnp.zeros(x.shape[:1]), params)}

    tx = optax.GradientTransformation(init, no_update)
    params = {"w": S((8, 8), jnp.float32), "v": S((16, 8), jnp.float32)}
    with pytest.raises(ft.ShardingError) as caught:
        specs_of(tx, {"w": params["w"]}, P("data"))
    assert [str(problem.path) for problem in caught.value.problems] == ["sum.w"]
    specs = specs_of(tx, {"w": params["w"]}, P("data"), otherwise=P())
    assert specs == {"m.w": P("data", None), "sum.w": P(None)}


@dataclasses.dataclass
class Start:
    """An `init` that is no function: it has no hash, and cannot be a key."""

    tx: Any

    def __call__(self, params: Any) -> Any:
        return self.tx.init(params)

    def init(self, params: Any) -> Any:
        return self.tx.init(params)


def test_an_init_of_any_kind():
    made = adam()
    expected = ft.plan_optimizer(made, MANY, P("data"), SIZES).rows
    for init in (Start(made), Start(made).init, functools.partial(made.init), jax.jit(made.init)):
        tx = optax.GradientTransformation(init, made.update)
        for _ in range(2):
            assert ft.plan_optimizer(tx, MANY, P("data"), SIZES).rows == expected


def test_errors_of_the_model_and_of_what_is_no_optimizer():
    with pytest.raises(ft.ShardingError, match="no rule names `hidden`"):
        ft.plan_optimizer(adam(), NET, ft.AxisRules({"embed": None}), SIZES)
    with pytest.raises(ft.FunctreeError, match="is not an optimizer"):
        ft.plan_optimizer(optax.adam, NET, RULES, SIZES)  # type: ignore[arg-type]
    with pytest.raises(ft.ShardingError, match="no layout was given for this array"):
        ft.plan_optimizer(adam(), NET, None, SIZES)
    with pytest.raises(ft.ShardingError, match="there is no mesh"):
        ft.plan_optimizer(adam(), NET, RULES)


@pytest.mark.parametrize("name", ["adafactor", "lbfgs", "sm3"])
def test_rules_on_a_bare_state_say_plan_optimizer(name: str):
    state = jax.eval_shape(build(name).init, arrays(NET))
    with pytest.raises(ft.ShardingError, match=re.escape("`ft.plan_optimizer`")):
        ft.plan(state, RULES, SIZES)


# Layouts of other kinds


def test_a_plan_as_the_layout():
    layout = ft.plan(NET, RULES, SIZES)
    assert specs_of(optax.adafactor(1e-3), NET, layout) == specs_of(optax.adafactor(1e-3))
    model = concrete_net()
    state = ft.init_optimizer(adam(), model, ft.plan(model, RULES, MESH))
    assert state[0].mu.up.sharding.spec == P("data", "model")


def test_fsdp_filters_and_prefixes():
    composed = ft.AxisRules({"hidden": "model", ...: None}) | ft.FSDP("data", min_size=64)
    assert specs_of(adam(), NET, composed)["0.mu.cube"] == P(None, "data", "model")
    filters = ft.StateSharding({"table": P(None, "data"), ft.has_axis("hidden"): RULES, ...: P()})
    specs = specs_of(optax.adafactor(1e-3), NET, filters)
    assert specs["0.v_row.table"] == P("data") and specs["0.v_col.table"] == P(None)
    assert specs["0.v_col.cube"] == P(None, "model")
    assert specs["0.v.square"] == P(None, None)


def test_a_model_on_the_host_has_its_moments_there():
    model = {"w": concrete((8, 4)), "b": concrete((4,))}
    layout = {"w": ft.on_host(P("data")), "b": P()}
    plan = ft.plan_optimizer(optax.lbfgs(1e-3, memory_size=2), model, layout, MESH)
    kinds_of = {str(row.path): row.memory_kind for row in plan}
    assert kinds_of["0.params.w"] == kinds_of["0.diff_params_memory.w"] == "pinned_host"
    assert kinds_of["0.params.b"] is None and kinds_of["0.count"] is None
    state = ft.init_optimizer(adam(), model, layout, MESH)
    assert state[0].mu["w"].sharding.memory_kind == "pinned_host"
    assert state[0].mu["b"].sharding.memory_kind == "device"


# Born


BORN = (
    "MultiSteps", "adafactor", "adam", "cocob", "ema", "hutchinson_estimator_diag_hessian", "inject_hyperparams",
    "lbfgs", "lookahead", "multi_transform", "muon", "sam", "schedule_free", "sm3",
)  # fmt: skip


def bits(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", BORN)
def test_born_equal_to_the_bit_and_as_planned(name: str, explicit: bool):
    mesh, tx = mesh_of(explicit), build(name)
    model = given(name, ft.shard(concrete_net(), RULES, mesh))
    plan = ft.plan_optimizer(tx, model, RULES, mesh)
    state = ft.init_optimizer(tx, model, RULES, mesh)
    expected = tx.init(arrays(given(name, concrete_net())))
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for row, have, wanted in zip(
        plan, jax.tree.leaves(state), jax.tree.leaves(expected), strict=True
    ):
        assert have.dtype == wanted.dtype and np.array_equal(bits(have), bits(wanted)), row.path
        assert have.committed and have.sharding.is_equivalent_to(plan.sharding(row), have.ndim), (
            row.path
        )


def test_born_from_parameters_that_lie_elsewhere():
    """Uncommitted, or in numpy: the state lies as the plan says all the same."""
    state = ft.init_optimizer(adam(), concrete_net(), RULES, MESH)
    assert state[0].nu.table.sharding.spec == P("model", "data")
    state = ft.init_optimizer(optax.ema(0.9), {"w": np.ones((8, 4), np.float32)}, P("data"), MESH)
    assert state.ema["w"].sharding.spec == P("data", None)


def test_the_current_mesh():
    with jax.set_mesh(MESH):
        state = ft.init_optimizer(adam(), concrete_net(), RULES)
    assert state[0].mu.cube.sharding.spec == P(None, "data", "model")


def buffers(tree: Any) -> list[int]:
    """One number for each shard of each array."""
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    raw = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in leaves
    ]
    return [shard.data.unsafe_buffer_pointer() for x in raw for shard in x.addressable_shards]


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(NOT_DERIVABLE)))
def test_never_the_models_own_buffers(name: str):
    model = {"w": jnp.arange(8.0).reshape(4, 2), "b": jnp.arange(2.0), "s": jnp.float32(1)}
    model = given(name, ft.shard(model, {"w": P("data"), "b": P(), "s": P()}, MESH))
    layout = jax.tree.map(lambda x: x.sharding.spec, model)
    state = ft.init_optimizer(build(name), model, layout, MESH)
    assert not set(buffers(state)) & set(buffers(model))


@pytest.mark.parametrize("name", ["lbfgs", "cocob"])
def test_no_buffer_twice_in_a_state(name: str):
    """Their `init` gives back one array of zeros at two places, and donating such a state is an
    error."""
    model = ft.shard({"w": jnp.ones((4, 2))}, P("data"), MESH)
    have = buffers(ft.init_optimizer(build(name), model, P("data"), MESH))
    assert len(set(have)) == len(have)


# What fails in silence elsewhere


def test_silent_failure_11_states_are_born_sharded():
    """`jit(tx.init)` leaves the moments replicated, or on one device, and the second step compiles
    again."""
    model = ft.shard(concrete_net(), RULES, MESH)
    lost = jax.jit(adam().init)(arrays(model))
    assert not lost[0].mu.up.sharding.is_equivalent_to(model.up.sharding, 2)
    state = ft.init_optimizer(adam(), model, RULES, MESH)
    for moment in (state[0].mu, state[0].nu):
        for name in SHAPES:
            have, parameter = getattr(moment, name), getattr(model, name)
            assert have.sharding.is_equivalent_to(parameter.sharding, have.ndim), name
            assert have.sharding.shard_shape(have.shape) == have.addressable_shards[0].data.shape
    assert (
        state[0].count.sharding.is_fully_replicated and len(state[0].count.sharding.device_set) == 8
    )

    def step(model: Any, state: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            updates, state = adam().update(jax.tree.map(jnp.ones_like, model), state, model)
        return optax.apply_updates(model, updates), state

    params = arrays(model)
    shardings = jax.tree.map(lambda x: x.sharding, (params, state))
    compiled = jax.jit(step, out_shardings=shardings).lower(params, state).compile()
    for _ in range(3):
        params, state = compiled(params, state)  # takes only what lies as the first arguments did


def test_silent_failure_13_specs_have_the_rank_of_their_leaf():
    for tx, otherwise in (
        (optax.adafactor(1e-3), None),
        (optax.sm3(1e-3), None),
        (optax.contrib.galore(1e-3), P()),
    ):
        plan = ft.plan_optimizer(tx, DICT, DICT_LAYOUT, SIZES, otherwise=otherwise)
        assert all(row.spec is not None and len(row.spec) == len(row.shape) for row in plan)
        model = {name: concrete(shape) for name, shape in SHAPES.items()}
        state = ft.init_optimizer(tx, model, DICT_LAYOUT, MESH, otherwise=otherwise)
        assert [x.shape for x in jax.tree.leaves(state)] == [row.shape for row in plan]


def test_silent_failure_14_where_tree_map_params_does_not_fit():
    """`optax.tree_map_params` gives adafactor's rows the whole spec, and raises for sm3, lbfgs and
    masked ones."""
    tx = optax.adafactor(1e-3)
    mapped: Any = optax.tree_map_params(
        tx, lambda _, spec: spec, tx.init(concrete_dict()), DICT_LAYOUT
    )
    assert mapped[0].v_row["table"] == P("model", "data")  # two entries for one dimension
    assert specs_of(tx, DICT, DICT_LAYOUT)["0.v_row.table"] == P("data")
    for tx, path, spec in (
        (optax.sm3(1e-3), "0.mu.table.0", P("model")),
        (optax.lbfgs(1e-3), "0.diff_params_memory.table", P(None, "model", "data")),
        (optax.masked(adam(), vectors), "inner_state.0.mu.bias", P("model")),
        (
            optax.multi_transform(two(), kinds),
            "inner_states.vector.inner_state.0.mu.bias",
            P("model"),
        ),
        (optax.contrib.muon(1e-3), "inner_states.adam.inner_state.0.nu.bias", P("model")),
    ):
        assert specs_of(tx, DICT, DICT_LAYOUT)[path] == spec


def concrete_dict() -> dict[str, Array]:
    return {name: concrete(shape) for name, shape in SHAPES.items()}


# How often the optimizer is traced, and with how many parameters


class Counted:
    """An optimizer that notes how many parameters each trace of its `init` has."""

    def __init__(self, tx: Any, refuses: bool = False):
        self.traces: list[int] = []
        self.tx = optax.GradientTransformation(self._init(tx, refuses), tx.update)

    def _init(self, tx: Any, refuses: bool) -> Any:
        def init(params: Any) -> Any:
            self.traces.append(len(jax.tree.leaves(params)))
            if refuses and self.traces[-1] < 12:
                raise KeyError("it needs all of them")
            return tx.init(params)

        return init


MANY = {f"w{i}": S((8, 16) if i % 2 else (16, 8), jnp.float32) for i in range(12)}


@pytest.mark.parametrize(
    ("make", "traces"),
    [
        (adam, [12]),
        (lambda: optax.adafactor(1e-3), [12, 2]),
        (lambda: optax.lbfgs(1e-3), [12, 2]),
    ],
)
def test_a_second_trace_is_of_one_parameter_of_each_kind(make: Any, traces: list[int]):
    """And only where a leaf has not the shape of its parameter."""
    counted = Counted(make())
    plan = ft.plan_optimizer(counted.tx, MANY, P("data"), SIZES)
    assert counted.traces == traces, "all, then two at other sizes"
    again = ft.plan_optimizer(counted.tx, MANY, P("data"), SIZES)
    assert counted.traces == traces and again.rows == plan.rows
    assert ft.plan_optimizer(counted.tx, MANY, P(None, "model"), SIZES).rows != plan.rows
    assert counted.traces == traces, "the layout makes no difference to the origins"


def sized(x: Any) -> Any:
    return S((x.shape[0] * 2, *x.shape[1:]), x.dtype)


OTHERWISE: dict[str, Callable[[], Any]] = {
    "shapes": lambda: ft.plan_optimizer(TX.tx, {**MANY, "w0": sized(MANY["w0"])}, P("data"), SIZES),
    "dtype": lambda: ft.plan_optimizer(
        TX.tx, {**MANY, "w0": S((16, 8), jnp.bfloat16)}, P("data"), SIZES
    ),
    "names": lambda: ft.plan_optimizer(
        TX.tx, {f"v{i}": x for i, x in enumerate(MANY.values())}, P("data"), SIZES
    ),
    "wrt": lambda: ft.plan_optimizer(TX.tx, MANY, P("data"), SIZES, wrt=~ft.glob("w3")),
}
TX = Counted(adam())


@pytest.mark.parametrize("case", OTHERWISE)
def test_other_parameters_are_traced_anew(case: str):
    ft.plan_optimizer(TX.tx, MANY, P("data"), SIZES)
    before = len(TX.traces)
    OTHERWISE[case]()
    assert len(TX.traces) > before


def test_other_settings_of_jax_are_traced_anew():
    counted = Counted(adam())
    ft.plan_optimizer(counted.tx, MANY, P("data"), SIZES)
    with jax.enable_x64(True):
        ft.plan_optimizer(counted.tx, MANY, P("data"), SIZES)
    assert len(counted.traces) == 2


def test_the_state_is_as_the_settings_of_jax_have_it():
    """Each in turn and again, whatever is remembered of the others."""

    def init(params: Any) -> Any:
        return {
            "key": jax.random.key(0),
            "mu": jax.tree.map(lambda p: p * jnp.ones((), jnp.bfloat16), params),
        }

    tx = optax.GradientTransformation(init, adam().update)
    strong, weak = S((8, 16), jnp.float32), S((8, 16), jnp.float32, weak_type=True)
    assert strong != weak
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(2):
            for impl in ("threefry2x32", "rbg"):
                with jax.default_prng_impl(impl):
                    for one, dtype in ((strong, jnp.float32), (weak, jnp.bfloat16)):
                        plan = ft.plan_optimizer(tx, {"w": one}, P("data"), SIZES)
                        assert plan["key"].dtype == jax.random.key(0).dtype
                        assert plan["mu.w"].dtype == dtype
    with jax.numpy_dtype_promotion("strict"), pytest.raises(ValueError, match="bfloat16"):
        ft.plan_optimizer(tx, {"w": strong}, P("data"), SIZES)


@pytest.mark.parametrize("make", [lambda: optax.lbfgs(1e-3), lambda: optax.adafactor(1e-3)])
def test_an_optimizer_that_needs_all_parameters_gets_all(make: Any):
    counted = Counted(make(), refuses=True)
    plan = ft.plan_optimizer(counted.tx, MANY, P("data"), SIZES)
    assert counted.traces == [12, 2, 12]
    assert plan.rows == ft.plan_optimizer(make(), MANY, P("data"), SIZES).rows


def number_of_parameters() -> Any:
    """Its state has a vector with a number for each parameter, whose size does not depend on the
    parameters' sizes."""
    return optax.GradientTransformation(
        lambda params: {
            "each": jnp.zeros(len(jax.tree.leaves(params))),
            "mu": jax.tree.map(jnp.zeros_like, params),
        },
        adam().update,
    )


def test_a_state_for_some_that_is_no_part_of_the_state_for_all():
    plan = ft.plan_optimizer(number_of_parameters(), MANY, P("data"), SIZES)
    assert (
        plan["each"].spec == P(None) and plan["each"].reason == "does not depend on the parameters"
    )
    assert plan["mu.w3"].spec == P("data", None)


def test_what_is_remembered_is_forgotten_with_the_optimizer():
    made = adam()
    ft.plan_optimizer(made, MANY, P("data"), SIZES)
    init = weakref.ref(made.init)
    del made
    gc.collect()
    assert init() is None


def test_under_other_names_nothing_is_traced_again():
    counted = Counted(adam())
    model = Named(S((8, 16), jnp.float32))
    for names in ("rows columns", "embed hidden", "rows columns"):
        layout = ft.AxisRules(
            {names.split()[0]: "data", ...: None}, names={Named: ft.names(w=names)}
        )
        plan = ft.plan_optimizer(counted.tx, model, layout, SIZES)
        assert plan["0.mu.w"].spec == P("data", None)
        assert str(plan["0.mu.w"].axes) == str(plan["0.nu.w"].axes) == names
    assert len(counted.traces) == 1


class Named(eqx.Module):
    w: Any


def test_a_training_state_is_traced_with_few_parameters_and_once():
    for make, traces in ((adam, []), (lambda: optax.adafactor(1e-3), [2])):
        counted = Counted(make())
        model = {name: jnp.ones(x.shape) for name, x in MANY.items()}
        ts = ft.TrainState.create(model, counted.tx)
        counted.traces.clear()
        for layout in (P("data"), P(None, "model")):
            ft.plan(ts, layout, SIZES)
            assert counted.traces == traces
