"""`zigzag` reorders a sequence to balance the work of causal attention across its parts."""

from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from functree.argument_checks import Size, Takes, checked, shown
from functree.devices.meshes import mesh_axes
from functree.errors import FunctreeValueError
from functree.nn.activations import entries_of, explicit_mesh

_TOKENS = Takes(
    "an array with dimensions for the batch and the sequence",
    lambda x: isinstance(x, np.ndarray | jax.Array) and x.ndim > 1 and x.size > 0,
)


@checked("zigzag: invalid arguments")
def zigzag(
    x: Annotated[Shaped[Array | np.ndarray, "batch seq ..."], _TOKENS], parts: Size
) -> tuple[Shaped[Array, "batch seq ..."], Int[Array, "seq"]]:
    """Reorder a sequence so that causal attention requires the same amount of work for each part.

    In the usual order, the last part attends to all parts, and the first part only to itself.
    `zigzag` splits the sequence into two pieces per part. Part `i` gets piece `i` and the piece
    equally far from the end (Grattafiori et al., "The Llama 3 herd of models", 2024). Reorder
    tokens, targets, masks and segments in the same way, before you place them. Then pass the
    positions and `in_order=False` to the model. The result for a NumPy array is a NumPy array.

    Only `context="gather"` and `"ring"` benefit: devices that exchange heads have equal work in any
    order. With `in_order=False`, attention runs in chunks, since the kernels mask by index.

    Args:
        x: an array to reorder along its second dimension.
        parts: the number of devices along the mesh axes that shard the sequence.

    Returns:
        The reordered array, and the position of each token.

    Raises:
        FunctreeError: if `2 * parts` does not divide the sequence length.
        FunctreeError: if the sequence is sharded over Explicit mesh axes.
        FunctreeError: if `x` or `parts` is invalid.

    Examples:
        >>> tokens, positions = ft.nn.zigzag(jnp.arange(8)[None] * 10, 2)
        >>> tokens
        Array([[ 0, 10, 60, 70, 20, 30, 40, 50]], dtype=int32)
        >>> positions
        Array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)
    """
    seq, pieces = x.shape[1], 2 * int(parts)
    if seq % pieces:
        raise FunctreeValueError(
            f"zigzag: the sequence length {seq} of {shown(x)} is not divisible by {pieces}, twice "
            f"the number of parts. Pad the sequence to a multiple of {pieces}"
        )
    first = np.arange(pieces // 2)
    order = np.stack([first, pieces - 1 - first], 1).reshape(-1)
    index = np.arange(seq, dtype=np.int32).reshape(pieces, -1)[order].reshape(-1)
    # JAX cannot look up along a dimension that the type of `x` shards. Resharding `x` first would
    # move all tokens.
    array: Any = x
    if explicit_mesh(array) is not None and mesh_axes(entries_of(array)[1]):
        raise FunctreeValueError(
            f"zigzag: the sequence of {shown(x)} is already sharded. Call `zigzag` before "
            "you place the array"
        )
    return array[:, index], jnp.asarray(index)
