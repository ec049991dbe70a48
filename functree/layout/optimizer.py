"""A model's layout and an optimizer ─► the layout of the optimizer's state.

What a leaf of the state stands for is not asked of its type: `tx.init` is traced twice, the second time with every
size changed and different, and the sizes tell which dimensions of which parameter it has.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from functree.errors import FunctreeError, RuleError, did_you_mean
from functree.layout.layouts import Decision, Layout, Resolution, as_layout, whole
from functree.layout.meshes import MeshView
from functree.layout.plan import Plan, plan_leaves, plan_tree
from functree.layout.prefix import Part
from functree.layout.row import Row
from functree.tree.asks import is_trainable
from functree.tree.axes import Axes
from functree.tree.filters import as_filter, patterns
from functree.tree.flat import Flat
from functree.tree.leaf import Leaf
from functree.tree.leaves import Leaves, read
from functree.tree.paths import Path


class Optimizer(Protocol):
    """What is asked of an optimizer: optax's `GradientTransformation`, and whatever has its `init`."""

    @property
    def init(self) -> Callable[..., Any]: ...


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
    tx: Optimizer,
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
        ShardingError: the model cannot be laid out; a leaf of the state cannot be derived and there is no `otherwise`.

    Examples:
        >>> import optax
        >>> plan = ft.plan_optimizer(optax.adam(1e-3), {"w": jnp.ones((4, 8))}, ft.P("data"), {"data": 2})
        >>> plan["0.mu.w"].spec, plan["0.count"].reason
        (P('data', None), 'does not depend on the parameters')
    """
    return planned_state(tx, model, layout, mesh, wrt, otherwise)[0]


def planned_state(tx: Any, model: Any, layout: Any, mesh: Any, wrt: Any, otherwise: Any) -> tuple[Plan, Any]:
    """The plan of the state, and the parameters that it is for."""
    model_plan = plan_tree(model, layout, mesh)
    params = parameters(model, wrt)
    rows = {leaf.path: model_plan[leaf.path] for leaf in read(params).leaves}
    leaves, origins = trace_state(tx, params, rows)
    known = [described(leaf, origin, rows) for leaf, origin in zip(leaves.leaves, origins, strict=True)]
    found = Leaves(tuple(known), (), leaves.treedef, leaves.positions, leaves.size)
    derived = Derived(tuple(origins), rows, None if otherwise is None else as_layout(otherwise))
    view = model_plan.view
    return plan_leaves(found, [Part(derived, Path(), leaves.size)], view), params


def parameters(model: Any, wrt: Any) -> Any:
    """The arrays of a model that a filter matches; None elsewhere.

    Raises:
        RuleError: a pattern in the filter matches no leaf: what it was to freeze would be trained.
    """
    leaves, matches = read(model), as_filter(wrt)
    for pattern in patterns(matches):
        if not any(map(pattern, leaves.leaves)):
            near = did_you_mean(getattr(pattern, "pattern", ""), [leaf.path for leaf in leaves.leaves])
            raise RuleError(f"wrt={wrt!r}: {pattern!r} matches no leaf of {type(model).__name__}{near}")
    return leaves.tree(leaf.value if matches(leaf) else None for leaf in leaves.leaves)


class Derived(Layout):
    """The layout of one optimizer state, leaf by leaf in its order."""

    __slots__ = ("origins", "otherwise", "rows")
    origins: Sequence[Origin]
    rows: Mapping[Path, Row]
    otherwise: Layout | None

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
            number = origin.parameter is not None and not leaf.shape
            return start._replace(reason=f"one number for {origin.parameter}" if number else INDEPENDENT)
        row = self.rows[origin.parameter]
        same = origin.dims == tuple(range(len(row.shape)))
        return start._replace(
            entries=tuple(() if dim is None else _mesh_axes(row, dim) for dim in origin.dims),
            rules=(f"the spec of {origin.parameter}",) * len(origin.dims),
            reason=f"as {origin.parameter}" + ("" if same else f", its dimensions {_kept(origin.dims)}"),
            memory_kind=row.memory_kind,
        )


INDEPENDENT = "does not depend on the parameters"
UNDERIVABLE = (
    "depends on the shapes of the parameters in a way that cannot be told, so no parameter's spec is its own",
    "give a layout for such leaves: `otherwise=P()` for whole on every device; in a TrainState, by a pattern: "
    "`StateSharding({'opt_state.**': P(), ...: layout})`",
)


def _mesh_axes(row: Row, dim: int) -> tuple[str, ...]:
    entry = row.spec[dim] if row.spec is not None else None
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _kept(dims: Sequence[int | None]) -> str:
    return ", ".join("whole" if dim is None else str(dim) for dim in dims)


def described(leaf: Leaf, origin: Origin, rows: Mapping[Path, Row]) -> Leaf:
    """The leaf with the axes of the dimensions that it has from its parameter, whose path patterns see too."""
    if origin.parameter is None:
        return leaf._replace(axes=Axes(*[None] * len(leaf.shape)), problem=None)
    axes = rows[origin.parameter].axes
    kept = Axes(*(None if dim is None else axes[dim] for dim in origin.dims))
    names = (leaf.path, origin.parameter)
    return leaf._replace(axes=kept, names=names, problem=None, annotated=origin.derived, stacked=0)


# Where the leaves of a state come from


def trace_state(tx: Any, params: Any, rows: Mapping[Path, Row]) -> tuple[Leaves, list[Origin]]:
    """The leaves of `tx.init(params)`, abstract, and what each comes from; `rows` are the parameters'."""
    real = _state(tx, params)
    paths = [leaf.path for leaf in real.leaves]
    owners = _owners(paths, rows)
    rivals = dict.fromkeys(owner for several in owners.values() if len(several) > 1 for owner in several)
    steps = dict.fromkeys(rows, 1) | {path: 1 + i % STEPS for i, path in enumerate(rivals)}
    changed, other = _changed(tx, params, rows, steps)
    jumped = _jumped(real, other, owners)
    if jumped:  # by the next larger sizes; so such parameters get smaller ones
        changed, other = _changed(tx, params, rows, steps | {path: -steps[path] for path in jumped})
        jumped = _jumped(real, other, owners)
    origins = []
    for leaf in real.leaves:
        if leaf.path not in other or not jumped.isdisjoint(owners[leaf.path]):
            origins.append(_by_shape(leaf, owners[leaf.path], rows))
        else:
            origins.append(_told(leaf, other[leaf.path], owners[leaf.path], rows, changed))
    return real, origins


