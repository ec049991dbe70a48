"""The warning where an optimizer treats a stack differently from its layers: for whom, how often, and
what it says."""

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from jaxtyping import Array, Float

import functree as ft
from tests.lib.covering import whole_tables
from tests.lib.meshes import MESH, SIZES
from tests.lib.optimizers import NAMES, build, given

P = ft.P
S = jax.ShapeDtypeStruct


class Block(eqx.Module):
    w: Float[Array, "embed hidden"]
    scale: Float[Array, "embed"]


class Net(eqx.Module):
    table: Float[Array, "vocab embed"]
    blocks: ft.Stacked[Block]


def net(layers: int = 24, dtype: Any = jnp.float32, embed: int = 256) -> Net:
    block = Block(S((layers, embed, 512), dtype), S((layers, embed), dtype))  # pyright: ignore
    return Net(S((1000, embed), dtype), ft.Stacked(block))  # pyright: ignore


WHOLE = ft.AxisRules({...: None})


def told(run: Callable[[], object]) -> list[str]:
    """The texts of the warnings of functree."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(one.message) for one in caught if one.category is ft.FunctreeWarning]


def told_of(tx: Any, model: Any = None, **options: Any) -> list[str]:
    model = net() if model is None else model
    return told(lambda: ft.plan_optimizer(tx, model, WHOLE, SIZES, otherwise=P(), **options))


# Those that look at the shape or the norm of a leaf.
OTHERWISE = {
    *("adafactor", "adaptive_grad_clip", "centralize", "clip_by_block_rms", "fromage", "galore"),
    *("lamb", "lars", "muon", "novograd", "sm3"),
    # What these are made of.
    *("scale_by_distance_over_gradients", "scale_by_galore", "scale_by_novograd"),
    *("scale_by_param_block_norm", "scale_by_param_block_rms", "scale_by_sm3"),
    "scale_by_trust_ratio",
    # In the table of optimizers, these have an adafactor, or a mask or labels by rank.
    *("chain", "freeze", "masked", "multi_transform", "named_chain", "partition"),
}
SOME = ["adafactor", "adaptive_grad_clip", "adam", "lamb", "lbfgs", "masked", "muon", "sam", "sm3"]


@pytest.mark.parametrize("name", NAMES if whole_tables() else SOME)
def test_who_is_told(name: str):
    texts = told_of(build(name), given(name, net()))
    if name not in OTHERWISE:
        assert not texts
        return
    (text,) = texts
    assert text.startswith(
        "the optimizer treats the stack `blocks` differently from separate layers"
    )
    assert "it treats the stack dimension of `blocks.layer." in text
    assert "Use `ft.layerwise(tx)`, which treats each layer as its own leaf" in text
    assert "`optax.chain(optax.clip_by_global_norm(1.0), ft.layerwise(tx))`" in text
    # With it there is nothing to tell, inside of others too.
    tx = optax.chain(optax.clip_by_global_norm(1.0), ft.layerwise(build(name)))
    assert not told_of(tx, given(name, net()))


def decayed(by: Callable[[Any], Any]) -> Any:
    return optax.adamw(1e-3, weight_decay=1e-4, mask=by)


def by_rank(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def by_name(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: "scale" not in str(path), params)


def test_a_decay_by_rank_is_another_one_for_a_stack():
    (text,) = told_of(decayed(by_rank))
    assert "`blocks.layer.scale`" in text and "`blocks.layer.w`" not in text
    assert not told_of(decayed(by_name))
    assert not told_of(ft.layerwise(decayed(by_rank)))


def test_real_sizes_count():
    """Factored are the two largest dimensions, if they have 128 elements."""
    tx = optax.scale_by_factored_rms()
    assert not told_of(tx, net(24)), "as for its layers"
    assert "`blocks.layer.scale`" in told_of(tx, net(130))[0]


def test_of_one_array_alone_nothing_is_told():
    """Its norm may be meant as a global one."""
    only = {"blocks": eqx.tree_at(lambda b: b.layer.scale, net().blocks, None)}
    assert not told_of(optax.clip_by_global_norm(1.0), only)
    assert not told_of(optax.clip_by_block_rms(1.0), only)


def gathered(grads: Any, state: Any, params: Any = None) -> Any:
    """An update with an operation whose dimension numbers are no pair of contracted ones."""
    return jax.tree.map(lambda g: g - g[..., jnp.array([0])], grads), state


def test_an_update_that_gathers_can_be_tried():
    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), gathered)
    assert not told_of(tx)
    assert "`blocks.layer.scale`" in told_of(optax.chain(tx, optax.lamb(1e-3)))[0]


def test_random_numbers_are_no_difference_and_hide_none():
    assert not told_of(optax.add_noise(1.0, 0.5, 0))
    assert told_of(optax.chain(optax.add_noise(1.0, 0.5, 0), optax.lamb(1e-3)))
    assert not told_of(optax.chain(optax.add_noise(1.0, 0.5, 0), ft.layerwise(optax.lamb(1e-3))))


def test_several_stacks_and_stacks_of_stacks():
    inner = net().blocks
    outer: Any = jax.tree.map(lambda x: S((2, *x.shape), x.dtype), inner)
    stack = ft.Stacked(outer, "outer")
    (text,) = told_of(optax.novograd(1e-3), {"a": stack, "b": inner})
    assert "treats the stacks `a`, `b` differently" in text
    (text,) = told_of(optax.novograd(1e-3), inner)
    assert "treats the stack `(the model)` differently" in text
    assert not told_of(ft.layerwise(optax.novograd(1e-3)), {"a": stack, "b": inner})


# What is not told


def raising(error: type[Exception]) -> Any:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        raise error("not without a value")

    return optax.GradientTransformation(optax.lamb(1e-3).init, update)


def test_what_cannot_be_tried_is_not_told():
    for error in (TypeError, RuntimeError, ft.FunctreeError):
        assert not told_of(raising(error))
    assert not told_of(optax.GradientTransformation(optax.lamb(1e-3).init, None))  # pyright: ignore


def test_without_stacks_nothing_is_tried():
    traces: list[Any] = []

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        traces.append(updates)
        return updates, state

    tx = optax.GradientTransformation(optax.sgd(1e-3).init, update)
    listed = [Block(S((256, 512), jnp.float32), S((256,), jnp.float32))] * 3  # pyright: ignore
    assert not told_of(tx, listed) and not traces
    # Nor for stacks that are not trained.
    assert not told_of(tx, wrt=ft.glob("table")) and not traces
    told_of(tx)
    # The stack, and one layer of it.
    assert [len(jax.tree.leaves(one)) for one in traces] == [3, 3]
    told_of(tx)
    assert len(traces) == 2


# How often, and where


def concrete() -> Net:
    return jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), net(3, embed=8))


DOORS: dict[str, Callable[[Any, Net], object]] = {
    "plan_optimizer": lambda tx, model: ft.plan_optimizer(tx, model, WHOLE, SIZES),
    "init_optimizer": lambda tx, model: ft.init_optimizer(tx, model, WHOLE, MESH),
    "TrainState.create": lambda tx, model: ft.TrainState.create(model, tx),
    "in ft.init": lambda tx, model: ft.init(lambda m: ft.TrainState.create(m, tx), WHOLE, MESH)(
        model
    ),
    "abstract": lambda tx, model: ft.abstract(lambda: ft.TrainState.create(concrete(), tx))(),
}


@pytest.mark.parametrize("door", DOORS)
def test_once_at_each_door(door: str):
    tx, model = optax.novograd(1e-3), concrete()
    with jax.set_mesh(MESH), ft.axis_rules(WHOLE):
        assert len(told(lambda: DOORS[door](tx, model))) == 1
        assert not told(lambda: DOORS["plan_optimizer"](tx, model))
        assert not told(lambda: DOORS[door](tx, model))
        assert not told(lambda: DOORS[door](ft.layerwise(tx), model))


def test_once_for_each_optimizer_and_shapes():
    tx = optax.lamb(1e-3)
    assert told_of(tx) and not told_of(tx)
    assert told_of(tx, net(25)) and not told_of(tx, net(25)) and not told_of(tx)
    assert told_of(optax.lamb(1e-3))


def test_optimizers_that_share_their_init_are_not_taken_for_each_other():
    clip, other = optax.clip(1.0), optax.scale_by_trust_ratio()
    assert clip.init is other.init
    assert not told_of(clip) and told_of(other)


def test_once_for_an_object_with_methods():
    tx = optax.MultiSteps(optax.lamb(1e-3), 1)
    assert told_of(tx) and not told_of(tx)
    found = weakref.ref(tx)
    del tx
    gc.collect()
    assert found() is None


def test_the_settings_of_the_caller_make_no_difference():
    with jax.numpy_dtype_promotion("strict"), jax.debug_nans(True), jax.disable_jit():
        assert told_of(optax.lamb(1e-3), net(dtype=jnp.bfloat16))
        assert not told_of(optax.adamw(1e-3), net(dtype=jnp.bfloat16))
    with jax.enable_x64(True):
        assert told_of(optax.lamb(1e-3), net(dtype=jnp.float64))
        assert not told_of(optax.adamw(1e-3), net(dtype=jnp.float64))
