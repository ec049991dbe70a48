"""`config.json` of a published model ─► a `TransformerConfig`, by the table of its family."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from functree.argument_checks import (
    LOCAL_FILE,
    check,
)
from functree.errors import FunctreeError, FunctreeValueError, Problem, count, did_you_mean
from functree.nn.config import TransformerConfig
from functree.nn.weight_map import WeightMap
from functree.report.json_text import parsed, value_text

# The fields that one chooses when a model is loaded; the others are those of the weights.
_CHOSEN = (
    "compute_dtype",
    "remat",
    "attention",
    "context",
    "microbatches",
    "max_seq",
    "capacity",
    "dispatch",
    "dot_general",
)

# What families with experts have that our layers do not.
_REFUSED = {
    "olmoe": "norms of queries and keys over all heads together, and `clip_qkv`",
    "deepseek": (
        "experts that all tokens have, and dense first layers, which would be a second stack"
    ),
    "deepseek_v2": (
        "latent attention, experts that all tokens have, groups of experts, "
        "`routed_scaling_factor`, and dense first layers, which would be a second stack"
    ),
}
_REFUSED["deepseek_v3"] = _REFUSED["deepseek_v2"]


def config_from_json(path: str | Path, **fields: Any) -> TransformerConfig:
    """The config of a published model.

    Args:
        path: its `config.json`, or the folder with it.
        **fields: other values for `compute_dtype`, `remat`, `attention`, `context`,
            `microbatches`, `max_seq`, `capacity`, `dispatch` or `dot_general`.

    Returns:
        The config. Its `param_dtype` is the "dtype" in the file.

    Raises:
        FunctreeError: there is no such file; the family is unknown; a field is missing or not
            understood. The error lists all of them.

    Examples:
        >>> config = ft.nn.config_from_json("no such folder")
        Traceback (most recent call last):
            ...
        functree.errors.FunctreeError: no such folder/config.json: there is no
        such file
    """
    check("no config can be read", path=(path, LOCAL_FILE))
    file, given = read_config(path)
    family = family_of(file, given)
    problems: list[Problem] = []
    for name in fields:
        if name not in _CHOSEN:
            why, remedy = "it is decided by the weights", f"one of {', '.join(_CHOSEN)}"
            problems.append(Problem(None, None, f"{name}=", why, remedy))
    found, misread = _understood(given, family)
    problems += misread
    if problems:
        raise FunctreeValueError(
            f"{file}: {count(len(problems), 'field')} not understood", problems
        )
    found |= family.options
    # Older files call it "torch_dtype". It is that of the training: `load_weights` goes by the
    # dtype of the tensors.
    found["param_dtype"] = given.get("dtype") or given.get("torch_dtype") or jnp.float32
    # What Hugging Face computes if the file does not have them, or has null.
    if found["kv_heads"] is None:
        found["kv_heads"] = found["heads"]
    if found["head_dim"] is None:
        found["head_dim"] = found["embed"] // found["heads"]
    try:
        return TransformerConfig(**(found | fields))
    except FunctreeError as error:
        # Such as numbers of heads that do not fit each other: a message without the file would be
        # about fields that nobody has written.
        raise FunctreeValueError(
            f"{file}: no transformer can be built with these fields", error.problems
        ) from None


def _understood(
    given: Mapping[str, Any], family: WeightMap
) -> tuple[dict[str, Any], list[Problem]]:
    """The fields of a `TransformerConfig` that a `config.json` gives, and what is wrong with it."""
    found: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, field in family.fields.items():
        if name in given:
            continue
        if field.absent is None:
            problems.append(
                Problem(None, None, f'"{name}"', "it is missing", f"write {field.text}")
            )
        else:
            found.update(field.absent)
    # Two fields may set the same one, such as "rope_theta" and that in "rope_parameters". Both have
    # to say the same: which of them a reader follows depends on its version.
    given_by: dict[str, str] = {}
    for name, value in given.items():
        if name == "model_type":
            continue
        field = family.fields.get(name)
        if field is None:
            problems.append(_unknown(name, value, family))
            continue
        means = field.read(value)
        if means is None:
            text = f'"{name}": {value_text(value)}'
            problems.append(Problem(None, None, text, f"it is understood as {field.text} only"))
            continue
        for key in means:
            if key in given_by and means[key] != found[key]:
                why = f'it says another {key} than "{given_by[key]}"'
                problems.append(Problem(None, None, f'"{name}"', why))
            given_by[key] = name
        found.update(means)
    return found, problems


def read_config(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """A `config.json`, and what it says.

    Raises:
        FunctreeError: there is no such file, or it is not an object of JSON.
    """
    file = Path(path)
    if file.suffix != ".json":
        file /= "config.json"
    try:
        if not file.is_file():
            raise FunctreeError(f"{file}: there is no such file")
        given = parsed(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise FunctreeError(f"{file} cannot be read: {error}") from error
    except ValueError as error:
        raise FunctreeValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise FunctreeValueError(f"{file}: it has to be an object, with a field for each size")
    return file, given


def family_of(file: Path, given: Mapping[str, Any]) -> WeightMap:
    """The family that a `config.json` names.

    Raises:
        FunctreeError: it is unknown.
    """
    name = given.get("model_type")
    if isinstance(name, str) and name in _REFUSED and name not in WeightMap.families:
        raise FunctreeValueError(
            f'{file}: "model_type": "{name}" cannot be loaded: `ft.nn` has no {_REFUSED[name]}'
        )
    if not isinstance(name, str) or name not in WeightMap.families:
        known = ", ".join(WeightMap.families)
        raise FunctreeValueError(
            f'{file}: "model_type": {value_text(name)} is none of {known}; for another family add '
            "a table to `ft.nn.WeightMap.families`"
        )
    return WeightMap.families[name]


def _unknown(name: str, value: Any, family: WeightMap) -> Problem:
    why = f"no such field is understood{did_you_mean(name, family.fields)}"
    remedy = (
        'if it changes nothing, add it to the family: `ft.nn.WeightMap.families["..."]`, with '
        "`WeightMap.only(...)`"
    )
    return Problem(None, None, f'"{name}": {value_text(value)}', why, remedy)
