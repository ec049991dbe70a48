"""functree lays out Equinox models over many devices.

Annotations name dimensions, rules map the names to mesh axes, and a plan shows the result before
arrays are placed.
"""

from jax.sharding import PartitionSpec as P

from functree import nn, testing
from functree.compiled.collective import Collective, Memory
from functree.compiled.layouts import Layouts
from functree.compiled.ledger import Ledger
from functree.devices.make_mesh import make_mesh
from functree.errors import (
    AxesError,
    CheckpointError,
    FunctreeError,
    FunctreeWarning,
    Problem,
    RuleError,
    ShardingError,
    StateError,
)
from functree.explorer.explore import explore
from functree.explorer.hardware import Hardware
from functree.explorer.ranking import Candidate, Ranking
from functree.explorer.why import Fix, Why, why
from functree.io.checkpoints.checkpoints import Checkpoints
from functree.io.checkpoints.inspect import Checkpoint, inspect
from functree.io.checkpoints.manifest import SavedArray
from functree.io.checkpoints.read import restore
from functree.io.checkpoints.write import save
from functree.io.export import Exported, export
from functree.io.weights.load import load_tensors, load_weights
from functree.io.weights.save import save_weights
from functree.labels.annotations.given_names import equinox_names
from functree.labels.filters import Filter, glob, regex, under
from functree.labels.leaves import tree_axes
from functree.labels.predicates import (
    has_axis,
    has_dtype,
    has_ndim,
    is_buffer,
    is_state,
    is_trainable,
    larger_than,
)
from functree.layout.fsdp import FSDP
from functree.layout.layout import Layout, on_host
from functree.layout.plan.make_plan import plan
from functree.layout.plan.plan import Plan
from functree.layout.plan.row import Row
from functree.layout.plan_optimizer import plan_optimizer
from functree.layout.rules import AxisRules
from functree.layout.state_sharding import StateSharding
from functree.optimizers.layerwise import layerwise
from functree.optimizers.muon import muon
from functree.optimizers.whole_matrices import on_whole_matrices
from functree.placing.ambient import axis_rules, spec
from functree.placing.constrain import AxisShards, axis_shards, constrain
from functree.placing.copy import copy
from functree.placing.shard import shard
from functree.processes.check_processes import check_processes
from functree.processes.preempted import preempted
from functree.report.diff import Change, Diff
from functree.state.ema import averaged, with_ema
from functree.state.refs import StateRef
from functree.state.state import State, make_state
from functree.state.train import TrainState, apply_gradients
from functree.surgery.pack import Packed, pack, unpack
from functree.surgery.select import Selection, select
from functree.surgery.split import merge, split
from functree.transforms.accumulate.accumulate import accumulate
from functree.transforms.grad.grad import grad, value_and_grad
from functree.transforms.init import abstract, init, init_optimizer
from functree.transforms.jit.jit import jit
from functree.transforms.ledger import layouts, ledger
from functree.transforms.remat import offload
from functree.transforms.shard_map import shard_map
from functree.transforms.signature_layouts import signature_layouts
from functree.transforms.stacked import Stacked, stack
from functree.transforms.typed import typed
from functree.tree.axes import Axes, Buffer, names
from functree.tree.paths import Path

__all__ = [
    # Axis names
    "Axes",
    "tree_axes",
    "names",
    "equinox_names",
    "Buffer",
    # Paths and filters
    "Path",
    "Filter",
    "glob",
    "regex",
    "under",
    "has_axis",
    "has_ndim",
    "has_dtype",
    "larger_than",
    "is_trainable",
    "is_buffer",
    "is_state",
    # Layouts
    "P",
    "Layout",
    "AxisRules",
    "FSDP",
    "StateSharding",
    "on_host",
    # Plans
    "plan",
    "Plan",
    "Row",
    "plan_optimizer",
    # Optimizers
    "layerwise",
    "on_whole_matrices",
    "muon",
    # Meshes and placing
    "make_mesh",
    "shard",
    "copy",
    "constrain",
    "axis_rules",
    "spec",
    "axis_shards",
    "AxisShards",
    "init",
    "abstract",
    "init_optimizer",
    # Trees
    "split",
    "merge",
    "pack",
    "unpack",
    "Packed",
    "select",
    "Selection",
    # Transforms
    "jit",
    "shard_map",
    "signature_layouts",
    "typed",
    "grad",
    "value_and_grad",
    "accumulate",
    # Inspection and testing
    "why",
    "Why",
    "Fix",
    "layouts",
    "Layouts",
    "ledger",
    "Ledger",
    "Collective",
    "Memory",
    "Diff",
    "Change",
    "explore",
    "Ranking",
    "Candidate",
    "Hardware",
    # State and training
    "StateRef",
    "make_state",
    "State",
    "TrainState",
    "apply_gradients",
    "with_ema",
    "averaged",
    # Layers
    "Stacked",
    "stack",
    "offload",
    # Weights
    "load_weights",
    "load_tensors",
    "save_weights",
    # Checkpoints, processes and export
    "save",
    "restore",
    "inspect",
    "Checkpoint",
    "SavedArray",
    "Checkpoints",
    "check_processes",
    "preempted",
    "export",
    "Exported",
    # Errors
    "FunctreeError",
    "AxesError",
    "RuleError",
    "ShardingError",
    "StateError",
    "CheckpointError",
    "Problem",
    "FunctreeWarning",
    # Subpackages
    "nn",
    "testing",
]

__version__ = "0.1.0"


def __dir__() -> list[str]:
    """List the public names, for `dir` and completion.

    Submodules are attributes of their package. Without this function, `ft.state` would therefore
    appear next to `ft.State`.
    """
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
