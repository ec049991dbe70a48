"""The paths of an optimizer's state ─► the parameters that each leaf may belong to."""

import pytest

import functree as ft
from functree.labels.optimizer.followed_parameters import STEPS, owners_of

MANY = [f"layers.{i}.w" for i in range(STEPS + 1)]

# The paths of the parameters; for each path of the state, the parameters, the most likely one first.
CASES: dict[str, tuple[list[str], dict[str, list[str]]]] = {
    "of nothing": (["w"], {"count": [], "0.count": []}),
    "behind a prefix": (["w", "a.b"], {"0.mu.w": ["w"], "0.mu.a.b": ["a.b"], "nu.w": ["w"]}),
    "without a prefix": (["w", "a.b"], {"w": ["w"], "a.b": ["a.b"]}),
    "several leaves of one": (["w"], {"mu.w.row": ["w"], "mu.w.column": ["w"]}),
    "the longest path": (["w", "w.a"], {"mu.w": ["w"], "mu.w.a": ["w.a"]}),
    "one called as the state is": (
        ["w", "mu"],
        {"0.mu.w": ["w", "mu"], "0.mu.mu": ["mu"]},
    ),
    "one called as the state is, beside what is of nothing": (
        ["w", "mu"],
        {"0.count": [], "0.mu.w": ["w"], "0.mu.mu": ["mu"]},
    ),
    "one called as the end of another": (
        ["w", "a.w"],
        {"mu.w": ["w"], "mu.a.w": ["a.w", "w"]},
    ),
    "the shorter prefix of two that are as good": (["a", "b"], {"a.b": ["a", "b"]}),
    "of the whole": ([""], {"": [""], "mu": [""], "0.count": [""]}),
    "of one half": (
        ["fast.w", "slow.w", "fast.b", "slow.b"],
        {"mu.w": ["fast.w", "slow.w"], "mu.b": ["fast.b", "slow.b"]},
    ),
    "the longest end": (
        ["x.a.w", "y.a.w", "z.b.w"],
        {"mu.a.w": ["x.a.w", "y.a.w"], "mu.c.w": ["x.a.w", "y.a.w", "z.b.w"]},
    ),
    "as many as sizes tell apart": (MANY[:-1], {"mu.w": MANY[:-1], "count": []}),
    "more than sizes tell apart": (MANY, {"mu.w": [], "count": []}),
}


def paths(several: list[str]) -> list[ft.Path]:
    return [ft.Path.parse(one) for one in several]


@pytest.mark.parametrize("case", CASES)
def test_owners(case: str) -> None:
    parameters, expected = CASES[case]
    found = owners_of(paths(list(expected)), paths(parameters))
    assert {str(path): list(map(str, owners)) for path, owners in found.items()} == expected
