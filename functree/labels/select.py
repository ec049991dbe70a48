"""A tree and a selection of its parts ─► the tree with these parts changed."""

from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from types import UnionType
from typing import Any, Generic, TypeVar, get_args, get_origin

from functree.errors import (
    FunctreeError,
    FunctreeTypeError,
    FunctreeValueError,
    Problem,
    count,
    listed,
)
from functree.labels.filters.filter import Filter, as_filter, bare_class
from functree.labels.leaves import read
from functree.labels.selected_parts import accessed_paths, path_below
from functree.parameters import EXTENT, FUNCTION, ITERABLE, check, check_callback
from functree.tree.arrays import value_text
from functree.tree.nodes import (
    BELOW,
    blanked,
    children,
    leaves_of,
    mapped,
    nodes_at,
    outermost,
    rebuilt,
)
from functree.tree.paths import Path

T = TypeVar("T")


class Selection(Generic[T]):
    """Selected parts of a tree, none of them inside another; made by `ft.select`.

    A selection is immutable, and each change returns a new tree. To change nothing at all, because
    nothing is selected, is an error. Iteration yields the parts, and `len` is their number.

    Examples:
        >>> mlp = eqx.nn.MLP(2, 2, 8, 2, key=jax.random.key(0))
        >>> biases = ft.select(mlp).where("**.bias")
        >>> biases
        <3 parts of MLP: layers.0.bias, layers.1.bias, layers.2.bias>
        >>> float(biases.apply(jnp.zeros_like).layers[0].bias.sum())
        0.0
    """

    __slots__ = ("_asked", "_paths", "_tree")

    def __init__(self, tree: T, paths: Sequence[Path], asked: str = ""):
        self._tree: T = tree
        self._paths: tuple[Path, ...] = tuple(paths)
        self._asked: str = asked  # what was asked for, for messages: `.under(Linear)`

    # Choosing

    def at(self, where: Any) -> "Selection[T]":
        """Select the part at a path, or the parts that a function returns.

        Args:
            where: a path below each selected part (an `ft.Path`, or its text: `"blocks.0.attn"`);
                or a function from a selected part to one of its parts, or to a tuple or list of
                them: `lambda model: model.blocks[0]`.

        Raises:
            FunctreeError: there is nothing at the path; the function returns something that is not
                a part, or a part and another one that is inside of it.
            RuleError: `where` is neither a path nor a function, or its text is not a path.
        """
        if isinstance(where, str | Path):
            below = Path.parse(where) if isinstance(where, str) else where
            return self._chosen(
                [path_below(path, part, below) for path, part in self._parts()],
                f".at({str(below)!r})",
            )
        found: list[Path] = []
        for path, part in self._parts():
            found += [Path((*path, *key)) for key in accessed_paths(part, where)]
        return self._chosen(found, f".at({_name(where)})")

    def under(self, cls: Any) -> "Selection[T]":
        """Select the outermost instances of a class, or of several classes (`Linear | Conv`).

        Raises:
            FunctreeError: the argument is not a class.
        """
        # `isinstance` itself knows best what it accepts: unions, tuples, and abstract classes too.
        try:
            isinstance(None, cls)
        except TypeError:
            bare = bare_class(get_args(cls) if isinstance(cls, UnionType) else (cls,))
            raise FunctreeTypeError(
                f"under takes a class, or several joined by `|`, not {cls!r}{bare}"
            ) from None
        return self._chosen(
            self._outermost(lambda path, node: isinstance(node, cls)), f".under({_name(cls)})"
        )

    def where(self, what: Any) -> "Selection[T]":
        """Select the arrays that a filter matches, or the outermost parts for which a function is
        true.

        Args:
            what: any filter (`"**.bias"`, `ft.has_axis("embed")`, a class, for the arrays below its
                instances); or a function `(path, node) -> bool`, which is called with nodes and
                leaves, and with `None`. Paths begin at the selected part.

        Raises:
            RuleError: the argument is not a filter.
        """
        # A function as a filter sees only arrays, but here it sees every node. `get_origin` is for
        # `Linear[int]` and `typing.Union[A, B]`, which are callable.
        if (
            what is ...
            or isinstance(what, str | Filter | type)
            or get_origin(what)
            or not callable(what)
        ):
            return self._chosen(self._matched(as_filter(what)), f".where({as_filter(what)!r})")
        check_callback(what, "a filter")
        return self._chosen(self._outermost(what), f".where({_name(what)})")

    # Looking

    def get(self) -> Any:
        """The only selected part.

        Raises:
            FunctreeError: the number of parts is not one.
        """
        return next(iter(self.expect(1)))

    def count(self) -> int:
        """The number of parts."""
        return len(self._paths)

    def paths(self) -> tuple[Path, ...]:
        """The paths of the parts, in the order of the tree; after `at` with a function, in the
        order of its result."""
        return self._paths

    def expect(self, number: int) -> "Selection[T]":
        """The same selection, if it has this number of parts.

        Raises:
            FunctreeError: the number of parts is different. The error lists them.
        """
        check("a selection has a number of parts", number=(number, EXTENT))
        if len(self._paths) != number:
            raise self._refuse(
                f"expected {count(number, 'part')}, found {len(self._paths)}",
                "select more, or fewer",
            )
        return self

    def partition(self) -> tuple[T, T]:
        """`(selected, rest)`: two trees with the structure of the tree. Each leaf is in one, and
        None in the other."""
        chosen = set(self._paths)

        def selected(path: Path, node: Any) -> Any:
            if path in chosen:
                return node
            return None if children(node) is None else BELOW

        def rest(path: Path, node: Any) -> Any:
            return blanked(node) if path in chosen else BELOW

        return mapped(self._tree, selected), mapped(self._tree, rest)

    # Changing

    def set(self, value: Any) -> T:
        """The tree with one value in the place of every selected part."""
        return self._changed(lambda path, node: value)

    def set_each(self, values: Sequence[Any]) -> T:
        """The tree with one value for each selected part, in the order of `paths`.

        Raises:
            FunctreeError: the number of values is not the number of parts.
        """
        check("set_each sets nothing", values=(values, ITERABLE))
        values = list(values)
        if len(values) != len(self._paths):
            headline = (
                f"set_each has {count(len(values), 'value')} for {count(len(self._paths), 'part')}"
            )
            raise self._refuse(headline, "give one value for each part")
        by_path = dict(zip(self._paths, values, strict=True))
        return self._changed(lambda path, node: by_path[path])

    def apply(self, fn: Callable[[Any], Any]) -> T:
        """The tree with the result of a function in the place of each selected part."""
        check("apply changes nothing", fn=(fn, FUNCTION))
        return self._changed(lambda path, node: fn(node))

    def insert_after(self, value: Any) -> T:
        """The tree with a value after each selected element of a list or tuple.

        Raises:
            FunctreeError: a part is not an element of a list or tuple.
        """
        return self._inserted(lambda node: (node, value), insert=True)

    def insert_before(self, value: Any) -> T:
        """The tree with a value before each selected element of a list or tuple.

        Raises:
            FunctreeError: a part is not an element of a list or tuple.
        """
        return self._inserted(lambda node: (value, node), insert=True)

    def remove(self) -> T:
        """The tree without the selected elements of lists, tuples and dicts.

        Raises:
            FunctreeError: a part is not an element of a list, tuple or dict.
        """
        return self._inserted(lambda node: (), insert=False)

    def __iter__(self) -> Iterator[Any]:
        return iter(nodes_at(self._tree, self._paths))

    def __len__(self) -> int:
        return len(self._paths)

    def __repr__(self) -> str:
        text = f"{count(len(self._paths), 'part')} of {type(self._tree).__name__}"
        if self._paths:
            text += ": " + listed([str(path) or "the whole" for path in self._paths])
        return f"<{text}>"

    # How the parts are found and changed

    def _parts(self) -> Iterator[tuple[Path, Any]]:
        """The paths and the selected parts."""
        return zip(self._paths, self, strict=True)

    def _chosen(self, paths: Sequence[Path], asked: str) -> "Selection[T]":
        return Selection(self._tree, paths, self._asked + asked)

    def _outermost(self, fits: Callable[[Path, Any], Any]) -> list[Path]:
        """The paths of the nodes for which a function is true, and of nothing below such a node."""
        return [
            Path((*start, *path))
            for start, part in self._parts()
            for path, _ in outermost(part, fits)
        ]

    def _matched(self, chosen: Filter) -> list[Path]:
        """The paths of the arrays that a filter matches."""
        whole = read(self._tree)
        # The paths of nodes, found by index. The leaves of a state and of a packed tree have the
        # path in the model (several keys) instead of the path of their node (one key).
        places = [path for path, _ in leaves_of(self._tree)]
        found: dict[Path, list[Path]] = {start: [] for start in self._paths}
        for index, leaf in zip(whole.skeleton.indices, whole.leaves, strict=True):
            place = places[index]
            # The selected part that the leaf is in, if it is in one: no part is inside another.
            start = next(
                (place[:depth] for depth in range(len(place) + 1) if place[:depth] in found), None
            )
            # Patterns are matched with the path from the selected part on.
            if start is not None and chosen(
                leaf._replace(aliases=(Path(leaf.path[len(start) :]),))
            ):
                found[Path(start)].append(place)
        return [place for places in found.values() for place in places]

    def _changed(self, change: Callable[[Path, Any], Any]) -> T:
        """The tree with another value for each selected part. All nodes that are not above a part
        stay the same."""
        self._check_some()
        chosen = set(self._paths)
        above = {path[:i] for path in self._paths for i in range(len(path))}

        def changed(path: Path, node: Any) -> Any:
            if path in chosen:
                return change(path, node)
            return BELOW if path in above else node

        return mapped(self._tree, changed)

    def _inserted(self, around: Callable[[Any], tuple[Any, ...]], *, insert: bool) -> T:
        """The tree in which each selected element is replaced by several elements (`insert`), or by
        none."""
        self._check_some()
        self._check_elements(insert)
        chosen = set(self._paths)
        above = {path[:i] for path in self._paths for i in range(len(path))}
        return _with_elements(self._tree, Path(), chosen, above, around)

    def _check_some(self) -> None:
        """Raise FunctreeError if nothing is selected: the tree would silently stay as it is."""
        if not self._paths:
            raise FunctreeValueError(
                f"nothing is selected by select({type(self._tree).__name__}){self._asked}, so nothing can be changed: "
                "correct what is selected, or ask `.count()` first"
            )

    def _check_elements(self, insert: bool) -> None:
        """Raise FunctreeError for selected parts that are not elements of a container which may
        have another length."""
        wanted = "a list or a tuple" if insert else "a list, a tuple or a dict"
        remedy = "`.apply(lambda part: ...)` to replace the part" if insert else "`.set(None)`"
        problems = []
        parents = nodes_at(self._tree, [Path(path[:-1]) for path in self._paths])
        for (path, part), parent in zip(self._parts(), parents, strict=True):
            if not path:
                parent = None
            if type(parent) in (list, tuple) or (not insert and isinstance(parent, dict)):
                continue
            where = (
                "is the whole tree" if parent is None else f"is a field of {type(parent).__name__}"
            )
            why = f"{where}, not an element of {wanted}"
            problems.append(Problem(path, None, value_text(part), why, remedy))
        if problems:
            parts = count(len(problems), "part")
            headline = (
                f"nothing can be inserted next to {parts}"
                if insert
                else f"{parts} cannot be removed"
            )
            raise FunctreeValueError(headline, problems)

    def _refuse(self, headline: str, remedy: str) -> FunctreeError:
        """An error that lists the selected parts."""
        parts = [
            Problem(path, None, value_text(part), "selected", remedy)
            for path, part in self._parts()
        ]
        return FunctreeValueError(headline, parts)


