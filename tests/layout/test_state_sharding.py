"""`StateSharding`: the first filter that matches decides, and no filter is dead in silence."""

import copy
import pickle
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

import functree as ft
from functree.layout.rules import with_rule
from functree.layout.state_sharding import with_tables
from tests.lib.checks import raises, refused
from tests.lib.meshes import SIZES
from tests.lib.trees import mlp

P = PartitionSpec


class Linear(eqx.Module):
    weight: Float[Array, "embed hidden"]
    bias: Float[Array, "hidden"]


class Conv(eqx.Module):
    kernel: Float[Array, "embed hidden"]


class Net(eqx.Module):
    layers: list[Linear]
    conv: Conv
    scale: ft.Buffer[Float[Array, "embed"]]


def linear() -> Linear:
    return Linear(jnp.ones((4, 8)), jnp.ones(8))


def net() -> Net:
    return Net([linear(), linear()], Conv(jnp.ones((4, 8))), jnp.ones(4))


def specs(tree: Any, layout: Any, mesh: Any = SIZES) -> dict[str, P]:
    return {str(row.path): row.spec for row in ft.plan(tree, layout, mesh)}


def test_specs_need_no_axes() -> None:
    """Neither those of what has no annotation, nor those of one that does not fit."""
    tree = {"plain": jnp.ones((4, 8)), "misfit": Conv(jnp.ones((4, 8, 2)))}
    layout = ft.StateSharding({"misfit.**": P("data"), ...: P(None, "model")})
    found = {"plain": P(None, "model"), "misfit.kernel": P("data", None, None)}
    assert specs(tree, layout) == found


# Which leaves


def matrix(path: Any, leaf: Any) -> bool:
    return leaf.ndim == 2


def test_the_first_match_wins() -> None:
    layout = ft.StateSharding(
        [("layers.0.*", P("model")), ("**.bias", P("data")), ("**.weight", P("data")), (..., P())]
    )
    assert specs(net(), layout) == {
        "layers.0.weight": P("model", None),
        "layers.0.bias": P("model"),
        "layers.1.weight": P("data", None),
        "layers.1.bias": P("data"),
        "conv.kernel": P(None, None),
        "scale": P(None),
    }
    assert ft.plan(net(), layout, SIZES)["layers.1.bias"].reason == "'**.bias': P('data') as given"
    assert ft.plan(net(), layout, SIZES)["scale"].reason == "...: P() as given"


def test_the_filter_is_named_after_the_reasons_of_earlier_layouts() -> None:
    tree = {"w": mlp(), "v": mlp()}
    rules = ft.AxisRules({"embed": None, "hidden": "model"})
    fsdp = ft.FSDP("data", min_size=0)
    inner = ft.StateSharding({"**.up": fsdp, ...: P()})
    plan = ft.plan(tree, rules | ft.StateSharding({"w.**": inner, ...: rules}), SIZES)
    largest = 'FSDP: "embed" is the largest dimension it can shard'
    assert plan["w.up"].reason == f"embed→None, hidden→model; 'w.**': '**.up': {largest}"
    assert plan["w.down"].reason == "hidden→model, embed→None; 'w.**': ...: P() as given"
    assert plan["v.up"].reason == "embed→None, hidden→model; ...: embed→None, hidden→model"
    first = ft.plan(tree, ft.StateSharding({"w.**": fsdp, ...: rules}) | fsdp, SIZES)
    assert first["v.up"].reason == f"...: embed→None, hidden→model; {largest}"
    unmatched = ft.plan(tree, rules | ft.StateSharding({"w.**": fsdp}), SIZES, check=False)
    assert unmatched["v.up"].reason == "embed→None, hidden→model" and len(unmatched.problems) == 2


def test_pairs_and_mappings_are_the_same() -> None:
    pairs = [("**.bias", P()), (..., P("data"))]
    assert ft.StateSharding([list(pair) for pair in pairs]) == ft.StateSharding(dict(pairs))


def test_problems_and_unused_names_come_through() -> None:
    rules = ft.AxisRules({"embed": "dat", "hidden": "model", "seq": None})
    plan = ft.plan(net(), ft.StateSharding({"conv.*": rules, ...: P()}), SIZES, check=False)
    assert plan.unused == ("seq",)
    assert [p.what for p in plan.problems] == ["rule embed→dat"]


