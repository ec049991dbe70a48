"""A function ─► the same, its arguments and its result checked against its annotations on each call or trace."""

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar, overload

import jax
from beartype import beartype
from jax.sharding import AxisType
from jaxtyping import jaxtyped

from functree.calls.signature import Signature
from functree.errors import Problem, ShardingError, count
from functree.layout.meshes import MeshView
from functree.layout.specs import of_rank, spec_text, without
from functree.layout.validation import spec_of_axes
from functree.placing.ambient import ambient_rules
from functree.placing.constrain import constrain as constrained
from functree.transforms.sizes import Sizes, annotated
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
    """Check a function's arguments and its result against its annotations: sizes by name, dtypes, types, layouts.

    What is no array is checked by beartype. Under jit all of it happens while the function is traced, and costs
    nothing in the compiled program. Where axes are Explicit and rules are ambient, the types of annotated arrays are
    compared with what the rules say; no operation is added.

    Args:
        fun: a function or a method.
        constrain: lay annotated arguments, and the result, out by their axes and the ambient rules (`ft.constrain`).

    Returns:
        A function of the same signature.

    Raises:
        AxesError: (when called) an array that is not as annotated: the argument, the axis, both sizes.
        ShardingError: (when called) under Explicit axes, an array whose type is not what the rules say; with
            `constrain`, one that cannot be laid out, or no rules where there is a mesh.
        TypeError, and what beartype and jaxtyping raise: (when called) arguments that are no arrays.

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
    if fun is None:
        return lambda fun: typed(fun, constrain=constrain)
    signature, bound = Signature.of(fun)

    def settled(record: Any, sizes: Sizes) -> Any:
        """A record whose arrays have been checked, and constrained if that was asked for."""
        leaves = read(record)
        sizes.check(record, leaves.leaves)
        named = [leaf for leaf, _ in annotated(record, leaves.leaves)]
        if constrain:
            return _constrained(record, leaves, named)
        _check_types(signature.name, named)
        return record

    # jaxtyping looks at a result as soon as there is one: our own check, with its message, has to come before.
    @jaxtyped(typechecker=beartype)
    @functools.wraps(bound.fun)
    def checked(*args: Any, **kwargs: Any) -> Any:
        return settled(signature.result(bound.fun(*args, **kwargs)), _SIZES.get())[0]

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        sizes = Sizes(signature.name)
        call = settled(signature.bind(*bound.call(args, kwargs)), sizes)
        token = _SIZES.set(sizes)
        try:
            return signature.run(checked, call)
        finally:
            _SIZES.reset(token)

    return functools.update_wrapper(wrapper, fun, updated=())


_SIZES: ContextVar[Sizes] = ContextVar("sizes of the call that is being checked")


def _constrained(record: Any, leaves: Leaves, named: Sequence[Leaf]) -> Any:
    """The record with annotated arrays laid out by their axes, or by the spec of their annotation."""
    layouts: dict[Path, Any] = {leaf.path: leaf.axes if leaf.spec is None else leaf.spec for leaf in named}
    values = [
        constrained(leaf.value, layouts[leaf.path]) if leaf.path in layouts else leaf.value for leaf in leaves.leaves
    ]
    return leaves.skeleton.fill(values)


def _check_types(name: str, named: Sequence[Leaf]) -> None:
    """Compare, under Explicit axes, the shardings in the types of arrays with those by the ambient rules."""
    rules = ambient_rules()
    if rules is None:
        return
    problems: list[Problem] = []
    for leaf in named:
        typed = jax.typeof(leaf.value).sharding
        if typed.mesh.empty or AxisType.Explicit not in typed.mesh.axis_types:
            continue
        kinds = zip(typed.mesh.axis_names, typed.mesh.axis_types, strict=True)
        hidden = {axis for axis, kind in kinds if kind != AxisType.Explicit}
        sizes = {axis: 1 if axis in hidden else size for axis, size in typed.mesh.shape.items()}
        wanted = leaf.spec
        if wanted is None:
            wanted = spec_of_axes(rules, leaf.axes, leaf.shape, MeshView(sizes, typed.mesh))
        have, want = (without(of_rank(spec, len(leaf.shape)), hidden) for spec in (typed.spec, wanted))
        if have != want:
            why = f"its type is sharded {spec_text(have)}, and the rules ask for {spec_text(want)}"
            problems.append(leaf.problem(why, "`ft.constrain` it, or pass `constrain=True` to `ft.typed`"))
    if problems:
        raise ShardingError(f"{name}: {count(len(problems), 'array')} not sharded as the rules ask", problems)
