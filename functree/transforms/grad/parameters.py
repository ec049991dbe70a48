"""An argument, a filter and a layout ─► `Parameters`: the arrays to differentiate, and how to lay
out the gradient."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from functree.devices.constraint import with_constraint
from functree.devices.meshes import MeshView, agreed_mesh, compiling, current_mesh
from functree.devices.placement import check_deleted, first_mesh
from functree.errors import (
    FunctreeError,
    FunctreeTypeError,
    FunctreeValueError,
    Problem,
    ShardingError,
    count,
)
from functree.labels.filters import Filter, FilterLike, check_wrt
from functree.labels.leaf import Leaf
from functree.labels.leaves import Leaves, read
from functree.layout.decide import decide_parts
from functree.layout.decision import Decision
from functree.layout.layout import LayoutTree, Part, as_partial, own_meshes
from functree.layout.plan.make_plan import read_for
from functree.placing.ambient import ambient_rules
from functree.placing.constrain import find_mesh, local_view, with_decision
from functree.transforms.grad.summed_first import SummedFirst
from functree.tree.arrays import dtype_text


class Parameters(NamedTuple):
    """An argument, and which of its arrays are differentiated.

    Attributes:
        number: the argument's position.
        leaves: its arrays.
        chosen: for each of them, whether it is differentiated.
        parts: the layouts of its parts; empty if there is no layout.
        ambient: whether they come from the ambient rules.
    """

    number: int
    leaves: Leaves
    chosen: Sequence[bool]
    parts: Sequence[Part]
    ambient: bool

    @staticmethod
    def of(tree: Any, number: int, wrt: Filter, layout: LayoutTree) -> "Parameters":
        """The arrays that a filter matches. Raises FunctreeError if there are none, or one has no
        gradient."""
        given = layout if layout is not None else ambient_rules()
        leaves, parts = (read(tree), []) if given is None else read_for(tree, given)
        check_deleted("grad", tree)
        if layout is None:
            # Ambient rules are for more than one argument.
            parts = as_partial(parts)
        chosen = [wrt(leaf) for leaf in leaves.leaves]
        found = Parameters(number, leaves, chosen, parts, layout is None)
        if not found.matched:
            raise _nothing(found, wrt)
        _check_differentiable(found.matched)
        return found

    @property
    def matched(self) -> list[Leaf]:
        """The leaves that are differentiated."""
        return [
            leaf for leaf, chosen in zip(self.leaves.leaves, self.chosen, strict=True) if chosen
        ]

    @property
    def arrays(self) -> list[Any]:
        """Their arrays."""
        return [leaf.value for leaf in self.matched]

    def with_arrays(self, arrays: Iterable[Any]) -> Any:
        """The argument with other arrays for the differentiated ones."""
        return self.leaves.skeleton.fill(self._merged(arrays, self.leaves.values))

    def gradient(self, arrays: Sequence[Any]) -> Any:
        """The gradient as a tree like the argument, with None for other leaves, constrained by the
        layout."""
        # If the types have the shardings, JAX has laid out the gradient already. A given `layout=`
        # is still applied.
        if not self.parts or (self.ambient and all(map(_typed, self.arrays))):
            return self._tree(arrays)
        layouts = own_meshes(self.parts)
        # A gradient that is a constant has no mesh, so that of the parameter is asked.
        mesh = find_mesh([*layouts, first_mesh(self.arrays)], arrays)
        if mesh is None:
            return self._tree(arrays)
        constrain = _constrained
        if isinstance(mesh, AbstractMesh) and current_mesh() is None and not compiling():
            # An eager transform, which hides devices. There the type of a gradient may name a mesh
            # that no array is on: JAX has cached it for other arrays.
            if first_mesh(self.arrays) is None:
                return self._tree(arrays)
            self._check_on_mesh()
            constrain = _eagerly_constrained
        rules = ambient_rules()
        given = [part.layout for part in self.parts]
        summed = SummedFirst(given if rules is None else [rules, *given], mesh)
        found: list[Any] = []
        for gradient, leaf, decision in zip(
            arrays, self.matched, self._decisions(mesh), strict=True
        ):
            first = summed.spec(leaf, decision.spec) if decision.specified else None
            found.append(constrain(gradient, leaf.value, decision, mesh, first))
        return self._tree(found)

    def _check_on_mesh(self) -> None:
        """Raise ShardingError for parameters without a mesh, where only the parameters have
        devices."""
        why = "is on no mesh, and an eager transform hides the devices that the others are on"
        remedy = "`ft.shard` it like the others, or enter `with jax.set_mesh(mesh):`"
        problems: list[Problem] = []
        for leaf in self.matched:
            if jax.typeof(leaf.value).sharding.mesh.empty:
                problems.append(leaf.problem(why, remedy))
        if problems:
            raise ShardingError(
                f"the gradient for argument {self.number} cannot be laid out", problems
            )

    def _decisions(self, mesh: Mesh | AbstractMesh) -> list[Decision]:
        """What is decided about the parameters, which their gradients follow.

        The whole argument is laid out, not only its differentiated arrays: otherwise a filter of
        the layout for the others would match nothing, which is an error. Problems of arrays without
        a gradient are left out.
        """
        own = own_meshes(self.parts)
        view = local_view(agreed_mesh(mesh, own))
        decided = decide_parts(self.leaves, self.parts, view)
        others: set[object] = set()
        decisions: list[Decision] = []
        for leaf, decision, chosen in zip(
            self.leaves.leaves, decided.decisions, self.chosen, strict=True
        ):
            if chosen:
                decisions.append(decision)
            else:
                others.add(leaf.path)
        problems = [one for one in decided.problems if one.path not in others]
        if problems:
            raise self._refuse(problems, view)
        return decisions

    def _refuse(self, problems: Sequence[Problem], view: MeshView) -> ShardingError:
        gradient = f"the gradient for argument {self.number} on mesh {view}"
        headline = f"the layout cannot lay out {gradient}"
        if self.ambient:
            headline = f"the ambient rules cannot lay out {gradient}; "
            headline += "change them, or pass `layout=` to grad"
        return ShardingError(headline, problems)

    def _tree(self, gradients: Sequence[Any]) -> Any:
        """Gradients as a tree like the argument, with None for other leaves."""
        return self.leaves.skeleton.spread(self._merged(gradients, [None] * len(self.chosen)))

    def _merged(self, arrays: Iterable[Any], others: Sequence[Any]) -> list[Any]:
        """One value for each leaf: the next of `arrays` if it is differentiated, else that of
        `others`."""
        new = iter(arrays)
        return [
            next(new) if chosen else other
            for chosen, other in zip(self.chosen, others, strict=True)
        ]


def check_differentiated(wrt: FilterLike, parameters: Sequence[Parameters]) -> None:
    """Raise RuleError if a pattern in a filter matches no leaf of the arguments."""
    leaves: list[Leaf] = []
    for found in parameters:
        leaves += found.leaves.leaves
    noun = "argument" if len(parameters) == 1 else "arguments"
    numbers = ", ".join(str(found.number) for found in parameters)
    check_wrt(wrt, leaves, f"{noun} {numbers}")


def _nothing(found: Parameters, wrt: Filter) -> FunctreeError:
    """The error for a filter that matches no leaf."""
    leaves, remedy = found.leaves.leaves, "give `wrt=` a filter that matches"
    problems = [leaf.problem("does not match", remedy) for leaf in leaves]
    why = (
        ""
        if leaves
        else "; it has no arrays; Python numbers are static, so write `jnp.asarray(...)`"
    )
    headline = (
        f"nothing to differentiate: no array of argument {found.number} matches wrt={wrt!r}{why}"
    )
    return FunctreeValueError(headline, problems)


def _check_differentiable(leaves: Sequence[Leaf]) -> None:
    problems: list[Problem] = []
    for leaf in leaves:
        if not jnp.issubdtype(leaf.value.dtype, jnp.inexact):
            why = f"is {dtype_text(leaf.value.dtype)}, but only inexact arrays have a gradient"
            remedy = "narrow the filter (`wrt=... & ft.is_trainable`), or make it a float array"
        elif isinstance(leaf.value, jax.ShapeDtypeStruct):
            why, remedy = (
                "is abstract",
                "differentiate inside `jax.eval_shape` or `.lower`, where it is traced",
            )
        else:
            continue
        problems.append(leaf.problem(why, remedy))
    if problems:
        raise FunctreeTypeError(
            f"{count(len(problems), 'leaf')} cannot be differentiated", problems
        )


def _typed(array: Any) -> bool:
    """Whether the type of an array has its whole sharding: there is a mesh, without Auto axes."""
    mesh = jax.typeof(array).sharding.mesh
    return not mesh.empty and AxisType.Auto not in mesh.axis_types


def _constrained(
    gradient: Any,
    parameter: Any,
    decision: Decision,
    mesh: Mesh | AbstractMesh,
    first: PartitionSpec | None,
) -> Any:
    """The gradient, constrained as it was decided, and before that to a spec, if one is given."""
    gradient = _tied(gradient, parameter)
    if first is not None:
        gradient = with_constraint(gradient, mesh, first)
    return with_decision(gradient, decision, mesh)


def _eagerly_constrained(
    gradient: Any,
    parameter: Any,
    decision: Decision,
    mesh: Mesh | AbstractMesh,
    first: PartitionSpec | None,
) -> Any:
    """The same where an eager `jax.grad` or `jax.vmap` hides the devices of the parameter.

    JAX differentiates a function with a rule of its own by its values, and these have devices. Its
    cotangent, which may be on a single device, is then moved to them.
    """

    def apply(gradient: Any, parameter: Any) -> Any:
        own = first_mesh([parameter]) or mesh
        return _constrained(gradient, parameter, decision, own, first)

    placed = jax.custom_jvp(apply)

    def differentiate(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
        gradient, parameter = primals
        return placed(gradient, parameter), apply(tangents[0], parameter)

    placed.defjvp(differentiate)
    return placed(gradient, parameter)


def _tied(gradient: jax.Array, parameter: Any) -> jax.Array:
    """The gradient, in a program that needs the parameter.

    The gradient of a linear function does not depend on the parameter. If nothing else does, JAX
    drops the parameter and with it the devices of its mesh, and a constraint on the mesh has no
    effect. XLA removes the selection.
    """
    if (
        not isinstance(parameter, Tracer)
        or _typed(parameter)
        or jax.typeof(parameter).sharding.mesh.empty
    ):
        return gradient
    return jax.lax.select(False, parameter, gradient)
