"""The functions in this module shard the activations of layers.

activation ─► its sharding, from the ambient rules, from its type, or on each device's shards

There are three ways to shard an activation:

- On Auto mesh axes, the compiler chooses a sharding. `activation` and `inputs` constrain this
  choice, using the names of the axes and the ambient `AxisRules`.
- On Explicit mesh axes, the sharding is part of the array's type. JAX derives the type of an
  operation's result from the types of the operands. `gather_last` and `indices_along` handle
  operations for which JAX cannot derive this type. For products with weights, see `weights.py`.
- `on_shards` leaves no choice to the compiler: it runs a `jax.shard_map` in which each device
  computes with its own batches and heads.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Shaped

from functree.devices.meshes import (
    Entry,
    devices_along,
    entry,
    mesh_axes,
    named_axes,
    of_rank,
    without,
)
from functree.devices.varying import unchecked, without_varying
from functree.layout.rules import AxisRules, with_rule
from functree.layout.state_sharding import with_tables
from functree.placing.constrain import ambient_rules, axis_rules, constrain, has_axis_rules, spec

T = TypeVar("T")

Entries = tuple[Entry, ...]
"""The entries of a spec, one for each dimension of an array."""

HEADS = "batch seq heads _"
KV_HEADS = "batch seq kv_heads _"

# From the ambient rules


def activation(x: Shaped[Array, "..."], axes: str) -> Shaped[Array, "..."]:
    """Constrain `x` using the names of its axes and the ambient rules.

    Without ambient `AxisRules` (`ft.jit(rules=...)`, `with ft.axis_rules(rules):`), return `x`
    unchanged. The same model can then run on one device, or with a layout for parameters only.

    Args:
        x: the activation. If it has fewer dimensions than there are names, the outermost names are
            dropped, starting with "batch". If it has more, it is returned unchanged, and the
            compiler chooses the sharding.
        axes: the names of the dimensions, outermost first.

    Raises:
        ShardingError: if the rules do not fit `x`, as in `ft.constrain`.

    Examples:
        >>> from functree.nn.activations import activation
        >>> activation(jnp.ones((2, 3)), "batch seq embed").shape
        (2, 3)
    """
    names = axes.split()
    # There may be several batch dimensions. Rules name only one, "batch", but a spec has an entry
    # for each dimension: `None` for the other batch dimensions would gather them.
    if not has_axis_rules() or x.ndim > len(names):
        return x
    return constrain(x, " ".join(names[len(names) - x.ndim :]))


@contextmanager
def unsharded_sequence() -> Iterator[None]:
    """Return a context in which the ambient rules leave "seq" unsharded, for models with a cache.

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
    # A step may have a single token. Mesh axes do not divide a size of 1, so rules that shard "seq"
    # would raise a ShardingError.
    with axis_rules(with_tables(rules, lambda table: with_rule(table, "seq", None))):
        yield


