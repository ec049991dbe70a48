"""Problems ─► the text of one exception; names that are near each other."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import functree as ft
from functree.errors import (
    MAX_GROUPS,
    MAX_PATHS,
    CheckpointFileError,
    FunctreeArgumentError,
    FunctreeTypeError,
    FunctreeValueError,
    count,
    did_you_mean,
    near_name,
)


def problem(
    path: str | None, why: str = "is wrong", remedy: str = "mend it", what: str = "f32[2]"
) -> ft.Problem:
    return ft.Problem(None if path is None else ft.Path.parse(path), (2,), what, why, remedy)


PYTHONS = (TypeError, ValueError, OSError)
CLASSES: dict[type[ft.FunctreeError], list[type[Exception]]] = {
    ft.FunctreeError: [],
    ft.AxesError: [ValueError],
    ft.RuleError: [ValueError],
    ft.ShardingError: [ValueError],
    ft.StateError: [],
    ft.CheckpointError: [],
    FunctreeTypeError: [TypeError],
    FunctreeValueError: [ValueError],
    FunctreeArgumentError: [TypeError, ValueError],
    CheckpointFileError: [OSError],
}


@pytest.mark.parametrize("kind", CLASSES)
def test_the_classes(kind: type[ft.FunctreeError]) -> None:
    assert issubclass(kind, ft.FunctreeError)
    assert [one for one in PYTHONS if issubclass(kind, one)] == CLASSES[kind]


def test_every_class_is_in_the_table() -> None:
    found, waiting = set(), [ft.FunctreeError]
    while waiting:
        found.add(kind := waiting.pop())
        waiting += kind.__subclasses__()
    assert found == set(CLASSES)


KEY = jax.random.key(0)
ARRAY = jnp.ones(3)
# What is raised, and the classes of Python that it is.
RAISED: dict[str, tuple[Callable[[], object], list[type[Exception]]]] = {
    "a text for a size": (lambda: ft.nn.Linear("4", 4, key=KEY), [TypeError, ValueError]),  # type: ignore[arg-type]
    "a size of zero": (lambda: ft.nn.Linear(0, 4, key=KEY), [TypeError, ValueError]),
    "a number for a key": (lambda: ft.nn.Linear(4, 4, key=0), [TypeError, ValueError]),  # type: ignore[arg-type]
    "a probability that is not a number": (lambda: ft.nn.Dropout(float("nan")), [TypeError, ValueError]),
    "a class for a tree": (lambda: ft.plan(ft.nn.Linear), [TypeError]),
    "no layout": (lambda: ft.plan(ARRAY, 3), [ValueError]),
    "a name that is none": (lambda: ft.Axes("a b"), [ValueError]),
    "an unknown option": (lambda: ft.jit(lambda x: x, backend="cpu"), [TypeError]),  # type: ignore[call-overload]
    "an unknown parameter": (lambda: ft.jit(lambda x: x, donate="y"), [ValueError]),
    "not packed": (lambda: ft.unpack(3), [TypeError]),  # type: ignore[arg-type]
    "a part too few": (lambda: ft.merge(ft.split(ARRAY)[0]), [ValueError]),
    "integers are not differentiated": (
        lambda: ft.grad(jnp.sum, wrt=...)(jnp.arange(3)), [TypeError]
    ),
    "a text that is not JSON": (lambda: ft.Plan.from_json("no"), [ValueError]),
    "a static value without a hash": (lambda: ft.jit(lambda x: x)({1}), [TypeError]),
    "the state of another model": (lambda: ft.StateRef("x"), []),
    "a deleted array": (lambda: ft.jit(lambda x: x)(deleted()), []),
}  # fmt: skip


def deleted() -> jax.Array:
    array = jnp.ones(3)
    array.delete()
    return array


@pytest.mark.parametrize("case", RAISED)
def test_what_is_an_error_of_python_too(case: str) -> None:
    run, expected = RAISED[case]
    with pytest.raises(ft.FunctreeError) as caught:
        run()
    assert python_classes(caught.value) == expected
    assert caught.value.problems


def python_classes(error: Exception) -> list[type[Exception]]:
    return [one for one in PYTHONS if isinstance(error, one)]


def damaged(folder: Path) -> None:
    text = (folder / "saved" / "functree.json").read_text()
    (folder / "saved" / "functree.json").write_text(text.replace("float32", "float64"))
    ft.restore(folder / "saved", {"w": ARRAY})


# In a folder with a checkpoint, a file and an empty folder: whether the files are at fault.
CHECKPOINTS: dict[str, tuple[Callable[[Path], object], bool]] = {
    "nothing is there": (lambda folder: ft.restore(folder / "missing", {"w": ARRAY}), True),
    "no checkpoint is there": (lambda folder: ft.restore(folder / "empty", {"w": ARRAY}), True),
    "the manifest is damaged": (damaged, True),
    "a checkpoint is there already": (lambda folder: ft.save(folder / "saved", ARRAY), True),
    "no folder can be made": (lambda folder: ft.save(folder / "file" / "new", ARRAY), True),
    "no step": (lambda folder: ft.Checkpoints(folder / "run").restore(ARRAY, layout=ft.P()), True),
    "another tree": (lambda folder: ft.restore(folder / "saved", {"v": ARRAY}), False),
    "an abstract tree": (lambda folder: ft.save(folder / "new", jax.ShapeDtypeStruct((3,), "float32")), False),
    "meta that is not JSON": (lambda folder: ft.save(folder / "new", ARRAY, meta={1}), False),
}  # fmt: skip


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_checkpoints_whose_files_are_at_fault(case: str, tmp_path: Path) -> None:
    run, at_fault = CHECKPOINTS[case]
    ft.save(tmp_path / "saved", {"w": ARRAY})
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ft.CheckpointError) as caught:
        run(tmp_path)
    assert python_classes(caught.value) == ([OSError] if at_fault else [])
    assert str(caught.value) and caught.value.problems


def test_the_sample_of_the_design_page() -> None:
    error = ft.ShardingError(
        "2 leaves cannot be laid out on mesh (data=4, model=2)",
        [
            problem(
                "blocks.3.mlp.down",
                '"hidden" has size 1001',
                'pad "hidden" to 1002',
                'f32[1001, 4]   "hidden embed"',
            ),
            problem(
                "head.weight", 'no rule for "vocab" applies', "", 'f32[512, 512]   "embed vocab"'
            ),
        ],
    )
    assert str(error) == (
        "2 leaves cannot be laid out on mesh (data=4, model=2)\n"
        "\n"
        '  blocks.3.mlp.down   f32[1001, 4]   "hidden embed"\n'
        '      "hidden" has size 1001\n'
        "\n"
        '  head.weight   f32[512, 512]   "embed vocab"\n'
        '      no rule for "vocab" applies\n'
        "\n"
        'Try: pad "hidden" to 1002'
    )
    assert [str(p.path) for p in error.problems] == ["blocks.3.mlp.down", "head.weight"]


def test_leaves_with_the_same_problems_share_a_paragraph() -> None:
    text = str(
        ft.ShardingError(
            "no", [problem("a"), problem("b"), problem("c", "is worse"), problem("a", "is odd")]
        )
    )
    assert "  a   f32[2]\n      is wrong\n      is odd\n" in text
    assert "  b   f32[2]\n      is wrong\n" in text and "  c   f32[2]\n      is worse\n" in text
    assert "  a, b   f32[2]\n      is wrong\n" in str(
        ft.ShardingError("no", [problem("a"), problem("b")])
    )


def test_many_leaves_are_counted_and_all_in_problems() -> None:
    error = ft.ShardingError("no", [problem(f"l.{i}") for i in range(100)])
    assert f"l.{MAX_PATHS - 1} and {100 - MAX_PATHS} more   f32[2]" in str(error)
    assert f"l.{MAX_PATHS}," not in str(error) and len(error.problems) == 100
    kinds = ft.ShardingError("no", [problem(f"l.{i}", f"why {i}") for i in range(MAX_GROUPS + 3)])
    assert "  and 3 more kinds of problem: see `.problems`" in str(kinds)
    assert f"why {MAX_GROUPS - 1}" in str(kinds) and f"why {MAX_GROUPS}\n" not in str(kinds)


def test_the_same_remedy_is_said_once() -> None:
    text = str(ft.ShardingError("no", [problem("a"), problem("b"), problem("c", remedy="or this")]))
    assert text.endswith("Try: mend it\n     or this")
    assert "Try" not in str(ft.ShardingError("no", [problem("a", remedy="")]))


def test_a_bare_array_and_no_leaf_at_all() -> None:
    assert "  (the root)   f32[2]\n" in str(ft.ShardingError("no", [problem("")]))
    assert "\n  rule a→b\n      is wrong" in str(
        ft.ShardingError("no", [problem(None, what="rule a→b")])
    )


def test_a_headline_alone_is_a_problem_too() -> None:
    error = ft.RuleError("nonsense")
    assert str(error) == "nonsense"
    assert error.problems == (ft.Problem(None, None, "", "nonsense", ""),)


COPIES: dict[str, Callable[[ft.FunctreeError], ft.FunctreeError]] = {
    "pickle": lambda error: pickle.loads(pickle.dumps(error)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("way", COPIES)
def test_errors_can_be_copied(kind: type[ft.FunctreeError], way: str) -> None:
    error = kind("no", [problem("a"), problem("b", "is worse")])
    again = COPIES[way](error)
    assert type(again) is kind
    assert str(again) == str(error)
    assert again.problems == error.problems


def test_count_and_did_you_mean() -> None:
    assert [count(n, "leaf") for n in (0, 1, 2)] == ["0 leaves", "1 leaf", "2 leaves"]
    assert count(3, "array") == "3 arrays"
    assert did_you_mean("modle", ["data", "model"]) == "; did you mean `model`?"
    assert did_you_mean("zzz", ["data", "model"]) == "" and did_you_mean("a", []) == ""


NEAR = [
    ("hidden", "hiden"), ("hidden", "hiddden"), ("hidden", "hidxen"), ("hidden", "hidedn"), ("hidden", "hiddne"),
    ("hidden", "ihdden"), ("batch", "bacth"), ("embed", "embd"), ("embed", "embbed"), ("seqs", "sesq"),
    ("heads", "haeds"), ("vocab", "bocab"), ("layer1", "layer2"), ("abcd", "xbcd"), ("abcd", "abxcd"),
    ("abcd", "xabcd"),
    ("embed", "emebd"),
]  # fmt: skip
FAR = [
    ("head", "heads"), ("heads", "head"), ("hidden", "hidden2"), ("hidden", "hidde"),  # one begins with the other
    ("seq", "sep"), ("abc", "bac"), ("abc", "abcd"), ("abc", "xabc"),  # three letters, or the shorter has
    ("hidden", "hidden"),  # the same
    ("hidden", "hiddnee"), ("hidden", "hdiedn"), ("hidden", "hxdxen"),  # two edits
    ("abcd", "cbad"), ("abcd", "acdb"), ("abcdef", "badcef"),  # not neighbors; two swaps
    ("embed", "embedding"), ("batch", "branch"), ("heads", "kv_heads"), ("data", "date2"),
]  # fmt: skip


@pytest.mark.parametrize(("left", "right"), NEAR)
def test_near(left: str, right: str) -> None:
    assert near_name(left, ["other", right]) == right
    assert near_name(right, ["other", left]) == left


@pytest.mark.parametrize(("left", "right"), FAR)
def test_far(left: str, right: str) -> None:
    assert near_name(left, [right]) is None
    assert near_name(right, [left]) is None
