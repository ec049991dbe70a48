"""Exported functions: equal results in a process that has no functree, shardings and open sizes;
what is refused."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array, Float, Int

import functree as ft
from tests.lib.checks import raises
from tests.lib.meshes import MESH, mesh_of

RULES = ft.AxisRules(
    {"batch": "data", "hidden": "model", "heads": "model", "kv_heads": "model", ...: None}
)
CONFIG = ft.nn.TransformerConfig(64, 16, layers=2, heads=4, kv_heads=4, head_dim=4, hidden=32)

# A process without functree: it has only the folder of site-packages in which functree is not.
ALONE = """
import sys
sys.modules["functree"] = None  # an import of it fails
import jax, jax.export, numpy as np
exported = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
given = np.load(sys.argv[2])
kinds = (getattr(jax.sharding.AxisType, sys.argv[4]),) * 2
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"), axis_types=kinds)
arrays = [given[str(i)] for i in range(len(given))]
if exported.nr_devices > 1:
    arrays = [x if s is None else jax.device_put(x, s) for x, s in zip(arrays, exported.in_shardings_jax(mesh))]
found = jax.jit(exported.call)(*arrays)
np.savez(sys.argv[3], *map(np.asarray, found))
try:
    import functree
except ImportError:
    print([len(x.sharding.device_set) for x in found])
"""


def alone(
    exported: ft.Exported, arrays: list[Any], folder: Path, kind: str = "Auto"
) -> tuple[list[np.ndarray], str]:
    """The result of an exported function in a process without functree, and what it prints."""
    (folder / "f.bin").write_bytes(exported.serialize())
    np.savez(folder / "in.npz", **{str(i): np.asarray(x) for i, x in enumerate(arrays)})
    files = [folder / name for name in ("f.bin", "in.npz", "out.npz")]
    command = [sys.executable, "-c", ALONE, *files, kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=folder)
    assert done.returncode == 0, done.stderr
    out = np.load(folder / "out.npz")
    return [out[name] for name in out.files], done.stdout


def loss(model: Any, tokens: Any) -> Any:
    logits = model(tokens[:, :-1])
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1))


@pytest.mark.slow
@pytest.mark.parametrize("explicit", [False, True])
def test_a_training_step_runs_without_functree(explicit: bool, tmp_path: Path) -> None:
    """A sharded step of a transformer with its optimizer: the same numbers, on as many devices."""
    mesh, tx = mesh_of(explicit), optax.sgd(0.1)

    @ft.jit(rules=RULES, mesh=mesh, donate="ts")
    def step(ts: Any, tokens: Int[Array, "batch seq"]) -> Any:
        value, grads = ft.value_and_grad(loss)(ts.model, tokens)
        return ft.apply_gradients(ts, grads), value

    def create(key: Any) -> Any:
        return ft.TrainState.create(ft.nn.Transformer.create(CONFIG, key=key), tx)

    ts = ft.init(create, RULES, mesh)(jax.random.key(0))
    numbers = np.random.default_rng(0).integers(0, 64, (4, 9))
    tokens = ft.shard(numbers, RULES, mesh, axes="batch seq")
    exported = ft.export(step, ts, tokens)
    arrays = [*jax.tree.leaves(ts), tokens]
    assert exported.paths is not None and len(exported.paths) == len(arrays)
    assert str(exported.paths[-1]) == "tokens"
    found, devices = alone(exported, arrays, tmp_path, "Explicit" if explicit else "Auto")
    expected = jax.tree.leaves(step(ts, tokens))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    assert set(eval(devices)) == {8}


@pytest.mark.slow
def test_open_sizes_on_several_platforms(tmp_path: Path) -> None:
    @ft.jit
    def f(w: Float[Array, "embed hidden"], x: Float[Array, "batch embed"]) -> Any:
        return {"y": x @ w, "n": 3, "sum": x.sum()}

    w = jnp.arange(12.0).reshape(4, 3)
    exported = ft.export(
        f, w, jnp.ones((2, 4)), platforms=("cpu", "tpu", "cuda"), symbolic={"batch": "2*b"}
    )
    assert exported.exported.platforms == ("cpu", "tpu", "cuda")
    assert str(exported.exported.in_avals[1].shape) == "(2*b, 4)"
    again = ft.Exported.deserialize(exported.serialize())
    assert again.paths is None
    for rows in (2, 6):
        x = np.random.default_rng(rows).normal(size=(rows, 4)).astype(np.float32)
        total, y = again.call(w, x)  # in the order of their paths: `sum` before `y`
        np.testing.assert_allclose(y, x @ np.asarray(w), rtol=1e-6)
        np.testing.assert_allclose(total, x.sum(), rtol=1e-5)
        assert np.array_equal(alone(exported, [w, x], tmp_path)[0][1], y)


def test_sizes_that_stay_open_may_be_sharded() -> None:
    @ft.jit(rules=RULES, mesh=MESH, in_shardings=RULES)
    def f(x: Float[Array, "batch hidden"]) -> Any:
        return jnp.tanh(x)

    exported = ft.export(f, jax.ShapeDtypeStruct((8, 4), jnp.float32), symbolic={"batch": "8*b"})
    assert exported.exported.nr_devices == 8
    shardings: Any = exported.exported.in_shardings_jax(MESH)
    assert shardings[0].spec == ft.P("data", "model")
    x = jax.device_put(jnp.arange(64.0).reshape(16, 4) / 64, shardings[0])
    np.testing.assert_allclose(exported.call(x)[0], np.tanh(x), rtol=1e-6)


def test_keys_and_modules_that_are_called() -> None:
    key = jax.random.key(3)
    f = ft.jit(lambda x, key: x + jax.random.normal(key, x.shape))
    again = ft.Exported.deserialize(ft.export(f, jnp.ones(3), key).serialize())
    assert np.array_equal(again.call(jnp.ones(3), key)[0], f(jnp.ones(3), key))
    method = ft.export(ft.jit(ft.nn.Linear(4, 8, key=key)), jnp.ones((2, 4)))
    assert len(method.paths or ()) == 3 and str((method.paths or ())[-1]) == "x"


def test_its_text() -> None:
    f = ft.jit(lambda tree, x: tree["w"] @ x)
    exported = ft.export(f, {"w": jnp.ones((4, 8))}, jnp.ones(8))
    assert repr(exported) == "<Exported of <lambda>, 2 arguments>"
    told = """\
