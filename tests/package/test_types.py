"""What a type checker and an editor see of what functree returns: the user's own types.

All of it is asked of pyright in strict mode, in which a type that is not known is an error.
"""

import inspect
import json
import operator
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

import functree as ft
from tests.package.public import NAMES

ROOT = Path(__file__).parents[2]

BEFORE = """# pyright: strict
from pathlib import Path

import equinox as eqx
import functree as ft
import jax
import optax
from jax import Array
from jaxtyping import Float, Int, PRNGKeyArray


class Model(eqx.Module):
    w: Float[Array, "embed hidden"]

    def __init__(self, size: int, *, key: PRNGKeyArray): ...
    def __call__(self, x: Array) -> Array: ...

    @ft.jit
    def step(self, x: Array) -> list[Array]: ...


class State(ft.TrainState[Model]):
    more: int = 0


@ft.jit
def plain(x: Array, n: int = 1) -> dict[str, Array]: ...


@ft.jit(donate="x")
def donating(x: Array) -> Array: ...


@ft.shard_map(rules=None)
def mapped(x: Array) -> Array: ...


@ft.typed
def checked(x: Array) -> Array: ...


@ft.grad
def gradient(model: Model, x: Array) -> Array: ...


def loss(model: Model, x: Array) -> Array: ...
def with_aux(model: Model, x: Array) -> tuple[Array, str]: ...


def show(
    model: Model, x: Array, key: PRNGKeyArray, tokens: Int[Array, "batch seq"], mesh: jax.sharding.Mesh,
    rules: ft.AxisRules, plan: ft.Plan, tx: optax.GradientTransformation, ts: ft.TrainState[Model], mine: State,
    ref: ft.StateRef, state: ft.State, stacked: ft.Stacked[Model], ledger: ft.Ledger, checkpoints: ft.Checkpoints,
    transformer: ft.nn.Transformer, config: ft.nn.TransformerConfig, path: Path,
) -> None:
    static, first, second = ft.split(model, "w", ...)
"""

