"""Programs of the soak: some of each kind, and that a wrong one is told."""

import jax
import pytest

from tests.soak import layout_programs, training_programs
from tests.soak.each import run_each

# Chosen so that each layout is with and without `over=` and `layout=`, and each population with and
# without micro-batches.
SEEDS = (0, 2, 5, 15, 33, 37, 56, 69, 91, 124, 158, 215, 254)
PROGRAMS = {seed: training_programs.make(seed) for seed in SEEDS}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_is_that_of_one_device(seed: int):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        training_programs.run(PROGRAMS[seed])


@pytest.mark.parametrize("seed", range(40))
def test_a_program_is_that_of_numpy(seed: int):
    layout_programs.run(layout_programs.make(seed))


def test_there_are_some_of_each_kind():
    found = PROGRAMS.values()
    transforms = {"vmap", "vmap with a name", "filter_vmap"}
    assert {one.population for one in found} == {None, *transforms}
    for field in ("explicit", "over", "weighted", "rules", "given", "kept"):
        assert {getattr(one, field) for one in found} == {False, True}, field
    assert {one.micro for one in found} == {0, 1, 2, 4}
    assert {one.layout for one in found} == set(training_programs.LAYOUTS)
    assert {one.optimizer for one in found} == set(training_programs.OPTIMIZERS)


def test_a_program_that_fails_is_listed(capsys: pytest.CaptureFixture[str]):
    def run(seed: int) -> None:
        if seed == 5:
            raise ValueError("other values")

    assert run_each(range(4, 7), lambda seed: seed, run, verbose=False) == 1
    told = capsys.readouterr().out
    assert "FAILED 5" in told and "ValueError: other values" in told
    assert "seeds 4 to 6: 1 failed [5]" in told
    assert run_each(range(6, 8), lambda seed: seed, run, verbose=False) == 0
