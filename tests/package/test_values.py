"""`Value`: immutable, equal and hashable by its parts."""

import copy
import pickle
from typing import Any

import pytest

from functree.values import Value


class Point(Value):
    """Compared by two of its three attributes."""

    __slots__ = ("note", "x", "y")

    def __init__(self, x: Any, y: Any, note: str = ""):
        self._set(x=x, y=y, note=note)

    def _parts(self) -> tuple[Any, ...]:
        return self.x, self.y


class Other(Point):
    __slots__ = ()


@pytest.mark.parametrize(("other", "equal"), [
    (Point(1, 2), True), (Point(1, 2, "noted"), True), (Point(2, 1), False), (Point(1, 3), False),
    (Other(1, 2), False), ((1, 2), False), (None, False),
], ids=range(7))  # fmt: skip
def test_equal_by_class_and_parts(other: Any, equal: bool):
    one = Point(1, 2)
    assert (one == other) is equal and (other == one) is equal
    assert (len({one, other}) == 1) is equal
    if equal:
        assert hash(one) == hash(other)


def test_a_part_that_has_no_hash():
    assert Point([], 1) == Point([], 1)
    with pytest.raises(TypeError, match="unhashable"):
        hash(Point([], 1))


@pytest.mark.parametrize("name", ["x", "note", "new"])
def test_immutable(name: str):
    point = Other(1, 2, "a")
    with pytest.raises(AttributeError, match="Other is immutable"):
        setattr(point, name, 3)
    with pytest.raises(AttributeError, match="Other is immutable"):
        delattr(point, name)
    assert (point.x, point.y, point.note) == (1, 2, "a")


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]
)
def test_copies_have_every_attribute(again: Any):
    point = again(Other(1, [2], "a"))
    assert type(point) is Other and (point.x, point.y, point.note) == (1, [2], "a")
    with pytest.raises(AttributeError, match="immutable"):
        point.x = 3
