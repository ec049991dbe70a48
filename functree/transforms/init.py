"""A function that makes a tree ─► the tree, created sharded as a layout says, or only its abstract
arrays."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MethodType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from functree.argument_checks import FUNCTION, check
from functree.calls.body import Arguments, Body
from functree.calls.call_groups import CallGroup, FlatCall, Traces
from functree.calls.checks import check_mesh
from functree.calls.function import Function
from functree.calls.output import Output
from functree.calls.program import Program, make_program, without_jit
from functree.devices.meshes import (
    NO_MESH,
    MeshLike,
    current_mesh,
    mesh_view,
    tracing,
    without_devices,
)
from functree.errors import ShardingError
from functree.labels.filters import FilterLike
from functree.labels.optimizer.followed_parameters import Optimizer
from functree.labels.predicates import is_trainable
from functree.layout.layout import Layout, LayoutLike, LayoutTree, copied
from functree.layout.plan.make_plan import plan_tree
from functree.layout.plan.plan import Plan
from functree.layout.plan_optimizer import plan_state
from functree.placing.ambient import ambient_rules, axis_rules
from functree.placing.shard import shard
from functree.processes.agreement import Agreement, Facts
from functree.processes.check_processes import facts_of, settings

_P = ParamSpec("_P")
_T = TypeVar("_T")


class InitOptions(NamedTuple):
    """The options of `ft.init`.

    Attributes:
        layout: the layout of the tree.
        mesh: the mesh, if it was given.
        fresh: whether no array of the result may be one of an argument.
    """

    layout: LayoutTree
    mesh: MeshLike
    fresh: bool


class Init(Function[_P, _T]):
    """A function that makes a tree and creates it sharded; made by `ft.init`.

    Attributes:
        compilations: one record for each compilation, with what differed from the most similar
            earlier one.

    Examples:
        >>> make = ft.init(
        ...     lambda: jnp.ones((8, 4)), ft.P("data"), ft.make_mesh(data=8)
        ... )
        >>> make.plan()[()].local_shape
        (1, 4)
    """

    _options: InitOptions
    _door = "init"

    def _set_up(self) -> None:
        self._layout, self._mesh, self._fresh = self._options
        # The programs that all processes have compared, as text.
        self._lowered: dict[Program, list[str]] = {}

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if jax.process_count() > 1 and not tracing():
            name = self.__name__
            with Agreement(f"{name} makes no tree", f"ft.init({name}, ...)(...)") as agreement:
                agreement.compare(lambda: self._facts(args, kwargs))
        result = super().__call__(*args, **kwargs)
        if without_jit() and not tracing():
            # The function ran as it is, and its arrays are on one device.
            return shard(result, self._layout, self._mesh)
        return result

    def plan(self, /, *args: _P.args, **kwargs: _P.kwargs) -> Plan:
        """The plan of the result; no array is allocated."""
        return self._planned(self._output(args, kwargs))

    def abstract(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """The result as `jax.ShapeDtypeStruct`s, with shardings if there is a layout; no array is
        allocated."""
        output = self._output(args, kwargs)
        if self._layout is None:
            return output.tree
        planned = self._planned(output)
        rows = [
            jax.ShapeDtypeStruct(row.shape, row.dtype, sharding=planned.sharding(row))
            for row in planned.rows
        ]
        return output.skeleton.fill(rows)

    def _rules(self) -> Layout | None:
        return ambient_rules()

    def _key(self, flat: FlatCall, rules: Layout | None) -> Hashable:
        # The mesh is part of the key: without `mesh=`, another ambient mesh needs other shardings
        # of the result.
        return (self._mesh_now(), rules, *flat.kinds())

    def _program(self, flat: FlatCall) -> Program:
        group, mesh = flat.group, self._mesh_now()
        check_mesh(self._signature.name, group.paths, flat.arrays, mesh)
        program, _ = make_program(
            group, self._body(group), flat.arrays, mesh=mesh, lay_outputs=self._shardings
        )
        return program

    def _facts(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Facts:
        """What has to be the same in all processes: the values of the arguments, the plan, and the
        program, which has all that the function closes over."""
        facts = {
            "settings": settings(),
            "arguments": facts_of(self._bind(args, kwargs), skip=True),
            "plan": facts_of(self._planned(self._output(args, kwargs))),
        }
        if not without_jit():
            program, flat = self._prepare(args, kwargs)
            if program not in self._lowered:  # to lower a large program takes seconds
                self._lowered[program] = facts_of(program.trace(flat.arrays).lower())
            facts["program"] = self._lowered[program]
        return facts

    def _mesh_now(self) -> Mesh | AbstractMesh | None:
        """The mesh of a call that is made now."""
        return current_mesh() if self._mesh is None else mesh_view(self._mesh).mesh

    def _output(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Output:
        """The result of a call, with abstract arrays."""
        flat = self._groups.find(self._bind(args, kwargs))
        body = self._body(flat.group)
        return jax.eval_shape(body, *body.arguments.split(flat.arrays))

    def _body(self, group: CallGroup) -> Body:
        """The user's function for one group of its calls; one body for all meshes, so that it is
        traced once."""
        rules = self._rules()
        body = group.bodies.get(rules)
        if body is None:
            body = group.bodies[rules] = _body(self._traces, group, rules, self._fresh)
        return body

    def _planned(self, output: Output) -> Plan:
        return plan_tree(output.tree, self._layout, self._mesh, same=output.which)

    def _shardings(self, output: Output) -> list[NamedSharding | None]:
        planned = self._planned(output)
        if planned.mesh is None:
            raise ShardingError(
                f"arrays cannot be created on {planned.view}, which has no devices: {NO_MESH}"
            )
        if isinstance(planned.mesh, AbstractMesh):
            inside = "inside jit write `ft.constrain(make(...), layout)`"
            raise ShardingError(
                f"arrays cannot be created: {without_devices(planned.mesh)}; {inside}"
            )
        # One array at two places of the result is one output of the program, so two rows may share
        # a place.
        which = range(len(planned.rows)) if output.which is None else output.which
        by_place = dict(zip(which, map(planned.sharding, planned.rows), strict=True))
        return [by_place[place] for place in range(len(output.values))]


def _body(traces: Traces, group: CallGroup, rules: Layout | None, fresh: bool) -> Body:
    """The user's function, for one group of its calls and one set of rules, as a function from
    arrays to arrays."""
    signature, fun = traces.signature, traces.fun

    def compute(arrays: Sequence[Any]) -> Output:
        with axis_rules(rules):
            result = signature.run(fun(), group.skeleton.fill(arrays))
        output = Output.of(result, signature.name)
        if fresh:
            # An optimizer may return parameters as part of its state. A copy of each array gives it
            # its own memory, so that model and state can both be donated. A compiled program would
            # copy them in any case; without jit nothing else does.
            return Output([jnp.copy(value) for value in output.values], output.skeleton)
        return output.distinct()

    return Body(compute, Arguments(group.paths, ()), traces)


def _init(
    make: Callable[_P, _T], layout: LayoutTree, mesh: MeshLike, fresh: bool = False
) -> Init[_P, _T]:
    check("init makes no tree", make=(make, FUNCTION))
    # A copy, because the traces are shared by the layout as it is now.
    return Init.of(make, InitOptions(copied(layout), mesh, fresh))


def init(make: Callable[_P, _T], layout: LayoutTree, mesh: MeshLike = None) -> Init[_P, _T]:
    """Create a tree sharded as a layout says. An array that the layout shards is never whole on one
    device.

    Args:
        make: makes the tree. It runs under jit and is compiled once for all keys. Arguments that
            are not arrays are static.
        layout: the layout of the tree.
        mesh: a mesh, or None for the current one.

    Returns:
        A function with the arguments of `make`. It also has `plan` and `abstract`, and `trace`,
            `lower`, `eval_shape` and `compilations` as in `ft.jit`. Its result is bitwise equal to
            that of `jax.jit(make)`. An array that is at two places of the tree stays one array.

    Raises:
        ShardingError: (when called) the layout does not fit the tree, or there is no mesh with
            devices.
        FunctreeError: (when called) an argument is neither an array nor hashable, or a static field
            of the result contains a traced array; the processes have other arguments, another plan
            or another program, as of a number that `make` closes over.

    Examples:
        >>> mesh = ft.make_mesh(data=8)
        >>> make = ft.init(eqx.nn.Linear, ft.FSDP("data", min_size=0), mesh)
        >>> model, other = (
        ...     make(16, 8, key=jax.random.key(0)),
        ...     make(16, 8, key=jax.random.key(1)),
        ... )
        >>> model.weight.sharding.spec, len(make.compilations)
        (P(None, 'data'), 1)
    """
    return _init(make, layout, mesh)


def abstract(
    make: Callable[_P, _T], layout: LayoutTree = None, mesh: MeshLike = None
) -> Callable[_P, _T]:
    """The tree that `ft.init` makes, as `jax.ShapeDtypeStruct`s with shardings. No array is
    allocated.

    Args:
        make: makes the tree.
        layout: the layout of the tree; without one, the result has only shapes and dtypes.
        mesh: a mesh, an abstract mesh, or None for the current one.

    Raises:
        ShardingError: (when called) the layout does not fit the tree.

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
    otherwise: LayoutLike = None,
) -> Any:
    """The result of `tx.init(parameters)`, created sharded as `ft.plan_optimizer` says. It has no
    array of the model.

    Args:
        tx: any optax optimizer.
        model: the model, with concrete arrays.
        layout: the layout of the model.
        mesh: a mesh, or None for the current one.
        wrt: the filter of the parameters that the optimizer updates.
        otherwise: as in `ft.plan_optimizer`.

    Raises:
        ShardingError: as in `ft.plan_optimizer`; or there is no mesh with devices.

    Examples:
        >>> import optax
        >>> mesh = ft.make_mesh(data=8)
        >>> model = {"w": ft.shard(jnp.ones((8, 4)), ft.P("data"), mesh)}
        >>> ft.init_optimizer(optax.adam(1e-3), model, ft.P("data"), mesh)[0].mu[
        ...     "w"
        ... ].sharding.spec
        P('data', None)
    """
    planned, params = plan_state(tx, model, layout, mesh, wrt, otherwise)
    # A bound method would bring its object along as an argument.
    make = (lambda params: tx.init(params)) if isinstance(tx.init, MethodType) else tx.init
    return _init(make, planned, planned.mesh, fresh=True)(params)
