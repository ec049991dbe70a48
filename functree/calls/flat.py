"""A traced call ─► the same program as a plain `jax.jit` function of its arrays, one argument for each."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from functree.calls.program import Program
from functree.tree.paths import Path


class FlatProgram(NamedTuple):
    """A program as a function of arrays, which needs nothing of functree's trees.

    Attributes:
        name: the name of the user's function.
        paths: the path of each argument, which begins with the name of a parameter.
        arguments: the arguments, abstract, with their shardings.
        jitted: `jax.jit` of the function; it returns a tuple of arrays.
    """

    name: str
    paths: tuple[Path, ...]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    jitted: Any


def flat_program(program: Program, types: Sequence[Any], shardings: Sequence[Any]) -> FlatProgram:
    """The program of a call.

    Args:
        program: the program.
        types: JAX's type of each array of the call.
        shardings: the sharding of each, or None; those by `in_shardings` come first.
    """
    wanted = program.in_shardings or [None] * len(types)
    laid = [own if given is None else given for given, own in zip(wanted, shardings, strict=True)]
    arguments = tuple(map(_abstract, types, laid))

    def of_arrays(*arrays: Any) -> tuple[Any, ...]:
        return tuple(program.jitted(*program.body.arguments.split(arrays)).values)

    of_arrays.__name__ = program.body.__name__
    return FlatProgram(program.name, tuple(program.group.paths), arguments, jax.jit(of_arrays))


def _abstract(kind: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    # An array that nobody has placed has no sharding in the exported program either.
    placed = sharding if isinstance(sharding, NamedSharding) else None
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type, sharding=placed)
