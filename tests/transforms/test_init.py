"""`init`, `abstract`, `init_optimizer`: born where the layout says, equal to the bit, never whole
on one device."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

import functree as ft
from tests.lib.checks import raises
from tests.lib.meshes import MESH, assert_lies, mesh_of

P = PartitionSpec
RULES = ft.AxisRules({"embed": "data", "hidden": "model"})


class MLP(eqx.Module):
    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden embed"]
    bias: Float[Array, "embed"] | None
    activation: Callable[..., Any] = jax.nn.relu

    @staticmethod
    def create(embed: int, hidden: int, *, key: Array) -> "MLP":
        first, second = jax.random.split(key)
        return MLP(
            jax.random.normal(first, (embed, hidden)),
            jax.random.normal(second, (hidden, embed)),
            None,
        )


KEY = jax.random.key(0)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("ambient", [False, True])
def test_born_where_the_layout_says_and_equal_to_the_bit(explicit: bool, ambient: bool):
    mesh = mesh_of(explicit)
    if ambient:
        with jax.set_mesh(mesh):
            model = ft.init(MLP.create, RULES)(64, 128, key=KEY)
    else:
        model = ft.init(MLP.create, RULES, mesh)(64, 128, key=KEY)
    assert model.up.sharding == NamedSharding(mesh, P("data", "model"))
    assert model.down.sharding == NamedSharding(mesh, P("model", "data"))
    assert model.activation is jax.nn.relu and model.bias is None
    want = jax.jit(lambda key: eqx.filter(MLP.create(64, 128, key=key), eqx.is_array))(KEY)
    assert np.array_equal(model.up, want.up) and np.array_equal(model.down, want.down)


@pytest.mark.parametrize("explicit", [False, True])
def test_without_jit_it_is_placed_as_the_layout_says(explicit: bool):
    make = ft.init(MLP.create, RULES, mesh_of(explicit))
    with jax.disable_jit():
        found = make(64, 128, key=KEY)
    wanted = make(64, 128, key=KEY)
    for one, other in ((found.up, wanted.up), (found.down, wanted.down)):
        assert one.sharding == other.sharding and not one.sharding.is_fully_replicated
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("explicit", [False, True])
def test_no_leaf_is_ever_whole_on_one_device(explicit: bool):
    size = 1024
    compiled = ft.init(MLP.create, RULES, mesh_of(explicit)).lower(size, size, key=KEY).compile()
    memory = compiled.memory_analysis()
    leaf = size * size * 4
    assert memory.output_size_in_bytes <= 2 * leaf // 8 + 1024
    # Random bits are made in pieces, so that output and temporaries together stay below one whole
    # leaf.
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < leaf


def test_one_array_at_two_places_is_born_once():
    def make() -> dict[str, Array]:
        table, other, last = jnp.ones((16, 4)), jnp.zeros((4, 16)), jnp.full((8, 8), 2.0)
        return {"a": table, "b": other, "c": table, "d": last}

    layout = {"a": P("data"), "b": P(None, "model"), "c": P("data"), "d": P("model", "data")}
    made = ft.init(make, layout, MESH)()
    for name, spec in layout.items():
        assert_lies(made[name], *spec)
    assert made["a"] is made["c"]
    with pytest.raises(ft.ShardingError, match="is the same array as `a`"):
        ft.init(make, {**layout, "c": P()}, MESH)()
    assert [float(made[name].mean()) for name in "abd"] == [1.0, 0.0, 2.0]


def test_a_constant_and_an_input_that_come_back_are_placed_too():
    constant = np.arange(8.0, dtype=np.float32)
    tree = ft.init(lambda x: (constant, x), P("data"), MESH)(jnp.ones(4))
    assert [x.sharding.spec for x in tree] == [P("data"), P("data")]
    assert np.array_equal(tree[0], constant)


def test_one_trace_for_all_keys():
    traces = []

    def make(size: int, *, key: Array) -> MLP:
        traces.append(1)
        return MLP.create(size, 128, key=key)

    init = ft.init(make, RULES, MESH)
    models = [init(64, key=jax.random.key(i)) for i in range(3)]
    assert len(traces) == 1 and len(init.compilations) == 1
    assert not np.array_equal(models[0].up, models[1].up)
    init(64, key=jax.random.key(3)), init(32, key=jax.random.key(3))
    assert [str(c) for c in init.compilations] == [
        "compilation 1: the first",
        "compilation 2: size: static 64 → 32",
    ]
    assert init.plan(64, key=KEY)["up"].spec == P("data", "model") and len(traces) == 2


def test_what_to_do_without_devices():
    def error(mesh: Any) -> str:
        with pytest.raises(ft.ShardingError) as caught:
            ft.init(MLP.create, RULES, mesh)(64, 128, key=KEY)
        return str(caught.value)

    here = "pass `mesh=`, or enter `with jax.set_mesh(mesh):`"
    for mesh in ({"data": 2, "model": 4}, MESH.abstract_mesh):
        assert error(mesh) == (
            f"arrays cannot be created on mesh (data=2, model=4), which has no devices: {here}, where `mesh` is a `Mesh`; "
            "inside jit, use `ft.constrain(make(...), layout)`"
        )
    assert error(None).startswith("there is no mesh")


def test_one_trace_for_each_of_the_rules_around_it():
    """Each in turn and again: what a constructor asks of them is part of its result."""

    def make() -> dict[str, Any]:
        return {"w": jnp.ones(8), "spec": str(ft.spec("batch"))}

    init = ft.init(make, P("data"), MESH)
    for _ in range(2):
        for axis in ("data", "model"):
            with ft.axis_rules(ft.AxisRules({"batch": axis})):
                assert init()["spec"] == str(P(axis))
                assert init.abstract()["spec"] == str(P(axis))
    assert len(init.compilations) == 2


def test_init_names_the_leaf_that_does_not_fit():
    with pytest.raises(ft.ShardingError, match=r'(?s)up .*"hidden" has size 30; rule hidden→model'):
        ft.init(MLP.create, RULES, MESH)(64, 30, key=KEY)


def test_init_on_host():
    model = ft.init(MLP.create, ft.on_host(RULES), MESH)(64, 128, key=KEY)
    assert model.up.sharding.memory_kind == "pinned_host"


# abstract


@pytest.mark.parametrize("mesh", [MESH, MESH.abstract_mesh, mesh_of(True)])
def test_abstract_has_shapes_and_shardings_and_statics(mesh: Any):
    model = ft.abstract(MLP.create, RULES, mesh)(
        2**16, 2**18, key=KEY
    )  # 64 GiB a leaf, were it made
    assert model.up == jax.ShapeDtypeStruct(
        (2**16, 2**18), "float32", sharding=NamedSharding(mesh, P("data", "model"))
    )
    assert model.activation is jax.nn.relu
    assert ft.abstract(lambda: jnp.asarray(1.0), P(), mesh)().weak_type


def test_abstract_without_a_layout_has_no_shardings():
    model = ft.abstract(MLP.create)(64, 128, key=KEY)
    assert model.up == jax.ShapeDtypeStruct((64, 128), "float32") and model.up.sharding is None


# init_optimizer


@pytest.mark.parametrize("explicit", [False, True])
def test_an_optimizer_is_born_where_its_model_lies(explicit: bool):
    mesh = mesh_of(explicit)
    model = ft.init(MLP.create, RULES, mesh)(64, 128, key=KEY)
    state = ft.init_optimizer(optax.adam(1e-3), model, RULES, mesh)
    assert state[0].mu.up.sharding == NamedSharding(mesh, P("data", "model"))
    assert state[0].nu.down.sharding == NamedSharding(mesh, P("model", "data"))
    assert state[0].count.sharding == NamedSharding(mesh, P())


def test_an_optimizer_of_a_model_in_host_memory_is_there_too():
    model = {"w": jnp.ones((8, 4)), "b": jnp.ones(4)}
    layout = {"w": ft.on_host(P("data")), "b": P()}
    state = ft.init_optimizer(optax.adam(1e-3), model, layout, MESH)
    assert state[0].mu["w"].sharding.memory_kind == "pinned_host"
    assert state[0].mu["b"].sharding.memory_kind == state[0].count.sharding.memory_kind == "device"


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "without jit"])
def test_an_optimizer_that_keeps_parameters_has_copies_of_its_own(jit: bool):
    """So that model and state can both be donated. Without jit, JAX copies nothing by itself."""
    model = ft.init(MLP.create, RULES, MESH)(64, 128, key=KEY)
    tx = optax.GradientTransformation(
        lambda params: {"slow": params, "fast": params}, lambda u, s, p=None: (u, s)
    )
    with jax.disable_jit(not jit):
        state = ft.init_optimizer(tx, model, RULES, MESH)
    arrays = [model.up, state["slow"].up, state["fast"].up]
    shards = [one.data.unsafe_buffer_pointer() for x in arrays for one in x.addressable_shards]
    assert len(set(shards)) == len(shards)
    assert state["slow"].up.sharding == model.up.sharding
    assert np.array_equal(state["slow"].up, model.up)


def test_the_layout_is_of_the_shapes_of_each_call():
    init = ft.init(lambda x: x * 2, ft.FSDP("data", min_size=0), MESH)
    for shape, spec in (
        ((8, 4), P("data", None)),
        ((4, 8), P(None, "data")),
        ((3, 2), P(None, "data")),
    ):
        assert init(jnp.ones(shape)).sharding.spec == spec
    assert len(init.compilations) == 3


# What a constructor keeps in a closure


def in_a_list(x: Any) -> Any:
    kept = {"a": [0, x]}
    return lambda y: y + kept["a"][1]


def in_an_inner_function(x: Any) -> Any:
    def inner(y: Any) -> Any:
        return y + x

    return lambda y: inner(y)


KEPT: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a variable": (lambda x: lambda y: y + x, "x"),
    "in a tree": (in_a_list, "kept.a.1"),
    "in an inner function": (in_an_inner_function, "x"),
    "a default": (lambda x: lambda y, x=x: y + x, "defaults.0"),
    "jitted": (lambda x: jax.jit(lambda y: y + x), "x"),
    "a partial's argument": (lambda x: functools.partial(lambda a, y: y + a, x), "args.0"),
}


class Holder(eqx.Module):
    weight: Any
    layers: list[Any]

    def __init__(self, keep: Callable[[Any], Any], key: Any):
        self.weight = jax.random.normal(key, (4,))
        self.layers = [None, {"act": eqx.nn.Lambda(keep(jnp.zeros(4)))}]


@pytest.mark.parametrize("case", KEPT)
def test_a_traced_array_in_a_closure_is_an_error_by_path(case: str):
    keep, name = KEPT[case]
    remedy = "return the array as a leaf of the result, or create the object outside the trace and shard it with `ft.shard`"
    for wrap in (lambda make: ft.init(make, P(), MESH), ft.abstract, ft.jit):
        with raises("result.layers.1.act.fn", f"closes over a traced array, `{name}`", remedy):
            wrap(lambda key: Holder(keep, key))(jax.random.key(0))
    made = ft.shard(Holder(keep, jax.random.key(0)), P(), MESH)
    assert made.weight.sharding.mesh == MESH
    assert np.array_equal(
        ft.jit(lambda model, y: model.layers[1]["act"](y))(made, ft.shard(jnp.ones(4), P(), MESH)),
        jnp.ones(4),
    )
