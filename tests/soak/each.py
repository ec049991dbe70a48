"""Seeds ─► the program of each, run; those that fail are listed."""

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax


def run_each(
    seeds: Sequence[int],
    make: Callable[[int], Any],
    run: Callable[[Any], None],
    verbose: bool,
) -> int:
    """Run the program of each seed, whatever the others do.

    Returns:
        The exit status: 1 if a program has failed.
    """
    failed, start = [], time.perf_counter()
    for done, seed in enumerate(seeds, 1):
        program = make(seed)
        if verbose:
            print(program, flush=True)
        try:
            run(program)
        except Exception as error:  # whatever it is, it is listed
            failed.append(seed)
            lines = str(error).splitlines() or [""]
            print(f"FAILED {program}\n    {type(error).__name__}: {lines[0][:300]}", flush=True)
            if verbose:
                traceback.print_exc()
        if done % 100 == 0:
            took = time.perf_counter() - start
            print(
                f"{done} programs, {len(failed)} failed, {took:.0f} s", file=sys.stderr, flush=True
            )
            jax.clear_caches()
    print(f"seeds {seeds[0]} to {seeds[-1]}: {len(failed)} failed {failed[:20]}")
    return 1 if failed else 0
