"""The sharding of tokens and experts determines how tokens reach their experts."""

from typing import Literal, NamedTuple

import jax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float

from functree.devices.meshes import Entry, devices_along, entry, mesh_axes, platform
from functree.errors import FunctreeValueError, Problem
from functree.nn.activations import constrain_to, divided, entries_of, on_one_device, specs_of
from functree.placing.constrain import spec

TOKENS = "batch seq embed"
INTO_HIDDEN = "experts embed hidden"

_Axes = tuple[str, ...]

DispatchName = Literal["auto", "gather", "exchange", "ragged"]


class Shards(NamedTuple):
    """The sharding of a layer's tokens and experts, without mesh axes of size 1.

    Attributes:
        entries: the entries of the tokens' spec, except for the last dimension, which is unsharded.
        experts: the mesh axes of the experts.
        embed: the mesh axes of the weights' `embed`, along which weights are gathered. Each of
            these mesh axes shards tokens too.
        hidden: the mesh axes of the weights' `hidden`, along which results are summed.
    """

    entries: tuple[Entry, ...]
    experts: _Axes = ()
    embed: _Axes = ()
    hidden: _Axes = ()

    @property
    def tokens(self) -> _Axes:
        """The mesh axes of the tokens."""
        return tuple(axis for of_dim in self.entries for axis in mesh_axes(of_dim))

    @property
    def parts(self) -> int:
        """The number of shards of the experts."""
        return devices_along(self.experts)

    def with_tokens_over_experts(self, shape: tuple[int, ...]) -> "Shards | None":
        """Shard the tokens over the experts' mesh axes too, if the size of a dimension allows it.

        Args:
            shape: the shape of the tokens.

        Returns:
            The new sharding, or None if no size is divisible by the number of shards.
        """
        more = tuple(axis for axis in self.experts if axis not in self.tokens)
        if not more:
            return self
        for dim in range(len(self.entries)):
            axes = (*mesh_axes(self.entries[dim]), *more)
            if shape[dim] % devices_along(axes) == 0:
                entries = (*self.entries[:dim], entry(axes), *self.entries[dim + 1 :])
                return self._replace(entries=entries)
        return None


def shards_of(
    x: Float[Array, "*batch embed"], gate: Float[Array, "experts embed hidden"]
) -> Shards | None:
    """Return the sharding of tokens and experts, read from types or the ambient rules.

    Return None on one device, or if the sharding is unknown.

    Raises:
        ShardingError: if mesh axes do not divide the number of experts, or `hidden`.
        ShardingError: if mesh axes do not divide a dimension of the tokens.
    """
    if on_one_device():
        return None
    # On Explicit axes, types give the sharding for any number of dimensions.
    token_specs = specs_of([x], ["embed" if _is_explicit() else TOKENS])
    if token_specs is None:
        return None
    of_weight = entries_of(gate)
    if not _is_explicit():
        of_weight = tuple(spec(INTO_HIDDEN))
    experts, embed, hidden = (mesh_axes(divided(of_dim)) for of_dim in of_weight)
    if gate.shape[0] % devices_along(experts) or gate.shape[2] % devices_along(hidden):
        constrain_to(gate, INTO_HIDDEN.split(), of_weight)  # raises an error that names the rule
    entries = tuple(map(divided, tuple(token_specs[0])[:-1]))
    shards = Shards(entries, experts, (), hidden)
    # The compiler gathers the weights along other axes of `embed` at the start of the shard_map. If
    # the weights were gathered inside the shard_map, gradients would be summed over devices with
    # the same tokens.
    return shards._replace(embed=tuple(axis for axis in embed if axis in shards.tokens))


def _is_explicit() -> bool:
    return AxisType.Auto not in jax.sharding.get_abstract_mesh().axis_types


def weight_specs(shards: Shards) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
    """Return the specs of gate, up and down as arguments of a shard_map."""
    experts, embed, hidden = entry(shards.experts), entry(shards.embed), entry(shards.hidden)
    into = PartitionSpec(experts, embed, hidden)
    return into, into, PartitionSpec(experts, hidden, embed)


def chosen_dispatch(
    name: DispatchName,
    shards: Shards,
    shape: tuple[int, ...],
    top_k: int,
    capacity: float | None,
) -> tuple[DispatchName, Shards]:
    """Choose a layer's dispatch, and the sharding of its tokens and experts.

    Args:
        name: the requested dispatch.
        shards: the sharding of the layer.
        shape: the shape of the tokens.
        top_k: the number of experts for each token.
        capacity: the capacity factor.

    Raises:
        FunctreeError: if the requested dispatch is not possible.
    """
    apart = shards.with_tokens_over_experts(shape)
    if name == "auto":
        # A gather moves a token to all other parts. An exchange moves `top_k * capacity` rows per
        # token. Without a capacity, an exchange moves more than a gather: its equal parts have room
        # for all tokens of a device.
        many = capacity is not None and shards.parts > top_k * capacity
        name = "exchange" if many and apart is not None else "gather"
    if name == "gather" or not shards.experts:
        return "gather", shards
    if apart is None:
        raise _refused(
            name,
            f"tokens of shape {shape[:-1]} cannot be sharded over the mesh axes of the experts, "
            f"which have {shards.parts} devices",
            'pass dispatch="gather" or "auto"',
        )
    if name == "ragged" and platform() != "tpu":
        why = f"it is supported only on TPUs, but the program is for {platform()}"
        raise _refused(name, why, 'pass dispatch="auto"')
    return name, apart


def _refused(name: str, why: str, remedy: str) -> FunctreeValueError:
    problem = Problem(None, None, f'dispatch="{name}"', why, remedy)
    return FunctreeValueError("MoE: unsupported dispatch", [problem])
