"""`matrix_dimensions` identifies the matrices in a model for `optax.contrib.muon`."""

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
    """Return a function that identifies the matrices in a model for `optax.contrib.muon`.

    By default, Muon treats each array with two dimensions as a matrix. This rule includes the table
    of an embedding, and the scales of the norms in a stack of layers. It excludes the weights of a
    stack, and the weights of attention, which have a dimension for the heads.

    The layers of `ft.nn` declare their matrices: the weights of `Linear`, `Attention` and `MLP`,
    and the experts' weights in `MoE`. Weights with a vocabulary dimension are not treated as
    matrices: the table of an embedding, the weight of a `Linear` with the axis `"vocab"`, and the
    `unembed` of a `Transformer`. Nor are norms, biases and routers.

    Your own modules can define a method `__matrix_dimensions__`. It returns a mapping from field
    names to pairs. A pair consists of the dimensions summed over, and the dimensions of the result.
    Count dimensions from the end: `{"weight": (-2, -1)}`. The pair then applies to stacks too.
    Write several dimensions as a tuple: `{"query": (-3, (-2, -1))}`. Instead of a pair, the value
    may be a `MuonDimensionNumbers`. All other dimensions index separate matrices. A value of None
    means that nothing below the field is a matrix. A key may also be a path below the module:
    `"proj.weight"`. If nested modules declare the same array, the outermost module's declaration
    applies. An array that no module declares is not treated as a matrix.

    Args:
        model: the model; it may be abstract.

    Returns:
        A function for `muon_weight_dimension_numbers=`. It takes the parameters: a tree with the
            model's structure, from which arrays may be missing, or dicts with the same keys. Its
            result has `MuonDimensionNumbers` in place of each matrix, and None for other arrays.

    Raises:
        FunctreeError: if `model` is not a tree of arrays.
        FunctreeError: if a method `__matrix_dimensions__` returns an invalid value.
        FunctreeError: (when called) if the model has no array at a parameter's path.

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
        >>> dimensions = ft.nn.matrix_dimensions(experts)(experts)
        >>> dimensions.router, dimensions.weight
        (None, MuonDimensionNumbers(reduction_axis=-1, output_axis=-2))
    """
    check_tree("matrix_dimensions", model)
    known = _by_path(model)

    def dimensions(parameters: Tree) -> Tree:
        result: list[MuonDimensionNumbers | None] = []
        problems: list[Problem] = []
        for keys, node, kind in walk(parameters, in_model=True):
            if kind not in LEAVES or kind is NONE:
                continue
            # Instead of a stack's array, there may be a tuple with the arrays of its layers.
            at = first_beginning(keys, known)
            result.append(None if at is None else known[at])
            if at is None and kind is ARRAY:
                problems.append(_unknown(keys, node))
        if problems:
            headline = f"matrix_dimensions: {count(len(problems), 'unknown parameter')}"
            raise FunctreeValueError(headline, problems)
        return jax.tree.structure(parameters).unflatten(result)

    return dimensions


def _unknown(keys: Keys, array: Tree) -> Problem:
    """Return the problem for a parameter that the model does not have."""
    why = "the model passed to `matrix_dimensions` has no array at this path"
    remedy = "pass the model that you train to `ft.nn.matrix_dimensions`"
    return Problem(Path(keys), tuple(array.shape), shown(array), why, remedy)


class _Statement(NamedTuple):
    """A module's declaration about one of its fields.

    Attributes:
        by: the class and the field, for messages.
        dimensions: the dimensions, or None if the field is not a matrix.
    """

    by: str
    dimensions: MuonDimensionNumbers | None


def _by_path(model: Tree) -> dict[Keys, MuonDimensionNumbers | None]:
    """Map the path of each array in a model to its dimensions, or to None if it is not a matrix."""
    about, problems, right_type = _statements(model)
    by_path: dict[Keys, MuonDimensionNumbers | None] = {}
    for leaf in read(model).leaves:
        at = first_beginning(leaf.path, about)
        by, dimensions = _Statement("", None) if at is None else about[at]
        by_path[leaf.path] = dimensions
        if dimensions is not None and (why := _too_few(leaf, dimensions)):
            problems.append(Problem(leaf.path, None, f"{leaf.text}   {by}", why, _TAKES))
    if problems:
        headline = "matrix_dimensions: invalid declarations in the model"
        raise parameter_error(headline, problems, right_type=right_type)
    return by_path


