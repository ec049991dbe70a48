"""`ft.layouts`: each operation's layout and who decided it, on programs whose layouts can be written
by hand."""

import pickle
import re
import weakref
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct, lax
from jax.sharding import NamedSharding, PartitionSpec

import functree as ft
from functree.compiled import shardy
from functree.compiled.layouts import Layouts, layouts_of
from functree.compiled.shardy import ARGUMENT, CONSTRAINT, RESULT, LaidOut, moved_bytes
from functree.devices.constraint import lies_as
from tests.lib.checks import compilations
from tests.lib.meshes import EXPLICIT, MESH, SIZES

P = PartitionSpec


def abstract(*shape: int, dtype: Any = "float32", spec: P | None = None) -> ShapeDtypeStruct:
    sharding = None if spec is None else NamedSharding(MESH, spec)
    return ShapeDtypeStruct(shape, dtype, sharding=sharding)


def line_of(text: str) -> str:
    """The first line of this file with a text, as rows have it."""
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(i for i, line in enumerate(lines, 1) if text in line)}"


def rows_of(layouts: Layouts, op: str) -> list[LaidOut]:
    return [row for row in layouts if row.op == op]


# Programs, their arguments, and by operation each array that it makes with who decided.


def product(w: Any, x: Any) -> Any:
    return x @ w


def two_layers(w: Any, x: Any) -> Any:
    return jax.nn.relu(x @ w["up"]) @ w["down"]


def constrained(x: Any) -> Any:
    return ft.constrain(jnp.exp(x), P("model")) * 2.0


def scanned(w: Any, x: Any, y: Any) -> Any:
    def body(carried: Any, layer: Any) -> Any:
        a, b = carried
        return (jnp.tanh(a @ layer), b * 2.0), None

    return lax.scan(body, (x, y), w)[0]


def convolved(kernel: Any, images: Any) -> Any:
    layout = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=layout)
    return ft.constrain(y, P(None, None, "data"))


def chosen(x: Any, y: Any) -> Any:
    return lax.cond(x[0, 0] > 0.0, lambda: jnp.sin(y), lambda: y)


def called_twice(w: Any, x: Any) -> Any:
    layer = jax.jit(lambda x: jnp.tanh(x @ w))
    return layer(layer(x))


def alike(x: Any, y: Any) -> Any:
    return lies_as(jnp.sin(y), x)


def alike_arguments(x: Any, y: Any) -> Any:
    return lies_as(y, x)


def alike_in_a_loop(x: Any, y: Any) -> Any:
    return lax.fori_loop(0, 3, lambda i, a: lies_as(jnp.sin(a), x), y)


def mapped(x: Any) -> Any:
    def summed(x: Any) -> Any:
        return lax.psum(jnp.sin(x), "data")

    body = jax.shard_map(summed, mesh=MESH, in_specs=P("data"), out_specs=P())
    return jnp.cos(body(jnp.exp(x)))


def twice(x: Any) -> Any:
    return x, x


def in_order(x: Any) -> Any:
    jax.debug.print("{}", x[0, 0], ordered=True)
    return jnp.sin(x)


