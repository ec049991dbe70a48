"""The annotations of a function, and rules ─► the layouts of its arguments and its result."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from functree.argument_checks import FUNCTION, check
from functree.calls.signature import RESULT, Signature
from functree.errors import AxesError
from functree.labels.annotations.hints import NOTHING, UNREADABLE, Hint, field_hints
from functree.layout.layout import (
    Layout,
    LayoutLike,
    LayoutTree,
    Modifier,
    NoLayout,
    as_layout,
)
from functree.layout.rules import AxisRules, spec_of_axes

_STATIC = (int, float, complex, bool, str, bytes, type(None), None)


def signature_layouts(
    fun: Callable[..., Any], rules: LayoutLike
) -> tuple[dict[str, LayoutTree], LayoutTree]:
    """The layouts of a function's arguments and result, by its annotations and some rules.

    Args:
        fun: a function, a method, a partial, or a callable module.
        rules: `AxisRules`, or another layout that uses names.

    Returns:
        `(inputs, output)`: a dict from each parameter's name to its layout, or prefix tree of
            layouts, and that of the result. For `Float[Array, "batch embed"]` it is the `P` by the
            rules. For a tuple it is a tuple with a layout for each element. For a module, or
            without an annotation, it is the rules themselves, which read the annotations of the
            module. If the names depend on the array (`"*batch embed"`), it is a layout that reads
            them from the array. For a number or a string it is None.

    Raises:
        AxesError: an annotation cannot be resolved, or has alternatives that an array cannot
            distinguish.
        RuleError: `rules` is not a layout.
        ShardingError: an axis is not laid out by any rule.

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
    check("signature_layouts reads no signature", fun=(fun, FUNCTION))
    (signature, _), layout = Signature.of(fun), as_layout(rules)

    def given(record: Any, name: str) -> LayoutTree:
        if record.__annotations__.get(name, ...) in _STATIC:
            return None
        hint = field_hints(record).get(name, NOTHING)
        return _layout(hint, layout, f"{signature.name}: the annotation of `{name}`, `{hint.text}`")

    inputs = {name: given(signature.call, name) for name in signature.parameters}
    return inputs, given(signature.result, RESULT)


def _layout(hint: Hint, rules: Layout, what: str) -> LayoutTree:
    """The layout by one annotation: a spec if it does not depend on the array, else an
    `AnnotationLayout`. `what` is the annotation in messages."""
    try:
        hint = hint.settled
    except UNREADABLE as error:
        raise AxesError(f"{what}, cannot be resolved: {error}") from error
    if hint is NOTHING:
        return rules
    # `PyTree[X]`
    in_any_tree = hint.below is not None and any(form.dtype for form in hint.below.forms)
    # A union such as `Float[Array, "a"] | tuple[...]` has more than one kind: only the value shows
    # which it is.
    kinds = [kind for kind in (hint.forms, hint.elements, hint.element) if kind]
    if hint.names or hint.generics or in_any_tree or len(kinds) != 1:
        return AnnotationLayout(rules, hint)
    if hint.elements:
        return tuple(_layout(element, rules, what) for element in hint.elements)
    if hint.element is None:
        return _array_layout(hint, rules, what)
    one = _layout(hint.element, rules, what)
    # The layout is for the whole container. A spec, and rules without an annotation, are the same
    # for each element. But an `AnnotationLayout` reads the annotation at the path of a leaf below
    # the container; and a tuple, as for `list[tuple[X, Y]]`, would be taken as one entry for each
    # element of the list.
    return AnnotationLayout(rules, hint) if isinstance(one, tuple | AnnotationLayout) else one


def _array_layout(hint: Hint, rules: Layout, what: str) -> Layout | PartitionSpec:
    """The spec of an annotated array; an `AnnotationLayout` if the spec depends on the array.

    Alternatives (`Float[Array, "a b"] | Float[Array, "c"]`) are distinguished by the rank and the
    dtype of the array.
    """
    kinds: dict[Any, Any] = {}
    for form in hint.forms:
        if form.wrong:
            raise AxesError(f"{what}, cannot be read: {form.wrong}")
        named = form.spec, [dim.token for dim in form.dims]
        if kinds.setdefault((len(form.dims), form.dtype), named) != named:
            raise AxesError(
                f"{what}, is ambiguous: alternatives of the same rank and dtype name its "
                "dimensions differently"
            )
    said = {(form.plain, form.spec) for form in hint.forms}
    if len(said) > 1:
        return AnnotationLayout(rules, hint)
    ((axes, spec),) = said
    # Another layout may have a mesh or a memory kind, and may shard more dimensions than the
    # annotation says. In a bare spec all of this would be lost.
    if spec is not None and isinstance(rules, AxisRules | NoLayout):
        return spec
    if axes is None or not isinstance(rules, AxisRules):
        return AnnotationLayout(rules, hint)
    return spec_of_axes(rules, axes, None, None)


@dataclass(frozen=True, repr=False, eq=False)
class AnnotationLayout(Modifier):
    """Rules for leaves whose axes come from an annotation, once the arrays are known."""

    annotation: Hint

    @property
    def hint(self) -> Hint:
        return self.annotation

    # A `Hint` is compared by identity, since it may contain names that are resolved later. Two
    # layouts by the same annotation have to be equal, so that they share what is compiled. A name
    # in it has one meaning in all annotations of a function, and no two functions share a program.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnnotationLayout) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash((self.hint.text, self.layout))

    def _parts(self) -> tuple[object, ...]:
        return self.layout, self.hint.text, self.hint.forms, self.hint.names

    def __repr__(self) -> str:
        return f"{self.layout!r} by `{self.hint.text}`"
