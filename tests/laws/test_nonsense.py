"""Nonsense for every parameter of every public function: an error of functree, or an answer, and no
error from inside.

The functions and their parameters are found by enumeration, so that a new one is tested without
being remembered.
"""

import dataclasses
import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float
from safetensors.numpy import save_file

import functree as ft
from tests.lib.checks import raises
from tests.lib.meshes import MESH

KEY = jax.random.key(0)
RULES = ft.AxisRules({"embed": "data", "hidden": "model", ...: None})
X = np.ones((8, 8), np.float32)
TX = optax.sgd(1e-3)


class Counts(eqx.Module):
    count: ft.StateRef


def mlp() -> ft.nn.MLP:
    return ft.nn.MLP(8, 16, key=KEY)


def double(x: Float[Array, "embed hidden"]) -> Float[Array, "embed hidden"]:
    return x * 2


def loss(model: Any, x: Any) -> Any:
    return model(x).sum()


def layers() -> ft.Stacked[Any]:
    return ft.stack(lambda key: ft.nn.MLP(8, 8, key=key), 3, KEY)


MODEL = mlp()
STATE = ft.TrainState.create(MODEL, TX)
COUNTS, PIECES = ft.make_state(Counts(ft.StateRef(jnp.zeros(3))))
CONFIG = ft.nn.TransformerConfig(16, 8, 2, 2, 2, 4, 8)
LLAMA = Path(__file__).parents[1] / "fixtures" / "hf" / "llama"
TRANSFORMER = ft.nn.Transformer.create(CONFIG, key=KEY)
EXPERTS = ft.nn.Transformer.create(dataclasses.replace(CONFIG, experts=2, top_k=1), key=KEY)

NONSENSE: dict[str, Any] = {
    "a class": ft.nn.MLP, "a mesh": MESH, "a jitted function": ft.jit(lambda x: x), "None": None, "a float": 1.5,
    "a negative number": -1, "zero": 0, "nan": float("nan"), "a number of NumPy": np.int64(1), "True": True,
    "an empty text": "", "a text": "a b", "bytes": b"x", "an abstract array": jax.ShapeDtypeStruct((4,), jnp.float32),
    "an array": jnp.ones(3), "an object": object(), "a dict": {"a": 1}, "an empty dict": {}, "a list": [1],
    "an empty list": [], "a tuple": ("a", 1.5), "a set": {1}, "a function": lambda *args: 1, "a module": MODEL,
    "a spec": P("data"), "rules": RULES, "a path": ft.Path(("a",)), "...": ..., "axes": ft.Axes("a"),
    "an init": ft.init(lambda: jnp.ones(3), P(), MESH), "a sharding": NamedSharding(MESH, P()),
}  # fmt: skip
PLAN = ft.plan(MODEL, RULES, MESH)
LEDGER = ft.ledger(double, X, in_shardings=P("data"), mesh=MESH)
LAYOUTS = ft.layouts(double, X, in_shardings=RULES, mesh=MESH)
FUNCTIONS = ("a class", "a mesh", "a jitted function", "a function", "a module", "an init")


