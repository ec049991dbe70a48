"""A tree ─► its `Form`: generated functions from trees with its structure to their arrays, and
back.

Generating takes long, most of it in Python's compiler. So a large part of a tree has a form of its
own, and a part whose form is known already, in this tree or in another one, uses that. The layers
of a model are of one form, and so are the state that a training step takes and the one that it
returns.
"""

import weakref
from collections.abc import Callable, Sequence

from functree.errors import FunctreeTypeError
from functree.tree.arrays import AnyArray, Tree, is_array
from functree.tree.skeleton.code import BuildCode, Refusal, TakeCode
from functree.tree.skeleton.kinds import LEAVES, kind_of

# The number of arrays from which a part of a tree has a form of its own. A form costs 0.2 µs in
# each call.
LARGE = 12
# The number of forms that are remembered for each class.
_REMEMBERED = 16


class Form:
    """The generated functions of trees with one structure and equal static values. It holds no
    arrays.

    Args:
        sample: a tree with this structure.
        code: the code of `take`, written from the sample.

    Attributes:
        take: a function from a tree to its arrays, in JAX's order. For another tree it returns a
            `Refusal`. It does not check that the values in the place of arrays are arrays.
        build: a function from arrays, in JAX's order, to a tree.
        size: the number of arrays.
    """

    def __init__(self, sample: Tree, code: "_Take"):
        what = type(sample).__name__
        self.size: int = code.size
        self.take: Callable[[Tree], list[AnyArray] | Refusal] = code.finished(what)
        build = _Build(code.parts)
        # Not `visit`, for which the sample would be a part of itself.
        build.lines.append(f"return {kind_of(sample).build(build, sample)}")
        self.build: Callable[[Sequence[AnyArray]], Tree] = build.function("build(arrays)", what)
        # They are remembered by others as long as this form exists.
        self._parts: list[Form] = [form for _, form in code.parts.values()]

    def fits(self, tree: Tree) -> bool:
        """Whether a tree has this form."""
        try:
            arrays = self.take(tree)
        except FunctreeTypeError:
            # Its static data cannot be compared with that of another function's trees.
            return False
        return type(arrays) is list and all(map(is_array, arrays))


def form_of(tree: Tree) -> Form:
    """The form of a tree. It is generated unless there is a tree with this form already."""
    known = _known(tree)
    if known is not None:
        return known
    return _remembered(tree, _Take.of(tree))


# The forms by the class of their trees. The forms belong to those who use them.
_FORMS: weakref.WeakKeyDictionary[type, list[weakref.ref[Form]]] = weakref.WeakKeyDictionary()


def _known(tree: Tree) -> Form | None:
    """The form of a tree, if it was generated before and is still in use."""
    for reference in _FORMS.get(type(tree), ()):
        form = reference()
        if form is not None and form.fits(tree):
            return form
    return None


def _remembered(sample: Tree, code: "_Take") -> Form:
    """A new form, as the first one of its class."""
    form = Form(sample, code)
    others = [other for other in _FORMS.get(type(sample), ()) if other() is not None]
    _FORMS[type(sample)] = [weakref.ref(form), *others][:_REMEMBERED]
    return form


# A part of a sample and its form, by the identity of the part. The part is kept, so that its
# identity stays its own.
_Parts = dict[int, tuple[Tree, Form]]


class _Take(TakeCode):
    """The code of `take`, in which large parts of the tree are taken apart by the functions of
    their own forms."""

    def __init__(self, outer: "_Take | None" = None):
        super().__init__(outer)
        self.parts: _Parts = {}

    @classmethod
    def of(cls, sample: Tree, outer: "_Take | None" = None) -> "_Take":
        """The code for a tree like the sample."""
        code = cls(outer)
        kind_of(sample).take(code, sample, code.root)
        return code

    def visit(self, sample: Tree, at: str) -> None:
        kind = kind_of(sample)
        if kind in LEAVES:
            kind.take(self, sample, at)
            return
        form = _known(sample)
        if form is None:
            inner = _Take.of(sample, self)
            if inner.size < LARGE:
                self.include(inner, at)
                self.parts.update(inner.parts)
                return
            form = _remembered(sample, inner)
        self.parts[id(sample)] = sample, form
        arrays = self.assign(f"{self.value(form.take)}({at})")
        self.refuse_if(f"type({arrays}) is tuple", arrays)
        self.several(arrays, form.size)


class _Build(BuildCode):
    """The code of `build`, in which the parts that have forms are built by their functions."""

    def __init__(self, parts: _Parts):
        super().__init__()
        self._parts = parts

    def visit(self, sample: Tree) -> str:
        part, form = self._parts.get(id(sample), (None, None))
        if form is None or part is not sample:
            return kind_of(sample).build(self, sample)
        return self.assign(f"{self.value(form.build)}({self.several(form.size)})")
