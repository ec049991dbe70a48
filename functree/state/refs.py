"""`StateRef` declares a piece of a module's state."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from functree.argument_checks import shown
from functree.errors import StateError, count
from functree.tree.arrays import is_array
from functree.tree.axes import Axes, Names, names
from functree.tree.interfaces import HoldsState
from functree.tree.paths import Path


class _Token:
    """The identity of a piece of state: refs that share a token declare the same piece.

    Refs themselves cannot be compared by identity, since `jax.tree.map` rebuilds modules.
    """


class StateRef(eqx.Module, HoldsState):
    """A declaration of a piece of state in a module.

    `ft.make_state` moves the values to a `State`, which functions take and return. If a model
    contains the same ref twice, both occurrences declare the same piece of state.

    Args:
        init: the initial value, which is an array or a number.
        axes: the names of the value's dimensions.

    Raises:
        StateError: if `init` is neither an array nor a number.
        OverflowError: by JAX, if `init` is an integer that does not fit into JAX's default dtype.
        StateError: if `axes` is given, but does not name each dimension of `init`.

    Examples:
        >>> class Counter(eqx.Module):
        ...     calls: ft.StateRef = eqx.field(
        ...         default_factory=lambda: ft.StateRef(jnp.array(0))
        ...     )
        ...
        ...     def __call__(self, x, state):
        ...         return x, state.set(self.calls, state[self.calls] + 1)
        >>> model, state = ft.make_state(Counter())
        >>> x, state = model(jnp.ones(3), state)
        >>> state
        State({'calls': Array(1, dtype=int32...)})
    """

    init: Any
    axes: Axes = eqx.field(static=True)
    path: Path | None = eqx.field(static=True)
    shape: tuple[int, ...] = eqx.field(static=True)
    dtype: Any = eqx.field(static=True)
    token: Any = eqx.field(static=True)

    def __init__(self, init: Any, axes: str | Axes = ""):
        if not is_array(init) and not isinstance(init, bool | int | float | complex):
            raise StateError(
                f"StateRef({shown(init)}): the initial value must be an array or a number"
            )
        if not isinstance(init, jax.ShapeDtypeStruct):
            init = strong(jnp.asarray(init))
        self.init = init
        self.axes = Axes.of(axes)
        if self.axes and len(self.axes) != len(self.init.shape):
            raise StateError(
                f'StateRef(axes="{self.axes}") names {count(len(self.axes), "dimension")}, '
                f"but the value has shape {tuple(self.init.shape)}: name each dimension"
            )
        # In a stack, `init` gets a leading dimension, while `shape` and `dtype` still describe one
        # layer.
        self.shape, self.dtype = tuple(self.init.shape), self.init.dtype
        self.path, self.token = None, _Token()

    def __axis_names__(self) -> Names:
        """Name the dimensions of `init`, for which the class has no annotation."""
        if not self.axes:
            return Names(())
        return names(init=self.axes)

    def at(self, path: Path) -> "StateRef":
        """Return a copy of the ref with the path of its value in a `State`.

        The copy has neither the initial value nor the token, so that equal models have equal refs
        and share a trace.
        """
        ref = object.__new__(StateRef)  # `__init__` requires a value
        for name, value in {**vars(self), "init": None, "path": path, "token": None}.items():
            object.__setattr__(ref, name, value)
        return ref

    def __repr__(self) -> str:
        where = "without a path"
        if self.path is not None:
            where = f"at {self.path}"
        return f"<StateRef {self.dtype}{list(self.shape)} {where}>"


def strong(value: Any) -> Any:
    """Return the array with a strong type.

    A step returns strong types, so a weak type in its input would make the step compile twice.
    """
    if not jax.typeof(value).weak_type:
        return value
    if isinstance(value, jax.ShapeDtypeStruct):
        return value.update(weak_type=False)
    return jnp.asarray(value, value.dtype)
