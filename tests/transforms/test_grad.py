"""`value_and_grad` and `grad`, beside `jax.grad` on literal arrays; and where the gradients lie."""

import functools
import inspect
import operator
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

import functree as ft
from functree.errors import FunctreeTypeError, FunctreeValueError
from functree.surgery.pack import pack
from functree.transforms.grad.grad import grad, value_and_grad
from tests.lib.checks import raises
from tests.lib.meshes import EXPLICIT, MESH

P = PartitionSpec
RULES = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None, "layers": None}) | ft.FSDP(
    "data", min_size=0
)


class MLP(eqx.Module):
    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden embed"]
    mean: ft.Buffer[Float[Array, "embed"]]
    steps: Int[Array, ""]
    act: Any
    name: str = "mlp"
    bias: Float[Array, "embed"] | None = None

    def __call__(self, x: Array) -> Array:
        return self.act((x - self.mean) @ self.up) @ self.down


def mlp(embed: int = 8, hidden: int = 16) -> MLP:
    up, down = jax.random.normal(jax.random.key(0), (2, embed, hidden))
    return MLP(up, down.T, jnp.full(embed, 0.5), jnp.array(3), jax.nn.gelu)


MODEL, X = mlp(), jax.random.normal(jax.random.key(1), (4, 8))


def loss(model: MLP, x: Array) -> Array:
    with jax.numpy_rank_promotion("allow"):
        return jnp.mean(model(x) ** 2)


def by_hand(model: MLP, x: Array) -> tuple[Array, dict[str, Array]]:
    """The same by `jax.value_and_grad` on a dict of two arrays."""

    def of_arrays(arrays: dict[str, Array]) -> Array:
        return loss(eqx.tree_at(lambda m: (m.up, m.down), model, (arrays["up"], arrays["down"])), x)

    return jax.value_and_grad(of_arrays)({"up": model.up, "down": model.down})


def assert_close(a: Any, b: Any, tolerance: float = 1e-6) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


# What is differentiated


def test_it_is_jax_grad_on_what_is_trainable():
    value, gradient = value_and_grad(loss)(MODEL, X)
    expected, by = by_hand(MODEL, X)
    assert value == expected
    assert np.array_equal(gradient.up, by["up"]) and np.array_equal(gradient.down, by["down"])
    assert_close(grad(loss)(MODEL, X), gradient, 0)


def test_the_gradient_has_the_models_structure_and_none_elsewhere():
    gradient = grad(loss)(MODEL, X)
    trained = eqx.filter(MODEL, lambda x: x is MODEL.up or x is MODEL.down)
    assert jax.tree.structure(gradient) == jax.tree.structure(trained)
    others = (gradient.mean, gradient.steps, gradient.act, gradient.name, gradient.bias)
    assert others == (None,) * 5
    assert ft.tree_axes(gradient).up == ft.Axes("embed", "hidden")
    assert np.allclose(eqx.apply_updates(MODEL, gradient).up, MODEL.up + gradient.up)


def test_a_packed_model_has_a_packed_gradient():
    """Its buffers are not trained, as those of the model itself."""
    tree = {"model": pack(MODEL), "step": 1}
    value, gradient = value_and_grad(lambda tree: loss(tree["model"].tree, X))(tree)
    expected, by = by_hand(MODEL, X)
    assert value == expected and gradient["step"] is None
    assert [x is None for x in gradient["model"].arrays] == [False, False, True, True]
    assert np.array_equal(gradient["model"].tree.up, by["up"])
    assert gradient["model"].static == tree["model"].static and gradient["model"].tree.mean is None
    moved = eqx.apply_updates(tree, gradient)["model"].tree
    assert np.array_equal(moved.up, MODEL.up + by["up"]) and moved.mean is MODEL.mean
    only = grad(lambda packed: loss(packed.tree, X), "down")(pack(MODEL))
    assert [x is None for x in only.arrays] == [True, False, True, True]


def test_a_parameter_that_is_not_used_has_a_gradient_of_zeros():
    gradient = grad(lambda tree: tree["a"].sum())({"a": jnp.ones(2), "b": jnp.ones(3)})
    assert gradient["a"].tolist() == [1, 1] and gradient["b"].tolist() == [0, 0, 0]


