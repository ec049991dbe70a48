"""`ft.jit`: `in_shardings`, `out_shardings`, the mesh and the rules of the body."""

import warnings
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

import functree as ft
from tests.lib import checks
from tests.lib.meshes import EXPLICIT, MESH, assert_lies

P = PartitionSpec
REVERSED = Mesh(MESH.devices[::-1, ::-1], MESH.axis_names, axis_types=(AxisType.Auto,) * 2)
HALF = ft.make_mesh(data=2, model=2, devices=jax.devices()[4:])
TALL = ft.make_mesh(data=4, model=2)
RULES = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})
raises = partial(checks.raises, error=ft.ShardingError)


class Model(eqx.Module):
    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden"]
    name: Any = "model"

    def both(self, x: Array) -> Any:
        return self.w, x


def lay(x: Any, *spec: Any, mesh: Mesh = MESH, kind: str | None = None) -> Array:
    # A copy: on the CPU two arrays that are made of one of numpy's may share its memory.
    return jax.device_put(jnp.array(x), NamedSharding(mesh, P(*spec), memory_kind=kind))


def model(mesh: Mesh = MESH) -> Model:
    return Model(
        lay(jnp.ones((4, 8)), None, "model", mesh=mesh), lay(jnp.ones(8), "model", mesh=mesh)
    )


X = np.arange(32, dtype=np.float32).reshape(8, 4)
BATCH = np.ones((32, 4), np.float32)


# in_shardings: how it is written


def three(a: Any, b: Any, c: Any = None) -> Any:
    return a, b, c


WRITTEN: dict[str, tuple[Any, list[Any]]] = {
    "a tuple": ((P("data"), P("model"), None), [("data",), ("model",), None]),
    "by name": ({"c": P("data"), "a": P("model")}, [("model",), None, ("data",)]),
    "one for all": (P("data"), [("data",), ("data",), ("data",)]),
    "one StateSharding for all": (
        ft.StateSharding({"a": P("data"), "b": None, ...: P()}),
        [("data",), None, ()],
    ),
    "rules for one": ((ft.FSDP("data", min_size=0), None, None), [("data",), None, None]),
}


@pytest.mark.parametrize("call", ["positions", "names"])
@pytest.mark.parametrize("form", WRITTEN)
def test_in_shardings(form: str, call: str):
    written, expected = WRITTEN[form]
    f = ft.jit(three, in_shardings=written, mesh=MESH)
    result = f(X, X + 1, X + 2) if call == "positions" else f(c=X + 2, b=X + 1, a=X)
    for i, (x, spec) in enumerate(zip(result, expected, strict=True)):
        np.testing.assert_array_equal(x, X + i)
        if spec is None:
            assert x.sharding.num_devices == 1 or x.sharding.is_fully_replicated
        else:
            assert_lies(x, *spec)
    assert len(f.compilations) == 1


def test_in_shardings_of_any_number_of_arguments():
    def f(a: Any, *rest: Any, c: Any = None, **named: Any) -> Any:
        return {"a": a, "rest": rest, "c": c, **named}

    found = ft.jit(f, mesh=MESH, in_shardings=(None, P("data")))(X, X + 1, X + 2, c=X, n=X)
    for x in found["rest"]:
        assert_lies(x, "data")
    for name in ("a", "c", "n"):
        assert_lies(found[name])
    by_name = {"c": P("data"), "n": P("model")}
    found = ft.jit(f, mesh=MESH, in_shardings=by_name)(X, c=X + 3, n=X + 1, m=X + 2)
    assert_lies(found["c"], "data")
    assert_lies(found["n"], "model")
    assert_lies(found["m"])


def test_in_shardings_of_a_bound_module():
    for options in ((P("data"),), {"self": RULES, "x": P("data")}):
        w, x = ft.jit(model().both, in_shardings=options, mesh=MESH)(X)
        assert_lies(w, None, "model")
        assert_lies(x, "data")


WRONG: dict[str, tuple[Any, str]] = {
    "too few": (
        (P(),),
        "in_shardings has 1 layout, but three has 3 positional parameters (a, b, c): give one layout "
        "for each parameter, and `None` for a parameter that is not an array",
    ),
    "unknown name": (
        {"aa": P()},
        "in_shardings: three has no parameter 'aa' (parameters: a, b, c); did you mean `a`?",
    ),
    "no layout": (
        3,
        "in_shardings: 3 is not a layout, a sequence with one layout per positional parameter, or a "
        "dict from parameter names to layouts",
    ),
}


@pytest.mark.parametrize("form", WRONG)
def test_in_shardings_that_do_not_fit_the_function(form: str):
    written, told = WRONG[form]
    with raises(told, error=ft.RuleError):
        ft.jit(three, in_shardings=written)


