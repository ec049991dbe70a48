"""`select` selects parts of a tree: a tree ─► a `Selection` ─► a changed tree."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import copy
from functools import partial
from typing import Any, Generic, Literal, TypeVar, get_origin, overload

import equinox as eqx
import jax

from functree.argument_checks import EXTENT, FLAG, FUNCTION, ITERABLE, check, check_callback, shown
from functree.errors import (
    FunctreeError,
    FunctreeTypeError,
    FunctreeValueError,
    Problem,
    RuleError,
    count,
    did_you_mean,
    listed,
)
from functree.labels.filters import Filter, as_filter, call_filter
from functree.labels.leaves import read
from functree.tree.arrays import Tree, value_text
from functree.tree.nodes import children, leaves_of, nodes_at, walk, with_nodes
from functree.tree.paths import Key, Keys, Path, first_beginning

T = TypeVar("T")


class Selection(Generic[T]):
    """The selected parts of a tree, none of which contains another. `ft.select` builds it.

    A selection is immutable, and each change returns a new tree. Changing an empty selection raises
    an error. Iteration yields the parts, and `len` returns their number.

    Examples:
        >>> mlp = eqx.nn.MLP(2, 2, 8, 2, key=jax.random.key(0))
        >>> biases = ft.select(mlp).where("**.bias")
        >>> biases
        <3 parts of MLP: layers.0.bias, layers.1.bias, layers.2.bias>
        >>> float(biases.apply(jnp.zeros_like).layers[0].bias.sum())
        0.0
    """

    __slots__ = ("_found", "_paths", "_tree")

    def __init__(self, tree: T, paths: Sequence[Path], found: Sequence[Path] | None = None):
        self._tree: T = tree
        self._paths: tuple[Path, ...] = tuple(paths)
        # All parts that a search found, including parts in other parts; None without a search.
        self._found: Sequence[Path] | None = found

    # Choosing

    def at(self, where: Any) -> "Selection[T]":
        """Select the part at a path, or the parts that a function returns.

        Args:
            where: a path below each selected part, as an `ft.Path` or as text
                (`"blocks.0.attn"`). Alternatively, pass a function from a selected part to one of
                its parts, or to a tuple or list of them: `lambda model: model.blocks[0]`.

        Raises:
            FunctreeError: if nothing is at the path.
            FunctreeError: if the function returns an object that is not a part.
            FunctreeError: if one of the returned parts contains another.
            RuleError: if `where` is neither a path nor a function.
            RuleError: if `where` is a string that is not a valid path.
        """
        if isinstance(where, str | Path):
            below = Path(where)
            paths = [_path_below(path, part, below) for path, part in self._parts()]
            return self._chosen(paths)
        picked: list[Path] = []
        for path, part in self._parts():
            picked += [Path((*path, *keys)) for keys in _picked_paths(part, where)]
        return self._chosen(picked)

    def under(self, cls: Any) -> "Selection[T]":
        """Select the outermost instances of a class, or of several classes (`Linear | Conv`).

        Raises:
            FunctreeError: if the argument is not a class.
        """
        # `isinstance` determines which arguments are valid, including unions, tuples, and abstract
        # classes.
        try:
            isinstance(None, cls)
        except TypeError:
            raise FunctreeTypeError(
                f"under: {cls!r} is not a class: pass a class without type arguments, or such "
                "classes joined by `|`"
            ) from None
        return self._search(lambda path, node: isinstance(node, cls))

    def where(self, what: Any) -> "Selection[T]":
        """Select the arrays that match a filter, or the outermost parts that satisfy a predicate.

        Args:
            what: any filter, such as `"**.bias"` or `ft.has_axis("embed")`; a class selects the
                arrays below its instances. Alternatively, pass a function `(path, node) -> bool`,
                which is called with all nodes, leaves and `None`. Paths begin at the selected part.

        Raises:
            RuleError: if the argument is neither a filter nor a function.
            RuleError: if the function raises an error.
        """
        # A function in a filter is called only with arrays, but here with every node. `get_origin`
        # recognizes `Linear[int]` and `typing.Union[A, B]`, which are callable.
        if (
            what is ...
            or isinstance(what, str | Filter | type)
            or get_origin(what)
            or not callable(what)
        ):
            paths = self._matched(as_filter(what))
            return self._chosen(paths, paths)
        check_callback(what, "a filter")
        return self._search(partial(call_filter, what))

    def innermost(self) -> "Selection[T]":
        """Select the innermost parts instead of the outermost.

        Call it right after `.under(cls)` or `.where(...)`.

        Raises:
            FunctreeError: if this call follows any other call, such as `.at(...)`.

        Examples:
            >>> tree = [1, [2, [3]]]
            >>> ft.select(tree).under(list).paths()
            (Path(''),)
            >>> ft.select(tree).under(list).innermost().paths()
            (Path('1.1'),)
        """
        if self._found is None:
            raise FunctreeValueError(
                "innermost: only `.under(cls)` and `.where(...)` search for parts: call "
                "`.innermost()` right after one of them"
            )
        above = {path[:depth] for path in self._found for depth in range(len(path))}
        return self._chosen([path for path in self._found if path not in above])

    # Looking

    def get(self) -> Any:
        """Return the only selected part.

        Raises:
            FunctreeError: if the number of parts is not one. The error lists the parts.
        """
        return next(iter(self.expect(1)))

    def count(self) -> int:
        """Return the number of parts."""
        return len(self._paths)

    def paths(self) -> tuple[Path, ...]:
        """Return the paths of the parts, in the order of the tree.

        After `at` with a function, the paths are in the order of the function's result.
        """
        return self._paths

    def expect(self, number: int) -> "Selection[T]":
        """Check the number of parts, and return the selection.

        Raises:
            FunctreeError: if the number of parts is not `number`. The error lists the parts.
        """
        check("expect: invalid arguments", number=(number, EXTENT))
        if len(self._paths) != number:
            change = "more" if len(self._paths) < number else "fewer"
            raise self._refuse(
                f"select: expected {count(number, 'part')}, but found {len(self._paths)}",
                f"select {change} parts",
            )
        return self

    def partition(self) -> tuple[T, T]:
        """Split the tree into `(selected, rest)`.

        Both results have the structure of the tree. Each leaf is in one of the two trees; the other
        tree has None in its place.
        """
        parts = [first_beginning(path, self._paths) for path, _ in leaves_of(self._tree)]
        mask = jax.tree.structure(self._tree).unflatten(part is not None for part in parts)
        return eqx.partition(self._tree, mask)

    # Changing

    def set(self, value: Any) -> T:
        """Replace every selected part with one value, and return the tree.

        Raises:
            FunctreeError: if nothing is selected.
        """
        return self._changed([value] * len(self._paths))

    def set_each(self, values: Sequence[Any]) -> T:
        """Replace each selected part with its own value, and return the tree.

        Args:
            values: one value for each part, in the order of `paths`.

        Raises:
            FunctreeError: if the number of values differs from the number of parts.
            FunctreeError: if nothing is selected.
        """
        check("set_each: invalid arguments", values=(values, ITERABLE))
        values = list(values)
        if len(values) != len(self._paths):
            headline = (
                f"set_each: got {count(len(values), 'value')} for {count(len(self._paths), 'part')}"
            )
            raise self._refuse(headline, "pass one value for each part")
        return self._changed(values)

    # Two signatures, so that type checkers infer the parameters of a lambda.
    @overload
    def apply(self, fn: Callable[[Any], Any], with_path: Literal[False] = False) -> T: ...
    @overload
    def apply(self, fn: Callable[[Path, Any], Any], with_path: Literal[True]) -> T: ...
    def apply(self, fn: Callable[..., Any], with_path: bool = False) -> T:
        """Replace each selected part with a function's result, and return the tree.

        Args:
            fn: a function of a part, or of its path and the part if `with_path` is true.
            with_path: whether the function takes the path of the part too.

        Raises:
            FunctreeError: if nothing is selected.

        Examples:
            >>> ft.select({"a": 1, "b": [2]}).under(int).apply(
            ...     lambda path, number: f"{path}={number}", with_path=True
            ... )
            {'a': 'a=1', 'b': ['b.0=2']}
        """
        check("apply: invalid arguments", fn=(fn, FUNCTION), with_path=(with_path, FLAG))
        if with_path:
            return self._changed([fn(path, part) for path, part in self._parts()])
        return self._changed(list(map(fn, self)))

    def insert_after(self, value: Any) -> T:
        """Insert a value after each selected element of a list or tuple, and return the tree.

        Raises:
            FunctreeError: if nothing is selected.
            FunctreeError: if a part is not an element of a list or tuple.
        """
        return self._replaced(lambda element: (element, value), insert=True)

    def insert_before(self, value: Any) -> T:
        """Insert a value before each selected element of a list or tuple, and return the tree.

        Raises:
            FunctreeError: if nothing is selected.
            FunctreeError: if a part is not an element of a list or tuple.
        """
        return self._replaced(lambda element: (value, element), insert=True)

    def remove(self) -> T:
        """Remove the selected elements of lists, tuples and dicts, and return the tree.

        Raises:
            FunctreeError: if nothing is selected.
            FunctreeError: if a part is not an element of a list, tuple or dict.
        """
        return self._replaced(lambda element: (), insert=False)

    def __iter__(self) -> Iterator[Any]:
        return iter(nodes_at(self._tree, self._paths))

    def __len__(self) -> int:
        return len(self._paths)

    def __repr__(self) -> str:
        text = f"{count(len(self._paths), 'part')} of {type(self._tree).__name__}"
        if self._paths:
            text += ": " + listed([str(path) or "the whole tree" for path in self._paths])
        return f"<{text}>"

    # How the parts are found and changed

    def _parts(self) -> Iterator[tuple[Path, Any]]:
        """Return the selected parts with their paths."""
        return zip(self._paths, self, strict=True)

    def _chosen(self, paths: Sequence[Path], found: Sequence[Path] | None = None) -> "Selection[T]":
        # `nodes_at` raises an error for children with the same key, because they could be confused.
        nodes_at(self._tree, paths)
        return Selection(self._tree, paths, found)

    def _search(self, fits: Callable[[Path, Tree], bool]) -> "Selection[T]":
        """Select the outermost nodes for which a function returns True."""
        found: list[Path] = []
        for start, part in self._parts():
            for keys, node, _ in walk(part):
                if fits(Path(keys), node):
                    found.append(Path((*start, *keys)))
        known = set(found)
        return self._chosen([path for path in found if first_beginning(path, known) == path], found)

    def _matched(self, chosen: Filter) -> list[Path]:
        """Return the paths of the arrays that a filter matches."""
        whole = read(self._tree)
        # The paths of nodes, looked up by index. Leaves of a state or a packed tree have their path
        # in the model (several keys) instead of the path of their node (one key).
        places = [path for path, _ in leaves_of(self._tree)]
        starts, matched = set(self._paths), list[Path]()
        for index, leaf in zip(whole.skeleton.indices, whole.leaves, strict=True):
            # At most one selected part contains the leaf, because no part contains another.
            start = first_beginning(places[index], starts)
            # Patterns match the path below the selected part.
            if start is not None and chosen(leaf._replace(seen=Path(leaf.path[len(start) :]))):
                matched.append(places[index])
        return matched

    def _changed(self, values: Sequence[Any]) -> T:
        """Replace each selected part with its own value.

        Nodes that contain no selected part keep their identity.

        Raises:
            FunctreeError: if nothing is selected.
        """
        self._check_some()
        return with_nodes(self._tree, dict(zip(self._paths, values, strict=True)))

    def _replaced(self, by: Callable[[Tree], tuple[Tree, ...]], *, insert: bool) -> T:
        """Replace each selected element with several elements (`insert`) or with none.

        Raises:
            FunctreeError: if nothing is selected.
            FunctreeError: if a part is not an element of a list, tuple or dict.
        """
        self._check_some()
        wanted = "a list or a tuple" if insert else "a list, a tuple or a dict"
        remedy = "replace the part instead, with `.set(value)` or `.apply(fn)`"
        keys: dict[Path, set[Key]] = {}
        problems: list[Problem] = []
        parents = nodes_at(self._tree, [Path(path[:-1]) for path in self._paths])
        for (path, part), parent in zip(self._parts(), parents, strict=True):
            keys.setdefault(Path(path[:-1]), set()).update(path[-1:])
            fits = type(parent) in (list, tuple) or (isinstance(parent, dict) and not insert)
            if not path or not fits:
                why = f"is not an element of {wanted}"
                problems.append(Problem(path, None, value_text(part), why, remedy))
        if problems:
            cannot = "insert next to" if insert else "remove"
            headline = f"select: cannot {cannot} {count(len(problems), 'part')}"
            raise FunctreeValueError(headline, problems)

        # The deepest paths come first, because a removal changes the indices in longer paths.
        tree = self._tree
        for depth in sorted(set(map(len, keys)), reverse=True):
            here = [path for path in keys if len(path) == depth]
            changed: dict[Keys, Tree] = {}
            for path, node in zip(here, nodes_at(tree, here), strict=True):
                changed[path] = _with_elements(node, keys[path], by)
            tree = with_nodes(tree, changed)
        return tree

    def _check_some(self) -> None:
        """Refuse to change an empty selection, which would silently return the same tree.

        Raises:
            FunctreeError: if nothing is selected.
        """
        if not self._paths:
            raise FunctreeValueError(
                f"select: no part of the {type(self._tree).__name__} is selected, so nothing can "
                "be changed: correct the selection, or check `.count()` first"
            )

    def _refuse(self, headline: str, remedy: str) -> FunctreeError:
        """Make an error that lists the selected parts."""
        parts = [
            Problem(path, None, value_text(part), "selected", remedy)
            for path, part in self._parts()
        ]
        return FunctreeValueError(headline, parts)


def select(tree: T) -> Selection[T]:
    """Select parts of a tree, to read or change them.

    The tree may contain modules, lists, tuples, named tuples and dicts. A change keeps all objects
    that are not selected and contain no selected part.

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


