"""What stands for a layout, alone and joined by `|`."""

import pickle
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

import functree as ft
from functree.devices.meshes import MeshView
from functree.layout.layout import as_layout, is_layout
from functree.layout.rules import activation
from tests.lib.checks import refused
from tests.lib.meshes import SIZES
from tests.lib.trees import leaf, x

P = PartitionSpec


class Two(eqx.Module):
    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden"]


def two(embed: int = 4, hidden: int = 8) -> Two:
    return Two(jnp.ones((embed, hidden)), jnp.ones(hidden))


def specs(tree: Any, layout: Any, mesh: Any = SIZES) -> list[P]:
    return [row.spec for row in ft.plan(tree, layout, mesh)]


# Specs


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (P(), P(None, None)),
        (P("data"), P("data", None)),
        (P(None, "model"), P(None, "model")),
        (P(("data", "model")), P(("data", "model"), None)),
        (P(("data",), ()), P("data", None)),
        (P(("model", "data"), None), P(("model", "data"), None)),
    ],
)
def test_a_spec_has_one_entry_for_each_dimension(spec: P, expected: P) -> None:
    found = ft.plan(jnp.ones((8, 4)), spec, SIZES)[()]
    assert found.spec == expected and len(found.spec) == 2


SPEC_ERRORS: dict[str, tuple[P, list[str]]] = {
    "rank": (
        P("data", None, None),
        [
            "P('data', None, None) has 3 entries for 2 dimensions",
            "one entry for each dimension, or fewer",
        ],
    ),
    "unknown": (
        P("modle"),
        [
            "P('modle') names `modle`, and the mesh (data=2, model=4) has no such axis; did you mean `model`?"
        ],
    ),
    "repeated": (
        P("data", "data"),
        [
            "P('data', 'data') uses mesh axis `data` twice, the second time for dimension 1",
            "Try: name the mesh axis once: it shards one dimension of an array",
        ],
    ),
    "repeated in one": (
        P(("data", "data")),
        ["uses mesh axis `data` twice, the second time for dimension 0"],
    ),
    "repeated across": (
        P(("data", "model"), "model"),
        ["uses mesh axis `model` twice, the second time for dimension 1"],
    ),
    "size": (
        P(None, "model"),
        ["dimension 1 has size 6; model=4 needs a multiple of 4", "pad dimension 1 to 8"],
    ),
    "sizes": (
        P(None, ("data", "model")),
        ["dimension 1 has size 6; (data, model)=8 needs a multiple of 8"],
    ),
    "unconstrained": (
        P(P.UNCONSTRAINED),
        ["dimension 0 is `P.UNCONSTRAINED`, which does not say how it is sharded"],
    ),
    "partial sums": (
        P("data", unreduced={"model"}),
        ["describes partial sums, which exist only inside a computation"],
    ),
}


@pytest.mark.parametrize("case", SPEC_ERRORS)
def test_what_a_spec_may_not(case: str) -> None:
    spec, said = SPEC_ERRORS[case]
    text = refused({"w": jnp.ones((8, 6))}, spec)
    assert all(part in text for part in [*said, "w   f32[8, 6]"])


@pytest.mark.parametrize("entry", [3, b"data", ("data", 3), 2.5, True])
def test_a_spec_of_what_is_no_mesh_axis(entry: Any) -> None:
    with pytest.raises(ft.RuleError, match="is neither a mesh axis, a tuple of them, nor `None`"):
        ft.plan(jnp.ones(4), P(entry), SIZES)
    with pytest.raises(ft.RuleError, match="is neither"):
        ft.StateSharding({...: P(entry)})
    assert "is neither a mesh axis" in refused(jnp.ones(4), lambda path, leaf: P(entry))
    annotated = type(
        "A",
        (eqx.Module,),
        {"__annotations__": {"w": Annotated[Float[Array, "a"], P(entry)]}, "__module__": __name__},
    )
    assert "is neither a mesh axis" in refused(annotated(jnp.ones(4)), ft.AxisRules({}))  # type: ignore[call-arg]


# NamedSharding, callables, None


