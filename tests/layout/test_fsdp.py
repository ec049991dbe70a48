"""`FSDP`: which dimension it takes, what it leaves alone, and what it refuses."""

import copy
import math
import pickle
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

import functree as ft
from tests.lib.checks import refused
from tests.lib.meshes import SIZES

P = PartitionSpec
ALL = ft.FSDP("data", min_size=0)


def row(layout: Any, *shape: int, sizes: dict[str, int] = SIZES) -> ft.Row:
    return ft.plan(jax.ShapeDtypeStruct(shape, jnp.float32), layout, sizes)[()]


CASES = [
    ((4, 8), P(None, "data")),
    ((8, 4), P("data", None)),
    ((4, 4), P("data", None)),  # the outermost of equals
    ((4, 9, 6), P(None, None, "data")),  # the largest that divides
    ((9, 2), P(None, "data")),
    ((2,), P("data")),
    ((2, 0), P("data", None)),
]


@pytest.mark.parametrize(("shape", "expected"), CASES)
def test_the_largest_that_divides(shape: tuple[int, ...], expected: P) -> None:
    assert row(ALL, *shape).spec == expected


def test_several_mesh_axes() -> None:
    assert row(ft.FSDP(("data", "model"), min_size=0), 12, 8).spec == P(None, ("data", "model"))
    assert row(ft.FSDP(["data"], min_size=0), 12, 8).spec == P("data", None)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 4))
def test_the_choice_beside_an_oracle(shape: list[int], parts: int) -> None:
    fitting = [(-size, dim) for dim, size in enumerate(shape) if size % parts == 0]
    layout = ft.FSDP("data", min_size=0, otherwise=P())
    expected = [None] * len(shape)
    if fitting:
        expected[min(fitting)[1]] = "data"  # type: ignore[call-overload]
    assert row(layout, *shape, sizes={"data": parts}).spec == P(*expected)


def test_min_size_counts_elements() -> None:
    layout = ft.FSDP("data", min_size=32)
    assert row(layout, 4, 8).spec == P(None, "data")
    small = row(layout, 31)
    assert small.spec == P(None) and small.reason == "FSDP: smaller than 32 elements"
    assert ft.FSDP("data").min_size == 2**18
    assert row(ft.FSDP("data"), 2**9, 2**9).spec == P("data", None)
    assert row(ft.FSDP("data"), 2**9, 2**9 - 1).spec == P(None, None)


def test_the_reasons() -> None:
    assert row(ALL, 4, 8).reason == "FSDP: dimension 1 is the largest unsharded dimension"
    assert row(ALL).reason == "FSDP: no unsharded dimension"
    assert row(P("data") | ALL, 4, 8).reason == "P('data') as given; FSDP: already uses data"
    assert row(P("model") | ALL, 4).reason == "P('model') as given; FSDP: no unsharded dimension"
    assert row(P("data") | ft.FSDP(("model", "data"), min_size=0), 4, 8).reason.endswith(
        "FSDP: already uses (model, data)"
    )


def test_what_stays_keeps_what_was_decided() -> None:
    assert row(P("data") | ALL, 4, 8).spec == P("data", None)
    assert row(P("model") | ALL, 4).spec == P("model")
    assert row(P(None, "model") | ft.FSDP("data"), 4, 8).spec == P(None, "model")


def test_it_takes_only_what_is_whole() -> None:
    assert row(P(None, "model") | ALL, 4, 8).spec == P("data", "model")
    assert row(ALL | ft.FSDP("model", min_size=0), 4, 8).spec == P("model", "data")


def test_none_divides() -> None:
    text = refused({"w": jnp.ones((3, 5))}, ALL)
    assert (
        "FSDP('data'): none of its unsharded dimensions (dimension 0=3, dimension 1=5) is a multiple of"
        in text
    )
    assert (
        "write `otherwise=P()` to leave such leaves as they are" in text and "w   f32[3, 5]" in text
    )
    text = refused({"w": jnp.ones((3, 8))}, P(None, "model") | ALL)  # the 8 is taken
    assert "(dimension 0=3) is a multiple of data=2" in text
    assert row(ft.FSDP("data"), 3, 5).spec == P(None, None)  # too small to be asked for


