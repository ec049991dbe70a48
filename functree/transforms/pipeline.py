"""The layers of a sharded stack, and the micro-batches of a batch ─► the result of the layers, by a
pipeline of stages.

Each device along the mesh axes of the stack has the layers of one stage. In each tick a stage
applies its layers to one micro-batch, and passes the result on to the next stage (Huang et
al., "GPipe", 2019). It is one `jax.shard_map` over the mesh axes of the stages and of the batch, so
that gradients are summed over the batch once, after the last tick; other mesh axes are left to the
compiler, inside a stage as everywhere.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Int

from functree.devices.meshes import devices_along
from functree.devices.specs import Entry, axes_text, entry, mesh_axes, of_rank, without
from functree.devices.varying import varying_axes, without_varying
from functree.errors import FunctreeValueError, Problem, count
from functree.labels.leaf import array_problem
from functree.layout.rules import AxisRules
from functree.placing.ambient import ambient_rules, axis_rules, has_axis_rules
from functree.placing.constrain import axis_shards
from functree.tree.arrays import AnyArray, Tree
from functree.tree.paths import Path

MeshAxes = tuple[str, ...]


class Stages(NamedTuple):
    """The stages of a pipeline.

    Attributes:
        axes: the mesh axes of the stack.
        parts: the number of stages.
    """

    axes: MeshAxes
    parts: int


def stages_of(axis: str, arrays: Sequence[AnyArray]) -> Stages:
    """Over which mesh axes a stack is sharded: by the ambient rules, or by Explicit types.

    Args:
        axis: the name of the stack's axis.
        arrays: its arrays.

    Examples:
        >>> from functree.transforms.pipeline import stages_of
        >>> mesh, rules = (
        ...     ft.make_mesh(pipe=4, data=2),
        ...     ft.AxisRules({"layers": "pipe"}),
        ... )
        >>> with jax.set_mesh(mesh), ft.axis_rules(rules):
        ...     stages_of("layers", [])
        Stages(axes=('pipe',), parts=4)
    """
    found = Stages(*_shards(axis))
    if found.parts > 1:
        return found
    for x in arrays:
        of_type = _entries(x)
        axes = mesh_axes(of_type[0]) if of_type else ()
        if devices_along(axes) > 1:
            return Stages(axes, devices_along(axes))
    return Stages((), 1)


def _shards(axis: str) -> tuple[MeshAxes, int]:
    rules = ambient_rules()
    if rules is None or not has_axis_rules():
        return (), 1
    # Rules that are for activations alone need not have an entry for the stack.
    with axis_rules(rules | AxisRules({axis: None})):
        return axis_shards(axis)


def _entries(x: AnyArray) -> tuple[Entry, ...]:
    """The entries of the spec in a type, which names Explicit axes only."""
    sharding = jax.typeof(x).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return ()
    return tuple(of_rank(sharding.spec, x.ndim))


def whole_stack(axis: str, stages: Stages, arrays: Sequence[AnyArray]) -> Sequence[AnyArray]:
    """The arrays of a stack as they are scanned.

    Raises:
        FunctreeError: the stack is in stages, and there are no micro-batches.

    Examples:
        >>> from functree.transforms.pipeline import Stages, whole_stack
        >>> whole_stack("layers", Stages((), 1), [jnp.ones(3)])
        [Array([1., 1., 1.], dtype=float32)]
    """
    if stages.parts > 1:
        raise FunctreeValueError(
            f'a stack whose axis "{axis}" is sharded over {axes_text(stages.axes)} is scanned: '
            "each iteration would gather the whole stack. Give `microbatches=`, so that the layers "
            f"run as a pipeline of {stages.parts} stages (`TransformerConfig(microbatches=)` of a "
            f'model), or leave the stack unsharded ("{axis}": None)'
        )
    return [_without_first(x) for x in arrays]


def _without_first(x: AnyArray) -> AnyArray:
    """An array whose first dimension is sharded over no mesh axis by its type: JAX scans no other,
    and refuses one over an Explicit axis of one device too."""
    found = _entries(x)
    if not found or found[0] is None:
        return x
    return jax.sharding.reshard(x, PartitionSpec(None, *found[1:]))


def check_pipeline(collect: bool, state: Tree) -> None:
    """Raise FunctreeError for what layers of a pipeline cannot return.

    Examples:
        >>> from functree.transforms.pipeline import check_pipeline
        >>> check_pipeline(collect=False, state=None)
    """
    problems: list[Problem] = []
    remedy = "leave the stack unsharded for it"
    if collect:
        why = (
            "what layers return besides `x`, such as new keys and values for a cache or the losses "
            "of experts, is of micro-batches"
        )
        problems.append(Problem(None, None, "collect=True", why, remedy))
    if state is not None:
        why = "each micro-batch would change the state for the next one"
        problems.append(Problem(None, None, "state=", why, remedy))
    if problems:
        raise FunctreeValueError("`microbatches=` runs layers that return `x` alone", problems)


Layers = Callable[[Tree, Sequence[Array], Sequence[Tree]], Tree]
"""Some layers of a stack: of `x`, the arrays of these layers, and what all layers share."""


class _Plan(NamedTuple):
    """What is known of a pipeline while it is traced.

    Attributes:
        stages: the stages.
        batch: the mesh axes of the batch.
        shards: the number of devices along these.
        microbatches: the number of micro-batches.
        layers: computes some layers.
        keys: of which arrays of the layers the random keys are split, by their indices.
    """

    stages: Stages
    batch: MeshAxes
    shards: int
    microbatches: int
    layers: Layers
    keys: frozenset[int]

    @property
    def axes(self) -> MeshAxes:
        return (*self.stages.axes, *self.batch)

    def varying(self, x: Array) -> Array:
        """An array whose type says that it differs between the devices of the pipeline.

        So the gradient of a weight is summed over the batch where it leaves the shard_map, and not
        in each tick.
        """
        more = tuple(axis for axis in self.axes if axis not in varying_axes(x))
        return jax.lax.pcast(x, more, to="varying") if more else x

    def split(self, x: Array) -> Array:
        """The batch of a device, in micro-batches. Neighbours are in different ones, so that a
        micro-batch is sharded as the batch is."""
        return x.reshape(-1, self.microbatches, *x.shape[1:]).swapaxes(0, 1)

    def joined(self, x: Array) -> Array:
        """The inverse of `split`."""
        return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])

    def keys_of(self, arrays: Sequence[Array], microbatch: Int[Array, ""]) -> list[Array]:
        """The arrays of the layers, with the random keys of a micro-batch and of a shard."""
        index = microbatch * self.shards
        if self.batch:
            index = index + jax.lax.axis_index(self.batch)

        def own(keys: Array) -> Array:
            flat = keys.reshape(-1)
            split = jax.vmap(
                lambda key: jax.random.split(key, self.microbatches * self.shards)[index]
            )
            return split(flat).reshape(keys.shape)

        return [own(x) if i in self.keys else x for i, x in enumerate(arrays)]


def pipeline(
    layers: Layers,
    x: Tree,
    arrays: Sequence[AnyArray],
    args: tuple[Tree, ...],
    *,
    stages: Stages,
    microbatches: int,
    keys: frozenset[int],
    divided: Sequence[int] = (),
) -> Tree:
    """What all layers make of `x`, computed micro-batch by micro-batch and stage by stage.

    Args:
        layers: computes some layers.
        x: arrays whose first dimension is the batch.
        arrays: the arrays of all layers, and of what is given for each.
        args: what layers share.
        divided: the positions of the `args` whose arrays are divided like `x`.
        stages: over which mesh axes the layers are sharded.
        microbatches: the number of micro-batches.
        keys: which of `arrays` are random keys that are split by micro-batch.

    Raises:
        FunctreeError: layers or batch are not divided by the stages, or by the
            micro-batches; an array in `divided` does not have the size of the batch.
    """
    sizes: set[tuple[int, ...]] = {leaf.shape[:1] for leaf in jax.tree.leaves(x)}
    if len(sizes) != 1 or () in sizes:
        raise FunctreeValueError(
            f"microbatches={microbatches}: the first dimension of all arrays of `x` is the batch, "
            f"and they have the sizes {sorted(sizes)}"
        )
    (batch,) = sizes.pop()
    axes, shards = _batch_axes(x, stages)
    _check_sizes(jnp.shape(arrays[0])[0], batch, stages, microbatches, shards)
    plan = _Plan(stages, axes, shards, microbatches, layers, keys)
    of_args, others = eqx.partition(args, eqx.is_array)
    shared, structure = jax.tree.flatten(of_args)
    is_split = _divided(of_args, divided, batch)

    def stage(x: Tree, arrays: list[Array], shared: list[Array]) -> Tree:
        split = [plan.split(one) if cut else one for one, cut in zip(shared, is_split, strict=True)]

        def args_of(microbatch: Int[Array, ""]) -> Sequence[Tree]:
            own = [
                one[microbatch] if cut else one for one, cut in zip(split, is_split, strict=True)
            ]
            return eqx.combine(jax.tree.unflatten(structure, own), others)

        return _run_stage(plan, x, [plan.varying(one) for one in arrays], args_of)

    rows, layer, whole = (PartitionSpec(entry(one)) for one in (axes, stages.axes, ()))
    of_shared = [rows if cut else whole for cut in is_split]
    given = x, list(arrays), shared
    specs = rows, layer, of_shared
    mapped = jax.shard_map(stage, in_specs=specs, out_specs=rows, axis_names=_manual(plan))
    places = (
        jax.tree.map(lambda _: rows, x),
        [layer] * len(arrays),
        of_shared,
    )
    return without_varying(mapped)(*jax.tree.map(partial(_placed, plan), given, places))


def _divided(args: tuple[Tree, ...], divided: Sequence[int], batch: int) -> list[bool]:
    """For each array in `args`, whether it is divided like the batch."""
    found: list[bool] = []
    problems: list[Problem] = []
    for i, arg in enumerate(args):
        for keys, leaf in jax.tree_util.tree_leaves_with_path(arg):
            found.append(i in divided)
            if i in divided and leaf.shape[:1] != (batch,):
                path = Path(("args", i, *Path.of(keys)))
                why = f"is in `divided`, and the batch has the size {batch}"
                problems.append(array_problem(path, leaf, why, "give it the batch as dimension 0"))
    if problems:
        raise FunctreeValueError("arrays cannot be divided into micro-batches", problems)
    return found


def _manual(plan: _Plan) -> set[str]:
    """The mesh axes that are mapped: those of the stages and of the batch."""
    mesh = jax.sharding.get_abstract_mesh()
    # An axis of one device shards nothing, and JAX lowers more if none is left to the compiler.
    single = {name for name, size in mesh.shape.items() if size == 1}
    return {*plan.axes, *single} - set(mesh.manual_axes)


def _placed(plan: _Plan, x: Array, wanted: PartitionSpec) -> Array:
    """An array as the shard_map requires it: on Explicit axes its type has to say so."""
    found = _entries(x)
    if not found:
        return x
    inner = without(PartitionSpec(*found), {*plan.axes, *_manual(plan)})
    entries = (*wanted, *inner[len(wanted) :])[: x.ndim]
    return jax.sharding.reshard(x, PartitionSpec(*entries))


def _run_stage(
    plan: _Plan,
    x: Tree,
    arrays: Sequence[Array],
    args_of: Callable[[Int[Array, ""]], Sequence[Tree]],
) -> Tree:
    """What a device of the pipeline does: in each tick it runs its layers on one micro-batch."""
    number = jax.lax.axis_index(plan.stages.axes)
    to_next = [(i, i + 1) for i in range(plan.stages.parts - 1)]
    # The type of what is passed on differs between devices from the start.
    batches = jax.tree.map(lambda leaf: plan.varying(plan.split(leaf)), x)

    def tick(carry: tuple[Tree, Tree], i: Int[Array, ""]) -> tuple[tuple[Tree, Tree], None]:
        arriving, results = carry
        # Before its first micro-batch, and after its last one, the result of a stage is not used.
        # It computes with real values, since zeros might give NaN, and so would the gradient.
        own_number = jnp.clip(i - number, 0, plan.microbatches - 1)
        own = jax.tree.map(
            lambda leaf, other: jnp.where(number == 0, leaf[own_number], other),
            batches,
            arriving,
        )
        y = plan.layers(own, plan.keys_of(arrays, own_number), args_of(own_number))
        # By the last stage. What others write there, and it before its first micro-batch, is
        # written over, or not used.
        results = jax.tree.map(
            lambda all, one: jax.lax.dynamic_update_index_in_dim(all, one, own_number, 0),
            results,
            y,
        )
        passed = jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, plan.stages.axes, to_next), y)
        return (passed, results), None

    first = jax.tree.map(lambda leaf: leaf[0], batches)
    start = first, jax.tree.map(jnp.zeros_like, batches)
    ticks = plan.microbatches + plan.stages.parts - 1
    (_, results), _ = jax.lax.scan(tick, start, jnp.arange(ticks))

    def of_last(leaf: Array) -> Array:
        is_last = number == plan.stages.parts - 1
        own = jax.lax.psum(jnp.where(is_last, leaf, 0), plan.stages.axes)
        return plan.joined(own)

    return jax.tree.map(of_last, results)


def _batch_axes(x: Tree, stages: Stages) -> tuple[MeshAxes, int]:
    """The mesh axes of the batch, and the number of its shards: by the ambient rules, or by types.

    Raises:
        FunctreeError: one of them shards the stack too.
    """
    axes, shards = _shards("batch")
    if not axes:
        found = _entries(jax.tree.leaves(x)[0])
        axes = mesh_axes(found[0]) if found else ()
        shards = devices_along(axes)
    both = [axis for axis in axes if axis in stages.axes]
    if both:
        raise FunctreeValueError(
            f"microbatches=: the mesh axis {both[0]} shards both the batch and the stack. A stage "
            "of a pipeline is a part of the devices, and its batch is sharded over others: give "
            "them two mesh axes"
        )
    return axes, shards


def _check_sizes(depth: int, batch: int, stages: Stages, microbatches: int, shards: int) -> None:
    """Raise FunctreeError for layers that stages do not divide, and a batch that the
    micro-batches do not."""
    problems: list[Problem] = []
    if depth % stages.parts:
        why = f"{axes_text(stages.axes)} has {count(stages.parts, 'stage')} for them"
        remedy = f"a number of layers that {stages.parts} divides"
        problems.append(Problem(None, None, count(depth, "layer"), why, remedy))
    if batch % (microbatches * shards):
        why = f"a batch of {batch}"
        if shards > 1:
            why += f", sharded over {shards} devices,"
        why += f" cannot be divided into {microbatches} equal micro-batches"
        remedy = f"a divisor of {batch // shards}"
        problems.append(Problem(None, None, f"microbatches={microbatches}", why, remedy))
    if problems:
        raise FunctreeValueError("a stack cannot be run as a pipeline", problems)
