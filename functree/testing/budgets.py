"""Assertions compare a plan with a golden file, or a ledger with a budget."""

import difflib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from functree.argument_checks import EXTENT, ITERABLE, LOCAL_FILE, TEXT, Takes, check, shown
from functree.compiled.collective import Collective, total_of
from functree.compiled.data_flow import KINDS
from functree.compiled.ledger import Ledger
from functree.compiled.table import rows_of_parameters
from functree.devices.meshes import spec_text
from functree.errors import (
    FunctreeTypeError,
    FunctreeValueError,
    count,
    did_you_mean,
)
from functree.layout.plan.plan import Plan
from functree.layout.plan.text import groups_of
from functree.report.table import bytes_text
from functree.tree.arrays import array_text

Kind = str | tuple[str, str | tuple[str, ...]]
"""A kind of collective, with or without mesh axes: `"all-reduce"`, `("all-reduce", "model")`."""

SHOWN = 10
"""The maximum number of collectives or arguments that a message lists."""

UPDATE = "FUNCTREE_UPDATE_GOLDEN"
"""The name of the environment variable that makes `assert_layout` write golden files."""

_KINDS = ITERABLE._replace(text="a set of kinds, such as `{'all-reduce'}`")


def _numbers(at_most: Any) -> Collection[Any]:
    return at_most.values() if isinstance(at_most, Mapping) else [at_most]


_BYTES = Takes(
    "a number of bytes, or a dict that maps kinds to numbers of bytes",
    lambda value: all(map(EXTENT.fits, _numbers(value))),
)

# Layouts


