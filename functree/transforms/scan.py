"""Many equal layers ─► one module whose arrays have a leading dimension, run by a single `lax.scan`."""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from functree.errors import AxesError, FunctreeError, Problem, count, did_you_mean
from functree.tree.paths import Path

T = TypeVar("T")
X = TypeVar("X")

#: What the backward pass recomputes: a name, `ft.offload(...)`, or a policy of `jax.checkpoint_policies`.
Remat = str | Callable[..., Any] | None

_POLICIES: dict[str, Callable[..., Any]] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Stacked(eqx.Module, Generic[T]):
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

    def __stack_axes__(self) -> tuple[str, ...]:
        """The axes in front of those of every leaf below.

        The hook by which the lower floors learn of a stack: who reads a tree's axes asks every module for it.
        """
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

    def scan(self, x: X, *args: Any, remat: Remat = None, unroll: int | bool = 1) -> X:
        """`x` through the layers in order, with a say in what the backward pass keeps.

        Args:
            x: an array, or a tree of them, that every layer returns with the same shapes and dtypes.
            *args: handed to every layer, the same to each.
            remat: what is kept for the backward pass. `None`: everything; `"full"`: each layer's input alone;
                `"dots"`: also the products with weights; `ft.offload(...)`: values by their names, in host memory;
                or a policy of `jax.checkpoint_policies`.
            unroll: layers in one iteration of the loop, as in `jax.lax.scan`.

        Raises:
            FunctreeError: a layer changes x's shape or dtype; an unknown `remat`; a name to offload that no value of
                a layer has.

        Examples:
            >>> layers = ft.stack(lambda key: ft.nn.MLP(4, 8, key=key), 3, jax.random.key(0))
            >>> layers.scan(jnp.ones((5, 4)), remat="dots").shape
            (5, 4)
        """
        arrays, static = eqx.partition(self.layer, eqx.is_array)

        def step(x: X, arrays: Any) -> tuple[X, None]:
            layer = eqx.combine(arrays, static)
            y = layer(x, *args)
            _check_same_type(layer, x, y)
            return y, None

        depth = len(self)
        if (policy := remat_policy(remat)) is not None:
            # XLA merges the recomputation with the forward pass, unless each is in a loop of its own.
            unrolled = unroll is True or unroll >= depth
            step = jax.checkpoint(step, policy=policy, prevent_cse=unrolled)

        def run(x: X, arrays: Any) -> X:
            return jax.lax.scan(step, x, arrays, length=depth, unroll=unroll)[0]

        if isinstance(policy, _Offload):
            _check_names(policy, type(self.layer).__name__, run, x, arrays)
        return run(x, arrays)


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


@dataclass(frozen=True)
class _Offload:
    """A checkpoint policy that is equal by value, so that a config which holds one compiles nothing twice."""

    names: tuple[str, ...]
    others: Remat

    def __call__(self, prim: Any, *args: Any, **params: Any) -> Any:
        named = prim.name == "name" and params["name"] in self.names
        policy = _to_host(self.names) if named else remat_policy(self.others)
        return policy is None or policy(prim, *args, **params)

    def __repr__(self) -> str:
        others = () if self.others == "full" else (f"others={self.others!r}",)
        return f"offload({', '.join([*map(repr, self.names), *others])})"


def _to_host(names: tuple[str, ...]) -> Callable[..., Any]:
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(names),
        offload_src="device",
        offload_dst="pinned_host",
    )


