"""What files say of sizes, names and depths is bounded by what is there: each of these answers at
once, with an error of functree that names the file."""

import json
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
import tensorstore

import functree as ft
from functree.io.checkpoints.manifest import checksum
from tests.lib.checks import raises
from tests.lib.meshes import MESH

MODELS = Path(__file__).parents[1] / "fixtures" / "hf"
CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
DEEP = "[" * 10**5 + "]" * 10**5
TOO_DEEP = "it is nested too deep"

# How something that is no file comes into the place of one
NO_FILES: dict[str, Callable[[Path], Any]] = {
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
}


@contextmanager
def refused(*said: str, error: type[Exception] = ft.FunctreeError) -> Iterator[None]:
    """It is an error in these words, at once."""
    start = time.monotonic()
    with raises(*said, error=error) as caught:
        yield
    assert time.monotonic() - start < 5
    # Not all of what was read is in the message, which is somebody's screen.
    assert len(str(caught.value)) < 5000


def load(folder: Path) -> Any:
    return ft.load_weights(folder, ft.P(), ft.make_mesh(data=8))


def copied(folder: Path, name: str = "llama") -> Path:
    shutil.copytree(MODELS / name, folder / "model")
    return folder / "model"


def rewrite(file: Path, change: Callable[[Any], Any]) -> None:
    """Change what a file of JSON says."""
    found = change(json.loads(file.read_text()))
    file.write_text(found if isinstance(found, str) else json.dumps(found))


# The config of published weights

FIELDS = {
    "vocab_size": 10**9,
    "hidden_size": 2**63,
    "num_attention_heads": 10**400,
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_size_that_no_tensor_has(field: str, tmp_path: Path) -> None:
    folder, size = copied(tmp_path), FIELDS[field]
    rewrite(folder / CONFIG, lambda given: given | {field: size})
    why = "the files contain only 30 tensors, with 29,408 elements in total"
    with refused(f"{CONFIG} do not fit the tensors in the files", f'"{field}": {size}'[:99], why):
        load(folder)


VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "a base that is no float": ({"rope_theta": 10**400}, '"rope_theta": 1000'),
    "a dtype that is no text": ({"dtype": "\ud800"}, '"dtype": "\\ud800"'),
    "a field that nobody knows": ({"x": [[0] * 10**5] * 9}, '"x": [[0, 0'),
    "layers that are lists": ({"layer_types": [["full_attention"]]}, '"layer_types": [["full'),
}


@pytest.mark.parametrize("case", VALUES)
def test_a_value_that_is_none(case: str, tmp_path: Path) -> None:
    changes, said = VALUES[case]
    folder = copied(tmp_path)
    rewrite(folder / CONFIG, lambda given: given | changes)
    with refused(CONFIG, said):
        load(folder)


# What is no JSON that can be read, for each file of JSON

MANY = "".join(f'"{i}": 1, ' for i in range(10**5))

