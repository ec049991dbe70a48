"""An error of an optimizer ─► one with the paths of its state that was made for other parameters.

Surgery may replace a layer of the model in a training state, and leave its moments. Optax then says
that two pytrees differ, in the words of JAX. To compare both before each update would trace `init`
each time, which takes as long as half of an update outside of `jit`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import optax

from functree.errors import USERS_ERRORS, FunctreeError, FunctreeValueError, Problem
from functree.labels.leaves import arrays_by_path
from functree.tree.arrays import AnyArray, Tree, array_text
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import abstract_result

_JAX = "pytree"  # in JAX's messages about trees that differ
_HEADLINE = "apply_gradients: the optimizer's state was made for other parameters"
_ANEW = "make the training state anew: `ft.TrainState.create(ts.model, ts.tx, wrt=ts.wrt, ...)`"
_STATIC = (
    "change such a field in the moments too: `ft.select(ts).under(Layer).apply(...)` without "
    '`.at("model")`'
)


@contextmanager
def naming_stale_moments(
    tx: optax.GradientTransformation, params: Tree, opt_state: Tree
) -> Iterator[None]:
    """A context in which an error of an optimizer has the paths of its state that is not that of
    the parameters.

    Args:
        tx: the optimizer.
        params: the parameters, with None for those that it does not get.
        opt_state: its state.

    Raises:
        FunctreeValueError: an update failed, and the state was made for other parameters.
    """
    try:
        yield
    except FunctreeError:
        raise
    except USERS_ERRORS as error:
        about_trees = isinstance(error, ValueError) and _JAX in str(error)
        problems = list(_problems(tx, params, opt_state, about_trees))
        if not problems:
            raise
        raise FunctreeValueError(_HEADLINE, problems) from error


def _problems(
    tx: optax.GradientTransformation, params: Tree, opt_state: Tree, about_trees: bool
) -> Iterator[Problem]:
    """What in a state is not as the optimizer makes it for these parameters; what is static, only
    if the error is about trees that differ."""
    try:
        made = abstract_result(tx.init, params)
    except USERS_ERRORS:
        return  # such as of an `init` that cannot be traced: the error of the update is the news
    wanted, found = arrays_by_path(made), arrays_by_path(opt_state)
    if _shapes(wanted) == _shapes(found):
        # Of two states that the same optimizer makes, functions in them may differ too.
        if about_trees and jax.tree.structure(made) != jax.tree.structure(opt_state):
            why = "has other fields that are no arrays than the model"
            yield Problem(Path(("opt_state",)), None, "", why, f"{_STATIC}; or {_ANEW}")
        return
    for path, array in found.items():
        own = Path(("opt_state", *path))
        what = array_text(array)
        if path not in wanted:
            yield Problem(own, array.shape, what, "is of no parameter of the model", _ANEW)
        elif wanted[path].shape != array.shape:
            why = f"the parameter needs {array_text(wanted[path])}"
            yield Problem(own, array.shape, what, why, _ANEW)
    for path, array in wanted.items():
        if path not in found:
            own = Path(("opt_state", *path))
            yield Problem(own, array.shape, array_text(array), "is not there", _ANEW)


def _shapes(arrays: dict[Path, AnyArray]) -> dict[Path, tuple[int, ...]]:
    return {path: array.shape for path, array in arrays.items()}
