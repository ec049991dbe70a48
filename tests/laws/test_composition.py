"""Whatever names a sharding, under every transform, on each kind of mesh axes, wherever the mesh
comes from; and every function that places or plans, on each kind of mesh axes and without a mesh.

Each cell of the first table is compared with plain JAX, in which every sharding is a
`NamedSharding` on a concrete mesh. A run tests a covering of the tables, `python -m tests.soak
--tables` all of them.
"""

import inspect
import itertools
from collections import namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

import functree as ft
from functree.devices.meshes import of_rank
from tests.lib.checks import raises
from tests.lib.covering import selected_cells
from tests.lib.meshes import EXPLICIT, MESH, assert_lies
from tests.lib.trees import MLP

P = PartitionSpec
SPEC = P("data", "model")
Function = Callable[[Array], Array]
RULES = ft.AxisRules({"rows": "data", "cols": "model"})

X = jnp.arange(64.0).reshape(8, 8)
ONE = jnp.ones((8, 8))


# The transforms that a function is called in: each as `(function, array, mesh) -> array`.


def custom(f: Function) -> Function:
    @jax.custom_vjp
    def g(x: Array) -> Array:
        return f(x)

    g.defvjp(lambda x: (f(x), x), lambda x, cotangent: (f(cotangent),))
    return g


def total(f: Function) -> Function:
    return lambda x: (f(x) ** 2).sum()


def by_rows(f: Any, mesh: Mesh) -> Function:
    """Under shard_map over the rows. On Explicit axes its argument has to be sharded so by its
    type."""

    def mapped(x: Array) -> Array:
        if AxisType.Explicit in mesh.axis_types and jax.typeof(x).sharding.spec != SPEC:
            x = jax.sharding.reshard(x, NamedSharding(mesh, P("data")))
        return jax.shard_map(
            f, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
        )(x)

    def called(x: Array) -> Array:
        with jax.set_mesh(mesh):
            return jax.jit(mapped)(x)

    return called


TRANSFORMS: dict[str, Callable[[Any, Array, Mesh], Array]] = {
    "eager": lambda f, x, mesh: f(x),
    "lower": lambda f, x, mesh: (f if hasattr(f, "lower") else jax.jit(f)).lower(x).compile()(x),
    "jax.jit": lambda f, x, mesh: jax.jit(lambda x: f(x))(x),
    "ft.jit": lambda f, x, mesh: ft.jit(lambda x: f(x))(x),
    "grad": lambda f, x, mesh: jax.grad(total(f))(x),
    "grad in jit": lambda f, x, mesh: jax.jit(jax.grad(total(f)))(x),
    "vmap": lambda f, x, mesh: jax.vmap(f)(x[None])[0],
    "vmap in jit": lambda f, x, mesh: jax.jit(jax.vmap(f))(x[None])[0],
    "vmap in ft.jit": lambda f, x, mesh: ft.jit(jax.vmap(f))(x[None])[0],
    "map": lambda f, x, mesh: jax.lax.map(f, x[None])[0],
    "while": lambda f, x, mesh: jax.lax.while_loop(
        lambda carry: carry[0] < 1, lambda carry: (carry[0] + 1, f(carry[1])), (0, x)
    )[1],
    "scan": lambda f, x, mesh: jax.lax.scan(lambda _, i: (0, f(x + i)), 0, jnp.arange(2.0))[1][0],
    "cond": lambda f, x, mesh: jax.lax.cond(jnp.bool_(True), f, lambda x: x, x),
    "remat": lambda f, x, mesh: jax.checkpoint(f)(x),
    "grad of remat": lambda f, x, mesh: jax.grad(total(jax.checkpoint(f)))(x),
    "custom_vjp": lambda f, x, mesh: jax.grad(total(custom(f)))(x),
    "shard_map": lambda f, x, mesh: by_rows(f, mesh)(x),
}
EAGER_GRADIENTS = {"grad", "grad of remat", "custom_vjp"}
GRADIENTS = {*EAGER_GRADIENTS, "grad in jit"}