STEPS = 8  # by so many different steps the sizes of parameters change whose paths do not tell them apart


def _changed(
    tx: Any, params: Any, rows: Mapping[Path, Row], steps: Mapping[Path, int]
) -> tuple[dict[Path, tuple[int, ...]], dict[Path, Leaf]]:
    """Other sizes for the parameters, and the leaves of the state for them; none if it cannot be made for these."""
    shapes = {path: _distinct(row.shape, steps[path]) for path, row in rows.items()}
    try:
        state = _state(tx, _reshaped(params, shapes))
    except (TypeError, ValueError):  # an `init` that computes with the parameters needs sizes that fit together
        return shapes, {}
    return shapes, {leaf.path: leaf for leaf in state.leaves}


def _jumped(real: Leaves, other: Mapping[Path, Leaf], owners: Mapping[Path, Sequence[Path]]) -> set[Path]:
    """The parameters for whose other sizes the optimizer decided otherwise: their state has other leaves, or ranks."""
    odd = [x.path for x in real.leaves if x.path not in other or len(other[x.path].shape) != len(x.shape)]
    return {owner for path in odd for owner in owners[path]}


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
    out, taken = list(shape), set(shape)
    way = 1 if step > 0 else -1
    for i in sorted(range(len(shape)), key=lambda i: (shape[i], i), reverse=way < 0):
        size = shape[i] + step
        while size > 0 and size in taken:
            size += way
        while size <= 0 or size in taken:  # nothing below is left
            size += 1
        out[i] = size
        taken.add(size)
    return tuple(out)


# Whose a leaf is


