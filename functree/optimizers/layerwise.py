"""`layerwise` makes an optimizer treat each layer of a stack as its own leaf."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Sharding

from functree.devices.placement import is_concrete
from functree.errors import (
    USERS_ERRORS,
    FunctreeTypeError,
    FunctreeValueError,
    Problem,
    count,
    listed,
)
from functree.labels.leaf import array_problem
from functree.labels.leaves import Leaves, arrays_by_path, read
from functree.labels.optimizer.followed_parameters import check_optimizer
from functree.labels.optimizer.layers import (
    for_layers,
    layered_state,
    mapped_init,
    mapped_update,
    single_layers,
    stack_sizes,
)
from functree.labels.optimizer.optimizer_state import remembered, trained_type
from functree.labels.optimizer.stack_treatment import STATE, UPDATES, TracedUpdate, traced_update
from functree.tree.arrays import AnyArray, Tree
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton


def layerwise(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Make an optimizer treat each layer of a stack as its own leaf.

    To an optimizer, an array of an `ft.Stacked` is one leaf with a dimension for the layers. Most
    optimizers compute the same updates for this leaf as for separate layers. Optimizers that use
    the shape or the norm of a leaf, such as adafactor, lamb and muon, do not: they treat stacked
    vectors as a matrix, or compute one norm for all layers. With `layerwise`, the result is the
    same as for a list of the layers. Nothing changes for leaves outside stacks.

    `jax.vmap` maps the optimizer over the dimension of the layers, so the compiled program does not
    grow with the number of layers. The optimizer's state has the same paths as the result of
    `tx.init` for one layer. State that belongs to a stack's parameter has a leading dimension for
    the layers, and `ft.plan_optimizer` lays it out like the parameter. A count or a learning rate
    is stored once.

    Transforms that combine all leaves, such as clipping by the global norm, belong outside:
    `optax.chain(optax.clip_by_global_norm(1.0), ft.layerwise(optax.adafactor(1e-3)))`. The same
    applies to transforms that draw random numbers. `masked`, `multi_transform`, `MultiSteps` and
    `inject_hyperparams` may be outside or inside.

    Args:
        tx: any optax optimizer that acts on each leaf alone. Extra arguments of `update`, such as
            `value=`, are passed on.

    Raises:
        FunctreeError: if `tx` is not an optimizer.
        FunctreeError: (when called) if `tx` combines several leaves, some of which are in a stack.
        FunctreeError: (when called) if the optimizer's state contains a random key.
        FunctreeError: (when called) if an array of the state does not have the shape that `init`
            gives it.

    Examples:
        >>> import optax
        >>> layers = ft.stack(
        ...     lambda key: ft.nn.Linear(4, 6, key=key), 3, jax.random.key(0)
        ... )
        >>> novograd = optax.novograd(1e-3)  # one number for each leaf
        >>> novograd.init(layers)[0].nu.layer.weight.shape
        ()
        >>> ft.layerwise(novograd).init(layers)[0].nu.layer.weight.shape
        (3,)
    """
    check_optimizer(tx, ("init", "update"))
    whole_update = optax.with_extra_args_support(tx).update

    def init(params: Tree) -> Tree:
        leaves = read(params)
        if not any(map(stack_sizes, leaves.leaves)):
            return tx.init(params)
        _check(tx, leaves, leaves, {})
        shardings = _shardings(tx, leaves)
        if shardings is None:
            return mapped_init(tx, params)
        skeleton, arrays = Skeleton.apart(params)
        skeletons: list[Skeleton] = []

        def run(arrays: Sequence[Any]) -> list[AnyArray]:
            state, values = Skeleton.apart(mapped_init(tx, skeleton.fill(arrays)))
            skeletons.append(state)
            return values

        values = jax.jit(run, out_shardings=shardings)(arrays)
        return skeletons[-1].fill(values)

    def update(
        updates: Tree, state: Tree, params: Tree | None = None, **extra: Any
    ) -> tuple[Tree, Tree]:
        leaves = read(updates)
        if not any(map(stack_sizes, leaves.leaves)):
            return whole_update(updates, state, params, **extra)
        _check(tx, leaves, None if params is None else read(params), extra)
        return mapped_update(tx, updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)


def _shardings(tx: Any, params: Leaves) -> list[Sharding | None] | None:
    """Return a state's shardings, or None if the parameters do not share several devices.

    State with the shape of its parameter is sharded like the parameter, since `jnp.zeros_like` of
    one layer ignores the sharding of its stack.
    """
    parameters: dict[Path, Any] = {leaf.path: leaf.value for leaf in params.leaves}
    if not all(map(is_concrete, parameters.values())):
        return None
    devices = {frozenset(x.sharding.device_set) for x in parameters.values() if x.committed}
    if len(devices) != 1 or len(next(iter(devices))) == 1:
        return None
    shardings: list[Sharding | None] = []
    for leaf in layered_state(tx, params).values():
        sharding: Sharding | None = None
        owner = None if leaf.follows is None else leaf.follows.path
        if owner is not None and parameters[owner].shape == leaf.shape:
            sharding = parameters[owner].sharding
        shardings.append(sharding)
    return shardings


# Checks for optimizers that combine several leaves


