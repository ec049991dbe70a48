"""One structure of calls, and a place ─► the function that JAX compiles for it."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import itemgetter
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.tree_util import GetAttrKey, register_pytree_with_keys, tree_map

from functree.transforms.ambient import axis_rules
from functree.transforms.jit.layouts import Shardings, elsewhere, mesh_of
from functree.transforms.jit.statics import values_of
from functree.transforms.result import Result
from functree.transforms.signature import Signature
from functree.transforms.structures import Structure
from functree.tree.exact import Exact
from functree.tree.pack import Packed, PackedStatic, pack
from functree.tree.paths import Path


class Labels:
    """The names of some arguments' arrays, as they stand in the compiled text. The same object for each call."""

    __slots__ = ("keys",)

    def __init__(self, paths: Sequence[Path]):
        self.keys: tuple[Any, ...] = tuple(GetAttrKey(str(path)) for path in paths)


class Arrays:
    """Arguments' arrays: a node that flattens in constant Python time, with a path for each array."""

    __slots__ = ("labels", "values")

    def __init__(self, values: Sequence[Any], labels: Labels):
        self.values: Sequence[Any] = values
        self.labels: Labels = labels


register_pytree_with_keys(
    Arrays,
    lambda node: (tuple(zip(node.labels.keys, node.values, strict=True)), node.labels),
    lambda labels, values: Arrays(tuple(values), labels),
    lambda node: (tuple(node.values), node.labels),
)


class Groups:
    """The arrays of a call in two groups: those that are kept, and those that are donated.

    Args:
        structure: of the call.
        donated: the names of the donated parameters.
    """

    def __init__(self, structure: Structure, donated: frozenset[str]):
        paths = structure.paths
        given = [path[0] in donated or ".".join(map(str, path[:2])) in donated for path in paths]
        self.donated: tuple[int, ...] = tuple(i for i, is_given in enumerate(given) if is_given)
        self.kept: tuple[int, ...] = tuple(i for i, is_given in enumerate(given) if not is_given)
        self.take_donated: Any = _taker(self.donated, len(paths))
        self.take_kept: Any = _taker(self.kept, len(paths))
        self.labels: tuple[Labels, Labels] = (
            Labels([paths[i] for i in self.kept]),
            Labels([paths[i] for i in self.donated]),
        )

    def split(self, values: Sequence[Any]) -> tuple[Arrays, Arrays]:
        """A value for each array ─► the two arguments of the compiled function."""
        kept, donated = self.labels
        return Arrays(self.take_kept(values), kept), Arrays(self.take_donated(values), donated)

    def join(self, kept: Sequence[Any], donated: Sequence[Any]) -> list[Any]:
        """The values of the two groups in the order of the call's arrays."""
        values: list[Any] = [None] * (len(self.kept) + len(self.donated))
        for places, group in ((self.kept, kept), (self.donated, donated)):
            for place, value in zip(places, group, strict=True):
                values[place] = value
        return values


def _taker(places: Sequence[int], size: int) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """The values at some places, in C."""
    if len(places) == size:
        return lambda values: values
    if len(places) < 2:
        return lambda values: [values[i] for i in places]
    return itemgetter(*places)


class Where(NamedTuple):
    """What holds around a function's body.

    Attributes:
        mesh: the ambient mesh; None for that on which the arguments lie.
        rules: the ambient rules.
    """

    mesh: Mesh | AbstractMesh | None
    rules: Any

    @contextmanager
    def entered(self, arrays: Sequence[Any]) -> Iterator[None]:
        """The mesh and the rules, while the body is traced. In Auto mode, too, a tracer's type tells its mesh."""
        mesh = self.mesh if self.mesh is not None else mesh_of(arrays)
        manual = jax.sharding.get_abstract_mesh().manual_axes  # inside `shard_map` the mesh is what it has made of it
        with ExitStack() as stack:
            if mesh is not None and not manual:
                abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
                stack.enter_context(jax.sharding.use_abstract_mesh(abstract))
            if self.rules is not None:
                stack.enter_context(axis_rules(self.rules))
            yield