def inputs(x: Shaped[Array, "... embed"], *products: str) -> tuple[Shaped[Array, "... embed"], ...]:
    """Return a layer's input once for each product, sharded as that product needs it.

    With sequence parallelism (Korthikanti et al., "Reducing activation recomputation", 2022), the
    mesh axes that shard the products' results also shard the sequence between layers. The input is
    gathered here, once for all products. Without this gather, the partitioner would move weights
    too.

    Args:
        x: the input, with axes "batch seq embed".
        products: the axes of each product's result, without batch and sequence.

    Raises:
        ShardingError: if the rules do not fit `x`, as in `ft.constrain`.

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
    # The keys are the entries of batch and sequence. Products with equal entries share one array:
    # there is one gather, and in the backward pass one sum over all their gradients.
    gathered: dict[Entries, Array] = {tuple(between): x}
    result: list[Array] = []
    for product in products:
        # A mesh axis shards only one dimension of an array. In the spec of the product's result,
        # mesh axes that shard "hidden" are not available to "seq". The first entries of this spec
        # are the entries that the input needs.
        of_result = tuple(spec(" ".join([*names, product])))
        outer = of_result[: len(names)]
        if outer not in gathered:
            used = [axis for entry in of_result for axis in mesh_axes(entry)]
            summed = without(PartitionSpec(embed), used)
            # `x` is constrained before the gather as well: otherwise the partitioner may gather the
            # operands from which `x` is computed, and these may have a wider dtype.
            before = constrain_to(x, [*names, "embed"], [*between, embed])
            gathered[outer] = constrain_to(before, [*names, "embed"], [*outer, *summed])
        result.append(gathered[outer])
    return tuple(result)


def constrain_to(
    x: Shaped[Array, "..."], names: Sequence[str], entries: Sequence[Entry]
) -> Shaped[Array, "..."]:
    """Constrain `x` to the entries of a spec; error messages name the dimensions.

    Raises:
        ShardingError: if a mesh axis does not divide its dimension.
    """
    # The entries become rules, one for each name. `constrain` checks rules before JAX sees the
    # spec, and its message names the dimension that does not fit.
    return constrain(x, " ".join(names), AxisRules(dict(zip(names, entries, strict=True))))


# From the type of an array, which has a sharding along Explicit mesh axes


def explicit_mesh(*arrays: Array) -> AbstractMesh | None:
    """Return the first mesh with Explicit axes in the types of the arrays, or None."""
    for array in arrays:
        mesh = jax.typeof(array).sharding.mesh
        if AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def entries_of(x: Array) -> Entries:
    """Return the entries of the spec in the type of `x`, one for each dimension.

    The spec in a type contains only Explicit axes.
    """
    return tuple(of_rank(jax.typeof(x).sharding.spec, x.ndim))


def out_sharding(mesh: AbstractMesh | None, entries: Entries) -> NamedSharding | None:
    """Return the value for JAX's `out_sharding=`, which must be None without Explicit axes."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec(*entries))


def gather_last(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Unshard the last dimension of `x` on Explicit mesh axes; return `x` unchanged on Auto axes.

    On Explicit axes, JAX sorts, accumulates and looks up only along a dimension that the array's
    type does not shard. On Auto axes, the partitioner gathers the dimension where necessary.

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
    """Return 0, 1, 2, … along the last dimension, in an array shaped and sharded like `x`.

    Examples:
        >>> from functree.nn.activations import indices_along
        >>> indices_along(jnp.ones((2, 3)))[0]
        Array([0, 1, 2], dtype=int32)
    """
    # `jnp.arange` returns a replicated array. Comparing it with the targets of a loss would create
    # an array as large as the logits, with the whole vocabulary on each device.
    sharding = out_sharding(explicit_mesh(x), entries_of(x))
    return jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1, out_sharding=sharding)


# On the shards of each device


def on_one_device() -> bool:
    """Return whether the traced code runs on one device, or on one device's shards."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    return all(size == 1 or name in mesh.manual_axes for name, size in mesh.shape.items())


def divided(of_dim: Entry) -> Entry:
    """Return an entry of a spec without mesh axes of one device."""
    # XLA's partitioner refuses a sum over such a mesh axis (JAX 0.12).
    return entry([axis for axis in mesh_axes(of_dim) if devices_along([axis]) > 1])


def is_partly_manual() -> bool:
    """Return whether the traced code runs in a shard_map that is Manual along only some mesh axes.

    Mesh axes of size 1 are ignored.
    """
    return bool(jax.sharding.get_abstract_mesh().manual_axes) and not on_one_device()


def specs_of(arrays: Sequence[Array], names: Sequence[str]) -> list[PartitionSpec] | None:
    """Return the arrays' specs, read from their types or from the ambient rules.

    Args:
        arrays: the arrays. On Explicit axes, they may have more leading dimensions than names.
        names: the names of each array's last dimensions, such as "batch _ heads _". The spec leaves
            a dimension named `_` unsharded. A dimension named `seq` is sharded like `seq` in the
            first array, over the mesh axes that shard no other dimension. Inside attention, these
            axes divide a sequence into parts (context parallelism).

    Returns:
        A spec for each array, or None if neither types nor rules determine the specs. Rules cover
        one batch dimension, so they do not apply if arrays have several batch dimensions, or if
        `jax.vmap` hides one.

    Raises:
        ShardingError: if the rules do not fit the arrays.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None
    if AxisType.Auto not in mesh.axis_types:
        of_names = zip(arrays, names, strict=True)
        own = [entries_of(x)[-len(text.split()) :] for x, text in of_names]
        of_first = own[0]
    else:
        if not has_axis_rules():
            return None
        for x, text in zip(arrays, names, strict=True):
            if x.ndim != len(text.split()):
                return None
        # The sequence is omitted here: all other dimensions take precedence, whatever the order of
        # the rules.
        others = list(map(_without_sequence, names))
        own = [tuple(spec(text)) for text in others]
        for x, text, entries in zip(arrays, others, own, strict=True):
            _check_fits(x, text, entries)
        of_first = tuple(spec(names[0]))
    seq = dict(zip(names[0].split(), of_first, strict=True)).get("seq")
    return _agreeing(arrays, own, names, seq)


