"""`matrix_dimensions` identifies the matrices in a model for `optax.contrib.muon`."""

from collections.abc import Callable
from typing import Any

import jax
from optax.contrib import MuonDimensionNumbers

from functree.argument_checks import check_tree, shown
from functree.errors import FunctreeValueError, Problem, count, did_you_mean
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
    Write several dimensions as a tuple: `{"query": (-3, (-2, -1))}`. All other dimensions index
    separate matrices. A value of None means that nothing below the field is a matrix. If nested
    modules declare the same array, the outermost module's declaration applies. An array that no
    module declares is not treated as a matrix.

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


def _by_path(model: Tree) -> dict[Keys, MuonDimensionNumbers | None]:
    """Map the path of each array in a model to its dimensions, or to None if it is not a matrix."""
    declared: dict[Keys, Any] = {}
    problems: list[Problem] = []
    for keys, node, kind in walk(model, in_model=True):
        matrices = None if kind in LEAVES else own_matrices(node)
        if matrices is None:
            continue
        fields = dict(children(node) or ())
        for name, value in matrices.items():
            if name not in fields:
                method = f"{type(node).__name__}.__matrix_dimensions__"
                why = f"the module has no field {name!r}{did_you_mean(name, fields)}"
                problems.append(Problem(Path(keys), None, method, why, _TAKES))
            # `walk` yields a module before its inner modules. The outermost declaration applies.
            elif first_beginning(keys, declared) is None:
                declared[*keys, name] = value
    by_path: dict[Keys, MuonDimensionNumbers | None] = {}
    for leaf in read(model).leaves:
        at = first_beginning(leaf.path, declared)
        value = by_path[leaf.path] = None if at is None else declared[at]
        # In a trace of an optimizer for single layers, arrays lack the dimensions of their stack.
        ndim = len(leaf.shape) - len(stack_sizes(leaf))
        if value is None:
            continue
        if _is_valid(value, ndim):
            by_path[leaf.path] = MuonDimensionNumbers(*value)
        else:
            why = f"it is declared as {shown(value)}, but has {count(ndim, 'dimension')}"
            if ndim < len(leaf.shape):
                why += ", not counting the dimensions of its stack"
            problems.append(leaf.problem(why, _TAKES))
    if problems:
        headline = "matrix_dimensions: invalid declarations in the model"
        raise FunctreeValueError(headline, problems)
    return by_path


_TAKES = (
    "let `__matrix_dimensions__` map the name of a field to a pair of the dimensions summed over "
    "and the dimensions of the result, counted from the end: `(-2, -1)` or `(-3, (-2, -1))`; or to "
    "None if the array is not a matrix"
)


def _is_valid(value: object, ndim: int) -> bool:
    """Return whether a value is a pair of dimensions of an array with `ndim` dimensions."""
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    summed, result = (part if isinstance(part, tuple) else (part,) for part in value)
    dimensions = [*summed, *result]
    if not all(isinstance(dim, int) and -ndim <= dim < 0 for dim in dimensions):
        return False
    return bool(summed and result) and len(set(dimensions)) == len(dimensions)