TEXTS: dict[str, tuple[Callable[[str], str], str]] = {
    "deep lists": (lambda text: text.replace("{", f'{{"x": {DEEP},', 1), TOO_DEEP),
    "many digits": (lambda text: text.replace("{", '{"x": ' + "9" * 9999 + ",", 1), "digits"),
    # Behind many, which are looked through once.
    "a name twice": (lambda text: f'{{{MANY}"x": 1, "x": 2}}', 'an object repeats the name "x"'),
    "no text": (lambda text: "\ud800", "'utf-8' codec can't decode"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_what_cannot_be_read_as_json(case: str, tmp_path: Path) -> None:
    change, said = TEXTS[case]
    folder = copied(tmp_path, "llama_sharded")
    ft.save(tmp_path / "saved", {"w": jnp.ones(3)})
    for file, error, read in (
        (folder / INDEX, ft.FunctreeError, lambda: load(folder)),
        (folder / CONFIG, ft.FunctreeError, lambda: load(folder)),
        (tmp_path / "saved" / "functree.json", ft.CheckpointError, lambda: inspected(tmp_path)),
    ):
        text = file.read_text()
        file.write_bytes(change(text).encode(errors="surrogatepass"))
        with refused(file.name, said, error=error):
            read()
        file.write_text(text)


def inspected(folder: Path) -> Any:
    return ft.inspect(folder / "saved")


@pytest.mark.parametrize("what", NO_FILES)
def test_what_is_no_file(what: str, tmp_path: Path) -> None:
    """Opening a pipe would wait for who writes to it, and a device does not end."""
    folder = copied(tmp_path, "llama_sharded")
    ft.save(tmp_path / "saved", {"w": jnp.ones(3)})
    for file, read in (
        (folder / INDEX, lambda: load(folder)),
        (folder / "model-00003-of-00007.safetensors", lambda: load(folder)),
        (folder / CONFIG, lambda: load(folder)),
        (tmp_path / "saved" / "functree.json", lambda: inspected(tmp_path)),
    ):
        file.rename(tmp_path / "away")
        NO_FILES[what](file)
        error = ft.CheckpointError if file.name == "functree.json" else ft.FunctreeError
        with refused("functree.json" if error is ft.CheckpointError else file.name, error=error):
            read()
        file.rmdir() if file.is_dir() else file.unlink()
        (tmp_path / "away").rename(file)
    with refused(f"{WEIGHTS} cannot be read: it is missing, or is not a regular file"):
        (folder / INDEX).unlink()
        NO_FILES[what](folder / WEIGHTS)
        load(folder)


def test_a_pipe_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    os.mkfifo(tmp_path / "saved" / "functree.json")
    with refused("it is not a regular file", error=ft.CheckpointError):
        ft.save(tmp_path / "saved", {"w": jnp.ones(3)}, overwrite=True)


# The names of files in an index

OUTSIDE = "index.json names files outside its folder: "
MISSING = " cannot be read: "
NAMES: dict[str, str] = {
    "../outside.safetensors": f'{OUTSIDE}"../outside.safetensors"',
    "/outside.safetensors": f'{OUTSIDE}"/outside.safetensors"',
    "": MISSING,
    "a\0b": MISSING,
    "x" * 4000: MISSING,
    CONFIG: f"{CONFIG} is not a safetensors file",
}


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:20]))
def test_a_name_in_an_index(name: str, tmp_path: Path) -> None:
    folder = copied(tmp_path, "llama_sharded")
    (folder / "sub").mkdir()
    moved = "model-00003-of-00007.safetensors"
    (folder / moved).rename(tmp_path / "outside.safetensors")
    if name == "/outside.safetensors":
        name = str(tmp_path / "outside.safetensors")
        said = f'{OUTSIDE}"{name}"'
    else:
        said = NAMES[name]
    (folder / INDEX).write_text(
        (folder / INDEX).read_text().replace(f'"{moved}"', json.dumps(name))
    )
    with refused(said):
        load(folder)


def test_a_link_and_a_folder_inside_are_followed(tmp_path: Path) -> None:
    """Hugging Face's cache consists of links to files elsewhere."""
    folder = copied(tmp_path, "llama_sharded")
    first, second = "model-00003-of-00007.safetensors", "model-00004-of-00007.safetensors"
    (folder / first).rename(tmp_path / "blob")
    (folder / first).symlink_to("../blob")
    (folder / "sub").mkdir()
    (folder / second).rename(folder / "sub" / second)
    (folder / INDEX).write_text((folder / INDEX).read_text().replace(second, f"sub/{second}"))
    load(folder)


# The heads of safetensors files

Head = dict[str, Any]


def tensor(**changes: Any) -> Callable[[Head], Head]:
    """Another entry for one tensor."""
    return lambda head: head | {"lm_head.weight": head["lm_head.weight"] | changes}


def extra(shape: list[int], offsets: list[int]) -> Callable[[Head], Head]:
    entry = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
    return lambda head: head | {"extra": entry}


WHOLE = f"{WEIGHTS} is not a safetensors file, or is incomplete: "
# Most of what a head says is compared with the file by safetensors itself.
HEADS: dict[str, tuple[Callable[[Head], Any], str]] = {
    "offsets beyond the file": (tensor(data_offsets=[0, 10**12]), WHOLE),
    "a huge shape without elements": (extra([0, 2**62], [0, 0]), "extra\n"),
    "a dtype of integers": (
        tensor(dtype="I32"),
        "the dtype of lm_head.weight is I32, but must be one of",
    ),
    "deep": (lambda head: f'{{"x": {DEEP}}}', WHOLE),
}


@pytest.mark.parametrize("case", HEADS)
def test_a_head_of_safetensors(case: str, tmp_path: Path) -> None:
    change, said = HEADS[case]
    folder = copied(tmp_path)
    data = (folder / WEIGHTS).read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    head = change(json.loads(data[8:end]))
    text = (head if isinstance(head, str) else json.dumps(head)).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + data[end:])
    with refused(said):
        load(folder)


# The manifest of a checkpoint, with a checksum that fits


def row(**changes: Any) -> Callable[[Head], Head]:
    """Another row for the one array."""
    return lambda body: body | {"rows": [body["rows"][-1] | changes]}


