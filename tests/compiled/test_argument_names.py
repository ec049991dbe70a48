"""The names of a program's arrays in its ledger and in its layouts, whoever has jitted the
function."""

from collections.abc import Callable
from functools import partial, update_wrapper
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct
from jax.sharding import NamedSharding, PartitionSpec

import functree as ft
from functree.compiled.shardy import ARGUMENT
from tests.lib.meshes import MESH, lay

P = PartitionSpec


def names_in_ledger(fn: Any, *args: Any, **kwargs: Any) -> list[str]:
    return list(map(str, ft.ledger(fn, *args, **kwargs).memory.arguments))


def names_in_layouts(fn: Any, *args: Any, **kwargs: Any) -> list[str]:
    return [row.name for row in ft.layouts(fn, *args, **kwargs) if row.op == ARGUMENT]


class Linear(eqx.Module):
    weight: Any
    bias: Any

    def __call__(self, x: Any) -> Any:
        return x @ self.weight

    @eqx.filter_jit
    def jitted(self, x: Any, scale: Any = 2.0) -> Any:
        return self(x) * scale


def product(w: Any, x: Any) -> Any:
    return x @ w


def gradient(model: Any, x: Any, flag: bool) -> Any:
    return eqx.filter_grad(lambda model: jnp.sum(model(x) ** 2.0))(model)


def drawn(key: Any, c: Any, x: Any) -> Any:
    return x + jax.random.normal(key, x.shape)


W = ShapeDtypeStruct((64, 32), "float32", sharding=NamedSharding(MESH, P()))
X = ShapeDtypeStruct((16, 64), "float32", sharding=NamedSharding(MESH, P("data")))
ONE = jnp.ones(())
LINEAR = Linear(lay(jnp.ones((64, 32))), lay(jnp.ones(32), "model"))
PLACED = lay(jnp.ones((16, 64)), "data")
# A function, its arguments, and the names of the arrays that its program has.
NAMED: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], list[str]]] = {
    "jax.jit": (jax.jit(product), (W, X), {}, ["w", "x"]),
    "an argument that is not used": (
        jax.jit(lambda a, b, c: a + c), (X, X, X), {}, ["a", "c"],
    ),
    "a leaf that is not used": (
        jax.jit(lambda model, x: model(x)), (LINEAR, X), {}, ["model.weight", "x"],
    ),
    "by keyword": (jax.jit(lambda x, *, w: x @ w["a"]), (X,), {"w": {"a": W}}, ["x", "w.a"]),
    "several of them": (jax.jit(lambda *xs: xs[0] + xs[2]), (X, X, X), {}, ["xs.0", "xs.2"]),
    # JAX does not say which argument is static, so the others are named by their positions.
    "a static argument": (
        jax.jit(lambda n, w, *more, x: sum([x @ w, *more]) * n, static_argnums=0),
        (3, W, ONE), {"x": X}, ["args.0", "args.1", "x"],
    ),
    "eqx.filter_jit": (
        eqx.filter_jit(lambda model, x: model(x)), (LINEAR, PLACED), {}, ["model.weight", "x"],
    ),
    "a gradient by Equinox": (
        eqx.filter_jit(gradient), (LINEAR, PLACED, True), {}, ["model.weight", "x"],
    ),
    "a module": (eqx.filter_jit(LINEAR), (PLACED,), {}, ["x", "self.weight"]),
    "a method": (LINEAR.jitted, (PLACED,), {"scale": ONE}, ["self.weight", "x", "scale"]),
    "ft.jit": (lambda model, x: model(x), (LINEAR, X), {"mesh": MESH}, ["model.weight", "x"]),
    "ft.jit of a module": (ft.jit(LINEAR), (PLACED,), {}, ["self.weight", "x"]),
    "functools.partial": (partial(jax.jit(product), W), (X,), {}, ["w", "x"]),
    "keys": (jax.jit(drawn), (jax.random.key(0), X, X), {}, ["key", "x"]),
}  # fmt: skip


@pytest.mark.parametrize("names_in", [names_in_ledger, names_in_layouts])
@pytest.mark.parametrize("case", NAMED)
def test_names_of_arguments(case: str, names_in: Callable[..., list[str]]) -> None:
    fn, args, kwargs, names = NAMED[case]
    assert names_in(fn, *args, **kwargs) == names


