"""An array and its annotation ─► its axes, or why they cannot be determined, or say nothing."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from functree.errors import USERS_ERRORS, Problem, count
from functree.labels.annotations.hints import (
    NOTHING,
    UNREADABLE,
    ArrayForm,
    Hint,
    dtype_fits,
    form_of_axes,
)
from functree.labels.leaf import array_problem
from functree.tree.arrays import AnyArray, Tree, is_array
from functree.tree.axes import Axes, OpenAxes
from functree.tree.paths import Path


class LeafAxes(NamedTuple):
    """The axes of one array: the attributes of `Leaf` from `axes` to `misfit`."""

    axes: Axes
    annotated: bool = False
    unnamed: tuple[str, ...] = ()
    spec: PartitionSpec | None = None
    misfit: Problem | None = None


# All layers of a model have the same annotations, shapes and dtypes. So the axes are computed once
# for each combination of these; the memory is for one walk over one tree.
Memory = dict[tuple[Any, ...], LeafAxes]


def leaf_axes(
    memory: Memory,
    value: AnyArray,
    path: Path,
    hint: Hint,
    given: Axes | OpenAxes | None,
    stack: tuple[str, ...],
) -> LeafAxes:
    """The axes of an array: those of its stacks, and then those `given` from outside or those of
    its annotation."""
    key = (hint, value.shape, value.dtype, given, stack)
    found = memory.get(key)
    if found is None:
        found = _read(value, path, hint, given, stack)
        # A misfit has the path of the leaf in it, so it is not the same for another leaf.
        if found.misfit is None:
            memory[key] = found
    return found


def state_axes(value: AnyArray, path: Path, declared: Axes) -> LeafAxes:
    """The axes of a piece of state, as its `StateRef` declares them; a misfit if the value has
    another rank."""
    have = len(value.shape)
    if have == len(declared):
        # A scalar has no axes that would need a name.
        return LeafAxes(declared, annotated=any(declared) or not declared)
    why = f"has {count(have, 'dimension')}, but its `StateRef` declares {len(declared)}"
    if any(declared):
        why += f' ("{declared}")'
    remedy = "lay it out by a spec (`P(...)`), or declare all of its dimensions"
    if have > len(declared):
        remedy = f"{STACK}; else {remedy}"
    return _misfit(value, path, (), why, remedy)


def _read(
    value: AnyArray, path: Path, hint: Hint, given: Axes | OpenAxes | None, stack: tuple[str, ...]
) -> LeafAxes:
    if given is not None:
        return _given(value, path, hint, given, stack)
    if hint.references:
        return _unresolved(value, path, hint, stack)
    if not hint.forms:
        # A stack of scalars has the axes of the stack and no others, so all of its axes are named.
        return LeafAxes(_unknown(value, stack), bool(stack) and len(value.shape) == len(stack))
    for form in hint.forms:
        if form.wrong:
            remedy = "write only the names of axes there, and choose the mesh axes by rules"
            return _misfit(value, path, stack, f"{form.wrong}: `{hint.text}`", remedy)
    fitting = hint.forms_for(len(value.shape) - len(stack))
    if not fitting:
        ranks = sorted({len(form.dims) for form in hint.forms})
        return _wrong_rank(value, path, hint.text, stack, ranks)
    return _chosen(value, path, hint, fitting, stack)


def _given(
    value: AnyArray, path: Path, hint: Hint, given: Axes | OpenAxes, stack: tuple[str, ...]
) -> LeafAxes:
    ndim, form = len(value.shape) - len(stack), form_of_axes(given)
    if not form.fits(ndim):
        return _wrong_rank(value, path, f'"{given}"', stack, [len(form.dims)])
    # Names from outside replace those of the annotation, but not a `PartitionSpec` that the
    # annotation has.
    for own in hint.forms_for(ndim):
        if own.spec is not None:
            form = form._replace(spec=own.spec)
            break
    return _by_form(form, value, stack)


def _chosen(
    value: AnyArray, path: Path, hint: Hint, fitting: Sequence[ArrayForm], stack: tuple[str, ...]
) -> LeafAxes:
    """The axes by the alternatives of the right rank; if these differ, by those that also have the
    right dtype."""
    found = _different(fitting, value, stack)
    if len(found) > 1:
        # The dtype is asked only now: an annotation with one alternative names the axes of an array
        # of any dtype, such as the int8 weights of a quantized model.
        of_dtype = [form for form in fitting if dtype_fits(form.dtype, value.dtype)]
        found = _different(of_dtype, value, stack) or found
    if len(found) == 1:
        return found[0]
    options = " or ".join(f'"{one.axes}"' for one in found)
    why = f"is ambiguous: `{hint.text}` allows {options} for an array of this rank and dtype"
    remedy = (
        "give the alternatives different ranks or dtypes, or name the axes by "
        "`Annotated[Array, ft.Axes(...)]`"
    )
    return _misfit(value, path, stack, why, remedy)


def _different(
    forms: Sequence[ArrayForm], value: AnyArray, stack: tuple[str, ...]
) -> list[LeafAxes]:
    """The axes by some alternatives, those that differ in their axes or their spec: `Float[Array,
    "a"] | Int[Array, "a"]` is not ambiguous."""
    different: dict[tuple[Axes, PartitionSpec | None], LeafAxes] = {}
    for form in forms:
        one = _by_form(form, value, stack)
        different[one.axes, one.spec] = one
    return list(different.values())


def _by_form(form: ArrayForm, value: AnyArray, stack: tuple[str, ...]) -> LeafAxes:
    """The axes of an array by one alternative of its annotation."""
    names: list[str | None] = list(stack)
    unnamed = [""] * len(stack)
    dims = form.dims_for(len(value.shape) - len(stack))
    for dim, size in zip(dims, value.shape[len(stack) :], strict=True):
        # A broadcast dimension, `#b` of size 1, cannot be sharded. So it has no name here.
        name = None if dim.broadcast and size == 1 else dim.name
        names.append(name)
        unnamed.append("" if name else dim.token)
    spec = form.spec
    if spec is not None and stack:
        # The annotation is for one layer, and the array has the dimensions of the stacks in front.
        spec = PartitionSpec(*[None] * len(stack), *spec)
    if not any(unnamed):
        unnamed = []
    return LeafAxes(Axes(*names), True, tuple(unnamed), spec)


def _unknown(value: AnyArray, stack: tuple[str, ...]) -> Axes:
    """The axes of an array of which only those of the stacks are known."""
    ndim = len(value.shape)
    # Cut off, since a misfit may have fewer dimensions than its stacks.
    return Axes(*(*stack, *[None] * ndim)[:ndim])


# What can be wrong

# The usual reason for too many dimensions is `eqx.filter_vmap` of a constructor.
STACK = (
    "if these are several layers in one array (by vmap or scan), hold them in `ft.Stacked` "
    "(`ft.stack` makes one), or name the axis of the stack, for its class, in "
    '`names={cls: ft.names("layers")}`'
)


def _wrong_rank(
    value: AnyArray, path: Path, hint: str, stack: tuple[str, ...], ranks: Sequence[int]
) -> LeafAxes:
    have = len(value.shape)
    after = ""
    if stack:
        after = f" after the axes `{' '.join(stack)}` of its stack"
    why = f"has {count(have, 'dimension')}; `{hint}` has {' or '.join(map(str, ranks))}{after}"
    remedy = "change the annotation or the array"
    if have > max(ranks) + len(stack):
        remedy = (
            f"{STACK}; else {remedy}, or name its dimensions from outside "
            "(`names={Class: ft.names(...)}`)"
        )
    return _misfit(value, path, stack, why, remedy)


def _unresolved(value: AnyArray, path: Path, hint: Hint, stack: tuple[str, ...]) -> LeafAxes:
    # Resolved once more, for the text of the error that Python raises.
    remedy = (
        "define or import the name in the module of the class, "
        "not in a function or under TYPE_CHECKING"
    )
    try:
        _ = hint.settled
        error = "the name was not defined when the tree was read, but it is now"
    except UNREADABLE as raised:
        error = str(raised) or type(raised).__name__
        if not isinstance(raised, NameError):
            remedy = "write an annotation that Python can evaluate"
    why = f"its annotation `{hint.text}` cannot be resolved: {error}"
    return _misfit(value, path, stack, why, remedy)


def _misfit(value: AnyArray, path: Path, stack: tuple[str, ...], why: str, remedy: str) -> LeafAxes:
    return LeafAxes(_unknown(value, stack), True, misfit=array_problem(path, value, why, remedy))


Unread = tuple[str, str]
"""The reason, and the remedy."""


def other_structure(hint: Hint, node: Tree) -> Unread | None:
    """Why an annotation says nothing about the arrays in a node, or about an array; None if it
    does, or is about nothing that has arrays."""
    if hint.references or _is_about(hint, node):
        return None
    if hint.typed_dict:
        return (
            f"its annotation `{hint.text}` is a TypedDict, and the annotations in it are not read",
            'write `dict[str, Float[Array, "..."]]`, a named tuple or a module in its place',
        )
    if not hint.is_about_arrays:
        return None
    if hint.elements and isinstance(node, list | tuple | dict):
        return (
            f"its annotation `{hint.text}` is for {count(len(hint.elements), 'element')}, but "
            f"there are {len(node)}",
            "annotate each element, or all alike: `tuple[X, ...]`",
        )
    have = "an array" if is_array(node) else f"a {type(node).__name__}"
    why = f"its annotation `{hint.text}` is for {_meant(hint)}, but it is {have}"
    if is_array(node):
        return why, 'write `Float[Array, "..."]` there'
    if isinstance(node, list | tuple | dict):
        inner = hint.text if hint.forms else 'Float[Array, "..."]'
        return why, f"write `PyTree[{inner}]`, which is for any structure"
    return why, f"write `Annotated[{type(node).__name__}, ft.names(...)]`"


def _meant(hint: Hint) -> str:
    """What an annotation is for, that is about arrays."""
    if hint.forms:
        return "an array"
    if hint.generics:
        origin, _ = hint.generics[0]
        return f"a {origin.__name__}"
    return "a container"


def _is_about(hint: Hint, node: Tree) -> bool:
    """Whether an annotation is for values of this structure."""
    if is_array(node):
        return bool(hint.forms)
    if hint.below is not None:
        return True
    if isinstance(node, list | tuple | dict):
        if hint.element is not None or len(node) <= len(hint.elements):
            return True
    return any(issubclass(type(node), origin) for origin, _ in hint.generics)


def without_keys(cls: type) -> Unread:
    """Why the annotations of a class say nothing about its children."""
    return (
        f"its class {cls.__name__} is registered with JAX without keys that name its fields, so "
        "it is not known which annotation belongs to which child",
        "register it with keys (`jax.tree_util.register_pytree_with_keys_class`, with "
        "`GetAttrKey` and the name of the field)",
    )


def hints_by_identity(node: Tree, fields: Mapping[str, Hint]) -> dict[int, Hint]:
    """The hints of the attributes of a node by the `id` of their values.

    An object that is the value of several fields has none, unless these have one annotation.
    """
    found: dict[int, Hint] = {}
    for name, hint in fields.items():
        try:
            value = getattr(node, name, None)
        except USERS_ERRORS:
            continue  # a property of the user's, which needs more than the arrays
        other = found.setdefault(id(value), hint)
        # Hints are compared by identity, and equal annotations have a hint each.
        if (other.text, other.forms) != (hint.text, hint.forms):
            found[id(value)] = NOTHING
    return found
