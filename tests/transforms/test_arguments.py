"""Arguments that nobody has placed: where rules put them, how often that compiles, and which
warning is given."""

import itertools
import warnings
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float

import functree as ft
from functree.transforms.jit.layouts import Placement
from tests.lib.checks import compilations, raises, warns
from tests.lib.covering import selected_cells
from tests.lib.meshes import EXPLICIT, MESH

P = PartitionSpec
RULES = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})
TX = optax.adam(0.1)
MESHES = {"Auto": MESH, "Explicit": EXPLICIT}


class Layer(eqx.Module):
    up: Float[Array, "embed hidden"]
    bias: Float[Array, "hidden"]
    name: str = eqx.field(static=True, default="layer")


def layer(make: Any = jnp.asarray) -> Layer:
    return Layer(
        make(np.arange(512, dtype=np.float32).reshape(4, 128)), make(np.ones(128, np.float32))
    )


X = np.arange(256, dtype=np.float32).reshape(64, 4)


def step(tree: Any, x: Float[Array, "batch embed"]) -> Any:
    """What comes in goes out, doubled."""
    return jax.tree.map(lambda w: w + w if jnp.issubdtype(w.dtype, jnp.inexact) else w, tree), x + x


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def adam_state() -> Any:
    return TX.init(layer())


LAYER, STATE = [P(None, "model"), P("model")], [P(), *[P(None, "model"), P("model")] * 2]


class Argument(NamedTuple):
    """Something that nobody has placed.

    Attributes:
        make: makes it.
        specs: of its arrays by the rules.
        warns: whether a second call with it is warned of. NumPy's arrays are moved in each call in
            any case.
        call: calls a function with it and with a batch.
    """

    make: Callable[[], Any]
    specs: list[P]
    warns: bool = True
    call: Callable[..., Any] = lambda f, tree, x: f(tree, x)


def lowered(f: Any, tree: Any, x: Any) -> Any:
    """The result of the program that is compiled for abstract arguments."""
    return f.lower(abstract(tree), abstract(x)).compile()(ft.shard(tree, RULES, x.sharding.mesh), x)


def in_vmap(f: Any, tree: Any, x: Any) -> Any:
    """The result in an eager `vmap`, whose tracers know no mesh."""
    return jax.tree.map(
        lambda y: y[0], jax.vmap(f, in_axes=(0, None))(jax.tree.map(lambda w: w[None], tree), x)
    )


ARGUMENTS = {
    "numpy": Argument(lambda: layer(np.asarray), LAYER, warns=False),
    "uncommitted": Argument(layer, LAYER),
    "abstract": Argument(layer, LAYER, warns=False, call=lowered),
    "tracer": Argument(layer, LAYER, warns=False, call=in_vmap),
    "packed": Argument(lambda: ft.pack(layer()), LAYER),
    "TrainState": Argument(lambda: ft.TrainState.create(layer(), TX), [P(), *LAYER, *STATE]),
    "bare optimizer state": Argument(adam_state, STATE),
}


def lies(tree: Any, expected: list[P], mesh: Any) -> None:
    leaves = jax.tree.leaves(tree)
    assert len(leaves) == len(expected)
    for x, spec in zip(leaves, expected, strict=True):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim), (x.sharding, spec)


# Both doors. On Explicit axes `in_shardings` asks for arrays that are placed, see
# `test_silent_failure_31_in_explicit_mode`.
DOORS: dict[str, dict[str, Any]] = {
    "rules": {"rules": RULES},
    "in_shardings": {"in_shardings": {"tree": RULES, "x": P("data")}},
}
CELLS = [
    cell
    for cell in itertools.product(DOORS, ARGUMENTS, MESHES, [False, True])
    if cell[0] == "rules" or cell[2] == "Auto" or cell[1] == "abstract"
]


