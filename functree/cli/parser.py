"""The options of the command line, what their help says, and the meshes and layouts in them."""

import argparse
import re
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import shtab

from functree.cli.factory import named
from functree.cli.failure import UNUSABLE, Failure
from functree.errors import RuleError, did_you_mean
from functree.layout.fsdp import FSDP
from functree.layout.layout import Layout, LayoutTree
from functree.layout.rules import AxisRules

PROGRAM = "functree"
COMMANDS = ("plan", "ledger", "explore")
_WIDTH = 80

_DESCRIPTION = """\
Look at the layout of a model before it runs: no array is allocated, and nothing
is run.

  plan      how each array is laid out on a mesh, why, and its bytes on a device
  ledger    what the compiled program moves between devices, and keeps in memory
  explore   compile several meshes and layouts, and rank them

Each takes MODULE:FACTORY, a function without arguments in one of your modules.
It returns the tree for `plan`, and for the others a function and its arguments:

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

_LAYOUTS = """\
A layout is Python, in one of your modules, a tuple of layouts (one for each
argument), or for `explore` a dict of candidates:

  # demo.py
  rules = ft.AxisRules({"batch": "data", "hidden": "model", ...: None})
  layout = rules | ft.FSDP("data")
  layouts = {"tensor": (rules, ft.P("data")), "both": (layout, ft.P("data"))}

Short rules can be written in place, tried in their order; `none` leaves an axis
unsharded, `data+model` is several mesh axes, and --fsdp shards what is left:

  --rules batch=data,hidden=model,...=none --fsdp data
"""

_EXAMPLES = {
    "plan": """\
examples:
  functree plan demo:state --mesh data=8,model=4 --layout demo:layout
  functree plan demo:state --mesh data=8,model=4 \\
      --rules batch=data,hidden=model,...=none --html plan.html
""",
    "ledger": """\
examples:
  functree ledger demo:train --mesh data=2,model=4 --layout demo:layout \\
      --devices 8
  functree ledger demo:train --mesh data=8,model=4 --layout demo:layout \\
      --target tpu:v5e:4x8
  functree ledger demo:train --mesh data=8,model=1 --layout demo:layout \\
      --target cuda:h100:8 --json
""",
    "explore": """\
examples:
  functree explore demo:train --layout demo:layouts --target tpu:v6e:4x8
  functree explore demo:train --layout demo:layouts --devices 8 \\
      --mesh data=8,model=1 --mesh data=4,model=2
""",
}

_CODES = """\
exit codes: 0 all is well; 1 the layout has problems, or the program does not
fit; 2 the command could not be carried out; 130 it was interrupted.
"""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the nearest of what is known."""

    def __init__(self, **options: Any):
        self._known: list[str] = []  # the options, which the base class adds some of
        super().__init__(**options, formatter_class=_Formatter)

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        self._known += [name for name in names if name.startswith("-")]
        return super().add_argument(*names, **options)

    def check(self, options: Iterable[str]) -> None:
        """End with an error for the first option that is not known."""
        # Before they are parsed: else a misspelled option would be told as a missing one.
        for option in options:
            name = option.partition("=")[0]
            if name.startswith("--") and name not in self._known:
                self.error(f"there is no option {name}{did_you_mean(name, self._known)}")

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"argument COMMAND: invalid choice: '([^']*)'", message)
        if wrong is not None:
            message = f"there is no command `{wrong[1]}`{did_you_mean(wrong[1], COMMANDS)}"
        elif message.endswith("required: COMMAND"):
            message = f"give a command: {', '.join(COMMANDS)}"
        sys.stderr.write(f"{self.prog}: error: {message} (`{self.prog} --help` explains)\n")
        raise SystemExit(UNUSABLE)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Text as it is written, and the rest as wide as the terminal, up to the width of the text."""

    def __init__(self, prog: str):
        width = min(_WIDTH, max(40, shutil.get_terminal_size().columns))
        super().__init__(prog, max_help_position=30, width=width)


def parsed(arguments: Sequence[str], version: str) -> argparse.Namespace:
    """The options of a command line. Wrong ones, and `--help`, end the process."""
    found, commands = _parsers(version)
    for i, argument in enumerate(arguments):
        # Behind a command are the options of the command.
        if not argument.startswith("-"):
            found.check(arguments[:i])
            if argument in commands:
                commands[argument].check(arguments[i + 1 :])
            break
    else:
        found.check(arguments)
    return found.parse_args(arguments)


def _parsers(version: str) -> tuple[Parser, dict[str, Parser]]:
    """The parser of the whole command line, and those of its commands."""
    found = Parser(
        prog=PROGRAM,
        description=_DESCRIPTION,
        epilog=f"{_LAYOUTS}\n`functree COMMAND --help` has examples.\n\n{_CODES}",
    )
    found.add_argument("--version", action="version", version=f"functree {version}")
    shtab.add_argument_to(
        found,
        "--print-completion",
        help='print completions for a shell: `eval "$(functree --print-completion bash)"`',
    )
    commands = found.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=Parser
    )
    by_name: dict[str, Parser] = {}
    for name, told, example in (
        ("plan", "how each array is laid out", "demo:state"),
        ("ledger", "what a compiled program moves and keeps", "demo:train"),
        ("explore", "meshes and layouts, ranked", "demo:train"),
    ):
        command = by_name[name] = commands.add_parser(
            name,
            help=told,
            description=f"{told[0].upper()}{told[1:]}.",
            epilog=f"{_EXAMPLES[name]}\n{_LAYOUTS}\n{_CODES}",
        )
        command.add_argument("factory", metavar="MODULE:FACTORY", help=f"such as {example}")
        _add_options(command, name)
    return found, by_name


def _add_options(command: argparse.ArgumentParser, name: str) -> None:
    several = name == "explore"
    again = "; may be given several times" if several else ""
    mesh = "the sizes of the mesh axes"
    if several:
        mesh += ", or a number of devices, for all ways to divide it; by default all of them"
    command.add_argument(
        "--mesh",
        metavar="data=8,model=4",
        action="append",
        required=name == "plan",
        help=f"{mesh}{again}",
    )
    layout = "the layout"
    if name == "ledger":
        layout += " of the arguments; by default that which the function has itself"
    elif several:
        layout = "a layout, or a dict of them"
    command.add_argument(
        "--layout", metavar="MODULE:NAME", action="append", help=f"{layout}{again}"
    )
    command.add_argument(
        "--rules", metavar="batch=data,...=none", help="short rules in place of a layout"
    )
    command.add_argument(
        "--fsdp", metavar="data", help="the mesh axis that shards what the rules leave unsharded"
    )
    target = "what is compiled for, without having it: tpu:v5e:4x8, cuda:h100:8"
    if name == "plan":
        target = "check that the mesh has as many devices as this target: tpu:v5e:4x8"
    command.add_argument("--target", metavar="tpu:v5e:4x8", help=target)
    if name != "plan":
        command.add_argument(
            "--devices", type=_number, metavar="N", help="compile for N simulated CPU devices"
        )
    page = command.add_argument("--html", metavar="out.html", help="write a page, too")
    page.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
    command.add_argument("--json", action="store_true", help="print JSON instead of text")
    command.add_argument(
        "--traceback", action="store_true", help="show where an error comes from, for a report"
    )


def _number(text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,5}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of devices")
    return int(text)


_SIZES = "write sizes by name, such as `--mesh data=8,model=4`"


def mesh_sizes(text: str) -> dict[str, int]:
    """`data=8,model=4` ─► `{"data": 8, "model": 4}`.

    Raises:
        Failure: the text has another form.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*([^\s=,]+)\s*=\s*([0-9]{1,9})\s*", part)
        if found is None or int(found[2]) < 1:
            raise Failure(f"--mesh {text!r}: {part!r} is not the size of a mesh axis: {_SIZES}")
        if found[1] in sizes:
            raise Failure(f"--mesh {text!r}: it has `{found[1]}` twice")
        sizes[found[1]] = int(found[2])
    return sizes


