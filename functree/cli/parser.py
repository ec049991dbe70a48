"""`parsed` parses a command line. Other functions here parse its meshes and layouts.

`made` runs a factory, given as `module:factory`, without allocating arrays.
"""

import argparse
import importlib
import inspect
import operator
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any, NoReturn

import equinox as eqx
import shtab
from jax.core import Tracer

from functree.argument_checks import shown
from functree.calls.closures import closed_over, held
from functree.cli.failure import UNUSABLE, Failure, UsersCode, refusing
from functree.devices.meshes import entry
from functree.errors import RuleError, did_you_mean
from functree.layout.fsdp import FSDP
from functree.layout.layout import Layout, LayoutTree
from functree.layout.rules import AxisRules
from functree.tree.arrays import Tree
from functree.tree.skeleton.skeleton import Skeleton

# Factories


def made(text: str) -> Tree:
    """Run a factory abstractly, without allocating arrays, and return its value.

    Raises:
        Failure: if the factory cannot be imported.
        Failure: if the factory raises an error.
        Failure: if the factory returns no arrays.
    """
    factory = named(text, "factory")
    with UsersCode(f"{text} raised"):
        value = eqx.filter_eval_shape(factory)
    if not is_call(value) and not Skeleton.apart(value)[1]:
        raise Failure(
            f"{text} returned {shown(value)}, which has no arrays: return a tree of arrays, or a "
            "function with its arguments"
        )
    return value


def made_call(text: str) -> tuple[Callable[..., Tree], tuple[Tree, ...]]:
    """Run a factory that returns a function and its arguments.

    Raises:
        Failure: if the factory returns anything else.
    """
    value = made(text)
    if is_call(value):
        step, args = value
        for path, one in held(closed_over(inspect.unwrap(step))):
            # A tracer from the factory's trace, which has ended.
            if isinstance(one, Tracer):
                raise Failure(
                    f"{text}: the function closes over `{path}`, an array that has no value, "
                    "because the factory is only traced: pass the array as an argument, or create "
                    "it in the function"
                )
        return step, tuple(args)
    raise Failure(
        f"{text} returned {shown(value)} instead of a function with its arguments: write "
        "`return step, (state, batch)`"
    )


def is_call(value: object) -> bool:
    """Return whether a value is a pair of a function and its arguments."""
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    step, args = value
    return callable(step) and isinstance(args, tuple | list)


def named(text: str, what: str) -> Any:
    """Import the value that `module:name` refers to.

    Args:
        text: the module and the name.
        what: the expected kind, "factory" or "layout", for messages.

    Raises:
        Failure: if `text` does not have the form `module:name`.
        Failure: if the module cannot be imported.
        Failure: if the module does not define the name.
    """
    module_name, _, name = text.partition(":")
    if not all(module_name.split(".")) or not all(name.split(".")):
        raise Failure(
            f"{text!r} is not a {what}: write `module:name`, where the module is installed or in "
            "the current folder"
        )
    value = _imported(module_name)
    for part in name.split("."):
        if not hasattr(value, part):
            known = [one for one in dir(value) if not one.startswith("_")]
            raise Failure(f"{module_name} has no `{part}`{did_you_mean(part, known)}")
        value = getattr(value, part)
    return value