# What is wrong with a tree


def test_many_filters_of_which_none_matches() -> None:
    many = ft.StateSharding([(f"a{i}", P()) for i in range(20)], unused="ignore")
    assert "'a7' and 12 more" in refused(net(), many) and "'a8'" not in refused(net(), many)


# Filters that match nothing, and the pattern that is suggested; empty for none.
MEANT: dict[str, tuple[Any, str]] = {
    "a letter": ("**.bais", "**.bias"),
    "a singular": ("**.layer.*", "**.layers.**"),
    "a plural": ("convs.*", "conv.*"),
    "a missing index": ("layers.bias", "layers.*.bias"),
    "a missing beginning": ("kernel", "**.kernel"),
    "a missing end": ("conv", "conv.**"),
    "a misspelled path": ("layer.1.wieght", "layers.1.weight"),
    "an index too many": ("layers.2.bias", "layers.*.bias"),
    "the whole path": ("blocks.*.bias", "layers.*.bias"),
    "a path": (ft.Path(("layer", 1, "bias")), "layers.1.bias"),
    "another tree": ("blocks.*.mlp", ""),
    "a class": (eqx.nn.LSTMCell, ""),
    "an axis": (ft.has_axis("embd"), ""),
}


@pytest.mark.parametrize("case", MEANT)
@pytest.mark.parametrize("of", ["model", "training state"])
def test_the_pattern_that_was_meant(case: str, of: str) -> None:
    written, near = MEANT[case]
    tree = net() if of == "model" else ft.TrainState.create(net(), optax.adam(1e-3))
    layout = ft.StateSharding({written: P(), ...: P()})
    end = near and f"; did you mean `{near}`?"
    assert f"      matches no leaf{end}\n" in refused(tree, layout)
    if near:
        ft.plan(tree, ft.StateSharding({near: P(), ...: P()}), SIZES)


def test_no_pattern_is_meant_that_earlier_filters_hide() -> None:
    earlier = {"**.bias": P(), "conv.*": P()}
    text = refused(net(), ft.StateSharding({**earlier, "**.bais": P(), "convs.*": P(), ...: P()}))
    assert text.count("matches no leaf\n") == 2 and "did you mean" not in text
    text = refused(net(), ft.StateSharding({"layers.0.*": P(), "**.bais": P(), ...: P()}))
    assert "did you mean `**.bias`?" in text


PARTS: dict[str, tuple[Any, str]] = {
    "not": (
        ~ft.glob("conv.kernal"),
        "glob('conv.kernal') matches no leaf; did you mean `conv.kern",
    ),
    "or": (ft.glob("conv.*") | ft.glob("**.bais"), "glob('**.bais') matches no leaf"),
    "and not": (ft.is_trainable & ~ft.glob("sclae"), "glob('sclae') matches no leaf; did you mean"),
    "deeper": (~(ft.glob("conv.*") & ~ft.glob("x")), "glob('x') matches no leaf"),
}


@pytest.mark.parametrize("case", PARTS)
def test_a_pattern_inside_of_a_filter_that_matches_nothing(case: str) -> None:
    written, told = PARTS[case]
    layout = ft.StateSharding({written: P(), ...: P()})
    text = refused(net(), layout)
    assert told in text and f"filter {written!r}" in text and "correct the pattern" in text
    kinder = ft.StateSharding({written: P(), ...: P()}, unused="ignore")
    ft.plan(net(), kinder, SIZES)


def test_a_property_inside_of_a_filter_may_match_nothing() -> None:
    for written in (~ft.under(eqx.nn.LSTMCell), ft.glob("conv.*") | ft.has_axis("nowhere")):
        ft.plan(net(), ft.StateSharding({written: P(), ...: P()}), SIZES)


