"""Many equal layers ─► one module whose arrays have a leading dimension, run by a single `lax.scan`."""

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar, overload

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from functree.errors import AxesError, FunctreeError, Problem
from functree.transforms.remat import Offload, Remat, check_names, remat_policy
from functree.tree.interfaces import Stack, StateMapping
from functree.tree.paths import Path

T = TypeVar("T")
X = TypeVar("X")
S = TypeVar("S")


class Stacked(eqx.Module, Stack, Generic[T]):
    """A module of `n` equal layers held as one: `x` goes through them in order.

    A sequence of layers (`len(s)`, `s[i]`, `s[1:3]`, iteration) and a layer itself (`s(x)`). The compiled
    program holds one layer, however many there are. Call it under jit: JAX compiles a `lax.scan` outside of one
    anew on each call.

    Args:
        layer: a layer whose array leaves all have a leading dimension `n`; made by `ft.stack`, or by
            `eqx.filter_vmap(make)(keys)`. What is not an array is shared by all layers.
        axis: the name of that dimension; it stands in front of the axes of every leaf below.

    Raises:
        FunctreeError: no array leaves, or leading sizes that differ. AxesError: `axis` is no identifier.

    Examples:
        >>> layers = ft.stack(lambda key: ft.nn.MLP(4, 8, key=key), 3, jax.random.key(0))
        >>> len(layers), layers.layer.gate.shape, layers[0].gate.shape
        (3, (3, 4, 8), (4, 8))
        >>> layers(jnp.ones((5, 4))).shape
        (5, 4)
    """

    layer: T
    axis: str = eqx.field(static=True, default="layers")

    def __check_init__(self) -> None:
        if not (isinstance(self.axis, str) and self.axis.isidentifier()):
            raise AxesError(f'Stacked(axis={self.axis!r}): the name of an axis is an identifier: "layers"')
        _depth(self)

    def stack_axes(self) -> tuple[str, ...]:
        """The axes in front of those of every leaf below."""
        return (self.axis,)

    def __len__(self) -> int:
        return _depth(self)

    def __iter__(self) -> Iterator[T]:
        return (self[i] for i in range(len(self)))

    @overload
    def __getitem__(self, index: slice) -> "Stacked[T]": ...
    @overload
    def __getitem__(self, index: int | Int[Array, ""]) -> T: ...
    def __getitem__(self, index: int | Int[Array, ""] | slice) -> "T | Stacked[T]":
        """One layer, or for a slice a shorter stack.

        An index that is an array (traced or not) is clamped to the stack, as JAX does: to check it would be
        to wait for the device.
        """
        if isinstance(index, slice):
            return Stacked(_take(self.layer, index), self.axis)
        return _take(self.layer, _position(index, len(self)))

    def __call__(self, x: X, *args: Any) -> X:
        """`x` through the layers in order; each is called as `layer(x, *args)`."""
        return self.scan(x, *args)

    @overload
    def scan(self, x: X, *args: Any, remat: Remat = None, unroll: int | bool = 1, state: None = None) -> X: ...
    @overload
    def scan(self, x: X, *args: Any, remat: Remat = None, unroll: int | bool = 1, state: S) -> tuple[X, S]: ...
    def scan(self, x: Any, *args: Any, remat: Remat = None, unroll: int | bool = 1, state: Any = None) -> Any:
        """`x` through the layers in order, with a say in what the backward pass keeps.

        Args:
            x: an array, or a tree of them, that every layer returns with the same shapes and dtypes.
            *args: handed to every layer, the same to each.
            remat: what is kept for the backward pass. `None`: everything; `"full"`: each layer's input alone;
                `"dots"`: also the products with weights; `ft.offload(...)`: values by their names, in host memory;
                or a policy of `jax.checkpoint_policies`.
            unroll: layers in one iteration of the loop, as in `jax.lax.scan`.
            state: an `ft.State`. Each layer is then called as `layer(x, *args, state=state)` and returns `(x, state)`;
                of what its `StateRef`s declare it sees its own part. All other state, such as what a ref outside of
                the stack declares too, is one for all layers, and goes through them in order.

        Returns:
            `x` after the last layer; with `state=`, `(x, state)`.

        Raises:
            FunctreeError: a layer changes x's shape or dtype; an unknown `remat`; a name to offload that no value of
                a layer has; a layer that is given a state and returns none.

        Examples:
            >>> layers = ft.stack(lambda key: ft.nn.MLP(4, 8, key=key), 3, jax.random.key(0))
            >>> layers.scan(jnp.ones((5, 4)), remat="dots").shape
            (5, 4)
        """
        arrays, static = eqx.partition(self.layer, eqx.is_array)
        shared, own = ({}, {}) if state is None else state.of_layers(self.layer)

        def step(carry: tuple[X, Any], slices: tuple[Any, Any]) -> tuple[tuple[X, Any], Any]:
            (x, shared), (arrays, own) = carry, slices
            layer = eqx.combine(arrays, static)
            if state is None:
                y = layer(x, *args)
            else:
                y, after = _stateful(layer, layer(x, *args, state=state.update({**shared, **own})))
                shared, own = {path: after[path] for path in shared}, {path: after[path] for path in own}
            _check_same_type(layer, x, y)
            return (y, shared), own

        depth = _depth(self, own)
        if (policy := remat_policy(remat)) is not None:
            # XLA merges the recomputation with the forward pass, unless each is in a loop of its own.
            unrolled = unroll is True or unroll >= depth
            step = jax.checkpoint(step, policy=policy, prevent_cse=unrolled)

        def run(x: Any, arrays: Any) -> Any:
            return jax.lax.scan(step, (x, shared), (arrays, own), length=depth, unroll=unroll)

        if isinstance(policy, Offload):
            check_names(policy, type(self.layer).__name__, run, x, arrays)
        (x, shared), own = run(x, arrays)
        return x if state is None else (x, state.update({**shared, **own}))


