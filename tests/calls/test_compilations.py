"""`f.compilations`: what each compilation of an `ft.jit` function was for, and what is worth a
warning."""

from itertools import product
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

import functree as ft
from tests.lib.checks import compilations, counted
from tests.lib.meshes import MESH, lay

P = PartitionSpec
X = jnp.arange(4.0)
ON = "(data=2, model=4)"


class Linear(eqx.Module):
    scale: Any = 1
    name: Any = eqx.field(static=True, default="linear")


FIRST = jax.devices()[0]


def lay_on(memory_kind: str) -> Array:
    sharding = jax.sharding.SingleDeviceSharding(FIRST, memory_kind=memory_kind)
    return jax.device_put(np.ones(4, np.float32), sharding)


RULES, OTHERS = ft.AxisRules({"batch": "data", ...: None}), ft.AxisRules({"batch": None, ...: None})
WIDE, TALL = lay(jnp.ones((4, 4)), None, "model"), lay(jnp.ones((4, 4)), "data")
# What differs, two arguments, and each path with its text before and now.
DIFFERENT: list[tuple[str, Any, Any, list[tuple[str, str, str]]]] = [
    ("static", {"n": 2, "x": X}, {"n": 3, "x": X}, [("tree.n", "2", "3")]),
    ("static", Linear(name=1), Linear(name=2), [("tree.name", "1", "2")]),
    ("shape", [X], [X[:2]], [("tree.0", "(4,)", "(2,)")]),
    ("dtype", [X], [jnp.arange(4)], [("tree.0", "f32", "i32")]),
    ("weak type", [jnp.float32(1)], [jnp.asarray(1.0)], [("tree.0", "False", "True")]),
    ("sharding", [TALL], [WIDE], [("tree.0", f"P('data') on {ON}", f"P(None, 'model') on {ON}")]),
    ("sharding", [lay_on("device")], [lay_on("pinned_host")], [("tree.0", f"on {FIRST}", f"on {FIRST} in pinned_host")]),
    ("structure", [X], {"a": X}, [("tree.0", "an array", "nothing"), ("tree.a", "nothing", "an array")]),
    ("structure", {"a": X}, {"a": "text"}, [("tree.a", "an array", "static 'text'")]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "before", "now", "expected"), DIFFERENT)
def test_a_compilation_says_what_for(kind: str, before: Any, now: Any, expected: Any):
    f = ft.jit(lambda tree: [2 * x for x in jax.tree.leaves(tree) if eqx.is_array(x)])
    f(before), f(now), f(before), f(now)
    first, second = f.compilations
    assert (first.number, first.differences, str(first)) == (1, (), "compilation 1: the first")
    found = [(str(d.path), d.kind, str(d.before), str(d.now)) for d in second.differences]
    assert found == [(path, kind, *texts) for path, *texts in expected]
    told = "; ".join(f"{path}: {kind} {a} → {b}" for path, a, b in expected)
    assert str(second) == f"compilation 2: {told}"


def test_a_compilation_for_rules_and_for_a_mesh():
    f = ft.jit(lambda: ft.constrain(jnp.ones(8), "batch"))
    other = ft.make_mesh(data=8)
    for mesh, rules in [(MESH, RULES), (MESH, OTHERS), (other, RULES), (MESH, RULES)]:
        with jax.set_mesh(mesh), ft.axis_rules(rules):
            f()
    kinds = [[d.kind for d in record.differences] for record in f.compilations]
    assert kinds == [[], ["rules"], ["mesh"]]
    by_rules = f.compilations[1].differences[0]
    assert (by_rules.before, by_rules.now) == (RULES, OTHERS) and not by_rules.path
    for fragment in ("compilation 3: mesh (data=2, model=4)", "→ (data=8)"):
        assert fragment in str(f.compilations[2])


