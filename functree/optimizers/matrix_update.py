"""Updates of parameters in pieces, and their exchange ─► their values, computed on whole
matrices."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from functree.optimizers.exchange import Exchange
from functree.optimizers.matrix_program import Division, Variable
from functree.tree.paths import Path

Values = Mapping[Variable, Any]
"""The values of variables. What is layered has the dimensions of the stacks in front."""


class MatrixUpdate(NamedTuple):
    """The update of one parameter, whose matrices are made whole.

    Attributes:
        path: the path of the parameter.
        division: its pieces.
        exchange: how its matrices become whole, by themselves.
        spec: how the parameter is sharded, with an entry for each dimension.
        stack: the sizes of the stacks that it is in.
    """

    path: Path
    division: Division
    exchange: Exchange
    spec: PartitionSpec
    stack: tuple[int, ...]

    @property
    def kind(self) -> Hashable:
        """What is computed on its matrices, and how they are moved."""
        return self.division.whole.kind(self.division.layered), self.exchange.kind

    def is_matrix(self, variable: Variable) -> bool:
        """Whether a variable has the shape of the parameter, and so is sharded like it."""
        return variable in self.division.layered and variable.aval.shape == self.exchange.layer

    def sharded(self, variable: Variable) -> PartitionSpec:
        """How a variable of each layer is sharded outside of the computation on whole matrices."""
        return (
            self.spec if self.is_matrix(variable) else PartitionSpec(*self.spec[: len(self.stack)])
        )


class MatrixUpdates(NamedTuple):
    """Updates of parameters that are alike, whose matrices are made whole together.

    Attributes:
        members: the updates.
        exchange: how their matrices become whole.
    """

    members: Sequence[MatrixUpdate]
    exchange: Exchange

    def values(
        self, inputs: Callable[[MatrixUpdate], Values], mesh: Mesh | AbstractMesh
    ) -> list[Values]:
        """For each member the values of all variables.

        Args:
            inputs: the values of the inputs of the program, for a member.
            mesh: the mesh.
        """
        known: list[dict[Variable, Any]] = []
        for member in self.members:
            before, _, _, layered = member.division
            values = dict(inputs(member))
            known.append({**values, **before.run(values, layered, len(member.stack))})
        for i, own in enumerate(self._on_whole_matrices(known, mesh)):
            _, _, after, layered = self.members[i].division
            known[i].update(own)
            known[i].update(after.run(known[i], layered, len(self.members[i].stack)))
        return list(known)

    def _on_whole_matrices(
        self, known: Sequence[Values], mesh: Mesh | AbstractMesh
    ) -> list[dict[Variable, Any]]:
        """For each member the values of what is computed on whole matrices, in a `shard_map`."""
        first, layered = self.members[0].division.whole, self.members[0].division.layered
        arrays: list[Any] = []
        specs: list[Any] = []
        for place, one in enumerate(first.inputs):
            if one not in layered:
                arrays.append(known[0][one])
                specs.append(PartitionSpec())
                continue
            own = [member.division.whole.inputs[place] for member in self.members]
            arrays.append([values[v] for values, v in zip(known, own, strict=True)])
            specs.append([one.sharded(v) for one, v in zip(self.members, own, strict=True)])
        outputs: list[Any] = []
        for place in range(len(first.outputs)):
            outputs.append([one.sharded(one.division.whole.outputs[place]) for one in self.members])
        # Of what is gathered it is not known to JAX' types that it is the same on all devices.
        mapped: Any = jax.shard_map(
            self._on_device,
            mesh=mesh,
            in_specs=tuple(specs),
            out_specs=outputs,
            check_vma=False,
        )
        results = mapped(*arrays)
        found: list[dict[Variable, Any]] = []
        for i, member in enumerate(self.members):
            own = [result[i] for result in results]
            found.append(dict(zip(member.division.whole.outputs, own, strict=True)))
        return found

    def _on_device(self, *arrays: Any) -> list[Any]:
        """For each output its shards of all members, by those of the inputs."""
        first, exchange = self.members[0], self.exchange
        piece, layered = first.division.whole, first.division.layered
        own = self._moved(piece.inputs, arrays, exchange.part, self._whole)

        def compute(*arrays: Any) -> list[Any]:
            known = dict(zip(piece.inputs, arrays, strict=True))
            return list(piece.run(known, layered, 1).values())

        idle = exchange.idle()
        computed = compute(*own) if idle is None else _unless(idle, compute, own)
        return self._moved(piece.outputs, computed, exchange.each, self._shards)

    def _moved(
        self,
        variables: Sequence[Variable],
        values: Sequence[Any],
        one: Callable[[Any], Any],
        matrices: Callable[[Sequence[Any]], Sequence[Any]],
    ) -> list[Any]:
        """The values of variables, moved: by `one` if each layer has its own, and matrices of one
        dtype at once, by `matrices`."""
        found = list(values)
        by_dtype: dict[Any, list[int]] = {}
        for i, variable in enumerate(variables):
            if self.members[0].is_matrix(variable):
                by_dtype.setdefault(variable.aval.dtype, []).append(i)
            elif variable in self.members[0].division.layered:
                found[i] = one(values[i])
        for indices in by_dtype.values():
            moved = matrices([values[i] for i in indices])
            for i, value in zip(indices, moved, strict=True):
                found[i] = value
        return found

    def _whole(self, each: Sequence[Sequence[Any]]) -> list[Any]:
        """The shards of several matrices of all members ─► these matrices, whole."""
        exchange = self.exchange.of_several(len(each))
        shards: list[Any] = []
        for stack, own in zip(exchange.stacks, zip(*each, strict=True), strict=True):
            shards.append(jnp.stack(own, len(stack)))
        x = exchange.whole(shards)
        return [x[:, i] for i in range(len(each))]

    def _shards(self, each: Sequence[Any]) -> list[list[Any]]:
        """The inverse."""
        exchange = self.exchange.of_several(len(each))
        found: list[list[Any]] = [[] for _ in each]
        for stack, x in zip(exchange.stacks, exchange.shards(jnp.stack(each, 1)), strict=True):
            for i, own in enumerate(found):
                own.append(jax.lax.index_in_dim(x, i, len(stack), keepdims=False))
        return found


def _unless(idle: Any, compute: Callable[..., list[Any]], arrays: Sequence[Any]) -> list[Any]:
    """What a function computes, and zeros on a device that is idle."""
    types = jax.eval_shape(compute, *arrays)

    def nothing(*arrays: Any) -> list[Any]:
        return [jnp.zeros(type_.shape, type_.dtype) for type_ in types]

    return jax.lax.cond(idle, nothing, compute, *arrays)


def grouped(updates: Sequence[MatrixUpdate]) -> list[MatrixUpdates]:
    """Updates, of which those that are alike are computed together where that leaves fewer matrices
    to each device: the layers of one alone do not fill the devices."""
    alike: dict[Hashable, list[MatrixUpdate]] = {}
    for update in updates:
        alike.setdefault(update.kind, []).append(update)
    found: list[MatrixUpdates] = []
    for group in alike.values():
        exchanges = [one.exchange for one in group]
        joined = exchanges[0].joined_with(exchanges[1:])
        if joined.own < sum(one.own for one in exchanges):
            found.append(MatrixUpdates(group, joined))
        else:
            found += [MatrixUpdates([one], one.exchange.of_one()) for one in group]
    return [one for one in found if one.exchange.moves]