# What is called


def put(x: Array, mesh: Mesh) -> Array:
    """The array, sharded by `SPEC`, in the words of plain JAX."""
    sharding = NamedSharding(mesh, SPEC)
    if AxisType.Explicit in mesh.axis_types:
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)


def annotated(x: Float[Array, "rows cols"]) -> Float[Array, "rows cols"]:
    return x * 2


def by_axes(x: Float[Array, "rows cols"]) -> Array:
    return ft.constrain(x * 2, "rows cols")


def square(x: Array) -> Array:
    return (x**2).sum()


def linear(x: Array) -> Array:
    return (x * 2).sum()


# What names a sharding. Ours takes `mesh=`, or nothing; plain JAX takes the mesh.
OURS: dict[str, Callable[..., Any]] = {
    "nothing": lambda **mesh: ft.jit(lambda x: x * 2, **mesh),
    "constrain": lambda **mesh: ft.jit(lambda x: ft.constrain(x * 2, SPEC), **mesh),
    "constrain by axes": lambda **mesh: ft.jit(by_axes, rules=RULES, **mesh),
    "typed": lambda **mesh: ft.jit(ft.typed(annotated, constrain=True), rules=RULES, **mesh),
    "in_shardings": lambda **mesh: ft.jit(lambda x: x * 2, in_shardings=SPEC, **mesh),
    "in_shardings by rules": lambda **mesh: ft.jit(annotated, in_shardings=RULES, **mesh),
    "out_shardings": lambda **mesh: ft.jit(lambda x: x * 2, out_shardings=SPEC, **mesh),
    "out_shardings by rules": lambda **mesh: ft.jit(annotated, out_shardings=RULES, **mesh),
    "grad": lambda **mesh: ft.jit(ft.grad(square, layout=SPEC), **mesh),
    "grad of a linear function": lambda **mesh: ft.jit(ft.grad(linear, layout=SPEC), **mesh),
    "shard_map": lambda **mesh: ft.shard_map(
        lambda x: x * 2, in_specs=SPEC, out_specs=SPEC, **mesh
    ),
    "constrain alone": lambda mesh=None: (
        lambda x: ft.constrain(x * 2, SPEC if mesh is None else NamedSharding(mesh, SPEC))
    ),
    "grad alone": lambda mesh=None: ft.grad(
        linear, layout=SPEC if mesh is None else NamedSharding(mesh, SPEC)
    ),
}
# The argument is sharded, and its double.
DOUBLED = {"constrain by axes", "typed", "in_shardings", "in_shardings by rules"}
SQUARED = {"grad"}
ONES = {"grad of a linear function", "grad alone"}
LOCAL = {
    "in_shardings",
    "in_shardings by rules",
    "out_shardings",
    "out_shardings by rules",
    "shard_map",
}


def plain(construct: str, mesh: Mesh) -> Function:
    """The same in plain JAX."""
    if construct == "nothing":
        return jax.jit(lambda x: x * 2)
    if construct in DOUBLED:
        return jax.jit(lambda x: put(put(x, mesh) * 2, mesh))
    if construct in SQUARED:
        return jax.jit(lambda x: put(jax.grad(square)(x), mesh))
    if construct in ONES:
        return jax.jit(lambda x: put(jax.grad(linear)(x), mesh))
    return jax.jit(lambda x: put(x * 2, mesh))


MESHES = {"Auto": MESH, "Explicit": EXPLICIT}
SOURCES = ("mesh=", "set_mesh", "arguments")


def called(make: Callable[[], Any], transform: str, source: str, mesh: Mesh, ambient: bool) -> Any:
    """The result of a cell, or the error."""
    x = X
    if source == "arguments":
        x = jax.device_put(x, NamedSharding(mesh, SPEC))
    with jax.set_mesh(mesh) if ambient else nullcontext():
        try:
            return TRANSFORMS[transform](make(), x, mesh)
        except (ft.FunctreeError, ValueError, jax.errors.JaxRuntimeError) as error:
            return error


