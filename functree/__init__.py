"""functree lays out Equinox models over many devices.

Annotations name dimensions, rules map the names to mesh axes, and a plan shows the result before
arrays are placed.
"""

import types as _types

from jax import P as P

from functree import nn as nn
from functree import testing as testing
from functree.compiled.collective import Collective as Collective
from functree.compiled.collective import Memory as Memory
from functree.compiled.layouts import Layouts as Layouts
from functree.compiled.ledger import Ledger as Ledger
from functree.devices.make_mesh import make_mesh as make_mesh
from functree.errors import AxesError as AxesError
from functree.errors import CheckpointError as CheckpointError
from functree.errors import FunctreeError as FunctreeError
from functree.errors import FunctreeWarning as FunctreeWarning
from functree.errors import Problem as Problem
from functree.errors import RuleError as RuleError
from functree.errors import ShardingError as ShardingError
from functree.errors import StateError as StateError
from functree.explorer.explore import explore as explore
from functree.explorer.hardware import Hardware as Hardware
from functree.explorer.ranking import Candidate as Candidate
from functree.explorer.ranking import Ranking as Ranking
from functree.explorer.why import Fix as Fix
from functree.explorer.why import Why as Why
from functree.explorer.why import why as why
from functree.io.checkpoints.checkpoints import Checkpoints as Checkpoints
from functree.io.checkpoints.inspect import Checkpoint as Checkpoint
from functree.io.checkpoints.inspect import inspect as inspect
from functree.io.checkpoints.manifest import SavedArray as SavedArray
from functree.io.checkpoints.read import restore as restore
from functree.io.checkpoints.write import save as save
from functree.io.export import Exported as Exported
from functree.io.export import export as export
from functree.io.weights.load import load_tensors as load_tensors
from functree.io.weights.load import load_weights as load_weights
from functree.io.weights.save import save_weights as save_weights
from functree.labels.annotations.given_names import equinox_names as equinox_names
from functree.labels.filters import Filter as Filter
from functree.labels.filters import glob as glob
from functree.labels.filters import has_axis as has_axis
from functree.labels.filters import has_dtype as has_dtype
from functree.labels.filters import has_ndim as has_ndim
from functree.labels.filters import is_buffer as is_buffer
from functree.labels.filters import is_state as is_state
from functree.labels.filters import is_trainable as is_trainable
from functree.labels.filters import larger_than as larger_than
from functree.labels.filters import regex as regex
from functree.labels.filters import under as under
from functree.labels.leaves import tree_axes as tree_axes
from functree.layout.decide import plan as plan
from functree.layout.fsdp import FSDP as FSDP
from functree.layout.layout import Layout as Layout
from functree.layout.layout import on_host as on_host
from functree.layout.plan.plan import Plan as Plan
from functree.layout.plan.text import Row as Row
from functree.layout.plan_optimizer import plan_optimizer as plan_optimizer
from functree.layout.rules import AxisRules as AxisRules
from functree.layout.state_sharding import StateSharding as StateSharding
from functree.optimizers.layerwise import layerwise as layerwise
from functree.optimizers.muon import muon as muon
from functree.optimizers.whole_matrices import on_whole_matrices as on_whole_matrices
from functree.placing.constrain import AxisShards as AxisShards
from functree.placing.constrain import axis_rules as axis_rules
from functree.placing.constrain import axis_shards as axis_shards
from functree.placing.constrain import constrain as constrain
from functree.placing.constrain import spec as spec
from functree.placing.copy import copy as copy
from functree.placing.shard import shard as shard
from functree.processes.check_processes import check_processes as check_processes
from functree.processes.preempted import preempted as preempted
from functree.report.diff import Change as Change
from functree.report.diff import Diff as Diff
from functree.state.ema import averaged as averaged
from functree.state.ema import with_ema as with_ema
from functree.state.state import State as State
from functree.state.state import StateRef as StateRef
from functree.state.state import make_state as make_state
from functree.state.train import TrainState as TrainState
from functree.state.train import apply_gradients as apply_gradients
from functree.surgery.pack import Packed as Packed
from functree.surgery.pack import pack as pack
from functree.surgery.pack import unpack as unpack
from functree.surgery.select import Selection as Selection
from functree.surgery.select import select as select
from functree.surgery.split import merge as merge
from functree.surgery.split import split as split
from functree.transforms.accumulate.accumulate import accumulate as accumulate
from functree.transforms.grad.grad import grad as grad
from functree.transforms.grad.grad import value_and_grad as value_and_grad
from functree.transforms.init import abstract as abstract
from functree.transforms.init import init as init
from functree.transforms.init import init_optimizer as init_optimizer
from functree.transforms.jit.jit import jit as jit
from functree.transforms.ledger import layouts as layouts
from functree.transforms.ledger import ledger as ledger
from functree.transforms.remat import offload as offload
from functree.transforms.shard_map import shard_map as shard_map
from functree.transforms.signature_layouts import signature_layouts as signature_layouts
from functree.transforms.stacked import Stacked as Stacked
from functree.transforms.stacked import stack as stack
from functree.transforms.typed import typed as typed
from functree.tree.axes import Axes as Axes
from functree.tree.axes import Buffer as Buffer
from functree.tree.axes import names as names
from functree.tree.paths import Path as Path

__version__ = "0.1.0"


def __dir__() -> list[str]:
    """List the public names, for `dir` and completion.

    Submodules are attributes of their package. Without this function, `ft.state` would therefore
    appear next to `ft.State`.
    """
    public = [name for name, value in globals().items() if not isinstance(value, _types.ModuleType)]
    return [*public, "nn", "testing"]


# Type checkers read the imports above instead.
__all__ = [name for name in __dir__() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
