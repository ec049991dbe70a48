"""These layers wrap or connect other layers: a sequence, a compiled layer, a constraint."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import equinox as eqx
import jax
from jaxtyping import PRNGKeyArray

from functree.argument_checks import FUNCTION, ITERABLE, check
from functree.errors import FunctreeTypeError
from functree.layout.layout import Layout, LayoutLike, as_layout
from functree.placing.constrain import constrain, has_axis_rules
from functree.state.state import STATE, State, refs
from functree.transforms.jit.jit import jit
from functree.tree.axes import Axes

T = TypeVar("T")


class Sequential(eqx.Module):
    """A sequence of layers, applied to `x` in order.

    Each layer receives the previous layer's result, usually an array. A layer that declares state
    is called with `state=` and returns `(x, state)`. If you pass `key=`, each layer with a
    parameter `key` receives its own key. To insert more layers, use the `insert_after` method of an
    `ft.select` selection.

    Args:
        layers: modules, or functions of one argument.

    Raises:
        FunctreeError: if `layers` is not a list, a tuple or another iterable.
        FunctreeError: (when called) if a layer declares state and `state=` is missing.

    Examples:
        >>> mlp = ft.nn.Sequential(
        ...     [ft.nn.LayerNorm(4), jax.nn.relu, ft.nn.Dropout(0.1)]
        ... )
        >>> mlp(jnp.ones((2, 4)), key=jax.random.key(0)).shape, len(mlp)
        ((2, 4), 3)
    """

    layers: list[Any]

    def __init__(self, layers: Iterable[Any]):
        check("Sequential: invalid arguments", layers=(layers, ITERABLE))
        self.layers = list(layers)

    def __call__(
        self, x: Any, *, state: State | None = None, key: PRNGKeyArray | None = None
    ) -> Any:
        """Apply the layers to `x` in order.

        Args:
            x: the argument of the first layer.
            state: the state of all layers; `None` if no layer declares state.
            key: the random key, which is split for the layers.

        Returns:
            The result of the last layer or, if you pass `state`, a pair of this result and the new
            state.

        Raises:
            FunctreeError: if a layer declares state and `state` is missing.
            FunctreeError: if `state` is not an `ft.State`.
        """
        check("Sequential: invalid state", state=(state, STATE.or_none()))
        # Some keys are not used if some layers take no key.
        keys = iter(()) if key is None else iter(jax.random.split(key, len(self.layers)))
        for i, layer in enumerate(self.layers):
            options: dict[str, Any] = {}
            if key is not None and _takes(layer, "key"):
                options["key"] = next(keys)
            if not refs(layer):
                x = layer(x, **options)
                continue
            # Without this error, declared state such as a `BatchNorm`'s averages would silently be
            # lost.
            if state is None:
                raise FunctreeTypeError(
                    f"Sequential: layer {i}, {type(layer).__name__}, keeps state. Pass "
                    "`state=state`, from `model, state = ft.make_state(model)`; the result is then "
                    "`(x, state)`"
                )
            x, state = layer(x, state=state, **options)
        return x if state is None else (x, state)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int | slice) -> Any:
        """Return a layer or, for a slice, a `Sequential` of the selected layers."""
        if isinstance(index, slice):
            return Sequential(self.layers[index])
        return self.layers[index]


def _takes(layer: Callable[..., Any], name: str) -> bool:
    """Return whether a layer has a parameter of this name."""
    # The signature of a `Jitted` is `(*args, **kwargs)`, since it passes all arguments to its body.
    while isinstance(layer, Jitted):
        layer = layer.body
    try:
        parameters = inspect.signature(layer).parameters
    except (TypeError, ValueError):
        # Some functions written in C have no signature. None of them takes a JAX key.
        return False
    return name in parameters


class Constrain(eqx.Module):
    """A layer that constrains its input with `ft.constrain`, for insertion into an existing model.

    It returns its input with the same values, shapes and dtypes.

    Args:
        layout: the axes of an array (`"batch seq embed"`), or a layout for a tree.
        rules: the rules for these axes; by default the ambient rules. Without any rules, the layer
            does nothing.

    Raises:
        AxesError: if `layout` names invalid axes.
        RuleError: if `layout` or `rules` is not a layout.
        ShardingError: (when called) if the layout or the rules do not fit the input.

    Examples:
        >>> rules = ft.AxisRules({"batch": "data", "embed": None})
        >>> layer = ft.nn.Constrain("batch embed", rules)
        >>> x = ft.shard(jnp.ones((8, 4)), ft.P(), ft.make_mesh(data=8))
        >>> ft.jit(layer)(x).sharding.shard_shape(x.shape)
        (1, 4)
    """

    layout: Axes | Layout = eqx.field(static=True)
    rules: Layout | None = eqx.field(static=True)

    def __init__(self, layout: str | Axes | LayoutLike, rules: LayoutLike = None):
        if isinstance(layout, str | Axes):
            self.layout = Axes.of(layout)
        else:
            self.layout = as_layout(layout)
        self.rules = None if rules is None else as_layout(rules)

    def __call__(self, x: T) -> T:
        # `constrain` raises an error for names without rules on a mesh. This layer does not, so the
        # same model can run with a layout for parameters only.
        if isinstance(self.layout, Axes) and self.rules is None and not has_axis_rules():
            return x
        return constrain(x, self.layout, self.rules)


class Jitted(eqx.Module):
    """A layer that compiles calls of another layer with `ft.jit`.

    A call accepts the other layer's arguments and returns that layer's results. Inside another jit,
    the call becomes part of the outer program.

    Args:
        body: any layer, available as `jitted.body`.

    Raises:
        FunctreeError: if `body` is not a function.

    Examples:
        >>> layer = ft.nn.Jitted(ft.nn.LayerNorm(4))
        >>> layer(jnp.ones((2, 4))).shape
        (2, 4)
    """

    body: Callable[..., Any]

    def __check_init__(self) -> None:
        check("Jitted: invalid arguments", body=(self.body, FUNCTION))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _run(self.body, *args, **kwargs)


def _call(body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return body(*args, **kwargs)


# One function for all `Jitted`s, so that layers with equal structure share compiled programs.
_run = jit(_call)
