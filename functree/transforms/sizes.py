"""The arrays of one call, and their annotations ─► a check that each axis has one size."""

from collections.abc import Iterator, Sequence

from functree.calls.signature import Record
from functree.errors import AxesError, Problem, count
from functree.labels.annotations.given_names import given_by
from functree.labels.annotations.hints import (
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

Sizes = dict[tuple[str, bool, Path | None], tuple[tuple[int, ...], Path]]
"""The sizes of each axis in one call, several for a variadic one, and the path of the array that
they are from. The key of an axis: its name, whether it is variadic, and for one that may differ by
leaf (`?b`) the path of the leaf in its argument."""

_REMEDY = "make the sizes equal, or give the axes different names"
_BUILTINS = {"__builtins__": {}, "min": min, "max": max, "abs": abs}


def check_sizes(
    name: str,
    record: Record,
    leaves: Sequence[Leaf] | None = None,
    known: Sizes | None = None,
    where: str = "",
) -> Sizes:
    """Compare the axes of a record's arrays with each other, and with the sizes that are known.

    The annotations of the function itself count, and of a method those of the fields of `self`. The
    names in another module's annotations belong to this module: two layers of one class may have
    different sizes.

    Args:
        name: the name of the function, for messages.
        record: a call or a result, as `Signature` makes them.
        leaves: its leaves, if they have been read already.
        known: the sizes in the call, if the record is its result.
        where: `"global"` or `"local"`, if messages have to say which shapes are meant.

    Returns:
        The sizes that are known, and those of this record.

    Raises:
        AxesError: the arrays that do not fit, each with the axis and both sizes.
    """
    if leaves is None:
        leaves = read(record).leaves
    sizes = {**_sizes_of_fields(leaves), **(known or {})}
    problems: list[Problem] = []
    found: list[tuple[Leaf, ArrayForm, Dim, tuple[int, ...]]] = []
    for leaf, form in annotated(record, leaves):
        if leaf.misfit is not None:
            # In a model, it would say how to hold a stack of layers.
            remedy = "pass an array with these dimensions, or change the annotation"
            problems.append(leaf.misfit._replace(remedy=remedy))
            continue
        if not dtype_fits(form.dtype, leaf.value.dtype):
            wanted = form.dtype.__name__
            why = f"its dtype is {leaf.value.dtype}, but the annotation says {wanted}"
            remedy = "convert the array, or change the annotation"
            problems.append(_problem(leaf, form, why, remedy))
        found += [(leaf, form, dim, own) for dim, own in _spans(form, leaf.shape)]
    # Expressions such as `batch*seq` are last: they may use names that a later array binds.
    found.sort(key=lambda one: not one[2].body.isidentifier())
    for leaf, form, dim, own in found:
        why = _difference(sizes, leaf, dim, own)
        if why is not None:
            problems.append(_problem(leaf, form, why, _REMEDY))
    if problems:
        # One array may have several problems.
        number = count(len({problem.path for problem in problems}), "array")
        by = f", by {where} shapes" if where else ""
        raise AxesError(f"{name}: {number} not as annotated{by}", problems)
    return sizes


def annotated(record: Record, leaves: Sequence[Leaf]) -> Iterator[tuple[Leaf, ArrayForm]]:
    """The arrays with an annotation of the function itself, and the alternative of it that fits: by
    rank and dtype, else by rank alone."""
    hints = field_hints(type(record))
    for leaf in leaves:
        hint = hints.get(leaf.path[0])
        if hint is None or is_in_module(leaf):  # where the module's own annotations count
            continue
        forms = _forms(hint, Path(leaf.path[1:]))
        fitting = [form for form in forms if form.fits(len(leaf.shape))]
        of_dtype = [form for form in fitting if dtype_fits(form.dtype, leaf.value.dtype)]
        if leaf.misfit is not None:
            yield leaf, ArrayForm(())  # none fits
        elif fitting:
            yield leaf, (of_dtype or fitting)[0]


def _forms(hint: Hint, below: Path) -> list[ArrayForm]:
    """The alternatives for an array at a path below a parameter. Axes by `ft.names` replace those
    of its annotation, but not its dtypes."""
    forms, given = list(hint.at(below).forms), given_by(hint, below)
    if given is None:
        return forms
    dtypes = [form.dtype for form in forms] or [None]
    return [form_of_axes(given)._replace(dtype=dtype) for dtype in dtypes]


def _spans(form: ArrayForm, shape: tuple[int, ...]) -> Iterator[tuple[Dim, tuple[int, ...]]]:
    """Each token of an annotation, and the sizes of its dimensions: several, or none, for a
    variadic token."""
    start = 0
    for dim in form.dims:
        length = 1
        if dim.variadic:  # at most one of them is
            length = len(shape) - len(form.dims) + 1
        yield dim, shape[start : start + length]
        start += length


def _sizes_of_fields(leaves: Sequence[Leaf]) -> Sizes:
    """The sizes of the fields of `self`, but for names that have several sizes there."""
    found: dict[str, dict[tuple[int, ...], Path]] = {}
    for leaf in leaves:
        is_field = leaf.path[0] == "self" and len(leaf.path) == 2
        if not is_field or not is_in_module(leaf) or leaf.stacked or leaf.misfit is not None:
            continue
        for name, size in zip(leaf.axes, leaf.shape, strict=True):
            if name is not None:
                found.setdefault(name, {}).setdefault((size,), leaf.path)
    return {(name, False, None): own.popitem() for name, own in found.items() if len(own) == 1}


def _difference(sizes: Sizes, leaf: Leaf, dim: Dim, own: tuple[int, ...]) -> str | None:
    """The reason why the size of a dimension does not fit those so far, or None. A new one is
    added to them."""
    body = dim.body
    # jaxtyping's `#name`: a size of 1 fits whatever the others are, since it is broadcast. Its
    # `{name}` refers to the arguments of the function, which are not known here.
    if dim.anonymous or "{" in body or (dim.broadcast and all(size == 1 for size in own)):
        return None
    if body.isdigit():
        if own == (int(body),):
            return None
        return f'"{dim.token}" requires size {body}, but the size is {own[0]}'
    if not body.isidentifier():
        return _other_value(sizes, body, own[0])
    # `*#name`: arrays that are broadcast against each other may have different ranks.
    if dim.variadic and dim.broadcast:
        return None
    key = body, dim.variadic, Path(leaf.path[1:]) if dim.by_leaf else None
    known, owner = sizes.setdefault(key, (own, leaf.path))
    if known == own:
        return None
    if dim.variadic:
        return f'"{body}" has size {own} here, and {known} in `{owner}`'
    return f'"{body}" has size {own[0]} here, and {known[0]} in `{owner}`'


def _other_value(sizes: Sizes, expression: str, size: int) -> str | None:
    """The reason why a size is not that of an expression of other sizes; None if it is."""
    single = {name: own[0] for (name, variadic, _), (own, _) in sizes.items() if not variadic}
    try:
        # As jaxtyping evaluates it. The text is from the user's own annotation, not from data.
        wanted = eval(expression, dict(_BUILTINS), single)
    except UNREADABLE as error:
        return f"`{expression}` cannot be evaluated: {error}"
    if wanted == size:
        return None
    return f"`{expression}` is {wanted}, but the size is {size}"


def _problem(leaf: Leaf, form: ArrayForm, why: str, remedy: str) -> Problem:
    """The problem of an array, with its annotation as it is written."""
    tokens = " ".join(dim.token for dim in form.dims)
    what = f'{array_text(leaf.value)}   "{tokens}"'
    return Problem(leaf.path, tuple(leaf.shape), what, why, remedy)