def _check_fits(x: Array, names: str, entries: Entries) -> None:
    """Raise a ShardingError if mesh axes do not divide a dimension."""
    for size, of_dim in zip(x.shape, entries, strict=True):
        if size % devices_along(mesh_axes(of_dim)):
            constrain(x, names)  # raises an error that names the dimension and the remedy


def sequence_by_rules(names: str) -> Entry:
    """Return the mesh axes that shard only "seq" in an array, according to the ambient rules.

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
    seq = spec(names)[names.split().index("seq")]
    return without(PartitionSpec(seq), named_axes(spec(_without_sequence(names))))[0]


def _without_sequence(names: str) -> str:
    return " ".join("_" if name == "seq" else name for name in names.split())


def _agreeing(
    arrays: Sequence[Array], own: Sequence[Entries], names: Sequence[str], seq: Entry
) -> list[PartitionSpec]:
    """Return the arrays' specs, in which dimensions that share a name have equal entries.

    Args:
        arrays: the arrays.
        own: each array's own entries, for its last dimensions.
        names: the names of these dimensions.
        seq: the entry for "seq", from which the mesh axes of other dimensions are removed.
    """
    # The first array that shards a named dimension determines the entry for the name. The other
    # arrays are resharded: for instance, users may pass replicated segments or prompt lengths.
    # Query heads may use a mesh axis of the batch while key heads, which have their own rule, do
    # not. An entry therefore omits mesh axes that shard another dimension of one of the arrays.
    entry_of: dict[str, Entry] = {"_": None, "seq": None}
    for entries, text in zip(own, names, strict=True):
        for name, of_dim in zip(text.split(), entries, strict=True):
            if name not in ("_", "seq") and entry_of.get(name) is None:
                beside = _beside(name, names)
                used = {axis for other in beside for axis in mesh_axes(entry_of.get(other))}
                entry_of[name] = without(PartitionSpec(of_dim), used)[0]
    unnamed = [
        entries_of(x)[: x.ndim - len(text.split())] for x, text in zip(arrays, names, strict=True)
    ]
    used = {axis for of_dim in chain(entry_of.values(), *unnamed) for axis in mesh_axes(of_dim)}
    entry_of["seq"] = without(PartitionSpec(seq), used)[0]
    specs: list[PartitionSpec] = []
    for entries, text in zip(unnamed, names, strict=True):
        specs.append(PartitionSpec(*entries, *(entry_of[name] for name in text.split())))
    return specs


def _beside(name: str, names: Sequence[str]) -> set[str]:
    """Return the names of the other dimensions in arrays that have a dimension with this name."""
    neighbors: set[str] = set()
    for text in names:
        if name in text.split():
            neighbors |= set(text.split()) - {name}
    return neighbors


def on_shards(
    fun: Callable[..., Array], arrays: Sequence[Array], names: Sequence[str], check_vma: bool = True
) -> Array:
    """Apply `fun` to each device's shards; the result is sharded like the first array.

    The compiler cannot partition a kernel, so kernels need `on_shards`. Other computations benefit
    too: nothing is left to the partitioner, and no device computes with another device's heads. If
    the sharding of the arrays is unknown, `fun` is applied to the whole arrays.

    Args:
        fun: a function of the arrays, the first of which has heads. If each device has all key and
            value heads, `fun` receives only the heads that the device's query heads use.
        arrays: the arrays.
        names: the names of their dimensions, as in `specs_of`.
        check_vma: as in `jax.shard_map`. Pass False for kernels, which do not declare along which
            mesh axes their results vary.
    """
    if on_one_device():
        return fun(*arrays) if check_vma else without_varying(unchecked(fun))(*arrays)
    specs = specs_of(arrays, names)
    if specs is None:
        return fun(*arrays)
    wanted = specs[0]
    # Nothing differs along a mesh axis of size 1. If queries varied along such an axis and keys did
    # not, the gradients would have types that JAX does not expect.
    specs = [PartitionSpec(*map(divided, array_spec)) for array_spec in specs]
    heads = specs[0][-2]
    # Example: a mesh axis of size 4 shards 8 query heads, and 2 key heads are replicated. Slices of
    # queries and keys would not match, so each device gets all key heads, and selects the heads
    # that its query heads use.
    wholes = [i for i, text in enumerate(names) if "kv_heads" in text and specs[i][-2] != heads]
    for i in wholes:
        specs[i] = PartitionSpec(*specs[i][:-2], None, None)
    total = arrays[0].shape[-2]

    def of_shards(*shards: Array) -> Array:
        own = list(shards)
        for i in wholes:
            own[i] = _heads_of_queries(shards[i], shards[0].shape[-2], total, heads)
        return fun(*own)

    return resharded(over_mesh(of_shards, arrays, specs, specs[0], check_vma), wanted)


def over_mesh(
    fun: Callable[..., T],
    arrays: Sequence[Array],
    in_specs: Sequence[PartitionSpec],
    out_specs: Any,
    check_vma: bool = True,
) -> T:
    """Apply `fun` in a shard_map over all mesh axes that are not Manual yet."""
    mesh = jax.sharding.get_abstract_mesh()
    # Inside an outer `shard_map`, some axes are already Manual and cannot be mapped again.
    mapped = jax.shard_map(
        fun,
        in_specs=tuple(in_specs),
        out_specs=out_specs,
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        check_vma=check_vma,
    )
    return without_varying(mapped)(*map(resharded, arrays, in_specs))


def resharded(x: Array, wanted: PartitionSpec) -> Array:
    """Reshard `x` to the spec `wanted` on Explicit mesh axes; return `x` unchanged on Auto axes.

    On Explicit axes, `jax.shard_map` requires arguments whose types match its `in_specs`.

    Examples:
        >>> from functree.nn.activations import resharded
        >>> resharded(jnp.ones(3), ft.P()).shape  # without Explicit axes
        (3,)
    """
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in mesh.axis_types or PartitionSpec(*entries_of(x)) == wanted:
        return x
    return jax.sharding.reshard(x, wanted)


def _heads_of_queries(
    x: Shaped[Array, "*batch kv_heads head_dim"], own: int, total: int, axes: Entry
) -> Shaped[Array, "*batch own_kv_heads head_dim"]:
    """Select the key or value heads that the query heads on this device use.

    Args:
        x: keys or values with all heads.
        own: the number of query heads on this device.
        total: the number of query heads on all devices.
        axes: the mesh axes over which the query heads are sharded.
    """
    if own == total:
        return x
    group = total // x.shape[-2]
    first = jax.lax.axis_index(mesh_axes(axes)) * own
    if own % group and group % own:
        # A device may have parts of several groups. With 12 query heads in groups of 3 on 6
        # devices, the second device has heads 2 and 3, of groups 0 and 1. Each query head therefore
        # gets a copy of its key head, and `fun` receives groups of one head.
        return jnp.take(x, (first + jnp.arange(own)) // group, axis=-2)
    return jax.lax.dynamic_slice_in_dim(x, first // group, max(1, own // group), x.ndim - 2)
