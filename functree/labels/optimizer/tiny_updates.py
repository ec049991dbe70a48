"""An optimizer and leaves of stacks ─► the leaves whose updates differ if the layers are apart, for
tiny arrays."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from functree.labels.leaf import Leaf
from functree.labels.leaves import arrays_by_path
from functree.labels.optimizer.evaluate import evaluate
from functree.labels.optimizer.owners import owners_of
from functree.labels.optimizer.plain_nodes import plain_nodes
from functree.tree.arrays import AnyArray, Tree
from functree.tree.jaxprs import NOTHING, dependencies
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton

LAYERS = 2  # in each stack
UPDATES = 3
# Values are computed in double precision, so they are equal or not. What is least different are
# masks by rank, which take the stacked scales of norms for matrices: a decay of 1e-4.
TOLERANCE = 1e-5

Updates = Mapping[Path, Any]
"""The updates of one step by path."""


def differing_updates(tx: Any, leaves: Sequence[Leaf]) -> list[Leaf]:
    """The leaves of stacks that get other updates than the leaves of their layers do."""
    values = _values(leaves)
    whole = _Traced(tx, plain_nodes(leaves, _types(leaves), stacks=True))
    stacked = whole.updates([plain_nodes(leaves, some, stacks=True) for some in values])
    if not whole.looks_across():
        # Each leaf is updated alone, so one layer at a time is enough, and its trace has half the
        # size. Of a single leaf it is not known whether its layers depend on each other.
        found = _differing(leaves, stacked, _one_by_one(tx, leaves, values))
        if not found or len(leaves) > 1:
            return found
    pairs = _Traced(tx, _apart(leaves, _types(leaves)))
    return _differing(leaves, stacked, pairs.updates([_apart(leaves, some) for some in values]))


def _apart(leaves: Sequence[Leaf], arrays: Sequence[Any]) -> Tree:
    """A tree with a tuple of the layers in the place of each stacked array."""
    return plain_nodes(leaves, list(map(_layers, leaves, arrays)), stacks=False)


def _layers(leaf: Leaf, array: Any) -> tuple[Any, ...]:
    """The layers of a stacked array, those of all stacks in a stack."""
    return tuple(array[i] for i in product(range(LAYERS), repeat=leaf.stacked))


def _one_by_one(tx: Any, leaves: Sequence[Leaf], values: Sequence[Sequence[Any]]) -> list[Updates]:
    """The updates of trees of single layers; a layer has the path of the leaf and its number."""

    def tree(arrays: Sequence[Any], number: int) -> Tree:
        layers = [_layers(leaf, array) for leaf, array in zip(leaves, arrays, strict=True)]
        return plain_nodes(leaves, [own[number % len(own)] for own in layers], stacks=False)

    traced = _Traced(tx, tree(_types(leaves), 0))
    found: list[dict[Path, Any]] = [{} for _ in range(UPDATES)]
    for number in range(LAYERS ** max(leaf.stacked for leaf in leaves)):
        new = traced.updates([tree(arrays, number) for arrays in values])
        for own, updates in zip(found, new, strict=True):
            own.update({path / number: update for path, update in updates.items()})
    return list(found)


def _differing(
    leaves: Sequence[Leaf], stacked: Sequence[Updates], apart: Sequence[Updates]
) -> list[Leaf]:
    found: list[Leaf] = []
    for leaf in leaves:
        for whole, layers in zip(stacked, apart, strict=True):
            if not _are_equal(leaf, whole.get(leaf.path), layers):
                found.append(leaf)
                break
    return found


def _are_equal(leaf: Leaf, whole: Any, layers: Updates) -> bool:
    """Whether the update of a stack, None if there is none, is that of its layers."""
    own: list[Any] = [layers.get(leaf.path / i) for i in range(LAYERS**leaf.stacked)]
    if whole is None or any(layer is None for layer in own):
        return whole is None and all(layer is None for layer in own)
    one, other = np.stack(_layers(leaf, whole)), np.stack(own)
    invalid = np.isnan(one) | np.isnan(other)
    if invalid.any():
        return bool(np.array_equal(np.isnan(one), np.isnan(other)))
    return bool(np.allclose(one, other, rtol=0, atol=TOLERANCE * np.abs(other).max()))


# Tiny arrays


def _tiny_shape(leaf: Leaf) -> tuple[int, ...]:
    """A tiny shape with two layers in each stack. The sizes of a layer are in the order of the real
    ones, and those that are equal stay equal."""
    layer = leaf.shape[leaf.stacked :]
    order = sorted({size for size in layer if size != 1})
    tiny = {size: LAYERS + 1 + i for i, size in enumerate(order)}
    return (*[LAYERS] * leaf.stacked, *(tiny.get(size, 1) for size in layer))


def _types(leaves: Sequence[Leaf]) -> list[Any]:
    """Arrays of the dtypes that the optimizer sees. The values are more precise."""
    return [np.zeros(_tiny_shape(leaf), leaf.value.dtype) for leaf in leaves]


def _values(leaves: Sequence[Leaf]) -> list[list[Any]]:
    """The values of the parameters, and those of their gradients for each update; always the
    same."""
    random = np.random.default_rng(0)
    values = [[_random_values(leaf, random, 3.0) for leaf in leaves]]
    for _ in range(UPDATES):
        values.append([_random_values(leaf, random, 10.0) for leaf in leaves])
    return values


def _random_values(leaf: Leaf, random: np.random.Generator, ratio: float) -> Any:
    """Values for a tiny array. Each layer is larger than the one before, by a ratio, so that no
    layer has the norm of the stack."""
    shape, dtype = _tiny_shape(leaf), leaf.value.dtype
    values = random.normal(size=shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        values = values + 1j * random.normal(size=shape)
    scales = ratio ** np.arange(LAYERS**leaf.stacked)
    ones = [1] * (len(shape) - leaf.stacked)
    values = values * scales.reshape(*[LAYERS] * leaf.stacked, *ones)
    return values if jnp.issubdtype(dtype, jnp.inexact) else values.astype(dtype)


# Updates


class _Traced:
    """An optimizer's `init` and `update`, traced for parameters of some types."""

    def __init__(self, tx: Any, parameters: Tree):
        self._tx = tx
        self._tree, types = Skeleton.apart(parameters)
        self._parameters: list[Path] = list(arrays_by_path(parameters))
        self._init: ClosedJaxpr = jax.make_jaxpr(self._run_init)(*types)
        state = [
            jax.ShapeDtypeStruct(type_.shape, type_.dtype, weak_type=type_.weak_type)
            for type_ in self._init.out_avals
        ]
        self._update: ClosedJaxpr = jax.make_jaxpr(self._run_update)(types, state, types)
        shapes = [type_.shape for type_ in self._update.out_avals]
        known = dict(zip(self._parameters, [type_.shape for type_ in types], strict=True))
        if shapes[: len(self._paths)] != [known.get(path) for path in self._paths]:
            raise ValueError("the optimizer takes gradients of other shapes than the parameters")
        if shapes[len(self._paths) :] != [type_.shape for type_ in state]:
            raise ValueError("the shapes of the optimizer's state change")

    def _run_init(self, *params: Any) -> list[AnyArray]:
        state = self._tx.init(self._tree.fill(params))
        self._state, arrays = Skeleton.apart(state)
        self._state_paths = list(arrays_by_path(state))
        return arrays

    def _run_update(self, gradients: Any, state: Any, params: Any) -> list[AnyArray]:
        updates, after = self._tx.update(
            self._tree.fill(gradients), self._state.fill(state), self._tree.fill(params)
        )
        new = arrays_by_path(updates)
        self._paths = list(new)
        return [*new.values(), *Skeleton.apart(after)[1]]

    def updates(self, values: Sequence[Tree]) -> list[Updates]:
        """The updates, one after the other, for trees of the parameters and of the gradients."""
        params, *gradients = [arrays_by_path(tree) for tree in values]
        state = evaluate(self._init, list(params.values()))
        found: list[Updates] = []
        for some in gradients:
            outputs = evaluate(self._update, [*some.values(), *state, *params.values()])
            new = dict(zip(self._paths, outputs, strict=False))
            state = outputs[len(new) :]
            params = {path: x + new[path] if path in new else x for path, x in params.items()}
            found.append(new)
        return found

    def looks_across(self) -> bool:
        """Whether what belongs to one parameter, or to none, depends on another one."""
        owners = owners_of(self._state_paths, self._parameters)
        state = [next(iter(owners[path]), None) for path in self._state_paths]
        inputs = [*self._parameters, *state, *self._parameters]
        sources = [NOTHING if owner is None else frozenset({owner}) for owner in inputs]
        found = dependencies(self._update, sources)
        return any(on - {owner} for owner, on in zip([*self._paths, *state], found, strict=True))
