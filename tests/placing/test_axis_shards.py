"""`axis_shards`: over which mesh axes a name is sharded, and into how many parts."""

from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

import functree as ft
from tests.lib.checks import raises
from tests.lib.meshes import EXPLICIT, MESH

RULES = ft.AxisRules(
    {"experts": ("data", "model"), "hidden": "model", "layers": "data", "embed": None}
)
FALLBACKS = ft.AxisRules([("experts", "model"), ("hidden", "model"), ("hidden", None)])
SHARDED: dict[str, tuple[ft.Layout, tuple[Any, ...], tuple[tuple[str, ...], int]]] = {
    "one mesh axis": (RULES, ("hidden",), (("model",), 4)),
    "several": (RULES, ("experts",), (("data", "model"), 8)),
    "none": (RULES, ("embed",), ((), 1)),
    "taken by another dimension": (FALLBACKS, ("hidden", "experts hidden"), ((), 1)),
    "of several dimensions": (RULES, ("layers", "layers embed hidden"), (("data",), 2)),
    "axes": (RULES, ("hidden", ft.Axes("layers", "hidden")), (("model",), 4)),
    "in a composition": (RULES | ft.FSDP("data"), ("embed",), ((), 1)),
    "a layout for parameters": (ft.FSDP("data"), ("embed",), ((), 1)),
}


@pytest.mark.parametrize("mesh", [MESH, EXPLICIT], ids=["Auto", "Explicit"])
@pytest.mark.parametrize("name", SHARDED)
def test_what_the_rules_say(name: str, mesh: jax.sharding.Mesh) -> None:
    rules, given, expected = SHARDED[name]
    with jax.set_mesh(mesh), ft.axis_rules(rules):
        assert ft.axis_shards(*given) == ft.AxisShards(*expected)


def test_in_a_trace() -> None:
    """What a `shard_map` maps is left out."""
    found: list[ft.AxisShards] = []

    def body(x: jax.Array) -> jax.Array:
        found.append(ft.axis_shards("experts"))
        return x

    scalar = jax.ShapeDtypeStruct((), "float32")
    ft.jit(body, mesh=MESH, rules=RULES).lower(scalar)
    mapped = jax.shard_map(body, in_specs=P(), out_specs=P(), axis_names={"data"})
    with jax.set_mesh(MESH), ft.axis_rules(RULES):
        jax.jit(mapped).lower(scalar)
    assert found == [(("data", "model"), 8), (("model",), 4)]


def test_without_rules_or_mesh_nothing_is_sharded() -> None:
    with jax.set_mesh(MESH):
        assert ft.axis_shards("hidden") == ((), 1)
    with ft.axis_rules(RULES):
        assert ft.axis_shards("hidden") == ((), 1)


def test_errors() -> None:
    with jax.set_mesh(MESH), ft.axis_rules(RULES):
        with raises('axis_shards("hidden", "embed vocab"): the axes do not have the name'):
            ft.axis_shards("hidden", "embed vocab")
        with raises('"vocab" cannot be laid out', "no rule"):
            ft.axis_shards("vocab")
        with raises("not as 3"):
            ft.axis_shards(3)  # pyright: ignore[reportArgumentType]
