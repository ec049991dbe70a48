"""An activation ─► its sharding: by the ambient rules, by its type, or on each device's shards.

The layers get the sharding of an activation in one of three ways, all of which are here:

- On Auto mesh axes the compiler chooses a sharding. `activation` and `inputs` constrain its choice,
  by the names of the axes and the ambient `AxisRules`.
- On Explicit mesh axes the sharding is part of the array's type, and JAX derives the type of a
  result from those of the operands. `gather_last` and `indices_along` are for operations where it
  cannot; for products with weights see `weights.py`.
- `on_shards` leaves no choice: a `jax.shard_map` in which each device computes with its own batches
  and heads.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Shaped

from functree.devices.meshes import devices_along
from functree.devices.specs import Entry, mesh_axes, named_axes, of_rank, without
from functree.devices.varying import unchecked, without_varying
from functree.layout.rules import AxisRules, with_rule
from functree.layout.state_sharding import with_tables
from functree.placing.ambient import ambient_rules, axis_rules, has_axis_rules, spec
from functree.placing.constrain import constrain

Entries = tuple[Entry, ...]
"""The entries of a spec, one for each dimension of an array."""

HEADS = "batch seq heads _"
KV_HEADS = "batch seq kv_heads _"

# By the ambient rules


def activation(x: Shaped[Array, "..."], axes: str) -> Shaped[Array, "..."]:
    """`x`, constrained by the names of its axes and the ambient rules.

    Without ambient `AxisRules` (`ft.jit(rules=...)`, `with ft.axis_rules(rules):`) it does nothing,
    so the same model also runs on one device, and under a layout that is for parameters only.

    Args:
        x: the activation. If it has fewer dimensions than there are names, the outermost names are
            left out, "batch" first. If it has more, the outer dimensions have no names, and the
            compiler chooses its sharding.
        axes: the names of the dimensions, outermost first.

    Raises:
        ShardingError: as in `ft.constrain`, if the rules do not fit.

    Examples:
        >>> from functree.nn.activations import activation
        >>> activation(jnp.ones((2, 3)), "batch seq embed").shape
        (2, 3)
    """
    names = axes.split()
    # There may be several batch dimensions. The rules know one "batch", and a spec has an entry for
    # each dimension: `None` for the others would gather them.
    if not has_axis_rules() or x.ndim > len(names):
        return x
    return constrain(x, " ".join(names[len(names) - x.ndim :]))


@contextmanager
def unsharded_sequence() -> Iterator[None]:
    """Leave "seq" unsharded by the ambient rules inside: for a model that is called with a cache.

    Examples:
        >>> from functree.nn.activations import unsharded_sequence
        >>> rules = ft.AxisRules({"batch": "data", "seq": "model"})
        >>> with ft.axis_rules(rules), unsharded_sequence():
        ...     ft.spec("batch seq")
        P('data', None)
    """
    rules = ambient_rules()
    if rules is None:
        yield
        return
    # A step may have one token, which no mesh axis divides: that would be a ShardingError.
    with axis_rules(with_tables(rules, lambda table: with_rule(table, "seq", None))):
        yield


def inputs(x: Shaped[Array, "... embed"], *products: str) -> tuple[Shaped[Array, "... embed"], ...]:
    """A layer's input, once for each product, sharded as that product needs it.

    If rules shard the sequence between the layers by mesh axes that shard the products themselves
    (sequence parallelism: Korthikanti et al., "Reducing activation recomputation", 2022), it is
    gathered here, once for all products. The compiler's partitioner alone would move weights too.

    Args:
        x: the input, with axes "batch seq embed".
        products: the axes of each product but for those of the batch and the sequence.

    Raises:
        ShardingError: as in `ft.constrain`, if the rules do not fit.

    Examples:
        >>> from functree.nn.activations import inputs
        >>> query, key = inputs(
        ...     jnp.ones((2, 3, 8)), "heads head_dim", "kv_heads head_dim"
        ... )
        >>> query is key
        True
    """
    if not has_axis_rules() or x.ndim > 3:
        return (x,) * len(products)
    names = ["batch", "seq"][max(0, 3 - x.ndim) :]
    *between, embed = spec(" ".join([*names, "embed"]))
    # By the entries of batch and sequence: products that need the same ones share one array, so
    # that there is one gather, and backward one sum over the gradients of all of them.
    gathered: dict[Entries, Array] = {tuple(between): x}
    found: list[Array] = []
    for product in products:
        # A mesh axis shards one dimension of an array. In the spec of the product's result, those
        # that shard "hidden" are not left for "seq": its first entries say how the input has to be.
        of_result = tuple(spec(" ".join([*names, product])))
        outer = of_result[: len(names)]
        if outer not in gathered:
            used = [axis for entry in of_result for axis in mesh_axes(entry)]
            summed = without(PartitionSpec(embed), used)
            # Constrained before the gather as well as after it: otherwise the partitioner may
            # gather what `x` is computed from, which may have a wider dtype.
            before = constrain_to(x, [*names, "embed"], [*between, embed])
            gathered[outer] = constrain_to(before, [*names, "embed"], [*outer, *summed])
        found.append(gathered[outer])
    return tuple(found)


def constrain_to(
    x: Shaped[Array, "..."], names: Sequence[str], entries: Sequence[Entry]
) -> Shaped[Array, "..."]:
    """`x`, constrained to the entries of a spec, with the names of its dimensions for the error.

    Raises:
        ShardingError: a mesh axis does not divide its dimension.
    """
    # The entries become rules, one for each name, since `constrain` checks rules before JAX sees
    # the spec, and its message says which dimension does not fit.
    return constrain(x, " ".join(names), AxisRules(dict(zip(names, entries, strict=True))))


# By the type of an array, which has a sharding along Explicit mesh axes


def explicit_mesh(*arrays: Array) -> AbstractMesh | None:
    """The first mesh with Explicit axes in the types of some arrays; None if there is none."""
    for array in arrays:
        mesh = jax.typeof(array).sharding.mesh
        if AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def entries_of(x: Array) -> Entries:
    """The spec in the type of `x`, which names Explicit axes only: an entry for each dimension."""
    return tuple(of_rank(jax.typeof(x).sharding.spec, x.ndim))


def out_sharding(mesh: AbstractMesh | None, entries: Entries) -> NamedSharding | None:
    """The value for `out_sharding=` of JAX, which has to be None without Explicit axes."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec(*entries))


