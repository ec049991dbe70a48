"""What the stages of a call have in common: the call that they belong to, and its trees."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
from jax.tree_util import tree_structure

from functree.calls.compilations import Log, Situation
from functree.calls.program import Program
from functree.calls.signature import Args, Kwargs, Record, Signature
from functree.tree.arrays import Tree


class StagedCall(NamedTuple):
    """The call that a stage belongs to. It holds no arrays.

    Attributes:
        program: the program of the call.
        signature: the signature of the function.
        bind: a function from the arguments of another call to this call, as a tree.
        by_keyword: the names of the arguments that are passed by keyword.
        arrays: the arrays of the call, abstract, with their shardings as far as they are known.
        log: the compilations of the function.
    """

    program: Program
    signature: Signature
    bind: Callable[[Args, Kwargs], Record]
    by_keyword: frozenset[str]
    arrays: tuple[jax.ShapeDtypeStruct, ...]
    log: Log

    def values(self, tree: Tree) -> list[Any]:
        """A tree from JAX with the structure of the compiled function's arguments ─► a value for
        each array."""
        arguments, _ = tree
        return self.program.body.arguments.join(arguments)

    def arguments(self, values: Sequence[object]) -> tuple[Args, dict[str, Tree]]:
        """A value for each array ─► `(args, kwargs)` of the call, with None for static values."""
        args, kwargs = self.signature.arguments(self.program.group.skeleton.spread(values))
        # Behind an argument that is passed by keyword, defaults have no position either.
        return self.signature.by_keyword(args, kwargs, self.by_keyword)

    def situation(self) -> Situation:
        """Everything that a compilation of the call depends on."""
        return Situation.of(self.program.group, self.arrays, self.program.mesh, self.program.rules)


_Stage = TypeVar("_Stage", jax.stages.Traced, jax.stages.Lowered, jax.stages.Compiled)


class Stage(Generic[_Stage]):
    """The base class of the three stages.

    Trees have the structure of the function's arguments `(args, kwargs)`, with None instead of
    leaves that are not arrays, or the structure of its result.

    Attributes:
        jax: JAX's own stage, of a function of arrays: the jaxpr, memory layouts, the executable.
    """

    def __init__(self, stage: _Stage, call: StagedCall):
        self.jax: _Stage = stage
        self._call, self._program = call, call.program

    @property
    def args_info(self) -> tuple[Args, dict[str, Tree]]:
        """`(args, kwargs)` of `jax.stages.ArgInfo`: shapes, dtypes, and whether they are
        donated."""
        return self._arguments(self.jax.args_info)

    @property
    def in_avals(self) -> tuple[Args, dict[str, Tree]]:
        """`(args, kwargs)` of abstract values."""
        return self._arguments(self.jax.in_avals)

    @property
    def in_tree(self) -> Any:
        """The structure of `(args, kwargs)`."""
        return tree_structure(self.args_info)

    @property
    def out_info(self) -> Tree:
        """The result, with an abstract value for each array."""
        return self.jax.out_info.tree

    @property
    def out_tree(self) -> Any:
        """The structure of the result."""
        return tree_structure(self.out_info)

    def _arguments(self, tree: Tree) -> tuple[Args, dict[str, Tree]]:
        """A tree from JAX as `(args, kwargs)` of the function."""
        return self._call.arguments(self._call.values(tree))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._program.name}>"
