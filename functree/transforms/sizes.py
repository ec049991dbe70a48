"""The arrays of one call, and their annotations ─► a check that each axis has one size."""

from collections.abc import Iterator, Mapping, Sequence

from functree.calls.signature import Record
from functree.errors import AxesError, Problem, count
from functree.labels.annotations.given_names import given_by
from functree.labels.annotations.hints import (
    NOTHING,
    UNREADABLE,
    ArrayForm,
    Dim,
    Hint,
    dtype_fits,
    field_hints,
    form_of_axes,
)
from functree.labels.leaf import Leaf, is_in_module
from functree.labels.leaves import read
from functree.tree.arrays import array_text
from functree.tree.paths import Path

_BUILTINS = {"__builtins__": {}, "min": min, "max": max, "abs": abs}


class Sizes:
    """The size of each axis in one call, collected from its arrays.

    The annotations of the function itself count, and of a method those of the fields of `self`. The
    names in another module's annotations belong to this module: two layers of one class may have
    different sizes.

    Args:
        name: the name of the function, for messages.
        where: `"global"` or `"local"`, if messages have to say which shapes are meant.
    """

    def __init__(self, name: str, where: str = ""):
        self.name: str = name
        self.where: str = where
        # By kind and name of the axis: its sizes, several for a variadic one, and the path of the
        # array they are from.
        self.bound: dict[tuple[bool, str, Path | None], tuple[tuple[int, ...], Path]] = {}

    def copy(self) -> "Sizes":
        """A copy. Sizes that are added to the copy are not added to the original."""
        other = Sizes(self.name, self.where)
        other.bound = dict(self.bound)
        return other

    def check(self, record: Record, leaves: Sequence[Leaf] | None = None) -> None:
        """Compare the axes of a record's arrays with the sizes so far, and add those that are new.

        Args:
            record: a call or a result, as `Signature` makes them.
            leaves: its leaves, if they have been read already.

        Raises:
            AxesError: the arrays that do not fit, each with the axis and both sizes.
        """
        if leaves is None:
            leaves = read(record).leaves
        self._bind_fields(leaves)
        problems: list[Problem] = []
        expressions: list[tuple[Leaf, ArrayForm, Dim, int]] = []
        for leaf, forms in annotated(record, leaves):
            if leaf.misfit is not None:
                # In a model, it would say how to hold a stack of layers.
                problems.append(leaf.misfit._replace(remedy=_OF_THIS_RANK))
                continue
            form = _chosen(leaf, forms)
            if not dtype_fits(form.dtype, leaf.value.dtype):
                wanted = form.dtype.__name__
                why = f"its dtype is {leaf.value.dtype}, but the annotation says {wanted}"
                remedy = "convert the array, or change the annotation"
                problems.append(_problem(leaf, form, why, remedy))
            for dim, sizes in _spans(form, leaf.shape):
                if _is_expression(dim):
                    expressions.append((leaf, form, dim, sizes[0]))
                    continue
                why = self._bind(leaf, dim, sizes)
                if why is not None:
                    problems.append(_problem(leaf, form, why, _REMEDY))
        # Expressions such as `batch*seq` are last: they may use names that a later array binds.
        for leaf, form, dim, size in expressions:
            why = self._evaluate(dim, size)
            if why is not None:
                problems.append(_problem(leaf, form, why, _REMEDY))
        if problems:
            # One array may have several problems.
            number = count(len({problem.path for problem in problems}), "array")
            headline = f"{self.name}: {number} not as annotated"
            if self.where:
                headline += f", by {self.where} shapes"
            raise AxesError(headline, problems)

    def _bind_fields(self, leaves: Sequence[Leaf]) -> None:
        """Add the sizes of the fields of `self`, but for names that have several sizes there."""
        found: dict[str, set[int]] = {}
        owners: dict[str, Path] = {}
        for leaf in leaves:
            is_field = leaf.path[0] == "self" and len(leaf.path) == 2
            if not is_field or not is_in_module(leaf) or leaf.stacked or leaf.misfit is not None:
                continue
            for name, size in zip(leaf.axes, leaf.shape, strict=True):
                if name is not None:
                    found.setdefault(name, set()).add(size)
                    owners.setdefault(name, leaf.path)
        for name, sizes in found.items():
            if len(sizes) == 1:
                self.bound.setdefault((False, name, None), (tuple(sizes), owners[name]))

    def _bind(self, leaf: Leaf, dim: Dim, sizes: tuple[int, ...]) -> str | None:
        """The reason why a dimension does not fit; None if it fits."""
        body = dim.body
        # jaxtyping's `#name`: a size of 1 fits whatever the others are, since it is broadcast.
        if dim.anonymous or (dim.broadcast and all(size == 1 for size in sizes)):
            return None
        if body.isdigit():
            if sizes == (int(body),):
                return None
            return f'"{dim.token}" requires size {body}, but the size is {sizes[0]}'
        # jaxtyping's `{name}` refers to the arguments of the function, which are not known here.
        if not body.isidentifier():
            return None
        # `*#name`: arrays that are broadcast against each other may have different ranks.
        if dim.variadic and dim.broadcast:
            return None
        key = (dim.variadic, body, Path(leaf.path[1:]) if dim.by_leaf else None)
        known, owner = self.bound.setdefault(key, (sizes, leaf.path))
        if known == sizes:
            return None
        if dim.variadic:
            return f'"{body}" has size {sizes} here, and {known} in `{owner}`'
        return f'"{body}" has size {sizes[0]} here, and {known[0]} in `{owner}`'

    def _evaluate(self, dim: Dim, size: int) -> str | None:
        """The reason why a size does not fit an expression of other sizes; None if it fits."""
        single: dict[str, int] = {}
        for (variadic, name, _), (sizes, _) in self.bound.items():
            if not variadic:
                single[name] = sizes[0]
        try:
            # As jaxtyping evaluates it. The text is from the user's own annotation, not from data.
            wanted = eval(dim.body, dict(_BUILTINS), single)
        except UNREADABLE as error:
            return f"`{dim.body}` cannot be evaluated: {error}"
        if wanted == size:
            return None
        return f"`{dim.body}` is {wanted}, but the size is {size}"


