"""`muon` is optax's Muon, but orthogonalizes whole matrices even if they are sharded."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from functree.argument_checks import Takes, check, is_number
from functree.errors import FunctreeTypeError, FunctreeValueError, Problem
from functree.labels.leaves import Leaves, read
from functree.labels.optimizer.layers import stack_sizes
from functree.layout.layout import LayoutTree
from functree.optimizers.whole_matrices import MatrixFunction, of_each_matrix
from functree.tree.arrays import Tree


def muon(
    learning_rate: optax.ScalarOrSchedule,
    *args: Any,
    over: str | Sequence[str] | None = None,
    layout: LayoutTree = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Create a version of optax's Muon that orthogonalizes whole matrices even if they are sharded.

    `ft.muon` accepts the arguments of `optax.contrib.muon`, and computes the same moments and
    updates. Each layer of a stack is treated as its own matrix, as in `ft.layerwise`. Shards of
    matrices are exchanged once before the orthogonalization, and once after it: see
    `ft.on_whole_matrices`.

    Args:
        learning_rate: as in `optax.contrib.muon`.
        *args: further arguments of `optax.contrib.muon`.
        over: the mesh axes over which the matrices are spread; by default all mesh axes that shard
            the parameter.
        layout: the layout of the model; by default the ambient one.
        **options: further options of `optax.contrib.muon`. By default, parameters with two
            dimensions, not counting stacks, are matrices. For the layers of `ft.nn`, pass
            `muon_weight_dimension_numbers=ft.nn.matrix_dimensions(model)`. In a stack, count the
            dimensions from the end.

    Raises:
        FunctreeError: if `over` does not name mesh axes.
        FunctreeError: if `optax.contrib.muon` does not accept the arguments.
        FunctreeError: (when called) if dimensions in a stack are not counted from the end.
        FunctreeError: (when called) if `ft.on_whole_matrices` would raise this error.
        ShardingError: (when called) if `ft.on_whole_matrices` would raise this error.

    References:
        Jordan, [modded-nanogpt](https://github.com/KellerJordan/modded-nanogpt), 2024; Liu et al.,
        [Muon is Scalable for LLM Training](https://arxiv.org/abs/2502.16982), 2025.

    Examples:
        >>> import optax
        >>> layers = ft.stack(
        ...     lambda key: ft.nn.MLP(4, 8, key=key), 3, jax.random.key(0)
        ... )
        >>> tx = ft.muon(
        ...     1e-3,
        ...     muon_weight_dimension_numbers=ft.nn.matrix_dimensions(layers),
        ... )
        >>> mesh = ft.make_mesh(data=2, model=4)
        >>> layout = ft.AxisRules({"hidden": "model", ...: None})
        >>> ts = ft.TrainState.create(layers, tx, layout=layout, mesh=mesh)
        >>> moments = ts.opt_state.inner_states["muon"].inner_state[0].mu
        >>> moments.layer.up.sharding.spec
        P(None, None, 'model')

        The optimizer reads the matrices' shardings from the ambient rules, so run each step under
        them:

        >>> step = ft.jit(ft.apply_gradients, rules=layout, donate="ts")
    """
    check("muon: invalid arguments", learning_rate=(learning_rate, _RATE))
    try:
        bound = _SIGNATURE.bind(learning_rate, *args, **options)
    except TypeError as error:
        raise FunctreeTypeError(f"muon: {error}; see `optax.contrib.muon`") from None
    bound.apply_defaults()
    given = bound.arguments
    dimensions = given["muon_weight_dimension_numbers"]

    def labels(params: Tree) -> Tree:
        leaves = read(params)
        each = _dimensions(dimensions, params, leaves)
        return leaves.skeleton.fill(["adam" if own is None else "muon" for own in each])

    def functions(updates: Tree, leaves: Leaves) -> Sequence[MatrixFunction]:
        each = _dimensions(dimensions, updates, leaves)
        known = {own: _orthogonalize(given, own) for own in each}
        return [known[own] for own in each]

    matrices = optax.chain(
        _momentum(given["beta"], given["nesterov"], given["mu_dtype"]),
        of_each_matrix(functions, over, layout, "muon"),
        optax.add_decayed_weights(given["weight_decay"], given["weight_decay_mask"]),
        optax.scale_by_learning_rate(learning_rate),
    )
    of_adam = given["adam_learning_rate"]
    others = optax.adamw(
        learning_rate if of_adam is None else of_adam,
        b1=given["adam_b1"],
        b2=given["adam_b2"],
        eps=given["eps"],
        eps_root=given["adam_eps_root"],
        weight_decay=given["adam_weight_decay"],
        mu_dtype=given["mu_dtype"],
        nesterov=given["nesterov"],
    )
    return optax.partition({"muon": matrices, "adam": others}, labels)