def _with_elements(node: Tree, keys: Collection[Key], by: Callable[[Tree], Iterable[Tree]]) -> Tree:
    """Replace elements of a list or tuple, or remove elements of a dict.

    Args:
        node: the list, tuple or dict.
        keys: the keys of the elements.
        by: a function from an element of a list or tuple to the elements that replace it.
    """
    if isinstance(node, dict):
        # A copy keeps the class, and a defaultdict's factory.
        kept = copy(node)
        for key in keys:
            del kept[key]
        return kept
    new: list[Tree] = []
    for i, element in enumerate(node):
        new += by(element) if i in keys else [element]
    return type(node)(new)


def _path_below(path: Path, node: Tree, below: Path) -> Path:
    """Return the full path of the node at `below` inside the node at `path`.

    Raises:
        FunctreeError: if there is no such node.
    """
    for i, key in enumerate(below):
        known = dict(children(node) or ())
        # Each key of an `ft.State` or a packed tree is the text of a whole path.
        if (rest := str(Path(below[i:]))) in known and not isinstance(node, dict):
            return Path((*path, *below[:i], rest))
        if key not in known:
            here = Path((*path, *below[:i])) or type(node).__name__
            hint = did_you_mean(key, known)
            raise FunctreeValueError(
                f"at: `{below}` does not exist, since `{here}` has no `{Path((key,))}`{hint}"
            )
        node = known[key]
    return Path((*path, *below))


