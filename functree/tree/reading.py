"""An array and its annotation ─► its axes, or what keeps them from being told."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from functree.errors import Problem
from functree.tree.annotations import UNREADABLE, Hint
from functree.tree.axes import Axes
from functree.tree.dims import Form, dtype_fits
from functree.tree.leaf import array_text
from functree.tree.paths import Path


class Told(NamedTuple):
    """What is known of one array's axes."""

    axes: Axes
    annotated: bool = False
    unnamed: tuple[str, ...] = ()
    spec: Any = None
    problem: Problem | None = None


class Reading:
    """Memory for the reading of one tree: what a hint says of a rank and dtype is the same for each layer."""

    def __init__(self):
        self.known: dict[tuple[Any, ...], Told] = {}


def read_hint(reading: Reading, value: Any, path: Path, hint: Hint, given: Axes | None, stack: tuple[str, ...]) -> Told:
    """The axes of an array: those `given` from outside, else those of its annotation, behind the stacks' own."""
    key = (hint, value.shape, value.dtype, given, stack)
    told = reading.known.get(key)
    if told is None:
        told = _told(value, path, hint, given, stack)
        if told.problem is None:
            reading.known[key] = told
    return told


def _told(value: Any, path: Path, hint: Hint, given: Axes | None, stack: tuple[str, ...]) -> Told:
    ndim = len(value.shape) - len(stack)
    if given is not None:
        if len(given) == ndim:
            spec = next((form.spec for form in hint.forms if form.spec is not None and form.fits(ndim)), None)
            return Told(Axes(*stack, *given), True, _unnamed(stack, given, ["_"] * ndim), _behind(stack, spec))
        return _misfit(value, path, f'"{given}"', stack, [len(given)])
    if hint.later:
        return _unresolved(value, path, hint, stack)
    if not hint.forms:
        # A scalar has no axes to be named; in a stack it has the stack's.
        return Told(Axes(*(*stack, *[None] * ndim)[: len(value.shape)]), annotated=bool(stack) and ndim == 0)
    wrong = next((form.wrong for form in hint.forms if form.wrong), None)
    if wrong is not None:
        remedy = "name the axes there, and say in rules on which mesh axes they go"
        return _trouble(value, path, stack, f"{wrong}: `{hint.text}`", remedy)
    fitting = [form for form in hint.forms if form.fits(ndim)]
    if not fitting:
        return _misfit(value, path, hint.text, stack, sorted({len(form.dims) for form in hint.forms}))
    return _choose(value, path, hint, fitting, stack)


def _choose(value: Any, path: Path, hint: Hint, fitting: Sequence[Form], stack: tuple[str, ...]) -> Told:
    """Among the alternatives of the right rank, those of the right dtype; they must agree."""
    told = _distinct(_axes(form, value, stack) for form in fitting)
    if len(told) > 1:
        told = _distinct(_axes(f, value, stack) for f in fitting if dtype_fits(f.dtype, value.dtype)) or told
    if len(told) == 1:
        return told[0]
    options = " or ".join(f'"{t.axes}"' for t in told)
    why = f"ambiguous: `{hint.text}` allows {options} for an array of this rank and dtype"
    remedy = "give the alternatives different ranks or dtypes, or name the axes by `Annotated[Array, ft.Axes(...)]`"
    return _trouble(value, path, stack, why, remedy)


def _distinct(told: Iterable[Told]) -> list[Told]:
    return list({(t.axes, t.spec): t for t in told}.values())


def _axes(form: Form, value: Any, stack: tuple[str, ...]) -> Told:
    if form.plain is not None:
        names = tuple(form.plain)
        tokens = tuple(dim.token for dim in form.dims)
    else:
        dims = form.dims_for(len(value.shape) - len(stack))
        sizes = value.shape[len(stack) :]
        names = tuple(None if d.broadcast and n == 1 else d.name for d, n in zip(dims, sizes, strict=True))
        tokens = tuple(dim.token for dim in dims)
    return Told(Axes(*stack, *names), True, _unnamed(stack, names, tokens), _behind(stack, form.spec))


def _behind(stack: Sequence[str], spec: Any) -> Any:
    """The spec of an annotation, which speaks of one layer, for a leaf that has a stack's dimensions in front."""
    return spec if spec is None or not stack else PartitionSpec(*[None] * len(stack), *spec)


def _unnamed(stack: Sequence[str], names: Sequence[str | None], tokens: Sequence[str]) -> tuple[str, ...]:
    """For each dimension without a name, what is written there."""
    if all(names):
        return ()
    return (*("" for _ in stack), *("" if name else token for name, token in zip(names, tokens, strict=True)))


# What can be wrong


def _misfit(value: Any, path: Path, hint: str, stack: tuple[str, ...], ranks: Sequence[int]) -> Told:
    have = len(value.shape)
    behind = f" behind the stack's `{' '.join(stack)}`" if stack else ""
    why = f"has {have} dimensions; `{hint}` has {' or '.join(map(str, ranks))}{behind}"
    remedy = "make the annotation and the array agree"
    if have > max(ranks) + len(stack):
        made = "made by `ft.stack`"
        remedy = f"hold layers that were stacked (by vmap or scan) in `ft.Stacked[...]`, {made}, or {remedy}"
    return _trouble(value, path, stack, why, remedy)


def _unresolved(value: Any, path: Path, hint: Hint, stack: tuple[str, ...]) -> Told:
    try:
        error: object = hint.settled and "it can now"
    except UNREADABLE as raised:
        error = str(raised) or type(raised).__name__
    why = f"its annotation `{hint.text}` cannot be resolved: {error}"
    remedy = "define or import the name in the module of the class, not in a function or under TYPE_CHECKING"
    return _trouble(value, path, stack, why, remedy)


def _trouble(value: Any, path: Path, stack: tuple[str, ...], why: str, remedy: str) -> Told:
    unknown = Axes(*(*stack, *[None] * len(value.shape))[: len(value.shape)])
    return Told(unknown, True, (), None, Problem(path, tuple(value.shape), array_text(value), why, remedy))
