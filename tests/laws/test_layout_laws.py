"""Laws of every layout, over random trees, tables, filters and meshes."""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from jaxtyping import Float

import functree as ft

P = PartitionSpec
NAMES = ("batch", "embed", "hidden", "heads", "vocab")
MESH_AXES = ("data", "model", "stage")


class Box(eqx.Module):
    """One leaf, whose names are those that the rules give to its class."""

    w: Any


def array(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def annotated(axes: tuple[str | None, ...], shape: tuple[int, ...]) -> Any:
    text = " ".join(name or "_" for name in axes)
    hints = {"__annotations__": {"w": Float[jax.Array, text]}, "__module__": __name__}
    return type("Annotated", (eqx.Module,), hints)(array(shape))


# Strategies

meshes = st.dictionaries(st.sampled_from(MESH_AXES), st.sampled_from((1, 2, 3, 4)), min_size=1)
axes_of = st.lists(st.sampled_from((*NAMES, None)), max_size=4).map(tuple)
several = st.lists(st.sampled_from(MESH_AXES), min_size=1, max_size=2, unique=True)
targets = st.one_of(st.none(), several.map(lambda axes: axes[0] if len(axes) == 1 else tuple(axes)))


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    sizes = st.sampled_from((1, 2, 6, 12, 24))
    leaves = draw(st.lists(axes_of, min_size=1, max_size=4))
    return {
        f"m{i}": annotated(axes, tuple(draw(sizes) for _ in axes)) for i, axes in enumerate(leaves)
    }


@st.composite
def rules(draw: st.DrawFn) -> ft.AxisRules:
    pairs, closed = [], set()
    for name, target in draw(st.lists(st.tuples(st.sampled_from(NAMES), targets), max_size=6)):
        if name not in closed:
            pairs.append((name, target))
        closed |= {name} if target is None else set()
    return ft.AxisRules([*pairs, *([(..., None)] if draw(st.booleans()) else [])])


entries = st.lists(st.one_of(st.none(), several.map(tuple)), max_size=3)
specs = entries.map(lambda given: P(*given))
fsdps = st.builds(
    ft.FSDP,
    several,
    min_size=st.sampled_from((0, 2, 2**18)),
    axes=st.one_of(st.none(), st.lists(st.sampled_from(NAMES), min_size=1, max_size=2)),
    otherwise=st.one_of(st.none(), st.just(P())),
)
globs = st.sampled_from(("**", "m0.*", "m*.w", "**.w", "m1.w", "m2.**", "nothing"))
filters = st.recursive(
    st.one_of(
        globs,
        st.builds(ft.glob, globs),
        st.sampled_from(
            (re.compile(r"m[01]\.w"), eqx.Module, ft.under(Box), ft.is_trainable, ft.is_buffer)
        ),
        st.builds(ft.has_axis, st.sampled_from(NAMES)),
        st.builds(ft.has_ndim, st.integers(0, 4)),
        st.builds(ft.larger_than, st.integers(0, 40)),
    ),
    lambda inner: st.one_of(
        st.tuples(st.builds(ft.has_ndim, st.integers(0, 3)), inner).map(
            lambda two: two[0] & two[1]
        ),
        st.tuples(st.builds(ft.has_ndim, st.integers(0, 3)), inner).map(
            lambda two: two[0] | two[1]
        ),
        st.builds(ft.larger_than, st.integers(0, 9)).map(lambda one: ~one),
    ),
    max_leaves=3,
)


def state_shardings(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[ft.StateSharding]:
    ordered = st.tuples(
        st.lists(st.tuples(filters, inner), max_size=3),
        st.one_of(st.just([]), inner.map(lambda x: [(..., x)])),
    )
    unused = st.sampled_from(("error", "ignore"))
    return st.builds(
        lambda both, how: ft.StateSharding([*both[0], *both[1]], unused=how), ordered, unused
    )


layouts = st.recursive(
    st.one_of(specs, rules(), fsdps),
    lambda inner: st.one_of(
        state_shardings(inner),
        st.tuples(st.one_of(rules(), fsdps), inner).map(lambda two: two[0] | two[1]),
        inner.map(ft.on_host),
    ),
    max_leaves=4,
)


def mesh_axes(spec: P) -> Iterator[str]:
    for entry in spec:
        yield from () if entry is None else (entry,) if isinstance(entry, str) else entry


def legal(tree: Any, layout: Any, sizes: dict[str, int]) -> tuple[Any, ft.Plan]:
    """What of a tree has no problems, and its plan; those with some are the other laws' matter."""
    wrong = {problem.path[0] for problem in ft.plan(tree, layout, sizes, check=False).problems}
    tree = {key: value for key, value in tree.items() if key not in wrong}
    return tree, ft.plan(tree, layout, sizes)


@st.composite
def friendly(draw: st.DrawFn) -> tuple[Any, Any, dict[str, int]]:
    """A tree, a layout and a mesh that are likely to go together."""
    sizes = {axis: draw(st.sampled_from((1, 2, 3))) for axis in MESH_AXES}
    tree = {}
    for i, axes in enumerate(draw(st.lists(axes_of, min_size=1, max_size=4))):
        tree[f"m{i}"] = annotated(axes, tuple(draw(st.sampled_from((36, 72, 216))) for _ in axes))
    table = draw(rules())
    closed = ft.AxisRules([*[(name, target or None) for name, target in table.table], (..., None)])
    byfsdp = draw(fsdps)
    layout = draw(
        st.one_of(
            st.just(closed),
            st.just(closed | byfsdp),
            st.just(byfsdp | closed),
            st.just(
                ft.StateSharding({ft.has_ndim(2): closed | byfsdp, ...: byfsdp}, unused="ignore")
            ),
            st.just(ft.on_host(byfsdp)),
            specs,
        )
    )
    return tree, layout, sizes


@given(friendly())
def test_no_mesh_axis_twice(case: tuple[Any, Any, dict[str, int]]) -> None:
    _, plan = legal(*case)
    for row in plan:
        used = list(mesh_axes(row.spec))
        assert len(used) == len(set(used)) and set(used) <= set(case[2])


@given(friendly())
def test_local_shape_times_mesh_is_the_whole(case: tuple[Any, Any, dict[str, int]]) -> None:
    sizes = case[2]
    _, plan = legal(*case)
    for row in plan:
        parts = [math.prod(sizes[axis] for axis in mesh_axes(P(entry))) for entry in row.spec]
        assert tuple(n * k for n, k in zip(row.local_shape, parts, strict=True)) == row.shape
        assert row.bytes_global == 4 * math.prod(
            row.shape
        ) and row.bytes_per_device == 4 * math.prod(row.local_shape)
        assert row.copies * math.prod(parts) == math.prod(sizes.values())


@given(trees(), layouts, meshes)
def test_one_entry_for_each_dimension(tree: Any, layout: Any, sizes: dict[str, int]) -> None:
    """With problems too: the rows are there for what is right."""
    plan = ft.plan(tree, layout, sizes, check=False)
    assert [row.path for row in plan] == [ft.Path((key, "w")) for key in sorted(tree)]
    for row in plan:
        assert len(row.spec) == len(row.shape) == len(row.local_shape) == len(row.axes)
    for key in tree:
        assert plan.specs[key].w == plan[(key, "w")].spec


NAMESPACE = {name: getattr(ft, name) for name in dir(ft) if not name.startswith("_")} | {
    "re": re,
    "Module": eqx.Module,
    "Box": Box,
}


@given(layouts)
def test_the_repr_can_be_pasted_back(layout: Any) -> None:
    again = eval(repr(layout), NAMESPACE)
    assert again == layout and hash(again) == hash(layout) and repr(again) == repr(layout)


@given(trees(), layouts, meshes)
def test_a_layout_is_legal_or_a_sharding_error(
    tree: Any, layout: Any, sizes: dict[str, int]
) -> None:
    plan = ft.plan(tree, layout, sizes, check=False)
    try:
        checked = ft.plan(tree, layout, sizes)
    except ft.ShardingError as error:
        assert error.problems == plan.problems and error.problems
    else:
        assert checked == plan and not plan.problems


@given(friendly())
def test_a_plan_as_a_layout_is_itself(case: tuple[Any, Any, dict[str, int]]) -> None:
    sizes = case[2]
    tree, plan = legal(*case)
    assert [(r.spec, r.memory_kind) for r in ft.plan(tree, plan, sizes)] == [
        (r.spec, r.memory_kind) for r in plan
    ]
    again = ft.plan(tree, ft.StateSharding.from_specs(plan.specs), sizes)
    assert [r.spec for r in again] == [r.spec for r in plan]


# Illegal layouts: a law for each kind


class Drawn:
    """A tree, a mesh, and one leaf of the tree for a layout to be wrong for."""

    def __init__(self, draw: st.DrawFn):
        count = draw(st.integers(1, 4))
        self.at = draw(st.integers(0, count - 1))
        self.sizes = {axis: draw(st.sampled_from((2, 4))) for axis in MESH_AXES}
        ndims = [draw(st.integers(1, 3)) for _ in range(count)]
        self.shapes = [
            tuple(draw(st.sampled_from((8, 16, 64))) for _ in range(ndim)) for ndim in ndims
        ]
        self.axes = [tuple(draw(st.permutations(NAMES))[:ndim]) for ndim in ndims]
        self.names, self.ndim, self.path = self.axes[self.at], ndims[self.at], f"m{self.at}.w"
        self.dim = draw(st.integers(0, self.ndim - 1))
        self.axis = draw(st.sampled_from(MESH_AXES))

    @property
    def tree(self) -> dict[str, Any]:
        both = zip(self.axes, self.shapes, strict=True)
        return {f"m{i}": annotated(axes, shape) for i, (axes, shape) in enumerate(both)}

    def grow(self) -> None:
        """Make the dimension one longer, which no axis of the mesh divides."""
        shape = self.shapes[self.at]
        self.shapes[self.at] = (*shape[: self.dim], shape[self.dim] + 1, *shape[self.dim + 1 :])


def for_the_leaf(draw: st.DrawFn, drawn: Drawn, spec: P) -> Any:
    """A layout that gives the leaf this spec, and the others none."""
    if draw(st.booleans()):
        return ft.StateSharding({drawn.path: spec, ...: P()}, unused="ignore")
    return lambda path, leaf: spec if str(path) == drawn.path else P()


def of_wrong_rank(draw: st.DrawFn, drawn: Drawn) -> Any:
    more = draw(st.integers(drawn.ndim, drawn.ndim + 2))
    last = draw(st.one_of(st.none(), st.just(drawn.axis)))
    return for_the_leaf(draw, drawn, P(*[None] * more, last))


def with_an_unknown_axis(draw: st.DrawFn, drawn: Drawn) -> Any:
    name = drawn.axis + draw(st.sampled_from(("x", "_", "0")))
    return for_the_leaf(draw, drawn, P(*[None] * drawn.dim, name))


def with_an_axis_twice(draw: st.DrawFn, drawn: Drawn) -> Any:
    inside = P(*[None] * drawn.dim, (drawn.axis, drawn.axis))
    if draw(st.booleans()) or drawn.ndim < 2:
        return for_the_leaf(draw, drawn, inside)
    return for_the_leaf(draw, drawn, P(drawn.axis, *[None] * (drawn.ndim - 2), drawn.axis))


def that_does_not_divide(draw: st.DrawFn, drawn: Drawn) -> Any:
    drawn.grow()
    rule = ft.AxisRules({drawn.names[drawn.dim]: drawn.axis, ...: None})
    return draw(st.sampled_from((P(*[None] * drawn.dim, drawn.axis), rule)))


def without_a_name(draw: st.DrawFn, drawn: Drawn) -> Any:
    known = [name for name in NAMES if name != drawn.names[drawn.dim]]
    layout = ft.AxisRules(dict.fromkeys(known))
    return layout | ft.FSDP(drawn.axis) if draw(st.booleans()) else layout


def that_matches_not_all(draw: st.DrawFn, drawn: Drawn) -> Any:
    others = {f"m{i}.w": P() for i in range(len(drawn.shapes)) if i != drawn.at}
    return ft.StateSharding(others or {"no": P()}, unused="ignore")


def with_a_hidden_filter(draw: st.DrawFn, drawn: Drawn) -> Any:
    return ft.StateSharding([("**.w", P()), (drawn.path, P(drawn.axis)), (..., P())])


def with_a_filter_of_nothing(draw: st.DrawFn, drawn: Drawn) -> Any:
    drawn.path = "m9.w"
    return ft.StateSharding([("**.w", P()), (drawn.path, P(drawn.axis)), (..., P())])


# A layout that is wrong for the drawn leaf, and what the error says.
ILLEGAL: dict[str, tuple[Callable[[st.DrawFn, Drawn], Any], str]] = {
    "rank": (of_wrong_rank, "entries for"),
    "unknown mesh axis": (with_an_unknown_axis, "has no such axis"),
    "repeated axis": (with_an_axis_twice, "twice"),
    "indivisible size": (that_does_not_divide, "multiple of"),
    "missing name": (without_a_name, "no rule names"),
    "unmatched leaf": (that_matches_not_all, "no filter matches this leaf"),
    "hidden filter": (with_a_hidden_filter, "is never used"),
    "filter of nothing": (with_a_filter_of_nothing, "matches no leaf"),
}
OF_FILTERS = ("hidden filter", "filter of nothing")


@pytest.mark.parametrize("kind", ILLEGAL)
@settings(max_examples=60)
@given(data=st.data())
def test_an_illegal_layout_is_refused_by_leaf(kind: str, data: st.DataObject) -> None:
    make, said = ILLEGAL[kind]
    drawn = Drawn(data.draw)
    layout = make(data.draw, drawn)
    with pytest.raises(ft.FunctreeError) as caught:  # nothing else passes
        ft.plan(drawn.tree, layout, drawn.sizes)
    assert isinstance(caught.value, ft.ShardingError)
    assert drawn.path in str(caught.value) and said in str(caught.value)
    if kind not in OF_FILTERS:
        assert drawn.path in {str(problem.path) for problem in caught.value.problems}
