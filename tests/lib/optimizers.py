"""Every optimizer that optax and optax.contrib export, made by name."""

import inspect
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib


def vectors(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim < 2, params)


def kinds(params: Any) -> Any:
    return jax.tree.map(lambda x: "vector" if x.ndim < 2 else "matrix", params)


def adam() -> Any:
    return optax.adam(1e-3)


def always(*_: Any, **__: Any) -> bool:
    return True


def two() -> Any:
    return {"vector": adam(), "matrix": optax.adafactor(1e-3)}


# Those that need more than a `learning_rate`.
WITH: dict[str, Callable[[Any], Any]] = {
    "MultiSteps": lambda make: make(adam(), 2),
    "adaptive_grad_clip": lambda make: make(0.1),
    "add_noise": lambda make: make(0.1, 0.5, jax.random.key(0)),
    "apply_if_finite": lambda make: make(adam(), 3),
    "chain": lambda make: make(adam(), optax.adafactor(1e-3)),
    "clip": lambda make: make(1.0),
    "clip_by_block_rms": lambda make: make(1.0),
    "clip_by_global_norm": lambda make: make(1.0),
    "conditionally_mask": lambda make: make(adam(), always),
    "conditionally_transform": lambda make: make(adam(), always),
    "differentially_private_aggregate": lambda make: make(1.0, 1.0, jax.random.key(0)),
    "dpsgd": lambda make: make(1e-3, 1.0, 1.0, 0),
    "ema": lambda make: make(0.9),
    "flatten": lambda make: make(adam()),
    "freeze": lambda make: make(vectors),
    "hutchinson_estimator_diag_hessian": lambda make: make(jax.random.key(0)),
    "inject_hyperparams": lambda make: make(optax.adam)(learning_rate=1e-3),
    "inject_stateful_hyperparams": lambda make: make(optax.adam)(learning_rate=1e-3),
    "lookahead": lambda make: make(adam(), 5, 0.5),
    "masked": lambda make: make(adam(), vectors),
    "measure_with_ema": lambda make: make(lambda _: jnp.float32(0), 0.9),
    "mechanize": lambda make: make(adam()),
    "monitor": lambda make: make({"norm": lambda _: jnp.float32(0)}),
    "multi_transform": lambda make: make(two(), kinds),
    "named_chain": lambda make: make(("one", adam()), ("two", optax.adafactor(1e-3))),
    "noisy_sgd": lambda make: make(1e-3, key=jax.random.key(0)),
    "partition": lambda make: make(two(), kinds),
    "sam": lambda make: make(adam(), optax.sgd(1e-3)),
    "scale": lambda make: make(1.0),
    "scale_by_backtracking_linesearch": lambda make: make(3),
    "scale_by_schedule": lambda make: make(lambda _: 1.0),
    "scale_by_zoom_linesearch": lambda make: make(3),
    "schedule_free": lambda make: make(adam(), 1e-3),
    "selective_transform": lambda make: make(adam(), freeze_mask=vectors),
    "snapshot": lambda make: make("norm", lambda _: jnp.float32(0)),
    "split_real_and_imaginary": lambda make: make(adam()),
    "stateless": lambda make: make(lambda updates, _: updates),
    "stateless_with_tree_map": lambda make: make(lambda update, _: update),
    "trace": lambda make: make(0.9),
    "with_extra_args_support": lambda make: make(adam()),
}

# What else optax exports, and what it is instead of an optimizer.
OTHERS = {
    "a state": """
        AdaptiveGradClipState AddDecayedWeightsState AddNoiseState ApplyEvery ApplyIfFiniteState ClipByGlobalNormState
        ClipState ConditionallyMaskState ConditionallyTransformState EmaState EmptyState FactoredState
        InjectHyperparamsState InjectStatefulHyperparamsState LookaheadState MaskedState MonitorState MultiStepsState
        MultiTransformState NonNegativeParamsState PartitionState ScaleByAdaDeltaState ScaleByAdamState
        ScaleByAdanState ScaleByAmsgradState ScaleByBacktrackingLinesearchState ScaleByBeliefState ScaleByLBFGSState
        ScaleByLionState ScaleByNovogradState ScaleByRStdDevState ScaleByRmsState ScaleByRpropState ScaleByRssState
        ScaleBySM3State ScaleByScheduleState ScaleByTrustRatioState ScaleByZoomLinesearchState ScaleState
        SnapshotState TraceState WrappedSchedule ZeroNansState ZoomLinesearchInfo init_empty_state
        COCOBState DAdaptAdamWState DifferentiallyPrivateAggregateState DoGState DoWGState GaLoreState
        HutchinsonState MadgradState MechanicState MomoAdamState MomoState MuonState NormalizeState ProdigyState
        ReduceLROnPlateauState SAMState ScaleByAdemamixState ScaleBySimplifiedAdEMAMixState ScheduleFreeState
        SophiaState SplitRealAndImaginaryState
    """,
    "a type": """
        GradientTransformation GradientTransformationExtraArgs LookaheadParams MaskOrFn MaskedNode OptState Params
        ScalarOrSchedule Schedule ShouldSkipUpdateFunction TransformInitFn TransformUpdateExtraArgsFn
        TransformUpdateFn Updates GaLoreDimensionNumbers MuonDimensionNumbers
    """,
    "a schedule": """
        constant_schedule cosine_decay_schedule cosine_onecycle_schedule exponential_decay join_schedules
        linear_onecycle_schedule linear_schedule piecewise_constant_schedule piecewise_interpolate_schedule
        polynomial_schedule sgdr_schedule warmup_constant_schedule warmup_cosine_decay_schedule
        warmup_exponential_decay_schedule
    """,
    "a loss or a measure": """
        convex_kl_divergence cosine_distance cosine_similarity ctc_loss ctc_loss_with_forward_probs
        generalized_kl_divergence global_norm hinge_loss huber_loss kl_divergence l2_loss log_cosh ntxent safe_norm
        safe_root_mean_squares safe_softmax_cross_entropy sigmoid_binary_cross_entropy sigmoid_focal_loss
        smooth_labels softmax_cross_entropy softmax_cross_entropy_with_integer_labels squared_error
    """,
    "a function of arrays, trees or functions": """
        apply_updates bias_correction incremental_update matrix_inverse_pth_root microbatch multi_normal nnls
        per_example_global_norm_clip per_example_layer_norm_clip periodic_update power_iteration safe_increment
        safe_int32_increment scale_gradient skip_large_updates skip_not_finite tree_map_params
        update_infinity_moment update_moment update_moment_per_elem_norm value_and_grad_from_state
        schedule_free_eval_params
    """,
}


def exported() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for module in (optax, optax.contrib):
        found |= {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return {name: value for name, value in found.items() if not isinstance(value, ModuleType)}


EXPORTED = exported()
NO_OPTIMIZERS = {name for names in OTHERS.values() for name in names.split()}
NAMES = sorted(set(EXPORTED) - NO_OPTIMIZERS)


def build(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* is deprecated", DeprecationWarning)
        return _build(name, EXPORTED[name])


def _build(name: str, make: Any) -> Any:
    if name in WITH:
        return WITH[name](make)
    parameters = inspect.signature(make).parameters.values()
    needed = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    assert needed in ([], ["learning_rate"]), (
        f"optax has a new export `{name}`: say in WITH or OTHERS what it is"
    )
    return make(1e-3) if needed else make()


def given(name: str, model: Any) -> Any:
    """What the optimizer wants for parameters."""
    return optax.LookaheadParams(model, model) if name == "lookahead" else model
