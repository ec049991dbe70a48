"""This diffusion model turns noise into points on two spirals.

    python examples/gallery/diffusion.py --picture diffusion.png

The network predicts the noise that was added to a point. Sampling begins
with pure noise, and subtracts a part of the predicted noise 100 times.
The batch is sharded over `data`, and the hidden units over `model`.
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
        "features": None,
        "plane": None,
    }
)
NOISES = 100
BETAS = jnp.linspace(1e-4, 0.08, NOISES)
# The share of a point that remains after each step.
KEPT = jnp.cumprod(1 - BETAS)


class Denoiser(eqx.Module):
    """A network that predicts the noise in a point at a step."""

    first: Float[Array, "features hidden"]
    middle: list[Float[Array, "hidden_in hidden"]]
    last: Float[Array, "hidden plane"]

    @classmethod
    def create(cls, hidden: int, key: PRNGKeyArray) -> "Denoiser":
        first, *middle = jax.random.split(key, 4)
        he = jax.nn.initializers.he_normal()
        layers = [he(key, (hidden, hidden)) for key in middle]
        return cls(
            he(first, (34, hidden)), layers, jnp.zeros((hidden, 2))
        )

    def __call__(
        self,
        points: Float[Array, "batch plane"],
        steps: Float[Array, "batch"],
    ) -> Float[Array, "batch plane"]:
        waves = (
            steps[:, None] / NOISES * jnp.pi * 2.0 ** jnp.arange(-4, 4)
        )
        where = jnp.concatenate([points, 2 * points], axis=1)
        features = [points, jnp.sin(waves), jnp.cos(waves)]
        features += [
            f(k * where) for k in (1.0, 3.0) for f in (jnp.sin, jnp.cos)
        ]
        x = jnp.concatenate(features, axis=1)
        x = ft.constrain(jax.nn.silu(x @ self.first), "batch hidden")
        for weight in self.middle:
            x = x + jax.nn.silu(x @ weight)
            x = ft.constrain(x, "batch hidden")
        return ft.constrain(x @ self.last, "batch plane")


def spirals(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draw points on two spirals."""
    angle = 1.5 * np.pi * np.sqrt(rng.uniform(0.05, 1, count)) * 2
    turn = angle + np.pi * rng.integers(0, 2, count)
    points = (
        np.stack([np.cos(turn), np.sin(turn)], axis=1)
        * angle[:, None]
        / 6
    )
    return (points + rng.normal(size=points.shape, scale=0.02)).astype(
        np.float32
    )


def make(key: PRNGKeyArray, steps: int) -> ft.TrainState[Denoiser]:
    tx = optax.adam(optax.cosine_decay_schedule(3e-3, max(steps, 1)))
    return ft.TrainState.create(Denoiser.create(256, key), tx, key=key)


@ft.jit(rules=RULES, donate="ts")
def step(
    ts: ft.TrainState[Denoiser], points: Float[Array, "batch plane"]
) -> tuple[ft.TrainState[Denoiser], Array]:
    when_key, noise_key = jax.random.split(
        jax.random.fold_in(ts.key, ts.step)
    )
    when = jax.random.randint(when_key, points.shape[:1], 0, NOISES)
    noise = jax.random.normal(noise_key, points.shape)
    kept = KEPT[when][:, None]
    noisy = jnp.sqrt(kept) * points + jnp.sqrt(1 - kept) * noise

    def loss(model: Denoiser) -> Array:
        return jnp.mean(
            (model(noisy, when.astype(jnp.float32)) - noise) ** 2
        )

    value, gradients = ft.value_and_grad(loss)(ts.model)
    return ft.apply_gradients(ts, gradients), value


@ft.jit(rules=RULES)
def sample(
    model: Denoiser, noise: Float[Array, "batch plane"], key: PRNGKeyArray
) -> Array:
    """Return the points after each denoising step."""

    def back(points: Array, at: Array) -> tuple[Array, Array]:
        when = jnp.full(points.shape[0], at, jnp.float32)
        guess = model(points, when) * BETAS[at] / jnp.sqrt(1 - KEPT[at])
        fresh = jax.random.normal(
            jax.random.fold_in(key, at), points.shape
        )
        points = (points - guess) / jnp.sqrt(1 - BETAS[at])
        points = (
            points + jnp.where(at > 0, jnp.sqrt(BETAS[at]), 0.0) * fresh
        )
        return points, points

    return jax.lax.scan(back, noise, jnp.arange(NOISES)[::-1])[1]


def main() -> None:
    given = options(__doc__, steps=2500)
    mesh, rng = ft.make_mesh(data=4, model=2), np.random.default_rng(0)
    ts = ft.init(make, RULES, mesh)(jax.random.key(0), given.steps)
    print(ft.plan(ts.model))

    def one_step(
        ts: ft.TrainState[Denoiser], _: int
    ) -> tuple[ft.TrainState[Denoiser], Array]:
        return step(
            ts,
            ft.shard(spirals(rng, 512), RULES, mesh, axes="batch plane"),
        )

    ts, _ = train(given.steps, ts, one_step)
    noise = rng.normal(size=(1024, 2)).astype(np.float32)
    noise = ft.shard(noise, RULES, mesh, axes="batch plane")
    path = np.asarray(sample(ts.model, noise, jax.random.key(1)))
    made, plots = figure(1, 5, (8, 1.9))
    shown = {
        "noise": noise,
        "after 85 steps": path[84],
        "95": path[94],
        "100": path[-1],
    }
    shown["the data"] = spirals(rng, 1024)
    for plot, (title, points) in zip(plots, shown.items(), strict=True):
        bare(plot, title).scatter(
            *np.asarray(points).T, s=0.6, color="tab:blue"
        )
        plot.set(xlim=(-2.2, 2.2), ylim=(-2.2, 2.2), aspect="equal")
    save(made, given.picture)


if __name__ == "__main__":
    main()
