"""An activation and its axes ─► the same activation, constrained by the ambient rules if there are any."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from jax.sharding import PartitionSpec
from jaxtyping import Array, Shaped

from functree.layout.rules import AxisRules, unsharded
from functree.layout.specs import Entry, mesh_axes, without
from functree.nn.products import rows
from functree.placing.ambient import ambient_axis_rules, axis_rules, spec
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


@contextmanager
def whole_sequence() -> Iterator[None]:
    """Leave the sequence unsharded by the ambient rules: that of the tokens behind a cache may be as short as one.

    Examples:
        >>> from functree.nn.activations import whole_sequence
        >>> with ft.axis_rules(ft.AxisRules({"batch": "data", "seq": "model"})), whole_sequence():
        ...     ft.spec("batch seq")
        P('data', None)
    """
    rules = ambient_axis_rules()
    with nullcontext() if rules is None else axis_rules(unsharded(rules, "seq")):
        yield


def inputs(x: Shaped[Array, "... embed"], *products: str) -> Iterator[Shaped[Array, "... embed"]]:
    """A layer's input, sharded as each of its products needs it.

    If rules shard the sequence between the layers by mesh axes that shard the products themselves, it is gathered here,
    once for all products. The compiler's partitioner alone would move weights too.

    Args:
        x: the input, with axes "batch seq embed".
        products: the axes of each product but for those of the batch and the sequence.

    Raises:
        ShardingError: as in `ft.constrain`, if the rules do not fit.

    Examples:
        >>> from functree.nn.activations import inputs
        >>> query, key = inputs(jnp.ones((2, 3, 8)), "heads head_dim", "kv_heads head_dim")
        >>> query is key
        True
    """
    names = ["batch", "seq"][max(0, 3 - x.ndim) :]
    if ambient_axis_rules() is None or x.ndim > 3:
        yield from (x for _ in products)
        return
    *own, embed = spec(" ".join([*names, "embed"]))
    placed: dict[tuple[Entry, ...], Array] = {tuple(own): x}
    for product in products:
        # A mesh axis shards one dimension: what a product uses is not left for its sequence.
        together = spec(" ".join([*names, product]))
        outer = tuple(together)[: len(names)]
        if outer not in placed:
            summed = without(PartitionSpec(embed), [axis for entry in together for axis in mesh_axes(entry)])
            # Before too: else the compiler may gather what `x` is computed from, which may be wider.
            before = _constrained(x, [*names, "embed"], [*own, embed])
            placed[outer] = _constrained(before, [*names, "embed"], [*outer, *summed])
        yield placed[outer]


def looked_up(table: Shaped[Array, "vocab embed"], tokens: Shaped[Array, "..."]) -> Shaped[Array, "... embed"]:
    """The rows of an embedding's table for tokens, each device with its own rows and its own tokens.

    The table is replicated along the mesh axes over which the tokens are sharded. Under FSDP this gathers it: the
    compiler's partitioner alone would move the vectors of all tokens instead. And where the rules shard the sequence
    between the layers by the mesh axes of the vocabulary, each device looks up the tokens of the whole sequence in its
    rows: otherwise the table would be gathered for it. Without ambient `AxisRules` nothing is constrained.

    Args:
        table: the table, with axes "vocab embed".
        tokens: the tokens to look up, with axes "batch seq" or "seq".

    Raises:
        ShardingError: as in `ft.constrain`, if the rules do not fit.

    Examples:
        >>> from functree.nn.activations import looked_up
        >>> looked_up(jnp.ones((7, 4)), jnp.array([1, 2])).shape
        (2, 4)
    """
    if ambient_axis_rules() is None or tokens.ndim > 2:
        return rows(table, tokens)
    names = ["batch", "seq"][2 - tokens.ndim :]
    # In one spec a mesh axis is used once, by the first rule.
    *places, vocab, embed = spec(" ".join([*names, "vocab", "embed"]))
    table = _constrained(table, ["vocab", "embed"], [vocab, embed])
    return _constrained(rows(table, tokens), [*names, "embed"], [*places, embed])


def _constrained(x: Shaped[Array, "..."], names: Sequence[str], entries: Sequence[Entry]) -> Shaped[Array, "..."]:
    """`x`, constrained by these entries of a spec; if one does not fit, the error has the name of its dimension."""
    return constrain(x, " ".join(names), AxisRules(dict(zip(names, entries, strict=True))))