_REMEDY = "make the sizes equal, or give the axes different names"
_OF_THIS_RANK = "pass an array with these dimensions, or change the annotation"


def _is_expression(dim: Dim) -> bool:
    """Whether a dimension is computed from others, such as `batch*seq`."""
    body = dim.body
    return not (dim.anonymous or body.isdigit() or body.isidentifier() or "{" in body)


def _problem(leaf: Leaf, form: ArrayForm, why: str, remedy: str) -> Problem:
    """The problem of an array, with its annotation as it is written."""
    tokens = " ".join(dim.token for dim in form.dims)
    what = f'{array_text(leaf.value)}   "{tokens}"'
    return Problem(leaf.path, tuple(leaf.shape), what, why, remedy)


def annotated(
    record: Record, leaves: Sequence[Leaf]
) -> Iterator[tuple[Leaf, tuple[ArrayForm, ...]]]:
    """The arrays with an annotation of the function itself, and the alternatives that the
    annotation allows."""
    hints: Mapping[str, Hint] = field_hints(type(record))
    for leaf in leaves:
        if is_in_module(leaf):  # where the module's own annotations count
            continue
        hint, below = hints.get(leaf.path[0], NOTHING), Path(leaf.path[1:])
        forms = _forms(hint, below)
        if forms or hint.at(below).references:
            yield leaf, forms


def _forms(hint: Hint, path: Path) -> tuple[ArrayForm, ...]:
    """The alternatives for an array at a path below a parameter. Axes by `ft.names` replace those
    of its annotation."""
    given = given_by(hint, path)
    forms = hint.at(path).forms
    if given is None:
        return forms
    form = form_of_axes(given)
    return tuple(form._replace(dtype=other.dtype) for other in forms) or (form,)


def _chosen(leaf: Leaf, forms: Sequence[ArrayForm]) -> ArrayForm:
    """The first alternative that fits the array: by rank and dtype, else by rank alone."""
    # One of them fits by rank, or else the leaf would be a misfit.
    fitting = [form for form in forms if form.fits(len(leaf.shape))]
    for form in fitting:
        if dtype_fits(form.dtype, leaf.value.dtype):
            return form
    return fitting[0]


def _spans(form: ArrayForm, shape: Sequence[int]) -> Iterator[tuple[Dim, tuple[int, ...]]]:
    """Each token of an annotation, and the sizes of its dimensions: several, or none, for a
    variadic token."""
    start = 0
    for dim in form.dims:
        length = 1
        if dim.variadic:  # at most one of them is
            length = len(shape) - len(form.dims) + 1
        yield dim, tuple(shape[start : start + length])
        start += length
