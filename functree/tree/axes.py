"""The names of an array's dimensions: `Axes`, and the marks that give them to leaves without an annotation."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self, TypeVar

from functree.errors import AxesError
from functree.tree.globs import glob_pattern
from functree.values import Value


class Axes(tuple[str | None, ...]):
    """The names of a leaf's dimensions, outermost first; `None` for one without a name.

    A tuple, hashable, and a leaf in JAX's eyes, so that a tree of them has the structure of the model.

    Args:
        names: an identifier or `None` for each dimension.

    Raises:
        AxesError: a name is not an identifier.

    Examples:
        >>> ft.Axes("embed", "hidden")
        Axes('embed', 'hidden')
        >>> ft.Axes.parse("batch _ embed")
        Axes('batch', None, 'embed')
        >>> str(ft.Axes("batch", None))
        'batch _'
        >>> jax.tree.leaves({"w": ft.Axes("embed")})
        [Axes('embed')]
    """

    __slots__ = ()

    def __new__(cls, *names: str | None) -> Self:
        for name in names:
            if name is not None and not (isinstance(name, str) and name.isidentifier() and name != "_"):
                raise AxesError(
                    f"{name!r} is not an axis name: names are Python identifiers, and a dimension without one is "
                    "`None` (`_` in text)"
                )
        return super().__new__(cls, names)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The axes whose text this is: names with spaces between, `_` for an unnamed dimension."""
        return cls(*(None if name == "_" else name for name in text.split()))

    @classmethod
    def of(cls, axes: "str | Axes") -> "Axes":
        """`Axes` as they are, or read from their text."""
        if isinstance(axes, Axes):
            return axes
        if isinstance(axes, str):
            return cls.parse(axes)
        raise AxesError(f"axes are written as text (`'batch embed'`) or as `ft.Axes`, not as {axes!r}")

    def __str__(self) -> str:
        return " ".join(name or "_" for name in self)

    def __repr__(self) -> str:
        return f"Axes({', '.join(map(repr, self))})"

    def __getnewargs__(self) -> tuple[str | None, ...]:
        return tuple(self)


class Names(Value):
    """Axes for the leaves below a module that has no annotations of its own; made by `ft.names`.

    Immutable, equal and hashable by value: (pattern, axes) pairs, the first that matches a leaf's path below the
    module wins.
    """

    __slots__ = ("pairs",)
    pairs: tuple[tuple[str, Axes], ...]

    def __init__(self, pairs: tuple[tuple[str, Axes], ...]):
        self._set(pairs=pairs)

    def _parts(self) -> tuple[Any, ...]:
        return (self.pairs,)

    def __iter__(self) -> Iterator[tuple[str, Axes]]:
        return iter(self.pairs)

    def __repr__(self) -> str:
        return "names({" + ", ".join(f"{pattern!r}: {str(axes)!r}" for pattern, axes in self.pairs) + "})"


def names(patterns: Mapping[str, str | Axes] | None = None, /, **fields: str | Axes) -> Names:
    """Axes for the leaves below a module that names none itself.

    Stands in an annotation, `lin: Annotated[eqx.nn.Linear, ft.names(weight="out in", bias="out")]`, or as a value
    of a layout's `names=` mapping.

    Args:
        patterns: globs over the path below the module ─► axes, for leaves further down.
        **fields: the module's own fields ─► axes.

    Raises:
        AxesError: axes that cannot be read. A field that the module does not have is found when a tree is read.
        RuleError: a glob that cannot be read.

    Examples:
        >>> ft.names(weight="hidden embed", bias="hidden")
        names({'weight': 'hidden embed', 'bias': 'hidden'})
        >>> ft.names({"*_proj.weight": "heads embed"}) == ft.names({"*_proj.weight": ft.Axes("heads", "embed")})
        True
    """
    both = {**(patterns or {}), **fields}
    for pattern in both:
        if not isinstance(pattern, str):
            raise AxesError(f"`ft.names` maps globs, as text, to axes; {pattern!r} is none")
        glob_pattern(pattern)  # a bad one is found here
    return Names(tuple((pattern, Axes.of(axes)) for pattern, axes in both.items()))


class BufferMark:
    """What `ft.Buffer[...]` leaves in an annotation."""

    def __repr__(self) -> str:
        return "Buffer"


BUFFER = BufferMark()
_T = TypeVar("_T")

Buffer = Annotated[_T, BUFFER]
"""An array of the model that is not trained; to a type checker, the array itself.

Examples:
    >>> class Norm(eqx.Module):
    ...     scale: Float[Array, "embed"]
    ...     mean: ft.Buffer[Float[Array, "embed"]]
    >>> _, trained, rest = ft.split(Norm(jnp.ones(2), jnp.zeros(2)), ft.is_trainable, ...)
    >>> trained.mean is None, rest.scale is None
    (True, True)
"""
