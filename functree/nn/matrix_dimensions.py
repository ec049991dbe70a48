"""A model ─► a function that says which parameters are matrices, as `optax.contrib.muon` asks."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from optax.contrib import MuonDimensionNumbers

from functree.argument_checks import check_tree, parameter_error, shown
from functree.errors import FunctreeValueError, Problem, count, did_you_mean
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


class _Statement(NamedTuple):
    """What a module says about one of its fields.

    Attributes:
        by: the class and the field, for messages.
        dimensions: the dimensions; None for no matrix.
    """

    by: str
    dimensions: MuonDimensionNumbers | None


def _by_path(model: Tree) -> dict[Keys, MuonDimensionNumbers | None]:
    """The dimensions of each array of a model; None if it is no matrix."""
    about, problems, right_type = _statements(model)
    found: dict[Keys, MuonDimensionNumbers | None] = {}
    for leaf in read(model).leaves:
        at = first_beginning(leaf.path, about)
        by, dimensions = _Statement("", None) if at is None else about[at]
        found[leaf.path] = dimensions
        if dimensions is not None and (why := _too_few(leaf, dimensions)):
            problems.append(Problem(leaf.path, None, f"{leaf.text}   {by}", why, _TAKES))
    if problems:
        headline = "which arrays are matrices cannot be read from the model"
        raise parameter_error(headline, problems, right_type=right_type)
    return found


def _statements(model: Tree) -> tuple[dict[Keys, _Statement], list[Problem], bool]:
    """What the modules of a model say, by the path of what it is about; what cannot be read; and
    whether no value is of a wrong type."""
    about: dict[Keys, _Statement] = {}
    problems: list[Problem] = []
    right_type = True
    for keys, node, kind in walk(model, in_model=True):
        said = None if kind in LEAVES else own_matrices(node)
        if said is None:
            continue
        method = f"{type(node).__name__}.__matrix_dimensions__"
        if not isinstance(said, Mapping):
            problems.append(Problem(Path(keys), None, method, f"returns {shown(said)}", _RETURNS))
            right_type = False
            continue
        for name, value in said.items():
            by, path = f"{method} of {name!r}", Path(keys)
            try:
                path = Path((*keys, *_place(node, name)))
                statement = _Statement(by, _read(value))
            except (TypeError, ValueError) as error:
                problems.append(Problem(path, None, by, str(error), _TAKES))
                right_type = right_type and isinstance(error, ValueError)
                continue
            # Modules come before those inside them, and the outermost decides.
            if first_beginning(path, about) is None:
                about[path] = statement
    return about, problems, right_type


_TAKES = (
    "say by the name of a field, or by a path below the module, which dimensions are summed over "
    "and which are those of the result, counted from the end: `(-2, -1)`, `(-3, (-2, -1))`, a "
    "`MuonDimensionNumbers`, or None for no matrix"
)
_RETURNS = "return a mapping from names of fields: " + _TAKES


def _place(node: Tree, name: object) -> Keys:
    """The keys from a module to what a name is for. Raises TypeError or ValueError if there is
    none."""
    if not isinstance(name, str):
        raise TypeError(f"{shown(name)} is not the name of a field")
    keys = Path.parse(name)
    for key in keys:
        below = dict(children(node) or ())
        if key not in below:
            raise ValueError(f"there is no {key!r}{did_you_mean(key, below)}")
        node = below[key]
    return keys


def _read(value: Any) -> MuonDimensionNumbers | None:
    """What a module says, in the form of optax. Raises TypeError or ValueError for anything else
    than what `_TAKES` speaks of."""
    if value is None:
        return None
    is_pair = isinstance(value, tuple | list) and len(value) == 2
    if not is_pair or not all(map(_is_integer, (*_group(value[0]), *_group(value[1])))):
        raise TypeError(f"{shown(value)} is not a pair of dimensions")
    summed, given = map(_group, value)
    if not summed or not given:
        raise ValueError(f"{shown(value)}: both need a dimension")
    if max(*summed, *given) >= 0:
        why = "dimensions are counted from the end, so they are negative"
        raise ValueError(f"{shown(value)}: {why}")
    if len({*summed, *given}) < len(summed) + len(given):
        raise ValueError(f"{shown(value)}: a dimension is named twice")
    return MuonDimensionNumbers(*map(_as_axes, value))


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _group(dimensions: Any) -> tuple[Any, ...]:
    """The dimensions of a group, of which one alone may be given as a number."""
    return tuple(dimensions) if isinstance(dimensions, tuple | list) else (dimensions,)


def _as_axes(dimensions: Any) -> int | tuple[int, ...]:
    """The dimensions of a group, as optax takes them."""
    if isinstance(dimensions, tuple | list):
        return tuple(map(int, dimensions))
    return int(dimensions)


def _too_few(leaf: Leaf, dimensions: MuonDimensionNumbers) -> str:
    """Why an array, or a layer of a stack, does not have some dimensions; empty if it has."""
    # In a trace of an optimizer for single layers, stacks have no dimensions.
    stacked = len(stack_sizes(leaf))
    has = len(leaf.shape) - stacked
    needed = max(-one for group in dimensions for one in _group(group))
    if needed <= has:
        return ""
    text = f"({dimensions.reduction_axis}, {dimensions.output_axis})"
    without = ", without those of its stack" if stacked else ""
    return f"{text} needs {count(needed, 'dimension')}, and it has {has}{without}"
