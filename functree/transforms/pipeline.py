"""`pipeline` runs the layers of a sharded stack on micro-batches, as a pipeline of stages.

Each device along the mesh axes of the stack holds the layers of one stage. In each tick, a stage
applies its layers to one micro-batch, and passes the result to the next stage (Huang et al.,
"GPipe", 2019). The pipeline is one `jax.shard_map` over the mesh axes of the stages and the batch.
Gradients are therefore summed over the batch once, after the last tick. All other mesh axes are
left to the compiler.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from functree.devices.meshes import axes_text, devices_along, entry, mesh_axes, typed_spec, without
from functree.devices.varying import varying_over, without_varying
from functree.errors import FunctreeValueError, Problem, count
from functree.labels.leaves import array_problem
from functree.layout.rules import AxisRules
from functree.placing.constrain import ambient_rules, axis_rules, axis_shards, has_axis_rules
from functree.tree.arrays import AnyArray, Tree, is_array
from functree.tree.paths import Path

MeshAxes = tuple[str, ...]


def stages_of(axis: str, arrays: Sequence[AnyArray]) -> MeshAxes:
    """Find the mesh axes over which a stack is sharded, from ambient rules or Explicit types.

    Args:
        axis: the name of the stack's axis.
        arrays: the stack's arrays.

    Returns:
        The mesh axes, or an empty tuple if they span only one device.

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
    """Return the mesh axes to which the ambient rules map an axis."""
    rules = ambient_rules()
    if rules is None or not has_axis_rules():
        return ()
    # Rules that only cover activations need no entry for the stack's axis.
    with axis_rules(rules | AxisRules({axis: None})):
        return axis_shards(axis).mesh_axes


def _by_type(x: AnyArray) -> MeshAxes:
    """Return the mesh axes that shard the first dimension in an array's type."""
    spec = typed_spec(x)
    return () if spec is None else mesh_axes(spec[0])


def scannable(x: AnyArray) -> AnyArray:
    """Reshard an array whose type shards its first dimension, so that JAX can scan it.

    `jax.lax.scan` refuses such a type, even if the Explicit axis has only one device.

    Examples:
        >>> from functree.transforms.pipeline import scannable
        >>> scannable(jnp.ones(3))
        Array([1., 1., 1.], dtype=float32)
    """
    spec = typed_spec(x)
    if spec is None or spec[0] is None:
        return x
    return jax.sharding.reshard(x, PartitionSpec(None, *spec[1:]))


def arrays_with_path(tree: Tree) -> list[tuple[Path, AnyArray]]:
    """Return the arrays of a tree with their paths.

    Examples:
        >>> from functree.transforms.pipeline import arrays_with_path
        >>> arrays_with_path({"scale": jnp.ones(()), "power": 2})
        [(Path('scale'), Array(1., dtype=float32))]
    """
    # Abstract arrays are included, since a stack may be planned before its arrays exist.
    entries = jax.tree_util.tree_leaves_with_path(tree)
    return [(Path.of(keys), leaf) for keys, leaf in entries if is_array(leaf)]


def leading_size(
    headline: str, arrays: Sequence[tuple[Path, AnyArray]], remedy: str, size: int | None = None
) -> int:
    """Return the size of the leading dimension of all arrays.

    Args:
        headline: the first line of the error.
        arrays: the arrays, with their paths.
        remedy: the remedy for an array with a different leading dimension.
        size: the required size; None for the size of the first array with dimensions.

    Raises:
        FunctreeError: if an array has a different leading dimension.

    Examples:
        >>> from functree.transforms.pipeline import leading_size
        >>> leading_size("Sizes differ", [(ft.Path("x"), jnp.ones((3, 4)))], "")
        3
    """
    if size is None:
        size = next((int(array.shape[0]) for _, array in arrays if array.shape), 1)
    problems: list[Problem] = []
    for path, array in arrays:
        if array.shape[:1] != (size,):
            why = f"does not have a leading dimension of size {size}"
            problems.append(array_problem(path, array, why, remedy))
    if problems:
        raise FunctreeValueError(headline, problems)
    return size


