"""The result of a piece ─► where in it are the values that the next piece takes, and whether these
can take the place of what the piece was given."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import AxisType

from functree.argument_checks import shown
from functree.devices.specs import spec_text
from functree.errors import FunctreeTypeError, Problem, count
from functree.labels.leaf import Leaf
from functree.transforms.accumulate.places import Place, at, indices_at
from functree.transforms.grad.known_gradient import KnownGradient
from functree.tree.arrays import Tree, array_text, value_text
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton

ArrayType = Any
"""The type of an array in a trace, as `jax.typeof` returns it, for which JAX has no public name."""


class Carried(NamedTuple):
    """The arguments that each piece takes from the one before.

    Attributes:
        name: the name of the function.
        skeletons: the skeleton of each of these arguments, by its path.
        shapes: the shapes of their arrays.
        gradient: what the function returns, if that is known.
    """

    name: str
    skeletons: Mapping[Path, Skeleton]
    shapes: Sequence[tuple[int, ...]]
    gradient: KnownGradient | None

    @classmethod
    def of(
        cls, name: str, values: Mapping[Path, Tree], gradient: KnownGradient | None
    ) -> "Carried":
        """The arguments, from their values.

        Raises:
            FunctreeError: the function is known to return no aux.
        """
        if values and gradient is not None and not gradient.has_aux:
            names = ", ".join(f"`{path}`" for path in values)
            raise FunctreeTypeError(
                f"accumulate: {name} returns no next value of {names}: return it as aux, and write "
                "`has_aux=True` in `ft.grad` or `ft.value_and_grad`"
            )
        apart = {path: Skeleton.apart(value) for path, value in values.items()}
        shapes = [x.shape for _, arrays in apart.values() for x in arrays]
        return cls(name, {path: own for path, (own, _) in apart.items()}, shapes, gradient)

    def indices(self, result: Tree) -> range:
        """The indices of the next values among the arrays of a result.

        Raises:
            FunctreeError: they are not there, or have another structure.
        """
        if not self.skeletons:
            return range(0)
        found = [place for place in self._places(result) if self._is_next(at(result, place))]
        if len(found) > 1:  # a gradient may have the structure of what is carried
            found = [place for place in found if self._has_shapes(at(result, place))]
        if len(found) != 1:
            raise self._refuse(result, found)
        return indices_at(result, found[0])

    def check_types(
        self, leaves: Sequence[Leaf], before: Sequence[ArrayType], after: Sequence[ArrayType]
    ) -> None:
        """Raise for carried arrays whose types are not those of the next values."""
        problems: list[Problem] = []
        for leaf, old, new in zip(leaves, before, after, strict=True):
            was, becomes = _type_text(old), _type_text(new)
            if was != becomes:
                why = f"is {was} in the first piece, and {becomes} in the next"
                problems.append(leaf.problem(why, _SAME_TYPE))
        if problems:
            arrays = count(len(problems), "array")
            raise FunctreeTypeError(
                f"accumulate: {arrays} in `carry` would change from piece to piece", problems
            )

    def _places(self, result: Tree) -> Iterator[Place]:
        """Where the next values may be."""
        for place in self._places_of_aux(result):
            yield place
            aux = at(result, place)
            if _is_pair(aux):  # other aux, and what is carried
                yield (*place, 1)

    def _places_of_aux(self, result: Tree) -> list[Place]:
        if self.gradient is not None:
            return [(0, 1)] if self.gradient.with_value else [(1,)]
        if not _is_pair(result):
            return []
        if _is_pair(result[0]):
            return [(0, 1), (1,)]
        # A number and something is more likely the value and its gradient.
        if value_text(result[0]).endswith("[]"):
            return []
        return [(1,)]

    def _is_next(self, value: Tree) -> bool:
        """Whether a value has the structure of what is carried."""
        wanted = list(self.skeletons.values())
        if len(wanted) == 1:
            return Skeleton.of(value) == wanted[0]
        if not isinstance(value, tuple | list) or len(value) != len(wanted):
            return False
        return all(Skeleton.of(one) == own for one, own in zip(value, wanted, strict=True))

    def _has_shapes(self, value: Tree) -> bool:
        """Whether the arrays of a value have the shapes of those that are carried."""
        return [x.shape for x in Skeleton.apart(value)[1]] == list(self.shapes)

    def _refuse(self, result: Tree, found: Sequence[Place]) -> FunctreeTypeError:
        names = ", ".join(f"`{path}`" for path in self.skeletons)
        one = len(self.skeletons) == 1
        next_value = "the next value" if one else f"a tuple of {len(self.skeletons)} next values"
        headline = f"accumulate: {self.name} does not return {next_value} of {names} as its aux"
        remedy = f"return {next_value} as aux, or `(aux, {'it' if one else 'the tuple'})`"
        if len(found) > 1:
            why = "its result has several values of this structure"
            remedy = "use `ft.value_and_grad` or `ft.grad`, which say what they return"
            return FunctreeTypeError(headline, [Problem(None, None, self.name, why, remedy)])
        places = self._places_of_aux(result)
        if not places:
            why = f"it returns {_kind(result)}"
            return FunctreeTypeError(headline, [Problem(None, None, self.name, why, remedy)])
        aux = at(result, places[0])
        why = self._difference(aux)
        return FunctreeTypeError(headline, [Problem(None, None, f"aux: {_kind(aux)}", why, remedy)])

    def _difference(self, aux: Tree) -> str:
        """What is different in the aux of a function, as far as it can be said in a line."""
        if len(self.skeletons) > 1:
            return "has another structure"
        ((path, wanted),) = self.skeletons.items()
        for value in (aux, aux[1] if _is_pair(aux) else aux):
            found = Skeleton.of(value)
            if found.treedef != wanted.treedef or found.indices != wanted.indices:
                continue
            for (_, old), (_, new) in zip(wanted.others, found.others, strict=True):
                if type(old) is not type(new) or old != new:
                    return (
                        f"`{path}` has the static value {shown(old)}, and the next one "
                        f"{shown(new)}: make it an array"
                    )
        return f"has another structure than `{path}`"


_SAME_TYPE = "return it with the shape and dtype that it had, such as by `.astype(old.dtype)`"


def _is_pair(value: Tree) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _kind(value: Any) -> str:
    """A result in messages."""
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return value_text(value)


def _type_text(array: ArrayType) -> str:
    """What of the type of an array a loop keeps: dtype, shape, and on Explicit axes its
    sharding."""
    text = array_text(array)
    if AxisType.Explicit in array.sharding.mesh.axis_types:
        text += f" {spec_text(array.sharding.spec)}"
    return text