def test_a_named_sharding_brings_its_mesh_and_memory(mesh: Mesh) -> None:
    plan = ft.plan(
        {"w": jnp.ones((4, 8))}, NamedSharding(mesh, P("data"), memory_kind="pinned_host")
    )
    assert (
        plan.mesh == mesh
        and plan["w"].spec == P("data", None)
        and plan["w"].memory_kind == "pinned_host"
    )
    assert plan.shardings["w"] == NamedSharding(mesh, P("data", None), memory_kind="pinned_host")
    assert refused(jnp.ones(4), NamedSharding(mesh, P("data")), {"data": 4}).startswith(
        "the layout is for the mesh (data=2, model=4), but the tree is laid out on (data=4): use one mesh"
    )
    swapped = Mesh(
        np.array(jax.devices())[::-1].reshape(2, 4),
        ("data", "model"),
        axis_types=(AxisType.Auto,) * 2,
    )
    assert "of other devices, but the tree is laid out" in refused(
        jnp.ones(4), NamedSharding(mesh, P("data")), swapped
    )


@pytest.mark.parametrize("kind", [None, "device"])
def test_a_named_sharding_in_default_memory_is_as_its_spec(mesh: Mesh, kind: str | None) -> None:
    named = NamedSharding(mesh, P("data"), memory_kind=kind)
    x = jnp.ones((4, 8))
    plan = ft.plan({"w": x, "tied": x}, {"w": named, "tied": P("data")}, mesh)
    assert [row.memory_kind for row in plan] == [None, None]
    assert ft.plan(x, ft.on_host(P()) | named)[()].memory_kind == "pinned_host"
    assert ft.plan(x, ft.on_host(P()) | named)[()].spec == P("data", None)


def test_a_callable_sees_path_and_leaf() -> None:
    seen = []

    def by_rank(path: ft.Path, leaf: Any) -> P:
        seen.append((path, leaf.shape))
        return P("data") if leaf.ndim == 2 else P()

    plan = ft.plan({"a": two()}, {"a": by_rank}, SIZES)
    assert seen == [
        (ft.Path(("w",)), (4, 8)),
        (ft.Path(("b",)), (8,)),
    ]  # below the subtree that it stands over
    assert [row.spec for row in plan] == [P("data", None), P(None)]
    assert plan["a.w"].reason == "P('data') by test_a_callable_sees_path_and_leaf.<locals>.by_rank"
    text = refused(two(), lambda path, leaf: "data")
    assert (
        "returned 'data', which is not a PartitionSpec" in text
        and "return `P(...)` for every leaf" in text
    )
    assert "returned None" in refused(two(), lambda path, leaf: None)


def test_none_is_no_layout() -> None:
    assert refused({"a": two(), "b": two()}, {"a": P(), "b": None}).startswith(
        "2 leaves cannot be laid out"
    )
    text = refused({"w": jnp.ones(4)}, {"w": None})
    assert (
        "no layout was given for this array (`None`)" in text
        and "write `P()` to replicate it" in text
    )
    assert "no layout was given" in refused({"w": jnp.ones(4)}, ft.StateSharding({"w": None}))
    assert specs({"w": jnp.ones(4), "n": 3}, {"w": P(), "n": None}) == [
        P(None)
    ]  # nothing to say of what is no array


@pytest.mark.parametrize("bad", [3, "data", ("data",), P, int, {"a"}, 2.5, ..., jnp.float32])
def test_what_is_no_layout(bad: Any) -> None:
    for make in (
        as_layout,
        ft.on_host,
        lambda x: ft.StateSharding({...: x}),
        lambda x: ft.FSDP("data") | x,
        lambda x: x | ft.FSDP("a"),
    ):
        with pytest.raises(ft.RuleError, match="is not a layout: write `P") as caught:
            make(bad)
        assert str(caught.value).endswith(
            "a `Plan`, or a callable (path, leaf) -> P"
        )  # no tree of them
    with pytest.raises(ft.RuleError):
        ft.plan({"a": jnp.ones(2)}, {"a": bad} if not isinstance(bad, dict | tuple) else bad, SIZES)


def test_what_is_a_layout() -> None:
    rules = ft.AxisRules({"a": "data"})
    for layout in (
        None,
        P(),
        rules,
        rules | P(),
        ft.FSDP("data"),
        ft.StateSharding({...: P()}),
        ft.on_host(P()),
        lambda p, x: P(),
    ):
        assert is_layout(layout) and isinstance(as_layout(layout), ft.Layout)
    for tree in ([P()], {"a": P()}, (P(), None), two(), eqx.nn.Linear):
        assert not is_layout(tree)


# `|`


