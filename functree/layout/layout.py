"""A `Layout` decides how leaves are sharded on a mesh.

`as_layout` turns any value that a user can write for a layout into a `Layout`. `broadcast` pairs
each layout of a prefix tree with the path of its subtree.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_map

from functree.argument_checks import check_callback
from functree.devices.meshes import MeshLike, MeshView, agreed_mesh, invalid_entry, spec_text
from functree.devices.placement import other_memory
from functree.errors import USERS_ERRORS, RuleError, ShardingError, error_text
from functree.labels.annotations.hints import Hint
from functree.labels.leaves import Leaf, Leaves, read
from functree.labels.training_state import Scope
from functree.layout.decision import (
    Decision,
    apply_spec,
    whole,
)
from functree.tree.axes import Names, dict_text
from functree.tree.nodes import PrefixOf, aligned, where_text
from functree.tree.paths import ROOT, Path


class Layout:
    """Base class of layouts, which are immutable and hashable, and compare by value.

    `first | then` is a layout in which `then` shards dimensions that `first` leaves unsharded. Do
    not subclass `Layout`. To compute a layout, pass a function `(path, leaf) -> P` instead.

    Examples:
        >>> rules = ft.AxisRules({"hidden": "model", "embed": None}) | ft.FSDP(
        ...     "data", min_size=0
        ... )
        >>> ft.plan(
        ...     jnp.ones((4, 8)), rules, {"data": 2, "model": 4}, check=False
        ... ).problems[0].why
        'has no axis names, and rules shard axes by name'
    """

    __slots__ = ()

    @abstractmethod
    def decide(self, leaf: Leaf, so_far: Decision | None, mesh: MeshView) -> Decision:
        """Decide how one leaf is sharded.

        Args:
            leaf: the leaf.
            so_far: the decision of the layouts before this one; None if this is the first.
            mesh: the sizes of the mesh.
        """

    @property
    def inner(self) -> tuple["Layout", ...]:
        """The layouts that this one contains."""
        return ()

    def asks(self, leaf: Leaf) -> Hashable:
        """Return the values that the decision depends on, besides the leaf's `kind`.

        Leaves share one decision if both these values and the leaves' kinds are equal.
        """
        return tuple([layout.asks(leaf) for layout in self.inner])

    def claims(self, leaf: Leaf) -> bool:
        """Return whether the layout applies to a leaf that would otherwise follow another leaf.

        For example, a layout with the filter `opt_state.**` claims the optimizer's state.
        """
        return any(layout.claims(leaf) for layout in self.inner)

    def reached(self, decisions: Collection[Decision]) -> "Iterator[Layout]":
        """Yield the layout and its inner layouts, but not those that a filter chose for no leaf."""
        yield self
        for layout in self.inner:
            yield from layout.reached(decisions)

    @property
    def rules(self) -> "Layout | None":
        """The layout's `AxisRules`, which also apply to activations, or None if it has none."""
        return None

    @property
    def given_names(self) -> Mapping[type, Names]:
        """The axes that the layout gives to leaves of classes without annotations."""
        return merge_names(self.inner)

    @property
    def hint(self) -> Hint | None:
        """The annotation that names the leaves' axes, or None if their own annotations do."""
        return None

    @property
    def own_mesh(self) -> Mesh | AbstractMesh | None:
        """The mesh of a `NamedSharding` or a plan in the layout, or None if there is none."""
        for layout in self.inner:
            if layout.own_mesh is not None:
                return layout.own_mesh
        return None

    def __or__(self, then: "LayoutLike") -> "Layout":
        return Composition.of(self, as_layout(then))

    def __ror__(self, first: "LayoutLike") -> "Layout":
        return Composition.of(as_layout(first), self)


LayoutLike = Layout | PartitionSpec | NamedSharding | Callable[[Path, Any], PartitionSpec] | None
"""Any value that a user can write for a layout."""

LayoutTree = Any
"""A layout, or a prefix tree of layouts."""