# What more than two values of a cell bring about together: arguments and cotangents without a
# sharding on Explicit axes, and the cell in which JAX itself fails on Auto ones.
SPECIAL = [
    *itertools.product(
        ["in_shardings", "in_shardings by rules"],
        ["Explicit"],
        ["mesh=", "set_mesh"],
        ["eager", "lower", "custom_vjp"],
    ),
    *itertools.product(["shard_map"], ["Explicit"], ["set_mesh"], ["vmap", "vmap in jit", "scan"]),
    ("shard_map", "Auto", "arguments", "grad of remat"),
]
# Where nothing names a sharding, that of the argument is all that there is.
TABLE = [
    cell
    for cell in itertools.product(OURS, MESHES, SOURCES, TRANSFORMS)
    if cell[0] != "nothing" or cell[2] == "arguments"
]
CELLS = selected_cells(TABLE, SPECIAL)


@pytest.mark.parametrize(
    ("construct", "axes", "source", "transform"), CELLS, ids=map(" | ".join, CELLS)
)
def test_a_cell(construct: str, axes: str, source: str, transform: str):
    mesh, explicit, ambient = MESHES[axes], axes == "Explicit", source == "set_mesh"
    given = {"mesh": mesh} if source == "mesh=" else {}
    found = called(lambda: OURS[construct](**given), transform, source, mesh, ambient)
    if transform == "shard_map" and construct in LOCAL:
        assert isinstance(found, ft.ShardingError), found
        return
    unplaced = explicit and source != "arguments"
    if (
        unplaced
        and construct.startswith("in_shardings")
        and transform in ("eager", "lower", "custom_vjp")
    ):
        assert isinstance(
            found, ft.ShardingError
        ) and "its type in the body would be unsharded" in str(found)
        return
    if explicit and ambient and construct == "shard_map" and isinstance(found, ft.ShardingError):
        # Under a current mesh the type of a traced array is replicated, if nobody has placed the
        # array.
        assert transform not in ("eager", "lower") and "shard_map does not reshard it" in str(found)
        return
    if isinstance(found, ValueError | jax.errors.JaxRuntimeError) and not isinstance(
        found, ft.FunctreeError
    ):
        as_jax_does(found, construct, axes, source, transform)
        return
    assert not isinstance(found, Exception), found
    if transform == "shard_map":
        # Plain JAX constrains no array on a mesh whose axes are partly Manual.
        expected, sharding = (2 * ONE if construct in ONES else 2 * X), NamedSharding(mesh, SPEC)
    else:
        # On Explicit axes JAX needs the current mesh, from which it knows the devices of types.
        expected = called(
            lambda: plain(construct, mesh), transform, source, mesh, explicit or ambient
        )
        sharding = expected.sharding
    assert np.array_equal(found, expected)
    if construct == "nothing" and transform == "shard_map":
        return  # nobody asks for a sharding
    if transform in GRADIENTS and construct in ONES:
        return  # the gradient is zero, and depends on nothing that is placed
    if sharding.num_devices == 1 or (unplaced and transform in GRADIENTS):
        # Plain JAX has lost the mesh, or the gradient has the type of an argument that nobody has
        # placed.
        assert found.sharding.device_set == set(mesh.devices.flat)
        return
    assert found.sharding.is_equivalent_to(sharding, found.ndim), (found.sharding, sharding)


