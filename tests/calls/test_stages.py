"""Traced, lowered and compiled calls over modules: trees of their structure, abstract arguments,
checked calls."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

import functree as ft
from tests.lib.checks import compilations, raises
from tests.lib.meshes import MESH
from tests.lib.trees import MLP

P = PartitionSpec
RULES = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})
STAGES = ("traced", "lowered", "compiled")


def mlp() -> MLP:
    return MLP(jnp.ones((8, 16)), jnp.ones((16, 8)))


def step(model: MLP, x: Array, scale: float = 1.0) -> dict[str, Any]:
    new = jax.tree.map(lambda w: w * scale if eqx.is_array(w) else w, model)
    return {"model": new, "loss": model(x).sum(), "name": "step"}


LOADS = {"in_shardings": {"model": RULES, "x": P("data")}, "donate": "model"}


@pytest.fixture
def placed(mesh: Mesh) -> tuple[MLP, Array]:
    return ft.shard((mlp(), jnp.ones((4, 8))), (RULES, P("data")), mesh)


def abstract(mesh: Mesh) -> tuple[MLP, jax.ShapeDtypeStruct]:
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    return ft.abstract(mlp, RULES, mesh)(), x


def stages(mesh: Mesh, *arguments: Any, **options: Any) -> dict[str, Any]:
    traced = ft.jit(step, mesh=mesh, **options).trace(*arguments)
    lowered = traced.lower()
    return {"traced": traced, "lowered": lowered, "compiled": lowered.compile()}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["abstract", "concrete"])
def test_trees_have_the_models_structure(
    stage: str, kind: str, mesh: Mesh, placed: tuple[MLP, Array]
):
    found = stages(mesh, *(abstract(mesh) if kind == "abstract" else placed), **LOADS)[stage]
    (model, x), kwargs = found.args_info
    assert isinstance(model, MLP) and model.activation is None and kwargs == {}
    assert (model.up.shape, model.up.donated, x.shape, x.donated) == ((8, 16), True, (4, 8), False)
    assert found.in_avals[0][0].down.shape == (16, 8)
    assert found.in_tree == jax.tree.structure(found.args_info)
    assert found.out_info["model"].up.shape == (8, 16) and found.out_info["name"] == "step"
    assert found.out_tree == jax.tree.structure(found.out_info)


def test_a_traced_function(mesh: Mesh):
    traced = stages(mesh, *abstract(mesh), **LOADS)["traced"]
    assert len(traced.jax.jaxpr.in_avals) == 3
    assert list(map(str, traced.paths)) == ["model.up", "model.down", "x"]
    assert list(map(str, traced.donated)) == ["model.up", "model.down"]
    assert repr(traced) == "<Traced of step>"
    for_tpu = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "sdy.mesh" in for_tpu and "stablehlo" in for_tpu


def test_a_lowered_function(mesh: Mesh):
    lowered = stages(mesh, *abstract(mesh), **LOADS)["lowered"]
    assert "stablehlo.dot" in lowered.as_text() and "HloModule" in lowered.as_text("hlo")
    assert '"x"' in lowered.as_text(debug_info=True)
    assert lowered.jax.compiler_ir() is not None and lowered.cost_analysis() is not None


def test_a_compiled_function(mesh: Mesh):
    compiled = stages(mesh, *abstract(mesh), **LOADS)["compiled"]
    assert all(name in compiled.as_text() for name in ('"model.up"', '"model.down"', '"x"'))
    assert (
        compiled.memory_analysis().argument_size_in_bytes > 0
        and compiled.cost_analysis() is not None
    )
    assert compiled.jax.runtime_executable() is not None
    (model, x), _ = compiled.input_shardings
    assert model.up == NamedSharding(mesh, P(None, "model"))
    assert x.is_equivalent_to(NamedSharding(mesh, P("data", None)), 2)
    # Closed, as it was donated.
    assert compiled.output_shardings["model"].down == NamedSharding(mesh, P("model", None))


@pytest.mark.parametrize("packed", [False, True])
def test_a_compiled_step_is_called_with_modules_and_packed_trees(
    packed: bool, mesh: Mesh, placed: tuple[MLP, Array]
):
    model, x = placed
    model = ft.pack(model) if packed else model
    compiled = ft.jit(step, mesh=mesh).lower(model, x).compile()
    found = compiled(model, x)
    assert type(found["model"]) is type(model) and float(found["loss"]) == 4 * 8 * 8 * 16
    assert float(compiled(model, x=x)["loss"]) == float(found["loss"])


def test_a_donated_loop(mesh: Mesh, placed: tuple[MLP, Array]):
    model, x = placed
    compiled = ft.jit(step, mesh=mesh, **LOADS).lower(*abstract(mesh)).compile()
    first = model
    for _ in range(3):
        model = compiled(model, x)["model"]
    assert first.up.is_deleted() and model.up.sharding.spec == P(None, "model")
    with pytest.raises(
        ft.FunctreeError, match=r"(?s)step: 1 argument is deleted.*model   2 arrays.*was donated"
    ):
        compiled(first, x)


@pytest.mark.filterwarnings("ignore:.*uncommitted")
def test_a_compiled_step_donates_nothing_twice(mesh: Mesh, placed: tuple[MLP, Array]):
    def square() -> MLP:
        return MLP(jnp.ones((8, 8)), jnp.ones((8, 8)))

    compiled = (
        ft.jit(step, mesh=mesh, donate="model").lower(ft.abstract(square)(), placed[1]).compile()
    )
    once = ft.shard(jnp.ones((8, 8)), P(), mesh)
    with pytest.raises(
        ft.FunctreeError,
        match=r"(?s)step: .*model.down.*is the same array as `model.up`, and both are",
    ):
        compiled(MLP(once, once), placed[1])


STRUCTURE = "do not have the structure and the static values that the program was compiled for"
# What differs from the call that was compiled, the class of the error, and what it says.
Wrong = Callable[[MLP, Array, Mesh], tuple[Any, ...]]
WRONG: dict[str, tuple[Wrong, type[Exception], tuple[str, ...]]] = {
    "shape": (
        lambda m, x, mesh: (m, x[:2], 1.0),
        TypeError,
        ("'x' compiled with float32[4,8] and called with float32[2,8]",),
    ),
    "dtype": (
        lambda m, x, mesh: (m, x.astype(jnp.int32), 1.0),
        TypeError,
        ("'x' compiled with float32[4,8] and called with int32[4,8]",),
    ),
    "sharding": (
        lambda m, x, mesh: (ft.shard(m, P(), mesh), x, 1.0),
        ValueError,
        ("model.up with shape float32[8,16]", "Passed", "Required", "model.down"),
    ),
    "other devices": (
        lambda m, x, mesh: (m, jax.device_put(np.ones((4, 8), np.float32), jax.devices()[0]), 1.0),
        ValueError,
        ("x with shape float32[4,8]", "Passed", "Required"),
    ),
    "static type": (
        lambda m, x, mesh: (m, x, 1),
        ft.FunctreeError,
        (STRUCTURE, "scale", "static 1.0 → 1", "Try: call the function itself"),
    ),
    "nothing": (
        lambda m, x, mesh: (m, None, 1.0),
        ft.FunctreeError,
        (STRUCTURE, "x", "structure an array → nothing"),
    ),
    "abstract": (
        lambda m, x, mesh: (m, jax.ShapeDtypeStruct((4, 8), "float32"), 1.0),
        ft.FunctreeError,
        ("`x` is abstract",),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_compiled_step_takes_nothing_else(case: str, mesh: Mesh, placed: tuple[MLP, Array]):
    compiled = ft.jit(step, mesh=mesh).lower(*placed, 1.0).compile()
    make, error, fragments = WRONG[case]
    with raises(*fragments, error=error):
        compiled(*make(*placed, mesh))
    compiled(*placed, 1.0)


def test_uncommitted_arrays_are_put_there(mesh: Mesh, placed: tuple[MLP, Array]):
    compiled = (
        ft.jit(step, mesh=mesh, in_shardings=LOADS["in_shardings"]).lower(*abstract(mesh)).compile()
    )
    for loose in jnp.ones((4, 8)), np.ones((4, 8), np.float32):
        assert float(compiled(placed[0], loose)["loss"]) == 4096


def test_of_a_method(mesh: Mesh):
    class Trainer(eqx.Module):
        model: MLP

        @ft.jit
        def loss(self, x: Array) -> Array:
            return self.model(x).sum()

    trainer, x = Trainer(ft.shard(mlp(), RULES, mesh)), ft.shard(jnp.ones((4, 8)), P("data"), mesh)
    assert repr(trainer.loss.trace(x)) == "<Traced of Trainer.loss>"
    compiled = trainer.loss.lower(x).compile()
    assert float(compiled(x)) == float(trainer.loss(x)) == 4096
    assert '"self.model.up"' in compiled.as_text()


def test_one_trace_for_all_stages_and_the_call(mesh: Mesh, placed: tuple[MLP, Array]):
    traces = 0

    @ft.jit(mesh=mesh, **LOADS)
    def counted(model: MLP, x: Array) -> Any:
        nonlocal traces
        traces += 1
        return model

    counted.eval_shape(*abstract(mesh))
    counted.lower(*abstract(mesh)).compile()
    counted(*placed)
    assert traces == 1


def test_a_program_for_devices_that_are_given_later(mesh: Mesh):
    sharding = NamedSharding(mesh.abstract_mesh, P("data"))
    x = jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=sharding)
    lowered = (
        ft.jit(lambda batch: {"y": 2 * batch["x"]})
        .trace({"x": x})
        .lower(lowering_platforms=("cpu",))
    )
    compiled = lowered.compile(device_assignment=tuple(mesh.devices.flat))
    placed = jax.device_put(np.ones((8, 2), np.float32), NamedSharding(mesh, P("data")))
    found = compiled({"x": placed})["y"]
    assert np.array_equal(found, 2 * np.ones((8, 2))) and found.sharding == NamedSharding(
        mesh, P("data")
    )


def test_platforms_are_a_tuple():
    with raises("<lambda>: invalid options for `lower()`", "lowering_platforms='tpu'"):
        ft.jit(lambda x: 2 * x).trace(jnp.ones(2)).lower(lowering_platforms="tpu")  # type: ignore[arg-type]


def test_an_abstract_mesh(mesh: Mesh, placed: tuple[MLP, Array]):
    elsewhere = mesh.abstract_mesh
    function = ft.jit(step, mesh=elsewhere, in_shardings={"model": RULES, "x": P("data")})
    text = function.trace(*abstract(elsewhere)).lower(lowering_platforms=("tpu",)).as_text()  # type: ignore[arg-type]
    assert '"model"=4' in text
    with pytest.raises(
        ft.ShardingError, match=r"step cannot run: the mesh \(data=2, model=4\) has no devices"
    ):
        function(*placed)


@pytest.mark.parametrize("kind", [jnp.ones, np.ones, jax.ShapeDtypeStruct])
def test_an_array_on_no_mesh_is_lowered_with_its_spec_on_an_abstract_mesh(kind: Callable[..., Any]):
    function = ft.jit(jnp.sum, mesh=MESH.abstract_mesh, in_shardings=P("data"))
    traced = function.trace(kind((16, 4), np.float32))
    assert '[{"data"}, {}]' in traced.lower(lowering_platforms=("cpu",)).as_text()


def test_an_abstract_call_is_an_error(mesh: Mesh):
    with pytest.raises(
        ft.FunctreeError, match=r"step: `model.up` is abstract.*use `.lower` or `.eval_shape`"
    ):
        ft.jit(step)(*abstract(mesh))


X = jnp.ones(3)


def mixed(a: Any, b: Any, c: Any = 1, *, d: Any) -> Any:
    return a + b + d


def many(a: Any, *more: Any, **named: Any) -> Any:
    return a


KEYWORDS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "by keyword": (mixed, (X,), {"b": X, "d": X}),
    "*args": (many, (X, X, X), {}),
    "**kwargs": (many, (X,), {"x": X, "y": X}),
    "all in **kwargs": (many, (), {"a": X, "y": X}),
}


@pytest.mark.parametrize("case", KEYWORDS)
def test_keywords_are_apart_as_in_jax(case: str):
    fun, args, kwargs = KEYWORDS[case]
    ours, theirs = ft.jit(fun).lower(*args, **kwargs), jax.jit(fun).lower(*args, **kwargs)
    for name in ("args_info", "in_avals"):
        (mine, by_name), (others, by_others_name) = getattr(ours, name), getattr(theirs, name)
        assert jax.tree.leaves(mine) == jax.tree.leaves(others)
        assert {key: one for key, one in by_name.items() if one is not None} == by_others_name
    assert ours.in_tree == jax.tree.structure(ours.args_info)
    assert ours.compile().input_shardings[1].keys() >= kwargs.keys()


def test_a_keyword_with_the_name_of_another_parameter():
    lowered = ft.jit(many).lower(X, X, X, named=X)
    assert lowered.in_tree == jax.tree.structure(((X, X, X), {"named": X}))


COMPILED_BEFORE: dict[str, Callable[[], tuple[Any, Any]]] = {
    "plain": lambda: (ft.jit(lambda x: x * 2), X),
    "in_shardings": lambda: (
        ft.jit(lambda x: x * 2, in_shardings=P("data"), out_shardings=P(), mesh=MESH),
        ft.shard(jnp.ones(8), P("data"), MESH),
    ),
    "shard_map": lambda: (
        ft.shard_map(lambda x: x * 2, mesh=MESH, in_specs=P("data"), out_specs=P("data")),
        ft.shard(jnp.ones(8), P("data"), MESH),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", COMPILED_BEFORE)
def test_a_call_uses_what_was_compiled_before_it(case: str):
    f, x = COMPILED_BEFORE[case]()
    f.lower(x).compile()
    with compilations() as heard:
        f(x)
    assert heard == [] and len(f.compilations) == 1
