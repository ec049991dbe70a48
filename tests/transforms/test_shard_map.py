"""`shard_map`, beside plain `jax.shard_map` with literal specs."""

import gc
import weakref
from collections.abc import Callable
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

import functree as ft
from functree.placing.constrain import ambient_rules
from functree.transforms.shard_map import shard_map
from tests.lib.checks import raises
from tests.lib.meshes import MESH, mesh_of

P = PartitionSpec
RULES = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})


LINE = ft.make_mesh(x=8)
X = jnp.arange(32.0).reshape(8, 4)
KEYS = jax.random.split(jax.random.key(0), 4)
INPUTS = [
    jax.random.normal(key, shape)
    for key, shape in zip(KEYS, [(4, 6), (6, 8), (8, 6)], strict=False)
]


class MLP(eqx.Module):
    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden embed"]
    activation: Callable[[Array], Array] = jax.nn.relu
    name: str = "mlp"

    def __call__(self, x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
        return jax.lax.psum(self.activation(x @ self.up) @ self.down, "model")


def mlp() -> MLP:
    return MLP(INPUTS[1], INPUTS[2])


def reference(x: Array, up: Array, down: Array) -> Array:
    return jax.nn.relu(x @ up) @ down


def ffn(
    x: Float[Array, "batch embed"],
    up: Float[Array, "embed hidden"],
    down: Float[Array, "hidden embed"],
) -> Float[Array, "batch embed"]:
    return jax.lax.psum(jax.nn.relu(x @ up) @ down, "model")


def by_hand(mesh: Mesh) -> Callable[..., Array]:
    specs = (P("data", None), P(None, "model"), P("model", None))
    return jax.jit(jax.shard_map(ffn, mesh=mesh, in_specs=specs, out_specs=P("data", None)))


# An example of JAX's own guide, with the values that it prints


def test_filters_lay_out_a_module():
    filters = ft.StateSharding({"up": P(None, "model"), "down": P("model")})
    f = shard_map(lambda m, x: m(x), mesh=MESH, in_specs=(filters, P("data")), out_specs=P("data"))
    np.testing.assert_allclose(f(mlp(), INPUTS[0]), reference(*INPUTS), rtol=1e-4, atol=1e-5)


# A signature is a specification


@pytest.mark.parametrize("explicit", [False, True])
def test_megatron_from_the_signature(explicit: bool):
    mesh = mesh_of(explicit)
    f = shard_map(ffn, mesh=mesh, rules=RULES)
    specs = (P("data", None), P(None, "model"), P("model", None))
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(INPUTS, specs, strict=True)
    ]
    ours, theirs = f(*placed), by_hand(mesh)(*placed)
    assert ours.sharding == theirs.sharding
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_allclose(ours, reference(*INPUTS), rtol=1e-4, atol=1e-5)


def test_it_is_the_same_program_as_by_hand():
    def program(f: Callable[..., Array]) -> str:
        lines = jax.jit(f).lower(*INPUTS).compile().as_text().splitlines()
        return " ".join(
            line.split(" = ", 1)[1].split()[1].split("(")[0] for line in lines if " = " in line
        )

    assert program(shard_map(ffn, mesh=MESH, rules=RULES)) == program(by_hand(MESH))


def test_modules_come_out_with_their_statics():
    @shard_map(mesh=MESH, rules=RULES)
    def double(model: MLP) -> MLP:
        assert model.up.shape == (6, 2) and model.name == "mlp"
        return jax.tree.map(lambda x: x * 2 if eqx.is_array(x) else x, model)

    out = double(mlp())
    assert out.up.sharding.spec == P(None, "model") and out.down.sharding.is_equivalent_to(
        NamedSharding(MESH, P("model")), 2
    )
    assert (out.name, out.activation) == ("mlp", jax.nn.relu)
    np.testing.assert_array_equal(out.up, INPUTS[1] * 2)


