"""Labelled leaves, layouts and a mesh ─► a `Decision` for each leaf, and all that is wrong.

Leaves are labelled before: they have their axes, and what they follow. A layout decides about the
leaves that follow nothing, and the others take these decisions.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import starmap
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from functree.devices.meshes import MeshView
from functree.devices.specs import spec_text
from functree.errors import Problem, warn
from functree.labels.leaf import FollowedLeaf, Leaf
from functree.labels.leaves import Leaves
from functree.labels.training_state import label_training_states
from functree.layout.decision import WHOLE, Decision, Dimension, Source
from functree.layout.layout import DeadFilter, Layout, Resolution
from functree.layout.prefix import Part
from functree.layout.validation import (
    absent,
    followed_paths,
    is_clean,
    leaf_problems,
    marked_followers,
    near_misses,
)
from functree.tree.interfaces import TrainingState
from functree.tree.paths import Path


class Decisions(NamedTuple):
    """What is decided about the leaves of a tree.

    Attributes:
        leaves: the leaves, labelled.
        decisions: one for each leaf.
        problems: what is wrong.
        unused: the axes of rules that no leaf has.
    """

    leaves: Sequence[Leaf]
    decisions: Sequence[Decision]
    problems: Sequence[Problem]
    unused: Sequence[str]


UNSPECIFIED = ("no layout was given for this array (`None`)", "write `P()` to replicate it")


def decide_parts(
    leaves: Leaves,
    parts: Sequence[Part],
    view: MeshView,
    *,
    same: Sequence[int] | None = None,
    allow_unspecified: bool = False,
) -> Decisions:
    """Decide about the leaves of a tree.

    Args:
        leaves: the leaves.
        parts: the layouts of the tree, in the order of their leaves.
        view: the mesh.
        same: for each abstract leaf, a number that is the same for leaves that are the same array.
        allow_unspecified: whether it is no problem if no layout was given for an array (`None`).
    """
    decisions: list[Decision] = []
    problems, known = list(leaves.problems), list[Leaf]()
    parts_of: dict[Problem, list[Part]] = {}
    unused: list[str] = []
    for part, group in grouped(leaves, parts):
        found = decide(part.layout, group, view)
        known += group
        decisions += found.decisions
        own = list(found.problems)
        if not part.partial:
            own += filter_problems(found.dead)
        for problem in own:
            parts_of.setdefault(problem, []).append(part)
        unused += found.unused
    # Two parts of a tree may have the same layout, and report the same problem of it.
    problems += starmap(_of_parts, parts_of.items())
    # A rule that one part has no axis for may be used in another part.
    unused = absent(unused, leaves.leaves)
    problems += near_misses(known, decisions, unused)
    # Many leaves share one decision object, so each object is examined once. Most have no sharded
    # dimension and no fault, and then nothing can be wrong with the leaf.
    clean: dict[int, bool] = {}
    for leaf, decision in zip(known, decisions, strict=True):
        if not decision.specified and not allow_unspecified:
            problems.append(leaf.problem(*UNSPECIFIED))
        if id(decision) not in clean:
            clean[id(decision)] = is_clean(decision)
        if not clean[id(decision)]:
            problems += leaf_problems(leaf, decision, view)
    problems += _conflicting(known, decisions, same)
    problems = marked_followers(problems, followed_paths(known))
    return Decisions(known, decisions, problems, unused)


def decide(layout: Layout, leaves: Sequence[Leaf], view: MeshView) -> Resolution:
    """Decide by one layout about leaves that it decides about, and about those that follow these.

    A layout also decides about a leaf that follows another one if it was written for this leaf.
    """
    direct: list[Leaf] = []
    followers: list[Leaf] = []
    for leaf in leaves:
        if leaf.follows is None or layout.claims(leaf):
            direct.append(leaf)
        else:
            followers.append(leaf)
    found = layout.resolve(direct, view)
    # A tree without a training state has none.
    if not followers:
        return found
    decided = by_path(direct, found.decisions)
    decided |= by_path(followers, follow(followers, decided))
    return found._replace(decisions=[decided[leaf.path] for leaf in leaves])


def by_path(leaves: Sequence[Leaf], decisions: Sequence[Decision]) -> dict[Path, Decision]:
    """The decisions about leaves by the paths of these."""
    return {leaf.path: one for leaf, one in zip(leaves, decisions, strict=True)}


def follow(leaves: Sequence[Leaf], decided: Mapping[Path, Decision]) -> list[Decision]:
    """The decisions about leaves that follow others.

    Args:
        leaves: the leaves.
        decided: the decisions about those that they follow, by path.
    """
    # Most parameters have several leaves, such as the two moments of adam, about which the decision
    # is one object.
    known: dict[tuple[FollowedLeaf | None, int], Decision] = {}
    decisions: list[Decision] = []
    for leaf in leaves:
        key = leaf.follows, len(leaf.shape)
        decision = known.get(key)
        if decision is None:
            decision = known[key] = _followed(leaf, decided)
        decisions.append(decision)
    return decisions


def _followed(leaf: Leaf, decided: Mapping[Path, Decision]) -> Decision:
    """The decision about one leaf that follows another one."""
    start, follows = Decision((WHOLE,) * len(leaf.shape)), leaf.follows
    if follows is not None and not follows.known:
        return start.wrong(UNKNOWN)
    if follows is None or follows.path is None:
        return start.because(INDEPENDENT)
    parameter, name = decided[follows.path], str(follows.path)
    if not leaf.shape:
        return start.because(f"one number for {name}")
    if all(dim is None for dim in follows.dims):
        return start.because(INDEPENDENT)
    dimensions: list[Dimension] = []
    kept: list[str] = []
    for dim in follows.dims:
        if dim is None:
            dimensions.append(WHOLE)
            kept.append("unsharded")
            continue
        # The source is that of the parameter, so that what is wrong with both is said in the same
        # words. An unsharded dimension has none: checks of sharded dimensions go by it.
        one = parameter.dimensions[dim]
        source = one.source or Source(f"the spec of {name}")
        dimensions.append(Dimension(one.mesh_axes, source) if one.mesh_axes else WHOLE)
        kept.append(str(dim))
    reason, same = f"as {name}", follows.path
    # Unless it has all dimensions in their order, the reason lists them.
    if not follows.has_all_of(len(parameter.dimensions)):
        reason += f", its dimensions {', '.join(kept)}"
        same = None
    return Decision(
        tuple(dimensions),
        memory_kind=parameter.memory_kind,
        # If no layout was given for a parameter, none was given for its statistics either.
        specified=parameter.specified,
        follows=same,
    ).because(reason)


INDEPENDENT = "does not depend on the parameters"
UNKNOWN = (
    "depends on the shapes of the parameters in a way that cannot be determined, so it cannot get "
    "the spec of a parameter",
    "give a layout for such leaves: `otherwise=P()` replicates them; in a TrainState, by a "
    "pattern: `StateSharding({'opt_state.**': P(), ...: layout})`",
)


def grouped(leaves: Leaves, parts: Sequence[Part]) -> Iterator[tuple[Part, Sequence[Leaf]]]:
    """The arrays that each layout is for, labelled with what they follow and with the paths that
    patterns of the layout are matched with."""
    if len(parts) == 1 and not parts[0].path:
        yield parts[0], label_training_states(leaves.leaves, leaves.training)
        return
    start = 0
    for part in parts:
        # The leaves below the path of a part are next to each other, in the order of the parts.
        depth, end = len(part.path), start
        while end < len(leaves.leaves) and leaves.leaves[end].path[:depth] == part.path:
            end += 1
        group = [_below(leaf, depth) for leaf in leaves.leaves[start:end]]
        # A training state of which each part has a layout of its own says nothing.
        states: dict[Path, TrainingState] = {}
        for path, state in leaves.training.items():
            if path[:depth] == part.path:
                states[path] = state
        yield part, label_training_states(group, states)
        start = end


def _below(leaf: Leaf, depth: int) -> Leaf:
    """A leaf with the paths from a subtree on, whose path has this length."""
    return leaf._replace(aliases=tuple(Path(path[depth:]) for path in leaf.patterned))


def filter_problems(dead: Iterable[DeadFilter]) -> list[Problem]:
    """The problems of filters that decide about no leaf. Those that are warnings are given here."""
    problems: list[Problem] = []
    for one in dead:
        if one.is_error:
            problems.append(one.problem)
        else:
            warn(f"{one.problem.what} {one.problem.why}")
    return problems


def _of_parts(problem: Problem, parts: Sequence[Part]) -> Problem:
    """A problem of a layout itself, with the path of its subtree if there is only one."""
    # A problem with a path says already where it is, and the path of the whole tree is empty.
    if len(parts) > 1 or problem.path is not None or not parts[0].path:
        return problem
    return problem._replace(what=f"{problem.what}, for `{parts[0].path}`")


Sharded = tuple[PartitionSpec, str | None]
"""A spec and a memory kind."""


def _conflicting(
    leaves: Sequence[Leaf], decisions: Sequence[Decision], same: Sequence[int] | None
) -> list[Problem]:
    """The problems of arrays that are at two paths of the tree with two different specs, such as
    tied weights."""
    first: dict[int, tuple[Leaf, Decision]] = {}
    found: list[Problem] = []
    for i, (leaf, decision) in enumerate(zip(leaves, decisions, strict=True)):
        # One `ShapeDtypeStruct` may describe several arrays, so its identity says nothing.
        if same is None and isinstance(leaf.value, jax.ShapeDtypeStruct | np.generic):
            continue
        # No layout was given for this path (`None`), so every sharding is right for it.
        if not decision.specified:
            continue
        array = id(leaf.value) if same is None else same[i]
        other, there = first.setdefault(array, (leaf, decision))
        # Tied weights that are alike share one decision object, whose spec need not be compared.
        if other is leaf or there is decision:
            continue
        here, its = _sharded(decision), _sharded(there)
        if here != its:
            differs = f"is laid out {_text(here)} here and {_text(its)} there"
            why = f"is the same array as `{other.path}`, and {differs}"
            found.append(leaf.problem(why, "give both paths one spec, or make two arrays"))
    return found


def _sharded(decision: Decision) -> Sharded:
    return decision.spec, decision.memory_kind


def _text(sharded: Sharded) -> str:
    """A spec and a memory kind, for messages."""
    spec, memory_kind = sharded
    if memory_kind is None:
        return spec_text(spec)
    return f"{spec_text(spec)} in {memory_kind}"
