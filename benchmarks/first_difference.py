"""This benchmark measures the search for the first difference between two programs.

    python benchmarks/first_difference.py

The programs compute a small Llama's loss and gradients, on one device and tensor parallel on eight.
The floor is compiling and running both once. Times are processor seconds, which exclude the
machine's other work.

- *sums*: trace, compile and run the program that returns checksums.
- *line*: the program that returns the values of one line, where there is a difference.
- *finite*: `first_nonfinite` of a function that has only finite values.
"""

import os
import time
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # JAX reads both variables once, when it starts
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax

import functree as ft
from functree.testing.evidence import Values, Watched
from functree.testing.programs import Both
from functree.testing.scopes import Pairs


def seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    jax.clear_caches()
    start = time.process_time()
    out = jax.block_until_ready(run())
    return time.process_time() - start, out


def main() -> None:
    rules = ft.AxisRules(
        {"batch": "data", "vocab": "model", "hidden": "model", "heads": "model", ...: None}
    )
    config = ft.nn.TransformerConfig(
        vocab_size=256, embed=64, layers=2, heads=4, kv_heads=2, head_dim=16, hidden=128
    )
    mesh = ft.make_mesh(data=2, model=4)
    model = ft.nn.Transformer.create(config, key=jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (8, 17), 0, 256)

    def loss(model: Any, tokens: Any) -> Any:
        return ft.nn.cross_entropy(model, tokens[:, :-1], tokens[:, 1:])

    step = ft.jit(
        lambda model, tokens: ft.value_and_grad(loss)(model, tokens), mesh=mesh, rules=rules
    )
    both = Both.of(step, (model, tokens), (rules, ft.P("data")), mesh)
    both.sharded.clear_cache()
    on_device, on_mesh = both.on_device(), both.on_mesh()
    plain = seconds(lambda: (both.unsharded(*on_device), both.sharded(*on_mesh)))[0]
    one, many = both.programs()

    def sums() -> Any:
        pairs = Pairs.of(one.body, many.body)
        return Watched(pairs, one, many).checksums(one, many)

    with_sums, checksums = seconds(sums)
    half = len(one.body.steps) // 2, len(many.body.steps) // 2
    line = seconds(lambda: Values(checksums, one, many, [((half[0], 0), (half[1], 0))]).arrays)[0]
    finite = seconds(lambda: ft.testing.first_nonfinite(step, *on_mesh))[0]
    alone = seconds(lambda: (both.sharded.clear_cache(), both.sharded(*on_mesh)))[0]
    print(f"trace, compile and run, on one device and on the mesh   {plain:6.2f} s")
    print(
        f"sums                                                    {with_sums:6.2f} s, {with_sums / plain:.2f} ×"
    )
    print(
        f"line                                                    {line:6.2f} s, {line / plain:.2f} ×"
    )
    print(f"trace, compile and run on the mesh                      {alone:6.2f} s")
    print(
        f"finite                                                  {finite:6.2f} s, {finite / alone:.2f} ×"
    )


if __name__ == "__main__":
    main()
