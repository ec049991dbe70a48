"""`MoE` is a mixture of experts: a router chooses a few feed-forward layers for each vector."""

from collections.abc import Callable, Iterator, Sequence

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
)
from functree.devices.meshes import devices_along
from functree.errors import Problem
from functree.nn.activations import activation, entries_of, over_mesh, resharded
from functree.nn.moe.dispatch import (
    Experts,
    Tokens,
    by_exchange,
    by_ragged_exchange,
    capacity_of,
    on_own_experts,
)
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
    """A mixture of experts: the weighted sum of the results of `top_k` experts for each vector.

    Each expert is an `ft.nn.MLP` with its own weights. A router, which computes in float32 or
    wider, chooses the experts with the highest probabilities (Shazeer et al., "Outrageously large
    neural networks", 2017), as in Mixtral and Qwen 3.

    Rules that shard `"experts"` put the experts on different devices. The tokens are then moved to
    their experts and back, in one `shard_map` over the mesh axes of tokens and experts. `"hidden"`
    (tensor parallelism inside each expert) and `"embed"` (FSDP) may be sharded too. To move tokens,
    the layer needs Explicit mesh axes, or ambient `AxisRules` and an `x` with the axes "batch seq
    embed". If the sharding of `x` is unknown, as under `jax.vmap`, the compiler decides which
    arrays move. Under `jax.vmap`, the layer needs a `capacity`, since JAX cannot map
    `jax.lax.ragged_dot`.

    For `ft.offload` and other checkpoint policies, the products with `gate` and `up` are named
    `"moe_gate"` and `"moe_up"`.

    Args:
        embed: the size of the input and of the result.
        hidden: the size of the hidden layer of each expert.
        experts: the number of experts.
        top_k: the number of experts for each vector.
        capacity: a factor, such as 1.25. In each shard of the tokens, an expert processes at most
            `capacity * top_k * tokens / experts` tokens, rounded up, and drops the rest. With
            `None`, no token is dropped, but arrays are large enough for all tokens to go to the
            experts of one device.
        dispatch: how tokens reach sharded experts. With `"gather"`, all tokens are gathered. With
            `"exchange"`, tokens are sent to their experts and back, using all-to-alls. `"ragged"`
            uses the TPU's all-to-alls for parts of unequal sizes. With a capacity and more than
            `top_k * capacity` shards of the experts, `"auto"` exchanges tokens if possible.
            Otherwise it gathers them.
        normalize: whether the weights of a vector's experts are divided by their sum, as in
            Mixtral.
        init: the initializer of all matrices; by default truncated normal with variance 1 / fan_in.
        key: the key for the matrices.
        param_dtype: the dtype of the parameters.
        compute_dtype: the dtype to which `x` and the experts' parameters are cast; by default the
            dtype of `x`.
        dot_general: a hashable function that multiplies by the experts' weights. It takes the
            arguments of `jax.lax.dot_general`, and needs a `capacity`.

    Raises:
        FunctreeError: if a size is not a positive integer.
        FunctreeError: if there are fewer experts than `top_k`.
        FunctreeError: if `dot_general` is passed without `capacity`.
        FunctreeError: if another argument is invalid.

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

    @checked("MoE: invalid arguments")
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
        check("MoE: invalid arguments", *_problems(experts, top_k, capacity, dot_general))
        keys = jax.random.split(key, 4)

        def of_each(key: PRNGKeyArray, rows: int, columns: int) -> Array:
            # Each expert's matrix is initialized separately: with three dimensions, JAX's
            # initializers would treat the first as summed over too.
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
        """Declare the experts' matrices for `ft.nn.matrix_dimensions`.

        The router is not declared: it holds one vector per expert, as an embedding does per token.
        """
        return dict.fromkeys(("gate", "up", "down"), (-2, -1))

    def __call__(
        self, x: Float[Array, "*batch embed"]
    ) -> tuple[Float[Array, "*batch embed"], MoELosses]:
        """Compute the result for each vector, in `compute_dtype`, and the losses of the router.

        Args:
            x: the vectors; the ambient rules apply to their axes as "batch seq embed".

        Raises:
            FunctreeError: if the dispatch is not possible on this mesh or platform.
            ShardingError: if the ambient rules do not fit the activations or the weights.
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
        y, losses = over_mesh(of_shard, (x, self.router, *weights), specs, (tokens, whole))
        y = resharded(y, PartitionSpec(*entries_of(x)))
        return activation(y, "batch seq embed"), losses

    def _of_shard(
        self, x: Array, router: Array, weights: Sequence[Array], name: DispatchName, shards: Shards
    ) -> tuple[Array, MoELosses]:
        """Compute the result for one device's tokens.

        Args:
            x: the device's tokens.
            router: the router's weights, which are replicated.
            weights: the device's shards of gate, up and down.
            name: how tokens reach their experts.
            shards: the sharding of tokens and experts.
        """
        vectors = x.reshape(-1, x.shape[-1])
        routing = route(vectors, router, self.top_k, self.normalize)
        tokens = Tokens(vectors, routing.experts, routing.weights)
        number = router.shape[1]
        capacity = dropped = None
        if self.capacity is not None:
            capacity = capacity_of(self.capacity, self.top_k, vectors.shape[0], number)
            tokens, dropped = tokens.within(capacity, number)
        gate, up, down = _gathered(weights, shards.embed)
        experts = Experts(gate, up, down, self.dot_general)
        # Along these mesh axes, each device has partial sums. If these axes shard the tokens too,
        # each device first gathers the other devices' tokens, and finally gets the sums for its own
        # tokens.
        summed = shards.hidden if name != "gather" else (*shards.experts, *shards.hidden)
        over = tuple(axis for axis in summed if axis in shards.tokens)
        if over:
            tokens = jax.tree.map(lambda array: jax.lax.all_gather(array, over, tiled=True), tokens)
        if capacity is not None:
            capacity *= devices_along(over)
        # `y` has the shape (tokens, embed). It is computed in float32 or wider, and cast to the
        # narrow dtype before it is sent.
        y = _DISPATCHED[name](tokens, experts, capacity, shards.experts).astype(x.dtype)
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
"""The functions that apply experts to tokens, by the name of the dispatch."""


def _gathered(weights: Sequence[Array], axes: tuple[str, ...]) -> Sequence[Array]:
    """Gather gate, up and down along `embed`, which is sharded over mesh axes of the tokens."""
    if not axes:
        return weights
    gathered: list[Array] = []
    for weight, dim in zip(weights, (1, 1, 2), strict=True):
        gathered.append(jax.lax.all_gather(weight, axes, axis=dim, tiled=True))
    return gathered


def _problems(
    experts: int, top_k: int, capacity: float | None, dot_general: DotGeneral | None
) -> Iterator[Problem]:
    """Yield the problems with arguments that do not fit each other."""
    if top_k > experts:
        why, remedy = f"there are only {experts} experts", f"set top_k to at most {experts}"
        yield Problem(None, None, f"top_k={top_k}", why, remedy)
    if dot_general is not None and capacity is None:
        why = "it needs equal numbers of tokens for all experts, which only a capacity ensures"
        yield Problem(None, None, "dot_general=", why, "pass capacity=1.25, for example")