def gather_last(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """`x`, with its last dimension unsharded if mesh axes are Explicit; on Auto axes as it is.

    On Explicit axes JAX sorts, accumulates and looks up only along a dimension whose type is not
    sharded. On Auto axes the partitioner gathers it where that is needed.

    Examples:
        >>> from functree.nn.activations import gather_last
        >>> gather_last(jnp.ones((2, 3))).shape
        (2, 3)
    """
    mesh = explicit_mesh(x)
    if mesh is None:
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*entries_of(x)[:-1], None)))


def indices_along(x: Shaped[Array, "*batch size"]) -> Int[Array, "*batch size"]:
    """0, 1, 2, … along the last dimension of `x`, broadcast to its shape and sharded like it.

    Examples:
        >>> from functree.nn.activations import indices_along
        >>> indices_along(jnp.ones((2, 3)))[0]
        Array([0, 1, 2], dtype=int32)
    """
    # The type of a `jnp.arange` is replicated. Compared with the targets of a loss it would give an
    # array as large as the logits, with the whole vocabulary on each device.
    sharding = out_sharding(explicit_mesh(x), entries_of(x))
    return jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1, out_sharding=sharding)


# On the shards of each device


def on_one_device() -> bool:
    """Whether what is traced runs on one device, or on the shards of one."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    return all(size == 1 or name in mesh.manual_axes for name, size in mesh.shape.items())


def is_partly_manual() -> bool:
    """Whether this is traced in a shard_map that leaves several devices to the compiler."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes) and not on_one_device()


