"""One structure of calls, and a place ─► a program for it: specs resolved and checked, one trace, compiled by JAX."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten

from functree.errors import Problem, ShardingError
from functree.layout.checks import refuse
from functree.layout.layouts import Fixed, axes_text, merge_names, spec_text
from functree.layout.live import live_decision
from functree.layout.meshes import MeshView
from functree.layout.plan import Plan, plan_leaves
from functree.layout.prefix import Part, broadcast
from functree.transforms.ambient import axis_rules, without
from functree.transforms.result import Result
from functree.transforms.signature import Signature
from functree.transforms.sizes import Sizes
from functree.tree.leaf import Leaf
from functree.tree.leaves import is_array, read

Shapes = Literal["global", "local"] | None


class Seen(MeshView):
    """A mesh of which some axes count as one device, in words the whole mesh."""

    def __str__(self) -> str:
        return str(MeshView(dict(self.mesh.shape))) if self.mesh is not None else super().__str__()


class Place(NamedTuple):
    """Where a program runs.

    Attributes:
        mesh: of the body; what an outer shard_map has made manual is so in it.
        manual: the axes that this shard_map makes manual.
    """

    mesh: Mesh | AbstractMesh
    manual: frozenset[str]

    @property
    def view(self) -> MeshView:
        """The mesh as global shapes see it."""
        return Seen({n: size if n in self.manual else 1 for n, size in self.mesh.shape.items()}, self.mesh)

    @property
    def local(self) -> MeshView:
        """The mesh as local shapes see it."""
        return Seen(dict.fromkeys(self.mesh.shape, 1), self.mesh)

    def projected(self, spec: PartitionSpec) -> PartitionSpec:
        """What a spec says of the manual axes."""
        return without(spec, set(self.mesh.axis_names) - self.manual)

    def refuse(self, name: str, problems: Sequence[Problem]) -> ShardingError:
        """The error for all that is wrong with a call."""
        error = refuse(problems, MeshView(dict(self.mesh.shape)))
        return ShardingError(f"{name}: {str(error).splitlines()[0]}", problems)

    @property
    def abstract(self) -> AbstractMesh:
        """The mesh without its devices."""
        return self.mesh.abstract_mesh if isinstance(self.mesh, Mesh) else self.mesh

    @property
    def explicit(self) -> bool:
        """Whether shardings along the axes that become manual are part of types."""
        kinds = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        return all(kinds[axis] == AxisType.Explicit for axis in self.manual)

    def whole(self, leaf: Leaf, spec: PartitionSpec) -> Leaf:
        """A local leaf as it is globally."""
        parts = [math.prod(self.mesh.shape[axis] for axis in _axes(entry)) for entry in spec]
        shape = tuple(size * n for size, n in zip(leaf.shape, parts, strict=True))
        return leaf._replace(value=jax.ShapeDtypeStruct(shape, leaf.value.dtype))

    def planned(self, tree: Any, layouts: Any, view: MeshView) -> tuple[Plan, tuple[Leaf, ...], list[Problem]]:
        """The plan of a tree, its leaves, and what is wrong with them."""
        parts = broadcast(layouts, tree)
        leaves = read(tree, merge_names(part.layout.given_names for part in parts))
        plan = plan_leaves(leaves, parts, view, check=False, same=range(len(leaves.leaves)))
        problems = [*plan.problems, *_outside(parts, leaves.positions, leaves.leaves, self)]
        for leaf, row in zip(leaves.leaves, plan.rows, strict=True):
            if row.memory_kind is not None:
                why = f"is to lie in {row.memory_kind}, and shard_map moves nothing there"
                problems.append(_problem(leaf, why, "move it before or after, by `ft.shard` or `ft.jit`"))
        return plan, leaves.leaves, problems


class Options(NamedTuple):
    """What a program needs to know besides its call.

    Attributes:
        signature: of the function.
        out_specs: a layout, or a prefix tree of layouts, for the result.
        rules: ambient in the body, or None.
        check_vma: as in JAX.
        shapes: which sizes the annotations speak of.
    """

    signature: Signature
    out_specs: Any
    rules: Any
    check_vma: bool
    shapes: Shapes


class Program:
    """A function for one structure of its calls. Nothing in it holds an array.

    Args:
        options: the function, and what was said of it.
        call: one of the calls.
        layouts: a layout, or a prefix tree of layouts, for it.
        place: the mesh, and the axes to be manual.

    Raises:
        ShardingError: the call cannot be laid out so.
        AxesError: it is not as annotated.
    """

    options: Options
    place: Place
    in_specs: tuple[PartitionSpec, ...]
    reshard: tuple[bool, ...]
    sizes: Sizes
    treedef: Any
    static: list[Any]
    positions: tuple[int, ...]
    jitted: Any

    def __init__(self, options: Options, call: Any, layouts: Any, place: Place):
        self.options, self.place = options, place
        name = options.signature.name
        planned, leaves, problems = place.planned(call, layouts, place.view)
        self.in_specs = tuple(place.projected(row.spec or PartitionSpec()) for row in planned.rows)
        self.reshard = tuple(place.explicit and _untyped(leaf.value) for leaf in leaves)
        self.sizes = Sizes(name, options.shapes or "")
        if options.shapes == "global":
            self.sizes.check(call, leaves)
        for leaf, spec in zip(leaves, self.in_specs, strict=True):
            problems += _elsewhere(leaf, spec, place)
        if problems:
            raise place.refuse(name, problems)
        flat, self.treedef = tree_flatten(call)
        self.static = [None if is_array(leaf) else leaf for leaf in flat]
        self.positions = planned.leaves.positions
        self.jitted = jax.jit(_named(self.run, options.signature), inline=True)

    def run(self, arrays: Sequence[Any]) -> Result:
        """From global arrays to global arrays."""
        place, shapes = self.place, []
        # JAX asks for the result's specs when the body has run, so the body may still fill them in: the function is
        # traced once, and not a second time to know its result's structure.
        out_specs: list[PartitionSpec] = []

        def body(*arrays: Any) -> list[Any]:
            result, specs = self.body(arrays)
            out_specs.extend(specs)
            shapes.append(result.shape)
            return list(result.values)

        with jax.sharding.use_abstract_mesh(place.abstract):
            moved = [
                jax.sharding.reshard(x, NamedSharding(place.mesh, spec)) if untyped else x
                for x, spec, untyped in zip(arrays, self.in_specs, self.reshard, strict=True)
            ]
            values = jax.shard_map(
                _named(body, self.options.signature),
                mesh=place.mesh,
                in_specs=self.in_specs,
                out_specs=out_specs,
                axis_names=set(place.manual),
                check_vma=self.options.check_vma,
            )(*moved)
        return Result(values, shapes[0])

    def body(self, arrays: Sequence[Any]) -> tuple[Result, list[PartitionSpec]]:
        """The function on local arrays, and where the parts of its result come from."""
        signature, out_specs, rules, check_vma, shapes = self.options
        flat = list(self.static)
        for position, array in zip(self.positions, arrays, strict=True):
            flat[position] = array
        call, sizes = self.treedef.unflatten(flat), self.sizes.copy()
        if shapes == "local":
            sizes.check(call)
        with nullcontext() if rules is None else axis_rules(rules):
            record = signature.result(signature.run(call))
        place = self.place
        planned, leaves, problems = place.planned(record, signature.result(out_specs), place.local)
        specs = [place.projected(row.spec or PartitionSpec()) for row in planned.rows]
        if check_vma and not problems:
            problems = [p for leaf, spec in zip(leaves, specs, strict=True) for p in _varying(leaf, spec, place)]
        if problems:
            raise place.refuse(signature.name, problems)
        if shapes == "global":
            leaves = [place.whole(leaf, spec) for leaf, spec in zip(leaves, specs, strict=True)]
        if shapes is not None:
            sizes.check(record, leaves)
        return Result.of(record), specs


def _named(fun: Callable[..., Any], signature: Signature) -> Callable[..., Any]:
    """A function under the name of the user's, which profiles and compiled texts show."""

    def named(*args: Any) -> Any:
        return fun(*args)

    named.__name__ = named.__qualname__ = signature.name.rpartition(".")[2]
    return named


