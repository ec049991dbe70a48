"""One layout means the same at every door: which filter decides about which array, and by which path.

The doors are those of a tree (`plan`, `shard`, `constrain`, gradients, ...) and those of a call (`in_shardings=`,
`rules=`, `in_specs=`). The trees are a model, a training state, several of them, and what a call takes.
"""

import re
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


def net() -> Net:
    return Net(Layer(jnp.ones((4, 8)), jnp.ones(8)), jnp.ones(8))


# A filter ─► the arrays of a `Net` that it selects, in the model and wherever else the model is.
FILTERS: dict[str, tuple[Any, set[str]]] = {
    "a path": ("weight", {"weight"}),
    "a star and a key": ("*.weight", {"inner.weight"}),
    "stars and a key": ("**.weight", {"inner.weight", "weight"}),
    "a key and stars": ("inner.**", {"inner.weight", "inner.bias"}),
    "a Path": (ft.Path(("inner", "bias")), {"inner.bias"}),
    "a compiled expression": (re.compile(r"inner\..*"), {"inner.weight", "inner.bias"}),
    "an expression, found": (ft.regex(r"^weight|s$"), {"weight", "inner.bias"}),
    "with a separator": (ft.regex("inner/w", separator="/"), {"inner.weight"}),
    "a callable, first key": (lambda path, leaf: path[0] == "inner", {"inner.weight", "inner.bias"}),
    "a callable, depth": (lambda path, leaf: len(path) == 1, {"weight"}),
    "a class": (Layer, {"inner.weight", "inner.bias"}),
    "a property": (ft.has_axis("embed"), {"inner.weight", "weight"}),
    "a negation": (~ft.glob("inner.**"), {"weight"}),
    "two": (ft.glob("weight") | "*.bias", {"weight", "inner.bias"}),
}  # fmt: skip
ALL = ("inner.weight", "inner.bias", "weight")


def layout(name: str) -> ft.Layout:
    """What the filter selects is sharded over `data`, and all else is whole."""
    return ft.StateSharding({FILTERS[name][0]: P("data"), ...: P()})


def train_state() -> ft.TrainState[Net]:
    return ft.TrainState.create(net(), TX)


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


def arguments(f: Any, tree: Any, **options: Any) -> set[str]:
    """The arrays of the first argument that a jitted function takes over `data`."""
    x = ft.shard(jnp.ones((8, 3)), P(), MESH)
    compiled = ft.jit(f, mesh=MESH, **options).lower(tree, x).compile()
    found = jax.tree_util.tree_leaves_with_path(compiled.input_shardings[0][0])
    return {str(ft.Path.of(keys)) for keys, sharding in found if "data" in str(sharding.spec)}


def gradients(tree: Any, layout: Any) -> set[str]:
    loss = ft.grad(
        lambda net: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(net)), layout=layout
    )
    placed = ft.shard(tree, P(), MESH)
    return sharded(jax.jit(loss)(placed))


def constrained(tree: Any, layout: Any) -> set[str]:
    placed = ft.shard(tree, P(), MESH)
    return sharded(jax.jit(lambda net: ft.constrain(net, layout))(placed))


# The doors that take a model.
MODELS: dict[str, Callable[[Any], set[str]]] = {
    "plan": lambda layout: planned(net(), layout),
    "shard": lambda layout: sharded(ft.shard(net(), layout, MESH)),
    "constrain": lambda layout: constrained(net(), layout),
    "init": lambda layout: sharded(ft.init(net, layout, MESH)()),
    "grad": lambda layout: gradients(net(), layout),
    "in_shardings": lambda layout: arguments(of_model, net(), in_shardings=(layout, P())),
    "in_shardings, by name": lambda layout: arguments(
        of_model, net(), in_shardings={"net": layout, "x": None}
    ),
    "in_shardings, one for all": lambda layout: arguments(of_model, net(), in_shardings=layout),
    "rules": lambda layout: arguments(of_model, net(), rules=layout),
    "out_shardings": lambda layout: sharded(
        ft.jit(lambda net: net, out_shardings=layout, mesh=MESH)(net())
    ),
}