class Body:
    """A function from arrays to arrays: the user's, for one structure of its calls and one place. Holds no array.

    JAX remembers its trace by the identity of `run`. So one of these serves every program that differs only in how
    the arrays lie, and the user's function is traced once for all of them, output layouts or not.

    Args:
        signature: of the function.
        structure: of the calls.
        donated: the names of donated parameters.
        where: the mesh and the rules.
    """

    def __init__(self, signature: Signature, structure: Structure, donated: frozenset[str], where: Where):
        self.signature: Signature = signature
        self.structure: Structure = structure
        self.where: Where = where
        self.groups: Groups = Groups(structure, donated)
        self._packed = [static for static in structure.statics.values() if isinstance(static, PackedStatic)]

        def run(kept: Arrays, donated: Arrays) -> Result:
            return self._run(self.groups.join(kept.values, donated.values))

        run.__name__ = run.__qualname__ = signature.name.rpartition(".")[2]
        # JAX names the file and the line of what is wrapped in its errors: the user's.
        run.__signature__, run.__wrapped__ = inspect.signature(run), signature.fun  # type: ignore[attr-defined]
        self.run: Any = run

    def _run(self, arrays: Sequence[Any]) -> Result:
        call = self.structure.build(arrays)
        with self.where.entered(arrays):
            if (error := elsewhere(self.signature.name, self.structure.paths, arrays, self.where.mesh)) is not None:
                raise error
            result = self.signature.run(type(call)(*_unpacked(values_of(call))))
        return Result.of(_repacked(result, self._packed))


class Program:
    """What JAX compiles: a body, and how its arguments and its result lie.

    Args:
        body: the function.
        options: what `jax.jit` takes besides shardings and donation.

    Attributes:
        in_shardings: for each array of a call; None if nothing was asked.
        out_shardings: for each array of the result; None if nothing was asked.
        moved: the places of the arrays that JAX puts on their devices in every call.
        calls: how often it was called with such arrays.
        entered: the mesh to enter around a call; None where it is the current one.
        careful: whether a call is checked before: arrays are donated, or lie on several devices, where JAX 0.10 ends
            the process if one has been deleted, or there are no devices.
    """

    in_shardings: Shardings | None = None
    out_shardings: Shardings | None = None
    moved: tuple[int, ...] = ()
    calls: int = 0
    entered: Mesh | None = None
    careful: bool = False

    def __init__(self, body: Body, options: dict[str, Any]):
        self.body: Body = body
        self.signature: Signature = body.signature
        self.structure: Structure = body.structure
        self.groups: Groups = body.groups
        self.where: Where = body.where
        self._options = {**options, "donate_argnums": (1,) if self.groups.donated else ()}
        self.jitted: Any = jax.jit(body.run, **self._options)

    def lay_inputs(self, shardings: Shardings, moved: tuple[int, ...]) -> None:
        """Where each array argument has to lie."""
        self.in_shardings, self.moved = shardings, moved
        self.jitted = jax.jit(self.body.run, **self._laid(), **self._options)

    def lay_outputs(self, result: Result, shardings: Shardings) -> None:
        """Where each array of the result goes. Does not trace again."""
        self.out_shardings = shardings
        out = Result([_ambient(sharding) for sharding in shardings], result.shape)
        self.jitted = jax.jit(self.body.run, **self._laid(), out_shardings=out, **self._options)

    def _laid(self) -> dict[str, Any]:
        if self.in_shardings is None:
            return {}
        return {"in_shardings": self.groups.split([_ambient(sharding) for sharding in self.in_shardings])}

    def __call__(self, arrays: Sequence[Any]) -> Any:
        kept, donated = self.groups.split(arrays)
        result = self.jitted(kept, donated)
        return result.shape.build(result.values)


def _ambient(sharding: Any) -> Any:
    """A sharding for `jax.jit`.

    Under a trace a mesh is known without its devices; but an eager `vmap` or `grad` is about to run all the same. So
    there the spec is left to JAX, which knows the ambient mesh whole.
    """
    if sharding is None or isinstance(sharding.mesh, Mesh) or sharding.memory_kind is not None:
        return sharding
    ambient = jax.sharding.get_abstract_mesh()
    return sharding if ambient.empty or ambient != sharding.mesh else sharding.spec


def _is_packed(node: Any) -> bool:
    return isinstance(node, Packed)


def _unpacked(values: Sequence[Any]) -> list[Any]:
    """Arguments as the function sees them: modules, however they came."""
    return tree_map(lambda x: x.tree if _is_packed(x) else x, list(values), is_leaf=_is_packed)


def _repacked(result: Any, packed: Sequence[PackedStatic]) -> Any:
    """A result whose outermost parts that have a packed argument's structure are packed."""
    if not packed:
        return result
    roots = {static.treedef.node_data()[0] for static in packed if static.treedef.node_data() is not None}
    known = {Exact(static): static for static in packed}

    def fits(node: Any) -> bool:
        return type(node) in roots and Exact(pack(node).static) in known

    # With the argument's own static data, so that the next call finds the same object.
    def again(node: Any) -> Any:
        packed = pack(node)
        return Packed(packed.arrays, known[Exact(packed.static)])

    return tree_map(lambda x: again(x) if fits(x) else x, result, is_leaf=fits)
