"""Layers of equal structure ─► one module with stacked arrays, run by a single `lax.scan`."""

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, TypedDict, TypeVar, Unpack, overload

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from functree.argument_checks import FLAG, FUNCTION, KEY, POSITIONS, SIZE, Takes, check
from functree.errors import (
    AxesError,
    FunctreeTypeError,
    FunctreeValueError,
    Problem,
    count,
    did_you_mean,
)
from functree.labels.leaf import array_problem
from functree.layout.plan.notebook import ShownByPlan
from functree.transforms.compiled_once import compiled_once
from functree.transforms.pipeline import (
    check_pipeline,
    pipeline,
    scannable,
    stages_of,
)
from functree.transforms.remat import Offload, Policy, Remat, check_names, remat_policy
from functree.tree.arrays import AnyArray, Tree, is_key
from functree.tree.axes import is_axis_name
from functree.tree.interfaces import Stack, StateMapping
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton

T = TypeVar("T")
X = TypeVar("X")
S = TypeVar("S")
Each = Mapping[str, Tree] | None
"""Keyword arguments of layers, whose arrays have a leading dimension with a part for each layer."""


class ScanOptions(TypedDict, total=False):
    """The options of `Stacked.scan` that do not change the type of its result."""

    each: Each
    remat: Remat
    unroll: int | bool
    microbatches: int | None
    divided: Sequence[int]


