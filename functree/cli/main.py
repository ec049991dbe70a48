"""Inspect a model's layout before you run the model. No program runs, and no
array is allocated.

  plan      show how and why each array is sharded, and its bytes per device.
  ledger    show what a compiled program moves, and the memory it needs.
  explore   compile for several meshes and layouts, and rank them.
  why       explain why a compiled program moves arrays, and find edits.

Each command takes MODULE:FACTORY, a function without parameters in one of your
modules. For `plan`, the factory returns a tree. For the other commands, it
returns a function and its arguments:

  # demo.py
  import functree as ft, jax, jax.numpy as jnp, optax
  from jaxtyping import Array, Int

  def state():
      config = ft.nn.TransformerConfig(32000, 512, 8, 8, 8, 64, 2048, 1024)
      model = ft.nn.Transformer.create(config, key=jax.random.key(0))
      return ft.TrainState.create(model, optax.adamw(1e-4))

  def train():
      @ft.jit(donate="state")
      def step(state, tokens: Int[Array, "batch _"]):
          ...
      return step, (state(), jax.ShapeDtypeStruct((64, 1025), jnp.int32))
"""

import os
import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import jax

from functree.cli.factory import check_devices, is_call, made, made_call, prepare
from functree.cli.failure import (
    FINE,
    INTERRUPTED,
    PROBLEMS,
    UNUSABLE,
    Failure,
    UsersCode,
    refusing,
    say,
)
from functree.cli.parser import (
    NO_LAYOUT,
    given_layout,
    given_layouts,
    mesh_or_devices,
    mesh_sizes,
    parsed,
)
from functree.compiled.ledger import Ledger
from functree.devices.make_mesh import make_mesh
from functree.devices.targets import Target
from functree.errors import FunctreeError, FunctreeWarning
from functree.explorer.explore import NOT_COMPILED, explore
from functree.explorer.ranking import Ranking
from functree.explorer.step import Step
from functree.explorer.why import Why, why
from functree.layout.plan.make_plan import plan_tree
from functree.layout.plan.plan import Plan

# Errors about layouts, and the compiler's errors.
_OF_LAYOUTS = (FunctreeError, jax.errors.JaxRuntimeError)


class Outcome(NamedTuple):
    """The result of a command.

    Attributes:
        report: the report to print.
        code: the exit code.
        note: a note for standard error.
    """

    report: Plan | Ledger | Ranking | Why
    code: int = FINE
    note: str = ""


# A command's docstring is its help text.


def plan(options: Namespace) -> Outcome:
    """Show how each array is sharded.

    examples:
      functree plan demo:state --mesh data=8,model=4 --layout demo:layout
      functree plan demo:state --mesh data=8,model=4 \\
          --rules batch=data,hidden=model,...=none --html plan.html
    """
    layout = given_layout(options)
    if layout is None:
        raise Failure(NO_LAYOUT)
    tree, note = made(options.factory), ""
    if is_call(tree):
        tree, note = tree[1][0], "this is the plan of the function's first argument"
        if isinstance(layout, tuple) and layout:  # one layout for each argument
            layout = layout[0]
    with refusing():
        report = plan_tree(tree, layout, options.mesh[0], check=False)
    return Outcome(report, PROBLEMS if report.problems else FINE, note)


def ledger(options: Namespace) -> Outcome:
    """Show what a compiled program moves, and the memory it needs.

    examples:
      functree ledger demo:train --mesh data=2,model=4 --layout demo:layout \\
          --devices 8
      functree ledger demo:train --mesh data=8,model=4 --layout demo:layout \\
          --target tpu:v5e:4x8
      functree ledger demo:train --mesh data=8,model=1 --layout demo:layout \\
          --target cuda:h100:8 --json
    """
    step, given = _step(options)
    with UsersCode(f"{step.name} raised", *_OF_LAYOUTS):
        return Outcome(step.compile(given).ledger())


def explained(options: Namespace) -> Outcome:
    """Explain why a compiled program moves arrays, and find edits that move less.

    examples:
      functree why demo:train --mesh data=2,model=4 --layout demo:layout --devices 8
      functree why demo:train --mesh data=8,model=4 --layout demo:layout \\
          --target tpu:v5e:4x8 --compilations 4 --html why.html
    """
    step, given = _step(options)
    with UsersCode(f"{step.name} raised", *_OF_LAYOUTS):
        return Outcome(why(step.jitted(given), *step.args, compilations=options.compilations))


def _step(options: Namespace) -> tuple[Step, dict[str, Any]]:
    """Build the step of a command, and its options for `ft.jit`."""
    layout = given_layout(options)
    if not options.mesh and (layout is not None or options.target is not None):
        raise Failure("a layout and --target need a mesh: add `--mesh data=8,model=4`")
    given: dict[str, Any] = {}
    for sizes in options.mesh:
        with refusing():  # invalid names of mesh axes, or a missing compiler
            given["mesh"] = make_mesh(target=options.target, **sizes)
    call = made_call(options.factory)
    with refusing(f"{options.factory}: "):
        step = Step(*call)
    if layout is not None:
        with refusing():
            given |= step.options(layout)
    return step, given


