"""Names from a field's `ft.names`, a layout's `names=` or a module's `__axis_names__` ─► the axes
of a leaf."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType

import equinox as eqx
from jax.tree_util import tree_leaves

from functree.errors import Problem
from functree.labels.annotations.hints import Hint
from functree.tree.arrays import Tree
from functree.tree.axes import Axes, Names, OpenAxes, names
from functree.tree.globs import glob_pattern, match_text, meant_glob
from functree.tree.interfaces import PackedTree, own_names
from functree.tree.nodes import leaves_of
from functree.tree.paths import Keys, Path, tokens


class Giver(IntEnum):
    """The source of some names. If several sources name one leaf, the first of these decides."""

    FIELD = 0
    LAYOUT = 1
    MODULE = 2


@dataclass(eq=False)
class GivenNames:
    """`ft.names` for the leaves below one node of a tree.

    Attributes:
        names: the patterns and their axes.
        depth: the length of the path of the node; patterns are matched with the rest of a leaf's
            path.
        giver: the source of the names.
        cls: for names of a layout: the class that they are given for.
        used: the patterns that have matched a leaf.
        by_leaf: for the names of a field: whether an array that is in no module below the field
            used them.
        by_module: for the names of a field: whether a module below the field used them.
    """

    names: Names
    depth: int
    giver: Giver
    cls: type | None = None
    used: set[str] = field(default_factory=set)
    by_leaf: bool = False
    by_module: bool = False


def invalid_names(names: object) -> str | None:
    """Why a `names=` is not a `{cls: ft.names(...)}`; None if it is."""
    if not isinstance(names, Mapping):
        return f"`names=` maps classes to `ft.names(...)`; {names!r} is not a mapping"
    for cls, given in names.items():
        if not isinstance(cls, type) or not isinstance(given, Names):
            return f"`names=` maps classes to `ft.names(...)`, not {cls!r} to {given!r}"
    return None


def given_at(
    node: Tree, depth: int, pending: GivenNames | None, names: Mapping[type, Names]
) -> tuple[GivenNames, ...]:
    """The names that are given at a module, for all leaves below it.

    Args:
        node: the module.
        depth: the length of its path.
        pending: the names in the annotation of a field above, if this is the first module below the
            field.
        names: the `names=` of the layout.
    """
    found: list[GivenNames] = []
    if pending is not None:
        pending.by_module = True
        # A copy for this module: a field such as `list[Linear]` has several, and each counts its
        # own used patterns.
        found.append(GivenNames(pending.names, depth, Giver.FIELD))
    if names:
        # Names of a class are also for its subclasses; those of the nearest class count.
        for cls in type(node).__mro__:
            if cls in names:
                found.append(GivenNames(names[cls], depth, Giver.LAYOUT, cls))
                break
    own = own_names(node)
    if own is not None:
        found.append(GivenNames(own, depth, Giver.MODULE))
    return tuple(found)


def given_axes(path: Path, several: Iterable[GivenNames]) -> Axes | OpenAxes | None:
    """The axes that are given to a leaf, or None.

    Names of a field come before those of a layout, and those of a layout before those of a module.
    Of the classes in a layout's `names=` the outermost comes first, since it knows the part that a
    layer plays. Of the names of fields and of modules the innermost come first.
    """
    for given in sorted(several, key=_precedence):
        text = match_text(Path(path[given.depth :]))
        for pattern, axes in given.names:
            if glob_pattern(pattern).fullmatch(text):
                given.used.add(pattern)
                return axes
    return None


def _precedence(given: GivenNames) -> tuple[Giver, int]:
    if given.giver is Giver.LAYOUT:
        return given.giver, given.depth
    return given.giver, -given.depth


def given_by(hint: Hint, path: Path) -> Axes | OpenAxes | None:
    """The axes that the `ft.names` in an annotation give to an array at a path below the annotated
    value, or None."""
    given: Axes | OpenAxes | None = None
    for depth in range(len(path) + 1):
        names = hint.at(Path(path[:depth])).names
        if names is not None:  # the innermost names decide, even if they do not name the array
            given = given_axes(path, [GivenNames(names, depth, Giver.FIELD)])
    return given


def unmatched(node: Tree, path: Keys, several: Iterable[GivenNames]) -> list[Problem]:
    """The problems of patterns that are given at a node and match none of its leaves. A leaf may be
    None."""
    suspects: list[str] = []
    for given in several:
        suspects += [pattern for pattern, _ in given.names if pattern not in given.used]
    if not suspects:
        return []
    # A pattern that was not used may still have a leaf: other names may have named it. Or several
    # arrays may be at its path, as in the state of some optimizers: these are laid out like the
    # parameter.
    leaves = dict(_leaves_below(node))
    texts: set[str] = set()
    empty: set[str] = set()
    for below, leaf in leaves.items():
        texts.update(match_text(Path(below[:depth])) for depth in range(1, len(below) + 1))
        if _is_empty(leaf):
            empty.add(match_text(below))
    found = []
    for pattern in suspects:
        matches = glob_pattern(pattern).fullmatch
        if not any(map(matches, texts)) and not _leads_through(pattern, empty):
            found.append(_unmatched(node, Path(path), pattern, leaves))
    return found


def _leaves_below(node: Tree) -> Iterator[tuple[Path, Tree]]:
    """The leaves of a node, and nodes without any; those of a packed tree as if it were not."""
    for path, leaf in leaves_of(node, lambda one: _is_empty(one) or isinstance(one, PackedTree)):
        if not isinstance(leaf, PackedTree):
            yield path, leaf
            continue
        for below, inner in _leaves_below(leaf.tree):
            yield Path((*path, *below)), inner


def _is_empty(node: Tree) -> bool:
    """Whether a node has no leaves. It is None, or optax has put it in the place of what it does
    not update."""
    return not tree_leaves(node)


def _leads_through(pattern: str, empty: Collection[str]) -> bool:
    """Whether a pattern is for what is below one of some empty nodes."""
    parts = list(tokens(pattern))
    for depth in range(len(parts) + 1):
        begin = parts[:depth]
        # A beginning that ends in `**` matches every node, and says nothing about this one.
        if begin[-1:] == ["**"]:
            continue
        if any(map(glob_pattern(".".join(begin)).fullmatch, empty)):
            return True
    return False


def _unmatched(node: Tree, path: Path, pattern: str, leaves: Collection[Path]) -> Problem:
    """The problem of a pattern that matches none of the leaves at some paths below a node."""
    cls = type(node).__name__
    hint = meant_glob(pattern, leaves)
    why = f"`ft.names` gives axes to `{pattern}`, but {cls} has no such leaf{hint}"
    named = [f"`{below}`" for below in filter(None, leaves)][:4]
    if not named:  # the node is a single array, which `ft.names` cannot name
        return Problem(path, None, cls, why, "write `Annotated[Array, ft.Axes(...)]`")
    # An empty path would be printed as that of a tree that is a single array.
    return Problem(path or None, None, cls, why, f"name a leaf of {cls}: {', '.join(named)}")


equinox_names: Mapping[type, Names] = MappingProxyType(
    {
        eqx.nn.Linear: names(weight="out_features in_features", bias="out_features"),
        **dict.fromkeys(
            (eqx.nn.Conv, eqx.nn.ConvTranspose),
            names(weight="out_channels in_channels ...", bias="out_channels ..."),
        ),
        eqx.nn.Embedding: names(weight="num_embeddings embedding_size"),
        # The first dimension concatenates the gates, so it has no name.
        eqx.nn.GRUCell: names(
            weight_ih="_ input_size", weight_hh="_ hidden_size", bias="_", bias_n="hidden_size"
        ),
        eqx.nn.LSTMCell: names(weight_ih="_ input_size", weight_hh="_ hidden_size", bias="_"),
        eqx.nn.GroupNorm: names(weight="channels", bias="channels"),
        eqx.nn.BatchNorm: names(
            {"*_state_index.init.**": "input_size"}, weight="input_size", bias="input_size"
        ),
        eqx.nn.PReLU: names(negative_slope="..."),
        eqx.nn.WeightNorm: names(g="..."),
        # The initial values of Equinox' own state, in a model that was made without
        # `eqx.nn.make_with_state`.
        eqx.nn.StateIndex: names({"init.**": "..."}),
        eqx.nn.State: names({"**": "..."}),
    }
)
"""Names for the leaves of each layer in `eqx.nn`, for `names=` of rules. They are the names of the
constructors' parameters, such as `out_features` and `in_features`; a dimension that is none of
these is unnamed. `LayerNorm` and `RMSNorm` have annotations of their own, with the axis `shape`.

Those of `eqx.nn.State`, which holds what layers declare by `eqx.nn.StateIndex`, are read without
`names=` too: its leaves have no names, and rules leave them whole.

Examples:
    >>> rules = ft.AxisRules(
    ...     {"out_features": "model", "in_features": None},
    ...     names=ft.equinox_names,
    ... )
    >>> model = eqx.nn.MLP(8, 4, 16, 2, key=jax.random.key(0))
    >>> ft.plan(model, rules, {"model": 4})["layers.0.weight"].spec
    P('model', None)
"""

OWN_STATE: Mapping[type, Names] = MappingProxyType({eqx.nn.State: equinox_names[eqx.nn.State]})
"""Names for Equinox' own state, whose leaves nobody can annotate."""
