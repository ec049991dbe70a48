"""A complete training script: copy it, and change the model and data.

    python examples/train.py                      # 8 simulated devices
    python examples/train.py --data 2 --model 4   # another mesh

Stop it at any time: the same command resumes the run.
"""

import argparse
import os
import sys

# 8 simulated devices if there is only a CPU. JAX reads this once.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8",
)

import equinox as eqx
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

import functree as ft

# --- The model. Annotations name its dimensions.

FEATURES, HIDDEN, CLASSES = 64, 1024, 16


class Classifier(eqx.Module):
    up: Float[Array, "features hidden"]
    bias: Float[Array, "hidden"]
    down: Float[Array, "hidden classes"]
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        up, down = jax.random.split(key)
        self.up = jax.random.normal(up, (FEATURES, HIDDEN)) / 8
        self.bias = jnp.zeros(HIDDEN)
        self.down = jax.random.normal(down, (HIDDEN, CLASSES)) / 32
        self.dropout = eqx.nn.Dropout(0.2)

    def __call__(self, x: Float[Array, "batch features"], key):
        x = ft.constrain(x @ self.up + self.bias, "batch hidden")
        x = self.dropout(jax.nn.gelu(x), key=key)
        return ft.constrain(x @ self.down, "batch classes")


# --- The layout: rules for these names, then FSDP for large arrays.

RULES = ft.AxisRules({"batch": "data", "hidden": "model", ...: None})
LAYOUT = RULES | ft.FSDP("data", min_size=2**12)

# --- The data: generated here, 16 classes with four clusters each.


def draw(seed, count):
    centers = np.random.default_rng(0).normal(size=(64, FEATURES))
    random = np.random.default_rng(seed)
    cluster = random.integers(64, size=count)
    x = centers[cluster] + 1.5 * random.normal(size=(count, FEATURES))
    return {"x": x.astype(np.float32), "label": cluster % CLASSES}


