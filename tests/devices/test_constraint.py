"""A traced array and a spec on a mesh ─► the same array, constrained to it on axes of each type."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from functree.devices.constraint import with_constraint
from tests.lib.meshes import EXPLICIT, MESH

P = PartitionSpec
MIXED = jax.make_mesh(
    (2, 2, 2), ("data", "model", "x"), axis_types=(AxisType.Explicit, AxisType.Auto, AxisType.Auto)
)


def constrained(mesh: Any, spec: P, kind: str | None = None) -> Callable[[jax.Array], jax.Array]:
    return lambda x: with_constraint(x * 2.0, mesh, spec, kind)


def program(fun: Callable[..., Any], *args: Any) -> str:
    return str(jax.make_jaxpr(fun)(*args))


# The mesh, the spec ─► whether it is a reshard and whether it is a constraint.
TYPES: dict[str, tuple[Mesh, P, bool, bool]] = {
    "Auto": (MESH, P("data", "model"), False, True),
    "Explicit": (EXPLICIT, P("data", "model"), True, False),
    "both": (MIXED, P("data", "model"), True, True),
    "both, on one dimension": (MIXED, P(("data", "model")), True, True),
}


@pytest.mark.parametrize("case", TYPES)
def test_it_is_a_constraint_or_a_reshard_by_the_type_of_the_axes(case: str) -> None:
    mesh, spec, resharded, by_constraint = TYPES[case]
    x = jnp.ones((4, 8))
    with jax.set_mesh(mesh):
        text = program(constrained(mesh, spec), x)
        found = jax.jit(constrained(mesh, spec))(x)
    assert ("reshard" in text) is resharded
    assert ("sharding_constraint" in text) is by_constraint
    assert found.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    assert (found == 2.0).all()
