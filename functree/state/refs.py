"""A piece of state that a module declares: `StateRef`."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from functree.errors import StateError
from functree.tree.arrays import is_array
from functree.tree.axes import Axes, Names, names
from functree.tree.interfaces import HoldsState
from functree.tree.paths import Path


class _Token:
    """What makes two places of a model one piece of state: they hold refs with one token."""


class StateRef(eqx.Module, HoldsState):
    """A piece of state that a module declares: it holds no value, but knows where the value is.

    The value lies in a `State`, which is handed in and out. One ref at two places of a model is one piece of state.

    Args:
        init: the value to begin with, an array or a number.
        axes: the names of its dimensions.

    Raises:
        StateError: `init` is no array; the axes are not as many as its dimensions.

    Examples:
        >>> class Counter(eqx.Module):
        ...     calls: ft.StateRef = eqx.field(default_factory=lambda: ft.StateRef(jnp.array(0)))
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
            raise StateError(f"StateRef({init!r}): the value to begin with is an array or a number")
        self.init = init if isinstance(init, jax.ShapeDtypeStruct) else strong(jnp.asarray(init))
        self.axes = Axes.of(axes)
        if self.axes and len(self.axes) != len(self.init.shape):
            raise StateError(
                f'StateRef(axes="{self.axes}") names {len(self.axes)} dimensions, and the value has shape '
                f"{tuple(self.init.shape)}"
            )
        # Of one layer, where it comes to lie in a stack: `init` has the stack's dimension in front then.
        self.shape, self.dtype = tuple(self.init.shape), self.init.dtype
        self.path, self.token = None, _Token()

    def __axis_names__(self) -> Names:
        """The axes of `init`, which the class cannot know."""
        return names(init=self.axes) if self.axes else Names(())

    def at(self, path: Path) -> "StateRef":
        """The ref when its value lies in a `State`: equal by value to that of a model built alike."""
        made = object.__new__(StateRef)
        told = {"init": None, "axes": self.axes, "path": path, "shape": self.shape, "dtype": self.dtype, "token": None}
        for name, value in told.items():
            object.__setattr__(made, name, value)
        return made

    def __repr__(self) -> str:
        where = f"at {self.path}" if self.path is not None else "not made yet"
        return f"<StateRef {self.dtype}{list(self.shape)} {where}>"


def strong(value: jax.Array) -> jax.Array:
    """A value whose dtype is not weak: a step that gave it back otherwise would compile a second time."""
    return jnp.asarray(value, value.dtype) if jax.typeof(value).weak_type else value