@dataclass(frozen=True, repr=False)
class SpecLayout(Layout):
    """A `PartitionSpec` for every leaf, or a `NamedSharding` with its mesh and memory kind."""

    spec: PartitionSpec
    mesh: Mesh | AbstractMesh | None = None
    memory_kind: str | None = None

    @property
    def own_mesh(self) -> Mesh | AbstractMesh | None:
        return self.mesh

    def claims(self, leaf: Leaf) -> bool:
        # Under `vmap`, every leaf has the batch dimension, even a step count. A second entry of the
        # spec would be for a parameter's dimension, which is unknown here.
        follows = leaf.follows
        if follows is None or not follows.batched:
            return False
        return follows.path is None or (not follows.known and len(self.spec.partitions) < 2)

    def decide(self, leaf: Leaf, so_far: Decision | None, mesh: MeshView) -> Decision:
        # `whole`, not `undecided`, since a layout's spec overrides the spec of an annotation.
        decision = so_far or whole(leaf)
        # A scalar in a tree is replicated. If the tree is just a scalar, a spec with entries is an
        # error.
        if leaf.shape or leaf.seen == ():
            because = f"{spec_text(self.spec)} as given"
            decision = apply_spec(leaf, self.spec, decision, because)
        else:
            decision = decision.because("a scalar")
        if self.memory_kind is None:
            return decision
        return decision._replace(memory_kind=self.memory_kind)

    def __repr__(self) -> str:
        if self.mesh is None:
            return spec_text(self.spec)
        return repr(NamedSharding(self.mesh, self.spec, memory_kind=self.memory_kind))


@dataclass(frozen=True, repr=False)
class NoLayout(Layout):
    """The missing layout `None`. Its meaning depends on the function that takes the layout."""

    def claims(self, leaf: Leaf) -> bool:
        return True  # without a layout, the optimizer's state has none either

    def decide(self, leaf: Leaf, so_far: Decision | None, mesh: MeshView) -> Decision:
        # There is no earlier layout, since `|` refuses `None`.
        return whole(leaf)._replace(specified=False)

    def __repr__(self) -> str:
        return "None"


@dataclass(frozen=True, repr=False)
class FunctionLayout(Layout):
    """A layout that a callable `(path, leaf) -> P` computes."""

    function: Callable[[Path, Any], Any]

    def asks(self, leaf: Leaf) -> Hashable:
        return leaf.path  # the function sees each path, so no two leaves share a decision

    def decide(self, leaf: Leaf, so_far: Decision | None, mesh: MeshView) -> Decision:
        before = so_far or whole(leaf)
        if leaf.seen is None:
            return before.wrong((f"has no path to pass to {self!r}", PATHLESS))
        try:
            spec = self.function(leaf.seen, leaf.value)
        except USERS_ERRORS as error:
            # A user may pass any function by mistake, such as `jax.nn.gelu`. The function's
            # own error would name neither the leaf nor the layout.
            problem = leaf.problem(f"{self!r} raised {error_text(error)}", LAYOUT_FUNCTION)
            raise ShardingError(f"the layout function {self!r} failed", [problem]) from error
        if isinstance(spec, PartitionSpec):
            return apply_spec(leaf, spec, before, f"{spec_text(spec)} by {self!r}")
        why = f"{self!r} returned {spec!r}, which is not a PartitionSpec"
        return before.wrong((why, "return `P(...)` for every leaf, or `P()` to replicate it"))

    def __repr__(self) -> str:
        # A `functools.partial` has no name.
        return getattr(self.function, "__qualname__", repr(self.function))


PATHLESS = (
    "give this array its own layout, with an entry of `in_shardings=` or a pattern that names it"
)
LAYOUT_FUNCTION = (
    "write a layout function that takes a leaf's path and array, and returns a `PartitionSpec`: "
    "`lambda path, leaf: P(...)`"
)


@dataclass(frozen=True, repr=False)
class Composition(Layout):
    """A sequence of layouts that `|` joined.

    Each layout may shard only dimensions that the earlier layouts leave unsharded.
    """

    parts: tuple[Layout, ...]

    @staticmethod
    def of(first: Layout, then: Layout) -> "Composition":
        """Compose two layouts.

        Nested compositions are flattened, so parentheses do not matter.
        """
        if isinstance(first, NoLayout) or isinstance(then, NoLayout):
            raise RuleError(
                "`|` combines layouts, and `None` is not a layout: remove `None`, or write `P()` "
                "to replicate the arrays"
            )
        parts: list[Layout] = []
        for layout in (first, then):
            parts += layout.parts if isinstance(layout, Composition) else (layout,)
        return Composition(tuple(parts))

    @property
    def inner(self) -> tuple[Layout, ...]:
        return self.parts

    @property
    def rules(self) -> Layout | None:
        tables = [part.rules for part in self.parts if part.rules is not None]
        if len(tables) < 2:
            return tables[0] if tables else None
        return Composition(tuple(tables))

    def decide(self, leaf: Leaf, so_far: Decision | None, mesh: MeshView) -> Decision:
        first, *others = self.parts
        decision = first.decide(leaf, so_far, mesh)
        for layout in others:
            decision = layout.decide(leaf, decision, mesh)
        return decision

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


