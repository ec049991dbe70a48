"""The first operation whose values differ, and the first that is not finite: the line that is named
is the one at fault, and nothing is named in a sound program."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import functree as ft
from functree.testing import Operation, assert_same_as_unsharded, first_nonfinite
from functree.testing.checksums import checksum
from functree.testing.evidence import Watched
from functree.testing.first_difference import first_difference
from functree.testing.operation import source_text
from functree.testing.programs import Both, Program
from functree.testing.relations import Kind, relate
from functree.testing.scopes import Pairs, Scope
from functree.testing.search import Finding, Search
from tests.lib.checks import raises
from tests.lib.covering import whole_tables
from tests.lib.meshes import MESH, SIZES, lay
from tests.testing.planted_faults import FAULTS, PROGRAMS, faulty, line_of
from tests.testing.sound_programs import SOUND

P = ft.P


def line(comment: str) -> str:
    """The file and the line of this test that ends with a comment."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = [n for n, text in enumerate(lines, 1) if text.endswith(f"# {comment}")]
    return f"{Path(__file__).name}:{number}"


# Planted faults


class Compared:
    """A faulty program, compiled once for all of its faults."""

    def __init__(self, number: int):
        self.case = faulty(number)
        both = Both.of(self.case.fn, self.case.args, self.case.layouts, MESH)
        self.one, self.many = both.programs()
        self.pairs = Pairs.of(self.one.body, self.many.body)
        self.watched = Watched(self.pairs, self.one, self.many)

    def finding(self, fault: int) -> Finding | None:
        one, many = self.one, self.many
        if self.case.switched:
            one, many = switched(one, fault), switched(many, fault)
        return Search(self.watched.checksums(one, many)).first(Scope(self.pairs))


def switched(program: Program, fault: int) -> Program:
    number = jax.device_put(jnp.int32(fault), program.arrays[-1].sharding)
    return replace(program, arrays=[*program.arrays[:-1], number])


compared = functools.cache(Compared)


@pytest.mark.parametrize(("number", "fault", "name"), FAULTS, ids=[name for *_, name in FAULTS])
def test_the_line_of_a_fault_is_named(number: int, fault: int, name: str) -> None:
    finding = compared(number).finding(fault)
    assert finding is not None
    assert source_text(finding.step.source)[0] == line_of(name)


# Sound programs


@pytest.mark.parametrize("number", [n for n in range(len(PROGRAMS)) if faulty(n).switched])
def test_nothing_is_named_in_a_program_without_its_faults(number: int) -> None:
    assert compared(number).finding(0) is None


# Those that compile quickly. `python -m tests.soak --tables` runs all.
QUICK = (
    "scan_in_a_shard_map", "conditional_by_device", "partly_manual", "newton", "integers",
    "dropout", "cancelling_sums", "masks", "half_precision",
)  # fmt: skip


@pytest.mark.parametrize("name", SOUND if whole_tables() else QUICK)
def test_nothing_is_named_in_a_sound_program(name: str) -> None:
    with jax.default_matmul_precision("highest"):
        assert first_difference(*Both.of(*SOUND[name]()).programs()) is None


# What is said


X, W = jax.random.normal(jax.random.key(0), (8, 8)), jax.random.normal(jax.random.key(1), (8, 8))


def by_hand(x: Any, w: Any) -> Any:
    def body(x: Any, w: Any) -> Any:
        y = x @ w  # a product by hand
        return jnp.tanh(y)

    specs = P("data", "model"), P("model")
    return jax.shard_map(body, in_specs=specs, out_specs=P("data"), check_vma=False)(x, w)


def asks(x: Any, w: Any) -> Any:
    def layer(x: Any, _: Any) -> Any:
        y = jnp.sin(x)
        more = jax.sharding.get_abstract_mesh().shape.get("data", 0)
        return y + more, None  # a layer that asks

    return {"out": lax.scan(layer, x @ w, None, length=3)[0]}


def asks_late(x: Any, w: Any) -> Any:
    """Differs in iteration 201 of 300; a `while` keeps 128 iterations apart."""
    more = jax.sharding.get_abstract_mesh().shape.get("data", 0)

    def layer(state: Any) -> Any:
        x, i = state
        y = x + jnp.sin(x @ w) / 1000
        return y + jnp.where(i == 200, more, 0), i + 1

    return lax.while_loop(lambda state: state[1] < 300, layer, (x, 0))[0]  # a long loop


def on_one(x: Any) -> Any:
    def body(x: Any) -> Any:
        y = jnp.where(lax.axis_index("model") == 3, jnp.nan, x)  # NaN on one
        return y * 2

    return jax.shard_map(body, in_specs=P("data"), out_specs=P("data"), check_vma=False)(x)