@pytest.mark.parametrize("given", [P(), {"a": P(), "b": None}, (P(), None, None)], ids=str)
def test_static_parameters_that_have_no_layout(given: Any):
    f = ft.jit(lambda a, b, c: a * 2, in_shardings=given, static_argnames="b", mesh=MESH)
    assert_lies(f(X, ("any", "thing"), None))


# in_shardings: what they check


def test_silent_failure_21_a_committed_array_that_lies_otherwise():
    f = ft.jit(lambda model, x: x, in_shardings=(RULES, P("data")), mesh=MESH)
    wrong = Model(lay(jnp.ones((4, 8)), "data"), jax.device_put(jnp.ones(8), jax.devices()[0]))
    with raises(
        "in_shardings: 2 leaves cannot be laid out on mesh (data=2, model=4)",
        "model.w   f32[4, 8]   \"embed hidden\"\n      is sharded P('data') on (data=2, model=4), but `in_shardings` specifies P(None, 'model') on",
        "`ft.jit` does not move arrays implicitly",
        "model.b   f32[8]   \"hidden\"\n      is sharded on cpu:0, but `in_shardings` specifies P('model') on (data=2, model=4)",
        "move it once: `ft.shard(x, layout, mesh)`",
    ):
        f(wrong, lay(X, "data"))
    f(ft.shard(wrong, RULES, MESH), lay(X, "data"))
    with raises("x   f32[8, 4]\n      is sharded P(None, 'model')"):  # and at every later call
        f(ft.shard(wrong, RULES, MESH), lay(X, None, "model"))


def test_an_array_that_is_committed_later():
    f = ft.jit(lambda x: x * 1, in_shardings=(P("data"),), mesh=MESH)
    f(jnp.asarray(X))
    with raises("x   f32[8, 4]\n      is sharded on cpu:0, but `in_shardings` specifies"):
        f(jax.device_put(X, jax.devices()[0]))


@pytest.mark.parametrize("mesh", [MESH, EXPLICIT], ids=["auto", "explicit"])
def test_an_abstract_array_that_is_sharded_otherwise(mesh: Any):
    """As one with values."""
    f = ft.jit(lambda tree: tree["x"] * 2, in_shardings=P("data"), mesh=mesh)
    other = NamedSharding(mesh, P(None, "model"))
    tree = {"x": jax.ShapeDtypeStruct(BATCH.shape, BATCH.dtype, sharding=other)}
    with raises(
        "tree.x", "is sharded P(None, 'model') on", "but `in_shardings` specifies P('data'"
    ):
        f.lower(tree)


@pytest.mark.parametrize(("array", "options", "layout"), [
    (BATCH, {"in_shardings": {"tree": P("data")}}, "in_shardings"),
    (jnp.asarray(BATCH), {"in_shardings": {"tree": P("data")}}, "in_shardings"),
    (jnp.asarray(BATCH), {"rules": ft.StateSharding({"**.x": P("data"), ...: P()})}, "the rules"),
], ids=["numpy", "uncommitted", "rules"])  # fmt: skip
def test_silent_failure_31_an_array_that_is_moved_on_each_call(
    array: Any, options: Any, layout: str
):
    f = ft.jit(lambda tree, y: tree["x"] * 2 + y, **options, mesh=MESH)
    y = lay(BATCH, "data")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_lies(f({"x": array}, y), "data")
    with pytest.warns(ft.FunctreeWarning) as caught:
        f({"x": array}, y)
    assert [str(w.message) for w in caught] == [
        "<lambda>: each call places `tree.x` again: call `ft.shard` once, before the calls"
    ]
    assert caught[0].filename == __file__
    f({"x": array}, y)  # once
    f({"x": lay(BATCH, "data")}, y)


def test_silent_failure_31_in_explicit_mode():
    f = ft.jit(lambda tree: tree["a"] * 2, in_shardings=P("data"), mesh=EXPLICIT)
    with raises(
        "in_shardings: 2 leaves cannot be laid out",
        "tree.a, tree.b   f32[8, 4]\n      is uncommitted and not on a mesh: on Explicit axes",
        "move it first: `ft.shard(x, layout, mesh)`",
    ):
        f({"a": X, "b": jnp.asarray(X)})
    seen = []
    f = ft.jit(lambda x: seen.append(jax.typeof(x)) or x, in_shardings=P("data"), mesh=EXPLICIT)
    f(ft.shard(X, P("data"), EXPLICIT))
    assert seen[0].sharding.spec == P("data", None)
    with raises("x   f32[8, 4]\n      is sharded P('data', None) on (data=2, model=4)"):
        f(ft.shard(X, P("data"), MESH))  # an array of an Auto mesh has another type