def _imported(name: str) -> Any:
    with UsersCode(f"{name} cannot be imported"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # With a different name, the module exists, but an import inside it failed.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            here = [path.stem for path in Path.cwd().glob("*.py")]
            raise Failure(f"no module named `{error.name}`{did_you_mean(name, here)}") from error


# Options

_LAYOUTS = """\
A layout is a Python value in one of your modules. It may be a tuple of layouts
(one for each argument) or, for `explore`, a dict of candidates:

  # demo.py
  rules = ft.AxisRules({"batch": "data", "hidden": "model", ...: None})
  layout = rules | ft.FSDP("data")
  layouts = {"tensor": (rules, ft.P("data")), "both": (layout, ft.P("data"))}

Short rules need no module, and are tried in order. `none` leaves an axis
unsharded, `data+model` means two mesh axes, and --fsdp shards more dimensions:

  --rules batch=data,hidden=model,...=none --fsdp data
"""

_CODES = """\
exit codes: 0 success; 1 the layout has problems, or no program fits in device
memory; 2 the command failed; 130 the command was interrupted.
"""


class _Once(argparse.Action):
    """An option that can be given once. By default, argparse uses the last of several values."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        if hasattr(self, "given"):
            parser.error(f"{option} is given twice: write it once")
        self.given = namespace.__dict__[self.dest] = values


class Parser(argparse.ArgumentParser):
    """An argument parser with one-line errors."""

    def __init__(self, **options: Any):
        form = partial(argparse.RawDescriptionHelpFormatter, max_help_position=30, width=80)
        super().__init__(**options, allow_abbrev=False, formatter_class=form)
        self.register("action", None, _Once)

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: error: {message} (see `{self.prog} --help`)\n")
        raise SystemExit(UNUSABLE)


def parsed(
    arguments: Sequence[str],
    description: str | None,
    version: str,
    commands: Mapping[str, Callable[..., Any]],
) -> Namespace:
    """Parse a command line. Exit on `--help` and on invalid options.

    Args:
        arguments: the command-line arguments.
        description: the beginning of the help text.
        version: functree's version.
        commands: the commands' functions, by name. Their docstrings are the help texts.
    """
    main = Parser(
        prog="functree",
        description=description,
        epilog=f"{_LAYOUTS}\n`functree COMMAND --help` has examples.\n\n{_CODES}",
    )
    main.add_argument("--version", action="version", version=f"functree {version}")
    shtab.add_argument_to(
        main,
        "--print-completion",
        help='print a completion script for a shell: `eval "$(functree --print-completion bash)"`',
    )
    parsers = main.add_subparsers(
        dest="command", metavar="COMMAND", parser_class=Parser, required=True
    )
    for name, function in commands.items():
        summary, _, examples = str(inspect.getdoc(function)).partition("\n\n")
        command = parsers.add_parser(
            name,
            help=summary[0].lower() + summary[1:].rstrip("."),
            description=summary,
            epilog=f"{examples}\n\n{_LAYOUTS}\n{_CODES}",
        )
        _add_options(command, name)
    return main.parse_args(arguments)


def _add_options(command: Parser, name: str) -> None:
    add, again = command.add_argument, ""
    several: dict[str, Any] = {}
    read_mesh: Callable[[str], Any] = mesh_sizes
    mesh, layout = "the sizes of the mesh axes", "the layout"
    target = "compile for devices that you don't have, such as tpu:v5e:4x8 or cuda:h100:8"
    example = "demo:train"
    if name in ("ledger", "why"):
        layout += " of the arguments; by default, the function's own layouts"
    elif name == "explore":
        again, several, read_mesh = "; may be given several times", {"action": "append"}, _mesh
        mesh += ", or a number of devices to arrange in every way; by default, all devices"
        layout = "a layout, or a dict of layouts"
    else:
        example, mesh = "demo:state", f"{mesh} (required)"
        target = "check that the mesh has as many devices as this target, such as tpu:v5e:4x8"
    add("factory", metavar="MODULE:FACTORY", help=f"such as {example}")
    add(
        "--mesh",
        metavar="data=8,model=4",
        type=read_mesh,
        required=name == "plan",
        help=f"{mesh}{again}",
        **several,
    )
    add("--layout", metavar="MODULE:NAME", help=f"{layout}{again}", **several)
    add("--rules", metavar="batch=data,...=none", help="short rules instead of a layout")
    leftover = "the mesh axis that shards dimensions that the rules leave unsharded"
    add("--fsdp", metavar="data", help=leftover)
    add("--target", metavar="tpu:v5e:4x8", help=target)
    command.set_defaults(devices=None)
    if name != "plan":
        add("--devices", type=_number, metavar="N", help="compile for N simulated CPU devices")
    if name == "why":
        add("--compilations", type=_number, default=8, metavar="N", help="compile at most N edits")
    page = add("--html", metavar="out.html", help="also write an HTML page")
    page.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
    add("--json", action="store_true", help="print JSON instead of text")
    add("--traceback", action="store_true", help="show the traceback of an error")


def _number(text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,5}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def mesh_sizes(text: str) -> dict[str, int]:
    """Parse `data=8,model=4` into `{"data": 8, "model": 4}`."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([^\s=,]+)\s*=\s*([0-9]{1,9})\s*", part)
        if match is None or int(match[2]) < 1 or match[1] in sizes:
            raise argparse.ArgumentTypeError(
                f"{text!r}: write `name=size` pairs with different names, such as "
                "`--mesh data=8,model=4`"
            )
        sizes[match[1]] = int(match[2])
    return sizes


