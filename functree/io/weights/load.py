"""The files of a published model ─► a `Transformer`, whose arrays are born as a layout says."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from functree.errors import FunctreeError, Problem, ShardingError, count
from functree.io.extras import foreign
from functree.io.weights.blocks import Form
from functree.io.weights.files import Tensor, open_tensors
from functree.layout.layout import LayoutTree
from functree.layout.plan.plan import Plan
from functree.layout.plan.resolver import plan
from functree.nn.transformer import Transformer
from functree.nn.weight_map import WeightMap, config_from_json, family_of, read_config
from functree.parameters import FLOATING, FOLDER, check
from functree.placing.init import abstract
from functree.processes.agreement import Facts, agreed
from functree.processes.facts import checksum, facts_of
from functree.processes.same_copies import digests_of
from functree.tree.leaves import read
from functree.tree.paths import Path


def load_weights(
    folder: str | FilePath,
    layout: LayoutTree,
    mesh: Mesh | None = None,
    *,
    param_dtype: DTypeLike | None = None,
    **fields: Any,
) -> Transformer:
    """A published model, from `config.json` and `*.safetensors`: llama, mistral, qwen2 and qwen3.

    The arrays are created sharded, and of each file only the slices are read that this process' devices keep.

    Args:
        folder: the folder with the files.
        layout: the layout of the model.
        mesh: the mesh; by default the ambient one.
        param_dtype: the dtype of the parameters; by default those of the files.
        **fields: `compute_dtype` (by default float32), `remat`, `attention` and `max_seq` of the config.

    Raises:
        FunctreeError: the family is unknown, a field of `config.json` is not understood, a weight is missing, has
            another shape, or is not read; the error lists all of them. Or the processes have other files.
        ShardingError: the layout does not fit.
    """
    check("no weights are loaded", folder=(folder, FOLDER), param_dtype=(param_dtype, FLOATING.or_none()))
    if layout is None:
        raise ShardingError("no weights are loaded: the layout is None; write `P()` to replicate")

    def prepare() -> tuple[_Published, Any]:
        found = _Published.of(FilePath(folder), layout, mesh, param_dtype, fields)
        return found, found.facts

    published = agreed(f"{folder}: no weights are loaded", prepare)
    leaves = read(published.model)

    def arrays_of() -> tuple[list[jax.Array], Any]:
        pairs = zip(published.weights, published.plan.rows, strict=True)
        with foreign(FunctreeError, f"{folder}: the weights cannot be read"):
            return [
                weight.array(published.tensors, published.plan.sharding(row), param_dtype) for weight, row in pairs
            ], dict

    arrays = agreed(f"{folder}: no weights are loaded", arrays_of)
    if jax.process_count() > 1:
        named = {str(leaf.path): array for leaf, array in zip(leaves.leaves, arrays, strict=True)}
        _, differ = digests_of(named, "give all processes the same files")
        if differ:
            raise FunctreeError(f"{folder}: the processes read other weights", differ)
    return leaves.skeleton.fill(arrays)


class _Published(NamedTuple):
    """A published model, of which nothing was read but the heads of its files.

    Attributes:
        model: the abstract model.
        plan: where its arrays are created.
        weights: which tensors they are read from.
        tensors: those in the files.
    """

    model: Transformer
    plan: Plan
    weights: "list[Weight]"
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(
        cls, folder: FilePath, layout: LayoutTree, mesh: Mesh | None, param_dtype: Any, fields: Mapping[str, Any]
    ) -> "_Published":
        """What is in a folder; the errors are those of `load_weights`."""
        file, given = read_config(folder)
        config, family = config_from_json(file, **fields), family_of(file, given)
        tensors = open_tensors(file.parent)
        table = tensors.get(family.weights["embed.weight"])
        if table is not None:  # what `config.json` says is the dtype of the training
            config = dataclasses.replace(config, param_dtype=table.dtype if param_dtype is None else param_dtype)
        model = abstract(Transformer.create)(config, key=jax.random.key(0))
        planned = plan(model, layout, mesh)
        weights = list(weights_of(model, family))
        _check(file.parent, weights, tensors, mixed=param_dtype is not None)
        return cls(model, planned, weights, tensors)

    def facts(self) -> Facts:
        # Each machine may have files of its own: of another model of the same shapes, perhaps.
        beginnings = {name: checksum(tensor.beginning()) for name, tensor in self.tensors.items()}
        tensors = sorted(f"{name} begins with {number:08x}" for name, number in beginnings.items())
        return {"config": facts_of(self.model.config), "plan": facts_of(self.plan), "tensors": tensors}


class Weight(NamedTuple):
    """One of our arrays, and the tensors that have it.

    Attributes:
        path: its path in the model.
        shape: its shape.
        names: the name of the tensor, or those of all layers.
        stacked: whether the leading dimension is that of the layers.
        form: how a tensor has it.
    """

    path: Path
    shape: tuple[int, ...]
    names: list[str]
    stacked: bool
    form: Form

    def array(self, tensors: Mapping[str, Tensor], sharding: NamedSharding, param_dtype: DTypeLike | None) -> jax.Array:
        """The array, of which each device reads its own block."""
        dtype = np.dtype(tensors[self.names[0]].dtype if param_dtype is None else param_dtype)

        def block(index: Any) -> np.ndarray:
            if not self.stacked:
                return self.form.read(tensors[self.names[0]], index).astype(dtype, copy=False)
            shape = [len(range(*part.indices(size))) for part, size in zip(index, self.shape, strict=True)]
            layers = np.empty(shape, dtype)
            for i, name in enumerate(self.names[index[0]]):
                layers[i] = self.form.read(tensors[name], index[1:])
            return layers

        return jax.make_array_from_callback(self.shape, sharding, block)


def weights_of(model: Transformer, family: WeightMap) -> Iterator[Weight]:
    """Each array of a model, in the order of its leaves.

    Raises:
        FunctreeError: the family does not name one.
    """
    for leaf in read(model).leaves:
        name = family.weights.get(str(leaf.path))
        if name is None:
            raise FunctreeError(f"the family has no name for `{leaf.path}`: add it to its `weights`")
        stacked, transposed = "{layer}" in name, name.endswith(".T")
        names = [
            name.removesuffix(".T").replace("{layer}", str(i)) for i in range(leaf.value.shape[0] if stacked else 1)
        ]
        form = Form.of(leaf.value.shape[stacked:], leaf.axes[stacked:], transposed)
        yield Weight(leaf.path, leaf.value.shape, names, stacked, form)


def _check(folder: FilePath, weights: list[Weight], tensors: Mapping[str, Tensor], mixed: bool) -> None:
    """Raise for weights that are missing, that have another shape, or that nobody reads.

    Args:
        folder: their folder, for the message.
        weights: the weights of the model.
        tensors: those in the files.
        mixed: whether the layers of a weight may have several dtypes, since all become one.
    """
    problems: list[Problem] = []
    unread = dict.fromkeys(tensors)
    for weight in weights:
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
    problems += [Problem(None, None, name, "no part of the model is read from it") for name in unread]
    if problems:
        raise FunctreeError(f"{folder}: {count(len(problems), 'weight')} that cannot be loaded", problems)