def other(x: Any) -> Any:
    y = jnp.sin(x)
    if jax.sharding.get_abstract_mesh().shape:
        y = jnp.cumsum(y, 0)  # the first of one
    return y.sum()


def drawn(x: Any) -> Any:
    def body(x: Any) -> Any:
        return x + jax.random.normal(jax.random.key(3), x.shape)  # drawn by each

    return jax.shard_map(body, in_specs=P("data"), out_specs=P("data"), check_vma=False)(x)


def message(fn: Any, args: Any, layouts: Any) -> list[str]:
    with pytest.raises(AssertionError) as caught:
        assert_same_as_unsharded(fn, args, layouts, MESH)
    first, *rest = str(caught.value).splitlines()
    assert first == "the sharded function returns a different result"
    return rest


def test_a_missing_sum_is_told() -> None:
    *results, first = message(by_hand, (X, W), (P("data", "model"), P("model")))
    assert len(results) == 2 and "its copies on different devices differ by up to" in results[1]
    found = line("a product by hand")
    assert first.startswith(
        f"the first operation whose values differ is `dot_general` at {found}, in `y = x @ w  # a product by hand`, "
        "applied to `x` and `w`: its values differ by up to "
    )
    assert first.endswith(
        ": its sum over model is missing; its result is f32[4, 8], on each device, as P('data', None), with the "
        "terms of a sum over model"
    )


def test_a_small_difference_is_told_as_it_is() -> None:
    *_, first = message(by_hand, (X / 100, W), (P("data", "model"), P("model")))
    assert (
        "its values differ by up to 0.07" in first
        and "and their largest magnitude is 0.07" in first
    )


def test_the_iteration_and_the_layout_are_told() -> None:
    result, first = message(asks, (X, W), (P("data", "model"), P()))
    assert result.startswith("  out: differs by up to ")
    assert f"`add` at {line('a layer that asks')}" in first
    assert (
        "its values differ by up to 2, and their largest magnitude is 0.999, in iteration 1"
        in first
    )
    assert first.endswith("its result is f32[8, 8], sharded P('data')")


def test_a_late_iteration_names_its_loop() -> None:
    *_, first = message(asks_late, (X, W), (P("data"), P()))
    assert f"`while` at {line('a long loop')}" in first


def test_the_device_is_told() -> None:
    *_, first = message(on_one, (X,), (P("data"),))
    assert f"`select_n` at {line('NaN on one')}" in first and "applied to `x`" in first
    assert (
        "its values are finite in one program and not in the other: it depends on the index of the device, "
        "on 2 of 8 devices, the first of which is (data=0, model=3)"
    ) in first


def test_random_numbers_of_each_device_are_told() -> None:
    *_, first = message(drawn, (X,), (P("data"),))
    assert line("drawn by each") in first
    assert "each device draws its own random numbers" in first


def test_an_operation_of_one_program_is_told() -> None:
    _, first = message(other, (X,), (P("data"),))
    assert first.startswith(
        f"the first operation whose values differ is `cumsum` at {line('the first of one')}, in "
        "`y = jnp.cumsum(y, 0)  # the first of one`, applied to `x`: only the program on the mesh has this operation; "
    )


def test_tolerances_that_rounding_exceeds_are_told() -> None:
    def sums(x: Any) -> Any:
        return [(x**power).sum() for power in range(1, 8)]

    x = jax.random.normal(jax.random.key(0), (64, 64))
    with pytest.raises(AssertionError) as caught:
        assert_same_as_unsharded(sums, (x,), (P("data", "model"),), MESH, 0.0, 0.0)
    assert "no operation differs by more than rounding. If sums" in str(caught.value)


def test_a_shard_map_of_functree_itself_is_compared_on_one_device() -> None:
    specs = P("data", "model"), P("model")

    def total(x: Any, w: Any) -> Any:
        return lax.psum(x @ w, "model")

    fn = ft.shard_map(total, mesh=MESH, in_specs=specs, out_specs=P("data"))
    assert_same_as_unsharded(fn, (X, W), specs, MESH)


def test_a_mesh_that_one_device_cannot_be_is_refused() -> None:
    spec = P("data")

    def by_functree(x: Any) -> Any:
        return ft.shard_map(jnp.sin, mesh=MESH, in_specs=spec, out_specs=spec)(x)

    with raises(
        "sin: its mesh is (data=2, model=4), but it is called under the mesh (data=1, model=1)",
        "leave `mesh=` out",
        error=ft.ShardingError,
    ):
        assert_same_as_unsharded(by_functree, (X,), (spec,), MESH)


def test_copies_of_a_result_are_compared() -> None:
    def fn(x: Any) -> Any:
        def body(x: Any) -> Any:
            return x.sum(1) > lax.axis_index("model").astype(x.dtype)

        return jax.shard_map(body, in_specs=P("data"), out_specs=P("data"), check_vma=False)(x)

    given = (jnp.full((8, 8), 0.25),), (P("data"),)
    assert "  the result: its copies on different devices differ by up to 1" in message(fn, *given)
    assert "  a.0: its copies on different devices differ by up to 1" in message(
        lambda x: {"a": [fn(x)], "b": x}, *given
    )


