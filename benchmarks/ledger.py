"""This benchmark compares the time of a ledger with the compilation of its program.

    python benchmarks/ledger.py [--layers 48] [--rounds 3]

The programs have 48 layers, unrolled or scanned, on 8 or 512 devices. Each runs in its own process,
since a process cannot change its number of simulated devices. Each round compiles the program, reads
its ledger, and reads all verdicts, which are computed when they are first read. The results are
medians. The limit for the ledger is 5 % of the compile time; there is no limit for the verdicts.
"""

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import time

LIMIT = 0.05
CASES = [
    (devices, name, unrolled)
    for devices in (8, 512)
    for name in ("TP", "FSDP+TP")
    for unrolled in (True, False)
]


def main() -> None:
    """Measure each case in its own process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--case", nargs=3, metavar=("DEVICES", "LAYOUT", "UNROLLED"), help="only this case"
    )
    options = parser.parse_args()
    if options.case is not None:
        devices, name, unrolled = options.case
        measure(int(devices), name, unrolled == "True", options.layers, options.rounds)
        return
    from machine import machine

    print(f"{machine('jax')}; {options.layers} layers, medians of {options.rounds} rounds\n")
    print("| devices | layout | blocks | text | arrays | compile | ledger | limit | verdicts |")
    print("|---|---|---|---|---|---|---|---|---|")
    for devices, name, unrolled in CASES:
        own = ["--layers", str(options.layers), "--rounds", str(options.rounds)]
        case = ["--case", str(devices), name, str(unrolled)]
        flags = f"--xla_force_host_platform_device_count={devices}"
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        subprocess.run([sys.executable, __file__, *own, *case], env=environment, check=True)


def measure(devices: int, name: str, unrolled: bool, layers: int, rounds: int) -> None:
    """Compile one training step and read its ledger, in each round."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import optax

    import functree as ft

    class Blocks(eqx.Module):
        """A decoder with a list of blocks."""

        model: ft.nn.Transformer
        blocks: list[ft.nn.Block]

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.model.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.model.logits(self.model.norm(x))

    mesh = ft.make_mesh(data=devices // 4, model=4)
    tensor = {axis: "model" for axis in ("heads", "kv_heads", "hidden", "vocab")}
    layout: ft.Layout = ft.AxisRules({"batch": "data", **tensor, ...: None})
    if name == "FSDP+TP":
        layout = layout | ft.FSDP("data", min_size=0)
    width = max(64, devices // 4)  # with 512 devices, each has one element of a norm's scale
    config = ft.nn.TransformerConfig(
        512, width, layers=layers, heads=8, kv_heads=4, head_dim=16, hidden=2 * width, max_seq=32
    )

    # The norm depends on all gradients, and each new value depends on the norm.
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def make(key: jax.Array) -> ft.TrainState:
        model = ft.nn.Transformer.create(config, key=key)
        if not unrolled:
            return ft.TrainState.create(model, tx)
        rest = ft.nn.Transformer.create(dataclasses.replace(config, layers=1), key=key)
        return ft.TrainState.create(Blocks(rest, list(model.blocks)), tx)

    def loss(model: Blocks, tokens: jax.Array) -> jax.Array:
        labels = optax.softmax_cross_entropy_with_integer_labels
        return labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()

    @ft.jit(
        in_shardings=(layout, ft.P("data")),
        out_shardings=(layout, None),
        mesh=mesh,
        rules=layout,
        donate="ts",
    )
    def step(ts: ft.TrainState, tokens: jax.Array) -> tuple[ft.TrainState, jax.Array]:
        value, grads = ft.value_and_grad(loss)(ts.model, tokens)
        return ft.apply_gradients(ts, grads), value

    state = ft.abstract(make)(jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((devices // 2, 33), jnp.int32)
    compiling: list[float] = []
    reading: list[float] = []
    judging: list[float] = []
    arrays, text = 0, ""
    for _ in range(rounds):
        jax.clear_caches()
        lowered = step.lower(state, tokens)
        start = time.perf_counter()
        compiled = lowered.compile()
        compiling.append(time.perf_counter() - start)
        start = time.perf_counter()
        ledger = compiled.ledger()
        reading.append(time.perf_counter() - start)
        start = time.perf_counter()
        assert all(row.verdict for row in ledger.collectives)
        judging.append(time.perf_counter() - start)
        arrays, text = len(ledger.collectives), f"{len(compiled.as_text()) / 2**20:.1f} MiB"
    compile_time = statistics.median(compiling)
    blocks = "unrolled" if unrolled else "scanned"
    cells = [devices, name, blocks, text, arrays, f"{compile_time:.1f} s"]
    for times in (reading, judging):
        median = statistics.median(times)
        cells.append(f"{median:.2f} s, {median / compile_time:.1%}")
    cells.insert(-1, f"{LIMIT:.0%}")
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