def test_annotations_of_parameters_and_containers():
    class Linear(eqx.Module):
        weight: Array

    @shard_map(mesh=MESH, rules=RULES)
    def f(
        linear: Annotated[Linear, ft.names(weight="embed hidden")],
        pair: tuple[Float[Array, "batch"], dict[str, Float[Array, "hidden"]]],
        *rest: Float[Array, "hidden"],
        scale: Annotated[Float[Array, "a"], P("data")],
        **more: "Float[Array, 'batch']",
    ) -> tuple[list[Float[Array, "batch"]], Float[Array, "hidden"]]:
        assert linear.weight.shape == (6, 2) and scale.shape == (1,)
        return [pair[0], more["y"] + scale], pair[1]["h"] + rest[0] + rest[1]

    four, eight = jnp.arange(4.0), jnp.arange(8.0)
    ones, twice = f(
        Linear(INPUTS[1]), (four, {"h": eight}), eight, eight, scale=jnp.ones(2), y=four
    )
    assert ones[0].sharding.spec == P("data") and twice.sharding.spec == P("model")
    np.testing.assert_array_equal(ones[1], four + 1)
    np.testing.assert_array_equal(twice, eight * 3)


def test_what_is_written_wins_over_rules():
    f = shard_map(
        lambda x, w: x @ w,
        mesh=MESH,
        rules=RULES,
        in_specs={"x": P("data"), "w": P()},
        out_specs=P("data"),
    )
    np.testing.assert_allclose(f(INPUTS[0], INPUTS[1]), INPUTS[0] @ INPUTS[1], rtol=1e-4, atol=1e-5)


def test_rules_are_ambient_in_the_body():
    def f(x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
        assert ft.spec("batch hidden") == P(None, "model")
        return ft.constrain(x, "batch embed")

    np.testing.assert_array_equal(shard_map(f, mesh=MESH, rules=RULES, axis_names={"data"})(X), X)


# Annotations are checked


WRONG = [
    (
        "global",
        jnp.ones((4, 6)),
        r'up   f32\[5, 8\]   "embed hidden"\n +"embed" has size 5 here, and 6',
    ),
    ("local", jnp.ones((4, 6)), r'"embed" has size 5 here, and 6 in `x`'),
]


@pytest.mark.parametrize(("shapes", "x", "message"), WRONG)
def test_arrays_that_are_not_as_annotated(shapes: Any, x: Array, message: str):
    f = shard_map(ffn, mesh=MESH, rules=RULES, shapes=shapes)
    headline = rf"(?s)^ffn: \d arrays? (does|do) not match \w+ annotations? \({shapes} shapes\)"
    with pytest.raises(ft.AxesError, match=f"{headline}.*{message}"):
        f(x, jnp.ones((5, 8)), jnp.ones((8, 6)))


def test_the_result_is_checked_against_its_global_shape():
    def gather(x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
        return jax.lax.all_gather(x, "model", tiled=True, axis=0)

    mesh, rules = ft.make_mesh(model=8), ft.AxisRules({"batch": None, "embed": "model"})
    with pytest.raises(
        ft.AxesError, match=r'(?s)result   f32\[64, 8\].*"batch" has size 64 here, and 8 in `x`'
    ):
        shard_map(gather, mesh=mesh, rules=rules)(jnp.ones((8, 8)))
    with pytest.raises(ft.AxesError, match=r"(?s)\(local shapes\).*has size 64 here, and 8 in `x`"):
        shard_map(gather, mesh=mesh, rules=rules, shapes="local")(jnp.ones((8, 8)))
    assert shard_map(gather, mesh=mesh, rules=rules, shapes=None)(jnp.ones((8, 8))).shape == (64, 8)


def test_what_jaxtyping_refuses_inside_is_right_globally():
    """An FSDP weight beside a whole activation, a product of sizes, a fixed size: none holds of
    local shapes."""

    def f(
        x: Float[Array, "batch embed"],
        w: Float[Array, "embed=8 heads*size"],
        q: Float[Array, "heads size 2"],
    ) -> Float[Array, "batch heads*size"]:
        return x @ jax.lax.all_gather(w, "data", tiled=True)

    mesh, ones = ft.make_mesh(data=8), jnp.ones
    args = ones((8, 8)), ones((8, 6)), ones((2, 3, 2))
    specs = (P("data"), P("data"), P())
    np.testing.assert_array_equal(
        shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("data"))(*args), ones((8, 6)) * 8
    )
    with pytest.raises(ft.AxesError, match=r'(?s)"embed=8" requires size 8, but the size is 1'):
        shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("data"), shapes="local")(*args)


