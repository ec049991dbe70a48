"""`axis_rules` and `spec`."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

import functree as ft
from functree.placing.constrain import ambient_rules
from tests.lib.checks import raises
from tests.lib.meshes import MESH, assert_lies, lay

RULES = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})


def test_spec_follows_the_innermost_rules():
    with ft.axis_rules(RULES):
        assert ft.spec("batch hidden") == P("data", "model")
        with ft.axis_rules(ft.AxisRules({"batch": "model", "hidden": None})):
            assert ft.spec(ft.Axes("batch", "hidden")) == P("model", None)
        assert ft.spec("batch _ hidden") == P("data", None, "model")


def test_rules_end_with_their_context():
    """After an error too. They can be switched off inside."""
    told = r"no ambient `AxisRules`: enter `with ft.axis_rules\(rules\):`"
    with pytest.raises(KeyError), ft.axis_rules(RULES):
        raise KeyError
    with pytest.raises(ft.ShardingError, match=told):
        ft.spec("batch")
    with ft.axis_rules(RULES), ft.axis_rules(None), pytest.raises(ft.ShardingError, match=told):
        ft.spec("batch")


# Tasks of asyncio take turns in one thread.

OTHERS = ft.AxisRules({"batch": "model", "hidden": None})


def in_turn(*bodies: Callable[[], Any], rules: Sequence[Any]) -> list[list[Any]]:
    """What functions return that are called in turn in several tasks, each in the rules of its
    task."""

    async def task(body: Callable[[], Any], layout: Any, turns: int) -> list[Any]:
        results = []
        with ft.axis_rules(layout):
            for _ in range(turns):
                await asyncio.sleep(0)
                results.append(body())
        return results

    async def main() -> list[list[Any]]:
        # They end in another order than they began.
        each = zip(bodies, rules, range(2, 2 + len(bodies)), strict=True)
        return await asyncio.gather(*(task(*one) for one in each))

    return asyncio.run(main())


def test_each_task_has_its_own_rules():
    def seen() -> Any:
        return ft.spec("batch hidden")

    found = in_turn(seen, seen, seen, rules=[RULES, OTHERS, RULES])
    assert [set(one) for one in found] == [
        {P("data", "model")},
        {P("model", None)},
        {P("data", "model")},
    ]
    with pytest.raises(ft.ShardingError, match="no ambient `AxisRules`"):
        ft.spec("batch")
    assert ambient_rules() is None and jax.jit(lambda x: (ambient_rules(), x)[1])(1) == 1


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "ft.jit": lambda f: ft.jit(f, mesh=MESH),
    "ft.shard_map": lambda f: ft.shard_map(f, mesh=MESH, in_specs=P(), out_specs=P()),
    "ft.init": lambda f: ft.init(f, P(), MESH),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_functions_that_are_traced_in_tasks(wrapper: str):
    traced: list[Any] = []

    def body(x: Float[Array, "batch hidden"]) -> Any:
        traced.append(ambient_rules())
        return x * 2

    f, x = WRAPPERS[wrapper](body), np.ones((8, 4), np.float32)
    in_turn(lambda: f(x), lambda: f(x), lambda: f(x), rules=[RULES, OTHERS, None])
    # Once for each, whoever called last.
    assert sorted(map(repr, traced)) == sorted(map(repr, [RULES, OTHERS, None]))


def test_a_plain_jit_that_would_remember_the_rules_of_another_task():
    def plain() -> Any:
        return jax.jit(lambda x: (ft.spec("batch"), x)[1])(1.0)

    with raises("another asyncio task of this thread is in `ft.axis_rules`", "ft.jit(rules"):
        in_turn(plain, plain, rules=[RULES, OTHERS])
    # Equal rules are no harm.
    assert in_turn(plain, plain, rules=[RULES, RULES]) == [[1.0] * 2, [1.0] * 3]


def test_threads_have_their_own_rules():
    async def main() -> Any:
        with ft.axis_rules(RULES):
            return await asyncio.to_thread(
                lambda: (ft.spec("batch"), ft.jit(lambda x: (ft.spec("batch"), x)[1])(1))
            )

    assert asyncio.run(main()) == (P("data"), 1)  # asyncio hands them over
    with ft.axis_rules(RULES), ThreadPoolExecutor(1) as pool:
        assert pool.submit(ambient_rules).result() is None


def test_spec_checks_the_mesh():
    with jax.set_mesh(ft.make_mesh(data=8)), ft.axis_rules(RULES):
        with pytest.raises(ft.ShardingError, match=r"the mesh \(data=8\) has no axis `model`"):
            ft.spec("batch hidden")
        with ft.axis_rules(RULES.on({"data": 8})):
            assert ft.spec("batch hidden") == P("data", None)


FSDP = ft.FSDP("data", min_size=0)
OTHER_TABLE = ft.AxisRules({"hidden": "model", "embed": None})
FOR_ACTIVATIONS: dict[str, Any] = {
    "rules": RULES,
    "rules and FSDP": RULES | FSDP,
    "FSDP and rules": FSDP | RULES,
    "two tables": ft.AxisRules({"batch": "data"}) | OTHER_TABLE | FSDP,
    "filters": ft.StateSharding({"**.bias": ft.AxisRules({"embed": "nowhere"}), ...: RULES | FSDP}),
    "on the host": ft.on_host(RULES | FSDP),
}
FOR_PARAMETERS: dict[str, Any] = {
    "FSDP": FSDP,
    "a spec": P("model"),
    "filters without rules": ft.StateSharding({"**.bias": RULES, ...: P()}),
    "a plan": ft.plan(jnp.ones((4, 8)), P("data"), {"data": 2, "model": 4}),
}


@pytest.mark.parametrize("case", FOR_ACTIVATIONS)
def test_axes_are_laid_out_by_the_axis_rules_of_a_layout(case: str):
    layout = FOR_ACTIVATIONS[case]
    with ft.axis_rules(layout):
        assert ft.spec("batch hidden") == P("data", "model")
        assert ft.spec("hidden embed") == P("model", None)
    x = lay(jnp.ones((4, 8)), "data")
    constrained = [
        ft.jit(lambda x: ft.constrain(x * 2, "batch hidden"), rules=layout)(x),
        ft.jit(lambda x: ft.constrain(x * 2, "batch hidden", rules=layout))(x),
        ft.jit(ft.nn.Constrain("batch hidden"), rules=layout)(x),
    ]
    for found in constrained:
        assert_lies(found, "data", "model")
        assert found.sharding.memory_kind != "pinned_host"


@pytest.mark.parametrize("case", FOR_PARAMETERS)
def test_a_layout_without_axis_rules_lays_out_no_activation(case: str):
    layout, x = FOR_PARAMETERS[case], lay(jnp.ones((4, 8)), "data")
    told = [
        "constrain: no rules lay out `batch hidden` on mesh (data=2, model=4)",
        "where `rules` are `AxisRules`",
        "has no rules for axes, so combine it as `AxisRules(...) | layout`",
    ]
    with raises(*told, error=ft.ShardingError):
        ft.jit(lambda x: ft.constrain(x * 2, "batch hidden"), rules=layout)(x)
    with raises(*told, error=ft.ShardingError):
        ft.jit(lambda x: ft.constrain(x * 2, "batch hidden", rules=layout))(x)
    with (
        ft.axis_rules(layout),
        raises("spec: there are no ambient `AxisRules`", error=ft.ShardingError),
    ):
        ft.spec("batch hidden")
    # The layers are not refused: they constrain nothing, and their activations stay as the compiler
    # has them.
    found = ft.jit(ft.nn.Constrain("batch hidden"), rules=layout)(x)
    assert np.array_equal(found, x)
    assert_lies(found, "data")


CONFIG = ft.nn.TransformerConfig(64, 32, layers=2, heads=4, kv_heads=4, head_dim=8, hidden=64)


def test_silent_failure_33_a_layout_for_parameters_moves_no_activation():
    """The program is that without ambient rules: as many collectives, and as many operations."""
    model = ft.shard(ft.nn.Transformer.create(CONFIG, key=jax.random.key(0)), FSDP, MESH)
    tokens = lay(jnp.zeros((8, 16), jnp.int32), "data")

    def compiled(rules: Any) -> Any:
        return (
            ft.jit(lambda model, tokens: model(tokens).sum(), rules=rules)
            .lower(model, tokens)
            .compile()
        )

    found, without = compiled(FSDP | P("model")), compiled(None)
    assert found.as_text().count("all-gather(") == without.as_text().count("all-gather(")
    assert found.cost_analysis()["flops"] == without.cost_analysis()["flops"]
