"""What each layer of a stack gets, and what it returns ─► why it does not fit."""

import inspect
from collections.abc import Iterator, Mapping, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp

from functree.argument_checks import Takes
from functree.errors import FunctreeTypeError, FunctreeValueError, Problem, count, did_you_mean
from functree.labels.leaf import array_problem
from functree.tree.arrays import Tree
from functree.tree.paths import Path


def _are_keywords(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    return all(isinstance(name, str) and name.isidentifier() and name != "state" for name in value)


EACH = Takes(
    'keyword arguments of the layers in a dict, `{"key": keys}`; the state is `state=`',
    _are_keywords,
).or_none()


def check_each(layer: Tree, each: Mapping[str, Tree], depth: int) -> None:
    """Raise FunctreeError for what a layer does not take, and for arrays that do not have a part
    for each layer."""
    if not each:
        return
    parameters = inspect.signature(layer).parameters
    # A layer with `**kwargs` may pass them on to others.
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        for name in each:
            if name not in parameters:
                near, of_layer = did_you_mean(name, parameters), type(layer).__name__
                raise FunctreeTypeError(
                    f"each={{{name!r}: ...}}: {of_layer} has no parameter `{name}`{near}"
                )
    problems: list[Problem] = []
    for path, leaf in arrays_with_path(dict(each)):
        if leaf.shape[:1] == (depth,):
            continue
        remedy = "pass what all layers share by position, `scan(x, shared)`"
        # The likely mistake: one key for all layers.
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) and not leaf.shape:
            remedy = f"split it, `jax.random.split(key, {depth})`"
        why = f"has leading size {leaf.shape[0]}" if leaf.shape else "has no leading dimension"
        why += f", and there are {depth} layers"
        problems.append(array_problem(Path(("each", *path)), leaf, why, remedy))
    if problems:
        raise FunctreeValueError("each layer needs its own part of an array", problems)


def divided_arguments(divided: int | Sequence[int], args: Sequence[Tree]) -> tuple[int, ...]:
    """The positions of the arguments that are divided like the batch. Raises FunctreeError for
    those that a call does not have."""
    positions = tuple(divided) if isinstance(divided, Sequence) else (divided,)
    if any(i not in range(len(args)) for i in positions):
        given = count(len(args), "argument")
        raise FunctreeValueError(
            f"a Stacked cannot be scanned: divided={divided!r} are positions among {given}, "
            "counted from 0 after `x`"
        )
    return positions


def arrays_with_path(tree: Tree) -> Iterator[tuple[Path, jax.Array | jax.ShapeDtypeStruct]]:
    """The arrays that are stacked, with their paths."""
    # Abstract ones too, since a stack may be planned before there are arrays.
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            yield Path.of(path), leaf


def check_same_type(layer: Tree, x: Tree, y: Tree) -> None:
    """Raise with our own message before `lax.scan` does, whose message is about its carry.

    Examples:
        >>> from functree.transforms.stack_arguments import check_same_type
        >>> check_same_type(jnp.sin, jnp.ones(2), jnp.zeros(2))
    """
    given, returned = _types(x), _types(y)
    if given != returned:
        raise FunctreeValueError(
            f"{type(layer).__name__} takes {given} and returns {returned}: in a Stacked the result "
            "of each layer is the input of the next one, so shape and dtype must stay the same. "
            "Convert x before the stack, or the result in the layer, or write "
            "`for layer in stacked: x = layer(x)`"
        )


def _types(x: Tree) -> str:
    """The types of the leaves as JAX writes them, with Explicit shardings. A weak type is as good
    as a strong one."""
    # JAX marks a weak type by a tilde.
    return str(jax.tree.map(lambda leaf: _Text(str(jax.typeof(leaf)).removeprefix("~")), x))


class _Text(str):
    """A string that is printed without quotes, also inside a tree."""

    __repr__ = str.__str__
