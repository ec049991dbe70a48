"""The command line as a new user would try it, with right input and wrong input of every kind."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import functree as ft
from functree.cli.main import main
from functree.explorer.step import Step

ROOT = Path(__file__).parents[2]
MESH = "--mesh data=2,model=4"
RULES = "--rules batch=data,hidden=model,embed=none"
LAID = f"{MESH} {RULES}"


def run(capsys: pytest.CaptureFixture[str], command: str) -> tuple[int, str, str]:
    """The exit code, the output and what is said on the standard error."""
    try:
        code = main(shlex.split(command))
    except SystemExit as end:  # of argparse: help, and a wrong option
        code = end.code if isinstance(end.code, int) else 1
    said = capsys.readouterr()
    return code, said.out, said.err


Cli = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def cli(folder: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return lambda command: run(capsys, command)


def test_plan(cli: Cli) -> None:
    code, out, err = cli(f"plan demo:tree {LAID}")
    assert code == 0 and err == ""
    assert "/model]" in out and "mesh (data=2, model=4): 2 arrays, 8.0 TiB" in out


def test_plan_of_a_call_is_that_of_its_first_argument(cli: Cli) -> None:
    code, out, err = cli(f"plan demo:call {LAID}")
    assert code == 0 and "2 arrays, 32 KiB in all, 8 KiB on each device" in out
    assert err == "functree: this is the plan of the function's first argument\n"


def test_plan_as_json_and_as_a_page(cli: Cli, folder: Path) -> None:
    code, out, err = cli(f"plan demo:tree {LAID} --json --html out.html")
    assert (code, err) == (0, "")
    assert ft.Plan.from_json(out)["up"].local_shape == (1 << 20, 1 << 18)
    assert (folder / "out.html").read_text().startswith("<!doctype html>")


def test_a_plan_with_problems(cli: Cli) -> None:
    code, out, err = cli(f"plan demo:tree --mesh data=2,model=3 {RULES}")
    assert code == 1 and err == ""
    assert 'PROBLEM up: "hidden" has size 1048576; rule hidden→model needs a multiple' in out
    code, out, _ = cli(f"plan demo:tree --mesh data=2 {RULES} --json")
    assert code == 1 and ft.Plan.from_json(out).problems


def test_ledger(cli: Cli) -> None:
    code, out, err = cli(f"ledger demo:call {LAID}")
    assert code == 0 and err == ""
    assert "all-reduce" in out and "cpu, mesh (data=2, model=4): 4 KiB moved" in out


def test_ledger_of_a_function_with_options_of_its_own(cli: Cli) -> None:
    code, out, err = cli("ledger demo:own --json")
    assert (code, err) == (0, "") and ft.Ledger.from_json(out).sizes == {}
    code, out, _ = cli(f"ledger demo:own {LAID} --json --devices 8")
    ledger = ft.Ledger.from_json(out)
    assert code == 0 and ledger.sizes == {"data": 2, "model": 4}
    assert ledger.memory.aliases == 4096  # what it donates


def test_a_ledger_that_cannot_be_had(cli: Cli) -> None:
    code, out, err = cli(f"ledger demo:unnamed {LAID}")
    assert code == 1 and out == ""
    assert "in_shardings: 1 leaf cannot be laid out on mesh (data=2, model=4)" in err
    assert "x   f32[64, 32]\n      has no axis names" in err


def test_explore(cli: Cli, folder: Path) -> None:
    code, out, err = cli("explore demo:call --layout demo:layouts --mesh 8 --html out.html")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines() if "KiB" in line and "=" in line]
    pairs = {tuple(one for one in line if one not in ("*", "=", "=*"))[:2] for line in lines}
    assert pairs == {
        ("data", "data=8,model=1"),
        ("rules", "data=8,model=1"),
        ("rules", "data=4,model=2"),
        ("rules", "data=2,model=4"),
        ("rules", "data=1,model=8"),
    }
    assert "functree explore" in (folder / "out.html").read_text()


WHY = f"why demo:with_a_mistake {LAID}"
CHANGE = 'remove `ft.constrain(jnp.tanh(x @ layer.up), ft.P("model", None))`'


def test_why(cli: Cli, folder: Path) -> None:
    code, out, err = cli(f"{WHY} --html out.html")
    assert (code, err) == (0, "")
    page = (folder / "out.html").read_text()
    assert page.startswith("<!doctype html>") and "Why mistaken moves arrays" in page
    assert out.startswith("mistaken moves ") and " avoidable, " in out
    assert f"fixes, each compiled: 1. {CHANGE} at {folder / 'demo.py'}:" in " ".join(out.split())


def test_why_compiles_as_many_edits_as_it_may(cli: Cli) -> None:
    for most in (1, 2):
        code, out, err = cli(f"{WHY} --compilations {most} --json")
        found = json.loads(out)
        assert (code, err, found["functree"], found["compiled"]) == (0, "", "why", most)


# The layout of `plan` for `demo:call`, and how `up` lies.
GIVEN: dict[str, ft.P] = {
    "--layout demo:rules": ft.P(None, "model"),
    "--layout demo:each": ft.P(None, "model"),  # a layout for each argument
    RULES: ft.P(None, "model"),
    "--rules hidden=data+model,...=none": ft.P(None, ("data", "model")),
    "--rules batch=data,embed=model,hidden=model,hidden=none": ft.P("model", None),  # a fallback
    f"{RULES} --fsdp data": ft.P(None, "model"),
    "--fsdp data+model": ft.P(None, None),  # it is small
}
NO_BATCH = ("--rules hidden=data+model,...=none", "--fsdp data+model")


@pytest.mark.parametrize("layout", GIVEN)
def test_a_layout(cli: Cli, layout: str) -> None:
    code, out, _ = cli(f"plan demo:call {MESH} {layout} --json")
    assert code == 0 and ft.Plan.from_json(out)["up"].spec == GIVEN[layout]
    if layout not in NO_BATCH:
        code, out, _ = cli(f"ledger demo:call {MESH} {layout} --json")
        assert code == 0 and ft.Ledger.from_json(out).sizes == {"data": 2, "model": 4}


def test_filters_name_the_arguments(cli: Cli) -> None:
    code, out, _ = cli(f"ledger demo:call {MESH} --layout demo:filters --json")
    assert code == 0 and ft.Ledger.from_json(out).sizes


def test_explore_several_meshes_as_json(cli: Cli) -> None:
    code, out, err = cli(f"explore demo:call {LAID} --mesh data=4,model=2 --json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["functree"] == "ranking" and found["kind"] == "TPU v5e"
    assert {tuple(row["mesh"].values()) for row in found["rows"]} == {(2, 4), (4, 2)}


def test_explore_where_nothing_fits(cli: Cli) -> None:
    code, out, err = cli(f"explore demo:huge {LAID}")
    assert (code, err) == (1, "")
    assert "the arguments take 2.0 TiB on each device" in out


# Commands, and what the one line says.
WRONG: dict[str, str] = {
    "": "functree: error: the following arguments are required: COMMAND (see `functree --help`)",
    "plna": "argument COMMAND: invalid choice: 'plna' (choose from ",
    f"plan demo:tree {MESH} --rulse batch=data": "unrecognized arguments: --rulse batch=data",
    f"plan demo:tree {LAID} --devices 8": "unrecognized arguments: --devices 8",
    # Factories
    f"plan dmeo:tree {LAID}": "functree plan: error: no module named `dmeo`; did you mean `demo`?",
    f"plan demo.sub:tree {LAID}": "no module named `demo.sub`",
    f"plan demo:tre {LAID}": "demo has no `tre`; did you mean `tree`?",
    f"plan demo {LAID}": "'demo' is not a factory: write `module:name`, where the module is installed or",
    f"plan demo.py:tree {LAID}": "no module named `demo.py`; did you mean `demo`?",
    f"plan demo:value {LAID}": "demo:value raised: TypeError: 'int' object is not callable",
    f"plan demo:wants {LAID}": "demo:wants raised: TypeError: wants() missing 1 required positional argument: 'config'",
    f"plan demo:raising {LAID}": "demo:raising raised: demo.py:44: ValueError: no data (add `--traceback` to see the traceback)",
    f"plan demo:asks {LAID}": "demo:asks raised: demo.py:48: ConcretizationTypeError: ",
    f"plan demo:own_error {LAID}": "demo:own_error raised: demo.py:77: Mine: \\x1b[31mred",
    f"plan demo:no_return {LAID}": "demo:no_return returned None, which has no arrays: return",
    f"plan broken:tree {LAID}": "broken cannot be imported: broken.py:1: ModuleNotFoundError: No module named",
    f"plan ends:tree {LAID}": "ends cannot be imported: ends.py:2: SystemExit: 4",
    f"plan wrong:tree {LAID}": "wrong cannot be imported: SyntaxError: '(' was never closed",
    # Functions
    f"ledger demo:nothing {LAID}": "demo:nothing returned {'w': ShapeDtypeStr...dtype=float32)} instead of a function with its arguments",
    f"ledger demo:closing {LAID}": "demo:closing: the function closes over `scale`, an array that has no value, because the factory is only traced",
    f"ledger demo:late {LAID}": "raised_inside raised: demo.py:61: KeyError: 'later' (add `--traceback` to see the traceback)",
    f"explore demo:late {LAID}": "demo:late: the function raised: demo.py:61: KeyError: 'later'",
    f"ledger demo:fewer {LAID}": "ledger: error: apply raised: TypeError: apply() missing 2 required positional arguments: 'layer'",
    f"why demo:call {LAID} --compilations 0": "argument --compilations: '0' is not a positive integer",
    # Meshes
    f"plan demo:tree {RULES}": "the following arguments are required: --mesh",
    f"ledger demo:call {RULES}": "a layout and --target need a mesh: add `--mesh data=8,model=4`",
    f"plan demo:tree --mesh data=2,model {RULES}": "argument --mesh: 'data=2,model': write `name=size` pairs with different names, such as",
    f"plan demo:tree --mesh data=2,data=2 {RULES}": "argument --mesh: 'data=2,data=2': write `name=size` pairs with different names",
    f"why demo:call {LAID} {MESH}": "--mesh is given twice: write it once",
    f"explore demo:call {LAID} {RULES}": "--rules is given twice: write it once",
    # Layouts
    f"plan demo:tree {MESH}": "give a layout: `--layout module:name`, or `--rules",
    f"explore demo:call {MESH}": "give a layout: `--layout module:name`",
    f"explore demo:call {MESH} --layout demo:layouts --layout demo:data": "--layout demo:data: two layouts are named `data`",
    f"explore demo:call {LAID} --layout demo:layouts": "--rules and --fsdp: two layouts are named `rules`",
    f"plan demo:call {MESH} --layout demo:none": "the layouts are a tuple",
    f"ledger demo:call {LAID} --layout demo:rules": "--layout cannot be combined with --rules or --fsdp: give one or the other",
    f"plan demo:tree {MESH} --layout demo:rulse": "demo has no `rulse`; did you mean `rules`?",
    f"ledger demo:call {MESH} --layout rules": "'rules' is not a layout: write `module:name`, where the module is installed or",
    f"plan demo:tree {MESH} --rules rules.toml": "--rules 'rules.toml': 'rules.toml' is not a rule: write rules such as `--rules batch=data,",
    # Devices
    f"ledger demo:call {LAID} --target v5e-8": """--target 'v5e-8' is not a target: write `"tpu:v5e:16x16"` for a TPU slice, or `"cuda:h100:8"` for GPUs""",
    f"plan demo:tree {LAID} --target tpu:v5e:2x2": "--target tpu:v5e:2x2 has 4 devices, but the mesh has 8: change one of them",
    f"explore demo:call {RULES} --mesh 16": "the mesh needs 16 devices, but JAX has 8: add `--devices 16` to simulate them, or",
    f"ledger demo:call --mesh data=4,model=4 {RULES}": "the mesh needs 16 devices, but JAX has 8: add `--devices 16` to simulate them, or",
    f"ledger demo:call {LAID} --devices eight": "argument --devices: 'eight' is not a positive integer",
    # Pages
    f"plan demo:tree {LAID} --html nowhere/out.html": "--html nowhere/out.html: No such file or directory",
    f"ledger demo:call {LAID} --html .": "--html .: Is a directory",
}


@pytest.mark.parametrize("command", WRONG)
def test_wrong_input_is_one_line(cli: Cli, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # which `--devices` changes
    code, out, err = cli(command)
    assert code == 2 and out == ""
    assert WRONG[command] in err and err.count("\n") == 1 and err.endswith("\n")


def test_a_failed_command_leaves_no_page(cli: Cli, folder: Path) -> None:
    (folder / "old.html").write_text("old")
    for page in ("new.html", "old.html"):
        assert cli(f"plan demo:raising {LAID} --html {page}")[0] == 2
    assert not (folder / "new.html").exists() and (folder / "old.html").read_text() == "old"
    (folder / "link.html").symlink_to("target.html")
    assert cli(f"plan demo:tree {LAID} --html link.html")[0] == 0
    assert (folder / "link.html").is_symlink() and (folder / "target.html").stat().st_size > 0


def test_a_traceback_is_shown_if_asked_for(cli: Cli) -> None:
    code, _, err = cli(f"plan demo:raising {LAID} --traceback")
    assert code == 2 and "Traceback" in err and "def raising" not in err
    assert err.splitlines()[-1].startswith("functree plan: error: demo:raising raised: demo.py:44")


def test_help_teaches(cli: Cli) -> None:
    code, out, err = cli("--help")
    assert (code, err) == (0, "") and max(map(len, out.splitlines())) <= 80
    for text in ("MODULE:FACTORY", "ft.AxisRules({", "return step, (", "exit codes: 0", "explore"):
        assert text in out
    for command in ("plan", "ledger", "explore"):
        code, out, _ = cli(f"{command} --help")
        assert code == 0 and f"  functree {command} demo:" in out and "--fsdp data" in out
        assert max(map(len, out.splitlines())) <= 80


def test_the_example_of_the_help_is_read_as_it_stands(cli: Cli, folder: Path) -> None:
    _, out, _ = cli("--help")
    layouts = out[out.index("  rules = ft.AxisRules") : out.index("\nShort rules")]
    lines = ["import functree as ft", *[line.strip() for line in layouts.splitlines()]]
    (folder / "shown_in_help.py").write_text("\n".join(lines))
    code, found, _ = cli(f"plan demo:call {MESH} --layout shown_in_help:layout")
    assert code == 0 and "/model]" in found
    code, found, _ = cli(f"explore demo:call {MESH} --layout shown_in_help:layouts")
    assert code == 0 and "tensor" in found and "both" in found
    short = out[out.index("--rules batch=data,hidden") :].splitlines()[0]
    code, found, _ = cli(f"plan demo:call {MESH} {short}")
    assert code == 0 and "/model]" in found


def test_completion(cli: Cli) -> None:
    for shell in ("bash", "zsh"):
        code, out, err = cli(f"--print-completion {shell}")
        assert (code, err) == (0, "") and "functree" in out and "--target" in out


def test_an_interrupt(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("functree.cli.main.plan_leaves", interrupted)
    assert cli(f"plan demo:tree {LAID}") == (130, "", "functree plan: interrupted\n")


def test_an_interrupt_of_an_exploration_keeps_what_is_compiled(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_ = Step.compile

    def interrupted(self: Step, options: Any) -> Any:
        if options["mesh"].shape["data"] == 4:
            raise KeyboardInterrupt
        return compile_(self, options)

    monkeypatch.setattr(Step, "compile", interrupted)
    code, out, err = cli("explore demo:call --layout demo:data --mesh data=2 --mesh data=4")
    assert code == 130 and "data=2" in out and "not compiled: the exploration" in out
    assert err == "functree: interrupted: only some candidates were compiled\n"
    assert "\x1b" not in out


def environment() -> dict[str, str]:
    kept = {
        name: text for name, text in os.environ.items() if not name.startswith(("XLA_", "JAX_"))
    }
    return {**kept, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


@pytest.mark.slow
def test_as_a_process_with_simulated_devices(folder: Path) -> None:
    command = f"-m functree ledger demo:call --json --devices 4 --mesh data=2,model=2 {RULES}"
    done = subprocess.run(
        [sys.executable, *command.split()],
        env=environment(),
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert ft.Ledger.from_json(done.stdout).sizes == {"data": 2, "model": 2}


@pytest.mark.slow
def test_a_reader_that_goes_away(folder: Path) -> None:
    command = f"{sys.executable} -m functree plan demo:tree {LAID} | true"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        env=environment(),
        cwd=folder,
        capture_output=True,
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_page_that_cannot_be_written_after_all(cli: Cli) -> None:
    code, out, err = cli(f"plan demo:tree {LAID} --html /dev/full")
    assert code == 2 and "mesh (data=2, model=4): 2 arrays" in out
    assert err == "functree plan: error: --html /dev/full: No space left on device\n"


def test_what_a_factory_prints_is_not_the_output(cli: Cli) -> None:
    code, out, err = cli("plan demo:printing --mesh data=2 --layout demo:data --json")
    assert (code, err) == (1, "hello\n") and ft.Plan.from_json(out).rows[0].shape == (3,)