def walk(layout: Layout) -> list[Layout]:
    """Return a layout, and all layouts in it."""
    found = [layout]
    for inner in layout.inner:
        found += walk(inner)
    return found


def asks_more(layout: Layout) -> bool:
    """Return whether decisions depend on more than the leaves' `kind`, such as their paths."""
    return any(type(inner).asks is not Layout.asks for inner in walk(layout))


def merge_names(layouts: Iterable[Layout]) -> dict[type, Names]:
    """Merge the `names=` of several layouts.

    Raises:
        RuleError: if two layouts give different names to one class.
    """
    merged: dict[type, Names] = {}
    for layout in layouts:
        for cls, given in layout.given_names.items():
            if merged.setdefault(cls, given) != given:
                raise RuleError(
                    f"two layouts name the axes of {cls.__name__} differently ({merged[cls]} and "
                    f"{given}): use one `ft.names(...)` for the class"
                )
    return merged


# Values that a user writes


def meant_rules(value: object) -> str:
    """Return a hint for an error about a mapping that is probably a table of rules, or `""`."""
    if not isinstance(value, Mapping) or not value:
        return ""
    # A tree of layouts has layouts as values; a table of rules has mesh axes.
    for item in value.values():
        if item is not None and not isinstance(item, str | tuple):
            return ""
    return "; for a table of rules, write `ft.AxisRules({...})`"


def written_pairs(written: Any, wanted: str) -> list[tuple[Any, Any]]:
    """Return the pairs of a mapping, or of an iterable of pairs.

    Args:
        written: the user's value.
        wanted: the beginning of the error message, which names the expected value.

    Raises:
        RuleError: if the value is neither a mapping nor an iterable of pairs.
    """
    if isinstance(written, Mapping):
        return list(written.items())
    # Strings and specs are iterable, but do not contain pairs.
    if not isinstance(written, Iterable) or isinstance(written, str | bytes | PartitionSpec):
        raise RuleError(f"{wanted}; {written!r} is neither")
    pairs: list[tuple[Any, Any]] = []
    for pair in written:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise RuleError(f"{wanted}; {pair!r} is not a pair")
        pairs.append((pair[0], pair[1]))
    return pairs


def pairs_text(pairs: Sequence[tuple[str, str]]) -> str:
    """Format pairs as a user writes them, given the texts of both sides."""
    if len(dict(pairs)) == len(pairs):
        return dict_text(pairs)
    # A dict cannot contain a key twice.
    return "[" + ", ".join([f"({left}, {right})" for left, right in pairs]) + "]"


def is_layout(value: object) -> bool:
    """Return whether a value is one layout, as opposed to a tree of layouts."""
    return (
        value is None
        or isinstance(value, Layout | PartitionSpec | NamedSharding)
        or _is_function(value)
    )


def _is_function(value: object) -> bool:
    """Return whether a value is a function that computes a layout."""
    # A callable module is a tree of layouts with a model's structure.
    return (
        callable(value)
        and not isinstance(value, type)
        and not hasattr(value, "__dataclass_fields__")
    )


def as_layout(value: Any) -> Layout:
    """Return the layout that a user's value stands for.

    Raises:
        RuleError: if the value is not a layout.
        RuleError: if the value is an invalid spec.
    """
    match value:
        case Layout():
            return value
        case PartitionSpec():
            # The spec is checked here, so that the traceback shows where it is written.
            invalid = invalid_entry(value)
            if invalid is not None:
                raise RuleError(f"{spec_text(value)}: {invalid}")
            return SpecLayout(value)
        case NamedSharding():
            # Default memory becomes None, so that it does not replace an earlier layout's memory.
            return SpecLayout(value.spec, value.mesh, other_memory(value))
        case None:
            return NoLayout()
    if _is_function(value):
        check_callback(value, "a layout")
        return FunctionLayout(value)
    raise RuleError(f"{value!r} is not a layout: write {LAYOUTS}{meant_rules(value)}")


LAYOUTS = (
    "`P(...)`, `AxisRules`, `FSDP`, `StateSharding`, a `Plan`, or a callable `(path, leaf) -> P`"
)
"""The values that a user can write for a layout, for messages."""


