"""A tree ─► what a checkpoint keeps of it: the arrays that are stored, and what is said of them."""

import enum
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey, register_pytree_with_keys_class
from safetensors.numpy import save_file

import functree as ft
from functree.errors import CheckpointError
from functree.io.checkpoints.contents import Contents
from tests.lib.checks import raises
from tests.lib.meshes import MESH, SIZES, lay
from tests.lib.trees import MLP, x

P = PartitionSpec
TIED = jnp.ones(4)


def contents(tree: Any, meta: Any = None, step: int | None = None) -> Contents:
    return Contents.of(tree, meta, step)


def test_what_is_kept() -> None:
    model = MLP(lay(jnp.ones((4, 8)), None, "model"), jnp.ones((8, 4)), name="mlp")
    found = contents({"model": model, "n": 3, "x": np.ones(2, np.int8)}, step=7)
    rows = found.manifest.rows
    assert [str(row.path) for row in rows] == ["model.up", "model.down", "x"]
    assert [str(row.axes) for row in rows] == ["embed hidden", "hidden embed", "_"]
    assert [row.shape for row in rows] == [(4, 8), (8, 4), (2,)]
    assert rows[0].spec == P(None, "model") and not any(row.same_as for row in rows)
    assert list(found.stored) == ["model.up", "model.down", "x"]
    assert found.manifest.sizes == SIZES and found.manifest.step == 7
    assert contents({"x": np.ones(2)}).manifest.sizes == {}


def test_an_array_at_several_paths_is_stored_once() -> None:
    """And one without elements never: the manifest says all that there is of it."""
    array, empty = jnp.ones(4), jnp.ones((0, 3))
    found = contents({"a": array, "b": [array, jnp.ones(4)], "c": empty, "d": empty, "n": 3})
    assert list(found.stored) == ["a", "b.1"]
    same_as = {str(row.path): str(row.same_as) for row in found.manifest.rows if row.same_as}
    assert same_as == {"b.0": "a", "d": "c"}
    assert found.manifest.rows[3].shape == (0, 3) and found.manifest.static == {"n": "3"}


def test_what_is_changed_later_is_not_in_it() -> None:
    """It is written in the background, while the loop goes on."""
    meta: dict[str, Any] = {"seen": [1], "at": {"epoch": 0}}
    found = contents({"x": jnp.ones(2)}, meta)
    meta["seen"].append(2)
    meta["at"]["epoch"] = 1
    assert found.manifest.meta == {"seen": [1], "at": {"epoch": 0}}


# What cannot be saved


class Color(enum.Enum):
    RED = 1


@dataclass(frozen=True, order=True)
class Named:
    """A key whose text is that of another path."""

    number: int

    def __repr__(self) -> str:
        return "3"


def gone() -> jax.Array:
    array = jnp.ones(2)
    array.delete()
    return array


def keyed(key: Any) -> Any:
    return OrderedDict({key: jnp.ones(2)})


@register_pytree_with_keys_class
class Meeting:
    """A node that gives its two children one key."""

    def __init__(self, *children: Any):
        self.children = children

    def tree_flatten_with_keys(self) -> tuple[Any, None]:
        return [(GetAttrKey("w"), child) for child in self.children], None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "Meeting":
        return cls(*children)


MEETING = (
    "is the path of several arrays: a class gives two of its children the same key",
    "give each child a different key in the class's `tree_flatten_with_keys`",
)
NO_TEXT = (
    "has a path that cannot be parsed from a string",
    "use strings or integers as keys",
)
PROBLEMS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "abstract": (
        lambda: [jnp.ones(2), x(2)],
        "is abstract, and has no values",
        "save the concrete tree instead",
    ),
    "deleted": (
        lambda: [gone()],
        "was donated or deleted, and has no values",
        "save the state that the step returned",
    ),
    "a dtype": (
        lambda: [np.ones(2, ml_dtypes.float6_e2m3fn)],
        "has a dtype that XLA cannot convert to bytes",
        "cast it to a dtype that can hold its values, such as bfloat16",
    ),
    "an array twice under one key": (lambda: Meeting(TIED, TIED), *MEETING),
    "arrays of numpy": (lambda: Meeting(np.ones(2), np.zeros(2)), *MEETING),
    "a key without a text": (lambda: keyed(Color.RED), *NO_TEXT),
    "a key with the text of another": (lambda: keyed(Named(3)), *NO_TEXT),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_what_cannot_be_saved(case: str) -> None:
    make, why, remedy = PROBLEMS[case]
    with pytest.raises(CheckpointError, match="1 leaf cannot be saved") as caught:
        contents(make())
    (problem,) = caught.value.problems
    assert (problem.why, problem.remedy) == (why, remedy)


