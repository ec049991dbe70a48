"""A tree and a selection of its parts ─► the tree with these parts changed."""

from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from itertools import chain
from types import UnionType
from typing import Any, Generic, TypeVar, get_args, get_origin

from functree.argument_checks import EXTENT, FUNCTION, ITERABLE, check, check_callback
from functree.errors import (
    USERS_ERRORS,
    FunctreeError,
    FunctreeTypeError,
    FunctreeValueError,
    Problem,
    RuleError,
    count,
    error_text,
    listed,
)
from functree.labels.filters.filter import Filter, as_filter, bare_class
from functree.labels.leaves import read
from functree.labels.selected_parts import accessed_paths, path_below
from functree.tree.arrays import Tree, value_text
from functree.tree.nodes import (
    BELOW,
    blanked,
    children,
    emptied,
    leaves_of,
    mapped,
    nodes_at,
    outermost,
    rebuilt,
)
from functree.tree.paths import Keys, Path, first_beginning

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
            below = Path(where)
            paths = [path_below(path, part, below) for path, part in self._parts()]
            return self._chosen(paths, f".at({str(below)!r})")
        found: list[Path] = []
        for path, part in self._parts():
            found += [Path((*path, *keys)) for keys in accessed_paths(part, where)]
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
            classes = get_args(cls) if isinstance(cls, UnionType) else (cls,)
            bare = bare_class(classes)
            raise FunctreeTypeError(
                f"under takes a class, or several joined by `|`, not {cls!r}{bare}"
            ) from None
        found = self._outermost(lambda path, node: isinstance(node, cls))
        return self._chosen(found, f".under({_name(cls)})")

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

        def selected(path: Path, node: Tree) -> Any:
            if path in chosen:
                return node
            return None if children(node) is None else BELOW

        def rest(path: Path, node: Tree) -> Any:
            return blanked(node) if path in chosen else BELOW

        return (
            mapped(self._tree, selected, build=emptied),
            mapped(self._tree, rest, build=emptied),
        )

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
        # Raises for a path of several parts, of which one would be taken for the other.
        nodes_at(self._tree, paths)
        return Selection(self._tree, paths, self._asked + asked)

    def _outermost(self, fits: Callable[[Path, Tree], Any]) -> list[Path]:
        """The paths of the nodes for which a function is true, and of nothing below such a node."""
        found: list[Path] = []
        for start, part in self._parts():
            found += [Path((*start, *path)) for path, _ in outermost(part, _telling(fits))]
        return found

    def _matched(self, chosen: Filter) -> list[Path]:
        """The paths of the arrays that a filter matches."""
        whole = read(self._tree)
        # The paths of nodes, found by index. The leaves of a state and of a packed tree have the
        # path in the model (several keys) instead of the path of their node (one key).
        places = [path for path, _ in leaves_of(self._tree)]
        found = dict[Path, list[Path]]()
        for start in self._paths:
            found[start] = []
        for index, leaf in zip(whole.skeleton.indices, whole.leaves, strict=True):
            # The selected part that the leaf is in, if it is in one: no part is inside another.
            start = first_beginning(places[index], found)
            if start is None:
                continue
            # Patterns are matched with the path from the selected part on.
            below = Path(leaf.path[len(start) :])
            if chosen(leaf._replace(seen=below)):
                found[start].append(places[index])
        return list(chain(*found.values()))

    def _changed(self, change: Callable[[Path, Tree], Any]) -> T:
        """The tree with another value for each selected part. All nodes that are not above a part
        stay the same."""
        self._check_some()
        chosen, above = set(self._paths), self._above()

        def changed(path: Path, node: Tree) -> Any:
            if path in chosen:
                return change(path, node)
            return BELOW if path in above else node

        return mapped(self._tree, changed)

    def _inserted(self, around: Callable[[Tree], tuple[Tree, ...]], *, insert: bool) -> T:
        """The tree in which each selected element is replaced by several elements (`insert`), or by
        none."""
        self._check_some()
        self._check_elements(insert)
        return _with_elements(self._tree, Path(), set(self._paths), self._above(), around)

    def _above(self) -> Collection[Keys]:
        """The paths of all nodes above the parts."""
        above: set[Keys] = set()
        for path in self._paths:
            above.update(path[:depth] for depth in range(len(path)))
        return above

    def _check_some(self) -> None:
        """Raise FunctreeError if nothing is selected: the tree would silently stay as it is."""
        if not self._paths:
            raise FunctreeValueError(
                f"nothing is selected by select({type(self._tree).__name__}){self._asked}, "
                "so nothing can be changed: correct what is selected, or ask `.count()` first"
            )

    def _check_elements(self, insert: bool) -> None:
        """Raise FunctreeError for selected parts that are not elements of a container which may
        have another length."""
        if insert:
            wanted, remedy = "a list or a tuple", "`.apply(lambda part: ...)` to replace the part"
            headline = "nothing can be inserted next to {}"
        else:
            wanted, remedy = "a list, a tuple or a dict", "`.set(None)`"
            headline = "{} cannot be removed"
        problems = []
        parents = nodes_at(self._tree, [Path(path[:-1]) for path in self._paths])
        for (path, part), parent in zip(self._parts(), parents, strict=True):
            if not path:
                where = "is the whole tree"
            elif type(parent) in (list, tuple) or (not insert and isinstance(parent, dict)):
                continue
            else:
                where = f"is a field of {type(parent).__name__}"
            why = f"{where}, not an element of {wanted}"
            problems.append(Problem(path, None, value_text(part), why, remedy))
        if problems:
            raise FunctreeValueError(headline.format(count(len(problems), "part")), problems)

    def _refuse(self, headline: str, remedy: str) -> FunctreeError:
        """An error that lists the selected parts."""
        parts = [
            Problem(path, None, value_text(part), "selected", remedy)
            for path, part in self._parts()
        ]
        return FunctreeValueError(headline, parts)


def _telling(fits: Callable[[Path, Tree], Any]) -> Callable[[Path, Tree], bool]:
    """The same function, whose failure is an error with the path of the node."""

    def fits_or_tells(path: Path, node: Tree) -> bool:
        try:
            return bool(fits(path, node))
        except USERS_ERRORS as error:
            why = f"{_name(fits)} raised {error_text(error)}"
            remedy = "a function in `where` takes the path and the value of a node, modules among "
            remedy += "them, and returns a bool: `lambda path, node: ...`"
            problem = Problem(path, None, value_text(node), why, remedy)
            raise RuleError(f"the filter function {_name(fits)} failed", [problem]) from error

    return fits_or_tells


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
        >>> wider.layers[0] is mlp.layers[0]
        True
        >>> bool((wider.layers[1].weight == 2 * mlp.layers[1].weight).all())
        True
    """
    return Selection(tree, [Path()])


def _with_elements(
    node: Tree,
    path: Path,
    chosen: Collection[Path],
    above: Collection[Keys],
    around: Callable[[Tree], tuple[Tree, ...]],
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
    below = children(node) or ()
    if isinstance(node, dict):
        # A copy keeps the class, and the factory of a defaultdict. JAX would sort the keys.
        kept = copy(node)
        for key, child in below:
            kept[key] = _with_elements(child, path / key, chosen, above, around)
            if path / key in chosen:
                del kept[key]
        return kept
    new: list[Tree] = []
    for key, child in below:
        if path / key in chosen:
            new += around(child)
        else:
            new.append(_with_elements(child, path / key, chosen, above, around))
    if type(node) in (list, tuple):
        return type(node)(new)
    return rebuilt(node, new)
