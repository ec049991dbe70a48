"""A node ─► what it says about all leaves below it."""

from typing import NamedTuple

from functree.labels.annotations.given_names import GivenNames
from functree.labels.annotations.unread import Unread


class Context(NamedTuple):
    """What is true for all leaves below a node.

    Attributes:
        within: the classes of the nodes above, outermost first.
        stack: the axes of the stacks above.
        given: the names that were given above.
        buffer: whether an annotation above marks the leaves as not trained.
        pending: the names in the annotation of a field above, if there has been no module since.
            Their patterns are matched with paths from the first module below the field, or from the
            field if there is no module.
        unread: why an annotation above says nothing about the leaves, and the remedy.
    """

    within: tuple[type, ...] = ()
    stack: tuple[str, ...] = ()
    given: tuple[GivenNames, ...] = ()
    buffer: bool = False
    pending: GivenNames | None = None
    unread: Unread | None = None


def inside_of(context: Context, cls: type) -> Context:
    """The context below a node of a class."""
    # Not by `_replace`, which takes twice as long; this runs for each container.
    within, stack, given, buffer, pending, unread = context
    return Context((*within, cls), stack, given, buffer, pending, unread)
