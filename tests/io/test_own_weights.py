"""The functions of docs/own-weights.md, which users copy: what is read, how much of it, and what is
refused."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import raises
from launch import ROOT, ended, started
from meshes import MESH, assert_lies
from own_weights import copied, recording
from safetensors.numpy import save_file

import functree as ft

P = ft.P
PROGRAM = str(ROOT / "tests" / "lib" / "own_weights.py")


def tensors(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Tensors of different numbers."""
    return {
        name.replace("__", "."): np.arange(at, at + math.prod(shape), dtype=np.float32).reshape(
            shape
        )
        for at, (name, shape) in enumerate(shapes.items())
    }


def like(layout: Any, **shapes: tuple[int, ...]) -> Any:
    """An abstract tree of arrays that are placed by a layout; its keys have no dots."""

    def make() -> dict[str, jax.Array]:
        return {name: jnp.zeros(shape) for name, shape in shapes.items()}

    return ft.abstract(make, layout, MESH)()


# A spec of an array (16, 8) on 2 × 4 devices ─► the elements of a shard.
SPECS = {P("model"): 32, P(None, "data"): 64, P("data", "model"): 16, P(): 128}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", ["w", "w.T"])
def test_slices_alone_are_read(spec: P, name: str, tmp_path: Path) -> None:
    page = copied()
    most = recording(page)
    given = tensors(w=(8, 16) if name == "w.T" else (16, 8))
    save_file(given, tmp_path / "a.safetensors")
    loaded = page["load"]([tmp_path / "a.safetensors"], like(spec, x=(16, 8)), {"x": name})
    assert most == {"w": SPECS[spec]}
    assert_lies(loaded["x"], *spec)
    np.testing.assert_array_equal(loaded["x"], given["w"].T if name == "w.T" else given["w"])


@pytest.mark.parametrize("dot_t", ["", ".T"])
def test_a_stack_of_layers(dot_t: str, tmp_path: Path) -> None:
    page = copied()
    most = recording(page)
    given = tensors(l__0__w=(8, 4), l__1__w=(8, 4), l__2__w=(8, 4), l__3__w=(8, 4))
    save_file(given, tmp_path / "a.safetensors")
    shape = (4, 4, 8) if dot_t else (4, 8, 4)
    wanted = like(P("data", None, "model"), x=shape)
    loaded = page["load"]([tmp_path / "a.safetensors"], wanted, {"x": "l.{layer}.w" + dot_t})
    each = [one.T if dot_t else one for one in given.values()]
    np.testing.assert_array_equal(loaded["x"], np.stack(each))
    assert set(most.values()) == {8}  # of each layer, a fourth


def test_several_files_and_names(tmp_path: Path) -> None:
    """The first pattern that matches decides, and a star is one part of a path."""
    page = copied()
    given = tensors(one__a=(8,), two__b=(8,), three=())
    files = []
    for name, array in given.items():
        files.append(tmp_path / f"{name}.safetensors")
        save_file({name: array}, files[-1])
    table = {"b": "two.b", "scalar": "three", "*": "one.*"}
    loaded = page["load"](files, like(P(), a=(8,), b=(8,), scalar=()), table)
    for ours, name in (("a", "one.a"), ("b", "two.b"), ("scalar", "three")):
        np.testing.assert_array_equal(loaded[ours], given[name])
    nested = {"deep": like(P(), a=(8,))}
    with raises("deep.a: the table has no name for it", error=ValueError):
        page["load"](files, nested, {"*": "one.*"})


def test_a_shape_that_the_files_join(tmp_path: Path) -> None:
    page = copied()
    given = tensors(q=(32, 16))  # (heads * head_dim, embed)
    save_file(given, tmp_path / "a.safetensors")
    table = {"q": "q.T"}
    loaded = page["load"]([tmp_path / "a.safetensors"], like(P(None, "model"), q=(16, 32)), table)
    layout = P(None, "model")
    split = ft.jit(
        lambda tree: ft.select(tree).at("q").apply(lambda w: w.reshape(16, 8, 4)),
        out_shardings=layout,
        mesh=MESH,
    )(loaded)
    assert_lies(split["q"], None, "model", None)
    np.testing.assert_array_equal(split["q"], given["q"].T.reshape(16, 8, 4))


