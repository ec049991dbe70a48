"""`StateRef` declares state in a module; `make_state` moves a model's state to a `State`.

Functions take and return the `State`. A model that declares state ─► the model with paths in its
refs, and a `State`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import DictKey, register_pytree_with_keys

from functree.argument_checks import Takes, check_tree, shown
from functree.errors import StateError, count, did_you_mean
from functree.labels.leaves import Leaf, meeting, read
from functree.tree.arrays import AnyArray, Tree, array_text, is_array, is_key
from functree.tree.axes import Axes, Names, dict_text, names
from functree.tree.interfaces import Entry, HoldsState, StateMapping
from functree.tree.nodes import outermost, with_nodes
from functree.tree.paths import Keys, Path


class _Token:
    """The identity of a piece of state: refs that share a token declare the same piece.

    Refs themselves cannot be compared by identity, since `jax.tree.map` rebuilds modules.
    """


class StateRef(eqx.Module, HoldsState):
    """A declaration of a piece of state in a module.

    `ft.make_state` moves the values to a `State`, which functions take and return. If a model
    contains the same ref twice, both occurrences declare the same piece of state.

    Args:
        init: the initial value, which is an array or a number.
        axes: the names of the value's dimensions.

    Raises:
        StateError: if `init` is neither an array nor a number.
        OverflowError: by JAX, if `init` is an integer that does not fit into JAX's default dtype.
        StateError: if `axes` is given, but does not name each dimension of `init`.

    Examples:
        >>> class Counter(eqx.Module):
        ...     calls: ft.StateRef = eqx.field(
        ...         default_factory=lambda: ft.StateRef(jnp.array(0))
        ...     )
        ...
        ...     def __call__(self, x, state):
        ...         return x, state.set(self.calls, state[self.calls] + 1)
        >>> model, state = ft.make_state(Counter())
        >>> x, state = model(jnp.ones(3), state)
        >>> state
        State({'calls': Array(1, dtype=int32...)})
    """

    init: Any
    axes: Axes = eqx.field(static=True)
    path: Path | None = eqx.field(static=True)
    shape: tuple[int, ...] = eqx.field(static=True)
    dtype: Any = eqx.field(static=True)
    token: Any = eqx.field(static=True)

    def __init__(self, init: Any, axes: str | Axes = ""):
        if not is_array(init) and not isinstance(init, bool | int | float | complex):
            raise StateError(
                f"StateRef({shown(init)}): the initial value must be an array or a number"
            )
        if not isinstance(init, jax.ShapeDtypeStruct):
            init = strong(jnp.asarray(init))
        self.init = init
        self.axes = Axes.of(axes)
        if self.axes and len(self.axes) != len(self.init.shape):
            raise StateError(
                f'StateRef(axes="{self.axes}") names {count(len(self.axes), "dimension")}, '
                f"but the value has shape {tuple(self.init.shape)}: name each dimension"
            )
        # In a stack, `init` gets a leading dimension, while `shape` and `dtype` still describe one
        # layer.
        self.shape, self.dtype = tuple(self.init.shape), self.init.dtype
        self.path, self.token = None, _Token()

    def __axis_names__(self) -> Names:
        """Name the dimensions of `init`, for which the class has no annotation."""
        if not self.axes:
            return Names(())
        return names(init=self.axes)

    def at(self, path: Path) -> "StateRef":
        """Return a copy of the ref with the path of its value in a `State`.

        The copy has neither the initial value nor the token, so that equal models have equal refs
        and share a trace.
        """
        ref = object.__new__(StateRef)  # `__init__` requires a value
        for name, value in {**vars(self), "init": None, "path": path, "token": None}.items():
            object.__setattr__(ref, name, value)
        return ref

    def __repr__(self) -> str:
        where = "without a path"
        if self.path is not None:
            where = f"at {self.path}"
        return f"<StateRef {self.dtype}{list(self.shape)} {where}>"


def strong(value: Any) -> Any:
    """Return the array with a strong type.

    A step returns strong types, so a weak type in its input would make the step compile twice.
    """
    if not jax.typeof(value).weak_type:
        return value
    if isinstance(value, jax.ShapeDtypeStruct):
        return value.update(weak_type=False)
    return jnp.asarray(value, value.dtype)


# State

T = TypeVar("T")


class State(StateMapping):
    """An immutable mapping from paths to a model's state arrays. `ft.make_state` builds it.

    A `State` is a pytree whose leaves have the keys `DictKey(str(path))`. In layouts, filters and
    checkpoints, a value is identified by its ref's path in the model.

    Raises:
        StateError: if the `State` is indexed with a ref that has no path yet.
        StateError: if the `State` has no value for the ref with which it is indexed.
        StateError: if a ref and its value differ in shape or dtype.

    Examples:
        >>> layer, state = ft.make_state(ft.nn.BatchNorm(4))
        >>> state[layer.mean].shape, list(map(str, state))
        ((4,), ['mean', 'var'])
        >>> layout = ft.StateSharding({"mean": ft.P("data"), "var": ft.P()})
        >>> ft.plan(state, layout, {"data": 2})["mean"].spec
        P('data',)
    """

    __slots__ = ("_entries", "_values")

    def __init__(self, entries: tuple[Entry, ...], values: Mapping[Path, AnyArray]):
        self._entries: tuple[Entry, ...] = entries
        self._values: dict[Path, AnyArray] = dict(values)

    def __getitem__(self, key: StateRef | Keys | str) -> Any:
        """Return the value for a ref, a path, or the text of a path."""
        if isinstance(key, str | tuple):
            path = Path(key)
            if path not in self._values:
                raise KeyError(f"there is no state at `{path}`{did_you_mean(path, self._values)}")
            return self._values[path]
        value = self._values[self._known(key)]
        # `jax.tree.map` may have replaced the arrays with other values.
        if not is_array(value):
            return value
        have, want = array_text(value), array_text(key)
        if have != want:
            why = _OTHER
            # A value with more leading dimensions is the state of all layers of a stack.
            if len(value.shape) > len(key.shape) and value.dtype == key.dtype:
                why = (
                    "if it covers all layers of a stack, run them with "
                    "`stacked.scan(..., state=state)`"
                )
            raise StateError(
                f"the state at `{key.path}` is {have}, but its ref declares {want}: {why}"
            )
        return value

    def set(self, ref: StateRef, value: object) -> "State":
        """Return a copy of the state with a new value for one ref.

        Args:
            ref: the ref whose value is set.
            value: an array with the ref's shape and dtype, or a Python number, which is converted
                as `jnp.asarray` converts it.

        Raises:
            StateError: if the state has no value for the ref.
            StateError: if the new value and the ref differ in shape or dtype.
            OverflowError: by JAX, if an integer does not fit into the dtype.
        """
        path = self._known(ref)
        new = value
        if isinstance(value, bool | int | float | complex) and not is_key(ref.dtype):
            with jax.numpy_dtype_promotion("standard"):
                # A number does not change the dtype if its kind fits: 1.5 does not fit an integer.
                if jnp.result_type(value, ref.dtype) == ref.dtype:
                    new = jnp.asarray(value, ref.dtype)
        if not is_array(new) or tuple(new.shape) != ref.shape or new.dtype != ref.dtype:
            text = array_text(new) if is_array(new) else shown(new)
            raise StateError(
                f"the state at `{path}` is {array_text(ref)}, but the new value is {text}: "
                "shape and dtype cannot change, so convert the value"
            )
        if not isinstance(new, jax.ShapeDtypeStruct):
            new = strong(jnp.asarray(new))
        return State(self._entries, {**self._values, path: new})

    def update(self, values: Mapping[Any, AnyArray]) -> "State":
        """Return a copy of the state with new values, of any shape, at some paths.

        Functions that run the layers of a stack use this method.
        """
        changed = dict(self._values)
        for key, value in values.items():
            if isinstance(key, str):
                key = Path.parse(key)
            if key not in changed:
                raise StateError(f"there is no state at `{key}`{did_you_mean(key, self._values)}")
            changed[key] = value
        return State(self._entries, changed)

    def of_layers(self, layer: Tree) -> tuple[dict[Path, AnyArray], dict[Path, AnyArray]]:
        """Separate the values that all layers share from the values with a slice per layer.

        Values that the layer does not declare are shared too, since the layer may receive their
        refs as arguments.
        """
        shared, stacked = dict(self._values), dict[Path, AnyArray]()
        for ref in refs(layer):
            path = self._known(ref)
            if self._values[path].ndim > len(ref.shape):
                stacked[path] = self._values[path]
                shared.pop(path, None)  # a layer may contain one ref twice
        return shared, stacked

    def _known(self, ref: StateRef) -> Path:
        if not isinstance(ref, StateRef):
            raise StateError(
                f"an `ft.State` takes a `StateRef`, not {ref!r}: use a ref of the model that "
                "`ft.make_state` returned"
            )
        if ref.path is None:
            raise StateError(
                "this StateRef has no path yet: call `model, state = ft.make_state(model)` "
                "and use the refs of the returned model"
            )
        if ref.path not in self._values:
            raise StateError(
                f"there is no state at `{ref.path}`{did_you_mean(ref.path, self._values)}; {_OTHER}"
            )
        return ref.path

    def __iter__(self) -> Iterator[Path]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def entries(self) -> tuple[Entry, ...]:
        """Return the path, the axes and the number of stacked dimensions of each piece."""
        return self._entries

    def __eq__(self, other: object) -> bool:
        """Compare by identity, since comparing arrays gives no single truth value."""
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        texts = [(repr(str(path)), repr(value)) for path, value in self._values.items()]
        return f"State({dict_text(texts)})"


STATE = Takes(
    "an `ft.State`, from `model, state = ft.make_state(model)`",
    lambda value: isinstance(value, State),
)
"""Check for the argument `state` of layers with state."""

_OTHER = "pass the state that `ft.make_state` returned with this model"


def _flatten(state: State) -> tuple[tuple[AnyArray, ...], tuple[Entry, ...]]:
    entries = state.entries()
    return tuple([state._values[entry.path] for entry in entries]), entries


def _flatten_with_keys(
    state: State,
) -> tuple[tuple[tuple[object, AnyArray], ...], tuple[Entry, ...]]:
    values, entries = _flatten(state)
    keys = [DictKey(str(entry.path)) for entry in entries]
    return tuple(zip(keys, values, strict=True)), entries


def _unflatten(entries: tuple[Entry, ...], values: Iterable[AnyArray]) -> State:
    by_path = {entry.path: value for entry, value in zip(entries, values, strict=True)}
    return State(entries, by_path)


# Without the last function, JAX would make the keys in each flattening.
register_pytree_with_keys(State, _flatten_with_keys, _unflatten, _flatten)


def make_state(model: T) -> tuple[T, State]:
    """Move the initial values of a model's `StateRef`s to a `State`.

    Args:
        model: a model with `StateRef`s anywhere. It may be abstract, or traced, as in
            `ft.init(lambda key: ft.make_state(...))`.

    Returns:
        `(model, state)`: the model with paths in its refs, and the values. A ref that occurs twice
            has the path of its first occurrence, or of an occurrence outside a stack if there is
            one. An array that occurs twice is copied, so that both trees can be donated. Equal
            models have equal structures, so they share a trace.

    Raises:
        StateError: if a ref already has a path.
        StateError: if two refs have the same path.
        StateError: if the model contains an `eqx.nn.StateIndex`.

    Examples:
        >>> shared = ft.StateRef(jnp.zeros(3), axes="embed")
        >>> (model, state) = ft.make_state({"a": shared, "b": shared})
        >>> list(map(str, state)), state[model["b"]].shape
        (['a'], (3,))
    """
    check_tree("make_state", model)
    return place_state(model, read(model).leaves)


def place_state(model: T, leaves: Sequence[Leaf]) -> tuple[T, State]:
    """Move the state as in `make_state`, for a model whose leaves are already read."""
    declared = _declared(model, leaves)
    if not declared:
        return model, State((), {})
    entries: list[Entry] = []
    values: dict[Path, AnyArray] = {}
    for leaf in declared.values():
        path = Path(leaf.path[:-1])
        entries.append(Entry(path, leaf.axes, leaf.stacked))
        values[path] = leaf.value

    placed: dict[Keys, Tree] = {}
    for path, node in outermost(model, lambda _, node: isinstance(node, StateRef)):
        placed[path] = node.at(Path(declared[node.token].path[:-1]))
    model = with_nodes(model, placed)
    return model, State(tuple(entries), apart(values, model))


def _declared(model: Tree, leaves: Sequence[Leaf]) -> dict[object, Leaf]:
    """Return the initial value of each piece of state in a model, keyed by its refs' token."""
    by_path = {leaf.path: leaf for leaf in leaves}
    twice = {problem.path: problem for problem in meeting(leaves)}
    pieces: dict[object, Leaf] = {}
    declarations = (StateRef, eqx.nn.StateIndex)
    for path, node in outermost(model, lambda _, node: isinstance(node, declarations)):
        if isinstance(node, eqx.nn.StateIndex):
            raise StateError(
                f"`{path}` is an `eqx.nn.StateIndex`, whose state is in an `eqx.nn.State`: "
                "build the model with `eqx.nn.make_with_state` and pass its state, as in "
                "`TrainState.create(model, tx, state=state)`, or use a layer of `ft.nn`"
            )
        if node.path is not None:
            raise StateError(
                f"the StateRef at `{path}` already has the path `{node.path}`: pass the state that "
                "was made with this model, as in `TrainState.create(model, tx, state=state)`"
            )
        leaf = by_path[path / "init"]
        if leaf.path in twice:
            raise StateError(
                "make_state: two pieces of state have the same path", [twice[leaf.path]]
            )
        first = pieces.setdefault(node.token, leaf)
        # If a ref is both inside and outside a stack, all layers share one piece at the outer path.
        if leaf.stacked < first.stacked:
            pieces[node.token] = leaf
    return pieces


def refs(module: Tree) -> list[StateRef]:
    """Return the refs of a module, in the order of its leaves."""
    return [ref for _, ref in outermost(module, lambda _, node: isinstance(node, StateRef))]


def apart(tree: T, other: Tree) -> T:
    """Copy each array of a tree that is also in the other tree, or that occurs twice.

    Without the copies, a step that donates both trees would donate an array twice.
    """
    seen = set(map(id, jax.tree.leaves(other)))

    def fresh(x: object) -> object:
        if not isinstance(x, jax.Array):
            return x
        if id(x) in seen:
            x = jnp.copy(x)
        seen.add(id(x))
        return x

    return jax.tree.map(fresh, tree)
