"""`mapped_init` and `mapped_update` map an optimizer's functions over the layers of stacks.

In a stack of layers, leaves have additional leading dimensions. The optimizer's functions get
leaves with the shapes of one layer, in a tree with the same nodes and paths.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import optax

from functree.labels.leaves import Leaf, Leaves, arrays_by_path
from functree.labels.optimizer.followed_parameters import Shape, TrainedModel, optimizer_state
from functree.tree.arrays import AnyArray, Tree
from functree.tree.paths import Keys, Path
from functree.tree.skeleton.skeleton import Skeleton

# While an optimizer is mapped, the nodes of stacks have the leaves of one layer. Code that reads
# the stacks of a tree, such as another `ft.layerwise` inside the optimizer, must not treat the
# leading dimensions of these leaves as layers.
_LAYERS: ContextVar[bool] = ContextVar("functree_single_layers", default=False)


@contextmanager
def for_layers() -> Iterator[None]:
    """Enter a context in which the nodes of stacks have the leaves of one layer."""
    token = _LAYERS.set(True)
    try:
        yield
    finally:
        _LAYERS.reset(token)


def stack_sizes(leaf: Leaf) -> Shape:
    """Return the sizes of a leaf's stacks, outermost first. Inside `for_layers`, there are none."""
    return () if _LAYERS.get() else tuple(leaf.shape[: leaf.stacked])


def single_layers(parameters: Leaves) -> TrainedModel:
    """Return abstract parameters with the shapes of single layers."""
    layers: dict[Path, Leaf | None] = {}
    for leaf in parameters.leaves:
        kind, shape = jax.typeof(leaf.value), leaf.value.shape[len(stack_sizes(leaf)) :]
        weak = getattr(kind, "weak_type", False)
        value = jax.ShapeDtypeStruct(shape, kind.dtype, weak_type=weak)
        layers[leaf.path] = leaf._replace(value=value, stacked=0)
    return TrainedModel(parameters.skeleton, layers)


def state_stacks(tx: Any, parameters: Leaves) -> dict[Path, Shape]:
    """Return the sizes of the stacks of each array in the state of a mapped optimizer, by path.

    An array that follows a parameter in stacks has the stacks' dimensions, followed by its
    dimensions for one layer. An array that follows no parameter, such as a count, is not stacked.
    """
    layers = single_layers(parameters)
    with for_layers():
        state = optimizer_state(tx, layers)
    stacks: dict[Path | None, Shape] = {x.path: stack_sizes(x) for x in parameters.leaves}
    of_state: dict[Path, Shape] = {}
    for leaf in state.leaves:
        owner = None if leaf.follows is None else leaf.follows.path
        of_state[leaf.path] = stacks.get(owner, ())
    return of_state


def mapped_init(tx: Any, params: Leaves) -> Tree:
    """Initialize an optimizer's state with `init` mapped over the layers of the parameters."""
    stacks = list(map(stack_sizes, params.leaves))
    return _mapped(tx.init, params.tree, stacks, state_stacks(tx, params))


def mapped_update(
    tx: Any, updates: Leaves, state: Tree, params: Leaves, extra: Mapping[str, Tree]
) -> tuple[Tree, Tree]:
    """Run an optimizer's `update`, mapped over the layers.

    Args:
        tx: the optimizer. Its results for one leaf must not depend on other leaves.
        updates: the gradients.
        state: the state. An array that belongs to a parameter in a stack has the stack's
            dimensions, followed by its dimensions for one layer.
        params: the parameters, or the leaves of None.
        extra: other arguments of `update`. An array in one of these belongs to the parameter with
            the same path and shape.

    Returns:
        The updates and the new state. If an array of the state lacks the dimensions of its stack,
            `jax.vmap` raises an error.
    """
    of_state = state_stacks(tx, params if params.leaves else updates)
    inputs = list(map(stack_sizes, updates.leaves))
    inputs += [of_state.get(path, ()) for path in arrays_by_path(state)]
    inputs += map(stack_sizes, params.leaves)
    known = {leaf.path: leaf for leaf in (*params.leaves, *updates.leaves)}
    for path, value in arrays_by_path(extra).items():
        same = known.get(Path(path[1:]))
        if same is None or same.shape != value.shape:
            inputs.append(())
        else:
            inputs.append(stack_sizes(same))
    # The keys are paths in the result, a pair of updates and a state.
    outputs: dict[Keys, Shape] = {(0, *path): stack_sizes(leaf) for path, leaf in known.items()}
    outputs |= {(1, *path): stack for path, stack in of_state.items()}
    update = optax.with_extra_args_support(tx).update

    def run(given: tuple[Tree, Tree, Tree, Mapping[str, Tree]]) -> Tree:
        updates, state, params, extra = given
        return tuple(update(updates, state, params, **extra))  # possibly a named tuple

    return _mapped(run, (updates.tree, state, params.tree, extra), inputs, outputs)


def _mapped(
    fn: Callable[[Any], Tree],
    tree: Tree,
    stacks: Sequence[Shape],
    outputs: Mapping[Any, Shape],
) -> Any:
    """Map a function over the stacks of its inputs, and return its result.

    Args:
        fn: a function of a tree.
        tree: the tree.
        stacks: the sizes of the stacks of each array in the tree.
        outputs: the sizes of the stacks of each array in the result, by path.
    """
    skeleton, arrays = Skeleton.apart(tree)
    # `jax.vmap` needs the mapped dimension of each output beforehand. Outputs with equal stacks are
    # therefore returned in one list.
    kinds = list(dict.fromkeys([(), *stacks]))
    results: list[tuple[Skeleton, list[Shape]]] = []

    def by_stacks(*arrays: Any) -> list[list[AnyArray]]:
        with for_layers():
            result = fn(skeleton.fill(arrays))
        new, values = Skeleton.apart(result)
        order = [outputs.get(path, ()) for path in arrays_by_path(result)]
        results.append((new, order))
        lists: dict[Shape, list[AnyArray]] = {kind: [] for kind in kinds}
        for value, stack in zip(values, order, strict=True):
            lists[stack].append(value)
        return list(lists.values())

    # Stacks with equal size and depth are mapped together. The outermost `vmap` maps the outermost
    # stacks.
    mapped: Any = by_stacks
    for level in sorted({level for stack in stacks for level in enumerate(stack)}, reverse=True):
        in_axes = tuple(_axis(stack, level) for stack in stacks)
        out_axes = [_axis(stack, level) for stack in kinds]
        mapped = jax.vmap(mapped, in_axes, out_axes, axis_size=level[1])
    lists = dict(zip(kinds, map(iter, mapped(*arrays)), strict=True))
    new, order = results[-1]
    return new.fill([next(lists[stack]) for stack in order])


def _axis(stack: Shape, level: tuple[int, int]) -> int | None:
    """Return the dimension to map for a level of stacks, or None if an array has no such stack.

    The dimension is 0, since outer stacks are mapped first.
    """
    return 0 if level in enumerate(stack) else None
