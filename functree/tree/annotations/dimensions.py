"""A jaxtyping array hint, `Float[Array, "embed hidden"]` ─► its `ArrayForm`: a name, or none, for each dimension."""

from functools import lru_cache
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from functree.tree.axes import Axes


class Dim(NamedTuple):
    """One token of a jaxtyping dimension string."""

    name: str | None
    token: str
    variadic: bool = False
    broadcast: bool = False  # `#b`: may be 1, and is never sharded then


class ArrayForm(NamedTuple):
    """One way in which an array may stand there: its dimensions, its dtypes, and a physical spec if one is written."""

    dims: tuple[Dim, ...]
    dtype: Any = None  # jaxtyping's class (`Float`), None for any
    spec: PartitionSpec | None = None
    plain: Axes | None = None  # the axes, where they do not depend on the array
    wrong: str = ""  # why the string cannot be read

    def fits(self, ndim: int) -> bool:
        return ndim == len(self.dims) or (ndim >= len(self.dims) - 1 and any(dim.variadic for dim in self.dims))

    def dims_for(self, ndim: int) -> list[Dim]:
        """One `Dim` for each dimension. A variadic one keeps its name when it spans exactly one."""
        out: list[Dim] = []
        for dim in self.dims:
            span = ndim - len(self.dims) + 1 if dim.variadic else 1
            out += [dim if span == 1 else dim._replace(name=None)] * span
        return out


@lru_cache(maxsize=4096)
def array_form(dim_str: str, dtype: Any = None) -> ArrayForm:
    """A jaxtyping dimension string ─► its `ArrayForm`."""
    tokens = dim_str.split()
    dims = tuple(map(dim, tokens))
    fixed = not any(d.variadic or d.broadcast for d in dims)
    wrong = next((token for token in tokens if any(mark in token for mark in "@:") and "{" not in token), None)
    return ArrayForm(
        dims,
        dtype,
        plain=Axes(*(d.name for d in dims)) if fixed else None,
        wrong="" if wrong is None else f"`{wrong}` in a dimension string is no axis name",
    )


def form_of_axes(axes: Axes) -> ArrayForm:
    """The `ArrayForm` of an array whose axes are written out."""
    return ArrayForm(tuple(Dim(name, name or "_") for name in axes), plain=axes)


def dim(token: str) -> Dim:
    """One token of a dimension string: modifiers, then a name, a size or an expression."""
    modifiers, rest = _modifiers(token)
    name, equals, size = rest.partition("=")
    if equals and name.isidentifier():  # `dim=4`, in which the modifiers may stand on either side
        more, _ = _modifiers(size)
        return Dim(name, token, "*" in modifiers + more, "#" in modifiers + more)
    return Dim(rest if rest.isidentifier() else None, token, "*" in modifiers or rest == "...", "#" in modifiers)


def _modifiers(token: str) -> tuple[str, str]:
    rest = token.lstrip("#*_?")
    return token[: len(token) - len(rest)], rest


def hint_text(hint: Any) -> str:
    """A jaxtyping hint as one writes it."""
    array = getattr(hint.array_type, "__name__", str(hint.array_type)).rpartition(".")[2]
    return f'{hint.dtype.__name__}[{array}, "{hint.dim_str}"]'


@lru_cache(maxsize=4096)
def dtype_fits(hint_dtype: Any, dtype: Any) -> bool:
    """Whether jaxtyping's `Float`, `Int`, ... takes an array of this dtype."""
    return hint_dtype is None or isinstance(jax.ShapeDtypeStruct((), dtype), hint_dtype[Any, "..."])
