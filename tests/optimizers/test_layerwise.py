"""`ft.layerwise` for every optimizer that optax exports: stacks against lists of their layers."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jaxtyping import Array, Float

import functree as ft
from functree.labels.leaves import arrays_by_path
from tests.lib.checks import raises
from tests.lib.optimizers import NAMES, build, given

P = ft.P
LAYERS = 3


class Block(eqx.Module):
    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden"]


class Net(eqx.Module):
    """A stack, a stack of stacks, and a leaf in no stack; or lists in the place of the stacks."""

    table: Float[Array, "vocab embed"] | None
    blocks: Any
    nested: Any


def values(seed: int, *shape: int) -> Any:
    """Layers of different norms."""
    random = np.random.default_rng([seed, *shape]).normal(size=shape)
    scales = 2.0 ** np.arange(shape[0])
    return jnp.asarray(random * scales.reshape(-1, *[1] * (len(shape) - 1)), jnp.float32)


def block(seed: int, *stack: int, embed: int = 3, hidden: int = 4) -> Block:
    return Block(values(seed, *stack, embed, hidden), values(seed, *stack, hidden))


def net(seed: int) -> Net:
    nested = ft.Stacked(ft.Stacked(block(seed, 2, 2), "inner"), "outer")
    return Net(values(seed, 5, 3), ft.Stacked(block(seed, LAYERS)), nested)


def layers(stack: Any) -> Any:
    """The list of the layers of a stack, which may be one of gradients."""
    if not isinstance(stack, ft.Stacked):
        return stack
    number = len(jax.tree.leaves(stack.layer)[0])
    return [layers(jax.tree.map(lambda x, i=i: x[i], stack.layer)) for i in range(number)]


def apart(tree: Any) -> Any:
    """The same tree with lists in the place of stacks."""
    return jax.tree.map(layers, tree, is_leaf=lambda node: isinstance(node, ft.Stacked))


# What is not compared: what draws random numbers, and what returns no updates.
RANDOM = {
    *("add_noise", "differentially_private_aggregate", "dpsgd", "noisy_sgd"),
    *("hutchinson_estimator_diag_hessian", "sophia"),
}
NO_UPDATES = {"measure_with_ema"}
# What looks at all leaves at once.
ACROSS = {
    *("apply_if_finite", "clip_by_global_norm", "dadapt_adamw", "dog", "dowg", "flatten", "lbfgs"),
    *("lookahead", "mechanize", "momo", "momo_adam", "normalize", "normalize_by_update_norm"),
    *("polyak_sgd", "prodigy", "scale_by_backtracking_linesearch", "scale_by_lbfgs"),
    *("scale_by_polyak", "scale_by_zoom_linesearch"),
}
ALONE = sorted(set(NAMES) - RANDOM - NO_UPDATES - ACROSS)
LINESEARCHES = ("lbfgs", "scale_by_backtracking_linesearch", "scale_by_zoom_linesearch")
WITH_VALUE = ("momo", "momo_adam", "polyak_sgd", "reduce_on_plateau", "scale_by_polyak")


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim == 2, params)


def dimensions(params: Any) -> Any:
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), params)


def optimizer(name: str) -> Any:
    if name == "scale_by_muon":  # by itself it is for matrices only
        tx = optax.contrib.scale_by_muon(weight_dimension_numbers=dimensions)
        return optax.masked(tx, matrices)
    return build(name)


def total(params: Any) -> Any:
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(params))


def extra(name: str, gradient: Any) -> Mapping[str, Any]:
    """What `update` needs besides."""
    if name in LINESEARCHES:
        return {"value": jnp.float32(1), "grad": gradient, "value_fn": total}
    return {"value": jnp.float32(1)} if name in WITH_VALUE else {}


def results(tx: Any, name: str, model: Any, gradients: Any) -> tuple[Any, Any]:
    """Two updates and the state after them, in double precision; by path."""
    paths: list[Any] = []

    def run(model: Any, gradients: Any) -> Any:
        params = given(name, model)
        state, updates = tx.init(params), []
        for gradient in gradients:
            update, state = tx.update(gradient, state, params, **extra(name, gradient))
            updates.append(update)
        by_path = arrays_by_path(updates), arrays_by_path(state)
        paths[:] = [list(one) for one in by_path]
        return [list(one.values()) for one in by_path]

    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        wide = jax.tree.map(lambda x: x.astype("float64"), (model, gradients))
        arrays = jax.tree.map(np.asarray, jax.jit(run)(*wide))
    updates, state = (dict(zip(*one, strict=True)) for one in zip(paths, arrays, strict=True))
    return updates, state


def by_layers(arrays: Mapping[ft.Path, Any]) -> Iterator[tuple[ft.Path, Any]]:
    """Each layer of the arrays of stacks, with its path in a model with lists."""
    for path, array in arrays.items():
        for i, key in enumerate(path):
            if path[i + 1 : i + 3] == ("layer", "layer") and key == "nested":
                for k in np.ndindex(array.shape[:2]):
                    yield ft.Path((*path[: i + 1], *k, *path[i + 3 :])), array[k]
                break
            if path[i + 1 : i + 2] == ("layer",) and key == "blocks":
                for k in range(len(array)):
                    yield ft.Path((*path[: i + 1], k, *path[i + 2 :])), array[k]
                break
        else:
            yield path, array


MODEL, GRADIENTS = net(0), [net(1), net(2)]
LISTS = apart(MODEL), apart(GRADIENTS)


def test_every_optimizer_is_in_the_table():
    assert RANDOM | NO_UPDATES | ACROSS <= set(NAMES)
    assert len(ALONE) >= 100


@pytest.mark.parametrize("name", ALONE)
def test_layers_are_updated_as_if_they_were_apart(name: str):
    """The state too: what belongs to a stack has its axis in front, and the rest is there once."""
    tx = optimizer(name)
    updates, state = results(ft.layerwise(tx), name, MODEL, GRADIENTS)
    want_updates, want_state = results(tx, name, *LISTS)
    for have, want in ((updates, want_updates), (state, want_state)):
        found = dict(by_layers(have))
        assert found.keys() == want.keys()
        for path, array in found.items():
            np.testing.assert_allclose(array, want[path], rtol=1e-7, atol=1e-9, err_msg=str(path))
    # A list has no stacks, and `layerwise` does nothing.
    if name in ("adafactor", "MultiSteps"):
        same, _ = results(ft.layerwise(tx), name, *LISTS)
        assert all(np.array_equal(same[path], x) for path, x in want_updates.items())


@pytest.mark.parametrize(
    ("name", "model"),
    [
        *itertools.product(sorted(ACROSS), ["with a plain leaf", "stacks alone"]),
        # Line searches take functions and trees of the model's structure, which JAX cannot map.
        *((name, "one array alone") for name in sorted(ACROSS.difference(LINESEARCHES))),
    ],
)
def test_what_looks_at_all_leaves_is_refused(name: str, model: str):
    tree, gradients = MODEL, GRADIENTS
    if model != "with a plain leaf":
        tree, gradients = MODEL.blocks, [one.blocks for one in GRADIENTS]
    if model == "one array alone":
        tree, *gradients = (
            eqx.tree_at(lambda m: m.layer.b, one, None) for one in (tree, gradients[0])
        )
    with pytest.raises(ft.FunctreeError) as caught:
        results(ft.layerwise(optimizer(name)), name, tree, gradients)
    text = str(caught.value)
    assert "`ft.layerwise` needs an optimizer that acts on each leaf alone" in text
    assert "move out of `ft.layerwise` the transformations that combine" in text
    assert "`optax.chain(optax.clip_by_global_norm(1.0), ft.layerwise(" in text


def test_the_message_names_what_depends_on_what():
    tx = ft.layerwise(optax.clip_by_global_norm(1.0))
    with pytest.raises(ft.FunctreeError) as caught:
        tx.update(MODEL, tx.init(MODEL), MODEL)
    text = str(caught.value)
    assert (
        "blocks.layer.w   f32[3, 4]\n      its update depends on `table`, `blocks.layer.b`" in text
    )
    assert {problem.path for problem in caught.value.problems} == set(arrays_by_path(MODEL))
    # With a mask of the model's own classes too, which plain dicts do not fit.
    mask = jax.tree.map(lambda _: True, MODEL)
    tx = ft.layerwise(optax.masked(optax.clip_by_global_norm(1.0), mask))
    with pytest.raises(
        ft.FunctreeError, match=r"its update depends on `table`, `blocks\.layer\.b`"
    ):
        tx.update(MODEL, tx.init(MODEL), MODEL)


def test_leaves_in_no_stack_may_depend_on_each_other():
    """As in a group of embeddings that is clipped by its own norm."""

    def make(wrapped: Callable[[Any], Any]) -> Any:
        def plain(params: Any) -> Any:
            return jax.tree_util.tree_map_with_path(lambda path, _: path[0].key != "blocks", params)

        clipped = optax.masked(optax.clip_by_global_norm(0.1), plain)
        return wrapped(optax.chain(clipped, optax.lamb(0.1)))

    model, gradients = (
        {"a": jnp.ones(3), "b": jnp.ones(4) * 2, "blocks": one.blocks}
        for one in (MODEL, GRADIENTS[0])
    )
    have, _ = results(make(ft.layerwise), "", model, [gradients])
    want, _ = results(make(lambda tx: tx), "", apart(model), [apart(gradients)])
    assert_equal(have, want)


def assert_equal(have: Mapping[ft.Path, Any], want: Mapping[ft.Path, Any]) -> None:
    found = dict(by_layers(have))
    assert found.keys() == want.keys()
    for path, array in found.items():
        np.testing.assert_allclose(array, want[path], rtol=1e-7, atol=1e-9, err_msg=str(path))


# Inside and outside of others. Each is made by what wraps an optimizer (`layerwise`, or nothing for
# the layers apart), and the model.


def weights(params: Any) -> Any:
    """A mask of the parameters' own classes."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].name == "w", params)


