"""What has a path and a size ─► HTML: a tree to fold, with the sum of each subtree."""

import html
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from functree.errors import count
from functree.report.byte_sizes import bytes_text
from functree.report.page import Segment, bar_html, code

OPEN_LINES = 48
"""The number of lines that a tree shows at first, if that is possible by whole levels."""


class TreeLeaf(NamedTuple):
    """One line of a tree.

    Attributes:
        parts: the texts of the keys of its path.
        size: its bytes, as a bar.
        content: the HTML of what it says.
        number: the number of things that it stands for.
        picture: the HTML of a picture at its left; may be empty.
        copies: the bytes among `size` that other devices have too.
    """

    parts: tuple[str, ...]
    size: int
    content: str
    number: int = 1
    picture: str = ""
    copies: int = 0


@dataclass
class _Node:
    """A subtree: lines and other subtrees, in their order.

    Attributes:
        name: the text of its keys, from those of the subtree that it is in.
        depth: the number of keys of its path.
        inside: what is in it. A subtree has its key; a line has no key of its own.
    """

    name: str
    depth: int = 0
    inside: "dict[object, _Node | TreeLeaf]" = field(default_factory=dict)

    def subtree(self, key: str) -> "_Node":
        """The subtree with a key, which is made if there is none."""
        found = self.inside.setdefault(key, _Node(key, self.depth + 1))
        return found if isinstance(found, _Node) else self

    def leaves(self) -> list[TreeLeaf]:
        """All lines of the subtree."""
        found: list[TreeLeaf] = []
        for one in self.inside.values():
            found += one.leaves() if isinstance(one, _Node) else [one]
        return found

    def subtrees(self) -> list["_Node"]:
        """The subtrees that are directly in it."""
        return [one for one in self.inside.values() if isinstance(one, _Node)]


class _Look(NamedTuple):
    """What the lines of a tree depend on.

    Attributes:
        whole: the bytes of the whole.
        most: the bytes of the longest bar of a leaf.
        noun: what a leaf stands for.
        levels: the number of levels that are open.
    """

    whole: int
    most: int
    noun: str
    levels: int


def tree_html(
    leaves: Sequence[TreeLeaf],
    title: str,
    noun: str,
    *,
    named: bool = True,
    opened: bool = True,
) -> str:
    """A tree to fold; nothing if it has no leaves.

    Args:
        leaves: the leaves.
        title: the name of the whole.
        noun: what a leaf stands for.
        named: whether a leaf is named by the last key of its path; if not, the path is that of a
            subtree, which may have several leaves.
        opened: whether some levels are open.
    """
    if not leaves:
        return ""
    root = _Node(title)
    for i, leaf in enumerate(leaves):
        node = root
        for part in leaf.parts[:-1] if named else leaf.parts:
            node = node.subtree(part)
        node.inside[i] = leaf
    root = _merged(root)
    most = max(leaf.size for leaf in leaves)
    levels = _levels(root) if opened else 0
    look = _Look(sum(leaf.size for leaf in leaves), most, noun, levels)
    return f'<div class="tree">{_node_html(root, 0, look)}</div>'


def _merged(node: _Node) -> _Node:
    """A tree without the levels that say nothing: a subtree with only one line, or that is all of
    the one above."""
    merged = _Node(node.name, node.depth)
    for key, inner in node.inside.items():
        if isinstance(inner, _Node):
            inner = _merged(inner)
            only, below = inner.leaves(), inner.subtrees()
            if len(only) == 1:
                inner = only[0]
            elif len(below) == len(inner.inside) == 1:
                inner = replace(below[0], name=f"{inner.name}.{below[0].name}")
        merged.inside[key] = inner
    return merged


def _levels(root: _Node) -> int:
    """The number of levels that can be open without too many lines."""
    shown, levels, level = 0, 0, [root]
    while level:
        shown += sum(len(node.inside) for node in level)
        if shown > OPEN_LINES and levels:
            break
        levels += 1
        level = [inner for node in level for inner in node.subtrees()]
    return levels


def _node_html(node: _Node, level: int, look: _Look) -> str:
    opened = " open" if level < look.levels else ""
    content = ""
    for inner in node.inside.values():
        if isinstance(inner, _Node):
            content += _node_html(inner, level + 1, look)
        else:
            content += _leaf_html(inner, node.depth, look)
    leaves = node.leaves()
    size = sum(leaf.size for leaf in leaves)
    number = count(sum(leaf.number for leaf in leaves), look.noun)
    bar = bar_html([Segment(node.name, size, "p5")], look.whole)
    title = f'<span>{code(node.name)} <span class="muted">{number}</span></span>'
    return (
        f"<details{opened}><summary>{title}"
        f'<span class="size num">{bytes_text(size)}{bar}</span></summary>{content}</details>'
    )


def _leaf_html(leaf: TreeLeaf, depth: int, look: _Look) -> str:
    path = ".".join(leaf.parts)
    name = ".".join(leaf.parts[depth:])
    if not leaf.parts:
        name = "(the array)"
    title = code(name, "name") if name else ""
    alone = Segment(path, leaf.size - leaf.copies)
    copied = Segment(f"{path}, copies", leaf.copies, "p0 copied")
    bar = bar_html([alone, copied], look.most)
    return leaf_html(path, title + leaf.content, bytes_text(leaf.size) + bar, leaf.picture)


def leaf_html(path: str, content: str, size: str, picture: str = "") -> str:
    """One line, which the search finds by its path and by what it says.

    Args:
        path: the path.
        content: the HTML of what it says.
        size: the HTML of its bytes, at the right.
        picture: the HTML of a picture at the left; may be empty.
    """
    kind = "leaf drawn" if picture else "leaf"
    return (
        f'<div class="{kind}" data-path="{html.escape(path)}">{picture}<div>{content}</div>'
        f'<div class="size num">{size}</div></div>'
    )
