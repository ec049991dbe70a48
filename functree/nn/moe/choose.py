"""The sizes of a layer and how it is sharded ─► how its tokens come to its experts."""

from typing import Annotated, Literal, get_args

from functree.argument_checks import one_of
from functree.devices.meshes import platform
from functree.errors import FunctreeValueError, Problem
from functree.nn.moe.sharding import Shards

_Name = Literal["auto", "gather", "exchange", "ragged"]
DispatchName = Annotated[_Name, one_of(get_args(_Name))]


def chosen_dispatch(
    name: DispatchName,
    shards: Shards,
    shape: tuple[int, ...],
    top_k: int,
    capacity: float | None,
) -> tuple[DispatchName, Shards]:
    """Which dispatch a layer uses, and how its tokens are sharded for it.

    Args:
        name: what is asked for.
        shards: how the layer is sharded.
        shape: the shape of the tokens.
        top_k: how many experts a token has.
        capacity: the factor of the capacity.

    Raises:
        FunctreeError: the dispatch that is asked for cannot be had.
    """
    apart = shards.with_tokens_over_experts(shape)
    if name == "auto":
        # Gathered, a token is moved to each of the other parts, and exchanged to its experts:
        # `top_k` rows of it, times the capacity. Without a capacity, parts of equal size have room
        # for all tokens of a device, and are more than these tokens.
        many = capacity is not None and shards.parts > top_k * capacity
        name = "exchange" if many and apart is not None else "gather"
    if name == "gather" or not shards.experts:
        return "gather", shards
    if apart is None:
        raise _refused(
            name,
            f"the tokens have the shape {shape[:-1]}, which cannot be sharded over the "
            f"{shards.parts} parts of the experts",
            'write dispatch="gather" or "auto"',
        )
    if name == "ragged" and platform() != "tpu":
        why = f"only TPUs have such an exchange, and this is for {platform()}"
        raise _refused(name, why, 'write dispatch="auto"')
    return name, apart


def _refused(name: str, why: str, remedy: str) -> FunctreeValueError:
    problem = Problem(None, None, f'dispatch="{name}"', why, remedy)
    return FunctreeValueError("MoE cannot compute this", [problem])