def stack(make: Callable[[PRNGKeyArray], T], n: int, key: PRNGKeyArray, axis: str = "layers") -> Stacked[T]:
    """`n` layers, each made from a key of its own, as one module.

    Equal to `eqx.filter_vmap(make)(jax.random.split(key, n))`: arrays are stacked, all else is shared.

    Args:
        make: a key ─► one layer.
        n: how many; at least one.
        key: split into one key for each layer.
        axis: the name of the stack's dimension.

    Raises:
        FunctreeError: `n` is no positive integer; a layer without arrays. AxesError: `axis` is no identifier.

    Examples:
        >>> ft.stack(lambda key: ft.nn.RMSNorm(4), 3, jax.random.key(0)).layer.scale.shape
        (3, 4)
    """
    if not isinstance(n, int) or n < 1:
        raise FunctreeError(f"stack(n={n!r}): the number of layers is a positive integer")
    return Stacked(eqx.filter_vmap(make)(jax.random.split(key, n)), axis)


def _depth(stacked: Stacked[Any], state: Mapping[Path, Any] | None = None) -> int:
    """The leading size that all array leaves share, those of the layers' state too; raises where they do not."""
    leaves = [(Path.of(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(stacked) if _is_array(leaf)]
    leaves += (state or {}).items()
    if not leaves:
        name = type(stacked.layer).__name__
        raise FunctreeError(f"{name} has no array leaves: nothing says how many layers there are to stack")
    sizes = {leaf.shape[:1] for _, leaf in leaves}
    if len(sizes) > 1 or () in sizes:
        raise FunctreeError(
            f'the arrays of a Stacked need one leading size, that of "{stacked.axis}"',
            [_leading(path, leaf) for path, leaf in leaves],
        )
    return sizes.pop()[0]


def _leading(path: Path, leaf: Any) -> Problem:
    why = f"leading size {leaf.shape[0]}" if leaf.shape else "no dimension at all"
    return Problem(path, leaf.shape, "", why, "build the layers with `ft.stack`, or with `eqx.filter_vmap`")


def _is_array(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def _take(layer: T, index: Any) -> T:
    """Each array leaf at `index` along its leading dimension; abstract leaves stay abstract."""

    def take(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.eval_shape(lambda a: a[index], leaf)
        return jnp.asarray(leaf)[index] if eqx.is_array(leaf) else leaf

    return jax.tree.map(take, layer)


def _position(index: Any, depth: int) -> Any:
    """The index of one layer, checked where that costs nothing."""
    if isinstance(index, jax.Array) and index.ndim == 0 and jnp.issubdtype(index.dtype, jnp.integer):
        return index
    try:
        position = operator.index(index)
    except TypeError:
        raise FunctreeError(
            f"a Stacked takes an integer, a scalar integer array or a slice as its index, not {index!r}"
        ) from None
    if not -depth <= position < depth:
        raise FunctreeError(f"layer {position} of a Stacked of {depth}: the index is out of range")
    return position


def _stateful(layer: Any, result: Any) -> tuple[Any, Any]:
    """What a layer that was given a state returns: the result, and the state after it."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], StateMapping):
        return result
    raise FunctreeError(f"{type(layer).__name__} is given `state=` and returns no `(y, state)`")


def _check_same_type(layer: Any, x: Any, y: Any) -> None:
    """In words of ours, before `lax.scan` compares the types of its carry."""
    given, returned = _types(x), _types(y)
    if given != returned:
        raise FunctreeError(
            f"{type(layer).__name__} takes {given} and returns {returned}: in a Stacked each layer's result "
            "is the next one's input, so its shape and dtype must stay. Convert x before the stack, or the "
            "result in the layer, or write `for layer in stacked: x = layer(x)`"
        )


def _types(x: Any) -> str:
    """The types of the leaves as JAX writes them, Explicit shardings included; weak is as strong."""
    return str(jax.tree.map(lambda leaf: _Text(str(jax.typeof(leaf)).removeprefix("~")), x))


class _Text(str):
    """A text that prints without quotes, also inside a tree."""

    __repr__ = str.__str__