def _owners(paths: Sequence[Path], params: Mapping[Path, Row]) -> dict[Path, list[Path]]:
    """For each leaf of the state, the parameters that its path may speak of, the likeliest first.

    `0.mu.w` speaks of `w`, `0.mu.w.1` too. What is in front stands before a tree of parameters, so every leaf behind
    it must be at a parameter's path. Of several fronts, the one with the most parameters behind it counts first, of
    equals the shortest: so `0.mu.w` is of `w` and not of a parameter `mu`, and `0.mu.a.w` of `a.w` and not of `w`.
    """
    matches = {path: [_first_of(path[k:], params) for k in range(len(path) + 1)] for path in paths}
    failing = {path[:k] for path, found in matches.items() for k, match in enumerate(found) if match is None}
    behind: defaultdict[tuple[Any, ...], set[Path]] = defaultdict(set)
    for path, found in matches.items():
        for k, match in enumerate(found):
            if match is not None and path[:k] not in failing:
                behind[path[:k]].add(match)
    owners: dict[Path, list[Path]] = {}
    for path, found in matches.items():
        fronts = sorted((-len(behind[path[:k]]), k) for k in range(len(found)) if path[:k] in behind)
        owners[path] = list(dict.fromkeys(match for _, k in fronts if (match := found[k]) is not None))
    return owners | _owners_below([path for path, several in owners.items() if not several], params)


def _first_of(keys: tuple[Any, ...], params: Mapping[Path, Row]) -> Path | None:
    """The longest parameter's path that some keys begin with."""
    return next((Path(keys[:n]) for n in range(len(keys), -1, -1) if keys[:n] in params), None)


def _owners_below(paths: Sequence[Path], params: Mapping[Path, Row]) -> dict[Path, list[Path]]:
    """For leaves of a part of the parameters (`lookahead` gives its inner optimizer one half): those that end alike.

    Not where they are so many that their sizes do not tell them apart.
    """
    endings: defaultdict[tuple[Any, ...], list[Path]] = defaultdict(list)
    for path in params if paths else ():
        for k in range(1, len(path)):
            endings[path[k:]].append(path)
    found = {path: next((endings[path[k:]] for k in range(len(path)) if path[k:] in endings), []) for path in paths}
    return {path: several if len(several) <= STEPS else [] for path, several in found.items()}


# Which dimensions it has


def _told(
    real: Leaf, other: Leaf, owners: Sequence[Path], rows: Mapping[Path, Row], changed: Mapping[Path, tuple[int, ...]]
) -> Origin:
    """The origin of a leaf by the first parameter that its sizes speak of."""
    found = [_origin(real, other, owner, rows, changed) for owner in owners or (None,)]
    return next((origin for origin in found if origin.derived), found[0])


def _origin(
    real: Leaf, other: Leaf, owner: Path | None, rows: Mapping[Path, Row], changed: Mapping[Path, tuple[int, ...]]
) -> Origin:
    """What a leaf comes from, told by its sizes for the real parameters and for the changed ones.

    It may have all the parameter's dimensions behind some of its own, or some of them in their order and none of
    its own. Others cannot be told: galore's rank is the parameter's smallest size, or not, as it happens.
    """
    varies = [a != b for a, b in zip(real.shape, other.shape, strict=True)]
    nothing = (None,) * len(varies)
    if owner is None or not any(varies):
        return Origin(owner, nothing, derived=not any(varies))
    want, have = changed[owner], rows[owner].shape
    lead = len(varies) - len(want)
    if lead >= 0 and other.shape[lead:] == want and real.shape[lead:] == have and not any(varies[:lead]):
        return Origin(owner, (*nothing[:lead], *range(len(want))))
    dims = tuple(want.index(n) if v and n in want else None for n, v in zip(other.shape, varies, strict=True))
    told = [n == 1 and not v if d is None else n == have[d] for d, n, v in zip(dims, real.shape, varies, strict=True)]
    kept = [d for d in dims if d is not None]
    if all(told) and kept == sorted(set(kept)):
        return Origin(owner, dims)
    return Origin(owner, nothing, derived=False)


def _by_shape(leaf: Leaf, owners: Sequence[Path], rows: Mapping[Path, Row]) -> Origin:
    """Where other sizes do not help: only what has its parameter's shape is known."""
    owner = owners[0] if owners else None
    if owner is not None and leaf.shape == rows[owner].shape:
        return Origin(owner, tuple(range(len(leaf.shape))))
    return Origin(owner, (None,) * len(leaf.shape), derived=not leaf.shape)