def test_then_shards_only_what_first_left_whole() -> None:
    rules = ft.AxisRules({"hidden": "model", "embed": None})
    assert specs(two(), rules | ft.FSDP("data", min_size=0)) == [P("data", "model"), P("model")]
    by_path = ft.StateSharding({"w": P(None, "model"), "b": P()})
    assert specs(two(), by_path | ft.FSDP("data", min_size=0)) == [P("data", "model"), P("data")]
    assert specs(
        two(), ft.FSDP("data", min_size=0) | ft.StateSharding({"w": P("model"), "b": P()})
    ) == [
        P("model", "data"),
        P("data"),
    ]
    assert specs(jnp.ones((4, 8)), as_layout(P("data")) | P(None, "model")) == [P("data", "model")]
    assert specs(jnp.ones((4, 8)), as_layout(P("data")) | P("data", "model")) == [
        P("data", "model")
    ]  # the same is no conflict
    assert specs(jnp.ones((4, 8)), (lambda p, x: P("data")) | ft.FSDP("model", min_size=0)) == [
        P("data", "model")
    ]


def test_it_is_associative_and_printed_so() -> None:
    a, b, c = ft.AxisRules({"embed": None, "hidden": "model"}), ft.FSDP("data", min_size=0), P()
    assert (a | b) | c == a | (b | c) and hash((a | b) | c) == hash(a | (b | c))
    assert (
        repr(a | b | c)
        == "AxisRules({'embed': None, 'hidden': 'model'}) | FSDP('data', min_size=0) | P()"
    )
    assert a | b != b | a
    assert pickle.loads(pickle.dumps(a | b)) == a | b


def test_the_order_matters() -> None:
    a, b = ft.AxisRules({"embed": "data", "hidden": "data", ...: None}), ft.FSDP("data", min_size=0)
    assert specs(two(), a | b)[0] == P("data", None)
    assert specs(two(), b | ft.AxisRules({"hidden": "data", "embed": "data", ...: None}))[0] == P(
        None, "data"
    )
    assert specs(two(embed=16, hidden=8), b | ft.AxisRules({"embed": None, "hidden": None})) == [
        P("data", None),
        P("data"),
    ]


CONFLICTS: dict[str, tuple[Any, str]] = {
    "two specs": (
        as_layout(P("data")) | P("model"),
        "dimension 0 is already sharded over data, and P('model') shards it over model",
    ),
    "a spec and rules": (
        P("data") | ft.AxisRules({"embed": "model", "hidden": None}),
        '"embed" is already sharded over data, and rule embed→model shards it over model',
    ),
    "rules and a spec": (
        ft.AxisRules({"embed": ("data", "model"), "hidden": None}) | P("data"),
        "\"embed\" is already sharded over (data, model), and P('data') shards it over data",
    ),
    "rules that take more": (
        P("data") | ft.AxisRules({"embed": ("data", "model"), "hidden": None}),
        '"embed" is already sharded over data, and rule embed→(data, model) shards it over (data, model)',
    ),
    "two rules": (
        ft.AxisRules({"embed": "data", "hidden": None}) | ft.AxisRules({"embed": "model"}),
        '"embed" is already sharded over data, and rule embed→model shards it over model',
    ),
    "FSDP and rules": (
        ft.FSDP("data", min_size=0) | ft.AxisRules({"hidden": "model", "embed": None}),
        '"hidden" is already sharded over data, and rule hidden→model shards it over model',
    ),
    "FSDP and a callable": (
        ft.FSDP("data", min_size=0) | (lambda p, x: P(None, "model")),
        "is already sharded over data, and P(None, 'model') shards it over",
    ),
    "in a StateSharding": (
        ft.StateSharding({...: P("data")}) | ft.StateSharding({...: P("model")}),
        "is already sharded over data, and P('model') shards it over model",
    ),
}


class One(eqx.Module):
    w: Float[Array, "embed hidden"]


@pytest.mark.parametrize("case", CONFLICTS)
def test_a_conflict_is_an_error(case: str) -> None:
    layout, said = CONFLICTS[case]
    text = refused(One(jnp.ones((8, 16))), layout)
    plain = said.replace("dimension 0", '"embed"')
    assert said in text or plain in text
    assert (
        "let the layout after `|` shard only dimensions that the layout before it leaves unsharded"
        in text
    )


def test_a_mesh_axis_used_by_both_is_an_error() -> None:
    assert "uses mesh axis `data` twice, the second time for dimension 1" in refused(
        jnp.ones((4, 8)), as_layout(P("data")) | P(None, "data")
    )
    # rules see that it is taken
    rules = ft.AxisRules({"hidden": "data", "embed": None})
    assert specs(One(jnp.ones((4, 8))), P("data") | rules) == [P("data", None)]


