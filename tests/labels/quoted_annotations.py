"""Modules whose annotations are strings, as `from __future__ import annotations` makes them.
Imported by tests."""

# ruff: noqa: UP037  (without its quotes, a dimension string of one word is a name)

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Generic, NamedTuple, TypeVar

import equinox as eqx
from jax import Array
from jaxtyping import Float

import functree as ft

if TYPE_CHECKING:
    from nowhere import Missing

T = TypeVar("T")
Weight = Float[Array, "embed hidden"]


class Inner(eqx.Module):
    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden"] | None
    size: int = 3


class Child(Inner):
    w: Float[Array, "vocab embed"]


class Outer(eqx.Module):
    alias: Weight
    inner: Inner
    inners: list[Inner]
    own: list[Outer] | None
    lin: Annotated[eqx.nn.Linear, ft.names(weight="out in", bias="out")]
    mean: ft.Buffer[Float[Array, "embed"]]
    table: dict[str, Float[Array, "vocab embed"]]
    missing: Missing
    loose: list[Missing]


class Box(eqx.Module, Generic[T]):
    item: T
    items: list[T]


class BoxOfWeights(Box[Float[Array, "p q"]]):
    pass


class Pair(NamedTuple):
    left: Float[Array, "a"]
    right: Float[Array, "b"]


class ForwardRef(eqx.Module):
    """`Soon` is defined by a test."""

    w: Soon
    ws: list[Soon]