# What is not finite


def logarithm(x: Any) -> Any:
    y = jnp.log(x - 1)  # log of zero
    return y.sum()


def harmless(x: Any) -> Any:
    low = jnp.where(jnp.tri(8, dtype=bool), x, -jnp.inf)
    safe = jnp.where(x > 5, 1 / (x - x), 0.0)
    return jax.nn.softmax(low, 1) + safe


def root(x: Any) -> Any:
    def loss(x: Any) -> Any:
        y = jnp.sqrt(x * 0)  # root of zero
        return jnp.where(x > 0, y, 0.0).sum()

    return jax.grad(jax.checkpoint(loss))(x)


def growth(x: Any) -> Any:
    def step(c: Any, _: Any) -> Any:
        c = jnp.abs(c) * 1e9 + 1  # growth in a scan
        return c, c.sum()

    return lax.scan(step, x, None, length=6, reverse=True)


def long_growth(x: Any) -> Any:
    def grow(state: Any) -> Any:
        y = state[0] * 1.5  # growth in a while
        return y, state[1] + 1

    return lax.while_loop(lambda state: state[1] < 300, grow, (jnp.ones(8), 0))[0] + x


def counted(x: Any) -> Any:
    n = lax.while_loop(lambda n: n < 3, lambda n: n + 1, 0)
    return jnp.log(x) + n.astype(x.dtype)  # beside a count


def branch(x: Any) -> Any:
    def second(x: Any) -> Any:
        return x / (x - x)  # in a branch

    return lax.cond(x.sum() > 1e9, lambda x: jnp.log(x - x), second, x)


def on_a_device(x: Any) -> Any:
    def body(x: Any) -> Any:
        me = lax.axis_index("model")
        y = x / jnp.where(me == 2, x - x, x)  # on one device
        return lax.psum(y, "model")

    spec = P("data")
    return jax.shard_map(body, mesh=MESH, in_specs=spec, out_specs=spec, check_vma=False)(x)


def variance(x: Any) -> Any:
    y = 1 / (x - x.var() - x)  # a variance that is zero
    return y * 2


def beside_no_elements(x: Any) -> Any:
    y = jnp.log(x) + jnp.sin(x[:0]).sum()  # beside no elements
    return y * 2


def marked(x: Any) -> Any:
    y = jnp.where(x > 1, jnp.nan, x)  # a mark
    return y * 2


def through_a_ref(x: Any) -> Any:
    kept = jax.new_ref(jnp.zeros(3))
    y = jnp.log(x)  # written to a ref
    kept[...] = y
    return kept[...]


