"""`given_axes` finds the axes that names from several sources give to a leaf.

A field's `ft.names`, a layout's `names=` or a module's `__axis_names__` ─► the axes of a leaf.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType

import equinox as eqx
from jax.tree_util import tree_leaves

from functree.errors import Problem
from functree.tree.arrays import Tree
from functree.tree.axes import Axes, Names, OpenAxes, names
from functree.tree.globs import glob_pattern, match_text, meant_glob
from functree.tree.nodes import walk
from functree.tree.paths import Keys, Path, tokens
from functree.tree.skeleton.kinds import LEAVES


@dataclass(eq=False)
class GivenNames:
    """Names from `ft.names` for the leaves below one node of a tree.

    Attributes:
        names: the patterns and their axes.
        depth: the length of the node's path. Patterns match the rest of a leaf's path.
        order: the position among several sources that name a leaf, the first of which decides.
        cls: the class to which a layout's `names=` gives these names; None for other sources.
        used: the patterns that have matched a leaf.
        by_leaf: whether a field's names apply to an array that no module below the field contains.
        by_module: whether a field's names apply to a module below the field.
    """

    names: Names
    depth: int
    order: tuple[int, int]
    cls: type | None = None
    used: set[str] = field(default_factory=set)
    by_leaf: bool = False
    by_module: bool = False


def names_of_field(given: Names, depth: int) -> GivenNames:
    """Return the names in a field's annotation, of which the innermost decide."""
    return GivenNames(given, depth, (0, -depth))


def invalid_names(names: object) -> str | None:
    """Return an error message, or None if `names` is a mapping `{cls: ft.names(...)}`."""
    if not isinstance(names, Mapping):
        return f"`names=` must map classes to `ft.names(...)`, but {names!r} is not a mapping"
    for cls, given in names.items():
        if not isinstance(cls, type) or not isinstance(given, Names):
            return f"`names=` must map classes to `ft.names(...)`, not {cls!r} to {given!r}"
    return None


def given_at(
    node: Tree, depth: int, pending: GivenNames | None, names: Mapping[type, Names]
) -> tuple[GivenNames, ...]:
    """Return the names that a module's field, layout and class give to the leaves below it.

    A field's names take precedence over a layout's names, which take precedence over a module's
    names. Among the classes in a layout's `names=`, the outermost wins, since its names describe
    the roles of the layers in that class. Among fields, and among modules, the innermost names win.

    Args:
        node: the module.
        depth: the length of its path.
        pending: the names in the annotation of a field above, if this is the first module below the
            field.
        names: the `names=` of the layout.
    """
    sources: list[GivenNames] = []
    if pending is not None:
        pending.by_module = True
        # This module gets its own copy, because a field such as `list[Linear]` holds several
        # modules, and the used patterns are recorded for each module.
        sources.append(names_of_field(pending.names, depth))
    if names:
        # Subclasses inherit a class's names. The nearest class in the MRO wins.
        for cls in type(node).__mro__:
            if cls in names:
                sources.append(GivenNames(names[cls], depth, (1, depth), cls))
                break
    names_of_class = _own_names(node)
    if names_of_class is not None:
        sources.append(GivenNames(names_of_class, depth, (2, -depth)))
    return tuple(sources)


def _own_names(node: Tree) -> Names | None:
    """Return the names that a module gives to its own leaves, or None.

    Any class may define `__axis_names__`, for example if its instances have different axes.

    Examples:
        >>> class Projection(eqx.Module):
        ...     weight: Array
        ...     axes: str = eqx.field(static=True)
        ...
        ...     def __axis_names__(self):
        ...         return ft.names(weight=self.axes)
        >>> ft.tree_axes(Projection(jnp.ones((2, 3)), "embed heads")).weight
        Axes('embed', 'heads')
    """
    # This runs for each module, and `isinstance` with a protocol is far slower than `hasattr`.
    return node.__axis_names__() if hasattr(type(node), "__axis_names__") else None


