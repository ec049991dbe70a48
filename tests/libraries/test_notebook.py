"""The short forms of a training state and of models, as text and in a notebook."""

from types import SimpleNamespace
from typing import Any

import equinox as eqx
import IPython
import jax
import jax.numpy as jnp
import optax
import pytest
from IPython.core.formatters import DisplayFormatter
from IPython.lib.pretty import pretty
from jax.sharding import Mesh

import functree as ft

RULES = ft.AxisRules({"hidden": "model", ...: None})


def state(mesh: Mesh) -> ft.TrainState[Any]:
    model = ft.stack(lambda key: ft.nn.MLP(8, 16, key=key), 2, jax.random.key(0))
    return ft.TrainState.create(
        model, optax.adam(1e-3), layout=RULES, mesh=mesh, key=jax.random.key(0)
    )


SHORT = "TrainState of 12 arrays, 9.0 KiB, on the mesh (data=2, model=4)"


def test_the_text_is_short(mesh: Mesh) -> None:
    ts = state(mesh)
    assert repr(ts) == str(ts) == SHORT
    assert repr([ts]) == f"[{SHORT}]"
    # Values are not read.
    jax.jit(lambda ts: ts, donate_argnums=0)(ts)
    assert repr(ts) == SHORT
    abstract = ft.abstract(lambda: ft.TrainState.create({"w": jnp.ones(2)}, optax.sgd(1.0)))()
    assert repr(abstract) == "TrainState of 2 arrays, 12 B"
    traced: list[str] = []
    jax.jit(lambda ts: traced.append(repr(ts)))(state(mesh))
    assert traced[0].startswith("TrainState of 12 arrays, 9.0 KiB")


def test_a_state_of_other_things_is_shown_in_full(mesh: Mesh) -> None:
    specs = ft.plan(state(mesh), RULES, mesh).specs
    assert "up=P(None, None, 'model')" in repr(specs) and repr(specs).startswith("TrainState(\n")
    assert specs._repr_html_() is None and pretty(specs) == repr(specs)


def test_ipython_prints_how_it_is_sharded(mesh: Mesh) -> None:
    text = pretty(state(mesh))
    assert "model.layer.up " in text and "f32[2, 8, 16/model]" in text
    assert "opt_state.0.mu.** ×3 like the parameters, in f32" in " ".join(text.split())


@pytest.fixture
def formatter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """IPython's own formatter of HTML, of a shell that has nothing else."""
    shell = SimpleNamespace(display_formatter=DisplayFormatter())
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    return shell.display_formatter.formatters["text/html"]


def test_a_notebook_shows_trees_to_fold(mesh: Mesh, formatter: Any) -> None:
    ts = state(mesh)
    config = ft.nn.TransformerConfig(
        vocab_size=8, embed=4, layers=1, heads=1, kv_heads=1, head_dim=4, hidden=4
    )
    transformer = ft.abstract(ft.nn.Transformer.create)(config, key=jax.random.key(0))
    for tree in (ts, ts.model, transformer):
        shown = formatter(tree)
        assert shown.startswith("<style>") and "<details open>" in shown and len(shown) < 40_000
    assert "layers embed hidden" in formatter(ts) and "16/model]" in formatter(ts)


def test_other_modules_are_as_equinox_shows_them() -> None:
    linear = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    assert repr(linear).startswith("Linear(") and not hasattr(linear, "_repr_html_")
    assert repr(ft.nn.Linear(2, 3, key=jax.random.key(0))).startswith("Linear(\n  weight=f32[2,3]")
