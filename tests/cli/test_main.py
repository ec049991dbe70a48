"""The command line as a new user would try it, with right input and wrong input of every kind."""

import json
import os
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
MESH = ["--mesh", "data=2,model=4"]
RULES = ["--rules", "batch=data,hidden=model,embed=none"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The exit code, the output and what is said on the standard error."""
    try:
        code = main(arguments)
    except SystemExit as end:  # of argparse: help, and a wrong option
        code = end.code if isinstance(end.code, int) else 1
    said = capsys.readouterr()
    return code, said.out, said.err


Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(folder: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return lambda *arguments: run(capsys, *arguments)


def test_plan(cli: Cli) -> None:
    code, out, err = cli("plan", "demo:tree", *MESH, *RULES)
    assert code == 0 and err == ""
    assert "/model]" in out and "mesh (data=2, model=4): 2 arrays, 8.0 TiB" in out


def test_plan_of_a_call_is_that_of_its_first_argument(cli: Cli) -> None:
    code, out, err = cli("plan", "demo:call", *MESH, *RULES)
    assert code == 0 and "2 arrays, 32 KiB in all, 8 KiB on each device" in out
    assert err == "functree: planned is the first argument of the function\n"


def test_plan_as_json_and_as_a_page(cli: Cli, folder: Path) -> None:
    code, out, err = cli("plan", "demo:tree", *MESH, *RULES, "--json", "--html", "out.html")
    assert (code, err) == (0, "")
    assert ft.Plan.from_json(out)["up"].local_shape == (1 << 20, 1 << 18)
    assert (folder / "out.html").read_text().startswith("<!doctype html>")


def test_a_plan_with_problems(cli: Cli) -> None:
    code, out, err = cli("plan", "demo:tree", "--mesh", "data=2,model=3", *RULES)
    assert code == 1 and err == ""
    assert 'PROBLEM up: "hidden" has size 1048576; rule hidden→model needs a multiple' in out
    code, out, _ = cli("plan", "demo:tree", "--mesh", "data=2", *RULES, "--json")
    assert code == 1 and ft.Plan.from_json(out).problems


def test_ledger(cli: Cli) -> None:
    code, out, err = cli("ledger", "demo:call", *MESH, *RULES)
    assert code == 0 and err == ""
    assert "all-reduce" in out and "cpu, mesh (data=2, model=4): 4 KiB moved" in out


def test_ledger_of_a_function_with_options_of_its_own(cli: Cli) -> None:
    code, out, err = cli("ledger", "demo:own", "--json")
    assert (code, err) == (0, "") and ft.Ledger.from_json(out).sizes == {}
    code, out, _ = cli("ledger", "demo:own", *MESH, *RULES, "--json", "--devices", "8")
    ledger = ft.Ledger.from_json(out)
    assert code == 0 and ledger.sizes == {"data": 2, "model": 4}
    assert ledger.memory.aliases == 4096  # what it donates


def test_a_ledger_that_cannot_be_had(cli: Cli) -> None:
    code, out, err = cli("ledger", "demo:unnamed", *MESH, *RULES)
    assert code == 1 and out == ""
    assert "in_shardings does not fit 1 leaf on mesh (data=2, model=4)" in err
    assert "x   f32[64, 32]\n      has no axis names" in err


def test_explore(cli: Cli, folder: Path) -> None:
    arguments = ["explore", "demo:call", "--layout", "demo:layouts", "--mesh", "8"]
    code, out, err = cli(*arguments, "--html", "out.html")
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


WHY = ["why", "demo:with_a_mistake", *MESH, *RULES]
CHANGE = 'remove `ft.constrain(jnp.tanh(x @ layer.up), ft.P("model", None))`'


def test_why(cli: Cli, folder: Path) -> None:
    code, out, err = cli(*WHY)
    assert (code, err) == (0, "")
    assert out.startswith("mistaken moves ") and " avoidable, " in out
    assert f"fixes, each compiled: 1. {CHANGE} at {folder / 'demo.py'}:" in " ".join(out.split())


def test_why_as_json_and_as_a_page(cli: Cli, folder: Path) -> None:
    code, out, err = cli(*WHY, "--json", "--html", "out.html")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["functree"] == "why" and found["fixes"][0]["change"] == CHANGE
    page = (folder / "out.html").read_text()
    assert page.startswith("<!doctype html>") and "Why mistaken moves arrays" in page


def test_why_compiles_as_many_edits_as_it_may(cli: Cli) -> None:
    compiled: list[int] = []
    for most in ("1", "2"):
        code, out, err = cli(*WHY, "--compilations", most, "--json")
        assert (code, err) == (0, "")
        compiled.append(json.loads(out)["compiled"])
    assert compiled == [1, 2]


def test_why_where_nothing_is_found(cli: Cli) -> None:
    code, out, err = cli("why", "demo:own")
    assert (code, err) == (0, "")
    assert "; no fix found; 0 tried, 0 compiled" in " ".join(out.split())


# The layout of `plan` for `demo:call`, and how `up` lies.
GIVEN: dict[str, tuple[list[str], ft.P]] = {
    "a layout": (["--layout", "demo:rules"], ft.P(None, "model")),
    "one for each argument": (["--layout", "demo:each"], ft.P(None, "model")),
    "short rules": (RULES, ft.P(None, "model")),
    "several mesh axes": (["--rules", "hidden=data+model,...=none"], ft.P(None, ("data", "model"))),
    "a fallback": (
        ["--rules", "batch=data,embed=model,hidden=model,hidden=none"],
        ft.P("model", None),
    ),
    "rules and FSDP": ([*RULES, "--fsdp", "data"], ft.P(None, "model")),
    "FSDP alone": (["--fsdp", "data+model"], ft.P(None, None)),  # it is small
}


@pytest.mark.parametrize("case", GIVEN)
def test_a_layout(cli: Cli, case: str) -> None:
    given, spec = GIVEN[case]
    code, out, _ = cli("plan", "demo:call", *MESH, *given, "--json")
    assert code == 0 and ft.Plan.from_json(out)["up"].spec == spec
    if case not in ("several mesh axes", "FSDP alone"):  # which say nothing of the batch
        code, out, _ = cli("ledger", "demo:call", *MESH, *given, "--json")
        assert code == 0 and ft.Ledger.from_json(out).sizes == {"data": 2, "model": 4}


def test_filters_name_the_arguments(cli: Cli) -> None:
    code, out, _ = cli("ledger", "demo:call", *MESH, "--layout", "demo:filters", "--json")
    assert code == 0 and ft.Ledger.from_json(out).sizes


def test_explore_several_meshes_as_json(cli: Cli) -> None:
    two = ["--mesh", "data=2,model=4", "--mesh", "data=4,model=2"]
    code, out, err = cli("explore", "demo:call", *RULES, *two, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["functree"] == "ranking" and found["kind"] == "TPU v5e"
    assert {tuple(row["mesh"].values()) for row in found["rows"]} == {(2, 4), (4, 2)}


def test_explore_where_nothing_fits(cli: Cli) -> None:
    code, out, err = cli("explore", "demo:huge", *RULES, *MESH)
    assert (code, err) == (1, "")
    assert "its arguments are 2.0 TiB on each device" in out


# Arguments, and the one line that is said.
WRONG: dict[str, tuple[list[str], str]] = {
    "nothing": ([], "functree: error: give a command: plan, ledger, explore"),
    "a misspelled command": (["plna"], "there is no command `plna`; did you mean `plan`?"),
    "a misspelled option": (
        ["plan", "demo:tree", *MESH, "--rulse", "batch=data"],
        "functree plan: error: there is no option --rulse; did you mean `--rules`?",
    ),
    "an option of another command": (
        ["plan", "demo:tree", *MESH, *RULES, "--devices", "8"],
        "there is no option --devices",
    ),
    "an option before the command": (["--mesh", "data=8", "plan"], "there is no option --mesh"),
    "no layout": (["plan", "demo:tree", *MESH], "give a layout: `--layout module:name`, or `--rules"),
    "no layout, explored": (["explore", "demo:call", *MESH], "give a layout: `--layout module:name`"),
    "no mesh": (["plan", "demo:tree", *RULES], "the following arguments are required: --mesh"),
    "too much": (["plan", "demo:tree", "x", *MESH, *RULES], "unrecognized arguments: x"),
    "no module": (
        ["plan", "dmeo:tree", *MESH, *RULES],
        "functree plan: error: there is no module `dmeo`; did you mean `demo`?",
    ),
    "no submodule": (["plan", "demo.sub:tree", *MESH, *RULES], "no module `demo.sub`"),
    "no function": (
        ["plan", "demo:tre", *MESH, *RULES],
        "demo has no `tre`; did you mean `tree`?",
    ),
    "no colon": (["plan", "demo", *MESH, *RULES], "'demo' is no factory: write `module:factory`"),
    "a file": (
        ["plan", "demo.py:tree", *MESH, *RULES],
        "'demo.py:tree': a module is named without its file: `demo:tree`",
    ),
    "a file of another folder": (
        ["plan", "../demo:tree", *MESH, *RULES],
        "'../demo:tree' is no factory: write `module:factory`, a function of a module in this",
    ),
    "a part without a name": (
        ["plan", "demo:tree.", *MESH, *RULES],
        "'demo:tree.' is no factory",
    ),
    "a value": (["plan", "demo:value", *MESH, *RULES], "demo:value is 3, not a function"),
    "a function of something": (
        ["plan", "demo:wants", *MESH, *RULES],
        "demo:wants(config) takes arguments, and a factory takes none",
    ),
    "a factory that raises": (
        ["plan", "demo:raising", *MESH, *RULES],
        "demo:raising raised: demo.py:42: ValueError: no data (`--traceback` shows all)",
    ),
    "a factory that asks for values": (
        ["plan", "demo:asks", *MESH, *RULES],
        "demo:asks needs the value of an array, and it is run without values: demo.py:46:",
    ),
    "a module that imports what is not there": (
        ["plan", "broken:tree", *MESH, *RULES],
        "broken cannot be imported: broken.py:1: ModuleNotFoundError: No module named",
    ),
    "a factory that ends Python": (
        ["plan", "demo:ends", *MESH, *RULES],
        "demo:ends raised: demo.py:79: SystemExit: 3",
    ),
    "a factory with an error of its own": (
        ["plan", "demo:own_error", *MESH, *RULES],
        "demo:own_error raised: demo.py:75: Mine: \\x1b[31mred",
    ),
    "a factory without a return": (
        ["plan", "demo:no_return", *MESH, *RULES],
        "demo:no_return returned None, in which there is no array",
    ),
    "a module that ends Python": (
        ["plan", "ends:tree", *MESH, *RULES],
        "ends cannot be imported: ends.py:2: SystemExit: 4",
    ),
    "a module that is not Python": (
        ["plan", "wrong:tree", *MESH, *RULES],
        "wrong cannot be imported: SyntaxError: '(' was never closed",
    ),
    "a tree in the place of a call": (
        ["ledger", "demo:nothing", *MESH, *RULES],
        "demo:nothing returned a dict, and here a function with its arguments is needed",
    ),
    "a closure": (
        ["ledger", "demo:closing", *MESH, *RULES],
        "demo:closing: the function closes over `scale`, an array that the factory makes",
    ),
    "a function that raises": (
        ["ledger", "demo:late", *MESH, *RULES],
        "raised_inside raised: demo.py:59: KeyError: 'later' (`--traceback` shows all)",
    ),
    "a function that raises, explored": (
        ["explore", "demo:late", *MESH, *RULES],
        "demo:late: the function raised: demo.py:59: KeyError: 'later'",
    ),
    "a function with an error of its own": (
        ["ledger", "demo:own_late", *MESH, *RULES],
        "fails raised: demo.py:75: Mine: ",
    ),
    "other arguments than the function has": (
        ["ledger", "demo:fewer", *MESH, *RULES],
        "ledger: error: demo:fewer: apply: missing a required argument: 'layer'",
    ),
    "the same, explained": (
        ["why", "demo:fewer", *MESH, *RULES],
        "why: error: demo:fewer: apply: missing a required argument: 'layer'",
    ),
    "no compilations": (
        [*WHY, "--compilations", "0"],
        "argument --compilations: '0' is no positive number",
    ),
    "a layout without a mesh": (
        ["why", "demo:call", *RULES],
        "a layout and --target need a mesh: `--mesh data=8,model=4`",
    ),
    "several layouts for why": (
        [*WHY, *MESH],
        "--mesh is given 2 times: only `explore` takes several",
    ),
    "the same, explored": (
        ["explore", "demo:fewer", *MESH, *RULES],
        "explore: error: apply: missing a required argument: 'layer'",
    ),
    "a mesh that is none": (
        ["plan", "demo:tree", "--mesh", "data=2,model", *RULES],
        "--mesh 'data=2,model': 'model' is not the size of a mesh axis: write sizes by name",
    ),
    "a mesh axis without devices": (
        ["plan", "demo:tree", "--mesh", "data=0", *RULES],
        "--mesh 'data=0': 'data=0' is not the size of a mesh axis",
    ),
    "a mesh axis twice": (
        ["plan", "demo:tree", "--mesh", "data=2,data=2", *RULES],
        "--mesh 'data=2,data=2': it has `data` twice",
    ),
    "two meshes": (
        ["plan", "demo:tree", *MESH, *MESH, *RULES],
        "--mesh is given 2 times: only `explore` takes several",
    ),
    "the same layout twice": (
        ["explore", "demo:call", *MESH, "--layout", "demo:layouts", "--layout", "demo:data"],
        "--layout demo:data: there is a layout `data` already",
    ),
    "rules beside a layout of that name": (
        ["explore", "demo:call", *MESH, "--layout", "demo:layouts", *RULES],
        "--rules and --fsdp: there is a layout `rules` already",
    ),
    "no layout in a tuple": (
        ["plan", "demo:call", *MESH, "--layout", "demo:none"],
        "the layouts are a tuple",
    ),
    "two layouts": (
        ["plan", "demo:tree", *MESH, "--layout", "demo:rules", "--layout", "demo:data"],
        "--layout is given 2 times: only `explore` takes several",
    ),
    "a layout and rules": (
        ["ledger", "demo:call", *MESH, "--layout", "demo:rules", *RULES],
        "--layout is a whole layout, and so are --rules and --fsdp: give one of them",
    ),
    "no such layout": (
        ["plan", "demo:tree", *MESH, "--layout", "demo:rulse"],
        "demo has no `rulse`; did you mean `rules`?",
    ),
    "no layout at all": (
        ["plan", "demo:tree", *MESH, "--layout", "demo:value"],
        "3 is not a layout: write `P(...)`, `AxisRules`, `FSDP`, `StateSharding`",
    ),
    "a layout of another form": (
        ["ledger", "demo:call", *MESH, "--layout", "rules"],
        "'rules' is no layout: write `module:name`, a layout in a module in this folder",
    ),
    "rules in a file": (
        ["plan", "demo:tree", *MESH, "--rules", "rules.toml"],
        "--rules 'rules.toml': 'rules.toml' is no rule: write rules such as `--rules batch=data,",
    ),
    "rules that are none": (
        ["plan", "demo:tree", *MESH, "--rules", "...=data"],
        "--rules '...=data': `...: 'data'`: only `...: None` is possible",
    ),
    "no mesh axis of FSDP": (
        ["plan", "demo:tree", *MESH, "--fsdp", ""],
        "--fsdp '': FSDP([''])",
    ),
    "no target": (
        ["ledger", "demo:call", *MESH, *RULES, "--target", "v5e"],
        "--target 'v5e' is not a target: write `\"tpu:v5e:16x16\"`",
    ),
    "another number of devices than the target": (
        ["plan", "demo:tree", *MESH, *RULES, "--target", "tpu:v5e:2x2"],
        "--mesh data=2,model=4 is 8 devices, and --target tpu:v5e:2x2 has 4",
    ),
    "another number of devices, explored": (
        ["explore", "demo:call", *MESH, *RULES, "--target", "tpu:v5e:2x2"],
        "--mesh data=2,model=4 is 8 devices, and --target tpu:v5e:2x2 has 4",
    ),
    "a target by another name": (
        ["ledger", "demo:call", *MESH, *RULES, "--target", "v5e-8"],
        "--target 'v5e-8' is not a target: write `\"tpu:v5e:16x16\"` for a slice of TPUs, "
        "`\"cuda:h100:8\"` for GPUs",
    ),
    "more devices than there are, explored": (
        ["explore", "demo:call", *RULES, "--mesh", "16"],
        "--mesh 16 is 16 devices, and there are 8: add `--devices 16`",
    ),
    "more devices than are simulated": (
        ["ledger", "demo:call", "--mesh", "data=4,model=4", *RULES, "--devices", "8"],
        "--mesh data=4,model=4 is 16 devices, and --devices 8: write `--devices 16`",
    ),
    "both devices and a target": (
        ["ledger", "demo:call", *MESH, *RULES, "--target", "tpu:v5e:2x4", "--devices", "8"],
        "--devices simulates CPUs, and --target has devices of its own: give one",
    ),
    "rules without a mesh": (
        ["ledger", "demo:call", *RULES],
        "a layout and --target need a mesh: `--mesh data=8,model=4`",
    ),
    "more devices than there are": (
        ["ledger", "demo:call", "--mesh", "data=4,model=4", *RULES],
        "data=4,model=4 is 16 devices, and there are 8: add `--devices 16` to simulate them, or",
    ),
    "devices too late": (
        ["ledger", "demo:call", *MESH, *RULES, "--devices", "16"],
        "--devices 16: JAX has made its devices already, and there are 8",
    ),
    "no number of devices": (
        ["ledger", "demo:call", *MESH, *RULES, "--devices", "eight"],
        "argument --devices: 'eight' is no positive number",
    ),
    "a page that cannot be written": (
        ["plan", "demo:tree", *MESH, *RULES, "--html", "nowhere/out.html"],
        "--html nowhere/out.html: there is no folder nowhere",
    ),
    "a page that is a folder": (
        ["ledger", "demo:call", *MESH, *RULES, "--html", "."],
        "--html '.' is no file to write to",
    ),
    "a page without a name": (
        ["explore", "demo:call", *MESH, *RULES, "--html", ""],
        "--html '' is no file to write to",
    ),
    "a page on a full disk": (
        ["ledger", "demo:nothing", *MESH, *RULES, "--html", "/dev/full"],
        "demo:nothing returned a dict",  # told first
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_line(cli: Cli, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # which `--devices` changes
    arguments, message = WRONG[name]
    code, out, err = cli(*arguments)
    assert code == 2 and out == ""
    assert message in err and err.count("\n") == 1 and err.endswith("\n")


def test_a_traceback_is_shown_if_asked_for(cli: Cli) -> None:
    code, _, err = cli("plan", "demo:raising", *MESH, *RULES, "--traceback")
    assert code == 2 and "Traceback" in err and "def raising" not in err
    assert err.splitlines()[-1].startswith("functree plan: error: demo:raising raised: demo.py:42")


def test_help_teaches(cli: Cli) -> None:
    code, out, err = cli("--help")
    assert (code, err) == (0, "") and max(map(len, out.splitlines())) <= 80
    for text in ("MODULE:FACTORY", "ft.AxisRules({", "return step, (", "exit codes: 0", "explore"):
        assert text in out
    for command in ("plan", "ledger", "explore"):
        code, out, _ = cli(command, "--help")
        assert code == 0 and f"  functree {command} demo:" in out and "--fsdp data" in out
        assert max(map(len, out.splitlines())) <= 80


def test_the_example_of_the_help_is_read_as_it_stands(cli: Cli, folder: Path) -> None:
    _, out, _ = cli("--help")
    layouts = out[out.index("  rules = ft.AxisRules") : out.index("\nShort rules")]
    lines = ["import functree as ft", *[line.strip() for line in layouts.splitlines()]]
    (folder / "shown_in_help.py").write_text("\n".join(lines))
    code, found, _ = cli("plan", "demo:call", *MESH, "--layout", "shown_in_help:layout")
    assert code == 0 and "/model]" in found
    code, found, _ = cli("explore", "demo:call", *MESH, "--layout", "shown_in_help:layouts")
    assert code == 0 and "tensor" in found and "both" in found
    short = out[out.index("--rules batch=data,hidden") :].splitlines()[0].split()
    code, found, _ = cli("plan", "demo:call", *MESH, *short)
    assert code == 0 and "/model]" in found


def test_completion(cli: Cli) -> None:
    for shell in ("bash", "zsh"):
        code, out, err = cli("--print-completion", shell)
        assert (code, err) == (0, "") and "functree" in out and "--target" in out


def test_an_interrupt(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("functree.cli.main.plan_tree", interrupted)
    assert cli("plan", "demo:tree", *MESH, *RULES) == (130, "", "functree plan: interrupted\n")


def test_an_interrupt_of_an_exploration_keeps_what_is_compiled(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_ = Step.compile

    def interrupted(self: Step, options: Any) -> Any:
        if options["mesh"].shape["data"] == 4:
            raise KeyboardInterrupt
        return compile_(self, options)

    monkeypatch.setattr(Step, "compile", interrupted)
    two = ["--mesh", "data=2", "--mesh", "data=4"]
    code, out, err = cli("explore", "demo:call", "--layout", "demo:data", *two)
    assert code == 130 and "data=2" in out and "it was not compiled: the exploration" in out
    assert err == "functree: interrupted: this is what was compiled until then\n"
    assert "\x1b" not in out


def environment() -> dict[str, str]:
    kept = {
        name: text for name, text in os.environ.items() if not name.startswith(("XLA_", "JAX_"))
    }
    return {**kept, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


@pytest.mark.slow
def test_as_a_process_with_simulated_devices(folder: Path) -> None:
    command = [sys.executable, "-m", "functree", "ledger", "demo:call", "--json", "--devices", "4"]
    done = subprocess.run(
        [*command, "--mesh", "data=2,model=2", *RULES],
        env=environment(), cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert ft.Ledger.from_json(done.stdout).sizes == {"data": 2, "model": 2}


@pytest.mark.slow
def test_a_reader_that_goes_away(folder: Path) -> None:
    command = f"{sys.executable} -m functree plan demo:tree {' '.join([*MESH, *RULES])} | true"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        env=environment(),
        cwd=folder,
        capture_output=True,
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_page_that_cannot_be_written_after_all(cli: Cli) -> None:
    code, out, err = cli("plan", "demo:tree", *MESH, *RULES, "--html", "/dev/full")
    assert code == 2 and "mesh (data=2, model=4): 2 arrays" in out
    assert err == "functree plan: error: --html /dev/full: No space left on device\n"


def test_what_a_factory_prints_is_not_the_output(cli: Cli) -> None:
    code, out, err = cli(
        "plan", "demo:printing", "--mesh", "data=2", "--layout", "demo:data", "--json"
    )
    assert (code, err) == (1, "hello\n") and ft.Plan.from_json(out).rows[0].shape == (3,)


def test_output_that_cannot_be_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        code = main(["plan", "demo:tree", *MESH, *RULES])
        monkeypatch.undo()
    assert code == 2 and capsys.readouterr().err == (
        "functree plan: error: the output cannot be written: No space left on device\n"
    )
