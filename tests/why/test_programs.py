"""Programs that were labelled before they were run: whether their collectives are told rightly."""

import pkgutil
from importlib import import_module

import jax
import pytest

import functree as ft
import tests.why
from tests.why.program import Program

PROGRAMS: list[Program] = []
for _module in pkgutil.iter_modules(tests.why.__path__):
    if not _module.name.startswith("test_"):
        PROGRAMS += getattr(import_module(f"tests.why.{_module.name}"), "PROGRAMS", ())


def named(program: Program) -> str:
    return program.name


@pytest.mark.parametrize("program", PROGRAMS, ids=named)
def test_it_lowers(program: Program):
    mesh = ft.make_mesh(data=2, model=2, **{program.third: 2}, explicit=program.explicit)
    with jax.set_mesh(mesh):
        fn, args, layouts = program.make(mesh)
        if not hasattr(fn, "lower"):
            fn = ft.jit(fn, mesh=mesh, **layouts)
        assert fn.lower(*args) is not None
