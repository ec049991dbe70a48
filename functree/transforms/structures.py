"""A call ─► its `Structure`, found without looking at it twice, and its arrays."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from functree.errors import FunctreeError, Problem, count
from functree.tree.codec import Form, builder, form_of, taker
from functree.tree.exact import Exact
from functree.tree.leaf import array_text
from functree.tree.leaves import Leaves, is_array, read
from functree.tree.paths import Path

RECENT = 4  # structures that are tried before one is looked up, which takes far longer


class Structure:
    """What calls have in common that differ in their arrays alone.

    Args:
        call: one of them.
        form: of it.

    Attributes:
        leaves: how each array is called; the arrays themselves are let go.
        heads: the place of the first array of each parameter.
        take: from a call to its arrays, or None if it is of another structure.
        build: from arrays to a call.
        spread: whether such calls had arrays on several devices.
        bodies: what is traced for it, by whatever a trace depends on.
        programs: what is compiled for it, by whatever that depends on.
        last: the key and the program that were used last.
    """

    def __init__(self, call: Any, form: Form):
        leaves = read(call)
        self.form: Form = form
        self.take: Any = taker(form)
        self.build: Any = builder(form)
        self.paths: tuple[Path, ...] = tuple(leaf.path for leaf in leaves.leaves)
        self.heads: tuple[int, ...] = _heads(self.paths)
        self.leaves: Leaves = Leaves((), (), leaves.treedef, leaves.positions, leaves.size)
        self.statics: dict[Path, Any] = {path: static.value for path, static in form.statics()}
        self.spread: bool = False
        self.bodies: dict[Any, Any] = {}
        self.programs: dict[Any, Any] = {}
        self.last: tuple[Any, Any] | None = None


def _heads(paths: Sequence[Path]) -> tuple[int, ...]:
    first: dict[Any, int] = {}
    for i, path in enumerate(paths):
        first.setdefault(path[:1], i)
    return tuple(first.values())


class Found(NamedTuple):
    """A call that has been taken apart.

    Attributes:
        structure: of the call.
        arrays: in JAX's order.
        concrete: whether all of them are `jax.Array`s with values; else some are traced, abstract, or numpy's.
    """

    structure: Structure
    arrays: Sequence[Any]
    concrete: bool


class Structures:
    """The structures that a function has been called with."""

    def __init__(self) -> None:
        self._recent: list[Structure] = []
        self._known: dict[Form, Structure] = {}
        self._concrete: frozenset[type] = frozenset()  # the class of JAX's arrays, once one has been seen

    def find(self, call: Any) -> Found:
        """Take a call apart.

        Raises:
            FunctreeError: leaves that are neither arrays nor can be static, by path.
        """
        for structure in self._recent:
            arrays = structure.take(call)
            if arrays is not None:
                if self._concrete.issuperset(map(type, arrays)):
                    return Found(structure, arrays, True)
                if all(map(is_array, arrays)):
                    return self._kinds(structure, arrays)
        return self._look_up(call)

    def _look_up(self, call: Any) -> Found:
        form = form_of(call)
        try:
            structure = self._known.get(form)
        except TypeError:
            raise unhashable(form) from None
        if structure is None:
            structure = self._known[form] = Structure(call, form)
        # A new list, for another thread may be going through the old one.
        self._recent = [structure, *(other for other in self._recent if other is not structure)][:RECENT]
        return self._kinds(structure, structure.take(call))

    def _kinds(self, structure: Structure, arrays: Sequence[Any]) -> Found:
        kinds = {type(x) for x in arrays}
        unlike = (Tracer, jax.ShapeDtypeStruct, np.ndarray, np.generic)
        concrete = not any(issubclass(kind, unlike) for kind in kinds)
        if concrete:
            self._concrete |= kinds
        return Found(structure, arrays, concrete)


def unhashable(form: Form) -> FunctreeError:
    """The error for what can be neither traced nor static, by path."""
    problems = []
    for path, static in form.statics():
        try:
            hash(static)
        except TypeError:
            why = "is neither an array nor hashable, so it can be neither traced nor static"
            remedy = "make it an array, or something hashable"
            value = static.value
            if isinstance(value, Exact):  # of an argument that is said to be static
                value, why = value.value, "is said to be static, and cannot be hashed"
                remedy = "leave it out of `static_argnums` and `static_argnames`" if is_array(value) else remedy
            what = array_text(value) if is_array(value) else type(value).__name__
            problems.append(Problem(path, None, what, why, remedy))
    return FunctreeError(f"{count(len(problems), 'leaf')} cannot be static", problems)
