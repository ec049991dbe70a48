"""A glob that matches no path, and the one that was meant."""

import pytest

from functree.tree.globs import glob_pattern, match_text
from functree.tree.near_patterns import meant_pattern
from functree.tree.paths import Path

PARTS = ("attn.query", "attn.key", "mlp.up", "norm.scale")
TREE = [f"layers.{i}.{part}" for i in range(12) for part in PARTS]
PATHS = [Path.parse(text) for text in ("embed.weight", "head.bias", 'odd."a.b".w', *TREE)]

# What was written, and what is suggested; empty for nothing.
MEANT: dict[str, str] = {
    # a misspelled key
    "**.bais": "**.bias",
    "head.bais": "head.bias",
    "layers.*.attn.qurey": "layers.*.attn.query",
    "layesr.3.atn.query": "layers.3.attn.query",
    'odd."a.c".w': 'odd."a.b".w',
    # singular and plural, and longer forms
    "layer.*.attn.query": "layers.*.attn.query",
    "**.layer.*": "**.layers.**",
    "layer.*.mlps.*": "layers.*.mlp.*",
    "embeds.*": "embed.*",
    "**.attention.query": "**.attn.query",
    # a part that is missing: inside, before, behind
    "layers.attn.query": "layers.*.attn.query",
    "layer.attn.query": "layers.*.attn.query",
    "layers.query": "layers.**.query",
    "attn.query": "**.attn.query",
    "query": "**.query",
    "*.query": "**.query",
    "embed": "embed.**",
    "layers.*.mlp": "layers.*.mlp.**",
    "layers.*.up": "layers.**.up",
    # a part too much
    "layers.*.*.*.query": "layers.**.*.*.query",
    # no index is nearer than another
    "layers.12.mlp.up": "layers.*.mlp.up",
    # a key that is like no other, in a path that is
    "blocks.3.attn.query": "layers.3.attn.query",
    "blocks.*.attn.query": "layers.*.attn.query",
    # what is for another tree
    "opt_state.**": "",
    "nothing": "",
    "x.*": "",
    "**.blocks.*": "",
    "": "",
}


@pytest.mark.parametrize("written", MEANT)
def test_what_is_suggested(written: str) -> None:
    near = MEANT[written]
    assert meant_pattern(written, PATHS) == (near and f"; did you mean `{near}`?")
    # It matches something.
    if near:
        assert any(map(glob_pattern(near).fullmatch, map(match_text, PATHS)))


def test_without_paths() -> None:
    assert meant_pattern("**.bias", []) == "" and meant_pattern("w", [Path(())]) == ""


def test_keys_that_are_no_text() -> None:
    assert meant_pattern("laeyr.w", [Path((1.5, "w")), Path(("layer", 1.5, "w"))]) == (
        "; did you mean `layer.*.w`?"
    )
