"""An optimizer ─► its `init` and `update`, mapped over the layers of stacks.

A stack of layers is one leaf with leading dimensions. The functions of the optimizer see leaves
with the shapes of one layer, in a tree with the same nodes and paths.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import optax

from functree.errors import FunctreeValueError, Problem, count
from functree.labels.leaf import Leaf, array_problem
from functree.labels.leaves import Leaves, read
from functree.labels.optimizer.followed_parameters import TrainedModel
from functree.labels.optimizer.optimizer_state import optimizer_state
from functree.labels.optimizer.followed_parameters import Shape
from functree.tree.arrays import Tree
from functree.tree.nodes import walk
from functree.tree.paths import Path
from functree.tree.skeleton.kinds import ARRAY
from functree.tree.skeleton.skeleton import Skeleton

# While an optimizer is mapped, the nodes of stacks have the leaves of one layer. What reads the
# stacks of a tree then, such as another `ft.layerwise` inside of the optimizer, must not take the
# leading dimensions of these for layers.
_LAYERS: ContextVar[bool] = ContextVar("functree_single_layers", default=False)


@contextmanager
def for_layers() -> Iterator[None]:
    """A context in which the nodes of stacks have the leaves of one layer."""
    before = _LAYERS.get()
    try:
        _LAYERS.set(True)
        yield
    finally:
        _LAYERS.set(before)


def stack_sizes(leaf: Leaf) -> Shape:
    """The sizes of the stacks that a leaf is in, outermost first; none for one layer."""
    return () if _LAYERS.get() else tuple(leaf.shape[: leaf.stacked])


def stacks_of(*trees: Leaves) -> dict[Path, Shape]:
    """The sizes of the stacks that each parameter of some trees is in, by its path."""
    return {leaf.path: stack_sizes(leaf) for leaves in trees for leaf in leaves.leaves}


def paths_of(tree: Tree) -> list[Path]:
    """The path of each array of a tree, in JAX's order."""
    return [Path(keys) for keys, _, kind in walk(tree, in_model=True) if kind is ARRAY]


class StateLayers:
    """The leaves of an optimizer's state for single layers.

    Args:
        tx: the optimizer.
        parameters: its parameters.

    Attributes:
        paths: the path of each leaf.
        owners: for the path of each leaf, the parameter that it belongs to; None for what is there
            once, such as a count.
        shapes: for the path of each leaf, its shape for one layer.
    """

    def __init__(self, tx: Any, parameters: Leaves):
        layers = single_layers(parameters)
        with for_layers():
            state = optimizer_state(tx, layers)
        self.paths: list[Path] = [leaf.path for leaf in state.leaves]
        self.shapes: dict[Path, Shape] = {leaf.path: leaf.shape for leaf in state.leaves}
        self.owners: dict[Path, Path | None] = {}
        for leaf in state.leaves:
            self.owners[leaf.path] = leaf.follows.path if leaf.follows else None

    def stack(self, path: Path, stacks: Mapping[Path, Shape]) -> Shape:
        """The sizes of the stacks that the parameter of a leaf is in."""
        owner = self.owners.get(path)
        return () if owner is None else stacks.get(owner, ())


def single_layers(parameters: Leaves) -> TrainedModel:
    """Parameters as single layers have them, abstract."""
    layers: dict[Path, Leaf | None] = {}
    for leaf in parameters.leaves:
        weak = getattr(jax.typeof(leaf.value), "weak_type", False)
        shape = leaf.shape[len(stack_sizes(leaf)) :]
        value = jax.ShapeDtypeStruct(shape, leaf.value.dtype, weak_type=weak)
        layers[leaf.path] = leaf._replace(value=value, stacked=0)
    return TrainedModel(parameters.skeleton, layers)


def mapped_init(tx: Any, params: Tree) -> Tree:
    """The state of an optimizer whose `init` is mapped over the layers of the parameters."""
    leaves = read(params)
    stacks, layers = stacks_of(leaves), StateLayers(tx, leaves)
    skeleton, arrays = Skeleton.apart(params)

    def run(arrays: Sequence[Any]) -> tuple[Tree, list[Shape]]:
        with for_layers():
            state = tx.init(skeleton.fill(arrays))
        return state, [layers.stack(path, stacks) for path in paths_of(state)]

    return _mapped(run, [stack_sizes(leaf) for leaf in leaves.leaves], arrays)


