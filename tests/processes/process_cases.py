"""What the processes of `test_processes.py` run: each case in all of them, one after the other.

Each prints a line of JSON: for each case what it returned or raised, and how long it took.
"""

import dataclasses
import json
import logging
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from tests.lib.launch import ROOT, initialized

initialized()  # before anything asks JAX for its devices

import equinox as eqx  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jaxtyping import Array, Float  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402

import functree as ft  # noqa: E402
from functree.io.checkpoints import write as checkpoint_writer  # noqa: E402
from functree.io.checkpoints.folder import BucketFolder  # noqa: E402
from functree.io.weights.files import Tensor  # noqa: E402
from functree.processes import exchange  # noqa: E402
from functree.processes.agreement import Agreement  # noqa: E402

RANK, COUNT = jax.process_index(), jax.process_count()
MESH = ft.make_mesh(data=COUNT, model=8 // COUNT)
LAYOUT = ft.AxisRules({"batch": "data", "hidden": "model", ...: None})
FOLDER = Path(os.environ.get("FUNCTREE_FOLDER", ""))
CASES: dict[str, Callable[[], Any]] = {}
# Cases that return numbers, the same in any number of processes.
ALIKE: dict[str, Callable[[], Any]] = {}
# Cases in which the last process differs ─► what the first one says of it, in this order. `{odd}` is
# the last process, `{count}` how many there are.
DIFFERENCES: dict[str, tuple[str, ...]] = {}
ODD = COUNT - 1


def case(run: Callable[[], Any]) -> Callable[[], Any]:
    CASES[run.__name__] = run
    return run


def alike(run: Callable[[], Any]) -> Callable[[], Any]:
    ALIKE[run.__name__] = run
    return case(run)


def differing(*told: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def register(run: Callable[[], Any]) -> Callable[[], Any]:
        DIFFERENCES[run.__name__] = told
        return case(run)

    return register


class MLP(eqx.Module):
    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden embed"]

    def __call__(self, x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
        return jnp.tanh(x @ self.up) @ self.down


def make(key: Any, embed: int = 16, hidden: int = 32) -> MLP:
    up, down = jax.random.split(key)
    return MLP(
        jax.random.normal(up, (embed, hidden)) * 0.3, jax.random.normal(down, (hidden, embed)) * 0.3
    )


def model() -> MLP:
    return ft.init(make, LAYOUT, MESH)(jax.random.key(0))


def batch(step: int, embed: int = 16) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(8, embed)).astype(np.float32)


def place(x: Any, **options: Any) -> Any:
    return ft.shard(x, LAYOUT, MESH, axes="batch embed", **options)


def loss(model: MLP, x: Any) -> Any:
    return jnp.mean((model(x) - jnp.sin(x)) ** 2)


def whole(tree: Any) -> Any:
    """The values of a tree, in each process."""
    replicate = jax.jit(lambda t: t, out_shardings=NamedSharding(MESH, ft.P()))
    return jax.tree.map(np.asarray, replicate(tree))


TX = optax.adam(1e-2)


# What works


@case
def plans() -> None:
    live = ft.plan(model())
    assert [str(row.spec) for row in live] == ["P(None, 'model')", "P('model', None)"]
    assert live.bytes_per_device == 2 * 16 * 32 * 4 // (8 // COUNT)


@case
def rows() -> None:
    """Each process hands in its own rows: the array is the one that all have whole."""
    x = batch(0)
    own = x[RANK * 8 // COUNT : (RANK + 1) * 8 // COUNT]
    placed = {"x": own, "y": own * 2}
    got = ft.shard(placed, LAYOUT, MESH, axes={"x": "batch embed", "y": "batch embed"}, local=True)
    assert np.array_equal(whole(got["x"]), x) and np.array_equal(whole(got["y"]), x * 2)
    assert got["x"].sharding.spec == ft.P("data", None)


@case
def whole_arrays() -> None:
    """Host arrays, local arrays, keys, one at two places, one that is placed already."""
    x, key = batch(0), jax.random.split(jax.random.key(3), 8)
    tree = {"np": x, "own": jnp.asarray(x), "again": x, "key": key, "int": np.arange(8)}
    got = ft.shard(tree, ft.StateSharding({"key": ft.P("data"), ...: ft.P()}), MESH)
    assert np.array_equal(whole(got["np"]), x) and np.array_equal(whole(got["own"]), x)
    words = whole(jax.jit(jax.random.key_data)(got["key"]))
    assert np.array_equal(words, np.asarray(jax.random.key_data(key)))
    assert got["np"] is got["again"] and got["int"].dtype == np.int32
    assert ft.shard(got, ft.P(), MESH)["np"] is got["np"]


@case
def one_program() -> None:
    f = ft.jit(lambda m, x: loss(m, x), check_processes=True)
    m = model()
    values = [float(f(m, place(batch(i)))) for i in (0, 1, 2, 0)]
    assert len(f.compilations) == 1 and values[0] == values[3]


@case
def prepared_once() -> None:
    """What nobody has placed is placed by the rules once in a call; twice would be a warning."""
    f = ft.jit(lambda m, x: loss(m, x), rules=LAYOUT, mesh=MESH, check_processes=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ft.FunctreeWarning)
        m, x = make(jax.random.key(0)), place(batch(0))
        assert float(f(m, x)) == float(f(ft.shard(m, LAYOUT, MESH), x))


@case
def saved() -> None:
    m = model()
    ft.save(FOLDER / "model", m, meta={"by": "all"})
    like = ft.abstract(make, ft.P(None, ("data", "model")), MESH)(jax.random.key(0))
    back = ft.restore(FOLDER / "model", like)
    with ft.Checkpoints(FOLDER / "run", keep=2) as checkpoints:
        for step in range(4):
            checkpoints.save(step, m)
    assert checkpoints.steps == (2, 3) and back.up.sharding.spec == ft.P(None, ("data", "model"))
    for tree in (back, checkpoints.restore(like)):
        for one, other in zip(*map(jax.tree.leaves, (whole(tree), whole(m))), strict=True):
            assert np.array_equal(one, other)


@case
def equal_numpy_arguments() -> None:
    """Of numpy, and on devices that are those of this process alone; without and with rules."""
    f = ft.jit(lambda x, y, z: jnp.sum(x * y + z), check_processes=True)
    g = ft.jit(f.__wrapped__, rules=LAYOUT, mesh=MESH, check_processes=True)
    x, y = place(batch(0)), batch(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ft.FunctreeWarning)  # they are replicated
        values = [float(f(x, y, jnp.ones(16))), float(g(x, y, np.ones(16, np.float32)))]
    np.testing.assert_allclose(values, np.sum(batch(0) * y + 1), rtol=1e-4)


@case
def the_same() -> None:
    m = model()
    ft.check_processes(
        step=3, layout=LAYOUT, plan=ft.plan(m), mesh=MESH, model=m, batch=batch(0), f=make, name="a\nb",
        letters=frozenset("abcdefghij"), tree={"s": {"x", "y", "z"}},
        order=dict(differs([("a", 1), ("b", 2)], [("b", 2), ("a", 1)])),
        own=jnp.ones(3),
        packed=ft.pack(m), state=ft.make_state(ft.nn.BatchNorm(8)), eqx=eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, "batch", mode="batch"),
        ts=ft.TrainState.create(make(jax.random.key(0)), TX, key=jax.random.key(0)), skeleton=ft.split(m),
        program=ft.jit(loss).lower(m, place(batch(0))),
    )  # fmt: skip


@case
def equal_sets() -> None:
    """Of texts, whose order is another one in each process."""
    names = frozenset("abcdefghij")

    def sized(key: Any, names: frozenset[str]) -> Any:
        return make(key, hidden=len(names) - 2)

    made = ft.init(sized, LAYOUT, MESH)(jax.random.key(0), names)
    f = ft.jit(lambda m, x, names: loss(m, x) * len(names), check_processes=True)
    ft.save(FOLDER / "sets", {"w": made.up, "names": names})
    assert made.up.shape == (16, 8) and f(made, place(batch(0)), names) > 0


@case
def not_preempted() -> None:
    assert not any(ft.preempted(step) for step in range(3))


# The same numbers in any number of processes

CONFIG = ft.nn.TransformerConfig(64, 16, layers=2, heads=8, kv_heads=8, head_dim=4, hidden=32)
TENSOR = {"heads": "model", "kv_heads": "model", "hidden": "model", "vocab": "model"}
RULES = ft.AxisRules({"batch": "data", **TENSOR, ...: None}) | ft.FSDP(
    "data", min_size=0, otherwise=ft.P()
)
TOKENS = np.random.default_rng(3).integers(0, 64, (8, 9))
LLAMA = ROOT / "tests" / "fixtures" / "hf" / "llama"


def numbers(tree: Any) -> list[float]:
    """A number for each array of a tree."""
    return [
        float(np.sin(np.arange(x.size)) @ x.ravel().astype(np.float64))
        for x in jax.tree.leaves(whole(tree))
    ]


def transformer() -> Any:
    return ft.init(ft.nn.Transformer.create, RULES, MESH)(CONFIG, key=jax.random.key(0))


def tokens() -> Any:
    return ft.shard(TOKENS, RULES, MESH, axes="batch _")


def next_token(model: Any, tokens: Any) -> Any:
    return ft.nn.cross_entropy(model, tokens[:, :-1], tokens[:, 1:])


@alike
def losses() -> Any:
    ts = ft.init(lambda key: ft.TrainState.create(make(key), TX), LAYOUT, MESH)(jax.random.key(0))

    @ft.jit(donate="ts", check_processes=True)
    def step(ts: Any, x: Any) -> Any:
        value, grads = ft.value_and_grad(loss)(ts.model, x)
        return ft.apply_gradients(ts, grads), value

    losses: list[float] = []
    for i in range(20):
        ts, value = step(ts, place(batch(i)))
        losses.append(float(value))
    return losses


@alike
def gradients() -> Any:
    f = ft.jit(ft.value_and_grad(next_token), rules=RULES, mesh=MESH, check_processes=True)
    return numbers(f(transformer(), tokens()))


@alike
def written() -> Any:
    with jax.set_mesh(MESH), ft.axis_rules(RULES):
        found = ft.nn.generate(transformer(), TOKENS[:, :4], 5)
    return np.asarray(whole(found)).tolist()


@alike
def optimizers() -> Any:
    m = transformer()
    states = [
        ft.init_optimizer(tx, m, RULES, MESH) for tx in (optax.adafactor(1e-3), optax.lion(1e-3))
    ]
    return numbers(states)


@alike
def parts() -> Any:
    """Copied, split, packed, changed by surgery: of arrays that no process has whole."""
    m = ft.copy(model())
    static, arrays = ft.split(m)
    packed = ft.pack(ft.merge(static, arrays))
    double = ft.jit(lambda m: ft.select(m).at("up").apply(lambda w: 2 * w))
    return numbers((double(packed), ft.select(m).at("down").apply(lambda w: w + 1)))


@alike
def looked_at() -> Any:
    f = ft.jit(next_token, rules=RULES, mesh=MESH)
    ledger = f.lower(transformer(), tokens()).compile().ledger()
    return [
        len(ledger.collectives) > 0,
        len(ft.export(f, transformer(), tokens()).exported.in_avals),
    ]


@alike
def published() -> Any:
    rules = ft.AxisRules({"batch": "data", "hidden": "model", ...: None})
    m = ft.load_weights(LLAMA, rules, MESH)
    ft.save_weights(FOLDER / f"weights{COUNT}", m)
    again = ft.load_weights(FOLDER / f"weights{COUNT}", rules, MESH)
    same = all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(whole(m)), jax.tree.leaves(whole(again)), strict=True)
    )
    logits = ft.jit(lambda m, t: m(t), rules=rules, mesh=MESH)(
        m, ft.shard(TOKENS, rules, MESH, axes="batch _")
    )
    return [same, *numbers(logits)]


