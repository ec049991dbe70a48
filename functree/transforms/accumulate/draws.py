"""A traced piece ─► the random keys that all pieces draw the same numbers from."""

from collections.abc import Sequence
from typing import Any

from functree.errors import listed, warn
from functree.tree.jaxprs import (
    Program,
    Reader,
    Sources,
    all_equations,
    dependencies,
)

DIFFERS = "differs from piece to piece"
"""What a value depends on that differs from piece to piece; other values depend on texts that say
what is the same."""

# Equations that draw numbers from a key, which is their first operand.
_DRAWS = frozenset({"random_bits", "rng_bit_generator"})


def warn_same_draws(name: str, piece: Program, origins: Sequence[str], steps: int) -> None:
    """Warn of keys from which all pieces draw the same numbers.

    Args:
        name: the name of the gradient function.
        piece: the function, traced for one piece.
        origins: for each of its operands, what it is, or `DIFFERS`.
        steps: the number of pieces.
    """
    if steps == 1 or not any(one.primitive.name in _DRAWS for one in all_equations(piece)):
        return
    found: dict[Sources, None] = {}

    def see(equation: Any, inputs: Sequence[Sources]) -> None:
        if equation.primitive.name in _DRAWS and DIFFERS not in inputs[0]:
            found[inputs[0]] = None

    closed_over = frozenset({f"a key that {name} closes over"})
    # What is in a mutable array is not known by what it was made with.
    reader = Reader(see, closed_over, mutable=frozenset({DIFFERS}))
    dependencies(piece, [frozenset({one}) for one in origins], reader)
    if not found:
        return
    made = f"a key that {name} makes of a constant"
    keys: dict[str, None] = {}
    for origin in found:
        keys |= dict.fromkeys(sorted(map(str, origin)) or [made])
    warn(
        f"accumulate: all {steps} pieces draw the same random numbers from {listed(list(keys))}: "
        f"pass the key as an argument of {name} and name it, "
        f'`ft.accumulate(..., {steps}, keys="key")`, and each piece gets a key of its own. '
        "Where one draw for all pieces is meant, silence this: "
        '`warnings.filterwarnings("ignore", "accumulate: all", ft.FunctreeWarning)`'
    )
