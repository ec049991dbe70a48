"""This vision transformer classifies shapes, and shows where it looks.

    python examples/gallery/vision_transformer.py --picture vision.png

The script draws the images: a disk, a ring, a cross, a bar, a square or
a triangle somewhere in noise. An image is cut into 64 patches, and one
more token collects their information. Heads and hidden units are sharded
over `model`, and the batch over `data`. FSDP shards the rest.
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
from jaxtyping import Array, Float, Int, PRNGKeyArray

import functree as ft

RULES = ft.AxisRules(
    {"batch": "data", "heads": "model", "hidden": "model", ...: None}
)
LAYOUT = RULES | ft.FSDP("data", min_size=2**12)
SHAPES = ("disk", "ring", "cross", "bar", "square", "triangle")
SIZE, PATCH, EMBED, HEADS, LAYERS = 32, 4, 64, 4, 3


def normal(key: PRNGKeyArray, *shape: int, by: int) -> Array:
    return jax.random.normal(key, shape) / by**0.5


class Attention(eqx.Module):
    """Attention of each token to all tokens.

    `ft.nn.Attention` is causal, so it does not fit here.
    """

    qkv: Float[Array, "three embed heads head_dim"]
    out: Float[Array, "heads head_dim embed"]

    @classmethod
    def create(cls, key: PRNGKeyArray) -> "Attention":
        qkv, out = jax.random.split(key)
        shape = (HEADS, EMBED // HEADS)
        return cls(
            normal(qkv, 3, EMBED, *shape, by=EMBED),
            0.5 * normal(out, *shape, EMBED, by=EMBED),
        )

    def weights(
        self, x: Float[Array, "batch seq embed"]
    ) -> tuple[Float[Array, "batch heads seq seq"], Array]:
        q, k, v = jnp.einsum("bse,tehd->tbshd", x, self.qkv)
        q, k, v = (
            ft.constrain(y, "batch seq heads head_dim") for y in (q, k, v)
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        return jax.nn.softmax(scores), v

    def __call__(
        self, x: Float[Array, "batch seq embed"]
    ) -> Float[Array, "batch seq embed"]:
        weights, v = self.weights(x)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return ft.constrain(
            jnp.einsum("bshd,hde->bse", mixed, self.out),
            "batch seq embed",
        )


class Block(eqx.Module):
    attn_norm: ft.nn.LayerNorm
    attn: Attention
    mlp_norm: ft.nn.LayerNorm
    mlp: ft.nn.MLP

    @classmethod
    def create(cls, key: PRNGKeyArray) -> "Block":
        attn, mlp = jax.random.split(key)
        norms = (ft.nn.LayerNorm(EMBED), ft.nn.LayerNorm(EMBED))
        return cls(
            norms[0],
            Attention.create(attn),
            norms[1],
            ft.nn.MLP(EMBED, 2 * EMBED, key=mlp),
        )

    def __call__(
        self, x: Float[Array, "batch seq embed"]
    ) -> Float[Array, "batch seq embed"]:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ViT(eqx.Module):
    patch: Float[Array, "pixels embed"]
    where: Float[Array, "seq embed"]
    blocks: ft.Stacked[Block]
    norm: ft.nn.LayerNorm
    head: Float[Array, "embed classes"]

    @classmethod
    def create(cls, key: PRNGKeyArray) -> "ViT":
        patch, where, blocks, head = jax.random.split(key, 4)
        tokens = (SIZE // PATCH) ** 2 + 1
        return cls(
            normal(patch, PATCH**2, EMBED, by=PATCH**2),
            normal(where, tokens, EMBED, by=25),
            ft.stack(Block.create, LAYERS, blocks),
            ft.nn.LayerNorm(EMBED),
            normal(head, EMBED, len(SHAPES), by=EMBED),
        )

    def tokens(
        self, images: Float[Array, "batch height width"]
    ) -> Float[Array, "batch seq embed"]:
        cut = SIZE // PATCH
        pieces = images.reshape(-1, cut, PATCH, cut, PATCH).swapaxes(2, 3)
        x = pieces.reshape(-1, cut**2, PATCH**2) @ self.patch
        # The first token collects.
        x = jnp.pad(x, ((0, 0), (1, 0), (0, 0))) + self.where
        return ft.constrain(x, "batch seq embed")

    def __call__(
        self, images: Float[Array, "batch height width"]
    ) -> Float[Array, "batch classes"]:
        x = self.norm(self.blocks(self.tokens(images)))
        return ft.constrain(x[:, 0] @ self.head, "batch classes")

    def looks(self, images: Float[Array, "batch height width"]) -> Array:
        """Return the first token's attention to each patch.

        It is the mean over the heads of the last block.
        """
        x = self.tokens(images)
        for block in self.blocks[:-1]:
            x = block(x)
        last = self.blocks[-1]
        return last.attn.weights(last.attn_norm(x))[0][:, :, 0, 1:].mean(
            axis=1
        )


def draw(
    rng: np.random.Generator, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draw images with one shape each, and return the shapes' indices."""
    kinds = rng.integers(0, len(SHAPES), count)
    center = rng.uniform(9, SIZE - 9, (2, count, 1, 1))
    radius = rng.uniform(5, 8, (count, 1, 1))
    rows, columns = np.mgrid[:SIZE, :SIZE]
    y, x = (rows - center[0]) / radius, (columns - center[1]) / radius
    far, across = np.hypot(x, y), np.maximum(abs(x), abs(y))
    shapes = np.stack(
        [
            far < 0.9,
            (far < 1) & (far > 0.6),
            (np.minimum(abs(x), abs(y)) < 0.3) & (across < 1),
            (abs(y) < 0.3) & (abs(x) < 1),
            across < 0.8,
            (y < 0.7) & (y > 2 * abs(x) - 0.9),
        ]
    )
    images = shapes[kinds, np.arange(count)] + rng.normal(
        size=(count, SIZE, SIZE), scale=0.3
    )
    return images.astype(np.float32), kinds.astype(np.int32)