def test_the_nearest_compilation_is_compared():
    f = ft.jit(lambda x, n, m: x * n * m)
    for x, n, m in [(X, 1.0, 1.0), (X[:2], 2.0, 2.0), (X[:2], 2.0, 1.0)]:
        f(x, n, m)
    alike = "compilation 2: x: shape (4,) → (2,); n, m: static 1.0 → 2.0"
    assert str(f.compilations[1]) == alike
    assert str(f.compilations[2]) == "compilation 3: m: static 2.0 → 1.0"


def test_what_changed_place_together_is_told_at_once_and_last():
    f = ft.jit(lambda model, scale: scale)
    other = ft.make_mesh(data=4, model=2)
    for mesh, scale in (MESH, 1.0), (other, 2.0):
        placed = ft.shard([X] * 5, PartitionSpec("data"), mesh)
        f(placed, scale)
    moved = "sharding P('data') on (data=2, model=4) → P('data') on (data=4, model=2)"
    assert str(f.compilations[1]) == (
        f"compilation 2: scale: static 1.0 → 2.0; model.0, model.1, model.2 and 2 more: {moved}"
    )


def test_a_setting_of_jax():
    f = ft.jit(lambda x: x @ x)
    f(X)
    with jax.default_matmul_precision("float32"):
        f(X)
    assert [d.kind for d in f.compilations[1].differences] == ["settings"]


def test_a_third_compilation_for_a_number_warns():
    def step(model: Any, lr: Any, x: Array) -> Array:
        return x * lr["lr"] * model.scale

    f = ft.jit(step)
    with jax.numpy_dtype_promotion("standard"):
        f(Linear(), {"lr": 0.1}, X), f(Linear(), {"lr": 0.2}, X)
        f(Linear(), {"lr": 0.3, "x": X}, X)  # for something else too
        with pytest.warns(ft.FunctreeWarning) as caught:
            f(Linear(), {"lr": 0.4}, X)
        f(Linear(), {"lr": 0.5}, X)  # once
    assert str(caught[0].message) == (
        "step recompiles a second time only because `lr.lr` differs (0.1 before, 0.4 now). A "
        "Python number is static: to trace it, pass an array, `jnp.asarray(...)`"
    )
    assert caught[0].filename == __file__


def test_other_statics_do_not_warn():
    f = ft.jit(lambda x, how: x * 1)
    for how in ("a", "b", "c", "d", True, False, jnp.sin, jnp.cos, jnp.tan, jnp.exp):
        f(X, how)
    assert len(f.compilations) == 10


BIG = {"table": jnp.ones((512, 513))}


def test_a_large_constant_warns():
    small = jnp.ones((512, 512))
    ft.jit(lambda x: x + small.sum())(X.sum())

    def closing(x: Array) -> Array:
        return x + BIG["table"].sum()

    f = ft.jit(closing)
    with pytest.warns(ft.FunctreeWarning) as caught:
        f(X.sum())
    (warning,) = caught
    assert str(warning.message) == (
        "closing closes over an array of 1.0 MiB, float32[512, 513] (`BIG.table`), which becomes a "
        "constant of the compiled program on every device: pass it as an argument"
    )
    assert warning.filename == __file__
    f(X.sum())


TRACED_ONCE: dict[str, Any] = {
    "nothing": {},
    "all": {
        "in_shardings": P("data"),
        "out_shardings": P("data"),
        "donate": 0,
        "mesh": MESH,
        "rules": RULES,
    },
}


@pytest.mark.parametrize("options", TRACED_ONCE)
def test_the_body_is_traced_once_for_each_compilation(options: str):
    f, traces = counted(
        lambda state, x: ({"w": state["w"] * 2}, x + state["w"].sum()), **TRACED_ONCE[options]
    )
    x = lay(jnp.ones(8), *(("data",) if options == "all" else ()))
    for size in (8, 16):
        state = {"w": lay(jnp.ones((size, 4)), "data")}
        for _ in range(3):
            state, _ = f(state, x)
    assert len(traces) == 2 == len(f.compilations)


def test_functions_are_told_by_name():
    again = ft.jit(lambda x, act: act(x))
    for _ in range(2):
        again(jnp.ones(3), lambda x: x)
    alike = "<lambda> (a different object, equal only to itself: create it once and reuse it)"
    assert str(again.compilations[1]).endswith(alike)


