"""The page of a transformer of one's own: what it says beside its examples."""

import ast
import sys
from doctest import DocTestParser
from pathlib import Path
from typing import Any

import jax
import pytest

import functree as ft
from functree.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "own-transformer.md").read_text(encoding="utf-8")
# What the page has `decoder.py` define, beside classes and functions.
VALUES = ("rules", "layout", "schedule", "tx", "once")


def definitions() -> str:
    """The module that the page asks for, without the factories: what it defines up to the file."""
    statements: list[str] = []
    for example in DocTestParser().get_examples(PAGE.partition("\n## Save")[0]):
        for one in ast.parse(example.source).body:
            named = isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) in VALUES
            if named or isinstance(
                one, ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef
            ):
                statements.append(ast.unparse(one))
    return "\n".join(statements)


def bytes_moved(module: str) -> int:
    """By the gradient of the loss, to each device."""
    defined: dict[str, Any] = {"__name__": "decoder"}
    exec(module, defined)  # so that lines can be left out
    mesh, layout = ft.make_mesh(data=2, model=4), defined["layout"]
    model = ft.abstract(defined["Decoder"], layout, mesh)(jax.random.key(0))
    spec = jax.NamedSharding(mesh, ft.P("data"))
    tokens = jax.ShapeDtypeStruct((16, 33), "int32", sharding=spec)
    step = ft.jit(ft.value_and_grad(defined["loss_fn"]), rules=layout)
    return sum(ft.ledger(step, model, tokens).totals().values())


def without(module: str, *lines: str) -> str:
    """The module with `x` in the place of `ft.constrain(x, ...)`."""
    for line in lines:
        assert line in module
        module = module.replace(line, line.partition("(")[2].partition(",")[0])
    return module


@pytest.fixture
def promotion() -> Any:
    """JAX's defaults, as pages have them."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.usefixtures("promotion")
def test_what_moves_without_constraints() -> None:
    module = definitions()
    table = "ft.constrain(self.embed, 'vocab embed')"
    stream = (
        "ft.constrain(table[tokens], 'batch seq embed')",
        "ft.constrain(x, 'batch seq embed')",
    )
    rest = (
        "ft.constrain(y, 'batch seq heads head_dim')",
        "ft.constrain(y, 'batch seq hidden')",
        "ft.constrain(logits, 'batch seq vocab')",
    )
    all_of_them = bytes_moved(module)
    assert 2.35 < all_of_them / 2**20 < 2.5
    assert 2.49 < bytes_moved(without(module, table)) / 2**20 < 2.65
    assert bytes_moved(without(module, table, *stream)) / 2**20 > 7.5
    assert bytes_moved(without(module, *rest)) == all_of_them


@pytest.mark.slow
@pytest.mark.usefixtures("promotion")
def test_the_commands_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    factories = PAGE.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "decoder.py").write_text(f"{definitions()}\n{factories}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    options = ["--mesh", "data=2,model=4", "--layout", "decoder:layout"]
    try:
        assert main(["plan", "decoder:state", *options]) == 0
        said = capsys.readouterr().out
        assert "model.blocks.{0-3}.mlp.down ×4" in said and "f32[256/model, 64/data]" in said
        assert main(["ledger", "decoder:training", *options, "--devices", "8"]) == 0
        said = capsys.readouterr().out
        assert "reduce-scatter" in said and "cpu, mesh (data=2, model=4): 2.3 MiB moved" in said
    finally:
        sys.modules.pop("decoder", None)
