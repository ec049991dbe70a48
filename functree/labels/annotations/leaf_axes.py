"""`leaf_axes` reads the axes of an array from its annotation.

An array and its annotation ─► its axes, or the reason why they cannot be determined.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jax.sharding import PartitionSpec

from functree.errors import count
from functree.labels.annotations.hints import ArrayForm, Hint, dtype_fits, form_of_axes
from functree.tree.arrays import DType
from functree.tree.axes import Axes, OpenAxes


class LeafAxes(NamedTuple):
    """The axes of one array: the attributes of `Leaf` from `axes` to `forms`."""

    axes: Axes
    annotated: bool = False
    unnamed: tuple[str, ...] = ()
    spec: PartitionSpec | None = None
    misfit: tuple[str, str] | None = None
    forms: tuple[ArrayForm, ...] = ()


Shape = tuple[int, ...]


def _misfit(shape: Shape, stack: tuple[str, ...], why: str, remedy: str) -> LeafAxes:
    """Return the axes of an array whose annotation does not apply."""
    return LeafAxes(_unknown(shape, stack), True, misfit=(why, remedy))


def leaf_axes(
    shape: Shape, dtype: DType, hint: Hint, given: Axes | OpenAxes | None, stack: tuple[str, ...]
) -> LeafAxes:
    """Return the axes of an array.

    The axes of its stacks come first, followed by its other axes. The other axes are `given`, or
    come from its annotation.
    """
    ndim = len(shape) - len(stack)
    fitting = [form for form in hint.forms if form.fits(ndim)]
    if given is not None:
        form = form_of_axes(given)
        if not form.fits(ndim):
            return _wrong_rank(shape, f'"{given}"', stack, [len(form.dims)])
        # Names from outside replace the annotation's names, but not its dtypes and specs.
        fitting = [form._replace(dtype=f.dtype, spec=f.spec) for f in fitting] or [form]
        return _chosen(shape, dtype, hint, fitting, stack)
    if hint.error:
        why = f"its annotation `{hint.text}` cannot be resolved: {hint.error}"
        remedy = (
            "write an annotation that Python can evaluate: define or import its names in the "
            "class's module, not in a function or under `TYPE_CHECKING`"
        )
        return _misfit(shape, stack, why, remedy)
    if not hint.forms:
        # A stack of scalars has only the axes of the stack, so all its axes are named.
        return LeafAxes(_unknown(shape, stack), bool(stack) and ndim == 0)
    for form in hint.forms:
        if form.wrong:
            remedy = "write only axis names in the annotation, and choose mesh axes with rules"
            return _misfit(shape, stack, f"{form.wrong}: `{hint.text}`", remedy)
    if not fitting:
        ranks = sorted({len(form.dims) for form in hint.forms})
        return _wrong_rank(shape, hint.text, stack, ranks)
    return _chosen(shape, dtype, hint, fitting, stack)


def _chosen(
    shape: Shape, dtype: DType, hint: Hint, fitting: Sequence[ArrayForm], stack: tuple[str, ...]
) -> LeafAxes:
    """Choose among the alternatives with the right rank, by dtype if their axes or specs differ."""
    options = _different(fitting, shape, stack)
    if len(options) > 1:
        # Dtypes are compared only here, since a single alternative names the axes of an array of
        # any dtype, such as the int8 weights of a quantized model.
        of_dtype = [form for form in fitting if dtype_fits(form.dtype, dtype)]
        options = _different(of_dtype, shape, stack) or options
    if len(options) == 1:
        return options[0]._replace(forms=tuple(fitting))
    texts = " or ".join(f'"{option.axes}"' for option in options)
    why = f"its annotation `{hint.text}` allows {texts} for an array of this rank and dtype"
    remedy = (
        "give the alternatives different ranks or dtypes, or name the axes with "
        "`Annotated[Array, ft.Axes(...)]`"
    )
    return _misfit(shape, stack, why, remedy)


def _different(forms: Sequence[ArrayForm], shape: Shape, stack: tuple[str, ...]) -> list[LeafAxes]:
    """Return the distinct axes and specs that some alternatives give to an array.

    `Float[Array, "a"] | Int[Array, "a"]` is not ambiguous.
    """
    different: dict[tuple[Axes, PartitionSpec | None], LeafAxes] = {}
    for form in forms:
        option = _by_form(form, shape, stack)
        different[option.axes, option.spec] = option
    return list(different.values())


def _by_form(form: ArrayForm, shape: Shape, stack: tuple[str, ...]) -> LeafAxes:
    """Return the axes that one alternative of an annotation gives to an array."""
    names: list[str | None] = list(stack)
    unnamed = [""] * len(stack)
    dims = form.dims_for(len(shape) - len(stack))
    for dim, size in zip(dims, shape[len(stack) :], strict=True):
        # A broadcast dimension (`#b` with size 1) cannot be sharded, so it has no name here.
        name = None if dim.broadcast and size == 1 else dim.name
        names.append(name)
        unnamed.append("" if name else dim.token)
    spec = form.spec
    if spec is not None and stack:
        # The annotation describes one layer, but the array also has the stacks' leading dimensions.
        spec = PartitionSpec(*[None] * len(stack), *spec)
    if not any(unnamed):
        unnamed = []
    return LeafAxes(Axes(*names), True, tuple(unnamed), spec)


def _unknown(shape: Shape, stack: tuple[str, ...]) -> Axes:
    """Return the axes of an array if only the axes of its stacks are known."""
    ndim = len(shape)
    # The axes are truncated, since a misfit may have fewer dimensions than its stacks.
    return Axes(*(*stack, *[None] * ndim)[:ndim])


# Problems

# The usual reason for too many dimensions is `eqx.filter_vmap` of a constructor.
STACK = (
    "if the array holds several layers (made with `vmap` or `scan`), wrap their module in "
    "`ft.Stacked` or create it with `ft.stack`, or name the axis of the stack for the module's "
    'class (`names={cls: ft.names("layers")}`)'
)


def _wrong_rank(shape: Shape, hint: str, stack: tuple[str, ...], ranks: Sequence[int]) -> LeafAxes:
    have = len(shape)
    after = ""
    if stack:
        after = f" after the axes `{' '.join(stack)}` of its stack"
    why = f"has {count(have, 'dimension')}, but `{hint}` has {' or '.join(map(str, ranks))}{after}"
    remedy = "change the annotation or the array"
    if have > max(ranks) + len(stack):
        remedy = (
            f"{STACK}; otherwise {remedy} (or the axes of its `StateRef`), name its dimensions in "
            "the layout (`names={cls: ft.names(...)}`), or lay it out with a spec (`P(...)`)"
        )
    return _misfit(shape, stack, why, remedy)
