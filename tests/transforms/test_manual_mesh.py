"""A mesh of which some axes become manual: plans of global and of local trees, and what is wrong
there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import functree as ft
from functree.layout.plan.make_plan import read_for
from functree.transforms.shard_map import ManualMesh, PartialView
from tests.lib.meshes import EXPLICIT, MESH, lay
from tests.lib.trees import leaf

P = PartitionSpec
BOTH, DATA = ManualMesh(MESH, frozenset({"data", "model"})), ManualMesh(MESH, frozenset({"data"}))


def whys(problems: Any) -> list[str]:
    return [problem.why for problem in problems]


def test_it_knows_its_mesh():
    assert not BOTH.explicit and ManualMesh(EXPLICIT, BOTH.axes).explicit
    mixed = jax.make_mesh(
        (2, 4), ("data", "model"), axis_types=(EXPLICIT.axis_types[0], MESH.axis_types[0])
    )
    assert ManualMesh(mixed, DATA.axes).explicit and not ManualMesh(mixed, BOTH.axes).explicit
    assert str(PartialView({"data": 2, "model": 1}, MESH)) == "(data=2, model=4)"


@pytest.mark.parametrize(("spec", "ours"), [
    (P(), P()), (P("data", "model"), P("data", None)), (P(("data", "model")), P("data")), (P("model"), P(None)),
])  # fmt: skip
def test_of_a_spec_the_manual_axes_are_kept(spec: P, ours: P):
    assert DATA.project(spec) == ours
    assert BOTH.project(spec) == spec


def test_a_global_tree_has_the_manual_axes_sizes_and_a_local_one_none():
    tree = {"x": jnp.ones((4, 3)), "y": [jnp.ones(3), "text"]}
    specs, problems = DATA.lay(*read_for(tree, {"x": P("data"), "y": P()}))
    assert specs == (P("data", None), P(None)) and problems == []
    _, problems = DATA.lay(*read_for(tree, P("data")))
    assert [str(problem.path) for problem in problems] == ["y.0"] and "3" in problems[0].why
    assert DATA.lay(*read_for(tree, P("data")), local=True)[1] == []
    # An axis that does not become manual counts as one device, too; but to write it out is a
    # mistake.
    rules = ft.AxisRules({"batch": ("data", "model"), ...: None})
    linear = ft.nn.Linear(4, 6, key=jax.random.key(0))
    assert DATA.lay(*read_for(linear, rules))[1] == []


ELSEWHERE = jax.make_mesh(
    (2, 2), ("data", "model"), axis_types=MESH.axis_types, devices=jax.devices()[4:]
)
HERE = jnp.ones((4, 8))
ON: dict[str, tuple[ManualMesh, Any, list[str]]] = {
    "on the mesh": (BOTH, lay(HERE, "data"), []),
    "uncommitted": (BOTH, HERE, []),
    "numpy": (BOTH, np.ones((4, 8)), []),
    "elsewhere": (BOTH, jax.device_put(HERE, NamedSharding(ELSEWHERE, P())), ["but the mesh has other devices"]),
    "an abstract mesh": (ManualMesh(MESH.abstract_mesh, BOTH.axes), lay(HERE, "data"), []),
    "Auto on Explicit": (ManualMesh(EXPLICIT, BOTH.axes), lay(HERE, "data"), ["its type is on a mesh of Auto axes"]),
    "of its type": (ManualMesh(EXPLICIT, BOTH.axes), jax.device_put(HERE, NamedSharding(EXPLICIT, P("data"))), []),
    "of another type": (
        ManualMesh(EXPLICIT, BOTH.axes), jax.device_put(HERE, NamedSharding(EXPLICIT, P(None, "model"))),
        ["its type is sharded P(None, 'model'), but its spec is P('data', None); Explicit axes are not moved"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ON)
def test_an_array_that_jax_would_not_move(case: str):
    place, array, wrong = ON[case]
    found = whys(place.misplaced(leaf("a b", 4, 8)._replace(value=array), P("data", None)))
    assert len(found) == len(wrong) and all(
        part in why for part, why in zip(wrong, found, strict=True)
    )


def test_other_names_on_explicit_axes():
    other = jax.make_mesh((2, 4), ("x", "y"), axis_types=EXPLICIT.axis_types)
    array = jax.device_put(HERE, NamedSharding(other, P("x")))
    for mesh in (MESH, EXPLICIT):
        found = ManualMesh(mesh, BOTH.axes).misplaced(
            leaf("a b", 4, 8)._replace(value=array), P("data", None)
        )
        assert whys(found) == ["its type is on a mesh of Explicit axes, (x=2, y=4)"]


def test_an_argument_without_a_type_is_given_its_spec():
    place, spec = ManualMesh(EXPLICIT, BOTH.axes), P("data", None)
    with jax.set_mesh(EXPLICIT):
        assert place.reshard(HERE, spec).sharding.spec == spec
    typed = jax.device_put(HERE, NamedSharding(EXPLICIT, spec))
    assert place.reshard(typed, spec) is typed and BOTH.reshard(HERE, spec) is HERE


def test_what_may_differ_along_an_axis_that_its_spec_calls_equal():
    found: list[list[str]] = []

    def body(value: Any) -> Any:
        for place in (BOTH, DATA):
            for spec in (P(None, None), P("data", None)):
                found.append(whys(place.varying(leaf("a b", 2, 2)._replace(value=value), spec)))
        return value

    jax.shard_map(body, mesh=MESH, in_specs=P("data", "model"), out_specs=P("data", "model"))(HERE)
    assert found == [
        ["P(None, None) says that it is the same along (data, model), but it may differ there"],
        ["P('data', None) says that it is the same along model, but it may differ there"],
        ["P(None, None) says that it is the same along data, but it may differ there"],
        [],
    ]
    assert BOTH.varying(leaf("a b", 2, 2), P()) == []