def test_a_pattern_inside_of_a_filter_for_a_training_state() -> None:
    # One layout lays out a training state, and its model alone.
    layout = ft.StateSharding({~ft.glob("opt_state.**"): P(), ...: P()})
    ft.plan(net(), layout, SIZES)
    state = ft.TrainState.create(net(), optax.adam(1e-3))
    ft.plan(state, layout, SIZES)
    wrong = ft.StateSharding({~ft.glob("opt_state.0.cuont"): P(), ...: P()})
    assert "glob('opt_state.0.cuont') matches no leaf" in refused(state, wrong)


def test_a_filter_that_earlier_ones_hide() -> None:
    """By two together. One leaf that is left is enough."""
    hidden = ft.StateSharding([("layers.0.*", P()), ("layers.1.*", P()), (Linear, P()), (..., P())])
    assert "filter under(Linear)\n      is never used" in refused(net(), hidden)
    layout = ft.StateSharding({"layers.0.**": P(), "**.bias": P("data"), ...: P()})
    assert specs(net(), layout)["layers.1.bias"] == P("data")


def test_a_last_ellipsis_is_exempt() -> None:
    assert specs(net(), ft.StateSharding({"**": P(), ...: P("data")}))["scale"] == P(None)
    last = ft.StateSharding({"a": P(), ft.glob("**.b"): P()})
    assert "matches no leaf" in refused({"a": jnp.ones(2)}, last)


def test_a_misspelled_filter_below_a_key_with_the_name_of_a_field() -> None:
    """Only without such a key it may be one for a training state."""
    layout = ft.StateSharding({"model.wieght": P("data"), ...: P()})
    with pytest.raises(ft.ShardingError, match=r"did you mean `model\.weight`"):
        ft.plan({"model": {"weight": jnp.ones(8)}}, layout, SIZES)
    assert ft.plan({"net": {"weight": jnp.ones(8)}}, layout, SIZES)