@dataclass(frozen=True, repr=False, eq=False)
class Modifier(Layout):
    """Base class of layouts that change another layout."""

    layout: Layout

    @property
    def inner(self) -> tuple[Layout, ...]:
        return (self.layout,)

    @property
    def rules(self) -> Layout | None:
        return self.layout.rules

    def decide(self, leaf: Leaf, so_far: Decision | None, mesh: MeshView) -> Decision:
        return self.layout.decide(leaf, so_far, mesh)


@dataclass(frozen=True, repr=False)
class OnHost(Modifier):
    """A layout, made by `ft.on_host`, that places arrays in pinned host memory."""

    def decide(self, leaf: Leaf, so_far: Decision | None, mesh: MeshView) -> Decision:
        decision = self.layout.decide(leaf, so_far, mesh)
        return decision._replace(memory_kind="pinned_host")

    def __repr__(self) -> str:
        return f"on_host({self.layout!r})"


def on_host(layout: LayoutLike) -> Layout:
    """Return a copy of a layout that places arrays in pinned host memory.

    Args:
        layout: any layout.

    Raises:
        RuleError: if the argument is None.
        RuleError: if the argument is not a layout.

    Examples:
        >>> ft.plan(jnp.ones((4, 8)), ft.on_host(ft.P("data")), {"data": 2})[
        ...     ()
        ... ].memory_kind
        'pinned_host'
    """
    if layout is None:
        raise RuleError("on_host: `None` is not a layout: write `P()` to replicate the arrays")
    return OnHost(as_layout(layout))


# The layouts of a tree


class Part(NamedTuple):
    """One layout of a prefix tree.

    Attributes:
        layout: the layout.
        path: the path of the layout's subtree.
        partial: whether the layout covers more than this tree, so that its filters may match
            nothing here.
        scope: the part of a call or tree to which the layout applies.
        for_arrays: a different layout for an argument that is one array; None to use `layout`.
    """

    layout: Layout
    path: Path
    partial: bool = False
    scope: Scope = Scope()
    for_arrays: Layout | None = None


def own_meshes(parts: Iterable[Part]) -> list[Mesh | AbstractMesh | None]:
    """Return the mesh of each layout in a prefix tree, or None for a layout without a mesh."""
    return [part.layout.own_mesh for part in parts]


def as_partial(parts: Iterable[Part]) -> list[Part]:
    """Mark the layouts as covering more than the tree."""
    return [part._replace(partial=True) for part in parts]


def copied(prefix: LayoutTree) -> LayoutTree:
    """Copy the containers of a prefix tree, so that later changes to them have no effect."""
    if prefix is None:
        return None
    return tree_map(lambda layout: layout, prefix, is_leaf=is_layout)


def broadcast(prefix: LayoutTree, tree: Any) -> list[Part]:
    """Return the layouts of a prefix tree, in the order of their leaves.

    Raises:
        RuleError: if the structure of the prefix tree does not fit the tree.
        RuleError: if the prefix tree contains something that is not a layout.
    """
    if is_layout(prefix):
        return [Part(_written(prefix, ROOT), ROOT)]
    return [
        Part(_written(layout, path), path, scope=Scope(len(path)))
        for layout, path, _ in aligned(prefix, tree, _LAYOUTS)
    ]


def _written(layout: LayoutLike, path: Path) -> Layout:
    """Return a layout of a prefix tree.

    Raises:
        RuleError: if the layout is invalid; the message gives its path.
    """
    try:
        return as_layout(layout)
    except RuleError as error:
        raise RuleError(f"at {where_text(path)}: {error}") from error


_LAYOUTS = PrefixOf(
    "layouts",
    "layout",
    is_layout,
    f"is not a layout: write {LAYOUTS}",
    lambda prefix, tree: meant_rules(prefix),
)


def read_for(tree: Any, layout: LayoutTree) -> tuple[Leaves, list[Part]]:
    """Return the leaves of a tree, with the names that a layout gives, and the layout's parts."""
    parts = broadcast(layout, tree)
    hints = {part.path: part.layout.hint for part in parts if part.layout.hint is not None}
    return read(tree, merge_names([part.layout for part in parts]), hints), parts


def read_on_mesh(
    tree: Any, layout: LayoutTree, mesh: MeshLike
) -> tuple[Leaves, list[Part], MeshView]:
    """Return what `read_for` returns, and the view of `mesh`, the layout's or the current mesh."""
    leaves, parts = read_for(tree, layout)
    return leaves, parts, agreed_mesh(mesh, own_meshes(parts))