def test_one_array_at_two_places_has_a_gradient_at_each():
    w = jnp.float32(3)
    assert grad(lambda t: t["a"] ** 2 * t["b"])({"a": w, "b": w}) == {"a": 18.0, "b": 9.0}


@pytest.mark.parametrize(
    ("wrt", "paths"),
    [
        ("up", {"up"}),
        (ft.glob("up") | ft.is_buffer, {"up", "mean"}),
        (ft.has_axis("hidden"), {"up", "down"}),
        (ft.under(MLP) & ft.is_trainable, {"up", "down"}),
    ],
)
def test_a_filter_chooses(wrt: Any, paths: set[str]):
    gradient = grad(loss, wrt)(MODEL, X)
    found = {str(ft.Path.of(path)) for path, _ in jax.tree.leaves_with_path(gradient)}
    assert found == paths
    _, by = by_hand(MODEL, X)
    for name in paths & {"up", "down"}:
        np.testing.assert_allclose(getattr(gradient, name), by[name], rtol=1e-6, atol=1e-6)


# How it is called


def test_several_arguments_and_keywords():
    def f(a: Any, b: Any, *, c: Any, flag: str = "no") -> Array:
        return a["x"] * b["x"] ** 2 * c * float(flag == "yes")

    a, b = {"x": jnp.float32(2)}, {"x": jnp.float32(3), "n": 1}
    value, (by_a, by_b) = value_and_grad(f, argnums=(0, 1))(a, b, c=jnp.float32(5), flag="yes")
    assert (value, by_a, by_b) == (90.0, {"x": 45.0}, {"x": 60.0, "n": None})
    assert grad(f, argnums=1)(a, b=b, c=5.0, flag="yes") == by_b
    assert grad(f, argnums=-1)(a, b, c=5.0, flag="yes") == by_b
    assert grad(f, argnums=[1])(b=b, a=a, c=5.0, flag="yes") == (by_b,)
    assert grad(f)(c=5.0, flag="yes", b=b, a=a) == by_a


def test_has_aux_gives_back_anything():
    def f(model: Any) -> tuple[Array, Any]:
        return model["w"] ** 2, {"model": model, "text": "aux", "f": jax.nn.relu}

    model = {"w": jnp.float32(3), "n": 1}
    (value, aux), gradient = value_and_grad(f, has_aux=True)(model)
    assert value == 9 and gradient == {"w": 6.0, "n": None} and aux == f(model)[1]
    assert grad(f, has_aux=True)(model) == (gradient, aux)


def test_the_signature_is_kept_but_for_what_is_returned():
    def f(model: MLP, x: Float[Array, "batch embed"], *, scale: float = 1.0) -> Float[Array, ""]:
        return x.sum()

    signature = inspect.signature(value_and_grad(f))
    assert list(signature.parameters.values()) == list(inspect.signature(f).parameters.values())
    assert signature.return_annotation is inspect.Signature.empty
    kept = grad(f).__annotations__
    assert "return" not in kept and kept["x"] is f.__annotations__["x"]


class Callable_(eqx.Module):
    scale: Array

    def __call__(self, x: Array) -> Array:
        return (self.scale * x).sum()

    @grad
    def method(self, x: Array) -> Array:
        return self(x)


def test_methods_modules_partials_and_functions_of_jax():
    module, x = Callable_(jnp.float32(3)), jnp.arange(3.0)
    with jax.numpy_rank_promotion("allow"):
        assert module.method(x).scale == 3.0
        assert np.array_equal(grad(module)(x), [3.0] * 3)
        assert not hasattr(grad(module), "scale")
        assert grad(functools.partial(Callable_.__call__, x=x))(module).scale == 3.0
    assert np.array_equal(grad(jnp.sum)(x), jnp.ones(3))
    assert grad(operator.neg)(jnp.float32(3)) == -1.0


# Errors

REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = {
    "an integer": (
        lambda: grad(loss, ...)(MODEL, X),
        FunctreeTypeError,
        (
            "grad: 1 leaf cannot be differentiated\n\n  steps   i32[]\n      is i32, but only inexact",
            "narrow the filter",
        ),
    ),
    "a filter of nothing": (
        lambda: grad(loss, "upp")(MODEL, X),
        FunctreeValueError,
        (
            "grad: wrt=glob('upp') matches no array of argument 0\n",
            "up   f32[8, 16]",
            "does not match",
            "Try: change `wrt=`",
        ),
    ),
    "no arrays": (
        lambda: grad(lambda x: x**2)(3.0),
        FunctreeValueError,
        ("which has no arrays. Python numbers are static: pass `jnp.asarray(...)`",),
    ),
}


