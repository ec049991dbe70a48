"""A plan ─► the text of a golden file, and the assertion that a plan is as the file says."""

import difflib
import os
from pathlib import Path

from functree.argument_checks import LOCAL_FILE, check, shown
from functree.devices.specs import spec_text
from functree.errors import FunctreeTypeError, count
from functree.layout.plan.plan import Plan
from functree.layout.plan.text import groups_of
from functree.report.table import bytes_text
from functree.tree.arrays import array_text

UPDATE = "FUNCTREE_UPDATE_GOLDEN"
"""The environment variable that has golden files written."""


def assert_layout(plan: Plan, file: str | os.PathLike[str]) -> None:
    """Assert that a plan is as a text file says, which a person can review in a pull request.

    The file has a line for each leaf, in which the layers of a list are one: path, array, axes,
    spec, bytes on each device. Run the tests with `FUNCTREE_UPDATE_GOLDEN=1` to write it.

    Args:
        plan: the plan.
        file: the path of the text file.

    Raises:
        AssertionError: the plan is another one; the message has the lines that differ. Or there is
            no such file.
        FunctreeError: `plan` is not a plan.

    Examples:
        >>> plan = ft.plan(
        ...     {"w": jnp.ones((8, 16))},
        ...     ft.P(None, "model"),
        ...     {"data": 2, "model": 4},
        ... )
        >>> ft.testing.assert_layout(plan, "layouts/missing.txt")
        Traceback (most recent call last):
            ...
        AssertionError: there is no file layouts/missing.txt: write it with
        FUNCTREE_UPDATE...
    """
    if not isinstance(plan, Plan):
        raise FunctreeTypeError(
            f"assert_layout takes a plan, `ft.plan(tree, layout, mesh)`, not {shown(plan)}"
        )
    check("assert_layout has nothing to compare with", file=(file, LOCAL_FILE))
    path, text = Path(file), golden_text(plan)
    # "0" is no too: so one test can compare in a run that writes the others.
    if os.environ.get(UPDATE, "") not in ("", "0"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    # Not written by itself: in CI a file that was not committed would pass for ever.
    if not path.exists():
        raise AssertionError(f"there is no file {path}: write it with {UPDATE}=1, and review it")
    before = path.read_text(encoding="utf-8")
    if before == text:
        return
    lines = difflib.unified_diff(
        before.splitlines(), text.splitlines(), str(path), "the plan", lineterm="", n=1
    )
    raise AssertionError(
        "\n".join([f"the layout is not that of {path} (if it is meant: {UPDATE}=1)", "", *lines])
    )


def golden_text(plan: Plan) -> str:
    """The text of a golden file: no columns, so that a change of one leaf is one of one line."""
    total = bytes_text(plan.bytes_per_device)
    lines = [f"mesh {plan.view}, {count(len(plan), 'array')}, {total} on each device", ""]
    for group in groups_of(plan.rows):
        row = group.rows[0]
        axes = f'  "{row.axes}"' if any(row.axes) else ""
        spec = "-" if row.spec is None else spec_text(row.spec)
        kind = f" {row.memory_kind}" if row.memory_kind else ""
        size = bytes_text(group.per_device)
        lines.append(f"{group.title}  {array_text(row)}{axes}  {spec}{kind}  {size}")
    # A plan with `check=False` may have problems. They are a part of the layout that is reviewed.
    for problem in plan.problems:
        lines.append(f"PROBLEM {problem.path or problem.what}: {problem.why}")
    return "\n".join(lines) + "\n"
