"""A `Transformer` ─► the published family that computes the same, or what none of them computes."""

import dataclasses
from collections.abc import Iterator

import equinox as eqx
import jax

from functree.argument_checks import shown
from functree.errors import FunctreeValueError, Problem
from functree.io.weights.files import DTYPES
from functree.nn.config import TransformerConfig
from functree.nn.rope import Llama3Rope
from functree.nn.transformer import Transformer
from functree.transforms.init import abstract
from functree.tree.arrays import is_array
from functree.tree.paths import Keys, Path

# Fields that say nothing of what is computed, or, as a dtype of activations, are chosen by who
# loads the weights, as the capacity of experts is. Those of the config are compared in the layers,
# which compute with them.
_FREE = ("config", "axes", "axis", "compute_dtype", "dispatch", "capacity")
_HEADLINE = "no published family computes what this model does"
_REPLACE = "put the array or the layer that the family has there, such as by `ft.select`"
_PLAIN = (
    "if it computes what `jax.nn.dot_product_attention` does, move the arrays into a model with "
    '`attention="auto"`: `plain = ft.abstract(ft.nn.Transformer.create)(dataclasses.replace('
    'model.config, attention="auto"), key=jax.random.key(0))`, and `jax.tree.unflatten('
    "jax.tree.structure(plain), jax.tree.leaves(model))`"
)


def family_of_model(model: Transformer) -> str:
    """The family whose models compute as this one does.

    The files of a family have its arrays, its sizes and its numbers. So what is compared is all
    else: the class of each layer, whether each array is there, its shape and kind of dtype, and
    the numbers in the layers, which surgery may have changed without the config.

    Raises:
        FunctreeError: none does. The error lists all parts that differ, by path.
    """
    name = _by_config(model.config)
    config = dataclasses.replace(model.config, attention="auto", dot_general=None)
    published = abstract(Transformer.create)(config, key=jax.random.key(0))
    if problems := list(_differences(model, published, ())):
        raise FunctreeValueError(_HEADLINE, problems)
    return name


def _by_config(config: TransformerConfig) -> str:
    """The family that has the options of a config."""
    has_experts = config.experts is not None
    special = {
        "qwen3_moe": has_experts and config.qk_norm,
        "mixtral": has_experts and not config.qk_norm,
        "qwen3": config.qk_norm and not has_experts,
        "qwen2": config.attention_bias,
        "mistral": config.window is not None and not (has_experts and not config.qk_norm),
    }
    families = [name for name, has_it in special.items() if has_it]
    why = ""
    if len(families) > 1:
        why = f"it has what only {' and only '.join(families)} has"
    elif families == ["mixtral"] and not config.normalize:
        why = "with experts and without norms of queries and keys all have normalize=True"
    # Not a subclass, which may compute other frequencies of the same numbers.
    elif config.rope_scaling is not None and type(config.rope_scaling) is not Llama3Rope:
        why = f"no family has rope_scaling={config.rope_scaling!r}"
    if why:
        raise FunctreeValueError(f"{_HEADLINE}: {why}")
    return families[0] if families else "llama"


def _differences(given: object, published: object, keys: Keys) -> Iterator[Problem]:
    """What in a part of a model is not as in that of a published one."""
    if isinstance(published, eqx.Module):
        # A subclass may compute something else, and so may another layer with the same arrays.
        if type(given) is not type(published):
            why = f"the family has functree's {_text(published)} there"
            yield Problem(Path(keys), None, _text(given), why, _REPLACE)
            return
        for field in dataclasses.fields(published):
            if field.name not in _FREE:
                parts = getattr(given, field.name), getattr(published, field.name)
                yield from _differences(*parts, (*keys, field.name))
    elif is_array(published):
        yield from _differences_of_array(given, published.shape, keys)
    elif keys[-1] == "attention":
        # By its name it is one computation, by whatever kernel.
        if not isinstance(given, str):
            yield Problem(Path(keys), None, _text(given), "no family has it", _PLAIN)
    elif is_array(given) or isinstance(given, eqx.Module) or given != published:
        why = f"the family has {_text(published)} there, by the config"
        yield Problem(Path(keys), None, _text(given), why, _REPLACE)


def _differences_of_array(given: object, shape: tuple[int, ...], keys: Keys) -> Iterator[Problem]:
    """What is wrong with that which stands in the place of an array."""
    if not is_array(given):
        yield Problem(Path(keys), None, _text(given), "the family has an array there", _REPLACE)
    elif given.shape != shape:
        why = f"the family has the shape {shape} there"
        yield Problem(Path(keys), None, shown(given), why, _REPLACE)
    elif str(given.dtype) not in DTYPES.values():
        # Such as integers, which a reader would take without what they are multiplied by.
        why = f"weights are of {', '.join(DTYPES.values())}"
        remedy = 'convert it: `jax.tree.map(lambda x: x.astype("float32"), model)`'
        yield Problem(Path(keys), None, shown(given), why, remedy)


def _text(value: object) -> str:
    """A layer by its class, another value by itself."""
    return type(value).__name__ if isinstance(value, eqx.Module) else shown(value)
