"""An optimizer, and its trace for single layers ─► the parameters of which one layer depends on
another one.

The trace for single layers has one array for each stack. What the optimizer does with several
layers is seen in a trace with two of them: with a tuple of two arrays in the place of each stack.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from functree.errors import USERS_ERRORS
from functree.labels.optimizer.owners import owners_of
from functree.optimizers.update_trace import (
    Part,
    UpdateTrace,
    for_layers,
    layer_type,
    paths_of,
)
from functree.tree.arrays import Tree
from functree.tree.jaxprs import NOTHING, Sources, dependencies
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton, abstract_result


class Arguments(NamedTuple):
    """The arguments of an optimizer's `update`, without the state."""

    updates: Tree
    params: Tree | None
    extra: Mapping[str, Tree]


def layers_depending(
    tx: optax.GradientTransformation, arguments: Arguments, trace: UpdateTrace
) -> frozenset[Path]:
    """The parameters of which one layer depends on another one.

    The pairs are first in plain dicts with the keys of the parameters, and then in the nodes of the
    model: an optimizer may have a mask or labels of the model's class, and a class may refuse
    pairs. If neither is possible, nothing is known.

    Args:
        tx: the optimizer.
        arguments: the arguments of its `update`.
        trace: the trace of its `update` for single layers.
    """
    for build in (_in_dicts, _in_nodes):
        try:
            with for_layers():
                return _depending(tx, build(arguments, trace), trace)
        except USERS_ERRORS:
            continue
    return frozenset()


def _pairs(trace: UpdateTrace, part: Part) -> list[tuple[Path, Any]]:
    """The path of each array of one of the arguments, and its type for one layer; a pair of them
    for a stack."""
    found: list[tuple[Path, Any]] = []
    for place, array in zip(trace.inputs, trace.arrays, strict=True):
        if place.part == part:
            type_ = layer_type(array, len(place.stack))
            found.append((place.path, (type_, type_) if place.stack else type_))
    return found


def _in_dicts(arguments: Arguments, trace: UpdateTrace) -> Arguments:
    """Arguments with a pair for each stack, in plain dicts."""
    params = None if arguments.params is None else nested(_pairs(trace, "parameter"))
    # What has no arrays, such as a function, is passed on as it is.
    extra = {**arguments.extra, **nested(_pairs(trace, "extra"))}
    return Arguments(nested(_pairs(trace, "gradient")), params, extra)


def nested(values: Iterable[tuple[Path, Any]]) -> dict[Any, Any]:
    """Plain dicts with a value at each of some paths."""
    tree: dict[Any, Any] = {}
    for path, value in values:
        *above, last = path
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def _in_nodes(arguments: Arguments, trace: UpdateTrace) -> Arguments:
    """Arguments with a pair for each stack, in the nodes of the model."""

    def filled(part: Part, tree: Tree) -> Any:
        skeleton, _ = Skeleton.apart(tree)
        return skeleton.fill([pair for _, pair in _pairs(trace, part)])

    return Arguments(
        filled("gradient", arguments.updates),
        filled("parameter", arguments.params),
        filled("extra", dict(arguments.extra)),
    )


def _depending(
    tx: optax.GradientTransformation, pairs: Arguments, trace: UpdateTrace
) -> frozenset[Path]:
    """The parameters of which one layer depends on another one, by a trace with pairs."""
    parameters = frozenset(paths_of(pairs.updates))
    state = abstract_result(tx.init, pairs.updates if pairs.params is None else pairs.params)
    skeleton, types = Skeleton.apart((*pairs, state))
    update = optax.with_extra_args_support(tx).update
    results: list[list[Path | None]] = []

    def run(*arrays: Any) -> list[Any]:
        updates, params, extra, state = skeleton.fill(arrays)
        result, after = update(updates, state, params, **extra)
        results.append(
            [*_own(paths_of(result), parameters), *_own_in_state(paths_of(after), parameters)]
        )
        _, outputs = Skeleton.apart((result, after))
        return outputs

    program = jax.make_jaxpr(run)(*types)
    owners = [*_own(paths_of(pairs.updates), parameters), *_own(paths_of(pairs.params), parameters)]
    below = [Path(path[1:]) for path in paths_of(dict(pairs.extra))]
    owners += [*_own(below, parameters), *_own_in_state(paths_of(state), parameters)]
    sources: list[Sources] = [NOTHING if owner is None else frozenset({owner}) for owner in owners]
    stacked = {place.path for place in trace.inputs if place.part == "gradient" and place.stack}
    depending: set[Path] = set()
    for owner, on in zip(results[0], dependencies(program, sources), strict=True):
        if owner is not None and on - {owner} and owner[:-1] in stacked:
            depending.add(Path(owner[:-1]))
    return frozenset(depending)


def _own(paths: Iterable[Path], parameters: frozenset[Path]) -> list[Path | None]:
    """The parameter at each path; None for what is at the path of no parameter."""
    return [path if path in parameters else None for path in paths]


def _own_in_state(paths: Sequence[Path], parameters: frozenset[Path]) -> list[Path | None]:
    """The parameter that each leaf of a state belongs to by its path."""
    owners = owners_of(paths, parameters)
    return [next(iter(owners[path]), None) for path in paths]
