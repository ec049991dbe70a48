"""Which parameters the collectives of a training step serve, against lists that are written down."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import functree as ft
from functree.compiled.flow import Flow
from functree.compiled.hlo import Hlo
from functree.compiled.moved import moved_in
from functree.compiled.served import Served

TENSOR = {"heads": "model", "kv_heads": "model", "hidden": "model", "vocab": "model"}
TP_AND_FSDP = ft.AxisRules({"batch": "data", **TENSOR, ...: None}) | ft.FSDP("data", min_size=0)
NORMS = ["attn_norm.scale", "mlp_norm.scale"]
ATTENTION = ["attn.query", "attn.key", "attn.value", "attn.out"]
MLP = ["mlp.gate", "mlp.up", "mlp.down"]


def served(text: str) -> list[tuple[str, str, list[str]]]:
    """Of each array that is moved the kind, how it serves parameters, and which, by their names in the text."""
    hlo = Hlo(text)
    by = Served(Flow(hlo))
    named = [one for one in hlo.computations[hlo.entry] if one.opcode == "parameter"]
    names = {int(one.argument): one.metadata("op_name") or "" for one in named}
    rows: list[tuple[str, str, list[str]]] = []
    for moved in moved_in(Flow(hlo)):
        found = {"weight": by.weights(moved), "output": by.outputs(moved), "product": by.products(moved)}
        how = next((how for how, numbers in found.items() if numbers), "")
        # Output k is the new value of parameter k, and the last one, in the place of the tokens, is the loss.
        called = {**names, len(names) - 1: "the loss"} if how == "output" else names
        rows.append((moved.kind, how, [called[number] for number in sorted(found.get(how, ()))]))
    return rows


def loss(model: Any, tokens: Any) -> Any:
    labels = optax.softmax_cross_entropy_with_integer_labels
    return labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()


@pytest.fixture(scope="module")
def rows() -> list[tuple[str, str, list[str]]]:
    config = ft.nn.TransformerConfig(256, 64, layers=3, heads=8, kv_heads=4, head_dim=8, hidden=128, max_seq=32)
    mesh = ft.make_mesh(data=2, model=4)

    def make(key: Any) -> Any:
        return ft.TrainState.create(ft.nn.Transformer.create(config, key=key), optax.adamw(1e-3))

    @ft.jit(in_shardings=(TP_AND_FSDP, ft.P("data")), out_shardings=(TP_AND_FSDP, None), mesh=mesh, rules=TP_AND_FSDP)
    def step(ts: Any, tokens: Any) -> Any:
        value, grads = ft.value_and_grad(loss)(ts.model, tokens)
        return ft.apply_gradients(ts, grads), value

    with jax.numpy_dtype_promotion("standard"):  # Adam raises a float to the power of an integer
        state = ft.abstract(make)(jax.random.key(0))
        lowered = step.lower(state, jax.ShapeDtypeStruct((16, 33), jnp.int32))
    return served(lowered.compile().as_text() or "")


def names(rows: list[tuple[str, str, list[str]]], kind: str, how: str) -> Counter[str]:
    """How often each parameter of the model is served, by its path in a layer or in the model."""
    found = [name for one, other, several in rows if (one, other) == (kind, how) for name in several]
    prefix = "ts.model."
    return Counter(name.removeprefix(prefix).removeprefix("blocks.layer.") for name in found if name.startswith(prefix))


def test_weights_are_gathered(rows: list[tuple[str, str, list[str]]]) -> None:
    # The backward pass needs all weights again, but not the scales of the norms.
    top = ["embed.weight", "norm.scale", "unembed.weight"]
    assert names(rows, "all-gather", "weight") == Counter([*NORMS, *2 * ATTENTION, *2 * MLP, *top])


def test_partial_results_belong_to_the_weights_that_made_them(rows: list[tuple[str, str, list[str]]]) -> None:
    forward, backward = ["attn.out", "mlp.down"], ["attn.query", "attn.key", "attn.value", "mlp.gate", "mlp.up"]
    assert names(rows, "all-reduce", "product") == Counter([*forward, *backward, "embed.weight", "unembed.weight"])


def test_gradients_belong_to_their_parameters(rows: list[tuple[str, str, list[str]]]) -> None:
    found = [several for kind, how, several in rows if kind == "all-reduce" and how == "output" and len(several) > 1]
    paths = [*(f"blocks.layer.{name}" for name in [*NORMS, *ATTENTION, *MLP])]
    paths += ["embed.weight", "norm.scale", "unembed.weight"]
    expected = [[f"ts.{where}{path}" for where in ("model.", "opt_state.0.mu.", "opt_state.0.nu.")] for path in paths]
    assert sorted(found) == sorted(expected)


def test_what_serves_no_parameter(rows: list[tuple[str, str, list[str]]]) -> None:
    rest = [(kind, several) for kind, how, several in rows if how == "" or several == ["the loss"]]
    # The largest logit, the sum of the exponentials, the logit of the label; and the loss itself, which is an output.
    assert Counter(map(str, rest)) == {"('all-reduce', [])": 3, "('all-reduce', ['the loss'])": 1}