def _mesh(text: str) -> dict[str, int] | int:
    """Parse a mesh's sizes, or a number of devices."""
    return int(text) if text.isdecimal() else mesh_sizes(text)


_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_RULE = re.compile(rf"\s*({_NAME}|\.\.\.)\s*=\s*({_NAME}(?:\+{_NAME})*)\s*")
_RULES = "write rules such as `--rules batch=data,hidden=model,...=none`"


def given_layout(options: Namespace) -> LayoutTree:
    """Return the layout for `plan`, `ledger` or `why`, or None if there is none.

    The layout comes from `--layout`, or from `--rules` and `--fsdp`.

    Raises:
        Failure: if `--layout` is combined with `--rules` or `--fsdp`.
        Failure: if the layout cannot be imported or parsed.
    """
    short = _short_layout(options.rules, options.fsdp)
    if options.layout is None:
        return short
    if short is not None:
        raise Failure("--layout cannot be combined with --rules or --fsdp: give one or the other")
    return named(options.layout, "layout")


def given_layouts(options: Namespace) -> Mapping[str, LayoutTree]:
    """Return the layouts for `explore`, by name.

    Raises:
        Failure: if there is no layout.
        Failure: if two layouts have the same name.
        Failure: if a layout cannot be imported or parsed.
    """
    layouts: dict[str, LayoutTree] = {}

    def add(option: str, name: str, layout: LayoutTree) -> None:
        if name in layouts:
            raise Failure(f"{option}: two layouts are named `{name}`: rename one of them")
        layouts[name] = layout

    for text in options.layout or []:
        value: Any = named(text, "layout")
        # A dict holds several candidates.
        if not isinstance(value, dict):
            value = {text.partition(":")[2]: value}
        for name, layout in value.items():
            add(f"--layout {text}", name, layout)
    short = _short_layout(options.rules, options.fsdp)
    if short is not None:
        add("--rules and --fsdp", "rules", short)
    if not layouts:
        raise Failure(NO_LAYOUT)
    return layouts


NO_LAYOUT = "give a layout: `--layout module:name`, or `--rules batch=data,...=none`"


def _short_layout(rules: str | None, fsdp: str | None) -> Layout | None:
    """Parse `--rules batch=data,hidden=model,...=none` and `--fsdp data`.

    Raises:
        Failure: if a rule or a mesh axis is invalid.
    """
    parts: list[Layout] = []
    if rules is not None:
        with refusing(f"--rules {rules!r}: "):
            parts.append(AxisRules(map(_rule, rules.split(","))))
    if fsdp is not None:
        with refusing(f"--fsdp {fsdp!r}: "):
            parts.append(FSDP(fsdp.split("+")))
    if not parts:
        return None
    return reduce(operator.or_, parts)


def _rule(text: str) -> tuple[Any, Any]:
    """Parse a rule that maps an axis to a mesh axis, to mesh axes joined with `+`, or to `none`."""
    match = _RULE.fullmatch(text)
    if match is None:
        raise RuleError(f"{text!r} is not a rule: {_RULES}")
    name: Any = ... if match[1] == "..." else match[1]
    if match[2] == "none":
        return name, None
    return name, entry(match[2].split("+"))
