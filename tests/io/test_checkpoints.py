"""Checkpoints: bit-equal on other meshes and layouts; all that can differ, by path or asked for;
what is kept."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float

import functree as ft
from functree.io.checkpoints import read, write
from functree.io.checkpoints.engine import load_arrays
from tests.lib.checks import raises, warns
from tests.lib.meshes import EXPLICIT, MESH, SIZES

KEY = jax.random.key(0)
S = jax.ShapeDtypeStruct
ADAFACTOR = ft.layerwise(optax.adafactor(1e-3))
TENSOR = {"heads": "model", "kv_heads": "model", "hidden": "model", "vocab": "model"}
CONFIG = ft.nn.TransformerConfig(
    vocab_size=64,
    embed=16,
    layers=2,
    heads=4,
    kv_heads=4,
    head_dim=4,
    hidden=32,
    param_dtype=jnp.bfloat16,
)


def mesh_of(**sizes: int) -> Mesh:
    return ft.make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])


@contextmanager
def wide_for_all_threads() -> Iterator[None]:
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)


def bits(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    """The dtype, the shape and the bytes of an array."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return str(array.dtype), array.shape, np.asarray(jax.random.key_data(array)).tobytes()
    return str(array.dtype), array.shape, np.asarray(array).tobytes()


def assert_same(found: Any, expected: Any) -> None:
    """Two trees have the same structure, and arrays with the same bits."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        if hasattr(other, "dtype"):
            assert bits(one) == bits(other), jax.tree_util.keystr(path)
        else:
            assert one == other


class Net(eqx.Module):
    """A real model with all that a training has: bfloat16 parameters, and the running means of a
    BatchNorm."""

    body: ft.nn.Transformer
    norm: ft.nn.BatchNorm
    head: Float[Array, "embed classes"]


def make(key: Any, classes: int = 8) -> Net:
    norm = ft.nn.BatchNorm(16)
    return Net(
        ft.nn.Transformer.create(CONFIG, key=key), norm, jnp.ones((16, classes), jnp.bfloat16)
    )


def training(layout: Any, mesh: Mesh, tx: optax.GradientTransformation) -> Any:
    """A function that makes a training state of this model."""

    def create(key: Any) -> Any:
        model = make(key)
        return ft.TrainState.create(model, tx, key=key)

    return ft.init(create, layout, mesh)


def _sum(model: Net) -> Any:
    return sum(
        jnp.sum(jnp.sin(x.astype(jnp.float32)))
        for x in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A training state under FSDP on 2 by 4 devices, after two updates, and its checkpoint."""
    layout = ft.AxisRules({**TENSOR, ...: None}) | ft.FSDP("data", min_size=0, otherwise=ft.P())
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        ts = training(layout, MESH, ADAFACTOR)(KEY)
        step = ft.jit(
            lambda ts: ft.apply_gradients(ts, ft.grad(lambda model: _sum(model))(ts.model))
        )
        ts = step(step(ts))
    host = ts.model.head.sharding.with_memory_kind("pinned_host")
    ts = eqx.tree_at(lambda ts: ts.model.head, ts, jax.device_put(ts.model.head, host))
    path = tmp_path_factory.mktemp("trained") / "checkpoint"
    ft.save(path, ts, meta={"tokens": 12})
    return path, ts


MESHES: dict[str, tuple[Callable[[], Mesh], Any]] = {
    "8": (lambda: mesh_of(data=8), ft.FSDP("data", min_size=0, otherwise=ft.P())),
    "1": (lambda: mesh_of(data=1), ft.P()),
    "tensor parallel": (lambda: MESH, ft.AxisRules({**TENSOR, ...: None})),
    "explicit": (lambda: EXPLICIT, ft.AxisRules({**TENSOR, ...: None})),
    "in host memory": (lambda: MESH, ft.on_host(ft.AxisRules({**TENSOR, ...: None}))),
}


@pytest.mark.parametrize("name", MESHES)
def test_a_training_state_on_another_mesh(trained: tuple[Path, Any], name: str) -> None:
    path, ts = trained
    make_mesh, layout = MESHES[name]
    mesh = make_mesh()
    like = training(layout, mesh, ADAFACTOR).abstract(KEY)
    found = ft.restore(path, like)
    assert found.tx is like.tx
    for want, saved, one in zip(*map(jax.tree.leaves, (like, ts, found)), strict=True):
        if isinstance(saved, jax.Array):
            assert bits(one) == bits(saved)
            assert one.sharding == want.sharding
    # The same by a layout that is given here, for a tree that says nothing of shardings.
    bare = training(None, mesh, ADAFACTOR).abstract(KEY)
    assert_same(ft.restore(path, bare, layout, mesh), found)