def _check(tx: Any, updates: Leaves, params: Leaves | None, extra: Mapping[str, Tree]) -> None:
    """Raise a FunctreeError if a result depends on several leaves, or the state has a random key.

    The problems are cached for equal types.
    """
    types = [
        None if leaves is None else trained_type(single_layers(leaves))
        for leaves in (updates, params)
    ]
    key = "layers", *types, tuple(sorted(extra))
    problems = remembered(tx, key, lambda: _problems(tx, updates, params, extra), of_update=True)
    keys = [problem for problem in problems if problem.remedy == _NO_KEYS]
    if keys:
        raise FunctreeTypeError(
            f"`ft.layerwise` cannot map an optimizer whose state contains "
            f"{count(len(keys), 'random key')}",
            keys,
        )
    if problems:
        raise FunctreeValueError(
            "`ft.layerwise` needs an optimizer that acts on each leaf alone, but "
            f"{count(len(problems), 'array')} of the optimizer's result "
            f"{'depends' if len(problems) == 1 else 'depend'} on several parameters",
            problems,
        )


_OUTSIDE = (
    "move out of `ft.layerwise` the transformations that combine several leaves: "
    "`optax.chain(optax.clip_by_global_norm(1.0), ft.layerwise(optax.adafactor(1e-3)))`"
)
_NO_KEYS = (
    "move out of `ft.layerwise` the transformations that draw random numbers: "
    "`optax.chain(ft.layerwise(optax.lamb(1e-3)), optax.add_noise(0.1, 0.5, 0))`"
)


def _problems(
    tx: Any, updates: Leaves, params: Leaves | None, extra: Mapping[str, Tree]
) -> Sequence[Problem]:
    """Return problems for results that depend on several leaves, and for random keys.

    The optimizer's update is traced with a tuple of two layers in place of each stack. If the
    optimizer cannot run on this tree, for example because it expects one label for each array,
    nothing is checked.
    """
    read_trees = [updates] if params is None else [params, updates]
    stacks = {leaf.path: stack_sizes(leaf) for tree in read_trees for leaf in tree.leaves}

    def pair(path: Path, array: AnyArray) -> Any:
        stack = stacks.get(path, ())
        layer = jax.ShapeDtypeStruct(array.shape[len(stack) :], array.dtype)
        return (layer, layer) if stack else layer

    def pairs(leaves: Leaves) -> Tree:
        return leaves.skeleton.fill([pair(leaf.path, leaf.value) for leaf in leaves.leaves])

    more, arrays = Skeleton.apart(dict(extra))
    below = [Path(path[1:]) for path in arrays_by_path(dict(extra))]
    update = optax.with_extra_args_support(tx).update
    try:
        with for_layers():
            others = more.fill(map(pair, below, arrays))
            params_pairs = None if params is None else pairs(params)
            traced = traced_update(tx.init, update, pairs(updates), params_pairs, others)
    except USERS_ERRORS:
        return ()
    return [*_keys(traced), *_depending(traced, stacks)]


def _keys(traced: TracedUpdate) -> Iterator[Problem]:
    """Yield a problem for each random key in the state."""
    for (path, owner), type_ in zip(traced.inputs, traced.program.in_avals, strict=True):
        if path[0] == STATE and owner is None and _is_key(path, type_):
            yield array_problem(Path(path[1:]), type_, "is a random key", _NO_KEYS)


def _depending(traced: TracedUpdate, stacks: Mapping[Path, tuple[int, ...]]) -> Iterator[Problem]:
    """Yield problems for results that depend on several leaves, if any of them is in a stack.

    The trace contains two layers of each stack.
    """
    # Maps each leaf of the trace, which is a parameter or one of its layers, to the parameter.
    whole: dict[Path | None, Path] = {}
    for path, stack in stacks.items():
        whole |= dict.fromkeys((path / 0, path / 1) if stack else (path,), path)
    told = set[tuple[Path, bool]]()
    outputs = zip(traced.outputs, traced.depends_on(), traced.program.out_avals, strict=True)
    for (path, owner), on, type_ in outputs:
        own = whole.get(owner)
        stack = () if own is None else stacks[own]
        others = {whole[leaf] for leaf in on - {owner}}  # pyright: ignore[reportArgumentType]
        parameters = [other for other in stacks if other in others and (stacks[other] or stack)]
        # The path of a layer ends with its index in the pair.
        shown = Path(path[1:])
        if stack and path[-1] in (0, 1):
            shown = Path(path[1:-1])
        is_update = path[0] == UPDATES
        if not parameters or (shown, is_update) in told:
            continue
        told.add((shown, is_update))
        names = [f"`{other}`" for other in parameters if other != own] or [
            "other layers of the stack"
        ]
        what = "this leaf of the optimizer's state"
        if is_update:
            what = "its update"
        array = jax.ShapeDtypeStruct((*stack, *type_.shape), type_.dtype)
        yield array_problem(shown, array, f"{what} depends on {listed(names)}", _OUTSIDE)


def _is_key(path: Path, value: AnyArray) -> bool:
    """Return whether an array that belongs to no parameter is a random key.

    A raw key is an array of integers, so only its name can identify it.
    """
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return True
    named = any(isinstance(key, str) and ("key" in key or "rng" in key) for key in path)
    # The lambda is created each time, since JAX would otherwise reuse a cached shape even after the
    # default kind of keys changes.
    raw = jax.eval_shape(lambda: jax.random.PRNGKey(0))
    return named and value.dtype == np.uint32 and value.shape == raw.shape
