"""`Stacked` holds layers of equal structure as one module, and runs them in one `lax.scan`.

Layers of equal structure ─► one module with stacked arrays.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Generic, TypeVar, overload

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from functree.argument_checks import FUNCTION, POSITIONS, Flag, Key, Size, Takes, checked, is_size
from functree.errors import AxesError, FunctreeValueError, count
from functree.layout.decide import ShownByPlan
from functree.transforms.compiled_once import compiled_once
from functree.transforms.pipeline import (
    arrays_with_path,
    check_pipeline,
    leading_size,
    pipeline,
    scannable,
    stages_of,
)
from functree.transforms.remat import REMAT, Offload, Policy, Remat, check_names, remat_policy
from functree.tree.arrays import Tree, is_key
from functree.tree.axes import is_axis_name
from functree.tree.interfaces import Stack, StateMapping
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton

T = TypeVar("T")
X = TypeVar("X")
S = TypeVar("S")

STATE = Takes("an `ft.State`", lambda value: isinstance(value, StateMapping)).or_none()
EACH = Takes(
    'a dict of keyword arguments for the layers, such as `{"key": keys}`, without `state`',
    lambda value: isinstance(value, Mapping) and "state" not in value,
)
UNROLL = Takes(
    "a positive integer, True or False", lambda value: isinstance(value, bool) or is_size(value)
)


class Stacked(eqx.Module, Stack, ShownByPlan, Generic[T]):
    """`n` layers of equal structure in one module, which applies them in order.

    The module is both a sequence of layers (`len(s)`, `s[i]`, `s[1:3]`, iteration) and a layer
    (`s(x)`). The compiled program contains one layer, regardless of `n`. Outside jit, the stack is
    compiled once for arrays of equal types.

    Args:
        layer: a layer whose array leaves all have a leading dimension of size `n`. `ft.stack` and
            `eqx.filter_vmap(make)(keys)` return such a layer. All layers share the values that are
            not arrays.
        axis: the name of the leading dimension. It becomes the first axis of every leaf of `layer`.

    Raises:
        FunctreeError: if `layer` has no array leaves.
        FunctreeError: if the leading sizes of the array leaves differ.
        AxesError: if `axis` is not an identifier.

    Examples:
        >>> key = jax.random.key(0)
        >>> layers = ft.stack(lambda key: ft.nn.MLP(4, 8, key=key), 3, key)
        >>> len(layers), layers.layer.gate.shape, layers[0].gate.shape
        (3, (3, 4, 8), (4, 8))
        >>> layers(jnp.ones((5, 4))).shape
        (5, 4)
    """

    layer: T
    axis: str = eqx.field(static=True, default="layers")

    def __check_init__(self) -> None:
        if not is_axis_name(self.axis):
            raise AxesError(
                f"Stacked(axis={self.axis!r}): the name of an axis must be an identifier, such as "
                '"layers"'
            )
        _depth(self)

    def stack_axes(self) -> tuple[str, ...]:
        """Return the axes that precede the axes of every leaf of `layer`."""
        return (self.axis,)

    def __len__(self) -> int:
        return _depth(self)

    # Without this method, Python would index the stack until it gets an `IndexError`.
    def __iter__(self) -> Iterator[T]:
        return (self[i] for i in range(len(self)))

    @overload
    def __getitem__(self, index: slice) -> "Stacked[T]": ...
    @overload
    def __getitem__(self, index: int | Int[Array, ""]) -> T: ...
    def __getitem__(self, index: int | Int[Array, ""] | slice) -> "T | Stacked[T]":
        """Return one layer, or a shorter stack for a slice.

        An array index, traced or not, is clamped to the valid range, as in JAX. Checking the index
        would require waiting for the device.
        """
        if isinstance(index, slice):
            return Stacked(_take(self.layer, index), self.axis)
        return _take(self.layer, _checked_index(index, len(self)))

    @overload
    def __call__(self, x: X, *args: Tree, state: None = None) -> X: ...
    @overload
    def __call__(self, x: X, *args: Tree, state: S) -> tuple[X, S]: ...
    def __call__(self, x: Tree, *args: Tree, state: Tree = None) -> Tree:
        """Apply the layers to `x` in order.

        Each layer is called as `layer(x, *args)`, or with `state=` as in `scan`.
        """
        return self.scan(x, *args, state=state)

    @checked("Stacked.scan: invalid arguments")
    def scan(
        self,
        x: Tree,
        *args: Tree,
        each: Annotated[Mapping[str, Tree], EACH] | None = None,
        collect: Flag = False,
        remat: Annotated[Remat, REMAT] = None,
        unroll: Annotated[int | bool, UNROLL] = 1,
        state: Annotated[Tree, STATE] = None,
        microbatches: Size | None = None,
        divided: Annotated[int | Sequence[int], POSITIONS] = (),
    ) -> Tree:
        """Apply the layers to `x` in order, with options for each layer's inputs and outputs.

        Args:
            x: an array or a tree of arrays. Every layer must preserve its shapes and dtypes.
            *args: positional arguments, which every layer gets unchanged.
            each: keyword arguments of the layers, as trees of arrays. Each layer gets its slice of
                the arrays' leading dimension: `{"key": jax.random.split(key, len(layers))}`.
            collect: whether each layer returns `(x, out)`, where `out` is a tree of arrays. The
                scan returns the layers' `out` as one tree, whose arrays have one slice per layer.
            remat: the values to keep for the backward pass. `None` keeps all values. `"full"`
                keeps only the input of each layer, and `"dots"` also keeps the products with
                weights. `ft.offload(...)` keeps named values in host memory. A policy from
                `jax.checkpoint_policies` is accepted too.
            unroll: the number of layers in one iteration of the loop, as in `jax.lax.scan`.
            state: an `ft.State`. Each layer then gets `state=` and returns the new state last:
                `(x, state)`, or `(x, out, state)`. A layer gets its own slice of the state that its
                `StateRef`s declare. All layers share any other state, and pass it from one layer
                to the next. State whose ref also occurs outside the stack is shared, too.
            microbatches: the number of micro-batches of a pipeline. If the stack's axis is sharded
                (`{"layers": "pipe"}`), the layers run in pipeline stages. The first dimension of
                `x` is then the batch, and random keys in `each` are split per micro-batch. If the
                axis is unsharded, the option has no effect.
            divided: the positions of those `args` whose arrays have the batch as their first
                dimension. A pipeline divides them like `x`. Every micro-batch gets all other
                arguments unchanged.

        Returns:
            The `x` that the last layer returns. With `collect` or `state=`, this `x` is the first
                element of a tuple: `(x, outs)`, `(x, state)` or `(x, outs, state)`.

        Raises:
            FunctreeError: if a layer changes the shape or dtype of `x`.
            FunctreeError: if a layer does not return the tuple that `collect` or `state=` requires.
            TypeError: if a layer does not have a parameter that `each` names.
            FunctreeError: if the leading size of an array in `each` is not the number of layers;
                the message gives the array's path.
            FunctreeError: if `remat` is invalid.
            FunctreeError: if `remat` offloads a name that no value of a layer has.
            FunctreeError: if the stack's axis is sharded and `microbatches` is missing.
            FunctreeError: if the layers of a pipeline return more than `x`.
            FunctreeError: if the layers cannot be divided evenly into the pipeline's stages.
            FunctreeError: if the batch cannot be divided evenly into the pipeline's micro-batches.
            FunctreeError: if a position in `divided` is not a position in `args`.
            FunctreeError: if an array at a position in `divided` does not have the batch's size.

        Examples:
            >>> key = jax.random.key(0)
            >>> layers = ft.stack(lambda key: ft.nn.MLP(4, 8, key=key), 3, key)
            >>> layers.scan(jnp.ones((5, 4)), remat="dots").shape
            (5, 4)

            Each layer gets its own dropout key:

            >>> parts = [ft.nn.RMSNorm(4), ft.nn.Dropout(0.5)]
            >>> layers = ft.stack(lambda _: ft.nn.Sequential(parts), 3, key)
            >>> each = {"key": jax.random.split(key, 3)}
            >>> layers.scan(jnp.ones((5, 4)), each=each).shape
            (5, 4)
        """
        return _scanned(
            self,
            x,
            args,
            dict(each or {}),
            state,
            collect=bool(collect),
            remat=remat,
            unroll=unroll if isinstance(unroll, bool) else int(unroll),
            microbatches=microbatches,
            divided=_divided_arguments(divided, args),
        )


_Step = Callable[[tuple[Tree, Tree], tuple[Tree, Tree]], tuple[Tree, Tree]]
"""One layer, as the body of a `jax.lax.scan`."""


@compiled_once
def _scanned(
    stacked: Stacked[Any],
    x: Tree,
    args: tuple[Tree, ...],
    each: dict[str, Tree],
    state: Tree,
    *,
    collect: bool,
    remat: Remat,
    unroll: int | bool,
    microbatches: int | None,
    divided: tuple[int, ...],
) -> Tree:
    """Apply the layers of a stack to `x` in order, with options as in `Stacked.scan`."""
    shared, per_layer = dict[Path, jax.Array](), dict[Path, jax.Array]()
    if state is not None:
        shared, per_layer = state.of_layers(stacked.layer)
    depth = _depth(stacked, per_layer)
    leading_size(
        "Stacked.scan: arrays in `each` need one slice for each layer",
        arrays_with_path({"each": each}),
        f"split a random key, `jax.random.split(key, {depth})`, and pass a value that all layers "
        "share by position: `scan(x, shared)`",
        depth,
    )
    skeleton, arrays = Skeleton.apart((stacked.layer, each))
    policy = remat_policy(remat)

    # Shared state passes from layer to layer, like `x`. Each layer gets its slice of the other
    # state.
    def run(x: Tree, arrays: Tree, step: _Step) -> tuple[Tree, Tree]:
        return jax.lax.scan(step, (x, shared), (arrays, per_layer), unroll=unroll)

    def step_with(args: Sequence[Tree]) -> _Step:
        step = _step(skeleton, args, state, collect)
        return step if policy is None else _saving(step, policy, depth, unroll)

    stages = stages_of(stacked.axis, arrays)
    if stages:
        check_pipeline(stacked.axis, stages, microbatches, collect, state)
    else:
        arrays = list(map(scannable, arrays))
    step = step_with(args)
    if isinstance(policy, Offload):
        check_names(policy, type(stacked.layer).__name__, partial(run, step=step), x, arrays)
    if stages and microbatches is not None:
        # Random keys in `each` are split for the micro-batches, unlike keys in the layers.
        first = len(Skeleton.apart(stacked.layer)[1])
        keys = frozenset(i for i, x in enumerate(arrays) if i >= first and is_key(x.dtype))
        return pipeline(
            lambda x, arrays, args: run(x, arrays, step_with(args))[0][0],
            x,
            arrays,
            args,
            stages=stages,
            microbatches=microbatches,
            keys=keys,
            divided=divided,
        )
    (x, shared), (outs, per_layer) = run(x, arrays, step)
    results = [x]
    if collect:
        results.append(outs)
    if state is not None:
        results.append(state.update({**shared, **per_layer}))
    return results[0] if len(results) == 1 else tuple(results)


def _saving(step: _Step, policy: Policy, depth: int, unroll: int | bool) -> _Step:
    """Return a step whose backward pass recomputes all values except those that a policy keeps."""
    # Without a loop, XLA would merge the recomputation with the forward pass as common
    # subexpressions, and no memory would be saved. `prevent_cse` prevents this with costly
    # barriers. Loops do not need the barriers, since XLA does not merge two loops.
    unrolled = unroll is True or unroll >= depth
    return jax.checkpoint(step, policy=policy, prevent_cse=unrolled)


def _step(skeleton: Skeleton, args: Sequence[Tree], state: Tree, collect: bool) -> _Step:
    """Build the body of a scan over layers.

    Args:
        skeleton: the layers and `each`, without their arrays.
        args: the arguments that every layer gets.
        state: the `ft.State` before the first layer, or None.
        collect: whether the layers return `(x, out)`.
    """

    def step(carry: tuple[Tree, Tree], slices: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        (x, shared), (arrays, per_layer) = carry, slices
        # The skeleton returns a new dict in each trace, so this code may add the state.
        layer, keywords = skeleton.fill(arrays)
        if state is not None:
            keywords["state"] = state.update({**shared, **per_layer})
        result = layer(x, *args, **keywords)
        y, out = result, None
        if collect or state is not None:
            _check_result(layer, result, collect, state)
            y = result[0]
        if collect:
            out = result[1]
        if state is not None:
            after = result[-1]
            shared = {path: after[path] for path in shared}
            per_layer = {path: after[path] for path in per_layer}
        _check_same_type(layer, x, y)
        return (y, shared), (out, per_layer)

    return step


def _check_result(layer: Tree, result: Tree, collect: bool, state: Tree) -> None:
    """Raise FunctreeError if a layer does not return the tuple that the options require."""
    wanted = ["y"]
    if collect:
        wanted.append("out")
    if state is not None:
        wanted.append("state")
    fits = isinstance(result, tuple) and len(result) == len(wanted)
    # Without this check, a layer that returns `(x, out)` would fail later, when the state is read.
    if fits and state is not None:
        fits = isinstance(result[-1], StateMapping)
    if not fits:
        raise FunctreeValueError(
            f"Stacked.scan: with these options, {type(layer).__name__} must return "
            f"`({', '.join(wanted)})`"
        )


def _divided_arguments(divided: int | Sequence[int], args: Sequence[Tree]) -> tuple[int, ...]:
    """Return the positions of the arguments that are divided like the batch.

    Raises:
        FunctreeError: if the call has no argument at a position.
    """
    positions = tuple(divided) if isinstance(divided, Sequence) else (divided,)
    if any(i not in range(len(args)) for i in positions):
        given = count(len(args), "argument")
        raise FunctreeValueError(
            f"Stacked.scan: divided={divided!r} is out of range, since the call has {given} after "
            "`x`: count these arguments from 0"
        )
    return positions


def _check_same_type(layer: Tree, x: Tree, y: Tree) -> None:
    """Raise FunctreeError if a layer changes the type of `x`.

    The error of `lax.scan` would describe the scan's carry instead.
    """
    # JAX marks a weak type with a tilde. Here, weak and strong types are not distinguished.
    given, returned = (
        jax.tree.map(lambda leaf: str(jax.typeof(leaf)).removeprefix("~"), tree) for tree in (x, y)
    )
    if given != returned:
        raise FunctreeValueError(
            f"Stacked.scan: {type(layer).__name__} takes {given} but returns {returned}. The "
            "result of each layer is the input of the next, so its shape and dtype must stay the "
            "same: convert `x` before the stack, convert the result in the layer, or write "
            "`for layer in stacked: x = layer(x)`"
        )


@checked("stack: invalid arguments")
def stack(
    make: Annotated[Callable[[PRNGKeyArray], T], FUNCTION], n: Size, key: Key, axis: str = "layers"
) -> Stacked[T]:
    """Create `n` layers as one module, each layer from its own key.

    The module's `layer` is `eqx.filter_vmap(make)(jax.random.split(key, n))`. Arrays are stacked,
    and the layers share everything else.

    Args:
        make: a function from a key to one layer.
        n: the number of layers, at least one.
        key: a random key, which is split into one key for each layer.
        axis: the name of the leading dimension.

    Raises:
        FunctreeError: if `n` is not a positive integer.
        FunctreeError: if a layer has no arrays.
        AxesError: if `axis` is not an identifier.

    Examples:
        >>> layers = ft.stack(lambda _: ft.nn.RMSNorm(4), 3, jax.random.key(0))
        >>> layers.layer.scale.shape
        (3, 4)
    """
    return Stacked(eqx.filter_vmap(make)(jax.random.split(key, n)), axis)


def _depth(stacked: Stacked[T], state: Mapping[Path, jax.Array] | None = None) -> int:
    """Return the leading size of all array leaves and of the layers' own state.

    Raises:
        FunctreeError: if there are no arrays.
        FunctreeError: if the leading sizes of the arrays differ.
    """
    leaves = [*arrays_with_path(stacked), *(state or {}).items()]
    if not leaves:
        name = type(stacked.layer).__name__
        raise FunctreeValueError(
            f"Stacked: {name} has no array leaves, so the number of layers is unknown: stack "
            "layers that have arrays"
        )
    return leading_size(
        f'Stacked: all arrays need the same leading size, the size of "{stacked.axis}"',
        leaves,
        "build the layers with `ft.stack`, or with `eqx.filter_vmap`",
    )


def _take(layer: T, index: int | jax.Array | slice) -> T:
    """Index the leading dimension of each array leaf; abstract leaves stay abstract."""

    def take(leaf: Tree) -> Tree:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.eval_shape(lambda a: a[index], leaf)
        if not eqx.is_array(leaf):
            return leaf
        # NumPy cannot index its arrays with a traced index.
        return jnp.asarray(leaf)[index]

    return jax.tree.map(take, layer)


def _checked_index(index: Any, depth: int) -> int | jax.Array:
    """Return the index of one layer, after checking it.

    An array index is not checked, since it may be traced or on a device.
    """
    is_scalar = isinstance(index, jax.Array) and index.ndim == 0
    if is_scalar and jnp.issubdtype(index.dtype, jnp.integer):
        return index
    return range(depth)[operator.index(index)]
