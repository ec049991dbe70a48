"""`ft.signature_layouts` applies rules to the annotations of a function.

A function and rules ─► the layouts of its arguments and its result.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from functree.argument_checks import FUNCTION, check
from functree.calls.signature import RESULT, Signature
from functree.errors import AxesError
from functree.labels.annotations.hints import NOTHING, Hint, field_hints
from functree.layout.layout import Layout, LayoutLike, LayoutTree, Modifier, as_layout
from functree.layout.rules import AxisRules, spec_of_axes

_STATIC = (int, float, complex, bool, str, bytes, type(None), None)


def signature_layouts(
    fun: Callable[..., Any], rules: LayoutLike
) -> tuple[dict[str, LayoutTree], LayoutTree]:
    """Return the layouts of a function's arguments and result, from its annotations and rules.

    Args:
        fun: a function, a method, a partial, or a callable module.
        rules: `AxisRules`, or another layout that uses names.

    Returns:
        `(inputs, output)`: a dict from each parameter's name to its layout, and the layout of the
            result. A layout may be a prefix tree. `Float[Array, "batch embed"]` becomes the `P`
            from the rules. A tuple becomes a tuple with a layout for each element. A module, or a
            missing annotation, becomes the rules themselves. For a module, the rules use the axis
            names in its annotations. If the names depend on the array's rank or dtype
            (`"*batch embed"`), the layout resolves them for each array. A number or a string
            becomes None.

    Raises:
        FunctreeError: if `fun` is not a function.
        AxesError: if an annotation cannot be resolved.
        RuleError: if `rules` is not a layout.
        ShardingError: if an axis has no rule.

    Examples:
        >>> def ffn(
        ...     x: Float[Array, "batch embed"], up: Float[Array, "embed hidden"]
        ... ) -> Float[Array, "batch hidden"]:
        ...     return x @ up
        >>> rules = ft.AxisRules(
        ...     {"batch": "data", "hidden": "model", "embed": None}
        ... )
        >>> inputs, output = ft.signature_layouts(ffn, rules)
        >>> inputs, output
        ({'x': P('data', None), 'up': P(None, 'model')}, P('data', 'model'))
    """
    check("signature_layouts: invalid arguments", fun=(fun, FUNCTION))
    (signature, _), layout = Signature.of(fun), as_layout(rules)

    def given(record: Any, name: str) -> LayoutTree:
        if record.__annotations__.get(name, ...) in _STATIC:
            return None
        hint = field_hints(record).child(name)
        return _layout(hint, layout, f"{signature.name}: the annotation of `{name}`, `{hint.text}`")

    inputs = {name: given(signature.call, name) for name in signature.parameters}
    return inputs, given(signature.result, RESULT)


def _layout(hint: Hint, rules: Layout, what: str) -> LayoutTree:
    """Return the layout for one annotation.

    The layout is a spec, or an `AnnotationLayout` if the spec depends on the array.

    Args:
        hint: the annotation.
        rules: the rules.
        what: the annotation's text in messages.
    """
    if hint.error:
        raise AxesError(f"{what}, cannot be resolved: {hint.error}")
    if hint is NOTHING:
        return rules
    # `PyTree[X]`
    in_any_tree = ... in hint.parts and any(form.dtype for form in hint.child(...).forms)
    # A union such as `Float[Array, "a"] | tuple[...]` has several kinds, and only the value shows
    # which kind applies.
    kinds = [kind for kind in (hint.forms, 0 in hint.parts, None in hint.parts) if kind]
    if hint.names or hint.generics or in_any_tree or len(kinds) != 1:
        return AnnotationLayout(rules, hint)
    if 0 in hint.parts:
        elements = list(map(hint.child, range(len(hint.parts))))
        if all(element is NOTHING for element in elements):
            return rules
        return tuple(_layout(element, rules, what) for element in elements)
    if None in hint.parts:
        inner = _layout(hint.child(None), rules, what)
        # This layout is for the whole container. A spec, and rules without an annotation, apply to
        # each element. An `AnnotationLayout` reads the annotation at a leaf's path below the
        # container. A tuple, as for `list[tuple[X, Y]]`, would mean one entry for each element of
        # the list.
        waits = isinstance(inner, tuple | AnnotationLayout)
        return AnnotationLayout(rules, hint) if waits else inner
    # The rank and the dtype of an array select among alternatives. Other layouts may have a mesh or
    # a memory kind, and may shard more dimensions than the annotation does, so a bare spec would
    # lose this information.
    form, *alternatives = hint.forms
    if alternatives or form.wrong or not isinstance(rules, AxisRules):
        return AnnotationLayout(rules, hint)
    if form.spec is not None:
        return form.spec
    if form.plain is None:
        return AnnotationLayout(rules, hint)
    return spec_of_axes(rules, form.plain, None, None)


@dataclass(frozen=True, repr=False, eq=False)
class AnnotationLayout(Modifier):
    """Rules with an annotation, whose axis names are resolved once the arrays are known."""

    annotation: Hint

    @property
    def hint(self) -> Hint:
        return self.annotation

    # A `Hint` is compared by identity, since it may contain names that are resolved later. Two
    # layouts from one annotation must be equal, so that they share programs. Comparing texts is
    # safe: a name means the same in all annotations of a function, and functions do not share
    # programs.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnnotationLayout) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash((self.hint.text, self.layout))

    def _parts(self) -> tuple[object, ...]:
        return self.layout, self.hint.text, self.hint.forms, self.hint.names

    def __repr__(self) -> str:
        return f"{self.layout!r} by `{self.hint.text}`"