def mesh_or_devices(text: str) -> dict[str, int] | int:
    """The sizes of a mesh, or a number of devices."""
    if re.fullmatch(r"[1-9][0-9]{0,8}", text):
        return int(text)
    return mesh_sizes(text)


_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_RULE = re.compile(rf"\s*({_NAME}|\.\.\.)\s*=\s*({_NAME}(?:\+{_NAME})*)\s*")
_RULES = "write rules such as `--rules batch=data,hidden=model,...=none`"


def given_layout(options: Namespace) -> LayoutTree:
    """The layout of `plan` and `ledger`: `--layout`, or `--rules` and `--fsdp`; None without any.

    Raises:
        Failure: there are several, or one cannot be read.
    """
    written: list[str] = options.layout or []
    if len(written) > 1:
        raise Failure(f"--layout is given {len(written)} times: only `explore` takes several")
    short = short_layout(options.rules, options.fsdp)
    if not written:
        return short
    if short is not None:
        raise Failure("--layout is a whole layout, and so are --rules and --fsdp: give one of them")
    return named(written[0], "layout")


def given_layouts(options: Namespace) -> Mapping[str, LayoutTree]:
    """The layouts of `explore` by their names.

    Raises:
        Failure: there is none, two have one name, or one cannot be read.
    """
    found: list[tuple[str, str, LayoutTree]] = []
    for text in options.layout or []:
        value: Any = named(text, "layout")
        # A dict is one of candidates.
        several = value if isinstance(value, dict) else {text.partition(":")[2]: value}
        found += [(f"--layout {text}", name, one) for name, one in several.items()]
    short = short_layout(options.rules, options.fsdp)
    if short is not None:
        found.append(("--rules and --fsdp", "rules", short))
    layouts: dict[str, LayoutTree] = {}
    for option, name, one in found:
        if name in layouts:
            raise Failure(f"{option}: there is a layout `{name}` already")
        layouts[name] = one
    if not layouts:
        raise Failure("give a layout: `--layout module:name`, or `--rules batch=data,...=none`")
    return layouts


def short_layout(rules: str | None, fsdp: str | None) -> Layout | None:
    """The layout of `--rules batch=data,hidden=model,...=none` and `--fsdp data`.

    Raises:
        Failure: a text has another form.
    """
    parts: list[Layout] = []
    if rules is not None:
        parts.append(_made("--rules", rules, lambda: AxisRules(map(_rule, rules.split(",")))))
    if fsdp is not None:
        parts.append(_made("--fsdp", fsdp, lambda: FSDP(fsdp.split("+"))))
    if not parts:
        return None
    first, *others = parts
    return first | others[0] if others else first


def _rule(text: str) -> tuple[Any, Any]:
    """One rule: an axis, and a mesh axis, several of them joined by `+`, or `none`."""
    found = _RULE.fullmatch(text)
    if found is None:
        raise RuleError(f"{text!r} is no rule: {_RULES}")
    name: Any = ... if found[1] == "..." else found[1]
    if found[2] == "none":
        return name, None
    mesh_axes = tuple(found[2].split("+"))
    return name, mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes


def _made(option: str, text: str, make: Any) -> Layout:
    try:
        return make()
    except RuleError as error:
        raise Failure(f"{option} {text!r}: {error}") from error
