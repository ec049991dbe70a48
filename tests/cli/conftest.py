"""A folder as a user has it: a module with factories and layouts."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

MODULE = """
import functree as ft
import jax
import jax.numpy as jnp
import equinox as eqx
from jaxtyping import Array, Float


class Layer(eqx.Module):
    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden embed"]


def tree():
    # So large that it would not fit anywhere if it were allocated.
    return Layer(jnp.ones((1 << 20, 1 << 20)), jnp.ones((1 << 20, 1 << 20)))


def apply(layer, x: Float[Array, "batch embed"]):
    return x + jnp.tanh(x @ layer.up) @ layer.down


def call():
    layer = Layer(jnp.ones((32, 128)), jnp.ones((128, 32)))
    return apply, (layer, jax.ShapeDtypeStruct((64, 32), "float32"))


def own():
    step, args = call()
    return ft.jit(step, donate="x"), args


def unnamed():
    return lambda layer, x: x @ layer.up, call()[1]


def huge():
    return apply, (tree(), jax.ShapeDtypeStruct((8, 1 << 20), "float32"))


def raising():
    raise ValueError("no data\\nand more")


def asks():
    return jnp.ones(int(jnp.ones(()).sum()))


def wants(config):
    return config


def closing():
    scale = jnp.ones(3)
    return (lambda x: x * scale), (jax.ShapeDtypeStruct((3,), "float32"),)


def raised_inside(x: Float[Array, "batch embed"]):
    raise KeyError("later")


def late():
    return raised_inside, (jax.ShapeDtypeStruct((8, 8), "float32"),)


def nothing():
    return {"w": jnp.ones(3)}


class Mine(Exception):
    pass


def own_error():
    raise Mine("\x1b[31mred")


def ends():
    raise SystemExit(3)


def no_return():
    tree()


def fails(x: Float[Array, "batch embed"]):
    own_error()


def own_late():
    return fails, (jax.ShapeDtypeStruct((8, 8), "float32"),)


def fewer():
    return apply, ()


def printing():
    print("hello")
    return nothing()


def mistaken(layer, x: Float[Array, "batch embed"]):
    hidden = ft.constrain(jnp.tanh(x @ layer.up), ft.P("model", None))
    return x + hidden @ layer.down


def with_a_mistake():
    return mistaken, call()[1]


value = 3
rules = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})
data = ft.AxisRules({"batch": "data", ...: None})
layouts = {"rules": rules, "data": data}
each = (rules, ft.P("data"))
none = ()
filters = ft.StateSharding({"layer.up": ft.P(None, "model"), ...: rules})
"""

FILES = {
    "demo.py": MODULE,
    "broken.py": "import functree_of_another_name\n",
    "wrong.py": "x = (\n",
    "ends.py": "import sys\nsys.exit(4)\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder of a user."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # where a command adds the folder
    before = set(sys.modules)
    yield tmp_path
    # Another test has another module of this name.
    for name in ("demo", "broken", "wrong", "ends", "shown_in_help"):
        if name not in before:
            sys.modules.pop(name, None)
