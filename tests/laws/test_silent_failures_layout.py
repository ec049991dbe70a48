"""What fails in silence elsewhere (`reference/silent-failures.md`, by its numbers): in a plan, an
error with a path."""

import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

import functree as ft
from tests.lib.checks import refused
from tests.lib.meshes import SIZES
from tests.lib.trees import BareMLP as MLP

P = PartitionSpec


def mlp(embed: int = 8, hidden: int = 16) -> MLP:
    return MLP(jnp.ones((embed, hidden)), jnp.ones((hidden, embed)))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            {"embd": None, "hidden": "model"},
            "no rule names `embed`; did you mean the rule for `embd`?",
        ),
        ({"embd": "data", "hidden": "model", ...: None}, '"embed" has no rule but `...: None`'),
        ({"embed": "dtaa", "hidden": "model"}, "has no axis `dtaa`; did you mean `data`?"),
    ],
)
def test_silent_failure_1_a_typo_in_a_rule(table: Any, said: str) -> None:
    text = refused({"mlp": mlp()}, ft.AxisRules(table))
    assert said in text
    assert "mlp.up, mlp.down" in text or "mlp.up   " in text or "rule embed→dtaa" in text


def test_silent_failure_1_a_typo_in_a_filter() -> None:
    text = refused(mlp(), ft.StateSharding({"pu": P("data"), ...: P()}))
    assert "filter 'pu'\n      matches no leaf" in text
    assert "did you mean `data`" in refused(mlp(), ft.FSDP("dta"))


def test_silent_failure_2_a_dimension_that_does_not_divide() -> None:
    tree = {"a": mlp(hidden=18), "b": mlp(), "c": mlp(embed=7)}
    with pytest.raises(ft.ShardingError) as caught:
        ft.plan(tree, ft.AxisRules({"hidden": "model", "embed": "data"}), SIZES)
    found = [(str(p.path), p.why) for p in caught.value.problems]  # all the leaves
    assert found == [
        ("a.up", '"hidden" has size 18; rule hidden→model needs a multiple of model=4'),
        ("a.down", '"hidden" has size 18; rule hidden→model needs a multiple of model=4'),
        ("c.up", '"embed" has size 7; rule embed→data needs a multiple of data=2'),
        ("c.down", '"embed" has size 7; rule embed→data needs a multiple of data=2'),
    ]
    for layout in (P("model"), lambda path, leaf: P("model"), ft.FSDP("model", min_size=0)):
        assert "w   f32[7, 5]" in refused({"w": jnp.ones((7, 5))}, layout)


def test_silent_failure_3_one_rule_list_one_answer() -> None:
    # as a dict, the last of `embed` would win, and "data" stand twice
    rules = ft.AxisRules(
        [
            ("batch", "data"),
            ("embed", "data"),
            ("embed", "model"),
            ("hidden", "model"),
            ("hidden", None),
        ]
    )
    assert ft.plan(mlp(), rules, SIZES).specs == MLP(P("data", "model"), P("model", "data"))  # type: ignore[arg-type]
    assert rules.spec("batch embed") == P("data", "model")
    assert rules.spec("embed hidden") == P("data", "model")


def test_silent_failure_4_an_ellipsis_in_front() -> None:
    with pytest.raises(
        ft.RuleError, match=r"`...` may only be the last filter: 'up' after it would match nothing"
    ):
        ft.StateSharding({...: P(), "up": P("data")})
    with pytest.raises(ft.RuleError, match=r"`...` may only be the last rule"):
        ft.AxisRules({...: None, "embed": "data"})


def test_silent_failure_5_two_axes_on_one_mesh_axis() -> None:
    both = {"embed": "model", "hidden": "model"}
    assert '"hidden" has no rule left: `model` is used by "embed"' in refused(
        mlp(), ft.AxisRules(both)
    )
    for layout in (
        P("model", "model"),
        lambda p, x: P("model", "model"),
        ft.FSDP("model", min_size=0) | P("model", "model"),
    ):
        text = refused({"w": jnp.ones((8, 16))}, layout)
        assert (
            "uses mesh axis `model` twice, the second time for" in text
            or "is already sharded over model" in text
        )
    with pytest.raises(ft.RuleError, match="mesh axis `model` is named twice"):
        ft.AxisRules({"embed": ("model", "model")})


