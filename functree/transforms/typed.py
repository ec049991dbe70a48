"""`ft.typed` checks the calls of a function against its annotations.

A function ─► the same function with checks. `ft.shard_map` uses only `check_sizes`.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar, get_type_hints, overload

import jax
from jaxtyping import jaxtyped

from functree.argument_checks import FLAG, FUNCTION, check, shown
from functree.calls.signature import NOT_GIVEN, Record, Signature, wrapper_updates
from functree.devices.meshes import MeshView, of_rank, spec_text, typed_spec, without
from functree.errors import AxesError, FunctreeTypeError, Problem, ShardingError, count
from functree.labels.annotations.hints import UNREADABLE, ArrayForm, Dim, dtype_fits
from functree.labels.leaves import Leaf, Leaves, is_in_module, read
from functree.layout.rules import spec_of_axes
from functree.placing.constrain import ambient_rules, constrain
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
    """Wrap a function to check its arguments and result against its annotations.

    The checks cover the sizes of named axes, dtypes, types and shardings. beartype checks the
    values that are not arrays, unless Python cannot resolve a quoted annotation. On a mesh with
    Explicit axes, the shardings in the types of annotated arrays are compared with the ambient
    rules. Under jit, all checks run while the function is traced, and add no operation to the
    program.

    Args:
        fun: a function or a method.
        constrain: whether to constrain annotated arguments and the result with `ft.constrain`,
            using their axes and the ambient rules.

    Returns:
        A function with the same signature.

    Raises:
        FunctreeError: if `fun` is not a function.
        FunctreeError: if `fun` is a class.
        AxesError: (when called) if an array does not match its annotation. If sizes differ, the
            message gives the argument, the axis and both sizes.
        ShardingError: (when called) if the type of an array on Explicit axes contradicts the rules.
        ShardingError: (when called) with `constrain=True`, if an array cannot be constrained.
        ShardingError: (when called) with `constrain=True`, if there is a mesh but no rules.
        FunctreeError: (when called) if a value that is not an array does not have its annotated
            type. For an annotation that beartype or jaxtyping cannot read, they raise errors of
            other classes.

    Examples:
        >>> @ft.typed
        ... def up(
        ...     x: Float[Array, "batch embed"], w: Float[Array, "embed hidden"]
        ... ) -> Float[Array, "batch hidden"]:
        ...     return x @ w
        >>> up(jnp.ones((4, 6)), jnp.ones((5, 8)))
        Traceback (most recent call last):
            ...
        functree.errors.AxesError: up: 1 array does not match its
        annotation
        <BLANKLINE>
          w   f32[5, 8]   "embed hidden"
              "embed" has size 5 here, and 6 in `x`
        ...
    """
    check("typed: invalid arguments", fun=(fun, FUNCTION.or_none()), constrain=(constrain, FLAG))
    if fun is None:
        return functools.partial(typed, constrain=constrain)
    signature, partial = Signature.of(fun)
    if isinstance(fun, type):
        raise FunctreeTypeError(
            f"typed: {fun.__name__} is a class, not a function: decorate its methods, or write "
            "`@jaxtyped(typechecker=beartype)` above the class to check its fields"
        )

    def checked(record: Record, known: Sizes) -> tuple[Record, Sizes]:
        """Check a call or a result, and return it with the sizes of its axes.

        With `constrain=True`, the annotated arrays are constrained.
        """
        leaves = read(record)
        sizes = check_sizes(signature.name, leaves.leaves, known)
        _check_types(signature.name, record)
        if constrain:
            return _constrain_annotated(leaves), sizes
        _check_shardings(signature.name, leaves)
        return record, sizes

    @functools.wraps(fun, updated=wrapper_updates(fun))
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        all_args, all_kwargs = partial.with_bound(args, kwargs)
        call = signature.bind(all_args, all_kwargs)
        # The names of axes mean the same in all annotations of a call, and in its body.
        with jaxtyped("context"):
            call, sizes = checked(call, {})
            result = signature.result(signature.run(partial.fun, call))
            return checked(result, sizes)[0][0]

    return wrapper


def _check_types(name: str, record: Record) -> None:
    """Raise FunctreeError if a value of a call or a result does not have its annotated type."""
    from beartype.door import is_bearable  # imported only here, since the import is slow

    # The call lacks the defaults, which need not have the annotated type, as in
    # `mask: Float[Array, "n"] = None`.
    hints: dict[str, Any] = {}
    with suppress(*UNREADABLE):
        hints = get_type_hints(type(record), include_extras=True)
    problems: list[Problem] = []
    for field, value in zip(record._fields, record, strict=True):
        hint = hints.get(field, object)
        if value is not NOT_GIVEN and not is_bearable(value, hint):
            why = f"does not have its annotated type `{shown(hint)}`"
            remedy = "pass a value of this type, or change the annotation"
            problems.append(Problem(Path((field,)), None, shown(value), why, remedy))
    if problems:
        number = count(len(problems), "value")
        raise FunctreeTypeError(f"{name}: {number} of a wrong type", problems)


def _constrain_annotated(leaves: Leaves) -> Tree:
    """Constrain the annotated arrays of a call or a result.

    A spec in an annotation overrides the axes.
    """
    # Keyed by identity, since a class may give two of its children one path.
    values = {id(leaf): leaf.value for leaf in leaves.leaves}
    for leaf, _ in _annotated(leaves.leaves):
        values[id(leaf)] = constrain(leaf.value, leaf.axes if leaf.spec is None else leaf.spec)
    return leaves.skeleton.fill(list(values.values()))


def _check_shardings(name: str, leaves: Leaves) -> None:
    """Raise ShardingError if the types of annotated arrays contradict the ambient rules.

    Only types on Explicit axes have shardings.
    """
    rules = ambient_rules()
    if rules is None or rules.rules is None:
        return
    problems: list[Problem] = []
    for leaf, _ in _annotated(leaves.leaves):
        have = typed_spec(leaf.value)
        if have is None:
            continue
        # Types do not record Auto and Manual axes, so these axes are treated as having one device.
        mesh = jax.typeof(leaf.value).sharding.mesh
        hidden = set(mesh.axis_names) - set(mesh.explicit_axes)
        wanted = leaf.spec
        if wanted is None:
            view = MeshView({**mesh.shape, **dict.fromkeys(hidden, 1)}, mesh)
            wanted = spec_of_axes(rules, leaf.axes, leaf.shape, view)
        want = without(of_rank(wanted, len(leaf.shape)), hidden)
        if have != want:
            why = (
                f"its type has the spec {spec_text(have)}, but the rules require {spec_text(want)}"
            )
            remedy = "apply `ft.constrain`, or pass `constrain=True` to `ft.typed`"
            problems.append(leaf.problem(why, remedy))
    if problems:
        number = count(len(problems), "array")
        raise ShardingError(f"{name}: the ambient rules require other specs of {number}", problems)


# The sizes of axes


Sizes = dict[tuple[str, bool, Path | None], tuple[tuple[int, ...], Path]]
"""The sizes of the axes in one call, each with the path of the first array with that axis.

