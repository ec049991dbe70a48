"""A function ─► the same function, which checks its calls against its annotations: `ft.typed`, and
the check of sizes by itself, which `ft.shard_map` makes of global shapes."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar, overload

import jax
from jax.sharding import AxisType
from jaxtyping import jaxtyped

from functree.argument_checks import FLAG, FUNCTION, check
from functree.calls.signature import AnyFunction, Record, Signature, inspected, wrapper_updates
from functree.devices.meshes import MeshView
from functree.devices.specs import of_rank, spec_text, typed_spec, without
from functree.errors import AxesError, FunctreeTypeError, Problem, ShardingError, count
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
from functree.labels.leaves import Leaves, read
from functree.layout.layout import Layout
from functree.layout.rules import spec_of_axes
from functree.placing.ambient import ambient_rules
from functree.placing.constrain import constrain
from functree.tree.arrays import Tree, array_text
from functree.tree.paths import Path

_P = ParamSpec("_P")
_T = TypeVar("_T")


@overload
def typed(fun: Callable[_P, _T], *, constrain: bool = False) -> Callable[_P, _T]: ...
@overload
def typed(
    fun: None = None, *, constrain: bool = False
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]: ...
def typed(
    fun: Callable[_P, _T] | None = None, *, constrain: bool = False
) -> Callable[_P, _T] | Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Check a function's arguments and result against its annotations: sizes by name, dtypes,
    types, shardings.

    Values that are not arrays are checked by beartype. Under jit all checks happen while the
    function is traced, and cost nothing in the compiled program. On a mesh with Explicit axes and
    with ambient rules, the shardings in the types of annotated arrays are compared with the rules.
    No operation is added to the program.

    Args:
        fun: a function or a method.
        constrain: whether annotated arguments and the result are constrained by their axes and the
            ambient rules, as by `ft.constrain`.

    Returns:
        A function of the same signature.

    Raises:
        AxesError: (when called) an array is not as annotated; the message has the argument, the
            axis and both sizes.
        ShardingError: (when called) on Explicit axes, the type of an array does not agree with the
            rules; with `constrain`, an array cannot be laid out, or there is a mesh but no rules.
        TypeError, and the errors of beartype and jaxtyping: (when called) an argument that is not
            an array does not have its annotated type.

    Examples:
        >>> @ft.typed
        ... def up(
        ...     x: Float[Array, "batch embed"], w: Float[Array, "embed hidden"]
        ... ) -> Float[Array, "batch hidden"]:
        ...     return x @ w
        >>> up(jnp.ones((4, 6)), jnp.ones((5, 8)))
        Traceback (most recent call last):
            ...
        functree.errors.AxesError: up: 1 array not as annotated
        <BLANKLINE>
          w   f32[5, 8]   "embed hidden"
              "embed" has size 5 here, and 6 in `x`
        ...
    """
    check("typed cannot check calls", fun=(fun, FUNCTION.or_none()), constrain=(constrain, FLAG))
    if fun is None:
        return functools.partial(typed, constrain=constrain)
    from beartype import beartype  # which takes as long to import as a third of functree

    signature, partial = Signature.of(fun)
    if isinstance(fun, type):
        raise FunctreeTypeError(
            f"typed checks the calls of a function, and {fun.__name__} is a class: decorate its "
            "methods, or for its fields write `@jaxtyped(typechecker=beartype)` above the class"
        )

    def check_and_constrain(record: Record, known: Sizes | None) -> tuple[Record, Sizes]:
        """A call or a result after the checks, its arrays constrained if the option is given; and
        the sizes of its axes."""
        leaves = read(record)
        sizes = check_sizes(signature.name, record, leaves.leaves, known)
        if constrain:
            return _constrain_annotated(record, leaves), sizes
        _check_types(signature.name, record, leaves)
        return record, sizes

    def unchecked(*args: Any, **kwargs: Any) -> Tree:
        result = signature.result(partial.fun(*args, **kwargs))
        return check_and_constrain(result, _SIZES.get())[0][0]

    # jaxtyping checks the result when `checked` returns. Our own check is inside, so that its
    # message comes first.
    checked = jaxtyped(_called_as(partial.fun)(unchecked), typechecker=beartype)
    needed = _needed(partial.fun)

    @functools.wraps(fun, updated=wrapper_updates(fun))
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        all_args, all_kwargs = partial.with_bound(args, kwargs)
        call, sizes = check_and_constrain(signature.bind(all_args, all_kwargs), None)
        # `checked` has the user's signature, so the sizes of this call cannot be passed to it as an
        # argument.
        token = _SIZES.set(sizes)
        try:
            # Without the defaults, which need not have the annotated type: `mask: Float[Array, "n"]
            # = None`.
            given = signature.given(all_args, all_kwargs)
            return signature.run(checked if needed.issubset(given) else unchecked, call, given)
        finally:
            _SIZES.reset(token)

    return wrapper


