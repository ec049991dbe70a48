"""`ft.shard`, beside what JAX does with literal specs."""

import gc
import weakref
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

import functree as ft
from functree.layout.decide import plan_leaves
from tests.lib.checks import python_calls, raises
from tests.lib.meshes import MESH, mesh_of
from tests.lib.trees import MLP, BareMLP, mlp

P = PartitionSpec
RULES = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})


@pytest.mark.parametrize("explicit", [False, True])
def test_shard_puts_arrays_where_jax_would(explicit: bool):
    mesh = mesh_of(explicit)
    placed = ft.shard(mlp(), RULES, mesh)
    assert placed.up.sharding == NamedSharding(mesh, P(None, "model"))
    assert placed.down.sharding == NamedSharding(mesh, P("model", None))
    assert placed.name == "mlp"
    assert np.array_equal(placed.up, mlp().up)


@given(
    dtype=st.sampled_from(["float32", "bfloat16", "int8", "uint32", "bool", "complex64"]),
    spec=st.sampled_from(
        [P(), P("data"), P(None, "model"), P(("data", "model")), P("model", "data")]
    ),
    bits=st.binary(min_size=8 * 8, max_size=8 * 8),
)
def test_shard_changes_no_bit(dtype: str, spec: P, bits: bytes):
    raw = np.frombuffer(bits, np.uint8).reshape(8, 8)
    x = np.asarray(jnp.asarray(raw).astype(dtype))
    assert np.asarray(ft.shard(x, spec, MESH)).tobytes() == x.tobytes()


def test_shard_gives_back_the_same_object_where_jax_gives_another():
    x = jax.device_put(jnp.ones((8, 4)), NamedSharding(MESH, P("data")))
    assert jax.device_put(x, NamedSharding(MESH, P("data", None))) is not x, "else it tests nothing"
    assert ft.shard(x, P("data", None), MESH) is x


def test_shard_commits_what_lies_right_by_chance():
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",), axis_types=(AxisType.Auto,))
    x = jnp.ones(4)
    placed = ft.shard(x, P("data"), mesh)
    assert placed.committed and placed.sharding == NamedSharding(mesh, P("data"))


@pytest.mark.parametrize(
    "other", [ft.make_mesh(data=8), mesh_of(explicit=True)], ids=["shape", "explicit"]
)
def test_shard_moves_to_another_mesh_what_lies_right_there(other: Mesh):
    """On the same devices, in the same parts: and yet the array's mesh is another one."""
    x = jax.device_put(jnp.ones(8), NamedSharding(other, P(other.axis_names)))
    placed = ft.shard(x, P(("data", "model")), MESH)
    assert placed.sharding == NamedSharding(MESH, P(("data", "model")))
    assert placed.sharding.mesh.axis_types == MESH.axis_types
    assert placed.sharding.mesh.shape == MESH.shape


def test_shard_moves_only_what_must_move():
    half = eqx.tree_at(lambda m: m.down, ft.shard(mlp(), RULES, MESH), jnp.ones((8, 6)))
    whole = ft.shard(half, RULES, MESH)
    assert whole.up is half.up and whole.down.sharding.spec == P("model", None)
    again = ft.shard(whole, RULES, MESH)
    assert again.up is whole.up and again.down is whole.down


def test_shard_takes_numpy_scalars_and_typed_keys():
    placed = ft.shard({"n": np.float32(3), "key": jax.random.key(0)}, P(), MESH)
    assert placed["n"].sharding == NamedSharding(MESH, P())
    assert jax.random.bits(placed["key"]) == jax.random.bits(jax.random.key(0))


def test_shard_says_constrain_in_a_trace():
    with raises("up", "is traced", "inside jit", "`ft.constrain`", error=ft.ShardingError):
        jax.jit(lambda up: ft.shard(MLP(up, up), RULES, MESH).up)(jnp.ones((6, 8)))
    with pytest.raises(ft.ShardingError, match=r"(?s)is abstract.*`ft.abstract`"):
        ft.shard(jax.ShapeDtypeStruct((4, 8), "float32"), P(), MESH)


def test_shard_wants_devices():
    for mesh in ({"data": 2, "model": 4}, MESH.abstract_mesh):
        with pytest.raises(ft.ShardingError, match="has no devices"):
            ft.shard(mlp(), RULES, mesh)


def test_shard_on_host():
    placed = ft.shard(mlp(), ft.on_host(RULES), MESH)
    assert placed.up.sharding.memory_kind == "pinned_host"
    assert ft.shard(placed, ft.on_host(RULES), MESH).up is placed.up
    assert ft.shard(placed, RULES, MESH).up.sharding.memory_kind == "device"