A variadic axis has several sizes. A key contains the axis's name, and whether the axis is variadic.
If the axis may differ by leaf (`?b`), the key also contains the leaf's path within its argument.
Otherwise, this path is None.
"""

_REMEDY = "make the sizes equal, or give the axes different names"
_BUILTINS = {"__builtins__": {}, "min": min, "max": max, "abs": abs}


def check_sizes(
    name: str,
    leaves: Sequence[Leaf],
    known: Sizes | None = None,
    where: str = "",
) -> Sizes:
    """Compare the sizes of the axes of a call or a result with each other, and with known sizes.

    The axes come from the function's own annotations and, for a method, from the annotations of the
    fields of `self`. Axis names in any other module apply only within that module, since two layers
    of one class may have different sizes.

    Args:
        name: the name of the function, for messages.
        leaves: the leaves of a call or a result from `Signature`.
        known: the sizes in the call, if the leaves are the result of that call.
        where: the kind of shapes that messages mention, `"global"` or `"local"`; may be empty.

    Returns:
        The known sizes and the sizes of these leaves.

    Raises:
        AxesError: if arrays do not match their annotations. If sizes differ, the message gives the
            axis and both sizes.
    """
    sizes = {**_sizes_of_fields(leaves), **(known or {})}
    problems: list[Problem] = []
    spans: list[tuple[Leaf, ArrayForm, Dim, tuple[int, ...]]] = []
    for leaf, form in _annotated(leaves):
        if leaf.misfit is not None:
            # The misfit's own remedy is for models: it explains how to hold a stack of layers.
            remedy = "pass an array with these dimensions, or change the annotation"
            problems.append(leaf.problem(leaf.misfit[0], remedy))
            continue
        if not dtype_fits(form.dtype, leaf.value.dtype):
            wanted = form.dtype.__name__
            why = f"its dtype is {leaf.value.dtype}, but the annotation requires {wanted}"
            remedy = "convert the array, or change the annotation"
            problems.append(_problem(leaf, form, why, remedy))
        spans += [(leaf, form, dim, span) for dim, span in _spans(form, leaf.shape)]
    # Expressions such as `batch*seq` come last, since they may use names that a later array binds.
    spans.sort(key=lambda entry: not entry[2].body.isidentifier())
    for leaf, form, dim, span in spans:
        why = _difference(sizes, leaf, dim, span)
        if why is not None:
            problems.append(_problem(leaf, form, why, _REMEDY))
    if problems:
        # One array may have several problems.
        number = len({problem.path for problem in problems})
        fails = "does not match its annotation" if number == 1 else "do not match their annotations"
        shapes = f" ({where} shapes)" if where else ""
        raise AxesError(f"{name}: {count(number, 'array')} {fails}{shapes}", problems)
    return sizes


def _annotated(leaves: Sequence[Leaf]) -> Iterator[tuple[Leaf, ArrayForm]]:
    """Yield the arrays that the function itself annotates, each with its fitting alternative.

    An alternative that fits by rank and dtype takes precedence over an alternative that fits only
    by rank.
    """
    for leaf in leaves:
        if is_in_module(leaf):  # a module's own annotations name its axes
            continue
        if leaf.misfit is not None:
            yield leaf, ArrayForm(())  # no alternative fits
            continue
        fitting = [form for form in leaf.forms if form.fits(len(leaf.shape))]
        of_dtype = [form for form in fitting if dtype_fits(form.dtype, leaf.value.dtype)]
        if fitting:
            yield leaf, (of_dtype or fitting)[0]


def _spans(form: ArrayForm, shape: tuple[int, ...]) -> Iterator[tuple[Dim, tuple[int, ...]]]:
    """Yield each token of an annotation with the sizes of the dimensions that it covers.

    A variadic token covers any number of dimensions.
    """
    start = 0
    for dim in form.dims:
        length = 1
        if dim.variadic:  # at most one token is variadic
            length = len(shape) - len(form.dims) + 1
        yield dim, shape[start : start + length]
        start += length


def _sizes_of_fields(leaves: Sequence[Leaf]) -> Sizes:
    """Return the sizes of the axes in the fields of `self`, except axes with several sizes."""
    by_name: dict[str, dict[tuple[int, ...], Path]] = {}
    for leaf in leaves:
        is_field = leaf.path[0] == "self" and len(leaf.path) == 2
        if not is_field or not is_in_module(leaf) or leaf.stacked or leaf.misfit is not None:
            continue
        for name, size in zip(leaf.axes, leaf.shape, strict=True):
            if name is not None:
                by_name.setdefault(name, {}).setdefault((size,), leaf.path)
    return {
        (name, False, None): sizes.popitem() for name, sizes in by_name.items() if len(sizes) == 1
    }


def _difference(sizes: Sizes, leaf: Leaf, dim: Dim, own: tuple[int, ...]) -> str | None:
    """Return why the size of a dimension does not fit the known sizes, or None if it fits.

    If the size of the axis is not known yet, the dimension's size is added to `sizes`.
    """
    body = dim.body
    # In jaxtyping, a size of 1 always fits `#name`, since it is broadcast. `{name}` refers to
    # arguments of the function, which are unknown here.
    if dim.anonymous or "{" in body or (dim.broadcast and all(size == 1 for size in own)):
        return None
    if not body.isidentifier():
        return _other_value(sizes, dim, own[0])
    # With `*#name`, arrays that are broadcast against each other may have different ranks.
    if dim.variadic and dim.broadcast:
        return None
    key = body, dim.variadic, Path(leaf.path[1:]) if dim.by_leaf else None
    known, owner = sizes.setdefault(key, (own, leaf.path))
    if known == own:
        return None
    here, there = (own, known) if dim.variadic else (own[0], known[0])
    return f'"{body}" has size {here} here, and {there} in `{owner}`'


def _other_value(sizes: Sizes, dim: Dim, size: int) -> str | None:
    """Return why a size differs from a number or an expression, or None if they are equal."""
    single = {name: known[0] for (name, variadic, _), (known, _) in sizes.items() if not variadic}
    try:
        # jaxtyping evaluates the expression in the same way. The text is the user's own annotation,
        # not data.
        if dim.body.isdigit():  # Python cannot evaluate leading zeros
            wanted = int(dim.body)
        else:
            wanted = eval(dim.body, dict(_BUILTINS), single)
    except UNREADABLE as error:
        return f"`{dim.body}` cannot be evaluated: {error}"
    if wanted == size:
        return None
    return f'"{dim.token}" requires size {wanted}, but the size is {size}'


def _problem(leaf: Leaf, form: ArrayForm, why: str, remedy: str) -> Problem:
    """Return the problem of an array, with its annotation as written."""
    tokens = " ".join(dim.token for dim in form.dims)
    what = f'{array_text(leaf.value)}   "{tokens}"'
    return Problem(leaf.path, tuple(leaf.shape), what, why, remedy)
