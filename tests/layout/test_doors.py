"""One layout means the same at every door: which filter decides about which array, by which path, and what is refused.

The doors are those of a tree (`plan`, `shard`, `constrain`, gradients, ...) and those of a call (`in_shardings=`,
`rules=`, `in_specs=`). The trees are a model, a training state, several of them, and what a call takes.
"""

import re
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

import functree as ft
from tests.lib.checks import raises
from tests.lib.meshes import MESH

P = PartitionSpec
TX = optax.adam(0.1)


class Layer(eqx.Module):
    weight: Float[Array, "embed hidden"]
    bias: Float[Array, "hidden"]


class Net(eqx.Module):
    inner: Layer
    weight: Float[Array, "embed"]


class Other(eqx.Module):
    key: Float[Array, "embed"]


def net() -> Net:
    return Net(Layer(jnp.ones((4, 8)), jnp.ones(8)), jnp.ones(8))


def train_state() -> ft.TrainState[Net]:
    return ft.TrainState.create(net(), TX)


X: Any = np.ones((8, 4), np.float32)
PLACED, PLACED_X = ft.shard(net(), P(), MESH), ft.shard(X, P(), MESH)
RULES = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})

# Which arrays a filter selects


# A filter ─► the arrays of a `Net` that it selects, in the model and wherever else the model is.
FILTERS: dict[str, tuple[Any, set[str]]] = {
    "a path": ("weight", {"weight"}),
    "a star and a key": ("*.weight", {"inner.weight"}),
    "an expression, found": (ft.regex(r"^weight|s$"), {"weight", "inner.bias"}),
    "a callable, depth": (lambda path, leaf: len(path) == 1, {"weight"}),
    "a class": (Layer, {"inner.weight", "inner.bias"}),
    "a negation": (~ft.glob("inner.**"), {"weight"}),
}
ALL = ("inner.weight", "inner.bias", "weight")


def layout(item: Any) -> ft.Layout:
    """What the filter selects is sharded over `data`, and all else is whole."""
    return ft.StateSharding({item: P("data"), ...: P()})