def as_jax_does(found: Exception, construct: str, axes: str, source: str, transform: str) -> None:
    """The errors of JAX that functree cannot foresee. Plain JAX, without a current mesh, raises
    them too."""
    if axes == "Auto":
        # An eager gradient through `jax.checkpoint` runs shard_map on arrays that are on no mesh.
        assert (construct, source, transform) == ("shard_map", "arguments", "grad of remat")
        assert "when passing `AbstractMesh`" in str(found) or "xla.sdy.LocalToGlobalShape" in str(
            found
        )
        return
    # Without a current mesh, JAX creates no array on Explicit axes outside of jit.
    assert source != "set_mesh" and (transform in EAGER_GRADIENTS or construct in ONES)
    other = called(lambda: plain(construct, MESHES[axes]), transform, source, MESHES[axes], False)
    for error in (found, other):
        assert isinstance(
            error, ValueError
        ) and "Please enter your `jit` into a mesh context" in str(error)


# Silent failures in every transform, by their numbers in the list of silent failures. In the body of
# a shard_map arrays are local, and layouts are an error that says so.

GLOBAL = [name for name in TRANSFORMS if name != "shard_map"]
# These call the function with values.
CALLED = ("eager", "lower", "custom_vjp")
OTHERS = ft.AxisRules({"rows": "model", "cols": "data"})


def expected(transform: str) -> Array:
    """The result of a transform of a function that doubles."""
    return TRANSFORMS[transform](lambda x: x * 2, X, MESH)


@pytest.mark.parametrize("transform", GLOBAL)
def test_silent_failure_9_one_array_at_two_paths_with_two_specs(transform: str):
    f = ft.jit(
        lambda tree: tree["a"] * 2,
        in_shardings={"tree": {"a": P("data"), "b": P("model")}},
        mesh=MESH,
    )
    with raises("tree.b   f32[8, 8]", "is the same array as `tree.a`", error=ft.ShardingError):
        TRANSFORMS[transform](lambda x: f({"a": x, "b": x}), X, MESH)


@pytest.mark.parametrize("transform", GLOBAL)
def test_silent_failure_21_an_array_that_is_committed_to_another_sharding(transform: str):
    """An error that names it. What is behind a tracer is not known, so a tracer is constrained."""
    f = ft.jit(lambda x: x * 2, in_shardings=SPEC, mesh=MESH)
    x = ft.shard(X, P(None, "data"), MESH)
    if transform in CALLED:
        with raises(
            "x   f32[8, 8]",
            "is sharded P(None, 'data') on (data=2, model=4), but `in_shardings` specifies",
        ):
            TRANSFORMS[transform](f, x, MESH)
    else:
        assert np.array_equal(TRANSFORMS[transform](f, x, MESH), expected(transform))


@pytest.mark.parametrize("transform", GLOBAL)
def test_silent_failure_23_ambient_rules_that_change(transform: str):
    f = ft.jit(lambda x: ft.constrain(x * 2, "rows cols"), mesh=MESH)
    x = ft.shard(X, P(), MESH)
    for rules, spec in ((RULES, SPEC), (OTHERS, P("model", "data")), (RULES, SPEC)):
        with ft.axis_rules(rules):
            found = TRANSFORMS[transform](f, x, MESH)
        assert np.array_equal(found, expected(transform))
        if transform not in EAGER_GRADIENTS:
            assert_lies(found, *spec)


class Pair(NamedTuple):
    first: Any
    second: Any


class Keyed:
    def __init__(self, first: Any, second: Any):
        self.first, self.second = first, second


Reversed = namedtuple("Reversed", ["first", "second"])
for registered in (Keyed, Reversed):
    jax.tree_util.register_pytree_node(
        registered,
        lambda node: ((node.second, node.first), None),
        lambda _, children, cls=registered: cls(children[1], children[0]),
    )


@pytest.mark.parametrize("cls", [Pair, Keyed, Reversed])
def test_silent_failure_39_leaves_are_taken_in_the_order_of_their_registration(cls: Any):
    f = ft.jit(lambda tree: tree["nested"].first * 2 + 0 * tree["nested"].second)
    assert np.array_equal(f({"nested": cls(X, jnp.ones_like(X))}), 2 * X)
    placed = ft.shard(cls(jnp.zeros((8, 2)), jnp.ones((4, 8))), P("data"), MESH)
    assert placed.first.shape == (8, 2) and not placed.first.any() and placed.second.all()
    _, part = ft.split(cls(jnp.zeros(2), jnp.ones(3)))
    assert part.first.shape == (2,) and part.second.shape == (3,)