def test_otherwise() -> None:
    found = row(ft.FSDP("data", min_size=0, otherwise=P()), 3, 5)
    assert (
        found.spec == P(None, None)
        and found.reason == "FSDP: no dimension is divisible, otherwise P()"
    )
    assert row(ft.FSDP("model", min_size=0, otherwise=P("data")), 6, 5).spec == P("data", None)
    assert row(ft.FSDP("model", min_size=0, otherwise=P("data")), 8, 5).spec == P("model", None)
    assert "needs a multiple of 2" in refused(
        {"w": jnp.ones((3, 5))}, ft.FSDP("data", min_size=0, otherwise=P("data"))
    )


class Named(eqx.Module):
    w: Float[Array, "embed hidden"]


def test_only_the_named_axes() -> None:
    tree = Named(jnp.ones((4, 8)))
    assert ft.plan(tree, ft.FSDP("data", min_size=0), SIZES)["w"].spec == P(None, "data")
    assert ft.plan(tree, ft.FSDP("data", min_size=0, axes=("embed",)), SIZES)["w"].spec == P(
        "data", None
    )
    assert ft.FSDP("data", axes="embed seq") == ft.FSDP("data", axes=("embed", "seq"))
    other = ft.plan(tree, ft.FSDP("data", min_size=0, axes=("seq",)), SIZES)["w"]
    assert other.spec == P(None, None) and other.reason == "FSDP: no unsharded dimension"
    # indivisible is only what it may take
    assert '("embed"=3)' in refused(
        Named(jnp.ones((3, 8))), ft.FSDP("data", min_size=0, axes=("embed",))
    )
    assert ft.plan({"w": jnp.ones((4, 8))}, ft.FSDP("data", min_size=0, axes=("embed",)), SIZES)[
        "w"
    ].spec == P(None, None)


def test_the_axes_of_fsdp_are_mentioned() -> None:
    tree = Named(jnp.ones((4, 8)))
    rules = ft.AxisRules({"hidden": "model"})
    assert "no rule names `embed`" in refused(tree, rules | ft.FSDP("data", min_size=0))
    for layout in (
        rules | ft.FSDP("data", min_size=0, axes=("embed",)),
        ft.FSDP("data", axes=("embed",)) | rules,
    ):
        assert ft.plan(tree, layout, SIZES)["w"].spec[1] == "model"
    assert ft.plan(tree, rules | ft.FSDP("data", min_size=0, axes=("embed",)), SIZES)[
        "w"
    ].spec == P("data", "model")


BLOCKED = {"embed": "model", "hidden": "model"}
# A layout after the rules, or before them, and the spec of `embed hidden`; None for an error.
AFTER_BLOCKED: dict[str, tuple[ft.Layout, P | None]] = {
    "shards it": (ft.FSDP("data", min_size=0, axes="hidden"), P("model", "data")),
    "does not mention it": (ft.FSDP("data", min_size=0), None),
    "too small": (ft.FSDP("data", axes="hidden"), None),
    "its mesh axis is used": (ft.FSDP("model", min_size=0, axes="hidden"), None),
    "shards another": (ft.FSDP("data", min_size=0, axes="hidden embed"), P("model", "data")),
    "rules shard it": (ft.AxisRules({"hidden": "data"}), P("model", "data")),
    "rules close it": (ft.AxisRules({"hidden": None}), P("model", None)),
    "rules close all": (ft.AxisRules({...: None}), P("model", None)),
    "rules for another": (ft.AxisRules({"batch": "data"}), None),
    "rules that are blocked": (ft.AxisRules({"hidden": "model"}), None),
}


