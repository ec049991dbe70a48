"""An array and its annotation ─► its axes, or what keeps them from being told."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from functree.errors import Problem
from functree.tree.annotations import Form, Hint, dtype_fits
from functree.tree.axes import Axes
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


def read_hint(
    reading: Reading, value: Any, path: Path, hint: Hint, given: Axes | None, stack: tuple[str, ...]
) -> Told:
    """The axes of an array: those `given` from outside, else those of its annotation, behind the stacks' own."""
    key = (id(hint), value.shape, value.dtype, given, stack)
    told = reading.known.get(key)
    if told is None:
        told = _told(value, path, hint, given, stack)
        if told.problem is None:
            reading.known[key] = told
    return told


def _told(value: Any, path: Path, hint: Hint, given: Axes | None, stack: tuple[str, ...]) -> Told:
    ndim = len(value.shape) - len(stack)
    wanted = f'"{given}"' if given is not None else hint.text
    if given is not None:
        if len(given) == ndim:
            return Told(Axes(*stack, *given), True, _unnamed(stack, given))
        return _misfit(value, path, wanted, stack, [len(given)])
    if hint.later:
        try:
            hint = hint.resolved()
        except (NameError, AttributeError, SyntaxError, TypeError) as error:
            return _unresolved(value, path, hint, stack, error)
    forms = _forms(hint)
    if not forms:
        return Told(Axes(*(*stack, *[None] * ndim)[: len(value.shape)]))
    fitting = [form for form in forms if form.fits(ndim)]
    if not fitting:
        return _misfit(value, path, wanted, stack, sorted({len(form.dims) for form in forms}))
    return _choose(value, path, hint, fitting, stack)


def _forms(hint: Hint) -> tuple[Form, ...]:
    """The hint's own, and those of the bound or constraints of type variables that nothing bound."""
    return hint.forms or (hint.below.forms if hint.below else ())


def _choose(value: Any, path: Path, hint: Hint, fitting: Sequence[Form], stack: tuple[str, ...]) -> Told:
    """Among the alternatives of the right rank, those of the right dtype; they must agree."""
    told = _distinct(_axes(form, value, stack) for form in fitting)
    if len(told) > 1:
        told = _distinct(_axes(f, value, stack) for f in fitting if dtype_fits(f.dtype, value.dtype)) or told
    if len(told) == 1:
        return told[0]
    options = " or ".join(f'"{t.axes}"' for t in told)
    why = f"ambiguous: `{hint.text}` allows {options} for an array of this rank and dtype"
    return _trouble(value, path, stack, why, "give the alternatives different ranks or dtypes, or name the axes by `Annotated[Array, ft.Axes(...)]`")


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
    unnamed = () if all(names) else (*("" for _ in stack), *("" if n else t for n, t in zip(names, tokens, strict=True)))
    return Told(Axes(*stack, *names), True, unnamed, form.spec)


def _unnamed(stack: Sequence[str], given: Axes) -> tuple[str, ...]:
    return () if all(given) else (*("" for _ in stack), *("" if name else "_" for name in given))


# What can be wrong


def _misfit(value: Any, path: Path, hint: str, stack: tuple[str, ...], ranks: Sequence[int]) -> Told:
    have = len(value.shape)
    behind = f" behind the stack's `{' '.join(stack)}`" if stack else ""
    why = f"has {have} dimensions; `{hint}` has {' or '.join(map(str, ranks))}{behind}"
    remedy = "make the annotation and the array agree"
    if have > max(ranks) + len(stack):
        remedy = "hold layers that were stacked (by vmap or scan) in `ft.Stacked[...]`, made by `ft.stack`, or " + remedy
    return _trouble(value, path, stack, why, remedy)


def _unresolved(value: Any, path: Path, hint: Hint, stack: tuple[str, ...], error: Exception) -> Told:
    text = hint.text or hint.later[0].text
    why = f"its annotation `{text}` cannot be resolved: {error}"
    return _trouble(value, path, stack, why, "define or import the name in the module of the class, not in a function or under TYPE_CHECKING")


def _trouble(value: Any, path: Path, stack: tuple[str, ...], why: str, remedy: str) -> Told:
    unknown = Axes(*(*stack, *[None] * len(value.shape))[: len(value.shape)])
    return Told(unknown, True, (), None, Problem(path, tuple(value.shape), array_text(value), why, remedy))