ANYWHERE = object()
W, X = abstract(64, 32), abstract(16, 64)
WRITTEN = ("ft.constrain(jnp.exp(x)", "ft.constrain(y, P(None, None", "return jnp.cos(body(")
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any, dict[str, list[str]]]] = {
    "a product": (
        product,
        (W, X),
        (P(None, "model"), P("data")),
        {"dot_general": ["f32[16/data, 32/model]: data by x, model by w"]},
    ),
    "two axes on one dimension": (
        product,
        (W, X),
        (P(), P(("data", "model"))),
        {"dot_general": ["f32[16/data/model, 32]: data by x, model by x"]},
    ),
    "an image's height where its width is constrained": (
        convolved,
        (abstract(3, 3, 4, 8), abstract(2, 16, 16, 4)),
        (P(None, None, None, "model"), P(None, "data")),
        {
            "convolution": [
                "f32[2, 16, 16/data, 8/model]: data by ft.constrain(y, P(None, None, model by kernel"
            ],
        },
    ),
    "a constraint": (
        constrained,
        (X,),
        (P("data"),),
        {
            "exponential": ["f32[16/data, 64]: data by x"],
            "sharding_constraint": ["f32[16/model, 64]: model by ft.constrain(jnp.exp(x)"],
            "multiply": ["f32[16/model, 64]: model by ft.constrain(jnp.exp(x)"],
        },
    ),
    "a scan, whose values have origins of their own": (
        scanned,
        (abstract(3, 64, 64), X, abstract(8, 4)),
        (P(), P("data"), P("model")),
        {
            "while": [
                "f32[3, 64, 64]",
                "i32[]",
                "f32[16/data, 64]: data by x",
                "f32[8/model, 4]: model by y",
            ],
            "tanh": ["f32[16/data, 64]: data by x"],
            "multiply": ["f32[8/model, 4]: model by y"],
        },
    ),
    "a branch": (
        chosen,
        (X, X),
        (P("data"), P("model")),
        {"case": ["f32[16/model, 64]: model by y"], "sine": ["f32[16/model, 64]: model by y"]},
    ),
    "a function that is called twice": (
        called_twice,
        (abstract(64, 64), X),
        (P(), P("data")),
        {"tanh": ["f32[16/data, 64]: data by x"] * 2},
    ),
    "a group with an argument": (
        alike,
        (X, X),
        (P("data"), P()),
        {"sine": ["f32[16/data, 64]: data by x"]},
    ),
    "a group of arguments": (
        alike_arguments,
        (X, X),
        (P("data"), ANYWHERE),
        {"argument": ["f32[16/data, 64]: data by x"] * 2},
    ),
    "a group inside a loop": (
        alike_in_a_loop,
        (X, X),
        (P("data"), P()),
        {"argument": ["f32[16/data, 64]: data by x", "f32[16, 64]"]},
    ),
    "shard_map, whose body is not read": (
        mapped,
        (X,),
        (P(),),
        {
            "exponential": ["f32[16/data, 64]: data by return jnp.cos(body("],
            "manual_computation": ["f32[8, 64]"],
            "cosine": ["f32[8, 64]"],
            "sine": [],
        },
    ),
    "complex numbers": (
        product,
        (abstract(64, 32, dtype="complex64"), abstract(16, 64, dtype="complex64")),
        (P(None, "model"), P("data")),
        {"dot_general": ["complex<f32>[16/data, 32/model]: data by x, model by w"]},
    ),
}


def placed(args: Any, specs: Any) -> Any:
    """The arguments, on the mesh."""

    def on_mesh(spec: Any, array: Any) -> Any:
        if spec is ANYWHERE:
            return array
        return ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(MESH, spec))

    return jax.tree.map(on_mesh, specs, args, is_leaf=lambda one: isinstance(one, P))


def told(row: LaidOut) -> str:
    """An array, and who has decided about it; of a line, what stands there."""
    lines = {line_of(text): text for text in WRITTEN}
    decided = [f"{axis} by {lines.get(by, by)}" for axis, by in sorted(row.origins.items())]
    return f"{row.array}: {', '.join(decided)}" if decided else row.array


@pytest.mark.parametrize("case", CASES)
def test_arrays_and_who_decided(case: str):
    fn, args, specs, expected = CASES[case]
    with compilations() as heard:
        layouts = ft.layouts(jax.jit(fn), *placed(args, specs))
    assert not heard and layouts.sizes == SIZES
    for op, arrays in expected.items():
        assert list(map(told, rows_of(layouts, op))) == arrays
    assert Layouts.from_json(layouts.to_json()) == layouts


# In a group, the compiler lays out what is not given.
@pytest.mark.parametrize("case", [case for case in CASES if "group" not in case])
def test_arguments_and_results_are_those_of_the_compiled_program(case: str):
    """JAX says how these are laid out after it has compiled the program."""
    fn, args, specs, _ = CASES[case]
    lowered = jax.jit(fn).lower(*placed(args, specs))
    layouts, compiled = layouts_of(lowered.compiler_ir("stablehlo")), lowered.compile()
    arguments = rows_of(layouts, ARGUMENT)
    shardings = jax.tree.leaves(compiled.input_shardings)
    for row, sharding in zip(arguments, shardings, strict=True):
        assert NamedSharding(MESH, row.spec).is_equivalent_to(sharding, len(row.shape)), row
    shardings = jax.tree.leaves(compiled.output_shardings)
    by_name = {row.name: row for row in rows_of(layouts, RESULT)}
    for (path, _), sharding in zip(
        jax.tree.leaves_with_path(lowered.out_info), shardings, strict=True
    ):
        row = by_name.get("result" + jax.tree_util.keystr(path))
        if row is None:  # not sharded
            assert sharding.is_fully_replicated
        else:
            assert NamedSharding(MESH, row.spec).is_equivalent_to(sharding, len(row.shape))


