"""An activation and its axes ─► the same, laid out by the ambient rules where there are any."""

from jax.sharding import PartitionSpec
from jaxtyping import Array, Shaped

from functree.placing.ambient import ambient_rules, spec
from functree.placing.constrain import constrain


def activation(x: Shaped[Array, "..."], axes: str) -> Shaped[Array, "..."]:
    """`x`, constrained by the names of its axes if a user has made rules ambient.

    Without ambient rules (`ft.jit(rules=...)`, `with ft.axis_rules(rules):`) it does nothing, so that a model
    runs on a laptop unchanged.

    Args:
        x: the activation. With fewer dimensions than names, the outermost names are left out ("batch" first).
            With more, nobody has said what the outer ones are, and its layout is the compiler's.
        axes: the names, outermost first.

    Raises:
        ShardingError: as `ft.constrain`, where the rules do not fit.

    Examples:
        >>> from functree.nn.activations import activation
        >>> activation(jnp.ones((2, 3)), "batch seq embed").shape
        (2, 3)
    """
    names = axes.split()
    if ambient_rules() is None or x.ndim > len(names):
        return x
    return constrain(x, " ".join(names[len(names) - x.ndim :]))


def table_for(tokens: Shaped[Array, "..."], table: Shaped[Array, "vocab embed"]) -> Shaped[Array, "vocab embed"]:
    """An embedding's table, whole along the mesh axes that split the tokens, by the ambient rules if there are any.

    So FSDP gathers the table, and not the vectors of all tokens, which the partitioner would choose to move.

    Args:
        tokens: what will be looked up; "batch seq", or "seq" alone.
        table: with axes "vocab embed".

    Raises:
        ShardingError: as `ft.constrain`, where the rules do not fit.

    Examples:
        >>> from functree.nn.activations import table_for
        >>> table_for(jnp.array([1, 2]), jnp.ones((7, 4))).shape
        (7, 4)
    """
    if ambient_rules() is None or tokens.ndim > 2:
        return table
    names = ["batch", "seq"][2 - tokens.ndim :]
    together = spec(" ".join([*names, "vocab", "embed"]))  # a mesh axis splits at most one of them
    return constrain(table, PartitionSpec(*together[tokens.ndim :]))