# For each public function, an expression and its type.
FUNCTIONS = {
    "tree_axes": ("ft.tree_axes(model)", "Any"),
    "names": ('ft.names(w="embed hidden")', "Names"),
    "glob": ('ft.glob("w")', "Filter"),
    "regex": ('ft.regex("w")', "Filter"),
    "under": ("ft.under(Model)", "Filter"),
    "has_axis": ('ft.has_axis("embed")', "Filter"),
    "has_ndim": ("ft.has_ndim(2)", "Filter"),
    "has_dtype": ('ft.has_dtype("float32")', "Filter"),
    "larger_than": ("ft.larger_than(3)", "Filter"),
    "on_host": ("ft.on_host(rules)", "Layout"),
    "plan": ("ft.plan(model, rules, mesh)", "Plan"),
    "plan_optimizer": ("ft.plan_optimizer(tx, model, rules, mesh)", "Plan"),
    "layerwise": ("ft.layerwise(tx)", "GradientTransformationExtraArgs"),
    "on_whole_matrices": ("ft.on_whole_matrices(jax.nn.relu)", "GradientTransformation"),
    "muon": ("ft.muon(0.1)", "GradientTransformationExtraArgs"),
    "make_mesh": ("ft.make_mesh(data=2, model=4)", "Mesh"),
    "shard": ("ft.shard(model, rules, mesh)", "Model"),
    "copy": ("ft.copy(model)", "Model"),
    "constrain": ('ft.constrain(x, "embed")', "Array"),
    "axis_rules": ("ft.axis_rules(rules)", "_GeneratorContextManager[None, None, None]"),
    "spec": ('ft.spec("embed")', "P"),
    "axis_shards": ('ft.axis_shards("embed")', "AxisShards"),
    "init": ("ft.init(Model, rules)(3, key=key)", "Model"),
    "abstract": ("ft.abstract(Model, rules)(3, key=key)", "Model"),
    "init_optimizer": ("ft.init_optimizer(tx, model, rules)", "Any"),
    "split": ("ft.split(model)", "tuple[Skeleton, *tuple[Model, ...]]"),
    "merge": ("ft.merge(static, first, second)", "Model"),
    "pack": ("ft.pack(model)", "Packed[Model]"),
    "unpack": ("ft.unpack(ft.pack(model))", "Model"),
    "select": ("ft.select(model)", "Selection[Model]"),
    "jit": ("ft.jit(loss)(model, x)", "Array"),
    "shard_map": ("ft.shard_map(loss)(model, x)", "Array"),
    "signature_layouts": ("ft.signature_layouts(loss, rules)", "tuple[dict[str, Any], Any]"),
    "typed": ("ft.typed(loss)(model, x)", "Array"),
    "grad": ("ft.grad(loss)(model, x)", "Any"),
    "value_and_grad": ("ft.value_and_grad(loss)(model, x)", "tuple[Array, Any]"),
    "accumulate": ("ft.accumulate(ft.value_and_grad(loss), 4)(model, x)", "tuple[Array, Any]"),
    "ledger": ("ft.ledger(loss, model, x)", "Ledger"),
    "layouts": ("ft.layouts(loss, model, x)", "Layouts"),
    "why": ("ft.why(loss, model, x)", "Why"),
    "explore": ('ft.explore(loss, (model, x), meshes=8, layouts={"data": ft.P("data")})', "Ranking"),
    "make_state": ("ft.make_state(model)", "tuple[Model, State]"),
    "apply_gradients": ("ft.apply_gradients(ts, model)", "TrainState[Model]"),
    "with_ema": ("ft.with_ema(tx)", "GradientTransformationExtraArgs"),
    "averaged": ("ft.averaged(ts)", "Model"),
    "stack": ("ft.stack(lambda key: Model(3, key=key), 3, key)", "Stacked[Model]"),
    "offload": ('ft.offload("hidden")', "(...) -> Any"),
    "load_weights": ("ft.load_weights(path, rules, mesh)", "Transformer"),
    "load_tensors": ('ft.load_tensors(path, model, {"w": "w"})', "Model"),
    "save_weights": ("ft.save_weights(path, transformer)", "None"),
    "save": ("ft.save(path, ts)", "None"),
    "restore": ("ft.restore(path, ts)", "TrainState[Model]"),
    "inspect": ("ft.inspect(path)", "Checkpoint"),
    "check_processes": ("ft.check_processes(plan=plan)", "None"),
    "preempted": ("ft.preempted(3)", "bool"),
    "export": ("ft.export(plain, x)", "Exported"),
    "nn.matrix_dimensions": ("ft.nn.matrix_dimensions(model)", "(Any) -> Any"),
    "nn.generate": ("ft.nn.generate(transformer, tokens, 3)", "Array"),
    "nn.zigzag": ("ft.nn.zigzag(tokens, 2)", "tuple[Array, Array]"),
    "nn.cross_entropy": ("ft.nn.cross_entropy(transformer, tokens, tokens)", "Array"),
    "nn.config_from_json": ("ft.nn.config_from_json(path)", "TransformerConfig"),
    "testing.assert_layout": ('ft.testing.assert_layout(plan, "layout.txt")', "None"),
    "testing.assert_same_as_unsharded": (
        "ft.testing.assert_same_as_unsharded(loss, (model, x), rules, mesh)", "None"
    ),
    "testing.first_nonfinite": ("ft.testing.first_nonfinite(loss, model, x)", "Operation | None"),
    "testing.assert_collectives": ("ft.testing.assert_collectives(ledger, at_most=3)", "None"),
    "testing.assert_peak_memory": ("ft.testing.assert_peak_memory(ledger, 3)", "None"),
    "testing.assert_closed": ("ft.testing.assert_closed(loss, (model, x))", "None"),
    "testing.assert_no_recompile": (
        "ft.testing.assert_no_recompile()", "_GeneratorContextManager[None, None, None]"
    ),
}  # fmt: skip

