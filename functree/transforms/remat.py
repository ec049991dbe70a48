"""`remat=` selects the values to recompute, to keep, or to move to host memory.

The option ─► a policy of `jax.checkpoint`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Primitive

from functree.argument_checks import TEXTS, Takes, check
from functree.errors import FunctreeValueError, Problem, count, did_you_mean
from functree.tree.arrays import Tree
from functree.tree.jaxprs import AnyJaxpr, all_equations
from functree.tree.skeleton.static_value import is_hashable

Policy = Callable[..., Any]
"""A `jax.checkpoint` policy: a function of a primitive and its parameters that returns whether the
primitive's result is kept."""

#: A choice of the values that the backward pass recomputes: `"full"` or `"dots"`,
#: `ft.offload(...)`, a policy of `jax.checkpoint_policies`, or `None` to recompute no values.
Remat = str | Policy | None

_POLICIES: dict[str, Policy] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def _is_remat(value: object) -> bool:
    if isinstance(value, str):
        return value in _POLICIES
    # A class is callable, but not a policy.
    is_policy = callable(value) and not isinstance(value, type) and is_hashable(value)
    return value is None or is_policy


REMAT = Takes(
    'None, "full", "dots", `ft.offload("name")` or one of `jax.checkpoint_policies`', _is_remat
)


@dataclass(frozen=True)
class Offload:
    """A checkpoint policy that is compared by value.

    JAX's policies for names are closures, which are compared by identity. A config with a new
    closure would differ from all earlier configs, so its program would be compiled again.
    """

    names: tuple[str, ...]
    others: Remat

    def __call__(self, prim: Primitive, *args: object, **params: Any) -> Any:
        if prim.name == "name" and params["name"] in self.names:
            policy = _to_host(self.names)
        else:
            policy = remat_policy(self.others)
        # `others=None` keeps all other values.
        return policy is None or policy(prim, *args, **params)


def _to_host(names: tuple[str, ...]) -> Policy:
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(names),
        offload_src="device",
        offload_dst="pinned_host",
    )


def offload(*names: str, others: Remat = "full") -> Policy:
    """Return a policy for `remat=` that keeps named values in host memory.

    A layer names a value with `x = jax.ad_checkpoint.checkpoint_name(x, "name")`. The value is
    copied to pinned host memory in the forward pass, and back in the backward pass. The layers of
    `ft.nn` document the names of their values.

    `jax.checkpoint` accepts the policy too, but does not report names that no value has.

    Args:
        *names: the names of the values.
        others: the policy for all other values, as in `Stacked.scan(remat=...)`.

    Returns:
        A policy that is compared by value.

    Raises:
        FunctreeError: if a name is not a string, or `others` is invalid.

    Examples:
        >>> layers = ft.stack(
        ...     lambda key: ft.nn.MLP(4, 8, key=key), 3, jax.random.key(0)
        ... )
        >>> layers.scan(
        ...     jnp.ones((5, 4)), remat=ft.offload("mlp_gate", "mlp_up")
        ... ).shape
        (5, 4)
        >>> layers.scan(jnp.ones((5, 4)), remat=ft.offload("mlp_gates"))
        Traceback (most recent call last):
            ...
        functree.errors.FunctreeValueError: offload: cannot find 1 name in MLP
        <BLANKLINE>
          "mlp_gates"
              no value has this name; did you mean `mlp_gate`?
        <BLANKLINE>
        Try: use one of `mlp_gate`, `mlp_up`
        ...
    """
    check("offload: invalid arguments", names=(names, TEXTS), others=(others, REMAT))
    if isinstance(others, Offload):
        names, others = (*names, *others.names), others.others
    return Offload(names, others)


def check_names(policy: Offload, layer: str, run: Callable[..., Tree], *operands: Tree) -> None:
    """Raise FunctreeError for names that no value has.

    JAX would silently ignore such names.

    The known names come from the traced program, so calls without a gradient are checked too. A
    policy could record names, but JAX calls it only for differentiated values, and too late for a
    check. JAX caches the trace of the step, so no layer is traced twice.
    """
    known = _names(jax.make_jaxpr(run)(*operands))
    if not known.issuperset(policy.names):
        # A `jax.custom_vjp` hides the names in its forward pass until it is differentiated.
        known |= _names(
            jax.make_jaxpr(lambda *operands: jax.linearize(run, *operands)[0])(*operands)
        )
    remedy = 'name a value: `x = jax.ad_checkpoint.checkpoint_name(x, "name")`'
    if known:
        remedy = f"use one of {', '.join(f'`{name}`' for name in sorted(known))}"
    problems: list[Problem] = []
    for name in policy.names:
        if name not in known:
            why = f"no value has this name{did_you_mean(name, known)}"
            problems.append(Problem(None, None, f'"{name}"', why, remedy))
    if problems:
        names = count(len(problems), "name")
        raise FunctreeValueError(f"offload: cannot find {names} in {layer}", problems)


def _names(program: AnyJaxpr) -> set[str]:
    """Return the names of the values in a program and in its inner programs."""
    # `jax.ad_checkpoint.checkpoint_name` adds an equation with the primitive `name`.
    named = (equation for equation in all_equations(program) if equation.primitive.name == "name")
    return {equation.params["name"] for equation in named}


def remat_policy(remat: Remat) -> Policy | None:
    """Return the policy for a valid option `remat=`, or `None` if nothing is recomputed.

    Examples:
        >>> from functree.transforms.remat import remat_policy
        >>> remat_policy(
        ...     "dots"
        ... ) is jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        True
    """
    if isinstance(remat, str):
        return _POLICIES[remat]
    return remat
