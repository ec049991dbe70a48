"""A model ─► a function that says which parameters are matrices, as `optax.contrib.muon` asks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from optax.contrib import MuonDimensionNumbers

from functree.argument_checks import check_tree, parameter_error, shown
from functree.errors import FunctreeValueError, Problem, RuleError, count, did_you_mean
from functree.labels.leaf import Leaf
from functree.labels.leaves import read
from functree.labels.optimizer.layers import stack_sizes
from functree.tree.arrays import Tree
from functree.tree.interfaces import own_matrices
from functree.tree.nodes import children, walk
from functree.tree.paths import Keys, Path, first_beginning
from functree.tree.skeleton.kinds import ARRAY, LEAVES, NONE


def matrix_dimensions(model: Tree) -> Callable[[Tree], Tree]:
    """Which parameters of a model are matrices, for `optax.contrib.muon`.

    By itself, Muon takes each array of two dimensions for a matrix. The table of an embedding is
    one, and so are the scales of the norms in a stack of layers; the weights of a stack are none,
    nor are those of attention, which have a dimension for the heads.

    The layers of `ft.nn` say which of their arrays are matrices: the weights of `Linear`,
    `Attention` and `MLP`. Those of a vocabulary are none: the table of an embedding, the weight of
    a `Linear` with the axis `"vocab"`, and the `unembed` of a `Transformer`. Norms and biases are
    none.

    A module of your own says it by a method `__matrix_dimensions__`. The method returns a mapping
    from the names of fields to the dimensions that are summed over and those of the result, counted
    from the end, so that they hold for a stack of layers too: `{"weight": (-2, -1)}`; several
    dimensions are a tuple: `{"query": (-3, (-2, -1))}`. A `MuonDimensionNumbers` may be given, too.
    All other dimensions count matrices. None means that nothing below the field is a matrix.
    Instead of a field, a path below the module may be given: `"proj.weight"`. If modules inside of
    each other speak of the same array, the outermost decides. What nobody speaks of is no matrix.

    Args:
        model: the model; it may be abstract.

    Returns:
        A function for `muon_weight_dimension_numbers=`. It takes the parameters: a tree with the
            structure of the model, in which some may be missing, or dicts with the same keys. It
            returns the same tree with `MuonDimensionNumbers` for each matrix, and None for every
            other array.

    Raises:
        FunctreeError: `model` is not a tree of arrays; a method `__matrix_dimensions__` returns
            something else; (when called) a parameter has a path that the model does not have.

    Examples:
        >>> import optax
        >>> layers = ft.stack(
        ...     lambda key: ft.nn.MLP(4, 8, key=key), 3, jax.random.key(0)
        ... )
        >>> dimensions = ft.nn.matrix_dimensions(layers)
        >>> dimensions(layers).layer.up
        MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
        >>> tx = optax.contrib.muon(
        ...     1e-3, muon_weight_dimension_numbers=dimensions
        ... )

        A module of your own:

        >>> class Experts(eqx.Module):
        ...     router: Float[Array, "embed experts"]
        ...     weight: Float[Array, "experts hidden embed"]
        ...
        ...     def __matrix_dimensions__(self):
        ...         return {"weight": (-1, -2)}
        >>> experts = Experts(jnp.ones((4, 2)), jnp.ones((2, 8, 4)))
        >>> found = ft.nn.matrix_dimensions(experts)(experts)
        >>> found.router, found.weight
        (None, MuonDimensionNumbers(reduction_axis=-1, output_axis=-2))
    """
    check_tree("matrix_dimensions", model)
    known = _by_path(model)

    def dimensions(parameters: Tree) -> Tree:
        found: list[MuonDimensionNumbers | None] = []
        problems: list[Problem] = []
        for keys, node, kind in walk(parameters, in_model=True):
            if kind not in LEAVES or kind is NONE:
                continue
            # In the place of a stack's array, there may be a tuple with the arrays of its layers.
            at = first_beginning(keys, known)
            found.append(None if at is None else known[at])
            if at is None and kind is ARRAY:
                problems.append(_unknown(keys, node))
        if problems:
            headline = f"which of {count(len(problems), 'parameter')} are matrices is not known"
            raise FunctreeValueError(headline, problems)
        return jax.tree.structure(parameters).unflatten(found)

    return dimensions


def _unknown(keys: Keys, array: Tree) -> Problem:
    """The problem of a parameter that the model does not have."""
    why = "the model that `matrix_dimensions` was called with has no array at this path"
    remedy = "call `ft.nn.matrix_dimensions` with the model that is trained"
    return Problem(Path(keys), tuple(array.shape), shown(array), why, remedy)


def _by_path(model: Tree) -> dict[Keys, MuonDimensionNumbers | None]:
    """The dimensions of each array of a model; None if it is no matrix."""
    statements = _Statements()
    for keys, node, kind in walk(model, in_model=True):
        if kind not in LEAVES:
            statements.hear(keys, node)
    found: dict[Keys, MuonDimensionNumbers | None] = {}
    for leaf in read(model).leaves:
        at = first_beginning(leaf.path, statements.about)
        found[leaf.path] = None if at is None else statements.of_leaf(leaf, at)
    statements.check()
    return found


class _Statement(NamedTuple):
    """What a module says about one of its fields.

    Attributes:
        by: the class and the field, for messages.
        dimensions: the dimensions; None for no matrix.
    """

    by: str
    dimensions: MuonDimensionNumbers | None


@dataclass
class _Statements:
    """What the modules of a model say, and what is wrong with it.

    Attributes:
        about: by the path of what it is about.
        problems: what cannot be read.
        right_type: whether no value is of a wrong type.
    """

    about: dict[Keys, _Statement] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    right_type: bool = True

    def hear(self, keys: Keys, node: Tree) -> None:
        """Note what a module says about arrays that no module around it has spoken of."""
        said = own_matrices(node)
        if said is None:
            return
        method = f"{type(node).__name__}.__matrix_dimensions__"
        if not isinstance(said, Mapping):
            self._wrong(Path(keys), method, f"returns {shown(said)}, {_RETURNS}", is_type=False)
            return
        for name, value in said.items():
            by = f"{method} of {name!r}"
            below, why = _place(node, name)
            path = Path((*keys, *below))
            if why is None:
                why = _misread(value)
            if why is not None:
                self._wrong(path, by, why, is_type=_is_pair(value))
            elif first_beginning(path, self.about) is None:
                self.about[path] = _Statement(by, _read(value))

    def of_leaf(self, leaf: Leaf, at: Path) -> MuonDimensionNumbers | None:
        """The dimensions of an array, by the statement at a path; a layer of a stack has to have
        them."""
        by, dimensions = self.about[at]
        if dimensions is None:
            return None
        # In a trace of an optimizer for single layers, stacks have no dimensions.
        stacked = len(stack_sizes(leaf))
        has = len(leaf.shape) - stacked
        needed = max(-one for group in dimensions for one in _group(group))
        if needed > has:
            why = f"{_text(dimensions)} needs {count(needed, 'dimension')}, and it has {has}"
            if stacked:
                why += ", without those of its stack"
            self._wrong(leaf.path, f"{leaf.text}   {by}", why, is_type=True)
        return dimensions

    def _wrong(self, path: Path, what: str, why: str, *, is_type: bool) -> None:
        self.problems.append(Problem(path, None, what, why, f"say {_TAKES}"))
        self.right_type = self.right_type and is_type

    def check(self) -> None:
        """Raise FunctreeError for all that is wrong."""
        if self.problems:
            headline = "which arrays are matrices cannot be read from the model"
            raise parameter_error(headline, self.problems, right_type=self.right_type)


_RETURNS = "and should return a mapping from names of fields"
_TAKES = (
    "by the name of a field, or by a path below the module, which dimensions are summed over and "
    "which are those of the result, counted from the end: `(-2, -1)`, `(-3, (-2, -1))`, a "
    "`MuonDimensionNumbers`, or None for no matrix"
)


def _place(node: Tree, name: object) -> tuple[Keys, str | None]:
    """The keys from a module to what a name is for, and why there is none."""
    if not isinstance(name, str):
        return (), f"{shown(name)} is not the name of a field"
    try:
        keys = Path.parse(name)
    except RuleError as error:
        return (), str(error)
    for depth, key in enumerate(keys):
        below = dict(children(node) or ())
        if key not in below:
            return keys[:depth], f"there is no {key!r}{did_you_mean(key, below)}"
        node = below[key]
    return keys, None


def _is_pair(value: Any) -> bool:
    """Whether a value has the form of two groups of dimensions, or is None."""
    if value is None:
        return True
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    return all(_is_integer(one) for group in value for one in _group(group))


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _misread(value: Any) -> str | None:
    """Why a value is not one of those that `_TAKES` speaks of; None if it is one."""
    if value is None:
        return None
    if not _is_pair(value):
        return f"{shown(value)} is not a pair of dimensions"
    summed, given = map(_group, value)
    if not summed or not given:
        return f"{shown(value)}: both need a dimension"
    if max(*summed, *given) >= 0:
        return f"{shown(value)}: dimensions are counted from the end, so they are negative"
    if len({*summed, *given}) < len(summed) + len(given):
        return f"{shown(value)}: a dimension is named twice"
    return None


def _read(value: Any) -> MuonDimensionNumbers | None:
    """What a module says, in the form of optax."""
    if value is None:
        return None
    summed, given = value
    return MuonDimensionNumbers(_as_axes(summed), _as_axes(given))


def _group(dimensions: Any) -> tuple[Any, ...]:
    """The dimensions of a group, of which one alone may be given as a number."""
    return tuple(dimensions) if isinstance(dimensions, tuple | list) else (dimensions,)


def _as_axes(dimensions: Any) -> int | tuple[int, ...]:
    """The dimensions of a group, as optax takes them."""
    if isinstance(dimensions, tuple | list):
        return tuple(map(int, dimensions))
    return int(dimensions)


def _text(dimensions: MuonDimensionNumbers) -> str:
    return f"({dimensions.reduction_axis}, {dimensions.output_axis})"