def in_rules(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(**arguments: Any) -> Any:
        with ft.axis_rules(RULES):
            return function(**arguments)

    return called


def entered(**arguments: Any) -> None:
    with ft.axis_rules(**arguments):
        pass


# For each function a use of it, and arguments with which it works; where the table has none for a
# parameter, its default. `*names` and `**names` are given one value.
Use = tuple[Callable[..., Any], dict[str, Any]]


SERIALIZED = ft.export(ft.jit(lambda x: x), jnp.ones(3)).serialize()


def fresh(path: Any) -> Any:
    """A path where nothing is: nonsense is handed in once for each of its kinds."""
    if path == "fresh":
        shutil.rmtree(path, ignore_errors=True)
    return path


def in_a_run(folder: str, use: Callable[[ft.Checkpoints], Any]) -> None:
    with ft.Checkpoints(fresh(folder)) as checkpoints:
        use(checkpoints)


USES: dict[str, Use] = {
    "AxisRules": (ft.AxisRules, {"rules": {"a": "data"}, "unnamed": P()}),
    "AxisRules.spec": (RULES.spec, {"axes": ft.Axes("embed"), "shape": (8,), "mesh": MESH}),
    "AxisRules.on": (RULES.on, {"mesh": MESH}),
    "AxisRules.identity": (ft.AxisRules.identity, {"mesh": MESH}),
    "FSDP": (
        lambda **k: ft.plan(MODEL, ft.FSDP(**k), MESH),
        {"axis": "data", "min_size": 0, "otherwise": P()},
    ),
    "StateSharding": (
        lambda rules, unused: ft.plan(MODEL, ft.StateSharding(rules, unused=unused), MESH),
        {"rules": {...: P()}},
    ),
    "StateSharding.from_specs": (
        lambda tree: ft.plan(MODEL, ft.StateSharding.from_specs(tree), MESH),
        {"tree": ft.plan(MODEL, RULES, MESH).specs},
    ),
    "Axes": (lambda names: ft.Axes("a", names), {"names": "b"}),
    "Axes.parse": (ft.Axes.parse, {"text": "a b"}),
    "Axes.of": (ft.Axes.of, {"axes": "a b"}),
    "Path": (ft.Path, {"keys": ("a",)}),
    "Path.parse": (ft.Path.parse, {"text": "a"}),
    "StateRef": (ft.StateRef, {"init": jnp.ones(3), "axes": "a"}),
    "Stacked": (ft.Stacked, {"layer": layers().layer}),
    "Stacked.scan": (lambda args, **k: layers().scan(**k), {"x": X, "args": ()}),
    "stack": (ft.stack, {"make": lambda key: ft.nn.MLP(8, 8, key=key), "n": 3, "key": KEY}),
    "TrainState.create": (
        ft.TrainState.create,
        {"model": MODEL, "tx": TX, "layout": RULES, "mesh": MESH},
    ),
    "abstract": (
        lambda **k: ft.abstract(**k)(),
        {"make": lambda: jnp.ones((8, 8)), "layout": P("data"), "mesh": MESH},
    ),
    "init": (
        lambda **k: ft.init(**k)(),
        {"make": lambda: jnp.ones((8, 8)), "layout": P("data"), "mesh": MESH},
    ),
    "accumulate": (
        lambda **k: ft.accumulate(**k)(X, X),
        {"fn": ft.grad(lambda x, y: x.sum() * y.sum()), "steps": 2, "batch": "y"},
    ),
    "apply_gradients": (
        lambda extra, **k: ft.apply_gradients(**k),
        {"ts": STATE, "grads": ft.grad(loss)(MODEL, X), "extra": None},
    ),
    "averaged": (ft.averaged, {"ts": ft.TrainState.create(MODEL, ft.with_ema(TX))}),
    "with_ema": (
        lambda **k: ft.TrainState.create(MODEL, ft.with_ema(**k)),
        {"tx": TX, "decay": 0.9},
    ),
    "axis_rules": (entered, {"rules": RULES}),
    "constrain": (
        lambda **k: ft.jit(ft.constrain, mesh=MESH)(**k),
        {"tree": X, "layout": P("data")},
    ),
    "copy": (ft.copy, {"tree": MODEL, "untie": True}),
    "glob": (ft.glob, {"pattern": "a"}),
    "regex": (ft.regex, {"pattern": "a"}),
    "under": (ft.under, {"cls": ft.nn.MLP}),
    "has_axis": (ft.has_axis, {"name": "a"}),
    "has_dtype": (ft.has_dtype, {"dtype": jnp.float32}),
    "has_ndim": (ft.has_ndim, {"ndim": 1}),
    "larger_than": (ft.larger_than, {"elements": 3}),
    "grad": (lambda **k: ft.grad(**k)(MODEL, X), {"fn": loss}),
    "value_and_grad": (lambda **k: ft.value_and_grad(**k)(MODEL, X), {"fn": loss}),
    "init_optimizer": (
        ft.init_optimizer,
        {"tx": TX, "model": MODEL, "layout": RULES, "mesh": MESH},
    ),
    "plan_optimizer": (
        ft.plan_optimizer,
        {"tx": TX, "model": MODEL, "layout": RULES, "mesh": MESH},
    ),
    "jit": (
        lambda refused, **k: ft.jit(**k, **({} if refused is None else {"backend": refused}))(jnp.array(X)),
        {"fun": double, "mesh": MESH, "refused": None},
    ),
    "make_mesh": (lambda sizes, **k: ft.make_mesh(data=sizes, **k), {"sizes": 8}),
    "ledger": (
        lambda fn, args, kwargs, **k: ft.ledger(fn, args, **k),
        {"fn": double, "args": X, "in_shardings": RULES, "mesh": MESH, "kwargs": None},
    ),
    "layouts": (
        lambda fn, args, kwargs, **k: ft.layouts(fn, args, **k),
        {"fn": double, "args": X, "in_shardings": RULES, "mesh": MESH, "kwargs": None},
    ),
    "why": (
        lambda fn, args, kwargs, **k: ft.why(fn, args, **k),
        {
            "fn": double, "args": X, "in_shardings": RULES, "mesh": MESH, "compilations": 1,
            "progress": False, "kwargs": None,
        },
    ),
    "explore": (
        ft.explore,
        {
            "step": double, "args": (X,), "meshes": 8, "layouts": {"rows": P("data")},
            "progress": False,
        },
    ),
    "Hardware": (ft.Hardware, {"flops": 1e12, "memory": 2**34, "links": 1e9, "efficiency": 0.5}),
    "layerwise": (ft.layerwise, {"tx": TX}),
    "on_whole_matrices": (
        lambda **k: ft.on_whole_matrices(**k).update(X, optax.EmptyState()),
        {"fn": lambda x: x, "over": "data", "layout": P("data")},
    ),
    "muon": (
        lambda args, options, **k: ft.TrainState.create(MODEL, ft.muon(**k)),
        {"learning_rate": 0.1, "over": "data", "layout": RULES, "args": (), "options": {}},
    ),
    "nn.matrix_dimensions": (ft.nn.matrix_dimensions, {"model": TRANSFORMER}),
    "Ledger.diff": (LEDGER.diff, {"other": LEDGER}),
    "Ledger.from_json": (ft.Ledger.from_json, {"text": LEDGER.to_json()}),
    "Layouts.diff": (LAYOUTS.diff, {"other": LAYOUTS}),
    "Layouts.from_json": (ft.Layouts.from_json, {"text": LAYOUTS.to_json()}),
    "Plan.diff": (PLAN.diff, {"other": PLAN}),
    "Plan.table": (PLAN.table, {"sort": "bytes"}),
    "Plan.from_json": (ft.Plan.from_json, {"text": PLAN.to_json()}),
    "testing.assert_layout": (ft.testing.assert_layout, {"plan": PLAN, "file": "missing.txt"}),
    "testing.assert_collectives": (ft.testing.assert_collectives, {"ledger": LEDGER}),
    "testing.assert_peak_memory": (
        ft.testing.assert_peak_memory,
        {"compiled": LEDGER, "bytes": 2**30},
    ),
    "testing.assert_closed": (ft.testing.assert_closed, {"step": lambda x: x, "args": (X,)}),
    "testing.assert_same_as_unsharded": (
        ft.testing.assert_same_as_unsharded,
        {"fn": double, "args": (X,), "layouts": RULES, "mesh": MESH},
    ),
    "testing.first_nonfinite": (
        lambda fn, args: ft.testing.first_nonfinite(fn, args),
        {"fn": double, "args": X},
    ),
    "make_state": (ft.make_state, {"model": Counts(ft.StateRef(jnp.zeros(3)))}),
    "merge": (
        lambda static, parts: ft.merge(static, parts),
        {"static": ft.split(MODEL)[0], "parts": ft.split(MODEL)[1]},
    ),
    "split": (lambda tree, filters: ft.split(tree, filters, ...), {"tree": MODEL, "filters": "up"}),
    "offload": (
        lambda names, others: layers().scan(X, remat=ft.offload(names, others=others)),
        {"names": "mlp_up"},
    ),
    "on_host": (ft.on_host, {"layout": P()}),
    "pack": (ft.pack, {"tree": MODEL}),
    "unpack": (ft.unpack, {"packed": ft.pack(MODEL)}),
    "plan": (ft.plan, {"tree": MODEL, "layout": RULES, "mesh": MESH}),
    "shard": (ft.shard, {"tree": X, "layout": RULES, "mesh": MESH, "axes": "embed hidden"}),
    "shard_map": (
        lambda refused, **k: ft.shard_map(**k, **({} if refused is None else {"auto": refused}))(jnp.array(X)),
        {
            "fun": double, "mesh": MESH, "in_specs": P("data"), "out_specs": P("data"), "refused": None,
        },
    ),
    "signature_layouts": (ft.signature_layouts, {"fun": double, "rules": RULES}),
    "spec": (in_rules(ft.spec), {"axes": "embed"}),
    "axis_shards": (in_rules(ft.axis_shards), {"name": "embed", "axes": "embed hidden"}),
    "tree_axes": (ft.tree_axes, {"tree": MODEL}),
    "names": (
        lambda patterns, fields: ft.names(patterns, w=fields),
        {"patterns": {"v": "a"}, "fields": "a"},
    ),
    "typed": (lambda **k: ft.typed(**k)(jnp.array(X)), {"fun": double}),
    "select": (ft.select, {"tree": MODEL}),
    "Selection.at": (ft.select(MODEL).at, {"where": "up"}),
    "Selection.under": (ft.select(MODEL).under, {"cls": ft.nn.MLP}),
    "Selection.where": (ft.select(MODEL).where, {"what": ft.is_trainable}),
    "Selection.expect": (ft.select(MODEL).at("up").expect, {"number": 1}),
    "Selection.set": (ft.select(MODEL).at("up").set, {"value": 1}),
    "Selection.set_each": (ft.select(MODEL).at("up").set_each, {"values": [1]}),
    "Selection.apply": (ft.select(MODEL).at("up").apply, {"fn": lambda *given: given[-1]}),
    "Selection.insert_after": (ft.select([1, 2]).at("0").insert_after, {"value": 1}),
    "Selection.insert_before": (ft.select([1, 2]).at("0").insert_before, {"value": 1}),
    "State.set": (PIECES.set, {"ref": COUNTS.count, "value": jnp.ones(3)}),
    "nn.Linear": (
        ft.nn.Linear,
        {"in_size": 4, "out_size": 4, "key": KEY, "init": jax.nn.initializers.normal()},
    ),
    "nn.Attention": (
        ft.nn.Attention,
        {"embed": 8, "heads": 2, "key": KEY, "init": jax.nn.initializers.normal()},
    ),
    "nn.BatchNorm": (ft.nn.BatchNorm, {"size": 4, "momentum": 0.9}),
    "nn.Dropout": (ft.nn.Dropout, {}),
    "nn.Embedding": (
        ft.nn.Embedding,
        {"vocab_size": 4, "embed": 4, "key": KEY, "init": jax.nn.initializers.normal()},
    ),
    "nn.LayerNorm": (ft.nn.LayerNorm, {"size": 4}),
    "nn.RMSNorm": (ft.nn.RMSNorm, {"size": 4}),
    "nn.MLP": (
        ft.nn.MLP,
        {"embed": 4, "hidden": 4, "init": jax.nn.initializers.normal(), "key": KEY},
    ),
    "nn.MoE": (
        ft.nn.MoE,
        {
            "embed": 4, "hidden": 4, "experts": 4, "top_k": 2, "init": jax.nn.initializers.normal(),
            "key": KEY,
        },
    ),
    "nn.Sequential": (ft.nn.Sequential, {"layers": [MODEL]}),
    "nn.Constrain": (ft.nn.Constrain, {"layout": "a"}),
    "nn.Jitted": (ft.nn.Jitted, {"body": MODEL}),
    "nn.TransformerConfig": (
        ft.nn.TransformerConfig,
        {
            "vocab_size": 16, "embed": 8, "layers": 2, "heads": 2, "kv_heads": 2, "head_dim": 4,
            "hidden": 8, "max_seq": 8,
        },
    ),
    "nn.Llama3Rope": (ft.nn.Llama3Rope, {"factor": 8.0, "low": 1.0, "high": 4.0, "original": 8192}),
    "nn.Transformer.create": (
        ft.nn.Transformer.create,
        {
            "config": CONFIG, "init": jax.nn.initializers.normal(),
            "embed_init": jax.nn.initializers.normal(), "key": KEY,
        },
    ),
    "nn.Transformer.features": (TRANSFORMER.features, {"tokens": jnp.zeros((1, 4), int)}),
    "nn.Transformer.with_losses": (EXPERTS.with_losses, {"tokens": jnp.zeros((1, 4), int)}),
    "nn.Transformer.decode": (
        TRANSFORMER.decode,
        {"tokens": jnp.zeros((1, 2), int), "cache": ft.nn.Cache.create(TRANSFORMER, 1, 8)},
    ),
    "nn.Cache.create": (ft.nn.Cache.create, {"model": TRANSFORMER, "batch": 1, "length": 8}),
    "nn.generate": (
        ft.nn.generate,
        {
            "model": TRANSFORMER, "prompts": jnp.zeros((1, 2), int), "length": 2, "key": KEY,
            "temperature": 1.0,
        },
    ),
    "nn.zigzag": (ft.nn.zigzag, {"x": jnp.zeros((1, 8)), "parts": 2}),
    "nn.cross_entropy": (
        ft.nn.cross_entropy,
        {"model": TRANSFORMER, "tokens": jnp.zeros((1, 4), int), "targets": jnp.zeros((1, 4), int)},
    ),
    "nn.config_from_json": (
        lambda path, fields: ft.nn.config_from_json(path, compute_dtype=fields),
        {"path": LLAMA, "fields": "float32"},
    ),
    "load_weights": (
        lambda fields, **given: ft.load_weights(**given, max_seq=fields),
        {"folder": LLAMA, "layout": ft.P(), "mesh": MESH, "fields": 16},
    ),
    "load_tensors": (
        ft.load_tensors,
        {
            "files": "tensors.safetensors", "like": {"w": jnp.zeros(3)}, "table": {"w": "w"},
            "layout": ft.P(), "mesh": MESH, "left_out": [],
        },
    ),
    "save": (
        lambda path, **given: ft.save(fresh(path), **given),
        {"path": "fresh", "tree": {"w": jnp.ones(3)}, "meta": {"a": 1}},
    ),
    "restore": (
        ft.restore,
        {"path": "saved", "like": {"w": jnp.zeros(3)}, "layout": ft.P(), "mesh": MESH},
    ),
    "inspect": (ft.inspect, {"path": "saved"}),
    "Checkpoint.diff": (
        lambda other: ft.inspect("saved").diff(other),
        {"other": ft.plan(jnp.ones(2))},
    ),
    "Checkpoints": (ft.Checkpoints, {"folder": "run"}),
    "Checkpoints.save": (
        lambda **given: in_a_run("fresh", lambda run: run.save(**given)),
        {"step": 1, "tree": {"w": jnp.ones(3)}, "meta": {"a": 1}},
    ),
    "Checkpoints.restore": (
        lambda **given: in_a_run("run", lambda run: run.restore(**given)),
        {"like": {"w": jnp.zeros(3)}, "step": 7, "layout": ft.P(), "mesh": MESH},
    ),
    "check_processes": (lambda values: ft.check_processes(value=values), {"values": 3}),
    "preempted": (ft.preempted, {"step": 3}),
    "export": (
        lambda f, args, **given: ft.export(f, args, **given),
        {"f": ft.jit(lambda x: x), "args": jnp.ones(3)},
    ),
    "Exported.call": (
        lambda arrays: ft.export(ft.jit(lambda x: x), jnp.ones(3)).call(arrays),
        {"arrays": jnp.ones(3)},
    ),
    "Exported.deserialize": (ft.Exported.deserialize, {"data": SERIALIZED}),
    "save_weights": (ft.save_weights, {"folder": "weights", "model": TRANSFORMER}),
    "nn.Transformer.logits": (TRANSFORMER.logits, {"x": jnp.zeros((1, 4, 8))}),
    "nn.Embedding.logits": (TRANSFORMER.embed.logits, {"x": jnp.zeros((1, 4, 8))}),
    "nn.Block.create": (
        ft.nn.Block.create,
        {"config": CONFIG, "init": jax.nn.initializers.normal(), "key": KEY},
    ),
}  # fmt: skip

# What is given is called, or computed with, as a user asks for it: an error is that of the user's
# own function or array. A layer of a Sequential or a Stacked, for example, is called with `x`.
OF_THE_USER: dict[str, set[str]] = {
    "accumulate": {"fn"}, "on_whole_matrices": {"fn"}, "grad": {"fn"}, "value_and_grad": {"fn"}, "init": {"make"}, "abstract": {"make"},
    "ledger": {"fn"}, "layouts": {"fn"}, "why": {"fn"}, "explore": {"step"}, "testing.assert_closed": {"step"}, "testing.assert_same_as_unsharded": {"fn"},
    "testing.first_nonfinite": {"fn"},
    "stack": {"make"}, "jit": {"fun"}, "shard_map": {"fun"}, "typed": {"fun"}, "Selection.at": {"where"},
    "Selection.apply": {"fn"},
    **{f"nn.{layer}": {"init"} for layer in ("Linear", "Attention", "Embedding", "RMSNorm", "MLP", "MoE")},
    "nn.Transformer.create": {"init", "embed_init"}, "nn.Block.create": {"init"},
}  # fmt: skip
COMPUTED_WITH = {
    ("Stacked.scan", "x"), ("nn.Transformer.logits", "x"), ("nn.Embedding.logits", "x"), ("ledger", "args"),
    ("layouts", "args"), ("why", "args"), ("explore", "args"),
    ("testing.assert_closed", "args"), ("testing.assert_same_as_unsharded", "args"),
    ("testing.first_nonfinite", "args"),
}  # fmt: skip
# Python's own protocols: `plan[path]` and `state[ref]` raise KeyError and TypeError as a dict does.
# XLA's options have names that only XLA knows. Without a function, `ft.grad` is a decorator.
NOT_OURS = {
    ("jit", "compiler_options", "a dict"),
    ("Stacked.scan", "each", "a dict"),  # Python's error: the layer has no parameter `a`
    ("grad", "fn", "None"),
    ("value_and_grad", "fn", "None"),
}
# Not errors of Python: they are about the model, or about what is saved.
OTHERS = (ft.StateError, ft.CheckpointError)
# Files that are not there. That is no wrong value: they may be there later.
FILES = {("load_weights", "folder"), ("load_tensors", "files"), ("nn.config_from_json", "path")}
# Called by functree itself, with values that it has checked.
INTERNAL = {
    "StateSharding.first", "Path.of", "StateRef.at", "State.update", "State.of_layers", "Plan.sharding", "Plan.page",
    # What a transformer calls of its parts, and what generation and the loss call of a transformer.
    "nn.Block", "nn.Block.decode", "nn.Block.with_losses", "nn.Attention.decode",
    "nn.Transformer.features_with_cache", "nn.Transformer.features_with_losses",
    "nn.Cache", "nn.Cache.extended", "nn.Cache.fits", "nn.Cache.most_tokens",
}  # fmt: skip
# What users do not construct: these are results, and errors.
RESULTS = {
    "AxisShards",
    "Candidate",
    "Change",
    "Checkpoint",
    "Collective",
    "Exported",
    "SavedArray",
    "Diff",
    "Filter",
    "Fix",
    "Layout",
    "Layouts",
    "Ledger",
    "Memory",
    "Packed",
    "Plan",
    "Ranking",
    "Row",
    "Selection",
    "State",
    "Problem",
    "P",
    "PartitionSpec",
    "TrainState",
    "Why",
}
RESULTS |= {"nn.Transformer", "nn.MoELosses", "testing.Operation"}


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


def public() -> dict[str, Any]:
    """Every public function, class and method, by its name."""
    found: dict[str, Any] = {}
    for prefix, module in (("", ft), ("nn.", ft.nn), ("testing.", ft.testing)):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.ismodule(value) or not callable(value):
                continue
            if isinstance(value, type) and issubclass(value, Exception):
                continue
            if isinstance(value, ft.Filter) or name in (
                "Buffer",
                "assert_no_recompile",
            ):  # these take nothing
                continue
            if prefix + name not in RESULTS:
                found[prefix + name] = value
            if isinstance(value, type) and value.__module__.startswith("functree"):
                found |= methods(prefix + name, value)
    return found


def methods(name: str, cls: type) -> dict[str, Any]:
    """The public methods that a class of functree defines, and that take arguments."""
    found: dict[str, Any] = {}
    for key, value in vars(cls).items():
        inner = key.startswith("_") or key in ("decide", "asks", "claims", "reached", "stack_axes")
        if (
            not inner
            and inspect.isfunction(getattr(value, "__func__", value))
            and parameters(getattr(cls, key))
        ):
            found[f"{name}.{key}"] = getattr(cls, key)
    return found


PUBLIC = {name: function for name, function in public().items() if name not in INTERNAL}


def arguments_of(name: str) -> dict[str, Any]:
    """The arguments of a use: those of the table, and the defaults of the other parameters."""
    found: dict[str, Any] = {}
    for key, parameter in inspect.signature(PUBLIC[name]).parameters.items():
        if parameter.default is not parameter.empty:
            found[key] = parameter.default
    return {**found, **USES[name][1]}


def test_every_public_function_and_parameter_is_in_the_table():
    assert sorted(PUBLIC.keys() - USES.keys()) == [] == sorted(USES.keys() - PUBLIC.keys())
    for name, function in PUBLIC.items():
        assert parameters(function) == set(arguments_of(name)), name


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint and a run, which all cases read."""
    folder = tmp_path_factory.mktemp("checkpoints")
    ft.save(folder / "saved", {"w": jnp.ones(3)})
    save_file({"w": np.ones(3, np.float32)}, folder / "tensors.safetensors")
    with ft.Checkpoints(folder / "run") as run:
        run.save(7, {"w": jnp.ones(3)})
    return folder


@pytest.fixture(autouse=True)
def _elsewhere(checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own, for what is written, with links to what is read."""
    monkeypatch.chdir(tmp_path)
    for shared in checkpoints.iterdir():
        Path(shared.name).symlink_to(shared)


@pytest.mark.parametrize("name", PUBLIC)
def test_the_arguments_of_the_table_are_sense(name: str):
    use, arguments = USES[name][0], arguments_of(name)
    if name == "testing.assert_layout":  # there is no such file, which is the message
        with raises("the file missing.txt does not exist", error=AssertionError):
            use(**arguments)
        return
    use(**arguments)


CASES = [(name, parameter) for name in PUBLIC for parameter in sorted(parameters(PUBLIC[name]))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "parameter"), CASES)
def test_nonsense(name: str, parameter: str):
    use, arguments = USES[name][0], arguments_of(name)
    for what, value in NONSENSE.items():
        if what in FUNCTIONS and parameter in OF_THE_USER.get(name, ()):
            continue
        if (name, parameter) in COMPUTED_WITH or (name, parameter, what) in NOT_OURS:
            continue
        try:
            use(**{**arguments, parameter: value})
        except ft.FunctreeError as error:
            assert str(error).strip()
            of_python = isinstance(error, TypeError | ValueError)
            assert of_python or isinstance(error, OTHERS) or (name, parameter) in FILES, what
        except AssertionError as error:
            assert name.startswith("testing.") and str(error).strip()
        except Exception as error:
            pytest.fail(f"{name}({parameter}={what}): {type(error).__name__}: {error}")


