"""`ft.init` creates sharded trees, and `ft.abstract` describes them with abstract arrays.

A function that makes a tree, and a layout ─► the sharded tree.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from functree.argument_checks import FUNCTION, check
from functree.calls.body import Arguments, Body, Output
from functree.calls.call_groups import CallGroup, FlatCall
from functree.calls.checks import check_mesh
from functree.calls.function import Function
from functree.calls.program import Program, make_program, without_jit
from functree.devices.meshes import NO_MESH, MeshLike, current_mesh, mesh_view, tracing
from functree.errors import ShardingError
from functree.labels.filters import FilterLike, is_trainable
from functree.labels.optimizer.followed_parameters import Optimizer
from functree.layout.decide import plan_leaves
from functree.layout.layout import Layout, LayoutLike, LayoutTree, copied, read_on_mesh
from functree.layout.plan.plan import Plan
from functree.layout.plan_optimizer import plan_state
from functree.placing.constrain import ambient_rules, axis_rules
from functree.placing.shard import shard
from functree.processes.agreement import Agreement, Facts
from functree.processes.check_processes import facts_of, settings

_P = ParamSpec("_P")
_T = TypeVar("_T")


class InitOptions(NamedTuple):
    """The options of `ft.init`.

    Attributes:
        layout: the layout of the tree.
        mesh: the mesh, or None for the current one.
    """

    layout: LayoutTree
    mesh: MeshLike


class Init(Function[_P, _T]):
    """A function that creates a sharded tree. `ft.init` returns it.

    Attributes:
        compilations: one record for each compilation, with the differences from the most similar
            earlier compilation.

    Examples:
        >>> make = ft.init(
        ...     lambda: jnp.ones((8, 4)), ft.P("data"), ft.make_mesh(data=8)
        ... )
        >>> make.plan()[()].local_shape
        (1, 4)
    """

    _options: InitOptions
    _door = "init"

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if jax.process_count() > 1 and not tracing():
            name = self.__name__
            with Agreement(f"{name} cannot be run", f"ft.init({name}, ...)(...)") as agreement:
                agreement.compare(lambda: self._facts(args, kwargs))
        result = super().__call__(*args, **kwargs)
        if without_jit() and not tracing():
            # The function ran without jit, so its arrays are on one device.
            return shard(result, self._options.layout, self._options.mesh)
        return result

    def plan(self, /, *args: _P.args, **kwargs: _P.kwargs) -> Plan:
        """Return the plan of the result without allocating arrays."""
        return self._planned(self._output(args, kwargs))

    def abstract(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Return the result with a `jax.ShapeDtypeStruct` for each array.

        No array is allocated. The structs have shardings if there is a layout.
        """
        output = self._output(args, kwargs)
        if self._options.layout is None:
            return output.tree
        shardings = _of_values(output, self._planned(output))
        pairs = zip(output.values, shardings, strict=True)
        return output.like([value.update(sharding=sharding) for value, sharding in pairs])

    def _rules(self) -> Layout | None:
        return ambient_rules()

    def _key(self, flat: FlatCall, rules: Layout | None) -> Hashable:
        # The mesh is part of the key: without `mesh=`, the result's shardings depend on the ambient
        # mesh.
        return (self._mesh_now(), rules, *flat.kinds())

    def _program(self, flat: FlatCall) -> Program:
        group, mesh = flat.group, self._mesh_now()
        check_mesh(self._signature.name, group.paths, flat.arrays, mesh)
        program, _ = make_program(
            group, self._body(group), flat.arrays, mesh=mesh, lay_outputs=self._shardings
        )
        return program

    def _facts(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Facts:
        """Return the facts that must be equal in all processes.

        These facts are the settings, the values of the arguments, the plan and the program. The
        program includes all values that the function closes over.
        """
        facts = {
            "settings": settings(),
            "arguments": facts_of(self._bind(args, kwargs), skip=True),
            "plan": facts_of(self._planned(self._output(args, kwargs))),
        }
        if not without_jit():
            program, flat = self._prepare(args, kwargs)
            facts["program"] = facts_of(program.trace(flat.arrays).lower())
        return facts

    def _mesh_now(self) -> Mesh | AbstractMesh | None:
        """Return the mesh that a call would use now."""
        return current_mesh() if self._options.mesh is None else mesh_view(self._options.mesh).mesh

    def _output(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Output:
        """Return the result of a call, with abstract arrays."""
        flat = self._find(args, kwargs)
        body = self._body(flat.group)
        return jax.eval_shape(body, *body.arguments.split(flat.arrays))

    def _body(self, group: CallGroup) -> Body:
        """Return the user's function for one group of its calls.

        All meshes share one body, so the function is traced once.
        """
        rules = self._rules()
        if rules in group.bodies:
            return group.bodies[rules]
        signature, fun = self._signature, self._traces.fun

        # `compute` must not refer to `self`, which holds the user's function: the group's cache
        # would keep that function alive.
        def compute(arrays: Sequence[Any]) -> Output:
            with axis_rules(rules):
                result = signature.run(fun(), group.skeleton.fill(arrays))
            return Output.of(result, signature.name).distinct()

        body = group.bodies[rules] = Body(compute, Arguments(group.paths, ()), self._traces)
        return body

    def _planned(self, output: Output) -> Plan:
        read = read_on_mesh(output.tree, self._options.layout, self._options.mesh)
        return plan_leaves(*read, same=output.which)

    def _shardings(self, output: Output) -> list[NamedSharding]:
        planned = self._planned(output)
        if not isinstance(planned.mesh, Mesh):
            raise ShardingError(
                f"arrays cannot be created on mesh {planned.view}, which has no devices: "
                f"{NO_MESH}, where `mesh` is a `Mesh`; inside jit, use "
                "`ft.constrain(make(...), layout)`"
            )
        return _of_values(output, planned)


def _of_values(output: Output, planned: Plan) -> list[NamedSharding]:
    """Return the planned sharding of each value of a result."""
    # An array at two paths of the result is one value, so two rows may have the same index.
    which = output.which or range(len(planned.rows))
    by_index = dict(zip(which, map(planned.sharding, planned.rows), strict=True))
    return [by_index[index] for index in range(len(output.values))]


def _init(name: str, make: Callable[_P, _T], layout: LayoutTree, mesh: MeshLike) -> Init[_P, _T]:
    check(f"{name}: invalid arguments", make=(make, FUNCTION))
    # The containers of the layout are copied, so that later changes cannot affect shared traces.
    return Init.of(make, InitOptions(copied(layout), mesh))


def init(make: Callable[_P, _T], layout: LayoutTree, mesh: MeshLike = None) -> Init[_P, _T]:
    """Return a function that creates a tree, sharded with a layout.

    No device ever holds a full copy of an array that the layout shards.

    Args:
        make: the function that makes the tree. It runs under jit and is compiled once for all
            random keys. Arguments that are not arrays are static.
        layout: the layout of the tree.
        mesh: a mesh, or None for the current one.

    Returns:
        A function with the parameters of `make`. The function also has the methods `plan` and
            `abstract`, and `trace`, `lower`, `eval_shape` and `compilations` as in `ft.jit`. Its
            result is bitwise equal to the result of `jax.jit(make)`. An array at two paths of the
            tree stays one array.

    Raises:
        FunctreeError: if `make` is not a function.
        FunctreeError: (when called) if an argument is neither an array nor hashable.
        FunctreeError: (when called) if a static field of the result contains a traced array.
        FunctreeError: (when called) if the arguments, the plan or the program differ between
            processes. A number that `make` closes over is part of the program.
        ShardingError: (when called) if the layout does not fit the tree.
        ShardingError: (when called) if there is no mesh with devices.

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
    return _init("init", make, layout, mesh)


def abstract(
    make: Callable[_P, _T], layout: LayoutTree = None, mesh: MeshLike = None
) -> Callable[_P, _T]:
    """Return a function that describes the tree of `ft.init` without allocating arrays.

    Each array is a `jax.ShapeDtypeStruct`, with a sharding if there is a layout.

    Args:
        make: the function that makes the tree.
        layout: the layout of the tree. Without a layout, arrays have only shapes and dtypes.
        mesh: a mesh, an abstract mesh, or None for the current one.

    Raises:
        FunctreeError: if `make` is not a function.
        ShardingError: (when called) if the layout does not fit the tree.

    Examples:
        >>> model = ft.abstract(eqx.nn.Linear)(16, 8, key=jax.random.key(0))
        >>> model.weight.shape
        (8, 16)
    """
    return _init("abstract", make, layout, mesh).abstract


def init_optimizer(
    tx: Optimizer,
    model: Any,
    layout: LayoutTree,
    mesh: MeshLike = None,
    *,
    wrt: FilterLike = is_trainable,
    otherwise: LayoutLike = None,
) -> Any:
    """Create an optimizer's state, `tx.init(parameters)`, sharded as in `ft.plan_optimizer`.

    The state shares no array with the model.

    Args:
        tx: any optax optimizer.
        model: the model, with concrete arrays.
        layout: the layout of the model.
        mesh: a mesh, or None for the current one.
        wrt: the filter that selects the parameters to update.
        otherwise: the layout of arrays whose dependence on the parameters is unknown, as in
            `ft.plan_optimizer`.

    Raises:
        ShardingError: if the state cannot be planned, for the reasons that `ft.plan_optimizer`
            lists.
        ShardingError: if there is no mesh with devices.

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

    # An optimizer may return parameters as part of its state. A copy of each array lets users
    # donate both model and state.
    def init(params: Any) -> Any:
        return jax.tree.map(lambda x: jnp.copy(x) if eqx.is_array(x) else x, tx.init(params))

    return _init("init_optimizer", init, planned, planned.mesh)(params)
