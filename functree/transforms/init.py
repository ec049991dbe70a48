"""A function that makes a tree ─► the tree born where the layout says, or only its description."""

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import jax
from jax.sharding import Mesh

from functree.errors import ShardingError
from functree.layout.meshes import NO_MESH
from functree.layout.optimizer import Optimizer, planned_state
from functree.layout.plan import Plan, plan_tree
from functree.tree.asks import is_trainable
from functree.tree.flat import Flat

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Init(Generic[_P, _T]):
    """A function that makes a tree, ready to make it sharded; made by `ft.init`.

    Examples:
        >>> make = ft.init(lambda: jnp.ones((8, 4)), ft.P("data"), ft.make_mesh(data=8))
        >>> make.plan()[()].local_shape
        (1, 4)
    """

    def __init__(self, make: Callable[_P, _T], layout: Any, mesh: Any, fresh: bool = False):
        self._make, self._layout, self._mesh, self._fresh = make, layout, mesh, fresh

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        flat, planned = self._planned(args, kwargs)
        return flat.result(self._jitted(flat, planned)(flat.arrays))

    def plan(self, *args: _P.args, **kwargs: _P.kwargs) -> Plan:
        """Where each array of the result goes; allocates nothing."""
        return self._planned(args, kwargs)[1]

    def lower(self, *args: _P.args, **kwargs: _P.kwargs) -> jax.stages.Lowered:
        """The function lowered by JAX, to be compiled and looked at."""
        flat, planned = self._planned(args, kwargs)
        return self._jitted(flat, planned).lower(flat.arrays)

    def _planned(self, args: Any, kwargs: Any) -> tuple[Flat, Plan]:
        flat = Flat(self._make, args, kwargs, self._fresh)
        return flat, _plan_result(flat, self._layout, self._mesh)

    def _jitted(self, flat: Flat, planned: Plan) -> Any:
        _on_devices(planned)
        shardings = {i: planned.sharding(row) for i, row in zip(flat.which, planned.rows, strict=True)}
        return jax.jit(flat, out_shardings=[shardings[i] for i in range(len(shardings))])


def init(make: Callable[_P, _T], layout: Any, mesh: Any = None) -> Init[_P, _T]:
    """Make a tree so that each array is born where the layout says, never whole on one device.

    Args:
        make: makes the tree; runs under jit. Its arguments that are no arrays are static.
        layout: of the tree.
        mesh: a mesh, or None for the current one.

    Returns:
        A function of `make`'s arguments. Its result equals `jax.jit(make)`'s to the bit; one array at two places of
        it is one array.

    Raises:
        ShardingError: (when called) the tree cannot be laid out so, or there is no mesh with devices.

    Examples:
        >>> mesh = ft.make_mesh(data=8)
        >>> model = ft.init(eqx.nn.Linear, ft.FSDP("data", min_size=0), mesh)(16, 8, key=jax.random.key(0))
        >>> model.weight.sharding.spec
        P(None, 'data')
    """
    return Init(make, layout, mesh)


def abstract(make: Callable[_P, _T], layout: Any = None, mesh: Any = None) -> Callable[_P, _T]:
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

    def described(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        flat = Flat(make, args, kwargs)
        values = flat.abstract()
        if layout is not None:
            planned = _plan_result(flat, layout, mesh, values)
            for i, row in zip(flat.which, planned.rows, strict=True):
                values[i] = jax.ShapeDtypeStruct(row.shape, row.dtype, sharding=planned.sharding(row))
        return flat.result(values)

    return described


def _plan_result(flat: Flat, layout: Any, mesh: Any, values: Any = None) -> Plan:
    """The plan of what a flat function makes."""
    values = flat.abstract() if values is None else values
    return plan_tree(flat.result(values), layout, mesh, same=flat.which)


def init_optimizer(
    tx: Optimizer,
    model: Any,
    layout: Any,
    mesh: Any = None,
    *,
    wrt: Any = is_trainable,
    otherwise: Any = None,
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
    planned, params = planned_state(tx, model, layout, mesh, wrt, otherwise)
    return Init(tx.init, planned, planned.mesh, fresh=True)(params)


def _on_devices(planned: Plan) -> None:
    if not isinstance(planned.mesh, Mesh):
        raise ShardingError(
            f"arrays cannot be born on {planned.view}, which has no devices: {NO_MESH} with a `Mesh`; inside jit write "
            "`ft.constrain(make(...), layout)`"
        )