# A table, patterns that are left out ─► what is said; of `x` (8, 4) in `w` (8, 4), `t` (4, 8).
REFUSED: dict[str, tuple[dict[str, str], list[str], list[str]]] = {
    "the transpose": (
        {"x": "t"},
        ["w"],
        ["x is float32[8, 4], and t is float32[4, 8]: transposed? write t.T"],
    ),
    "not the transpose": (
        {"x": "w.T"},
        ["t"],
        ["x is float32[8, 4], and w.T is float32[4, 8]: transposed? write w"],
    ),
    "a name that is not there": (
        {"x": "v.T"},
        ["*"],
        ["x: the files have no v"],
    ),
    "no name": ({"y": "w"}, ["t", "w"], ["x: the table has no name for it"]),
    "left over": ({"x": "w"}, [], ["t: no array is read from it"]),
    "left over beside a pattern": ({"x": "w"}, ["v*"], ["t: no array is read from it"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    page = copied()
    most = recording(page)
    table, left_out, lines = REFUSED[case]
    save_file(tensors(w=(8, 4), t=(4, 8)), tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="nothing is loaded") as caught:
        page["load"]([tmp_path / "a.safetensors"], like(P(), x=(8, 4)), table, left_out)
    assert str(caught.value).splitlines() == ["nothing is loaded", *lines]
    assert not most  # nothing was read


def test_another_shape_and_another_dtype(tmp_path: Path) -> None:
    page = copied()
    wide, narrow = np.zeros((8, 8), np.float32), np.zeros((8, 4), jnp.bfloat16)
    save_file({"wide": wide, "narrow": narrow, "s.1": wide}, tmp_path / "a.safetensors")
    wanted = like(P(), x=(8, 4), y=(8, 4), s=(2, 8, 4))
    table = {"x": "wide", "y": "narrow", "s": "s.{layer}"}
    with pytest.raises(ValueError, match="nothing is loaded") as caught:
        page["load"]([tmp_path / "a.safetensors"], wanted, table)
    assert str(caught.value).splitlines()[1:] == [
        "s: the files have no s.0",
        "s is float32[8, 4], and s.1 is float32[8, 8]",
        "x is float32[8, 4], and wide is float32[8, 8]",
        "y is float32[8, 4], and narrow is bfloat16[8, 4]",
    ]


def test_a_name_in_two_files(tmp_path: Path) -> None:
    page = copied()
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for file in files:
        save_file(tensors(w=(8,)), file)
    with raises("nothing is loaded", "b.safetensors: another file has w too", error=ValueError):
        page["load"](files, like(P(), x=(8,)), {"x": "w"})


# In several processes


def published(folder: Path) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"head": (256, 128)}
    for i in range(2):
        shapes |= {f"l.{i}.up.weight": (512, 128), f"l.{i}.up.bias": (512,)}
        shapes |= {f"l.{i}.down.weight": (128, 512), f"l.{i}.down.bias": (128,)}
    given = {name: rng.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    save_file(given, folder / "a.safetensors")
    return given


def test_two_processes(tmp_path: Path) -> None:
    given = published(tmp_path)
    for status, out, err in ended(started([PROGRAM, str(tmp_path), "whole"], 2), 100):
        assert status == 0, err
        _, most, total = next(line for line in out.splitlines() if "READ" in line).split()
        assert int(most) == 256 * 128 // 8
        np.testing.assert_allclose(float(total), given["head"].sum(), rtol=1e-3)


def test_other_files_in_one_process(tmp_path: Path) -> None:
    published(tmp_path)
    save_file(tensors(w=(8,)), tmp_path / "other")
    for status, _, err in ended(started([PROGRAM, str(tmp_path), "other"], 2), 100):
        assert status and "process 1 differs" in err and "sizes" in err, err
