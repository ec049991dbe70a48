"""The result of a gradient function ─► what is averaged, the weight, and the carried values."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from functree.argument_checks import shown
from functree.errors import FunctreeTypeError, Problem
from functree.transforms.grad.known_gradient import KnownGradient
from functree.tree.arrays import Tree, value_text
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton


class GradientParts(NamedTuple):
    """The parts of a result.

    Attributes:
        averaged: the result; without its aux, if this is a weight or has carried values.
        weight: the weight of the micro-batch; None if there is none.
        carried: the next value of each parameter in `carry=`, in a tuple.
    """

    averaged: Tree
    weight: Tree
    carried: Tree


class Results(NamedTuple):
    """What the results of a gradient function mean.

    Attributes:
        name: the name of the function.
        gradient: what it returns, if that is known.
        weighted: whether its aux has a weight.
        carried: the skeletons of the arguments in `carry=`, by their paths.
    """

    name: str
    gradient: KnownGradient | None
    weighted: bool
    carried: Mapping[Path, Skeleton]

    def check(self) -> None:
        """Raise FunctreeError for a function that is known to return no aux, or of which it is not
        known what it returns."""
        if not self._has_own_aux:
            return
        wanted = self._wanted
        if self.gradient is None:
            raise FunctreeTypeError(
                f"accumulate: it is not known whether {self.name} returns {wanted} as its aux: use "
                "`ft.grad` or `ft.value_and_grad` with `has_aux=True`"
            )
        if not self.gradient.has_aux:
            raise FunctreeTypeError(
                f"accumulate: {self.name} returns no aux: return {wanted} as aux, and write "
                "`has_aux=True` in `ft.grad` or `ft.value_and_grad`"
            )

    def split(self, result: Any) -> GradientParts:
        """The parts of a result.

        Raises:
            FunctreeError: if its aux has not the structure that is wanted.
        """
        if not self._has_own_aux or self.gradient is None:
            return GradientParts(result, None, ())
        if self.gradient.with_value:
            (value, aux), gradients = result
            averaged = ((value, None), gradients)
        else:
            gradients, aux = result
            averaged = (gradients, None)
        weight, carried = None, aux
        if self.weighted and self.carried:
            if not isinstance(aux, tuple | list) or len(aux) != 2:
                raise self._refuse(aux, "is not a pair")
            weight, carried = aux
        elif self.weighted:
            weight, carried = aux, ()
        return GradientParts(averaged, weight, self._carried(carried))

    def join(self, parts: GradientParts) -> Tree:
        """The result with these parts."""
        if not self._has_own_aux or self.gradient is None:
            return parts.averaged
        carried: Any = parts.carried
        if len(self.carried) == 1:
            (carried,) = carried
        aux = carried
        if self.weighted:
            aux = (parts.weight, carried) if self.carried else parts.weight
        if self.gradient.with_value:
            (value, _), gradients = parts.averaged
            return (value, aux), gradients
        return parts.averaged[0], aux

    @property
    def _has_own_aux(self) -> bool:
        return self.weighted or bool(self.carried)

    @property
    def _wanted(self) -> str:
        """What the aux has to be, in words."""
        names = ", ".join(f"`{path}`" for path in self.carried)
        next_value = f"the next value of {names}"
        if len(self.carried) > 1:
            next_value = f"a tuple of the {len(self.carried)} next values of {names}"
        if not self.weighted:
            return next_value
        weight = "the weight of the micro-batch"
        return f"`({weight}, {next_value})`" if self.carried else weight

    def _carried(self, value: Any) -> tuple[Tree, ...]:
        """The next values in a tuple, each with the structure of its argument."""
        several = len(self.carried) != 1
        if several and (not isinstance(value, tuple | list) or len(value) != len(self.carried)):
            raise self._refuse(value, f"is not a tuple of {len(self.carried)}")
        values = tuple(value) if several else (value,)
        for (path, wanted), one in zip(self.carried.items(), values, strict=True):
            found = Skeleton.of(one)
            if found != wanted:
                raise self._refuse(one, _difference(path, wanted, found))
        return values

    def _refuse(self, value: Tree, why: str) -> FunctreeTypeError:
        problem = Problem(None, None, f"aux: {_kind(value)}", why, f"return {self._wanted} as aux")
        return FunctreeTypeError(
            f"accumulate: {self.name} does not return {self._wanted} as its aux", [problem]
        )


def _difference(path: Path, wanted: Skeleton, found: Skeleton) -> str:
    """What is different in a carried value, as far as it can be said in a line."""
    if found.treedef == wanted.treedef and found.indices == wanted.indices:
        for (_, old), (_, new) in zip(wanted.others, found.others, strict=True):
            if type(old) is not type(new) or old != new:
                return (
                    f"`{path}` has the static value {shown(old)}, and the next one has "
                    f"{shown(new)}: make it an array"
                )
    return f"has another structure than `{path}`"


def _kind(value: Any) -> str:
    """A result in messages."""
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return value_text(value)
