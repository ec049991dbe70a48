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

import math
import os
import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import jax

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
    is_call,
    made,
    made_call,
    parsed,
)
from functree.compiled.ledger import Ledger
from functree.devices.make_mesh import make_mesh
from functree.devices.targets import Target
from functree.errors import FunctreeError, FunctreeWarning, count
from functree.explorer.explore import NOT_COMPILED, explore
from functree.explorer.ranking import Ranking
from functree.explorer.step import Step
from functree.explorer.why import Why, why
from functree.layout.decide import plan_leaves
from functree.layout.layout import read_on_mesh
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
    layout, sizes = given_layout(options), options.mesh
    if layout is None:
        raise Failure(NO_LAYOUT)
    if options.target is not None:
        with refusing():
            target = Target.read(options.target)
        if math.prod(sizes.values()) != target.size:
            raise Failure(
                f"--target {target.text} has {target.size} devices, but the mesh has "
                f"{math.prod(sizes.values())}: change one of them"
            )
    tree, note = made(options.factory), ""
    if is_call(tree):
        tree, note = tree[1][0], "this is the plan of the function's first argument"
        if isinstance(layout, tuple) and layout:  # one layout for each argument
            layout = layout[0]
    with refusing():
        report = plan_leaves(*read_on_mesh(tree, layout, sizes), check=False)
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
    if options.mesh is None and (layout is not None or options.target is not None):
        raise Failure("a layout and --target need a mesh: add `--mesh data=8,model=4`")
    given: dict[str, Any] = {}
    if options.mesh is not None:
        with refusing():  # invalid names of mesh axes, or a missing compiler
            given["mesh"] = make_mesh(target=options.target, **options.mesh)
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
        with refusing():
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
    """Configure JAX's devices for a command."""
    is_plan = options.command == "plan"
    if options.devices is not None:
        jax.config.update("jax_platforms", "cpu")
        with suppress(RuntimeError):  # JAX has already created its devices
            jax.config.update("jax_num_cpu_devices", options.devices)
    elif (is_plan or options.target is not None) and not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")  # the command needs no accelerator
    if is_plan or options.target is not None:
        return
    meshes = options.mesh if isinstance(options.mesh, list) else [options.mesh]
    for mesh in filter(None, meshes):
        _check_devices(mesh)


def _check_devices(mesh: Mapping[str, int] | int) -> None:
    """Raise Failure if this machine has too few devices for a mesh."""
    needed = math.prod(mesh.values()) if isinstance(mesh, Mapping) else mesh
    have = len(jax.devices())
    if needed > have:
        raise Failure(
            f"the mesh needs {count(needed, 'device')}, but JAX has {have}: add `--devices "
            f"{needed}` to simulate them, or a target, such as `--target tpu:v5e:2x4`"
        )


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
            # A page that cannot be written is an error before the compilation, which may take
            # minutes. A command that fails leaves no empty page.
            is_new = not os.path.lexists(options.html)
            _write(options.html, "a", "")
            if is_new:
                os.remove(options.html)
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


def _write(page: str, mode: str, text: str) -> None:
    """Write a page, or raise Failure."""
    try:
        with open(page, mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise Failure(f"--html {page}: {error.strerror}") from error


def _show(outcome: Outcome, as_json: bool, page: str | None) -> None:
    if outcome.note:
        say(f"functree: {outcome.note}")
    report = outcome.report
    _print(report.to_json() if as_json else str(report))
    # Last, so that the report is printed even if the page cannot be written.
    if page is not None:
        _write(page, "w", report.html())


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # `| head` closes the pipe early. Prevent a second error when Python closes the output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _short_warnings(command: str) -> Iterator[None]:
    """Show each warning on one line, without its line of code."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", FunctreeWarning)

        def show(message: Warning | str, category: type[Warning], *where: object) -> None:
            say(f"{command}: warning: {' '.join(str(message).split())}")

        warnings.showwarning = show
        yield
