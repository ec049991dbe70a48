"""The arguments of the command line ─► what is printed, and the exit code."""

import os
import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh

from functree.cli.factory import (
    check_devices,
    importing_from_here,
    is_call,
    made,
    made_call,
    mesh_of,
    prepare,
)
from functree.cli.failure import FINE, INTERRUPTED, PROBLEMS, UNUSABLE, Failure, UsersCode, say
from functree.cli.parser import given_layout, given_layouts, mesh_or_devices, mesh_sizes, parsed
from functree.devices.targets import Target
from functree.errors import (
    FunctreeError,
    FunctreeTypeError,
    FunctreeWarning,
    RuleError,
    ShardingError,
)
from functree.explorer.explore import NOT_COMPILED, explore
from functree.explorer.step import Step
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


def _compiled(step: Step, layout: LayoutTree, mesh: Mesh | None) -> Report:
    options: dict[str, Any] = {}
    if layout is not None:
        try:
            options |= step.options(layout)
        except RuleError as error:
            raise Failure(str(error)) from error
    if mesh is not None:
        options["mesh"] = mesh
    with UsersCode(f"{step.name} raised", passes=_OF_LAYOUTS):
        return step.compile(options).ledger()


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code.

    Args:
        arguments: the arguments; None for those of the process.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parsed(given, _version())
    command = f"functree {options.command}"
    try:
        if options.html is not None:
            _check_page(options.html)
        with importing_from_here(), _short_warnings(command), redirect_stdout(sys.stderr):
            # What the user's own functions print is not what was asked for.
            outcome = COMMANDS[options.command](options)
        _show(outcome, options.json, options.html)
        return outcome.code
    except Failure as failure:
        return _failed(command, failure, failure.code, options.traceback)
    except FunctreeError as error:
        # It lists what is wrong with the layout, a paragraph for each kind.
        return _failed(command, error, PROBLEMS, options.traceback)
    except jax.errors.JaxRuntimeError as error:
        return _failed(command, error, PROBLEMS, options.traceback)
    except KeyboardInterrupt:
        say(f"{command}: interrupted")
        return INTERRUPTED


def _version() -> str:
    try:
        return version("functree")
    except PackageNotFoundError:  # a checkout that is not installed
        return "(not installed)"


def _check_page(page: str) -> None:
    """Raise Failure if a page cannot be written: a program may take minutes to compile."""
    if not page or Path(page).is_dir():
        raise Failure(f"--html {page!r} is no file to write to")
    folder = Path(page).parent
    if not folder.is_dir():
        raise Failure(f"--html {page}: there is no folder {folder}")
    if not os.access(page if os.path.exists(page) else folder, os.W_OK):
        raise Failure(f"--html {page}: it may not be written")


def _show(outcome: Outcome, as_json: bool, page: str | None) -> None:
    if outcome.note:
        say(f"functree: {outcome.note}")
    report = outcome.report
    _print(report.to_json() if as_json else str(report))
    # Last, so that what was found out is seen wherever the page cannot be written.
    if page is not None:
        try:
            Path(page).write_text(report.html(), encoding="utf-8")
        except OSError as error:
            raise Failure(f"--html {page}: {error.strerror}") from error


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError as error:
        # Python would complain again when it closes the output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # As `| head` ends it.
        if not isinstance(error, BrokenPipeError):
            raise Failure(f"the output cannot be written: {error.strerror}") from error


def _failed(command: str, error: Exception, code: int, with_traceback: bool) -> int:
    if with_traceback:
        traceback.print_exception(error)
    if code == UNUSABLE:
        say(f"{command}: error: {error}")
    else:
        say(f"{command}: {error}")
    return code


@contextmanager
def _short_warnings(command: str) -> Iterator[None]:
    """A context in which our warnings are one line each, without the line of code."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", FunctreeWarning)

        def show(message: Warning | str, category: type[Warning], *where: object) -> None:
            say(f"{command}: warning: {' '.join(str(message).split())}")

        warnings.showwarning = show
        yield
