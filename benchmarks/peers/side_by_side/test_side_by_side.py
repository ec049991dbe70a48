"""The programs of the documentation's comparison compute the same, and the tables match them.

They need the extra `bench`, which `.ci/run` installs.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from side_by_side import LIBRARIES, MISTAKES, lines, said, trained
from tables import said_table

HERE = Path(__file__).parent

# The libraries raise these warnings when they are imported and when they run.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning"
)


@pytest.mark.parametrize(
    "library", [name for name in LIBRARIES if name != "functree"]
)
def test_all_compute_the_same(library: str) -> None:
    ours, theirs = trained("functree"), trained(library)
    np.testing.assert_allclose(theirs.losses, ours.losses, rtol=1e-5)
    assert ours.losses[-1] < 0.1 * ours.losses[0]
    assert (
        theirs.shards
        == ours.shards
        == {(64, 256): (64, 64), (256, 16): (64, 16)}
    )


def test_the_table_of_mistakes() -> None:
    found = {
        name: {mistake: said(name, mistake) for mistake in MISTAKES}
        for name in LIBRARIES
    }
    assert (
        said_table(found)
        == (HERE / "said.md").read_text(encoding="utf-8").splitlines()
    )


def test_the_lines() -> None:
    table = (HERE / "times.md").read_text(encoding="utf-8")
    found = dict(
        re.findall(r"^\| ([^|]+) \| (\d+) \|", table, re.MULTILINE)
    )
    assert found == {
        title: str(lines(name)) for name, title in LIBRARIES.items()
    }
