"""A tree and a choice of its parts ─► the tree with those parts changed: model surgery, in the language of filters."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, Generic, TypeVar, get_origin

from jax.tree_util import tree_flatten_with_path

from functree.errors import FunctreeError, Problem, RuleError, count, did_you_mean
from functree.tree.arrays import value_text
from functree.tree.filters.filter import Filter, as_filter
from functree.tree.leaves import read
from functree.tree.nodes import blanked, children, follow, marked, rebuilt
from functree.tree.paths import Path

T = TypeVar("T")


class Selection(Generic[T]):
    """Parts of a tree, none inside another; made by `ft.select`. Immutable: each change gives a new tree.

    Iterating gives the parts, `len` their number.

    Examples:
        >>> mlp = eqx.nn.MLP(2, 2, 8, 2, key=jax.random.key(0))
        >>> biases = ft.select(mlp).where("**.bias")
        >>> biases
        <3 parts of MLP: layers.0.bias, layers.1.bias, layers.2.bias>
        >>> float(biases.apply(jnp.zeros_like).layers[0].bias.sum())
        0.0
    """

    __slots__ = ("_paths", "_tree")

    def __init__(self, tree: T, paths: Sequence[Path]):
        self._tree: T = tree
        self._paths: tuple[Path, ...] = tuple(paths)

    # Choosing

    def at(self, where: Any) -> "Selection[T]":
        """The part at a place.

        Args:
            where: a path below each selected part (an `ft.Path`, or its text: `"blocks.0.attn"`); or a function from
                it to one of its parts, or to a tuple or list of them: `lambda model: model.blocks[0]`.

        Raises:
            FunctreeError: there is nothing at that path; the function gives something that is no part.
        """
        if isinstance(where, str | Path):
            below = Path.parse(where) if isinstance(where, str) else where
            return Selection(self._tree, [self._there(path, below) for path in self._paths])
        return Selection(
            self._tree, [Path((*path, *key)) for path in self._paths for key in self._accessed(path, where)]
        )

    def under(self, cls: Any) -> "Selection[T]":
        """The outermost instances of a class, or of several (`Linear | Conv`).

        Raises:
            FunctreeError: no class.
        """
        try:
            isinstance(None, cls)
        except TypeError:
            raise FunctreeError(f"under takes a class, or several joined by `|`, not {cls!r}") from None
        return self._outermost(lambda path, node: isinstance(node, cls))

    def where(self, what: Any) -> "Selection[T]":
        """The arrays that a filter matches; or the outermost parts of which a function says so.

        Args:
            what: any filter (`"**.bias"`, `ft.has_axis("embed")`, a class whose arrays are meant); or a function
                `(path, node)` over inner nodes and leaves, `None` among them. Paths begin at the selected part.

        Raises:
            RuleError: no filter.
        """
        if what is ... or isinstance(what, str | Filter | type) or get_origin(what) or not callable(what):
            return self._matched(as_filter(what))
        return self._outermost(what)

    # Looking

    def get(self) -> Any:
        """The one selected part.

        Raises:
            FunctreeError: there is not exactly one.
        """
        return next(iter(self.expect(1)))

    def count(self) -> int:
        """How many parts there are."""
        return len(self._paths)

    def paths(self) -> tuple[Path, ...]:
        """Where they are, in the tree's order; for `at` with a function, in that of its tuple."""
        return self._paths

    def expect(self, number: int) -> "Selection[T]":
        """The same selection, if it has this number of parts.

        Raises:
            FunctreeError: it has another; lists them.
        """
        if len(self._paths) != number:
            raise self._refuse(f"{count(number, 'part')} expected, and {len(self._paths)} found")
        return self

    def partition(self) -> tuple[T, T]:
        """`(selected, rest)`: two trees like the tree, with None in the place of what is in the other."""
        chosen = set(self._paths)

        def only(keep: bool) -> Callable[[Path, Any], Any]:
            def visit(path: Path, node: Any) -> Any:
                if path in chosen:
                    return node if keep else blanked(node)
                below = children(node)
                if below is None:
                    return None if keep else node
                return rebuilt(node, [visit(path / key, child) for key, child in below])

            return visit

        return only(True)(Path(), self._tree), only(False)(Path(), self._tree)

    # Changing

    def set(self, value: Any) -> T:
        """The tree with a value in the place of every selected part."""
        return self._changed(lambda path, node: value)

    def set_each(self, values: Sequence[Any]) -> T:
        """The tree with one value for each selected part, in order.

        Raises:
            FunctreeError: another number of values than of parts.
        """
        values = list(values)
        if len(values) != len(self._paths):
            raise self._refuse(f"set_each has {count(len(values), 'value')} for {count(len(self._paths), 'part')}")
        by_path = dict(zip(self._paths, values, strict=True))
        return self._changed(lambda path, node: by_path[path])

    def apply(self, fn: Callable[[Any], Any]) -> T:
        """The tree with a function's result in the place of each selected part."""
        return self._changed(lambda path, node: fn(node))

    def insert_after(self, value: Any) -> T:
        """The tree with a value behind each selected element of a list or tuple.

        Raises:
            FunctreeError: a part is no element of one.
        """
        return self._inserted(lambda node: (node, value))

    def insert_before(self, value: Any) -> T:
        """The tree with a value in front of each selected element of a list or tuple. Raises like `insert_after`."""
        return self._inserted(lambda node: (value, node))

    def remove(self) -> T:
        """The tree without the selected elements of lists, tuples and dicts.

        Raises:
            FunctreeError: a part is no element of one.
        """
        return self._inserted(lambda node: ())

    def __iter__(self) -> Iterator[Any]:
        return (follow(self._tree, path) for path in self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __repr__(self) -> str:
        shown = ", ".join(str(path) or "the whole" for path in self._paths[:4])
        more = f" and {len(self._paths) - 4} more" if len(self._paths) > 4 else ""
        listed = f": {shown}{more}" if shown else ""
        return f"<{count(len(self._paths), 'part')} of {type(self._tree).__name__}{listed}>"

    # How

    def _there(self, path: Path, below: Path) -> Path:
        node = follow(self._tree, path)
        for i, key in enumerate(below):
            known = dict(children(node) or ())
            if (rest := str(Path(below[i:]))) in known and not isinstance(node, dict):
                return Path((*path, *below[:i], rest))  # a State, or what is packed: the whole path is one key
            if key not in known:
                where = Path((*path, *below[:i]))
                static = "; it is static, no part of the tree"
                near = static if key in _fields(node) else did_you_mean(key, known)
                raise FunctreeError(
                    f"there is no `{below}`: `{where or type(node).__name__}` has no `{Path((key,))}`{near}"
                )
            node = known[key]
        return Path((*path, *below))

    def _accessed(self, path: Path, where: Callable[[Any], Any]) -> list[Path]:
        """Where the parts are that an accessor gives: found by handing it a tree whose parts can be told apart."""
        if not callable(where):
            raise RuleError(f"at takes a path or a function from the tree to one of its parts, not {where!r}")
        node = follow(self._tree, path)
        copied, places = marked(node)
        found = where(copied)
        several = found if type(found) in (tuple, list) and id(found) not in places else (found,)
        lost = [x for x in several if id(x) not in places]
        if lost or not several:
            raise FunctreeError(f"at: the function gave {lost[0] if lost else found!r}, which is no part of the tree")
        parts = list(dict.fromkeys(places[id(x)] for x in several))
        for part in parts:
            outer = next((other for other in parts if part != other == part[: len(other)]), None)
            if outer is not None:
                raise FunctreeError(f"at: `{part}` lies in `{outer or type(node).__name__}`: choose one of them")
        return parts

    def _outermost(self, fits: Callable[[Path, Any], Any]) -> "Selection[T]":
        found: list[Path] = []

        def visit(start: Path, path: Path, node: Any) -> None:
            if fits(path, node):
                found.append(Path((*start, *path)))
                return
            for key, child in children(node) or ():
                visit(start, path / key, child)

        for start in self._paths:
            visit(start, Path(), follow(self._tree, start))
        return Selection(self._tree, found)

    def _matched(self, chosen: Filter) -> "Selection[T]":
        whole = read(self._tree)
        # By position: a State and what is packed tell of paths that are longer than those of their nodes.
        places = [Path.of(keys) for keys, _ in tree_flatten_with_path(self._tree)[0]]
        leaves = [(places[i], leaf) for i, leaf in zip(whole.skeleton.places, whole.leaves, strict=True)]
        found = []
        for start in self._paths:
            depth = len(start)
            inside = [(place, leaf) for place, leaf in leaves if place[:depth] == start]
            found += [place for place, leaf in inside if chosen(leaf._replace(aliases=(Path(leaf.path[depth:]),)))]
        return Selection(self._tree, found)

    def _changed(self, change: Callable[[Path, Any], Any]) -> T:
        chosen = set(self._paths)
        above = {path[:i] for path in self._paths for i in range(len(path))}

        def visit(path: Path, node: Any) -> Any:
            if path in chosen:
                return change(path, node)
            if path not in above:
                return node
            return rebuilt(node, [visit(path / key, child) for key, child in children(node) or ()])

        return visit(Path(), self._tree)

    def _inserted(self, around: Callable[[Any], tuple[Any, ...]]) -> T:
        """The tree in which each selected element has become several, or none."""
        self._check_elements(bool(around(None)))
        chosen = set(self._paths)
        above = {path[:i] for path in self._paths for i in range(len(path))}

        def visit(path: Path, node: Any) -> Any:
            if path not in above:
                return node
            items = [(key, path / key, child) for key, child in children(node) or ()]
            if isinstance(node, dict):
                kept = copy(node)  # of its own class, a defaultdict with its factory
                for key, at, child in items:
                    kept[key] = visit(at, child)
                    if at in chosen:
                        del kept[key]
                return kept
            new = [x for _, at, child in items for x in (around(child) if at in chosen else (visit(at, child),))]
            return type(node)(new) if type(node) in (list, tuple) else rebuilt(node, new)

        return visit(Path(), self._tree)

    def _check_elements(self, insert: bool) -> None:
        problems = []
        for path in self._paths:
            parent = follow(self._tree, Path(path[:-1])) if path else None
            if type(parent) in (list, tuple) or (not insert and isinstance(parent, dict)):
                continue
            where = "is the whole tree" if parent is None else f"is a field of {type(parent).__name__}"
            wanted = "a list or a tuple" if insert else "a list, a tuple or a dict"
            remedy = "`.apply(lambda part: ...)` with what should stand there" if insert else "`.set(None)`"
            problems.append(
                Problem(
                    path, None, value_text(follow(self._tree, path)), f"{where}, and no element of {wanted}", remedy
                )
            )
        if problems:
            raise FunctreeError(
                f"{count(len(problems), 'part')} cannot be {'put beside' if insert else 'removed'}", problems
            )

    def _refuse(self, headline: str) -> FunctreeError:
        remedy = "select more, or fewer"
        parts = [Problem(path, None, value_text(follow(self._tree, path)), "selected", remedy) for path in self._paths]
        return FunctreeError(headline, parts)


def select(tree: T) -> Selection[T]:
    """Choose parts of a tree, to look at them or to change them.

    Works on modules, lists, tuples, named tuples and dicts. What is not selected stays the same object.

    Args:
        tree: any tree.

    Returns:
        A selection of the whole tree. Narrow it with `.at(where)`, `.under(cls)`, `.where(filter)`, one after another;
        then `.get()`, `.set(value)`, `.set_each(values)`, `.apply(fn)`, `.insert_after(value)`,
        `.insert_before(value)`, `.remove()`, `.count()`, `.expect(number)`, `.paths()` or `.partition()`.

    Examples:
        >>> mlp = eqx.nn.MLP(2, 2, 8, 2, key=jax.random.key(0))
        >>> ft.select(mlp).under(eqx.nn.Linear).count()
        3
        >>> wider = ft.select(mlp).at("layers.1.weight").apply(lambda w: 2 * w)
        >>> wider.layers[0] is mlp.layers[0], bool((wider.layers[1].weight == 2 * mlp.layers[1].weight).all())
        (True, True)
    """
    return Selection(tree, [Path()])


def _fields(node: Any) -> Iterable[str]:
    return [field.name for field in fields(node)] if is_dataclass(node) else ()
