"""`grad` differentiates a function with respect to the leaves of the model that a filter matches.

A function and a filter ─► a function that returns the gradient, laid out like the model.
`Parameters` selects the arrays to differentiate.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from typing import Annotated, Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from functree.argument_checks import FUNCTION, POSITIONS, Flag, checked, shown
from functree.calls.program import around
from functree.calls.signature import inspected, wrapper_updates
from functree.devices.constraint import lies_as, with_constraint
from functree.devices.meshes import compiling, current_mesh, entry, local_view, mesh_axes, without
from functree.devices.placement import check_deleted, explicit_mesh, first_mesh, is_sharded_as
from functree.devices.varying import varying_axes
from functree.errors import (
    FunctreeError,
    FunctreeTypeError,
    FunctreeValueError,
    Problem,
    RuleError,
    ShardingError,
    count,
)
from functree.labels.filters import Filter, FilterLike, as_filter, check_wrt, is_trainable
from functree.labels.leaves import Leaf, Leaves, read
from functree.layout.decide import decide_parts
from functree.layout.decision import Decision
from functree.layout.fsdp import fsdp_axes
from functree.layout.layout import Layout, LayoutTree, Part, as_partial, own_meshes, read_for
from functree.placing.constrain import ambient_rules, axes_of_name, find_mesh, with_decision
from functree.tree.arrays import dtype_text, is_array

BACKWARD = "transpose(jvp())"
"""The scope that JAX gives to gradients. The ledger recognizes the backward pass by this scope."""


class Parameters(NamedTuple):
    """An argument of which some arrays are differentiated.

    Attributes:
        number: the argument's position.
        leaves: the argument's arrays.
        chosen: the indices of the differentiated arrays.
        parts: the layouts of the argument's parts, from `layout=` or the ambient rules. Without
            either, the sequence is empty.
        given: whether the layouts were passed as `layout=`.
    """

    number: int
    leaves: Leaves
    chosen: Sequence[int]
    parts: Sequence[Part]
    given: bool

    @staticmethod
    def of(tree: Any, number: int, wrt: Filter, layout: LayoutTree) -> "Parameters":
        """Select the arrays of an argument that a filter matches.

        Raises:
            FunctreeError: if the filter matches no array.
            FunctreeError: if a matched array cannot be differentiated.
        """
        layouts = layout if layout is not None else ambient_rules()
        leaves, parts = (read(tree), []) if layouts is None else read_for(tree, layouts)
        if layout is None:
            # Ambient rules serve other arguments too, so their filters may match nothing here.
            parts = as_partial(parts)
        chosen = [i for i, leaf in enumerate(leaves.leaves) if wrt(leaf)]
        argument = Parameters(number, leaves, chosen, parts, layout is not None)
        if not argument.matched:
            raise _nothing(argument, wrt)
        _check_differentiable(argument.matched)
        return argument

    @property
    def matched(self) -> list[Leaf]:
        """The differentiated leaves."""
        return [self.leaves.leaves[i] for i in self.chosen]

    @property
    def arrays(self) -> list[Any]:
        """The arrays of the differentiated leaves."""
        return [leaf.value for leaf in self.matched]

    def with_arrays(self, arrays: Iterable[Any]) -> Any:
        """Return the argument with new arrays for the differentiated leaves."""
        values = list(self.leaves.values)
        for i, array in zip(self.chosen, arrays, strict=True):
            values[i] = array
        return self.leaves.skeleton.fill(values)

    def gradient(self, arrays: Sequence[Any]) -> Any:
        """Return the gradient as a tree like the argument, with None for undifferentiated leaves.

        The gradient is laid out with `layout=`, if a layout was passed. Otherwise, under ambient
        rules, the gradient is sharded like the parameters. Without a layout and rules, JAX's
        gradient is returned unchanged.
        """
        # If the types have shardings, JAX has already laid out the gradient.
        if not self.parts or (not self.given and all(map(_typed, self.arrays))):
            return self._tree(arrays)
        # A constant gradient has no mesh, so the parameters' mesh is a candidate too.
        mesh = find_mesh([*own_meshes(self.parts), first_mesh(self.arrays)], arrays)
        if mesh is None:
            return self._tree(arrays)
        # A constraint needs the devices of the arrays, which an eager transform hides.
        if isinstance(mesh, AbstractMesh) and current_mesh() is None and not compiling():
            return self._tree(list(map(laid_out_as, self.arrays, arrays)))
        layouts = [part.layout for part in self.parts]
        if (rules := ambient_rules()) is not None:
            layouts = [rules, *layouts]
        laid_out: list[Any] = []
        for gradient, leaf, decision in zip(
            arrays, self.matched, self._decisions(mesh), strict=True
        ):
            parameter, first = leaf.value, None
            if decision is not None and decision.specified:
                first = _summed_first(leaf, decision.spec, layouts, mesh)
            if first is not None:
                gradient = with_constraint(_tied(gradient, parameter), mesh, first)
                # Without the barrier, `first` would become the final sharding too.
                gradient = jax.lax.optimization_barrier(gradient)
            if self.given and decision is not None:
                gradient = with_decision(_tied(gradient, parameter), decision, mesh)
            else:
                # The ambient layout does not decide the gradient's sharding. Its specs and sizes
                # are meant for the arguments of a program, and under `vmap`, a parameter has fewer
                # dimensions.
                gradient = laid_out_as(parameter, gradient)
            laid_out.append(gradient)
        return self._tree(laid_out)

    def _decisions(self, mesh: Mesh | AbstractMesh) -> list[Decision | None]:
        """Return each parameter's decision, or None where ambient layouts do not fit.

        The whole argument is laid out, not only its differentiated arrays. Otherwise, a filter for
        the other arrays would match nothing, which is an error. Problems of arrays without a
        gradient are dropped.
        """
        meshes = own_meshes(self.parts)
        view = local_view(mesh, meshes)
        decided = decide_parts(self.leaves, self.parts, view)
        paths = {leaf.path for leaf in self.matched}
        problems = [
            problem for problem in decided.problems if problem.path in paths or problem.path is None
        ]
        if problems and self.given:
            gradient = f"the gradient of argument {self.number} on mesh {view}"
            raise ShardingError(f"grad: the layout does not fit {gradient}", problems)
        by_path: dict[Any, Decision] = dict(zip(self.leaves.paths, decided.decisions, strict=True))
        for problem in problems:
            by_path.pop(problem.path, None)
        return [by_path.get(leaf.path) for leaf in self.matched]

    def _tree(self, gradients: Sequence[Any]) -> Any:
        """Build a tree of gradients like the argument, with None for undifferentiated leaves."""
        values: list[Any] = [None] * len(self.leaves.leaves)
        for i, gradient in zip(self.chosen, gradients, strict=True):
            values[i] = gradient
        return self.leaves.skeleton.spread(values)


def _nothing(argument: Parameters, wrt: Filter) -> FunctreeError:
    """Build the error for a filter that matches no leaf."""
    remedy = "change `wrt=` so that it matches one of these arrays"
    problems = [leaf.problem("does not match", remedy) for leaf in argument.leaves.leaves]
    headline = f"grad: wrt={wrt!r} matches no array of argument {argument.number}"
    if not problems:
        headline += ", which has no arrays. Python numbers are static: pass `jnp.asarray(...)`"
    return FunctreeValueError(headline, problems)


def _check_differentiable(leaves: Sequence[Leaf]) -> None:
    problems: list[Problem] = []
    for leaf in leaves:
        if not jnp.issubdtype(leaf.value.dtype, jnp.inexact):
            why = f"is {dtype_text(leaf.value.dtype)}, but only inexact arrays have gradients"
            remedy = "narrow the filter (`wrt=... & ft.is_trainable`), or use a float dtype"
            problems.append(leaf.problem(why, remedy))
    if problems:
        raise FunctreeTypeError(
            f"grad: {count(len(problems), 'leaf')} cannot be differentiated", problems
        )


def _typed(array: Any) -> bool:
    """Return whether an array's type contains its full sharding, on a mesh without Auto axes."""
    mesh = jax.typeof(array).sharding.mesh
    return not mesh.empty and AxisType.Auto not in mesh.axis_types


