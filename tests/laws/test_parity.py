"""The program of `ft.jit` beside that of plain `jax.jit` on the same model written by hand: no more
work or traffic."""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import optax
import pytest
from jax import Array
from jax.sharding import Mesh

import functree as ft
from tests.laws import by_hand

CONFIG = ft.nn.TransformerConfig(256, 64, layers=2, heads=8, kv_heads=4, head_dim=8, hidden=192)
BATCH = ft.AxisRules({"batch": "data", ...: None})
TENSOR = ft.AxisRules(
    {
        "batch": "data",
        "heads": "model",
        "kv_heads": "model",
        "hidden": "model",
        "vocab": "model",
        ...: None,
    }
)
FSDP = ft.FSDP("data", min_size=1024)
TX = optax.adam(1e-3)


# With the library


def next_token_loss(model: ft.nn.Transformer, tokens: Array) -> Array:
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def jit_train_step(loss: Callable[..., Array], rules: ft.Layout, state_plan: ft.Plan) -> Any:
    def train_step(model: Any, state: Any, batch: Array) -> tuple[Any, Any, Array]:
        value, grads = ft.value_and_grad(loss)(model, batch)
        updates, state = TX.update(grads, state, model)
        return optax.apply_updates(model, updates), state, value

    in_shardings = (rules, state_plan, ft.P("data"))
    return ft.jit(train_step, rules=rules, in_shardings=in_shardings, donate=("model", "state"))


def create_transformer() -> ft.nn.Transformer:
    return ft.nn.Transformer.create(CONFIG, key=jax.random.key(0))


# Both, side by side


class Case(NamedTuple):
    """A layout, with the library and by hand."""

    rules: ft.Layout
    layout: by_hand.Layout


def transformer_params(model: ft.nn.Transformer) -> by_hand.Params:
    block = model.blocks.layer
    assert model.unembed is not None
    return {
        "embed": model.embed.weight,
        "blocks": {
            "attn_norm": block.attn_norm.scale,
            "query": block.attn.query,
            "key": block.attn.key,
            "value": block.attn.value,
            "out": block.attn.out,
            "mlp_norm": block.mlp_norm.scale,
            "gate": block.mlp.gate,
            "up": block.mlp.up,
            "down": block.mlp.down,
        },
        "norm": model.norm.scale,
        "unembed": model.unembed.weight,
    }


CASES = {
    "fsdp": Case(BATCH | FSDP, by_hand.FSDP),
    "fsdp+tp": Case(TENSOR | FSDP, by_hand.FSDP_TP),
}


@contextlib.contextmanager
def surroundings(mesh: Mesh, precision: str | None) -> Iterator[None]:
    """Optax and what is written by hand promote; that the library does not, other tests see to."""
    with jax.set_mesh(mesh), jax.default_matmul_precision(precision):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            yield


def compiled_train_step(case: Case) -> tuple[str, str]:
    """The compiled text, with the library and by hand."""
    model = ft.abstract(create_transformer)()
    batch = jax.ShapeDtypeStruct((16, 33), "int32")
    params = transformer_params(model)
    state, hand_state = (jax.eval_shape(TX.init, tree) for tree in (model, params))
    ours = jit_train_step(
        next_token_loss, case.rules, ft.plan_optimizer(TX, model, case.rules)
    ).lower(model, state, batch)
    theirs = by_hand.jit_train_step(by_hand.next_token_loss, TX, case.layout).lower(
        params, hand_state, batch
    )
    return compiled_text(ours), compiled_text(theirs)


def compiled_text(lowered: Any) -> str:
    """What XLA makes of it. LLVM, which takes most of the time, comes after that."""
    return lowered.compile(compiler_options={"xla_backend_optimization_level": 0}).as_text()


# What the texts say

INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = ", re.MULTILINE)
ARRAY = re.compile(r"\w+\[[\d,]*\](?:\{[^}]*\})?")
COLLECTIVE = re.compile(
    r"= (?P<result>.*?) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    r".*?(?:replica_groups|source_target_pairs)=(?P<groups>.*?)(?:, (?!device_ids)[a-z_]+=|$)",
    re.MULTILINE,
)


def instructions(text: str) -> int:
    """How many there are, those inside fusions and loops included."""
    return len(INSTRUCTION.findall(text))


def collectives(text: str) -> Counter[tuple[str, str, str]]:
    """Kind, result and groups of each. XLA combines several into one whose result is a tuple, in
    any order."""
    found = list(COLLECTIVE.finditer(text))
    assert len(found) == text.count("channel_id="), "a collective that COLLECTIVE does not read"
    return Counter(
        (m["kind"], " ".join(sorted(ARRAY.findall(m["result"]))), m["groups"]) for m in found
    )


@pytest.mark.parametrize("precision", [None, "highest"])
@pytest.mark.parametrize("name", CASES)
def test_compiles_to_what_is_written_by_hand(name: str, precision: str | None, mesh: Mesh) -> None:
    with surroundings(mesh, precision):
        ours, theirs = compiled_train_step(CASES[name])
    count, most = instructions(ours), instructions(theirs)
    assert count <= most
    assert most > 5
    assert collectives(ours) == collectives(theirs)
    assert collectives(theirs)
    exact = theirs.count("operand_precision={highest,highest}")
    assert ours.count("operand_precision={highest,highest}") == exact
    assert exact == (theirs.count(" dot(") if precision else 0)
