"""A model's layout and an optimizer ─► the layout of the optimizer's state.

What a leaf of the state stands for is not asked of its type: `tx.init` is traced twice, the second time with every
size changed and different, and the sizes tell which dimensions of which parameter it has.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from optax import GradientTransformation

from functree.errors import FunctreeError
from functree.layout.layouts import Decision, Layout, Resolution, as_layout, whole
from functree.layout.meshes import MeshView
from functree.layout.plan import Plan, Row, plan, plan_leaves
from functree.layout.prefix import Part
from functree.tree.axes import Axes
from functree.tree.filters import as_filter, is_trainable
from functree.tree.flat import Flat
from functree.tree.leaf import Leaf
from functree.tree.leaves import Leaves, read
from functree.tree.paths import Path


class Origin(NamedTuple):
    """What one leaf of an optimizer's state comes from.

    Attributes:
        parameter: the path of the parameter, or None.
        dims: for each dimension of the leaf, the parameter's dimension that it is, or None.
        derived: False where the leaf depends on the parameters' shapes in a way that sizes cannot tell.
    """

    parameter: Path | None
    dims: tuple[int | None, ...]
    derived: bool = True


def plan_optimizer(
    tx: GradientTransformation,
    model: Any,
    layout: Any,
    mesh: Any = None,
    *,
    wrt: Any = is_trainable,
    otherwise: Any = None,
) -> Plan:
    """Decide where each array of an optimizer's state goes, from the layout of the model alone.

    A leaf that stands for a parameter and has its shape gets the parameter's spec; a factored one the specs of the
    dimensions it keeps; one with further leading dimensions the parameter's behind unsharded ones. What does not
    depend on the parameters' shapes is whole.

    Args:
        tx: any optax optimizer.
        model: concrete or abstract.
        layout: of the model.
        mesh: as in `ft.plan`.
        wrt: the filter of the parameters that the optimizer updates.
        otherwise: a layout for leaves that depend on the parameters' shapes, and of which cannot be told how.

    Returns:
        The plan of `tx.init(parameters)`.

    Raises:
        ShardingError: the model cannot be laid out, or a leaf of the state cannot be derived and there is no `otherwise`.

    Example:
        >>> import optax
        >>> plan = ft.plan_optimizer(optax.adam(1e-3), {"w": jnp.ones((4, 8))}, ft.P("data"), {"data": 2})
        >>> plan["0.mu.w"].spec, plan["0.count"].reason
        (P('data', None), 'does not depend on the parameters')
    """
    return planned_state(tx, model, layout, mesh, wrt, otherwise)[0]


def planned_state(tx: Any, model: Any, layout: Any, mesh: Any, wrt: Any, otherwise: Any) -> tuple[Plan, Any]:
    """The plan of the state, and the parameters that it is for."""
    model_plan = plan(model, layout, mesh)
    params = parameters(model, wrt)
    rows = {leaf.path: model_plan[leaf.path] for leaf in read(params).leaves}
    leaves, origins = trace_state(tx, params)
    described = [_described(leaf, origin, rows) for leaf, origin in zip(leaves.leaves, origins, strict=True)]
    found = Leaves(tuple(described), (), leaves.treedef, leaves.positions, leaves.size)
    derived = _Derived(tuple(origins), rows, None if otherwise is None else as_layout(otherwise))
    view = model_plan.view
    return plan_leaves(found, [Part(derived, Path(), leaves.size)], view), params


def parameters(model: Any, wrt: Any) -> Any:
    """The arrays of a model that a filter matches; None elsewhere."""
    leaves, matches = read(model), as_filter(wrt)
    return leaves.tree(leaf.value if matches(leaf) else None for leaf in leaves.leaves)


class _Derived(Layout):
    """The layout of one optimizer state, leaf by leaf in its order."""

    __slots__ = ("origins", "otherwise", "rows")

    def __init__(self, origins: Sequence[Origin], rows: Mapping[Path, Row], otherwise: Layout | None):
        self.origins, self.rows, self.otherwise = origins, rows, otherwise

    def resolve(self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None) -> Resolution:
        decisions = [self._one(leaf, origin) for leaf, origin in zip(leaves, self.origins, strict=True)]
        lost = [i for i, origin in enumerate(self.origins) if not origin.derived]
        if self.otherwise is None or not lost:
            return Resolution(decisions)
        found = self.otherwise.resolve([leaves[i] for i in lost], mesh)
        for i, decision in zip(lost, found.decisions, strict=True):
            decisions[i] = decision._replace(reason=f"otherwise: {decision.reason}")
        return Resolution(decisions, found.problems, found.unused)

    def _one(self, leaf: Leaf, origin: Origin) -> Decision:
        start = whole(leaf)._replace(unsettled=())
        if not origin.derived:
            return start._replace(problems=(UNDERIVABLE,))
        if origin.parameter is None or all(dim is None for dim in origin.dims):
            return start._replace(reason="does not depend on the parameters" if leaf.shape or not origin.parameter else f"one number for {origin.parameter}")
        row = self.rows[origin.parameter]
        entries = [() if d is None else _mesh_axes(row, d) for d in origin.dims]
        rules = [f"the spec of {origin.parameter}"] * len(entries)
        same = origin.dims == tuple(range(len(row.shape)))
        reason = f"as {origin.parameter}" if same else f"as {origin.parameter}, its dimensions {_kept(origin.dims)}"
        return start._replace(
            entries=tuple(entries), rules=tuple(rules), reason=reason, memory_kind=row.memory_kind if same else None
        )


UNDERIVABLE = (
    "depends on the shapes of the parameters in a way that cannot be told, so no parameter's spec is its own",
    "give a layout for such leaves: `otherwise=P()` for whole on every device",
)


def _mesh_axes(row: Row, dim: int) -> tuple[str, ...]:
    entry = row.spec[dim] if row.spec is not None else None
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _kept(dims: Sequence[int | None]) -> str:
    return ", ".join("whole" if dim is None else str(dim) for dim in dims)


def _described(leaf: Leaf, origin: Origin, rows: Mapping[Path, Row]) -> Leaf:
    """The leaf with the axes of the dimensions that it has from its parameter, whose path patterns see too."""
    if origin.parameter is None:
        return leaf._replace(axes=Axes(*[None] * len(leaf.shape)), problem=None)
    axes = rows[origin.parameter].axes
    kept = Axes(*(None if dim is None else axes[dim] for dim in origin.dims))
    return leaf._replace(axes=kept, names=(leaf.path, origin.parameter), problem=None, annotated=True, stacked=0)


# Where the leaves of a state come from


def trace_state(tx: Any, params: Any) -> tuple[Leaves, list[Origin]]:
    """The leaves of `tx.init(params)`, abstract, and what each comes from."""
    real = _state(tx, params)
    shapes = {leaf.path: leaf.shape for leaf in read(params).leaves}
    owners = _owners([leaf.path for leaf in real.leaves], set(shapes))
    for step in (1, -1):
        changed = {path: _distinct(shape, step) for path, shape in shapes.items()}
        other = _state(tx, _reshaped(params, changed))
        pairs = list(zip(real.leaves, other.leaves, strict=False))
        if len(real.leaves) == len(other.leaves) and all(len(a.shape) == len(b.shape) for a, b in pairs):
            return real, [_origin(a, b, owners[a.path], shapes, changed) for a, b in pairs]
    # The state itself has another structure for sizes next to these: only what has a parameter's shape is known.
    return real, [_by_shape(leaf, owners[leaf.path], shapes) for leaf in real.leaves]


def _state(tx: Any, params: Any) -> Leaves:
    if not callable(getattr(tx, "init", None)):
        raise FunctreeError(f"{tx!r} is no optimizer: an optax GradientTransformation has `init` and `update`")
    flat = Flat(tx.init, (params,), {})
    return read(flat.result(flat.abstract()))


def _reshaped(params: Any, shapes: Mapping[Path, tuple[int, ...]]) -> Any:
    leaves = read(params)
    return leaves.tree(jax.ShapeDtypeStruct(shapes[x.path], x.value.dtype) for x in leaves.leaves)


def _distinct(shape: Sequence[int], step: int) -> tuple[int, ...]:
    """Sizes that all differ from each other and from the real ones, in the same order and close to them.

    Optimizers decide by size (adafactor factors what is large, and by the order of sizes), so both are kept.
    """
    out = list(shape)
    taken: set[int] = set()
    order = sorted(range(len(shape)), key=lambda i: (shape[i], i), reverse=step < 0)
    for i in order:
        size = shape[i] + step
        while size in taken or size in shape:
            size += step
        out[i] = max(size, 1)
        taken.add(size)
    return tuple(out)


def _owners(paths: Sequence[Path], params: set[Path]) -> dict[Path, Path | None]:
    """For each leaf of the state, the parameter whose path its own path ends in, or goes on from.

    The shortest prefix counts below which every leaf is at a parameter's path: so `0.mu.w` is `w`, also where there
    is a parameter `mu.w`.
    """

    def parameter(rest: Path) -> Path | None:
        return next((Path(rest[:n]) for n in range(len(rest), -1, -1) if rest[:n] in params), None)

    matches = {path: [parameter(Path(path[k:])) for k in range(len(path) + 1)] for path in paths}
    failing = {path[:k] for path, found in matches.items() for k, match in enumerate(found) if match is None}
    return {
        path: next((match for k, match in enumerate(found) if match is not None and path[:k] not in failing), None)
        for path, found in matches.items()
    }


def _origin(real: Leaf, other: Leaf, owner: Path | None, shapes: Mapping[Path, Any], changed: Mapping[Path, Any]) -> Origin:
    varies = [a != b for a, b in zip(real.shape, other.shape, strict=True)]
    nothing = (None,) * len(varies)
    if owner is None or not any(varies):
        return Origin(owner, nothing, derived=not any(varies))
    want, ndim = changed[owner], len(changed[owner])
    if other.shape[len(varies) - ndim :] == want and len(varies) >= ndim and not any(varies[: len(varies) - ndim]):
        return Origin(owner, (*(None,) * (len(varies) - ndim), *range(ndim)))
    dims = tuple(want.index(n) if v and n in want else None for n, v in zip(other.shape, varies, strict=True))
    told = all(dim is not None for dim, v in zip(dims, varies, strict=True) if v)
    same = told and all(dim is None or real.shape[i] == shapes[owner][dim] for i, dim in enumerate(dims))
    return Origin(owner, dims if same else nothing, derived=same)


def _by_shape(leaf: Leaf, owner: Path | None, shapes: Mapping[Path, Any]) -> Origin:
    if owner is not None and leaf.shape == shapes[owner]:
        return Origin(owner, tuple(range(len(leaf.shape))))
    return Origin(owner, (None,) * len(leaf.shape), derived=not leaf.shape)
