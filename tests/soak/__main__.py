"""Random programs: layouts × transforms × models, each compared with plain JAX; out of CI, for
hours if need be. And the tables of the tests, whole.

    python -m tests.soak --programs 10000 --seed 0
    python -m tests.soak --seed 4711 --programs 1 --verbose     # one program again
    python -m tests.soak --parallel 500 --seed 0                # experts, context, pipelines
    python -m tests.soak --training 300 --seed 0                # steps, micro-batches, populations
    python -m tests.soak --tables                               # every cell, some minutes

`--programs` runs those of `layout_programs.py`, `--parallel` those of `parallel_programs.py`, of
which the gradient is compared too, and `--training` those of `training_programs.py`. Any error is a
failure. But what functree says that it cannot do, of experts, sequences in parts and pipelines, is
none: it is counted, and listed at the end.

Of a large table of cases the tests run a covering of the pairs of values (`tests/lib/covering.py`).
`--tables` runs each cell of these tables, in pytest.
"""

import argparse
import os
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # both are read when jax starts
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    # Most of the time is compilation, and most of that is machine code, as in `conftest.py`.
    + " --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    + " --xla_cpu_use_fusion_emitters=false" * version("jaxlib").startswith("0.10.")
)

import functree as ft
from tests.lib.covering import WHOLE
from tests.soak import layout_programs, parallel_programs, training_programs
from tests.soak.each import never, run_each

TESTS = Path(__file__).parents[1]


def run_tables() -> int:
    """Run every cell of the tables of which the tests run a part."""
    found = {path for path in TESTS.glob("*/test_*.py") if "tests.lib.covering" in path.read_text()}
    command = [sys.executable, "-m", "pytest", *map(str, sorted(found))]
    return subprocess.run(command, env={**os.environ, WHOLE: "1"}, cwd=TESTS.parent).returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first program; the others follow"
    )
    parser.add_argument(
        "--parallel", type=int, metavar="N", help="instead, programs with experts and the like"
    )
    parser.add_argument("--training", type=int, metavar="N", help="instead, training steps")
    parser.add_argument("--verbose", action="store_true", help="print each program")
    parser.add_argument(
        "--tables", action="store_true", help="instead, each cell of the tables of the tests"
    )
    options = parser.parse_args()
    if options.tables:
        return run_tables()
    warnings.simplefilter("ignore")
    kind, number, is_refusal = layout_programs, options.programs, never
    if options.parallel:
        warnings.simplefilter("error", ft.FunctreeWarning)
        kind, number, is_refusal = parallel_programs, options.parallel, parallel_programs.is_refusal
    elif options.training:
        kind, number = training_programs, options.training
    seeds = range(options.seed, options.seed + number)
    return run_each(seeds, kind.make, kind.run, options.verbose, is_refusal)


if __name__ == "__main__":
    sys.exit(main())