def explored(options: Namespace) -> Outcome:
    """Rank meshes and layouts by a score of their compiled programs.

    examples:
      functree explore demo:train --layout demo:layouts --target tpu:v6e:4x8
      functree explore demo:train --layout demo:layouts --devices 8 \\
          --mesh data=8,model=1 --mesh data=4,model=2
    """
    layouts = given_layouts(options)
    meshes = options.mesh or [options.devices or len(jax.devices())]
    if options.target is not None and not options.mesh:
        meshes = [Target.read(options.target).size]
    step, args = made_call(options.factory)
    with UsersCode(f"{options.factory}: the function raised", *_OF_LAYOUTS), refusing():
        ranking = explore(step, args, meshes=meshes, layouts=layouts, target=options.target)
    if any(NOT_COMPILED in row.problems for row in ranking):
        return Outcome(ranking, INTERRUPTED, "interrupted: only some candidates were compiled")
    return Outcome(ranking, FINE if ranking.best else PROBLEMS)


COMMANDS = {"plan": plan, "ledger": ledger, "explore": explored, "why": explained}
"""The functions of the commands, by name."""


def _prepare(options: Namespace) -> None:
    """Parse a command's meshes and target, and configure JAX's devices for them.

    Raises:
        Failure: if a mesh or target cannot be parsed.
        Failure: if an option occurs several times, but the command accepts it only once.
        Failure: if the number of devices does not fit a mesh.
    """
    is_plan, read = options.command == "plan", mesh_or_devices
    if options.command != "explore":
        read = mesh_sizes
        for option, values in (("--mesh", options.mesh), ("--layout", options.layout)):
            if values is not None and len(values) > 1:
                raise Failure(
                    f"{option} is given {len(values)} times, but only `explore` accepts several "
                    "values"
                )
    if options.devices is not None and options.target is not None:
        raise Failure(
            "--devices simulates CPUs, but --target has its own devices: give only one of them"
        )
    target = None
    if options.target is not None:
        with refusing():
            target = Target.read(options.target)
    options.mesh = list(map(read, options.mesh or []))
    prepare(options.devices, only_compile=is_plan or target is not None)
    for mesh in options.mesh:
        if target is not None or not is_plan:  # a plan needs only sizes
            check_devices(mesh, target, options.devices)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        arguments: the command-line arguments; None for `sys.argv[1:]`.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parsed(given, __doc__, _version(), COMMANDS)
    command = f"functree {options.command}"
    sys.path.insert(0, os.getcwd())  # so that modules in the current folder can be imported
    try:
        if options.html is not None:
            _check_page(options.html)
        # Keep the output of the user's functions out of standard output.
        with _short_warnings(command), redirect_stdout(sys.stderr):
            _prepare(options)
            outcome = COMMANDS[options.command](options)
        _show(outcome, options.json, options.html)
        return outcome.code
    except (Failure, *_OF_LAYOUTS) as error:
        if options.traceback:
            traceback.print_exception(error)
        if isinstance(error, Failure):
            say(f"{command}: error: {error}")
            return UNUSABLE
        # The error lists the layout's problems in paragraphs.
        say(f"{command}: {error}")
        return PROBLEMS
    except KeyboardInterrupt:
        say(f"{command}: interrupted")
        return INTERRUPTED


def _version() -> str:
    try:
        return version("functree")
    except PackageNotFoundError:  # a checkout that is not installed
        return "(not installed)"


def _check_page(page: str) -> None:
    """Raise Failure before the compilation, which may take minutes, if a page cannot be written."""
    if not page or Path(page).is_dir():
        raise Failure(f"--html {page!r} is not a file: write, for example, `--html out.html`")
    folder = Path(page).parent
    if not folder.is_dir():
        raise Failure(f"--html {page}: there is no folder {folder}: create it")
    if not os.access(page if os.path.exists(page) else folder, os.W_OK):
        raise Failure(f"--html {page}: permission denied: write to another file")


def _show(outcome: Outcome, as_json: bool, page: str | None) -> None:
    if outcome.note:
        say(f"functree: {outcome.note}")
    report = outcome.report
    _print(report.to_json() if as_json else str(report))
    # Last, so that the report is printed even if the page cannot be written.
    if page is not None:
        try:
            Path(page).write_text(report.html(), encoding="utf-8")
        except OSError as error:
            raise Failure(f"--html {page}: {error.strerror}") from error


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError as error:
        # Prevent a second error when Python closes the output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # `| head` closes the pipe early.
        if not isinstance(error, BrokenPipeError):
            raise Failure(f"cannot write the output: {error.strerror}") from error


@contextmanager
def _short_warnings(command: str) -> Iterator[None]:
    """Show each warning on one line, without its line of code."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", FunctreeWarning)

        def show(message: Warning | str, category: type[Warning], *where: object) -> None:
            say(f"{command}: warning: {' '.join(str(message).split())}")

        warnings.showwarning = show
        yield