# What differs in one process


def differs(value: Any, other: Any) -> Any:
    return other if RANK == ODD else value


@differing(
    "make cannot be run",
    "process {odd} differs from process 0",
    "key: key<fry>[] [0, 0]",
    "key: key<fry>[] [0, 1]",
)
def other_key() -> Any:
    return ft.init(make, LAYOUT, MESH)(jax.random.key(differs(0, 1)))


@differing("in comparison ", "(`ft.init(<lambda>, ...)(...)`)", "program", "dense<0>", "dense<1>")
def other_seed_in_the_closure() -> Any:
    seed = differs(0, 1)
    return ft.init(lambda: make(jax.random.key(seed)), LAYOUT, MESH)()


@differing("make cannot be run", "settings", "partitionable = True", "partitionable = False")
def other_setting() -> Any:
    with jax.threefry_partitionable(differs(True, False)):
        return ft.init(make, LAYOUT, MESH)(jax.random.key(0))


@differing("<lambda> cannot run", "settings", "precision = float32", "precision = bfloat16")
def other_setting_of_a_later_call() -> Any:
    """For which JAX compiles again."""
    f, x = ft.jit(lambda x: x @ x.T, check_processes=True), place(batch(0))
    f(x)
    with jax.default_matmul_precision(differs("float32", "bfloat16")):
        return f(x)