# What would be an empty or a replicated answer, without a word.

FOR_RULES = "for a table of rules, write `ft.AxisRules({...})`"
SAID: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "a class as a tree": (
        lambda: ft.plan(ft.nn.MLP, RULES, MESH), ["plan takes a tree", "MLP is a class", "`ft.abstract(MLP)(...)`"]
    ),
    "a value without its aux": (
        lambda: ft.grad(loss, has_aux=True)(MODEL, X), ["with has_aux=True, the function must return `(value, aux)`"]
    ),
    "no layout for a plan": (lambda: ft.plan(MODEL, None, MESH), ["plan: the layout is None", "leave it out"]),
    "a mapping for rules": (
        lambda: ft.plan(MODEL, {"embed": "data", "hidden": None}, MESH), [FOR_RULES]
    ),
    "a mapping for ambient rules": (
        lambda: entered(rules={"embed": "data"}), ["is not a layout", FOR_RULES]
    ),
    "a mesh as a layout": (lambda: ft.plan(MODEL, MESH, MESH), ["is not a layout: a callable must take"]),
    "a jitted function as a filter": (
        lambda: ft.grad(loss, wrt=ft.jit(lambda x: x)),
        ["is not a filter: a callable must take `(path, leaf)`"],
    ),
    "several wrong values": (
        lambda: ft.nn.Linear(0, 4, use_bias="no", key=KEY),  # type: ignore[arg-type]
        ["Linear: invalid arguments", "in_size=0\n      it must be a positive integer", "use_bias='no'", "True or False"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAID)
def test_what_is_said(case: str):
    run, told = SAID[case]
    with raises(*told):
        run()


def test_positions_of_numpy_and_negative_ones():
    x = jnp.ones(3)
    assert ft.grad(lambda a, b: (a * b).sum(), argnums=np.int64(1))(x, 2 * x).tolist() == [1.0] * 3  # type: ignore
    assert ft.grad(lambda a, b: (a * b).sum(), argnums=-1)(x, 2 * x).tolist() == [1.0] * 3
    assert ft.jit(lambda a, b: a + b, donate=np.int64(0))(jnp.ones(3), x).tolist() == [2.0] * 3