# Every public function that places or plans × where it is called × kind of tree: a result, or an
# error by name

MODES = ("auto", "explicit", "manual", "none")
ROOMS = ("functree.devices", "functree.placing", "functree.transforms", "functree.layout")
NAMES = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})


def mlp() -> MLP:
    return MLP(jnp.ones((6, 8)), jnp.ones((8, 6)))


MAKE: dict[str, Callable[[], Any]] = {"array": lambda: jnp.ones((4, 8)), "module": mlp}
LAYOUT: dict[str, Any] = {"array": SPEC, "module": NAMES}
UP, DOWN = P(None, "model"), P("model")

# The specs of each kind of tree.
Specs = dict[str, list[P]]
SPECS: Specs = {"array": [SPEC], "module": [UP, DOWN]}
ADAM: Specs = {kind: [P(), *specs, *specs] for kind, specs in SPECS.items()}
WHOLE: Specs = {kind: [P()] * len(specs) for kind, specs in SPECS.items()}
UNSHARDED: Specs = {kind: [] for kind in SPECS}  # no NamedSharding to be seen


def for_each(*specs: P) -> Specs:
    """The same for each kind of tree."""
    return {kind: list(specs) for kind in SPECS}


def lie(tree: Any) -> list[P]:
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(tree)]
    return [s.spec for s in shardings if isinstance(s, NamedSharding)]


def rows(plan: ft.Plan) -> list[P]:
    return [row.spec for row in plan]  # type: ignore[misc]


def in_manual() -> bool:
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def traced(kind: str, compute: Callable[[Any], Any]) -> list[P]:
    """The specs of what is computed under jit, as users do. In a shard_map it is traced already,
    and no array has a sharding that could be seen."""
    arrays, rest = eqx.partition(MAKE[kind](), eqx.is_array)

    def computed(arrays: Any) -> Any:
        return eqx.filter(compute(eqx.combine(arrays, rest)), eqx.is_array)

    if in_manual():
        return [P() for _ in jax.tree.leaves(computed(arrays))]
    return lie(jax.jit(computed)(arrays))


def energy(tree: Any) -> Array:
    return sum(
        (jnp.sum(x**2) for x in jax.tree.leaves(tree) if eqx.is_inexact_array(x)), jnp.zeros(())
    )


def doubled(tree: Any) -> Any:
    return jax.tree.map(lambda x: x + x if eqx.is_array(x) else x, tree)


def spec_of_names() -> list[P]:
    with ft.axis_rules(NAMES):
        return [ft.spec("embed hidden")]


def shards_of_name() -> list[P]:
    with ft.axis_rules(NAMES):
        return [P(*ft.axis_shards("hidden").mesh_axes)]