def test_names_are_checked_against_the_composition() -> None:
    tree = One(jnp.ones((4, 8)))
    hidden, embed = ft.AxisRules({"hidden": "model"}), ft.AxisRules({"embed": "data"})
    assert specs(tree, hidden | embed) == specs(tree, embed | hidden) == [P("data", "model")]
    assert specs(tree, hidden | ft.AxisRules({...: None})) == [P(None, "model")]
    assert specs(tree, ft.AxisRules({...: None}) | hidden) == [P(None, "model")]
    assert "no rule names `embed`" in refused(tree, hidden | ft.AxisRules({"hidden": "model"}))
    assert "no rule names `embed`" in refused(tree, hidden | ft.FSDP("data", min_size=0))
    # a spec speaks of every dimension
    assert specs(tree, P("data") | hidden) == [P("data", "model")]
    assert specs(tree, hidden | P("data")) == [P("data", "model")]
    # each blocked name is told once, with the layout that it could go by
    one = ft.AxisRules([("hidden", "model"), ("embed", "model")])
    text = refused(tree, one | ft.AxisRules({"other": "data"}))
    assert text.count('"embed" has no rule left') == 1 and "no rule names" not in text
    assert specs(tree, one | ft.AxisRules({"embed": "data"})) == [P("data", "model")]
    assert '"embed" has no rule left' in refused(tree, hidden | ft.AxisRules({"embed": "model"}))


def test_none_cannot_be_joined() -> None:
    for make in (lambda: ft.FSDP("data") | None, lambda: None | ft.FSDP("data")):
        with pytest.raises(
            ft.RuleError, match="`None` is not one: leave it out, or write `P\\(\\)` to replicate"
        ):
            make()


def test_joined_shardings_bring_their_mesh(mesh: Mesh) -> None:
    plan = ft.plan(jnp.ones((4, 8)), NamedSharding(mesh, P("data")) | ft.FSDP("model", min_size=0))
    assert plan.mesh == mesh and plan[()].spec == P("data", "model")


# Host memory


def test_on_host(mesh: Mesh) -> None:
    rules = ft.AxisRules({"hidden": "model", "embed": None})
    plan = ft.plan({"a": two(), "b": two()}, {"a": ft.on_host(rules), "b": rules}, mesh)
    assert [row.memory_kind for row in plan] == ["pinned_host"] * 2 + [None] * 2
    assert plan.shardings["a"].w == NamedSharding(mesh, P(None, "model"), memory_kind="pinned_host")
    assert plan.shardings["b"].w.memory_kind != "pinned_host"
    assert (
        repr(ft.on_host(P("data"))) == "on_host(P('data'))"
        and ft.on_host(P()) == ft.on_host(P()) != P()
    )
    for nothing in (None, 3):
        with pytest.raises(ft.RuleError, match=f"{nothing}`? is not "):
            ft.on_host(nothing)  # type: ignore[arg-type]
    # joined, with host memory said by either
    for layout in (
        ft.on_host(P("data")) | P(None, "model"),
        P("data") | ft.on_host(P(None, "model")),
        ft.on_host(P("data")) | plan_of(mesh),
    ):
        found = ft.plan(jnp.ones((4, 8)), layout, mesh)[()]
        assert (found.spec, found.memory_kind) == (P("data", "model"), "pinned_host")


def test_on_host_is_about_arrays_that_are_kept() -> None:
    """An activation is computed with at once, on the device, though parameters are on the host."""
    rules = ft.AxisRules({"batch": "data", "embed": None})
    for layout in (
        ft.on_host(rules),
        ft.on_host(rules | ft.FSDP("data")),
        ft.StateSharding({...: ft.on_host(rules)}),
        ft.on_host(rules) | P(),
    ):
        view, layout = MeshView(SIZES), as_layout(layout)
        kept = layout.decide(leaf("batch embed", 4, 8), None, view)
        assert (kept.spec, kept.memory_kind) == (P("data", None), "pinned_host")
        assert layout.rules is not None
        found = layout.rules.decide(activation(ft.Axes("batch", "embed"), x(4, 8)), None, view)
        assert (found.spec, found.memory_kind) == (P("data", None), None)


def plan_of(mesh: Mesh) -> ft.Plan:
    return ft.plan(jnp.ones((4, 8)), P(None, "model"), mesh)


def test_the_repr_of_a_spec() -> None:
    for spec in (P(), P("a"), P(None, ("a", "b")), P(P.UNCONSTRAINED), P("a", unreduced={"b"})):
        assert eval(repr(as_layout(spec)), {"P": P}) == spec
