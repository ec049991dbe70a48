"""A tree and a selection of its parts ─► the tree with these parts changed."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from itertools import chain
from types import UnionType
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, overload

import equinox as eqx
import jax

from functree.argument_checks import EXTENT, FLAG, FUNCTION, ITERABLE, check, check_callback, shown
from functree.errors import (
    USERS_ERRORS,
    FunctreeError,
    FunctreeTypeError,
    FunctreeValueError,
    Problem,
    RuleError,
    count,
    did_you_mean,
    error_text,
    listed,
)
from functree.labels.filters import Filter, as_filter, bare_class
from functree.labels.leaves import read
from functree.tree.arrays import Tree, value_text
from functree.tree.nodes import BELOW, children, leaves_of, mapped, nodes_at, outermost, walk
from functree.tree.paths import Key, Path, first_beginning

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

    __slots__ = ("_asked", "_found_by", "_paths", "_tree")

    def __init__(
        self, tree: T, paths: Sequence[Path], asked: str = "", found_by: "_FoundBy | None" = None
    ):
        self._tree: T = tree
        self._paths: tuple[Path, ...] = tuple(paths)
        self._asked: str = asked  # what was asked for, for messages: `.under(Linear)`
        self._found_by: _FoundBy | None = found_by

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
            paths = [_path_below(path, part, below) for path, part in self._parts()]
            return self._chosen(paths, f".at({str(below)!r})")
        found: list[Path] = []
        for path, part in self._parts():
            found += [Path((*path, *keys)) for keys in _picked_paths(part, where)]
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
        return self._outermost(lambda path, node: isinstance(node, cls), f".under({_name(cls)})")

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
            chosen = as_filter(what)
            # Arrays have no parts inside, so the innermost are the same.
            paths = self._matched(chosen)
            return self._chosen(paths, f".where({chosen!r})", (lambda path, node: True, paths))
        check_callback(what, "a filter")
        return self._outermost(_telling(what), f".where({_name(what)})")

    def innermost(self) -> "Selection[T]":
        """Select the innermost parts, instead of the outermost. This follows `.under(cls)` or
        `.where(...)`.

        Raises:
            FunctreeError: if it follows something else, such as `.at(...)`.

        Examples:
            >>> tree = [1, [2, [3]]]
            >>> ft.select(tree).under(list).paths()
            (Path(''),)
            >>> ft.select(tree).under(list).innermost().paths()
            (Path('1.1'),)
        """
        if self._found_by is None:
            raise FunctreeValueError(
                f"select({type(self._tree).__name__}){self._asked}.innermost(): there are no "
                "innermost parts of an exact choice: write it right after `.under(cls)` or "
                "`.where(...)`"
            )
        found: list[Path] = []
        fits, within = self._found_by
        for start, part in Selection(self._tree, within)._parts():
            for keys, node, _ in walk(part):
                if fits(Path(keys), node):
                    found.append(Path((*start, *keys)))
        above = {path[:depth] for path in found for depth in range(len(path))}
        inner = [path for path in found if path not in above]
        return self._chosen(inner, ".innermost()")

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
        found = [first_beginning(path, self._paths) for path, _ in leaves_of(self._tree)]
        mask = jax.tree.structure(self._tree).unflatten(path is not None for path in found)
        return eqx.partition(self._tree, mask)

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

    # Two signatures, so that a type checker knows what a lambda takes.
    @overload
    def apply(self, fn: Callable[[Any], Any], with_path: Literal[False] = False) -> T: ...
    @overload
    def apply(self, fn: Callable[[Path, Any], Any], with_path: Literal[True]) -> T: ...
    def apply(self, fn: Callable[..., Any], with_path: bool = False) -> T:
        """The tree with the result of a function for each selected part.

        Args:
            fn: a function of a part; of the path and the part, if `with_path` is true.
            with_path: whether the function takes the path of the part, too.

        Examples:
            >>> ft.select({"a": 1, "b": [2]}).under(int).apply(
            ...     lambda path, number: f"{path}={number}", with_path=True
            ... )
            {'a': 'a=1', 'b': ['b.0=2']}
        """
        check("apply changes nothing", fn=(fn, FUNCTION), with_path=(with_path, FLAG))
        return self._changed(fn if with_path else lambda path, node: fn(node))

    def insert_after(self, value: Any) -> T:
        """The tree with a value after each selected element of a list or tuple.

        Raises:
            FunctreeError: a part is not an element of a list or tuple.
        """
        return self._replaced(lambda element: (element, value), insert=True)

    def insert_before(self, value: Any) -> T:
        """The tree with a value before each selected element of a list or tuple.

        Raises:
            FunctreeError: a part is not an element of a list or tuple.
        """
        return self._replaced(lambda element: (value, element), insert=True)

    def remove(self) -> T:
        """The tree without the selected elements of lists, tuples and dicts.

        Raises:
            FunctreeError: a part is not an element of a list, tuple or dict.
        """
        return self._replaced(lambda element: (), insert=False)

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

    def _chosen(
        self, paths: Sequence[Path], asked: str, found_by: "_FoundBy | None" = None
    ) -> "Selection[T]":
        # Raises for a path of several parts, of which one would be taken for the other.
        nodes_at(self._tree, paths)
        return Selection(self._tree, paths, self._asked + asked, found_by)

    def _outermost(self, fits: "_Fits", asked: str) -> "Selection[T]":
        """The nodes for which a function is true, and nothing below such a node."""
        found: list[Path] = []
        for start, part in self._parts():
            found += [Path((*start, *path)) for path, _ in outermost(part, fits)]
        return self._chosen(found, asked, (fits, self._paths))

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
        chosen = set(self._paths)
        above = {path[:depth] for path in chosen for depth in range(len(path))}

        def changed(path: Path, node: Tree) -> Any:
            if path in chosen:
                return change(path, node)
            return BELOW if path in above else node

        return mapped(self._tree, changed)

    def _replaced(self, by: Callable[[Tree], tuple[Tree, ...]], *, insert: bool) -> T:
        """The tree with several elements (`insert`), or none, for each selected element."""
        self._check_some()
        self._check_elements(insert)
        keys: dict[Path, set[Key]] = {}
        for path in self._paths:
            keys.setdefault(Path(path[:-1]), set()).add(path[-1])

        def changed(path: Path, node: Tree) -> Tree:
            return _with_elements(node, keys[path], by)

        # The deepest first: the path of an element ends where another one before it is removed.
        tree = self._tree
        for depth in sorted({len(path) for path in keys}, reverse=True):
            here = [path for path in keys if len(path) == depth]
            tree = Selection(tree, here)._changed(changed)
        return tree

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


_Fits = Callable[[Path, Tree], bool]
"""Whether a node at a path is to be selected."""

_FoundBy = tuple[_Fits, Sequence[Path]]
"""By which function the parts were found, and inside which parts."""


def _telling(fits: Callable[[Path, Tree], Any]) -> _Fits:
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


def _with_elements(node: Tree, keys: Collection[Key], by: Callable[[Tree], Iterable[Tree]]) -> Tree:
    """A list, tuple or dict with several elements, or none, for each of those at some keys; a dict
    without these."""
    if isinstance(node, dict):
        # A copy keeps the class, and the factory of a defaultdict.
        kept = copy(node)
        for key in keys:
            del kept[key]
        return kept
    new: list[Tree] = []
    for i, element in enumerate(node):
        new += by(element) if i in keys else [element]
    return type(node)(new)


def _path_below(path: Path, node: Tree, below: Path) -> Path:
    """The path of the node that is at `below` in the node at `path`. Raises FunctreeError if there
    is none."""
    for i, key in enumerate(below):
        known = dict(children(node) or ())
        # The keys of an `ft.State` and of a packed tree are whole paths, as texts.
        if (rest := str(Path(below[i:]))) in known and not isinstance(node, dict):
            return Path((*path, *below[:i], rest))
        if key not in known:
            here = Path((*path, *below[:i])) or type(node).__name__
            hint = did_you_mean(key, known)
            if is_dataclass(node) and key in [field.name for field in fields(node)]:
                hint = "; it is a static field, not a part of the tree"
            raise FunctreeValueError(
                f"there is no `{below}`: `{here}` has no `{Path((key,))}`{hint}"
            )
        node = known[key]
    return Path((*path, *below))


class _Mark:
    """A placeholder for one leaf."""

    def __repr__(self) -> str:
        return "<leaf>"


def _is_one(node: Tree) -> bool:
    """Whether a node is one object at all its places."""
    return node is None or (type(node) is tuple and not node)


def _picked_paths(node: Tree, where: Callable[[Tree], Any]) -> list[Path]:
    """The paths of the parts of a node that a function returns, from the node on."""
    if not callable(where) or isinstance(where, type):
        raise RuleError(
            f"at takes a path or a function from the tree to one of its parts, not {shown(where)}"
        )
    # The function is called with a copy in which each node and leaf is a different object, so that
    # the objects that it returns show their paths. Python has only one None and one empty tuple.
    copied = jax.tree.map(lambda leaf: _Mark(), node, is_leaf=_is_one)
    places: dict[int, Path] = {}
    for keys, part, _ in walk(copied):
        places.setdefault(id(part), Path(keys))
    found = where(copied)
    # A tuple or list of parts that the function made, or one part.
    several = (
        found if type(found) in (tuple, list) and id(found) not in places and found else (found,)
    )
    parts: dict[Path, None] = {}  # a dict, as a set in the order of the result
    for part in several:
        if id(part) not in places:
            raise FunctreeValueError(
                f"at: the function returned {part!r}, which is not a part of the tree"
            )
        parts[places[id(part)]] = None
    for path in parts:
        outer = first_beginning(path, parts)
        if outer != path:
            raise FunctreeValueError(
                f"at: `{path}` is inside `{outer or type(node).__name__}`: choose one of them"
            )
    return list(parts)
