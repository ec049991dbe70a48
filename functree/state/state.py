"""A model that declares state ─► the same model, and a `State`: what is handed in and out."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import DictKey, register_pytree_with_keys

from functree.errors import StateError, did_you_mean
from functree.state.refs import StateRef, strong
from functree.tree.arrays import array_text, is_array
from functree.tree.interfaces import Entry, PackedTree, StateMapping
from functree.tree.leaf import Leaf
from functree.tree.leaves import read
from functree.tree.nodes import children, rebuilt
from functree.tree.paths import Path

T = TypeVar("T")


class State(StateMapping):
    """The state of a model: an immutable mapping from the path of each piece to its array. Made by `ft.make_state`.

    A pytree with one key for each leaf, `DictKey(str(path))`. Layouts, filters, donation and checkpoints see the paths
    as if the values stood in the model.

    Raises:
        StateError: (when asked for a ref) the ref is of another model, or not made yet; the value has another shape.

    Examples:
        >>> layer, state = ft.make_state(ft.nn.BatchNorm(4))
        >>> state[layer.mean].shape, list(map(str, state))
        ((4,), ['mean', 'var'])
        >>> ft.plan(state, ft.StateSharding({"mean": ft.P("data"), "var": ft.P()}), {"data": 2})["mean"].spec
        P('data',)
    """

    __slots__ = ("_entries", "_values")

    def __init__(self, entries: tuple[Entry, ...], values: Mapping[Path, Any]):
        self._entries: tuple[Entry, ...] = entries
        self._values: dict[Path, Any] = dict(values)

    def __getitem__(self, key: Any) -> Any:
        """The value of a ref, or at a path or its text."""
        if isinstance(key, str | tuple):
            path = Path.parse(key) if isinstance(key, str) else Path(key)
            if path not in self._values:
                raise KeyError(f"no state at `{path}`{did_you_mean(path, self._values)}")
            return self._values[path]
        value = self._values[self._known(key)]
        shape = tuple(value.shape) if is_array(value) else key.shape
        if shape != key.shape:
            stacked = shape[len(shape) - len(key.shape) :] == key.shape
            why = "it is a whole stack's: run the layers by `stacked.scan(..., state=state)`" if stacked else _OTHER
            raise StateError(f"the state at `{key.path}` has shape {shape}, and its ref {key.shape}: {why}")
        if is_array(value) and value.dtype != key.dtype:
            raise StateError(
                f"the state at `{key.path}` is {array_text(value)}, and its ref {array_text(key)}: {_OTHER}"
            )
        return value

    def set(self, ref: StateRef, value: Any) -> "State":
        """The state with another value.

        Args:
            ref: whose value.
            value: an array of the same shape and dtype; or a Python number, which takes the dtype if it can.

        Raises:
            StateError: an unknown ref; another shape or dtype.
        """
        path = self._known(ref)
        number = isinstance(value, bool | int | float | complex) and _takes(ref.dtype, value)
        new: Any = jnp.asarray(value, ref.dtype) if number else value
        if not is_array(new) or tuple(new.shape) != ref.shape or new.dtype != ref.dtype:
            text = array_text(new) if is_array(new) else repr(new)
            raise StateError(
                f"the state at `{path}` is {array_text(ref)}, and the new value {text}: a step keeps shape and dtype"
            )
        new = new if isinstance(new, jax.ShapeDtypeStruct) else strong(jnp.asarray(new))
        return State(self._entries, {**self._values, path: new})

    def update(self, values: Mapping[Any, Any]) -> "State":
        """The state with other values at some paths, or their texts, whatever their shapes: for what runs layers."""
        values = {Path.parse(key) if isinstance(key, str) else key: value for key, value in values.items()}
        lost = next((path for path in values if path not in self._values), None)
        if lost is not None:
            raise StateError(f"no state at `{lost}`{did_you_mean(lost, self._values)}")
        return State(self._entries, {**self._values, **values})

    def of_layers(self, layer: Any) -> tuple[dict[Path, Any], dict[Path, Any]]:
        """All values that go through the layers of a stack, and those of which each layer has its own, stacked.

        A layer may know of any by an argument.
        """
        known = {self._known(ref): ref for ref in refs(layer)}
        own = {path: x for path, ref in known.items() if (x := self._values[path]).ndim > len(ref.shape)}
        return {path: x for path, x in self._values.items() if path not in own}, own

    def _known(self, ref: StateRef) -> Path:
        if not isinstance(ref, StateRef):
            raise StateError(f"state is asked for by a `StateRef`, not by {ref!r}")
        if ref.path is None:
            raise StateError(
                "this StateRef has no place yet: `model, state = ft.make_state(model)`, and use the refs of that model"
            )
        if ref.path not in self._values:
            raise StateError(f"no state at `{ref.path}`{did_you_mean(ref.path, self._values)}; {_OTHER}")
        return ref.path

    def __iter__(self) -> Iterator[Path]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def entries(self) -> tuple[Entry, ...]:
        """What is known of each piece, in order."""
        return self._entries

    def __eq__(self, other: object) -> bool:
        """Arrays have no single truth value: two states are equal only if they are one."""
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return "State({" + ", ".join(f"{str(path)!r}: {value!r}" for path, value in self._values.items()) + "})"


_OTHER = "is it the state of another model?"


def _takes(dtype: Any, number: Any) -> bool:
    """Whether a Python number keeps its value in a dtype: 1.5 is no integer."""
    kinds: dict[type, tuple[Any, ...]] = {bool: (jnp.bool_, jnp.number), int: (jnp.number,), float: (jnp.inexact,)}
    kind = next((kinds[t] for t in kinds if isinstance(number, t)), (jnp.complexfloating,))
    return any(jnp.issubdtype(dtype, k) for k in kind)


register_pytree_with_keys(
    State,
    lambda s: (tuple((DictKey(str(e.path)), s._values[e.path]) for e in s._entries), s._entries),
    lambda entries, values: State(entries, {e.path: x for e, x in zip(entries, values, strict=True)}),
    lambda s: (tuple(s._values[e.path] for e in s._entries), s._entries),
)


def make_state(model: T) -> tuple[T, State]:
    """Give each piece of state that a model declares its path, and its value a place in a `State`.

    Args:
        model: with `StateRef`s anywhere; concrete or abstract, traced too (`ft.init(lambda key: ft.make_state(...))`).

    Returns:
        `(model, state)`: the model with refs that know their paths, and the values. One ref at two places is one piece
        of state, at the path of the first. Two models built alike are equal in structure, so they share a trace. Where
        two pieces, or a piece and the model, hold one array, it is copied: to donate both would be an error.

    Raises:
        StateError: a ref that has its place already (hand over its `state=` too), or in a packed tree; state that is
            declared in Equinox' way.

    Examples:
        >>> shared = ft.StateRef(jnp.zeros(3), axes="embed")
        >>> (model, state) = ft.make_state({"a": shared, "b": shared})
        >>> list(map(str, state)), state[model["b"]].shape
        (['a'], (3,))
    """
    return place_state(model, read(model).leaves)


def place_state(model: T, leaves: Sequence[Leaf]) -> tuple[T, State]:
    """As `make_state`, of a model whose leaves have been read."""
    by_path = {leaf.path: leaf for leaf in leaves}
    found: dict[Any, tuple[Path, StateRef]] = {}

    def look(path: Path, node: Any) -> None:
        if isinstance(node, StateRef):
            if node.path is not None:
                raise StateError(
                    f"the StateRef at `{path}` has its place already, `{node.path}`: make the state once, "
                    "and hand it on (`TrainState.create(model, tx, state=state)`)"
                )
            first = found.setdefault(node.token, (path, node))
            # A piece that stands outside of a stack too is one for all its layers.
            if by_path[path / "init"].stacked < by_path[first[0] / "init"].stacked:
                found[node.token] = (path, node)
            return
        if isinstance(node, eqx.nn.StateIndex):
            raise StateError(
                f"`{path}` is an `eqx.nn.StateIndex`, which keeps its state elsewhere: use a layer of `ft.nn`, or an "
                "`ft.StateRef` in its place"
            )
        if isinstance(node, PackedTree) and refs(node):
            raise StateError(
                f"{str(path) or 'the model'} is packed, so its refs can be given no places: make the state, then pack"
            )
        for key, child in children(node) or ():
            look(path / key, child)

    def place(node: Any) -> Any:
        if isinstance(node, StateRef):
            return node.at(found[node.token][0])
        below = children(node)
        return node if not below else rebuilt(node, [place(child) for _, child in below])

    look(Path(), model)
    if not found:
        return model, State((), {})
    told = [by_path[path / "init"] for path, _ in found.values()]
    entries = [Entry(Path(leaf.path[:-1]), leaf.axes, leaf.stacked) for leaf in told]
    model = place(model)
    return model, State(tuple(entries), apart({path: ref.init for path, ref in found.values()}, model))


def holds_refs(module: Any) -> bool:
    """Whether a module declares state."""
    return bool(refs(module))


def refs(module: Any) -> list[StateRef]:
    """The refs of a module, in its order."""
    if isinstance(module, StateRef):
        return [module]
    if isinstance(module, PackedTree):
        module = module.tree
    return [ref for _, child in children(module) or () for ref in refs(child)]


def apart(tree: T, other: Any) -> T:
    """A tree without the arrays of another one, or one array twice: to donate both would be an error."""
    seen = {id(x) for x in jax.tree.leaves(other)}

    def fresh(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        new = jnp.copy(x) if id(x) in seen else x
        seen.add(id(new))
        return new

    return jax.tree.map(fresh, tree)