def _name(what: Any) -> str:
    """A class or a function in messages."""
    return getattr(what, "__name__", None) or repr(what)


def select(tree: T) -> Selection[T]:
    """Select parts of a tree, to read or to change them.

    This works on modules, lists, tuples, named tuples and dicts. A change keeps the objects of all
    parts that are not selected.

    Args:
        tree: any tree.

    Returns:
        A selection of the whole tree. Narrow it with one or more of `.at(where)`, `.under(cls)` and
            `.where(filter)`. Then use `.get()`, `.set(value)`, `.set_each(values)`, `.apply(fn)`,
            `.insert_after(value)`, `.insert_before(value)`, `.remove()`, `.count()`,
            `.expect(number)`, `.paths()` or `.partition()`.

    Examples:
        >>> mlp = eqx.nn.MLP(2, 2, 8, 2, key=jax.random.key(0))
        >>> ft.select(mlp).under(eqx.nn.Linear).count()
        3
        >>> wider = ft.select(mlp).at("layers.1.weight").apply(lambda w: 2 * w)
        >>> wider.layers[0] is mlp.layers[0], bool((wider.layers[1].weight == 2 * mlp.layers[1].weight).all())
        (True, True)
    """
    return Selection(tree, [Path()])


def _with_elements(
    node: Any,
    path: Path,
    chosen: Collection[Path],
    above: Collection[tuple[Any, ...]],
    around: Callable[[Any], tuple[Any, ...]],
) -> Any:
    """A node in which each chosen element is replaced by several elements, or by none.

    Args:
        node: the node.
        path: its path.
        chosen: the paths of the chosen elements.
        above: the paths of the nodes above them.
        around: what takes the place of an element. For an element of a dict it is not used: such an
            element is removed.
    """
    if path not in above:
        return node
    items = [(key, path / key, child) for key, child in children(node) or ()]
    if isinstance(node, dict):
        # A copy keeps the class, and the factory of a defaultdict. JAX would sort the keys.
        kept = copy(node)
        for key, at, child in items:
            kept[key] = _with_elements(child, at, chosen, above, around)
            if at in chosen:
                del kept[key]
        return kept
    new: list[Any] = []
    for _, at, child in items:
        if at in chosen:
            new += around(child)
        else:
            new.append(_with_elements(child, at, chosen, above, around))
    if type(node) in (list, tuple):
        return type(node)(new)
    return rebuilt(node, new)
