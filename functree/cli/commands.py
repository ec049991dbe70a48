"""The options of a command ─► what it prints, and its exit code."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from functree.cli.devices import check_devices, mesh_of, prepare
from functree.cli.factory import is_call, made, made_call
from functree.cli.failure import FINE, INTERRUPTED, PROBLEMS, Failure, UsersCode
from functree.cli.layout_option import given_layout, given_layouts
from functree.cli.mesh_option import mesh_or_devices, mesh_sizes
from functree.devices.targets import Target
from functree.errors import FunctreeError, FunctreeTypeError, RuleError, ShardingError
from functree.explorer.explore import NOT_COMPILED, explore
from functree.explorer.step import Laid, Step
from functree.layout.layout import LayoutTree
from functree.layout.plan.make_plan import plan_tree


class Report(Protocol):
    """What a command shows: a plan, a ledger, a ranking."""

    def html(self) -> str: ...
    def to_json(self) -> str: ...


class Outcome(NamedTuple):
    """What a command found.

    Attributes:
        report: what is shown.
        code: the exit code.
        note: what is said beside it, on the standard error.
    """

    report: Report
    code: int = FINE
    note: str = ""


def plan(options: Namespace) -> Outcome:
    """`functree plan`."""
    sizes = mesh_sizes(_only("--mesh", options.mesh))
    target = _target(options.target)
    if target is not None:
        check_devices(sizes, target, None)
    prepare(None, only_compile=True)
    layout = given_layout(options)
    if layout is None:
        raise Failure("give a layout: `--layout module:name`, or `--rules batch=data,...=none`")
    tree, note = made(options.factory), ""
    if is_call(tree):
        tree, note = tree[1][0], "planned is the first argument of the function"
        if isinstance(layout, tuple) and layout:  # one layout for each argument
            layout = layout[0]
    try:
        found = plan_tree(tree, layout, sizes, check=False)
    except RuleError as error:
        raise Failure(str(error)) from error
    return Outcome(found, PROBLEMS if found.problems else FINE, note)


def ledger(options: Namespace) -> Outcome:
    """`functree ledger`."""
    _check_devices(options)
    sizes = None if options.mesh is None else mesh_sizes(_only("--mesh", options.mesh))
    target = _target(options.target)
    laid_out = any(one is not None for one in (options.layout, options.rules, options.fsdp))
    if sizes is None and (laid_out or target is not None):
        raise Failure("a layout and --target need a mesh: `--mesh data=8,model=4`")
    prepare(options.devices, only_compile=target is not None)
    layout = given_layout(options)
    mesh = None if sizes is None else mesh_of(sizes, options.target, options.devices)
    return Outcome(_compiled(_step(options.factory), layout, mesh))


def _step(factory: str) -> Step:
    step, args = made_call(factory)
    try:
        return Step(step, args)
    except FunctreeTypeError as error:
        raise Failure(f"{factory}: {str(error).removeprefix('explore: ')}") from error


def _compiled(step: Step, layout: LayoutTree, mesh: Any) -> Report:
    laid: Laid | None = None
    if layout is not None:
        try:
            laid = step.laid(layout)
        except RuleError as error:
            raise Failure(str(error)) from error
    with UsersCode(f"{step.name} raised", passes=_OF_LAYOUTS):
        return step.compile(laid, None, mesh).ledger()


# About the layout, or of the compiler.
_OF_LAYOUTS = (FunctreeError, jax.errors.JaxRuntimeError)


def explored(options: Namespace) -> Outcome:
    """`functree explore`."""
    _check_devices(options)
    target = _target(options.target)
    meshes: list[Mapping[str, int] | int] = list(map(mesh_or_devices, options.mesh or []))
    prepare(options.devices, only_compile=target is not None)
    layouts = given_layouts(options)
    if not meshes and target is not None:
        meshes = [target.size]
    elif not meshes:
        meshes = [options.devices or len(jax.devices())]
    for one in meshes:
        check_devices(one, target, options.devices)
    step, args = made_call(options.factory)
    with UsersCode(f"{options.factory}: the function raised", passes=_OF_LAYOUTS):
        try:
            found = explore(step, args, meshes=meshes, layouts=layouts, target=options.target)
        except (ShardingError, RuleError, FunctreeTypeError) as error:
            raise Failure(str(error).removeprefix("explore: ")) from error
    if any(NOT_COMPILED in row.problems for row in found):
        return Outcome(found, INTERRUPTED, "interrupted: this is what was compiled until then")
    return Outcome(found, FINE if found.best else PROBLEMS)


COMMANDS = {"plan": plan, "ledger": ledger, "explore": explored}
"""The commands by name."""


def _only(option: str, given: Sequence[str]) -> str:
    if len(given) > 1:
        raise Failure(f"{option} is given {len(given)} times: only `explore` takes several")
    return given[0]


def _check_devices(options: Namespace) -> None:
    if options.devices is not None and options.target is not None:
        raise Failure("--devices simulates CPUs, and --target has devices of its own: give one")


def _target(text: str | None) -> Target | None:
    if text is None:
        return None
    try:
        return Target.read(text)
    except ShardingError as error:
        raise Failure(str(error).replace("target=", "--target ")) from error
