"""The files of a published model ─► a `Transformer`, whose arrays are born as a layout says."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from functree.argument_checks import FLOATING, LOCAL_FOLDER, check
from functree.errors import FunctreeError, Problem, ShardingError, count
from functree.io.extras import ForeignErrors
from functree.io.weights.arrays import Created, beginnings, read_arrays
from functree.io.weights.blocks import Weight, weights_of
from functree.io.weights.files import Tensor, files_of, open_tensors
from functree.io.weights.repeated import why_not_repeated
from functree.labels.leaves import read
from functree.layout.layout import LayoutTree
from functree.layout.plan.make_plan import plan
from functree.layout.plan.plan import Plan
from functree.nn.published_config import config_from_json, family_of, read_config
from functree.nn.transformer import Transformer
from functree.nn.weight_map import WeightMap
from functree.processes.agreement import Agreement, Facts
from functree.processes.check_processes import facts_of
from functree.report.json_text import value_text
from functree.transforms.init import abstract


def load_weights(
    folder: str | FilePath,
    layout: LayoutTree,
    mesh: Mesh | None = None,
    *,
    param_dtype: DTypeLike | None = None,
    **fields: Any,
) -> Transformer:
    """A published model, from `config.json` and `*.safetensors`: llama, mistral, qwen2, qwen3,
    mixtral and qwen3_moe.

    The arrays are created sharded, and of each file only the slices are read that this process'
    devices keep.

    Args:
        folder: the folder with the files.
        layout: the layout of the model.
        mesh: the mesh; by default the ambient one.
        param_dtype: the dtype of the parameters; by default those of the files. A value that it
            does not hold, but would be an infinity, is a warning by path.
        **fields: `compute_dtype` (by default float32), `remat`, `attention`, `max_seq`,
            `capacity`, `dispatch` and `dot_general` of the config.

    Raises:
        FunctreeError: the family is unknown, a field of `config.json` is not understood, a weight
            is missing, has another shape, or is not read; the error lists all of them. Or the
            processes have other files.
        ShardingError: the layout does not fit.

    Examples:
        >>> sizes = dict(layers=2, heads=4, kv_heads=2, head_dim=2, hidden=16)
        >>> config = ft.nn.TransformerConfig(100, 8, **sizes)
        >>> model = ft.nn.Transformer.create(config, key=jax.random.key(0))
        >>> ft.save_weights(folder / "published", model)
        >>> loaded = ft.load_weights(
        ...     folder / "published", ft.P(), ft.make_mesh(data=8)
        ... )
        >>> loaded.blocks.layer.attn.query.shape, loaded.config.layers
        ((2, 8, 4, 2), 2)
    """
    check(
        "no weights are loaded",
        folder=(folder, LOCAL_FOLDER),
        param_dtype=(param_dtype, FLOATING.or_none()),
    )
    if layout is None:
        raise ShardingError("no weights are loaded: the layout is None; write `P()` to replicate")
    failure = f"{folder}: no weights are loaded"
    with Agreement(failure) as agreement:
        published = _PublishedModel.of(FilePath(folder), layout, mesh, param_dtype, fields)
        agreement.compare(published.facts)
    created: list[Created] = []
    for weight, row in zip(published.weights, published.plan.rows, strict=True):
        created.append(Created(weight, published.plan.sharding(row), param_dtype))
    remedy = "give a `param_dtype=` that holds them, such as that of the files: None"
    arrays = read_arrays(folder, created, published.tensors, remedy)
    return read(published.model).skeleton.fill(arrays)


class _PublishedModel(NamedTuple):
    """A published model, of which nothing was read but its config and the heads of its files.

    Attributes:
        model: the abstract model.
        plan: where its arrays are created.
        weights: which tensors they are read from.
        tensors: those in the files.
    """

    model: Transformer
    plan: Plan
    weights: list[Weight]
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(
        cls,
        folder: FilePath,
        layout: LayoutTree,
        mesh: Mesh | None,
        param_dtype: DTypeLike | None,
        fields: Mapping[str, Any],
    ) -> "_PublishedModel":
        """What is in a folder; the errors are those of `load_weights`."""
        file, given = read_config(folder)
        config, family = config_from_json(file, **fields), family_of(file, given)
        with ForeignErrors(FunctreeError, f"{folder}: the weights cannot be read"):
            tensors = open_tensors(files_of(file.parent))
        _check_sizes(file, given, family, tensors)
        # By the tensors: what `config.json` says is the dtype of the training. A table that is
        # missing is found below, with all else that is.
        table = tensors.get(family.weights["embed.weight"])
        if table is not None:
            found = table.dtype if param_dtype is None else param_dtype
            config = dataclasses.replace(config, param_dtype=found)
        # Abstract, and planned and compared before a tensor is read: a layout that does not fit is
        # an error after a second, and not after the first 100 GB.
        model = abstract(Transformer.create)(config, key=jax.random.key(0))
        planned = plan(model, layout, mesh)
        published = cls(model, planned, list(weights_of(model, family, tensors)), tensors)
        published.check(file.parent, family, mixed=param_dtype is not None)
        return published

    def facts(self) -> Facts:
        """What has to be the same in all processes."""
        return {
            "config": facts_of(self.model.config),
            "plan": facts_of(self.plan),
            "tensors": beginnings(self.tensors),
        }

    def check(self, folder: FilePath, family: WeightMap, mixed: bool) -> None:
        """Raise for weights that are missing, that have another shape, or that nobody reads.

        Args:
            folder: their folder, for the message.
            family: the family of the model.
            mixed: whether the layers of a weight may have several dtypes, since all become one.
        """
        weights, tensors, config = self.weights, self.tensors, self.model.config
        problems: list[Problem] = []
        unread = dict.fromkeys(tensors)
        for weight in weights:
            # One array has one dtype: to cast some of the layers would lose digits without a word.
            dtypes = {str(tensors[name].dtype) for name in weight.names if name in tensors}
            if len(dtypes) > 1 and not mixed:
                why = f"its layers have several dtypes: {', '.join(sorted(dtypes))}"
                problems.append(Problem(weight.path, None, "", why, "say which, as `param_dtype=`"))
            for name in weight.names:
                unread.pop(name, None)
                if name not in tensors:
                    problems.append(Problem(weight.path, None, name, "the files do not have it"))
                elif tensors[name].shape != weight.form.stored:
                    why = f"has the shape {tensors[name].shape}, and not {weight.form.stored}"
                    problems.append(Problem(weight.path, None, name, why))
        # Such as biases that our config does not have: the model would compute something else.
        for name in unread:
            if why_not := why_not_repeated(name, tensors, config, family):
                problems.append(Problem(None, None, name, *why_not))
        if problems:
            raise FunctreeError(
                f"{folder}: {count(len(problems), 'weight')} that cannot be loaded", problems
            )


def _check_sizes(
    file: FilePath, given: Mapping[str, Any], family: WeightMap, tensors: Mapping[str, Tensor]
) -> None:
    """Raise for sizes of a config that nothing in the files can have.

    Even abstract, a model of such sizes may take for ever.

    Args:
        file: the file of the config, for the message.
        given: what it says.
        family: the family of the model.
        tensors: those in the files.
    """
    elements = sum(math.prod(tensor.shape) for tensor in tensors.values())
    # A layer has a tensor of its own, and every other size is in the shape of one.
    most = {**dict.fromkeys(_SIZES, elements), "layers": len(tensors)}
    problems: list[Problem] = []
    for name, value in given.items():
        if name not in family.fields:
            continue
        for key, size in (family.fields[name].read(value) or {}).items():
            if key in most and size is not None and size > most[key]:
                why = f"the files have {count(len(tensors), 'tensor')} with {elements:,} elements"
                problems.append(Problem(None, None, f'"{name}": {value_text(value)}', why))
    if problems:
        raise FunctreeError(f"{file}: sizes that the files do not have", problems)


_SIZES = (
    "vocab_size",
    "embed",
    "heads",
    "kv_heads",
    "head_dim",
    "hidden",
    "experts",
    "expert_hidden",
)
