"""What fails in silence elsewhere, and is told here: the numbers of `silent-failures.md` about
compiled programs."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import functree as ft
from functree.compiled.moved_arrays import groups_of, mesh_axes_of
from tests.lib.meshes import MESH, SIZES
from tests.lib.training import gradient


@pytest.mark.usefixtures("compiles_anew")
def test_silent_failure_17_an_involuntary_rematerialization_has_a_name_and_a_cost() -> None:
    mesh = ft.make_mesh(x=4, y=2)
    table = {"small": ft.P("x"), "large": ft.P("x")}

    def move(model: Any) -> Any:
        return jax.tree.map(lambda w: ft.constrain(w, ft.P(None, "y")), model)

    shapes = {
        "small": jax.ShapeDtypeStruct((16, 16), "float32"),
        "large": jax.ShapeDtypeStruct((512, 64), "float32"),
    }
    ledger = ft.ledger(move, shapes, in_shardings=(table,), mesh=mesh)
    assert (
        len(ledger.warnings) == 2
    )  # XLA names shapes of shards, and the first operation that it meets
    # Which to remove first: what is moved for each, the largest first.
    moved = [
        (line.split()[0], line.split()[-2:])
        for line in str(ledger).splitlines()
        if line.startswith("model.")
    ]
    assert moved == [("model.large", ["128", "KiB"]), ("model.small", ["1", "KiB"])]


def test_silent_failure_18_parameters_in_a_scan() -> None:
    compiled, _ = gradient("FSDP", "full")
    loops = [
        line
        for line in compiled.as_text().splitlines()
        if " all-gather(" in line and "while/body" in line
    ]
    assert loops and not any(
        "model.blocks" in line for line in loops
    )  # the text does not name them
    ledger = compiled.ledger()
    gathered = Counter(
        str(one.path) for one in ledger.collectives if one.kind == "all-gather" and one.count == 3
    )
    assert gathered["blocks.layer.mlp.up"] == gathered["blocks.layer.attn.query"] == 2
    assert all(path.startswith("blocks.layer.") for path in gathered)


SPELLINGS = {
    "lists": "{{0,1,2,3},{4,5,6,7}}",
    "iota": "[2,4]<=[8]",
    "transposed iota": "[4,2]<=[2,4]T(1,0)",
    "mesh": "mesh['data'=2,'model'=4] {'model'}",
    "mesh with made-up names": "mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_0'}",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_silent_failure_19_groups_in_all_spellings(spelling: str) -> None:
    groups = groups_of(SPELLINGS[spelling], 8)
    assert groups is not None
    assert mesh_axes_of(groups, SIZES) == (
        ("data",) if spelling == "transposed iota" else ("model",)
    )


def test_silent_failure_19_in_a_program() -> None:
    def fun(x: Any) -> Any:
        return jax.tree.map(lambda one: one * jnp.sum(x), x.sum(0)), x.sum(1)

    ledger = ft.ledger(
        fun, jax.ShapeDtypeStruct((8, 8), "float32"), in_shardings=ft.P("data", "model"), mesh=MESH
    )
    assert {one.mesh_axes for one in ledger.collectives} >= {
        ("data",),
        ("model",),
    } and not ledger.not_understood