def _called_as(fun: AnyFunction) -> Callable[[AnyFunction], AnyFunction]:
    """As `functools.wraps`, with the signature by which `fun` itself is called: it may be a wrapper
    too."""

    def decorate(wrapper: AnyFunction) -> AnyFunction:
        wrapped: Any = functools.wraps(fun)(wrapper)
        wrapped.__signature__ = inspected(fun)
        if not wrapped.__name__.isidentifier():
            wrapped.__name__ = "function"  # a lambda: jaxtyping writes a function with this name
        return wrapped

    return decorate


def _needed(fun: AnyFunction) -> set[str]:
    """The parameters that jaxtyping asks of a call. A wrapper may supply some of them."""
    parameters = inspected(fun).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {one.name for one in parameters if one.default is one.empty and one.kind not in variadic}


_SIZES: "ContextVar[Sizes | None]" = ContextVar("sizes of the call that is checked", default=None)


def _constrain_annotated(record: Record, leaves: Leaves) -> Tree:
    """A call or result with annotated arrays constrained by their axes, or by the spec in their
    annotation."""
    paths = {leaf.path for leaf, _ in _annotated(record, leaves.leaves)}
    values: list[Tree] = []
    for leaf in leaves.leaves:
        value = leaf.value
        if leaf.path in paths:
            value = constrain(value, leaf.axes if leaf.spec is None else leaf.spec)
        values.append(value)
    return leaves.skeleton.fill(values)


def _check_types(name: str, record: Record, leaves: Leaves) -> None:
    """On Explicit axes, compare the shardings in the types of annotated arrays with those by the
    ambient rules."""
    rules = ambient_rules()
    if rules is None or rules.rules is None:
        return
    problems: list[Problem] = []
    for leaf, _ in _annotated(record, leaves.leaves):
        why = _other_spec(leaf, rules)
        if why is not None:
            remedy = "apply `ft.constrain`, or pass `constrain=True` to `ft.typed`"
            problems.append(leaf.problem(why, remedy))
    if problems:
        number = count(len(problems), "array")
        raise ShardingError(f"{name}: {number} not sharded as the rules ask", problems)


def _other_spec(leaf: Leaf, rules: Layout) -> str | None:
    """Why the type of an array does not agree with the rules; None if it does, or has no spec."""
    have = typed_spec(leaf.value)
    if have is None:
        return None
    # A type says nothing about Auto and Manual axes: they count as one device.
    mesh = jax.typeof(leaf.value).sharding.mesh
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    hidden = {axis for axis, axis_type in types.items() if axis_type != AxisType.Explicit}
    wanted = leaf.spec
    if wanted is None:
        sizes = {**mesh.shape, **dict.fromkeys(hidden, 1)}
        wanted = spec_of_axes(rules, leaf.axes, leaf.shape, MeshView(sizes, mesh))
    want = without(of_rank(wanted, len(leaf.shape)), hidden)
    if have == want:
        return None
    return f"its type is sharded {spec_text(have)}, but the rules ask for {spec_text(want)}"


# The sizes of axes


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
    for leaf, form in _annotated(record, leaves):
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


def _annotated(record: Record, leaves: Sequence[Leaf]) -> Iterator[tuple[Leaf, ArrayForm]]:
    """The arrays with an annotation of the function itself, and the alternative of it that fits: by
    rank and dtype, else by rank alone."""
    hints = field_hints(type(record))
    for leaf in leaves:
        hint = hints.get(leaf.path[0])
        if hint is None or is_in_module(leaf):  # where the module's own annotations count
            continue
        if leaf.misfit is not None:
            yield leaf, ArrayForm(())  # none fits
            continue
        forms = _forms(hint, Path(leaf.path[1:]))
        fitting = [form for form in forms if form.fits(len(leaf.shape))]
        of_dtype = [form for form in fitting if dtype_fits(form.dtype, leaf.value.dtype)]
        if fitting:
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
    here, there = (own, known) if dim.variadic else (own[0], known[0])
    return f'"{body}" has size {here} here, and {there} in `{owner}`'


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
