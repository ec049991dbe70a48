"""NumPy arrays that JAX cannot hold: an error with the path at every door, before JAX sees them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functree as ft
from functree.tree.arrays import is_array, unheld
from tests.lib.checks import raises
from tests.lib.covering import whole_tables
from tests.lib.meshes import MESH

P = ft.P
ONES = np.ones((4, 8), np.float32)
# A value ─► what the message says, a part of its remedy, and the value after that.
VALUES: dict[str, tuple[Any, str, str, Any]] = {
    "byte order": (ONES.astype(">f4"), "has dtype >f4, whose byte order JAX", 'x.astype(x.dtype.newbyteorder("="))', ONES),
    "long": (ONES.astype(np.longdouble), "has dtype float128, which JAX", "x.astype(np.float64)", ONES),
    "long scalar": (np.longdouble(1), "has dtype float128, which JAX", "x.astype(np.float64)", np.float64(1)),
    "mask": (np.ma.array(ONES, mask=ONES > 2), "is a masked array, which JAX does not support", ".filled(...)", ONES),
}  # fmt: skip


def total(tree: Any) -> Any:
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(tree))


DOORS: dict[str, Callable[[Any], Any]] = {
    "tree_axes": ft.tree_axes,
    "shard": lambda tree: ft.shard(tree, P(), MESH),
    "pack": ft.pack,
    "select": lambda tree: ft.select(tree).where("**").count(),
    "TrainState.create": lambda tree: ft.TrainState.create(tree, optax.adam(1.0)),
    "grad": ft.grad(total),
    "jit": ft.jit(lambda tree: tree),
    "jit, lowered": ft.jit(lambda tree: tree).lower,
    "shard_map": ft.shard_map(lambda tree: tree, mesh=MESH, in_specs=P(), out_specs=P()),
}
CELLS = [(door, value) for door in DOORS for value in VALUES]


@pytest.mark.parametrize(
    ("door", "value"),
    CELLS if whole_tables() else [*CELLS[: len(VALUES)], *CELLS[len(VALUES) :: len(VALUES)]],
)
def test_the_path_is_named_at_every_door(door: str, value: str) -> None:
    given, why, *_ = VALUES[value]
    with raises("a.0 ", why):
        DOORS[door]({"a": [given]})


def test_saving(tmp_path: Path) -> None:
    given, why, *_ = VALUES["long"]
    with raises("a.0 ", why, error=ft.CheckpointError):
        ft.save(tmp_path / "saved", {"a": [given]})


CHANGES: dict[str, Callable[[Any], Any]] = {
    "byte order": lambda x: x.astype(x.dtype.newbyteorder("=")),
    "long": lambda x: x.astype(np.float64),
    "long scalar": lambda x: x.astype(np.float64),
    "mask": lambda x: x.filled(0),
}


@pytest.mark.parametrize("value", VALUES)
def test_the_remedies(value: str) -> None:
    given, _, remedy, wanted = VALUES[value]
    assert remedy in (unheld(given) or ("", ""))[1] and not is_array(given)
    np.testing.assert_array_equal(ft.jit(lambda x: x + 0)(CHANGES[value](given)), wanted)


DATA = {
    "texts": np.array(["a", "b"]),
    "texts of any length": np.array(["a", "b"], np.dtypes.StringDType()),
    "objects": np.array([1, "a"], object),
    "dates": np.zeros(2, "M8[D]"),
    "records": np.zeros(2, [("a", "f4"), ("b", "i4")]),
}


@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
def test_data_that_are_no_numbers_are_static(data: Any) -> None:
    """They pass where static leaves do, and a compiled function cannot take them."""
    sharded = ft.shard({"w": ONES, "data": data}, P(), MESH)
    assert sharded["data"] is data
    with pytest.raises(ft.FunctreeError, match=r"tree\.data .*\n.*which JAX does not support"):
        ft.jit(lambda tree: tree["w"])({"w": ONES, "data": data})
    f = ft.jit(lambda x: {"data": data, "x": x})
    assert all(f(jnp.ones(2))["data"] is data for _ in range(3)) and len(f.compilations) == 1


@pytest.mark.parametrize("text", [np.str_("gelu"), np.bytes_(b"gelu")])
def test_a_text_of_numpy_is_a_static_leaf(text: Any) -> None:
    assert unheld(text) is None and not is_array(text)
    assert ft.jit(lambda tree: tree["w"] + len(tree["name"]))({"w": 1.0, "name": text}) == 5
