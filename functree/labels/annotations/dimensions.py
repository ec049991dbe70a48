"""A jaxtyping annotation, `Float[Array, "embed hidden"]` ─► its `ArrayForm`: a name or None for
each dimension."""

from functools import lru_cache
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from functree.tree.axes import Axes, OpenAxes


class Dim(NamedTuple):
    """One token of a jaxtyping dimension string.

    Attributes:
        name: the name of the axis, or None.
        token: the token as it is written.
        modifiers: those that the token has: `#` (broadcast), `*` (variadic), `_` (anonymous), `?`
            (may differ by leaf).
        body: the rest of the token: a name, a size, or an expression; for `rows=4` the size.
    """

    name: str | None
    token: str
    modifiers: str = ""
    body: str = ""

    @property
    def variadic(self) -> bool:
        """Whether it is for any number of dimensions: `*b`, `...`."""
        return "*" in self.modifiers or self.body == "..."

    @property
    def broadcast(self) -> bool:
        """Whether the size may be 1; then the dimension is never sharded: `#b`."""
        return "#" in self.modifiers

    @property
    def anonymous(self) -> bool:
        """Whether the size is not compared with that of other dimensions: `_b`, `_`, `...`."""
        return "_" in self.modifiers or self.body in ("", "...")

    @property
    def by_leaf(self) -> bool:
        """Whether it may have another size in each leaf of a tree: `?b`."""
        return "?" in self.modifiers


class ArrayForm(NamedTuple):
    """One alternative of an array's annotation: its dimensions, its dtypes, and its `PartitionSpec`
    if it has one."""

    dims: tuple[Dim, ...]
    dtype: Any = None  # jaxtyping's class (`Float`), None for any dtype
    spec: PartitionSpec | None = None
    plain: Axes | None = None  # the axes, if they are the same for every array that fits
    wrong: str = ""  # why the dimension string cannot be read

    def fits(self, ndim: int) -> bool:
        """Whether an array of this rank fits."""
        if ndim == len(self.dims):
            return True
        # A variadic token is for any number of dimensions, zero included.
        return ndim >= len(self.dims) - 1 and any(dim.variadic for dim in self.dims)

    def dims_for(self, ndim: int) -> list[Dim]:
        """One `Dim` for each dimension. A variadic token keeps its name if it is for exactly one
        dimension."""
        # A name for several dimensions would be one axis several times, which no rule could shard.
        span = ndim - len(self.dims) + 1
        out: list[Dim] = []
        for dim in self.dims:
            if not dim.variadic or span == 1:
                out.append(dim)
            else:
                out += [dim._replace(name=None)] * span
        return out


@lru_cache(maxsize=4096)
def array_form(dim_str: str, dtype: Any = None) -> ArrayForm:
    """A jaxtyping dimension string ─► its `ArrayForm`."""
    tokens = dim_str.split()
    dims = tuple(map(dim, tokens))
    plain, wrong = None, ""
    if not any(d.variadic or d.broadcast for d in dims):
        plain = Axes(*(d.name for d in dims))
    for token in tokens:
        # `embed:data` or `embed@data` would give mesh axes to an axis, as some libraries do.
        # jaxtyping reads it as an expression, so it must not pass without a name. `{...}` is an
        # expression, and may have these characters.
        if ("@" in token or ":" in token) and "{" not in token:
            wrong = f"`{token}` in a dimension string is not an axis name"
            break
    return ArrayForm(dims, dtype, plain=plain, wrong=wrong)


@lru_cache(maxsize=4096)
def form_of_axes(axes: Axes | OpenAxes) -> ArrayForm:
    """The `ArrayForm` of an array whose axes are given as `Axes`."""
    if isinstance(axes, OpenAxes):
        before, after = form_of_axes(axes.before).dims, form_of_axes(axes.after).dims
        return ArrayForm((*before, dim("..."), *after))
    # Names are not parsed: an axis may be called `_pad`, which as a token would be anonymous.
    return ArrayForm(tuple(Dim(name, name or "_", body=name or "") for name in axes), plain=axes)


def dim(token: str) -> Dim:
    """Parse one token of a dimension string: modifiers, then a name, a size or an expression."""
    modifiers, body = _modifiers(token)
    name = body
    # `rows=4` is a size with a name. Two signs (`a==b`) are an expression to jaxtyping, which gives
    # no name.
    if body.count("=") == 1:
        name, _, size = body.partition("=")
        more, body = _modifiers(size)  # the modifiers may stand on either side
        modifiers += more
    if not name.isidentifier():
        return Dim(None, token, modifiers, body)
    return Dim(name, token, modifiers, body)


def _modifiers(token: str) -> tuple[str, str]:
    """A token as its modifiers and the rest."""
    rest = token.lstrip("#*_?")
    return token[: len(token) - len(rest)], rest


def hint_text(hint: Any) -> str:
    """The source text of a jaxtyping annotation."""
    array = getattr(hint.array_type, "__name__", str(hint.array_type)).rpartition(".")[2]
    return f'{hint.dtype.__name__}[{array}, "{hint.dim_str}"]'


@lru_cache(maxsize=4096)
def dtype_fits(hint_dtype: Any, dtype: Any) -> bool:
    """Whether jaxtyping's `Float`, `Int`, ... accepts an array of this dtype."""
    # jaxtyping itself decides, by `isinstance` with an abstract array.
    return hint_dtype is None or isinstance(jax.ShapeDtypeStruct((), dtype), hint_dtype[Any, "..."])