@pytest.mark.parametrize("door", MODELS)
@pytest.mark.parametrize("name", FILTERS)
def test_a_model(door: str, name: str) -> None:
    assert MODELS[door](layout(name)) == FILTERS[name][1]


# The doors that take a training state.
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


@pytest.mark.parametrize("door", STATES)
@pytest.mark.parametrize("name", FILTERS)
def test_a_training_state(door: str, name: str) -> None:
    """The paths that filters see are those in the model; the moments follow."""
    assert STATES[door](layout(name)) == in_state(FILTERS[name][1])


@pytest.mark.parametrize("name", FILTERS)
def test_the_state_of_an_optimizer(name: str) -> None:
    rows = ft.plan_optimizer(TX, net(), layout(name), MESH)
    found = {str(row.path) for row in rows if "data" in row.spec}
    assert found == {
        path[len("opt_state.") :] for path in in_state(FILTERS[name][1]) if "opt" in path
    }


@pytest.mark.parametrize("name", FILTERS)
def test_two_training_states(name: str) -> None:
    both = {"gen": train_state(), "dis": train_state()}
    expected = {f"{key}.{path}" for key in both for path in in_state(FILTERS[name][1])}
    assert planned(both, layout(name)) == expected
    assert sharded(ft.init(lambda: both, layout(name), MESH)()) == expected


TREES: dict[str, Callable[[], Any]] = {
    "a dict": lambda: {"inner": net().inner, "weight": net().weight},
    "packed": lambda: ft.pack(net()),
}


@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("name", [name for name in FILTERS if name != "a property"])
def test_other_trees(kind: str, name: str) -> None:
    selected = FILTERS[name][1]
    assert planned(TREES[kind](), layout(name)) == selected
    found = arguments(lambda net, x: (net, x), TREES[kind](), in_shardings=layout(name))
    # JAX knows a packed array by one key, which is the text of its path.
    assert {path.strip('"') for path in found} == selected


# Filters before `...: AxisRules({"batch": "data", ...: None})`, and how `x` lies, whatever the door.
CALLS: dict[str, tuple[Any, P]] = {
    "everything that has a path": ("**", P("data", None)),
    "one key": ("*", P("data", None)),
    "the model by its argument": ("net.**", P("data", None)),
    "a part of it": ("net.inner.*", P("data", None)),
    "the array": ("x", P(None, "data")),
    "a Path of the array": (ft.Path(("x",)), P(None, "data")),
    "with a property": (ft.glob("x") & ft.has_ndim(2), P(None, "data")),
    "beside another": (ft.glob("x") | "net.inner.weight", P(None, "data")),
    "a property": (ft.has_ndim(2), P("data", None)),
    "an expression": (re.compile(".*"), P("data", None)),
    "a callable": (lambda path, leaf: True, P("data", None)),
    "a negation": (~ft.glob("inner.**"), P("data", None)),
}  # fmt: skip


@pytest.mark.parametrize("door", ["in_shardings", "rules"])
@pytest.mark.parametrize("case", CALLS)
def test_a_call(door: str, case: str) -> None:
    """An argument that is one array has no path: a pattern names it, or `...` decides."""
    item, spec = CALLS[case]
    ruled = ft.AxisRules({"batch": "data", ...: None})
    own = spec if spec[0] is None else P()
    layout = ft.StateSharding({item: own, ...: ruled})

    def f(net: Net, x: Float[Array, "batch _"]) -> Any:
        return net, x

    options: dict[str, Any] = {door: layout}
    x = np.ones((8, 4), np.float32)
    compiled = ft.jit(f, mesh=MESH, **options).lower(net(), x).compile()
    assert compiled.input_shardings[0][1].spec == spec


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