def check_pipeline(
    axis: str, stages: MeshAxes, microbatches: int | None, collect: bool, state: Tree
) -> None:
    """Check that a stack that is sharded into stages can run as a pipeline.

    Raises:
        FunctreeError: if the stack is scanned without micro-batches.
        FunctreeError: if the layers return more than `x`.

    Examples:
        >>> from functree.transforms.pipeline import check_pipeline
        >>> check_pipeline("layers", ("pipe",), 4, collect=False, state=None)
    """
    if microbatches is None:
        raise FunctreeValueError(
            f'Stacked.scan: the stack\'s axis "{axis}" is sharded over {axes_text(stages)}, so '
            "each iteration would gather the whole stack: pass `microbatches=` to run the layers "
            f"as a pipeline of {devices_along(stages)} stages (in a model, "
            "`TransformerConfig(microbatches=)`), or leave the axis unsharded "
            f'("{axis}": None)'
        )
    if collect or state is not None:
        raise FunctreeValueError(
            "Stacked.scan: with `microbatches=`, layers can return only `x`, since state, a cache "
            "and losses would each cover only one micro-batch: leave the axis "
            f'"{axis}" unsharded, or remove `collect=True` and `state=`'
        )


class _Plan(NamedTuple):
    """The mesh axes and the number of micro-batches of a pipeline.

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
        """Split a device's batch into micro-batches.

        Neighboring examples go to different micro-batches, so a micro-batch is sharded like the
        batch.
        """
        return x.reshape(-1, self.microbatches, *x.shape[1:]).swapaxes(0, 1)

    def split_keys(self, keys: Array) -> Array:
        """Split each random key into one key for each micro-batch of this device."""
        shards = devices_along(self.batch)
        shard = jax.lax.axis_index(self.batch) if self.batch else 0
        split = partial(jax.random.split, num=self.microbatches * shards)
        all_keys = jax.vmap(split, out_axes=1)(keys.reshape(-1))
        return all_keys.reshape(self.microbatches, shards, *keys.shape)[:, shard]


def pipeline(
    layers: Callable[[Tree, Sequence[Array], Sequence[Tree]], Tree],
    x: Tree,
    arrays: Sequence[AnyArray],
    args: tuple[Tree, ...],
    *,
    stages: MeshAxes,
    microbatches: int,
    keys: Collection[int],
    divided: Collection[int] = (),
) -> Tree:
    """Run all layers on `x`, micro-batch by micro-batch and stage by stage.

    Args:
        layers: a function that runs some layers on `x`, given their arrays and shared arguments.
        x: a tree of arrays whose first dimension is the batch.
        arrays: the arrays of all layers, and of the arguments with one value for each layer.
        args: the arguments that all layers share.
        stages: the mesh axes over which the layers are sharded.
        microbatches: the number of micro-batches.
        keys: the indices of the `arrays` that are random keys, which are split for micro-batches.
        divided: the positions of the `args` whose arrays are divided like `x`.

    Raises:
        FunctreeError: if the number of stages does not divide the number of layers.
        FunctreeError: if the leading dimensions of the divided arrays differ in size.
        FunctreeError: if the batch cannot be divided into equal micro-batches.
        FunctreeError: if one mesh axis shards both the batch and the stack.
    """
    also_divided = arrays_with_path({"args": {i: args[i] for i in divided}})
    batch = leading_size(
        "Stacked.scan: arrays cannot be divided into micro-batches",
        [*arrays_with_path({"x": x}), *also_divided],
        "make the batch its first dimension, or remove the argument from `divided`",
    )
    plan = _Plan(stages, _batch_axes(x, stages), microbatches)
    _check_sizes(plan, jnp.shape(arrays[0])[0], batch)
    args_arrays, others = eqx.partition(list(args), eqx.is_array)

    def stage(x: Tree, arrays: list[Array], args_arrays: list[Tree]) -> Tree:
        # The weights are typed as varying along the pipeline's mesh axes. Their gradients are then
        # summed over the batch once, where they leave the shard_map, and not in each tick.
        arrays = [varying_over(array, plan.axes) for array in arrays]
        by_microbatch = _changed(plan.split_keys, arrays, keys)
        args_by_microbatch = _changed(plan.split, args_arrays, divided)

        def run(x: Tree, microbatch: Int[Array, ""]) -> Tree:
            def take(array: Array) -> Array:
                return array[microbatch]

            own_args = _changed(take, args_by_microbatch, divided)
            return layers(x, _changed(take, by_microbatch, keys), eqx.combine(own_args, others))

        return _run_stage(plan, x, run)

    rows, layer = PartitionSpec(entry(plan.batch)), PartitionSpec(entry(stages))
    specs = rows, layer, [rows if i in divided else PartitionSpec() for i in range(len(args))]
    mapped = jax.shard_map(stage, in_specs=specs, out_specs=rows, axis_names=_manual(plan))
    given = jax.tree.map(
        lambda spec, tree: jax.tree.map(partial(_placed, plan, spec), tree),
        specs,
        (x, list(arrays), args_arrays),
    )
    return without_varying(mapped)(*given)


def _changed(
    change: Callable[[Array], Array], trees: Sequence[Tree], which: Collection[int]
) -> list[Tree]:
    """Apply a function to all arrays of the trees at the indices `which`."""
    return [jax.tree.map(change, tree) if i in which else tree for i, tree in enumerate(trees)]


def _manual(plan: _Plan) -> set[str]:
    """Return the mesh axes of the pipeline's shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    # A mesh axis with one device shards nothing, and JAX can lower more programs without Auto axes.
    single = {name for name, size in mesh.shape.items() if size == 1}
    return {*plan.axes, *single} - set(mesh.manual_axes)