POSITIVE = jnp.abs(X) + 1
WRITTEN = "a NaN from finite values, or from a constant NaN of the program"
NONFINITE: dict[str, tuple[Callable[..., Any], Any, str, str, str, str]] = {
    "an infinity": (logarithm, jnp.arange(1.0, 4.0), "log", "log of zero", "an infinity from finite values: 1 of 3 elements", ""),
    "a ref": (through_a_ref, jnp.arange(3.0), "log", "written to a ref", "an infinity from finite values: 1 of 3 elements", ""),
    "a gradient": (root, POSITIVE, "div", "root of zero", "an infinity from finite values: 64 of 64 elements", ""),
    "a scan": (growth, POSITIVE, "mul", "growth in a scan", "an infinity from finite values: 64 of 64 elements", "in iteration 5"),
    "a while": (long_growth, X[0], "mul", "growth in a while", "an infinity from finite values: 8 of 8 elements", "in iteration 219"),
    "a while of integers": (counted, jnp.arange(3.0), "log", "beside a count", "an infinity from finite values: 1 of 3 elements", ""),
    "a branch": (branch, POSITIVE, "div", "in a branch", "an infinity from finite values: 64 of 64 elements", "in branch 0"),
    "a device": (
        on_a_device, lay(POSITIVE, "data"), "div", "on one device", "an infinity from finite values: 64 of 256 elements",
        "on 2 of 8 devices, the first of which is (data=0, model=2)",
    ),
    # `var` has a NaN in it, for no elements.
    "beside a NaN": (variance, jnp.ones(3), "div", "a variance that is zero", "an infinity from finite values: 3 of 3 elements", ""),
    "beside no elements": (beside_no_elements, jnp.arange(3.0), "log", "beside no elements", "an infinity from finite values: 1 of 3 elements", ""),
    "a NaN that is written": (marked, jnp.arange(3.0), "select_n", "a mark", f"{WRITTEN}: 1 of 3 elements", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", NONFINITE)
def test_the_first_that_is_not_finite(name: str) -> None:
    fn, x, primitive, where, what, place = NONFINITE[name]
    found = first_nonfinite(fn, x)
    assert found is not None
    assert (found.name, found.source, found.what, found.where) == (
        primitive,
        line(where),
        f"it makes {what}",
        place,
    )


def test_what_is_finite_or_was_not_before() -> None:
    assert first_nonfinite(harmless, X) is None
    assert first_nonfinite(lambda x: jnp.sin(x) * 2, X.at[0, 0].set(jnp.nan)) is None
    assert first_nonfinite(lambda x: x // 2, jnp.arange(4)) is None
    # It writes a NaN, and does not take it.
    assert first_nonfinite(jnp.var, X) is None
    with raises("fn=3", error=ft.FunctreeError):
        first_nonfinite(3)  # pyright: ignore[reportArgumentType]


def test_a_model_that_is_sharded() -> None:
    rules = ft.AxisRules({"batch": "data", "hidden": "model", ...: None})
    model = ft.nn.MLP(8, 16, key=jax.random.key(0))
    model = ft.select(model).at(lambda model: model.up).apply(lambda up: up * 1e38)
    step = ft.jit(lambda model, x: model(x * 100), rules=rules, mesh=MESH, donate="model")
    model = ft.shard(model, rules, MESH)
    found = first_nonfinite(step, model, lay(X, "data"))
    assert found is not None and not model.up.is_deleted()
    assert found.name == "dot_general" and found.source.startswith("mlp.py:")
    assert list(map(str, found.paths)) == ["x", "model.up"]
    assert (found.shape, found.layout) == ((8, 16), "sharded P('data', 'model')")
    assert isinstance(found, Operation) and found.difference is None
    assert str(found).startswith(
        f"`dot_general` at {found.source}, in `{found.line}`, applied to `x` and "
    )


# Relations and checksums


V = np.arange(16.0).reshape(4, 4)
PARTS = {
    "whole": ((1, 1), np.broadcast_to(V, (2, 4, 4, 4)), Kind.SAME, ((), ())),
    "rows": ((2, 1), np.broadcast_to(V.reshape(2, 1, 2, 4), (2, 4, 2, 4)), Kind.SAME, (("data",), ())),
    "columns": ((1, 4), np.broadcast_to(V.T.reshape(1, 4, 4, 1), (2, 4, 4, 1)), Kind.SAME, ((), ("model",))),
    "terms": ((1, 1), np.broadcast_to(V / 4, (2, 4, 4, 4)), Kind.PARTIAL, ((), ())),
    "means": ((1, 1), V + np.arange(-1.5, 2.5)[None, :, None, None] + np.zeros((2, 1, 1, 1)), Kind.MEAN, ((), ())),
    "something else": ((1, 1), np.broadcast_to(V + 1, (2, 4, 4, 4)), Kind.OTHER, ()),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_how_parts_lie_to_a_whole(name: str) -> None:
    (rows, columns), parts, kind, assignment = PARTS[name]
    tiles = V.reshape(rows, 4 // rows, columns, 4 // columns).transpose(0, 2, 1, 3)
    relation = relate(tiles, np.asarray(1e-6), parts, SIZES)
    assert (relation.kind, relation.assignment) == (kind, assignment)
    assert relation.over == (("model",) if relation.missing else ())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool", "complex64", "float64"])
def test_a_checksum_tells_values_apart(dtype: str) -> None:
    if dtype == "float64":
        with jax.enable_x64(True):
            check_checksum(jnp.asarray(np.asarray(X) > 0.3, dtype))
    else:
        check_checksum((X > 0.3).astype(dtype))


def check_checksum(x: Any) -> None:
    sum_ = checksum(x)
    if jnp.iscomplexobj(x):
        assert checksum(x * jnp.complex64(1j)) != sum_
    assert sum_ == checksum(x) and sum_.shape == ()
    for changed in (
        x[::-1],
        x[:, ::-1],
        x.T,
        x.at[3, 4].set(jnp.logical_not(x[3, 4]).astype(x.dtype)),
    ):
        assert checksum(changed) != sum_
    np.testing.assert_allclose(checksum(x, (2, 4)), [[checksum(x[i : i + 4, j : j + 2]) for j in (0, 2, 4, 6)] for i in (0, 4)])  # fmt: skip
    assert checksum(x, with_size=True).shape == (2,)


def test_a_checksum_of_large_numbers_is_finite() -> None:
    x = jnp.full((64, 64), jnp.finfo(jnp.float32).min)
    assert np.isfinite(checksum(x)) and np.isinf(checksum(x.at[5, 7].set(jnp.inf)))
    assert np.isnan(checksum(x.at[5, 7].set(jnp.nan)))
    assert checksum(jax.random.split(jax.random.key(0), 4)).dtype == jnp.uint32