def laid_out_as(parameter: Any, gradient: Any) -> Any:
    """Shard a gradient like its parameter.

    On Auto axes, the type of a traced parameter has no sharding. The compiler derives the sharding
    from the program's arguments, even under `vmap` and in a scan.
    """
    if _typed(parameter):
        return gradient
    if isinstance(gradient, Tracer) or isinstance(parameter, Tracer):
        if jax.typeof(parameter).sharding.mesh.empty and not compiling():
            return gradient
        with jax.named_scope(BACKWARD):
            return lies_as(gradient, parameter)
    placed = isinstance(parameter, jax.Array) and first_mesh([parameter]) is not None
    if placed and not is_sharded_as(gradient, parameter.sharding):
        return jax.device_put(gradient, parameter.sharding)
    return gradient


def _tied(gradient: jax.Array, parameter: Any) -> jax.Array:
    """Return the gradient, made to depend on its parameter.

    The gradient of a linear function does not depend on the parameter. If no other value depends on
    the parameter, JAX drops the parameter and the devices of its mesh. A constraint on the mesh
    then has no effect. The gradient therefore passes through a `select`, which XLA removes.
    """
    if (
        not isinstance(parameter, Tracer)
        or _typed(parameter)
        or jax.typeof(parameter).sharding.mesh.empty
    ):
        return gradient
    return jax.lax.select(False, parameter, gradient)


