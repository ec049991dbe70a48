"""A function that makes a tree ─► the tree born sharded as a layout says, or only its description."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from functree.calls.body import Arguments, Body
from functree.calls.call_groups import CallGroup, FoundCall
from functree.calls.function import Function, on_several_devices
from functree.calls.output import Output
from functree.calls.program import Program, prepare
from functree.calls.signature import Bound, Signature
from functree.calls.traces import Traces, traces_of
from functree.errors import ShardingError
from functree.layout.layout import LayoutTree
from functree.layout.meshes import NO_MESH, MeshLike, current_mesh, mesh_view
from functree.layout.optimizer.origins import Optimizer
from functree.layout.optimizer.plan_optimizer import plan_state
from functree.layout.plan.plan import Plan
from functree.layout.plan.resolver import plan_tree
from functree.tree.filters.filter import FilterLike
from functree.tree.filters.predicates import is_trainable

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Init(Function[_P, _T]):
    """A function that makes a tree, ready to make it sharded; made by `ft.init`.

    Attributes:
        compilations: a record for each compilation, of what differed from the nearest earlier one.

    Examples:
        >>> make = ft.init(lambda: jnp.ones((8, 4)), ft.P("data"), ft.make_mesh(data=8))
        >>> make.plan()[()].local_shape
        (1, 4)
    """

    def __init__(
        self, make: Callable[_P, _T], bound: Bound, traces: Traces, layout: LayoutTree, mesh: MeshLike, fresh: bool
    ):
        super().__init__(make, bound, traces)
        self._layout, self._mesh, self._fresh = layout, mesh, fresh

    def plan(self, *args: _P.args, **kwargs: _P.kwargs) -> Plan:
        """Where each array of the result goes; allocates nothing."""
        return self._planned(self._output(args, kwargs))

    def abstract(self, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """The result as `jax.ShapeDtypeStruct`s, with shardings where there is a layout; allocates nothing."""
        output = self._output(args, kwargs)
        if self._layout is None:
            return output.tree
        planned = self._planned(output)
        rows = [jax.ShapeDtypeStruct(row.shape, row.dtype, sharding=planned.sharding(row)) for row in planned.rows]
        return output.skeleton.fill(rows)

    def __repr__(self) -> str:
        return f"<ft.init of {self._signature.name}>"

    def _key(self, found: FoundCall) -> Hashable:
        mesh = current_mesh() if self._mesh is None else mesh_view(self._mesh).mesh
        return (mesh, *map(_kind, found.arrays))

    def _program(self, call: Any, found: FoundCall) -> Program:
        group, body = found.group, self._body(found.group)
        prepared = prepare(body, found.arrays, lay_outputs=self._shardings)
        group.several_devices = group.several_devices or on_several_devices(found.arrays)
        return Program(self._signature.name, group, body, prepared.jitted, out_shardings=prepared.out_shardings)

    def _output(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Output:
        """The result of a call, with abstract values."""
        found = self._groups.find(self._signature.bind(*self._bound.call(args, kwargs)))
        body = self._body(found.group)
        return jax.eval_shape(body, *body.arguments.split(found.arrays))

    def _body(self, group: CallGroup) -> Body:
        """The user's function, for one group of its calls: the same for all meshes, so that it is traced once."""
        body = group.bodies.get(None)
        if body is None:
            body = group.bodies[None] = _body(self._traces, group, self._fresh)
        return body

    def _planned(self, output: Output) -> Plan:
        return plan_tree(output.tree, self._layout, self._mesh, same=output.which)

    def _shardings(self, output: Output) -> list[NamedSharding | None]:
        planned = self._planned(output)
        if not isinstance(planned.mesh, Mesh):
            raise ShardingError(
                f"arrays cannot be born on {planned.view}, which has no devices: {NO_MESH} with a `Mesh`; "
                "inside jit write `ft.constrain(make(...), layout)`"
            )
        which = range(len(planned.rows)) if output.which is None else output.which
        by_place = dict(zip(which, map(planned.sharding, planned.rows), strict=True))
        return [by_place[place] for place in range(len(output.values))]


