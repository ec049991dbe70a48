"""The tours, which go through other libraries' documents cell by cell: what these print comes out
here too."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import functree as ft
from tests.examples.scripts import variables_of

# treescope 0.1.10 looks through all of numpy's modules for names, deprecated ones among them (numpy
# 2.5).
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The chararray class is deprecated:DeprecationWarning"),
]


@pytest.fixture
def tour(request, tmp_path, capsys):
    """The tour's variables, and as `out` what it prints, with pictures."""
    variables = variables_of(request.param, "--html", str(tmp_path / "page.html"))
    found = SimpleNamespace(**variables, out=capsys.readouterr().out)
    page = (tmp_path / "page.html").read_text()
    shown = re.findall("<h3>(.*)</h3>", page)
    assert shown and page.count("treescope") >= len(shown), "a picture for each"
    assert f"Pictures: {tmp_path / 'page.html'}" in found.out
    return found


def spec(array: jax.Array) -> P | None:
    """A concrete array's spec, with an entry for each dimension."""
    return ft.plan(array)[()].spec


@pytest.mark.parametrize("tour", ["penzai_tour.py"], indirect=True)
def test_penzai_tour(tour):
    assert tour.counts == {10: 1, 11: 2, 15: 3, 18: 3, 20: 0, 23: 1, 24: 2, 27: 3, 29: 4}
    np.testing.assert_allclose(tour.y, jnp.ones(8) @ tour.model.layers[0].weight, rtol=1e-6)
    assert tour.jit_model.body is tour.model and len(tour.jitted_call.compilations) == 1
    assert tour.arr.tolist() == [[1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]]

    assert tour.arrays[49].tolist() == tour.arr.tolist()
    assert spec(tour.arrays[49]) == P(None, "columns")
    assert spec(tour.tokens) == P("devices", None) and tour.result.shape == (16, 20, 100)
    for result in (tour.fsdp_result, tour.constrained_result):
        assert spec(result) == P("devices", None, None)
        np.testing.assert_allclose(result, tour.result, rtol=1e-4, atol=1e-5)
    assert tour.constraints.count() == 2
    same = jax.tree.map(
        lambda a, b: a is b, tour.tiny_transformer, tour.tiny_transformer_unconstrained
    )
    assert jax.tree.all(same)
    assert "[23, 24] the counter, and the number of compilations: (1, 2, 1)" in tour.out
    assert "[65] constraints: <2 parts of Decoder: blocks.layers.1, blocks.layers.3>" in tour.out


@pytest.mark.parametrize("tour", ["flax_tour.py"], indirect=True)
def test_flax_tour(tour):
    for plan in (tour.state_plan, tour.logical_plan):
        for row in plan:
            wanted = {"w1": P(None, "model"), "w2": P("model", None)}.get(str(row.path[-1]), P())
            assert row.spec == wanted, row.path
    shardings = jax.tree.map(lambda x: x.sharding, tour.initialized_state)
    assert jax.tree.all(jax.tree.map(lambda a, b: a == b, shardings, tour.state_sharding))
    assert not tour.diff.w1.any() and int(tour.new_state.step) == 1
    assert spec(tour.y) == P("data", None) and len(tour.train_step.compilations) == 1
    stacked = tour.scanned_state.model.layers.layer
    assert (spec(stacked.w1), spec(stacked.w2)) == (P(None, None, "model"), P(None, "model", None))
    for line in (
        "[30] annotations are logical, not mesh-specific: embed hidden",
        "[31] the plan is mesh-specific: P(None, 'model')",
        "[19] step: int32[] as P() = 0",
        "[24] y: float32[8, 1024] as P('data', None)",
        "steps, and compilations: (3, 1)",
    ):
        assert f"\n{line}\n" in tour.out


@pytest.mark.parametrize("tour", ["pjit_tour.py"], indirect=True)
def test_pjit_tour(tour):
    smooth = [0.5, 2, 4, 6, 8, 10, 12, 10]
    assert "\nf(x): [ 0.5  2.   4.   6.   8.  10.  12.  10. ]\n" in tour.out, (
        "as in pjit's docstring"
    )
    assert tour.y.tolist() == tour.y_half.tolist() == tour.compiled(tour.whole).tolist() == smooth
    assert spec(tour.y) == spec(tour.y_half) == P("devices")
    assert (len(tour.y.sharding.device_set), len(tour.y_half.sharding.device_set)) == (8, 4)
    mistakes = "no mesh,moved,few,type,unique,rank,undefined,divisible,mesh"
    assert set(tour.messages) == set(mistakes.split(","))
    assert tour.cubed.tolist() == [i**3 for i in range(8)] and tour.donated.is_deleted()
    assert tour.batched.tolist() == [smooth] * 3 and spec(tour.batched) == P(None, "devices")
    assert tour.primal.tolist() == smooth and tour.tangent.tolist() == [1.5, *[2] * 6, 1.5]
    assert spec(tour.tangent) == P("devices") and tour.gradient.tolist() == tour.tangent.tolist()
    assert tour.nested.tolist() == np.convolve(smooth, [0.5, 1, 0.5], "same").tolist()
    assert tour.compiled.output_shardings.spec == P("devices")
