"""An optimizer ─► one for which each layer of a stack is its own leaf."""

from collections.abc import Collection, Mapping, Sequence
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
from functree.labels.leaves import Leaves, read
from functree.labels.optimizer.followed_parameters import check_optimizer
from functree.labels.optimizer.layers import (
    StateLayers,
    for_layers,
    mapped_init,
    mapped_update,
    paths_of,
    single_layers,
    stack_sizes,
    stacks_of,
)
from functree.labels.optimizer.optimizer_state import remembered_update, trained_type
from functree.labels.optimizer.followed_parameters import owners_of
from functree.tree.arrays import AnyArray, Tree
from functree.tree.jaxprs import NOTHING, Sources, dependencies
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton, abstract_result


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
        return mapped_update(tx, updates, state, params, extra)

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
    layers, stacks = StateLayers(tx, params), stacks_of(params)
    shardings: list[Sharding | None] = []
    for path in layers.paths:
        owner = layers.owners[path]
        like = None if owner is None else parameters[owner]
        shape = (*layers.stack(path, stacks), *layers.shapes[path])
        shardings.append(like.sharding if like is not None and like.shape == shape else None)
    return shardings


# What looks at several leaves at once


def _check(tx: Any, updates: Leaves, params: Leaves | None, extra: Mapping[str, Tree]) -> None:
    """Raise FunctreeError if one leaf depends on another one, or if a key is drawn from; found out
    once for equal shapes."""
    types = [None if one is None else trained_type(single_layers(one)) for one in (updates, params)]
    key = "layers", *types, tuple(sorted(extra))
    problems = remembered_update(tx, key, lambda: (_problems(tx, updates, params, extra),))[0]
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
    """What of an optimizer's result depends on several leaves.

    Its update is traced with a tuple of two layers in the place of each stack. If the optimizer
    does not take that, such as one with labels for each array, nothing is known.
    """
    stacks = stacks_of(*([] if params is None else [params]), updates)

    def pair(path: Path, array: AnyArray) -> Any:
        stack = stacks.get(path, ())
        layer = jax.ShapeDtypeStruct(array.shape[len(stack) :], array.dtype)
        return (layer, layer) if stack else layer

    def pairs(leaves: Leaves | None) -> Tree:
        if leaves is None:
            return None
        return leaves.skeleton.fill([pair(leaf.path, leaf.value) for leaf in leaves.leaves])

    more, arrays = Skeleton.apart(dict(extra))
    below = [Path(path[1:]) for path in paths_of(dict(extra))]
    try:
        with for_layers():
            others = more.fill(map(pair, below, arrays))
            return _depending(tx, pairs(updates), pairs(params), others, stacks)
    except USERS_ERRORS:
        return ()


def _depending(
    tx: Any, updates: Tree, params: Tree | None, extra: Any, stacks: Mapping[Path, tuple[int, ...]]
) -> Sequence[Problem]:
    """The problems of a trace with two layers of each stack."""
    state = abstract_result(tx.init, updates if params is None else params)
    skeleton, types = Skeleton.apart((updates, state, params, extra))
    update = optax.with_extra_args_support(tx).update
    parameters = frozenset([*paths_of(updates), *paths_of(params)])
    results: list[tuple[list[Path], list[Path]]] = []

    def run(*arrays: Any) -> list[Any]:
        updates, state, params, extra = skeleton.fill(arrays)
        new, after = update(updates, state, params, **extra)
        results.append((paths_of(new), paths_of(after)))
        return Skeleton.apart((new, after))[1]

    program = jax.make_jaxpr(run)(*types)
    new, after = results[0]
    in_state = _owners(paths_of(state), parameters)
    problems: list[Problem] = []
    for path, array in zip(paths_of(state), Skeleton.apart(state)[1], strict=True):
        if in_state[path] is None and _is_key(path, array):
            problems.append(array_problem(path, array, "is a random key", _NO_KEYS))
    owners: list[Path | None] = [*paths_of(updates), *map(in_state.get, paths_of(state))]
    owners += paths_of(params)
    for path in paths_of(extra):
        below = Path(path[1:])
        owners.append(below if below in parameters else None)
    sources: list[Sources] = [NOTHING if one is None else frozenset({one}) for one in owners]
    later = _owners(after, parameters)
    outputs = [(path, path, "its update") for path in new]
    outputs += [(path, later[path], "this leaf of the optimizer's state") for path in after]
    pairs = zip(outputs, dependencies(program, sources), program.out_avals, strict=True)
    told = set[tuple[Path, str]]()
    for (path, owner, what), on, type_ in pairs:
        others = _others(owner, on, stacks)
        # The path of one layer of a pair ends with its number.
        own = _of_stack(owner, stacks)
        stack = () if own is None else stacks.get(own, ())
        shown = Path(path[: len(path) - 1]) if stack and path[-1] in (0, 1) else path
        if others and (shown, what) not in told:
            told.add((shown, what))
            whole = jax.ShapeDtypeStruct((*stack, *type_.shape), type_.dtype)
            why = f"{what} depends on {listed(others)}"
            problems.append(array_problem(shown, whole, why, _OUTSIDE))
    return problems


def _owners(paths: Sequence[Path], parameters: Collection[Path]) -> dict[Path, Path | None]:
    """The parameter that each leaf of a state belongs to."""
    found = owners_of(paths, parameters)
    return {path: next(iter(found[path]), None) for path in paths}


def _of_stack(path: Path | None, stacks: Mapping[Path, tuple[int, ...]]) -> Path | None:
    """The path of a parameter, by that of one of its layers."""
    if path is None or stacks.get(path):
        return path
    return Path(path[:-1]) if stacks.get(Path(path[:-1])) else path


def _others(
    owner: Path | None, on: Sources, stacks: Mapping[Path, tuple[int, ...]]
) -> Sequence[str]:
    """The other leaves that an output depends on, in words, if one of the two is in a stack."""
    own = _of_stack(owner, stacks)
    found: dict[Path, None] = {}
    for path in stacks:
        for one in on - {owner}:
            other = _of_stack(Path(one), stacks)  # pyright: ignore[reportArgumentType]
            if other == path and (stacks[path] or stacks.get(own or Path(), ())):
                found[path] = None
    others = [f"`{path}`" for path in found if path != own]
    return others or (["other layers of the stack"] if found else [])


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
