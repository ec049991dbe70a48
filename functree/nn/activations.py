"""An activation and its axes ─► the same activation, constrained by the ambient rules if there are any."""

from jax.sharding import PartitionSpec
from jaxtyping import Array, Shaped

from functree.placing.ambient import ambient_axis_rules, spec
from functree.placing.constrain import constrain


def activation(x: Shaped[Array, "..."], axes: str) -> Shaped[Array, "..."]:
    """`x`, constrained by the names of its axes and the ambient rules.

    Without ambient `AxisRules` (`ft.jit(rules=...)`, `with ft.axis_rules(rules):`) it does nothing, so the same model
    also runs on one device, and under a layout that is for parameters only.

    Args:
        x: the activation. If it has fewer dimensions than there are names, the outermost names are left out, "batch"
            first. If it has more, the outer dimensions have no names, and the compiler chooses its sharding.
        axes: the names of the dimensions, outermost first.

    Raises:
        ShardingError: as in `ft.constrain`, if the rules do not fit.

    Examples:
        >>> from functree.nn.activations import activation
        >>> activation(jnp.ones((2, 3)), "batch seq embed").shape
        (2, 3)
    """
    names = axes.split()
    if ambient_axis_rules() is None or x.ndim > len(names):
        return x
    return constrain(x, " ".join(names[len(names) - x.ndim :]))


def table_for(tokens: Shaped[Array, "..."], table: Shaped[Array, "vocab embed"]) -> Shaped[Array, "vocab embed"]:
    """An embedding's table, constrained to be replicated along the mesh axes over which the tokens are sharded.

    Under FSDP this gathers the table. The compiler's partitioner alone would move the vectors of all tokens instead.
    Without ambient `AxisRules` it does nothing.

    Args:
        tokens: the tokens to look up, with axes "batch seq" or "seq".
        table: the table, with axes "vocab embed".

    Raises:
        ShardingError: as in `ft.constrain`, if the rules do not fit.

    Examples:
        >>> from functree.nn.activations import table_for
        >>> table_for(jnp.array([1, 2]), jnp.ones((7, 4))).shape
        (7, 4)
    """
    if ambient_axis_rules() is None or tokens.ndim > 2:
        return table
    names = ["batch", "seq"][2 - tokens.ndim :]
    # In one spec a mesh axis is used once, and the tokens are first: what they use is not left for the table.
    together = spec(" ".join([*names, "vocab", "embed"]))
    return constrain(table, PartitionSpec(*together[tokens.ndim :]))