def _body(traces: Traces, group: CallGroup, fresh: bool) -> Body:
    """The user's function, for one group of its calls."""
    signature, fun = traces.signature, traces.fun

    def compute(arrays: Sequence[Any]) -> Output:
        result = signature.run(fun(), group.build(arrays))
        output = Output.of(result, signature.name)
        if fresh:
            return Output([jnp.copy(value) for value in output.values], output.skeleton)
        return output.distinct()

    return Body(compute, Arguments(group.paths, frozenset()), fun, signature.name)


def _kind(array: Any) -> Any:
    """What the shapes of the result depend on in an argument."""
    return array if isinstance(array, jax.ShapeDtypeStruct) else jax.typeof(array)


def _init(make: Callable[_P, _T], layout: LayoutTree, mesh: MeshLike, fresh: bool = False) -> Init[_P, _T]:
    signature, bound = Signature.of(make)
    traces = traces_of(bound, signature, Init, layout, mesh, fresh)
    return Init(make, bound, traces, layout, mesh, fresh)


def init(make: Callable[_P, _T], layout: LayoutTree, mesh: MeshLike = None) -> Init[_P, _T]:
    """Make a tree so that each array is born where the layout says, never whole on one device.

    Args:
        make: makes the tree; runs under jit, compiled once for all keys. Its arguments that are no arrays are static.
        layout: of the tree.
        mesh: a mesh, or None for the current one.

    Returns:
        A function of `make`'s arguments, with `plan`, `abstract`, and as `ft.jit` has them `trace`, `lower`,
        `eval_shape` and `compilations`. Its result equals `jax.jit(make)`'s to the bit; one array at two places of it
        is one array.

    Raises:
        ShardingError: (when called) the tree cannot be laid out so, or there is no mesh with devices.
        FunctreeError: (when called) an argument that is neither an array nor hashable; a traced array in a static
            field of the result.

    Examples:
        >>> mesh = ft.make_mesh(data=8)
        >>> make = ft.init(eqx.nn.Linear, ft.FSDP("data", min_size=0), mesh)
        >>> model, other = make(16, 8, key=jax.random.key(0)), make(16, 8, key=jax.random.key(1))
        >>> model.weight.sharding.spec, len(make.compilations)
        (P(None, 'data'), 1)
    """
    return _init(make, layout, mesh)


def abstract(make: Callable[_P, _T], layout: LayoutTree = None, mesh: MeshLike = None) -> Callable[_P, _T]:
    """The same tree as `ft.init` makes, of `jax.ShapeDtypeStruct`s with shardings. Allocates nothing.

    Args:
        make: makes the tree.
        layout: of the tree; without one, the shapes and dtypes alone.
        mesh: a mesh, an abstract one, or None for the current one.

    Raises:
        ShardingError: (when called) the tree cannot be laid out so.

    Examples:
        >>> model = ft.abstract(eqx.nn.Linear)(16, 8, key=jax.random.key(0))
        >>> model.weight.shape
        (8, 16)
    """
    return _init(make, layout, mesh).abstract


def init_optimizer(
    tx: Optimizer,
    model: Any,
    layout: LayoutTree,
    mesh: MeshLike = None,
    *,
    wrt: FilterLike = is_trainable,
    otherwise: LayoutTree = None,
) -> Any:
    """`tx.init(parameters)`, each array born where `ft.plan_optimizer` says, and never the model's own.

    Args:
        tx: any optax optimizer.
        model: concrete.
        layout: of the model.
        mesh: a mesh, or None for the current one.
        wrt: the filter of the parameters that the optimizer updates.
        otherwise: as in `ft.plan_optimizer`.

    Raises:
        ShardingError: as `ft.plan_optimizer`, or there is no mesh with devices.

    Examples:
        >>> import optax
        >>> mesh = ft.make_mesh(data=8)
        >>> model = {"w": ft.shard(jnp.ones((8, 4)), ft.P("data"), mesh)}
        >>> ft.init_optimizer(optax.adam(1e-3), model, ft.P("data"), mesh)[0].mu["w"].sharding.spec
        P('data', None)
    """
    planned, params = plan_state(tx, model, layout, mesh, wrt, otherwise)
    return _init(tx.init, planned, planned.mesh, fresh=True)(params)