class Affine(eqx.Module):
    weight: jax.Array
    bias: jax.Array | None
    name: str = "affine"


def affine(bias: bool = True) -> Affine:
    return Affine(jnp.ones((4, 4)), jnp.ones(4) if bias else None)


def call(model: Any, x: Any, *more: Any, scale: Any = 1.0, **others: Any) -> Any:
    used = jax.tree.leaves((model, more, others))
    return x * scale + sum(jnp.sum(one) for one in used if eqx.is_array(one))


SQUARE = jnp.ones((4, 4))
# The arguments of a call, and the names of its arrays.
EQUINOX: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "a part that is None": ((affine(False), SQUARE), {}, "model.weight x"),
    "by keyword": ((affine(),), {"x": SQUARE, "scale": ONE}, "model.weight model.bias x scale"),
    "static ones": (("text", SQUARE, 3, jnp.tanh), {"scale": 2.0}, "x"),
    "of numpy": (({"a": np.ones(3)}, SQUARE), {}, "model.a x"),
    "more": (
        ([affine(), affine(False)], SQUARE, ONE, [ONE]), {"z": ONE, "k": affine(False)},
        "model.0.weight model.0.bias model.1.weight x more.0 more.1.0 k.weight z",
    ),
    "one array at several paths": (
        ({"a": SQUARE, "b": [SQUARE]}, SQUARE, SQUARE), {}, "model.a model.b.0 x more.0",
    ),
}  # fmt: skip
DONATED = ("none", "all", "all-except-first")


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("donate", DONATED)
@pytest.mark.parametrize("case", EQUINOX)
def test_names_under_filter_jit(case: str, donate: Any) -> None:
    args, kwargs, names = EQUINOX[case]
    ledger = ft.ledger(eqx.filter_jit(call, donate=donate), *args, **kwargs)
    sizes = {str(path): size for path, size in ledger.memory.arguments.items()}
    assert sorted(sizes) == sorted(names.split())
    assert sizes["x"] == 64 and sizes.get("scale", 4) == 4


class ByOrder:
    """A library that hands JAX the arrays of each argument as a list, each array once, as
    `nnx.jit` does with the variables of its modules."""

    def __init__(self, fun: Any, **stage: Any) -> None:
        self.__wrapped__ = fun
        vars(self).update(stage)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        seen, lists = set[int](), list[Any]()
        for value in args:
            new = {id(x): x for x in jax.tree.leaves(value) if eqx.is_array(x)}
            lists.append({"states": [[x for i, x in new.items() if i not in seen]]})
            seen |= set(new)
        # What the call does not have.
        lists.extend([[ONE]] * ("another" in args))
        lowered = jax.jit(lambda *lists, **kwargs: (lists, kwargs)).lower(*lists, **kwargs)
        return ByOrder(self.__wrapped__, lowered=lowered)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """A stage of its own, which does not show the program."""
        return SimpleNamespace(lower=lambda: self.lower(*args, **kwargs))

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        return jax.eval_shape(self.__wrapped__, *args, **kwargs)

    def compile(self) -> Any:
        return ByOrder(self.__wrapped__, compiled=vars(self)["lowered"].compile())


TIED = jnp.ones((4, 4))
BY_ORDER: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "modules": (({"b": TIED, "a": ONE}, SQUARE), {}, "model.a model.b x"),
    "tied": (({"b": TIED, "a": TIED, "c": ONE}, SQUARE), {}, "model.a model.c x"),
    "static": (({"b": TIED, "n": 3}, SQUARE), {"scale": ONE}, "model.b x scale"),
    # No name is guessed.
    "unknown": (({"b": TIED}, "another"), {}, "args.0.states.0.0 args.2.0"),
}


@pytest.mark.parametrize("case", BY_ORDER)
def test_names_of_leaves_in_order(case: str) -> None:
    args, kwargs, names = BY_ORDER[case]
    fun = ByOrder(call)
    update_wrapper(fun, call)
    assert isinstance(fun, jax.stages.Wrapped)  # as what `nnx.jit` returns
    assert sorted(names_in_ledger(fun, *args, **kwargs)) == sorted(names.split())