def batches(data, size):
    """Iterate over the rows of this process, shuffled in each epoch."""
    rows = grain.MapDataset.range(len(data["x"])).seed(0).shuffle()
    rows = rows[jax.process_index() :: jax.process_count()].repeat()
    rows = rows.map(lambda i: {name: a[i] for name, a in data.items()})
    rows = rows.batch(size // jax.process_count(), drop_remainder=True)
    return iter(rows.to_iter_dataset())


# --- The loss, in bfloat16 up to the logits, and the optimizer.


def loss_fn(model, x, label, key=None):
    """Return the mean loss, then the loss and hit or miss of each row."""
    arrays, rest = eqx.partition((model, x), eqx.is_inexact_array)
    arrays = jax.tree.map(lambda a: a.astype(jnp.bfloat16), arrays)
    model, x = eqx.combine(arrays, rest)
    logits = model(x, key).astype(jnp.float32)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    return loss.mean(), (loss, logits.argmax(axis=1) == label)


def decayed(params):
    """Mark arrays of two or more dimensions, except biases and norms."""
    rest = ft.has_ndim(0) | ft.has_ndim(1) | ft.glob("**.*bias")
    rest |= ft.under(eqx.nn.LayerNorm | eqx.nn.RMSNorm)
    chosen = ft.select(params).where(~rest).set(True)
    return jax.tree.map(lambda leaf: leaf is True, chosen)


def optimizer(steps):
    rate = optax.warmup_cosine_decay_schedule(0, 3e-3, steps // 10, steps)
    adam = optax.adamw(rate, weight_decay=0.1, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(1.0), adam)


# --- The training step, and the evaluation.


@ft.jit(rules=LAYOUT, donate="ts")
def train_step(ts, x, label):
    key = jax.random.fold_in(ts.key, ts.step)
    gradient = ft.value_and_grad(loss_fn, has_aux=True)
    (loss, _), grads = gradient(ts.model, x, label, key)
    return ft.apply_gradients(ts, grads), loss


@ft.jit(rules=LAYOUT)
def measure(model, x, label, counts):
    _, (loss, right) = loss_fn(model, x, label)
    return jnp.where(counts, loss, 0).sum(), (right & counts).sum()


def evaluate(model, data, size, mesh):
    """Return the loss and accuracy of all rows; pad the last batch."""
    quiet, total = eqx.nn.inference_mode(model), len(data["x"])
    sums = np.zeros(2)
    for start in range(0, total, size):
        rows = np.arange(start, start + size)
        filled = rows.clip(max=total - 1)
        batch = {name: a[filled] for name, a in data.items()}
        batch["counts"] = rows < total
        batch = ft.shard(batch, ft.P("data"), mesh)
        sums += jax.device_get(measure(quiet, **batch))
    return sums / total


# --- The run: from the start, or from the latest checkpoint.


def begin(checkpoints, make, mesh, rows, run):
    """Return the training state and the log, and position the rows."""
    key, latest = jax.random.key(0), checkpoints.latest
    if latest is None:
        log = ["step,loss,valid_loss,accuracy"]
        return ft.init(make, LAYOUT, mesh)(key), log
    meta = ft.inspect(checkpoints.folder / str(latest)).meta
    if meta["run"] != run:
        sys.exit(f"train.py: error: the saved run has {meta['run']}")
    rows.set_state(meta["rows"])
    like = ft.abstract(make, LAYOUT, mesh)(key)
    return checkpoints.restore(like, latest), meta["log"]


def train(folder, steps, batch, every, **sizes):
    mesh, tx = ft.make_mesh(**sizes), optimizer(steps)
    data, valid = draw(1, 10_000), draw(2, 1_000)
    rows = batches(data, batch)
    # The state of the rows depends on the number of processes.
    run = {"steps": steps, "batch": batch}
    run["processes"] = jax.process_count()

    def make(key):
        return ft.TrainState.create(Classifier(key), tx, key=key)

    def placed(rows):
        return ft.shard(next(rows), ft.P("data"), mesh, local=True)

    with ft.Checkpoints(folder, keep=2) as checkpoints:
        ts, log = begin(checkpoints, make, mesh, rows, run)
        lowered = train_step.lower(ts, **placed(batches(data, batch)))
        print(ft.plan(ts.model, LAYOUT, mesh), end="\n\n")
        print(lowered.compile().ledger().summary(), end="\n\n")
        print(*log, sep="\n")
        losses = []
        for step in range(int(ts.step) + 1, steps + 1):
            ts, loss = train_step(ts, **placed(rows))
            losses.append(loss)
            if jax.default_backend() == "cpu":
                loss.block_until_ready()  # simulated devices need it
            if step % every == 0 or step == steps:
                mean, losses = np.mean(jax.device_get(losses)), []
                row = step, mean, *evaluate(ts.model, valid, batch, mesh)
                log.append("{},{:.4f},{:.4f},{:.4f}".format(*row))
                print(log[-1], flush=True)
                meta = {"run": run, "rows": rows.get_state(), "log": log}
                checkpoints.save(step, ts, meta)


# --- The command line.


def main():
    parser = argparse.ArgumentParser(
        description="Train a classifier, or resume its run.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        usage=argparse.SUPPRESS,  # prints a mistake as one line
    )
    add, devices = parser.add_argument, jax.device_count()
    add("--folder", default="run", help="where checkpoints are saved")
    add("--steps", type=int, default=200, help="steps of the whole run")
    add("--batch", type=int, default=64, help="rows per step")
    add("--every", type=int, default=25, help="steps per log and save")
    add("--data", type=int, default=devices, help="size of the mesh axis")
    add("--model", type=int, default=1, help="size of the mesh axis")
    options = parser.parse_args()
    _, *sizes = vars(options).values()
    if min(sizes) < 1:
        parser.error("all sizes must be at least 1")
    if options.batch % options.data:
        parser.error("--batch must be a multiple of --data")
    try:
        train(**vars(options))
    except ft.FunctreeError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
