"""Replica groups in all their spellings, against groups that are written out by numpy."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from functree.compiled.moved_arrays import groups_of, mesh_axes_of
from tests.lib.meshes import SIZES

SPELLINGS: dict[str, tuple[tuple[int, ...], ...] | None] = {
    "{{0,1},{2,3}}": ((0, 1), (2, 3)),
    "{{0,3,2},{1}}": ((0, 3, 2), (1,)),
    "{{0,4},{4,0}}": ((0, 4), (4, 0)),
    "{}": ((0, 1, 2, 3, 4, 5, 6, 7),),
    "[2,4]<=[8]": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "[4,2]<=[2,4]T(1,0)": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "[1,8]<=[8]": ((0, 1, 2, 3, 4, 5, 6, 7),),
    "mesh['data'=2,'model'=4] {'data'}": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_0','axis_1'}": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "mesh['data'=2,'model'=4] {'model','data'}": ((0, 4, 1, 5, 2, 6, 3, 7),),
    "mesh['x'=8] {'x':(1)2}": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "mesh['x'=8] {'x':(2)2}": ((0, 2), (1, 3), (4, 6), (5, 7)),
    "mesh['x'=8] {'x':(4)2}": ((0, 1), (2, 3), (4, 5), (6, 7)),
    "mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'x'}": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "mesh['x'=2,'y'=2], device_ids=(3,1,2,0) {'y'}": ((3, 1), (2, 0)),
    # Not known: nothing is guessed.
    "mesh['x'=8] {'y'}": None,
    "mesh['x'=8] {'x':(1)2,'x':(4)2}": None,
    "mesh['x'=4], device_ids=(0,1) {'x'}": None,
    "[2,2,2]<=[8]": None,
    "all of them": None,
}


@pytest.mark.parametrize(("text", "groups"), SPELLINGS.items(), ids=range(len(SPELLINGS)))
def test_each_spelling(text: str, groups: Any) -> None:
    assert groups_of(text, 8) == groups


MESHES = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 4), min_size=1, max_size=4)


@given(MESHES, st.data())
def test_all_spellings_of_some_axes_have_these_axes(
    sizes: dict[str, int], data: st.DataObject
) -> None:
    chosen = [name for name in sizes if data.draw(st.booleans(), label=name)]
    ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    kept = [i for i, name in enumerate(sizes) if name not in chosen]
    last = [i for i, name in enumerate(sizes) if name in chosen]
    rows = (
        ids.transpose(*kept, *last)
        .reshape(-1, math.prod([sizes[name] for name in chosen]))
        .tolist()
    )
    order = ",".join(map(str, [*kept, *last]))
    shape = f"{len(rows)},{len(rows[0])}"
    axes = ",".join(f"'{name}'={size}" for name, size in sizes.items())
    for text in (
        "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in rows) + "}",
        f"[{shape}]<=[{','.join(map(str, sizes.values()))}]T({order})",
        f"mesh[{axes}] {{{','.join(map(repr, chosen))}}}",
    ):
        groups = groups_of(text, ids.size)
        assert groups == tuple(map(tuple, rows)), text
        assert mesh_axes_of(groups, sizes) == tuple(name for name in chosen if sizes[name] > 1), (
            text
        )


# Groups, or the pairs of a permute, and the mesh axes that vary in them.
VARYING: list[tuple[Any, dict[str, int], tuple[str, ...] | None]] = [
    (((0, 2), (1, 3), (4, 6), (5, 7)), {"data": 8}, ("data",)),  # a part of an axis
    (((0, 1), (2, 3)), SIZES, ("model",)),
    (((0, 4), (4, 0), (1, 5), (5, 1)), SIZES, ("data",)),
    (((3, 4),), SIZES, ("data", "model")),
    ((), SIZES, ()),
    (((3,), ()), SIZES, ()),
    (((0, 8),), SIZES, None),  # a position that the mesh does not have
]


@pytest.mark.parametrize(("groups", "sizes", "axes"), VARYING)
def test_mesh_axes_that_vary(groups: Any, sizes: dict[str, int], axes: Any) -> None:
    assert mesh_axes_of(groups, sizes) == axes