# The first constraint of a gradient
#
# A gradient is a product that is summed over the mesh axes of the batch. On Auto axes, XLA's
# partitioner may take the wrong parts of the operands, without an error (jax 0.10.2 and 0.12). This
# happens if the gradient's spec scatters the sum over the same mesh axes, and two mesh axes shard a
# dimension of the gradient or of a factor.
#
# The result is right if the sum is constrained first and scattered afterwards. This moves no more
# bytes if two mesh axes shard the gradient itself, since the partitioner sums before it slices in
# any case. If two mesh axes shard only a factor, more bytes move, since the unsharded gradient is
# summed.


# A gradient is summed over the dimensions of an activation with these names.
_SUMMED = ("batch", "seq")


def _summed_first(
    leaf: Leaf, wanted: PartitionSpec, layouts: Sequence[Layout], mesh: Mesh | AbstractMesh
) -> PartitionSpec | None:
    """Return the spec of a gradient's first constraint, or None if none is needed.

    Args:
        leaf: the parameter.
        wanted: the final spec of its gradient.
        layouts: the ambient rules, and the layouts of the parameters.
        mesh: the mesh of the gradients.
    """

    def axes_of(name: str) -> tuple[str, ...]:
        """Return the mesh axes of an activation's dimension with this name."""
        known = (axes_of_name(name, layout, mesh) for layout in layouts)
        return next((axes for axes in known if axes), ())

    entries = [axes for axes in map(mesh_axes, wanted.partitions) if axes]
    if AxisType.Explicit in mesh.axis_types or not entries:
        return None
    batch = set[str]().union(*map(fsdp_axes, layouts), *map(axes_of, _SUMMED))
    if not batch:
        # No layout determines over which mesh axes the gradient is summed.
        several = len(entries) > 1 and any(len(axes) > 1 for axes in entries)
        # Only the outermost mesh axis of each dimension is kept.
        first = [entry(mesh_axes(axes)[:1]) for axes in wanted.partitions]
        return PartitionSpec(*first) if several else None
    summed = without(wanted, batch)
    split = [*map(mesh_axes, summed.partitions), *map(axes_of, filter(None, leaf.axes))]
    if summed == wanted or all(len(axes) < 2 for axes in split):
        return None
    return summed


# Gradients of a function

_P = ParamSpec("_P")
_R = TypeVar("_R")


