"""Problems ─► the text of one exception; names that are near each other."""

import pickle

import pytest

import functree as ft
from functree.errors import MAX_GROUPS, MAX_PATHS, count, did_you_mean, near_name


def problem(path: str | None, why: str = "is wrong", remedy: str = "mend it", what: str = "f32[2]") -> ft.Problem:
    return ft.Problem(None if path is None else ft.Path.parse(path), (2,), what, why, remedy)


def test_the_classes() -> None:
    for cls in (ft.AxesError, ft.RuleError, ft.ShardingError, ft.StateError):
        assert issubclass(cls, ft.FunctreeError)
    assert issubclass(ft.ShardingError, ValueError)
    assert not issubclass(ft.RuleError, ValueError)


def test_the_sample_of_the_design_page() -> None:
    error = ft.ShardingError(
        "2 leaves cannot be laid out on mesh (data=4, model=2)",
        [
            problem(
                "blocks.3.mlp.down", '"hidden" has size 1001', 'pad "hidden" to 1002', 'f32[1001, 4]   "hidden embed"'
            ),
            problem("head.weight", '"vocab" has no rule left', "", 'f32[512, 512]   "embed vocab"'),
        ],
    )
    assert str(error) == (
        "2 leaves cannot be laid out on mesh (data=4, model=2)\n"
        "\n"
        '  blocks.3.mlp.down   f32[1001, 4]   "hidden embed"\n'
        '      "hidden" has size 1001\n'
        "\n"
        '  head.weight   f32[512, 512]   "embed vocab"\n'
        '      "vocab" has no rule left\n'
        "\n"
        'Try: pad "hidden" to 1002'
    )
    assert [str(p.path) for p in error.problems] == ["blocks.3.mlp.down", "head.weight"]


def test_leaves_with_the_same_problems_share_a_paragraph() -> None:
    text = str(ft.ShardingError("no", [problem("a"), problem("b"), problem("c", "is worse"), problem("a", "is odd")]))
    assert "  a   f32[2]\n      is wrong\n      is odd\n" in text
    assert "  b   f32[2]\n      is wrong\n" in text and "  c   f32[2]\n      is worse\n" in text
    assert "  a, b   f32[2]\n      is wrong\n" in str(ft.ShardingError("no", [problem("a"), problem("b")]))


def test_many_leaves_are_counted_and_all_in_problems() -> None:
    error = ft.ShardingError("no", [problem(f"l.{i}") for i in range(100)])
    assert f"l.{MAX_PATHS - 1} and {100 - MAX_PATHS} more   f32[2]" in str(error)
    assert f"l.{MAX_PATHS}," not in str(error) and len(error.problems) == 100
    kinds = ft.ShardingError("no", [problem(f"l.{i}", f"why {i}") for i in range(MAX_GROUPS + 3)])
    assert "  and 3 more kinds of problem, all in `.problems`" in str(kinds)
    assert f"why {MAX_GROUPS - 1}" in str(kinds) and f"why {MAX_GROUPS}\n" not in str(kinds)


def test_the_same_remedy_is_said_once() -> None:
    text = str(ft.ShardingError("no", [problem("a"), problem("b"), problem("c", remedy="or this")]))
    assert text.endswith("Try: mend it\n     or this")
    assert "Try" not in str(ft.ShardingError("no", [problem("a", remedy="")]))


def test_a_bare_array_and_no_leaf_at_all() -> None:
    assert "  (the array)   f32[2]\n" in str(ft.ShardingError("no", [problem("")]))
    assert "\n  rule a→b\n      is wrong" in str(ft.ShardingError("no", [problem(None, what="rule a→b")]))


def test_a_headline_alone_is_a_problem_too() -> None:
    error = ft.RuleError("nonsense")
    assert str(error) == "nonsense"
    assert error.problems == (ft.Problem(None, None, "", "nonsense", ""),)


def test_errors_can_be_pickled() -> None:
    error = ft.ShardingError("no", [problem("a"), problem("b", "is worse")])
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is ft.ShardingError and str(again) == str(error) and again.problems == error.problems


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
    ("abcd", "cbad"), ("abcd", "acdb"), ("abcdef", "badcef"),  # not neighbours; two swaps
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