def test_silent_failure_6_a_stack_without_its_name() -> None:
    layers = 8  # divides, so that a spec off by one would lie well
    shapes = (
        jax.ShapeDtypeStruct((layers, 8, 16), jnp.float32),
        jax.ShapeDtypeStruct((layers, 16, 8), jnp.float32),
    )
    bare = MLP(*shapes)  # type: ignore[arg-type]
    rules = ft.AxisRules({"hidden": "model", "embed": "data", "layers": None})
    for layout in (rules, ft.FSDP("data", min_size=0)):
        text = refused({"blocks": bare}, layout)
        assert (
            'blocks.up   f32[8, 8, 16]\n      has 3 dimensions; `Float[Array, "embed hidden"]` has 2'
            in text
        )
        assert "several layers in one array (by vmap or scan), hold them in `ft.Stacked`" in text
    stacked = ft.Stacked(bare, axis="layers")
    plan = ft.plan(stacked, rules, SIZES)
    assert plan["layer.up"].spec == P(None, "data", "model")
    state = ft.plan_optimizer(
        optax.adam(1e-3), stacked, rules, SIZES
    )  # and its optimizer's copy is laid out alike
    assert state["0.mu.layer.up"].spec == state["0.nu.layer.up"].spec == P(None, "data", "model")


def test_silent_failure_9_one_array_at_two_paths_with_two_specs() -> None:
    shared = jnp.ones((8, 16))
    text = refused(
        {"embedding": shared, "head": {"w": shared}},
        {"embedding": P("data"), "head": P(None, "model")},
    )
    assert "head.w   f32[8, 16]" in text
    assert (
        "is the same array as `embedding`, and is laid out P(None, 'model') here and P('data', None) there"
        in text
    )
    by_path = ft.StateSharding({"embedding": P("data"), ...: P()})
    assert "is the same array as `embedding`" in refused(
        {"embedding": shared, "head": {"w": shared}}, by_path
    )


def test_silent_failure_10_one_resolver_for_parameters_and_activations() -> None:
    rules = ft.AxisRules({"batch": "data", "embed": "data", "hidden": "model", ...: None})

    class Activations(eqx.Module):
        up: Float[Array, "embed hidden"]
        x: Float[Array, "batch embed"]

    for sizes in ({"data": 1, "model": 1}, {"data": 1, "model": 4}, {"data": 8, "model": 1}):
        mesh = Mesh(
            np.array(jax.devices()[: sizes["data"] * sizes["model"]]).reshape(*sizes.values()),
            tuple(sizes),
        )
        plan = ft.plan(Activations(jnp.ones((8, 16)), jnp.ones((8, 8))), rules, mesh)
        assert (
            plan["up"].spec == rules.spec("embed hidden", (8, 16), mesh) == P("data", "model")
        )  # axes of size 1 stay
        assert plan["x"].spec == rules.spec("batch embed", (8, 8), mesh) == P("data", None)
        with jax.set_mesh(mesh), ft.axis_rules(rules):
            assert (
                ft.spec("embed hidden") == plan["up"].spec
                and ft.spec("batch embed") == plan["x"].spec
            )
            x = jax.jit(lambda x: ft.constrain(x, "embed hidden"))(jnp.ones((8, 16)))
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, plan["up"].spec), 2)


def test_silent_failure_26_fsdp_never_takes_the_scan_axis() -> None:
    shapes = (
        jax.ShapeDtypeStruct((512, 8, 16), jnp.float32),
        jax.ShapeDtypeStruct((512, 16, 8), jnp.float32),
    )
    stacked = ft.Stacked(MLP(*shapes), axis="layers")  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = ft.plan(stacked, ft.FSDP("data", min_size=0), SIZES)
    assert plan["layer.up"].spec == P(None, None, "data") and plan["layer.down"].spec == P(
        None, "data", None
    )
    nested = ft.plan(
        {"outer": stacked},
        ft.AxisRules({"hidden": "model", ...: None}) | ft.FSDP("data", min_size=0),
        SIZES,
    )
    assert nested["outer.layer.up"].spec == P(None, "data", "model")
