"""A function ─► the same function, which checks its calls against its annotations."""

import functools
import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar, overload

import jax
from jax.sharding import AxisType
from jaxtyping import jaxtyped

from functree.argument_checks import FLAG, FUNCTION, check
from functree.calls.signature import AnyFunction, Record, Signature, inspected, wrapper_updates
from functree.devices.meshes import MeshView
from functree.devices.specs import of_rank, spec_text, typed_spec, without
from functree.errors import FunctreeTypeError, Problem, ShardingError, count
from functree.labels.leaf import Leaf
from functree.labels.leaves import Leaves, read
from functree.layout.layout import Layout
from functree.layout.rules import spec_of_axes
from functree.placing.ambient import ambient_rules
from functree.placing.constrain import constrain
from functree.transforms.sizes import Sizes, annotated, check_sizes
from functree.tree.arrays import Tree

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
        named = [leaf for leaf, _ in annotated(record, leaves.leaves)]
        if constrain:
            record = _constrain_named(leaves, named)
        else:
            _check_types(signature.name, named)
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
        before = _SIZES.get()
        try:
            _SIZES.set(sizes)
            # Without the defaults, which need not have the annotated type: `mask: Float[Array, "n"]
            # = None`.
            given = signature.given(all_args, all_kwargs)
            return signature.run(checked if needed.issubset(given) else unchecked, call, given)
        finally:
            _SIZES.set(before)

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


_SIZES: ContextVar[Sizes | None] = ContextVar("sizes of the call that is checked", default=None)


def _constrain_named(leaves: Leaves, named: Sequence[Leaf]) -> Tree:
    """The call or result with annotated arrays constrained by their axes, or by the spec in their
    annotation."""
    paths = {leaf.path for leaf in named}
    values: list[Tree] = []
    for leaf in leaves.leaves:
        value = leaf.value
        if leaf.path in paths:
            value = constrain(value, leaf.axes if leaf.spec is None else leaf.spec)
        values.append(value)
    return leaves.skeleton.fill(values)


def _check_types(name: str, named: Sequence[Leaf]) -> None:
    """On Explicit axes, compare the shardings in the types of arrays with those by the ambient
    rules."""
    rules = ambient_rules()
    if rules is None or rules.rules is None:
        return
    problems: list[Problem] = []
    for leaf in named:
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
