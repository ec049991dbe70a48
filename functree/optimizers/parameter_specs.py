"""Parameters and a layout ─► the mesh that they are on, and how each of them is sharded."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from functree.devices.meshes import agreed_mesh, mesh_view
from functree.devices.specs import of_rank
from functree.errors import ShardingError, count
from functree.labels.leaf import Leaf
from functree.labels.leaves import Leaves, read
from functree.layout.decide import decide_parts
from functree.layout.layout import LayoutTree, Part, as_partial, own_meshes
from functree.layout.plan.make_plan import read_for
from functree.placing.ambient import ambient_rules
from functree.placing.constrain import find_mesh, local_view
from functree.tree.arrays import AnyArray, Tree
from functree.tree.paths import Path


class ParameterSpecs(NamedTuple):
    """Parameters that are on a mesh.

    Attributes:
        mesh: the mesh.
        leaves: the parameters.
        parts: the layouts of the parts of their tree; None if no layout is known.
    """

    mesh: Mesh | AbstractMesh
    leaves: Leaves
    parts: Sequence[Part] | None

    @staticmethod
    def of(tree: Tree, layout: LayoutTree) -> "ParameterSpecs | None":
        """The parameters of a tree; None if they are on one device.

        Args:
            tree: the parameters, or gradients.
            layout: their layout; None for the ambient rules.
        """
        given = ambient_rules() if layout is None else layout
        leaves, parts = (read(tree), None) if given is None else read_for(tree, given)
        mesh = find_mesh([] if parts is None else own_meshes(parts), leaves.values)
        if mesh is None or mesh.size == 1:
            return None
        if parts is not None:
            # The tree has only what is trained, and a filter may be for something else.
            parts = as_partial(parts)
        return ParameterSpecs(mesh, leaves, parts)

    @property
    def explicit(self) -> tuple[str, ...]:
        """The Explicit axes of the mesh."""
        types = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        return tuple(name for name, axis_type in types if axis_type == AxisType.Explicit)

    def specs(self, paths: Collection[Path]) -> dict[Path, PartitionSpec]:
        """How the parameters at some paths are sharded, by their types or by the layout.

        Raises:
            ShardingError: neither says it; the layout does not fit the parameters; inside of a
                `shard_map`.
        """
        chosen = [leaf for leaf in self.leaves.leaves if leaf.path in paths]
        manual = getattr(self.mesh, "manual_axes", ())
        if manual:
            axes = ", ".join(manual)
            raise self._unknown(chosen, f"inside of shard_map ({axes})", _OUTSIDE)
        if AxisType.Auto not in self.mesh.axis_types:
            return {leaf.path: type_spec(leaf.value) for leaf in chosen}
        if self.parts is None:
            raise self._unknown(chosen, f"on mesh {mesh_view(self.mesh)}", _GIVE_LAYOUT)
        return self._decided(self.parts, paths)

    def _unknown(self, chosen: Sequence[Leaf], where: str, remedy: str) -> ShardingError:
        """The error for parameters of which nobody says how they are sharded."""
        problems = [leaf.problem("its sharding is not known", remedy) for leaf in chosen]
        matrices = count(len(chosen), "parameter")
        return ShardingError(
            f"`ft.whole_matrices` cannot make the matrices of {matrices} whole {where}", problems
        )

    def _decided(self, parts: Sequence[Part], paths: Collection[Path]) -> dict[Path, PartitionSpec]:
        """What a layout decides. All parameters are laid out, since it is written for all."""
        own = own_meshes(parts)
        view = local_view(agreed_mesh(self.mesh, own))
        decided = decide_parts(self.leaves, parts, view)
        others = {leaf.path for leaf in decided.leaves if leaf.path not in paths}
        problems = [one for one in decided.problems if one.path not in others]
        if problems:
            raise ShardingError(
                f"the layout for `ft.whole_matrices` does not fit on mesh {view}; it is `layout=`, "
                "or the ambient rules",
                problems,
            )
        found: dict[Path, PartitionSpec] = {}
        for leaf, decision in zip(decided.leaves, decided.decisions, strict=True):
            if leaf.path in paths:
                found[leaf.path] = decision.spec
        return found


_OUTSIDE = "update the parameters outside of shard_map, where their shapes are those of the whole"
_GIVE_LAYOUT = (
    "on Auto axes types do not tell: pass the layout of the model, "
    "`ft.whole_matrices(tx, layout=...)`, or update under ambient rules, as `ft.jit(rules=...)` "
    "and `ft.axis_rules` give them"
)


def type_spec(array: AnyArray) -> PartitionSpec:
    """How an array is sharded by its type; replicated if it is on no mesh."""
    sharding = jax.typeof(array).sharding
    spec = PartitionSpec() if sharding.mesh.empty else sharding.spec
    return of_rank(spec, len(array.shape))
