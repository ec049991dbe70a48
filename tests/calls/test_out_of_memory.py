"""A program that is too large for its devices: what of its arrays is known. The errors of the
compilers are in `test_accelerators.py`."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import functree as ft
from functree.calls.out_of_memory import ProgramArrays, _figures, _need, used_arguments

MESH = jax.make_mesh((8,), ("data",))
MIB = 2**20


def test_the_figures_of_a_compiler() -> None:
    text = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
        "required for HLO temporaries (40.46G) exceeds available HBM (31.24G). HLO module: jit_f.\n"
        "See https://openxla.org/xla/errors/error_1000 for more details."
    )
    found = _figures(text)
    assert found.text == "it needs 40.46 GiB, and there are 31.24 GiB"
    assert found[1:] == (round(40.46 * 2**30), round(31.24 * 2**30))
    assert _figures(text.replace("40.46G", "768.5M"))[1] == 768.5 * MIB
    assert _figures("RESOURCE_EXHAUSTED: too large.\nSee more.") == ("too large.", None, None)


def lowered(fn: Any, *args: Any, **options: Any) -> tuple[str, list[ft.Path]]:
    stage = ft.jit(fn, **options).lower(*args)
    paths = list(map(ft.Path, stage._program.group.paths))
    return stage.as_text(debug_info=True), paths


X = jax.ShapeDtypeStruct((8,), "float32")
# Functions, and the paths that their programs use.
USED: dict[str, tuple[Any, tuple[Any, ...], list[str]]] = {
    "all": (lambda x, y: x["a"] + y, ({"a": X}, X), ["x.a", "y"]),
    "some": (lambda x, y: x["b"] * 2, ({"a": X, "b": X}, X), ["x.b"]),
    "keys that are quoted": (
        lambda x: x["a.b"] + x["ü \n\\"],
        ({"a.b": X, "ü \n\\": X, "c": X},),
        ['x."a.b"', 'x."ü \\n\\\\"'],
    ),
    "a key like the text of a program": (
        lambda x, y: x[") -> ("] + y,
        ({") -> (": X, "b": X}, X),
        ['x.") -> ("', "y"],
    ),
    "a returned one": (lambda x, y: y, (X, X), ["y"]),
    "of several": (lambda x: sum(x), ([X] * 12,), [f"x.{i}" for i in range(12)]),
}


@pytest.mark.parametrize("case", USED)
def test_the_arguments_that_a_program_uses(case: str) -> None:
    fn, args, used = USED[case]
    text, paths = lowered(fn, *args)
    assert sorted(map(str, used_arguments(text, paths))) == sorted(used)


def test_a_text_that_cannot_be_read_says_nothing() -> None:
    paths = [ft.Path(("x",)), ft.Path(("y",))]
    other = '  func.func public @main(%arg0: tensor<8xf32> loc("other")) -> (tensor<8xf32>) {'
    for text in ("", "func.func public @main()", other):
        assert used_arguments(text, paths) == set(paths)


def placed(*shape: int, spec: P | None = None, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    sharding = None if spec is None else NamedSharding(MESH, spec)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)


BIG, CUT, LOOSE = placed(MIB, spec=P()), placed(MIB, spec=P("data")), placed(MIB)
# Arguments, which are donated, and results; then in MiB: arguments, of which no sharding is known,
# results, of which no sharding is known, and arguments that are kept.
NEEDS: dict[str, tuple[dict[str, Any], str, list[Any], tuple[float, ...]]] = {
    "donated": ({"x": BIG, "y": CUT}, "x", [BIG], (4.5, 0, 0, 0, 0)),
    "kept": ({"x": BIG, "y": CUT}, "", [BIG], (4.5, 0, 4, 0, 4)),
    "another sharding": ({"x": BIG}, "x", [CUT], (4, 0, 0.5, 0, 0)),
    "one of two": ({"x": BIG, "y": BIG}, "x", [BIG, BIG], (8, 0, 4, 0, 4)),
    "another dtype": ({"x": BIG}, "x", [placed(MIB, spec=P(), dtype="int32")], (4, 0, 4, 0, 0)),
    "a loose result": ({"x": BIG}, "", [LOOSE], (4, 0, 4, 4, 4)),
    "a loose result that is donated": ({"x": CUT}, "x", [LOOSE], (0.5, 0, 0, 0, 0)),
    "a loose argument": ({"x": LOOSE, "y": CUT}, "", [], (4.5, 4, 0, 0, 0)),
    "nothing": ({}, "", [], (0, 0, 0, 0, 0)),
}


@pytest.mark.parametrize("case", NEEDS)
def test_what_is_known_of_the_arrays(case: str) -> None:
    arguments, donated, results, sizes = NEEDS[case]
    by_path = {ft.Path((name,)): array for name, array in arguments.items()}
    found = _need(ProgramArrays(by_path, [ft.Path((name,)) for name in donated], results), 9, 7)
    assert found[:2] == (9, 7)
    assert tuple(size / MIB for size in found[2:7]) == sizes
