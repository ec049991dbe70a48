"""A plan as a table for a log."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

import functree as ft
from functree.layout.plan.text import array_of, groups_of
from functree.report.table import WIDTH
from tests.lib.checks import python_calls
from tests.lib.meshes import SIZES
from tests.lib.trees import module, x

P = PartitionSpec


class Block(eqx.Module):
    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden"]


def block(hidden: int = 8) -> Block:
    return Block(x(4, hidden), x(hidden, dtype=jnp.bfloat16))  # type: ignore[arg-type]


RULES = ft.AxisRules({"hidden": "model", "embed": None, "vocab": None})


def test_the_whole_text() -> None:
    plan = ft.plan({"blocks": [block(), block(), block()], "head": block(16)}, RULES, SIZES)
    assert str(plan) == (
        "path                                    array                                       why  per device\n"
        "blocks.{0-2}.w ×3                       f32[4, 8/model]                             1          96 B\n"
        "blocks.{0-2}.b ×3                       bf16[8/model]                               2          12 B\n"
        "head.w                                  f32[4, 16/model]                            1          64 B\n"
        "head.b                                  bf16[16/model]                              2           8 B\n"
        "\n"
        "why\n"
        "  1 embed hidden: embed→None, hidden→model\n"
        "  2 hidden: hidden→model\n"
        "\n"
        "mesh (data=2, model=4): 8 arrays, 720 B in all, 180 B on each device\n"
        "replicated over data: 8 arrays, 180 B per device; sharding would save 90 B (largest: head.w)\n"
        "not used by any leaf: vocab"
    )
    assert str(plan).endswith(plan.summary().splitlines()[-1])


CUTS: dict[str, tuple[Any, Any, str]] = {
    "one mesh axis": (jnp.ones((8, 4)), P("model"), "f32[8/model, 4]"),
    "several for one size": (jnp.ones((8, 4)), P(("data", "model")), "f32[8/data/model, 4]"),
    "each size": (jnp.ones((8, 4), jnp.int8), P("data", "model"), "i8[8/data, 4/model]"),
    "a number": (jnp.ones(()), P(), "f32[]"),
    "host memory": (jnp.ones(4), ft.on_host(P("data")), "f32[4/data] pinned_host"),
    "too many entries": (jnp.ones(4), P("data", "model"), "f32[4/data]"),
    "no size that is divided": (jnp.ones(3), P("data"), "f32[3/data]"),
}


@pytest.mark.parametrize("case", CUTS)
def test_cuts_are_in_the_shape(case: str) -> None:
    array, layout, expected = CUTS[case]
    plan = ft.plan({"w": array}, layout, SIZES, check=False)
    assert array_of(plan.rows[0]) == expected and f" {expected} " in str(plan)


def adam(dtype: Any = None) -> ft.TrainState[Any]:
    model = {"blocks": [block(), block()], "head": block(16)}
    return ft.TrainState.create(model, optax.adam(1e-3, mu_dtype=dtype))


def table(plan: ft.Plan) -> list[str]:
    """The lines above the reasons, without the spaces of the columns."""
    return [" ".join(line.split()) for line in str(plan).split("\n\n")[0].splitlines()]


def test_moments_are_one_line() -> None:
    plan = ft.plan(adam(), RULES, SIZES)
    assert table(plan)[1:] == [
        "step i32[] 1 4 B",
        "model.blocks.{0-1}.w ×2 f32[4, 8/model] 2 64 B",
        "model.blocks.{0-1}.b ×2 bf16[8/model] 3 8 B",
        "model.head.w f32[4, 16/model] 2 64 B",
        "model.head.b bf16[16/model] 3 8 B",
        "opt_state.0.count i32[] 1 4 B",
        "opt_state.0.mu.** ×3 like the parameters, in f32 128 B",
        "opt_state.0.mu.** ×3 like the parameters, in bf16 16 B",
        "opt_state.0.nu.** ×3 like the parameters, in f32 128 B",
        "opt_state.0.nu.** ×3 like the parameters, in bf16 16 B",
    ]
    assert str(plan["opt_state.0.mu.head.w"].follows) == "model.head.w"
    half = table(ft.plan(adam(jnp.float16), RULES, SIZES))
    assert "opt_state.0.mu.** ×6 like the parameters, in f16 80 B" in half
    # Below each of two training states.
    two = table(ft.plan({"a": adam(jnp.float16), "b": adam(jnp.float16)}, RULES, SIZES))
    assert "b.opt_state.0.mu.** ×6 like the parameters, in f16 80 B" in two
    # A plan of the optimizer's state alone has no parameters to refer to.
    alone = table(ft.plan_optimizer(optax.adam(1e-3), adam().model, RULES, SIZES))
    assert "0.mu.blocks.{0-1}.w ×2 f32[4, 8/model] 2 64 B" in alone


def test_follows_is_kept() -> None:
    ts = adam()
    plan = ft.plan(ts, RULES, SIZES)
    again = ft.Plan.from_json(plan.to_json())
    assert again.rows == plan.rows and str(again) == str(plan)
    assert ft.plan(ts, plan, SIZES) == plan


def test_moments_of_live_arrays(mesh: Mesh) -> None:
    model = {"w": jnp.ones((4, 8)), "b": jnp.ones(8)}
    ts = ft.TrainState.create(model, optax.adam(1e-3), layout=P(), mesh=mesh)
    assert "opt_state.0.mu.** ×2 like the parameters, in f32 160 B" in table(ft.plan(ts))
    # What is sharded in another way is told in full.
    w = ft.shard(model["w"], P("data"), mesh)
    other = eqx.tree_at(lambda ts: ts.opt_state[0].mu["w"], ts, w)
    assert any(line.startswith("opt_state.0.mu.w f32[4/data, 8]") for line in table(ft.plan(other)))


def test_the_largest_first() -> None:
    plan = ft.plan({"a": jnp.ones(8), "b": jnp.ones(64), "c": jnp.ones(16)}, P(), SIZES)
    lines = plan.table(sort="bytes").splitlines()[1:4]
    assert [line.split()[0] for line in lines] == ["b", "c", "a"]
    assert plan.table() == str(plan)


def test_what_is_replicated_and_what_it_costs() -> None:
    """A number is left out, and a mesh axis of size 1."""
    tree = {"a": x(32), "b": x(32), "c": x(32), "number": x()}
    specs = {"a": P("data"), "b": P(), "c": P(("data", "model")), "number": P()}
    plan = ft.plan(tree, specs, {**SIZES, "one": 1})
    assert plan.summary().splitlines()[1:] == [
        "replicated over data, model: 1 array, 128 B per device; sharding would save 112 B (largest: b)",
        "replicated over model: 1 array, 64 B per device; sharding would save 48 B (largest: a)",
    ]


FOLDS: dict[str, tuple[Any, list[tuple[str, int]]]] = {
    "a gap": ([x(4), x(8), x(4), x(4)], [("{0,2-3}", 3), ("1", 1)]),
    "two indices": ([[x(4)] * 2] * 3, [("{0-2}.{0-1}", 6)]),
    "no full grid": ([[x(4)] * 2, [x(4)]], [("0.0", 1), ("0.1", 1), ("1.0", 1)]),
    "text that looks like one": ({"0": x(4), "1": x(4)}, [('"0"', 1), ('"1"', 1)]),
    "a bare array": (x(4), [("(the root)", 1)]),
}


@pytest.mark.parametrize("case", FOLDS)
def test_what_is_folded(case: str) -> None:
    tree, expected = FOLDS[case]
    plan = ft.plan(tree, P(), SIZES)
    groups = groups_of(plan.rows)
    titles = [f"{path} ×{number}" if number > 1 else path for path, number in expected]
    assert [group.title for group in groups] == titles
    assert sum(group.per_device for group in groups) == plan.bytes_per_device
    assert all(title in str(plan) for title in titles)


KEYS = st.one_of(
    st.sampled_from(["a", "weight", "b.c", "[dim]", "ключ", "<b>"]),
    st.text(st.characters(exclude_categories=["C", "Z", "M"]), min_size=1, max_size=130),
)
NAMED = st.dictionaries(KEYS, st.tuples(st.integers(1, 3), st.integers(0, 3)), max_size=5)


@given(NAMED, st.integers(0, 3))
def test_it_fits_a_log_and_leaves_out_no_path(
    shapes: dict[str, tuple[int, int]], depth: int
) -> None:
    tree: Any = {key: x(*[size] * ndim) for key, (size, ndim) in shapes.items()}
    for level in range(depth):
        tree = {f"a_rather_long_name_{level}": tree}
    plan = ft.plan(
        tree, P(("data", "model", "expert")), {"data": 1, "model": 1, "expert": 1}, check=False
    )
    text = str(plan)
    assert all(len(line) <= WIDTH for line in text.split("\n")) and WIDTH == 100
    squeezed = "".join(text.split())
    for row in plan:
        shown = str(row.path)
        assert shown in squeezed
        if len(shown) <= WIDTH:
            assert shown in text  # in one piece, to be searched for


def test_problems_are_below_the_table_and_fit_too() -> None:
    long = {"a_very_long_name_of_a_module_that_goes_on": {"and_on_and_on_and_on": jnp.ones((3, 5))}}
    plan = ft.plan(long, P("data", "model"), SIZES, check=False)
    text = str(plan)
    assert text.count(f"PROBLEM {plan.rows[0].path}: dimension") == 2
    assert "a multiple of 4" in " ".join(text.split()) and max(map(len, text.splitlines())) <= WIDTH
    dead = ft.plan(long, ft.StateSharding({"x": P(), ...: P()}), SIZES, check=False)
    assert "PROBLEM filter 'x': matches no leaf" in str(dead)


def test_each_row_costs_the_same_and_needs_no_rich():
    def calls(rows: int) -> int:
        tree = {f"w{i}": {"a": x(8, i + 1)} for i in range(rows)}
        plan = ft.plan(tree, P(), SIZES)
        return python_calls(lambda: str(plan))

    assert calls(1000) < 12 * calls(100)


def test_each_field_keeps_rows_apart() -> None:
    row = ft.plan([jnp.ones((4, 4))], P(), SIZES)["0"]
    changes = {
        "spec": P("data", None),
        "reason": "because",
        "memory_kind": "pinned_host",
        "copies": 2,
        "shape": (4, 5),
        "dtype": np.dtype(np.int32),
    }
    for name, value in changes.items():
        other = row._replace(path=ft.Path((1,)), **{name: value})
        assert len(groups_of([row, other])) == 2, name
    assert len(groups_of([row, row._replace(path=ft.Path((1,)))])) == 1


# Axes with several sizes in one module

OF_EQUINOX = ft.AxisRules({...: None}, names=ft.equinox_names)
HEADLINE = "axes with several sizes in one module (are their names transposed?):"
KEY = jax.random.key(0)


class Swapped(eqx.Module):
    up: Float[Array, "embed hidden"]
    down: Float[Array, "embed hidden"]


class Gated(eqx.Module):
    mlp: Swapped
    gate: Float[Array, "embed hidden"]


SWAPPED = Swapped(x(8, 32), x(32, 8))  # type: ignore[arg-type]
SEVERAL_SIZES: dict[str, tuple[Any, list[str]]] = {
    "transposed": (SWAPPED, ["embed: 8 in up, 32 in down", "hidden: 32 in up, 8 in down"]),
    "weights of two layers": (
        {"up": ft.nn.Linear(8, 32, key=KEY), "down": ft.nn.Linear(32, 8, key=KEY)},
        [
            "embed: 32 in down.weight, 8 in up.weight",
            "hidden: 8 in down.weight, down.bias, 32 in up.weight, up.bias",
        ],
    ),
    "layers one after another": (eqx.nn.MLP(4, 8, 16, 2, key=KEY), []),
    "twice in one array": (module("embed embed", 8, 32), ["embed: 8 in w, 32 in w"]),
    "names of one layer each": (
        {"up": eqx.nn.Linear(8, 16, key=KEY), "down": eqx.nn.Linear(16, 8, key=KEY)}, [],
    ),
    "where they are nearest to each other": (
        Gated(SWAPPED, x(8, 16)),
        ["embed: 8 in mlp.up, 32 in mlp.down", "hidden: 32 in mlp.up, 8 in mlp.down"],
    ),
    "not again for moments": (
        ft.abstract(lambda: ft.TrainState.create(Swapped(jnp.ones((8, 32)), jnp.ones((32, 8))), optax.adam(0.1)))(),
        ["embed: 8 in model.up, 32 in model.down", "hidden: 32 in model.up, 8 in model.down"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SEVERAL_SIZES)
def test_axes_with_several_sizes(case: str) -> None:
    tree, lines = SEVERAL_SIZES[case]
    plan = ft.plan(tree, OF_EQUINOX, SIZES)
    text = str(plan)
    assert (HEADLINE in text) is bool(lines)
    if lines:
        assert text.splitlines()[-len(lines) - 1 :] == [HEADLINE, *lines]
        assert lines[0] in plan.html()


def test_no_more_lines_than_can_be_read() -> None:
    many = [Swapped(x(8, n), x(n, 8)) for n in range(10, 20)]  # type: ignore[arg-type]
    lines = str(ft.plan(many, OF_EQUINOX, SIZES)).splitlines()
    assert lines[-10] == HEADLINE and lines[-1] == "and 12 more (see `.axis_sizes`)"


def test_axis_sizes() -> None:
    plan = ft.plan(SWAPPED, OF_EQUINOX, SIZES)
    up, down = ft.Path("up"), ft.Path("down")
    assert plan.axis_sizes == {"embed": {8: (up,), 32: (down,)}, "hidden": {32: (up,), 8: (down,)}}
    assert ft.Plan.from_json(plan.to_json()).axis_sizes == plan.axis_sizes
    twice = ft.plan(module("embed embed", 8, 32), OF_EQUINOX, SIZES)
    assert twice.axis_sizes == {"embed": {8: (ft.Path("w"),), 32: (ft.Path("w"),)}}
