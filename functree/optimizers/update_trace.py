"""An optimizer and its arguments ─► its `init` or `update`, traced for single layers: a program
whose inputs and outputs belong to parameters.

A stack of layers is one leaf with leading dimensions. In the trace each leaf of a stack has the
shape that it has in one layer; the tree is the same otherwise, with the same paths. So the trace
has the size of one layer, and it is mapped over the stacks by whoever runs it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from functree.errors import FunctreeValueError, Problem, count
from functree.labels.leaf import Leaf, array_problem
from functree.labels.leaves import read
from functree.labels.optimizer.followed_parameters import TrainedModel
from functree.labels.optimizer.optimizer_state import optimizer_state
from functree.tree.arrays import AnyArray, Tree
from functree.tree.jaxprs import dependencies
from functree.tree.nodes import walk
from functree.tree.paths import Path
from functree.tree.skeleton.kinds import ARRAY
from functree.tree.skeleton.skeleton import Skeleton

Part = Literal["gradient", "state", "parameter", "extra", "update"]


class Place(NamedTuple):
    """What one input or output of a traced optimizer is.

    Attributes:
        part: the tree that it is in. The inputs of an `update` are gradients, state, parameters and
            extra arguments, and its outputs are updates and state. The inputs of an `init` are
            parameters, and its outputs are state.
        path: its path in that tree; that of an extra argument begins with the argument's name.
        owner: the path of the parameter that it belongs to; None for what is there once, such as a
            count, a learning rate or a random key.
        stack: the sizes of the stacks that the parameter is in, outermost first. The array has
            these leading dimensions, and in the trace it has none of them.
        is_key: whether it is a random key that is there once.
    """

    part: Part
    path: Path
    owner: Path | None
    stack: tuple[int, ...] = ()
    is_key: bool = False


@dataclass(frozen=True, eq=False)
class UpdateTrace:
    """An optimizer's `update` or `init`, traced for single layers.

    Attributes:
        program: the traced program, from arrays to arrays.
        inputs: what each input of the program is.
        arrays: the array for each input, with all its dimensions.
        outputs: what each output of the program is.
        depends: for each output, the indices of the inputs that it depends on.
        result: the skeleton of what was traced: the pair of updates and state, or the state.
    """

    program: ClosedJaxpr
    inputs: tuple[Place, ...]
    arrays: tuple[AnyArray, ...]
    outputs: tuple[Place, ...]
    depends: tuple[frozenset[int], ...]
    result: Skeleton

    def build(self, values: Sequence[object]) -> Tree:
        """What the optimizer returns, with a value for each output: the pair of updates and state,
        or the state."""
        return self.result.fill(values)


def trace_update(
    tx: optax.GradientTransformation,
    updates: Tree,
    state: Tree,
    params: Tree | None,
    extra: Mapping[str, Tree],
) -> UpdateTrace:
    """Trace an optimizer's `update` for single layers.

    Args:
        tx: the optimizer.
        updates: the gradients.
        state: the state. What belongs to a parameter in a stack has the dimensions of the stack in
            front of those that it has for a single layer.
        params: the parameters, or None.
        extra: other arguments of `update`. What has the path and the shape of a parameter in one of
            these arguments belongs to the parameter.

    Raises:
        FunctreeError: the state is not for single layers.
    """
    # Some optimizers, such as `optax.lookahead`, have parameters in other places than gradients.
    parameters = {**_parameters(params), **_parameters(updates)}
    owners = _owners(tx, updates if params is None else params, parameters)
    arguments: list[tuple[Part, Tree]] = [("gradient", updates), ("state", state)]
    arguments += [("parameter", params), ("extra", dict(extra))]
    skeletons: list[Skeleton] = []
    places: list[Place] = []
    arrays: list[AnyArray] = []
    for part, tree in arguments:
        skeleton, values = Skeleton.apart(tree)
        skeletons.append(skeleton)
        arrays += values
        for path, value in zip(paths_of(tree), values, strict=True):
            places.append(_place(part, path, value, parameters, owners))
    _check_state(places, arrays, owners)
    update = optax.with_extra_args_support(tx).update

    def run(values: Sequence[Any]) -> tuple[Tree, list[Place]]:
        rest = iter(values)
        trees = [one.fill([next(rest) for _ in range(len(one))]) for one in skeletons]
        new, after = update(trees[0], trees[1], trees[2], **trees[3])
        found = [Place("update", path, path, _stack(parameters, path)) for path in paths_of(new)]
        found += [_state_place(path, owners, parameters) for path in paths_of(after)]
        return (new, after), found

    return _traced(run, places, arrays)


def trace_init(tx: optax.GradientTransformation, params: Tree) -> UpdateTrace:
    """Trace an optimizer's `init` for single layers. Its inputs are the parameters."""
    parameters = _parameters(params)
    owners = _owners(tx, params, parameters)
    skeleton, arrays = Skeleton.apart(params)
    places: list[Place] = []
    for path, value in zip(paths_of(params), arrays, strict=True):
        places.append(_place("parameter", path, value, parameters, owners))

    def run(values: Sequence[Any]) -> tuple[Tree, list[Place]]:
        state = tx.init(skeleton.fill(values))
        return state, [_state_place(path, owners, parameters) for path in paths_of(state)]

    return _traced(run, places, arrays)