@checked("grad: invalid arguments")
def value_and_grad(
    fn: Annotated[Callable[_P, _R], FUNCTION],
    wrt: FilterLike = is_trainable,
    argnums: Annotated[int | Sequence[int], POSITIONS] = 0,
    has_aux: Flag = False,
    layout: LayoutTree = None,
) -> Callable[_P, tuple[_R, Any]]:
    """Build a function that returns the value of `fn` and its gradient, laid out like the model.

    The gradient is taken with respect to the leaves that a filter matches.

    On Auto axes, the type of a traced parameter has no sharding, and an unconstrained gradient
    silently loses the mesh axes of FSDP. Gradients are therefore constrained to `layout` if it is
    given. Otherwise, under ambient rules, they are sharded like their parameters. On Explicit
    axes, the types contain shardings, so ambient rules are not needed. Without a layout or rules,
    or without a mesh, JAX's gradients are returned unchanged.

    Inside `ft.shard_map`, JAX sums the gradient of a shared parameter over all shards. If the loss
    on each of `n` shards is the mean over its examples, the sum is `n` times the gradient of the
    overall mean. A loss that differs between shards therefore raises an error if a parameter is
    shared. Return `jax.lax.pmean(loss, "data")`, or `psum` if the loss is a sum. The gradients then
    need no reduction. The check cannot detect a parameter that was gathered with `all_gather`: its
    gradient is still the gradient of the summed losses. `check_vma=False` always raises an error,
    since each shard then computes only its own part of the gradient.

    Args:
        fn: a function that returns a scalar, or with `has_aux` a pair of a scalar and any other
            value. Its arguments may have any type.
        wrt: a filter. The argument's leaves that match this filter are differentiated. All other
            leaves are constants.
        argnums: the position of the differentiated argument, or several positions. The argument
            may be passed by keyword.
        has_aux: whether `fn` returns `(value, aux)`.
        layout: the layout of the argument, or a prefix tree of layouts. With several `argnums`,
            pass one layout for all arguments, or a tuple with one layout for each argument.

    Returns:
        A function with `fn`'s parameters that returns `(fn's result, gradient)`. The gradient has
            the structure of the argument, with None for each leaf that was not differentiated. With
            several `argnums`, the result contains a tuple with one gradient for each argument.

    Raises:
        RuleError: if `wrt` is not a filter.
        RuleError: if `layout` is a tuple without one layout for each of `argnums`.
        RuleError: (when called) if a pattern in `wrt` matches no leaf.
        FunctreeError: if `fn` is not a function.
        FunctreeError: if `fn` is written in C and has no signature.
        FunctreeError: (when called) if an array is deleted.
        FunctreeError: (when called) with `has_aux`, if `fn` does not return a pair.
        FunctreeError: (when called) if the filter matches no leaf.
        FunctreeError: (when called) if the filter matches a leaf that is not inexact.
        FunctreeError: (when called) if the call has no argument at a position in `argnums`.
        FunctreeError: (when called) inside shard_map, if the loss differs between shards that share
            a parameter.
        FunctreeError: (when called) if the call is inside a shard_map with `check_vma=False`.
        ShardingError: (when called) if the layout does not fit the gradients.

    Examples:
        >>> @ft.value_and_grad
        ... def loss(model, x):
        ...     return jnp.sum(model["scale"] * x ** model["power"])
        >>> value, gradient = loss(
        ...     {"scale": jnp.float32(3), "power": 2}, jnp.arange(3.0)
        ... )
        >>> value, gradient
        (Array(15., dtype=float32), {'power': None, 'scale': Array(5.,
        dtype=float32)})
        >>> bias = ft.value_and_grad(lambda layer, x: layer(x).sum(), wrt="bias")
        >>> bias(eqx.nn.Linear(2, 2, key=jax.random.key(0)), jnp.ones(2))[
        ...     1
        ... ].weight is None
        True
    """
    chosen = as_filter(wrt)
    several = isinstance(argnums, Sequence)
    numbers = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)
    layouts = _one_each(layout, argnums)

    @partial(_like, fn)
    def value_and_gradient(*args: Any, **kwargs: Any) -> Any:
        given, by_name, places = _positional(fn, args, kwargs, numbers)
        by_position = dict(zip(inspected(fn).parameters, given, strict=False))
        check_deleted("grad", {**by_position, **by_name})
        each = zip(places, layouts, strict=True)
        parameters = [Parameters.of(given[i], i, chosen, layout) for i, layout in each]
        leaves = [leaf for argument in parameters for leaf in argument.leaves.leaves]
        check_wrt(wrt, leaves, f"argument {', '.join(map(str, places))}")
        result, gradients = _differentiate(fn, given, by_name, parameters, has_aux)
        return result, gradients if several else gradients[0]

    record = KnownGradient(numbers, layouts, has_aux, True, several)
    setattr(value_and_gradient, _ATTRIBUTE, record)
    return value_and_gradient


