"""An optimizer ─► one for which each layer of a stack is its own leaf."""

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
    """Make each layer of a stack its own leaf for an optimizer.

    An optimizer sees an array of an `ft.Stacked` as one leaf with a dimension of layers. Most
    optimizers do not care. Those that look at the shape or the norm of a leaf do, such as
    adafactor, lamb and muon: they take stacked vectors for a matrix, and have one norm for all
    layers. With `layerwise` they compute what they compute for a list of the layers. Leaves that
    are in no stack stay as they are.

    The optimizer is mapped over the dimension of the layers by `jax.vmap`, so the compiled program
    does not grow with their number. Its state has the paths of `tx.init` for one layer. What
    belongs to a parameter of a stack has the dimension of the layers in front, and is laid out with
    the parameter by `ft.plan_optimizer`; a count or a learning rate is there once.

    What looks at all leaves at once, such as a global norm, belongs outside:
    `optax.chain(optax.clip_by_global_norm(1.0), ft.layerwise(optax.adafactor(1e-3)))`. So does what
    draws random numbers. `masked`, `multi_transform`, `MultiSteps` and `inject_hyperparams` may be
    outside or inside.

    Args:
        tx: any optax optimizer that acts on each leaf alone. Other arguments of its `update`, such
            as `value=`, are passed on.

    Raises:
        FunctreeError: if `tx` is not an optimizer; (when called) if it looks at several leaves at
            once, and one of them is in a stack; if its state has a random key; if the state is not
            that of this optimizer.

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
        found: list[Skeleton] = []

        def run(arrays: Sequence[Any]) -> list[AnyArray]:
            state, values = Skeleton.apart(mapped_init(tx, skeleton.fill(arrays)))
            found.append(state)
            return values

        values = jax.jit(run, out_shardings=shardings)(arrays)
        return found[-1].fill(values)

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
    """How to shard a state: what has the shape of its parameter as the parameter, for
    `jnp.zeros_like` of one layer does not see how the stack is sharded; None if the parameters are
    not placed on the same several devices."""
    parameters: dict[Path, Any] = {leaf.path: leaf.value for leaf in params.leaves}
    if not all(map(is_concrete, parameters.values())):
        return None
    devices = {frozenset(one.sharding.device_set) for one in parameters.values() if one.committed}
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


# What looks at several leaves at once


def _check(tx: Any, updates: Leaves, params: Leaves | None, extra: Mapping[str, Tree]) -> None:
    """Raise FunctreeError if one leaf depends on another one, or if a key is drawn from; found out
    once for equal shapes."""
    types = [None if one is None else trained_type(single_layers(one)) for one in (updates, params)]
    key = "layers", *types, tuple(sorted(extra))
    problems = remembered(tx, key, lambda: _problems(tx, updates, params, extra), of_update=True)
    keys = [one for one in problems if one.remedy == _NO_KEYS]
    if keys:
        raise FunctreeTypeError(
            f"`ft.layerwise` cannot map an optimizer with {count(len(keys), 'random key')}", keys
        )
    if problems:
        raise FunctreeValueError(
            "`ft.layerwise` takes each layer of a stack as its own leaf, but the optimizer "
            f"looks at all leaves at once: {count(len(problems), 'array')} of its result "
            f"{'depends' if len(problems) == 1 else 'depend'} on several parameters",
            problems,
        )


_OUTSIDE = (
    "put what looks at all leaves outside, and what acts on each leaf inside: "
    "`optax.chain(optax.clip_by_global_norm(1.0), ft.layerwise(optax.adafactor(1e-3)))`"
)
_NO_KEYS = (
    "put what draws random numbers outside: "
    "`optax.chain(ft.layerwise(optax.lamb(1e-3)), optax.add_noise(0.1, 0.5, 0))`"
)


def _problems(
    tx: Any, updates: Leaves, params: Leaves | None, extra: Mapping[str, Tree]
) -> Sequence[Problem]:
    """What of an optimizer's result depends on several leaves, and the random keys of its state.

    Its update is traced with a tuple of two layers in the place of each stack. If the optimizer
    does not take that, such as one with labels for each array, nothing is known.
    """
    read_trees = [updates] if params is None else [params, updates]
    stacks = {leaf.path: stack_sizes(leaf) for one in read_trees for leaf in one.leaves}

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
    """The problems of random keys in the state."""
    for (path, owner), type_ in zip(traced.inputs, traced.program.in_avals, strict=True):
        if path[0] == STATE and owner is None and _is_key(path, type_):
            yield array_problem(Path(path[1:]), type_, "is a random key", _NO_KEYS)


def _depending(traced: TracedUpdate, stacks: Mapping[Path, tuple[int, ...]]) -> Iterator[Problem]:
    """The problems of what depends on several leaves, one of which is in a stack, in a trace with
    two layers of each stack."""
    # The parameter that each leaf of the trace is, or is a layer of.
    whole: dict[Path | None, Path] = {}
    for path, stack in stacks.items():
        whole |= dict.fromkeys((path / 0, path / 1) if stack else (path,), path)
    told = set[tuple[Path, bool]]()
    outputs = zip(traced.outputs, traced.depends_on(), traced.program.out_avals, strict=True)
    for (path, owner), on, type_ in outputs:
        own = whole.get(owner)
        stack = () if own is None else stacks[own]
        others = {whole[one] for one in on - {owner}}  # pyright: ignore[reportArgumentType]
        found = [one for one in stacks if one in others and (stacks[one] or stack)]
        # The path of one layer of a pair ends with its number.
        shown = Path(path[1:])
        if stack and path[-1] in (0, 1):
            shown = Path(path[1:-1])
        is_update = path[0] == UPDATES
        if not found or (shown, is_update) in told:
            continue
        told.add((shown, is_update))
        names = [f"`{one}`" for one in found if one != own] or ["other layers of the stack"]
        what = "this leaf of the optimizer's state"
        if is_update:
            what = "its update"
        array = jax.ShapeDtypeStruct((*stack, *type_.shape), type_.dtype)
        yield array_problem(shown, array, f"{what} depends on {listed(names)}", _OUTSIDE)


def _is_key(path: Path, value: AnyArray) -> bool:
    """Whether an array that belongs to no parameter is a random key.

    A raw key is an array of numbers like others, so it has to have a name that says so.
    """
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return True
    named = any(isinstance(key, str) and ("key" in key or "rng" in key) for key in path)
    # A new function each time: JAX remembers a shape for other kinds of keys too.
    raw = jax.eval_shape(lambda: jax.random.PRNGKey(0))
    return named and value.dtype == np.uint32 and value.shape == raw.shape