def _traced(
    run: Callable[[Sequence[Any]], tuple[Tree, list[Place]]],
    places: Sequence[Place],
    arrays: Sequence[AnyArray],
) -> UpdateTrace:
    """The trace of a function that returns a tree, and what each array in the tree is."""
    results: list[tuple[Skeleton, list[Place]]] = []

    def flat(*values: Any) -> list[AnyArray]:
        with for_layers():
            tree, found = run(values)
        skeleton, outputs = Skeleton.apart(tree)
        results.append((skeleton, found))
        return outputs

    types = [
        layer_type(array, len(place.stack)) for place, array in zip(places, arrays, strict=True)
    ]
    program = jax.make_jaxpr(flat)(*types)
    (skeleton, outputs), own = results[0], [frozenset({i}) for i in range(len(places))]
    depends: Any = dependencies(program, own)
    return UpdateTrace(
        program, tuple(places), tuple(arrays), tuple(outputs), tuple(depends), skeleton
    )


# In the trace the nodes of stacks have the leaves of one layer. Whatever reads the stacks of a tree
# there, such as another `ft.layerwise` inside of the optimizer, must not take them for stacks.
_LAYERS: ContextVar[bool] = ContextVar("functree_single_layers", default=False)


@contextmanager
def for_layers() -> Iterator[None]:
    """A context in which the nodes of stacks have the leaves of one layer."""
    token = _LAYERS.set(True)
    try:
        yield
    finally:
        _LAYERS.reset(token)


def stack_sizes(leaf: Leaf) -> tuple[int, ...]:
    """The sizes of the stacks that a leaf is in; none in a trace for single layers."""
    return () if _LAYERS.get() else tuple(leaf.shape[: leaf.stacked])


class _Sizes(NamedTuple):
    """The sizes of the stacks that a parameter is in, and those of one layer."""

    stack: tuple[int, ...]
    layer: tuple[int, ...]


_Parameters = Mapping[Path, _Sizes]
"""The sizes of each parameter, by its path."""


def _parameters(tree: Tree) -> _Parameters:
    found: dict[Path, _Sizes] = {}
    for leaf in read(tree).leaves:
        stack = stack_sizes(leaf)
        found[leaf.path] = _Sizes(stack, tuple(leaf.shape[len(stack) :]))
    return found


def _stack(parameters: _Parameters, path: Path | None) -> tuple[int, ...]:
    """The sizes of the stacks that a parameter is in; none for what is not a parameter."""
    if path is None or path not in parameters:
        return ()
    return parameters[path].stack


def layer_type(array: AnyArray, stacked: int) -> jax.ShapeDtypeStruct:
    """The type of an array without its leading dimensions, with how it is sharded on Explicit axes
    and what varies in `shard_map`."""
    type_: Any = jax.typeof(array)
    mesh = type_.sharding.mesh
    sharding = None
    # On Auto axes the type says nothing.
    if AxisType.Explicit in mesh.axis_types or AxisType.Manual in mesh.axis_types:
        sharding = NamedSharding(mesh, PartitionSpec(*type_.sharding.spec[stacked:]))
    return jax.ShapeDtypeStruct(
        type_.shape[stacked:],
        type_.dtype,
        sharding=sharding,
        weak_type=type_.weak_type,
        manual_axis_type=type_.manual_axis_type,
    )