@pytest.mark.parametrize("case", AFTER_BLOCKED)
def test_a_blocked_name_is_not_excused_by_its_mention(case: str) -> None:
    then, spec = AFTER_BLOCKED[case]
    tree, layout = Named(jnp.ones((4, 8))), ft.AxisRules(BLOCKED) | then
    if spec is not None:
        assert ft.plan(tree, layout, SIZES)["w"].spec == spec
        return
    text = refused(tree, layout)
    assert '"hidden" has no rule left: `model` is used by "embed"' in text
    assert 'add `("hidden", None)` after its rules to leave it unsharded' in text
    # The remedy, to the letter.
    closed = ft.AxisRules([*BLOCKED.items(), ("hidden", None)]) | then
    assert ft.plan(tree, closed, SIZES)["w"].spec[0] == "model"


def test_an_indivisible_size_does_not_excuse_a_blocked_name() -> None:
    fsdp = ft.FSDP("data", min_size=0, axes="hidden", otherwise=P())
    tree = Named(jnp.ones((4, 7)))
    assert '"hidden" has no rule left' in refused(tree, ft.AxisRules(BLOCKED) | fsdp)
    assert ft.plan(tree, ft.AxisRules({"embed": "model"}) | fsdp, SIZES)["w"].spec[1] is None


def test_a_blocked_name_after_its_mention() -> None:
    layout = ft.FSDP("data", axes="hidden") | ft.AxisRules(BLOCKED)
    assert '"hidden" has no rule left' in refused(Named(jnp.ones((4, 8))), layout)
    shards = ft.FSDP("data", min_size=0, axes="hidden") | ft.AxisRules({"embed": "model"})
    assert ft.plan(Named(jnp.ones((4, 8))), shards, SIZES)["w"].spec == P("model", "data")


class Block(eqx.Module):
    w: Float[Array, "embed hidden"]
    b: Annotated[Float[Array, "hidden"], P("model")]


def stacked(layers: int, embed: int) -> ft.Stacked[Block]:
    shape = jax.ShapeDtypeStruct
    return ft.Stacked(
        Block(shape((layers, embed, 4), jnp.float32), shape((layers, 4), jnp.float32)),
        axis="layers",
    )


def test_otherwise_does_not_mention_names() -> None:
    layout = ft.AxisRules({"hidden": "model"}) | ft.FSDP("data", min_size=0, otherwise=P())
    assert "no rule names `embed`" in refused(Named(jnp.ones((3, 8))), layout)


def test_never_the_axis_of_a_stack() -> None:
    plan = ft.plan(stacked(64, 6), ALL, SIZES)
    assert plan["layer.w"].axes == ft.Axes("layers", "embed", "hidden")
    assert plan["layer.w"].spec == P(None, "data", None)
    assert 'none of its unsharded dimensions ("embed"=3, ' in refused(
        eqx.tree_at(
            lambda s: s.layer.w, stacked(64, 6), jax.ShapeDtypeStruct((64, 3, 5), jnp.float32)
        ),
        ALL,
    )


def test_a_physical_annotation_stands() -> None:
    tree = Block(jnp.ones((4, 8)), jnp.ones(8))
    assert ft.plan(tree, ALL, SIZES)["b"].spec == P("model")


def test_a_leaf_whose_axes_cannot_be_told() -> None:
    text = refused(
        Named(jnp.ones((6, 4, 8))), ALL
    )  # perhaps a stack, which must not be sharded along its layers
    assert 'has 3 dimensions; `Float[Array, "embed hidden"]` has 2' in text and "ft.Stacked" in text


def test_a_mesh_axis_that_the_mesh_lacks_whether_a_leaf_is_large_or_not() -> None:
    for tree in ({"w": jnp.ones((4, 8))}, {"w": jnp.ones(2**18)}):
        with pytest.raises(ft.ShardingError) as caught:
            ft.plan(tree, ft.FSDP("dta"), SIZES)
        assert (
            "FSDP('dta')\n      the mesh (data=2, model=4) has no axis `dta`; did you mean `data`?"
            in str(caught.value)
        )
        assert len(caught.value.problems) == 1
    with pytest.raises(ft.ShardingError, match="no axis `x`"):
        ft.plan({"w": jnp.ones((4, 8))}, P() | ft.FSDP(("data", "x"), min_size=0), SIZES)