def _is_one(node: Tree) -> bool:
    """Return whether a node is the same object wherever it occurs."""
    return node is None or (type(node) is tuple and not node)


def _picked_paths(node: Tree, where: Callable[[Tree], Any]) -> list[Path]:
    """Return the paths, below a node, of the parts that a function returns.

    Raises:
        RuleError: if `where` is not a function.
        FunctreeError: if `where` returns an object that is not a part.
        FunctreeError: if one of the parts contains another.
    """
    if not callable(where) or isinstance(where, type):
        raise RuleError(
            f"at: invalid argument {shown(where)}: "
            "pass a path, or a function from the tree to one of its parts"
        )
    # The function gets a copy in which each node and leaf is a different object, so that objects in
    # its result identify their paths. None and the empty tuple exist only once in Python, so they
    # are replaced too.
    copied = jax.tree.map(lambda leaf: object(), node, is_leaf=_is_one)
    places: dict[int, Path] = {}
    for keys, part, _ in walk(copied):
        places.setdefault(id(part), Path(keys))
    result = where(copied)
    # The result is one part, or a new tuple or list of parts.
    several = (
        result
        if type(result) in (tuple, list) and id(result) not in places and result
        else (result,)
    )
    parts: dict[Path, None] = {}  # an ordered set
    for part in several:
        if id(part) not in places:
            raise FunctreeValueError(
                f"at: the function returned {part!r}, which is not a part of the tree: "
                "return parts of the function's argument"
            )
        parts[places[id(part)]] = None
    for path in parts:
        outer = first_beginning(path, parts)
        if outer != path:
            raise FunctreeValueError(
                f"at: `{path}` is inside `{outer or type(node).__name__}`: return only one of them"
            )
    return list(parts)