# Methods, results, and other ways to write the same.
MORE = {
    "plain": "Jit[(x: Array, n: int = 1), dict[str, Array]]",
    "plain(x, 2)": "dict[str, Array]",
    "plain.lower": "(x: Array, n: int = 1) -> Lowered",
    "plain.lower(x).compile().ledger()": "Ledger",
    "donating": "Jit[(x: Array), Array]",
    "mapped(x)": "Array",
    "model.step": "Function[(x: Array), list[Array]]",
    "model.step(x)": "list[Array]",
    "checked": "(x: Array) -> Array",
    "ft.init(loss, ft.P()).plan": "(model: Model, x: Array) -> Plan",
    "ft.abstract(loss)": "(model: Model, x: Array) -> Array",
    "rules | ft.FSDP('data')": "Layout",
    "ft.is_trainable & ~ft.is_buffer": "Filter",
    # The types of gradients are not known, as in JAX; those of the arguments are.
    "gradient(model=model, x=x)": "Any",
    "ft.grad(loss)": "(model: Model, x: Array) -> Any",
    "ft.value_and_grad(with_aux, has_aux=True)(model, x)": "tuple[tuple[Array, str], Any]",
    "ft.jit(ft.value_and_grad(loss))(model, x)": "tuple[Array, Any]",
    # The model's type goes through the training state.
    "ft.TrainState.create(model, tx)": "TrainState[Model]",
    "ft.TrainState.create(model, tx).model.w": "Array",
    "ft.apply_gradients(mine, model)": "State",
    "checkpoints.restore(ts)": "TrainState[Model]",
    "(static, first, second)": "tuple[Skeleton, Model, Model]",
    "ft.select(model).at('w').set(x)": "Model",
    "ft.select(model).at('w').apply(lambda path, w: w, with_path=True)": "Model",
    "ft.select(model).partition()": "tuple[Model, Model]",
    "stacked[0]": "Model",
    "stacked[1:]": "Stacked[Model]",
    "list(stacked)": "list[Model]",
    "stacked(x)": "Array",
    'ft.explore(loss, (model, x), meshes=8, layouts={"data": ft.P("data")})[0].wire_bytes': "Mapping[str | tuple[str, ...], int]",
    "ft.nn.Linear(3, 4, key=key)(x)": "Array",
    "ft.nn.Transformer.create(config, key=key)(tokens)": "Array",
    "ft.nn.Transformer.create(config, key=key).with_losses(tokens)": "tuple[Array, MoELosses]",
    "ft.nn.MoE(3, 4, 4, 2, key=key)(x)": "tuple[Array, MoELosses]",
}

EXPRESSIONS = {**dict(FUNCTIONS.values()), **MORE}