def assert_layout(plan: Plan, file: str | os.PathLike[str]) -> None:
    """Assert that a plan matches a golden text file, which you can review in a pull request.

    The file contains a line for each leaf, with the leaf's path, array, axes, spec and bytes per
    device. Identical layers of a list share a line. To write the file, run the tests with
    `FUNCTREE_UPDATE_GOLDEN=1`.

    Args:
        plan: the plan to check.
        file: the path of the golden file.

    Raises:
        AssertionError: if the file does not exist.
        AssertionError: if the plan differs from the file. The message lists the lines that differ.
        FunctreeError: if `plan` is not a plan.
        FunctreeError: if `file` is not a local path.

    Examples:
        >>> plan = ft.plan(
        ...     {"w": jnp.ones((8, 16))},
        ...     ft.P(None, "model"),
        ...     {"data": 2, "model": 4},
        ... )
        >>> ft.testing.assert_layout(plan, "layouts/missing.txt")
        Traceback (most recent call last):
            ...
        AssertionError: the file layouts/missing.txt does not exist: create it
        with FUNCTREE_UPDATE...
    """
    if not isinstance(plan, Plan):
        raise FunctreeTypeError(
            f"assert_layout takes a plan, `ft.plan(tree, layout, mesh)`, not {shown(plan)}"
        )
    check("assert_layout: invalid arguments", file=(file, LOCAL_FILE))
    path, text = Path(file), golden_text(plan)
    # "0" disables writing, so that a test can compare its file in a run that writes other files.
    if os.environ.get(UPDATE, "") not in ("", "0"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    # A missing file is an error. If it were written, a test whose file was never committed would
    # always pass in CI.
    if not path.exists():
        raise AssertionError(
            f"the file {path} does not exist: create it with {UPDATE}=1, and review it"
        )
    before = path.read_text(encoding="utf-8")
    if before == text:
        return
    lines = difflib.unified_diff(
        before.splitlines(), text.splitlines(), str(path), "the plan", lineterm="", n=1
    )
    raise AssertionError(
        "\n".join(
            [
                f"the layout differs from {path}: if the change is intended, update the file with "
                f"{UPDATE}=1",
                "",
                *lines,
            ]
        )
    )


def golden_text(plan: Plan) -> str:
    """Format a plan for a golden file so that a changed leaf changes only one line.

    Columns are not aligned.
    """
    total = bytes_text(plan.bytes_per_device)
    lines = [f"mesh {plan.view}, {count(len(plan), 'array')}, {total} on each device", ""]
    for group in groups_of(plan.rows):
        row = group.rows[0]
        axes = f'  "{row.axes}"' if any(row.axes) else ""
        spec = "-" if row.spec is None else spec_text(row.spec)
        kind = f" {row.memory_kind}" if row.memory_kind else ""
        size = bytes_text(group.per_device)
        lines.append(f"{group.title}  {array_text(row)}{axes}  {spec}{kind}  {size}")
    # A plan with `check=False` may have problems, which are reviewed too.
    for problem in plan.problems:
        lines.append(f"PROBLEM {problem.path or problem.what}: {problem.why}")
    return "\n".join(lines) + "\n"


# Collectives and memory


def assert_collectives(
    ledger: object,
    allow: Collection[Kind] | None = None,
    at_most: int | Mapping[Kind, int] | None = None,
) -> None:
    """Assert that a program contains only allowed collectives and moves at most the allowed bytes.

    Args:
        ledger: a ledger, or a compiled function.
        allow: the allowed collectives: kinds, or pairs of a kind and mesh axes. None allows all.
        at_most: the maximum number of bytes that the program may move to each device, in total or
            for each kind. The bytes of all loop iterations are included.

    Raises:
        AssertionError: if the program contains collectives that are not allowed. The message lists
            them with their parameters and bytes.
        AssertionError: if the program moves more bytes than allowed. The message lists the
            collectives that move them.
        AssertionError: if there is a limit, but the ledger could not read a part of the program.
        FunctreeError: if an argument is invalid.

    Examples:
        >>> mesh = ft.make_mesh(data=2, model=4)
        >>> shapes = [
        ...     jax.ShapeDtypeStruct(shape, "float32")
        ...     for shape in [(64, 32), (16, 64)]
        ... ]
        >>> layouts = (ft.P("model"), ft.P(None, "model"))
        >>> options = dict(in_shardings=layouts, out_shardings=ft.P(), mesh=mesh)
        >>> ledger = ft.ledger(lambda w, x: x @ w, *shapes, **options)
        >>> ft.testing.assert_collectives(
        ...     ledger, allow={("all-reduce", "model")}, at_most=2048
        ... )
        >>> ft.testing.assert_collectives(ledger, allow={"all-gather"})
        Traceback (most recent call last):
            ...
        AssertionError: the program has collectives that are not allowed
          all-reduce over model, 2 KiB: w, x
    """
    check(
        "assert_collectives: invalid arguments",
        allow=(allow, _KINDS.or_none()),
        at_most=(at_most, _BYTES.or_none()),
    )
    found = _ledger_of(ledger)
    # A part that could not be read may contain any collective, and a loop of unknown length may
    # move any number of bytes. Ignoring them would make the assertion meaningless.
    if found.not_understood and (allow is not None or at_most is not None):
        raise AssertionError(
            "\n  ".join(["the program cannot be compared with a budget:", *found.not_understood])
        )
    # All kinds are parsed first, so that another failure does not hide a misspelled kind.
    allowed, budgets = [_Kind()], dict[_Kind, int]()
    if allow is not None:
        allowed = [_kind(one, found) for one in allow]
    if isinstance(at_most, Mapping):
        budgets = {_kind(one, found): size for one, size in at_most.items()}
    elif at_most is not None:
        budgets = {_Kind(): at_most}
    others = [one for one in found.collectives if not any(kind.covers(one) for kind in allowed)]
    if others:
        raise AssertionError(f"the program has collectives that are not allowed\n{_listed(others)}")
    for kind, most in budgets.items():
        moved = list(filter(kind.covers, found.collectives))
        total = total_of(moved)
        if total > most:
            raise AssertionError(
                f"{kind} moves {bytes_text(total)}, which is {bytes_text(total - most)} more than "
                f"the budget of {bytes_text(most)}\n"
                f"{_listed(moved)}"
            )


def assert_peak_memory(compiled: object, bytes: int) -> None:
    """Assert that a program's peak memory on one device is within a budget.

    Args:
        compiled: a compiled function, or its ledger.
        bytes: the budget in bytes.

    Raises:
        AssertionError: if the program needs more memory than the budget. The message lists the
            memory of temporaries, outputs and the largest arguments.
        FunctreeError: if `compiled` is neither a compiled function nor a ledger.
        FunctreeError: if `bytes` is not an integer of at least 0.
    """
    check("assert_peak_memory: invalid arguments", bytes=(bytes, EXTENT))
    memory = _ledger_of(compiled).memory
    if memory.peak <= bytes:
        return
    lines = [
        f"the program needs {bytes_text(memory.peak)} on each device, which is "
        f"{bytes_text(memory.peak - bytes)} more than the budget of {bytes_text(bytes)}",
        f"  temporaries {bytes_text(memory.temporaries)}, outputs {bytes_text(memory.outputs)}",
    ]
    # Arguments are listed by path, since a layout can make them smaller.
    largest = sorted(memory.arguments.items(), key=lambda item: item[1], reverse=True)
    for path, size in largest[:SHOWN]:
        lines.append(f"  {path} {bytes_text(size)}")
    raise AssertionError("\n".join(lines))


def _ledger_of(value: object) -> Ledger:
    if isinstance(value, Ledger):
        return value
    make = getattr(value, "ledger", None)
    if make is None:
        raise FunctreeTypeError(
            f"pass a ledger, or a function compiled by `ft.jit`, not {shown(value)}"
        )
    return make()


class _Kind(NamedTuple):
    """A kind of collective in a budget.

    Attributes:
        name: the name of the kind, such as `"all-reduce"`; empty for all.
        axes: the mesh axes, in any order; None for all.
    """

    name: str = ""
    axes: tuple[str, ...] | None = None

    def covers(self, collective: Collective) -> bool:
        """Return whether a collective is of this kind."""
        if self.name not in ("", collective.kind):
            return False
        return self.axes is None or set(collective.mesh_axes or ()) == set(self.axes)

    def __str__(self) -> str:
        if self.axes is None:
            return self.name or "the program"
        return f"{self.name} over {', '.join(self.axes)}"


def _kind(written: object, ledger: Ledger) -> _Kind:
    """Parse the kind of collective that a user wrote.

    A kind that cannot occur in the program is refused, since a budget for it would always hold.

    Raises:
        FunctreeError: if there is no such kind.
        FunctreeError: if the program has no such mesh axis.
    """
    name, axes = written, None
    if isinstance(written, tuple) and len(written) == 2:
        name, axes = written
    if name not in KINDS:
        raise FunctreeValueError(
            f"{shown(written)} is not a kind of collective: use one of {', '.join(KINDS)}"
            f"{did_you_mean(name, KINDS)}"
        )
    if axes is None:
        return _Kind(str(name))
    if not isinstance(axes, tuple | list):
        axes = (axes,)
    if not all(map(TEXT.fits, axes)):
        raise FunctreeTypeError(
            f"{shown(written)}: write mesh axes as strings, such as ('all-reduce', 'model')"
        )
    for axis in axes:
        if axis not in ledger.sizes:
            known = ", ".join(ledger.sizes) or "none"
            raise FunctreeValueError(
                f"{shown(written)}: the program has no mesh axis `{axis}`; its mesh axes: {known}"
                f"{did_you_mean(axis, ledger.sizes)}"
            )
    return _Kind(str(name), tuple(axes))


def _listed(moved: Collection[Collective]) -> str:
    """Format collectives as lines of a message, the largest first."""
    rows = rows_of_parameters(list(moved))
    lines: list[str] = []
    for row in rows[:SHOWN]:
        lines.append(f"  {row.kind} over {row.axes}, {bytes_text(row.total)}: {row.title}")
    if len(rows) > SHOWN:
        lines.append(f"  and {len(rows) - SHOWN} more")
    return "\n".join(lines)
