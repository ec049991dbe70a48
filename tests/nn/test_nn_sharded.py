"""The transformer on a mesh: as on one device, on Auto, Explicit and Manual axes, and no collective
too many."""

import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from functree import nn
from functree.devices.make_mesh import make_mesh
from functree.errors import ShardingError
from functree.layout.fsdp import FSDP
from functree.layout.rules import AxisRules
from functree.nn.activations import on_shards
from functree.nn.attention.kernels import AXES, splash
from functree.placing.constrain import axis_rules
from functree.placing.shard import shard
from tests.lib.training import filled

P = PartitionSpec
CONFIG = nn.TransformerConfig(512, 128, layers=3, heads=8, kv_heads=4, head_dim=16, hidden=384)
TIED = nn.TransformerConfig(512, 128, 2, 8, 4, 16, 384, tie_embedding=True, remat="dots")
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (8, 40)).astype(np.int32)
TENSOR = {"heads": "model", "kv_heads": "model", "hidden": "model", "vocab": "model"}
LAYOUTS = {
    "data": AxisRules({"batch": "data", ...: None}),
    "tensor": AxisRules({"batch": "data", **TENSOR, ...: None}),
    "fsdp": AxisRules({"batch": "data", "embed": "data", ...: None}),
    "fsdp and tensor": AxisRules({"batch": "data", "embed": "data", **TENSOR, ...: None}),
    "composed": AxisRules({"batch": "data", **TENSOR, ...: None}) | FSDP("data", min_size=0),
    "sequence": AxisRules({"batch": "data", "embed": "data", **TENSOR, "seq": "model", ...: None}),
    "sequence, key heads whole": AxisRules(
        {"batch": "data", "embed": "data", **TENSOR, "kv_heads": None, "seq": "model", ...: None}
    ),
}


def loss(model: nn.Transformer, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = model(tokens)
    return jnp.mean(logits**2), logits


gradient = jax.grad(loss, has_aux=True)


@contextlib.contextmanager
def placed(
    config: nn.TransformerConfig, layout: str, mesh: Mesh, ambient: bool
) -> Iterator[tuple[Any, Any]]:
    """The model and the tokens on the mesh, which is the current one; and perhaps the rules as
    well."""
    tokens = jax.device_put(TOKENS, NamedSharding(mesh, P("data", None)))
    rules = axis_rules(LAYOUTS[layout]) if ambient else contextlib.nullcontext()
    with jax.set_mesh(mesh), rules, jax.default_matmul_precision("highest"):
        yield shard(filled(config, 0.1), LAYOUTS[layout], mesh), tokens


@functools.cache
def whole(config: nn.TransformerConfig) -> tuple[Any, Any]:
    with jax.default_matmul_precision("highest"):
        return jax.jit(gradient)(filled(config, 0.1), TOKENS)


def assert_close(found: Any, expected: Any, rtol: float) -> None:
    """Equal, or within `rtol` of the largest value."""
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol * np.abs(expected).max())


CASES = [
    *itertools.product(LAYOUTS, ["auto", "explicit"], ["rules"], [CONFIG]),
    ("data", "auto", "no rules", TIED),
    ("fsdp and tensor", "explicit", "no rules", TIED),
]


COMPILED: dict[Any, tuple[Any, str]] = {}


def compiled_gradient(capfd: Any, *case: Any) -> tuple[Any, str]:
    """The gradient that lies as the model does, and the logits, for `placed`; and what the compiler
    said, so by no kept compilation. Each case is compiled once, for its numbers and for its
    collectives."""
    if case not in COMPILED:
        capfd.readouterr()
        with placed(*case) as (model, tokens):
            shardings = jax.tree.map(lambda leaf: leaf.sharding, model)
            lowered = jax.jit(gradient, out_shardings=(shardings, None)).lower(model, tokens)
            compiled = lowered.compile()
        COMPILED[case] = compiled, capfd.readouterr().err
    return COMPILED[case]