def test_expressions_of_unusual_source():
    specs: Any = {"in_shardings": P("data"), "mesh": MESH}
    größe = 3.0
    one, other = (lambda x: jnp.sin(x) * größe), (lambda x: jnp.cos(x))
    for fn, op, expression in [(one, "sine", "jnp.sin(x)"), (other, "cosine", "jnp.cos(x)")]:
        assert [row.expression for row in rows_of(ft.layouts(fn, X, **specs), op)] == [expression]
    long = ft.layouts(
        lambda x: jnp.tanh(
            x + 1.0 + 2.0 + 3.0 + 4.0 + 5.0 + 6.0 + 7.0 + 8.0 + 9.0 + 10.0 + 11.0 + 12.0 + 13.0
        ),
        X,
        **specs,
    )
    [row] = rows_of(long, "tanh")
    assert row.expression.startswith("jnp.tanh( x + 1.0") and row.expression.endswith("…")


def test_an_operation_that_a_result_lays_out_has_this_origin():
    specs: Any = (P("model"), P(None, "data"))
    layouts = ft.layouts(
        lambda x, y: (jnp.sin(x), jnp.cos(y)), X, X, out_shardings=specs, mesh=MESH
    )
    [sine], [cosine] = rows_of(layouts, "sine"), rows_of(layouts, "cosine")
    assert sine.origins == {"model": "result.0"} and cosine.origins == {"data": "result.1"}


def test_a_value_that_is_returned_twice():
    specs: Any = (P("model"), P("data"))
    layouts = ft.layouts(twice, X, in_shardings=P("data"), out_shardings=specs, mesh=MESH)
    results = rows_of(layouts, RESULT)
    assert [(row.name, row.spec) for row in results] == [
        ("result.0", P("model", None)),
        ("result.1", P("data", None)),
    ]
    for row in results:
        assert [layouts.rows[i].name for i in row.operands] == ["x"]
        assert set(row.origins) <= {"model" if row.name == "result.0" else "data"}


def test_effects_in_order():
    """Tokens come before the arguments, and before the results."""
    layouts = ft.layouts(jax.jit(in_order), jnp.ones((16, 64)))
    assert [row.name for row in rows_of(layouts, ARGUMENT)] == ["x"]
    assert list(ft.ledger(in_order, jnp.ones((16, 64))).memory.arguments) == [ft.Path("x")]
    assert len(rows_of(layouts, "sine")) == 1

    def looped(x: Any) -> Any:
        return lax.scan(lambda x, _: (in_order(x), None), x, length=3)

    assert len(rows_of(ft.layouts(jax.jit(looped), jnp.ones((16, 64))), "sine")) == 1
    assert ft.ledger(jax.jit(looped), jnp.ones((16, 64))).collectives == ()


def test_explicit_axes():
    """There each operation has a type, which no user wrote."""
    w = ShapeDtypeStruct((64, 32), "float32", sharding=NamedSharding(EXPLICIT, P(None, "model")))
    x = ShapeDtypeStruct((16, 64), "float32", sharding=NamedSharding(EXPLICIT, P("data")))
    with jax.set_mesh(EXPLICIT):
        layouts = ft.layouts(jax.jit(lambda w, x: jnp.tanh(x @ w)), w, x)
        moved = ft.layouts(jax.jit(lambda x: jax.sharding.reshard(x, P("model"))), x)
    assert rows_of(layouts, CONSTRAINT) == []
    [row] = rows_of(layouts, "tanh")
    assert (row.array, row.origins) == ("f32[16/data, 32/model]", {"data": "x", "model": "w"})
    [row] = rows_of(moved, CONSTRAINT)
    assert (row.array, row.origins) == (
        "f32[16/model, 64]",
        {"model": line_of("jax.sharding.reshard(x")},
    )


