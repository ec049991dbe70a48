"""`ft.load_tensors`: by which name an array is read, what of the files, as what, and what is
refused."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float
from safetensors.numpy import save_file

import functree as ft
from functree.io.weights.files import Tensor
from tests.io.reads import blocks_read
from tests.lib.checks import raises, warns
from tests.lib.meshes import MESH, assert_lies

P = ft.P
S = jax.ShapeDtypeStruct


def tensors(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Tensors of different numbers; `__` is a dot in a name."""
    found: dict[str, np.ndarray] = {}
    for at, (name, shape) in enumerate(shapes.items()):
        numbers = np.arange(at, at + math.prod(shape), dtype=np.float32)
        found[name.replace("__", ".")] = numbers.reshape(shape)
    return found


def saved(folder: Path, given: Mapping[str, np.ndarray]) -> Path:
    save_file(dict(given), folder / "a.safetensors")
    return folder / "a.safetensors"


def abstract(dtype: Any = "float32", **shapes: tuple[int, ...]) -> dict[str, Any]:
    return {name: S(shape, dtype) for name, shape in shapes.items()}


# Which name


NAMES: dict[str, tuple[Any, dict[str, str], dict[tuple[Any, ...], str]]] = {
    # a tree of (8,), a table ─► the tensor of each path
    "a star for a part": (
        {"a": [0, 0], "b": [0]},
        {"a.*": "l.*.a", "b.*": "l.*.b"},
        {("a", 0): "l.0.a", ("a", 1): "l.1.a", ("b", 0): "l.0.b"},
    ),
    "a star in a part": ({"la": 0, "lb": 0}, {"l*": "l.1.*"}, {("la",): "l.1.a", ("lb",): "l.1.b"}),
    "the first that matches": ({"a": 0, "b": 0}, {"b": "l.0.a", "*": "l.1.*"}, {("a",): "l.1.a", ("b",): "l.0.a"}),
    "any number of parts": (
        {"l": [{"a": 0, "b": 0}, {"a": 0}]}, {"**": "**"},
        {("l", 0, "a"): "l.0.a", ("l", 0, "b"): "l.0.b", ("l", 1, "a"): "l.1.a"},
    ),
    "or none": ({"a": 0, "x": {"a": 0}}, {"**.a": "**.a"}, {("a",): "a", ("x", "a"): "x.a"}),
    "a key with dots": ({"l.0.a": 0, "l.1.b": 0}, {"*": "*"}, {("l.0.a",): "l.0.a", ("l.1.b",): "l.1.b"}),
    "an array by itself": (0, {"": "a"}, {(): "a"}),
    "index arithmetic": (
        [[0, 0], [0, 0]], {"{i}.{j}": "n.{2*i+j}"},
        {(0, 0): "n.0", (0, 1): "n.1", (1, 0): "n.2", (1, 1): "n.3"},
    ),
    "a remainder, and a text": (
        {"x": [{"a": 0}, {"b": 0}, {"a": 0}]}, {"*.{i}.*": "*.{i//2}.{i % 2}.*"},
        {("x", 0, "a"): "x.0.0.a", ("x", 1, "b"): "x.0.1.b", ("x", 2, "a"): "x.1.0.a"},
    ),
    "a number is none of a text": (
        {"a": [0], "b": {"c": 0}}, {"*.{i}": "l.{i}.*", "b.*": "b.*"}, {("a", 0): "l.0.a", ("b", "c"): "b.c"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMES)
def test_names(case: str, tmp_path: Path) -> None:
    tree, table, wanted = NAMES[case]
    given = tensors(
        a=(8,), x__a=(8,), l__0__a=(8,), l__0__b=(8,), l__1__a=(8,), l__1__b=(8,),
        n__0=(8,), n__1=(8,), n__2=(8,), n__3=(8,), x__0__0__a=(8,), x__0__1__b=(8,), x__1__0__a=(8,), b__c=(8,),
    )  # fmt: skip
    left_out = [name for name in given if name not in wanted.values()]
    like = jax.tree.map(lambda _: S((8,), np.float32), tree)
    file = saved(tmp_path, given)
    loaded = ft.load_tensors(file, like, table, P("data"), MESH, left_out=left_out)
    assert jax.tree.structure(loaded) == jax.tree.structure(tree)
    found = {ft.Path.of(path): leaf for path, leaf in jax.tree.leaves_with_path(loaded)}
    assert found.keys() == {ft.Path(path) for path in wanted}
    for path, name in wanted.items():
        np.testing.assert_array_equal(found[ft.Path(path)], given[name])
        assert_lies(found[ft.Path(path)], "data")


# What of a tensor


Wanted = Callable[[dict[str, np.ndarray]], np.ndarray]
QKV = {"w": (96, 16)}
SHAPES: dict[str, tuple[dict[str, tuple[int, ...]], tuple[int, ...], str, Wanted]] = {
    # the files, our shape, the name ─► our values
    "as it is": ({"w": (16, 8)}, (16, 8), "w", lambda t: t["w"]),
    "the transpose": ({"w": (8, 16)}, (16, 8), "w.T", lambda t: t["w"].T),
    "a number": ({"w": ()}, (), "w", lambda t: t["w"]),
    "no elements": ({"w": (4, 0)}, (0, 4), "w.T", lambda t: t["w"].T),
    "heads of a query": ({"w": (32, 16)}, (16, 8, 4), "w.T", lambda t: t["w"].T.reshape(16, 8, 4)),
    "heads of a bias": ({"w": (32,)}, (8, 4), "w", lambda t: t["w"].reshape(8, 4)),
    "heads in groups": (
        {"w": (64, 16)}, (16, 4, 8, 2), "w.T", lambda t: t["w"].T.reshape(16, 4, 8, 2)
    ),
    "ones in both": ({"w": (1, 16, 1)}, (1, 1, 16, 1), "w", lambda t: t["w"].reshape(1, 1, 16, 1)),
    "a third": (QKV, (16, 8, 4), "w[1/3].T", lambda t: t["w"][32:64].T.reshape(16, 8, 4)),
    "the last of these": (QKV, (16, 2, 8), "w[5/6].T", lambda t: t["w"][80:].T.reshape(16, 2, 8)),
    "a third of the other dimension": (
        {"w": (16, 96)}, (16, 8, 4), "w[1/3]", lambda t: t["w"][:, 32:64].reshape(16, 8, 4)
    ),
    "layers": (
        {"l__0": (8, 4), "l__1": (8, 4)}, (2, 8, 4), "l.{layer}", lambda t: np.stack([t["l.0"], t["l.1"]])
    ),
    "layers of heads": (
        {"l__0": (32, 16), "l__1": (32, 16)}, (2, 16, 8, 4), "l.{layer}.T",
        lambda t: np.stack([t["l.0"].T, t["l.1"].T]).reshape(2, 16, 8, 4),
    ),
    "the heads of another order": (
        {"w": (16, 8, 3)}, (8, 3, 4, 4), "w.transpose(1, 2, 0)",
        lambda t: t["w"].transpose(1, 2, 0).reshape(8, 3, 4, 4),
    ),
    "a one that is dropped": ({"w": (8, 1, 4)}, (4, 8), "w.T", lambda t: t["w"][:, 0].T),
    "a part of the layers": (
        {"l__4": (8, 4), "l__5": (8, 4)}, (2, 8, 4), "l.{2 * (1 + 1) + layer}",
        lambda t: np.stack([t["l.4"], t["l.5"]]),
    ),
    "experts of layers": (
        {"l__0__e__0": (4, 8), "l__0__e__1": (4, 8)}, (1, 2, 8, 4), "l.{layer}.e.{expert}.T",
        lambda t: np.stack([t["l.0.e.0"].T, t["l.0.e.1"].T])[None],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SHAPES)
def test_shapes(case: str, tmp_path: Path) -> None:
    """The values are those that numpy takes of the whole tensor, wherever they are."""
    shapes, shape, name, wanted = SHAPES[case]
    given = tensors(**shapes)
    file = saved(tmp_path, given)
    for layout in (P(), ft.FSDP(("data", "model"), min_size=0, otherwise=P())):
        loaded = ft.load_tensors(file, abstract(x=shape), {"x": name}, layout, MESH)
        assert loaded["x"].shape == shape
        np.testing.assert_array_equal(loaded["x"], wanted(given))


class Experts(eqx.Module):
    up: Float[Array, "experts embed hidden"]


def test_a_tensor_of_all_experts_keeps_their_dimension_in_front(tmp_path: Path) -> None:
    given = tensors(e=(2, 16, 4))
    like = Experts(S((2, 4, 8), "float32"))  # type: ignore[arg-type]
    loaded = ft.load_tensors(saved(tmp_path, given), like, {"up": "e[1/2].T"}, P(), MESH)
    np.testing.assert_array_equal(loaded.up, given["e"][:, 8:].transpose(0, 2, 1))


def test_a_tensor_of_all_layers_and_experts_keeps_both_in_front(tmp_path: Path) -> None:
    given, key = tensors(e=(3, 2, 8, 4)), jax.random.key(0)
    like = ft.abstract(ft.stack)(lambda key: Experts(jnp.zeros((2, 4, 8))), 3, key)
    loaded = ft.load_tensors(saved(tmp_path, given), like, {"layer.up": "e.T"}, P(), MESH)
    np.testing.assert_array_equal(loaded.layer.up, given["e"].transpose(0, 1, 3, 2))


# How much of the files


# The spec of (16, 8, 4), heads in the middle, on 2 × 4 devices ─► the elements that a device reads.
READ = {
    P(): 512,
    P("model"): 128,
    P(None, "model"): 128,
    P("data", "model"): 64,
    P(None, None, "data"): 512,  # these are cut in memory
}


@pytest.mark.parametrize("name", ["w.T", "qkv[1/3].T"])
@pytest.mark.parametrize("spec", READ)
def test_slices_alone_are_read(spec: P, name: str, tmp_path: Path) -> None:
    given = tensors(w=(32, 16)) if name == "w.T" else tensors(qkv=(96, 16))
    file, like = saved(tmp_path, given), abstract(x=(16, 8, 4))
    with blocks_read() as blocks:
        loaded = ft.load_tensors(file, like, {"x": name}, spec, MESH)
    assert {block.size for block in blocks} == {READ[spec]}
    assert_lies(loaded["x"], *spec)
    whole = given["w"] if name == "w.T" else given["qkv"][32:64]
    np.testing.assert_array_equal(loaded["x"], whole.T.reshape(16, 8, 4))


# Files


def test_files(tmp_path: Path) -> None:
    """One, several in any iterable, or a folder, and what its index names."""
    given = tensors(a=(8,), b=(8,))
    like, table = abstract(a=(8,), b=(8,)), {"*": "*"}
    for name, array in given.items():
        save_file({name: array}, tmp_path / f"{name}.safetensors")
    files = [tmp_path / "a.safetensors", str(tmp_path / "b.safetensors")]
    for one in (tmp_path, str(tmp_path), files, tuple(files), tmp_path.glob("*.safetensors")):
        loaded = ft.load_tensors(one, like, table, P(), MESH)
        np.testing.assert_array_equal(loaded["b"], given["b"])
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "a.safetensors"}}')
    with raises("the files have no `b`"):
        ft.load_tensors(tmp_path, like, table, P(), MESH)
    assert ft.load_tensors(tmp_path, abstract(a=(8,)), table, P(), MESH)["a"].shape == (8,)


FILES: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "none there": (lambda folder: folder / "b", ["b cannot be read: it is missing, or is not a regular file"]),
    "an empty folder": (lambda folder: folder / "empty", ["empty contains no *.safetensors file"]),
    "a name in two": (
        lambda folder: [folder / "a.safetensors", folder / "copy"], ["copy: another file also contains a tensor named 'w'"]
    ),
    "no file": (lambda folder: [], ["it must be the path of a folder, a list of files, or the path of a file"]),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_no_such_files(case: str, tmp_path: Path) -> None:
    files, fragments = FILES[case]
    saved(tmp_path, tensors(w=(8,)))
    (tmp_path / "copy").write_bytes((tmp_path / "a.safetensors").read_bytes())
    (tmp_path / "empty").mkdir()
    with raises(*fragments):
        ft.load_tensors(files(tmp_path), abstract(x=(8,)), {"x": "w"}, P(), MESH)


# Where, and as what


class Head(eqx.Module):
    w: jax.Array
    name: str
    scale: float = 2.0


def test_like_says_where(tmp_path: Path) -> None:
    """The layout decides, or else what `like` has: live, abstract, of numpy; the rest is kept."""
    given = tensors(w=(8, 4))
    file = saved(tmp_path, given)
    spec = jax.NamedSharding(MESH, P("data"))
    live = Head(jax.device_put(jnp.zeros((8, 4)), spec), "head")
    placed = Head(S((8, 4), np.float32, sharding=spec), "head")  # type: ignore[arg-type]
    for like in (live, placed):
        loaded = ft.load_tensors(file, like, {"w": "w"})
        assert_lies(loaded.w, "data", None)
        assert (loaded.name, loaded.scale) == ("head", 2.0)
        loaded = ft.load_tensors(file, like, {"w": "w"}, P(None, "model"), MESH)
        assert_lies(loaded.w, None, "model")
    on_host = ft.load_tensors(file, {"w": np.zeros((8, 4), np.float32)}, {"w": "w"})["w"]
    assert isinstance(on_host, np.ndarray)
    free = ft.load_tensors(file, {"w": jnp.zeros((8, 4))}, {"w": "w"})["w"]
    assert isinstance(free, jax.Array) and not free.committed
    for array in (on_host, free):
        np.testing.assert_array_equal(array, given["w"])
    save_file({"w": np.ones((), np.float32)}, tmp_path / "number")
    for zero in (np.float32(0), np.zeros((), np.float32)):
        number = ft.load_tensors(tmp_path / "number", {"w": zero}, {"w": "w"})["w"]
        assert type(number) is type(zero) and number == 1
    with raises("w   f32[8, 4]", "has no sharding in `like`", "pass `layout=`"):
        ft.load_tensors(file, abstract(w=(8, 4)), {"w": "w"})


def test_one_array_in_two_places(tmp_path: Path) -> None:
    file = saved(tmp_path, tensors(w=(8, 4), v=(8, 4)))
    x = ft.shard(jnp.zeros((8, 4)), P("data"), MESH)
    tied = ft.load_tensors(file, {"a": x, "b": x}, {"a": "w", "b": "w"}, left_out=["v"])
    assert tied["a"] is tied["b"]
    apart = ft.load_tensors(
        file, abstract(a=(8, 4), b=(8, 4)), {"a": "w", "b": "w"}, P(), MESH, left_out=["v"]
    )
    assert apart["a"] is not apart["b"]
    two = ft.load_tensors(file, {"a": x, "b": x}, {"a": "w", "b": "v"})
    assert not np.array_equal(two["a"], two["b"])


DTYPES = ["float16", "bfloat16", "int8", "int32", "uint8", "bool", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: str, tmp_path: Path) -> None:
    """All that a state_dict may have, such as a mask or a count of batches."""
    given = np.array([[0, 1, 1, 0]] * 8).astype(jnp.dtype(dtype))
    file = saved(tmp_path, {"w": given})
    loaded = ft.load_tensors(file, abstract(dtype, x=(8, 4)), {"x": "w"}, P("data"), MESH)
    assert loaded["x"].dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(loaded["x"], given)
    with raises("x   f32[8, 4]", "the files have `w` as", CAST):
        ft.load_tensors(file, abstract(x=(8, 4)), {"x": "w"}, P(), MESH)


def test_cast(tmp_path: Path) -> None:
    narrow = np.array([1.0, 0.1, 3e38], jnp.bfloat16)
    file = saved(tmp_path, {"w": narrow})
    wide = ft.load_tensors(file, abstract(x=(3,)), {"x": "w"}, P(), MESH, cast=True)["x"]
    assert wide.dtype == np.float32
    np.testing.assert_array_equal(wide, narrow.astype(np.float32))
    like = abstract("float16", x=(3,))
    with warns(
        "a.safetensors: 1 array",
        "`x` lost 1 of 3 (bfloat16 to float16)",
        "in `like`, give these arrays the dtypes",
    ):
        ft.load_tensors(file, like, {"x": "w"}, P(), MESH, cast=True)
    with raises("JAX does not support float64 without `jax_enable_x64`"):
        ft.load_tensors(file, abstract("float64", x=(3,)), {"x": "w"}, P(), MESH, cast=True)


# What is refused


GIVEN = tensors(
    l__0__w=(8, 4), l__1__w=(8, 4), l__0__t=(4, 8), l__1__t=(4, 8), qkv=(24, 8), big=(9, 9)
)  # fmt: skip
GIVEN |= tensors(sizes__0=(8, 4), sizes__1=(4, 8), e=(8, 8))
GIVEN["l.1.h"] = np.zeros((8, 4), np.float16)
GIVEN["l.0.h"] = np.zeros((8, 4), np.float32)
ALL = ["l.*", "qkv", "big", "[se]*"]
CORRECT = "correct the name in `table` (`.T` transposes the tensor), or the shape in `like`"
PARTS = "write `[0/3]` for the first of 3 parts, or `[0:2/4]` for the first two of 4"
CAST = "pass `cast=True` to convert the tensor to f32"
NO_PARTS = "the range is empty, or exceeds the 3 parts, which are numbered from 0"
# A table and what is left out, for `x.0` and `x.1` (8, 4) ─► where something is wrong, what, and what
# to do.
REFUSED: dict[str, tuple[dict[str, str], list[str], list[tuple[str, str, str]]]] = {
    "the transpose": (
        {"x.*": "l.*.t"}, ALL,
        [("x.0, x.1", "the files have `l.*.t` as f32[4, 8], which does not fit f32[8, 4]", CORRECT)],
    ),
    "another shape": (
        {"x.0": "l.0.w", "x.1": "big"}, ["l.*", "qkv", "[se]*"],
        [("x.1", "the files have `big` as f32[9, 9], which does not fit f32[8, 4]", CORRECT)],
    ),
    "another dtype of one layer": (
        {"x.*": "l.*.h"}, ALL,
        [("x.1", "the files have `l.*.h` as f16[8, 4], not as f32", CAST)],
    ),
    "a part that does not fit": (
        {"x.0": "l.0.w", "x.1": "qkv[0/3].T"}, ["l.*", "big", "[se]*"],
        [("x.1", "the files have `qkv[0/3].T` as f32[24, 8], which does not fit f32[8, 4]", CORRECT)],
    ),
    "a part that cannot be": (
        {"x.*": "qkv[3/3]"}, ALL,
        [
            ('"x.*": "qkv[3/3]"', "the pattern has 1 `*`, but the name has 0",
             "write as many `*` in the name as in the pattern: each `*` stands for the same text in both"),
            ('"x.*": "qkv[3/3]"', NO_PARTS, PARTS),
        ],
    ),
    "a name that no file has": (
        {"x.*": "l.*.tt"}, ALL,
        [
            ("x.0, x.1", "the files have no `l.*.tt`", CORRECT),
        ],
    ),
    "no name": (
        {"x.0": "l.0.w"}, ["*t", "*h", "qkv", "big", "[se]*"],
        [
            ("x.1", "no pattern in `table` matches it", "add a row for this array to `table`"),
            ("l.1.w", "no array uses this tensor", "add rows for these tensors to `table`, or pass `left_out=`"),
        ],
    ),
    "a number that the pattern lacks": (
        {"x.{i}": "l.{2*j}.w"}, ALL,
        [("x.0, x.1", "the files have no `l.{2*j}.w`", CORRECT)],
    ),
    "a division by zero": (
        {"x.{i}": "l.{1//i}.w"}, ALL,
        [
            ("x.0", "the files have no `l.{1//0}.w`", CORRECT),
        ],
    ),
    "patterns for nothing": (
        {"x.*": "l.*.w", "y.*": "l.*.t", "x.1": "l.1.t"}, [*ALL, "l.*.hh", "l.0.w"],
        [
            ('"y.*": "l.*.t", "x.1": "l.1.t"', "matches no array, or only arrays that earlier patterns match", "correct or remove the pattern, or move it up"),
            ('left_out "l.*.hh", left_out "l.0.w"', "matches no tensor, or only tensors that are read", "correct or remove the pattern"),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that does not fit is one error, and nothing was read."""
    table, left_out, told = REFUSED[case]
    file, like = saved(tmp_path, GIVEN), {"x": [S((8, 4), np.float32)] * 2}
    monkeypatch.setattr(Tensor, "read", lambda *_: pytest.fail("a value was read"))
    with raises(f"{file} cannot be loaded: ") as caught:
        ft.load_tensors(file, like, table, P(), MESH, left_out=left_out)
    where: dict[tuple[str, str], list[str]] = {}
    for problem in caught.value.problems:
        named = problem.what if problem.path is None else str(problem.path)
        where.setdefault((problem.why, problem.remedy), []).append(named)
    assert [(", ".join(named), *text) for text, named in where.items()] == told


# (3, embed, heads, head_dim), and what PyTorch has of it: (3 * heads * head_dim, embed). Where both
# products are equal, dimensions joined at two places would be read from it without a word.
@pytest.mark.parametrize("name", ["qkv", "qkv.T", "qkv.transpose(0, 2, 1)"])
@pytest.mark.parametrize(("shape", "stored"), [((3, 8, 4, 2), (24, 8)), ((4, 6), (3, 8))])
def test_a_tensor_in_another_order_is_refused(
    tmp_path: Path, shape: tuple[int, ...], stored: tuple[int, ...], name: str
) -> None:
    file = saved(tmp_path, tensors(qkv=stored))
    with raises(f"the files have `{name}` as f32{list(stored)}, which does not fit"):
        ft.load_tensors(file, abstract(x=shape), {"x": name}, P(), MESH)


STACKED: dict[str, tuple[dict[str, Any], dict[str, str], list[str]]] = {
    "a layer that is missing": (
        abstract(x=(3, 8, 4)), {"x": "l.{layer}.w"},
        ["x   f32[3, 8, 4]", "the files have no `l.2.w`"],
    ),
    "no dimension of layers": (
        abstract(x=()), {"x": "l.{layer}.w"}, ["its name `l.{layer}.w` stands for several tensors"]
    ),
    "layers of two shapes": (
        abstract(x=(2, 8, 4)), {"x": "sizes.{layer}"}, ["x   f32[2, 8, 4]", "the files have `sizes.1` as f32[4, 8]"]
    ),
    "experts that are joined": (
        Experts(S((2, 4, 8), "float32")), {"up": "e.T"},  # type: ignore[arg-type]
        ["`e.T` as f32[8, 8], which does not fit f32[2, 4, 8]"],
    ),
    "a random key": (
        {"x": jax.random.key(0)}, {"x": "big"}, ["x   key<fry>[]", "is a random key, which cannot be read from a tensor"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STACKED)
def test_refused_of_layers(case: str, tmp_path: Path) -> None:
    like, table, fragments = STACKED[case]
    with raises(*fragments):
        ft.load_tensors(saved(tmp_path, GIVEN), like, table, P(), MESH, left_out=ALL)


def test_a_hundred_layers_are_one_line(tmp_path: Path) -> None:
    """What is wrong with each layer is told once, with one remedy."""
    tensors = {f"l.{i}.w": np.zeros((4, 8), np.float32) for i in range(100)}
    file = saved(tmp_path, tensors | {"n.0": tensors["l.0.w"], "n.1": tensors["l.0.w"]})
    like = [{"w": S((8, 4), np.float32), "v": S((8, 4), np.float32)}] * 100
    with pytest.raises(ft.FunctreeError) as caught:
        ft.load_tensors(file, like, {"*.v": "l.*.v"}, P(), MESH)
    assert len(str(caught.value).splitlines()) < 20
    for many in ("99 similarly named tensors", "1 similarly named tensor"):
        assert f"no array uses this tensor or {many}" in str(caught.value)
    assert len(caught.value.problems) == 202


def test_stacks_in_a_list(tmp_path: Path) -> None:
    """A name computes with a number of the path and with that of a layer."""
    given = tensors(l__0=(4, 8), l__1=(4, 8), l__2=(4, 8), l__3=(4, 8))
    like, table = [S((2, 8, 4), np.float32)] * 2, {"{i}": "l.{2*i + layer}.T"}
    loaded = ft.load_tensors(saved(tmp_path, given), like, table, P(), MESH)
    for i, array in enumerate(loaded):
        wanted = np.stack([given[f"l.{2 * i}"].T, given[f"l.{2 * i + 1}"].T])
        np.testing.assert_array_equal(array, wanted)
