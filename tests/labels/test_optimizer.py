"""`plan_optimizer` and `init_optimizer` for every optimizer that optax exports, against literal
specs."""

import dataclasses
import gc
import itertools
import weakref
from collections.abc import Callable
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
from tests.lib.covering import whole_tables
from tests.lib.meshes import MESH, SIZES, mesh_of
from tests.lib.optimizers import (
    NAMES,
    adam,
    build,
    given,
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
PARAMETERS: dict[str, tuple[tuple[int, ...], P]] = {
    "up": ((16, 8), P("data", "model")),
    "bias": ((8,), P("model")),
    "square": ((8, 8), P("model", "data")),
    "table": ((256, 128), P("model", "data")),
    "cube": ((3, 128, 256), P(None, "data", "model")),
    "gain": ((), P()),
}
SHAPES = {name: shape for name, (shape, _) in PARAMETERS.items()}
SPECS = {name: spec for name, (_, spec) in PARAMETERS.items()}
# Of what has neither a parameter's shape nor its shape behind leading dimensions: (field,
# parameter, ...).
FACTORED: dict[tuple[Any, ...], P] = {
    ("v_row", "table"): P("data"),
    ("v_col", "table"): P("model"),
    ("v_row", "cube"): P(None, "data"),
    ("v_col", "cube"): P(None, "model"),
}
for parameter, spec in SPECS.items():
    FACTORED |= {("mu", parameter, dim): P(axis) for dim, axis in enumerate(spec)}
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


class Named(eqx.Module):
    w: Float[Array, "embed hidden"]


class Bare(eqx.Module):
    w: Any


NOT_DERIVABLE = ("flatten", "galore", "scale_by_galore")


def arrays(model: Any) -> Any:
    return jax.tree.map(lambda x: x if eqx.is_array(x) or isinstance(x, S) else None, model)


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
    field = path[at - 1]
    return FACTORED[field, *path[at:]] if shape else P()


DERIVABLE = sorted(set(NAMES) - set(NOT_DERIVABLE))


@pytest.mark.parametrize("name", DERIVABLE)
def test_every_optimizer_is_laid_out(name: str):
    tx, model = build(name), given(name, NET)
    plan = ft.plan_optimizer(tx, model, RULES, SIZES)
    state = jax.eval_shape(tx.init, arrays(model))
    paths = [(ft.Path.of(path), x) for path, x in jax.tree.leaves_with_path(state)]
    expected = [(path, x.shape, x.dtype, want(path, x.shape)) for path, x in paths]
    assert [(row.path, row.shape, row.dtype, row.spec) for row in plan] == expected
    assert jax.tree.structure(plan.specs) == jax.tree.structure(state)


@pytest.mark.parametrize("name", NOT_DERIVABLE)
def test_what_cannot_be_derived_is_an_error_that_names_otherwise(name: str):
    tx = build(name)
    with pytest.raises(ft.ShardingError) as caught:
        ft.plan_optimizer(tx, DICT, DICT_LAYOUT, SIZES)
    for problem in caught.value.problems:
        assert problem.why == (
            "depends on the shapes of the parameters in a way that cannot be determined, "
            "so it cannot get a parameter's spec"
        )
        assert problem.remedy == (
            "pass `otherwise=P()` to replicate such leaves; in a TrainState, add a pattern for them: "
            "`StateSharding({'opt_state.**': P(), ...: layout})`"
        )
    plan = ft.plan_optimizer(tx, DICT, DICT_LAYOUT, SIZES, otherwise=P())
    state = jax.tree.leaves_with_path(jax.eval_shape(tx.init, DICT))
    assert [(row.path, row.shape) for row in plan] == [(ft.Path.of(p), x.shape) for p, x in state]
    given = [row for row in plan if row.reason == "otherwise: P() as given"]
    assert {row.path: row.shape for row in given} == {
        p.path: p.shape for p in caught.value.problems
    }
    assert given and all(row.spec == P(*[None] * len(row.shape)) for row in given)


def test_otherwise_is_any_layout_and_sees_the_paths_of_the_state():
    layout = ft.StateSharding({"0.projector.table": P("data"), "**.up": P(None, "model"), ...: P()})
    galore = optax.contrib.galore(1e-3, rank=4)
    plan = ft.plan_optimizer(galore, DICT, DICT_LAYOUT, SIZES, otherwise=layout)
    assert plan["0.projector.table"].spec == P("data", None)
    assert plan["0.base_optimizer_state.mu.up"].spec == P(None, "model")
    dead = ft.StateSharding({"**.projj": P("data"), ...: P()})
    with pytest.raises(ft.ShardingError, match=r"filter '\*\*\.projj'\s+matches no leaf"):
        ft.plan_optimizer(galore, DICT, DICT_LAYOUT, SIZES, otherwise=dead)


def test_galores_own_dimensions_are_never_taken_for_a_parameters():
    """A rank that is the smallest size looks like that size."""
    for shape, rank in (((16, 8), 128), ((32, 64), 4)):
        tx, params = optax.contrib.galore(1e-3, rank=rank), {"w": S(shape, jnp.float32)}
        with pytest.raises(ft.ShardingError, match="otherwise"):
            ft.plan_optimizer(tx, params, P("data", "model"), SIZES)
    # Of a square parameter, and at its full rank, each leaf has the shape of the parameter.
    specs = specs_of(optax.contrib.galore(1e-3), {"w": S((8, 8), jnp.float32)}, P("data", "model"))
    assert specs["0.projector.w"] == specs["0.base_optimizer_state.mu.w"] == P("data", "model")


# Families, spelled out


def specs_of(tx: Any, model: Any = NET, layout: Any = RULES, **kwargs: Any) -> dict[str, P | None]:
    return {
        str(row.path): row.spec for row in ft.plan_optimizer(tx, model, layout, SIZES, **kwargs)
    }


@pytest.mark.parametrize("shape", [(128, 256), (256, 128), (128, 128), (127, 128), (127, 127)])
def test_adafactor_next_to_its_threshold(shape: tuple[int, ...]):
    shapes = {"w": shape, "v": (128, 127), "u": (128, 200)}
    params = {name: S(shape, jnp.float32) for name, shape in shapes.items()}
    plan = ft.plan_optimizer(optax.adafactor(1e-3), params, P("x", "y"), {"x": 1, "y": 1})
    factored = min(shape) >= 128
    # v_row keeps the smaller dimension; of equals, the first.
    rows, columns = ("y", "x") if shape[0] > shape[1] else ("x", "y")
    assert plan["0.v_row.w"].spec == (P(rows) if factored else P(None))
    assert plan["0.v_col.w"].spec == (P(columns) if factored else P(None))
    assert plan["0.v.w"].spec == (P(None) if factored else P("x", "y"))
    assert plan["0.v_row.u"].spec == P("x") and plan["0.v.v"].spec == P("x", "y")


# Parameters of other kinds, and names that could be mistaken


def test_parameters_in_dicts_lists_and_bare():
    w, b = S((8, 4), jnp.float32), S((4,), jnp.float32)
    specs = specs_of(adam(), {"layers": [{"w": w}, {"w": w, "b": b}], "none": None}, P("model"))
    assert specs["0.mu.layers.0.w"] == specs["0.nu.layers.1.w"] == P("model", None)
    assert specs["0.mu.layers.1.b"] == P("model") and specs["0.count"] == P() and len(specs) == 7
    assert specs_of(optax.trace(0.9), w, P("model")) == {"trace": P("model", None)}
    assert specs_of(adam(), {}, P("model")) == {"0.count": P()}
    keys, layout = {"a.b": w, "0": w}, {"a.b": P("data", None), "0": P(None, "data")}
    assert specs_of(optax.trace(0.9), keys, layout) == {
        'trace."a.b"': P("data", None),
        'trace."0"': P(None, "data"),
    }


def test_a_parameter_called_as_the_state_is():
    """Every parameter has one shape: only its path tells whose a leaf is."""
    w = S((8, 8), jnp.float32)
    x, y = P("data", None), P("model", None)
    specs = specs_of(adam(), {"mu": w, "nu": w, "count": w}, {"mu": x, "nu": y, "count": x})
    assert specs["0.mu.mu"] == specs["0.nu.mu"] == x
    assert specs["0.mu.nu"] == specs["0.nu.nu"] == y and specs["0.count"] == P()
    # A state with one field: all its leaves are below the name of the parameter `trace`.
    specs = specs_of(optax.trace(0.9), {"trace": {"w": w}, "w": w}, {"trace": {"w": x}, "w": y})
    assert specs == {"trace.trace.w": x, "trace.w": y}
    # `0.mu.1.0` of sm3 is of parameter 1, and not of parameter 0 behind `0.mu.1`.
    specs = specs_of(optax.sm3(1e-3), [S((8,), jnp.float32)] * 2, [P("data"), P("model")])
    assert specs["0.mu.0.0"] == P("data") and specs["0.mu.1.0"] == P("model")


def test_labels_called_as_other_parameters_are():
    w = S((8, 8), jnp.float32)
    tx = optax.partition({"b": optax.trace(0.9), "w": optax.trace(0.9)}, {"w": "b", "b": "w"})
    specs = specs_of(tx, {"w": w, "b": w}, {"w": P("data", None), "b": P("model", None)})
    assert specs == {
        "inner_states.b.inner_state.trace.w": P("data", None),
        "inner_states.w.inner_state.trace.b": P("model", None),
    }


class Partly(eqx.Module):
    w: Float[Array, "embed hidden"]
    running: ft.Buffer[Float[Array, "hidden"]]
    step: Int[Array, ""]


PARTS: Any = (S((4, 8), jnp.float32), S((8,), jnp.float32), S((), jnp.int32))
PARTLY = Partly(*PARTS)


def test_wrt_says_what_is_trained():
    assert specs_of(optax.trace(0.9), PARTLY) == {"trace.w": P("data", "model")}
    everything = {"trace.w": P("data", "model"), "trace.running": P("model"), "trace.step": P()}
    assert specs_of(optax.trace(0.9), PARTLY, wrt=...) == everything
    assert specs_of(optax.trace(0.9), PARTLY, wrt=ft.is_buffer) == {"trace.running": P("model")}
    assert specs_of(optax.trace(0.9), PARTLY, wrt="running") == {"trace.running": P("model")}
    with pytest.raises(ft.FunctreeError, match="no array of Partly matches wrt="):
        specs_of(optax.trace(0.9), PARTLY, wrt=ft.larger_than(10**9))


def test_sizes_of_one_and_zero():
    shapes = {"one": (1, 1), "none": (0, 4), "row": (1, 8)}
    params = {name: S(shape, jnp.float32) for name, shape in shapes.items()}
    layout = {"one": P(), "none": P(None, "model"), "row": P(None, "model")}
    specs = specs_of(optax.adafactor(1e-3), params, layout)
    assert specs["0.v.none"] == P(None, "model") and specs["0.v.row"] == P(None, "model")
    assert specs["0.v.one"] == P(None, None)


# Optimizers that optax does not have


def no_update(updates: Any, state: Any, params: Any = None) -> Any:
    return updates, state


Init = Callable[[Any], Any]


def of_each(shape: Callable[[Any], tuple[int, ...]]) -> Init:
    """An `init` that makes one array of this shape for each parameter."""
    return lambda params: jax.tree.map(lambda x: jnp.zeros(shape(x)), params)


def product(params: Any) -> Any:
    row = jax.tree.map(lambda x: x[:1], params)
    return {"product": params["a"] @ params["b"], "m": params, "row": row, "n": jnp.zeros(())}


def more_leaves_for_8_rows(params: Any) -> Any:
    return {"m": params, "extra": params} if params["w"].shape[0] == 8 else {"m": params}


def other_ranks_but_for_8_rows(params: Any) -> Any:
    flat = of_each(lambda x: x.shape if x.shape[0] == 8 else (x.size,))
    return {"m": flat(params), "sum": of_each(lambda x: x.shape[:1])(params)}


def a_rank_by_the_rows(params: Any) -> Any:
    """Of a leaf that belongs to no parameter."""
    return {"table": jnp.zeros((2,) * (1 + params["w"].shape[0] % 2))}


def number_of_parameters(params: Any) -> Any:
    """A vector with a number for each parameter, whose size does not depend on their sizes."""
    return {"each": jnp.zeros(len(jax.tree.leaves(params))), "mu": params}


MANY = {f"w{i}": S((8, 16) if i % 2 else (16, 8), jnp.float32) for i in range(12)}
W, SQUARE = {"w": S((8, 4), jnp.float32)}, {"w": S((8, 8), jnp.float32)}
FACTORS = {"a": S((8, 4), jnp.float32), "b": S((4, 2), jnp.float32)}
# With the next sizes that are all different, these cannot be multiplied.
CLOSE = {"a": S((4, 5), jnp.float32), "b": S((5, 3), jnp.float32)}
BOTH = P("data", "model")

# What `init` makes of some parameters, each with the spec `BOTH` ─► the specs of its leaves; None
# for what depends on the parameters in a way that cannot be determined.
INITS: dict[str, tuple[Init, Any, dict[str, P | None]]] = {
    "one row": (of_each(lambda x: (1, x.shape[1])), W, {"w": P(None, "model")}),
    "one column": (of_each(lambda x: (x.shape[0], 1)), W, {"w": P("data", None)}),
    "of its own": (of_each(lambda x: (5,)), W, {"w": P(None)}),
    # One mesh axis cannot shard both.
    "a preconditioner": (of_each(lambda x: (x.shape[0], x.shape[0])), W, {"w": None}),
    "flat": (of_each(lambda x: (x.size,)), W, {"w": None}),
    "a history as long as it": (of_each(lambda x: (x.shape[0], *x.shape)), W, {"w": None}),
    # 9, as the parameter has rows when it is traced again.
    "relative positions": (of_each(lambda x: (2 * x.shape[1] - 1,)), W, {"w": None}),
    "a product": (product, FACTORS, {"product": None, "m.a": BOTH, "row.b": P(None, "model")}),
    "of sizes that have to fit": (
        product,
        CLOSE,
        {"product": None, "m.a": BOTH, "m.b": BOTH, "row.a": None, "row.b": None, "n": P()},
    ),
    "more leaves": (more_leaves_for_8_rows, SQUARE, {"m.w": BOTH, "extra.w": BOTH}),
    "other ranks": (other_ranks_but_for_8_rows, SQUARE, {"m.w": BOTH, "sum.w": None}),
    "a rank by the rows": (a_rank_by_the_rows, W, {"table": None}),
    "their number": (number_of_parameters, MANY, {"each": P(None), "mu.w3": BOTH}),
}


@pytest.mark.parametrize("case", INITS)
def test_of_an_optimizer_that_optax_does_not_have(case: str):
    init, params, expected = INITS[case]
    tx, sizes = optax.GradientTransformation(init, no_update), {"data": 1, "model": 1}
    unknown = {path for path, spec in expected.items() if spec is None}
    if unknown:
        with pytest.raises(ft.ShardingError, match="a way that cannot be determined") as caught:
            ft.plan_optimizer(tx, params, BOTH, sizes)
        assert {str(problem.path) for problem in caught.value.problems} == unknown
    plan = ft.plan_optimizer(tx, params, BOTH, sizes, otherwise=P())
    for path, spec in expected.items():
        row = plan[path]
        assert row.spec == (P(*[None] * len(row.shape)) if spec is None else spec)
        assert (row.reason == "otherwise: P() as given") is (spec is None)


def test_some_of_the_dimensions_have_some_of_the_names():
    tx = optax.GradientTransformation(of_each(lambda x: (1, *x.shape[1:])), no_update)
    row = ft.plan_optimizer(tx, Named(S((8, 16), jnp.float32)), RULES, SIZES)["w"]
    assert (row.axes, row.spec) == (ft.Axes(None, "hidden"), P(None, "model"))
    assert row.reason == "follows w, with dimensions unsharded, 1"


def test_an_error_of_functree_in_an_init_is_not_taken_for_sizes_that_do_not_fit():
    def init(params: Any) -> Any:
        if params["w"].shape != (8, 4):
            raise ft.ShardingError("the state is for 8 rows")
        return params["w"][0]

    with pytest.raises(ft.ShardingError, match="the state is for 8 rows"):
        specs_of(optax.GradientTransformation(init, no_update), W, P("data"))


@dataclasses.dataclass
class Start:
    """An `init` that is no function: it has no hash, and cannot be a key."""

    tx: Any

    def __call__(self, params: Any) -> Any:
        return self.tx.init(params)


def test_an_init_of_any_kind():
    made = adam()
    expected = ft.plan_optimizer(made, MANY, P("data"), SIZES).rows
    for init in (Start(made), Start(made).__call__, jax.jit(made.init)):
        tx = optax.GradientTransformation(init, made.update)
        for _ in range(2):
            assert ft.plan_optimizer(tx, MANY, P("data"), SIZES).rows == expected


def test_what_is_no_optimizer_and_no_mesh():
    with pytest.raises(ft.FunctreeError, match="is not an optimizer"):
        ft.plan_optimizer(optax.adam, NET, RULES, SIZES)  # type: ignore[arg-type]
    with pytest.raises(ft.ShardingError, match="there is no mesh"):
        ft.plan_optimizer(adam(), NET, RULES)


# Layouts of other kinds


def test_a_plan_as_the_layout():
    model = concrete_net()
    state = ft.init_optimizer(adam(), model, ft.plan(model, RULES, MESH))
    assert state[0].mu.up.sharding.spec == P("data", "model")


# Born


# Those whose `init` returns parameters, one array twice, keys, or leaves of other shapes.
BORN = (
    "adafactor", "cocob", "dog", "hutchinson_estimator_diag_hessian", "inject_hyperparams", "lookahead",
    "mechanize", "multi_transform", "muon", "prodigy", "sam", "schedule_free", "sm3",
)  # fmt: skip
# Names with whether the axes of the mesh are Explicit.
CELLS = [(name, False) for name in BORN] + [("adam", True), ("lbfgs", True)]
if whole_tables():
    # Which divides, and the compiler does that in another way than an operation alone.
    divides = {"scale_by_distance_over_gradients"}
    CELLS = list(itertools.product(sorted({*DERIVABLE} - divides), (False, True)))


def data(x: Any) -> Any:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def buffers(tree: Any) -> list[int]:
    """One number for each shard of each array."""
    shards = [shard for x in jax.tree.leaves(tree) for shard in data(x).addressable_shards]
    return [shard.data.unsafe_buffer_pointer() for shard in shards]


@pytest.mark.parametrize(("name", "explicit"), CELLS)
def test_born_equal_to_the_bit_and_as_planned(name: str, explicit: bool):
    mesh, tx = mesh_of(explicit), build(name)
    model = given(name, ft.shard(concrete_net(), RULES, mesh))
    plan = ft.plan_optimizer(tx, model, RULES, mesh)
    state = ft.init_optimizer(tx, model, RULES, mesh)
    expected = tx.init(arrays(given(name, concrete_net())))
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    leaves = jax.tree.leaves(state)
    for row, have, wanted in zip(plan, leaves, jax.tree.leaves(expected), strict=True):
        assert have.dtype == wanted.dtype and np.array_equal(data(have), data(wanted)), row.path
        assert have.committed and have.sharding.is_equivalent_to(plan.sharding(row), have.ndim)
    # It may be donated, and the model after it: each buffer is there once, and is not the model's.
    own = buffers(state)
    assert len(set(own)) == len(own)
    assert not set(own) & set(buffers(arrays(model)))


def test_born_from_parameters_that_lie_elsewhere():
    """Uncommitted, or in numpy: the state lies as the plan says all the same."""
    with jax.set_mesh(MESH):
        state = ft.init_optimizer(adam(), concrete_net(), RULES)
    assert state[0].nu.table.sharding.spec == P("model", "data")
    state = ft.init_optimizer(optax.ema(0.9), {"w": np.ones((8, 4), np.float32)}, P("data"), MESH)
    assert state.ema["w"].sharding.spec == P("data", None)


# How often the optimizer is traced


class Counted:
    """An optimizer that notes how many parameters each trace of its `init` has."""

    def __init__(self, tx: Any):
        self.traces: list[int] = []
        self.tx = optax.GradientTransformation(self._init(tx), tx.update)

    def _init(self, tx: Any) -> Any:
        def init(params: Any) -> Any:
            self.traces.append(len(jax.tree.leaves(params)))
            return tx.init(params)

        return init


@pytest.mark.parametrize(
    ("make", "traces"), [(adam, [12]), (lambda: optax.adafactor(1e-3), [12, 12])]
)
def test_there_is_a_second_trace_only_for_leaves_of_other_shapes(make: Any, traces: list[int]):
    counted = Counted(make())
    plan = ft.plan_optimizer(counted.tx, MANY, P("data"), SIZES)
    assert counted.traces == traces, "then at other sizes"
    again = ft.plan_optimizer(counted.tx, MANY, P("data"), SIZES)
    assert counted.traces == traces and again.rows == plan.rows
    assert ft.plan_optimizer(counted.tx, MANY, P(None, "model"), SIZES).rows != plan.rows
    assert counted.traces == traces, "the layout makes no difference to the origins"


OTHERS: dict[str, tuple[Any, Any]] = {
    "shapes": ({**MANY, "w0": S((32, 8), jnp.float32)}, ft.is_trainable),
    "dtype": ({**MANY, "w0": S((16, 8), jnp.bfloat16)}, ft.is_trainable),
    "names": ({f"v{i}": x for i, x in enumerate(MANY.values())}, ft.is_trainable),
    "wrt": (MANY, ~ft.glob("w3")),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_parameters_are_traced_anew(case: str):
    counted, (params, wrt) = Counted(adam()), OTHERS[case]
    ft.plan_optimizer(counted.tx, MANY, P("data"), SIZES)
    ft.plan_optimizer(counted.tx, params, P("data"), SIZES, wrt=wrt)
    assert len(counted.traces) == 2


def test_the_state_is_as_the_settings_of_jax_have_it():
    """Each in turn and again, whatever is remembered of the others."""

    def init(params: Any) -> Any:
        mu = jax.tree.map(lambda p: p * jnp.ones((), jnp.bfloat16), params)
        return {"key": jax.random.key(0), "n": jnp.zeros(()), "mu": mu}

    tx = optax.GradientTransformation(init, no_update)
    strong, weak = S((8, 16), jnp.float32), S((8, 16), jnp.float32, weak_type=True)
    settings = [
        (False, "threefry2x32", strong, jnp.float32), (True, "threefry2x32", strong, jnp.float32),
        (False, "rbg", strong, jnp.float32), (False, "threefry2x32", weak, jnp.bfloat16),
    ]  # fmt: skip
    with jax.numpy_dtype_promotion("standard"):
        for x64, impl, one, dtype in settings * 2:
            with jax.enable_x64(x64), jax.default_prng_impl(impl):
                plan = ft.plan_optimizer(tx, {"w": one}, P("data"), SIZES)
                assert plan["key"].dtype == jax.random.key(0).dtype
                assert plan["n"].dtype == (jnp.float64 if x64 else jnp.float32)
                assert plan["mu.w"].dtype == dtype
    with jax.numpy_dtype_promotion("strict"), pytest.raises(ValueError, match="bfloat16"):
        ft.plan_optimizer(tx, {"w": strong}, P("data"), SIZES)


def test_what_is_remembered_is_forgotten_with_the_optimizer():
    made = adam()
    ft.plan_optimizer(made, MANY, P("data"), SIZES)
    init = weakref.ref(made.init)
    del made
    gc.collect()
    assert init() is None


def test_under_other_names_nothing_is_traced_again():
    counted = Counted(adam())
    model = Bare(S((8, 16), jnp.float32))
    for names in ("rows columns", "embed hidden", "rows columns"):
        by_class = {Bare: ft.names(w=names)}
        layout = ft.AxisRules({names.split()[0]: "data", ...: None}, names=by_class)
        plan = ft.plan_optimizer(counted.tx, model, layout, SIZES)
        assert plan["0.mu.w"].spec == P("data", None)
        assert str(plan["0.mu.w"].axes) == str(plan["0.nu.w"].axes) == names
    assert len(counted.traces) == 1


def test_a_training_state_is_traced_once():
    for make, traces in ((adam, []), (lambda: optax.adafactor(1e-3), [12])):
        counted = Counted(make())
        model = {name: jnp.ones(x.shape) for name, x in MANY.items()}
        ts = ft.TrainState.create(model, counted.tx)
        counted.traces.clear()
        for layout in (P("data"), P(None, "model")):
            ft.plan(ts, layout, SIZES)
            assert counted.traces == traces
