"""Casts while something is loaded: what the new dtype does not hold is a warning by path, at every
door; and what it does hold is none."""

import re
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import functree as ft
from functree.io.casts import cast_on_devices, cast_on_host, lost_on_host
from tests.lib.checks import compilations
from tests.lib.meshes import MESH, mesh_of

INF, NAN = float("inf"), float("nan")
BF16, E4M3, E2M1, INT4 = (
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float4_e2m1fn,
    ml_dtypes.int4,
)

# The dtype before, what is lost by a cast, what is kept, and the dtype after.
TABLE: list[tuple[Any, list[Any], list[Any], Any]] = [
    ("f4", [300.7, 0.5, -129, 128, NAN, INF, -INF, 3e9], [0.0, -0.0, 127, -128], "i1"),
    ("f4", [-1, 256, 0.1, NAN], [0, 255], "u1"),
    ("f4", [2.0**31, 3e9, -3e9, 1.5], [2.0**30, -(2.0**31)], "i4"),
    ("f4", [NAN, 2, -1, 0.5, INF], [0, 1], "?"),
    ("f4", [8, -9, 0.5], [7, -8], INT4),
    ("f4", [70000, -1e20, 65536], [65504, 65510, 1e-10, 0.1, NAN, INF, -INF], "f2"),
    ("f4", [3.4e38, -3.4e38], [1e38, 0.1, 1e-40, NAN, INF, -INF], BF16),
    ("f4", [1000, -1e9, INF], [448, 0.1, NAN], E4M3),
    ("i4", [128, -129, 2**31 - 1], [127, -128, 0], "i1"),
    ("i4", [-1, -128, 256], [0, 255], "u1"),
    ("u4", [2**31, 2**32 - 1], [2**31 - 1], "i4"),
    ("i4", [2, -1, 256], [0, 1], "?"),
    ("i4", [2**24 + 1, 2**31 - 1, -(2**24) - 1], [2**24, 2**24 + 2, -(2**31), 7], "f4"),
    ("u4", [2**32 - 1, 2**24 + 1], [2**31, 0], "f4"),
    ("i4", [257, 2**31 - 1], [256, -3, 258], BF16),
    ("c8", [1 + 1j, 1j, complex(0, NAN), complex(1, -INF)], [1, -2.5], "f4"),
    ("c8", [1 + 1j, 0.5, 300, NAN], [1, -128], "i1"),
    ("i4", [2**24 + 1], [3], "c8"),
    ("?", [], [True, False], "i1"),
    ("f4", [], [300.7, NAN, 1e30], "c8"),
    (BF16, [], [0.1, NAN, INF, 1e38], "f4"),
]
# Without `jax_enable_x64` they are on the host alone.
WIDE: list[tuple[Any, list[Any], list[Any], Any]] = [
    ("f8", [1e39, -1e300], [0.1, NAN, INF, 1e-300, 3e38], "f4"),
    ("f8", [2.0**63, 1e19, 0.5], [2.0**62, -(2.0**63), 2.0**53], "i8"),
    ("f8", [2.0**64, -1], [2.0**63], "u8"),
    ("i8", [2**31, -(2**31) - 1], [2**31 - 1], "i4"),
    ("u8", [2**63, 2**64 - 1], [2**63 - 1], "i8"),
    ("i8", [2**53 + 1, 2**63 - 1], [2**53, -(2**63)], "f8"),
    ("i8", [2**63 - 1, 10**6], [0], "f2"),
    ("c16", [complex(1e39, 0), complex(0, 1e39)], [1 + 1j, complex(NAN, INF)], "c8"),
    ("f4", [100], [6, -0.5, 0.1, 6.5], E2M1),
    ("f4", [NAN, INF], [4], E2M1),
]


def case(row: tuple[Any, list[Any], list[Any], Any]) -> str:
    return f"{np.dtype(row[0])} to {np.dtype(row[3])}"


@pytest.mark.parametrize("row", [*TABLE, *WIDE], ids=case)
def test_on_the_host(row: tuple[Any, list[Any], list[Any], Any]) -> None:
    before, lost, kept, after = row
    for value in lost:
        assert lost_on_host(np.array(value, before), np.dtype(after)) == 1, value
    for value in kept:
        assert lost_on_host(np.array([value], before), np.dtype(after)) == 0, value
    both = np.array([*lost, *kept], before)
    assert lost_on_host(both, np.dtype(after)) == len(lost)
    assert cast_on_host(both, np.dtype(after)).dtype == np.dtype(after)


@pytest.mark.parametrize("row", TABLE, ids=case)
def test_on_devices(row: tuple[Any, list[Any], list[Any], Any]) -> None:
    before, lost, kept, after = row
    array = np.array([*lost, *kept], before)
    single = SingleDeviceSharding(jax.devices()[0])
    cast, number = cast_on_devices(jnp.asarray(array), np.dtype(after), single)
    assert cast.dtype == np.dtype(after) and int(number) == len(lost)


SHARDINGS = {
    "Auto": NamedSharding(MESH, PartitionSpec("data", "model")),
    "Explicit": NamedSharding(mesh_of(explicit=True), PartitionSpec(None, ("data", "model"))),
    "whole": NamedSharding(MESH, PartitionSpec()),
    "in the memory of the host": NamedSharding(MESH, PartitionSpec("data"), memory_kind="pinned_host"),
}  # fmt: skip


