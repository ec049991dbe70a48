"""A function ─► the same function, which checks its arguments and result against its annotations on each call."""

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar, overload

import jax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import jaxtyped

from functree.calls.signature import Signature, inspected, wrapper_updates
from functree.errors import Problem, ShardingError, count
from functree.layout.meshes import MeshView
from functree.layout.specs import of_rank, spec_text, without
from functree.layout.validation import spec_of_axes
from functree.parameters import FLAG, FUNCTION, check
from functree.placing.ambient import ambient_axis_rules
from functree.placing.constrain import constrain as constrained
from functree.transforms.sizes import Sizes, annotated
from functree.tree.axes import Axes
from functree.tree.leaf import Leaf
from functree.tree.leaves import Leaves, read
from functree.tree.paths import Path

_P = ParamSpec("_P")
_T = TypeVar("_T")


@overload
def typed(fun: Callable[_P, _T], *, constrain: bool = False) -> Callable[_P, _T]: ...
@overload
def typed(fun: None = None, *, constrain: bool = False) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]: ...
def typed(fun: Any = None, *, constrain: bool = False) -> Any:
    """Check a function's arguments and result against its annotations: sizes by name, dtypes, types, shardings.

    Values that are not arrays are checked by beartype. Under jit all checks happen while the function is traced, and
    cost nothing in the compiled program. On a mesh with Explicit axes and with ambient rules, the shardings in the
    types of annotated arrays are compared with the rules. No operation is added to the program.

    Args:
        fun: a function or a method.
        constrain: whether annotated arguments and the result are constrained by their axes and the ambient rules, as
            by `ft.constrain`.

    Returns:
        A function of the same signature.

    Raises:
        AxesError: (when called) an array is not as annotated; the message has the argument, the axis and both sizes.
        ShardingError: (when called) on Explicit axes, the type of an array does not agree with the rules; with
            `constrain`, an array cannot be laid out, or there is a mesh but no rules.
        TypeError, and the errors of beartype and jaxtyping: (when called) an argument that is not an array does not
            have its annotated type.

    Examples:
        >>> @ft.typed
        ... def up(x: Float[Array, "batch embed"], w: Float[Array, "embed hidden"]) -> Float[Array, "batch hidden"]:
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
        return lambda fun: typed(fun, constrain=constrain)
    from beartype import beartype  # which takes as long to import as a third of functree

    signature, bound = Signature.of(fun)

    def check_and_constrain(record: Any, sizes: Sizes) -> Any:
        """A call or a result, after the checks; its arrays are constrained if the option is given."""
        leaves = read(record)
        sizes.check(record, leaves.leaves)
        named = [leaf for leaf, _ in annotated(record, leaves.leaves)]
        if constrain:
            return _constrained(leaves, named)
        _check_types(signature.name, named)
        return record

    # jaxtyping checks the result when `checked` returns. Our own check is inside, so that its message comes first.
    @jaxtyped(typechecker=beartype)
    @_called_as(bound.fun)
    def checked(*args: Any, **kwargs: Any) -> Any:
        return check_and_constrain(signature.result(bound.fun(*args, **kwargs)), _SIZES.get())[0]

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        sizes = Sizes(signature.name)
        whole = bound.call(args, kwargs)
        call = check_and_constrain(signature.bind(*whole), sizes)
        # `checked` has the user's signature, so the sizes of this call cannot be passed to it as an argument.
        token = _SIZES.set(sizes)
        try:
            # Without the defaults, which need not have the annotated type: `mask: Float[Array, "n"] = None`.
            return signature.run(checked, call, signature.given(*whole))
        finally:
            _SIZES.reset(token)

    return functools.update_wrapper(wrapper, fun, updated=wrapper_updates(fun))


def _called_as(fun: Callable[..., Any]) -> Callable[[Any], Any]:
    """As `functools.wraps`, with the signature by which `fun` itself is called: it may be a wrapper too."""

    def decorate(wrapper: Any) -> Any:
        wrapped: Any = functools.wraps(fun)(wrapper)
        wrapped.__signature__ = inspected(fun)
        if not wrapped.__name__.isidentifier():
            wrapped.__name__ = "function"  # a lambda: jaxtyping writes a function with this name
        return wrapped

    return decorate


_SIZES: ContextVar[Sizes] = ContextVar("sizes of the call that is being checked")


def _constrained(leaves: Leaves, named: Sequence[Leaf]) -> Any:
    """The call or result with annotated arrays constrained by their axes, or by the spec in their annotation."""
    layouts: dict[Path, Axes | PartitionSpec] = {}
    for leaf in named:
        layouts[leaf.path] = leaf.axes if leaf.spec is None else leaf.spec
    values: list[Any] = []
    for leaf in leaves.leaves:
        layout = layouts.get(leaf.path)
        values.append(leaf.value if layout is None else constrained(leaf.value, layout))
    return leaves.skeleton.fill(values)


def _check_types(name: str, named: Sequence[Leaf]) -> None:
    """On Explicit axes, compare the shardings in the types of arrays with those by the ambient rules."""
    rules = ambient_axis_rules()
    if rules is None:
        return
    problems: list[Problem] = []
    for leaf in named:
        sharding = jax.typeof(leaf.value).sharding
        mesh = sharding.mesh
        if mesh.empty or AxisType.Explicit not in mesh.axis_types:
            continue
        # A type says nothing about Auto and Manual axes: they are left out of both specs, and count as one device.
        types = zip(mesh.axis_names, mesh.axis_types, strict=True)
        hidden = {axis for axis, axis_type in types if axis_type != AxisType.Explicit}
        sizes = {axis: 1 if axis in hidden else size for axis, size in mesh.shape.items()}
        wanted = leaf.spec
        if wanted is None:
            wanted = spec_of_axes(rules, leaf.axes, leaf.shape, MeshView(sizes, mesh))
        have, want = (without(of_rank(spec, len(leaf.shape)), hidden) for spec in (sharding.spec, wanted))
        if have != want:
            why = f"its type is sharded {spec_text(have)}, but the rules ask for {spec_text(want)}"
            problems.append(leaf.problem(why, "apply `ft.constrain`, or pass `constrain=True` to `ft.typed`"))
    if problems:
        raise ShardingError(f"{name}: {count(len(problems), 'array')} not sharded as the rules ask", problems)
