"""The names of an array's dimensions: `Axes`; and `names` and `Buffer`, for the annotations of
fields."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Self, TypeGuard, TypeVar

from functree.argument_checks import shown
from functree.errors import AxesError
from functree.tree.globs import glob_pattern

_A = TypeVar("_A", bound="Axes")


class Axes(tuple[str | None, ...]):
    """The names of a leaf's dimensions, outermost first; `None` for a dimension without a name.

    A hashable tuple. JAX treats it as a leaf, so a tree of `Axes` has the structure of the model.

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
            if name is not None and not is_axis_name(name):
                raise AxesError(
                    f"{name!r} is not an axis name: names are Python identifiers, "
                    "and a dimension without one is `None` (`_` in text)"
                )
        return super().__new__(cls, names)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The axes of a text: names separated by spaces, `_` for an unnamed dimension."""
        if not isinstance(text, str):
            raise AxesError(
                f"axes are parsed from a text (`'batch embed'`), not from {shown(text)}"
            )
        return _parsed(cls, text)

    @classmethod
    def of(cls, axes: "str | Axes") -> "Axes":
        """The axes that a user wrote, as `Axes` or as text."""
        if isinstance(axes, Axes):
            return axes
        if isinstance(axes, str):
            return cls.parse(axes)
        raise AxesError(
            f"axes are written as text (`'batch embed'`) or as `ft.Axes`, not as {axes!r}"
        )

    def __str__(self) -> str:
        return " ".join(name or "_" for name in self)

    def __repr__(self) -> str:
        return f"Axes({', '.join(map(repr, self))})"

    def __getnewargs__(self) -> tuple[str | None, ...]:
        # For pickle and copy: the default would pass one tuple to `__new__`, which takes the names
        # one by one.
        return tuple(self)


# The texts in a model's code are read again each time it is traced.
@lru_cache(maxsize=4096)
def _parsed(cls: type[_A], text: str) -> _A:
    return cls(*(None if name == "_" else name for name in text.split()))


def dict_text(pairs: Iterable[tuple[str, str]]) -> str:
    """The text of a dict, from the texts of its keys and values."""
    return "{" + ", ".join(map(": ".join, pairs)) + "}"


def is_axis_name(name: object) -> TypeGuard[str]:
    """Whether a value can be the name of an axis: an identifier, but not `_`, which stands for a
    missing name."""
    return isinstance(name, str) and name.isidentifier() and name != "_"


@dataclass(frozen=True, repr=False)
class OpenAxes:
    """The axes of an array of any rank, in which `...` stands for any number of unnamed dimensions.

    Attributes:
        before: the axes before the `...`.
        after: the axes behind it.
    """

    before: Axes
    after: Axes

    @classmethod
    def parse(cls, text: str) -> Self:
        """The axes of a text such as `out_channels ...`. Raises AxesError if it has more than one
        `...`."""
        before, _, after = text.partition("...")
        return cls(Axes.parse(before), Axes.parse(after))

    def __str__(self) -> str:
        return " ".join(filter(None, (str(self.before), "...", str(self.after))))

    def __repr__(self) -> str:
        return repr(str(self))


@dataclass(frozen=True, repr=False)
class Names:
    """Axes for the leaves below a module that has no annotations of its own; made by `ft.names`.

    Immutable, hashable, and equal by value. It holds (pattern, axes) pairs. The first pattern that
    matches the path of a leaf, from the module on, gives the leaf its axes. `stack` are axes in
    front of those of every leaf below the module.
    """

    pairs: tuple[tuple[str, Axes | OpenAxes], ...]
    stack: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[tuple[str, Axes | OpenAxes]]:
        return iter(self.pairs)

    def __repr__(self) -> str:
        given = [(repr(pattern), repr(str(axes))) for pattern, axes in self.pairs]
        texts = [dict_text(given)] if given or not self.stack else []
        if self.stack:
            texts.insert(0, repr(" ".join(self.stack)))
        return f"names({', '.join(texts)})"


def names(*patterns: str | Mapping[str, str | Axes], **fields: str | Axes) -> Names:
    """Axes for the leaves below a module that does not name them itself.

    Write it in an annotation, `lin: Annotated[eqx.nn.Linear, ft.names(weight="out in",
    bias="out")]`, or as a value of a layout's `names=` mapping.

    Args:
        *patterns: `{glob: axes}`, for leaves further down; a glob is matched with the path below
            the module, and `"**"` matches all leaves. A text has axes in front of those of every
            leaf below the module: it is a stack of layers, as `eqx.filter_vmap` of a constructor
            makes it, and `ft.FSDP` never shards these axes.
        **fields: the axes of the module's own fields. In a text, `...` stands for any number of
            unnamed dimensions.

    Raises:
        AxesError: the axes cannot be read. (A field that the module does not have is an error when
            a tree is read.) Or an argument is something else.
        RuleError: a glob cannot be read.

    Examples:
        >>> ft.names(weight="hidden embed", bias="hidden")
        names({'weight': 'hidden embed', 'bias': 'hidden'})
        >>> axes = ft.Axes("heads", "embed")
        >>> ft.names({"*_proj.weight": "heads embed"}) == ft.names(
        ...     {"*_proj.weight": axes}
        ... )
        True
        >>> ft.names("layers", weight="out in")
        names('layers', {'weight': 'out in'})
    """
    stack: list[str] = []
    both: dict[Any, str | Axes] = {}
    for one in patterns:
        if isinstance(one, str):
            stack += _stack_axes(one)
        elif isinstance(one, Mapping):
            both |= one
        else:
            raise AxesError(
                "`ft.names` takes a mapping from globs to axes, or the axes of a stack as a text, "
                f"not {shown(one)}"
            )
    both |= fields
    for pattern in both:
        if not isinstance(pattern, str):
            raise AxesError(f"`ft.names` maps globs, as text, to axes; {pattern!r} is not a text")
        glob_pattern(pattern)  # raises here for an invalid glob, and not only when a tree is read
    return Names(tuple((pattern, _written(axes)) for pattern, axes in both.items()), tuple(stack))


def _stack_axes(text: str) -> list[str]:
    """The axes of a stack, each of which has a name. Raises AxesError for anything else."""
    axes = Axes.parse(text)
    if not axes or None in axes:
        raise AxesError(f"`ft.names({text!r})`: each axis of a stack has a name, such as `layers`")
    return [name for name in axes if name is not None]


def _written(axes: str | Axes) -> Axes | OpenAxes:
    """The axes that a user wrote in `ft.names`."""
    if isinstance(axes, str) and "..." in axes.split():
        return OpenAxes.parse(axes)
    return Axes.of(axes)


class BufferMark:
    """The mark that `ft.Buffer[...]` puts into an annotation."""

    def __repr__(self) -> str:
        return "Buffer"


BUFFER = BufferMark()
_T = TypeVar("_T")

Buffer = Annotated[_T, BUFFER]
"""The annotation of an array that is not trained. For a type checker it is the annotation of the
array itself.

Examples:
    >>> class Norm(eqx.Module):
    ...     scale: Float[Array, "embed"]
    ...     mean: ft.Buffer[Float[Array, "embed"]]
    >>> _, trained, rest = ft.split(
    ...     Norm(jnp.ones(2), jnp.zeros(2)), ft.is_trainable, ...
    ... )
    >>> trained.mean is None, rest.scale is None
    (True, True)
"""