def given_axes(path: Path, several: Iterable[GivenNames]) -> Axes | OpenAxes | None:
    """Return the axes that names from several sources give to a leaf, or None."""
    for given in sorted(several, key=attrgetter("order")):
        text = match_text(Path(path[given.depth :]))
        for pattern, axes in given.names:
            if glob_pattern(pattern).fullmatch(text):
                given.used.add(pattern)
                return axes
    return None


def unmatched(node: Tree, path: Keys, several: Iterable[GivenNames]) -> list[Problem]:
    """Return a problem for each pattern that is given at a node but matches no leaf of the node.

    `None` counts as a leaf here.
    """
    suspects: list[str] = []
    for given in several:
        suspects += [pattern for pattern, _ in given.names if pattern not in given.used]
    if not suspects:
        return []
    # An unused pattern may still match a leaf whose axes come from other names. Or it may match a
    # node with several arrays, as in the state of some optimizers. Such arrays are laid out like
    # their parameter.
    leaves: list[Path] = []
    texts: set[str] = set()
    empty: set[str] = set()  # nodes without leaves, such as None or an `optax.MaskedNode`
    for keys, part, kind in walk(node, in_model=True):
        texts.add(match_text(Path(keys)))
        if kind in LEAVES:
            leaves.append(Path(keys))
        if not tree_leaves(part):
            empty.add(match_text(Path(keys)))
    problems = []
    for pattern in suspects:
        matches = glob_pattern(pattern).fullmatch
        if not any(map(matches, texts)) and not _leads_through(pattern, empty):
            problems.append(_unmatched(node, Path(path), pattern, leaves))
    return problems


def _leads_through(pattern: str, empty: Collection[str]) -> bool:
    """Return whether a pattern names a leaf below an empty node."""
    parts = list(tokens(pattern))
    for depth in range(len(parts) + 1):
        begin = parts[:depth]
        # A prefix that ends in `**` matches every node, so its match proves nothing.
        if begin[-1:] == ["**"]:
            continue
        if any(map(glob_pattern(".".join(begin)).fullmatch, empty)):
            return True
    return False


def _unmatched(node: Tree, path: Path, pattern: str, leaves: Collection[Path]) -> Problem:
    """Return the problem for a pattern that matches no leaf below a node."""
    cls = type(node).__name__
    hint = meant_glob(pattern, leaves)
    why = f"`ft.names` gives axes to `{pattern}`, but {cls} has no such leaf{hint}"
    named = [f"`{below}`" for below in filter(None, leaves)][:4]
    if not named:  # the node is a single array, which `ft.names` cannot name
        return Problem(path, None, cls, why, "write `Annotated[Array, ft.Axes(...)]`")
    # An empty path would be printed like the path of a bare array.
    return Problem(path or None, None, cls, why, f"name a leaf of {cls}: {', '.join(named)}")


equinox_names: Mapping[type, Names] = MappingProxyType(
    {
        eqx.nn.Linear: names(weight="out_features in_features", bias="out_features"),
        **dict.fromkeys(
            (eqx.nn.Conv, eqx.nn.ConvTranspose),
            names(weight="out_channels in_channels ...", bias="out_channels ..."),
        ),
        eqx.nn.Embedding: names(weight="num_embeddings embedding_size"),
        # The first dimension concatenates gates, so it has no name.
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
        # Without `eqx.nn.make_with_state`, the model holds the initial values of Equinox's state.
        eqx.nn.StateIndex: names({"init.**": "..."}),
        eqx.nn.State: names({"**": "..."}),
    }
)
"""Names for the leaves of all layers in `eqx.nn`, to be passed as `names=` to rules.

The names are parameters of the layers' constructors, such as `out_features` and `in_features`. A
dimension without such a parameter is unnamed. `LayerNorm` and `RMSNorm` have their own annotations,
with the axis `shape`.

`eqx.nn.State` holds the state that layers declare with `eqx.nn.StateIndex`. Its entry applies even
without `names=`. The entry leaves all dimensions unnamed, so rules replicate the state.

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
"""Names for Equinox's state, whose leaves cannot be annotated."""
