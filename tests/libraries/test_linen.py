"""A Linen model as the page keeps it: its logical names become a layout before there are arrays."""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

import functree as ft
from tests.lib.meshes import MESH

P = ft.P
PAGE = Path(__file__).parents[2] / "docs" / "flax.md"
RULES = {"batch": "data", "hidden": "model", "embed": None}


def pasted() -> dict[str, Any]:
    """The names that the page's program leaves."""
    [program] = re.findall(r"```python\n(import jax.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {"mesh": MESH, "rules": ft.AxisRules(RULES)}
    exec(program, names)
    return names


def test_the_layout_is_of_the_logical_names() -> None:
    given = pasted()
    specs = {str(row.path): row.spec for row in ft.plan(given["ts"])}
    for tree in ("model", "opt_state.0.mu", "opt_state.0.nu"):
        assert specs[f"{tree}.params.Dense_0.kernel"] == P(None, "model")
        assert specs[f"{tree}.params.Dense_1.kernel"] == P("model", None)
        assert specs[f"{tree}.params.Dense_1.bias"] == P(None)


def test_it_is_the_model_that_flax_makes() -> None:
    given = pasted()
    alone = given["nn"].unbox(given["model"].init(given["key"], given["x"]))
    for one, other in zip(jax.tree.leaves(given["ts"].model), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(one, other)


def test_fsdp_shards_what_the_names_leave() -> None:
    given = pasted()
    layout = given["layout"] | ft.FSDP("data", min_size=0)
    plan = ft.plan(ft.abstract(given["make"])(given["key"]), layout, MESH)
    assert plan["params.Dense_0.kernel"].spec == P("data", "model")
