"""What a layout is: a value that decides, for the leaves of a tree and a mesh's sizes, where each dimension goes."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from functree.errors import Problem, RuleError
from functree.layout.meshes import MeshView
from functree.layout.specs import axes_text, odd_entry, spec_text
from functree.tree.axes import Names
from functree.tree.leaf import Leaf
from functree.tree.paths import Path


class Decision(NamedTuple):
    """Where one leaf goes.

    Attributes:
        entries: for each dimension, the mesh axes over which it is split; `()` where it is whole.
        rules: for each dimension, what split it, as messages name it.
        reason: why, for a person.
        pending: dimensions that nothing has decided yet, and why: another layout behind this one may.
        problems: (why, remedy) of what is wrong whatever comes behind.
        memory_kind: where in a device's memory; None for the default.
        said: False where nobody has said anything: `None` as a layout.
        unsettled: the named dimensions of which nobody has said anything yet; names are checked against these.
        fell: the named dimensions that only `...: None` is about.
    """

    entries: tuple[tuple[str, ...], ...]
    rules: tuple[str, ...]
    reason: str = ""
    pending: tuple[tuple[int, str, str], ...] = ()
    problems: tuple[tuple[str, str], ...] = ()
    memory_kind: str | None = None
    said: bool = True
    unsettled: tuple[int, ...] = ()
    fell: tuple[int, ...] = ()


class Resolution(NamedTuple):
    """What a layout says of some leaves.

    Attributes:
        decisions: one for each.
        problems: what is wrong with the layout as a whole.
        unused: names of rules that no leaf has.
        leaves: the leaves themselves, where the layout knows their axes better than their annotations do.
    """

    decisions: list[Decision]
    problems: tuple[Problem, ...] = ()
    unused: tuple[str, ...] = ()
    leaves: Sequence[Leaf] | None = None


class Layout:
    """A layout: frozen, hashable, equal by value, printable. `first | then` shards by `then` what `first` left whole.

    Examples:
        >>> rules = ft.AxisRules({"hidden": "model", "embed": None}) | ft.FSDP("data", min_size=0)
        >>> ft.plan(jnp.ones((4, 8)), rules, {"data": 2, "model": 4}, check=False).problems[0].remedy
        'annotate the field (`Float[Array, "..."]`), give `names=` to the rules, or lay it out by a path filter'
    """

    __slots__ = ()

    @abstractmethod
    def resolve(self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None) -> Resolution:
        """Decide for each leaf. `before` is what the layouts in front of this one decided."""

    @property
    def given_names(self) -> Mapping[type, Names]:
        """The axes that it gives to foreign classes."""
        return {}

    @property
    def own_mesh(self) -> Mesh | AbstractMesh | None:
        """The mesh that it brings along, if any."""
        return None

    def __or__(self, then: Any) -> "Layout":
        return Composition.of(self, as_layout(then))

    def __ror__(self, first: Any) -> "Layout":
        return Composition.of(as_layout(first), self)


def undecided(leaf: Leaf) -> Decision:
    """Every dimension whole, or as the physical spec of the leaf's annotation has it."""
    blank = whole(leaf)
    return blank if leaf.spec is None else apply_spec(leaf, leaf.spec, blank, "its annotation")


def whole(leaf: Leaf, reason: str = "") -> Decision:
    """Every dimension whole."""
    ndim = len(leaf.shape)
    unsettled = tuple(i for i, name in enumerate(leaf.axes) if name is not None)
    return Decision(((),) * ndim, ("",) * ndim, reason, unsettled=unsettled)


@dataclass(frozen=True, repr=False)
class Fixed(Layout):
    """One `PartitionSpec` for every leaf, possibly with a mesh and a memory kind of its own."""

    spec: PartitionSpec
    mesh: Mesh | AbstractMesh | None = None
    memory_kind: str | None = None

    @property
    def own_mesh(self) -> Mesh | AbstractMesh | None:
        return self.mesh

    def resolve(self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None) -> Resolution:
        reason = f"{spec_text(self.spec)} as given"
        found = [
            apply_spec(leaf, self.spec, before[i] if before else whole(leaf), reason) for i, leaf in enumerate(leaves)
        ]
        if self.memory_kind is not None:
            found = [decision._replace(memory_kind=self.memory_kind) for decision in found]
        return Resolution(found)

    def __repr__(self) -> str:
        if self.mesh is None:
            return spec_text(self.spec)
        return repr(NamedSharding(self.mesh, self.spec, memory_kind=self.memory_kind))


@dataclass(frozen=True, repr=False)
class Unsaid(Layout):
    """`None`: nobody has said. What that means depends on who asks."""

    def resolve(self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None) -> Resolution:
        return Resolution([whole(leaf)._replace(said=False) for leaf in leaves])

    def __repr__(self) -> str:
        return "None"


@dataclass(frozen=True, repr=False)
class Computed(Layout):
    """A callable `(path, leaf) -> P`."""

    function: Callable[[Path, Any], Any]

    def resolve(self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None) -> Resolution:
        return Resolution([self._one(leaf, before[i] if before else whole(leaf)) for i, leaf in enumerate(leaves)])

    def _one(self, leaf: Leaf, before: Decision) -> Decision:
        spec = self.function(leaf.patterned[0], leaf.value)
        if isinstance(spec, PartitionSpec):
            return apply_spec(leaf, spec, before, f"{spec_text(spec)} by {self!r}")
        why = f"{self!r} returned {spec!r}, which is no PartitionSpec"
        return before._replace(problems=(*before.problems, (why, "return `P(...)` for every leaf; `P()` for whole")))

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))