_SIGNATURE = inspect.signature(optax.contrib.muon)
_RATE = Takes(
    "a number, or a schedule",
    lambda value: (
        not isinstance(value, jax.ShapeDtypeStruct)
        and (callable(value) or is_number(value) or getattr(value, "shape", None) == ())
    ),
)


class Momentum(NamedTuple):
    """The state of Muon's momentum.

    Attributes:
        count: the number of updates.
        mu: the first moment of each matrix.
    """

    count: Any  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: Any


def _momentum(beta: Any, nesterov: bool, mu_dtype: Any) -> optax.GradientTransformation:
    """Return the momentum of `optax.contrib.scale_by_muon`, without the orthogonalization."""

    def init(params: Any) -> Any:
        zeros = optax.tree.zeros_like(params, dtype=mu_dtype)
        return Momentum(jnp.zeros([], jnp.int32), zeros)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        count = optax.safe_increment(state.count)
        if nesterov:
            ahead = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))
            own = optax.tree.bias_correction(updates, beta, count)
            new = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, own)
        else:
            new = optax.tree.bias_correction(mu, beta, count)
        return new, Momentum(count, optax.tree.cast(mu, mu_dtype))

    return optax.GradientTransformation(init, update)


# The options that affect the orthogonalization of one matrix.
_OF_ONE = ("ns_coeffs", "ns_steps", "eps", "adaptive", "preconditioning", "consistent_rms")


def _orthogonalize(
    given: Mapping[str, Any], dimensions: MuonDimensionNumbers | None
) -> MatrixFunction:
    """Return a function that applies optax's Muon to one matrix.

    The function uses neither momentum nor weight decay, and its learning rate is 1.
    """

    def orthogonalized(matrix: jax.Array) -> jax.Array:
        tx = optax.contrib.muon(
            1.0,
            beta=0.0,
            nesterov=False,
            muon_weight_dimension_numbers=dimensions,
            **{name: given[name] for name in _OF_ONE},
        )
        updates: Any
        updates, _ = tx.update(matrix, tx.init(matrix), matrix)
        return -updates  # optax multiplies by minus the learning rate, which is 1

    return orthogonalized


def _dimensions(given: Any, params: Tree, leaves: Leaves) -> Sequence[MuonDimensionNumbers | None]:
    """Return each matrix's dimensions, in the format of optax's Muon, or None for other arrays.

    Raises:
        FunctreeError: if the dimensions in a stack are not counted from the end.
    """
    each: list[MuonDimensionNumbers | None] = []
    if given is None:
        for leaf in leaves.leaves:
            is_matrix = len(leaf.shape) - len(stack_sizes(leaf)) == 2
            each.append(MuonDimensionNumbers(-2, -1) if is_matrix else None)
        return each
    # A tree of dimensions may be a prefix of the parameters.
    jax.tree.map(
        lambda own, below: each.extend([own] * len(jax.tree.leaves(below))),
        given(params) if callable(given) else given,
        params,
        is_leaf=lambda x: x is None or isinstance(x, MuonDimensionNumbers),
    )
    problems: list[Problem] = []
    for leaf, own in zip(leaves.leaves, each, strict=True):
        if own is None or not stack_sizes(leaf):
            continue
        if any(dim >= 0 for dim in jax.tree.leaves(tuple(own))):
            pair = f"({own.reduction_axis}, {own.output_axis})"
            why = f"is in a stack, but its dimensions {pair} are not all counted from the end"
            remedy = "count the dimensions from the end, as in `(-2, -1)`"
            problems.append(leaf.problem(why, remedy))
    if problems:
        raise FunctreeValueError("muon: matrices in stacks have invalid dimensions", problems)
    return each