def test_a_reshape_that_a_mesh_axis_does_not_divide():
    """Shardy's own record of origins crashes the process here, in about half of the runs."""

    def fused(w, x):
        return (x @ w).reshape(16, 16, 3, 4, 16)

    w, x = abstract(64, 192, spec=P(None, "model")), abstract(16, 16, 64, spec=P("data"))
    for _ in range(8):
        layouts = ft.layouts(jax.jit(fused), w, x)
    [row] = rows_of(layouts, "dot_general")
    assert row.origins == {"data": "x", "model": "w"}


GIVEN = abstract(16, 64, spec=P("data"))


def test_functions_with_the_same_program():
    """JAX keeps lowered programs: rows must not be those of another function."""
    first, second = (jax.jit(lambda x: jnp.sin(x)), jax.jit(lambda y: jnp.sin(y)))
    for fn, name in ((first, "x"), (second, "y"), (first, "x")):
        layouts = ft.layouts(fn, GIVEN)
        [row] = rows_of(layouts, "sine")
        assert row.origins == {"data": name} and row.expression == f"jnp.sin({name})"


def test_names_of_mesh_axes():
    names = ("daten_ä", "a-b 模型")
    mesh = jax.make_mesh((2, 4), names, axis_types=MESH.axis_types)
    x = ShapeDtypeStruct((16, 64), "float32", sharding=NamedSharding(mesh, P(*names)))
    layouts = ft.layouts(jax.jit(jnp.sin), x)
    [row] = rows_of(layouts, "sine")
    assert (row.spec, layouts.sizes) == (P(*names), dict(mesh.shape))
    assert set(row.origins) == set(names)


BYTES = {"float32": 4, "complex64": 8, "bfloat16": 2, "bool": 1, "int4": 1, "float8_e4m3fn": 1}


@pytest.mark.parametrize("dtype", BYTES)
def test_bytes_on_one_device(dtype: str):
    x = abstract(16, 64, dtype=dtype, spec=P("data", "model"))
    layouts = ft.layouts(jax.jit(lambda x: x[::-1]), x)
    assert layouts.rows[0].bytes_of(SIZES) == 16 * 64 * BYTES[dtype] // 8


def test_text():
    layers = {"up": W, "down": abstract(32, 64)}
    specs = ({"up": P(None, "model"), "down": P("model")}, P("data"))
    text = str(ft.layouts(two_layers, layers, X, in_shardings=specs, mesh=MESH))
    line = line_of("jax.nn.relu(x @ w")
    assert text.splitlines() == [
        "layouts on the mesh (data=2, model=4)",
        "no source line",
        "    w.down   argument f32[32/model, 64]",
        "    w.up   argument f32[64, 32/model]",
        "    x   argument f32[16/data, 64]",
        line,
        '    x @ w["up"]   dot_general f32[16/data, 32/model]: data by x, model by w.up',
        '    jax.nn.relu(x @ w["up"])   broadcast_in_dim f32[16/data, 32/model]: data by x, model by w.up',
        '    jax.nn.relu(x @ w["up"])   maximum f32[16/data, 32/model]: data by x, model by w.up',
        '    jax.nn.relu(x @ w["up"]) @ w["down"]   dot_general f32[16/data, 64]: data by x',
        "    result   result f32[16/data, 64]: data by x",
    ]


def test_equal_rows_are_one_line():
    def same(x: Any) -> Any:
        return tuple(jnp.sin(x) for _ in range(3))

    text = str(ft.layouts(same, X, in_shardings=P("data"), mesh=MESH))
    assert "jnp.sin(x)   sine f32[16/data, 64] ×3: data by x" in text
    assert text.count("sine") == 1


def test_page():
    layouts = ft.layouts(constrained, X, in_shardings=P("data"), mesh=MESH)
    page = layouts.html()
    assert page.startswith("<!doctype html>") and "http" not in page and "<svg" in page
    assert "ft.constrain(jnp.exp(x), P(&quot;model&quot;))" in page
    fragment = layouts._repr_html_()
    assert "<html" not in fragment and "f32[16/model, 64]" in fragment


