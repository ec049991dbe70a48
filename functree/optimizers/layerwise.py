"""`layerwise` makes an optimizer treat each layer of a stack as its own leaf."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from functree.devices.placement import is_concrete
from functree.errors import USERS_ERRORS, FunctreeValueError, Problem, listed
from functree.labels.leaves import Leaves, array_problem, arrays_by_path, read
from functree.labels.optimizer.followed_parameters import check_optimizer, remembered, trained_type
from functree.labels.optimizer.layers import (
    for_layers,
    mapped_init,
    mapped_update,
    single_layers,
    stack_sizes,
)
from functree.labels.optimizer.stack_treatment import UPDATES, traced_update
from functree.layout.decide import plan
from functree.layout.state_sharding import StateSharding
from functree.transforms.init import init_optimizer
from functree.tree.arrays import Tree
from functree.tree.jaxprs import all_equations, is_random
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

    If the parameters are on several devices, `init` shards the state like the parameters, as
    `ft.init_optimizer` does.

    Args:
        tx: any optax optimizer that acts on each leaf alone. Extra arguments of `update`, such as
            `value=`, are passed on.

    Raises:
        FunctreeError: if `tx` is not an optimizer.
        FunctreeError: (when called) if `tx` combines several leaves, some of which are in a stack.
        FunctreeError: (when called) if `tx` draws random numbers.
        ValueError: (when called) by `jax.vmap`, if the state is not from this optimizer's `init`.

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
        if any(is_concrete(x) and len(x.sharding.device_set) > 1 for x in leaves.values):
            # `jnp.zeros_like` of one layer ignores the sharding of its stack.
            now = plan(params)
            # An array on one device has no spec in this plan.
            loose = [(row.path, PartitionSpec()) for row in now if row.spec is None]
            now = StateSharding([*loose, (..., now)])
            return init_optimizer(layered, params, now, wrt="**", otherwise=PartitionSpec())
        return mapped_init(tx, leaves)

    def update(
        updates: Tree, state: Tree, params: Tree | None = None, **extra: Any
    ) -> tuple[Tree, Tree]:
        leaves = read(updates)
        if not any(map(stack_sizes, leaves.leaves)):
            return whole_update(updates, state, params, **extra)
        parameters = read(params)
        _check(tx, leaves, None if params is None else parameters, extra)
        return mapped_update(tx, leaves, state, parameters, extra)

    layered = optax.GradientTransformationExtraArgs(init, update)
    return layered


# Checks for optimizers that combine several leaves


def _check(tx: Any, updates: Leaves, params: Leaves | None, extra: Mapping[str, Tree]) -> None:
    """Raise a FunctreeError if a result depends on several leaves, or on random numbers.

    The problems are cached for equal types.
    """
    types = [
        None if leaves is None else trained_type(single_layers(leaves))
        for leaves in (updates, params)
    ]
    key = "layers", *types, tuple(sorted(extra))
    problems = remembered(tx, key, lambda: _problems(tx, updates, params, extra), of_update=True)
    if problems:
        raise FunctreeValueError(
            "`ft.layerwise` needs an optimizer that acts on each leaf alone, and draws no random "
            "numbers",
            problems,
        )


_OUTSIDE = (
    "move out of `ft.layerwise` the transformations that combine several leaves: "
    "`optax.chain(optax.clip_by_global_norm(1.0), ft.layerwise(optax.adafactor(1e-3)))`"
)
_NO_RANDOM = (
    "move out of `ft.layerwise` the transformations that draw random numbers: "
    "`optax.chain(ft.layerwise(optax.lamb(1e-3)), optax.add_noise(0.1, 0.5, 0))`"
)


def _problems(
    tx: Any, updates: Leaves, params: Leaves | None, extra: Mapping[str, Tree]
) -> Sequence[Problem]:
    """Return the problems of an optimizer whose update is traced for one layer of each stack.

    If `update` needs other arguments, nothing is checked.
    """
    both = updates.leaves if params is None else (*updates.leaves, *params.leaves)
    stacks = {leaf.path: stack_sizes(leaf) for leaf in both}
    more, arrays = Skeleton.apart(dict(extra))
    others: list[Any] = []
    for path, array in zip(arrays_by_path(dict(extra)), arrays, strict=True):
        stack = stacks.get(Path(path[1:]), ())
        others.append(jax.ShapeDtypeStruct(array.shape[len(stack) :], jax.typeof(array).dtype))

    def layers(leaves: Leaves) -> Tree:
        layer = single_layers(leaves).tree(lambda leaf: leaf.value)
        # With a single array, only a second layer tells a global norm from the norm of a layer.
        return (layer, layer) if len(stacks) == 1 else layer

    given = layers(updates), None if params is None else layers(params), more.fill(others)
    try:
        with for_layers():
            traced = traced_update(tx.init, optax.with_extra_args_support(tx).update, *given)
    except USERS_ERRORS:
        return ()
    problems: list[Problem] = []
    if any(map(is_random, all_equations(traced.program))):
        why = "draws random numbers, which would be the same for all layers"
        problems.append(Problem(None, None, "the optimizer's update", why, _NO_RANDOM))
    outputs = zip(traced.outputs, traced.depends_on(), traced.program.out_avals, strict=True)
    for (path, owner), on, type_ in outputs:
        if len(stacks) == 1 and on - {owner}:
            why = "its update depends on other layers of the stack"
            return [array_problem(next(iter(stacks)), type_, why, _OUTSIDE)]
        names = [f"`{parameter}`" for parameter in stacks if parameter in on - {owner}]
        if names and any(stacks[parameter] for parameter in stacks if parameter in on):
            what = "this leaf of the optimizer's state"
            if path[0] == UPDATES:
                what = "its update"
            why = f"{what} depends on {listed(names)}"
            problems.append(array_problem(Path(path[1:]), type_, why, _OUTSIDE))
    return problems