@pytest.mark.usefixtures("compiles_anew")
@pytest.mark.parametrize(
    ("layout", "kind", "ambient", "config"),
    CASES,
    ids=lambda x: x if isinstance(x, str) else "tied" if x.tie_embedding else "untied",
)
def test_a_sharded_model_is_the_whole_one(
    layout: str, kind: str, ambient: str, config: nn.TransformerConfig, capfd: Any
) -> None:
    mesh = make_mesh(data=4, model=2, explicit=kind == "explicit")
    case = config, layout, mesh, ambient == "rules"
    with placed(*case) as state:
        grads, logits = compiled_gradient(capfd, *case)[0](*state)
    expected_grads, expected = whole(config)
    assert_close(logits, expected, 1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert_close(a, b, 1e-4)
    if ambient == "rules":
        vocab = "model" if layout not in ("data", "fsdp") else None
        assert logits.sharding.is_equivalent_to(NamedSharding(mesh, P("data", None, vocab)), 3)


COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


def collectives(layout: str, explicit: bool, capfd: Any) -> set[tuple[str, str]]:
    """Of a gradient that lies as the model does: what is moved on each device, and how."""
    mesh = make_mesh(data=4, model=2, explicit=explicit)
    compiled, said = compiled_gradient(capfd, CONFIG, layout, mesh, True)
    assert "Involuntary" not in said
    text = compiled.as_text()
    return {
        (array, how)
        for result, how in COLLECTIVE.findall(text)
        for array in re.findall(r"\w+\[[\d,]*\]", result)
    }


# On each device 2 sequences of 40, and the weights as tensor parallelism splits them.
WEIGHTS = set(
    """
    f32[128,8,16] f32[128,4,16] f32[8,16,128] f32[128,384] f32[384,128] f32[128] f32[512,128]
    f32[128,512]
    """.split()
)
HALVES = set(
    """
    f32[128,4,16] f32[128,2,16] f32[4,16,128] f32[128,192] f32[192,128] f32[128] f32[256,128]
    f32[128,256]
    """.split()
)
STREAM = "f32[2,40,128]"
# For each layout the weights that are gathered, and how activations are moved. For TPUs the sums of
# a sharded sequence are reduce-scatters (`test_accelerators.py`); the compiler for CPUs has only
# all-reduces.
MOVED: dict[str, tuple[set[str], set[str]]] = {
    "fsdp": (WEIGHTS, set()),
    "tensor": (set(), {"all-reduce"}),
    "fsdp and tensor": (HALVES, {"all-reduce"}),
    "sequence": (HALVES, {"all-reduce", "all-gather"}),
}


@pytest.mark.usefixtures("compiles_anew")
@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("layout", MOVED)
def test_what_is_moved(layout: str, explicit: bool, capfd: Any) -> None:
    weights, of_stream = MOVED[layout]
    found = collectives(layout, explicit, capfd)
    assert {what for what, how in found if how == "all-gather"} - {STREAM} == weights
    activations = {(what, how) for what, how in found if "40" in what or "20" in what}
    assert activations == {(STREAM, how) for how in of_stream}
    allowed = {"tensor": {"all-reduce"}, "fsdp": {"all-gather", "all-reduce", "reduce-scatter"}}
    if layout in allowed:
        assert {how for _, how in found} <= allowed[layout]


SMALL = nn.TransformerConfig(64, 16, layers=2, heads=8, kv_heads=4, head_dim=4, hidden=32)
POD = AxisRules({"batch": "data", **TENSOR, ...: None})
# The mesh axes of the user's shard_map, and the rules for those that it leaves.
PARTLY: dict[str, tuple[tuple[str, ...], AxisRules]] = {
    "one axis": (("pod",), POD),
    "all axes": (("pod", "data", "model"), POD),
    "two axes": (("pod", "data"), AxisRules({**TENSOR, ...: None})),
    "a sharded sequence": (
        ("pod",),
        AxisRules({"batch": "data", **TENSOR, "seq": "model", ...: None}),
    ),
}


def chunked_loss(model: nn.Transformer, tokens: jax.Array) -> jax.Array:
    return nn.cross_entropy(model, tokens[:, :-1], tokens[:, 1:], chunk=8)


@functools.cache
def whole_loss(**options: Any) -> tuple[Any, Any, Any]:
    """A model, tokens, and the gradient of their loss on one device."""
    model = filled(dataclasses.replace(SMALL, **options), 0.1)
    tokens = jnp.asarray(TOKENS[:, :17] % 64)
    return model, tokens, jax.jit(jax.value_and_grad(chunked_loss))(model, tokens)


@pytest.mark.parametrize(
    ("case", "check_vma", "options", "explicit"),
    [
        *((case, True, {}, explicit) for case in PARTLY for explicit in (False, True)),
        ("all axes", False, {}, False),
        ("one axis", False, {}, True),
        ("one axis", True, {"remat": "dots", "tie_embedding": True}, False),
    ],
    ids=str,
)
def test_a_loss_in_a_partial_shard_map(
    case: str, check_vma: bool, options: dict[str, Any], explicit: bool
) -> None:
    manual, rules = PARTLY[case]
    mesh = make_mesh(pod=2, data=2, model=2, explicit=explicit)
    model, tokens, expected = whole_loss(**options)

    def local(model: nn.Transformer, tokens: jax.Array) -> jax.Array:
        return jax.lax.pmean(chunked_loss(model, tokens), manual)

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(), P(manual)),
        out_specs=P(),
        axis_names=set(manual),
        check_vma=check_vma,
    )
    split = {} if "model" in manual else TENSOR
    placed = shard(model, AxisRules({**split, ...: None}), mesh)
    with jax.set_mesh(mesh), axis_rules(rules), jax.default_matmul_precision("highest"):
        found = jax.jit(jax.value_and_grad(mapped))(placed, shard(tokens, P(manual), mesh))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected
    )


@pytest.mark.parametrize("manual", [{"data"}, {"data", "model"}], ids=["some", "all"])
def test_a_kernel_in_a_checked_shard_map(manual: set[str]) -> None:
    """Its results do not say along which mesh axes they vary: alone it is an error of JAX."""
    mesh = make_mesh(data=2, model=4)
    heads = jax.random.normal(jax.random.key(1), (4, 128, 4, 128))

    def kernel(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return splash(query, key, value, interpret=True)

    def local(x: jax.Array) -> jax.Array:
        mixed = on_shards(kernel, [x, x, x], AXES[:3], check_vma=False)
        return jax.lax.psum((mixed**2).sum(), "data")

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P(), axis_names=manual)
    with jax.set_mesh(mesh), axis_rules(LAYOUTS["tensor"]):
        found = jax.jit(jax.grad(mapped))(shard(heads, P("data"), mesh))
    expected = jax.jit(jax.grad(lambda x: (kernel(x, x, x) ** 2).sum()))(heads)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_rules_that_do_not_fit_an_activation_say_so(mesh: Mesh) -> None:
    model = filled(CONFIG, 0.1)
    with jax.set_mesh(mesh), axis_rules(LAYOUTS["tensor"]):
        with pytest.raises(ShardingError, match=r'"batch" has size 3'):
            jax.eval_shape(model, jax.ShapeDtypeStruct((3, 40), jnp.int32))
    with jax.set_mesh(mesh), axis_rules(AxisRules({"batch": "data", "embed": None, "vocab": None})):
        with pytest.raises(ShardingError, match="seq"):
            jax.eval_shape(model, jax.ShapeDtypeStruct((4, 40), jnp.int32))