@pytest.mark.parametrize(("door", "kind", "axes", "donated"), selected_cells(CELLS))
def test_where_they_are_placed(door: str, kind: str, axes: str, donated: bool):
    argument, mesh = ARGUMENTS[kind], MESHES[axes]
    tree, x = argument.make(), ft.shard(X, P("data"), mesh)
    f = ft.jit(step, **DOORS[door], mesh=mesh, donate="tree" if donated else ())
    out, y = argument.call(f, tree, x)
    lies(out, argument.specs, mesh)
    lies(y, [P("data")], mesh)
    # The caller's arrays stay, donated or not.
    assert not any(
        isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(tree)
    )
    for before, after in zip(jax.tree.leaves(tree), jax.tree.leaves(out), strict=True):
        assert np.array_equal(
            before + before if jnp.issubdtype(before.dtype, jnp.inexact) else before, after
        )
    # The second call compiles nothing, and is warned of.
    with compilations() as heard, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        again, _ = argument.call(f, tree, x)
    lies(again, argument.specs, mesh)
    warns = argument.warns or (door == "in_shardings" and kind == "numpy")
    assert [str(one.message).partition(":")[0] for one in told] == ["step"] * warns
    assert kind in ("abstract", "tracer") or not heard
    # What came out, and what somebody has placed, are arguments of the same program.
    f(again, x), f(ft.shard(argument.make(), RULES, mesh), x)
    assert len(f.compilations) == 1


def test_what_is_committed_stays_whatever_the_rules_say():
    """Rules that do not fit what somebody has placed are no reason to refuse what nobody has."""
    tree = ft.shard(Layer(jnp.ones((4, 6)), jnp.ones(6)), P(), MESH)
    out, y = ft.jit(step, rules=RULES, mesh=MESH)(tree, X)
    lies(out, [P(), P()], MESH)
    lies(y, [P("data")], MESH)


def test_inside_shard_map_arrays_are_local():
    """So the rules, which are about whole arrays, say nothing of their sizes."""
    f = ft.jit(step, rules=RULES)
    local = np.ones((3, 4), np.float32)  # `data` does not divide 3

    def body(y: Array) -> Array:
        return y + f((), local)[1].sum()

    by_rows = P("data")
    mapped = jax.shard_map(body, mesh=MESH, in_specs=by_rows, out_specs=by_rows)
    assert jax.jit(mapped)(jnp.ones(8)).tolist() == [25.0] * 8


