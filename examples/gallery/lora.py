"""This network learns a second picture through LoRA adapters.

    python examples/gallery/lora.py --picture lora.png

The network returns the brightness at a point of the plane. First, all
its weights learn a picture of rings. Then these weights are frozen, each
gets an adapter of low rank, and only the adapters learn a picture of
stripes in a disk. An adapter uses the axes of its weight, so the same
rules shard it.
"""

from runs import (
    bare,
    figure,
    options,
    save,
    train,
)  # imported first: simulates the devices

import equinox as eqx  # isort: skip
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray

import functree as ft

RULES = ft.AxisRules(
    {
        "batch": "data",
        "hidden": "model",
        "hidden_in": None,
        "inputs": None,
        "rank": None,
    }
)
SIZE = 64  # pixels per side of a picture
WAVES = 16
ADAPTERS = ft.glob("**.lora_a") | ft.glob("**.lora_b")


class Dense(eqx.Module):
    weight: Float[Array, "hidden_in hidden"]

    def __call__(self, x: Array) -> Array:
        return ft.constrain(x @ self.weight, "batch hidden")


class LoRA(eqx.Module):
    """A frozen weight with a low-rank product that is initially zero."""

    weight: Float[Array, "hidden_in hidden"]
    lora_a: Float[Array, "hidden_in rank"]
    lora_b: Float[Array, "rank hidden"]

    @classmethod
    def of(cls, dense: Dense, rank: int, key: PRNGKeyArray) -> "LoRA":
        rows, columns = dense.weight.shape
        a = jax.random.normal(key, (rows, rank)) / rows**0.5
        return cls(dense.weight, a, jnp.zeros((rank, columns)))

    def __call__(self, x: Array) -> Array:
        return ft.constrain(
            x @ self.weight + x @ self.lora_a @ self.lora_b,
            "batch hidden",
        )


class Picture(eqx.Module):
    """A network that returns the brightness at each point."""

    first: Float[Array, "inputs hidden"]
    middle: list[Dense | LoRA]
    last: Float[Array, "hidden"]

    @classmethod
    def create(cls, hidden: int, key: PRNGKeyArray) -> "Picture":
        first, last, *middle = jax.random.split(key, 5)
        he = jax.nn.initializers.he_normal()
        layers: list[Dense | LoRA] = [
            Dense(he(key, (hidden, hidden))) for key in middle
        ]
        out = jax.random.normal(last, (hidden,)) / hidden**0.5
        return cls(he(first, (4 * WAVES, hidden)), layers, out)

    def __call__(
        self, points: Float[Array, "batch plane"]
    ) -> Float[Array, "batch"]:
        waves = points[:, :, None] * jnp.linspace(1, 12, WAVES)
        x = jnp.concatenate(
            [jnp.sin(waves), jnp.cos(waves)], axis=2
        ).reshape(len(points), -1)
        x = ft.constrain(jax.nn.relu(x @ self.first), "batch hidden")
        for layer in self.middle:
            x = jax.nn.relu(layer(x))
        return ft.constrain(x @ self.last, "batch")


def grid() -> Float[np.ndarray, "batch plane"]:
    line = np.linspace(-1, 1, SIZE, dtype=np.float32)
    return np.stack(
        np.meshgrid(line, line, indexing="ij"), axis=2
    ).reshape(-1, 2)


def rings(points: np.ndarray) -> np.ndarray:
    return np.cos(14 * np.hypot(*points.T)).astype(np.float32)


def stripes(points: np.ndarray) -> np.ndarray:
    inside = np.hypot(*points.T) < 0.8
    return np.where(
        inside, np.sign(np.sin(9 * (points[:, 0] + points[:, 1]))), 0.0
    ).astype(np.float32)


@ft.jit(rules=RULES, donate="ts")
def step(
    ts: ft.TrainState[Picture],
    points: Float[Array, "batch plane"],
    wanted: Float[Array, "batch"],
) -> tuple[ft.TrainState[Picture], Array]:
    def loss(model: Picture) -> Array:
        return jnp.mean((model(points) - wanted) ** 2)

    value, gradients = ft.value_and_grad(loss, wrt=ts.wrt)(ts.model)
    return ft.apply_gradients(ts, gradients), value


def main() -> None:
    given = options(__doc__, steps=250)
    mesh, points = ft.make_mesh(data=4, model=2), grid()
    rules = RULES | ft.P()
    base = ft.init(Picture.create, rules, mesh)(128, jax.random.key(0))
    placed = ft.shard(points, ft.P("data"), mesh)

    def learned(
        model: Picture, wanted: np.ndarray, wrt: ft.Filter
    ) -> Picture:
        """Train the weights that a filter selects."""
        # Copy the model, because steps donate the state's arrays.
        ts = ft.TrainState.create(
            ft.copy(model),
            optax.adam(3e-3),
            layout=rules,
            mesh=mesh,
            wrt=wrt,
        )
        target = ft.shard(wanted, ft.P("data"), mesh)
        return train(
            given.steps, ts, lambda ts, _: step(ts, placed, target)
        )[0].model

    base = learned(base, rings(points), ft.is_trainable)
    shown = {"all weights: rings": base}
    count = sum(leaf.size for leaf in jax.tree.leaves(base))
    for rank in (1, 4, 16):
        keys = iter(jax.random.split(jax.random.key(rank), 3))
        dense = ft.select(base).under(Dense)
        adapted = dense.apply(
            lambda layer, r=rank, k=keys: LoRA.of(layer, r, next(k))
        )
        adapted = learned(
            ft.shard(adapted, rules, mesh), stripes(points), ADAPTERS
        )
        added = sum(
            layer.lora_a.size + layer.lora_b.size
            for layer in adapted.middle
        )
        print(f"rank {rank}: adds {added:,} weights to {count:,}")
        shown[f"rank {rank}: {added / count:.1%} more"] = adapted
    draw = ft.jit(Picture.__call__, rules=RULES)
    made, plots = figure(1, 5, (8, 1.9))
    images = {
        title: np.asarray(draw(model, placed))
        for title, model in shown.items()
    }
    images["wanted: stripes"] = stripes(points)
    for plot, (title, image) in zip(plots, images.items(), strict=True):
        bare(plot, title).imshow(
            image.reshape(SIZE, SIZE), cmap="gray", vmin=-1, vmax=1
        )
    save(made, given.picture)


if __name__ == "__main__":
    main()