def test_what_is_wrong_with_rules_is_not_told_of_an_argument() -> None:
    """Also if the function has one argument alone: the rules are for any."""
    rules = ft.AxisRules({"embed": "nowhere", ...: None}, unnamed=P())
    with pytest.raises(ft.ShardingError) as caught:
        ft.jit(lambda net: net, rules=rules, mesh=MESH).lower(net())
    assert [problem.what for problem in caught.value.problems] == ["rule embed→nowhere"]


# Patterns that name what is above a leaf

NAMED: dict[str, tuple[Any, set[str]]] = {
    "a field": ("model.weight", {"model.weight", "opt_state.0.mu.weight", "opt_state.0.nu.weight"}),
    "the state of the optimizer": ("opt_state.**.weight", {
        f"opt_state.0.{moment}.{path}" for moment in ("mu", "nu") for path in ("weight", "inner.weight")}),
    "one moment": ("opt_state.0.mu.weight", {"opt_state.0.mu.weight"}),
}  # fmt: skip


@pytest.mark.parametrize("door", STATES)
@pytest.mark.parametrize("case", NAMED)
def test_a_field_of_a_training_state(door: str, case: str) -> None:
    pattern, expected = NAMED[case]
    assert STATES[door](ft.StateSharding({pattern: P("data"), ...: P()})) == expected


def test_a_key_above_a_training_state() -> None:
    both = {"gen": train_state(), "dis": train_state()}
    assert planned(both, ft.StateSharding({"gen.**": P("data"), ...: P()})) >= {
        f"gen.{path}" for path in in_state(set(ALL))
    }
    found = planned(both, ft.StateSharding({"gen.model.weight": P("data"), ...: P()}))
    assert found == {f"gen.{path}" for path in in_state({"weight"})}


GONE = ["opt*.**", "**.opt_state.**", "*.0.mu.**", re.compile(r"opt_state\..*"), re.compile("step"),
    lambda path, leaf: path[0] == "opt_state", ft.regex("^opt_state")]  # fmt: skip


@pytest.mark.parametrize("item", GONE, ids=map(str, range(len(GONE))))
def test_what_names_nothing(item: Any) -> None:
    with raises("matches no leaf", error=ft.ShardingError):
        ft.plan(train_state(), ft.StateSharding({item: P("data"), ...: P()}), MESH)


# A name of two meanings


class WithModel(eqx.Module):
    model: Float[Array, "embed"]
    step: Float[Array, "embed"]


def two_meanings(pattern: str, door: str) -> Callable[[], Any]:
    layout = ft.StateSharding({pattern: P("data"), ...: P()})
    one = WithModel(jnp.ones(8), jnp.ones(8))
    state = ft.TrainState.create(one, TX)
    doors: dict[str, Callable[[], Any]] = {
        "a field": lambda: ft.plan(state, layout, MESH),
        "a key": lambda: ft.plan({"step": state}, layout, MESH),
        "an argument": lambda: ft.jit(
            lambda model, state: state, in_shardings=layout, mesh=MESH
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
    with raises("a name of two meanings", *meanings, "ft.regex(r'^", error=ft.ShardingError):
        run()


class WithBest(ft.TrainState[Any]):
    best: Float[Array, "embed"]


def test_a_field_of_a_subclass_that_is_one_array_has_one_meaning() -> None:
    ts = train_state()
    more = WithBest(ts.step, ts.model, ts.opt_state, ts.state, ts.key, ts.tx, ts.wrt, jnp.ones(8))
    assert planned(more, ft.StateSharding({"best": P("data"), ...: P()})) == {"best"}


def test_the_remedy_for_a_name_of_two_meanings() -> None:
    state = ft.TrainState.create(WithModel(jnp.ones(8), jnp.ones(8)), TX)
    with pytest.raises(ft.ShardingError) as caught:
        ft.plan(state, ft.StateSharding({"model": P("data"), ...: P()}), MESH)
    written = re.findall(r"`(ft\.regex\(.*?'\))`", caught.value.problems[0].remedy)
    layout = ft.StateSharding({eval(written[0], {"ft": ft}): P("data"), ...: P()})
    assert planned(state, layout) == {"model.model", "opt_state.0.mu.model", "opt_state.0.nu.model"}


# A bare spec is for every leaf


def population(tx: Any = TX) -> ft.TrainState[Net]:
    def make(key: Any) -> ft.TrainState[Net]:
        return ft.TrainState.create(net(), tx, key=key)

    return eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), 8))