def test_keys_that_meet_at_other_doors(tmp_path: Path) -> None:
    """Wherever arrays are known by their paths, one would be taken for the other."""
    tree = Meeting(jnp.ones(8), jnp.zeros(8))
    ft.save(tmp_path / "c", {"w": jnp.ones(8)})
    save_file({"w": np.ones(8, np.float32)}, tmp_path / "tensors")
    doors: list[Callable[[], Any]] = [
        lambda: ft.save(tmp_path / "d", tree),
        lambda: ft.restore(tmp_path / "c", tree),
        lambda: ft.load_tensors(tmp_path / "tensors", tree, {"w": "w"}, ft.P(), MESH),
        lambda: ft.TrainState.create(tree, optax.adam(0.1)),
        lambda: ft.plan_optimizer(optax.adam(0.1), tree, ft.P(), SIZES),
        lambda: ft.accumulate(lambda model, batch: model, 2)(jnp.ones(2), tree),
    ]
    for door in doors:
        with raises("w   f32[8]", *MEETING):
            door()
    with raises("w.init   f32[8]", *MEETING, error=ft.StateError):
        ft.make_state(Meeting(ft.StateRef(jnp.ones(8)), ft.StateRef(jnp.zeros(8))))
    told = ("a   Meeting", "gives several of its children the same key", MEETING[1])
    for chosen in (ft.has_ndim(1), "**", lambda path, node: str(path).endswith("w")):
        with raises(*told):
            ft.select({"b": 1, "a": tree}).where(chosen)
    assert ft.select({"b": TIED, "a": tree}).where("b").get() is TIED
    # What keeps the arrays in their order tells them apart.
    assert [float(x[0]) for x in ft.copy(tree).children] == [1.0, 0.0]
    # Static children are no arrays, and one array beside them has the path for itself.
    assert list(contents(Meeting(TIED, "text")).stored) == ["w"]


def test_in_a_trace() -> None:
    with pytest.raises(CheckpointError) as caught:
        jax.jit(lambda array: contents([array]))(jnp.ones(2))
    (problem,) = caught.value.problems
    assert problem.why == "is traced, and has no values yet"
    assert problem.remedy == "save it outside `jit`"


NOT_JSON: dict[str, tuple[Any, str]] = {
    "a tuple": ({"a": [1, (2, 3)]}, "would change to {'a': [1, [2, 3]]}: use only strings"),
    "a number as a key": ({"a": {3: "x"}}, "would change to {'a': {'3': 'x'}}"),
    "a text of another class": ({"a": np.str_("x")}, "would change to {'a': 'x'}"),
    "bytes": (b"x", "`meta` is not JSON: Object of type bytes is not JSON serializable"),
}


@pytest.mark.parametrize("case", NOT_JSON)
def test_what_is_not_json(case: str) -> None:
    meta, message = NOT_JSON[case]
    with raises(message, error=CheckpointError):
        contents({"x": jnp.ones(2)}, meta)


def test_what_is_json(tmp_path: Path) -> None:
    meta = {"a": [1, {"b": None}, [True], 0.5, float("inf")], "ü": {}, "x": []}
    ft.save(tmp_path / "c", {"x": jnp.ones(2)}, meta=meta)
    assert ft.inspect(tmp_path / "c").meta == meta


# What has to be the same in all processes

BASE: dict[str, Any] = {"a": TIED, "b": TIED, "n": 3, "x": np.ones(2, np.float32)}
OTHERS: dict[str, tuple[Callable[[], Contents], str]] = {
    "a shape": (lambda: contents(BASE | {"a": jnp.ones(5), "b": TIED}), "arrays"),
    "two arrays for one": (lambda: contents(BASE | {"b": jnp.ones(4)}), "arrays"),
    "values of numpy": (lambda: contents(BASE | {"x": np.zeros(2, np.float32)}), "NumPy arrays"),
    "a number": (lambda: contents(BASE | {"n": 4}), "static leaves"),
    "the step": (lambda: contents(BASE, step=1), "step"),
    "the meta": (lambda: contents(BASE, {"seed": 1}), "meta"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_differs_between_processes(case: str) -> None:
    make, name = OTHERS[case]
    here, there = contents(BASE).facts(), make().facts()
    assert [key for key in here if here[key] != there[key]] == [name]


def test_arrays_of_jax_are_one_in_all_processes() -> None:
    facts = contents(BASE).facts()
    assert [text.split()[0] for text in facts["NumPy arrays"]] == ["x"]
    other = contents({"a": 2 * TIED}).facts()
    assert other == contents({"a": TIED}).facts()
