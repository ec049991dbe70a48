"""functree lays out Equinox models over many devices: names in annotations, rules, a plan, and the arrays placed."""

from jax.sharding import PartitionSpec

from functree import nn as nn
from functree import testing as testing
from functree.errors import AxesError as AxesError
from functree.errors import CheckpointError as CheckpointError
from functree.errors import FunctreeError as FunctreeError
from functree.errors import FunctreeWarning as FunctreeWarning
from functree.errors import Problem as Problem
from functree.errors import RuleError as RuleError
from functree.errors import ShardingError as ShardingError
from functree.errors import StateError as StateError
from functree.compiled.collective import Collective as Collective
from functree.compiled.ledger import Ledger as Ledger
from functree.compiled.memory import Memory as Memory
from functree.layout.diff import Change as Change
from functree.layout.diff import Diff as Diff
from functree.layout.fsdp import FSDP as FSDP
from functree.layout.layout import Layout as Layout
from functree.layout.host import on_host as on_host
from functree.layout.optimizer.plan_optimizer import plan_optimizer as plan_optimizer
from functree.layout.plan.plan import Plan as Plan
from functree.layout.plan.resolver import plan as plan
from functree.layout.plan.row import Row as Row
from functree.layout.rules import AxisRules as AxisRules
from functree.layout.state_sharding import StateSharding as StateSharding
from functree.state.ema import averaged as averaged
from functree.state.ema import with_ema as with_ema
from functree.state.refs import StateRef as StateRef
from functree.state.state import State as State
from functree.state.state import make_state as make_state
from functree.state.train import TrainState as TrainState
from functree.state.train import apply_gradients as apply_gradients
from functree.transforms.accumulate import accumulate as accumulate
from functree.placing.ambient import axis_rules as axis_rules
from functree.placing.ambient import spec as spec
from functree.transforms.grad.grad import grad as grad
from functree.transforms.grad.grad import value_and_grad as value_and_grad
from functree.placing.copy import copy as copy
from functree.placing.init import abstract as abstract
from functree.placing.init import init as init
from functree.placing.init import init_optimizer as init_optimizer
from functree.transforms.jit.jit import jit as jit
from functree.transforms.ledger import ledger as ledger
from functree.placing.mesh import make_mesh as make_mesh
from functree.io.checkpoints.checkpoints import Checkpoints as Checkpoints
from functree.io.checkpoints.inspect import Checkpoint as Checkpoint
from functree.io.checkpoints.inspect import inspect as inspect
from functree.io.checkpoints.manifest import SavedArray as SavedArray
from functree.io.checkpoints.read import restore as restore
from functree.io.checkpoints.write import save as save
from functree.io.export import Exported as Exported
from functree.io.export import export as export
from functree.io.weights.load import load_weights as load_weights
from functree.io.weights.save import save_weights as save_weights
from functree.processes.check import check_processes as check_processes
from functree.processes.preempted import preempted as preempted
from functree.placing.constrain import constrain as constrain
from functree.placing.shard import shard as shard
from functree.transforms.remat import offload as offload
from functree.transforms.stacked import Stacked as Stacked

from functree.transforms.stacked import stack as stack
from functree.transforms.shard_map.shard_map import shard_map as shard_map
from functree.transforms.signature_layouts import signature_layouts as signature_layouts
from functree.transforms.typed import typed as typed
from functree.tree.annotations.equinox_names import equinox_names as equinox_names
from functree.tree.axes import Axes as Axes
from functree.tree.axes import Buffer as Buffer
from functree.tree.axes import names as names
from functree.tree.filters.filter import Filter as Filter
from functree.tree.filters.filter import glob as glob
from functree.tree.filters.predicates import has_axis as has_axis
from functree.tree.filters.predicates import has_dtype as has_dtype
from functree.tree.filters.predicates import has_ndim as has_ndim
from functree.tree.filters.predicates import is_buffer as is_buffer
from functree.tree.filters.predicates import is_state as is_state
from functree.tree.filters.predicates import is_trainable as is_trainable
from functree.tree.filters.predicates import larger_than as larger_than
from functree.tree.filters.filter import under as under
from functree.tree.leaves import tree_axes as tree_axes
from functree.tree.pack import Packed as Packed
from functree.tree.pack import pack as pack
from functree.tree.pack import unpack as unpack
from functree.tree.paths import Path as Path
from functree.tree.select import Selection as Selection
from functree.tree.select import select as select
from functree.tree.split import merge as merge
from functree.tree.split import split as split

P = PartitionSpec

__version__ = "0.1.0"
