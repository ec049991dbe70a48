"""A function of a tree, and a tree with abstract arrays ─► its result, abstract, of which nothing
was computed."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax

from functree.tree.arrays import AnyArray, Tree
from functree.tree.skeleton.skeleton import Skeleton

T = TypeVar("T")


def abstract_result(fn: Callable[[Tree], Tree], tree: Tree) -> Tree:
    """`jax.eval_shape` for trees whose leaves need not be arrays."""
    skeleton, arrays = read_abstract(lambda tree: Skeleton.apart(fn(tree)), tree)
    return skeleton.fill(arrays)


def read_abstract(
    fn: Callable[[Tree], tuple[T, Sequence[AnyArray]]], tree: Tree
) -> tuple[T, list[jax.ShapeDtypeStruct]]:
    """What a function returns beside the arrays that it returns, and these, abstract.

    So a tree that was made in the trace can be read there, with its traced arrays: it is not built
    once more with abstract ones, which the class of a node may refuse. What is returned beside the
    arrays must not be used for others that it may have.
    """
    skeleton, arrays = Skeleton.apart(tree)
    beside: list[T] = []

    def run(*arrays: AnyArray) -> list[AnyArray]:
        found, values = fn(skeleton.fill(arrays))
        beside.append(found)
        return list(values)

    abstract = jax.eval_shape(run, *arrays)
    return beside[0], abstract
