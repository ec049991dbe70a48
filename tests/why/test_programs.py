"""Programs that were labeled before they were run: whether their collectives are told rightly, and
whether nothing is called avoidable that is not."""

import pkgutil
from importlib import import_module

import jax
import pytest

import functree as ft
import tests.why
from tests.why.program import PROGRAMS, Program, text_of

for _module in pkgutil.iter_modules(tests.why.__path__):
    if not _module.name.startswith(("test_", "mistake")):
        import_module(f"tests.why.{_module.name}")

# The rows on whose label and verdict differ at most, and why the verdict stays.
DISAGREEMENTS = {
    "experts-sorted-over-devices": (1, "`x[order]` looks up in a sharded dimension"),
    "label-smoothing-with-swapped-names": (1, "the sum belongs to the wrong constraint"),
    "linen-flattened-width": (2, "gradients of biases are summed over the batch"),
    "lstm-fused-gates": (5, "the compiler splits products over an axis that nothing uses"),
    "neighbors-on-one-axis": (1, "`top_k` needs other code, as its hint says"),
    "time-major-constraint": (1, "a constraint asks for it, though its author did not mean it"),
}
# The programs whose cause is another operation than the label says.
# The width reaches all layers, and the images are relaid for the last convolution.
OTHER_OPERATIONS = {"unet-width-for-height"}
# Those whose cause lacks an origin.
OTHER_ORIGINS = set[str]()
# Those in which no row is what the label of the cause expects.
NO_ROW = {"neighbors-on-one-axis"}

if jax.__version_info__ >= (0, 12):
    _RENAMED = "the compiler names it by an operation beside it, or not at all"
    DISAGREEMENTS |= {"contrastive": (1, _RENAMED)}
    OTHER_OPERATIONS |= {"clipped-as-one-vector", "contrastive"}
    OTHER_ORIGINS |= {"clipped-as-one-vector", "contrastive"}
    # This compiler partitions the transforms, and moves the scores for their product.
    NO_ROW = {"fourier-operator"}


def ledger_of(program: Program) -> ft.Ledger:
    mesh = ft.make_mesh(data=2, model=2, **{program.third: 2}, explicit=program.explicit)
    with jax.set_mesh(mesh):
        fn, args, layouts = program.make(mesh)
        if hasattr(fn, "lower"):
            return ft.ledger(fn, *args)
        return ft.ledger(fn, *args, mesh=mesh, **layouts)


@pytest.mark.slow
@pytest.mark.usefixtures("compiles_anew")
@pytest.mark.parametrize("name", PROGRAMS)
def test_verdicts_and_causes(name: str):
    program = PROGRAMS[name]
    ledger = ledger_of(program)
    wrong = [one for one in ledger.collectives if one.verdict != program.verdict(one)]
    most, _ = DISAGREEMENTS.get(name, (0, ""))
    assert len(wrong) <= most, [(one.kind, one.mesh_axes, str(one.cause)) for one in wrong]

    labeled = program.cause
    rows = [
        one
        for one in ledger.collectives
        if labeled.row.matches(one) and program.verdict(one) == labeled.row.verdict
    ]
    assert bool(rows) == (name not in NO_ROW)
    if not rows:
        return
    cause = max(rows, key=lambda one: one.total).cause
    assert cause is not None
    if name not in OTHER_OPERATIONS:
        assert labeled.expression in cause.op + cause.expression + text_of(cause.source)
    if name in OTHER_ORIGINS:
        return
    told = [origin + text_of(origin) for origin in cause.origins]
    for wanted in labeled.origins:
        assert any(wanted in text for text in told), (wanted, told)


def test_what_differs_is_about_programs_that_there_are():
    assert set(PROGRAMS) >= {*DISAGREEMENTS, *OTHER_OPERATIONS, *OTHER_ORIGINS, *NO_ROW}