tree.w  f32[4, 8]
x       f32[8]

<lambda> for cpu on 1 device; 1 result"""
    assert str(exported) == told


def test_bytes_that_are_not_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused before JAX sees them, which may end the process over one flipped bit."""
    data = ft.export(ft.jit(lambda x: x + 1), jnp.ones(3)).serialize()
    plain = bytes(jax.export.export(jax.jit(lambda x: x + 1))(jnp.ones(3)).serialize())
    changed = [flipped(data, i) for i in range(8 * len(data))]
    changed += [data[:n] for n in range(len(data))]
    changed += [data + b"\0", data[1:], plain, b"nonsense", data + data[:-1]]
    with monkeypatch.context() as patch:
        patch.setattr(jax.export, "deserialize", None)  # JAX does not see any of them
        for bad in changed:
            with raises("these bytes are not an exported function: "):
                ft.Exported.deserialize(bad)
        with raises(
            "do not end with their digest from `ft.Exported.serialize`, so they are damaged"
        ):
            ft.Exported.deserialize(plain)
    # The remedy, and the bytes without functree
    for given in (plain, data):
        [y] = jax.tree.leaves(jax.export.deserialize(bytearray(given)).call(jnp.ones(3)))
        assert y[0] == 2
    assert ft.Exported.deserialize(bytearray(data)).call(jnp.ones(3))[0][0] == 2


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    f = ft.jit(lambda x: x + 1)
    x = jnp.ones(3)
    with raises("export takes a function from `ft.jit`: write `ft.export(ft.jit(sin), ...)`"):
        ft.export(jnp.sin, x)

    @ft.jit
    def named(x: Float[Array, "batch embed"]) -> Any:
        return x

    with raises('"batches"', "no argument has this axis; did you mean `batch`?"):
        ft.export(named, jnp.ones((2, 3)), symbolic=["batches"])
    with raises("export: invalid options", "symbolic="):
        ft.export(named, jnp.ones((2, 3)), symbolic={"batch": 3})  # type: ignore[dict-item]
    exported = ft.export(f, x)
    with raises("takes 1 array, but got 2: `print(exported)` lists the arrays"):
        exported.call(x, x)
    for wrong in (jnp.ones(2), jnp.ones(3, int)):
        with raises("<lambda>: 1 argument cannot be used", "x   ", "was exported as f32[3]"):
            exported.call(wrong)
    with raises("Exported.deserialize: invalid arguments", "data=", "it must be bytes"):
        ft.Exported.deserialize("text")  # type: ignore[arg-type]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises("`flatbuffers` is not installed: run `pip install 'functree[export]'`"):
        exported.serialize()