class Stacked(eqx.Module, Stack, ShownByPlan, Generic[T]):
    """`n` layers of equal structure as one module, which applies them in order.

    It is a sequence of layers (`len(s)`, `s[i]`, `s[1:3]`, iteration), and also a layer (`s(x)`).
    The compiled program contains one layer, whatever the number of layers. Called outside of jit,
    it is compiled once for arrays of equal types.

    Args:
        layer: a layer whose array leaves all have a leading dimension of size `n`; made by
            `ft.stack`, or by `eqx.filter_vmap(make)(keys)`. Values that are not arrays are shared
            by all layers.
        axis: the name of the leading dimension. It becomes the first axis of every leaf of `layer`.

    Raises:
        FunctreeError: there are no array leaves, or their leading sizes differ.
        AxesError: `axis` is not an identifier.

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
        """The axes that come before those of every leaf of `layer`."""
        return (self.axis,)

    def __len__(self) -> int:
        return _depth(self)

    # Without it Python would ask for one layer after the other until an `IndexError`.
    def __iter__(self) -> Iterator[T]:
        return (self[i] for i in range(len(self)))

    @overload
    def __getitem__(self, index: slice) -> "Stacked[T]": ...
    @overload
    def __getitem__(self, index: int | Int[Array, ""]) -> T: ...
    def __getitem__(self, index: int | Int[Array, ""] | slice) -> "T | Stacked[T]":
        """One layer, or for a slice a shorter stack.

        An index that is an array (traced or not) is clamped to the stack, as in JAX. To check it,
        the call would have to wait for the device.
        """
        if isinstance(index, slice):
            return Stacked(_take(self.layer, index), self.axis)
        return _take(self.layer, _checked_index(index, len(self)))

    @overload
    def __call__(self, x: X, *args: Tree, state: None = None) -> X: ...
    @overload
    def __call__(self, x: X, *args: Tree, state: S) -> tuple[X, S]: ...
    def __call__(self, x: Tree, *args: Tree, state: Tree = None) -> Tree:
        """Apply the layers to `x` in order; each is called as `layer(x, *args)`, or with `state=`
        as in `scan`."""
        return self.scan(x, *args, state=state)

    @overload
    def scan(
        self,
        x: X,
        *args: Tree,
        collect: Literal[False] = False,
        state: None = None,
        **options: Unpack[ScanOptions],
    ) -> X: ...
    @overload
    def scan(
        self,
        x: X,
        *args: Tree,
        collect: Literal[False] = False,
        state: S,
        **options: Unpack[ScanOptions],
    ) -> tuple[X, S]: ...
    @overload
    def scan(
        self,
        x: X,
        *args: Tree,
        collect: Literal[True],
        state: None = None,
        **options: Unpack[ScanOptions],
    ) -> tuple[X, Tree]: ...
    @overload
    def scan(
        self,
        x: X,
        *args: Tree,
        collect: Literal[True],
        state: S,
        **options: Unpack[ScanOptions],
    ) -> tuple[X, Tree, S]: ...
    def scan(
        self,
        x: Tree,
        *args: Tree,
        each: Each = None,
        collect: bool = False,
        remat: Remat = None,
        unroll: int | bool = 1,
        state: Tree = None,
        microbatches: int | None = None,
        divided: Sequence[int] = (),
    ) -> Tree:
        """Apply the layers to `x` in order, with inputs and outputs of each of them.

        Args:
            x: an array, or a tree of arrays, that every layer returns with the same shapes and
                dtypes.
            *args: passed to every layer; each gets the same values.
            each: keyword arguments of the layers, of which each layer gets its own part: trees of
                arrays whose leading dimension is that of the layers, such as `{"key":
                jax.random.split(key, len(layers))}`.
            collect: whether each layer returns `(x, out)`, a tree of arrays besides. The scan
                returns these as one tree whose arrays have a leading dimension.
            remat: what is kept for the backward pass. `None`: everything; `"full"`: only the input
                of each layer; `"dots"`: also the products with weights; `ft.offload(...)`: values
                by their names, in host memory; or a policy of `jax.checkpoint_policies`.
            unroll: the number of layers in one iteration of the loop, as in `jax.lax.scan`.
            state: an `ft.State`. Each layer is then called with `state=` too and returns it last:
                `(x, state)`, or `(x, out, state)`. A layer sees its own slice of the state that its
                `StateRef`s declare. Other state is shared by all layers and passed from one to the
                next; this includes state whose ref is also outside of the stack.
            microbatches: where the stack's axis is sharded (`{"layers": "pipe"}`), the layers run
                as a pipeline of stages, with this number of micro-batches. The first dimension of
                `x` is the batch. Random keys in `each` are split by micro-batch. Where the axis is
                not sharded, it is a scan as without it.
            divided: the positions of the `args` whose arrays have the batch as their first
                dimension, and are divided like `x` in a pipeline. The other arguments are the same
                in each micro-batch.

        Returns:
            The `x` that the last layer returns; with `collect` or `state=` a tuple: `(x, outs)`,
                `(x, state)` or `(x, outs, state)`.

        Raises:
            FunctreeError: a layer changes the shape or dtype of `x`, or does not return a tuple as
                above; an array in `each` has another leading size, with its path; `remat` is
                unknown; no value of a layer has a name that is to be offloaded; the stack's axis is
                sharded and there are no `microbatches`, or there are and the layers return more
                than `x`, or the batch cannot be divided so; `divided` has no such positions, or an
                array there does not have the size of the batch.

        Examples:
            >>> key = jax.random.key(0)
            >>> layers = ft.stack(lambda key: ft.nn.MLP(4, 8, key=key), 3, key)
            >>> layers.scan(jnp.ones((5, 4)), remat="dots").shape
            (5, 4)

            Dropout with a key for each layer:

            >>> parts = [ft.nn.RMSNorm(4), ft.nn.Dropout(0.5)]
            >>> layers = ft.stack(lambda _: ft.nn.Sequential(parts), 3, key)
            >>> each = {"key": jax.random.split(key, 3)}
            >>> layers.scan(jnp.ones((5, 4)), each=each).shape
            (5, 4)
        """
        check(
            "a Stacked cannot be scanned",
            each=(each, EACH),
            collect=(collect, FLAG),
            unroll=(unroll, UNROLL),
            state=(state, STATE),
            microbatches=(microbatches, SIZE.or_none()),
            divided=(divided, POSITIONS),
        )
        remat_policy(remat)  # raises for what is none
        layers_at_once = unroll if FLAG.fits(unroll) else int(unroll)
        positions = _divided_arguments(divided, args)
        options = _Options(bool(collect), remat, layers_at_once, microbatches, positions)
        return _scanned(self, x, args, dict(each or {}), state, options)


_Step = Callable[[tuple[Tree, Tree], tuple[Tree, Tree]], tuple[Tree, Tree]]
"""One layer of a scan, as a function of what `jax.lax.scan` passes."""


class _Options(NamedTuple):
    """Options of a scan, as in `Stacked.scan`."""

    collect: bool
    remat: Remat
    unroll: int | bool
    microbatches: int | None
    divided: tuple[int, ...]


@compiled_once
def _scanned(
    stacked: Stacked[Any],
    x: Tree,
    args: tuple[Tree, ...],
    each: dict[str, Tree],
    state: Tree,
    options: _Options,
) -> Tree:
    """The layers of a stack, applied to `x` in order."""
    collect, remat, unroll, microbatches, divided = options
    shared: dict[Path, jax.Array] = {}
    own: dict[Path, jax.Array] = {}
    if state is not None:
        shared, own = state.of_layers(stacked.layer)
    depth = _depth(stacked, own)
    check_each(stacked.layer, each, depth)
    skeleton, arrays = Skeleton.apart((stacked.layer, each))
    policy = remat_policy(remat)

    # What layers share is passed from one to the next, like `x`; each gets a slice of the rest.
    def run(x: Tree, arrays: Tree, step: _Step) -> tuple[Tree, Tree]:
        return jax.lax.scan(step, (x, shared), (arrays, own), unroll=unroll)

    def step_with(args: Sequence[Tree]) -> _Step:
        step = _step(skeleton, args, state, collect)
        return step if policy is None else _saving(step, policy, depth, unroll)

    stages = stages_of(stacked.axis, arrays)
    if stages:
        check_pipeline(stacked.axis, stages, microbatches, collect, state)
    else:
        arrays = [scannable(one) for one in arrays]
    step = step_with(args)
    if isinstance(policy, Offload):
        check_names(policy, type(stacked.layer).__name__, partial(run, step=step), x, arrays)
    if stages and microbatches is not None:
        return pipeline(
            lambda x, arrays, args: run(x, arrays, step_with(args))[0][0],
            x,
            arrays,
            args,
            stages=stages,
            microbatches=microbatches,
            keys=_own_keys(stacked.layer, arrays),
            divided=divided,
        )
    (x, shared), (outs, own) = run(x, arrays, step)
    results = [x]
    if collect:
        results.append(outs)
    if state is not None:
        results.append(state.update({**shared, **own}))
    return results[0] if len(results) == 1 else tuple(results)


def _saving(step: _Step, policy: Policy, depth: int, unroll: int | bool) -> _Step:
    """One layer of a scan, whose backward pass has what a policy keeps and recomputes the rest."""
    # In one program XLA would merge the recomputation with the forward pass and save nothing
    # (common subexpressions). Two loops are not merged, so the costly barriers are needed only
    # without a loop.
    unrolled = unroll is True or unroll >= depth
    return jax.checkpoint(step, policy=policy, prevent_cse=unrolled)


def _own_keys(layer: Tree, arrays: Sequence[AnyArray]) -> frozenset[int]:
    """Which arrays are random keys that were given for each layer, and not a part of it."""
    first = len(Skeleton.apart(layer)[1])
    return frozenset(i for i, x in enumerate(arrays) if i >= first and is_key(x.dtype))


def _step(skeleton: Skeleton, args: Sequence[Tree], state: Tree, collect: bool) -> _Step:
    """One layer of a scan.

    Args:
        skeleton: the layers, and what is given for each, without their arrays.
        args: what is passed to every layer.
        state: the `ft.State` before the first layer, or None.
        collect: whether the layers return something besides.
    """

    def step(carry: tuple[Tree, Tree], slices: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        (x, shared), (arrays, own) = carry, slices
        # A new dict in each trace, so the state may be added to it.
        layer, given = skeleton.fill(arrays)
        if state is not None:
            given["state"] = state.update({**shared, **own})
        result = layer(x, *args, **given)
        y, out = result, None
        if collect or state is not None:
            _check_result(layer, result, collect, state)
            y = result[0]
        if collect:
            out = result[1]
        if state is not None:
            after = result[-1]
            shared = {path: after[path] for path in shared}
            own = {path: after[path] for path in own}
        _check_same_type(layer, x, y)
        return (y, shared), (out, own)

    return step


def _check_result(layer: Tree, result: Tree, collect: bool, state: Tree) -> None:
    """Raise FunctreeError if a layer does not return a tuple of all that is asked for."""
    wanted, options = ["y"], list[str]()
    if collect:
        wanted.append("out")
        options.append("`collect=True`")
    if state is not None:
        wanted.append("state")
        options.append("`state=`")
    fits = isinstance(result, tuple) and len(result) == len(wanted)
    # Otherwise a layer that returns `(x, out)` would fail later, where its state is read.
    if fits and state is not None:
        fits = isinstance(result[-1], StateMapping)
    if not fits:
        raise FunctreeValueError(
            f"{type(layer).__name__} is called with {' and '.join(options)} but does not "
            f"return `({', '.join(wanted)})`"
        )


UNROLL = Takes(
    "a positive integer, or True for all layers",
    lambda value: FLAG.fits(value) or SIZE.is_type(value),
    lambda value: FLAG.fits(value) or SIZE.fits(value),
)
STATE = Takes("an `ft.State`", lambda value: isinstance(value, StateMapping)).or_none()


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
    for path, leaf in _arrays_with_path(dict(each)):
        if leaf.shape[:1] == (depth,):
            continue
        remedy = "pass what all layers share by position, `scan(x, shared)`"
        # The likely mistake: one key for all layers.
        if is_key(leaf.dtype) and not leaf.shape:
            remedy = f"split it, `jax.random.split(key, {depth})`"
        why = f"has leading size {leaf.shape[0]}" if leaf.shape else "has no leading dimension"
        why += f", and there are {depth} layers"
        problems.append(array_problem(Path(("each", *path)), leaf, why, remedy))
    if problems:
        raise FunctreeValueError("each layer needs its own part of an array", problems)


def _divided_arguments(divided: int | Sequence[int], args: Sequence[Tree]) -> tuple[int, ...]:
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


def _arrays_with_path(tree: Tree) -> Iterator[tuple[Path, jax.Array | jax.ShapeDtypeStruct]]:
    """The arrays that are stacked, with their paths."""
    # Abstract ones too, since a stack may be planned before there are arrays.
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            yield Path.of(path), leaf


def _check_same_type(layer: Tree, x: Tree, y: Tree) -> None:
    """Raise with our own message before `lax.scan` does, whose message is about its carry."""
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


def stack(
    make: Callable[[PRNGKeyArray], T], n: int, key: PRNGKeyArray, axis: str = "layers"
) -> Stacked[T]:
    """Make `n` layers, each from its own key, as one module.

    Its layer is `eqx.filter_vmap(make)(jax.random.split(key, n))`: arrays are stacked, everything
    else is shared.

    Args:
        make: a function from a key to one layer.
        n: the number of layers; at least one.
        key: is split into one key for each layer.
        axis: the name of the leading dimension.

    Raises:
        FunctreeError: `n` is not a positive integer; a layer has no arrays.
        AxesError: `axis` is not an identifier.

    Examples:
        >>> layers = ft.stack(lambda _: ft.nn.RMSNorm(4), 3, jax.random.key(0))
        >>> layers.layer.scale.shape
        (3, 4)
    """
    check("stack cannot make layers", make=(make, FUNCTION), n=(n, SIZE), key=(key, KEY))
    return Stacked(_each(make, jax.random.split(key, n)), axis)


def _each(make: Callable[[PRNGKeyArray], T], keys: PRNGKeyArray) -> T:
    """The layers that a function makes of some keys, as one whose arrays are stacked."""
    found: list[Skeleton] = []

    # Not by `eqx.filter_vmap`, which puts True and None into the nodes of the layer; some classes
    # check what they are given.
    def arrays_of(key: PRNGKeyArray) -> list[AnyArray]:
        skeleton, arrays = Skeleton.apart(make(key))
        found.append(skeleton)
        return arrays

    arrays = jax.vmap(arrays_of)(keys)
    return found[0].fill(arrays)


def _depth(stacked: Stacked[T], state: Mapping[Path, jax.Array] | None = None) -> int:
    """The leading size of all array leaves, and of the layers' own state; raises if they differ."""
    leaves = [*_arrays_with_path(stacked), *(state or {}).items()]
    if not leaves:
        name = type(stacked.layer).__name__
        raise FunctreeValueError(
            f"{name} has no array leaves, so the number of its layers is unknown"
        )
    sizes = {leaf.shape[:1] for _, leaf in leaves}
    if len(sizes) > 1 or () in sizes:
        remedy = "build the layers with `ft.stack`, or with `eqx.filter_vmap`"
        problems: list[Problem] = []
        for path, leaf in leaves:
            why = f"has leading size {leaf.shape[0]}" if leaf.shape else "has no dimensions"
            problems.append(array_problem(path, leaf, why, remedy))
        raise FunctreeValueError(
            f'the arrays of a Stacked need the same leading size, that of "{stacked.axis}"',
            problems,
        )
    return sizes.pop()[0]


def _take(layer: T, index: int | jax.Array | slice) -> T:
    """Each array leaf at `index` along its leading dimension; abstract leaves stay abstract."""

    def take(leaf: Tree) -> Tree:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.eval_shape(lambda a: a[index], leaf)
        if not eqx.is_array(leaf):
            return leaf
        # An array of numpy has no element at a traced index.
        return jnp.asarray(leaf)[index]

    return jax.tree.map(take, layer)


def _checked_index(index: Any, depth: int) -> int | jax.Array:
    """The index of one layer; a Python integer is checked, an array is not (it may be traced, or on
    a device)."""
    is_scalar = isinstance(index, jax.Array) and index.ndim == 0
    if is_scalar and jnp.issubdtype(index.dtype, jnp.integer):
        return index
    try:
        number = operator.index(index)
    except TypeError:
        raise FunctreeTypeError(
            "a Stacked takes an integer, a scalar integer array or a slice as its index, not "
            f"{index!r}"
        ) from None
    if not -depth <= number < depth:
        raise FunctreeValueError(
            f"layer {number} of a Stacked of {depth}: the index is out of range"
        )
    return number
