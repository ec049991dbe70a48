"""An optimizer ─► one for which each layer of a stack is a leaf of its own."""

from collections.abc import Mapping
from typing import Any

import optax

from functree.labels.leaves import read
from functree.labels.optimizer.followed_parameters import check_optimizer
from functree.labels.optimizer.optimizer_state import remembered_update, trained_type
from functree.optimizers.apart import check_apart, check_layers_apart
from functree.optimizers.initialized import initialized
from functree.optimizers.over_layers import over_layers
from functree.optimizers.pairs import Arguments, layers_depending
from functree.optimizers.update_trace import (
    UpdateTrace,
    single_layers,
    stack_sizes,
    trace_init,
    trace_update,
)
from functree.tree.arrays import Tree


def layerwise(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Make each layer of a stack a leaf of its own for an optimizer.

    An optimizer sees an array of an `ft.Stacked` as one leaf with a dimension of layers. Most
    optimizers do not care. Those that look at the shape or the norm of a leaf do, such as
    adafactor, lamb and muon: they take stacked vectors for a matrix, and have one norm for all
    layers. With `layerwise` they compute what they compute for a list of the layers. Leaves that
    are in no stack stay as they are.

    The optimizer is mapped over the dimension of the layers, so it is traced once and the compiled
    program does not grow with their number. Its state has the paths of `tx.init` for one layer.
    What belongs to a parameter of a stack has the dimension of the layers in front, and is laid out
    with the parameter by `ft.plan_optimizer`; a count or a learning rate is there once. A random
    key is there once too, and each layer draws by one that is split from it.

    What looks at all leaves at once, such as a global norm, belongs outside:
    `optax.chain(optax.clip_by_global_norm(1.0), ft.layerwise(optax.adafactor(1e-3)))`. `masked`,
    `multi_transform`, `MultiSteps` and `inject_hyperparams` may be outside or inside.

    Args:
        tx: any optax optimizer that acts on each leaf alone. Other arguments of its `update`, such
            as `value=`, are passed on.

    Raises:
        FunctreeError: `tx` is not an optimizer; (when called) it looks at several leaves at once,
            and one of them is in a stack; the state is not that of this optimizer.

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
        if not _has_stacks(params):
            return tx.init(params)
        trace = trace_init(tx, params)
        check_apart(trace)
        return trace.build(initialized(trace))

    def update(
        updates: Tree, state: Tree, params: Tree | None = None, **extra: Any
    ) -> tuple[Tree, Tree]:
        if not _has_stacks(updates):
            return whole_update(updates, state, params, **extra)
        trace = trace_apart(tx, updates, state, params, extra)
        return trace.build(over_layers(trace))

    return optax.GradientTransformationExtraArgs(init, update)


def trace_apart(
    tx: optax.GradientTransformation,
    updates: Tree,
    state: Tree,
    params: Tree | None,
    extra: Mapping[str, Tree],
    by: str = "layerwise",
) -> UpdateTrace:
    """An optimizer's `update`, traced for single layers.

    Args:
        tx: as in `trace_update`, and so are the four arguments behind it.
        updates: the gradients.
        state: the state.
        params: the parameters, or None.
        extra: other arguments of `update`.
        by: the name of the function that was called with the optimizer.

    Raises:
        FunctreeError: the state is not for single layers; the optimizer looks at several leaves at
            once, and one of them is in a stack.
    """
    trace = trace_update(tx, updates, state, params, extra)
    check_apart(trace, by)
    _check_layers(tx, Arguments(updates, params, extra), trace, by)
    return trace


def _has_stacks(tree: Tree) -> bool:
    """Whether a parameter is in a stack."""
    return any(stack_sizes(leaf) for leaf in read(tree).leaves)


def _check_layers(
    tx: optax.GradientTransformation, arguments: Arguments, trace: UpdateTrace, by: str
) -> None:
    """Raise FunctreeError if one layer depends on another one; found out once for equal shapes."""
    tree = arguments.updates if arguments.params is None else arguments.params
    given = arguments.params is not None, tuple(sorted(arguments.extra))
    key = "layers", trained_type(single_layers(tree)), given
    depending = remembered_update(tx, key, lambda: layers_depending(tx, arguments, trace))
    check_layers_apart(trace, depending, by)
