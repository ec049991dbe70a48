"""This mixture of experts learns a different function in each region.

    python examples/gallery/experts.py --picture experts.png

In each region of the plane, the target function has waves of a different
direction and length. A router sends each point to one of eight experts.
They are spread over devices, because `experts` is sharded over the mesh
axis `expert`. A point here is a token of a sequence, as in a language
model.
"""

from collections.abc import Callable

from runs import (
    bare,
    curve,
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
    {"batch": ("data", "expert"), "experts": "expert", ...: None}
)
EXPERTS, SEQ = 8, 64


class Model(eqx.Module):
    embed: Float[Array, "plane waves"]
    moe: ft.nn.MoE
    head: Float[Array, "embed"]

    @classmethod
    def create(cls, key: PRNGKeyArray) -> "Model":
        embed, moe, head = jax.random.split(key, 3)
        layer = ft.nn.MoE(
            64, 128, EXPERTS, 1, capacity=2.0, normalize=False, key=moe
        )
        return cls(
            jax.random.normal(embed, (2, 32)) * 2,
            layer,
            jax.random.normal(head, (64,)) / 8,
        )

    def features(
        self, points: Float[Array, "batch seq plane"]
    ) -> Float[Array, "batch seq embed"]:
        waves = points @ self.embed
        x = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], axis=-1)
        return ft.constrain(x, "batch seq embed")

    def __call__(
        self, points: Float[Array, "batch seq plane"]
    ) -> tuple[Float[Array, "batch seq"], ft.nn.MoELosses]:
        y, losses = self.moe(self.features(points))
        return y @ self.head, losses

    def expert(self, points: Float[Array, "batch seq plane"]) -> Array:
        """Return the likeliest expert of each point."""
        return jnp.argmax(
            self.features(points) @ self.moe.router, axis=-1
        )


def wanted(points: np.ndarray) -> np.ndarray:
    """Return the target: four regions, each with its own waves."""
    region = (np.arctan2(points[..., 1], points[..., 0]) / np.pi + 1) * 2
    region = region.astype(int) % 4
    angle = np.array([0.3, 1.2, 2.2, 2.9])[region]
    length = np.array([6.0, 12.0, 9.0, 4.0])[region]
    along = points[..., 0] * np.cos(angle) + points[..., 1] * np.sin(
        angle
    )
    return np.sin(length * along).astype(np.float32)


def make(key: PRNGKeyArray, steps: int) -> ft.TrainState[Model]:
    tx = optax.adam(optax.cosine_decay_schedule(5e-3, max(steps, 1)))
    return ft.TrainState.create(Model.create(key), tx)


@ft.jit(rules=RULES, donate="ts")
def step(
    ts: ft.TrainState[Model],
    points: Float[Array, "batch seq plane"],
    values: Float[Array, "batch seq"],
) -> tuple[ft.TrainState[Model], tuple[Array, Array]]:
    def loss(model: Model) -> tuple[Array, tuple[Array, Array]]:
        y, losses = model(points)
        error = jnp.mean((y - values) ** 2)
        return error + 0.01 * losses.balance, (error, losses.dropped)

    (_, shown), gradients = ft.value_and_grad(loss, has_aux=True)(
        ts.model
    )
    return ft.apply_gradients(ts, gradients), shown


def main() -> None:
    given = options(__doc__, steps=1500)
    mesh, rng = ft.make_mesh(data=2, expert=4), np.random.default_rng(0)
    ts = ft.init(make, RULES, mesh)(jax.random.key(0), given.steps)
    print(ft.plan(ts.model))
    dropped: list[int] = []

    def one_step(
        ts: ft.TrainState[Model], _: int
    ) -> tuple[ft.TrainState[Model], Array]:
        points = rng.uniform(-1, 1, (32, SEQ, 2)).astype(np.float32)
        axes = ("batch seq plane", "batch seq")
        ts, (error, lost) = step(
            ts,
            *ft.shard((points, wanted(points)), RULES, mesh, axes=axes),
        )
        dropped.append(int(lost))
        return ts, error

    ts, losses = train(given.steps, ts, one_step)
    print(
        f"Dropped {dropped[0]} of {32 * SEQ} points in the first step,",
        f"{dropped[-1]} in the last",
    )
    line = np.linspace(-1, 1, 128, dtype=np.float32)
    points = np.stack(np.meshgrid(line, line), axis=2)
    # Shuffle the points, because neighbors have the same expert, and each
    # expert has room for a limited share of a shard's points.
    order = rng.permutation(128 * 128)
    mixed = points.reshape(-1, 2)[order].reshape(points.shape)
    placed = ft.shard(mixed, RULES, mesh, axes="batch seq plane")

    def drawn(of: Callable[[Model, Array], Array]) -> np.ndarray:
        values = np.asarray(
            ft.jit(of, rules=RULES)(ts.model, placed)
        ).ravel()
        return values[np.argsort(order)].reshape(128, 128)

    found, expert = (
        drawn(lambda model, x: model(x)[0]),
        drawn(Model.expert),
    )
    made, plots = figure(1, 4, (8, 2.1))
    looks = {"vmin": -1, "vmax": 1, "origin": "lower", "cmap": "RdBu"}
    bare(plots[0], "wanted").imshow(wanted(points), **looks)
    bare(plots[1], "learned").imshow(found, **looks)
    used = len(np.unique(expert))
    bare(
        plots[2], f"the expert of each point ({used} of {EXPERTS})"
    ).imshow(expert, cmap="Set2", vmin=0, vmax=7, origin="lower")
    curve(plots[3], losses, "loss")
    save(made, given.picture)


if __name__ == "__main__":
    main()
