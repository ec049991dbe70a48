"""`Layout`: the leaves of a tree and a mesh ─► a `Decision` for each leaf; and what a user can write for a layout."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from functree.errors import Problem, RuleError
from functree.layout.decision import Decision, apply_spec, decide_each, whole
from functree.layout.meshes import MeshView
from functree.layout.placement import other_memory
from functree.layout.specs import invalid_entry, spec_text
from functree.parameters import check_callback
from functree.tree.axes import Names
from functree.tree.leaf import Leaf
from functree.tree.paths import Path


class Resolution(NamedTuple):
    """What a layout decides about some leaves.

    Attributes:
        decisions: one for each leaf.
        problems: what is wrong with the layout itself, and not with a single leaf.
        unused: names in rules that no leaf has.
        leaves: the leaves with other axes than their annotations say, if the layout knows these; or None.
    """

    decisions: list[Decision]
    problems: tuple[Problem, ...] = ()
    unused: tuple[str, ...] = ()
    leaves: Sequence[Leaf] | None = None


class Layout:
    """The base class of layouts. A layout is immutable and hashable, is equal by value, and has a readable `repr`.

    `first | then` is a layout in which `then` shards dimensions that `first` leaves unsharded. This class is not for
    subclasses of users: to compute a layout, give a function `(path, leaf) -> P` in the place of a layout.

    Examples:
        >>> rules = ft.AxisRules({"hidden": "model", "embed": None}) | ft.FSDP("data", min_size=0)
        >>> ft.plan(jnp.ones((4, 8)), rules, {"data": 2, "model": 4}, check=False).problems[0].remedy
        'annotate the field (`Float[Array, "..."]`), give `names=` to the rules, or lay it out by a path filter'
    """

    __slots__ = ()

    @abstractmethod
    def resolve(self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None) -> Resolution:
        """Decide about each leaf.

        Args:
            leaves: the leaves.
            mesh: the sizes of the mesh.
            before: the decisions of the layouts before this one, or None if this is the first.
        """

    @property
    def given_names(self) -> Mapping[type, Names]:
        """The axes that the layout gives to the leaves of classes without annotations."""
        return {}

    @property
    def own_mesh(self) -> Mesh | AbstractMesh | None:
        """The mesh that is a part of the layout, or None."""
        return None

    @property
    def by_axes(self) -> "Layout | None":
        """The part of the layout that lays out an array by the names of its axes alone; None if there is none.

        Such an array is an activation. `FSDP` and specs are written for parameters.
        """
        return None

    @property
    def tolerant(self) -> "Layout":
        """The same layout, in which a filter that matches no leaf is not an error."""
        return self

    def __or__(self, then: "LayoutLike") -> "Layout":
        return Composition.of(self, as_layout(then))

    def __ror__(self, first: "LayoutLike") -> "Layout":
        return Composition.of(as_layout(first), self)


LayoutLike = Layout | PartitionSpec | NamedSharding | Callable[[Path, Any], PartitionSpec] | None
"""What a user can write for a layout."""

LayoutTree = Any
"""A layout, or a prefix tree of layouts."""


@dataclass(frozen=True, repr=False)
class Fixed(Layout):
    """A `PartitionSpec` for every leaf, or a `NamedSharding` with its mesh and memory kind."""

    spec: PartitionSpec
    mesh: Mesh | AbstractMesh | None = None
    memory_kind: str | None = None

    @property
    def own_mesh(self) -> Mesh | AbstractMesh | None:
        return self.mesh

    def resolve(self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None) -> Resolution:
        return Resolution(decide_each(leaves, before, lambda leaf: (leaf.axes, len(leaf.shape)), self._decide))

    def _decide(self, leaf: Leaf, before: Decision | None) -> Decision:
        # `whole` and not `undecided`: a spec that is given here replaces the spec of an annotation.
        start = whole(leaf) if before is None else before
        decision = apply_spec(leaf, self.spec, start, f"{spec_text(self.spec)} as given")
        if self.memory_kind is None:
            return decision
        return decision._replace(memory_kind=self.memory_kind)

    def __repr__(self) -> str:
        if self.mesh is None:
            return spec_text(self.spec)
        return repr(NamedSharding(self.mesh, self.spec, memory_kind=self.memory_kind))


@dataclass(frozen=True, repr=False, eq=False)
class Modified(Layout):
    """The base of layouts that change what another one decides. Names and the mesh are those of the other one."""

    layout: Layout

    @property
    def given_names(self) -> Mapping[type, Names]:
        return self.layout.given_names

    @property
    def own_mesh(self) -> Mesh | AbstractMesh | None:
        return self.layout.own_mesh


@dataclass(frozen=True, repr=False)
class Unspecified(Layout):
    """`None`: no layout was given. The meaning depends on the function that takes the layout."""

    def resolve(self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None) -> Resolution:
        return Resolution([whole(leaf)._replace(specified=False) for leaf in leaves])

    def __repr__(self) -> str:
        return "None"


@dataclass(frozen=True, repr=False)
class Computed(Layout):
    """A callable `(path, leaf) -> P`."""

    function: Callable[[Path, Any], Any]

    def resolve(self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None) -> Resolution:
        starts = before or map(whole, leaves)
        return Resolution([self._decide(leaf, start) for leaf, start in zip(leaves, starts, strict=True)])

    def _decide(self, leaf: Leaf, before: Decision) -> Decision:
        spec = self.function(leaf.patterned[0], leaf.value)
        if isinstance(spec, PartitionSpec):
            return apply_spec(leaf, spec, before, f"{spec_text(spec)} by {self!r}")
        why = f"{self!r} returned {spec!r}, which is not a PartitionSpec"
        return before.wrong((why, "return `P(...)` for every leaf; `P()` to replicate it"))

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))


@dataclass(frozen=True, repr=False)
class Composition(Layout):
    """Layouts one after another; made by `|`. Each may only shard dimensions that the ones before left unsharded."""

    parts: tuple[Layout, ...]

    @staticmethod
    def of(first: Layout, then: Layout) -> "Composition":
        """The composition of two layouts. The parts of compositions are joined, so that brackets do not matter."""
        if isinstance(first, Unspecified) or isinstance(then, Unspecified):
            raise RuleError("`|` joins layouts, and `None` is not one: leave it out, or write `P()` to replicate")
        parts: list[Layout] = []
        for layout in (first, then):
            parts += layout.parts if isinstance(layout, Composition) else (layout,)
        return Composition(tuple(parts))

    @property
    def given_names(self) -> Mapping[type, Names]:
        return merge_names(part.given_names for part in self.parts)

    @property
    def own_mesh(self) -> Mesh | AbstractMesh | None:
        return next((part.own_mesh for part in self.parts if part.own_mesh is not None), None)

    @property
    def by_axes(self) -> Layout | None:
        named = tuple(part.by_axes for part in self.parts if part.by_axes is not None)
        return Composition(named) if len(named) > 1 else next(iter(named), None)

    @property
    def tolerant(self) -> Layout:
        return Composition(tuple(part.tolerant for part in self.parts))

    def resolve(self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None) -> Resolution:
        problems: list[Problem] = []
        unused: list[str] = []
        for part in self.parts:
            found = part.resolve(leaves, mesh, before)
            before = found.decisions
            problems += found.problems
            unused += found.unused
        return Resolution(list(before or ()), tuple(problems), tuple(unused))

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


def merge_names(several: Iterable[Mapping[type, Names]]) -> dict[type, Names]:
    """The `names=` of several layouts in one mapping. Raises RuleError if two give different names to one class."""
    merged: dict[type, Names] = {}
    for names in several:
        for cls, given in names.items():
            if merged.setdefault(cls, given) != given:
                raise RuleError(f"two layouts name {cls.__name__} differently: {merged[cls]} and {given}")
    return merged


# What a user can write for a layout


def meant_rules(value: object) -> str:
    """The end of an error about a value that may be meant as a table of rules; empty if it is not one."""
    if not isinstance(value, Mapping) or not value:
        return ""
    # The values of a tree of layouts are layouts, and those of a table of rules are mesh axes.
    is_table = all(one is None or isinstance(one, str | tuple) for one in value.values())
    return "; for a table of rules write `ft.AxisRules({...})`" if is_table else ""


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
    if not isinstance(written, Iterable) or isinstance(written, str | bytes | PartitionSpec):
        raise RuleError(f"{wanted}; {written!r} is neither")
    pairs = list(written)
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise RuleError(f"{wanted}; {pair!r} is neither")
    return [(left, right) for left, right in pairs]


def is_layout(value: Any) -> bool:
    """Whether a value is a layout, and not a tree of layouts."""
    return value is None or isinstance(value, Layout | PartitionSpec | NamedSharding) or _is_function(value)


def _is_function(value: Any) -> bool:
    """Whether a value is a function that computes a layout."""
    # A callable module is a tree of layouts with the structure of a model, and not a function.
    return callable(value) and not isinstance(value, type) and not hasattr(value, "__dataclass_fields__")


def as_layout(value: Any) -> Layout:
    """What a user wrote for a layout ─► the layout. Raises RuleError for anything that is not a layout."""
    match value:
        case Layout():
            return value
        case PartitionSpec():
            invalid = invalid_entry(value)
            if invalid is not None:
                raise RuleError(f"{spec_text(value)}: {invalid}")
            return Fixed(value)
        case NamedSharding():
            # Default memory is None here, as for a bare spec: it does not replace the memory of an earlier layout.
            return Fixed(value.spec, value.mesh, other_memory(value))
        case None:
            return Unspecified()
    if _is_function(value):
        check_callback(value, "a layout")
        return Computed(value)
    raise RuleError(f"{value!r} is not a layout: write {LAYOUTS}{meant_rules(value)}")


LAYOUTS = "`P(...)`, `AxisRules`, `FSDP`, `StateSharding`, a `Plan`, or a callable (path, leaf) -> P"
"""What a user can write for a layout, in messages."""