@pytest.mark.parametrize("what", SHARDINGS)
def test_on_a_mesh(what: str) -> None:
    sharding = SHARDINGS[what]
    values = np.linspace(-200, 200, 64, dtype=np.float32).reshape(4, 16)
    cast, number = cast_on_devices(jax.device_put(values, sharding), np.dtype("i1"), sharding)
    assert cast.sharding == sharding and int(number) == lost_on_host(values, np.dtype("i1")) == 64


# The doors


W = np.array([1.0, 300.7, np.nan, 3.0], np.float32)
LIKES: dict[str, Any] = {
    "an array of numpy": lambda dtype: np.zeros(4, dtype),
    "an array on no device": lambda dtype: jnp.zeros(4, dtype),
    "an array of a device": lambda dtype: jax.device_put(jnp.zeros(4, dtype), jax.devices()[1]),
    "an abstract one with a sharding": lambda dtype: jax.ShapeDtypeStruct(
        (4,), dtype, sharding=NamedSharding(MESH, PartitionSpec("model"))
    ),
}


@pytest.mark.parametrize("saved", ["f4", "f8"])
@pytest.mark.parametrize("what", LIKES)
def test_restore(what: str, saved: str, tmp_path: Path) -> None:
    """Those of 8 bytes are read by numpy, and then cast."""
    ft.save(tmp_path / "c", {"a": [W.astype(saved)], "b": np.ones(2, saved)})
    like = {"a": [LIKES[what](np.int8)], "b": np.zeros(2, np.int8)}
    with pytest.warns(
        ft.FunctreeWarning,
        match=re.escape(
            f"1 array lost values that the new dtype cannot hold: `a.0` lost "
            f"2 of 4 ({np.dtype(saved)} to int8); give these arrays in `like` the dtype that they have in the checkpoint"
        ),
    ) as caught:
        found = ft.restore(tmp_path / "c", like, cast=True)
    assert len(caught) == 1 and found["b"].tolist() == [1, 1]
    assert np.asarray(found["a"][0])[[0, 3]].tolist() == [1, 3]
    # The remedy.
    like["a"] = [LIKES[what](np.float32)]
    again = ft.restore(tmp_path / "c", like, cast=True)
    assert np.array_equal(np.asarray(again["a"][0]), W, equal_nan=True)


def test_a_number_of_numpy(tmp_path: Path) -> None:
    ft.save(tmp_path / "c", {"a": np.float32(0.5)})
    with pytest.warns(ft.FunctreeWarning, match="`a` lost 1 of 1 .float32 to int32."):
        assert type(ft.restore(tmp_path / "c", {"a": np.int32(0)}, cast=True)["a"]) is np.int32


def test_a_run_and_a_layout(tmp_path: Path) -> None:
    with ft.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"a": W, "b": np.array([1 + 1j], np.complex64), "c": W})
    like = {
        "a": jax.ShapeDtypeStruct((4,), np.uint8),
        "b": jax.ShapeDtypeStruct((1,), jnp.bfloat16),
        "c": np.zeros(4, np.int8),
    }
    with pytest.warns(ft.FunctreeWarning, match="2 arrays .*`a` lost 2 of 4 .*`b` lost 1 of 1"):
        found = checkpoints.restore(like, 1, ft.P(), MESH, only=~ft.glob("c"), cast=True)
    assert found["c"] is like["c"]


def test_it_is_one_program_for_each_shape() -> None:
    """The values are counted by the program that casts them."""
    sharding = NamedSharding(MESH, PartitionSpec())
    arrays = [jax.device_put(np.full(96, i, np.float32), sharding) for i in range(3)]
    with compilations() as compiled:
        for array in arrays:
            cast_on_devices(array, np.dtype("i2"), sharding)
    assert len(compiled) == 1


def published(folder: Path, value: float) -> None:
    sizes: Any = dict(layers=2, heads=2, kv_heads=1, head_dim=4, hidden=8)
    model = ft.nn.Transformer.create(ft.nn.TransformerConfig(16, 8, **sizes), key=jax.random.key(0))
    weight = model.embed.weight.at[3, 3].set(value)
    gate = model.blocks.layer.mlp.gate.at[1, 0, 0].set(value)

    def where(model: Any) -> Any:
        return model.embed.weight, model.blocks.layer.mlp.gate

    ft.save_weights(folder, eqx.tree_at(where, model, (weight, gate)))


def test_load_weights(tmp_path: Path) -> None:
    published(tmp_path / "m", 1e6)
    with pytest.warns(
        ft.FunctreeWarning, match="2 arrays .*1 of 128 .float32 to float16.* 1 of .*`param_dtype="
    ) as caught:
        ft.load_weights(tmp_path / "m", ft.P("data"), MESH, param_dtype=jnp.float16)
    assert len(caught) == 1
    # The remedies: another dtype, or that of the files.
    for dtype in (jnp.bfloat16, None):
        found = ft.load_weights(tmp_path / "m", ft.P("data"), MESH, param_dtype=dtype)
        assert float(found.embed.weight[3, 3]) == float(jnp.asarray(1e6, dtype))
    published(tmp_path / "n", 6e4)
    ft.load_weights(tmp_path / "n", ft.P(), MESH, param_dtype=jnp.float16)
