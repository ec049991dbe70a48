"""`restore(only=)`: what a filter names has to be there, on one side or the other; classes and
functions are asked of `like` alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import numpy as np
import pytest
from jaxtyping import Array, Float, Int

import functree as ft
from functree.labels.filters import as_filter
from tests.lib.checks import raises


class Base(eqx.Module):
    """A class that others are derived from."""


class Up(Base):
    weight: Float[Array, "embed hidden"]


class Down(Base):
    weight: Float[Array, "hidden embed"]


class Never(Base):
    weight: Float[Array, "embed hidden"]


def net(**more: Any) -> dict[str, Any]:
    return {"model": [Up(np.ones((2, 4))), Down(np.ones((4, 2)))], "head": np.ones(3), **more}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with an array that `net()` does not have."""
    path = tmp_path_factory.mktemp("only") / "c"
    ft.save(path, net(extra={"up": Up(np.ones((2, 4)))}))
    return path


# What matches nothing: by a typing error, or because nothing of that kind is there.
NOTHING: dict[str, Any] = {
    "a glob": "modle.**",
    "a path": ft.Path("model.7"),
    "a class": Never,
    "a function": lambda path, leaf: "modle" in path,
    "a property": ft.larger_than(10**6),
    "parts that exclude each other": ft.glob("head") & ft.under(Up),
}
# Beside something that matches.
BESIDE: dict[str, Callable[[ft.Filter], ft.Filter]] = {
    "alone": lambda part: part,
    "not": lambda part: ~part,
    "or": lambda part: ft.glob("head") | part,
    "and not": lambda part: ft.glob("model.**") & ~part,
}
# A property may be that of no array, if something else is restored.
PROPERTIES = ("a property", "parts that exclude each other")


@pytest.mark.parametrize("where", BESIDE)
@pytest.mark.parametrize("what", NOTHING)
def test_what_matches_nothing(what: str, where: str, saved: Path) -> None:
    only = BESIDE[where](as_filter(NOTHING[what]))
    if where != "alone" and what in PROPERTIES:
        ft.restore(saved, net(extra={"up": Up(np.ones((2, 4)))}), only=only)
        return
    with raises(
        "only=", f"no array in {saved} or `like` matches ", error=ft.CheckpointError
    ) as caught:
        ft.restore(saved, net(), only=only)
    assert "correct the filter, or leave it out" in str(caught.value)
    assert ("did you mean `model.**`" in str(caught.value)) == (what == "a glob")
    assert {str(problem.path) for problem in caught.value.problems} == {
        "model.0.weight",
        "model.1.weight",
        "head",
        "extra.up.weight",
    }


# What a filter may ask of an array besides: the checkpoint has one that is trained and a buffer;
# `like` has none of them.
ASKED: dict[str, tuple[ft.Filter, set[str]]] = {
    "trained": (ft.is_trainable, {"norm.weight"}),
    "a buffer": (ft.is_buffer, {"norm.table"}),
    "beside a class": (Up | ft.is_buffer, {"norm.table"}),
    "a size": (ft.has_ndim(1) & ~ft.glob("head"), {"norm.weight", "norm.table"}),
    "a dtype": (ft.has_dtype(np.int32), {"norm.table"}),
    # Classes are asked of `like` alone.
    "not a class": (~ft.under(Base), {"norm.weight", "norm.table"}),
}


class Norm(eqx.Module):
    weight: Float[Array, "embed"]
    table: ft.Buffer[Int[Array, "rows"]]


@pytest.mark.parametrize("what", ASKED)
def test_what_is_asked_of_what_only_the_checkpoint_has(what: str, tmp_path: Path) -> None:
    only, wanted = ASKED[what]
    norm = Norm(np.ones(3, np.float32), np.ones(2, np.int32))
    ft.save(tmp_path / "c", net(norm=norm))
    with pytest.raises(ft.CheckpointError, match="cannot be restored") as caught:
        ft.restore(tmp_path / "c", net(), only=only)
    assert {str(problem.path) for problem in caught.value.problems} == wanted
