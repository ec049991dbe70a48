"""`StateRef`: a module's declaration of a piece of state."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from functree.argument_checks import shown
from functree.errors import StateError
from functree.tree.arrays import is_array
from functree.tree.axes import Axes, Names, names
from functree.tree.interfaces import HoldsState
from functree.tree.paths import Path


class _Token:
    """Identifies a piece of state: the refs at two places of a model mean the same piece if they
    have the same token.

    The refs themselves cannot be compared by identity: `jax.tree.map` and the like rebuild modules.
    """


class StateRef(eqx.Module, HoldsState):
    """A module's declaration of a piece of state. It has no value, but the path of the value.

    The values are in a `State`, which functions take and return. One ref at two places of a model
    is one piece of state.

    Args:
        init: the initial value, an array or a number.
        axes: the names of its dimensions.

    Raises:
        StateError: `init` is neither an array nor a number, or JAX has no dtype for its value; the
            number of axes is not that of its dimensions.

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
        if not isinstance(init, jax.Array | jax.ShapeDtypeStruct):
            dtype = jnp.result_type(init)
            if not holds(dtype, init):
                raise StateError(
                    f"StateRef({shown(init)}): {dtype} has no room for this value: give an array "
                    "of another dtype"
                )
        if not isinstance(init, jax.ShapeDtypeStruct):
            init = strong(jnp.asarray(init))
        self.init = init
        self.axes = Axes.of(axes)
        if self.axes and len(self.axes) != len(self.init.shape):
            raise StateError(
                f'StateRef(axes="{self.axes}") names {len(self.axes)} dimensions, '
                f"but the value has shape {tuple(self.init.shape)}"
            )
        # In a stack these stay those of one layer, while `init` gets the leading dimension of the
        # stack.
        self.shape, self.dtype = tuple(self.init.shape), self.init.dtype
        self.path, self.token = None, _Token()

    def __axis_names__(self) -> Names:
        """The axes of `init`, which the class cannot know."""
        if not self.axes:
            return Names(())
        return names(init=self.axes)

    def at(self, path: Path) -> "StateRef":
        """The ref after its value has moved to a `State`.

        It has no token any more: refs of two models that were built alike are equal, so the models
        share a trace.
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


def holds(dtype: DTypeLike, value: Any) -> bool:
    """Whether a dtype has room for a Python number or the values of a NumPy array: integers do not
    wrap, and finite numbers stay finite.

    JAX raises an error of its own for some, and wraps others (int4, 64 bits of NumPy).
    """
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        least, most = int(limits.min), int(limits.max)
    elif jnp.issubdtype(dtype, jnp.inexact):
        most = float(jnp.finfo(dtype).max)
        least = -most
    else:
        return True
    for part in (value.real, value.imag):
        numbers = np.ravel(part)
        # Neither NaN nor infinite.
        numbers = numbers[(numbers == numbers) & (abs(numbers) != math.inf)]
        if numbers.size and not least <= numbers.min() <= numbers.max() <= most:
            return False
    return True


def strong(value: Any) -> Any:
    """An array with a strong type. A step returns strong types, so with a weak one it would be
    compiled twice."""
    if not jax.typeof(value).weak_type:
        return value
    if isinstance(value, jax.ShapeDtypeStruct):
        return value.update(weak_type=False)
    return jnp.asarray(value, value.dtype)
