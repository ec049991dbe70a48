"""What a type checker and an editor see of what functree returns: the user's own types."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import equinox as eqx
import functree as ft
from jax import Array


@ft.jit
def plain(x: Array, n: int = 1) -> dict[str, Array]: ...


@ft.jit(donate="x")
def donating(x: Array) -> Array: ...


@ft.shard_map(rules=None)
def mapped(x: Array) -> Array: ...


class Model(eqx.Module):
    @ft.jit
    def step(self, x: Array) -> list[Array]: ...


@ft.typed
def checked(x: Array) -> Array: ...


def loss(model: Model, x: Array) -> Array: ...


def show(x: Array, model: Model, ts: ft.TrainState[Model]) -> None:
    reveal_type(plain)
    reveal_type(plain(x, 2))
    reveal_type(plain.lower)
    reveal_type(plain.compilations)
    reveal_type(donating)
    reveal_type(mapped(x))
    reveal_type(mapped.lower)
    reveal_type(model.step)
    reveal_type(model.step(x))
    reveal_type(model.step.compilations)
    reveal_type(checked)
    reveal_type(ft.init(Model, ft.P()).plan)
    reveal_type(ft.init(loss, ft.P())(model, x))
    reveal_type(ft.abstract(loss))
    reveal_type(ft.shard(model, ft.P()))
    reveal_type(ft.constrain(model, ft.P()))
    reveal_type(ft.value_and_grad(loss))
    reveal_type(ft.unpack(ft.pack(model)))
    reveal_type(ft.apply_gradients(ts, model).model)
"""

EXPECTED = """
Jit[(x: Array, n: int = 1), dict[str, Array]]
dict[str, Array]
(x: Array, n: int = 1) -> Lowered
list[Compilation]
Jit[(x: Array), Array]
Array
(x: Array) -> Lowered
BoundFunction[(x: Array), list[Array]]
list[Array]
list[Compilation]
(x: Array) -> Array
() -> Plan
Array
(model: Model, x: Array) -> Array
Model
Model
(model: Model, x: Array) -> tuple[Array, Any]
Model
Model
""".strip().splitlines()


@pytest.fixture(scope="module")
def revealed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    file = tmp_path_factory.mktemp("types") / "program.py"
    file.write_text(PROGRAM)
    root = Path(__file__).parent.parent
    # From the project's folder, so that this functree is what the program imports.
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(file)],
        cwd=root, capture_output=True, text=True,
    )  # fmt: skip
    return re.findall(r'information: Type of ".*" is "(.*)"', done.stdout)


@pytest.mark.parametrize("number", range(len(EXPECTED)), ids=lambda number: str(number))
def test_the_users_own_types(revealed: list[str], number: int):
    assert len(revealed) == len(EXPECTED)
    assert revealed[number] == EXPECTED[number]
