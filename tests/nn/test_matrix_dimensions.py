"""Which arrays of a model are matrices, for `optax.contrib.muon`: of ft.nn's layers, and of a
user's modules."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jaxtyping import Array
from optax.contrib import MuonDimensionNumbers

import functree as ft
from tests.lib.checks import raises

LINEAR = MuonDimensionNumbers(-2, -1)
INTO_HEADS = MuonDimensionNumbers(-3, (-2, -1))
OUT_OF_HEADS = MuonDimensionNumbers((-3, -2), -1)
BLOCK = {
    "attn.query": INTO_HEADS,
    "attn.key": INTO_HEADS,
    "attn.value": INTO_HEADS,
    "attn.out": OUT_OF_HEADS,
    "mlp.gate": LINEAR,
    "mlp.up": LINEAR,
    "mlp.down": LINEAR,
}
SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 2, "hidden": 6}


def transformer(**options: Any) -> ft.nn.Transformer:
    """An abstract model with every array that a transformer may have."""
    config = ft.nn.TransformerConfig(
        10, 8, layers=3, qk_norm=True, attention_bias=True, **SIZES, **options
    )
    return ft.abstract(ft.nn.Transformer.create)(config, key=jax.random.key(0))


def block(path: str) -> dict[str, MuonDimensionNumbers]:
    return {f"{path}.{name}": dimensions for name, dimensions in BLOCK.items()}


def matrices(model: Any, parameters: Any = None) -> dict[str, MuonDimensionNumbers]:
    """The matrices among the parameters of a model, by path."""
    parameters = model if parameters is None else parameters
    found = ft.nn.matrix_dimensions(model)(parameters)
    assert jax.tree.structure(parameters).flatten_up_to(found)
    leaves = jax.tree_util.tree_leaves_with_path(
        found, is_leaf=lambda x: isinstance(x, MuonDimensionNumbers)
    )
    return {str(ft.Path.of(path)): one for path, one in leaves}


# ft.nn


def layer(make: Any) -> Any:
    return ft.abstract(make)(jax.random.key(0))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda key: ft.nn.Linear(4, 8, key=key), {"weight": LINEAR}),
        (lambda key: ft.nn.Linear(4, 8, axes="embed vocab", key=key), {}),
        (lambda key: ft.nn.Embedding(4, 8, key=key), {}),
        (lambda key: ft.nn.MLP(4, 8, key=key), {"gate": LINEAR, "up": LINEAR, "down": LINEAR}),
        (
            lambda key: ft.nn.Attention(8, 4, 2, use_bias=True, qk_norm=True, key=key),
            {
                "query": INTO_HEADS,
                "key": INTO_HEADS,
                "value": INTO_HEADS,
                "out": OUT_OF_HEADS,
            },
        ),
        (lambda key: ft.nn.RMSNorm(4), {}),
        (lambda key: ft.nn.LayerNorm(4), {}),
        (lambda key: ft.nn.BatchNorm(4), {}),
        (
            lambda key: ft.nn.Sequential([ft.nn.Linear(4, 4, key=key), ft.nn.Dropout(0.5)]),
            {"layers.0.weight": LINEAR},
        ),
    ],
)
@pytest.mark.parametrize("stacked", [False, True])
def test_layers(make: Any, expected: dict[str, MuonDimensionNumbers], stacked: bool) -> None:
    if not stacked:
        assert matrices(layer(make)) == expected
        return
    found = matrices(layer(lambda key: ft.stack(make, 3, key)))
    assert found == {f"layer.{path}": one for path, one in expected.items()}


def test_a_stacked_transformer_has_its_matrices_and_no_others() -> None:
    assert matrices(transformer()) == block("blocks.layer")
    assert matrices(transformer(tie_embedding=True)) == block("blocks.layer")


# Forms of the parameters


def test_parameters_with_some_missing() -> None:
    model = transformer()
    _, trained, _ = ft.split(model, ft.glob("blocks.**") & ~ft.glob("**.mlp.up"), ...)
    expected = block("blocks.layer")
    del expected["blocks.layer.mlp.up"]
    assert matrices(model, trained) == expected
    masked = jax.tree.map(
        lambda x: optax.MaskedNode() if x is None else x, trained, is_leaf=lambda x: x is None
    )
    assert matrices(model, masked) == expected


def test_parameters_as_dicts_with_the_layers_of_a_stack_apart() -> None:
    model = ft.stack(lambda key: ft.nn.MLP(4, 6, key=key), 2, jax.random.key(0))
    matrix = jnp.ones((4, 6))
    found = ft.nn.matrix_dimensions(model)({"layer": {"up": (matrix, matrix), "gate": matrix}})
    assert found == {"layer": {"up": (LINEAR, LINEAR), "gate": LINEAR}}


def test_other_parameters_are_refused() -> None:
    dimensions = ft.nn.matrix_dimensions(ft.nn.MLP(4, 6, key=jax.random.key(0)))
    with raises(
        "matrix_dimensions: 1 unknown parameter",
        "mlp.gate   float32[4, 6]",
        "has no array at this path",
        "pass the model that you train",
        error=ft.FunctreeError,
    ):
        dimensions({"mlp": {"gate": jnp.ones((4, 6))}})


# Modules of users


class Told(eqx.Module):
    """A module that says what a test gives it."""

    weight: Array
    table: Array
    proj: eqx.nn.Linear
    said: Any = eqx.field(static=True)

    def __matrix_dimensions__(self) -> Any:
        return self.said


def told(said: Any) -> Told:
    projection = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    return Told(jnp.ones((2, 3, 4)), jnp.ones(5), projection, said)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, {}),
        ({"weight": (-2, -1)}, {"weight": LINEAR}),
        ({"weight": (-3, (-2, -1)), "table": None}, {"weight": INTO_HEADS}),
        ({"weight": LINEAR}, {"weight": LINEAR}),
    ],
)
def test_a_module_says_it(said: Any, expected: dict[str, MuonDimensionNumbers]) -> None:
    assert matrices(told(said)) == expected
    found = matrices(ft.Stacked(jax.tree.map(lambda x: x[None], told(said))))
    assert found == {f"layer.{path}": one for path, one in expected.items()}


class Wrapper(eqx.Module):
    mlp: ft.nn.MLP
    said: Any = eqx.field(static=True)

    def __matrix_dimensions__(self) -> Any:
        return self.said


@pytest.mark.parametrize(
    ("said", "dimensions"),
    [({}, LINEAR), ({"mlp": None}, None), ({"mlp": (-1, -2)}, MuonDimensionNumbers(-1, -2))],
)
def test_the_outermost_module_decides(said: Any, dimensions: Any) -> None:
    expected = {f"mlp.{name}": dimensions for name in ("gate", "up", "down") if dimensions}
    assert matrices(Wrapper(ft.nn.MLP(2, 3, key=jax.random.key(0)), said)) == expected


@pytest.mark.parametrize(
    ("said", "fragment"),
    [
        ({"wieght": (-2, -1)}, "the module has no field 'wieght'; did you mean `weight`?"),
        ({"weight": -2}, "weight   f32[2, 3, 4]\n      it is declared as -2, but has 3 dimensions"),
        ({"weight": (0, 1)}, "(0, 1)"),
        ({"weight": (-1, (-1, -2))}, "(-1, (-1, -2))"),
        ({"weight": ((), -1)}, "((), -1)"),
        ({"table": (-2, -1)}, "table   f32[5]"),
    ],
)
def test_what_cannot_be_read(said: Any, fragment: str) -> None:
    with raises("matrix_dimensions: invalid declarations in the model", fragment, "`(-2, -1)`"):
        ft.nn.matrix_dimensions(told(said))


def test_too_few_dimensions_without_those_of_a_stack() -> None:
    stack = ft.Stacked(jax.tree.map(lambda x: x[None], told({"table": (-2, -1)})))
    with raises("layer.table", "but has 1 dimension, not counting the dimensions of its stack"):
        ft.nn.matrix_dimensions(stack)


def test_all_that_is_wrong_is_one_error() -> None:
    with raises("weight", "table") as caught:
        ft.nn.matrix_dimensions(told({"weight": (0, 1), "table": 1}))
    assert len(caught.value.problems) == 2