def test_scalars_are_not_placed():
    """JAX replicates them at no cost, so no call is warned of."""
    f, x = ft.jit(lambda n, x: x * n, rules=RULES), ft.shard(X, P("data"), MESH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            lies(f(jnp.float32(2), x), [P("data")], MESH)
        # Nor is one for which there are no rules: it needs no names.
        f = ft.jit(lambda n, x: x * n, rules=ft.FSDP("data"), mesh=MESH)
        lies(f(jnp.float32(2), x), [P("data")], MESH)


def test_they_are_placed_in_the_memory_of_the_layout():
    f = ft.jit(lambda tree: tree, rules=ft.on_host(RULES), mesh=MESH)
    for make in (jnp.asarray, np.asarray):
        out = f(layer(make))
        assert [w.sharding.memory_kind for w in (out.up, out.bias)] == ["pinned_host"] * 2
        assert out.up.sharding.spec == P(None, "model")


def test_of_a_traced_array_without_names_the_layout_is_left_to_the_compiler():
    def named(x: Float[Array, "batch embed"]) -> Any:
        return x * 2

    for fun, constrained in ((named, True), (lambda x: x * 2, False)):
        f = ft.jit(fun, rules=RULES, mesh=MESH)
        text = str(jax.make_jaxpr(jax.vmap(f))(X[None]))
        assert ("sharding_constraint" in text) is constrained


def test_a_layout_without_rules_is_not_about_activations():
    f = ft.jit(step, rules=ft.FSDP("data", min_size=0), mesh=MESH)
    with warns(
        "step: uncommitted arrays are replicated on mesh",
        '`x` f32[64, 4] (no rules for "batch embed")',
        "add `ft.AxisRules` to the rules, place them with `ft.shard`, or pass `in_shardings=`",
    ):
        out, y = f(layer(np.asarray), X)
    lies(out, [P(None, "data"), P("data")], MESH)
    lies(y, [P()], MESH)


def test_for_a_mesh_that_is_not_there_they_are_abstract():
    """Of the same types: a weak type is one of the program's too."""
    by_rows = NamedSharding(MESH, P("data", None))
    placement = Placement({0: by_rows, 2: by_rows}, can_run=False, donated=())
    weak, strong, other = jnp.full((8, 4), 2.0), jnp.ones((8, 4)), jnp.ones(2)
    assert jax.typeof(weak).weak_type and not jax.typeof(strong).weak_type
    one, kept, two = placement.place([weak, other, strong])
    for array, weak_type in ((one, True), (two, False)):
        assert isinstance(array, jax.ShapeDtypeStruct) and array.sharding == by_rows
        assert (array.shape, array.dtype, array.weak_type) == ((8, 4), np.float32, weak_type)
    assert kept is other


def test_an_entry_of_in_shardings_decides_instead():
    f = ft.jit(step, rules=RULES, mesh=MESH, in_shardings={"tree": P()})
    out, y = f(layer(), X)
    lies(out, [P(), P()], MESH)
    lies(y, [P("data")], MESH)
    f = ft.jit(lambda **more: more, rules=RULES, mesh=MESH, in_shardings={"mode": P(None, "data")})
    lies(f(mode=jnp.ones((64, 4)))["mode"], [P(None, "data")], MESH)


def test_silent_failure_34_what_has_no_names_is_replicated_with_a_warning():
    f = ft.jit(lambda w, x: (w @ x, x), rules=RULES)
    x = ft.shard(np.ones((4, 64), np.float32), P("data"), MESH)
    told = (
        r"<lambda>: uncommitted arrays are replicated on mesh .* `w` f32\[64, 4\] \(no axis names\)"
    )
    with pytest.warns(ft.FunctreeWarning, match=told):
        f(np.ones((64, 4), np.float32), x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(np.ones((64, 4), np.float32), x)  # once for each program
        # Scalars, keys and what costs nothing are never meant.
        f = ft.jit(lambda n, key, raw, small, x: (x * n, key, raw, small), rules=RULES)
        keys = jax.random.key(0), jax.random.PRNGKey(0)
        for _ in range(2):
            f(jnp.float32(2), *keys, jnp.ones(127), x)
        # On one device nothing is replicated.
        ft.jit(
            lambda w: w, rules=RULES, mesh=ft.make_mesh(data=1, model=1, devices=jax.devices()[:1])
        )(X)


def test_none_in_the_rules_is_an_error_for_what_nobody_has_placed():
    rules = ft.StateSharding({"**.up": P(), ...: None})
    f, x = ft.jit(lambda tree, x: x, rules=rules, mesh=MESH), ft.shard(X, P(), MESH)
    with raises("tree.bias   f32[128]", "no layout was given for this array (`None`)"):
        f(layer(), x)
    assert f(ft.shard(layer(), P(), MESH), x).shape == X.shape


def test_a_whole_layout_is_for_modules_only():
    both = RULES | ft.FSDP("data", min_size=0)
    f = ft.jit(step, rules=both, mesh=MESH)
    out, y = f(layer(), np.ones((64, 4), np.float32))
    lies(out, [P("data", "model"), P("model")], MESH)
    lies(y, [P("data")], MESH)  # not sharded by FSDP: it is an activation


REFUSED: dict[str, tuple[Any, Any, list[str]]] = {
    "a size": (RULES, Layer(np.ones((4, 6), np.float32), np.ones(6, np.float32)), ['"hidden" has size 6', "tree.up"]),
    "an optimizer": (
        ft.AxisRules({"batch": "data", "hidden": "model", "embed": None}), optax.adafactor().init(layer()),
        ["ft.plan_optimizer"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_rules_do_not_fit(case: str):
    rules, tree, told = REFUSED[case]
    with raises(
        "step: rules of uncommitted arguments: ", " on mesh", error=ft.ShardingError
    ) as caught:
        ft.jit(step, rules=rules, mesh=MESH)(tree, X)
    assert all(part in str(caught.value) for part in told), str(caught.value)


def test_without_rules_or_a_mesh_nothing_changes():
    plain, ruled = ft.jit(step), ft.jit(step, rules=RULES)
    with pytest.warns(
        ft.FunctreeWarning, match="step: one of 8 devices does all the work.* `mesh=`"
    ):
        ruled(layer(), X)
    for f in (plain, ruled):  # the warning comes once for each program
        out, y = f(layer(), X)
        assert all(x.sharding.num_devices == 1 for x in jax.tree.leaves((out, y)))


def test_the_spec_of_an_annotation_needs_no_rules():
    def f(x: Annotated[Float[Array, "a b"], P(None, "model")]):
        return x

    x = np.ones((8, 8), np.float32)
    for rules in (ft.FSDP("data", min_size=0), ft.StateSharding({...: ft.FSDP("data")})):
        (sharding,) = ft.jit(f, rules=rules, mesh=MESH).lower(x).compile().input_shardings[0]
        assert sharding.spec == P(None, "model")