PROGRAM = '''# pyright: strict
"""A model is planned, created, trained, saved, changed, and looked at."""

import equinox as eqx
import functree as ft
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray


class MLP(eqx.Module):
    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden embed"]

    def __init__(self, embed: int, hidden: int, *, key: PRNGKeyArray):
        up, down = jax.random.split(key)
        self.up = jax.random.normal(up, (embed, hidden))
        self.down = jax.random.normal(down, (hidden, embed))

    def __call__(self, x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
        return jnp.tanh(x @ self.up) @ self.down


def loss(model: MLP, x: Float[Array, "batch embed"]) -> Float[Array, ""]:
    return jnp.mean((model(x) - x) ** 2)


@ft.jit(donate="state")
def step(
    state: ft.TrainState[MLP], x: Float[Array, "batch embed"]
) -> tuple[ft.TrainState[MLP], Float[Array, ""]]:
    value, gradients = ft.value_and_grad(loss)(state.model, x)
    norm = jnp.sqrt(jnp.sum(gradients.up**2))
    return ft.apply_gradients(state, gradients), value / norm


mesh = ft.make_mesh(data=2, model=4)
rules = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})
key = jax.random.key(0)
print(ft.plan(ft.abstract(MLP)(16, 64, key=key), rules, mesh).bytes_per_device)
model = ft.init(MLP, rules, mesh)(16, 64, key=key)
state = ft.TrainState.create(model, optax.adamw(1e-3), layout=rules, mesh=mesh)
x = ft.shard(jax.random.normal(key, (8, 16)), rules, mesh, axes="batch embed")
for _ in range(3):
    state, value = step(state, x)
    print(int(state.step), float(value), state.model.up.sharding, len(step.compilations))
ft.save("run", state, overwrite=True)
state = ft.restore("run", state)
print([str(row.path) for row in ft.inspect("run").rows], state.model.down.shape)
static, up, others = ft.split(state.model, "up", ...)
model = ft.merge(static, up, others)
model = ft.select(model).at("up").apply(lambda array: array * 2)
print(model.up.shape, [row.spec for row in ft.plan(model, rules, mesh)])
ledger = step.lower(state, x).compile().ledger()
print(ledger.totals(), [one.bytes for one in ledger.collectives if one.kind == "all-reduce"])
print(ft.accumulate(ft.grad(loss), 2)(model, x).up.shape)
'''

# What pyright does not know of other packages, in which a user's program is wrong without functree.
OF_OTHERS = [
    'Stub file not found for "optax"',  # optax says nothing of its types: it has no `py.typed`
]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What pyright says of the two files: for each its errors and revealed types."""
    folder = tmp_path_factory.mktemp("types")
    shown = "".join(f"    reveal_type({expression})\n" for expression in EXPRESSIONS)
    (folder / "types.py").write_text(BEFORE + shown)
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    # From the project's folder, so that this functree is what the programs import.
    done = subprocess.run(
        [*command, str(folder / "types.py"), str(folder / "program.py")],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    # Before it is what pyright's wrapper says when it installs itself.
    found = json.loads(done.stdout[done.stdout.index("{") :])["generalDiagnostics"]
    return {
        name: [one for one in found if Path(one["file"]).name == name]
        for name in ("types.py", "program.py")
    }


def errors(report: list[dict[str, Any]]) -> list[str]:
    messages = [one["message"] for one in report if one["severity"] == "error"]
    return [message for message in messages if not message.startswith(tuple(OF_OTHERS))]


@pytest.mark.slow
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_the_users_own_types(reports: dict[str, list[dict[str, Any]]], expression: str):
    line = len(BEFORE.splitlines()) + list(EXPRESSIONS).index(expression)
    found = [one for one in reports["types.py"] if one["range"]["start"]["line"] == line]
    texts = [one["message"] for one in found if one["severity"] == "information"]
    assert [text.split('" is "')[-1].removesuffix('"') for text in texts] == [
        EXPRESSIONS[expression]
    ]
    assert errors(found) == []


def test_every_public_function_has_a_row() -> None:
    functions = {name for name in NAMES if inspect.isfunction(operator.attrgetter(name)(ft))}
    assert functions == FUNCTIONS.keys()


@pytest.mark.slow
def test_a_users_program_has_no_error(reports: dict[str, list[dict[str, Any]]]):
    assert errors(reports["program.py"]) == []


@pytest.mark.slow
def test_what_others_leave_unknown(reports: dict[str, list[dict[str, Any]]]):
    """A canary: what is no longer so is taken from the list."""
    messages = [one["message"] for one in reports["program.py"] if one["severity"] == "error"]
    for text in OF_OTHERS:
        assert any(message.startswith(text) for message in messages), text


def test_the_users_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with jax.numpy_dtype_promotion("standard"):  # optax promotes
        exec(compile(PROGRAM, "program.py", "exec"), {"__name__": "program"})
