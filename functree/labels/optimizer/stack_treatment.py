"""An optimizer and its parameters ─► a warning about the stacks that it treats otherwise than their
layers.

It is found out by trying. The optimizer gets tiny arrays with two layers in each stack, once
stacked and once apart, and a few updates are compared. An optimizer may decide by sizes, as
adafactor does, so the shapes of its state for the real sizes are compared too.
"""

import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np

from functree.errors import USERS_ERRORS, listed, warn
from functree.labels.leaf import Leaf
from functree.labels.leaves import arrays_by_path
from functree.labels.optimizer.followed_parameters import TrainedModel
from functree.labels.optimizer.optimizer_state import remembered_update, trained_type
from functree.labels.optimizer.other_sizes import Shape
from functree.labels.optimizer.owners import owners_of
from functree.labels.optimizer.plain_nodes import plain_nodes, stack_paths
from functree.labels.optimizer.tiny_updates import differing_updates
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import read_abstract

_CONFIG: Any = jax.config  # its options are attributes that type checkers do not know


def warn_of_stacks(tx: Any, trained: TrainedModel) -> None:
    """Warn if an optimizer treats stacks otherwise than the layers in them, once for an optimizer
    and parameters of some shapes."""
    stacked = [leaf for leaf in trained.parameters.values() if leaf.stacked]
    if not stacked or not callable(getattr(tx, "update", None)):
        return
    told: list[Leaf] = []

    def find() -> bool:
        told.extend(treated_otherwise(tx, stacked))
        return True

    remembered_update(tx, ("stacks", trained_type(trained)), find)
    if told:
        warn(_text(told))


def _text(leaves: Sequence[Leaf]) -> str:
    stacks = list(dict.fromkeys(str(stack_paths(leaf)[0]) or "(the model)" for leaf in leaves))
    named = "the stack " if len(stacks) == 1 else "the stacks "
    named += listed([f"`{stack}`" for stack in stacks])
    arrays = listed([f"`{leaf.path}`" for leaf in leaves], 2)
    return (
        f"the optimizer treats {named} otherwise than it would treat the layers one by one: "
        f"for it, {arrays} are leaves with a dimension more. "
        "With `ft.layerwise(tx)` each layer is a leaf of its own. What looks at all leaves at once "
        "belongs outside: `optax.chain(optax.clip_by_global_norm(1.0), ft.layerwise(tx))`"
    )


def treated_otherwise(tx: Any, stacked: Sequence[Leaf]) -> Sequence[Leaf]:
    """The leaves of stacks that an optimizer treats otherwise than the leaves of their layers.

    What needs more arguments, or the classes of the model, cannot be tried and is not found, and
    neither is what takes more than a few updates to show. Random numbers are the same everywhere,
    so they make no difference.
    """
    # In a thread of its own, where the mesh, the rules, the settings and the traces of the caller
    # do not hold.
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(_tried, tx, stacked, _CONFIG.jax_enable_x64)
    # Whatever the optimizer raises, also exceptions of the user's own: it was not meant to run.
    return () if future.exception() is not None else future.result()


def _tried(tx: Any, stacked: Sequence[Leaf], x64: bool) -> Sequence[Leaf]:
    leaves = [leaf for leaf in stacked if stack_paths(leaf)]
    with ExitStack() as settings:
        settings.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        settings.enter_context(np.errstate(all="ignore"))
        settings.enter_context(jax.enable_x64(x64))
        settings.enter_context(jax.numpy_dtype_promotion("standard"))
        settings.enter_context(jax.numpy_rank_promotion("allow"))
        for differing in (differing_updates, _by_shapes):
            try:
                found = differing(tx, leaves)
            except USERS_ERRORS:
                continue
            if found:
                return found
    return ()


def _by_shapes(tx: Any, leaves: Sequence[Leaf]) -> list[Leaf]:
    """The leaves with other arrays in the state than a layer of them has, for the real sizes."""
    stacked = _shapes(tx, leaves, stacks=True)
    layers = [leaf._replace(value=_layer(leaf)) for leaf in leaves]
    apart = _shapes(tx, layers, stacks=False)
    by_path = {leaf.path: leaf for leaf in leaves}
    owners = owners_of([*stacked, *(path for path in apart if path not in stacked)], by_path)
    found: dict[Path, Leaf] = {}
    for path, several in owners.items():
        if several:
            leaf = by_path[several[0]]
            stack = leaf.shape[: leaf.stacked]
            if not _are_alike(stacked.get(path), apart.get(path), stack):
                found[leaf.path] = leaf
    return list(found.values())


def _are_alike(whole: Shape | None, layer: Shape | None, stack: Shape) -> bool:
    """Whether a shape in the state of a stack is that of a layer and of the stack. An array of the
    same shape may be a placeholder, and a history has a dimension in front."""
    if whole is None or layer is None:
        return False
    with_stack = [(*layer[:i], *stack, *layer[i:]) for i in range(len(layer) + 1)]
    return whole == layer or whole in with_stack


def _layer(leaf: Leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape[leaf.stacked :], leaf.value.dtype)


def _shapes(tx: Any, leaves: Sequence[Leaf], *, stacks: bool) -> dict[Path, Shape]:
    """The shapes in the state of an optimizer for some leaves, by path."""
    types = [jax.ShapeDtypeStruct(leaf.shape, leaf.value.dtype) for leaf in leaves]

    def init(params: Any) -> Any:
        found = arrays_by_path(tx.init(params))
        return list(found), list(found.values())

    paths, arrays = read_abstract(init, plain_nodes(leaves, types, stacks=stacks))
    return {path: array.shape for path, array in zip(paths, arrays, strict=True)}
