"""Vectors ─► vectors, each by a few of many feed-forward layers, which a router chooses: `MoE`."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray

from functree.argument_checks import (
    Flag,
    FloatingDtype,
    Key,
    Positive,
    Size,
    check,
    checked,
    is_size,
)
from functree.devices.meshes import devices_along
from functree.devices.varying import without_varying
from functree.errors import Problem
from functree.nn.activations import activation, entries_of, explicit_mesh, resharded
from functree.nn.moe.dispatch import (
    Tokens,
    by_exchange,
    by_ragged_exchange,
    capacity_of,
    on_own_experts,
)
from functree.nn.moe.experts import Experts, Sorted
from functree.nn.moe.router import MoELosses, route
from functree.nn.moe.sharding import DispatchName, Shards, chosen_dispatch, shards_of, weight_specs
from functree.nn.weights import (
    DotGeneral,
    Initializer,
    cast,
    dtype_or_none,
    fan_in,
)
from functree.tree.interfaces import Matrices


class MoE(eqx.Module):
    """A mixture of experts: of each vector the weighted sum of what `top_k` of the experts compute.

    Each expert is an `ft.nn.MLP` with weights of its own. A router, which computes in float32,
    chooses those with the highest probabilities (Shazeer et al., "Outrageously large neural
    networks", 2017), as in Mixtral and Qwen 3.

    Rules that shard `"experts"` put the experts on different devices. The tokens are then moved to
    their experts and back, in one `shard_map` over the mesh axes of both. `"hidden"` may be sharded
    too (tensor parallelism inside each expert), and `"embed"` (FSDP). This needs the ambient
    `AxisRules` and an `x` with the axes "batch seq embed", or Explicit mesh axes. Where it is not
    known how `x` is sharded, as under `jax.vmap`, the compiler decides what moves.

    For `ft.offload` and other policies, the products with `gate` and `up` have the names
    `"moe_gate"` and `"moe_up"`.

    Args:
        embed: the size of the input and of the result.
        hidden: the size of the hidden layer of each expert.
        experts: the number of experts.
        top_k: how many of them compute each vector.
        capacity: a factor, such as 1.25: an expert computes at most `capacity * top_k * tokens /
            experts` tokens of each shard of the tokens, rounded up, and what is beyond is dropped.
            `None`: no token is dropped, at the price of arrays that have room for all tokens at one
            expert.
        dispatch: how the tokens come to experts that are sharded: they are all gathered
            (`"gather"`), or each is exchanged by all-to-alls (`"exchange"`), also by those of TPUs
            for parts of unlike sizes (`"ragged"`). `"auto"` gathers while the experts have no more
            shards than `top_k * capacity`, and exchanges above; without a capacity it gathers.
        normalize: whether the weights of a vector are divided by their sum, as in Mixtral.
        init: the initializer of all matrices; by default truncated normal with variance 1 / (size
            summed over).
        key: the key for the matrices.
        param_dtype: the dtype of the parameters.
        compute_dtype: the dtype to which those of the experts are cast in the computation; `None`:
            that of `x`.
        dot_general: what multiplies by the weights of the experts, a hashable function of the
            arguments of `jax.lax.dot_general`. It needs a `capacity`.

    Raises:
        FunctreeError: a size is not a positive integer, there are fewer experts than `top_k`, or
            another argument does not fit.

    Examples:
        >>> moe = ft.nn.MoE(4, 8, experts=6, top_k=2, key=jax.random.key(0))
        >>> moe.gate.shape
        (6, 4, 8)
        >>> y, losses = moe(jnp.ones((2, 3, 4)))
        >>> y.shape
        (2, 3, 4)
    """

    router: Float[Array, "embed experts"]
    gate: Float[Array, "experts embed hidden"]
    up: Float[Array, "experts embed hidden"]
    down: Float[Array, "experts hidden embed"]
    top_k: int = eqx.field(static=True)
    capacity: float | None = eqx.field(static=True)
    dispatch: DispatchName = eqx.field(static=True)
    normalize: bool = eqx.field(static=True)
    compute_dtype: np.dtype | None = eqx.field(static=True)
    dot_general: DotGeneral | None = eqx.field(static=True)

    @checked("MoE cannot be built")
    def __init__(
        self,
        embed: Size,
        hidden: Size,
        experts: Size,
        top_k: Size,
        *,
        capacity: Positive | None = None,
        dispatch: DispatchName = "auto",
        normalize: Flag = True,
        init: Initializer = fan_in,
        key: Key,
        param_dtype: FloatingDtype = jnp.float32,
        compute_dtype: FloatingDtype | None = None,
        dot_general: DotGeneral | None = None,
    ):
        check("MoE cannot be built", *expert_problems(experts, top_k, capacity, dot_general))
        keys = jax.random.split(key, 4)

        def of_each(key: PRNGKeyArray, rows: int, columns: int) -> Array:
            # Each as a matrix of its own: of three dimensions JAX's initializers would take the
            # first for summed over, too.
            keys = jax.random.split(key, experts)
            return jax.vmap(lambda key: init(key, (rows, columns), param_dtype))(keys)

        self.router = init(keys[0], (embed, experts), param_dtype)
        self.gate = of_each(keys[1], embed, hidden)
        self.up = of_each(keys[2], embed, hidden)
        self.down = of_each(keys[3], hidden, embed)
        self.top_k, self.normalize = int(top_k), bool(normalize)
        self.capacity = None if capacity is None else float(capacity)
        self.dispatch, self.dot_general = dispatch, dot_general
        self.compute_dtype = dtype_or_none(compute_dtype)

    def __matrix_dimensions__(self) -> Matrices:
        """The matrices of the experts, for `ft.nn.matrix_dimensions`.

        The router is none: it has a vector for each expert, as a vocabulary for each token.
        """
        return dict.fromkeys(("gate", "up", "down"), (-2, -1))

    def __call__(
        self, x: Float[Array, "*batch embed"]
    ) -> tuple[Float[Array, "*batch embed"], MoELosses]:
        """The layer of each vector, in `compute_dtype`, and what keeps its router even.

        Args:
            x: the vectors, with axes "batch seq embed" for the ambient rules.

        Raises:
            FunctreeError: the dispatch cannot be had on this mesh or platform.
            ShardingError: the ambient rules do not fit the activations or the weights.
        """
        x, *weights = cast(self.compute_dtype, x, self.gate, self.up, self.down)
        x = activation(x, "batch seq embed")
        shards = shards_of(x, weights[0])
        if shards is None:
            return self._of_shard(x, self.router, weights, "gather", Shards(()))
        name, shards = chosen_dispatch(self.dispatch, shards, x.shape, self.top_k, self.capacity)

        def of_shard(x: Array, router: Array, *weights: Array) -> tuple[Array, MoELosses]:
            return self._of_shard(x, router, weights, name, shards)

        whole, tokens = PartitionSpec(), PartitionSpec(*shards.entries, None)
        specs = (tokens, whole, *weight_specs(shards))
        mesh = jax.sharding.get_abstract_mesh()
        mapped = jax.shard_map(
            of_shard,
            in_specs=specs,
            out_specs=(tokens, whole),
            # Inside an outer `shard_map` some axes are Manual already, and may not be mapped again.
            axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        )
        given = map(resharded, (x, self.router, *weights), specs)
        y, losses = without_varying(mapped)(*given)
        if explicit_mesh(x) is not None:
            y = resharded(y, PartitionSpec(*entries_of(x)))
        return activation(y, "batch seq embed"), losses

    def _of_shard(
        self, x: Array, router: Array, weights: Sequence[Array], name: DispatchName, shards: Shards
    ) -> tuple[Array, MoELosses]:
        """The layer of the tokens of one device.

        Args:
            x: these tokens.
            router: the whole router.
            weights: the part of gate, up and down that this device has.
            name: how tokens come to the experts.
            shards: how all are sharded.
        """
        tokens = x.reshape(-1, x.shape[-1])
        routing = route(tokens, router, self.top_k, self.normalize)
        number = router.shape[1]
        capacity = dropped = None
        if self.capacity is not None:
            capacity = capacity_of(self.capacity, self.top_k, tokens.shape[0], number)
            dropped = Sorted.of(routing.experts.reshape(-1), number).dropped(capacity)
        gate, up, down = _gathered(weights, shards.embed)
        experts = Experts(gate, up, down, self.dot_general)
        # Along these mesh axes devices have a part of each sum. Where they shard the tokens too,
        # each device needs those of the others before, and adds up its own afterwards.
        summed = shards.hidden if name != "gather" else (*shards.experts, *shards.hidden)
        over = tuple(axis for axis in summed if axis in shards.tokens)
        given = tokens, routing.experts, routing.weights
        if over:
            given = jax.tree.map(lambda one: jax.lax.all_gather(one, over, tiled=True), given)
        # (tokens, embed), in float32 or wider, and narrow again before they are moved.
        rows = Tokens(given[0], given[1], given[2], devices_along(over))
        y = _DISPATCHED[name](rows, experts, capacity, shards.experts).astype(x.dtype)
        if over:
            y = jax.lax.psum_scatter(y, over, tiled=True)
        if others := tuple(axis for axis in summed if axis not in over):
            y = jax.lax.psum(y, others)
        return y.reshape(x.shape), routing.losses(dropped, shards.tokens)


_Dispatch = Callable[[Tokens, Experts, int | None, tuple[str, ...]], Array]

_DISPATCHED: dict[str, _Dispatch] = {
    "gather": on_own_experts,
    "exchange": by_exchange,
    "ragged": by_ragged_exchange,
}
"""What computes the experts of tokens, by how these come to them."""


def _gathered(weights: Sequence[Array], axes: tuple[str, ...]) -> Sequence[Array]:
    """Gate, up and down, whole along `embed`, which is sharded over mesh axes of the tokens."""
    if not axes:
        return weights
    gathered: list[Array] = []
    for weight, dim in zip(weights, (1, 1, 2), strict=True):
        gathered.append(jax.lax.all_gather(weight, axes, axis=dim, tiled=True))
    return gathered


def expert_problems(experts: Any, top_k: Any, capacity: Any, dot_general: Any) -> list[Problem]:
    """The problems of these numbers, for the layer and for the config of a model.

    Examples:
        >>> from functree.nn.moe.layer import expert_problems
        >>> [problem.why for problem in expert_problems(4, 8, None, None)]
        ['there are only 4 experts']
    """
    found: list[Problem] = []
    if is_size(experts) and is_size(top_k) and top_k > experts:
        found.append(Problem(None, None, f"top_k={top_k}", f"there are only {experts} experts"))
    if dot_general is not None and capacity is None:
        why = "without a capacity experts have unlike numbers of tokens, which it cannot multiply"
        found.append(Problem(None, None, "dot_general=", why, "give a capacity, such as 1.25"))
    return found