def _statements(model: Tree) -> tuple[dict[Keys, _Statement], list[Problem], bool]:
    """Collect the modules' declarations by path, with their problems.

    The last result is True if all values have the right type.
    """
    about: dict[Keys, _Statement] = {}
    problems: list[Problem] = []
    right_type = True
    for keys, node, kind in walk(model, in_model=True):
        said = None if kind in LEAVES else own_matrices(node)
        if said is None:
            continue
        method = f"{type(node).__name__}.__matrix_dimensions__"
        if not isinstance(said, Mapping):
            problems.append(
                Problem(Path(keys), None, method, f"it returns {shown(said)}", _RETURNS)
            )
            right_type = False
            continue
        for name, value in said.items():
            by, path = f"{method} for {name!r}", Path(keys)
            try:
                path = Path((*keys, *_place(node, name)))
                statement = _Statement(by, _read(value))
            except (TypeError, ValueError) as error:
                problems.append(Problem(path, None, by, str(error), _TAKES))
                right_type = right_type and isinstance(error, ValueError)
                continue
            # `walk` yields a module before its inner modules. The outermost declaration applies.
            if first_beginning(path, about) is None:
                about[path] = statement
    return about, problems, right_type


_TAKES = (
    "map the name of a field, or a path below the module, to the dimensions summed over and the "
    "dimensions of the result, counted from the end: `(-2, -1)`, `(-3, (-2, -1))`, a "
    "`MuonDimensionNumbers`, or None if the array is not a matrix"
)
_RETURNS = "return a mapping, and " + _TAKES


def _place(node: Tree, name: object) -> Keys:
    """Return the keys from a module to a named node.

    Raises:
        TypeError: if `name` is not a string.
        ValueError: if `name` is not a path in the module.
    """
    if not isinstance(name, str):
        raise TypeError(f"{shown(name)} is not the name of a field")
    keys = Path.parse(name)
    for key in keys:
        below = dict(children(node) or ())
        if key not in below:
            raise ValueError(f"the module has no {key!r} at this path{did_you_mean(key, below)}")
        node = below[key]
    return keys


def _read(value: Any) -> MuonDimensionNumbers | None:
    """Convert a declared value to optax's form.

    Raises:
        TypeError: if the value is not a pair of dimensions.
        ValueError: if the dimensions are invalid.
    """
    if value is None:
        return None
    is_pair = isinstance(value, tuple | list) and len(value) == 2
    if not is_pair or not all(map(_is_integer, (*_group(value[0]), *_group(value[1])))):
        raise TypeError(f"{shown(value)} is not a pair of dimensions")
    summed, given = map(_group, value)
    if not summed or not given:
        raise ValueError(f"{shown(value)}: each part of the pair must contain a dimension")
    if max(*summed, *given) >= 0:
        why = "dimensions must be negative, counted from the end"
        raise ValueError(f"{shown(value)}: {why}")
    if len({*summed, *given}) < len(summed) + len(given):
        raise ValueError(f"{shown(value)}: a dimension occurs twice")
    return MuonDimensionNumbers(*map(_as_axes, value))


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _group(dimensions: Any) -> tuple[Any, ...]:
    """Return a group's dimensions as a tuple; a single dimension may be an integer."""
    return tuple(dimensions) if isinstance(dimensions, tuple | list) else (dimensions,)


def _as_axes(dimensions: Any) -> int | tuple[int, ...]:
    """Return a group's dimensions in optax's form."""
    if isinstance(dimensions, tuple | list):
        return tuple(map(int, dimensions))
    return int(dimensions)


def _too_few(leaf: Leaf, dimensions: MuonDimensionNumbers) -> str:
    """Return why an array, or a layer of a stack, has too few dimensions.

    The text is empty if the array has enough dimensions.
    """
    # In a trace of an optimizer for single layers, arrays lack the dimensions of their stack.
    stacked = len(stack_sizes(leaf))
    has = len(leaf.shape) - stacked
    needed = max(-dimension for group in dimensions for dimension in _group(group))
    if needed <= has:
        return ""
    text = f"({dimensions.reduction_axis}, {dimensions.output_axis})"
    without = ", not counting the dimensions of its stack" if stacked else ""
    return f"{text} needs {count(needed, 'dimension')}, but the array has {has}{without}"
