"""`Axes` names the dimensions of an array; `names` and `Buffer` annotate fields."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Self, TypeGuard, TypeVar

from functree.argument_checks import shown
from functree.errors import AxesError
from functree.tree.globs import glob_pattern

_A = TypeVar("_A", bound="Axes")


class Axes(tuple[str | None, ...]):
    """The names of a leaf's dimensions, outermost first; `None` for an unnamed dimension.

    `Axes` is a hashable tuple that JAX treats as a leaf. A tree of `Axes` therefore has the model's
    structure.

    Args:
        names: an identifier or `None` for each dimension.

    Raises:
        AxesError: if a name is not an identifier.

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
                    f"{name!r} is not an axis name: use a Python identifier, "
                    "or `None` for an unnamed dimension (`_` in a string)"
                )
        return super().__new__(cls, names)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a string of names separated by spaces, with `_` for an unnamed dimension.

        Raises:
            AxesError: if `text` is not a string.
            AxesError: if a name in `text` is not an identifier.
        """
        if not isinstance(text, str):
            raise AxesError(
                f"invalid axes {shown(text)}: pass a string such as `'batch embed'`, or `ft.Axes`"
            )
        return _parsed(cls, text)

    @classmethod
    def of(cls, axes: "str | Axes") -> "Axes":
        """Return the axes that a user wrote as `Axes` or as a string."""
        return axes if isinstance(axes, Axes) else cls.parse(axes)

    def __str__(self) -> str:
        return " ".join(name or "_" for name in self)

    def __repr__(self) -> str:
        return f"Axes({', '.join(map(repr, self))})"

    def __getnewargs__(self) -> tuple[str | None, ...]:
        # Pickle and copy call this method. The default would pass one tuple to `__new__`, which
        # takes each name as an argument.
        return tuple(self)


# The strings in a model's code are parsed in each trace of the model, so the results are cached.
@lru_cache(maxsize=4096)
def _parsed(cls: type[_A], text: str) -> _A:
    return cls(*(None if name == "_" else name for name in text.split()))


def dict_text(pairs: Iterable[tuple[str, str]]) -> str:
    """Format a dict from the texts of its keys and values."""
    return "{" + ", ".join(map(": ".join, pairs)) + "}"


def is_axis_name(name: object) -> TypeGuard[str]:
    """Return whether a value is an axis name: an identifier other than `_`.

    `_` stands for an unnamed dimension.
    """
    return isinstance(name, str) and name.isidentifier() and name != "_"


@dataclass(frozen=True, repr=False)
class OpenAxes:
    """The axes of an array of any rank; `...` stands for any number of unnamed dimensions.

    Attributes:
        before: the axes before the `...`.
        after: the axes after the `...`.
    """

    before: Axes
    after: Axes

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a string such as `out_channels ...`.

        Raises:
            AxesError: if the string contains several `...`.
            AxesError: if a name is not an identifier.
        """
        before, _, after = text.partition("...")
        return cls(Axes.parse(before), Axes.parse(after))

    def __str__(self) -> str:
        return " ".join(filter(None, (str(self.before), "...", str(self.after))))

    def __repr__(self) -> str:
        return repr(str(self))


@dataclass(frozen=True, repr=False)
class Names:
    """The axes for the leaves below a module without annotations, built by `ft.names`.

    The object is immutable and hashable, and compares by value. It holds (pattern, axes) pairs,
    whose patterns match paths below the module. The first pattern that matches a leaf gives the
    leaf its axes. `stack` holds the leading axes that every leaf below the module gets in addition.
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
    """Name the dimensions of the leaves below a module that does not name them itself.

    Write `ft.names` in an annotation, as in
    `lin: Annotated[eqx.nn.Linear, ft.names(weight="out in", bias="out")]`, or as a value of a
    layout's `names=` mapping. Naming a field that the module does not have raises an error when a
    tree is read.

    Args:
        *patterns: mappings `{glob: axes}` for leaves at any depth; a glob matches paths below the
            module, and `"**"` matches all leaves. A string instead of a mapping names the leading
            axes of a stack of layers, for example from `eqx.filter_vmap` of a constructor. Every
            leaf below the module gets these axes, and `ft.FSDP` never shards them.
        **fields: the axes of the module's own fields. In a string, `...` stands for any number of
            unnamed dimensions.

    Raises:
        AxesError: if axes cannot be parsed.
        AxesError: if an argument is neither a mapping nor a string.
        RuleError: if a glob cannot be parsed.

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
    for argument in patterns:
        if isinstance(argument, str):
            stack += _stack_axes(argument)
        elif isinstance(argument, Mapping):
            both |= argument
        else:
            raise AxesError(
                f"names: invalid argument {shown(argument)}: pass a mapping from globs to axes, "
                "or a string with the axes of a stack"
            )
    both |= fields
    for pattern in both:
        if not isinstance(pattern, str):
            raise AxesError(f"names: the key {pattern!r} is not a string: use globs as keys")
        glob_pattern(pattern)  # raises an error for an invalid glob
    return Names(tuple((pattern, _written(axes)) for pattern, axes in both.items()), tuple(stack))


def _stack_axes(text: str) -> list[str]:
    """Parse the axes of a stack, all of which must have names.

    Raises:
        AxesError: if there is no axis.
        AxesError: if an axis has no name.
    """
    axes = Axes.parse(text)
    if not axes or None in axes:
        raise AxesError(f"names({text!r}): name each axis of the stack, for example `layers`")
    return [name for name in axes if name is not None]


def _written(axes: str | Axes) -> Axes | OpenAxes:
    """Return the axes that a user wrote in `ft.names`."""
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
"""The annotation of an array that is not trained.

Type checkers treat it as the array's own annotation.

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