def labels(params: Any) -> Any:
    """Labels by the paths."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "table" if len(path) == 1 else "layers", params
    )


def schedule(step: Any) -> Any:
    return 0.1 / (1 + step)


def lamb(learning_rate: Any = 0.1) -> Any:
    return optax.lamb(learning_rate, weight_decay=0.1)


COMPOSED: dict[str, Callable[[Callable[[Any], Any], Any], Any]] = {
    "a global norm outside": lambda wrap, _: optax.chain(
        optax.clip_by_global_norm(1.0), wrap(optax.adafactor(0.1))
    ),
    "masked by a tree": lambda wrap, model: wrap(optax.masked(lamb(), weights(model))),
    "masked by a function": lambda wrap, _: wrap(optax.masked(lamb(), matrices)),
    "multi_transform": lambda wrap, _: wrap(
        optax.multi_transform({"table": optax.adam(0.1), "layers": lamb()}, labels)
    ),
    "inject_hyperparams": lambda wrap, _: wrap(
        optax.inject_hyperparams(lamb)(learning_rate=schedule)
    ),
    "MultiSteps outside": lambda wrap, _: optax.MultiSteps(wrap(optax.adafactor(0.1)), 2),
    "an average": lambda wrap, _: ft.with_ema(wrap(lamb()), 0.9),
    "twice": lambda wrap, _: wrap(optax.chain(wrap(lamb()), optax.scale_by_trust_ratio())),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_inside_and_outside_of_others(name: str):
    tx = COMPOSED[name](ft.layerwise, MODEL)
    plain = COMPOSED[name](lambda tx: tx, LISTS[0])
    have, want = results(tx, "", MODEL, GRADIENTS), results(plain, "", *LISTS)
    for one, other in zip(have, want, strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("root", ["blocks", "nested"])
def test_a_stack_alone_and_frozen_parameters(root: str):
    params, *gradients = (
        {root: ft.select(getattr(one, root)).where("**.b").set(None)} for one in (MODEL, *GRADIENTS)
    )
    have, _ = results(ft.layerwise(lamb()), "", params, gradients)
    want, _ = results(lamb(), "", apart(params), apart(gradients))
    assert_equal(have, want)


def test_without_parameters_and_with_a_tree_as_an_extra_argument():
    def make() -> Any:
        def update(updates: Any, state: Any, params: Any = None, *, like: Any) -> Any:
            new = jax.tree.map(lambda x, y: x * jnp.max(y), updates, like)
            return new, state

        return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)

    tx = ft.layerwise(make())
    updates, _ = tx.update(GRADIENTS[0], tx.init(MODEL), like=MODEL)
    want, _ = make().update(LISTS[1][0], optax.EmptyState(), like=LISTS[0])
    assert_equal(arrays_by_path(updates), arrays_by_path(want))


def test_the_program_does_not_grow_with_the_layers():
    def lines(number: int) -> int:
        model = {"table": MODEL.table, "blocks": ft.Stacked(block(0, number))}
        tx = ft.layerwise(optax.MultiSteps(lamb(), 2))
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            update = jax.jit(tx.update).lower(model, jax.eval_shape(tx.init, model), model)
        return update.as_text().count("\n")

    assert lines(4) == lines(8)


@pytest.mark.parametrize("raw", [False, True], ids=["typed", "raw"])
def test_what_draws_random_numbers_is_refused(raw: bool):
    key = (jax.random.PRNGKey if raw else jax.random.key)(0)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        own, after = jax.random.split(state["key"])
        return jax.tree.map(lambda x: x + jax.random.normal(own, x.shape), updates), {"key": after}

    noise = optax.GradientTransformation(lambda params: {"key": key}, update)
    for tx in (noise, optax.MultiSteps(noise, 2)):
        with jax.numpy_dtype_promotion("standard"), raises(
            "`ft.layerwise` needs an optimizer that", "the optimizer's update",
            "draws random numbers, which would be the same for all layers",
            "move out of `ft.layerwise` the transformations that draw",
        ):  # fmt: skip
            ft.layerwise(tx).init(MODEL)
    # The remedy.
    outside = optax.chain(ft.layerwise(lamb()), noise)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = outside.update(MODEL, outside.init(MODEL), MODEL)
    assert updates.blocks.layer.w.shape == MODEL.blocks.layer.w.shape


def test_what_is_not_an_optimizer_is_an_error():
    with raises(
        "an instance of int is not an optimizer: the argument `tx`", "which has `init` and `update`"
    ):
        ft.layerwise(1)  # pyright: ignore


LOOP: list[Any] = [np.ones(2)]
LOOP.append(LOOP)
# Values that JAX cannot hold or flatten, and a part of the error.
UNFIT: dict[str, tuple[Any, str]] = {
    "byte order": (np.ones(2, ">f4"), "has dtype >f4, whose byte order JAX"),
    "masked": (np.ma.ones(2), "mask"),
    "longdouble": (np.ones(2, np.longdouble), "which JAX does not support"),
    "keys": ({1: np.ones(2), "a": np.ones(2)}, "a dict cannot be flattened"),
    "itself": (LOOP, "it contains itself"),
}


@pytest.mark.parametrize("name", UNFIT)
@pytest.mark.parametrize("place", ["extra", "state"])
def test_what_jax_cannot_hold_is_told_by_path(place: str, name: str) -> None:
    value, text = UNFIT[name]

    def update(updates: Any, state: Any, params: Any = None, *, scale: Any) -> Any:
        return updates, state

    tx = ft.layerwise(
        optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    )
    stack = ft.Stacked(block(1, LAYERS))
    state = tx.init(stack)
    tx.update(stack, state, stack, scale=np.ones(2))  # after this call, nothing is traced again
    with raises(text):
        if place == "extra":
            tx.update(stack, state, stack, scale=value)
        else:
            tx.update(stack, (state, value), stack, scale=np.ones(2))


class Updated(NamedTuple):
    updates: Any
    state: Any


def test_an_update_that_returns_a_named_tuple() -> None:
    sgd = optax.sgd(0.1, momentum=0.9)
    tx = ft.layerwise(
        optax.GradientTransformation(sgd.init, lambda *given: Updated(*sgd.update(*given)))
    )
    stack = ft.Stacked(block(1, LAYERS))
    got, want = (each.update(stack, each.init(stack), stack) for each in (tx, ft.layerwise(sgd)))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(one, other)