DOORS_OF_A_POPULATION: dict[str, Callable[[Any], Any]] = {
    "init": lambda layout: ft.init(population, layout, MESH)(),
    "shard": lambda layout: ft.shard(population(), layout, MESH),
    "shard, all else": lambda layout: ft.shard(population(), ft.StateSharding({...: layout}), MESH),
}


@pytest.mark.parametrize("door", DOORS_OF_A_POPULATION)
def test_a_training_state_under_vmap(door: str) -> None:
    """Each leaf has the dimension of the agents, the step, the key and the counts too."""
    state = DOORS_OF_A_POPULATION[door](P("data"))
    assert all(leaf.sharding.spec[0] == "data" for leaf in jax.tree.leaves(state))
    assert len(jax.tree.leaves(state)) == 12


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(0.1, momentum=0.9),
        optax.adafactor(0.1, min_dim_size_to_factor=2),
        optax.flatten(optax.adam(0.1)),
        optax.inject_hyperparams(optax.adam)(0.1),
    ],
    ids=["sgd", "adafactor", "flatten", "inject_hyperparams"],
)
def test_any_optimizer_under_vmap(tx: Any) -> None:
    state = ft.init(population, P("data"), MESH)(tx)
    assert all(leaf.sharding.spec[0] == "data" for leaf in jax.tree.leaves(state))


def test_a_spec_of_two_entries_under_vmap_is_not_for_statistics() -> None:
    """Their dimensions are not known to be those of the parameter: `model` could land on another."""
    tx = optax.adafactor(0.1, min_dim_size_to_factor=2)
    wide = {"inner.weight": P("data", "model"), ...: P("data")}
    make = ft.abstract(lambda: population(tx))
    with raises("opt_state.0.v_row.inner.weight", "opt_state.**", error=ft.ShardingError):
        ft.plan(make(), ft.StateSharding(wide), MESH)
    # The remedy.
    plan = ft.plan(make(), ft.StateSharding({"opt_state.**": P("data"), **wide}), MESH)
    assert plan["opt_state.0.v_row.inner.weight"].spec == P("data", None)
    assert plan["model.inner.weight"].spec == P("data", "model", None)


def test_a_spec_for_a_scalar_alone_is_a_mistake() -> None:
    scalar, x = jnp.ones(()), jnp.ones(8)
    mapped = ft.shard_map(
        lambda x: x.sum(), in_specs=P("data"), out_specs=P("data"), mesh=MESH, check_vma=False
    )
    for call in (
        lambda: ft.plan(scalar, P("data"), MESH),
        lambda: ft.jit(lambda x: x, in_shardings=(P("data"),), mesh=MESH).lower(scalar),
        lambda: mapped(x),
    ):
        with raises("P('data') has 1 entries for 0 dimensions", error=ft.ShardingError):
            call()


def test_a_scalar_is_whole() -> None:
    tree = {"w": jnp.ones(8), "scale": jnp.ones(())}
    assert ft.plan(tree, P("data"), MESH).specs == {"w": P("data"), "scale": P()}


# A class that is defined again


