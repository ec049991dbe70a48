"""Layers ─► layers around or between them: a sequence, a compiled layer, a constraint."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PRNGKeyArray

from functree.errors import FunctreeError
from functree.layout.layout import Layout, LayoutLike, as_layout
from functree.parameters import FUNCTION, ITERABLE, check
from functree.placing.ambient import ambient_axis_rules
from functree.placing.constrain import constrain
from functree.state.state import State, holds_refs
from functree.transforms.jit.jit import jit
from functree.tree.axes import Axes


class Sequential(eqx.Module):
    """A sequence of layers, applied to `x` in order.

    A layer that declares state is called with `state=` and returns `(x, state)`. A layer with a parameter `key` gets
    its own key. `ft.select(model)....insert_after(layer)` inserts further layers.

    Args:
        layers: modules, or functions of one argument.

    Raises:
        FunctreeError: (when called) a layer declares state, but `state=` is not given.

    Examples:
        >>> mlp = ft.nn.Sequential([ft.nn.LayerNorm(4), jax.nn.relu, ft.nn.Dropout(0.1)])
        >>> mlp(jnp.ones((2, 4)), key=jax.random.key(0)).shape, len(mlp)
        ((2, 4), 3)
    """

    layers: list[Any]

    def __init__(self, layers: Iterable[Any]):
        check("Sequential cannot be built", layers=(layers, ITERABLE))
        self.layers = list(layers)

    def __call__(self, x: Any, *, state: State | None = None, key: PRNGKeyArray | None = None) -> Any:
        keys = iter(() if key is None else jax.random.split(key, max(1, len(self.layers))))
        for i, layer in enumerate(self.layers):
            options: dict[str, Any] = {}
            if key is not None and _takes(layer, "key"):
                options["key"] = next(keys)
            if not holds_refs(layer):
                x = layer(x, **options)
                continue
            if state is None:
                raise FunctreeError(
                    f"layer {i} of a Sequential, {type(layer).__name__}, keeps state: call it with "
                    "`state=state`, from `model, state = ft.make_state(model)`, and it returns `(x, state)`"
                )
            x, state = layer(x, state=state, **options)
        return x if state is None else (x, state)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: Any) -> Any:
        return Sequential(self.layers[index]) if isinstance(index, slice) else self.layers[index]


def _takes(layer: Any, name: str) -> bool:
    """Whether a layer has a parameter of this name."""
    while isinstance(layer, Jitted):  # passes all arguments to its body
        layer = layer.body
    try:
        parameters = inspect.signature(layer).parameters
    except (TypeError, ValueError):  # some functions written in C have no signature
        return False
    return name in parameters


class Constrain(eqx.Module):
    """A layer that constrains its input (`ft.constrain`), to be inserted between the layers of an existing model.

    Args:
        layout: the axes of an array (`"batch seq embed"`), or a layout for a tree.
        rules: the rules for these axes; the ambient rules if not given. If there are none, it does nothing.

    Raises:
        AxesError, RuleError: `layout` is neither axes nor a layout.

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
        self.layout = Axes.of(layout) if isinstance(layout, str | Axes) else as_layout(layout)
        self.rules = None if rules is None else as_layout(rules)

    def __call__(self, x: Any) -> Any:
        if isinstance(self.layout, Axes) and self.rules is None and ambient_axis_rules() is None:
            return x
        return constrain(x, self.layout, self.rules)


class Jitted(eqx.Module):
    """A layer that compiles the call of another layer by `ft.jit`. Inside another jit it is a part of that program.

    Args:
        body: any layer. It is available as `jitted.body`.

    Examples:
        >>> layer = ft.nn.Jitted(ft.nn.LayerNorm(4))
        >>> layer(jnp.ones((2, 4))).shape
        (2, 4)
    """

    body: Callable[..., Any]

    def __check_init__(self) -> None:
        check("Jitted cannot be built", body=(self.body, FUNCTION))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _run(self.body, *args, **kwargs)


def _call(body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return body(*args, **kwargs)


_run = jit(_call)  # one function for all `Jitted`s, so that layers of equal structure share compiled programs