NONSENSE: dict[str, tuple[dict[str, Any], str]] = {
    "a number": (
        {"axis": 3},
        "FSDP(3): the first argument is a mesh axis, or several different ones",
    ),
    "None": ({"axis": None}, "the first argument is a mesh axis"),
    "empty": ({"axis": ""}, "the first argument is a mesh axis"),
    "no axes": ({"axis": ()}, "the first argument is a mesh axis"),
    "twice": ({"axis": ("data", "data")}, "several different ones"),
    "a spec": ({"axis": P("data")}, "the first argument is a mesh axis"),
    "numbers": ({"axis": (1, 2)}, "the first argument is a mesh axis"),
    "negative": (
        {"axis": "data", "min_size": -1},
        "min_size=-1: give a number of elements, 0 or more",
    ),
    "a float": ({"axis": "data", "min_size": 1e6}, "min_size=1000000.0: give a number of elements"),
    "True": ({"axis": "data", "min_size": True}, "min_size=True: give a number of elements"),
    "otherwise": (
        {"axis": "data", "otherwise": "data"},
        "otherwise='data' is not a PartitionSpec; write `P()`",
    ),
    "otherwise odd": ({"axis": "data", "otherwise": P(3)}, "3 is neither a mesh axis"),
    "axes number": ({"axis": "data", "axes": 3}, "axes=3 is not a list of axis names"),
    "axes numbers": ({"axis": "data", "axes": (3,)}, "axes=(3,) is not a list of axis names"),
    "axes with a comma": (
        {"axis": "data", "axes": "embed,hidden"},
        "axes='embed,hidden' is not a list of axis names",
    ),
    "axes without a name": (
        {"axis": "data", "axes": ("embed", "_")},
        "such as `('embed', 'hidden')` or `'embed hidden'`",
    ),
    "axes empty": ({"axis": "data", "axes": ()}, "leave it out for every axis"),
    "axes blank": ({"axis": "data", "axes": " "}, "leave it out for every axis"),
}


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_is_refused_at_construction(case: str) -> None:
    arguments, said = NONSENSE[case]
    with pytest.raises(ft.RuleError) as caught:
        ft.FSDP(**arguments)
    assert said in str(caught.value)


def test_a_value() -> None:
    several = [
        ft.FSDP("data"),
        ft.FSDP("model"),
        ft.FSDP(("data", "model")),
        ft.FSDP("data", min_size=3),
        ft.FSDP("data", axes="a b"),
        ft.FSDP("data", otherwise=P()),
        ft.FSDP("data", otherwise=P("model", ("a", "b"))),
    ]
    for i, left in enumerate(several):
        assert [left == right for right in several] == [i == j for j in range(len(several))]
        for again in (
            pickle.loads(pickle.dumps(left)),
            copy.deepcopy(left),
            eval(repr(left), {"FSDP": ft.FSDP, "P": P}),
        ):
            assert again == left and hash(again) == hash(left)
    assert ft.FSDP("data") == ft.FSDP(("data",)) and ft.FSDP("data") != "data"
    assert (
        repr(ft.FSDP("data", 5, "a", P())) == "FSDP('data', min_size=5, axes=('a',), otherwise=P())"
    )
    with pytest.raises(AttributeError, match="cannot assign"):
        ft.FSDP("data").min_size = 3


def test_local_bytes() -> None:
    found = row(ft.FSDP("data", min_size=0), 6, 4)
    assert found.local_shape == (3, 4) and found.bytes_per_device == 48 and found.copies == 4
    assert math.prod(found.local_shape) * 2 == np.prod(found.shape)


def test_a_misspelt_axis_does_not_replicate_in_silence() -> None:
    model = ft.nn.Linear(8, 16, key=jax.random.key(0))
    message = "FSDP.*no leaf has the axis `embd`; did you mean `embed`"
    with pytest.raises(ft.ShardingError, match=f"(?s){message}"):
        ft.plan(model, ft.FSDP("data", axes="embd", min_size=0), {"data": 2})
    # A name that only other models have is none.
    assert (
        ft.plan(model, ft.FSDP("data", axes=("embed", "vocab"), min_size=0), {"data": 2})[
            "weight"
        ].spec[0]
        == "data"
    )
