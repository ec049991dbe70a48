"""An array and its annotation ─► its axes, or the reason why they cannot be told."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from functree.errors import Problem
from functree.tree.annotations.dimensions import ArrayForm, dtype_fits
from functree.tree.annotations.hints import UNREADABLE, Hint
from functree.tree.axes import Axes
from functree.tree.leaf import array_problem
from functree.tree.paths import Path


class LeafAxes(NamedTuple):
    """What is known of one array's axes; the attributes are those of `Leaf`."""

    axes: Axes
    annotated: bool = False
    unnamed: tuple[str, ...] = ()
    spec: PartitionSpec | None = None
    misfit: Problem | None = None


# What a hint says of a rank and a dtype is the same for each layer of a model: a memory for the reading of one tree.
Memory = dict[tuple[Any, ...], LeafAxes]


def leaf_axes(
    memory: Memory, value: Any, path: Path, hint: Hint, given: Axes | None, stack: tuple[str, ...]
) -> LeafAxes:
    """The axes of an array: those `given` from outside, else those of its annotation, behind the axes of its stacks."""
    key = (hint, value.shape, value.dtype, given, stack)
    found = memory.get(key)
    if found is None:
        found = _read(value, path, hint, given, stack)
        if found.misfit is None:  # which names the path
            memory[key] = found
    return found


def _read(value: Any, path: Path, hint: Hint, given: Axes | None, stack: tuple[str, ...]) -> LeafAxes:
    if given is not None:
        return _given(value, path, hint, given, stack)
    if hint.later:
        return _unresolved(value, path, hint, stack)
    if not hint.forms:
        return _unannotated(value, stack)
    wrong = next((form.wrong for form in hint.forms if form.wrong), None)
    if wrong is not None:
        remedy = "name the axes there, and write rules for the mesh axes that they go to"
        return _misfit(value, path, stack, f"{wrong}: `{hint.text}`", remedy)
    ndim = len(value.shape) - len(stack)
    fitting = [form for form in hint.forms if form.fits(ndim)]
    if not fitting:
        return _wrong_rank(value, path, hint.text, stack, sorted({len(form.dims) for form in hint.forms}))
    return _chosen(value, path, hint, fitting, stack)


def _given(value: Any, path: Path, hint: Hint, given: Axes, stack: tuple[str, ...]) -> LeafAxes:
    ndim = len(value.shape) - len(stack)
    if len(given) != ndim:
        return _wrong_rank(value, path, f'"{given}"', stack, [len(given)])
    # The names come from outside; a physical spec that the annotation has holds all the same.
    spec = next((form.spec for form in hint.forms if form.spec is not None and form.fits(ndim)), None)
    return LeafAxes(Axes(*stack, *given), True, _unnamed(stack, given, ["_"] * ndim), _behind(stack, spec))


def _unannotated(value: Any, stack: tuple[str, ...]) -> LeafAxes:
    axes = _unknown(value, stack)
    # A scalar has no axes to be named; in a stack it has the stack's.
    return LeafAxes(axes, annotated=bool(stack) and len(value.shape) == len(stack))


def _chosen(value: Any, path: Path, hint: Hint, fitting: Sequence[ArrayForm], stack: tuple[str, ...]) -> LeafAxes:
    """Among the alternatives of the right rank, those of the right dtype; they must agree."""
    found = _different(_by_form(form, value, stack) for form in fitting)
    if len(found) > 1:
        of_dtype = [form for form in fitting if dtype_fits(form.dtype, value.dtype)]
        found = _different(_by_form(form, value, stack) for form in of_dtype) or found
    if len(found) == 1:
        return found[0]
    options = " or ".join(f'"{one.axes}"' for one in found)
    why = f"is ambiguous: `{hint.text}` allows {options} for an array of this rank and dtype"
    remedy = "give the alternatives different ranks or dtypes, or name the axes by `Annotated[Array, ft.Axes(...)]`"
    return _misfit(value, path, stack, why, remedy)


def _different(found: Iterable[LeafAxes]) -> list[LeafAxes]:
    return list({(one.axes, one.spec): one for one in found}.values())


def _by_form(form: ArrayForm, value: Any, stack: tuple[str, ...]) -> LeafAxes:
    if form.plain is not None:
        names: Sequence[str | None] = form.plain
        dims: Sequence[Any] = form.dims
    else:
        dims = form.dims_for(len(value.shape) - len(stack))
        sizes = value.shape[len(stack) :]
        # A dimension that is broadcast, `#b` of size 1, has no name: it is never sharded.
        names = [None if dim.broadcast and size == 1 else dim.name for dim, size in zip(dims, sizes, strict=True)]
    tokens = [dim.token for dim in dims]
    return LeafAxes(Axes(*stack, *names), True, _unnamed(stack, names, tokens), _behind(stack, form.spec))


def _behind(stack: Sequence[str], spec: PartitionSpec | None) -> PartitionSpec | None:
    """The spec of an annotation, which speaks of one layer, for a leaf that has a stack's dimensions in front."""
    if spec is None or not stack:
        return spec
    return PartitionSpec(*[None] * len(stack), *spec)


def _unnamed(stack: Sequence[str], names: Sequence[str | None], tokens: Sequence[str]) -> tuple[str, ...]:
    """For each dimension without a name, what is written there."""
    if all(names):
        return ()
    written = ["" if name else token for name, token in zip(names, tokens, strict=True)]
    return (*[""] * len(stack), *written)


def _unknown(value: Any, stack: tuple[str, ...]) -> Axes:
    """The axes of an array of which only the stack's are known."""
    ndim = len(value.shape)
    return Axes(*(*stack, *[None] * ndim)[:ndim])


# What can be wrong


def _wrong_rank(value: Any, path: Path, hint: str, stack: tuple[str, ...], ranks: Sequence[int]) -> LeafAxes:
    have = len(value.shape)
    behind = f" behind the stack's `{' '.join(stack)}`" if stack else ""
    why = f"has {have} dimensions; `{hint}` has {' or '.join(map(str, ranks))}{behind}"
    remedy = "make the annotation and the array agree"
    if have > max(ranks) + len(stack):
        made = "made by `ft.stack`"
        remedy = f"hold layers that were stacked (by vmap or scan) in `ft.Stacked[...]`, {made}, or {remedy}"
    return _misfit(value, path, stack, why, remedy)


def _unresolved(value: Any, path: Path, hint: Hint, stack: tuple[str, ...]) -> LeafAxes:
    try:
        error: object = hint.settled and "it can now"
    except UNREADABLE as raised:
        error = str(raised) or type(raised).__name__
    why = f"its annotation `{hint.text}` cannot be resolved: {error}"
    remedy = "define or import the name in the module of the class, not in a function or under TYPE_CHECKING"
    return _misfit(value, path, stack, why, remedy)


def _misfit(value: Any, path: Path, stack: tuple[str, ...], why: str, remedy: str) -> LeafAxes:
    return LeafAxes(_unknown(value, stack), True, misfit=array_problem(path, value, why, remedy))