def test_all_is_checked_before_anything_moves(monkeypatch: pytest.MonkeyPatch):
    tree = {"fits": jnp.ones(8), "not": jnp.ones(7)}
    monkeypatch.setattr(jax, "device_put", None)
    with pytest.raises(ft.ShardingError, match="not   f32"):
        ft.shard(tree, P("data"), MESH)
    with pytest.raises(TypeError):  # else this test tests nothing
        ft.shard({"fits": tree["fits"]}, P("data"), MESH)


# What fails in silence elsewhere


def test_silent_failure_07_names_stand_at_their_own_dimensions():
    class Batched(eqx.Module):
        w: Annotated[Array, ft.Axes(None, "embed", "hidden")]

    model = ft.shard(Batched(jnp.ones((4, 6, 8))), RULES, MESH)
    assert model.w.sharding.spec == P(None, None, "model")


def test_silent_failure_25_one_array_at_two_places_stays_one():
    class Tied(eqx.Module):
        embed: Float[Array, "vocab embed"]
        unembed: Float[Array, "vocab embed"]

    table = jnp.ones((16, 4))
    placed = ft.shard(Tied(table, table), ft.AxisRules({"vocab": "model", "embed": None}), MESH)
    assert placed.embed is placed.unembed
    assert placed.embed.sharding.spec == P("model", None)


# Trees of bare arrays