def grad(
    fn: Callable[_P, Any],
    wrt: FilterLike = is_trainable,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    layout: LayoutTree = None,
) -> Callable[_P, Any]:
    """Build a function that returns the gradient of `fn`, laid out like the model.

    The gradient is taken with respect to the leaves that a filter matches. See `ft.value_and_grad`
    for how gradients are sharded, and for the differences inside `ft.shard_map`.

    Args:
        fn: a function that returns a scalar, as in `ft.value_and_grad`.
        wrt: a filter. The argument's leaves that match this filter are differentiated.
        argnums: the position of the differentiated argument, or several positions.
        has_aux: whether `fn` returns `(value, aux)`. The result is then `(gradient, aux)`.
        layout: the layout of the argument. Without it, gradients are sharded like their parameters
            under ambient rules.

    Returns:
        A function with `fn`'s parameters that returns the gradient. The gradient has the structure
        of the argument, with None for each leaf that was not differentiated.

    Raises:
        RuleError: if `wrt` is not a filter.
        RuleError: if `layout` is a tuple without one layout for each of `argnums`.
        RuleError: (when called) if a pattern in `wrt` matches no leaf.
        FunctreeError: if `ft.value_and_grad` would raise this error.
        ShardingError: (when called) if the layout does not fit the gradients.

    Examples:
        >>> ft.grad(lambda model: model["w"] ** 2)(
        ...     {"w": jnp.float32(3), "name": "square"}
        ... )
        {'name': None, 'w': Array(6., dtype=float32)}
        >>> mesh, rules = ft.make_mesh(data=8), ft.AxisRules({"embed": "data"})
        >>> class Scale(eqx.Module):
        ...     scale: Float[Array, "embed"]
        >>> model = ft.shard(Scale(jnp.ones(8)), rules, mesh)
        >>> with ft.axis_rules(rules):
        ...     jax.jit(ft.grad(lambda model: (model.scale**2).sum()))(
        ...         model
        ...     ).scale.sharding.spec
        P('data',)
    """
    value_and_gradient = value_and_grad(fn, wrt, argnums, has_aux, layout)

    @partial(_like, fn)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        result, gradients = value_and_gradient(*args, **kwargs)
        return (gradients, result[1]) if has_aux else gradients

    record: Any = KnownGradient.of(value_and_gradient)
    setattr(gradient, _ATTRIBUTE, record._replace(with_value=False))
    return gradient


# The description is stored as an attribute, since `functools.wraps` copies attributes to wrappers
# such as `ft.jit`.
_ATTRIBUTE = "__functree_gradient__"


class KnownGradient(NamedTuple):
    """Description of what a gradient function returns.

    Attributes:
        argnums: the positions of the differentiated arguments.
        layouts: the layout of each differentiated argument, or None if it has no layout.
        has_aux: whether the differentiated function returns `(value, aux)`.
        with_value: whether the value is returned with the gradient.
        several: whether the gradient is a tuple with one entry for each argument.
    """

    argnums: Sequence[int]
    layouts: Sequence[LayoutTree]
    has_aux: bool
    with_value: bool
    several: bool = False

    @staticmethod
    def of(fn: object) -> "KnownGradient | None":
        """Return the description of a gradient function of functree, or of a wrapper around one."""
        return getattr(fn, _ATTRIBUTE, None)

    @property
    def aux_place(self) -> tuple[int, ...]:
        """The position of the aux in the result, as indices into nested tuples."""
        return (0, 1) if self.with_value else (1,)

    def place_of(self, index: int) -> tuple[int, ...]:
        """Return the position of a differentiated argument's gradient, like `aux_place`."""
        place: tuple[int, ...] = ()
        if self.with_value:
            place = (1,)
        elif self.has_aux:
            place = (0,)
        return (*place, index) if self.several else place