def make(key: PRNGKeyArray, steps: int) -> ft.TrainState[ViT]:
    tx = optax.adam(
        optax.warmup_cosine_decay_schedule(
            0, 3e-3, min(50, steps), steps + 50
        )
    )
    return ft.TrainState.create(ViT.create(key), tx)


@ft.jit(rules=LAYOUT, donate="ts")
def step(
    ts: ft.TrainState[ViT],
    images: Float[Array, "batch height width"],
    kinds: Int[Array, "batch"],
) -> tuple[ft.TrainState[ViT], Array]:
    def loss(model: ViT) -> Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(
            model(images), kinds
        )
        return losses.mean()

    value, gradients = ft.value_and_grad(loss)(ts.model)
    return ft.apply_gradients(ts, gradients), value


def main() -> None:
    given = options(__doc__, steps=600)
    mesh, rng = ft.make_mesh(data=4, model=2), np.random.default_rng(0)
    ts = ft.init(make, LAYOUT, mesh)(jax.random.key(0), given.steps)
    print(ft.plan(ts.model))
    axes = ("batch height width", "batch")

    def one_step(
        ts: ft.TrainState[ViT], _: int
    ) -> tuple[ft.TrainState[ViT], Array]:
        return step(ts, *ft.shard(draw(rng, 64), RULES, mesh, axes=axes))

    ts, losses = train(given.steps, ts, one_step)
    images, kinds = draw(rng, 256)
    placed = ft.shard(images, RULES, mesh, axes=axes[0])
    both = ft.jit(
        lambda model, x: (model(x).argmax(axis=1), model.looks(x)),
        rules=LAYOUT,
    )
    found, looks = map(np.asarray, both(ts.model, placed))
    print(f"Classifies {np.mean(found == kinds):.1%} of new images")
    made, plots = figure(2, 7, (9, 2.8))
    for column in range(len(SHAPES)):
        at = int(np.argmax(kinds == column))
        bare(plots[column], SHAPES[found[at]]).imshow(
            images[at], cmap="gray", vmin=-1, vmax=2
        )
        cut = SIZE // PATCH
        bare(plots[column + 7], "").imshow(
            looks[at].reshape(cut, cut), cmap="magma"
        )
    plots[0].set_ylabel("says", fontsize=8)
    plots[7].set_ylabel("looks at", fontsize=8)
    curve(plots[6], losses, "loss")
    plots[13].axis("off")
    plots[13].text(
        0,
        0.5,
        f"{np.mean(found == kinds):.0%} of 256\nnew images",
        fontsize=9,
    )
    save(made, given.picture)


if __name__ == "__main__":
    main()
