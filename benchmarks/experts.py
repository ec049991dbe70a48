"""This benchmark compiles a layer of experts for TPUs that you don't have.

    python benchmarks/experts.py                       # The table of experts.md, two minutes.
    python benchmarks/experts.py --target tpu:v5p:2x2x2

It prints flops, moved bytes and temporaries of the gradient with respect to weights and tokens. The
layer has 8 × 1,024 tokens, embed 1,024, hidden 512, and 16 experts, of which 4 compute a token. It
uses bfloat16 on data=2, expert=4. Nothing runs: all figures come from the compiler.
"""

import argparse
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing runs, so no accelerator is occupied

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import functree as ft

TOKENS, EMBED, HIDDEN, EXPERTS, TOP_K = 8 * 1024, 1024, 512, 16, 4
RULES = ft.AxisRules({"batch": ("data", "expert"), "experts": "expert", ...: None})
CASES: list[tuple[str, float | None]] = [
    ("exchange", 1.25),
    ("gather", 1.25),
    ("ragged", 1.25),
    ("gather", None),
    ("exchange", None),
    ("ragged", None),
]


def gradient(mesh: Any, dispatch: Any, capacity: float | None) -> Any:
    """Compile the gradient of a layer."""

    @ft.abstract
    def experts(key: Any) -> ft.nn.MoE:
        options: dict[str, Any] = {"capacity": capacity, "dispatch": dispatch}
        return ft.nn.MoE(
            EMBED, HIDDEN, EXPERTS, TOP_K, **options, key=key, param_dtype=jnp.bfloat16
        )

    def loss(moe: ft.nn.MoE, x: Array) -> Array:
        return jnp.sum(jnp.sin(moe(x)[0].astype(jnp.float32)))

    @ft.jit(mesh=mesh, rules=RULES)
    def of_both(moe: ft.nn.MoE, x: Float[Array, "batch seq embed"]) -> Any:
        return jax.grad(loss, (0, 1))(moe, x)

    x = jax.ShapeDtypeStruct((8, TOKENS // 8, EMBED), jnp.bfloat16)
    return of_both.lower(experts(jax.random.key(0)), x).compile()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default="tpu:v5e:2x4")
    options = parser.parse_args()
    mesh = ft.make_mesh(data=2, expert=4, target=options.target)
    ideal = 3 * 3 * 2 * (TOP_K * TOKENS // 8) * EMBED * HIDDEN
    print("| `dispatch=` | `capacity=` | flops over ideal | moved over `expert` | temporaries |")
    print("|---|---|---|---|---|")
    for dispatch, capacity in CASES:
        compiled = gradient(mesh, dispatch, capacity)
        ledger = compiled.ledger()
        moved: list[str] = []
        for (kind, axes), size in ledger.totals().items():
            if axes == ("expert",) and size >= 2**20:
                moved.append(f"{kind} {size / 2**20:.0f} MiB")
        if ledger.not_understood:
            moved.append("not in the ledger")
        cells = [f'`"{dispatch}"`', str(capacity or "none")]
        cells.append(f"{compiled.cost_analysis()['flops'] / ideal:.2f}")
        cells += [", ".join(moved), f"{ledger.memory.temporaries / 2**20:.1f} MiB"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
