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
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from functree.devices.meshes import devices_along
from functree.devices.specs import axes_text, entry, mesh_axes, typed_spec, without
from functree.devices.varying import varying_over, without_varying
from functree.errors import FunctreeValueError, Problem, count
from functree.labels.leaf import array_problem
from functree.layout.rules import AxisRules
from functree.placing.ambient import ambient_rules, axis_rules, has_axis_rules
from functree.placing.constrain import axis_shards
from functree.tree.arrays import AnyArray, Tree
from functree.tree.paths import Path

MeshAxes = tuple[str, ...]


def stages_of(axis: str, arrays: Sequence[AnyArray]) -> MeshAxes:
    """The mesh axes over which a stack is sharded: by the ambient rules, or by Explicit types.

    Args:
        axis: the name of the stack's axis.
        arrays: its arrays.

    Returns:
        The mesh axes; none if they have one device only.

    Examples:
        >>> from functree.transforms.pipeline import stages_of
        >>> mesh, rules = (
        ...     ft.make_mesh(pipe=4, data=2),
        ...     ft.AxisRules({"layers": "pipe"}),
        ... )
        >>> with jax.set_mesh(mesh), ft.axis_rules(rules):
        ...     stages_of("layers", [])
        ('pipe',)
    """
    for axes in (_by_rules(axis), *map(_by_type, arrays)):
        if devices_along(axes) > 1:
            return axes
    return ()


def _by_rules(axis: str) -> MeshAxes:
    """The mesh axes of a name by the ambient rules."""
    rules = ambient_rules()
    if rules is None or not has_axis_rules():
        return ()
    # Rules that are for activations alone need not have an entry for the stack.
    with axis_rules(rules | AxisRules({axis: None})):
        return axis_shards(axis).mesh_axes


def _by_type(x: AnyArray) -> MeshAxes:
    """The mesh axes that shard the first dimension of an array by its type."""
    found = typed_spec(x)
    return () if found is None else mesh_axes(found[0])


def scannable(x: AnyArray) -> AnyArray:
    """An array whose first dimension is sharded over no mesh axis by its type: JAX scans no other,
    and refuses one over an Explicit axis of one device too.

    Examples:
        >>> from functree.transforms.pipeline import scannable
        >>> scannable(jnp.ones(3))
        Array([1., 1., 1.], dtype=float32)
    """
    found = typed_spec(x)
    if found is None or found[0] is None:
        return x
    return jax.sharding.reshard(x, PartitionSpec(None, *found[1:]))


def check_pipeline(
    axis: str, stages: MeshAxes, microbatches: int | None, collect: bool, state: Tree
) -> None:
    """Raise FunctreeError for a stack in stages that is scanned without micro-batches, and for what
    layers of a pipeline cannot return.

    Examples:
        >>> from functree.transforms.pipeline import check_pipeline
        >>> check_pipeline("layers", ("pipe",), 4, collect=False, state=None)
    """
    if microbatches is None:
        raise FunctreeValueError(
            f'a stack whose axis "{axis}" is sharded over {axes_text(stages)} is scanned: '
            "each iteration would gather the whole stack. Give `microbatches=`, so that the layers "
            f"run as a pipeline of {devices_along(stages)} stages "
            "(`TransformerConfig(microbatches=)` of a model), or leave the stack unsharded "
            f'("{axis}": None)'
        )
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
        stages: the mesh axes of the stages.
        batch: the mesh axes of the batch.
        microbatches: the number of micro-batches.
    """

    stages: MeshAxes
    batch: MeshAxes
    microbatches: int

    @property
    def axes(self) -> MeshAxes:
        return (*self.stages, *self.batch)

    def split(self, x: Array) -> Array:
        """The batch of a device, in micro-batches. Neighbours are in different ones, so that a
        micro-batch is sharded as the batch is."""
        return x.reshape(-1, self.microbatches, *x.shape[1:]).swapaxes(0, 1)

    def split_keys(self, keys: Array) -> Array:
        """Random keys for each micro-batch of this device."""
        shards = devices_along(self.batch)
        shard = jax.lax.axis_index(self.batch) if self.batch else 0
        split = partial(jax.random.split, num=self.microbatches * shards)
        all_keys = jax.vmap(split, out_axes=1)(keys.reshape(-1))
        return all_keys.reshape(self.microbatches, shards, *keys.shape)[:, shard]


def pipeline(
    layers: Layers,
    x: Tree,
    arrays: Sequence[AnyArray],
    args: tuple[Tree, ...],
    *,
    stages: MeshAxes,
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
        stages: the mesh axes over which the layers are sharded.
        microbatches: the number of micro-batches.
        keys: which of `arrays` are random keys that are split by micro-batch.

    Raises:
        FunctreeError: layers or batch are not divided by the stages, or by the
            micro-batches; an array in `divided` does not have the size of the batch.
    """
    batch = _batch_size(x, microbatches)
    plan = _Plan(stages, _batch_axes(x, stages), microbatches)
    _check_sizes(plan, jnp.shape(arrays[0])[0], batch)
    of_args, others = eqx.partition(args, eqx.is_array)
    shared, structure = jax.tree.flatten(of_args)
    cut = _divided(of_args, divided, batch)

    def stage(x: Tree, arrays: list[Array], shared: list[Array]) -> Tree:
        # The gradient of a weight is summed over the batch where it leaves the shard_map, and not
        # in each tick, as its type says that it differs between the devices of the pipeline.
        arrays = [varying_over(one, plan.axes) for one in arrays]
        arrays = [plan.split_keys(one) if i in keys else one for i, one in enumerate(arrays)]
        shared = [plan.split(one) if i in cut else one for i, one in enumerate(shared)]

        def run(x: Tree, microbatch: Int[Array, ""]) -> Tree:
            own = jax.tree.unflatten(structure, _at(microbatch, shared, cut))
            return layers(x, _at(microbatch, arrays, keys), eqx.combine(own, others))

        return _run_stage(plan, x, run)

    rows, layer, whole = (PartitionSpec(entry(one)) for one in (plan.batch, stages, ()))
    specs = (
        jax.tree.map(lambda _: rows, x),
        [layer] * len(arrays),
        [rows if i in cut else whole for i in range(len(shared))],
    )
    mapped = jax.shard_map(stage, in_specs=specs, out_specs=rows, axis_names=_manual(plan))
    given = x, list(arrays), shared
    return without_varying(mapped)(*jax.tree.map(partial(_placed, plan), given, specs))