@pytest.mark.parametrize("stage", ["trace", "lower", "eval_shape"])
def test_on_explicit_axes_abstract_arrays_have_the_types_of_placed_ones(stage: str):
    seen: list[Any] = []

    def double(tree: dict[str, Any], x: Float[Array, "batch embed"]) -> Any:
        seen.append(jax.tree.map(jax.typeof, (tree, x)))
        return tree["y"] * 2 + x

    abstract = jax.ShapeDtypeStruct(X.shape, X.dtype)
    f = ft.jit(double, mesh=EXPLICIT, in_shardings=(P(None, "model"), RULES))
    getattr(f, stage)({"y": abstract}, abstract)
    assert [str(kind) for kind in jax.tree.leaves(seen)] == [
        "float32[8,4@model]",
        "float32[8@data,4]",
    ]
    f({"y": ft.shard(X, P(None, "model"), EXPLICIT)}, ft.shard(X, P("data"), EXPLICIT))
    assert len(seen) == 1


def test_none_is_as_it_comes():
    f = ft.jit(
        lambda a, b: (a, b),
        in_shardings={"a": ft.StateSharding({"x": P("data"), ...: None}), "b": None},
        mesh=MESH,
    )
    for spec in (("data",), (None, "model"), ()):
        a, b = f({"x": lay(X, "data"), "y": lay(X, *spec)}, lay(X, *spec))
        assert_lies(a["x"], "data")
        assert_lies(a["y"], *spec)
        assert_lies(b, *spec)
    assert len(f.compilations) == 3
    x = lay(X, "data")  # at two paths
    assert_lies(ft.jit(three, in_shardings=(P("data"), None, None), mesh=MESH)(x, x)[1], "data")


def test_host_memory():
    f = ft.jit(
        lambda x, y: (jax.device_put(x, jax.memory.Space.Device) + y, x),
        in_shardings=(ft.on_host(P("data")), P("data")),
        out_shardings=(P("data"), ft.on_host(P("data"))),
        mesh=MESH,
    )
    x, y = lay(X, "data", kind="pinned_host"), lay(X, "data")
    for _ in range(2):
        y, x = f(x, y)
    assert (x.sharding.memory_kind, y.sharding.memory_kind) == ("pinned_host", "device")
    np.testing.assert_array_equal(y, X * 3)
    assert len(f.compilations) == 1
    with raises("x   f32[8, 4]", "but `in_shardings` specifies", "in pinned_host"):
        f(y, x)


# out_shardings

OUT: dict[str, tuple[Any, list[Any]]] = {
    "a prefix": (({"x": P("model"), "m": RULES},), [(None, "model"), ("model",), ("model",)]),
    "a tree": (
        ({"x": P("model"), "m": Model(P("data"), None, None)},),
        [("data",), (), ("model",)],
    ),
    "a StateSharding": (
        ft.StateSharding({"**.x": P("data"), "**.w": P(None, "data"), ...: None}),
        [(None, "data"), (), ("data",)],
    ),
    "the compiler's choice": (None, [(), (), ()]),
}


@pytest.mark.parametrize("form", OUT)
def test_out_shardings(form: str):
    layout, expected = OUT[form]

    def body(x: Array) -> Any:
        return (
            {
                "m": Model(jnp.full((4, 8), x.sum()), jnp.full(8, x.sum())),
                "x": jnp.full(8, x.sum()),
            },
        )

    f = ft.jit(body, out_shardings=layout, mesh=MESH)
    (result,) = f(lay(jnp.ones(8), "data"))
    for x, spec in zip([result["m"].w, result["m"].b, result["x"]], expected, strict=True):
        assert_lies(x, *spec)
    assert result["m"].name == "model"


def test_out_shardings_that_do_not_fit():
    where = "<lambda>: out_shardings: 1 leaf cannot be laid out"
    with raises(where, "result.w", "f32[6, 8]", "dimension 0 has size 6; model=4"):
        ft.jit(lambda x: {"w": jnp.ones((6, 8))}, out_shardings=P("model"), mesh=MESH)(X)
    with raises("at `result`: `v` is only in the tree", error=ft.RuleError):
        ft.jit(lambda x: {"w": x, "v": x}, out_shardings={"w": P()}, mesh=MESH)(X)


# The mesh


def test_a_given_mesh_wins():
    f = ft.jit(lambda x: ft.constrain(x * 2, "batch embed", rules=RULES), mesh=MESH)
    with jax.set_mesh(TALL):
        assert_lies(f(X), "data")
        assert jax.sharding.get_mesh() is TALL


def test_the_context_brings_the_mesh():
    def double(x: Float[Array, "batch embed"]) -> Array:
        return ft.constrain(x * 2, "batch embed")

    f = ft.jit(double, rules=RULES)
    for mesh in (MESH, TALL, MESH):
        with jax.set_mesh(mesh):
            assert_lies(f(X), "data", mesh=mesh)
    assert len(f.compilations) == 2