@pytest.mark.parametrize("argnums", [-3, (0, -2), ()])
def test_argnums_that_are_not_there(argnums: Any):
    told = "argnums=", "2 positional arguments", "pass one position, counted from 0"
    with raises(*told, error=FunctreeValueError):
        grad(loss, argnums=argnums)(MODEL, X)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str):
    call, error, told = REFUSED[case]
    with raises(*told, error=error):
        call()


# Where gradients lie


def specs(tree: Any) -> Any:
    """Where arrays lie, with an entry for each dimension."""
    return jax.tree.map(
        lambda x: P(*x.sharding.spec, *(None,) * (x.ndim - len(x.sharding.spec))), tree
    )


class Square(eqx.Module):
    """A layer that keeps its input's width."""

    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden embed"]

    def __call__(self, x: Array) -> Array:
        return x + jnp.tanh(x @ self.up) @ self.down


def stacked(key: Any) -> ft.Stacked[Square]:
    def make(key: Any) -> Square:
        up, down = jax.random.normal(key, (2, 8, 16))
        return Square(up, down.T)

    return ft.stack(make, 3, key)


def stack_loss(model: Any, x: Array) -> Array:
    return jnp.mean(model(x) ** 2)


@pytest.mark.parametrize("set_mesh", [True, False])
@pytest.mark.parametrize("by", ["layout", "ambient"])
def test_silent_failure_12_gradients_lie_like_their_parameters(by: str, set_mesh: bool):
    model = ft.init(stacked, RULES, MESH)(jax.random.key(0))
    planned = ft.plan(model, RULES, MESH).specs
    assert planned.layer.up == P(None, "data", "model") and specs(model) == planned
    x = jax.device_put(jax.random.normal(jax.random.key(1), (4, 8)), NamedSharding(MESH, P("data")))
    with jax.set_mesh(MESH) if set_mesh else nullcontext():
        if by == "layout":
            found = specs(jax.jit(grad(stack_loss, layout=RULES))(model, x))
        else:
            with ft.axis_rules(RULES):
                found = specs(jax.jit(grad(stack_loss))(model, x))
    assert found == planned


def test_silent_failure_12_is_there_without_a_layout():
    """A canary: should JAX mend it, this test fails, and the constraint costs nothing."""
    model = ft.init(stacked, RULES, MESH)(jax.random.key(0))
    x = jax.device_put(jax.random.normal(jax.random.key(1), (4, 8)), NamedSharding(MESH, P("data")))
    plain = specs(jax.jit(jax.grad(stack_loss))(model, x))
    assert plain == specs(jax.jit(grad(stack_loss))(model, x))
    assert plain.layer.up != P(None, "data", "model")


def test_a_layout_need_not_fit_what_has_no_gradient():
    model = {"w": ft.shard(jnp.ones((8, 4)), P("data"), MESH), "odd": jnp.ones(3)}
    gradient = grad(lambda m: (m["w"] ** 2).sum() * m["odd"].sum(), "w", layout=P("data"))
    assert specs(jax.jit(gradient)(model))["w"] == P("data", None)


def test_with_no_mesh_rules_do_nothing():
    with ft.axis_rules(RULES):
        assert_close(grad(loss)(MODEL, X), grad(loss)(MODEL, X), 0)
        text = jax.jit(grad(stack_loss)).lower(Square(MODEL.up, MODEL.down), X).as_text()
    assert "sharding" not in text


