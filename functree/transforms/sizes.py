"""The arrays of one call and their annotations ─► whether each axis name stands for one size."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from functree.errors import AxesError, Problem, count
from functree.tree.annotations.classes import class_hints
from functree.tree.annotations.dimensions import ArrayForm, Dim, dtype_fits
from functree.tree.annotations.hints import NOTHING, UNREADABLE
from functree.tree.leaf import Leaf
from functree.tree.leaves import read
from functree.tree.paths import Path

_CONTAINERS = ("builtins", "collections")
_BUILTINS = {"__builtins__": {}, "min": min, "max": max, "abs": abs}


class Sizes:
    """The sizes that axis names stand for in one call, as its arrays show them, one after the other.

    Only what the function's own annotations name is in it: a module's names are for its own fields, and two layers
    of one class may differ.

    Args:
        name: of the function.
        where: what the shapes are, if messages have to say that: `"global"`.
    """

    def __init__(self, name: str, where: str = ""):
        self.name: str = name
        self.where: str = where
        self.bound: dict[Any, tuple[tuple[int, ...], Path]] = {}

    def copy(self) -> "Sizes":
        """The same so far; what is bound in the copy is not bound here."""
        other = Sizes(self.name, self.where)
        other.bound = dict(self.bound)
        return other

    def check(self, record: Any, leaves: Sequence[Leaf] | None = None) -> None:
        """Bind the names of a record's arrays, and compare those that are bound.

        Args:
            record: a call or a result, as `Signature` makes them.
            leaves: its leaves, where they have been read.

        Raises:
            AxesError: everything that does not fit: the array, the axis, both sizes.
        """
        leaves = read(record).leaves if leaves is None else leaves
        problems: list[Problem] = []
        expressions: list[tuple[Leaf, Dim, int]] = []
        for leaf, forms in annotated(record, leaves):
            if leaf.misfit is not None:
                problems.append(leaf.misfit)
                continue
            form = _chosen(leaf, forms)
            if not dtype_fits(form.dtype, leaf.value.dtype):
                why = f"its dtype is {leaf.value.dtype}, and the annotation says {form.dtype.__name__}"
                problems.append(leaf.problem(why, "convert it, or annotate what it is"))
            for dim, sizes in _spans(form, leaf.shape):
                why = self._bind(leaf, dim, sizes, expressions)
                problems += [leaf.problem(why, _REMEDY)] if why else []
        for leaf, dim, size in expressions:
            why = self._evaluate(dim, size)
            problems += [leaf.problem(why, _REMEDY)] if why else []
        if problems:
            where = f", by {self.where} shapes" if self.where else ""
            number = count(len({p.path for p in problems}), "array")
            raise AxesError(f"{self.name}: {number} not as annotated{where}", problems)

    def _bind(self, leaf: Leaf, dim: Dim, sizes: tuple[int, ...], expressions: list[Any]) -> str | None:
        """Why one dimension does not fit; None where it does."""
        modifiers = dim.token[: len(dim.token) - len(dim.token.lstrip("#*_?"))]
        body = dim.token.rpartition("=")[2].lstrip("#*_?")
        if "_" in modifiers or body in ("", "...") or (dim.broadcast and all(size == 1 for size in sizes)):
            return None
        if body.isdigit():
            return f'"{dim.token}" says {body}, and the size is {sizes[0]}' if sizes != (int(body),) else None
        if not body.isidentifier():
            expressions += [(leaf, dim, sizes[0])] if "{" not in body else []
            return None
        if dim.variadic and dim.broadcast:
            return None
        key = (dim.variadic, body, Path(leaf.path[1:]) if "?" in modifiers else None)
        known, owner = self.bound.setdefault(key, (sizes, leaf.path))
        if known == sizes:
            return None
        here, there = (sizes, known) if dim.variadic else (sizes[0], known[0])
        return f'"{body}" has size {here} here, and {there} in `{owner}`'

    def _evaluate(self, dim: Dim, size: int) -> str | None:
        """Why a size that is an expression of others does not fit."""
        body = dim.token.rpartition("=")[2].lstrip("#*_?")
        single = [(name, sizes[0]) for (variadic, name, _), (sizes, _) in self.bound.items() if not variadic]
        try:
            wanted = eval(body, dict(_BUILTINS), dict(single))
        except UNREADABLE as error:
            return f"`{body}` cannot be worked out: {error}"
        return None if wanted == size else f"`{body}` is {wanted}, and the size is {size}"


_REMEDY = "make the shapes agree, or name the axes apart"


def annotated(record: Any, leaves: Sequence[Leaf]) -> Iterator[tuple[Leaf, tuple[ArrayForm, ...]]]:
    """The arrays that the function's own annotations speak of, and what they allow there."""
    hints: Mapping[str, Any] = class_hints(type(record)).fields
    for leaf in leaves:
        if any(cls.__module__ not in _CONTAINERS for cls in leaf.within[1:]):
            continue
        hint = hints.get(leaf.path[0], NOTHING).at(Path(leaf.path[1:]))
        if hint.forms or hint.later:
            yield leaf, hint.forms


def _chosen(leaf: Leaf, forms: Sequence[ArrayForm]) -> ArrayForm:
    """The alternative that an array was read by."""
    fitting = [form for form in forms if form.fits(len(leaf.shape))]
    return next((form for form in fitting if dtype_fits(form.dtype, leaf.value.dtype)), fitting[0])


def _spans(form: ArrayForm, shape: Sequence[int]) -> Iterator[tuple[Dim, tuple[int, ...]]]:
    """Each token of an annotation, and the sizes that it stands for."""
    at = 0
    for dim in form.dims:
        span = len(shape) - len(form.dims) + 1 if dim.variadic else 1
        yield dim, tuple(shape[at : at + span])
        at += span