def test_a_class_of_another_cell() -> None:
    """In a notebook, a cell that is run again defines another class of the same name."""

    def cell() -> type[Any]:
        class Again(eqx.Module):
            w: Float[Array, "embed"]

        return Again

    tree, again = {"net": cell()(jnp.ones(8))}, cell()
    with raises(
        "filter Again",
        "the tree has an earlier class `Again`",
        "make the tree again, or write a pattern",
        error=ft.ShardingError,
    ):
        ft.plan(tree, ft.StateSharding({again: P("data"), ...: P()}), MESH)
    with raises("the tree has the class `functree.nn.linear.Linear`", error=ft.ShardingError):
        linear = ft.nn.Linear(8, 8, key=jax.random.key(0))
        ft.plan({"net": linear}, ft.StateSharding({eqx.nn.Linear: P(), ...: P()}), MESH)
    # The remedies, to the letter.
    tree = {"net": again(jnp.ones(8))}
    assert planned(tree, ft.StateSharding({again: P("data"), ...: P()})) == {"net.w"}
    assert planned(tree, ft.StateSharding({"net.**": P("data"), ...: P()})) == {"net.w"}


# A filter without an effect, where the arguments are no modules


def of_dict(tree: Any) -> Any:
    return tree["w"]


@pytest.mark.parametrize("door", ["in_shardings", "in_specs"])
def test_a_misspelled_filter_over_a_dict(door: str) -> None:
    layout, tree = ft.StateSharding({"v": P("data"), ...: P()}), {"w": jnp.ones(8)}
    doors: dict[str, Callable[[], Any]] = {
        "in_shardings": lambda: ft.jit(of_dict, in_shardings=layout, mesh=MESH).lower(tree),
        "in_specs": lambda: ft.shard_map(of_dict, in_specs=layout, out_specs=P(), mesh=MESH)(tree),
    }
    with raises("filter 'v'", "matches no leaf", error=ft.ShardingError):
        doors[door]()


@pytest.mark.parametrize(
    "pattern", ["opt_state.**", "model.weight", "state.norm.mean", "step", "key"]
)
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


def test_a_layout_function_and_an_argument_without_a_path() -> None:
    def by_path(path: ft.Path, leaf: Any) -> P:
        return P("data") if path == ("weight",) else P()

    x = ft.shard(jnp.ones((8, 3)), P(), MESH)
    with raises(
        "x   f32[8, 3]", "has no path for", "an entry of `in_shardings=`", error=ft.ShardingError
    ):
        ft.jit(of_model, in_shardings=by_path, mesh=MESH).lower(net(), x)
    # The remedies.
    assert arguments(of_model, net(), in_shardings=(by_path, P())) == {"weight"}
    named = ft.StateSharding({"x": P(), ...: by_path})
    assert arguments(of_model, net(), in_shardings=named) == {"weight"}


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
    with raises("inner.weight", "no leaf has the axis of rule `hiden`", error=ft.ShardingError):
        ft.plan(net(), layout, MESH)


VMAPPED: dict[str, Any] = {
    "spec": P("data"),
    "last": ft.StateSharding({...: P("data")}),
    "the optimizer's state apart": ft.StateSharding(
        {~ft.glob("opt_state.**"): P(), ...: P("data")}
    ),
}


@pytest.mark.parametrize("layout", VMAPPED.values(), ids=VMAPPED)
def test_rules_and_in_shardings_agree_about_a_state_made_under_vmap(layout: Any) -> None:
    """Its counts have no path, and are no argument that is one array."""
    make = jax.vmap(lambda b: ft.TrainState.create({"b": b}, optax.adam(1.0)))
    state = ft.abstract(make)(jnp.ones(8))
    found = []
    for door in ("rules", "in_shardings"):
        f = ft.jit(lambda state: state, mesh=MESH, **{door: layout})
        found.append(f.lower(state).compile().input_shardings)
    assert found[0] == found[1]
    assert found[0][0][0].step.spec == P("data")


def test_a_glob_that_begins_with_a_wildcard_is_suggested_none_for_other_paths() -> None:
    state = ft.abstract(lambda: ft.TrainState.create({"w": jnp.ones(8)}, optax.adam(1.0)))()
    layout = ft.StateSharding({"**.opt_state.**": P(), ...: P("data")})
    with pytest.raises(ft.ShardingError, match=r"matches no leaf\n"):
        ft.plan(state, layout, {"data": 2})