LAYOUTS: dict[str, Any] = {
    "rules": RULES,
    "filters": ft.StateSharding({"mean": P(), "steps": P(), ft.under(MLP): RULES}),
    "a plan": ft.plan(MODEL, ft.StateSharding({"steps": P(), ...: RULES}), MESH),
    "host": ft.on_host(RULES),
    "a prefix tree": MLP(P("data", None), P(None, "model"), P(), P(), None, None),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_of_the_model_lays_out_its_gradient(name: str):
    layout = LAYOUTS[name]
    planned = ft.plan(MODEL, layout, MESH)
    arrays, rest = eqx.partition(MODEL, eqx.is_array)
    gradient = jax.jit(
        lambda arrays: grad(loss, "up", layout=layout)(eqx.combine(arrays, rest), X)
    )(jax.device_put(arrays, NamedSharding(MESH, P())))
    assert gradient.up.sharding.is_equivalent_to(planned.sharding(planned["up"]), 2)
    assert gradient.up.sharding.memory_kind == (planned["up"].memory_kind or "device")
    assert jax.tree.leaves(gradient) == [gradient.up]


def test_several_arguments_have_one_layout_or_one_each():
    a, b = (ft.shard(MODEL.up, P(), MESH) for _ in range(2))

    def f(a: Array, b: Array) -> Array:
        return jnp.vdot(a, b)

    one = jax.jit(grad(f, argnums=(0, 1), layout=P("data")))(a, b)
    assert specs(one) == (P("data", None),) * 2
    each = jax.jit(grad(f, argnums=(0, 1), layout=(P("data"), P(None, "model"))))(a, b)
    assert specs(each) == (P("data", None), P(None, "model"))
    with raises("grad: got 3 layouts for 2 differentiated arguments", error=ft.RuleError):
        grad(f, argnums=(0, 1), layout=(P(),) * 3)


def test_ambient_rules_need_not_lay_out_the_parameters():
    foreign = ft.shard(eqx.nn.Linear(8, 16, key=jax.random.key(0)), P("model"), MESH)
    gradient_of = grad(lambda layer: layer(X[0]).sum())
    with jax.set_mesh(MESH), ft.axis_rules(RULES):
        for gradient in (gradient_of(foreign), jax.jit(gradient_of)(foreign)):
            assert (specs(gradient.weight), specs(gradient.bias)) == (P("model", None), P("model"))
        gradient = grad(lambda layer: layer(X[0]).sum(), layout=P("data"))(foreign)
        assert specs(gradient.weight) == P("data", None)
        assert grad(lambda x: x**2)(jnp.float32(3)) == 6.0


def test_a_layout_that_does_not_fit_is_an_error_by_path():
    model = MLP(MODEL.up[:, :15], MODEL.down[:15], MODEL.mean, MODEL.steps, jax.nn.relu)
    with jax.set_mesh(MESH), raises(
        "grad: the layout does not fit the gradient of argument 0 on mesh (data=2, model=4)", "up", '"hidden" has size 15',
        error=ft.ShardingError,
    ):  # fmt: skip
        grad(loss, layout=RULES)(model, X)


@pytest.mark.parametrize("mesh", [MESH, EXPLICIT], ids=["auto", "explicit"])
def test_a_gradient_lies_as_its_parameter_does_and_not_as_the_rules_say(mesh: Any):
    def squares(model: Square) -> Array:
        return jnp.sum(model.up**2) + jnp.sum(model.down**2)

    for placement in (P(), RULES, ft.AxisRules({"embed": "model", ...: None})):
        model = ft.shard(Square(MODEL.up, MODEL.down), placement, mesh)
        with ft.axis_rules(RULES), jax.set_mesh(mesh):
            assert specs(jax.jit(grad(squares))(model)) == specs(model)
            moved = jax.jit(grad(squares, layout=RULES))(model)
        assert jax.tree.leaves(specs(moved)) == [P("data", "model"), P("model", "data")]


# Inside shard_map


def in_shards(f: Callable[..., Any], check_vma: bool = True) -> Any:
    """`f` of a weight that all shards share, and of the shards of four numbers."""
    body = jax.shard_map(
        f, mesh=MESH, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma
    )
    return jax.jit(body)(jnp.float32(2), jnp.arange(4.0))


EXPECTED = 1.5  # the gradient of mean(w * x) by w


def test_silent_failure_30_a_loss_averaged_on_each_shard_is_refused():
    def local(w: Array, x: Array) -> Array:
        return jnp.mean(w * x)

    assert in_shards(jax.grad(local)) == 2 * EXPECTED  # what fails in silence
    with raises(
        "the loss differs between shards along 'data'", "w   f32[]", "is shared between shards",
        "return `jax.lax.pmean(loss, 'data')` for the mean, or `psum` for the sum",
    ):  # fmt: skip
        in_shards(lambda w, x: grad(lambda t: local(t["w"], x))({"w": w})["w"])
    with raises("along 'data'"):
        in_shards(value_and_grad(lambda w, x: (local(w, x), x), has_aux=True))
    # A loss that is not an array is JAX's error.
    with pytest.raises(TypeError, match="Gradient only defined for scalar-output functions"):
        in_shards(grad(lambda w, x: (local(w, x), x)))


def test_silent_failure_30_along_two_mesh_axes_of_which_one_cuts_the_parameter():
    mapped = jax.shard_map(
        lambda model, x: grad(lambda model: jnp.mean(model["w"] * x))(model),
        mesh=MESH,
        in_specs=(P("data"), P(("data", "model"))),
        out_specs=P("data"),
    )
    with raises("along ('data', 'model')", "w   f32[1]", "is shared between shards"):
        jax.jit(mapped)({"w": jnp.ones(2)}, jnp.arange(8.0))


def test_silent_failure_30_the_ways_that_are_right():
    def mean(w: Array, x: Array) -> Array:
        return jax.lax.pmean(jnp.mean(w * x), "data")

    def total(w: Array, x: Array) -> Array:
        return jax.lax.psum(jnp.sum(w * x), "data")

    def averaged(w: Array, x: Array) -> Array:
        own = grad(lambda w: jnp.mean(w * x))(jax.lax.pcast(w, "data", to="varying"))
        return jax.lax.pmean(own, "data")

    assert in_shards(grad(mean)) == EXPECTED
    assert in_shards(value_and_grad(mean)) == (2 * EXPECTED, EXPECTED)
    assert in_shards(grad(total)) == 4 * EXPECTED
    assert in_shards(averaged) == EXPECTED


def test_silent_failure_30_a_gathered_parameter_is_not_seen_through():
    """The loss of each shard may be its own here, and grad cannot tell: what the docstring says of
    it."""

    def body(reduce: Callable[[Array], Array], w: Array, x: Array) -> Array:
        return grad(lambda w: reduce(jnp.vdot(jax.lax.all_gather(w, "data", tiled=True), x)))(w)

    def found(reduce: Callable[[Array], Array]) -> Array:
        specs = (P("data"), P(None, "data"))
        mapped = jax.shard_map(
            lambda w, x: body(reduce, w, x[:, 0]), mesh=MESH, in_specs=specs, out_specs=P("data")
        )
        return jax.jit(mapped)(
            jnp.ones(4), jnp.stack([jnp.arange(4.0), 3 * jnp.arange(4.0)], axis=1)
        )

    assert np.array_equal(found(lambda loss: jax.lax.pmean(loss, "data")), 2 * jnp.arange(4.0))
    assert np.array_equal(found(lambda loss: loss), 4 * jnp.arange(4.0))


def test_silent_failure_30_without_check_vma_gradients_are_refused():
    def mean(w: Array, x: Array) -> Array:
        return jax.lax.pmean(jnp.mean(w * x), "data")

    with raises(
        "inside shard_map(check_vma=False)", "only its own part", "take the gradient outside"
    ):
        in_shards(grad(mean), check_vma=False)


def test_it_lies_as_its_parameter_along_the_axes_that_are_not_manual():
    def body(up: Array, x: Array) -> Array:
        with ft.axis_rules(ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})):
            model = Square(up, up.T)
            return grad(lambda m: jax.lax.pmean(stack_loss(m, x), "data"))(model).up

    mapped = jax.shard_map(
        body, mesh=MESH, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"}
    )
    found = jax.jit(mapped)(ft.shard(MODEL.up, P(None, "model"), MESH), X)
    assert specs(found) == P(None, "model")
    assert_close(found, jax.grad(stack_loss)(Square(MODEL.up, MODEL.up.T), X).up, 1e-5)


def test_rules_are_not_asked_where_all_axes_are_manual():
    def body(w: Array, x: Array) -> Array:
        with ft.axis_rules(RULES):  # they say nothing of a bare array
            return grad(lambda w: jax.lax.psum(jnp.vdot(w, x), "data"))(jnp.stack([w, w]))

    assert np.array_equal(in_shards(body), [2.0, 4.0])
