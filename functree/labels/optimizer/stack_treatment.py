"""An optimizer and its parameters ─► a warning about the stacks that it treats differently from
their layers.

The update of a stack is traced, and the update of its layers that is mapped over them. If both
programs compute the same for a leaf, the optimizer does not care about stacks.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import optax
from jax.extend.core import Literal

from functree.errors import USERS_ERRORS, FunctreeError, listed, warn
from functree.labels.leaf import Leaf
from functree.labels.optimizer.followed_parameters import TrainedModel
from functree.labels.optimizer.layers import mapped_init, mapped_update, paths_of
from functree.labels.optimizer.optimizer_state import remembered_update, trained_type
from functree.labels.optimizer.followed_parameters import owners_of
from functree.tree.arrays import Tree
from functree.tree.interfaces import Stack
from functree.tree.jaxprs import (
    NOTHING,
    AnyJaxpr,
    called_program,
    dependencies,
    inner_programs,
    is_random,
)
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton, abstract_result


def warn_of_stacks(tx: Any, trained: TrainedModel) -> None:
    """Warn if an optimizer treats stacks differently from their layers, once for an optimizer and
    parameters of some shapes."""
    stacked = [leaf for leaf in trained.parameters.values() if leaf.stacked]
    if not stacked or not callable(getattr(tx, "update", None)):
        return
    told: list[Leaf] = []

    def find() -> bool:
        told.extend(treated_differently(tx, trained))
        return True

    remembered_update(tx, ("stacks", trained_type(trained)), find)
    if told:
        warn(_text(told))


def _text(leaves: Sequence[Leaf]) -> str:
    stacks = list(dict.fromkeys(str(_stack_path(leaf)) or "(the model)" for leaf in leaves))
    named = "the stack " if len(stacks) == 1 else "the stacks "
    named += listed([f"`{stack}`" for stack in stacks])
    arrays = listed([f"`{leaf.path}`" for leaf in leaves], 2)
    return (
        f"the optimizer treats {named} differently from the layers in it: it takes {arrays} for "
        "leaves with one more dimension. "
        "With `ft.layerwise(tx)` each layer is its own leaf. What looks at all leaves at once "
        "belongs outside: `optax.chain(optax.clip_by_global_norm(1.0), ft.layerwise(tx))`"
    )


def _stack_path(leaf: Leaf) -> Path:
    """The path of the outermost stack that a leaf is in."""
    for i, cls in enumerate(leaf.within):
        if issubclass(cls, Stack):
            return Path(leaf.path[:i])
    return Path()


def treated_differently(tx: Any, trained: TrainedModel) -> Sequence[Leaf]:
    """The leaves of stacks whose update is not that of their layers.

    An optimizer that looks at several leaves at once is not compared, nor one whose `update` needs
    more arguments. A single array is not compared either: its norm may be meant as a global one.
    Random numbers make no difference.
    """
    if len(trained.parameters) == 1:
        return ()
    params = trained.tree(lambda leaf: leaf.value)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        try:
            whole = _Traced(tx, params, layers=False)
            if whole.looks_across():
                return ()
            apart = _Traced(tx, params, layers=True)
        # It was not meant to run, and may need other arguments.
        except (*USERS_ERRORS, FunctreeError):
            return ()
    same, other = whole.values(), apart.values()
    found: list[Leaf] = []
    for leaf in trained.parameters.values():
        if leaf.stacked and same.get(leaf.path) != other.get(leaf.path):
            found.append(leaf)
    return found


class _Traced:
    """An optimizer's `update`, traced for abstract parameters.

    Args:
        tx: the optimizer.
        params: the parameters.
        layers: whether it is mapped over the layers of stacks.
    """

    def __init__(self, tx: Any, params: Tree, *, layers: bool):
        self._parameters = paths_of(params)
        self._updates: list[Path] = []
        init = (lambda params: mapped_init(tx, params)) if layers else tx.init
        state = abstract_result(init, params)
        self._state = paths_of(state)
        skeleton, types = Skeleton.apart((params, state, params))
        update = optax.with_extra_args_support(tx).update

        def run(*arrays: Any) -> list[Any]:
            gradients, state, params = skeleton.fill(arrays)
            if layers:
                new, after = mapped_update(tx, gradients, state, params, {})
            else:
                new, after = update(gradients, state, params)
            self._updates = paths_of(new)
            return [*Skeleton.apart(new)[1], *Skeleton.apart(after)[1]]

        self.program: Any = jax.make_jaxpr(run)(*types)

    def values(self) -> dict[Path, int]:
        """What is computed for the update of each parameter, as a number: equal numbers for equal
        computations."""
        inputs = [_number(("input", i)) for i in range(len(self.program.in_avals))]
        outputs = _numbers(self.program, inputs)
        return dict(zip(self._updates, outputs, strict=False))

    def looks_across(self) -> bool:
        """Whether what belongs to one parameter, or to none, depends on another one."""
        owners = owners_of(self._state, self._parameters)
        state = [next(iter(owners[path]), None) for path in self._state]
        inputs = [*self._parameters, *state, *self._parameters]
        sources = [NOTHING if owner is None else frozenset({owner}) for owner in inputs]
        outputs = [*self._updates, *state]
        found = dependencies(self.program, sources)
        return any(on - {owner} for owner, on in zip(outputs, found, strict=True))


# What is computed, without how its dimensions are ordered

# Operations that only move or repeat elements. A mapped program has them at other places.
_MOVES = frozenset({
    "broadcast_in_dim", "copy", "copy_p", "expand_dims", "reshape", "squeeze", "transpose",
})  # fmt: skip
# Operations along one dimension, in their parameters.
_ALONG = ("axis", "dimension", "dimensions")

_KNOWN: dict[Hashable, int] = {}


def _number(what: Hashable) -> int:
    """One number for equal computations."""
    return _KNOWN.setdefault(what, len(_KNOWN))


def _numbers(program: AnyJaxpr, inputs: Sequence[int]) -> list[int]:
    """The number of each output of a program, by those of its inputs."""
    open_program: Any = getattr(program, "jaxpr", program)
    known: dict[Any, int] = {}
    for variable, value in zip(open_program.constvars, getattr(program, "consts", ()), strict=True):
        known[variable] = _number(("constant", value.dtype, value.size, _bytes(value)))
    known.update(zip(open_program.invars, inputs, strict=True))

    def number(variable: Any) -> int:
        if isinstance(variable, Literal):
            return _number(("literal", str(variable.val)))
        return known[variable]

    for equation in open_program.eqns:
        given = [number(one) for one in equation.invars]
        known.update(zip(equation.outvars, _outputs(equation, given), strict=True))
    return [number(one) for one in open_program.outvars]


def _bytes(value: Any) -> Hashable:
    typed = jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)
    return "key" if typed else jax.numpy.asarray(value).tobytes()


def _outputs(equation: Any, inputs: Sequence[int]) -> list[int]:
    """The number of each output of an operation."""
    name = equation.primitive.name
    if is_random(equation):
        return [_number("random")] * len(equation.outvars)
    if name in _MOVES:
        return [inputs[0]]
    called = called_program(equation)
    if called is not None:
        return _numbers(called, inputs)
    inner: list[Hashable] = []
    for program in inner_programs(equation):
        arguments = [_number(("argument", i)) for i in range(len(program.in_avals))]
        inner.append(tuple(_numbers(program, arguments)))
    what = (name, tuple(inputs), tuple(inner), _extent(equation))
    return [_number((what, i)) for i in range(len(equation.outvars))]


def _extent(equation: Any) -> Hashable:
    """Over how many elements an operation sums, or how it changes the number of elements."""
    params, name = equation.params, equation.primitive.name
    sizes = [one.aval.size for one in equation.invars]
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return tuple(sorted(shape[dim] for dim in contracted))
    if "axes" in params:
        shape = equation.invars[0].aval.shape
        return tuple(sorted(shape[dim] for dim in params["axes"]))
    for key in _ALONG:
        if isinstance(params.get(key), int):
            return equation.invars[0].aval.shape[params[key]]
    largest = max(sizes, default=0)
    if all(one.aval.size == largest for one in equation.outvars):
        return None
    return tuple(one.aval.size for one in equation.outvars)