# What can be wrong, besides what a plan finds


def _problem(leaf: Leaf, why: str, remedy: str) -> Problem:
    return Problem(leaf.path, tuple(leaf.shape), leaf.text, why, remedy)


def _axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a spec."""
    return (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else ()


def _outside(parts: Sequence[Part], positions: Sequence[int], leaves: Sequence[Leaf], place: Place) -> list[Problem]:
    """Specs, written out, that name a mesh axis which does not become manual here."""
    found, end = [], 0
    for part in parts:
        start, end = end, end + part.leaves
        if not isinstance(part.layout, Fixed):
            continue
        named = {axis for entry in part.layout.spec for axis in _axes(entry)}
        lost = sorted(named & (set(place.mesh.axis_names) - place.manual))
        if lost:
            manual = axes_text(sorted(place.manual))
            why = f"{spec_text(part.layout.spec)} names {axes_text(lost)}, and only {manual} is manual here"
            within = [leaf for at, leaf in zip(positions, leaves, strict=True) if start <= at < end]
            found += [_problem(leaf, why, "leave it out of the spec, or add it to `axis_names`") for leaf in within]
    return found


def _untyped(value: Any) -> bool:
    """Whether nobody has put an array anywhere, so that no type says how it lies."""
    if not isinstance(value, jax.Array) or not (isinstance(value, Tracer) or value.committed):
        return True
    return jax.typeof(value).sharding.mesh.empty


def _elsewhere(leaf: Leaf, spec: PartitionSpec, place: Place) -> list[Problem]:
    """An array on other devices, or under Explicit axes of another type: JAX would move neither."""
    value = leaf.value
    if isinstance(value, jax.ShapeDtypeStruct):
        return [_problem(leaf, "is abstract, and is to be computed with", "write `jax.eval_shape(fun, ...)`")]
    if not isinstance(value, jax.Array):
        return []
    if not isinstance(value, Tracer) and value.committed and isinstance(place.mesh, Mesh):
        if value.sharding.device_set != set(place.mesh.devices.flat):
            why = f"{live_decision(value).reason}, and the mesh is of other devices"
            return [_problem(leaf, why, "put it on the mesh with `ft.shard`")]
    return [] if _untyped(value) else _mistyped(leaf, spec, place)


def _mistyped(leaf: Leaf, spec: PartitionSpec, place: Place) -> list[Problem]:
    here = jax.typeof(leaf.value).sharding
    explicit = AxisType.Explicit in here.mesh.axis_types
    if (explicit and here.mesh.axis_names != place.mesh.axis_names) or (place.explicit and not explicit):
        kind = "Explicit" if explicit else "Auto"
        why = f"by its type it lies on a mesh of {kind} axes, {MeshView(dict(here.mesh.shape))}"
        return [_problem(leaf, why, "put it on the mesh with `ft.shard`")]
    typed = place.projected(PartitionSpec(*here.spec, *[None] * (len(leaf.shape) - len(here.spec))))
    if not place.explicit or typed == spec:
        return []
    why = f"by its type it lies {spec_text(typed)}, and its spec is {spec_text(spec)}: Explicit axes move nothing"
    return [_problem(leaf, why, "`jax.sharding.reshard` it before, or write the spec of its type")]


def _varying(leaf: Leaf, spec: PartitionSpec, place: Place) -> list[Problem]:
    """A part of the result that differs between devices on which its spec calls it equal."""
    if not isinstance(leaf.value, jax.Array):
        return []
    named = {axis for entry in spec for axis in _axes(entry)}
    lost = sorted((jax.typeof(leaf.value).manual_axis_type.varying & place.manual) - named)
    if not lost:
        return []
    over = axes_text(lost)
    why = f"{spec_text(spec)} says that it is the same along {over}, and it may differ there"
    remedy = f"reduce it (`jax.lax.psum`, `pmean`) over {over}, or name that in its spec; "
    return [_problem(leaf, why, remedy + "or pass `check_vma=False` where it is known to be the same")]
