"""Arguments that nobody has placed ─► the same arguments, placed where the rules lay them out."""

import warnings
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from functree.errors import FunctreeWarning, Problem, ShardingError
from functree.layout.constraint import constrained
from functree.layout.decision import Decision
from functree.layout.layout import Layout
from functree.layout.meshes import MeshView
from functree.layout.prefix import broadcast
from functree.layout.validation import leaf_problems, leaves_at_fault
from functree.tree.leaf import Leaf
from functree.tree.leaves import read
from functree.tree.paths import Path

# The modules of the classes of plain containers. What is below any other class is a part of a module.
_CONTAINERS = ("builtins", "collections")


class Targets(NamedTuple):
    """Where the arguments of some calls are placed.

    Attributes:
        mesh: the mesh.
        specs: (index, spec, memory kind) of each array that nobody has placed.
    """

    mesh: Mesh | AbstractMesh
    specs: tuple[tuple[int, PartitionSpec, str | None], ...]


def is_unplaced(array: Any) -> bool:
    """Whether nobody has said where an array is: it is uncommitted, abstract, traced or of numpy."""
    if isinstance(array, Tracer):
        return jax.typeof(array).sharding.mesh.empty
    if isinstance(array, jax.Array):
        return not array.committed
    return getattr(array, "sharding", None) is None


def find_targets(
    name: str,
    call: Any,
    unplaced: Sequence[int],
    paths: Sequence[Path],
    rules: Layout,
    mesh: Mesh | AbstractMesh,
) -> Targets:
    """Where the rules lay out the arguments that nobody has placed.

    Leaves of modules, and of a training state, are laid out by the whole of the rules, as by `ft.shard`; bare arrays by
    their annotations and the `AxisRules` alone.

    Args:
        name: the name of the function.
        call: the call.
        unplaced: the indices of the arrays that nobody has placed.
        paths: the paths of all arrays.
        rules: the given or ambient rules.
        mesh: the mesh of the function.

    Raises:
        ShardingError: the rules do not fit an array, as in `ft.plan`.
    """
    view = MeshView(dict(mesh.shape), mesh)
    (part,) = broadcast(rules, call)
    leaves = read(call, rules.given_names).leaves
    whole = part.layout.resolve(leaves, view)
    known = whole.leaves or leaves
    by_axes = rules.by_axes
    problems: list[Problem] = list(whole.problems)
    specs: list[tuple[int, PartitionSpec, str | None]] = []
    anonymous: list[Leaf] = []
    for i in unplaced:
        leaf, decision = known[i], whole.decisions[i]
        if not leaf.shape and not _in_module(leaf):
            continue  # JAX replicates a scalar at no cost; only that of a state has to lie as it comes back
        if not _in_module(leaf):
            decision = None if by_axes is None else by_axes.resolve([leaf], view).decisions[0]
        if decision is None or _is_anonymous(leaf, decision):
            anonymous.append(leaf)
            specs.append((i, PartitionSpec(*[None] * len(leaf.shape)), None))
            continue
        if not decision.specified:
            continue
        problems += leaf_problems(leaf, decision, view)
        specs.append((i, decision.spec, decision.memory_kind))
    if problems:
        at_fault = leaves_at_fault(problems) or "the call"
        raise ShardingError(f"{name}: the rules do not fit {at_fault} that nobody has placed, on mesh {view}", problems)
    if anonymous and view.devices > 1:
        _warn_replicated(name, anonymous, view)
    return Targets(mesh, tuple(specs))


def _in_module(leaf: Leaf) -> bool:
    """Whether a leaf of a call is in a module. (`within[0]` is the call itself.)"""
    return any(cls.__module__ not in _CONTAINERS for cls in leaf.within[1:])


def _is_anonymous(leaf: Leaf, decision: Decision) -> bool:
    """Whether rules cannot lay out a leaf because it has no annotation."""
    return not leaf.annotated and leaf.spec is None and leaf.misfit is None and bool(decision.faults)


def _warn_replicated(name: str, leaves: Sequence[Leaf], view: MeshView) -> None:
    arrays = ", ".join(f"`{leaf.path}` {leaf.text}" for leaf in leaves[:4])
    more = f" and {len(leaves) - 4} more" if len(leaves) > 4 else ""
    what, verb = ("it", "has") if len(leaves) == 1 else ("them", "have")
    warnings.warn(
        f"{name}: {arrays}{more} {verb} no axis names and nobody has placed {what}, so this is replicated on the mesh "
        f"{view}: annotate {what}, place {what} with `ft.shard`, or write `in_shardings=`",
        FunctreeWarning,
        stacklevel=6,
    )


def place(arrays: Sequence[Any], targets: Targets, fresh: Collection[int]) -> list[Any]:
    """The arrays of a call, with those that nobody has placed where they belong.

    Args:
        arrays: all arrays of the call.
        targets: where they belong.
        fresh: the indices of arrays that are donated: their placed copies share no buffer with the given arrays.
    """
    new, moving = list(arrays), dict[int, NamedSharding]()
    for i, spec, kind in targets.specs:
        array, mesh = arrays[i], targets.mesh
        if isinstance(array, Tracer):
            new[i] = constrained(array, mesh, spec, kind)
        elif isinstance(array, jax.ShapeDtypeStruct):
            new[i] = array.update(sharding=NamedSharding(mesh, spec, memory_kind=kind))
        elif isinstance(mesh, Mesh):
            moving[i] = NamedSharding(mesh, spec, memory_kind=kind)
    # `device_put` may share a buffer with the given array, even with `may_alias=False`: that on the device where the
    # given array is, if the array is replicated.
    values = [jnp.array(arrays[i], copy=True) if i in fresh else arrays[i] for i in moving]
    for i, array in zip(moving, jax.device_put(values, list(moving.values())), strict=True):
        new[i] = array
    return new