def test_unused_says_what_to_do() -> None:
    filters = {"layers.**": P(), "**.bias": P("data"), "**.bais": P("data"), ...: P()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert specs(net(), ft.StateSharding(filters, unused="ignore"))["scale"] == P(None)
    with pytest.warns(ft.FunctreeWarning) as caught:
        assert specs(net(), ft.StateSharding(filters, unused="warn"))["scale"] == P(None)
    assert sorted(str(w.message)[:31] for w in caught) == [
        "filter '**.bais' matches no lea",
        "filter '**.bias' is never used,",
    ]
    assert {w.filename for w in caught} == {__file__}  # the line of the call
    # unmatched leaves are an error all the same
    with pytest.raises(ft.ShardingError, match="no filter matches this leaf"):
        ft.plan(net(), ft.StateSharding({"conv.*": P()}, unused="ignore"), SIZES)


# A function in the place of a filter that raises

FAILING: dict[str, Any] = {
    "gelu": jax.nn.gelu,
    "no bool": lambda path, leaf: jnp.ones(3) > 0,
    "own": lambda path, leaf: {}[path],
    "next of nothing": lambda path, leaf: next(iter(())),
}


@pytest.mark.parametrize("function", FAILING)
def test_a_filter_function_that_raises(function: str) -> None:
    chosen = FAILING[function]
    for door in (
        lambda: ft.split(linear(), chosen, ...),
        lambda: ft.grad(lambda layer: layer.weight.sum(), wrt=chosen)(linear()),
        lambda: ft.plan(linear(), ft.StateSharding({chosen: P(), ...: P()}), SIZES),
        lambda: ft.plan_optimizer(optax.sgd(0.1), linear(), P(), SIZES, wrt=chosen),
        lambda: ft.select(linear()).where(chosen),
    ):
        with raises("function ", "failed", "raised ", "Try: ", error=ft.RuleError):
            door()


# Construction

NONSENSE: dict[str, tuple[Any, str]] = {
    "... first": ({...: P(), "a": P()}, "`...` must be the last filter, since 'a' after it would match nothing"),
    "a number": (5, "StateSharding takes a mapping or (filter, layout) pairs; 5 is neither"),
    "no pair": ([("a", P(), P())], "is not a pair"),
    "a bad filter": ({3: P()}, "3 is not a filter: write a glob"),
    "a bad layout": ({"a": "data"}, "'data' is not a layout"),
}  # fmt: skip


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_is_refused_at_construction(case: str) -> None:
    rules, said = NONSENSE[case]
    with pytest.raises(ft.RuleError) as caught:
        ft.StateSharding(rules)
    assert said in str(caught.value)


# Values


def test_what_was_written_is_kept() -> None:
    rules = ft.AxisRules({...: None})
    layout = ft.StateSharding({"**.bias": P(), Linear: rules, ...: None})
    assert layout.filters == ("**.bias", Linear, ...)
    assert layout.layouts == (P(), rules, None) and layout.shardings == layout.layouts


def test_with_other_tables_the_rest_is_kept() -> None:
    """A rule comes in the place of the first one for its name, whose fallbacks go."""
    first, last = ("a", "x"), ("b", "z")
    table = ft.AxisRules([first, ("seq", "y"), ("seq", None), last])
    layout = ft.StateSharding({"a": P(), ...: table}, unused="ignore")
    changed = ft.AxisRules([first, ("seq", "m"), last])
    kept = ft.StateSharding({"a": P(), ...: changed}, unused="ignore")
    assert with_tables(layout, lambda table: with_rule(table, "seq", "m")) == kept
    assert with_rule(ft.AxisRules([first, (..., None)]), "seq", "y").pairs[0] == ("seq", "y")


def test_equal_by_what_filters_mean() -> None:
    assert ft.StateSharding({"**.bias": P()}) == ft.StateSharding({ft.glob("**.bias"): P()})
    assert ft.StateSharding({Linear: P()}) == ft.StateSharding({ft.under(Linear): P()})
    by_function = ft.StateSharding({matrix: matrix})
    assert pickle.loads(pickle.dumps(by_function)) == by_function
    assert "matrix: matrix" in repr(by_function)


def test_a_plan_and_a_named_sharding_can_be_values(mesh: Mesh) -> None:
    plan = ft.plan({"w": jnp.ones((4, 8))}, P("data"), mesh)
    layout = ft.StateSharding({"w": plan, "b": NamedSharding(mesh, P()), ...: P()})
    assert layout == ft.StateSharding({"w": plan, "b": NamedSharding(mesh, P()), ...: P()})
    assert "<Plan of 1 arrays" in repr(layout)
    # One without devices.
    layout = ft.StateSharding({"w": ft.plan({"w": jnp.ones((4, 8))}, P("data"), SIZES), ...: P()})
    assert pickle.loads(pickle.dumps(layout)) == layout == copy.deepcopy(layout)


# From a tree of specs


def test_from_specs() -> None:
    tree = {"a": [jnp.ones((4, 8)), jnp.ones(8)], "b.c": jnp.ones(4), "m": linear()}
    given = {"a": [P("data"), P("model")], "b.c": P("data"), "m": Linear(P(None, "model"), P())}  # type: ignore[arg-type]
    layout = ft.StateSharding.from_specs(given)
    assert layout.filters == ("a.0", "a.1", '"b.c"', "m.weight", "m.bias")
    assert specs(tree, layout) == {
        "a.0": P("data", None),
        "a.1": P("model"),
        '"b.c"': P("data"),
        "m.weight": P(None, "model"),
        "m.bias": P(None),
    }
    assert specs(jnp.ones(4), ft.StateSharding.from_specs(P("data"))) == {"": P("data")}


def test_from_specs_of_another_structure() -> None:
    text = refused(
        {"a": jnp.ones(2), "b": jnp.ones(2)}, ft.StateSharding.from_specs({"a": P(), "c": P()})
    )
    assert "filter 'c'\n      matches no leaf" in text
    assert "b   f32[2]\n      no filter matches this leaf" in text
    with pytest.raises(ft.RuleError, match="3 at `a` is not a PartitionSpec"):
        ft.StateSharding.from_specs({"a": 3})


def test_a_filter_before_one_that_gives_no_layout_is_used() -> None:
    first = ft.StateSharding({"w": P("data"), ...: P()})
    layout = first | ft.StateSharding({"w": None, ...: ft.FSDP("data", min_size=0)})
    plan = ft.plan({"w": jnp.ones((4, 4)), "b": jnp.ones(4)}, layout, {"data": 2}, check=False)
    assert [problem.path for problem in plan.problems] == [("w",)]