def _placed(plan: _Plan, wanted: PartitionSpec, x: Array) -> Array:
    """On Explicit axes, reshard an array to the type that the shard_map requires."""
    spec = typed_spec(x)
    if spec is None:
        return x
    inner = without(spec, {*plan.axes, *_manual(plan)})
    entries = (*wanted, *inner[len(wanted) :])[: x.ndim]
    return jax.sharding.reshard(x, PartitionSpec(*entries))


def _run_stage(plan: _Plan, x: Tree, run: Callable[[Tree, Int[Array, ""]], Tree]) -> Tree:
    """Run the layers of a device on one micro-batch in each tick."""
    number, stages = jax.lax.axis_index(plan.stages), devices_along(plan.stages)
    to_next = [(i, i + 1) for i in range(stages - 1)]
    # Activations are typed as varying from the start, since a scan's carry must keep its type.
    batches = jax.tree.map(lambda leaf: varying_over(plan.split(leaf), plan.axes), x)

    def tick(carry: tuple[Tree, Tree], i: Int[Array, ""]) -> tuple[tuple[Tree, Tree], None]:
        arriving, results = carry
        # Before its first micro-batch and after its last, a stage's result is not used. The stage
        # still computes with real values, since zeros might lead to NaN in results and gradients.
        microbatch = jnp.clip(i - number, 0, plan.microbatches - 1)
        inputs = jax.tree.map(
            lambda leaf, other: jnp.where(number == 0, leaf[microbatch], other),
            batches,
            arriving,
        )
        y = run(inputs, microbatch)
        # Only the results of the last stage are used. Its results from before its first micro-batch
        # are overwritten.
        results = jax.tree.map(
            lambda all, new: jax.lax.dynamic_update_index_in_dim(all, new, microbatch, 0),
            results,
            y,
        )
        passed = jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, plan.stages, to_next), y)
        return (passed, results), None

    first = jax.tree.map(lambda leaf: leaf[0], batches)
    start = first, jax.tree.map(jnp.zeros_like, batches)
    (_, results), _ = jax.lax.scan(tick, start, jnp.arange(plan.microbatches + stages - 1))

    def of_last(leaf: Array) -> Array:
        last = jax.lax.psum(jnp.where(number == stages - 1, leaf, 0), plan.stages)
        return last.swapaxes(0, 1).reshape(-1, *last.shape[2:])  # the inverse of `split`

    return jax.tree.map(of_last, results)


def _batch_axes(x: Tree, stages: MeshAxes) -> MeshAxes:
    """Return the mesh axes of the batch, from the ambient rules or from types.

    Raises:
        FunctreeError: if a mesh axis of the batch also shards the stack.
    """
    axes = _by_rules("batch") or _by_type(jax.tree.leaves(x)[0])
    both = [axis for axis in axes if axis in stages]
    if both:
        raise FunctreeValueError(
            f"Stacked.scan: the mesh axis `{both[0]}` shards both the batch and the stack: "
            "shard them over different mesh axes"
        )
    return axes


def _check_sizes(plan: _Plan, depth: int, batch: int) -> None:
    """Check that the layers can be divided into stages, and the batch into micro-batches.

    Raises:
        FunctreeError: if the layers cannot be divided evenly.
        FunctreeError: if the batch cannot be divided evenly.
    """
    stages, shards = devices_along(plan.stages), devices_along(plan.batch)
    if depth % stages:
        raise FunctreeValueError(
            f"Stacked.scan: {count(depth, 'layer')} cannot be divided into "
            f"{count(stages, 'stage')} over {axes_text(plan.stages)}: use a number of layers that "
            f"is a multiple of {stages}"
        )
    if batch % (plan.microbatches * shards):
        raise FunctreeValueError(
            f"Stacked.scan: microbatches={plan.microbatches}: a batch of {batch} cannot be divided "
            f"equally on each of {count(shards, 'device')}: use a batch whose size is a multiple "
            f"of {plan.microbatches * shards}"
        )
