"""Programs for TPUs and GPUs that this machine does not have, from their own compilers.

pytest collects this file only if the extras `functree[tpu,cuda]` are installed (see `conftest.py`).
"""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float, Int

import functree as ft
from functree.calls.stages import SMALLER
from functree.compiled.flops import count_flops
from functree.devices.targets import Target, target_devices
from functree.nn.attention.attend import attend
from tests.lib.checks import raises
from tests.lib.covering import whole_tables
from tests.lib.training import (
    BATCH,
    EMBED,
    LAYERS,
    LAYOUTS,
    SEQ,
    TENSOR,
    VOCAB,
    gradient,
    make,
    training_step,
)
from tests.libraries.name_audit import CELLS, audit

# Without a GPU, JAX cannot say what the installed cuDNN takes; a test of its own is about the
# warning.
pytestmark = pytest.mark.filterwarnings(
    'ignore:attention. the kernel "cudnn":functree.FunctreeWarning'
)

TARGETS = {"tpu": "tpu:v5e:2x4", "cuda": "cuda:h100:8"}
BACKENDS = {"tpu": "tpu v5e", "cuda": "cuda h100"}
RESIDUAL = BATCH // 2 * SEQ * EMBED * 4  # the bytes of the residual stream on one device
KEY = jax.random.key(0)
IN_THE_LOSS = 3 * (BATCH // 2 * SEQ * 4)


def mesh_of(platform: str) -> Any:
    return ft.make_mesh(data=2, model=4, target=TARGETS[platform])


@pytest.mark.parametrize(
    "name",
    ["tpu:v4:2x2x2", "tpu:v5e:2x4", "tpu:v5e:1x1", "tpu:v5p:2x2x1", "tpu:v6e:4x4",
     "tpu:tpu7x:2x2x1", "cuda:a100:4", "cuda:h200:16", "cuda:b200:1"],
)  # fmt: skip
def test_a_target_has_as_many_devices_as_its_name_says(name: str) -> None:
    """What is compared with the mesh before the compiler is asked is what the compiler has."""
    target = Target.read(name)
    assert len(target_devices(target)) == target.size


@pytest.mark.parametrize("unrolled", [False, True], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("remat", [None, "full"])
@pytest.mark.parametrize("platform", TARGETS)
def test_tensor_parallelism(platform: str, remat: str | None, unrolled: bool) -> None:
    compiled, plan = gradient("TP", remat, unrolled, mesh_of(platform))
    ledger = compiled.ledger()
    # The partial results of query, key and value, and of gate and up, are summed before they are
    # moved.
    forward, again, backward = 2, 1 if remat else 0, 2
    assert ledger.totals() == {
        ("all-reduce", ("model",)): ((forward + again + backward) * LAYERS + 2) * RESIDUAL
        + IN_THE_LOSS,
        ("all-reduce", ("data",)): plan.bytes_per_device + 4,  # the gradients, and the loss
    }
    runs: Counter[tuple[str | None, tuple[str, ...]]] = Counter()
    for one in ledger.collectives:
        if one.mesh_axes == ("model",) and one.bytes == RESIDUAL:
            names = tuple(sorted(str(path).split(".")[-1] for path in one.paths))
            runs[one.phase, names] += one.count or 0
    recompute = {("recompute", ("out",)): LAYERS} if remat else {}
    assert runs == {
        ("forward", ("out",)): LAYERS,
        ("forward", ("down",)): LAYERS,
        **recompute,
        ("backward", ("key", "query", "value")): LAYERS,
        ("backward", ("gate", "up")): LAYERS,
        ("forward", ("weight",)): 1,
        ("backward", ("weight",)): 1,
    }


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("platform", TARGETS)
def test_sequence_parallelism(platform: str, explicit: bool) -> None:
    """Where tensor parallelism has an all-reduce, there are a reduce-scatter and an all-gather, and
    no weight moves."""
    rules = ft.AxisRules({"batch": "data", **TENSOR, "seq": "model", ...: None})
    mesh = ft.make_mesh(data=2, model=4, target=TARGETS[platform], explicit=explicit)

    @ft.jit(in_shardings=(rules, ft.P("data")), out_shardings=(None, rules), mesh=mesh, rules=rules)
    def gradient(model: Any, tokens: Any) -> Any:
        return ft.value_and_grad(ft.nn.cross_entropy)(model, tokens[:, :-1], tokens[:, 1:])

    model = ft.abstract(make)(jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((BATCH, SEQ + 1), "int32")
    ledger = gradient.lower(model, tokens).compile().ledger()
    runs: Counter[tuple[str, str | None, tuple[str, ...]]] = Counter()
    for one in ledger.collectives:
        names = tuple(sorted(str(path).split(".")[-1] for path in one.paths))
        if one.mesh_axes == ("model",) and "weight" not in names and names:
            runs[one.kind, one.phase, names] += one.count or 0
    blocks = {
        ("reduce-scatter", "forward", ("out",)),
        ("reduce-scatter", "forward", ("down",)),
        ("reduce-scatter", "backward", ("key", "query", "value")),
        ("reduce-scatter", "backward", ("gate", "up")),
        ("all-gather", "forward", ("key", "query", "value")),
        ("all-gather", "forward", ("gate", "up")),
        ("all-gather", "backward", ("out",)),
        ("all-gather", "backward", ("down",)),
    }
    assert runs == dict.fromkeys(blocks, LAYERS)
    # Outside of the blocks: the embedding, what the head takes, and the sums of the loss.
    most = (8 * LAYERS + 4) * RESIDUAL + IN_THE_LOSS
    assert sum(size for (_, axes), size in ledger.totals().items() if axes == ("model",)) <= most


@pytest.mark.parametrize("remat", [None, "full"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("platform", TARGETS)
def test_a_training_step(platform: str, name: str, remat: str | None) -> None:
    compiled, plan = training_step(name, remat, mesh_of(platform))
    ledger = compiled.ledger()
    assert ledger.backend == BACKENDS[platform] and ledger.sizes == {"data": 2, "model": 4}
    assert ledger.attributed >= 0.995 and not ledger.not_understood
    assert all(one.count is not None and one.mesh_axes is not None for one in ledger.collectives)
    assert all(one.paths or one.source for one in ledger.collectives)
    assert all(one.phase for one in ledger.collectives if not one.paths)
    lost = [one for one in ledger.collectives if not one.paths]
    assert sum(one.total for one in lost) <= IN_THE_LOSS + 4  # what the loss itself sums up
    state = {
        str(path)[3:]: size for path, size in ledger.memory.arguments.items() if path[0] == "ts"
    }
    assert state == {str(row.path): row.bytes_per_device for row in plan.rows}
    # TPUs pad small arrays to tiles.
    given = sum(ledger.memory.arguments.values())
    exact = compiled.memory_analysis().argument_size_in_bytes
    assert exact == given if platform == "cuda" else given <= exact
    assert ledger.memory.peak > given
    if name != "TP":
        weights = [str(one.path) for one in ledger.collectives if one.kind == "all-gather"]
        gathered = {path.removeprefix("model.blocks.layer.") for path in weights}
        assert {"mlp.gate", "mlp.up", "mlp.down", "attn.query", "attn.out"} <= gathered
    if name == "FSDP":  # on CPUs the gradients are reduced everywhere
        scattered = [one for one in ledger.collectives if one.kind == "reduce-scatter"]
        assert scattered and {str(one.path)[:5] for one in scattered} == {"model"}


@pytest.mark.parametrize("remat", [None, "full"])
@pytest.mark.parametrize("platform", TARGETS)
def test_fully_sharded_scanned_and_unrolled(platform: str, remat: str | None) -> None:
    """Each gradient is reduced once; each matrix is gathered once forward, and again backward if it
    is not kept."""
    _, plan = gradient("FSDP", remat, False, mesh_of(platform))
    matrices = sum(row.bytes_global for row in plan.rows if row.path[-1] != "scale")
    layers = sum(
        row.bytes_global for row in plan.rows if row.path[0] == "blocks" and row.path[-1] != "scale"
    )
    for unrolled in (False, True):
        ledger = gradient("FSDP", remat, unrolled, mesh_of(platform))[0].ledger()
        sizes: Counter[str] = Counter()
        for one in ledger.collectives:
            if (
                one.path is not None and one.path[-1] != "scale"
            ):  # scales are too small to be worth a gather to a TPU
                sizes[one.kind] += one.total * (8 if one.kind == "reduce-scatter" else 1)
        assert sizes["reduce-scatter"] + sizes["all-reduce"] == matrices
        if platform == "cuda":  # a TPU gathers some in bfloat16, and passes others around a ring
            again = 0 if unrolled and remat is None else layers
            assert sizes["all-gather"] == matrices + again


@pytest.mark.parametrize("unrolled", [False, True], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("remat", [None, "full"])
@pytest.mark.parametrize("platform", TARGETS)
def test_flops_are_those_of_closed_forms(platform: str, remat: str | None, unrolled: bool) -> None:
    compiled, _ = gradient("TP", remat, unrolled, mesh_of(platform))
    rows, heads, head_dim, hidden = BATCH // 2 * SEQ, 2, 8, 128 // 4
    # Queries and the output of all heads; keys and values of one head; gate, up and down.
    block = 2 * rows * EMBED * (2 * heads * head_dim + 2 * head_dim + 3 * hidden)
    down, head = 2 * rows * EMBED * hidden, 2 * rows * EMBED * VOCAB // 4
    if platform == "tpu":  # the kernel computes a whole tile, and the products of before again
        product, forward, backward = 2 * BATCH // 2 * heads * 128 * 128 * head_dim, 2, 4 + 3
    else:
        product, forward, backward = 2 * rows * heads * SEQ * head_dim, 2, 4
    layer = 3 * block + (forward + backward) * product
    if remat:
        layer += block - down + forward * product
    assert count_flops(compiled.as_text()) == (LAYERS * layer + 3 * head, ())


def squared(w: Any, x: Float[Array, "batch embed"]) -> Any:
    return ((x @ w) ** 2).sum()


def test_an_exploration_for_tpus() -> None:
    arrays = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((512, 1024), (64, 512))]
    layouts = {
        "data": (ft.P(), ft.P("data")),
        "tensor": (ft.P("model"), ft.P("data", "model")),
    }
    ranking = ft.explore(
        squared, arrays, meshes={"data": 2, "model": 4}, layouts=layouts, target="tpu:v6e:2x4"
    )
    tensor = next(row for row in ranking if row.layout_name == "tensor")
    assert tensor.flops == 2 * 32 * 128 * 1024
    assert tensor.compute_seconds == tensor.flops / (920e12 * ranking.hardware.efficiency)
    # 32 by 1,024 partial results in bfloat16, summed over four chips.
    assert tensor.wire_bytes["model"] == 2 * 3 * 32 * 1024 * 2 // 4
    # JAX makes a square of four chips, in which each has a link in two dimensions.
    assert tensor.wire_seconds == pytest.approx(tensor.wire_bytes["model"] / (2 * 9e10), rel=0.01)
    assert str(ranking).startswith("ranked for tpu:v6e:2x4 (TPU v6e)\n")
    assert "compiled for CPU" not in str(ranking)


def test_what_the_compiler_of_a_target_refuses_is_a_problem_of_its_row() -> None:
    x = jax.ShapeDtypeStruct((2**18,), "float32")
    layouts = {"data": (ft.P("data"), ft.P())}

    def outer(a: Any, b: Any) -> Any:
        return a[:, None] * b[None]

    row = ft.explore(outer, (x, x), meshes=8, layouts=layouts, target="tpu:v5e:2x4")[0]
    assert row.score is None and row.flops is None
    assert re.match(
        r"outer does not fit in the memory of a tpu v5e: .* \([\d.]+G\) exceeds available HBM \(15.75G\)",
        row.problems[0].why,
    )
    assert row.problems[1].path == ft.Path("b")


@pytest.mark.parametrize("platform", TARGETS)
def test_whole_matrices_are_exchanged_once_in_and_once_out(platform: str) -> None:
    """Eight layers, one for each device: a matrix of 64 × 128, without rematerialization."""
    mesh = mesh_of(platform)
    make_layer = lambda key: ft.nn.Linear(64, 128, use_bias=False, key=key)  # noqa: E731
    model = ft.abstract(lambda key: ft.stack(make_layer, 8, key))(jax.random.key(0))
    layout = ft.AxisRules({"embed": "data", "hidden": "model", "layers": None})
    dimensions = ft.nn.matrix_dimensions(model)
    tx = ft.muon(0.1, ns_steps=1, muon_weight_dimension_numbers=dimensions)
    of_state = ft.plan_optimizer(tx, model, layout, mesh)
    update = ft.jit(
        lambda gradients, state, model: tx.update(gradients, state, model),
        in_shardings=(layout, of_state, layout),
        out_shardings=(layout, of_state),
        rules=layout,
        mesh=mesh,
    )
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        lowered = update.lower(model, jax.eval_shape(tx.init, model), model)
    ledger = lowered.compile().ledger()
    moved = [(one.kind, one.mesh_axes, one.bytes) for one in ledger.collectives]
    assert moved == [("all-to-all", ("data", "model"), 64 * 128 * 4)] * 2
    assert not [text for text in ledger.warnings if "remat" in text.lower()]


AUDITED = [
    ("dqn_gradient_only", "both"), ("autoencoder", "tp"), ("lists_of_moments", "fsdp"),
    ("sam", "both"), ("maml", "fsdp"), ("lora_merged", "fsdp"), ("quantized", "both"),
    ("shampoo", "tp"), ("accumulated_gradient", "fsdp"), ("experts", "fsdp"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # those of the libraries
def test_no_name_is_wrong() -> None:
    """In programs of others, whose tables know nothing of the compiler."""
    found = audit(CELLS if whole_tables() else AUDITED, TARGETS["tpu"])
    assert not found.wrong, "\n".join(found.wrong)
    assert not found.misread, "\n".join(found.misread)
    assert found.missing <= 0.25, found


def printed(x: Any) -> Any:
    jax.debug.print("{}", x.sum())
    return jax.lax.while_loop(
        lambda s: s[0] > 0, lambda s: (s[0] - 2, jnp.sin(s[1] - s[1].mean())), (9, x)
    )[1]


def test_prints_are_no_collectives_and_loops_count_down() -> None:
    x = jax.ShapeDtypeStruct((64, 128), "float32")
    ledger = ft.ledger(printed, x, in_shardings=ft.P("data"), mesh=mesh_of("tpu"))
    assert not ledger.not_understood
    assert {(one.kind, one.count) for one in ledger.collectives} == {
        ("all-reduce", 1),
        ("all-reduce", 5),
    }


def test_devices_of_a_target_are_equal() -> None:
    assert mesh_of("tpu") == mesh_of("tpu") and mesh_of("cuda") == mesh_of("cuda") != mesh_of("tpu")
    # A chip with two cores is one device, and a mesh axis may be a part of an axis of the torus.
    assert ft.make_mesh(data=16, model=4, target="tpu:v4:4x4x4").size == 64
    assert ft.make_mesh(data=2, model=8, target="tpu:v6e:4x4").size == 16


RULES = ft.AxisRules({"batch": "data", "hidden": "model", ...: None})
MLP = ft.nn.MLP(64, 128, key=jax.random.key(0))
X = jnp.ones((16, 32, 64))
ONLY = (
    "has compile-only devices (",
    "): use `.lower(...).compile()` or `ft.ledger`; to run programs, make the mesh without `target=`",
)


def apply(model: Any, x: Any) -> Any:
    return model(x).mean()


def scaled(scale: Float[Array, "batch"], x: Float[Array, "batch"]) -> Any:
    return scale * x


CALLS: dict[str, Any] = {
    "a call": lambda mesh: ft.jit(
        apply, in_shardings=(RULES, ft.P("data")), mesh=mesh, rules=RULES
    )(MLP, X),
    "a compiled call": lambda mesh: (
        ft.jit(apply, rules=RULES, mesh=mesh).lower(MLP, X).compile()(MLP, X)
    ),
    "shard": lambda mesh: ft.shard(MLP, RULES, mesh),
    "init": lambda mesh: ft.init(lambda key: ft.nn.MLP(64, 128, key=key), RULES, mesh)(
        jax.random.key(0)
    ),
    "shard_map": lambda mesh: ft.shard_map(
        jnp.sin, mesh=mesh, in_specs=ft.P("data"), out_specs=ft.P("data")
    )(X),
    "same as unsharded": lambda mesh: ft.testing.assert_same_as_unsharded(
        apply, (MLP, X), (RULES, ft.P("data")), mesh
    ),
}


@pytest.mark.filterwarnings("ignore::functree.FunctreeWarning")
@pytest.mark.parametrize("platform", TARGETS)
@pytest.mark.parametrize("call", CALLS)
def test_nothing_runs_there(platform: str, call: str) -> None:
    with raises(*ONLY, error=ft.ShardingError):
        CALLS[call](mesh_of(platform))


@pytest.mark.parametrize("platform", TARGETS)
def test_what_works_there(platform: str) -> None:
    mesh = mesh_of(platform)
    model = ft.abstract(lambda key: ft.nn.MLP(64, 128, key=key), RULES, mesh)(jax.random.key(0))
    assert model.up.sharding.spec == ft.P(None, "model") and model.up.sharding.mesh == mesh
    assert ft.plan(model, RULES, mesh).bytes_per_device == 3 * 64 * 128 * 4 // 4
    fun = ft.jit(apply, in_shardings=(RULES, ft.P("data")), mesh=mesh, rules=RULES)
    for args in ((model, jax.ShapeDtypeStruct(X.shape, X.dtype)), (MLP, X)):
        assert fun.lower(*args).compile().ledger().collectives[0].path == ft.Path("down")
    # A weak type stays weak: it decides the dtype of the result.
    weak, x = jnp.broadcast_to(jnp.asarray(2.0), (8,)), jnp.ones(8, "bfloat16")
    for options in ({"rules": RULES}, {"in_shardings": ft.P("data")}):
        for on in (mesh, ft.make_mesh(data=2, model=4, target=TARGETS[platform], explicit=True)):
            assert ft.jit(scaled, mesh=on, **options).lower(weak, x).out_info.dtype == "bfloat16"
    closed = ft.jit(
        lambda state, x: {"w": state["w"] + x.mean()},
        donate="state",
        in_shardings=(ft.P("data"), ft.P()),
        mesh=mesh,
    )
    ft.testing.assert_closed(closed, ({"w": jnp.ones((8, 8))}, jnp.ones(3)))
    with raises("has collectives that are not allowed", error=AssertionError):
        ft.testing.assert_collectives(fun.lower(MLP, X).compile(), allow={"all-gather"})


@pytest.mark.parametrize("platform", TARGETS)
def test_what_does_not_fit_is_refused(platform: str) -> None:
    shapes = {"big": (65536, 131072), "wide": (131072, 65536)}
    arrays = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}

    @ft.jit(
        in_shardings=({"big": ft.P("data"), "wide": ft.P()},),
        out_shardings=ft.P(),
        mesh=mesh_of(platform),
    )
    def step(model: Any) -> Any:
        return jnp.sin(model["big"]) @ model["wide"], model["big"].T @ model["big"]

    lowered = step.lower(arrays)
    with pytest.raises(ft.FunctreeError) as caught:
        lowered.compile()
    text = str(caught.value)
    assert text.startswith(f"step does not fit in the memory of a {BACKENDS[platform]}: ")
    assert re.search(r"exceeds available HBM \(15\.75G\)|but the device has 79\.1 GiB\n", text)
    assert "The arguments take 48 GiB on each device; the largest:" in text
    assert (
        "model.wide   f32[131072, 65536]\n      takes 32 GiB on each device, P(None, None) on (data=2, model=4)"
        in text
    )
    assert (
        "model.big   f32[65536, 131072]\n      takes 16 GiB on each device, P('data', None)" in text
    )
    assert f"Try: {SMALLER}" in " ".join(text.split())


def test_arguments_in_the_memory_of_a_host_are_not_counted() -> None:
    big = jax.ShapeDtypeStruct((49152, 49152), "float32")
    step = ft.jit(
        lambda here, far: (here * 2, jax.device_put(far, jax.memory.Space.Device)[0]),
        in_shardings=(ft.P(), ft.on_host(ft.P())),
        out_shardings=ft.P(),
        mesh=mesh_of("tpu"),
    )
    with raises("The arguments take 9 GiB on each device", error=ft.FunctreeError) as caught:
        step.lower(big, big).compile()
    assert "far" not in str(caught.value)


SCRIPT = """
import functree as ft, jax
mesh = ft.make_mesh(data=8, target="tpu:v5e:2x4")
x = jax.ShapeDtypeStruct((64, 64), "float32")
print(ft.ledger(lambda x: x.sum(0), x, in_shardings=ft.P("data"), mesh=mesh).collectives[0].kind)
"""


def test_several_processes_at_once() -> None:
    run = [sys.executable, "-c", SCRIPT]
    pipe = subprocess.PIPE
    for process in [subprocess.Popen(run, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0 and out.strip() == "all-reduce", err


def test_an_involuntary_rematerialization_is_heard(capfd: pytest.CaptureFixture[str]) -> None:
    mesh = ft.make_mesh(x=4, y=2, target="tpu:v5e:2x4")
    table = jax.ShapeDtypeStruct((16, 16), "float32")
    ledger = ft.ledger(
        lambda table: ft.constrain(table, ft.P(None, "y")), table, in_shardings=ft.P("x"), mesh=mesh
    )
    assert ledger.warnings_known and "Involuntary full rematerialization" in ledger.warnings[0]
    assert (
        not capfd.readouterr().err
    )  # this compiler writes to a file, and what is of no use is not passed on


def test_will_it_fit() -> None:
    script = Path(__file__).parents[2] / "examples" / "will_it_fit.py"
    options = "--model 8b --target tpu:v5e:2x4 cuda:h100:8 --seq 256"
    command = [sys.executable, str(script), *options.split()]
    environment = {**os.environ, "PYTHONPATH": str(script.parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "train_step does not fit in the memory of a tpu v5e: " in done.stdout
    assert (
        "It fits." in done.stdout and "all-reduce" in done.stdout and "first moments" in done.stdout
    )
    assert re.search(r"^8b +tpu:v5e:2x4 +data=1,model=8 +no ", done.stdout, re.M)
    assert re.search(r"^8b +cuda:h100:8 +data=1,model=8 +yes ", done.stdout, re.M)


@pytest.mark.parametrize(
    "kv_heads", [8, 2], ids=["as many key heads", "fewer key heads than devices"]
)
def test_attention_of_a_long_sequence_holds_nothing(kv_heads: int) -> None:
    """Batch 4, sequence 8,192, 8 heads of 128: the kernel for TPUs, forward, and twice backward."""
    over = "model" if kv_heads == 8 else None
    rules = ft.AxisRules({"batch": "data", "heads": "model", "kv_heads": over, ...: None})
    specs = [ft.P("data", None, "model"), *[ft.P("data", None, over)] * 2]

    @ft.jit(in_shardings=specs, out_shardings=tuple(specs), mesh=mesh_of("tpu"), rules=rules)
    def gradient(query: Any, key: Any, value: Any) -> Any:
        return jax.grad(lambda *given: attend(*given).astype(jnp.float32).sum(), (0, 1, 2))(
            query, key, value
        )

    arrays = [
        jax.ShapeDtypeStruct((4, 8192, heads, 128), jnp.bfloat16)
        for heads in (8, kv_heads, kv_heads)
    ]
    compiled = gradient.lower(*arrays).compile()
    ledger = compiled.ledger()
    assert ledger.memory.temporaries < 2**20 and compiled.as_text().count('"tpu_custom_call"') == 3
    # Each device has gradients of all key and value heads by its own query heads.
    moved = {} if over else {("all-reduce", ("model",)): 2 * 4 // 2 * 8192 * kv_heads * 128 * 2}
    assert ledger.totals() == moved


def test_attention_of_a_sequence_in_parts() -> None:
    """131,072 tokens over 8 chips, by the kernel: heads are exchanged for sequence once in and once
    out, and nothing else is held or moved."""
    mesh = ft.make_mesh(context=8, target=TARGETS["tpu"])
    sharding = jax.NamedSharding(mesh, ft.P(None, "context"))
    seq, size = 2**17, 128
    arrays = [
        jax.ShapeDtypeStruct((1, seq, heads, size), jnp.bfloat16, sharding=sharding)
        for heads in (16, 4, 4, 16)
    ]

    def backward(query: Any, key: Any, value: Any, given: Any) -> Any:
        fun = lambda *arrays: attend(*arrays, context="heads")  # noqa: E731
        return jax.vjp(fun, query, key, value)[1](given)

    rules = ft.AxisRules({"seq": "context", ...: None})
    ledger = ft.jit(backward, mesh=mesh, rules=rules).lower(*arrays).compile().ledger()
    # Queries, and key and value heads repeated to 8; backward the cotangent too. The results are
    # not asked for.
    heads = 16 + 8 + 8 + 16 + 16 + 8 + 8
    moved = heads * seq // 8 * size * 2
    assert ledger.totals() == {("all-to-all", ("context",)): moved}
    assert moved <= 330 * 2**20
    assert ledger.memory.temporaries <= 450 * 2**20
    assert not ledger.warnings


def test_a_pipeline_of_four_stages() -> None:
    """8 blocks, a batch of 32 × 1,024 in 8 pieces, the backward pass with blocks computed again."""
    config = ft.nn.TransformerConfig(64, 512, 8, 8, 4, 64, 512)
    rules = ft.AxisRules({"batch": "data", "layers": "pipe", ...: None})
    mesh = ft.make_mesh(pipe=4, data=2, target=TARGETS["tpu"])

    def make() -> Any:
        return ft.stack(lambda key: ft.nn.Block.create(config, key=key), 8, jax.random.key(0))

    def loss(blocks: Any, x: Float[Array, "batch seq embed"]) -> Any:
        return (blocks.scan(x, remat="full", microbatches=8) ** 2).sum()

    blocks = ft.abstract(make, rules, mesh)()
    x = jax.ShapeDtypeStruct((32, 1024, 512), jnp.float32)
    step = ft.jit(ft.value_and_grad(loss), mesh=mesh, rules=rules)
    ledger = step.lower(blocks, x).compile().ledger()
    piece, ticks = 32 // 2 // 8 * 1024 * 512 * 4, 8 + 3
    assert ledger.totals() == {
        ("collective-permute", ("pipe",)): 2 * ticks * piece,
        ("all-reduce", ("pipe",)): 8 * piece,
        # The gradients of a stage, once, and the loss.
        ("all-reduce", ("data",)): ft.plan(blocks, rules, mesh).bytes_per_device + 4,
    }
    assert ledger.memory.temporaries <= 170 * 2**20
    # A machine that is busy hears of a slow compilation too.
    assert not any("rematerialization" in warning for warning in ledger.warnings)


def test_attention_on_a_gpu_that_is_not_there_says_what_it_is_computed_by() -> None:
    arrays = [jax.ShapeDtypeStruct((8, 64, 8, 128), jnp.bfloat16)] * 3
    fun = ft.jit(attend, mesh=mesh_of("cuda"), in_shardings=ft.P("data"))
    with pytest.warns(ft.FunctreeWarning, match='the kernel "cudnn" does not support this call'):
        fun.lower(*arrays)


def test_experts_by_exchange() -> None:
    """Nothing is computed beyond the capacity, and hardly anything is held besides."""
    mesh = ft.make_mesh(data=2, expert=4, target="tpu:v5e:2x4")
    rules = ft.AxisRules({"batch": ("data", "expert"), "experts": "expert", ...: None})

    @ft.abstract
    def experts(key: Any) -> ft.nn.MoE:
        options: dict[str, Any] = {"capacity": 1.25, "dispatch": "exchange"}
        return ft.nn.MoE(1024, 512, 16, 4, **options, key=key, param_dtype=jnp.bfloat16)

    @ft.jit(mesh=mesh, rules=rules)
    def gradient(moe: ft.nn.MoE, x: Float[Array, "batch seq embed"]) -> Any:
        return jax.grad(lambda moe, x: moe(x)[0].astype(jnp.float32).sum(), (0, 1))(moe, x)

    x = jax.ShapeDtypeStruct((8, 1024, 1024), jnp.bfloat16)
    compiled = gradient.lower(experts(KEY), x).compile()
    # Three products, and two of each size for its gradient, of four rows of each token.
    ideal = 3 * 3 * 2 * (4 * 8 * 1024 // 8) * 1024 * 512
    cost: Any = compiled.cost_analysis()
    assert 1.25 * ideal <= cost["flops"] <= 1.05 * 1.25 * ideal
    ledger = compiled.ledger()
    assert ledger.memory.temporaries <= 8 * 2**20 and not ledger.warnings
    # There and back, forward and backward: rows of 16 experts with room for 320 tokens each.
    assert ledger.totals()["all-to-all", ("expert",)] == 4 * 16 * 320 * 1024 * 2


def int8(x: Any, weight: Any, dimension_numbers: Any, **options: Any) -> Any:
    """A product of int8, as in `docs/experts.md`."""

    def quantized(array: Any, dims: Any) -> Any:
        scale = jnp.max(jnp.abs(array), axis=dims, keepdims=True) / 127 + 1e-9
        return jnp.round(array / scale).astype(jnp.int8), scale

    (q, q_scale), (w, w_scale) = map(quantized, (x, weight), dimension_numbers[0])
    options["preferred_element_type"] = jnp.int32
    product = jax.lax.dot_general(q, w, dimension_numbers, **options).astype(x.dtype)
    return product * jax.lax.dot_general(q_scale, w_scale, dimension_numbers)


def test_a_quantizing_dot_general_multiplies_int8() -> None:
    mesh = ft.make_mesh(data=2, model=4, target="tpu:v5e:2x4")
    rules = ft.AxisRules({"batch": "data", "hidden": "model", "experts": "model", ...: None})

    @ft.abstract
    def layers(key: Any) -> Any:
        mlp = ft.nn.MLP(512, 1024, key=key, dot_general=int8)
        return mlp, ft.nn.MoE(512, 256, 8, 2, capacity=1.0, key=key, dot_general=int8)

    @ft.jit(mesh=mesh, rules=rules)
    def run(layers: Any, x: Float[Array, "batch seq embed"]) -> Any:
        return layers[1](layers[0](x))[0]

    x = jax.ShapeDtypeStruct((8, 256, 512), jnp.bfloat16)
    text = run.lower(layers(KEY), x).compile().as_text()
    # TPUs write products as convolutions: three in each layer, beside that of the router.
    operands = re.findall(r" convolution\((%[\w.-]+), (%[\w.-]+)\)", text)
    narrow = [pair for pair in operands if all(f"{one} = s8[" in text for one in pair)]
    assert len(narrow) == 6 and len(operands) == 7


# Micro-batches


class Matrices(eqx.Module):
    """Layers one after another."""

    weights: list[Float[Array, "embed hidden"]]

    def __call__(self, x: Array) -> Array:
        for weight in self.weights:
            x = jnp.tanh(x @ weight)
        return x


def in_micro_batches(
    loss: Any, layout: Any, over: str | None, mesh: Any, model: Any, *batch: Any
) -> Any:
    step = ft.accumulate(ft.value_and_grad(loss), 4, over=over)
    shardings = (layout, *[ft.P("data")] * len(batch))
    return ft.jit(step, rules=layout, mesh=mesh, in_shardings=shardings).lower(model, *batch)


@pytest.mark.parametrize("over", [None, "data"])
def test_parameters_are_gathered_once_for_all_micro_batches(over: str | None) -> None:
    """Eight matrices of 4 MiB, fully sharded over 8 devices; the TPU gathers them in bfloat16."""
    model = ft.abstract(lambda: Matrices([jnp.ones((1024, 1024)) for _ in range(8)]))()
    x = jax.ShapeDtypeStruct((4096, 1024), jnp.float32)

    def loss(model: Any, x: Float[Array, "batch embed"], y: Float[Array, "batch embed"]) -> Array:
        return jnp.mean((model(x) - y) ** 2)

    mesh = ft.make_mesh(data=8, target=TARGETS["tpu"])
    layout = ft.AxisRules({"batch": "data", ...: None}) | ft.FSDP("data", axes="embed")
    lowered = in_micro_batches(loss, layout, over, mesh, model, x, x)
    ledger = lowered.compile().ledger()
    times = 4 if over is None else 1
    assert ledger.totals() == {
        ("all-gather", ("data",)): times * 16 * 2**20,
        ("reduce-scatter", ("data",)): times * 4 * 2**20,
        ("all-reduce", ("data",)): 4 * times,  # the loss
    }
    assert not ledger.warnings
    # Also what the compiler has made of the weights and the sums: each has its parameter.
    named = Counter((one.kind, one.phase, str(one.path)) for one in ledger.collectives)
    for i in range(8):
        assert named["all-gather", "forward", f"weights.{i}"] >= 1
        assert named["reduce-scatter", "backward", f"weights.{i}"] == 1


@pytest.mark.parametrize("name", ["DP", "FSDP+TP"])
def test_a_stack_over_micro_batches(name: str) -> None:
    """No gradient is summed in a loop: with few heads, which a TPU scatters only with its blocks in
    front, too."""
    rules = LAYOUTS[name] if name in LAYOUTS else ft.AxisRules({"batch": "data", ...: None})
    model = ft.abstract(make)(jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((4 * BATCH, SEQ + 1), "int32")

    def loss(model: Any, tokens: Int[Array, "batch seq"]) -> Array:
        return ft.nn.cross_entropy(model, tokens[:, :-1], tokens[:, 1:])

    lowered = in_micro_batches(loss, rules, "data", mesh_of("tpu"), model, tokens)
    moved = [one for one in lowered.compile().ledger().collectives if one.mesh_axes == ("data",)]
    names = Counter(str(one.path) for one in moved)
    # Its sum, and before the loop what is gathered of it.
    times = 1 if name == "DP" else 2
    for row in ft.plan(model, rules, {"data": 2, "model": 4}).rows:
        assert names[str(row.path)] == times, row.path
    often = [one for one in moved if one.path is not None and one.count != 1]
    assert not often