def specs_of(arrays: Sequence[Array], names: Sequence[str]) -> list[PartitionSpec] | None:
    """How arrays are sharded, if that is known: by their types, or by the ambient rules.

    Args:
        arrays: the arrays; on Explicit axes they may have more dimensions in front.
        names: the names of the last dimensions of each, such as "batch _ heads _". A dimension that
            is called `_` is unsharded in the spec. One that is called `seq` is sharded as that of
            the first array, by those mesh axes that shard nothing else: the parts of a sequence
            that is sharded while heads are mixed (context parallelism).

    Returns:
        A spec for each array; None if neither types nor rules say how they are sharded. The rules
        know one batch dimension: they say nothing of several, or of one that `jax.vmap` hides.

    Raises:
        ShardingError: the rules do not fit the arrays.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None
    # Without the sequence, since all other dimensions come before it, in whatever order rules are.
    others = [_without_sequence(text) for text in names]
    first = names[0].split()
    if AxisType.Auto not in mesh.axis_types:
        of_names = zip(arrays, others, strict=True)
        own = [entries_of(x)[-len(text.split()) :] for x, text in of_names]
        sharded = entries_of(arrays[0])[-len(first) :]
    else:
        if not has_axis_rules():
            return None
        for x, text in zip(arrays, names, strict=True):
            if x.ndim != len(text.split()):
                return None
        own = [tuple(spec(text)) for text in others]
        for x, text, entries in zip(arrays, others, own, strict=True):
            _check_fits(x, text, entries)
        sharded = spec(names[0])
    specs = _agreeing(arrays, own, others)
    if "seq" not in first:
        return specs
    seq = _sequence(sharded[first.index("seq")], specs)
    return [_with_sequence(*pair, seq) for pair in zip(specs, names, strict=True)]


def _check_fits(x: Array, names: str, entries: Entries) -> None:
    """Raise ShardingError if mesh axes do not divide a dimension."""
    for size, entry in zip(x.shape, entries, strict=True):
        if size % devices_along(mesh_axes(entry)):
            constrain(x, names)  # whose error says which dimension, and what to do


def sequence_by_rules(names: str) -> Entry:
    """The mesh axes of "seq" in an array with these axes, by the ambient rules: those that shard
    nothing else in it.

    Examples:
        >>> from functree.nn.activations import sequence_by_rules
        >>> table = [
        ...     ("vocab", "model"),
        ...     ("seq", ("context", "model")),
        ...     ("seq", "context"),
        ... ]
        >>> rules = ft.AxisRules(table)
        >>> with ft.axis_rules(rules):
        ...     sequence_by_rules("seq vocab")
        'context'
    """
    return _sequence(spec(names)[names.split().index("seq")], [spec(_without_sequence(names))])


def _sequence(sharded: Entry, others: Sequence[PartitionSpec]) -> Entry:
    used = {axis for one in others for axis in named_axes(one)}
    return without(PartitionSpec(sharded), used)[0]


def _without_sequence(names: str) -> str:
    return " ".join("_" if name == "seq" else name for name in names.split())


def _with_sequence(one: PartitionSpec, names: str, seq: Entry) -> PartitionSpec:
    """A spec with an entry for the dimensions that are called "seq"."""
    entries, named = list(one), names.split()
    for i, name in enumerate(named, len(entries) - len(named)):
        if name == "seq":
            entries[i] = seq
    return PartitionSpec(*entries)


def _agreeing(
    arrays: Sequence[Array], own: Sequence[Entries], names: Sequence[str]
) -> list[PartitionSpec]:
    """The specs of arrays, with the same entry for all dimensions of one name.

    Args:
        arrays: the arrays.
        own: the entries of each by itself, for its last dimensions.
        names: the names of these.
    """
    # The first array in which a dimension of this name is sharded decides. Others, such as
    # segments or the lengths of prompts, may come replicated from the user, and are resharded. By
    # rules, heads may have a mesh axis of the batch in the queries, and not in the keys, whose
    # heads have a rule of their own: what shards another dimension of one array is left out.
    entry_of: dict[str, Entry] = {"_": None}
    for entries, text in zip(own, names, strict=True):
        for name, one in zip(text.split(), entries, strict=True):
            if name != "_" and entry_of.get(name) is None:
                beside = _beside(name, names)
                used = {axis for other in beside for axis in mesh_axes(entry_of.get(other))}
                entry_of[name] = without(PartitionSpec(one), used)[0]
    specs: list[PartitionSpec] = []
    for x, text in zip(arrays, names, strict=True):
        named = text.split()
        unnamed = entries_of(x)[: x.ndim - len(named)]
        specs.append(PartitionSpec(*unnamed, *(entry_of[name] for name in named)))
    return specs


def _beside(name: str, names: Sequence[str]) -> set[str]:
    """The names of the other dimensions of arrays that have one of this name."""
    found: set[str] = set()
    for text in names:
        if name in text.split():
            found |= set(text.split()) - {name}
    return found


def on_shards(
    fun: Callable[..., Array], arrays: Sequence[Array], names: Sequence[str], check_vma: bool = True
) -> Array:
    """`fun` of arrays, computed on each device with its shards; the result is sharded as the first.

    A kernel cannot be partitioned by the compiler, so it needs this. Other computations gain by it:
    nothing is left to the partitioner, and no device computes with heads that are not its own.

    Where it is not known how the arrays are sharded, `fun` is applied to the whole arrays.

    Args:
        fun: a function of the arrays, of which the first has heads. If each device has all key and
            value heads, `fun` gets those that its query heads use.
        arrays: the arrays.
        names: the names of their dimensions, as in `specs_of`.
        check_vma: as in `jax.shard_map`: kernels do not tell along which mesh axes their results
            vary.
    """
    if on_one_device():
        return fun(*arrays) if check_vma else without_varying(unchecked(fun))(*arrays)
    specs = specs_of(arrays, names)
    if specs is None:
        return fun(*arrays)
    wanted, mesh = specs[0], jax.sharding.get_abstract_mesh()
    # Along mesh axes of one device nothing differs: queries that vary along one, and keys that do
    # not, would have gradients of other types than JAX finds.
    single = {name for name, size in mesh.shape.items() if size == 1}
    specs = [without(one, single) for one in specs]
    heads = specs[0][-2]
    selects: list[bool] = []
    for i, (text, one) in enumerate(zip(names, specs, strict=True)):
        # For instance 8 query heads over a mesh axis of 4, and 2 key heads, which are replicated.
        # A slice of each would not fit together: so all key heads enter, and each device selects
        # those of its query heads.
        selects.append("kv_heads" in text and one[-2] != heads)
        if selects[i]:
            specs[i] = PartitionSpec(*one[:-2], None, None)
    total = arrays[0].shape[-2]

    def of_shards(*shards: Array) -> Array:
        own: list[Array] = []
        for x, is_whole in zip(shards, selects, strict=True):
            if is_whole:
                x = _heads_of_queries(x, shards[0].shape[-2], total, heads)
            own.append(x)
        return fun(*own)

    # Inside an outer `shard_map` some axes are Manual already, and may not be mapped again.
    free = set(mesh.axis_names) - set(mesh.manual_axes)
    mapped = jax.shard_map(
        of_shards, in_specs=tuple(specs), out_specs=specs[0], axis_names=free, check_vma=check_vma
    )
    return resharded(without_varying(mapped)(*map(resharded, arrays, specs)), wanted)


def resharded(x: Array, wanted: PartitionSpec) -> Array:
    """An array as `jax.shard_map` requires it: on Explicit axes its type has to have the spec.

    Examples:
        >>> from functree.nn.activations import resharded
        >>> resharded(jnp.ones(3), ft.P()).shape  # on no Explicit axes
        (3,)
    """
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in mesh.axis_types or PartitionSpec(*entries_of(x)) == wanted:
        return x
    return jax.sharding.reshard(x, wanted)


def _heads_of_queries(
    x: Shaped[Array, "*batch kv_heads head_dim"], own: int, total: int, axes: Entry
) -> Shaped[Array, "*batch own_kv_heads head_dim"]:
    """Of all key or value heads, those that the query heads on this device use.

    Args:
        x: keys or values with all heads.
        own: the number of query heads on this device.
        total: the number of all query heads.
        axes: the mesh axes over which these are sharded.
    """
    if own == total:
        return x
    group = total // x.shape[-2]
    first = jax.lax.axis_index(mesh_axes(axes)) * own
    if own % group and group % own:
        # A device has parts of several groups: of 12 query heads in groups of 3 each of 6 devices
        # has 2, the second one heads 2 and 3, of groups 0 and 1. So each query head gets a copy of
        # its key head, and the groups that `fun` sees are of one.
        return jnp.take(x, (first + jnp.arange(own)) // group, axis=-2)
    return jax.lax.dynamic_slice_in_dim(x, first // group, max(1, own // group), x.ndim - 2)
