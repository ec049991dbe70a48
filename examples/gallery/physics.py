"""This network solves Burgers' equation, u_t + u u_x = ν u_xx.

    python examples/gallery/physics.py --picture physics.png

The network is u(t, x). It sees no solution: the loss is the equation's
residual at random points. The network meets the initial and boundary
conditions by construction. A sine wave becomes a front. The points are
sharded over `data`, and the hidden units over `model`. JAX computes the
derivatives.
"""

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
    {
        "batch": "data",
        "hidden": "model",
        "hidden_in": None,
        "inputs": None,
    }
)
VISCOSITY = 0.02


class Field(eqx.Module):
    """A network for u at points (t, x).

    By construction, it is zero at both ends of the line, and the sine
    wave at t = 0.
    """

    first: Float[Array, "inputs hidden"]
    middle: list[Float[Array, "hidden_in hidden"]]
    last: Float[Array, "hidden"]

    @classmethod
    def create(cls, hidden: int, key: PRNGKeyArray) -> "Field":
        first, *middle, last = jax.random.split(key, 5)
        glorot = jax.nn.initializers.glorot_normal()
        layers = [glorot(key, (hidden, hidden)) for key in middle]
        out = jax.random.normal(last, (hidden,)) / hidden**0.5
        return cls(2 * glorot(first, (2, hidden)), layers, out)

    def __call__(
        self, t: Float[Array, "batch"], x: Float[Array, "batch"]
    ) -> Float[Array, "batch"]:
        y = jnp.stack([2 * t - 1, x], axis=1)
        y = ft.constrain(
            jnp.tanh(y @ self.first + jnp.pi / 4), "batch hidden"
        )
        for weight in self.middle:
            y = ft.constrain(jnp.tanh(y @ weight), "batch hidden")
        return t * (1 - x**2) * ft.constrain(
            y @ self.last, "batch"
        ) - jnp.sin(jnp.pi * x)


def residual(
    u: Field, t: Float[Array, "batch"], x: Float[Array, "batch"]
) -> Float[Array, "batch"]:
    """Return the equation's residual at each point."""
    ones = jnp.ones_like(x)

    def along_x(x: Array) -> tuple[Array, Array]:
        return jax.jvp(lambda x: u(t, x), (x,), (ones,))

    (value, u_x), (_, u_xx) = jax.jvp(along_x, (x,), (ones,))
    u_t = jax.jvp(lambda t: u(t, x), (t,), (ones,))[1]
    return u_t + value * u_x - VISCOSITY * u_xx


def make(key: PRNGKeyArray, steps: int) -> ft.TrainState[Field]:
    tx = optax.adam(optax.cosine_decay_schedule(3e-3, max(steps, 1)))
    return ft.TrainState.create(Field.create(64, key), tx)


@ft.jit(rules=RULES, donate="ts")
def step(
    ts: ft.TrainState[Field],
    t: Float[Array, "batch"],
    x: Float[Array, "batch"],
) -> tuple[ft.TrainState[Field], Array]:
    def loss(model: Field) -> Array:
        return jnp.mean(residual(model, t, x) ** 2)

    value, gradients = ft.value_and_grad(loss)(ts.model)
    return ft.apply_gradients(ts, gradients), value


def reference(times: int, points: int) -> np.ndarray:
    """Solve the equation with finite differences, in small time steps."""
    x = np.linspace(-1, 1, points)
    u, rows = -np.sin(np.pi * x), []
    small, each = 2e-4, round(1 / 2e-4 / (times - 1))
    for i in range((times - 1) * each + 1):
        if i % each == 0:
            rows.append(u.copy())
        left, right, width = u[:-2], u[2:], x[1] - x[0]
        change = VISCOSITY * (right - 2 * u[1:-1] + left) / width**2
        change -= (right**2 - left**2) / (4 * width)
        u[1:-1] += small * change
    return np.stack(rows)


def main() -> None:
    given = options(__doc__, steps=2000)
    mesh, rng = ft.make_mesh(data=4, model=2), np.random.default_rng(0)
    ts = ft.init(make, RULES, mesh)(jax.random.key(0), given.steps)
    print(ft.plan(ts.model))

    def one_step(
        ts: ft.TrainState[Field], _: int
    ) -> tuple[ft.TrainState[Field], Array]:
        t, x = rng.uniform(0, 1, 1024), rng.uniform(-1, 1, 1024)
        points = (t.astype(np.float32), x.astype(np.float32))
        return step(
            ts, *ft.shard(points, RULES, mesh, axes=("batch", "batch"))
        )

    ts, losses = train(given.steps, ts, one_step)
    t, x = np.meshgrid(
        np.linspace(0, 1, 64), np.linspace(-1, 1, 256), indexing="ij"
    )
    flat = (t.ravel().astype(np.float32), x.ravel().astype(np.float32))
    flat = ft.shard(flat, RULES, mesh, axes=("batch", "batch"))
    found = np.asarray(
        ft.jit(Field.__call__, rules=RULES)(ts.model, *flat)
    ).reshape(t.shape)
    wanted = reference(64, 256)
    print(
        "The largest difference from finite differences:",
        f"{np.abs(found - wanted).max():.3f}",
    )

    made, plots = figure(1, 4, (8, 2.1))
    fields = {"the network, u(t, x)": found, "finite differences": wanted}
    for plot, (title, values) in zip(
        plots[:2], fields.items(), strict=True
    ):
        bare(plot, title).imshow(
            values.T, cmap="RdBu", aspect="auto", origin="lower"
        )
        plot.set(xlabel="t", ylabel="x")
    for row, color in ((0, "0.7"), (20, "tab:blue"), (63, "tab:red")):
        plots[2].plot(
            x[0], wanted[row], color=color, linewidth=3, alpha=0.3
        )
        plots[2].plot(
            x[0],
            found[row],
            color=color,
            linewidth=0.9,
            label=f"t = {t[row, 0]:.1f}",
        )
    bare(plots[2], "the wave becomes a front").legend(fontsize=6)
    curve(plots[3], losses, "loss")
    save(made, given.picture)


if __name__ == "__main__":
    main()