# What differs, on one side or the other


ARRAYS = {
    "w": np.arange(32, dtype=np.float32).reshape(8, 4),
    "b": np.arange(4, dtype=np.int32),
    "key": jax.random.key(1),
    "none": None,
}


def on_mesh(tree: Any) -> Any:
    return ft.shard(tree, ft.P(), MESH)


def without(name: str, **others: Any) -> dict[str, Any]:
    return {**{key: value for key, value in ARRAYS.items() if key != name}, **others}


NOT_SAVED = "is in `like`, but was not saved"
KEYS = (
    "was saved as key<fry>: random keys cannot be converted to numbers, or to another kind of key"
)
NOT_IN_LIKE = "was saved, but is not in `like`"
# The tree that restores ─► the paths that differ, each with the reason; and the options with which
# the tree is restored (None: with no options).
DIFFERENCES: dict[str, tuple[Any, dict[str, str], dict[str, Any] | None]] = {
    "renamed": (
        without("b", bias=ARRAYS["b"]),
        {"bias": NOT_SAVED, "b": NOT_IN_LIKE},
        {"only": ~(ft.glob("b") | ft.glob("bias"))},
    ),
    "a number for an array": (
        without("b", b=3),
        {"b": NOT_IN_LIKE},
        {"only": ~ft.glob("b")},
    ),
    "shape": (
        without("w", w=np.ones((4, 8), np.float32)),
        {"w": "was saved as f32[8, 4], with a different shape"},
        {"only": ~ft.glob("w")},
    ),
    "dtype": (
        without("w", w=jnp.ones((8, 4), jnp.bfloat16)),
        {"w": "was saved as f32"},
        {"cast": True},
    ),
    "kind of key": (
        without("key", key=jax.random.key(0, impl="rbg")),
        {"key": KEYS},
        None,
    ),
    "raw key": (
        without("key", key=jnp.zeros(2, jnp.uint32)),
        {"key": KEYS},
        None,
    ),
    "everything": (
        {"other": np.ones(3)},
        {"other": NOT_SAVED, "b": NOT_IN_LIKE, "key": NOT_IN_LIKE, "w": NOT_IN_LIKE},
        None,
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_differs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    like, differences, asked = DIFFERENCES[name]
    ft.save(tmp_path / "c", on_mesh(ARRAYS))
    like = on_mesh(like)
    with monkeypatch.context() as patch:
        patch.setattr(read, "load_arrays", None)  # nothing is read
        with raises("cannot be restored from", error=ft.CheckpointError) as caught:
            ft.restore(tmp_path / "c", like)
    problems = caught.value.problems
    assert {str(problem.path): problem.why for problem in problems} == differences
    if asked is None:
        with pytest.raises(ft.CheckpointError):
            ft.restore(tmp_path / "c", like, cast=True)
        return
    remedies = {
        "only": "pass `only=` with a filter that excludes these leaves",
        "cast": "pass `cast=True` to convert it to bf16",
    }
    assert {problem.remedy for problem in problems} == {remedies[name] for name in asked}
    found = ft.restore(tmp_path / "c", like, **asked)
    for key, value in on_mesh(ARRAYS).items():
        if key not in like or value is None:
            continue
        if key not in differences:
            assert bits(found[key]) == bits(value)
        elif "cast" in asked:
            assert bits(found[key]) == bits(value.astype(like[key].dtype))
        else:
            assert found[key] is like[key]


def test_the_text_of_what_differs(tmp_path: Path) -> None:
    ft.save(tmp_path / "c", {**without("key"), "n": np.ones(2)})
    like = {"w": jnp.ones((8, 4), jnp.bfloat16), "bias": ARRAYS["b"], "n": np.ones(2)}
    with pytest.raises(ft.CheckpointError) as caught:
        ft.restore(tmp_path / "c", like)
    assert (
        str(caught.value)
        == f"""\
3 leaves cannot be restored from {tmp_path / "c"}

  bias   i32[4]
      is in `like`, but was not saved

  w   bf16[8, 4]
      was saved as f32

  b   i32[4]
      was saved, but is not in `like`

Try: pass `only=` with a filter that excludes these leaves
     pass `cast=True` to convert it to bf16"""
    )


def test_another_container_with_the_same_paths(tmp_path: Path) -> None:
    """Paths say which array is which: their order, and the classes that hold them, do not."""
    tree = on_mesh(ARRAYS)
    ft.save(tmp_path / "c", tree)
    like = {key: tree[key] for key in reversed(tree)}
    assert_same(ft.restore(tmp_path / "c", like), like)
    ft.save(tmp_path / "list", [tree["w"], tree["b"]])
    assert_same(ft.restore(tmp_path / "list", (tree["w"], tree["b"])), (tree["w"], tree["b"]))


def test_leaves_of_each_kind(tmp_path: Path) -> None:
    """Every dtype, keys, numpy, nothing, host memory, odd names: bit-equal, of the same class,
    where they were."""
    small = "int2 uint2 int4 uint4 float4_e2m1fn float8_e3m4 float8_e4m3 float8_e8m0fnu"
    wide = "bool_ int8 uint16 complex64 bfloat16 float16 int64 uint64 float64 complex128"
    with wide_for_all_threads():
        tree: dict[str, Any] = {
            name: jax.device_put(jnp.asarray(np.arange(64).reshape(8, 8) % 2).astype(name), place)
            for name in f"{small} {wide}".split()
            for place in [NamedSharding(MESH, ft.P("data", "model"))]
        }
        host = NamedSharding(EXPLICIT, ft.P("data"), memory_kind="pinned_host")
        tree |= {
            "keys": jax.device_put(
                jax.random.split(KEY, (8, 4)), NamedSharding(MESH, ft.P("data"))
            ),
            "rbg": jax.random.split(jax.random.key(1, impl="rbg"), 8),
            "raw": jnp.zeros(2, jnp.uint32),
            "nothing": jnp.zeros((0, 8)),
            "no keys": jax.random.split(KEY, 8)[:0],
            "numpy": [np.arange(8.0), np.float64(3.25), np.arange(3) * 1j, np.ones((), np.int8)],
            "host": jax.device_put(jnp.arange(8.0), host),
            "host uint4": jax.device_put(tree["uint4"], host),
            'ü."x"/y.0': [jnp.ones(3), {"": jnp.ones(2), "3": jnp.ones(1)}, {3: jnp.ones(1)}],
            "number": 3,
            "text": "a",
        }
        ft.save(tmp_path / "c", tree)
        ft.save(tmp_path / "c", tree, overwrite=True)  # read back before it counts
        found = ft.restore(tmp_path / "c", tree)
        assert_same(found, tree)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
            assert isinstance(other, jax.Array) or type(one) is type(other)
            if isinstance(other, jax.Array):
                assert (one.sharding, one.committed) == (other.sharding, other.committed)
        assert {row.digest is None for row in ft.inspect(tmp_path / "c")} == {False, True}


def test_without_any_array(tmp_path: Path) -> None:
    ft.save(tmp_path / "c", {"a": None, "n": 3, "e": np.zeros((0, 2))})
    found = ft.restore(tmp_path / "c", {"a": None, "n": 3, "e": np.ones((0, 2))})
    assert found["e"].shape == (0, 2)


def buffers(array: jax.Array) -> set[int]:
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


def test_one_array_at_two_places(tmp_path: Path) -> None:
    """It is stored once, and one array again; two arrays are not put in the place of one."""
    w = on_mesh(jnp.arange(1024.0))
    ft.save(tmp_path / "tied", {"a": w, "b": w})
    ft.save(tmp_path / "apart", {"a": w, "b": w + 1})
    assert ft.inspect(tmp_path / "tied")["b"].same_as == ft.Path("a")
    assert ft.inspect(tmp_path / "tied").total_bytes == w.nbytes
    assert str(ft.inspect(tmp_path / "tied")).splitlines()[2].endswith(" 0 B")
    tied = ft.restore(tmp_path / "tied", {"a": w, "b": w})
    assert tied["a"] is tied["b"]
    abstract = S(w.shape, w.dtype, sharding=w.sharding)
    tied = ft.restore(tmp_path / "tied", {"a": abstract, "b": abstract})
    assert tied["a"] is tied["b"]
    # Elsewhere, or with another dtype, it is another array.
    sharded = S(w.shape, w.dtype, sharding=NamedSharding(MESH, ft.P("data")))
    half = S(w.shape, jnp.bfloat16, sharding=w.sharding)
    for like in (sharded, half):
        found = ft.restore(tmp_path / "tied", {"a": abstract, "b": like}, cast=True)
        assert [(x.dtype, x.sharding) for x in found.values()] == [
            (x.dtype, x.sharding) for x in (abstract, like)
        ]
    apart = ft.restore(tmp_path / "tied", {"a": w, "b": w + 1})
    assert not buffers(apart["a"]) & buffers(apart["b"]) and bits(apart["b"]) == bits(w)
    apart = ft.restore(tmp_path / "apart", {"a": w, "b": w})
    assert bits(apart["a"]) == bits(w) and bits(apart["b"]) == bits(w + 1)


def test_numpy_arrays_that_are_one_in_like_are_two_that_were_saved(tmp_path: Path) -> None:
    """Zeros that were made once stand for all of them, as for the moments of an optimizer."""
    zeros = np.zeros(4)
    ft.save(tmp_path / "c", {"mu": np.ones(4), "nu": np.full(4, 2.0)})
    found = ft.restore(tmp_path / "c", {"mu": zeros, "nu": zeros})
    assert bits(found["mu"]) == bits(np.ones(4)) and bits(found["nu"]) == bits(np.full(4, 2.0))


def test_without_digests(tmp_path: Path) -> None:
    """Tied arrays are one again."""
    w = jnp.ones(3)
    tied = {"a": w, "b": w, "e": jnp.zeros(0)}
    ft.save(tmp_path / "c", tied, verify=False)
    with warns("was saved with `verify=False`: 2 arrays cannot be verified"):
        ft.restore(tmp_path / "c", tied)
    found = ft.restore(tmp_path / "c", tied, verify=False)
    assert_same(found, tied)
    assert found["a"] is found["b"]


# What cannot be saved or restored


def test_inspect_loads_nothing(tmp_path: Path) -> None:
    ft.save(tmp_path / "c", on_mesh(ARRAYS))
    whole = ft.inspect(tmp_path / "c")
    for values in tmp_path.glob("c/arrays-*/"):
        shutil.rmtree(values)
    assert list(ft.inspect(tmp_path / "c")) == list(whole) != []


def test_where_arrays_cannot_be_created(tmp_path: Path) -> None:
    ft.save(tmp_path / "c", {"w": jnp.ones((8, 4))})
    bare = {"w": S((8, 4), jnp.float32)}
    with raises(
        "w   f32[8, 4]", "has no sharding in `like`, and there is no layout", "pass `layout"
    ):
        ft.restore(tmp_path / "c", bare)
    with raises("cannot be laid out on mesh (data=2, model=4)", error=ft.ShardingError):
        ft.restore(tmp_path / "c", bare, ft.P("nowhere"), MESH)
    with raises("without devices", error=ft.ShardingError):
        ft.restore(tmp_path / "c", bare, ft.P(), {"data": 2})
    abstract = NamedSharding(MESH.abstract_mesh, ft.P())
    with raises("cannot be created", "has no devices"):
        ft.restore(tmp_path / "c", {"w": S((8, 4), jnp.float32, sharding=abstract)})


def test_float64_that_jax_does_not_have(tmp_path: Path) -> None:
    ft.save(tmp_path / "wide", {"w": np.ones(4)})
    like = {"w": S((4,), np.dtype("float64"))}
    lacking = raises(
        "JAX does not support float64 without `jax_enable_x64`", error=ft.CheckpointError
    )
    with lacking:
        ft.restore(tmp_path / "wide", like, ft.P(), MESH)
    with jax.enable_x64(True):
        with raises("`w` was read as float32", "for the whole process", error=ft.CheckpointError):
            ft.restore(tmp_path / "wide", like, ft.P(), MESH)
        free = {"w": jnp.ones(4, jnp.float64)}  # to be on any device: it is read by numpy
    with lacking:
        ft.restore(tmp_path / "wide", free)
    narrow = {"w": S((4,), jnp.float32)}
    found = ft.restore(tmp_path / "wide", narrow, ft.P(), MESH, cast=True)
    assert bits(found["w"]) == bits(np.ones(4, np.float32))


def test_copies_that_differ(tmp_path: Path) -> None:
    """An array whose copies have different values is not one array: which one would be saved?"""
    pieces = [
        jax.device_put(jnp.full((4,), i // 7, jnp.float32), device)
        for i, device in enumerate(jax.devices())
    ]
    torn = jax.make_array_from_single_device_arrays((4,), NamedSharding(MESH, ft.P()), pieces)
    with raises("cannot be written", "w", "has copies with different values"):
        ft.save(tmp_path / "c", {"w": torn})
    assert not (tmp_path / "c").exists()


def test_a_checkpoint_that_is_replaced_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one is read; and of a run the newer step, if the latest was removed."""
    like = {"w": jnp.zeros(3)}

    def meanwhile(do: Callable[[], Any]) -> None:
        """Do something after the manifest was read, and before the values are."""

        def load(*given: Any) -> Any:
            monkeypatch.undo()
            do()
            return load_arrays(*given)

        monkeypatch.setattr(read, "load_arrays", load)

    ft.save(tmp_path / "c", {"w": jnp.full(3, 1.0)})
    meanwhile(lambda: ft.save(tmp_path / "c", {"w": jnp.full(3, 2.0)}, overwrite=True))
    assert ft.restore(tmp_path / "c", like)["w"][0] == 2
    with ft.Checkpoints(tmp_path / "run", keep=1) as checkpoints:
        checkpoints.save(1, {"w": jnp.full(3, 1.0)})
        reader = ft.Checkpoints(tmp_path / "run")
        checkpoints.wait()
        meanwhile(lambda: (checkpoints.save(2, {"w": jnp.full(3, 2.0)}), checkpoints.wait()))
        assert reader.restore(like)["w"][0] == 2


# Formats that were written once


def test_a_checkpoint_of_the_first_format_is_still_read() -> None:
    """It was written once, and stays: whatever comes later reads it."""
    path = Path(__file__).parents[1] / "fixtures" / "checkpoints" / "format-1"
    w = np.arange(32, dtype=np.float32).reshape(8, 4) / np.float32(8)
    like = {
        "model": {"w": jnp.zeros((8, 4)), "half": jnp.zeros(8, jnp.bfloat16), "bits": jnp.zeros(8, jnp.int4)},
        "key": jax.random.key(0), "numpy": np.zeros(3), "empty": jnp.zeros((0, 2)),
        "step": 17, "tied": jnp.zeros((8, 4)),
    }  # fmt: skip
    found = ft.restore(path, like)
    assert bits(found["model"]["w"]) == bits(found["tied"]) == bits(w)
    assert bits(found["model"]["half"]) == bits(np.arange(8).astype(jnp.bfloat16))
    assert found["model"]["bits"].astype(int).tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert bits(found["key"]) == bits(jax.random.key(7)) and found["numpy"].tolist() == [0, 0.5, 1]
    checkpoint = ft.inspect(path)
    assert checkpoint.meta == {"tokens": 12, "by": "functree"} and checkpoint.sizes == SIZES
    assert checkpoint["tied"].same_as == ft.Path("model.w")
    assert checkpoint["model.w"].spec == ft.P("data", "model")


# After surgery


def test_after_surgery_the_rest_is_restored(trained: tuple[Path, Any]) -> None:
    """Another head and another optimizer come from `like`."""
    path, ts = trained
    new = ft.glob("model.head") | ft.glob("opt_state.**")

    def create(key: Any) -> Any:
        return ft.TrainState.create(make(key, classes=3), optax.adam(1e-3), key=key)

    like = ft.init(create, ft.AxisRules({**TENSOR, ...: None}), MESH)(jax.random.key(5))
    with raises(
        "pass `only=` with a filter that excludes these leaves",
        error=ft.CheckpointError,
    ):
        ft.restore(path, like)
    found = ft.restore(path, like, only=~new)
    assert found.model.head is like.model.head and found.opt_state is not ts.opt_state
    for one, other in zip(*map(jax.tree.leaves, (found.opt_state, like.opt_state)), strict=True):
        assert one is other
    assert_same((found.model.body, found.key), (ts.model.body, ts.key))


def test_an_overwritten_checkpoint_stays_if_the_disk_changes_new_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def changed(*args: Any) -> dict[str, Any]:
        stored = load_arrays(*args)
        return stored | {"w": stored["w"] + 1}

    tree = {"w": jnp.ones(2), "b": jnp.ones(3)}
    ft.save(tmp_path / "c", tree)
    monkeypatch.setattr(write, "load_arrays", changed)
    why = "the values of w on the disk differ from the values in memory"
    with raises(why, error=ft.CheckpointError):
        ft.save(tmp_path / "c", jax.tree.map(jnp.zeros_like, tree), overwrite=True)
    assert_same(ft.restore(tmp_path / "c", tree), tree)


def test_a_step_that_is_none(tmp_path: Path):
    with ft.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(2)})
    with raises("Checkpoints.restore: invalid arguments", "step", error=ft.FunctreeError):
        ft.Checkpoints(tmp_path).restore({"w": jnp.ones(2)}, -1)
