"""`Layout`: a leaf and a mesh ─► a `Decision`; what a user can write for a layout; and a prefix
tree of layouts ─► each with the path that it is for."""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import tree_map

from functree.argument_checks import check_callback
from functree.devices.meshes import MeshView
from functree.devices.placement import other_memory
from functree.devices.specs import invalid_entry, spec_text
from functree.errors import USERS_ERRORS, RuleError, ShardingError, error_text
from functree.labels.annotations.hints import Hint
from functree.labels.leaf import Leaf
from functree.labels.training_state import Scope
from functree.layout.decision import (
    USE_PLAN_OPTIMIZER,
    Decision,
    apply_spec,
    is_optimizer_state,
    whole,
)
from functree.tree.axes import Names, dict_text
from functree.tree.paths import Path
from functree.tree.prefix import PrefixOf, aligned, where_text


class Layout:
    """The base class of layouts, which are immutable, hashable and equal by value.

    `first | then` is a layout in which `then` shards dimensions that `first` leaves unsharded. This
    class is not for subclasses of users: to compute a layout, give a function `(path, leaf) -> P`
    in the place of a layout.

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
        """Decide about one leaf.

        Args:
            leaf: the leaf.
            so_far: what the layouts before this one have decided; None if this is the first.
            mesh: the sizes of the mesh.
        """

    @property
    def inner(self) -> tuple["Layout", ...]:
        """The layouts that this one is made of."""
        return ()

    def asks(self, leaf: Leaf) -> Hashable:
        """What the decision depends on besides the leaf's `kind`: leaves for which both are equal
        share one decision."""
        return tuple([layout.asks(leaf) for layout in self.inner])

    def claims(self, leaf: Leaf) -> bool:
        """Whether the layout itself decides about a leaf that follows another one, because it was
        written for this leaf, as the filter `opt_state.**` is."""
        return any(layout.claims(leaf) for layout in self.inner)

    @property
    def rules(self) -> "Layout | None":
        """The `AxisRules` in the layout, which lay out activations, too; None if there are none."""
        return None

    @property
    def given_names(self) -> Mapping[type, Names]:
        """The axes that the layout gives to the leaves of classes without annotations."""
        return merge_names(self.inner)

    @property
    def hint(self) -> Hint | None:
        """The annotation by which leaves have their axes, or None if they are annotated
        themselves."""
        return None

    @property
    def own_mesh(self) -> Mesh | AbstractMesh | None:
        """The mesh that is a part of the layout, or None."""
        for layout in self.inner:
            if layout.own_mesh is not None:
                return layout.own_mesh
        return None

    def __or__(self, then: "LayoutLike") -> "Layout":
        return Composition.of(self, as_layout(then))

    def __ror__(self, first: "LayoutLike") -> "Layout":
        return Composition.of(as_layout(first), self)


LayoutLike = Layout | PartitionSpec | NamedSharding | Callable[[Path, Any], PartitionSpec] | None
"""What a user can write for a layout."""

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
        # Under `vmap` each leaf has the dimension of the batch, counts and keys too. More entries
        # would be for the dimensions of parameters, and what they are here is not known.
        follows = leaf.follows
        if follows is None or not follows.batched:
            return False
        return follows.path is None or (not follows.known and len(self.spec.partitions) < 2)

    def decide(self, leaf: Leaf, so_far: Decision | None, mesh: MeshView) -> Decision:
        # `whole` and not `undecided`: a spec that is given here replaces the spec of an annotation.
        decision = so_far or whole(leaf)
        # In a tree a scalar is whole. A spec that is written for a scalar alone is a mistake.
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
    """`None`: no layout was given. The meaning depends on the function that takes the layout."""

    def claims(self, leaf: Leaf) -> bool:
        return True  # if no layout was given, none was given for the optimizer's state either

    def decide(self, leaf: Leaf, so_far: Decision | None, mesh: MeshView) -> Decision:
        # It is never after another layout: `|` refuses `None`.
        return whole(leaf)._replace(specified=False)

    def __repr__(self) -> str:
        return "None"


@dataclass(frozen=True, repr=False)
class FunctionLayout(Layout):
    """A callable `(path, leaf) -> P`."""

    function: Callable[[Path, Any], Any]

    def asks(self, leaf: Leaf) -> Hashable:
        return leaf.path  # the function may ask for anything, so no two leaves are alike

    def decide(self, leaf: Leaf, so_far: Decision | None, mesh: MeshView) -> Decision:
        before = so_far or whole(leaf)
        if leaf.seen is None:
            return before.wrong((f"has no path for {self!r}", PATHLESS))
        try:
            spec = self.function(leaf.seen, leaf.value)
        except USERS_ERRORS as error:
            # Any function may stand here by mistake, such as `jax.nn.gelu`, and what it says of its
            # own arguments would name neither the leaf nor the layout.
            problem = leaf.problem(f"{self!r} raised {error_text(error)}", LAYOUT_FUNCTION)
            raise ShardingError(f"the layout function {self!r} failed", [problem]) from error
        if isinstance(spec, PartitionSpec):
            return apply_spec(leaf, spec, before, f"{spec_text(spec)} by {self!r}")
        why = f"{self!r} returned {spec!r}, which is not a PartitionSpec"
        return before.wrong((why, "return `P(...)` for every leaf; `P()` to replicate it"))

    def __repr__(self) -> str:
        # A `functools.partial` has no name.
        return getattr(self.function, "__qualname__", repr(self.function))


PATHLESS = "give it a layout of its own: an entry of `in_shardings=`, or a pattern with its name"
LAYOUT_FUNCTION = (
    "a layout function takes the path and the array of a leaf, and returns a `PartitionSpec`: "
    "`lambda path, leaf: P(...)`"
)


@dataclass(frozen=True, repr=False)
class Composition(Layout):
    """Layouts one after another; made by `|`. Each may only shard dimensions that the ones before
    left unsharded."""

    parts: tuple[Layout, ...]

    @staticmethod
    def of(first: Layout, then: Layout) -> "Composition":
        """The composition of two layouts. The parts of compositions are joined, so that brackets do
        not matter."""
        if isinstance(first, NoLayout) or isinstance(then, NoLayout):
            raise RuleError(
                "`|` joins layouts, and `None` is not one: leave it out, or write `P()` to "
                "replicate"
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


def walk(layout: Layout) -> Iterator[Layout]:
    """A layout, and all layouts in it."""
    yield layout
    for inner in layout.inner:
        yield from walk(inner)


def merge_names(layouts: Iterable[Layout]) -> dict[type, Names]:
    """The `names=` of several layouts in one mapping. Raises RuleError if two give different names
    to one class."""
    merged: dict[type, Names] = {}
    for layout in layouts:
        for cls, given in layout.given_names.items():
            if merged.setdefault(cls, given) != given:
                raise RuleError(
                    f"two layouts name {cls.__name__} differently: {merged[cls]} and {given}"
                )
    return merged


# What a user can write for a layout


_ONE_DEVICE = (
    "; for a single device write `P()`, on the mesh `ft.make_mesh(data=1, devices=[device])`"
)


def meant_rules(value: object) -> str:
    """The end of an error about a value that may be meant as a table of rules, or is JAX's own for
    a sharding; empty if it is neither."""
    if isinstance(value, Format):
        return "; memory layouts are the compiler's choice: write its `.sharding`"
    if isinstance(value, Sharding | jax.Device):
        return _ONE_DEVICE
    if not isinstance(value, Mapping) or not value:
        return ""
    # The values of a tree of layouts are layouts, and those of a table of rules are mesh axes.
    for one in value.values():
        if one is not None and not isinstance(one, str | tuple):
            return ""
    return "; for a table of rules write `ft.AxisRules({...})`"


def written_pairs(written: Any, wanted: str) -> list[tuple[Any, Any]]:
    """A mapping, or an iterable of pairs, as a list of pairs.

    Args:
        written: what a user wrote.
        wanted: what is expected, for the error.

    Raises:
        RuleError: it is something else.
    """
    if isinstance(written, Mapping):
        return list(written.items())
    # These can be iterated over, but their elements are no pairs.
    if not isinstance(written, Iterable) or isinstance(written, str | bytes | PartitionSpec):
        raise RuleError(f"{wanted}; {written!r} is neither")
    pairs: list[tuple[Any, Any]] = []
    for pair in written:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise RuleError(f"{wanted}; {pair!r} is neither")
        pairs.append((pair[0], pair[1]))
    return pairs


def pairs_text(pairs: Sequence[tuple[str, str]]) -> str:
    """Pairs as a user writes them, from the texts of both sides."""
    if len(dict(pairs)) == len(pairs):
        return dict_text(pairs)
    # A dict would keep only one of several pairs with the same left side.
    return "[" + ", ".join([f"({left}, {right})" for left, right in pairs]) + "]"


def is_layout(value: object) -> bool:
    """Whether a value is a layout, and not a tree of layouts."""
    return (
        value is None
        or isinstance(value, Layout | PartitionSpec | NamedSharding)
        or _is_function(value)
    )


def _is_function(value: object) -> bool:
    """Whether a value is a function that computes a layout."""
    # A callable module is a tree of layouts with the structure of a model, and not a function.
    return (
        callable(value)
        and not isinstance(value, type)
        and not hasattr(value, "__dataclass_fields__")
    )


def as_layout(value: Any) -> Layout:
    """What a user wrote for a layout ─► the layout. Raises RuleError for anything else."""
    match value:
        case Layout():
            return value
        case PartitionSpec():
            # Here and not for the first leaf: the mistake is where the layout is written.
            invalid = invalid_entry(value)
            if invalid is not None:
                raise RuleError(f"{spec_text(value)}: {invalid}")
            return SpecLayout(value)
        case NamedSharding():
            # Default memory is None here, as for a bare spec: it does not replace the memory of an
            # earlier layout.
            return SpecLayout(value.spec, value.mesh, other_memory(value))
        case None:
            return NoLayout()
    if _is_function(value):
        check_callback(value, "a layout")
        return FunctionLayout(value)
    raise RuleError(f"{value!r} is not a layout: write {LAYOUTS}{meant_rules(value)}")


LAYOUTS = (
    "`P(...)`, `AxisRules`, `FSDP`, `StateSharding`, a `Plan`, or a callable (path, leaf) -> P"
)
"""What a user can write for a layout, in messages."""


@dataclass(frozen=True, repr=False, eq=False)
class Modifier(Layout):
    """The base of layouts that change another one."""

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
    """Another layout in the pinned memory of the host; made by `ft.on_host`."""

    def decide(self, leaf: Leaf, so_far: Decision | None, mesh: MeshView) -> Decision:
        decision = self.layout.decide(leaf, so_far, mesh)
        return decision._replace(memory_kind="pinned_host")

    def __repr__(self) -> str:
        return f"on_host({self.layout!r})"


def on_host(layout: LayoutLike) -> Layout:
    """The same layout in the pinned memory of the host.

    Args:
        layout: any layout.

    Raises:
        RuleError: the argument is not a layout, or is None.

    Examples:
        >>> ft.plan(jnp.ones((4, 8)), ft.on_host(ft.P("data")), {"data": 2})[
        ...     ()
        ... ].memory_kind
        'pinned_host'
    """
    if layout is None:
        raise RuleError("`on_host` takes a layout, and `None` is not one: write `P()` to replicate")
    return OnHost(as_layout(layout))


class Part(NamedTuple):
    """One layout of a prefix tree.

    Attributes:
        layout: the layout.
        path: the path of the subtree that the layout is for.
        partial: whether the layout is for more than the tree, so that filters in it may match
            nothing here.
        scope: where the paths begin that filters see.
        for_arrays: the layout of an argument that is one array, if that is another one.
    """

    layout: Layout
    path: Path
    partial: bool = False
    scope: Scope = Scope()
    for_arrays: Layout | None = None


def own_meshes(parts: Iterable[Part]) -> list[Mesh | AbstractMesh | None]:
    """The mesh that each layout of a prefix tree has of its own."""
    return [part.layout.own_mesh for part in parts]


def as_partial(parts: Iterable[Part]) -> list[Part]:
    """The parts, as layouts that are for more than the tree."""
    return [part._replace(partial=True) for part in parts]


def copied(prefix: LayoutTree) -> LayoutTree:
    """A prefix tree of layouts in containers of its own, on which a later change of the given ones
    has no effect."""
    if prefix is None:
        return None
    return tree_map(lambda one: one, prefix, is_leaf=is_layout)


def broadcast(prefix: LayoutTree, tree: Any) -> list[Part]:
    """The layouts of a prefix tree, in the order of the leaves that they are for.

    Raises:
        RuleError: the prefix has another structure than the tree, or contains something that is not
            a layout.
    """
    return [
        Part(_written(one, where_text(path)), path, scope=Scope(len(path)))
        for one, path, _ in aligned(prefix, tree, _LAYOUTS)
    ]


def _written(layout: LayoutLike, where: str) -> Layout:
    """A layout of a prefix tree. Raises RuleError with the path for one that is invalid."""
    try:
        return as_layout(layout)
    except RuleError as error:
        raise RuleError(f"at {where}: {error}") from error


def _hint(prefix: Any, tree: Any) -> str:
    """The end of an error about layouts of another structure: rules, or the state of an optimizer,
    may be meant."""
    hint = meant_rules(prefix)
    classes = {type(tree)}
    # A chain of transformations has a tuple of states.
    if isinstance(tree, tuple):
        classes.update(map(type, tree))
    if any(map(is_optimizer_state, classes)):
        hint += USE_PLAN_OPTIMIZER
    return hint


_LAYOUTS = PrefixOf("layouts", "layout", is_layout, f"is not a layout: write {LAYOUTS}", _hint)