def mapped_update(
    tx: Any, updates: Tree, state: Tree, params: Tree | None, extra: Mapping[str, Tree]
) -> tuple[Tree, Tree]:
    """The updates and the state of an optimizer whose `update` is mapped over the layers.

    Args:
        tx: the optimizer. What belongs to one leaf depends on no other one.
        updates: the gradients.
        state: the state. What belongs to a parameter in a stack has the dimensions of the stack
            before those that it has for one layer.
        params: the parameters, or None.
        extra: other arguments of `update`. What has the path and the shape of a parameter in one of
            these arguments belongs to the parameter.

    Raises:
        FunctreeError: the state is not for single layers.
    """
    # Some optimizers, such as `optax.lookahead`, have parameters in other places than gradients.
    gradients, parameters = read(updates), read(params)
    stacks = stacks_of(parameters, gradients)
    shapes = {leaf.path: leaf.shape for leaf in (*parameters.leaves, *gradients.leaves)}
    layers = StateLayers(tx, gradients if params is None else parameters)
    _check_state(state, layers, stacks)
    trees = updates, state, params, dict(extra)
    skeleton, arrays = Skeleton.apart(trees)
    inputs = [stack_sizes(leaf) for leaf in gradients.leaves]
    inputs += [layers.stack(path, stacks) for path in paths_of(state)]
    inputs += [stack_sizes(leaf) for leaf in parameters.leaves]
    _, values = Skeleton.apart(trees[3])
    for path, value in zip(paths_of(trees[3]), values, strict=True):
        below = Path(path[1:])
        belongs = shapes.get(below) == value.shape
        inputs.append(stacks[below] if belongs else ())
    update = optax.with_extra_args_support(tx).update

    def run(arrays: Sequence[Any]) -> tuple[Tree, list[Shape]]:
        updates, state, params, extra = skeleton.fill(arrays)
        with for_layers():
            new, after = update(updates, state, params, **extra)
        outputs = [stacks.get(path, ()) for path in paths_of(new)]
        outputs += [layers.stack(path, stacks) for path in paths_of(after)]
        return (new, after), outputs

    return _mapped(run, inputs, arrays)


def _mapped(
    run: Callable[[Sequence[Any]], tuple[Any, list[Shape]]],
    inputs: Sequence[Shape],
    arrays: Sequence[Any],
) -> Any:
    """The result of a function that is mapped over the stacks of its inputs.

    Args:
        run: a function of arrays. It returns a tree, and the stacks of each array in it.
        inputs: the stacks of each array.
        arrays: the arrays.
    """
    # What `jax.vmap` has to know beforehand is the dimension of each output. So those of equal
    # stacks are in one list.
    kinds = list(dict.fromkeys([(), *inputs]))
    found: list[tuple[Skeleton, list[Shape]]] = []

    def by_stacks(*arrays: Any) -> list[list[Any]]:
        tree, outputs = run(arrays)
        skeleton, values = Skeleton.apart(tree)
        found.append((skeleton, outputs))
        lists: dict[Shape, list[Any]] = {kind: [] for kind in kinds}
        for value, stack in zip(values, outputs, strict=True):
            # What a trace computes without its inputs may be a number of Python.
            lists[stack].append(jnp.asarray(value))
        return list(lists.values())

    # Stacks of equal size that are in equally many others are mapped together, the outermost
    # stacks outermost.
    mapped: Any = by_stacks
    for level in sorted({level for stack in inputs for level in enumerate(stack)}, reverse=True):
        mapped = jax.vmap(
            mapped,
            in_axes=tuple(_axis(stack, level) for stack in inputs),
            out_axes=[_axis(stack, level) for stack in kinds],
            axis_size=level[1],
        )
    lists = dict(zip(kinds, map(iter, mapped(*arrays)), strict=True))
    skeleton, outputs = found[-1]
    return skeleton.fill([next(lists[stack]) for stack in outputs])


def _axis(stack: Shape, level: tuple[int, int]) -> int | None:
    """The dimension that is mapped. The stacks around it are mapped already."""
    return 0 if level in enumerate(stack) else None


def _check_state(state: Tree, layers: StateLayers, stacks: Mapping[Path, Shape]) -> None:
    """Raise FunctreeError for leaves of the state without the dimensions of their stacks."""
    problems: list[Problem] = []
    _, arrays = Skeleton.apart(state)
    for path, array in zip(paths_of(state), arrays, strict=True):
        stack = layers.stack(path, stacks)
        if stack and tuple(array.shape) != (*stack, *layers.shapes[path]):
            want = [*stack, *layers.shapes[path]]
            why = f"belongs to layers of a stack, and for these its shape is {want}"
            problems.append(array_problem(path, array, why, _MAKE_STATE))
    if problems:
        raise FunctreeValueError(
            f"{count(len(problems), 'leaf')} of the optimizer's state cannot be updated by layers",
            problems,
        )


_MAKE_STATE = "make the state by the same optimizer: `ft.layerwise(tx).init`, and not `tx.init`"
