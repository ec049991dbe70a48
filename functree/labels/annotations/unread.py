"""An annotation that names no axes of the arrays that it is of ─► the reason, and what to do."""

from collections.abc import Mapping

from functree.errors import USERS_ERRORS, count
from functree.labels.annotations.hints import NOTHING, Hint
from functree.tree.arrays import Tree, is_array

Unread = tuple[str, str]
"""The reason, and the remedy."""


def other_structure(hint: Hint, node: Tree) -> Unread | None:
    """Why an annotation says nothing about the arrays in a node, or about an array; None if it
    does, or is about nothing that has arrays."""
    if hint.references or _is_about(hint, node):
        return None
    if hint.typed_dict:
        return (
            f"its annotation `{hint.text}` is a TypedDict, and the annotations in it are not read",
            'write `dict[str, Float[Array, "..."]]`, a named tuple or a module in its place',
        )
    if not hint.is_about_arrays:
        return None
    if hint.elements and isinstance(node, list | tuple | dict):
        return (
            f"its annotation `{hint.text}` is for {count(len(hint.elements), 'element')}, but "
            f"there are {len(node)}",
            "annotate each element, or all alike: `tuple[X, ...]`",
        )
    have = "an array" if is_array(node) else f"a {type(node).__name__}"
    why = f"its annotation `{hint.text}` is for {_meant(hint)}, but it is {have}"
    if is_array(node):
        return why, 'write `Float[Array, "..."]` there'
    if isinstance(node, list | tuple | dict):
        inner = hint.text if hint.forms else 'Float[Array, "..."]'
        return why, f"write `PyTree[{inner}]`, which is for any structure"
    return why, f"write `Annotated[{type(node).__name__}, ft.names(...)]`"


def _meant(hint: Hint) -> str:
    """What an annotation is for, that is about arrays."""
    if hint.forms:
        return "an array"
    if hint.generics:
        origin, _ = hint.generics[0]
        return f"a {origin.__name__}"
    return "a container"


def _is_about(hint: Hint, node: Tree) -> bool:
    """Whether an annotation is for values of this structure."""
    if is_array(node):
        return bool(hint.forms)
    if hint.below is not None:
        return True
    if isinstance(node, list | tuple | dict):
        if hint.element is not None or len(node) <= len(hint.elements):
            return True
    return any(issubclass(type(node), origin) for origin, _ in hint.generics)


def without_keys(cls: type) -> Unread:
    """Why the annotations of a class say nothing about its children."""
    return (
        f"its class {cls.__name__} is registered with JAX without keys that name its fields, so "
        "it is not known which annotation is that of which child",
        "register it with keys (`jax.tree_util.register_pytree_with_keys_class`, with "
        "`GetAttrKey` and the name of the field)",
    )


def hints_by_identity(node: Tree, fields: Mapping[str, Hint]) -> dict[int, Hint]:
    """The hints of the attributes of a node by the `id` of their values.

    An object that is the value of several fields has none, unless these have one annotation.
    """
    found: dict[int, Hint] = {}
    for name, hint in fields.items():
        try:
            value = getattr(node, name, None)
        except USERS_ERRORS:
            continue  # a property of the user's, which needs more than the arrays
        other = found.setdefault(id(value), hint)
        # Hints are compared by identity, and equal annotations have a hint each.
        if (other.text, other.forms) != (hint.text, hint.forms):
            found[id(value)] = NOTHING
    return found
