"""Mistakes that were planted before anything was run: whether the edits that mend them are found."""

import inspect
import pkgutil
from importlib import import_module

import jax
import pytest

import functree as ft
import tests.why
from tests.why.mistake import Mistake

MODULES = [
    import_module(f"tests.why.{module.name}")
    for module in pkgutil.iter_modules(tests.why.__path__)
    if module.name.startswith("mistakes_")
]
MISTAKES: list[Mistake] = [mistake for module in MODULES for mistake in module.MISTAKES]


def named(mistake: Mistake) -> str:
    return mistake.name


@pytest.mark.parametrize("mistake", MISTAKES, ids=named)
@pytest.mark.parametrize("variant", ["make", "mended"])
def test_it_lowers(mistake: Mistake, variant: str):
    mesh = ft.make_mesh(data=2, model=2, **{mistake.third: 2})
    with jax.set_mesh(mesh):
        fn, args, layouts = getattr(mistake, variant)(mesh)
        if not hasattr(fn, "lower"):
            fn = ft.jit(fn, mesh=mesh, **layouts)
        assert fn.lower(*args) is not None


def test_each_is_named_once():
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_lines_that_are_named_are_there(module):
    text = inspect.getsource(module)
    code = text[: text.index("MISTAKES: ")]
    for mistake in module.MISTAKES:
        if mistake.edit in ("constraint", None):
            assert code.count(mistake.named) == 1, mistake.name