def _at(microbatch: Int[Array, ""], arrays: Sequence[Array], which: frozenset[int]) -> list[Array]:
    """Arrays, and of some of them the part for a micro-batch."""
    return [one[microbatch] if i in which else one for i, one in enumerate(arrays)]


def _divided(args: tuple[Tree, ...], divided: Sequence[int], batch: int) -> frozenset[int]:
    """Which of the arrays in `args` are divided like the batch."""
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
    return frozenset(i for i, is_divided in enumerate(found) if is_divided)


def _manual(plan: _Plan) -> set[str]:
    """The mesh axes that are mapped: those of the stages and of the batch."""
    mesh = jax.sharding.get_abstract_mesh()
    # An axis of one device shards nothing, and JAX lowers more if none is left to the compiler.
    single = {name for name, size in mesh.shape.items() if size == 1}
    return {*plan.axes, *single} - set(mesh.manual_axes)


def _placed(plan: _Plan, x: Array, wanted: PartitionSpec) -> Array:
    """An array as the shard_map requires it: on Explicit axes its type has to say so."""
    found = typed_spec(x)
    if found is None:
        return x
    inner = without(found, {*plan.axes, *_manual(plan)})
    entries = (*wanted, *inner[len(wanted) :])[: x.ndim]
    return jax.sharding.reshard(x, PartitionSpec(*entries))


def _run_stage(plan: _Plan, x: Tree, run: Callable[[Tree, Int[Array, ""]], Tree]) -> Tree:
    """What a device of the pipeline does: in each tick it runs its layers on one micro-batch."""
    number, stages = jax.lax.axis_index(plan.stages), devices_along(plan.stages)
    to_next = [(i, i + 1) for i in range(stages - 1)]
    # The type of what is passed on differs between devices from the start.
    batches = jax.tree.map(lambda leaf: varying_over(plan.split(leaf), plan.axes), x)

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
        y = run(own, own_number)
        # By the last stage. What others write there, and it before its first micro-batch, is
        # written over, or not used.
        results = jax.tree.map(
            lambda all, one: jax.lax.dynamic_update_index_in_dim(all, one, own_number, 0),
            results,
            y,
        )
        passed = jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, plan.stages, to_next), y)
        return (passed, results), None

    first = jax.tree.map(lambda leaf: leaf[0], batches)
    start = first, jax.tree.map(jnp.zeros_like, batches)
    (_, results), _ = jax.lax.scan(tick, start, jnp.arange(plan.microbatches + stages - 1))

    def of_last(leaf: Array) -> Array:
        own = jax.lax.psum(jnp.where(number == stages - 1, leaf, 0), plan.stages)
        return own.swapaxes(0, 1).reshape(-1, *own.shape[2:])  # the inverse of `split`

    return jax.tree.map(of_last, results)


def _batch_size(x: Tree, microbatches: int) -> int:
    """The size of the first dimension of all arrays. Raises FunctreeError if they differ."""
    sizes: set[tuple[int, ...]] = {leaf.shape[:1] for leaf in jax.tree.leaves(x)}
    if len(sizes) != 1 or () in sizes:
        raise FunctreeValueError(
            f"microbatches={microbatches}: the first dimension of all arrays of `x` is the batch, "
            f"and they have the sizes {sorted(sizes)}"
        )
    return sizes.pop()[0]


def _batch_axes(x: Tree, stages: MeshAxes) -> MeshAxes:
    """The mesh axes of the batch: by the ambient rules, or by types.

    Raises:
        FunctreeError: one of them shards the stack too.
    """
    axes = _by_rules("batch") or _by_type(jax.tree.leaves(x)[0])
    both = [axis for axis in axes if axis in stages]
    if both:
        raise FunctreeValueError(
            f"microbatches=: the mesh axis {both[0]} shards both the batch and the stack. A stage "
            "of a pipeline is a part of the devices, and its batch is sharded over others: give "
            "them two mesh axes"
        )
    return axes


def _check_sizes(plan: _Plan, depth: int, batch: int) -> None:
    """Raise FunctreeError for layers that stages do not divide, and a batch that the
    micro-batches do not."""
    stages, shards = devices_along(plan.stages), devices_along(plan.batch)
    problems: list[Problem] = []
    if depth % stages:
        why = f"{axes_text(plan.stages)} has {count(stages, 'stage')} for them"
        remedy = f"a number of layers that {stages} divides"
        problems.append(Problem(None, None, count(depth, "layer"), why, remedy))
    if batch % (plan.microbatches * shards):
        why = f"a batch of {batch}"
        if shards > 1:
            why += f", sharded over {shards} devices,"
        why += f" cannot be divided into {plan.microbatches} equal micro-batches"
        remedy = f"a divisor of {batch // shards}"
        problems.append(Problem(None, None, f"microbatches={plan.microbatches}", why, remedy))
    if problems:
        raise FunctreeValueError("a stack cannot be run as a pipeline", problems)
