"""Every public placing and planning function × kind of mesh × kind of tree: a result, or an error
by name."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

import functree as ft
from tests.lib.meshes import mesh_of
from tests.lib.trees import MLP

P = PartitionSpec
MODES = ("auto", "explicit", "manual", "none")
TREES = ("array", "module", "pair")
ROOMS = ("functree.devices", "functree.placing", "functree.transforms", "functree.layout")
RULES = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})


def mlp() -> MLP:
    return MLP(jnp.ones((6, 8)), jnp.ones((8, 6)))


def pair() -> tuple[MLP, Any]:
    model = mlp()
    return model, optax.adam(1e-3).init(eqx.filter(model, eqx.is_array))  # type: ignore[arg-type]


MAKE: dict[str, Callable[[], Any]] = {
    "array": lambda: jnp.ones((4, 8)),
    "module": mlp,
    "pair": pair,
}
LAYOUT: dict[str, Any] = {"array": P("data", "model"), "module": RULES, "pair": (RULES, RULES)}
UP, DOWN = P(None, "model"), P("model", None)
SPECS: dict[str, list[P]] = {
    "array": [P("data", "model")],
    "module": [UP, DOWN],
    "pair": [UP, DOWN, P(), UP, DOWN, UP, DOWN],
}
ADAM: dict[str, list[P]] = {
    "array": [P(), P("data", "model"), P("data", "model")],
    "module": [P(), UP, DOWN, UP, DOWN],
    # of the pair, adam's own count is an integer, so five arrays are trained
    "pair": [P(), *([UP, DOWN] * 3), *([UP, DOWN] * 3)],
}
# A gradient has no place for adam's integer count.
GRADIENTS = {**SPECS, "pair": [UP, DOWN, UP, DOWN, UP, DOWN]}
WHOLE: dict[str, list[P]] = {"array": [P()], "module": [P()] * 2, "pair": [P()] * 6}
MANUAL = "are Manual and shapes are local"
NONE = "there is no mesh: pass `mesh=`"


def lie(tree: Any) -> list[P]:
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(tree)]
    return [s.spec for s in shardings if isinstance(s, NamedSharding)]


def rows(plan: ft.Plan) -> list[P]:
    return [row.spec for row in plan]  # type: ignore[misc]


def same_specs(found: list[P], wanted: list[P]) -> bool:
    def padded(spec: P) -> tuple[Any, ...]:
        return tuple(entry for entry in spec) + (None,) * (4 - len(spec))

    return [padded(s) for s in found] == [padded(s) for s in wanted]


def constrained(kind: str) -> Any:
    """Constrain under jit, as users do."""
    arrays, rest = eqx.partition(MAKE[kind](), eqx.is_array)
    layout = LAYOUT[kind]
    return jax.jit(lambda a: eqx.filter(ft.constrain(eqx.combine(a, rest), layout), eqx.is_array))(
        arrays
    )


def constrained_here(kind: str) -> list[P]:
    return [
        P(None, None)
        for x in jax.tree.leaves(ft.constrain(MAKE[kind](), LAYOUT[kind]))
        if eqx.is_array(x)
    ]


def energy(tree: Any) -> Array:
    return sum(
        (jnp.sum(x**2) for x in jax.tree.leaves(tree) if eqx.is_inexact_array(x)), jnp.zeros(())
    )


def gradient(kind: str, name: str) -> list[P]:
    """The specs of a gradient, which `grad` and `value_and_grad` constrain under jit."""
    arrays, rest = eqx.partition(MAKE[kind](), eqx.is_array)

    def derive(arrays: Any) -> Any:
        found = getattr(ft, name)(energy, layout=LAYOUT[kind])(eqx.combine(arrays, rest))
        return eqx.filter(found if name == "grad" else found[1], eqx.is_array)

    return (
        [P() for _ in jax.tree.leaves(derive(arrays))]
        if in_manual()
        else lie(jax.jit(derive)(arrays))
    )


def doubled(tree: Any) -> Any:
    return jax.tree.map(lambda x: x + x if eqx.is_array(x) else x, tree)


def spec_of_array() -> list[P]:
    with ft.axis_rules(RULES):
        return [ft.spec("embed hidden")]


def shards_of_name() -> list[P]:
    with ft.axis_rules(RULES):
        return [P(*ft.axis_shards("hidden").mesh_axes)]


# function ─► mode ─► how it is called on a kind of tree; then what comes out, or a fragment of the
# error.
Call = Callable[[str], list[P]]
TABLE: dict[str, tuple[Call, dict[str, Any]]] = {
    "plan": (
        lambda kind: rows(ft.plan(MAKE[kind](), LAYOUT[kind])),
        {"auto": SPECS, "explicit": SPECS, "manual": MANUAL, "none": NONE},
    ),
    "shard": (
        lambda kind: lie(ft.shard(MAKE[kind](), LAYOUT[kind])),
        {"auto": SPECS, "explicit": SPECS, "manual": "is traced", "none": NONE},
    ),
    "constrain": (
        lambda kind: constrained_here(kind) if in_manual() else lie(constrained(kind)),
        {
            "auto": SPECS,
            "explicit": SPECS,
            "manual": {"array": [P()], "module": [P()] * 2, "pair": [P()] * 7},
            "none": {
                "array": [],
                "module": [],
                "pair": [],
            },  # unsharded: no NamedSharding to be seen
        },
    ),
    "init": (
        lambda kind: lie(ft.init(MAKE[kind], LAYOUT[kind])()),
        {"auto": SPECS, "explicit": SPECS, "manual": MANUAL, "none": NONE},
    ),
    "abstract": (
        lambda kind: lie(ft.abstract(MAKE[kind], LAYOUT[kind])()),
        {"auto": SPECS, "explicit": SPECS, "manual": MANUAL, "none": NONE},
    ),
    "plan_optimizer": (
        lambda kind: rows(ft.plan_optimizer(optax.adam(1e-3), MAKE[kind](), LAYOUT[kind])),
        {"auto": ADAM, "explicit": ADAM, "manual": MANUAL, "none": NONE},
    ),
    "init_optimizer": (
        lambda kind: lie(ft.init_optimizer(optax.adam(1e-3), MAKE[kind](), LAYOUT[kind])),
        {"auto": ADAM, "explicit": ADAM, "manual": MANUAL, "none": NONE},
    ),
    "spec": (
        lambda kind: spec_of_array(),
        {
            "auto": {kind: [UP] for kind in TREES},
            "explicit": {kind: [UP] for kind in TREES},
            "manual": {kind: [P()] for kind in TREES},
            "none": {kind: [UP] for kind in TREES},
        },
    ),
    "axis_shards": (
        lambda kind: shards_of_name(),
        {
            "auto": {kind: [P("model")] for kind in TREES},
            "explicit": {kind: [P("model")] for kind in TREES},
            "manual": {kind: [P()] for kind in TREES},
            "none": {kind: [P()] for kind in TREES},
        },
    ),
    "axis_rules": (
        lambda kind: spec_of_array(),
        {
            "auto": {kind: [UP] for kind in TREES},
            "explicit": {kind: [UP] for kind in TREES},
            "manual": {kind: [P()] for kind in TREES},
            "none": {kind: [UP] for kind in TREES},
        },
    ),
    **{
        name: (
            partial(gradient, name=name),
            {
                "auto": GRADIENTS,
                "explicit": GRADIENTS,
                "manual": WHOLE,
                "none": {kind: [] for kind in TREES},
            },
        )
        for name in ("grad", "value_and_grad")
    },
    "jit": (
        lambda kind: lie(ft.jit(doubled, out_shardings=LAYOUT[kind])(MAKE[kind]())),
        {"auto": SPECS, "explicit": SPECS, "manual": MANUAL, "none": NONE},
    ),
    "on_host": (
        lambda kind: rows(ft.plan(MAKE[kind](), jax.tree.map(ft.on_host, LAYOUT[kind]))),
        {"auto": SPECS, "explicit": SPECS, "manual": MANUAL, "none": NONE},
    ),
    "make_mesh": (
        lambda kind: lie(ft.shard(MAKE[kind](), LAYOUT[kind], ft.make_mesh(data=2, model=4))),
        {"auto": SPECS, "explicit": SPECS, "manual": "is traced", "none": SPECS},
    ),
}


def in_manual() -> bool:
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def call(function: Call, mode: str, kind: str) -> list[P]:
    if mode == "none":
        return function(kind)
    with jax.set_mesh(mesh_of(mode == "explicit")):
        if mode != "manual":
            return function(kind)
        found: list[list[P]] = []

        def body(x: Array) -> Array:
            found.append(function(kind))
            return x

        jax.jit(jax.shard_map(body, in_specs=P("data", "model"), out_specs=P("data", "model")))(
            jnp.ones((4, 8))
        )
        return found[0]


def public_functions() -> set[str]:
    """The public functions of the rooms that place and plan."""
    return {
        name
        for name, value in vars(ft).items()
        if not name.startswith("_")
        and inspect.isfunction(value)
        and value.__module__.startswith(ROOMS)
    }


def test_every_function_has_a_row():
    # `stack` makes a module, `offload` a policy, and `copy` leaves arrays where they are; the others
    # run, compile and read functions, and are tested under each mode in files of their own.
    others = {
        "stack",
        "offload",
        "copy",
        "accumulate",
        "ledger",
        "layouts",
        "why",
        "shard_map",
        "signature_layouts",
        "typed",
    }
    assert public_functions() - others == set(TABLE)
    assert all(set(outcomes) == set(MODES) for _, outcomes in TABLE.values())


@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TABLE)
def test_gives_a_result_or_a_named_error(name: str, mode: str, kind: str):
    function, outcomes = TABLE[name]
    outcome = outcomes[mode]
    if isinstance(outcome, str):
        with pytest.raises(ft.ShardingError, match=outcome):
            call(function, mode, kind)
        return
    assert same_specs(call(function, mode, kind), outcome[kind])


def test_mixed_axis_types_take_a_constraint_and_a_reshard():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, P("data", "model")))
        out = jax.jit(lambda x: ft.constrain(x * 2.0, P("data", "model")))(x)
    assert same_specs([out.sharding.spec], [P("data", "model")])
