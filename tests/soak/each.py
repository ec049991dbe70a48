"""Seeds ─► the program of each, run; those that fail are listed."""

import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

import functree as ft


def never(text: str) -> bool:
    """Of most programs, no error is a refusal."""
    return False


def run_each(
    seeds: Sequence[int],
    make: Callable[[int], Any],
    run: Callable[[Any], Sequence[str] | None],
    verbose: bool,
    is_refusal: Callable[[str], bool] = never,
) -> int:
    """Run the program of each seed, whatever the others do.

    Args:
        seeds: the seeds.
        make: makes a program.
        run: runs it, and raises whatever is wrong; it may return warnings of the compiler.
        verbose: whether to print each program.
        is_refusal: whether an error of functree with this text is no failure.

    Returns:
        The exit status: 1 if a program has failed.
    """
    failed, start = [], time.perf_counter()
    told: Counter[str] = Counter()
    for done, seed in enumerate(seeds, 1):
        program = make(seed)
        if verbose:
            print(program, flush=True)
        try:
            told.update({f"warned: {_without_numbers(one)[:45]}" for one in run(program) or ()})
        except Exception as error:  # whatever it is, it is listed
            text = str(error)
            if isinstance(error, ft.FunctreeError) and is_refusal(text):
                told[f"refused: {_without_numbers(text)}"] += 1
            else:
                failed.append(seed)
                first = " ".join(text.split())[:400]
                print(f"FAILED {program}\n    {type(error).__name__}: {first}", flush=True)
            if verbose:
                traceback.print_exc()
        if done % 25 == 0:
            took = time.perf_counter() - start
            line = f"{done} programs, {len(failed)} failed, {took:.0f} s"
            print(line, file=sys.stderr, flush=True)
            jax.clear_caches()
    for text, number in told.most_common():
        print(f"{number:4} {text}")
    print(f"seeds {seeds[0]} to {seeds[-1]}: {len(failed)} failed {failed[:20]}")
    return 1 if failed else 0


def _without_numbers(text: str) -> str:
    """The first lines of a message, the same for all sizes."""
    return re.sub(r"\d+", "N", " ".join(text.split()))[:230]