def sharded(tree: Any) -> set[str]:
    """The paths of the arrays that lie over `data`."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {str(ft.Path.of(keys)) for keys, leaf in found if "data" in str(leaf.sharding.spec)}


def planned(tree: Any, layout: Any) -> set[str]:
    return {str(row.path) for row in ft.plan(tree, layout, MESH) if "data" in row.spec}


def of_model(net: Net, x: Float[Array, "batch _"]) -> Any:
    return net, x


def of_state(state: Any, x: Float[Array, "batch _"]) -> Any:
    return state, x


def same(net: Net) -> Net:
    return net


def arguments(f: Any, tree: Any, **options: Any) -> set[str]:
    """The arrays of the first argument that a jitted function takes over `data`."""
    compiled = ft.jit(f, mesh=MESH, **options).lower(tree, X).compile()
    found = jax.tree_util.tree_leaves_with_path(compiled.input_shardings[0][0])
    return {str(ft.Path.of(keys)) for keys, sharding in found if "data" in str(sharding.spec)}


def gradients(layout: Any) -> set[str]:
    loss = ft.grad(
        lambda net: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(net)), layout=layout
    )
    return sharded(jax.jit(loss)(PLACED))


# The doors that take the layout of a model.
MODELS: dict[str, Callable[[Any], set[str]]] = {
    "plan": lambda layout: planned(net(), layout),
    "shard": lambda layout: sharded(ft.shard(net(), layout, MESH)),
    "constrain": lambda layout: sharded(jax.jit(lambda net: ft.constrain(net, layout))(PLACED)),
    "init": lambda layout: sharded(ft.init(net, layout, MESH)()),
    "abstract": lambda layout: sharded(ft.abstract(net, layout, MESH)()),
    "grad": gradients,
    "in_shardings": lambda layout: arguments(of_model, net(), in_shardings=(layout, P())),
    "in_shardings, by name": lambda layout: arguments(
        of_model, net(), in_shardings={"net": layout, "x": None}
    ),
    "in_shardings, one for all": lambda layout: arguments(of_model, net(), in_shardings=layout),
    "rules": lambda layout: arguments(of_model, net(), rules=layout),
    "out_shardings": lambda layout: sharded(ft.jit(same, out_shardings=layout, mesh=MESH)(net())),
}
# The doors that take the layout of a training state.
STATES: dict[str, Callable[[Any], set[str]]] = {
    "plan": lambda layout: planned(train_state(), layout),
    "shard": lambda layout: sharded(ft.shard(train_state(), layout, MESH)),
    "create": lambda layout: sharded(ft.TrainState.create(net(), TX, layout=layout, mesh=MESH)),
    "init": lambda layout: sharded(ft.init(train_state, layout, MESH)()),
    "in_shardings": lambda layout: arguments(of_state, train_state(), in_shardings=(layout, P())),
    "in_shardings, one for all": lambda layout: arguments(
        of_state, train_state(), in_shardings=layout
    ),
    "rules": lambda layout: arguments(of_state, train_state(), rules=layout),
}


def in_state(selected: set[str]) -> set[str]:
    """The parameters, and their two moments."""
    beginnings = ("model", "opt_state.0.mu", "opt_state.0.nu")
    return {f"{beginning}.{path}" for beginning in beginnings for path in selected}


@pytest.mark.parametrize("door", MODELS)
@pytest.mark.parametrize("name", FILTERS)
def test_a_model(door: str, name: str) -> None:
    item, selected = FILTERS[name]
    assert MODELS[door](layout(item)) == selected


# Filters for a training state ─► the arrays of it. Paths are those in the model, and the moments
# follow; or a pattern names what is above a leaf.
IN_STATES: dict[str, tuple[Any, set[str]]] = {
    **{name: (item, in_state(selected)) for name, (item, selected) in FILTERS.items()},
    "a field": ("model.weight", in_state({"weight"})),
    "one moment": (
        "opt_state.*.mu.**.weight",
        {"opt_state.0.mu.weight", "opt_state.0.mu.inner.weight"},
    ),
}


@pytest.mark.parametrize("door", STATES)
@pytest.mark.parametrize("name", IN_STATES)
def test_a_training_state(door: str, name: str) -> None:
    item, selected = IN_STATES[name]
    assert STATES[door](layout(item)) == selected


@pytest.mark.parametrize("name", FILTERS)
def test_other_trees(name: str) -> None:
    item, selected = FILTERS[name]
    state = {f"opt_state.{row.path}" for row in ft.plan_optimizer(TX, net(), layout(item), MESH)
             if "data" in row.spec}  # fmt: skip
    assert state == {path for path in in_state(selected) if path.startswith("opt_state")}
    both = {"gen": train_state(), "dis": train_state()}
    expected = {f"{key}.{path}" for key in both for path in in_state(selected)}
    assert planned(both, layout(item)) == expected
    for tree in ({"inner": net().inner, "weight": net().weight}, ft.pack(net())):
        assert planned(tree, layout(item)) == selected
        found = arguments(lambda net, x: (net, x), tree, in_shardings=layout(item))
        # JAX knows a packed array by one key, which is the text of its path.
        assert {path.strip('"') for path in found} == selected


@pytest.mark.parametrize("door", STATES)
def test_a_parameter_and_its_moments_are_one_problem(door: str) -> None:
    with pytest.raises(ft.ShardingError) as caught:
        STATES[door](ft.StateSharding({"weight": P("nowhere"), ...: P()}))
    (problem,) = caught.value.problems
    assert str(problem.path).endswith("model.weight") and "`nowhere`" in problem.why


def test_a_key_above_a_training_state() -> None:
    both = {"gen": train_state(), "dis": train_state()}
    assert planned(both, layout("gen.**")) >= {f"gen.{path}" for path in in_state(set(ALL))}
    found = planned(both, layout("gen.model.weight"))
    assert found == {f"gen.{path}" for path in in_state({"weight"})}


# Filters before `...: AxisRules({"batch": "data", ...: None})`, and how `x` lies, whatever the door.
CALLS: dict[str, tuple[Any, P]] = {
    "everything that has a path": ("**", P("data", None)),
    "the model by its argument": ("net.**", P("data", None)),
    "the array": ("x", P(None, "data")),
    "with a property": (ft.glob("x") & ft.has_ndim(2), P(None, "data")),
    "a property": (ft.has_ndim(2), P("data", None)),
    "a callable": (lambda path, leaf: True, P("data", None)),
    "a negation": (~ft.glob("inner.**"), P("data", None)),
}


@pytest.mark.parametrize("door", ["in_shardings", "rules"])
@pytest.mark.parametrize("case", CALLS)
def test_a_call(door: str, case: str) -> None:
    """An argument that is one array has no path: a pattern names it, or `...` decides."""
    item, spec = CALLS[case]
    ruled = ft.AxisRules({"batch": "data", ...: None})
    own = spec if spec[0] is None else P()
    options: dict[str, Any] = {door: ft.StateSharding({item: own, ...: ruled})}
    compiled = ft.jit(of_model, mesh=MESH, **options).lower(net(), X).compile()
    assert compiled.input_shardings[0][1].spec == spec


def test_rules_for_the_model_alone() -> None:
    """They say nothing of an argument that is one array."""
    rules = ft.StateSharding({"net.**": P("data")})
    assert arguments(of_model, net(), rules=rules) == set(ALL)
    compiled = ft.jit(of_model, rules=rules, mesh=MESH).lower(net(), X).compile()
    assert compiled.input_shardings[0][1].is_fully_replicated
    # Nor of one that is like an array of the model.
    f = ft.jit(lambda *given: given, rules=ft.FSDP("data", min_size=0), mesh=MESH)
    alike = {"w": jnp.ones(8)}
    found, _ = f.lower(alike, jnp.ones(8), {"w": jnp.ones(8)}).compile().input_shardings
    assert [one.is_fully_replicated for one in jax.tree.leaves(found)] == [False, True, False]


def test_each_of_several_arguments_is_one_by_itself() -> None:
    def f(*xs: Any, **named: Any) -> Any:
        return xs, named

    layout = ft.StateSharding({"xs.1": P("data"), "named": P("model"), ...: P()})
    compiled = ft.jit(f, in_shardings=layout, mesh=MESH)
    a, b, c = (jnp.ones(8) for _ in range(3))
    (first, second), by_name = compiled.lower(a, b, named=c).compile().input_shardings
    assert (first.spec, second.spec, by_name["named"].spec) == (P(None), P("data"), P("model"))
    # A path in a tree begins in the argument.
    layout = ft.StateSharding({"w": P("data"), ...: P()})
    compiled = ft.jit(f, in_shardings=layout, mesh=MESH)
    (first, second), _ = compiled.lower({"w": a}, {"v": b}).compile().input_shardings
    assert (first["w"].spec, second["v"].spec) == (P("data"), P(None))


def test_a_layout_function_and_an_argument_without_a_path() -> None:
    def by_path(path: ft.Path, leaf: Any) -> P:
        return P("data") if path == ("weight",) else P()

    with raises(
        "x   f32[8, 4]",
        "has no path to pass to",
        "an entry of `in_shardings=`",
        error=ft.ShardingError,
    ):
        ft.jit(of_model, in_shardings=by_path, mesh=MESH).lower(net(), X)
    # The remedies.
    assert arguments(of_model, net(), in_shardings=(by_path, P())) == {"weight"}
    named = ft.StateSharding({"x": P(), ...: by_path})
    assert arguments(of_model, net(), in_shardings=named) == {"weight"}


# What is refused, at every door


def anew() -> Any:
    """A function like `of_model`: JAX keeps the traces of one that it knows."""

    def body(net: Net, x: Float[Array, "batch _"]) -> Any:
        return net, x

    return body


def mapped(fun: Any, *args: Any, **options: Any) -> Any:
    return ft.shard_map(fun, mesh=MESH, check_vma=False, **options).trace(*args)


# The doors that take the layout of a model.
DOORS: dict[str, Callable[[Any], Any]] = MODELS | {
    "plan_optimizer": lambda layout: ft.plan_optimizer(TX, net(), layout, MESH),
    "create": lambda layout: ft.TrainState.create(net(), TX, layout=layout, mesh=MESH),
    "rules, placed": lambda layout: ft.jit(of_model, rules=layout).trace(PLACED, PLACED_X),
    "rules, no mesh": lambda layout: ft.jit(of_model, rules=layout).trace(net(), X),
    "rules, called": lambda layout: ft.jit(anew(), mesh=MESH, rules=layout)(net(), X),
    "in_specs": lambda layout: mapped(
        of_model, net(), X, in_specs=(layout, P("data")), out_specs=P("data")
    ),
    "out_specs": lambda layout: mapped(same, net(), in_specs=RULES, out_specs=layout),
    "rules of shard_map": lambda layout: mapped(
        of_model, net(), X, rules=layout, out_specs=P("data")
    ),
    "rules of shard_map, one entry": lambda layout: mapped(
        of_model, net(), X, rules=layout, in_specs={"x": P("data")}, out_specs=P("data")
    ),
}
# Where nothing is laid out: an array that was placed stays where it is, and so do all without a mesh.
STAY = ("rules, placed", "rules, no mesh")
# Where no layout (`None`) leaves the array as it is, or to the compiler.
NONE_MEANS = (
    *STAY, "in_shardings", "in_shardings, by name", "in_shardings, one for all", "out_shardings",
)  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
def test_each_door_refuses(door: str) -> None:
    """A filter without an effect, a function that raises, and no layout."""
    with raises("filter '**.bais'", "matches no leaf", error=ft.ShardingError):
        DOORS[door](ft.StateSharding({"**.bais": P(), ...: RULES}))
    if door not in STAY:
        with raises("failed", "weight   f32", "gelu raised TypeError: ", error=ft.ShardingError):
            DOORS[door](jax.nn.gelu)
    nothing = ft.StateSharding({"**.bias": None, ...: RULES})
    if door in NONE_MEANS:
        DOORS[door](nothing)
        return
    with raises("bias   f32[", "no layout was given for this array (`None`)"):
        DOORS[door](nothing)


@pytest.mark.parametrize("door", [door for door in DOORS if door not in STAY])
def test_each_door_warns_of_a_longer_form(door: str) -> None:
    rules = ft.AxisRules({"hiddens": "model", ...: None})
    with pytest.warns(
        ft.FunctreeWarning, match="no leaf has the axis `hiddens`, which a rule names"
    ):
        DOORS[door](rules)


# Over all arguments together, and only where there is a model


def two(net: Net, other: Other) -> Any:
    return net.weight.sum() + other.key.sum()


ACROSS = {
    "one for each": ft.StateSharding({Net: RULES, Other: P(), ...: RULES}),
    "by path": ft.StateSharding({"**.bias": P("model"), "**.key": P(), ...: RULES}),
    "for a training state": ft.StateSharding(
        {"opt_state.**": P(), "step": P(), "state.**": P(), "model.weight": RULES, ...: RULES}
    ),
}


@pytest.mark.parametrize("case", ACROSS)
def test_over_all_arguments_together(case: str) -> None:
    both = net(), Other(jnp.ones(4))
    ft.jit(two, mesh=MESH, rules=ACROSS[case]).trace(*both)
    mapped(two, *both, rules=ACROSS[case], out_specs=P())


def test_a_call_without_a_module_says_nothing() -> None:
    layout = ft.StateSharding({"**.bias": P(), Layer: P(), ...: RULES})

    def double(x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
        return x + x

    ft.jit(double, mesh=MESH, rules=layout).trace(X)
    mapped(double, X, rules=layout)


@pytest.mark.parametrize("pattern", ["opt_state.**", "model.weight", "state.norm.mean", "step", "key"])  # fmt: skip
def test_a_field_of_a_training_state_is_for_where_there_is_one(pattern: str) -> None:
    layout = ft.StateSharding({pattern: P(), ...: P("data")})
    assert planned(net(), layout) == set(ALL)
    assert arguments(of_model, net(), in_shardings=(layout, P())) == set(ALL)
    assert arguments(of_model, net(), rules=layout) == set(ALL)


@pytest.mark.parametrize("pattern", ["key.weight", "step.**", "modle.**", "**.step"])
def test_what_is_no_field_is_a_slip(pattern: str) -> None:
    layout = ft.StateSharding({pattern: P(), ...: P("data")})
    for run in (lambda: planned(net(), layout), lambda: arguments(of_model, net(), rules=layout)):
        with raises("matches no leaf", error=ft.ShardingError):
            run()


# Patterns that match nothing in a training state, and what is suggested.
GONE: dict[Any, str] = {
    "opt*.**": "", "**.opt_state.**": "", "*.0.mu.**": "", re.compile(r"opt_state\..*"): "",
    re.compile("step"): "", (lambda path, leaf: path[0] == "opt_state"): "", ft.regex("^opt_state"): "",
    "opt_state.*.mv.weight": "; did you mean `opt_state.*.mu.weight`?", "model.wieght": "; did you mean `model.weight`?",
}  # fmt: skip


@pytest.mark.parametrize("item", GONE, ids=map(str, range(len(GONE))))
def test_what_names_nothing(item: Any) -> None:
    for run in (STATES["plan"], STATES["rules"]):
        with pytest.raises(ft.ShardingError) as caught:
            run(layout(item))
        assert [problem.why for problem in caught.value.problems] == [
            f"matches no leaf{GONE[item]}"
        ]


# A name of two meanings


class WithModel(eqx.Module):
    model: Float[Array, "embed"]
    step: Float[Array, "embed"]


def two_meanings(pattern: str, door: str) -> Callable[[], Any]:
    one = WithModel(jnp.ones(8), jnp.ones(8))
    state = ft.TrainState.create(one, TX)
    doors: dict[str, Callable[[], Any]] = {
        "a field": lambda: ft.plan(state, layout(pattern), MESH),
        "a key": lambda: ft.plan({"step": state}, layout(pattern), MESH),
        "an argument": lambda: ft.jit(
            lambda model, state: state, in_shardings=layout(pattern), mesh=MESH
        ).lower(ft.copy(one), state),
    }
    return doors[door]


@pytest.mark.parametrize(
    ("pattern", "door", "meanings"),
    [
        ("model", "a field", ("the field `model` of a training state", "at the root of the model")),
        ("step", "a key", ("the key `step` above a training state", "at the root of the model")),
        ("model", "an argument", ("the argument `model`", "at the root of the model")),
        ("state.**", "an argument", ("the argument `state`",)),
    ],
)
def test_a_name_of_two_meanings(pattern: str, door: str, meanings: tuple[str, ...]) -> None:
    run = two_meanings(pattern, door)
    if len(meanings) == 1:
        run()
        return
    with raises("an ambiguous name", *meanings, "ft.regex(r'^", error=ft.ShardingError):
        run()


class WithBest(ft.TrainState[Any]):
    best: Float[Array, "embed"]


def test_a_field_of_a_subclass_that_is_one_array_has_one_meaning() -> None:
    ts = train_state()
    more = WithBest(ts.step, ts.model, ts.opt_state, ts.state, ts.key, ts.tx, ts.wrt, jnp.ones(8))
    assert planned(more, layout("best")) == {"best"}


def test_the_remedy_for_a_name_of_two_meanings() -> None:
    state = ft.TrainState.create(WithModel(jnp.ones(8), jnp.ones(8)), TX)
    with pytest.raises(ft.ShardingError) as caught:
        ft.plan(state, layout("model"), MESH)
    written = re.findall(r"`(ft\.regex\(.*?'\))`", caught.value.problems[0].remedy)
    assert planned(state, layout(eval(written[0], {"ft": ft}))) == in_state({"model"})


# A bare spec is for every leaf


def population(tx: Any = TX) -> ft.TrainState[Net]:
    def make(key: Any) -> ft.TrainState[Net]:
        return ft.TrainState.create(net(), tx, key=key)

    return eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), 8))


OPTIMIZERS: dict[str, Any] = {
    "adam": TX,
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "flatten": optax.flatten(optax.adam(0.1)),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_training_state_under_vmap(optimizer: str) -> None:
    """Each leaf has the dimension of the agents, the step, the key and the counts too."""
    state = ft.init(population, P("data"), MESH)(OPTIMIZERS[optimizer])
    assert all(leaf.sharding.spec[0] == "data" for leaf in jax.tree.leaves(state))


def test_a_spec_of_two_entries_under_vmap_is_not_for_statistics() -> None:
    """Their dimensions are not known to be those of the parameter: `model` could land on another."""
    wide = {"inner.weight": P("data", "model"), ...: P("data")}
    make = ft.abstract(lambda: population(OPTIMIZERS["adafactor"]))
    with raises("opt_state.0.v_row.inner.weight", "opt_state.**", error=ft.ShardingError):
        ft.plan(make(), ft.StateSharding(wide), MESH)
    # The remedy.
    plan = ft.plan(make(), ft.StateSharding({"opt_state.**": P("data"), **wide}), MESH)
    assert plan["opt_state.0.v_row.inner.weight"].spec == P("data", None)
    assert plan["model.inner.weight"].spec == P("data", "model", None)


def test_rules_and_in_shardings_agree_about_a_state_made_under_vmap() -> None:
    """Its counts have no path, and are no argument that is one array."""
    make = jax.vmap(lambda b: ft.TrainState.create({"b": b}, optax.adam(1.0)))
    state = ft.abstract(make)(jnp.ones(8))
    apart = ft.StateSharding({~ft.glob("opt_state.**"): P(), ...: P("data")})
    for given in (P("data"), ft.StateSharding({...: P("data")}), apart):
        found = []
        for door in ("rules", "in_shardings"):
            f = ft.jit(lambda state: state, mesh=MESH, **{door: given})
            found.append(f.lower(state).compile().input_shardings)
        assert found[0] == found[1]
        assert found[0][0][0].step.spec == P("data")


def test_a_spec_for_a_scalar() -> None:
    """For a scalar alone it is a mistake. In a tree a scalar is whole."""
    scalar = jnp.ones(())
    summed = ft.shard_map(
        lambda x: x.sum(), in_specs=P("data"), out_specs=P("data"), mesh=MESH, check_vma=False
    )
    for call in (
        lambda: ft.plan(scalar, P("data"), MESH),
        lambda: ft.jit(lambda x: x, in_shardings=(P("data"),), mesh=MESH).lower(scalar),
        lambda: summed(jnp.ones(8)),
    ):
        with raises("P('data') has 1 entry for 0 dimensions", error=ft.ShardingError):
            call()
    tree = {"w": jnp.ones(8), "scale": scalar}
    assert ft.plan(tree, P("data"), MESH).specs == {"w": P("data"), "scale": P()}


# A class that is defined again


def test_a_class_of_another_cell() -> None:
    """In a notebook, a cell that is run again defines another class of the same name."""

    def cell() -> type[Any]:
        class Again(eqx.Module):
            w: Float[Array, "embed"]

        return Again

    tree, again = {"net": cell()(jnp.ones(8))}, cell()
    told = "the tree contains instances of another class, `"
    with raises("filter under(Again)", told, ".Again`: use this class or", error=ft.ShardingError):
        ft.plan(tree, layout(again), MESH)
    with raises(told + "functree.nn.linear.Linear`", error=ft.ShardingError):
        linear = ft.nn.Linear(8, 8, key=jax.random.key(0))
        ft.plan({"net": linear}, layout(eqx.nn.Linear), MESH)
    # The remedies, to the letter.
    tree = {"net": again(jnp.ones(8))}
    assert planned(tree, layout(again)) == planned(tree, layout("net.**")) == {"net.w"}


# A layout that no filter has chosen says nothing


def test_what_is_not_reached_is_not_checked() -> None:
    other = ft.AxisRules({"vocab": "nowhere"})
    layout = ft.StateSharding({"head.**": other, ...: P("data")}, unused="ignore")
    assert planned(net(), layout) == set(ALL) and not ft.plan(net(), layout, MESH).unused


def test_a_typo_does_not_hide_behind_the_rules_of_another_filter() -> None:
    hidden = ft.AxisRules({"hidden": "model", "embed": None})
    layout = ft.StateSharding(
        {"inner.bias": hidden, ...: ft.AxisRules({"hiden": "model", ...: None})}
    )
    with raises(
        "inner.weight", "no leaf has the axis `hiden`, which a rule names", error=ft.ShardingError
    ):
        ft.plan(net(), layout, MESH)


def test_what_is_wrong_with_rules_is_not_told_of_an_argument() -> None:
    """Also if the function has one argument alone: the rules are for any."""
    rules = ft.AxisRules({"embed": "nowhere", ...: None}, unnamed=P())
    with pytest.raises(ft.ShardingError) as caught:
        ft.jit(same, rules=rules, mesh=MESH).lower(net())
    assert [problem.what for problem in caught.value.problems] == ["rule embed→nowhere"]


def test_what_may_be_a_warning() -> None:
    layout = ft.StateSharding({"**.bais": P(), ...: RULES}, unused="warn")
    f = ft.jit(of_model, mesh=MESH, rules=layout)
    with pytest.warns(ft.FunctreeWarning, match=r"filter '\*\*\.bais' matches no leaf"):
        f.trace(PLACED, PLACED_X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f.trace(PLACED, PLACED_X)