def _like(fn: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Update a wrapper like `functools.wraps(fn)`, without `fn`'s return annotation.

    The annotation is wrong for the wrapper, whose result differs from `fn`'s.
    """
    wrapped: Any = wraps(fn, updated=wrapper_updates(fn))(wrapper)
    wrapped.__annotations__ = {
        k: v for k, v in getattr(fn, "__annotations__", {}).items() if k != "return"
    }
    wrapped.__signature__ = inspected(fn).replace(return_annotation=inspect.Signature.empty)
    return wrapped


def _positional(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], argnums: Sequence[int]
) -> tuple[tuple[Any, ...], Mapping[str, Any], tuple[int, ...]]:
    """Make keyword arguments of a call positional if `argnums` refers to them.

    The result also contains the positions of the differentiated arguments.
    """
    if max(argnums, default=0) >= len(args):
        bound = inspected(fn).bind(*args, **kwargs)
        args, kwargs = bound.args, bound.kwargs
    have = len(args)
    places = tuple(range(have)[i] for i in argnums if -have <= i < have)
    if not places or len(set(places)) < len(argnums):
        given = count(have, "positional argument")
        raise FunctreeValueError(
            f"grad: argnums={argnums} does not fit a call with {given}: "
            "pass one position, counted from 0, for each differentiated argument"
        )
    return args, kwargs, places


def _one_each(layout: LayoutTree, argnums: int | Sequence[int]) -> tuple[LayoutTree, ...]:
    """Return the layout of each differentiated argument."""
    if not isinstance(argnums, Sequence):
        return (layout,)
    layouts = layout if type(layout) is tuple else (layout,) * len(argnums)
    if len(layouts) != len(argnums):
        have, want = count(len(layouts), "layout"), count(len(argnums), "differentiated argument")
        raise RuleError(f"grad: got {have} for {want}: pass one layout for each")
    return layouts


def _differentiate(
    fn: Callable[..., Any],
    given: tuple[Any, ...],
    by_name: Mapping[str, Any],
    parameters: Sequence[Parameters],
    has_aux: bool,
) -> tuple[Any, tuple[Any, ...]]:
    """Return the result of a call, and the gradient for each differentiated argument."""
    manual = _manual_axes()

    def of_arrays(arrays_of_each: Sequence[Sequence[Any]]) -> Any:
        args = list(given)
        for argument, arrays in zip(parameters, arrays_of_each, strict=True):
            args[argument.number] = argument.with_arrays(arrays)
        result = fn(*args, **by_name)
        if has_aux and not (isinstance(result, tuple | list) and len(result) == 2):
            raise FunctreeTypeError(
                "grad: with has_aux=True, the function must return `(value, aux)`, "
                f"not {shown(result)}"
            )
        loss = result[0] if has_aux else result
        # JAX raises an error for a loss that is not an array.
        if manual and is_array(loss):
            _check_one_loss(loss, parameters, arrays_of_each)
        return result

    mesh = explicit_mesh(array for argument in parameters for array in argument.arrays)
    with around(mesh):
        result, gradients = jax.value_and_grad(of_arrays, has_aux=has_aux)(
            [argument.arrays for argument in parameters]
        )
    return result, tuple(
        argument.gradient(arrays) for argument, arrays in zip(parameters, gradients, strict=True)
    )


# Inside shard_map


def _manual_axes() -> tuple[str, ...]:
    """Return the mesh axes of the shard_map around this trace.

    Raises:
        FunctreeError: if the shard_map has `check_vma=False`.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    # With `check_vma=False`, types do not record varying mesh axes, so the cast has no effect.
    if manual and not varying_axes(jax.lax.pcast(jnp.zeros(()), manual, to="varying")):
        raise FunctreeError(
            "grad: inside shard_map(check_vma=False), each shard computes only its own part of "
            "the gradient, and JAX does not sum the parts: leave `check_vma` at True, or take the "
            "gradient outside of shard_map. If you use `jax.pmap`, replace it with `ft.shard_map`, "
            "or use `jax.grad` and `jax.lax.pmean` inside it"
        )
    return manual


def _check_one_loss(
    loss: Any, parameters: Sequence[Parameters], arrays_of_each: Sequence[Sequence[Any]]
) -> None:
    """Raise FunctreeError for parameters that shards share, if each shard computes its own loss.

    JAX sums the gradient of such a parameter over the shards. The result is the gradient of the
    summed losses.
    """
    varying = varying_axes(loss)
    axes = repr(entry(sorted(varying)))
    why = "is shared between shards, so its gradient would be the gradient of the sum of all losses"
    remedy = f"return `jax.lax.pmean(loss, {axes})` for the mean, or `psum` for the sum"
    problems: list[Problem] = []
    for argument, arrays in zip(parameters, arrays_of_each, strict=True):
        for leaf, array in zip(argument.matched, arrays, strict=True):
            if not varying <= varying_axes(array):
                problems.append(leaf.problem(why, remedy))
    if problems:
        raise FunctreeError(f"grad: the loss differs between shards along {axes}", problems)
