"""Parameters and a layout ─► the mesh that they are on, and how each of them is sharded."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from functree.devices.meshes import agreed_mesh, mesh_view
from functree.devices.specs import of_rank
from functree.errors import ShardingError, count
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
        name: the name of the public function, for messages.
    """

    mesh: Mesh | AbstractMesh
    leaves: Leaves
    parts: Sequence[Part] | None
    name: str

    @staticmethod
    def of(tree: Tree, layout: LayoutTree, name: str) -> "ParameterSpecs | None":
        """The parameters of a tree; None if they are on one device.

        Args:
            tree: the parameters, or gradients.
            layout: their layout; None for the ambient rules.
            name: the name of the public function, for messages.
        """
        given = ambient_rules() if layout is None else layout
        leaves, parts = (read(tree), None) if given is None else read_for(tree, given)
        mesh = find_mesh([] if parts is None else own_meshes(parts), leaves.values)
        if mesh is None or mesh.size == 1:
            return None
        if parts is not None:
            # The tree has only what is trained, and a filter may be for something else.
            parts = as_partial(parts)
        return ParameterSpecs(mesh, leaves, parts, name)

    def specs(self) -> dict[Path, PartitionSpec]:
        """How the parameters are sharded, by their types or by the layout.

        Raises:
            ShardingError: neither says it; the layout does not fit the parameters; inside of a
                `shard_map`.
        """
        manual = getattr(self.mesh, "manual_axes", ())
        if manual:
            axes = ", ".join(manual)
            raise self._unknown(f"inside of shard_map ({axes})", _OUTSIDE)
        if AxisType.Auto not in self.mesh.axis_types:
            return {leaf.path: type_spec(leaf.value) for leaf in self.leaves.leaves}
        if self.parts is None:
            remedy = _GIVE_LAYOUT.format(name=self.name)
            raise self._unknown(f"on mesh {mesh_view(self.mesh)}", remedy)
        view = local_view(agreed_mesh(self.mesh, own_meshes(self.parts)))
        decided = decide_parts(self.leaves, self.parts, view)
        if decided.problems:
            raise ShardingError(
                f"the layout for `ft.{self.name}` does not fit on mesh {view}; it is `layout=`, "
                "or the ambient rules",
                decided.problems,
            )
        pairs = zip(decided.leaves, decided.decisions, strict=True)
        return {leaf.path: of_rank(one.spec, len(leaf.shape)) for leaf, one in pairs}

    def _unknown(self, where: str, remedy: str) -> ShardingError:
        """The error for parameters of which nobody says how they are sharded."""
        leaves = self.leaves.leaves
        problems = [leaf.problem("its sharding is not known", remedy) for leaf in leaves]
        matrices = count(len(leaves), "parameter")
        return ShardingError(
            f"`ft.{self.name}` cannot make the matrices of {matrices} whole {where}", problems
        )


_OUTSIDE = "update the parameters outside of shard_map, where their shapes are those of the whole"
_GIVE_LAYOUT = (
    "on Auto axes types do not tell: pass the layout of the model, "
    "`ft.{name}(..., layout=...)`, or update under ambient rules, as `ft.jit(rules=...)` "
    "and `ft.axis_rules` give them"
)


def type_spec(array: AnyArray) -> PartitionSpec:
    """How an array is sharded by its type; replicated if it is on no mesh."""
    sharding = jax.typeof(array).sharding
    spec = PartitionSpec() if sharding.mesh.empty else sharding.spec
    return of_rank(spec, len(array.shape))