def test_diff():
    before = ft.layouts(product, W, X, in_shardings=(P(), P("data")), mesh=MESH)
    after = ft.layouts(product, W, X, in_shardings=(P(None, "model"), P("data")), mesh=MESH)
    assert not before.diff(before).rows
    text = str(before.diff(after))
    assert "x @ w dot_general" in text and "f32[16/data, 32/model]" in text


def test_without_the_passes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shardy, "_PASSES", "sdy-there-is-no-such-pass")
    message = re.compile("layouts: this jaxlib's Shardy passes differ from .*")
    call: Any = (product, W, X)
    options: Any = {"in_shardings": (P("model"), P("data")), "mesh": MESH}
    for fn in (ft.layouts, partial(ft.why, progress=False)):
        with compilations() as heard, pytest.raises(ft.FunctreeError) as caught:
            fn(*call, **options)
        assert message.fullmatch(str(caught.value)) and not heard


def test_ledger_without_the_passes(monkeypatch: pytest.MonkeyPatch):
    function = ft.jit(product, in_shardings=(P("model"), P("data")), mesh=MESH)
    ledger = function.lower(W, X).compile().ledger()
    assert {one.verdict for one in ledger.collectives} == {"compiler"}
    monkeypatch.setattr(shardy, "_PASSES", "sdy-there-is-no-such-pass")
    bare = function.lower(W, X).compile().ledger()
    plain = tuple(replace(one, verdict=None, cause=None) for one in ledger.collectives)
    # JAX has compiled it before, and so does not compile it again.
    assert bare == replace(ledger, collectives=plain, warnings_known=bare.warnings_known)


# Programs of which Shardy's own collectives are those of the compiler: the bytes they make.
MOVED: dict[str, tuple[Callable[..., Any], Any, Any, Any, int]] = {
    "a sum over a sharded dimension": (
        product,
        (W, X),
        (P("model"), P("data", "model")),
        P("data"),
        8 * 32 * 4,
    ),
    "a gather for a result": (lambda x: jnp.sin(x), (X,), (P("data"),), P(), 16 * 64 * 4),
    "in a loop": (
        lambda w, x: lax.fori_loop(0, 5, lambda i, x: jnp.tanh(x @ w), x),
        (abstract(64, 64), X),
        (P("model"), P("data")),
        P("data"),
        (5 + 1) * 8 * 64 * 4,
    ),
}


@pytest.mark.parametrize("case", MOVED)
def test_bytes_that_are_moved(case: str):
    fn, args, specs, result, expected = MOVED[case]
    options: Any = {"in_shardings": specs, "out_shardings": result, "mesh": MESH}
    lowered = ft.jit(fn, **options).lower(*args)
    moved = sum(one.total for one in lowered.compile().ledger().collectives)
    assert moved_bytes(lowered.jax) == moved == expected


def test_verdicts_are_computed_when_one_is_read(monkeypatch: pytest.MonkeyPatch):
    function = ft.jit(product, in_shardings=(P("model"), P("data")), mesh=MESH)
    judged = function.lower(W, X).compile().ledger()
    monkeypatch.setattr(shardy, "_PASSES", "sdy-there-is-no-such-pass")  # no layouts from here on
    later = function.lower(W, X).compile().ledger()
    ft.testing.assert_collectives(later, allow=["all-reduce"], at_most=10**6)
    assert later.totals() == judged.totals() and not later.diff(judged).rows
    monkeypatch.undo()
    # A copy has the verdict, even where the original has not computed it.
    assert pickle.loads(pickle.dumps(later)).collectives == judged.collectives
    [row], [again] = judged.collectives, function.lower(W, X).compile().ledger().collectives
    assert hash(again) == hash(row) and copy(again) == row
    assert (again.verdict, again.cause) == ("compiler", row.cause)
    assert replace(again, verdict="asked").cause == row.cause


def test_a_ledger_keeps_no_layouts_once_its_verdicts_are_read():
    lowered = ft.jit(product, in_shardings=(P("model"), P("data")), mesh=MESH).lower(W, X)
    ledger = lowered.compile().ledger()
    kept = weakref.ref(lowered.layouts())
    del lowered
    assert kept() is not None
    assert all(row.verdict for row in ledger.collectives)
    assert kept() is None