def placed_on(devices: Any) -> Any:
    mesh = jax.make_mesh(
        (len(devices),), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices
    )
    return jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, P("data")))


DEVICES = jax.devices()
PLACES: dict[str, Any] = {
    "single devices": [jax.device_put(np.ones(8, np.float32), device) for device in DEVICES[:3]],
    "meshes": [placed_on(DEVICES[:4]), placed_on(DEVICES[4:])],
    "the order of devices": [placed_on(DEVICES), placed_on(DEVICES[::-1])],
}
WRAPPERS: dict[str, Any] = {
    "jit": lambda: ft.jit(lambda x: x * 2),
    "donated": lambda: ft.jit(lambda x: x * 2, donate="x"),
    "shard_map": lambda: ft.shard_map(lambda x: x * 2, in_specs=P("data"), out_specs=P("data")),
}


@pytest.mark.parametrize(
    ("places", "wrapper"),
    # `shard_map` needs a mesh.
    sorted({*product(PLACES, WRAPPERS)} - {("single devices", "shard_map")}),
)
def test_other_devices_are_another_compilation(places: str, wrapper: str):
    f = WRAPPERS[wrapper]()
    with compilations() as heard:
        for x in PLACES[places]:
            for _ in range(2):
                f(jax.device_put(np.ones(8, np.float32), x.sharding))
    assert len(f.compilations) == len(PLACES[places]) == len(heard)
    kinds = {d.kind for record in f.compilations[1:] for d in record.differences}
    assert kinds <= {"sharding", "mesh"} and kinds
    assert "a different object" not in "".join(map(str, f.compilations))


# Many compilations, and those that no call has made


def test_what_lower_has_compiled_is_a_compilation():
    f = ft.jit(lambda x: x + 1)
    lowered = f.lower(jnp.ones(3))
    assert f.compilations == []
    lowered.compile()
    assert list(map(str, f.compilations)) == ["compilation 1: the first"]
    f(jnp.ones(3)), lowered.compile(), f.lower(jnp.ones(3)).compile()
    assert len(f.compilations) == 1, "JAX has compiled it once"
    f(jnp.ones(4)), f.lower(jnp.ones(5)).compile(), f(jnp.ones(5))
    assert list(map(str, f.compilations[1:])) == [
        "compilation 2: x: shape (3,) → (4,)", "compilation 3: x: shape (3,) → (5,)"
    ]  # fmt: skip
    f.lower(jnp.ones(5)).compile({"xla_cpu_enable_fast_math": True})
    assert (
        str(f.compilations[3])
        == "compilation 4: compiler options {} → {'xla_cpu_enable_fast_math': True}"
    )


def test_what_jax_compiles_for_itself_is_no_compilation_of_the_function():
    """To move an array to the devices of a program, JAX runs functions of its own, which are
    compiled at first."""
    jax.clear_caches()
    f = ft.shard_map(lambda x: x * 2, mesh=MESH, in_specs=P("data"), out_specs=P("data"))
    f.lower(X).compile()
    with compilations() as events:
        f(X)
    assert events and len(f.compilations) == 1


@pytest.mark.parametrize(
    "wrap", [ft.jit, ft.shard_map(mesh=MESH, in_specs=P(), out_specs=P())], ids=["jit", "map"]
)
def test_a_cleared_cache(wrap: Any):
    traces: list[int] = []

    def double(x: Any) -> Any:
        traces.append(1)
        return 2 * x

    f, other = wrap(double), wrap(double)
    f(X), f(X[:2]), other(X)
    assert len(traces) == 2 and len(f.compilations) == 2
    f.clear_cache()
    assert f.compilations == []
    assert np.array_equal(f(X), 2 * X) and len(traces) == 3, "one program, with its trace"
    assert list(map(str, f.compilations)) == ["compilation 1: the first"]
    assert np.array_equal(other(X), 2 * X) and len(traces) == 3, "they share their traces"