@dataclass(frozen=True, repr=False)
class Composition(Layout):
    """Layouts in turn; each may only shard what those before it left whole."""

    parts: tuple[Layout, ...]

    @staticmethod
    def of(first: Layout, then: Layout) -> "Composition":
        def flat(x: Layout) -> tuple[Layout, ...]:
            return x.parts if isinstance(x, Composition) else (x,)

        if isinstance(first, Unsaid) or isinstance(then, Unsaid):
            raise RuleError("`|` joins layouts, and `None` is nobody's word: leave it out, or write `P()` for whole")
        return Composition(flat(first) + flat(then))

    @property
    def given_names(self) -> Mapping[type, Names]:
        return merge_names(part.given_names for part in self.parts)

    @property
    def own_mesh(self) -> Mesh | AbstractMesh | None:
        return next((part.own_mesh for part in self.parts if part.own_mesh is not None), None)

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


def merge_names(several: Any) -> dict[type, Names]:
    """The `names=` of several layouts. Raises RuleError where two name one class differently."""
    merged: dict[type, Names] = {}
    for names in several:
        for cls, given in names.items():
            if merged.setdefault(cls, given) != given:
                raise RuleError(f"two layouts name {cls.__name__} differently: {merged[cls]} and {given}")
    return merged


# Specs


def apply_spec(leaf: Leaf, spec: PartitionSpec, before: Decision, reason: str) -> Decision:
    """A physical spec over what is still whole. What it splits differently from before is a problem."""
    problems = list(before.problems)
    if len(spec.partitions) > len(leaf.shape):
        why = f"{spec_text(spec)} has {len(spec.partitions)} entries for {len(leaf.shape)} dimensions"
        problems.append((why, "give one entry for each dimension, or fewer"))
    odd = odd_entry(spec)
    if odd is not None:
        problems.append((f"{spec_text(spec)}: {odd}", "write names of mesh axes, or `None`"))
        return before._replace(problems=tuple(problems))
    if spec.unreduced or spec.reduced:
        why = f"{spec_text(spec)} is about partial sums, which no leaf has at rest"
        problems.append((why, "write a spec without it"))
    entries, rules = list(before.entries), list(before.rules)
    for i, entry in enumerate(spec.partitions[: len(entries)]):
        if entry is PartitionSpec.UNCONSTRAINED:
            why = f"dimension {i} is `P.UNCONSTRAINED`: nobody has said where it goes"
            problems.append((why, "write a mesh axis or `None`"))
            continue
        axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
        if axes and entries[i] and entries[i] != axes:
            problems.append(conflict(i, leaf, entries[i], axes, spec_text(spec)))
        elif axes:
            entries[i], rules[i] = axes, spec_text(spec)
    both = "; ".join(filter(None, (before.reason, reason)))
    return before._replace(
        entries=tuple(entries),
        rules=tuple(rules),
        reason=both,
        pending=(),
        problems=tuple(problems),
        unsettled=(),
        fell=(),
    )


def misread(leaf: Leaf, problem: Problem) -> tuple[str, str]:
    """The problem that a leaf's axes cannot be told, for a layout that has to know them."""
    return problem.why, problem.remedy + optimizer_remedy(leaf)


def optimizer_remedy(leaf: Leaf) -> str:
    """What to add to a remedy for a leaf of a bare optimizer state: there the model's annotations need not fit."""
    inside = any(issubclass(cls, tuple) and cls.__module__.split(".")[0] == "optax" for cls in leaf.within)
    return "; for an optimizer's state use `ft.plan_optimizer`" if inside else ""


def conflict(dim: int, leaf: Leaf, have: Sequence[str], want: Sequence[str], who: str) -> tuple[str, str]:
    """The problem that a layout wants to split what one before it has split otherwise."""
    why = f"{dim_text(leaf, dim)} is on {axes_text(have)} already, and {who} wants it on {axes_text(want)}"
    return why, "let the layout behind `|` shard only what the first leaves whole"


def dim_text(leaf: Leaf, dim: int) -> str:
    """A dimension as messages name it: by its axis, else by its position."""
    name = leaf.axes[dim] if dim < len(leaf.axes) else None
    return f'"{name}"' if name else f"dimension {dim}"


# What stands for a layout


def written_pairs(written: Any, wanted: str) -> list[tuple[Any, Any]]:
    """A mapping, or pairs, as pairs. Raises RuleError for what is neither; `wanted` says what is."""
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
    """Whether a value is a layout, and not a tree of them."""
    return value is None or isinstance(value, Layout | PartitionSpec | NamedSharding) or _is_function(value)


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type) and not hasattr(value, "__dataclass_fields__")


def as_layout(value: Any) -> Layout:
    """What a user wrote for a layout ─► the layout. Raises RuleError where it means nothing."""
    match value:
        case Layout():
            return value
        case PartitionSpec():
            odd = odd_entry(value)
            if odd is not None:
                raise RuleError(f"{spec_text(value)}: {odd}")
            return Fixed(value)
        case NamedSharding():
            return Fixed(value.spec, value.mesh, value.memory_kind)
        case None:
            return Unsaid()
    if _is_function(value):
        return Computed(value)
    raise RuleError(
        f"{value!r} is no layout: write `P(...)`, `AxisRules`, `FSDP`, `StateSharding`, a `Plan`, a callable "
        "(path, leaf) -> P, or a tree of these"
    )
