"""A spec and its entries ─► mesh axes and back, and their texts: pure functions, from tables."""

import pytest
from jax.sharding import PartitionSpec

from functree.devices.meshes import (
    named_axes,
    spec_text,
    without,
)

P = PartitionSpec


@pytest.mark.parametrize(
    ("spec", "named", "without_data", "text"),
    [
        (P(), set(), P(), "P()"),
        (P("data"), {"data"}, P(None), "P('data')"),
        (P(None, "model"), {"model"}, P(None, "model"), "P(None, 'model')"),
        (P(("data", "model")), {"data", "model"}, P("model"), "P(('data', 'model'))"),
        (P(("model", "data", "x"), "y"), {*("data", "model", "x", "y")}, P(("model", "x"), "y"),
         "P(('model', 'data', 'x'), 'y')"),
        (P(P.UNCONSTRAINED, "data"), {"data"}, P(None, None), "P(P.UNCONSTRAINED, 'data')"),
        (P("data", unreduced={"x"}), {"data"}, P(None), "P('data', unreduced={'x'})"),
        (P("data", reduced={"x"}), {"data"}, P(None), "P('data', reduced={'x'})"),
    ],
)  # fmt: skip
def test_a_spec(spec: P, named: set[str], without_data: P, text: str):
    assert named_axes(spec) == named
    assert (
        without(spec, {"data"}) == without_data
        and without(spec, ["data", "nowhere"]) == without_data
    )
    assert spec_text(spec) == text
