"""The planning exercise of the documentation, beside hand arithmetic."""

import doctest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.explorer import paper

PAGE = Path(__file__).parents[2] / "docs" / "will-it-fit.md"


@pytest.fixture(scope="module")
def planned() -> Callable[[str, int], dict[str, int]]:
    """What the page says of the memory of a model on a number of chips."""
    found: dict[str, Any] = {}
    for example in doctest.DocTestParser().get_examples(PAGE.read_text(encoding="utf-8")):
        # What it prints is tested as a doctest.
        if example.source.startswith(("table()", "for name, model")):
            continue
        exec(example.source, found)
    return found["memory"]


@pytest.mark.parametrize("chips", [256, 4096])
@pytest.mark.parametrize("name", paper.ELEMENTS)
def test_memory_by_part(
    planned: Callable[[str, int], dict[str, int]], name: str, chips: int
) -> None:
    assert planned(name, chips) == paper.memory(name, chips // 8, 8)


@pytest.mark.parametrize("name", paper.ELEMENTS)
def test_the_hand_arithmetic_has_the_published_number_of_parameters(name: str) -> None:
    assert sum(paper.ELEMENTS[name]) == pytest.approx(paper.PUBLISHED[name], rel=0.003)
