"""Mistakes that were planted before anything was run: whether the edits that mend them are found."""

import pkgutil
from importlib import import_module
from typing import Any

import pytest
from jax.sharding import Mesh

import functree as ft
import tests.why
from functree.explorer.edits import Edits
from functree.transforms.ledger import call_of
from tests.why.mistake import MISTAKES, Mistake
from tests.why.program import text_of

for _module in pkgutil.iter_modules(tests.why.__path__):
    if _module.name.startswith("mistakes_"):
        import_module(f"tests.why.{_module.name}")


def named(mistake: Mistake) -> str:
    return mistake.name


# How the edit that mends it is found; a fix is one that needs no more flops and memory.
FOUND = {
    "documents: hidden on the axis of the sequence": "not",  # it needs a mesh axis that is idle
    "inverted residual: an override transposed": "trade",
    "language model: the table of logits over embed": "trade",
    "patches: the batch on another axis": "trade",
}


@pytest.mark.slow
@pytest.mark.usefixtures("compiles_anew")
@pytest.mark.parametrize("mistake", MISTAKES, ids=named)
def test_it_is_named_and_mended(mistake: Mistake):
    mesh = ft.make_mesh(data=2, model=2, **{mistake.third: 2})
    why = explained(*mistake.make(mesh), mesh)
    edits = [f"{fix.change} {text_of(fix.source)}" for fix in (*why.fixes, *why.trades)]
    told = [told for row in why.rows if row.cause is not None for told in told_of(row.cause)]
    assert any(mistake.named in text for text in (*edits, *told)), (edits, told)

    fn, args, layouts = mistake.mended(mesh)
    mended = ft.ledger(fn, *args, mesh=mesh, **layouts)
    moved = sum(one.total for one in mended.collectives)
    found = {
        kind
        for kind, fixes in (("fix", why.fixes), ("trade", why.trades))
        for fix in fixes
        if mistake.named in f"{fix.change} {text_of(fix.source)}"
        and fix.moved[1] == pytest.approx(moved, rel=0.01)
        and fix.peak[1] == pytest.approx(mended.memory.peak, rel=0.01)
    }
    wanted = FOUND.get(mistake.name, "fix")
    if mistake.edit is None:
        assert why.hints and not why.fixes
    elif wanted != "not":
        assert wanted in found, edits
    assert_keeps_to_its_word(why)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES, ids=named)
def test_edits_but_for_rules_give_a_program(mistake: Mistake):
    """The search passes over an edit that cannot be lowered, so that it would hide a defect."""
    mesh = ft.make_mesh(data=2, model=2, **{mistake.third: 2})
    fn, args, layouts = mistake.make(mesh)
    call = call_of("why", fn, args, {}, layouts["in_shardings"], layouts.get("out_shardings"), mesh)
    ledger, _ = call.compiled()
    for edit in Edits(call, args, {}, call.layouts(), ledger):
        if not edit.place.startswith("rule "):
            assert edit.lower() is not None, edit.change


def assert_keeps_to_its_word(why: ft.Why) -> None:
    """What every answer promises."""
    for fix in why.fixes:
        assert fix.peak[1] <= 1.02 * fix.peak[0] and fix.flops[1] <= 1.05 * fix.flops[0]
    for fix in (*why.fixes, *why.trades):
        assert fix.moved[1] < fix.moved[0]
        for data in why.data:
            assert f"`{data}`" not in fix.change and f"`{data}." not in fix.change
    assert not set(why.fixes) & set(why.trades)
    assert why.fixes or all(row.verdict != "avoidable" for row in why.rows)


def explained(fn: Any, args: tuple[Any, ...], layouts: dict[str, Any], mesh: Mesh) -> ft.Why:
    return ft.why(fn, *args, mesh=mesh, progress=False, **layouts)


def told_of(cause: Any) -> list[str]:
    """All that a cause names, with the lines of code that it names."""
    names = [cause.expression, cause.source or "", *cause.origins]
    return [f"{name} {text_of(name)}" for name in names]
