"""Keys of paths and parts of globs for hypothesis to draw: (kind, value) with the kind `key`, `*`
or `**`."""

from typing import Any

from hypothesis import strategies as st

from functree.tree.paths import part_text

WORDS = st.sampled_from(["a", "b", "ab", "aab", "bias", "x", "_"])
ODD = st.sampled_from(["", "a.b", "0", "1", "*", "**", '"', "\n", "n", "é"])
KEYS = (
    WORDS
    | ODD
    | st.text(st.characters(exclude_characters="\x1e\x1f"), max_size=3)
    | st.integers(-2, 12)
    | st.sampled_from([True, None, 1.0, (1, "a"), b"a"])
)
STARRED = st.sampled_from(["*", "a*", "*b", "a*b", "*a*", "1*", "*1", "b*s", "_*"])
PARTS = st.one_of(
    st.just(("**", None)), STARRED.map(lambda s: ("*", s)), KEYS.map(lambda key: ("key", key))
)


def written(parts: list[tuple[str, Any]]) -> str:
    """The glob that these parts are."""
    return ".".join("**" if k == "**" else v if k == "*" else part_text(v) for k, v in parts)