# What comes out in each mode: specs, or a fragment of the error.
Outcomes = dict[str, Specs | str]
NO_PLAN = {
    "manual": "shapes are local along Manual mesh axes",
    "none": "there is no mesh: pass `mesh=`",
}
PLANNED: Outcomes = {"auto": SPECS, "explicit": SPECS, **NO_PLAN}
OF_ADAM: Outcomes = {"auto": ADAM, "explicit": ADAM, **NO_PLAN}
TRACED: Outcomes = {"auto": SPECS, "explicit": SPECS, "manual": WHOLE, "none": UNSHARDED}
NAMED: Outcomes = {mode: for_each(P() if mode == "manual" else UP) for mode in MODES}
# How each function is called on a kind of tree, and what comes out.
PLACING: dict[str, tuple[Callable[[str], list[P]], Outcomes]] = {
    "plan": (lambda kind: rows(ft.plan(MAKE[kind](), LAYOUT[kind])), PLANNED),
    "shard": (
        lambda kind: lie(ft.shard(MAKE[kind](), LAYOUT[kind])),
        {**PLANNED, "manual": "is traced"},
    ),
    "constrain": (
        lambda kind: traced(kind, lambda tree: ft.constrain(tree, LAYOUT[kind])),
        TRACED,
    ),
    "init": (lambda kind: lie(ft.init(MAKE[kind], LAYOUT[kind])()), PLANNED),
    "abstract": (lambda kind: lie(ft.abstract(MAKE[kind], LAYOUT[kind])()), PLANNED),
    "plan_optimizer": (
        lambda kind: rows(ft.plan_optimizer(optax.adam(1e-3), MAKE[kind](), LAYOUT[kind])),
        OF_ADAM,
    ),
    "init_optimizer": (
        lambda kind: lie(ft.init_optimizer(optax.adam(1e-3), MAKE[kind](), LAYOUT[kind])),
        OF_ADAM,
    ),
    "spec": (lambda kind: spec_of_names(), NAMED),
    "axis_rules": (lambda kind: spec_of_names(), NAMED),
    "axis_shards": (
        lambda kind: shards_of_name(),
        {mode: for_each(P("model") if mode in ("auto", "explicit") else P()) for mode in MODES},
    ),
    "grad": (lambda kind: traced(kind, ft.grad(energy, layout=LAYOUT[kind])), TRACED),
    "value_and_grad": (
        lambda kind: traced(
            kind, lambda tree: ft.value_and_grad(energy, layout=LAYOUT[kind])(tree)[1]
        ),
        TRACED,
    ),
    "jit": (lambda kind: lie(ft.jit(doubled, out_shardings=LAYOUT[kind])(MAKE[kind]())), PLANNED),
    "on_host": (
        lambda kind: rows(ft.plan(MAKE[kind](), jax.tree.map(ft.on_host, LAYOUT[kind]))),
        PLANNED,
    ),
    "make_mesh": (
        lambda kind: lie(ft.shard(MAKE[kind](), LAYOUT[kind], ft.make_mesh(data=2, model=4))),
        {**PLANNED, "manual": "is traced", "none": SPECS},
    ),
}


def test_every_function_that_places_has_a_row():
    # `stack` makes a module, `offload` a policy, and `copy` leaves arrays where they are; the others
    # run, compile and read functions, and are tested under each mode in files of their own.
    others = "stack offload copy accumulate ledger layouts why shard_map signature_layouts typed"
    public = {
        name
        for name, value in vars(ft).items()
        if not name.startswith("_")
        and inspect.isfunction(value)
        and value.__module__.startswith(ROOMS)
    }
    assert public - set(others.split()) == set(PLACING)


def in_mode(mode: str, function: Callable[[], list[P]]) -> list[P]:
    if mode == "none":
        return function()
    with jax.set_mesh(EXPLICIT if mode == "explicit" else MESH):
        if mode != "manual":
            return function()
        found: list[list[P]] = []

        def body(x: Array) -> Array:
            found.append(function())
            return x

        jax.jit(jax.shard_map(body, in_specs=SPEC, out_specs=SPEC))(jnp.ones((4, 8)))
        return found[0]


@pytest.mark.parametrize(
    ("name", "mode", "kind"), selected_cells(list(itertools.product(PLACING, MODES, MAKE)))
)
def test_gives_a_result_or_a_named_error(name: str, mode: str, kind: str):
    function, outcomes = PLACING[name]
    outcome = outcomes[mode]
    if isinstance(outcome, str):
        with pytest.raises(ft.ShardingError, match=outcome):
            in_mode(mode, lambda: function(kind))
        return
    found = in_mode(mode, lambda: function(kind))
    for spec, wanted in zip(found, outcome[kind], strict=True):
        assert of_rank(spec, 3) == of_rank(wanted, 3)