def offload(*names: str, others: Remat = "full") -> Callable[..., Any]:
    """For `remat=`: the backward pass reads the values of these names from host memory.

    A layer names a value by `x = jax.ad_checkpoint.checkpoint_name(x, "name")`. Each goes to pinned host memory in the
    forward pass and comes back in the backward pass. The layers of `ft.nn` say in their documentation what they name.

    Also a policy for `jax.checkpoint`, which does not tell of a name that no value has.

    Args:
        *names: of the values.
        others: what of all other values is kept on the device, as in `Stacked.scan(remat=...)`.

    Returns:
        A policy, equal by value.

    Raises:
        FunctreeError: no names, or what is no identifier; an unknown `others`.

    Examples:
        >>> layers = ft.stack(lambda key: ft.nn.MLP(4, 8, key=key), 3, jax.random.key(0))
        >>> layers.scan(jnp.ones((5, 4)), remat=ft.offload("mlp_gate", "mlp_up")).shape
        (5, 4)
        >>> layers.scan(jnp.ones((5, 4)), remat=ft.offload("mlp_gates"))
        Traceback (most recent call last):
            ...
        functree.errors.FunctreeError: 1 name to offload that MLP gives to no value
        <BLANKLINE>
          "mlp_gates"
              no value has this name; did you mean `mlp_gate`?
        <BLANKLINE>
        Try: one of `mlp_gate`, `mlp_up`
    """
    if not names:
        raise FunctreeError('offload() needs the names of values: offload("hidden")')
    for name in names:
        if not (isinstance(name, str) and name.isidentifier()):
            raise FunctreeError(f'offload({name!r}): the name of a value is an identifier: "hidden"')
    remat_policy(others)
    if isinstance(others, _Offload):
        names, others = (*names, *others.names), others.others
    return _Offload(names, others)


def _check_names(policy: _Offload, layer: str, run: Callable[..., Any], *operands: Any) -> None:
    """Raise for a name that no value has: JAX would recompute what was meant, and say nothing.

    The names are read in the traced program, so that a call without a gradient is checked too: a policy that recorded
    them would see only what is differentiated, too late to refuse. JAX remembers its trace of the step, and no layer's
    code runs twice. Only `jax.custom_vjp` hides names until it is differentiated.
    """
    found = _names(jax.make_jaxpr(run)(*operands))
    if not found.issuperset(policy.names):
        found |= _names(jax.make_jaxpr(lambda *operands: jax.linearize(run, *operands)[0])(*operands))
    there = ", ".join(f"`{name}`" for name in sorted(found))
    remedy = f"one of {there}" if there else 'name a value: `x = jax.ad_checkpoint.checkpoint_name(x, "name")`'
    problems = [
        Problem(None, None, f'"{name}"', f"no value has this name{did_you_mean(name, found)}", remedy)
        for name in policy.names
        if name not in found
    ]
    if problems:
        raise FunctreeError(f"{count(len(problems), 'name')} to offload that {layer} gives to no value", problems)


def _names(jaxpr: Any) -> set[str]:
    """The names of values in a program, and in the programs that its equations hold."""
    eqns = getattr(jaxpr, "jaxpr", jaxpr).eqns
    found = {eqn.params["name"] for eqn in eqns if eqn.primitive.name == "name"}
    params = [value for eqn in eqns for value in eqn.params.values()]
    inner = [x for value in params for x in (value if isinstance(value, tuple) else (value,)) if hasattr(x, "eqns")]
    return found.union(*map(_names, inner))


def remat_policy(remat: Remat) -> Callable[..., Any] | None:
    """The policy that a `remat=` argument stands for; `None` where nothing is recomputed.

    Raises:
        FunctreeError: neither a known name nor callable.

    Examples:
        >>> from functree.transforms.scan import remat_policy
        >>> remat_policy("dots") is jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        True
    """
    if remat is None or callable(remat):
        return remat
    if isinstance(remat, str) and remat in _POLICIES:
        return _POLICIES[remat]
    raise FunctreeError(
        f'remat={remat!r}: write None, "full", "dots", `ft.offload("name")` or one of `jax.checkpoint_policies`'
    )


def _depth(stacked: Stacked[Any]) -> int:
    """The leading size that all array leaves share; raises where they do not."""
    leaves = [leaf for leaf in jax.tree_util.tree_leaves_with_path(stacked) if _is_array(leaf[1])]
    if not leaves:
        name = type(stacked.layer).__name__
        raise FunctreeError(f"{name} has no array leaves: nothing says how many layers there are to stack")
    sizes = {leaf.shape[:1] for _, leaf in leaves}
    if len(sizes) > 1 or () in sizes:
        raise FunctreeError(
            f'the arrays of a Stacked need one leading size, that of "{stacked.axis}"',
            [_leading(Path.of(path), leaf) for path, leaf in leaves],
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
