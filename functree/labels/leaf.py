"""`Leaf` describes one array of a tree for filters, layouts and messages.

`leaf_axes` reads its axes: an array and its annotation ─► its axes, or the reason why they cannot
be determined.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from functree.errors import Problem, count
from functree.labels.annotations.hints import ArrayForm, Hint, dtype_fits, form_of_axes
from functree.tree.arrays import DType, array_text
from functree.tree.axes import Axes, OpenAxes
from functree.tree.paths import Key, Path


class FollowedLeaf(NamedTuple):
    """A leaf whose decision also applies to its follower, such as a moment of a parameter.

    Attributes:
        path: the path of the followed leaf. It is None if the follower, such as an optimizer's step
            count, depends on no parameter. Such a follower is replicated.
        dims: for each dimension of the follower, the index of the matching dimension of the
            followed leaf; None for a dimension that only the follower has.
        known: whether it is known how the follower's shape depends on the shapes of parameters.
        batched: whether the follower's training state was made under `vmap`, which adds a dimension
            to each leaf.
    """

    path: Path | None
    dims: tuple[int | None, ...]
    known: bool = True
    batched: bool = False

    def has_all_of(self, ndim: int) -> bool:
        """Return whether the follower has exactly the `ndim` dimensions of the followed leaf."""
        return self.dims == tuple(range(ndim))


class Root(NamedTuple):
    """A name above a leaf that a pattern may begin with.

    Attributes:
        what: the description of the name in messages, such as "the argument `x`".
        path: the path of the leaf, beginning with this name.
    """

    what: str
    path: Path


class Leaf(NamedTuple):
    """An array of a tree, with its labels for filters and layouts.

    Attributes:
        path: the path from the root of the tree.
        value: the array, which may be traced or abstract.
        axes: the names of its dimensions.
        annotated: whether its axes are named, for example by an annotation or by `ft.names`.
        unnamed: for each dimension, its token in the annotation if the token is not a name;
            otherwise an empty string. The tuple is empty if all dimensions are named.
        spec: the `PartitionSpec` in its annotation, or None.
        misfit: the reason why its axes cannot be determined, and the remedy; None if they can.
        forms: the alternatives of its annotation that fit its rank.
        within: the classes of the nodes above it, outermost first.
        seen: the path that filters match. For a layout's filters, it begins at the root of the tree
            that the layout is for; in a training state, at the root of the model. It is None if
            there is no such path. In that case, only `...` and patterns that begin with one of
            `roots` match the leaf.
        roots: the names above the leaf that patterns may begin with.
        stacked: the number of leading dimensions that belong to stacks of layers.
        buffer: whether the array is marked as not trained.
        follows: the leaf whose decision applies to this leaf; None if layouts apply to it.
    """

    path: Path
    value: Any
    axes: Axes
    annotated: bool = False
    unnamed: tuple[str, ...] = ()
    spec: PartitionSpec | None = None
    misfit: tuple[str, str] | None = None
    forms: tuple[ArrayForm, ...] = ()
    within: tuple[type, ...] = ()
    seen: Path | None = None
    roots: tuple[Root, ...] = ()
    stacked: int = 0
    buffer: bool = False
    follows: FollowedLeaf | None = None

    def named(self, name: tuple[Key, ...]) -> Path | None:
        """Return the path of the leaf, beginning with a name above the leaf.

        Args:
            name: the name, as a path of one key.

        Returns:
            The path, or None if no pattern may begin with this name.
        """
        for root in self.roots:
            if root.path[:1] == name:
                return root.path
        return None

    @property
    def kind(self) -> Hashable:
        """The properties that decisions depend on, besides the values of `Layout.asks`."""
        return (
            self.axes,
            self.value.shape,
            self.stacked,
            self.annotated,
            self.unnamed,
            self.spec,
            self.misfit,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.value.shape

    @property
    def text(self) -> str:
        """The leaf as messages show it: `f32[512, 128]   "embed hidden"`."""
        text = array_text(self.value)
        if any(self.axes):
            text += f'   "{self.axes}"'
        return text

    def is_below(self, classes: type | tuple[type, ...]) -> bool:
        """Return whether the leaf is below an instance of a class, or of one of several classes."""
        return any(issubclass(cls, classes) for cls in self.within)

    def dimension(self, dim: int) -> str:
        """Return a dimension as messages show it: its axis, or its index if it has no name."""
        # An array whose annotation does not fit may have more dimensions than axes.
        name = self.axes[dim] if dim < len(self.axes) else None
        return f'"{name}"' if name else f"dimension {dim}"

    def problem(self, why: str, remedy: str) -> Problem:
        """Make a `Problem` about this leaf."""
        return Problem(self.path, tuple(self.shape), self.text, why, remedy)


def meeting(leaves: Iterable[Leaf]) -> list[Problem]:
    """Return one problem for each leaf whose path another leaf already has.

    Leaves share a path if a class gives two of its children the same key.
    """
    first_at: dict[Path, Leaf] = {}
    problems: list[Problem] = []
    for leaf in leaves:
        if first_at.setdefault(leaf.path, leaf) is not leaf:
            problems.append(
                leaf.problem(
                    "is the path of several arrays: a class gives two of its children the same key",
                    "give each child a different key in the class's `tree_flatten_with_keys`",
                )
            )
    return problems


# The Python modules that define the classes of plain containers.
_CONTAINERS = ("builtins", "collections")


def is_in_module(leaf: Leaf) -> bool:
    """Return whether a leaf of a call is in a module, not only in plain containers."""
    # The first class is the call itself, a named tuple.
    return any(cls.__module__ not in _CONTAINERS for cls in leaf.within[1:])


def is_bare(leaf: Leaf) -> bool:
    """Return whether a leaf is itself an argument of a call with one layout for all arguments."""
    return leaf.seen is None and leaf.follows is None


def array_problem(path: Path, value: Any, why: str, remedy: str) -> Problem:
    """Make a `Problem` about an array for which there is no `Leaf`."""
    return Problem(path, tuple(value.shape), array_text(value), why, remedy)


# Axes


class LeafAxes(NamedTuple):
    """The axes of one array: the attributes of `Leaf` from `axes` to `forms`."""

    axes: Axes
    annotated: bool = False
    unnamed: tuple[str, ...] = ()
    spec: PartitionSpec | None = None
    misfit: tuple[str, str] | None = None
    forms: tuple[ArrayForm, ...] = ()


Shape = tuple[int, ...]


def _misfit(shape: Shape, stack: tuple[str, ...], why: str, remedy: str) -> LeafAxes:
    """Return the axes of an array whose annotation does not apply."""
    return LeafAxes(_unknown(shape, stack), True, misfit=(why, remedy))


def leaf_axes(
    shape: Shape, dtype: DType, hint: Hint, given: Axes | OpenAxes | None, stack: tuple[str, ...]
) -> LeafAxes:
    """Return the axes of an array.

    The axes of its stacks come first, followed by its other axes. The other axes are `given`, or
    come from its annotation.
    """
    ndim = len(shape) - len(stack)
    fitting = [form for form in hint.forms if form.fits(ndim)]
    if given is not None:
        form = form_of_axes(given)
        if not form.fits(ndim):
            return _wrong_rank(shape, f'"{given}"', stack, [len(form.dims)])
        # Names from outside replace the annotation's names, but not its dtypes and specs.
        fitting = [form._replace(dtype=f.dtype, spec=f.spec) for f in fitting] or [form]
        return _chosen(shape, dtype, hint, fitting, stack)
    if hint.error:
        why = f"its annotation `{hint.text}` cannot be resolved: {hint.error}"
        remedy = (
            "write an annotation that Python can evaluate: define or import its names in the "
            "class's module, not in a function or under `TYPE_CHECKING`"
        )
        return _misfit(shape, stack, why, remedy)
    if not hint.forms:
        # A stack of scalars has only the axes of the stack, so all its axes are named.
        return LeafAxes(_unknown(shape, stack), bool(stack) and ndim == 0)
    for form in hint.forms:
        if form.wrong:
            remedy = "write only axis names in the annotation, and choose mesh axes with rules"
            return _misfit(shape, stack, f"{form.wrong}: `{hint.text}`", remedy)
    if not fitting:
        ranks = sorted({len(form.dims) for form in hint.forms})
        return _wrong_rank(shape, hint.text, stack, ranks)
    return _chosen(shape, dtype, hint, fitting, stack)


def _chosen(
    shape: Shape, dtype: DType, hint: Hint, fitting: Sequence[ArrayForm], stack: tuple[str, ...]
) -> LeafAxes:
    """Choose among the alternatives with the right rank, by dtype if their axes or specs differ."""
    options = _different(fitting, shape, stack)
    if len(options) > 1:
        # Dtypes are compared only here, since a single alternative names the axes of an array of
        # any dtype, such as the int8 weights of a quantized model.
        of_dtype = [form for form in fitting if dtype_fits(form.dtype, dtype)]
        options = _different(of_dtype, shape, stack) or options
    if len(options) == 1:
        return options[0]._replace(forms=tuple(fitting))
    texts = " or ".join(f'"{option.axes}"' for option in options)
    why = f"its annotation `{hint.text}` allows {texts} for an array of this rank and dtype"
    remedy = (
        "give the alternatives different ranks or dtypes, or name the axes with "
        "`Annotated[Array, ft.Axes(...)]`"
    )
    return _misfit(shape, stack, why, remedy)


def _different(forms: Sequence[ArrayForm], shape: Shape, stack: tuple[str, ...]) -> list[LeafAxes]:
    """Return the distinct axes and specs that some alternatives give to an array.

    `Float[Array, "a"] | Int[Array, "a"]` is not ambiguous.
    """
    different: dict[tuple[Axes, PartitionSpec | None], LeafAxes] = {}
    for form in forms:
        option = _by_form(form, shape, stack)
        different[option.axes, option.spec] = option
    return list(different.values())


def _by_form(form: ArrayForm, shape: Shape, stack: tuple[str, ...]) -> LeafAxes:
    """Return the axes that one alternative of an annotation gives to an array."""
    names: list[str | None] = list(stack)
    unnamed = [""] * len(stack)
    dims = form.dims_for(len(shape) - len(stack))
    for dim, size in zip(dims, shape[len(stack) :], strict=True):
        # A broadcast dimension (`#b` with size 1) cannot be sharded, so it has no name here.
        name = None if dim.broadcast and size == 1 else dim.name
        names.append(name)
        unnamed.append("" if name else dim.token)
    spec = form.spec
    if spec is not None and stack:
        # The annotation describes one layer, but the array also has the stacks' leading dimensions.
        spec = PartitionSpec(*[None] * len(stack), *spec)
    if not any(unnamed):
        unnamed = []
    return LeafAxes(Axes(*names), True, tuple(unnamed), spec)


def _unknown(shape: Shape, stack: tuple[str, ...]) -> Axes:
    """Return the axes of an array if only the axes of its stacks are known."""
    ndim = len(shape)
    # The axes are truncated, since a misfit may have fewer dimensions than its stacks.
    return Axes(*(*stack, *[None] * ndim)[:ndim])


# Problems

# The usual reason for too many dimensions is `eqx.filter_vmap` of a constructor.
STACK = (
    "if the array holds several layers (made with `vmap` or `scan`), wrap their module in "
    "`ft.Stacked` or create it with `ft.stack`, or name the axis of the stack for the module's "
    'class (`names={cls: ft.names("layers")}`)'
)


def _wrong_rank(shape: Shape, hint: str, stack: tuple[str, ...], ranks: Sequence[int]) -> LeafAxes:
    have = len(shape)
    after = ""
    if stack:
        after = f" after the axes `{' '.join(stack)}` of its stack"
    why = f"has {count(have, 'dimension')}, but `{hint}` has {' or '.join(map(str, ranks))}{after}"
    remedy = "change the annotation or the array"
    if have > max(ranks) + len(stack):
        remedy = (
            f"{STACK}; otherwise {remedy} (or the axes of its `StateRef`), name its dimensions in "
            "the layout (`names={cls: ft.names(...)}`), or lay it out with a spec (`P(...)`)"
        )
    return _misfit(shape, stack, why, remedy)