TOKENS, WEIGHT = np.arange(32).reshape(4, 8), np.ones(4, np.float32)
BARE = BareMLP(jnp.ones((4, 8)), jnp.ones((8, 4)))
TEXT_RULES = ft.AxisRules({"batch": "data", "seq": "model"})
AXES: dict[str, tuple[Any, Any, Any]] = {
    "an array": (TOKENS, "batch seq", P("data", "model")),
    "axes": (TOKENS, ft.Axes("batch", None), P("data", None)),
    "a dict": (
        {"tokens": TOKENS, "weight": WEIGHT}, {"tokens": "batch seq", "weight": "batch"},
        {"tokens": P("data", "model"), "weight": P("data")},
    ),
    "a text for all": ([TOKENS, (TOKENS, TOKENS)], "batch seq", [P("data", "model"), (P("data", "model"),) * 2]),
    "a prefix": ({"a": [TOKENS], "b": WEIGHT}, {"a": "_ seq", "b": "batch"}, {"a": [P(None, "model")], "b": P("data")}),
    "as it is annotated": (
        BARE, BareMLP("embed hidden", None), BareMLP(P(None, "model"), P("model", None)),  # pyright: ignore
    ),
    "beside a module": (
        [mlp(), TOKENS], [None, "batch seq"], [MLP(P(None, "model"), P("model", None), "mlp"), P("data", "model")]
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", AXES)
def test_axes_of_a_tree(case: str):
    tree, axes, specs = AXES[case]
    rules = ft.AxisRules({"batch": "data", "seq": "model", "hidden": "model", "embed": None})
    for _ in range(2):  # the second one is remembered
        placed = ft.shard(tree, rules, MESH, axes=axes)
        for x, old, spec in zip(*map(jax.tree.leaves, (placed, tree, specs)), strict=False):
            if not isinstance(spec, P):
                assert x is old
            else:
                assert x.sharding == NamedSharding(MESH, spec) and np.array_equal(x, old)


# A tree, its axes ─► the path of each array that they do not fit, and why.
WRONG_AXES: dict[str, tuple[Any, Any, dict[str, str]]] = {
    "too many": ({"a": [1, TOKENS]}, {"a": "b s e"}, {"a.1": 'its axes are "_ _", but `axes=` gives it "b s e"'}),
    "several": (
        {"a": WEIGHT, "b": TOKENS}, {"a": "batch seq", "b": "batch"},
        {"a": 'its axes are "_", but `axes=` gives it "batch seq"', "b": 'its axes are "_ _", but `axes=` gives it "batch"'},
    ),
    "annotated otherwise": (
        [BARE], [BareMLP("batch hidden", "hidden embed")],  # pyright: ignore
        {"0.up": 'its axes are "embed hidden", but `axes=` gives it "batch hidden"'},
    ),
    "a name": (TOKENS, "batch hiden", {"": "no rule names `hiden`; did you mean the rule for `hidden`?"}),
    "a size": (TOKENS[:3], "batch _", {"": '"batch" has size 3; rule batch→data needs a multiple of data=2'}),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_AXES)
def test_axes_that_do_not_fit(case: str):
    tree, axes, told = WRONG_AXES[case]
    with pytest.raises(ft.ShardingError) as caught:
        ft.shard(tree, RULES, MESH, axes=axes)
    assert {str(problem.path): problem.why for problem in caught.value.problems} == told


def test_axes_beside_names_in_the_rules():
    rules = ft.AxisRules(
        {"out_features": "model", "in_features": None, "batch": "data"}, names=ft.equinox_names
    )
    tree = [eqx.nn.Linear(4, 8, use_bias=False, key=jax.random.key(0)), WEIGHT]
    linear, weight = ft.shard(tree, rules, MESH, axes=[None, "batch"])
    assert linear.weight.sharding.spec == P("model", None) and weight.sharding.spec == P("data")
    with raises('its axes are "out_features in_features", but `axes=` gives it "batch _"'):
        ft.shard(tree, rules, MESH, axes=["batch _", "batch"])


def test_axes_of_another_structure():
    with raises('at `n`: 3 is not a string such as `"batch embed"`', error=ft.RuleError):
        ft.shard({"n": TOKENS}, RULES, MESH, axes={"n": 3})


def test_the_batches_of_a_loop_are_planned_once():
    def place(n: int) -> Any:
        batch = {"tokens": TOKENS + n, "weight": WEIGHT}
        return ft.shard(batch, TEXT_RULES, MESH, axes={"tokens": "batch seq", "weight": "batch"})

    first = place(0)
    assert python_calls(lambda: place(1), of=plan_leaves) == 0
    second = place(2)
    assert np.array_equal(second["tokens"], TOKENS + 2)
    assert second["tokens"].sharding == first["tokens"].sharding
    assert place(0)["weight"] is not first["weight"]


ANEW: dict[str, tuple[Any, Any, Any, Any]] = {
    "shape": (np.ones((4, 8)), TEXT_RULES, MESH, "batch seq"),
    "mesh": (TOKENS, TEXT_RULES, ft.make_mesh(data=4, model=2), "batch seq"),
    "explicit": (TOKENS, TEXT_RULES, mesh_of(True), "batch seq"),
    "rules": (TOKENS, ft.AxisRules({"batch": "model", "seq": None}), MESH, "batch seq"),
    "axes": (TOKENS, TEXT_RULES, MESH, "seq batch"),
    "spec": (TOKENS, P("data"), MESH, None),
    "a tree": ([TOKENS], [P("data")], MESH, None),
    "function": (TOKENS, lambda path, leaf: P("model"), MESH, None),
}


def test_what_a_batch_depends_on():
    """Each beside all others, in turn and again: as planned, whatever is remembered of the
    others."""
    for _ in range(2):
        for tree, layout, mesh, axes in ANEW.values():
            placed = jax.tree.leaves(ft.shard(tree, layout, mesh, axes=axes))
            if axes is None:
                rows = ft.plan(tree, layout, mesh).rows
            else:
                with ft.axis_rules(layout):
                    rows = ft.plan(tree, ft.spec(axes), mesh).rows
            assert [x.sharding for x in placed] == [NamedSharding(mesh, row.spec) for row in rows]


def test_a_batch_with_one_array_twice_has_one_spec():
    with pytest.raises(ft.ShardingError, match="is the same array as `a`"):
        ft.shard({"a": TOKENS, "b": TOKENS}, {"a": P("data"), "b": P()}, MESH)
    ft.shard({"a": TOKENS, "b": TOKENS + 1}, {"a": P("data"), "b": P()}, MESH)
    with pytest.raises(ft.ShardingError, match="is the same array as `a`"):
        ft.shard({"a": TOKENS, "b": TOKENS}, {"a": P("data"), "b": P()}, MESH)


def test_a_batch_without_a_mesh_is_refused_each_time():
    for _ in range(2):
        ft.shard(TOKENS, P("data"), MESH)
        with pytest.raises(ft.ShardingError, match="there is no mesh"):
            ft.shard(TOKENS, P("data"))
        with jax.set_mesh(ft.make_mesh(data=8)), pytest.raises(ft.ShardingError, match="8"):
            ft.shard(TOKENS, P("data"))


def test_what_is_remembered_of_batches_is_forgotten():
    """A loop over batches of ever new shapes fills no memory."""
    layout = ft.FSDP("data", min_size=1)
    remembered = weakref.ref(layout)
    ft.shard(TOKENS, layout, MESH)
    del layout
    gc.collect()
    assert remembered() is not None
    for size in range(1, 300):
        ft.shard(np.ones((8, size), np.int8), P("data"), MESH)
    gc.collect()
    assert remembered() is None
