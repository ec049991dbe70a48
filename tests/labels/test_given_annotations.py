"""Annotations that are given by path ─► the leaves below these paths, named as if their parts of
the tree were annotated."""

from typing import Annotated, Any

import equinox as eqx
import pytest
from jaxtyping import Array, Float

import functree as ft
from functree.labels.annotations.hints import Namespace, Reference, parse
from functree.labels.leaves import read
from tests.lib.trees import x


class Model(eqx.Module):
    up: Float[Array, "embed hidden"]
    down: Array


def tree() -> Any:
    return {"a": [x(2, 3), x(2, 3)], "ab": x(2, 3), "model": Model(x(2, 3), x(3, 2)), "n": 3}


UNNAMED = {"a.0": "_ _", "a.1": "_ _", "ab": "_ _", "model.up": "embed hidden", "model.down": "_ _"}

# Annotations by path ─► the axes that differ from those without any.
CASES: dict[str, tuple[dict[tuple[Any, ...], Any], dict[str, str]]] = {
    "an element": ({("a", 1): Float[Array, "b e"]}, {"a.1": "b e"}),
    "no such path": ({("a", 2): Float[Array, "b e"], ("b",): Float[Array, "b e"]}, {}),
    "the whole tree": (
        {(): dict[str, Float[Array, "b e"]]},
        {"ab": "b e"},
    ),
    "the later of two": (
        {("a",): list[Float[Array, "b e"]], ("a", 0): Float[Array, "c f"]},
        {"a.0": "c f", "a.1": "b e"},
    ),
    "names of the whole": (
        {(): Annotated[Any, ft.names({"a.*": "b e", "down": "c f"})]},
        {"a.0": "b e", "a.1": "b e", "model.down": "c f"},
    ),
    "names, the innermost": (
        {
            (): Annotated[
                dict[str, Annotated[list[Array], ft.names({"0": "b e"})]],
                ft.names({"a.*": "c f", "ab": "d g"}),
            ]
        },
        {"a.0": "b e"},
    ),
    "of another kind": ({("ab",): int}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_axes(case: str) -> None:
    written, expected = CASES[case]
    namespace = Namespace(__name__)
    hints = {ft.Path(path): parse(Reference(one, namespace)) for path, one in written.items()}
    found = read(tree(), None, hints).leaves
    assert {str(leaf.path): str(leaf.axes) for leaf in found} == UNNAMED | expected
    for leaf in found:
        assert leaf.annotated is (any(leaf.axes) or str(leaf.path) in expected)
        assert leaf.misfit is None