# 4000.0, and what is around it
@differing("program", "process 0: ...", "00007A45", "process {odd}: ...", "00107A45")
def other_array_in_the_closure() -> Any:
    """In the program it is one line of 40,000 characters."""
    table = np.arange(5000.0, dtype=np.float32)
    table[4000] += differs(0, 1)
    return ft.jit(lambda x: (x.sum() + table).sum(), check_processes=True)(place(batch(0)))


CHECKSUMS = "f32[8, 16] with the checksum ", "{odd}: y: f32[8, 16] with the checksum "


@differing("(`<lambda>(...)`)", "arguments", *CHECKSUMS)
def other_numpy_argument() -> Any:
    f = ft.jit(lambda x, y: jnp.sum(x * y), check_processes=True)
    return f(place(batch(0)), batch(differs(1, 2)))


@differing("mesh", "process 0: mesh (data={count}, ", "process {odd}: mesh (data=", "other=1)")
def other_mesh_of_a_step() -> Any:
    other = ft.make_mesh(data=8 // COUNT, model=COUNT, other=1)
    return ft.jit(lambda x: x + 1, mesh=differs(MESH, other), check_processes=True)(batch(0))


@differing(
    "check_processes: the {count} processes made different calls",
    *("process 0", "is at comparison ", "(`ft.check_processes`) at ", "process_cases.py:"),
    *("process {odd}", "is at comparison ", "(`ft.shard`) at ", "process_cases.py:"),
    "Try: make the same calls in the same order in all processes: one process made a call",
)
def one_call_apart() -> Any:
    """One process skips a comparison, and is at the next one."""
    if RANK != ODD:
        ft.check_processes(step=1)
    return place(batch(0))


@differing("step", "process 0: 0", "process {odd}: 1", "line", "process_cases.py:")
def one_line_apart() -> Any:
    if RANK == ODD:
        ft.check_processes(step=1, loss=2.0)
    else:
        ft.check_processes(step=0, loss=2.0)


@differing("mine alone")
def an_error_inside_of_two() -> Any:
    """Nobody is told twice, which would be in the way of the next comparison."""
    with Agreement("nothing is done"):
        with Agreement("nothing is found"):
            if RANK == ODD:
                raise ValueError("mine alone")


@differing("check_processes: the {count} processes differ in comparison ", "step")
def another_thing_inside_of_two() -> Any:
    with Agreement("nothing is done"):
        ft.check_processes(step=differs(0, 1))


# What `check_processes` is handed, and the same but for one process ─► what is told of both.
HANDED: dict[str, tuple[Callable[[], tuple[Any, Any]], list[str]]] = {
    "plan": (
        lambda: (ft.plan(model()), ft.plan(model(), ft.P(), MESH)),
        ["up: f32[16, 32/model]", "up: f32[16, 32]"],
    ),
    "program": (
        lambda: (ft.jit(jnp.sin).lower(jnp.ones(3)), ft.jit(jnp.cos).lower(jnp.ones(3))),
        ["stablehlo.sine", "stablehlo.cosine"],
    ),
    "line": (lambda: ("a\nb", "a\nb\n"), ["process 0: (nothing)", "process {odd}: "]),
    "tree": (lambda: ({"a": [1, 2]}, {"a": [1, 3]}), ["process 0: a.1: 2", "{odd}: a.1: 3"]),
    "set": (lambda: ({"x", "y"}, {"x", "w"}), ["set{'x', 'y'}", "set{'w', 'x'}"]),
    "object": (
        lambda: ({"a": {"b": object()}}, {"a": {"b": object()}}),
        ["a.b: object objects cannot be compared between processes: pass their contents"],
    ),
}


@case
def handed() -> Any:
    """What is told of each."""
    texts: dict[str, str] = {}
    for name, (pair, _) in HANDED.items():
        value = differs(*pair())
        try:
            ft.check_processes(value=value)
        except ft.FunctreeError as error:
            texts[name] = str(error)
    return texts


@differing("make cannot be run", "process {odd} differs", "up: f32[16, 32/model]")
def other_layout() -> Any:
    return ft.init(make, differs(LAYOUT, ft.P()), MESH)(jax.random.key(0))


@differing("make cannot be run", "process {odd} differs", "devices [0, 1,")
def other_devices() -> Any:
    devices = differs(jax.devices(), jax.devices()[::-1])
    mesh = Mesh(np.array(devices).reshape(COUNT, -1), ("data", "model"))
    return ft.init(make, LAYOUT, mesh)(jax.random.key(0))


@differing("the arrays cannot be placed", "process {odd} differs", "mesh (data=")
def other_mesh() -> Any:
    return ft.shard(
        batch(0), ft.P("data"), differs(MESH, ft.make_mesh(data=8 // COUNT, model=COUNT, other=1))
    )


@differing(
    "(the root): f32[8, 16] ",
    "Try: if each process has its own rows, pass `local=True`; otherwise run the same program",
)
def other_batch() -> Any:
    return place(batch(differs(0, 1)))


@differing("f cannot run", "sdy.sharding_constraint", '{"data"}, {}')
def other_collectives() -> Any:
    """A constraint inside, which without the check would wait for ever."""

    def f(x: Any) -> Any:
        y = ft.constrain(x * 2, differs(ft.P("data"), ft.P(None, "model")))
        return y @ y.T

    return ft.jit(f, mesh=MESH, check_processes=True)(place(batch(0)))


@differing("f cannot run: process {odd} of {count} failed with ValueError:\nmine alone")
def an_error_in_one() -> Any:
    def f(x: Any) -> Any:
        if RANK == ODD:
            raise ValueError("mine alone")
        return x.sum()

    return ft.jit(f, check_processes=True)(place(batch(0)))


@differing("{odd} of {count} failed with ShardingError", '"batch" has size 7')
def an_array_that_does_not_fit_in_one() -> Any:
    return place(np.ones((differs(8, 7), 16), np.float32))


@differing("the mesh has no device of process", "build the mesh from all devices")
def part_of_the_devices() -> Any:
    return ft.shard(
        batch(0), ft.P(), ft.make_mesh(data=8 // COUNT, devices=jax.devices()[: 8 // COUNT])
    )


@differing("process {odd} differs", "Try: pass the same number of rows in each process")
def rows_that_do_not_fit() -> Any:
    return place(batch(0)[: differs(4, 3)], local=True)


@differing("copies with different values, as in process {odd}", "pass equal rows")
def rows_of_one_part() -> Any:
    """All processes keep all rows, and one has others."""
    return ft.shard(batch(differs(0, 1)), ft.P(), MESH, local=True)


@differing(
    "w   f32[16, 32]", "has shards in other processes, so it cannot be the rows of this process"
)
def rows_that_are_none() -> Any:
    return ft.shard({"w": model().up}, ft.P(), MESH, local=True)


@differing("{odd} of {count} failed", "does not see the folder", "a file system that all")
def saved_elsewhere() -> Any:
    with mock.patch.object(checkpoint_writer, "_SEEN_AFTER", 0.5):  # usually 5 seconds
        return ft.save(FOLDER / f"at{differs(0, 1)}", model())


@case
def saved_in_a_bucket() -> None:
    m = model()
    for overwrite in (False, True):
        ft.save("gs://bucket/model", m, overwrite=overwrite)
    with ft.Checkpoints("gs://bucket/run", keep=2) as checkpoints:
        for step in range(3):
            checkpoints.save(step, m)
    like = ft.abstract(make, ft.P(None, ("data", "model")), MESH)(jax.random.key(0))
    assert checkpoints.steps == (1, 2)
    assert np.array_equal(whole(checkpoints.restore(like)).up, whole(m).up)


@differing(
    "process {odd} of {count} failed",
    "gs://bucket/unreached cannot be written: the bucket has not answered for 60 seconds",
)
def saved_in_a_bucket_that_one_does_not_reach() -> Any:
    def refuse(*_: object) -> None:
        raise OSError("the bucket has not answered for 60 seconds")

    reached = differs(BucketFolder.check_reached, refuse)
    with mock.patch.object(BucketFolder, "check_reached", reached):
        return ft.save("gs://bucket/unreached", model())


@differing("w   f32[3]", "only on devices of process 0, but there are {count}", "ft.shard(tree")
def saved_by_one_alone() -> Any:
    return ft.save(FOLDER / "alone", {"w": jnp.ones(3)})


@differing(
    "(`ft.save`)",
    "arrays",
    "process 0: up float32[16, 32]",
    "process {odd}: down float32[32, 16]",
)
def saved_another_tree() -> Any:
    m = model()
    return ft.save(FOLDER / "tree", differs({"up": m.up}, {"up": m.up, "down": m.down}))


@differing("options", "verify=True", "verify=False")
def saved_with_other_options() -> Any:
    return ft.save(FOLDER / "options", {"w": model().up}, verify=differs(True, False))


@differing("cannot be opened", "(`ft.Checkpoints`)", "keep", "process {odd}: 2")
def opened_otherwise() -> Any:
    with ft.Checkpoints(FOLDER / "opened", keep=differs(1, 2)):
        return None


@differing("cannot be written", "(`ft.Checkpoints.save`)", "step", "{odd}: 1")
def saved_at_another_step() -> Any:
    with ft.Checkpoints(FOLDER / "other_steps") as checkpoints:
        return checkpoints.save(differs(0, 1), {"w": model().up})


@case
def saved_while_steps_run() -> None:
    """What is written in the background talks to no other process: that would be in the way of the
    steps."""
    f = ft.jit(lambda m, x: jax.tree.map(lambda w, d: w - 0.1 * d, m, ft.grad(loss)(m, x)))
    m = model()
    large = ft.shard({"w": np.ones((8, 2**19), np.float32)}, ft.P(("data", "model")), MESH)
    with ft.Checkpoints(FOLDER / "steps", keep=2) as checkpoints:
        for step in range(4):
            checkpoints.save(step, {"m": m, **large})
            for i in range(3):
                m = f(m, place(batch(i)))
                ft.check_processes(i=i)
    assert checkpoints.steps == (2, 3) and np.isfinite(float(loss(m, place(batch(0)))))


def tensor_files(name: str, where: slice | None = None) -> Path:
    """A file of tensors; one machine has another one, of which some values differ."""
    rows = np.arange(128, dtype=np.float32).reshape(16, 8)
    # A device's part of the bias is larger than the beginnings that are compared.
    tensors = {"bias": np.arange(4096, dtype=np.float32), "qkv.weight": np.concatenate([rows] * 3)}
    tensors["scale"] = np.ones((), np.float32)
    file = FOLDER / f"{name}{RANK}"
    if RANK == ODD and where is not None:
        tensors["bias"][where] += 1
    save_file(tensors, file)
    return file


TENSORS = {
    "w": jax.ShapeDtypeStruct((8, 4, 4), "float32"),
    "b": jax.ShapeDtypeStruct((4096,), "float32"),
    "s": jax.ShapeDtypeStruct((), "float32"),
}
TENSOR_NAMES = {"w": "qkv.weight[1/3].T", "b": "bias", "s": "scale"}


@alike
def loaded_by_names() -> Any:
    """In any number of processes a device reads its own blocks."""
    read: list[int] = []

    def count(self: Tensor, index: Any, read_block: Any = Tensor.read) -> np.ndarray:
        block = read_block(self, index)
        read.append(block.size)
        return block

    layout = ft.FSDP(("data", "model"), min_size=0)
    with mock.patch.object(Tensor, "read", count):
        loaded = ft.load_tensors(tensor_files("alike"), TENSORS, TENSOR_NAMES, layout, MESH)
    return [max(read), *numbers(loaded)]


@differing(
    "the processes read different weights",
    "b",
    "different values, as in process {odd}",
    "same files",
)
def other_tensors() -> Any:
    file = tensor_files("copies_of_tensors", np.s_[-1:])
    return ft.load_tensors(file, TENSORS, TENSOR_NAMES, ft.P(), MESH)


@differing("(`ft.load_tensors`)", "process {odd} differs", "bias: the first values have checksum")
def other_tensors_without_copies() -> Any:
    file = tensor_files("parts_of_tensors", np.s_[:])
    layout = ft.FSDP(("data", "model"), min_size=0)
    return ft.load_tensors(file, TENSORS, TENSOR_NAMES, layout, MESH)


@differing("arrays", "b: f32[4096] P(None) on", "b: f32[4096] P('data') on")
def tensors_loaded_otherwise() -> Any:
    layout = differs(ft.P(), ft.FSDP("data", min_size=0))
    return ft.load_tensors(tensor_files("otherwise"), TENSORS, TENSOR_NAMES, layout, MESH)


@differing("names", "w: qkv.weight[1/3].T", "process {odd}: w: qkv.weight[2/3].T")
def tensors_of_other_names() -> Any:
    names = {**TENSOR_NAMES, "w": differs("qkv.weight[1/3].T", "qkv.weight[2/3].T")}
    return ft.load_tensors(tensor_files("names"), TENSORS, names, ft.P(), MESH)


@differing("cannot be restored", "like", "up: f32[16, 32] P(None, 'model')")
def restored_otherwise() -> Any:
    like = ft.abstract(make, differs(LAYOUT, ft.P()), MESH)(jax.random.key(0))
    return ft.restore(FOLDER / "model", like)


@differing("verify", "process 0: True", "process {odd}: False")
def restored_unverified() -> Any:
    like = ft.abstract(make, LAYOUT, MESH)(jax.random.key(0))
    return ft.restore(FOLDER / "model", like, verify=differs(True, False))


@differing("cannot be restored", "(`ft.restore`)", "manifest", '"of": 1')
def restored_from_another_manifest() -> Any:
    m = model()
    ft.save(FOLDER / "first", m, meta={"of": 0})
    ft.save(FOLDER / "second", m, meta={"of": 1})
    link = FOLDER / f"link{RANK}"
    link.symlink_to(FOLDER / differs("first", "second"))
    return ft.restore(link, m)


@differing("process {odd} of {count} failed", "cannot be read")
def restored_with_the_files_of_one_process_torn() -> Any:
    """What the last process reads is gone; the others can read their parts."""
    tree = {"w": ft.shard(np.ones((8, 4096), np.float32), ft.P(("data", "model")), MESH)}
    ft.save(FOLDER / "torn_files", tree)
    if RANK == ODD:
        for file in FOLDER.glob(f"torn_files/*/state/ocdbt.process_{ODD}/d/*"):
            file.write_bytes(b"")
    ft.check_processes()  # the files are torn
    return ft.restore(FOLDER / "torn_files", tree)


@differing("(`ft.load_weights`)", "config", "max_seq=8", "max_seq=16")
def loaded_with_another_config() -> Any:
    return ft.load_weights(LLAMA, ft.P(), MESH, max_seq=differs(8, 16))


@differing("cannot be restored", "step", "process 0: 2", "process {odd}: 3")
def another_step_restored() -> Any:
    return ft.Checkpoints(FOLDER / "run").restore(model(), differs(2, 3))


@case
def a_model_with_functions() -> None:
    """A function has another address in each process."""
    functions = {"attention": jax.nn.dot_product_attention, "remat": lambda *_, **__: True}
    ft.load_weights(LLAMA, ft.P(), MESH, **functions)
    # What no family computes, such as an attention of one's own, is not published.
    m = ft.load_weights(LLAMA, ft.P(), MESH, remat=functions["remat"])
    ft.save_weights(FOLDER / "functions", m)


@differing("the model cannot be saved to ", "process {odd} differs", "merged0")
def other_model_published() -> Any:
    m = ft.load_weights(LLAMA, ft.P(), MESH)
    return ft.save_weights(FOLDER / f"merged{differs(0, 1)}", m)


@differing("(`ft.save_weights`)", "config", "max_seq=8", "max_seq=16")
def published_with_another_config() -> Any:
    m = ft.load_weights(LLAMA, ft.P(), MESH)
    m = dataclasses.replace(m, max_seq=differs(8, 16))
    return ft.save_weights(FOLDER / "config_weights", m)


@differing("model", "norm.scale: f32[32]\n", "norm.scale: f32[32/data]")
def published_otherwise() -> Any:
    """In one process an array is sharded otherwise, which JAX does not notice."""
    m = ft.load_weights(LLAMA, ft.P(), MESH)
    sharding = NamedSharding(MESH, differs(ft.P(None), ft.P("data")))
    scale = jax.make_array_from_callback((32,), sharding, lambda i: np.ones(32, np.float32)[i])
    return ft.save_weights(FOLDER / "plan_weights", ft.select(m).at("norm.scale").set(scale))


@case
def one_comes_late() -> Any:
    """What the first process logs while it waits, and when the last one has come."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("functree").addHandler(handler)
    time.sleep(differs(0, 1))
    with mock.patch.object(exchange, "LONG", 0.5):  # usually a minute
        ft.check_processes(step=1)
    logging.getLogger("functree").removeHandler(handler)
    return heard if RANK == 0 else None


def told(run: Callable[[], Any]) -> dict[str, Any]:
    """What a case returned, or what it raised."""
    start = time.monotonic()
    try:
        result: dict[str, Any] = {"returned": run()}
        json.dumps(result)
    except (
        ft.FunctreeError,
        ValueError,
    ) as error:  # an error of another class ends the process, and fails the test
        result = {"raised": type(error).__name__, "text": str(error)}
    return {**result, "seconds": time.monotonic() - start, "alike": run.__name__ in ALIKE}


if __name__ == "__main__":
    # One process alone has only the numbers that several are compared with.
    cases = ALIKE if COUNT == 1 else CASES
    results = {name: told(run) for name, run in cases.items()}
    print("RESULTS", json.dumps(results))