ELSEWHERE = {
    "other devices": (REVERSED, "(data=2, model=4), which has different devices"),
    "other shape": (TALL, "(data=4, model=2)"),
    "fewer devices": (HALF, "(data=2, model=2)"),
}


@pytest.mark.parametrize("first", [True, False], ids=["first call", "later call"])
@pytest.mark.parametrize("options", [{"mesh": MESH}, {"donate": "a"}], ids=["mesh=", "arguments"])
@pytest.mark.parametrize("other", ELSEWHERE)
def test_arguments_on_another_mesh(other: str, options: Any, first: bool):
    mesh, told = ELSEWHERE[other]
    f = ft.jit(lambda a, b: {"x": a["x"] + b}, **options)
    a, b = {"x": lay(X, "data")}, lay(X, "data")
    if not first:
        f({"x": a["x"] + 0}, b)
    with raises(
        "<lambda> runs on mesh (data=2, model=4), but 1 argument is not on it",
        f"b   f32[8, 4]\n      is on the mesh {told}",
        "move the argument to the function's mesh: `ft.shard(x, layout, mesh)`",
    ):
        f(a, lay(X, "data", mesh=mesh))
    assert jax.sharding.get_mesh().empty
    f(a, b)


def test_only_what_has_devices():
    with raises("jit: `mesh` has only sizes: pass a `Mesh` with devices"):
        ft.jit(lambda x: x, mesh={"data": 2})  # type: ignore[call-overload]


# The rules. Silent failure 23.


def test_silent_failure_23_without_the_ambient_rules_of_the_call_before():
    f = ft.jit(lambda x: ft.constrain(x * 1, "batch embed"))
    with ft.axis_rules(RULES):
        assert_lies(f(lay(X)), "data")
    with raises("constrain: no rules lay out `batch embed` on mesh (data=2, model=4)"):
        f(lay(X))


def test_given_rules_win():
    others = ft.AxisRules({"batch": None, "embed": "model"})
    f = ft.jit(lambda x: ft.constrain(x * 1, "batch embed"), rules=RULES)
    with ft.axis_rules(others):
        assert_lies(f(lay(X)), "data")
        assert ft.spec("batch embed") == P(None, "model")
    assert_lies(f(lay(X)), "data")
    assert_lies(jax.jit(lambda x: f(x) * 1)(lay(X)), "data")
    with raises("3 is not a layout", error=ft.RuleError):
        ft.jit(lambda x: x, rules=3)


def test_an_error_of_jax_names_the_users_line():
    def body(x: Array, y: Array) -> Array:
        return x if x.sum() > 0 else y

    where = r"test_jit_shardings.py:\d+ for jit.*argument x\b"
    with pytest.raises(jax.errors.TracerBoolConversionError, match=where):
        ft.jit(body)(jnp.ones(2), jnp.ones(2))


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_a_function_that_uses_no_argument_runs_where_they_lie(explicit: bool):
    x = ft.shard(jnp.ones((8, 4)), P("data"), ft.make_mesh(data=2, model=4, explicit=explicit))
    assert ft.jit(lambda x: jnp.ones_like(x))(x).sharding.device_set == x.sharding.device_set


# An optimizer's state


def step(model: Any, opt_state: Any, x: Any) -> Any:
    return model


NAMED_RULES = ft.AxisRules({"embed": "data", "hidden": "model"})
PLAN_OPTIMIZER = "for an optimizer's state, use `ft.plan_optimizer`"
# A layout of the model for the state of an optimizer, and what the error has to name.
FOR_THE_MODEL: dict[str, tuple[Any, Any, list[str]]] = {
    "rules": (NAMED_RULES, optax.adafactor(1e-3), ["in_shardings: 4 leaves", "opt_state.0.v_row.weight", PLAN_OPTIMIZER]),
    "one spec": (P("data", "model"), optax.adam(1e-3), ["in_shardings: 2 leaves", "opt_state.0.mu.bias, opt_state.0.nu.bias   f32[8]", PLAN_OPTIMIZER]),
    "a pattern": (
        ft.StateSharding({"weight": P("data", "model"), ...: P("model")}), optax.adam(1e-3),
        ["filter 'weight', for `opt_state`\n      matches no leaf"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOR_THE_MODEL)
def test_the_layout_of_a_model_for_the_state_of_an_optimizer(case: str):
    layout, tx, told = FOR_THE_MODEL[case]
    model = ft.nn.Linear(8, 8, key=jax.random.key(0))
    with raises(*told):
        ft.jit(step, in_shardings=(None, layout, None), mesh=MESH)(model, tx.init(model), X)
    # And so it is done.
    state = ft.plan_optimizer(tx, model, NAMED_RULES, MESH)
    ft.jit(step, in_shardings=(NAMED_RULES, state, P()), mesh=MESH).lower(model, tx.init(model), X)