# Every way to call


def test_one_entry_for_any_number_of_arguments_and_one_for_each_name():
    f = shard_map(
        lambda x, *rest, **more: sum(rest, x) + more["b"][:1],
        mesh=LINE,
        in_specs={"x": P("x"), "rest": P("x"), "b": P()},
        out_specs=P("x"),
    )
    np.testing.assert_array_equal(f(X, X, X, b=X), 3 * X + X[:1])
    g = shard_map(
        lambda x, *rest: sum(rest, x), mesh=LINE, in_specs=(P("x"), P("x")), out_specs=P("x")
    )
    np.testing.assert_array_equal(g(X, X, X), 3 * X)


def test_a_method_a_bound_method_and_a_module():
    class Layer(MLP):
        @shard_map(mesh=MESH, rules=RULES)
        def run(self, x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
            return self(x)

    specs = {"in_specs": {"self": RULES, "x": P("data")}, "out_specs": P("data")}
    for f in (
        Layer(INPUTS[1], INPUTS[2]).run,
        shard_map(mlp().__call__, mesh=MESH, rules=RULES),
        shard_map(mlp(), mesh=MESH, rules=RULES),
        shard_map(mlp(), mesh=MESH, **specs),
    ):
        np.testing.assert_allclose(f(INPUTS[0]), reference(*INPUTS), rtol=1e-4, atol=1e-5)
    told = "2 leaves", "self.up", "no layout was given for this array"
    with raises(*told, error=ft.ShardingError):
        shard_map(mlp(), mesh=MESH, in_specs=(P("data"),), out_specs=P("data"))(INPUTS[0])


def test_a_named_sharding_is_in_device_memory():
    for kind in (None, "device"):
        named = NamedSharding(MESH, P("data"), memory_kind=kind)
        doubled = ft.shard_map(lambda x: 2 * x, mesh=MESH, in_specs=(named,), out_specs=named)
        assert doubled(jnp.ones((4, 8))).sharding.is_equivalent_to(named, 2)


def test_prefix_trees():
    tree = {"a": X, "b": [X, (X, "text")]}
    specs = {"a": P("x"), "b": [P(), P("x")]}
    f = shard_map(lambda t: t, mesh=LINE, in_specs=(specs,), out_specs=specs)
    out = f(tree)
    assert out["b"][1][1] == "text" and out["b"][0].sharding.is_fully_replicated
    jax.tree.map(np.testing.assert_array_equal, out, tree)


def test_typed_keys_numpy_and_scalars():
    f = shard_map(
        lambda key, x, n: jax.random.normal(key[0], x.shape) * n,
        mesh=LINE,
        in_specs=(P("x"), P("x"), P()),
        out_specs=P("x"),
    )
    keys = jax.random.split(jax.random.key(0), 8)
    out = f(keys, np.ones((8, 4), np.float32), np.float32(2))
    np.testing.assert_array_equal(
        out, jnp.concatenate([jax.random.normal(k, (1, 4)) for k in keys]) * 2
    )


def test_one_array_under_two_specs():
    f = shard_map(lambda x, y: x + y[:1], mesh=LINE, in_specs=(P("x"), P()), out_specs=P("x"))
    np.testing.assert_array_equal(f(X, X), X + X[:1])


# Meshes


def test_a_mesh_that_is_given_or_is_not_there():
    f = shard_map(lambda x: x * 2, in_specs=P("data"), out_specs=P("data"))
    with jax.set_mesh(MESH):  # one that is given wins
        g = shard_map(lambda x: x * 2, mesh=LINE, in_specs=P("x"), out_specs=P("x"))
        np.testing.assert_array_equal(g(np.asarray(X)), 2 * X)
    with raises("there is no mesh: pass `mesh=`, or enter", error=ft.ShardingError):
        f(X)


def test_partial_auto_projects_rules():
    @shard_map(mesh=MESH, rules=RULES, axis_names={"model"})
    def f(model: MLP, x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
        assert x.shape == (4, 6) and model.up.shape == (6, 2)
        return model(x)

    x = ft.shard(INPUTS[0], P("data"), MESH)
    np.testing.assert_allclose(f(mlp(), x), reference(*INPUTS), rtol=1e-4, atol=1e-5)


def test_nested():
    @shard_map(mesh=MESH, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    def outer(x: Array) -> Array:
        @shard_map(in_specs=P(None, "model"), out_specs=P(None, "model"))
        def inner(y: Array) -> Array:
            assert y.shape == (4, 1)
            return y + (10 * jax.lax.axis_index("data") + jax.lax.axis_index("model")).astype(float)

        return inner(x)

    expected = X + 10 * jnp.repeat(jnp.arange(2.0), 4)[:, None] + jnp.arange(4.0)[None]
    np.testing.assert_array_equal(outer(X), expected)
    np.testing.assert_array_equal(jax.jit(outer)(X), expected)


def test_abstract_arrays_and_meshes():
    f = shard_map(ffn, mesh=MESH.abstract_mesh, rules=RULES)
    out = jax.eval_shape(f, *INPUTS)
    assert (out.shape, out.dtype) == ((4, 6), jnp.float32)
    with pytest.raises(
        ft.ShardingError, match=r"cannot run: the mesh \(data=2, model=4\) has no devices"
    ):
        f(*INPUTS)


# Composition


def loss(f: Callable[..., Array]) -> Callable[..., Array]:
    return lambda *args: jnp.sum(f(*args) ** 2)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("jit", [True, False])
def test_grad_taken_outside(jit: bool, check_vma: bool):
    grad = jax.grad(loss(shard_map(ffn, mesh=MESH, rules=RULES, check_vma=check_vma)), (0, 1, 2))
    ours = (jax.jit(grad) if jit else grad)(*INPUTS)
    for a, b in zip(ours, jax.grad(loss(reference), (0, 1, 2))(*INPUTS), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_inside_ambient_rules_and_other_settings_it_is_traced_again():
    f = shard_map(
        lambda x: x * (2 if ambient_rules() else 1), mesh=LINE, in_specs=P("x"), out_specs=P("x")
    )
    np.testing.assert_array_equal(f(X), X)
    with ft.axis_rules(RULES):
        np.testing.assert_array_equal(f(X), 2 * X)
    np.testing.assert_array_equal(f(X), X)


@pytest.mark.parametrize("inner", [False, True], ids=["directly", "by a function"])
def test_a_traced_array_that_is_closed_over_is_of_this_trace(inner: bool):
    """One function, called in two traces: nothing of the first may be left in the second."""
    held: Any = None

    def scaled(x: Array) -> Array:
        return x * held

    f = shard_map(
        (lambda x: scaled(x)) if inner else scaled, mesh=LINE, in_specs=P("x"), out_specs=P("x")
    )

    def step(x: Array, factor: Array) -> Array:
        nonlocal held
        held = factor
        return f(x)

    for factor in (2.0, 3.0):
        found = jax.jit(lambda *args: step(*args))(X, jnp.float32(factor))
        np.testing.assert_array_equal(found, X * factor)
        by_factor = jax.grad(lambda factor: step(X, factor).sum())(jnp.float32(factor))
        assert by_factor == X.sum()


def test_the_ambient_mesh_may_be_another_one_in_each_call():
    seen = []
    f = shard_map(lambda x: seen.append(x.shape) or x, in_specs=P("data"), out_specs=P("data"))
    for sizes in ({"data": 8}, {"data": 2, "model": 4}, {"data": 8}):
        with jax.set_mesh(ft.make_mesh(**sizes)):
            np.testing.assert_array_equal(f(np.asarray(X)), X)
    assert seen == [(1, 4), (4, 4)]


def test_arguments_are_let_go():
    f = shard_map(lambda tree: tree["x"], mesh=LINE, in_specs=P("x"), out_specs=P("x"))
    x = X + 1
    seen = weakref.ref(x)
    f({"x": x})
    del x
    gc.collect()
    assert seen() is None


# Traces and time


def test_rules_lose_the_axes_that_are_not_manual():
    """Such an axis counts as one device, also where the sizes are checked."""

    def f(x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
        assert x.shape == (3, 4)
        return x

    rules = ft.AxisRules({"batch": ("data", "model"), ...: None})
    found = shard_map(f, mesh=MESH, rules=rules, axis_names={"data"})(jnp.ones((6, 4)))
    assert found.sharding.spec == P("data")


def test_a_trace_in_another_setting_keeps_its_own_result():
    """The result's structure depends on a setting of JAX, and the traces of both settings are used
    again, wherever the argument lies."""
    traces: list[Any] = []

    def body(x: Any) -> Any:
        traces.append(x)
        wide = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
        return {"x": x, "again": x} if wide else {"x": x}

    f = shard_map(body, mesh=MESH, in_specs=P("data"), out_specs=P("data"))
    assert f(X).keys() == {"x"}
    with jax.enable_x64(True):
        assert f(X).keys() == {"x", "again"}
    for x in (ft.shard(X, P("data"), MESH), np.asarray(X), X):
        assert f(x).keys() == {"x"}
    assert f.eval_shape(jax.ShapeDtypeStruct(X.shape, X.dtype)).keys() == {"x"}
    assert len(traces) == 2


# Explicit axes: the types have the specs


EXPLICIT = mesh_of(explicit=True)


def typed(*spec: Any) -> Any:
    return jax.device_put(jnp.arange(32.0).reshape(8, 4), NamedSharding(EXPLICIT, P(*spec)))


@pytest.mark.parametrize("spec", [("data",), (("data", "model"),), ()], ids=str)
def test_without_in_specs_the_types_tell(spec: tuple[Any, ...]):
    seen: list[Any] = []

    def body(x: Any, *, tree: Any) -> Any:
        seen.append((x.shape, tree["a"].shape))
        return x * 2

    x = typed(*spec)
    f = shard_map(body, mesh=EXPLICIT, out_specs=P(*spec))
    for y in (f(x, tree={"a": x}), ft.jit(lambda x, tree: f(x, tree=tree))(x, {"a": x})):
        assert np.array_equal(y, 2 * np.asarray(x)) and y.sharding.is_equivalent_to(x.sharding, 2)
    local = x.sharding.shard_shape(x.shape)
    assert seen and all(shapes == (local, local) for shapes in seen)


def test_what_has_no_type_needs_a_spec():
    f = shard_map(lambda x, y: x, mesh=EXPLICIT, out_specs=P("data"))
    for other in (jnp.ones(8), np.ones(8)):
        with pytest.raises(
            ft.ShardingError, match=r"(?s)1 leaf.*y   f.*no layout was given for this array"
        ):
            f(typed("data"), other)
    g = shard_map(lambda x, y: x, mesh=EXPLICIT, in_specs=(None, P("data")), out_specs=P("data"))
    assert g(typed("data"), jnp.ones(8)).shape == (8, 4), "`None` for one of them"
    with pytest.raises(ft.ShardingError, match="no layout was given for this array"):
        shard_map(lambda x: x, mesh=MESH, out_specs=P())(ft.shard(X, P("data"), MESH))


# Nonsense


def call(*, x: Any = X, fun: Any = lambda x: x, mesh: Any = MESH, **options: Any) -> Any:
    return shard_map(fun, mesh=mesh, **{"in_specs": P("data"), "out_specs": P("data"), **options})(
        x
    )


NO_LAYOUT = "no layout was given for this array (`None`)"
NOT_MANUAL = "names `model`, but this shard_map makes only `data` Manual"
HOST = NamedSharding(MESH, P("data"), memory_kind="pinned_host")
OF_DATA = {"axis_names": {"data"}}
ODD = {"a": jnp.ones((7, 4)), "b": jnp.ones((5, 4))}
# Of a layout that does not fit, one case for each side: the others are those of every layout.
UNFIT: list[tuple[dict[str, Any], str, str]] = [
    ({"in_specs": (None,)}, "x", NO_LAYOUT),
    ({"out_specs": None}, "result", NO_LAYOUT),
    ({"in_specs": P("dta")}, "x", "P('dta') names `dta`, but the mesh (data=2, model=4) has no"),
    ({"x": ODD}, "x.a, x.b", "dimension 0 has size 7; data=2 needs a multiple of 2"),
    ({"in_specs": P("model"), **OF_DATA}, "x", NOT_MANUAL),
    ({"out_specs": P("model"), **OF_DATA}, "result", NOT_MANUAL),
    ({"in_specs": None, "rules": RULES}, "x", "has no axis names, and rules shard axes by name"),
    (
        {"in_specs": HOST},
        "x",
        "its layout has the memory kind pinned_host, but shard_map cannot move",
    ),
    # What JAX would not move.
    (
        {"x": ft.shard(X, P(None, "model"), EXPLICIT), "mesh": EXPLICIT},
        "x",
        "its type has the spec P(None, 'model'), but its layout has the spec P('data', None)",
    ),
]


@pytest.mark.parametrize(("options", "paths", "why"), UNFIT)
def test_layouts_that_do_not_fit(options: dict[str, Any], paths: str, why: str):
    with pytest.raises(ft.ShardingError) as caught:
        call(**options)
    problems = caught.value.problems
    assert ", ".join(str(problem.path) for problem in problems) == paths
    assert problems[0].why.startswith(why)


def test_the_error_for_a_result_that_may_differ():
    with pytest.raises(ft.ShardingError) as caught:
        call(out_specs=P())
    assert str(caught.value).startswith(
        "<lambda>: 1 leaf cannot be laid out on mesh (data=2, model=4)\n\n  result   f32[4, 4]\n"
        "      P(None, None) replicates it over `data`, but its values may differ between devices\n\n"
        "Try: reduce it over `data` with `jax.lax.psum` or `pmean`, name `data` in its spec, or pass "
        "`check_vma=False` if its values are equal"
    )


WRONG_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"in_specs": (P(), P())},
        ft.RuleError,
        "in_specs has 2 layouts, but <lambda> has 1 positional parameter (x)",
    ),
    (
        {"axis_names": {"dta"}},
        ft.ShardingError,
        "(dta) must be axes of the mesh (data=2, model=4) that are not Manual yet (data, model); did",
    ),
    ({"axis_names": "data"}, TypeError, "it must be a collection of strings, or None"),
    ({"shapes": "globl"}, ValueError, "it must be one of 'global', 'local', or None"),
    (
        {"mesh": {"data": 2}},
        ft.ShardingError,
        "shard_map: `mesh` has only sizes: pass a `Mesh` with devices",
    ),
    ({"check_rep": True}, TypeError, "shard_map has no option `check_rep`"),
    (
        {"x": jax.device_put(X, jax.devices()[1])},
        ft.ShardingError,
        "is committed to cpu:1 only",
    ),
    (
        {"x": ft.shard(X, P("data"), MESH), "mesh": EXPLICIT},
        ft.ShardingError,
        "is on the mesh (data=2, model=4) with Auto axes",
    ),
]


@pytest.mark.parametrize(("options", "error", "text"), WRONG_OPTIONS)
def test_wrong_options(options: dict[str, Any], error: type[Exception], text: str):
    with raises(text, error=error) as caught:
        call(**options)
    assert isinstance(caught.value, ft.FunctreeError)


def test_another_mesh_inside():
    inner = shard_map(lambda x: x, mesh=LINE, in_specs=P("x"), out_specs=P("x"))
    message = r"its mesh is \(x=8\), but it is called inside a shard_map over \(data=2, model=4\)"
    with pytest.raises(ft.ShardingError, match=message):
        call(fun=inner)
    with pytest.raises(ft.ShardingError, match="not Manual yet \\(none\\)"):
        call(fun=shard_map(lambda x: x, in_specs=P(), out_specs=P()))


def test_results_of_every_kind():
    def f(x: Array) -> Any:
        kept = {"none": None, "number": 2.5, "set": {1}, "empty": ()}
        return {"x": x, "numpy": np.ones(3, np.float32), **kept}

    out = shard_map(
        f, mesh=LINE, in_specs=P("x"), out_specs={**dict.fromkeys(f(X), P()), "x": P("x")}
    )(X)
    assert (out["none"], out["number"], out["set"], out["empty"]) == (None, 2.5, {1}, ())
    np.testing.assert_array_equal(out["numpy"], np.ones(3))
    assert shard_map(lambda: jnp.ones(2), mesh=LINE, out_specs=P("x"))().shape == (16,)