class _Owner(NamedTuple):
    """A leaf of an optimizer's state for single layers: the parameter that it belongs to, and its
    shape."""

    path: Path | None
    shape: tuple[int, ...]


def single_layers(tree: Tree, parameters: _Parameters | None = None) -> TrainedModel:
    """The parameters of a tree as single layers have them, abstract."""
    found = read(tree)
    sizes = _parameters(tree) if parameters is None else parameters
    layers: dict[Path, Leaf | None] = {}
    for leaf in found.leaves:
        weak = getattr(jax.typeof(leaf.value), "weak_type", False)
        shape = sizes[leaf.path].layer
        value = jax.ShapeDtypeStruct(shape, leaf.value.dtype, weak_type=weak)
        layers[leaf.path] = leaf._replace(value=value, stacked=0)
    return TrainedModel(found.skeleton, layers)


def _owners(tx: Any, tree: Tree, parameters: _Parameters) -> dict[Path, _Owner]:
    """The parameter that each leaf of the state belongs to."""
    with for_layers():
        state = optimizer_state(tx, single_layers(tree, parameters))
    owners: dict[Path, _Owner] = {}
    for leaf in state.leaves:
        owners[leaf.path] = _Owner(leaf.follows.path if leaf.follows else None, leaf.shape)
    return owners


def _state_place(path: Path, owners: Mapping[Path, _Owner], parameters: _Parameters) -> Place:
    """The place of a leaf of the state."""
    owner = owners[path].path if path in owners else None
    return Place("state", path, owner, _stack(parameters, owner))


def _place(
    part: Part, path: Path, value: AnyArray, parameters: _Parameters, owners: Mapping[Path, _Owner]
) -> Place:
    """The place of an input."""
    if part == "state":
        place = _state_place(path, owners, parameters)
    elif part == "extra":
        below = Path(path[1:])
        sizes = parameters.get(below)
        belongs = sizes is not None and (*sizes.stack, *sizes.layer) == tuple(value.shape)
        owner = below if belongs else None
        place = Place(part, path, owner, _stack(parameters, owner))
    else:
        place = Place(part, path, path, _stack(parameters, path))
    return place._replace(is_key=place.owner is None and _is_key(path, value))


def _is_key(path: Path, value: AnyArray) -> bool:
    """Whether an array that belongs to no parameter is a random key.

    A raw key is an array of numbers like others, so it has to have a name that says so.
    """
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value.shape == ()
    if value.dtype != np.uint32:
        return False
    named = any(isinstance(key, str) and ("key" in key or "rng" in key) for key in path)
    # A new function each time: JAX remembers a shape also for other kinds of keys.
    raw = jax.eval_shape(lambda: jax.random.PRNGKey(0))
    return named and value.shape == raw.shape


def _check_state(
    places: Sequence[Place], arrays: Sequence[AnyArray], owners: Mapping[Path, _Owner]
) -> None:
    """Raise FunctreeError for leaves of the state without the dimensions of their stacks."""
    problems: list[Problem] = []
    for place, array in zip(places, arrays, strict=True):
        if place.part != "state" or not place.stack:
            continue
        want = (*place.stack, *owners[place.path].shape)
        if tuple(array.shape) != want:
            why = f"belongs to layers of a stack, and for these its shape is {list(want)}"
            problems.append(array_problem(place.path, array, why, _MAKE_STATE))
    if problems:
        raise FunctreeValueError(
            f"{count(len(problems), 'leaf')} of the optimizer's state cannot be updated by layers",
            problems,
        )


_MAKE_STATE = "make the state by the same optimizer: `ft.layerwise(tx).init`, and not `tx.init`"


def paths_of(tree: Tree) -> list[Path]:
    """The path of each array of a tree, in JAX's order."""
    return [Path(keys) for keys, _, kind in walk(tree, in_model=True) if kind is ARRAY]