MANIFESTS: dict[str, tuple[Callable[[Head], Head], str]] = {
    "a dtype that nobody knows": (row(dtype="float9"), "unknown dtype 'float9'"),
    "a path that is a list": (row(path="[[1]]"), "is not a Python literal that can be a key"),
    "a deep path": (row(path=f"[{'-' * 10**4}1]"), "is not a path"),
    "values elsewhere": (lambda body: body | {"arrays": "/tmp"}, "not a folder of values"),
}


def forge(folder: Path, change: Callable[[Head], Head]) -> None:
    """Change a manifest, and its checksum with it."""
    file = folder / "functree.json"
    body = json.loads(file.read_text())
    del body["checksum"]
    body = change(body)
    file.write_text(json.dumps(body | {"checksum": checksum(body)}))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("manifests") / "saved"
    ft.save(folder, {"a": jnp.ones(3), "w": jnp.ones((4, 8))})
    return folder


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest(case: str, saved: Path, tmp_path: Path) -> None:
    change, said = MANIFESTS[case]
    shutil.copytree(saved, tmp_path / "saved")
    forge(tmp_path / "saved", change)
    headline = "functree.json is not the manifest of a checkpoint: "
    with raises(headline, said, error=ft.CheckpointError):
        inspected(tmp_path)


def test_meta_is_not_deeper_than_what_is_read(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(98):
        deep = [deep]
    ft.save(tmp_path / "saved", {"w": jnp.ones(3)}, meta=deep)
    assert inspected(tmp_path).meta == deep
    for _ in range(10_000):
        deep = [deep]
    itself: dict[str, Any] = {}
    itself["a"] = [itself, itself]
    for meta, why in ((deep, "recursion"), (itself, "Circular reference detected")):
        with refused("`meta` is not JSON: ", why):
            ft.save(tmp_path / "deeper", {"w": jnp.ones(3)}, meta=meta)


# What tensorstore reads, which ends the process over it

Change = Callable[[Path], Any]


def in_head(change: Callable[[Head], Any]) -> Change:
    """Write another head of the array `w`, by tensorstore itself, so that its checksums fit."""

    def write(state: Path) -> None:
        base = {"driver": "file", "path": f"{state}/"}
        store: Any = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
        found = change(json.loads(store.read("w/zarr.json").result().value))
        text = found if isinstance(found, str) else json.dumps(found)
        store.write("w/zarr.json", text.encode()).result()

    return write


def in_parts(*sizes: int) -> Change:
    grid = {"name": "regular", "configuration": {"chunk_shape": sizes}}
    return in_head(lambda head: head | {"chunk_grid": grid})


HEAD = "the stored header of `w` "
VALUES_FILES: dict[str, tuple[Change, str]] = {
    "huge parts": (in_parts(10**6, 10**6), f"{HEAD}has shape [4, 8] and chunk shape [1000000"),
    "parts of nothing": (in_parts(0, 8), f"{HEAD}has shape [4, 8] and chunk shape [0, 8]"),
    "parts of other rank": (in_parts(4), f"{HEAD}cannot be read: "),
    "deep": (in_head(lambda head: DEEP), f"{HEAD}cannot be read: {TOO_DEEP}"),
    "a dtype that nobody knows": (in_head(lambda head: head | {"data_type": "x"}), "data_type"),
}


@pytest.mark.parametrize("case", VALUES_FILES)
def test_the_files_of_the_values(case: str, saved: Path, tmp_path: Path) -> None:
    change, said = VALUES_FILES[case]
    shutil.copytree(saved, tmp_path / "saved")
    change(next((tmp_path / "saved").glob("arrays-*/state")))
    with refused("cannot be restored\n\n  w\n", said, "restore another checkpoint"):
        ft.restore(tmp_path / "saved", {"a": jnp.ones(3), "w": jnp.ones((4, 8))})


def test_values_of_another_digest(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "saved")
    forge(
        tmp_path / "saved", lambda body: body | {"rows": [body["rows"][-1] | {"digest": "0" * 8}]}
    )
    why = (
        "its values have changed since they were saved: their digest is f8f5d28f, but was 00000000"
    )
    with raises("1 leaf of ", why, "restore another checkpoint", error=ft.CheckpointError):
        ft.restore(tmp_path / "saved", {"w": jnp.ones((4, 8))})


def test_a_ledger_whose_paths_have_no_arguments() -> None:
    f = ft.jit(lambda x: x.sum(), mesh=MESH, in_shardings=ft.P("data"))
    body = json.loads(f.lower(jnp.ones(8)).compile().ledger().to_json())
    body["collectives"][0]["arguments"] = ["x", "y"]
    with refused(" `paths` and 2 `arguments`"):
        ft.Ledger.from_json(json.dumps(body))
