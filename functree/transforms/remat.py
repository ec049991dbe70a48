"""What the backward pass recomputes, keeps or reads from the host ─► a `jax.checkpoint` policy."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Primitive

from functree.argument_checks import Takes, parameter_error
from functree.errors import FunctreeValueError, Problem, count, did_you_mean
from functree.tree.arrays import Tree
from functree.tree.jaxprs import AnyJaxpr, all_equations
from functree.tree.skeleton.static_value import is_hashable

Policy = Callable[..., Any]
"""A policy of `jax.checkpoint`: from a primitive and its parameters to whether its result is
kept."""

#: What the backward pass recomputes: `"full"` or `"dots"`, `ft.offload(...)`, a policy of
#: `jax.checkpoint_policies`, or `None` for nothing.
Remat = str | Policy | None

_POLICIES: dict[str, Policy] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def _is_policy(value: object) -> bool:
    # A class is callable too.
    return callable(value) and not isinstance(value, type) and is_hashable(value)


REMAT = Takes(
    'None, "full", "dots", `ft.offload("name")` or one of `jax.checkpoint_policies`',
    lambda value: value is None or isinstance(value, str) or _is_policy(value),
    lambda value: not isinstance(value, str) or value in _POLICIES,
)


@dataclass(frozen=True)
class Offload:
    """A checkpoint policy that is equal by value.

    JAX's own policies are closures, equal only by identity. A config with one would be another
    config each time that it is created, and would be compiled again.
    """

    names: tuple[str, ...]
    others: Remat

    def __call__(self, prim: Primitive, *args: object, **params: Any) -> Any:
        if prim.name == "name" and params["name"] in self.names:
            policy = _to_host(self.names)
        else:
            policy = remat_policy(self.others)
        # `others=None`: all of them are kept.
        return policy is None or policy(prim, *args, **params)

    def __repr__(self) -> str:
        arguments = list(map(repr, self.names))
        if self.others != "full":
            arguments.append(f"others={self.others!r}")
        return f"offload({', '.join(arguments)})"


def _to_host(names: tuple[str, ...]) -> Policy:
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(names),
        offload_src="device",
        offload_dst="pinned_host",
    )


def offload(*names: str, others: Remat = "full") -> Policy:
    """A policy for `remat=`: the backward pass reads the values with these names from host memory.

    A layer names a value by `x = jax.ad_checkpoint.checkpoint_name(x, "name")`. The value is copied
    to pinned host memory in the forward pass, and back in the backward pass. The documentation of
    the layers of `ft.nn` lists the names of their values.

    The result is also a policy for `jax.checkpoint`, but there a name that no value has is not an
    error.

    Args:
        *names: the names of the values.
        others: which of the other values are kept on the device, as in `Stacked.scan(remat=...)`.

    Returns:
        A policy, equal by value.

    Raises:
        FunctreeError: there are no names, or one is not an identifier; `others` is unknown.

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
        functree.errors.FunctreeValueError: 1 name to offload that no value in MLP
        has
        <BLANKLINE>
          "mlp_gates"
              no value has this name; did you mean `mlp_gate`?
        <BLANKLINE>
        Try: one of `mlp_gate`, `mlp_up`
        ...
    """
    if not names:
        raise FunctreeValueError('offload() needs the names of values: offload("hidden")')
    for name in names:
        if not (isinstance(name, str) and name.isidentifier()):
            raise parameter_error(
                f'offload({name!r}): the name of a value must be an identifier, such as "hidden"',
                right_type=isinstance(name, str),
            )
    remat_policy(others)  # raises an error here, and not where the layers are run
    if isinstance(others, Offload):
        names, others = (*names, *others.names), others.others
    return Offload(names, others)


def check_names(policy: Offload, layer: str, run: Callable[..., Tree], *operands: Tree) -> None:
    """Raise for a name that no value has: JAX would silently recompute the value that was meant.

    The names are read from the traced program, so a call without a gradient is checked too. (A
    policy that records the names sees only differentiated values, and too late.) JAX caches the
    trace of the step, so no layer is traced twice.
    """
    found = _names(jax.make_jaxpr(run)(*operands))
    if not found.issuperset(policy.names):
        # A `jax.custom_vjp` hides the names of its forward pass until it is differentiated.
        found |= _names(
            jax.make_jaxpr(lambda *operands: jax.linearize(run, *operands)[0])(*operands)
        )
    remedy = 'name a value: `x = jax.ad_checkpoint.checkpoint_name(x, "name")`'
    if found:
        remedy = f"one of {', '.join(f'`{name}`' for name in sorted(found))}"
    problems: list[Problem] = []
    for name in policy.names:
        if name not in found:
            why = f"no value has this name{did_you_mean(name, found)}"
            problems.append(Problem(None, None, f'"{name}"', why, remedy))
    if problems:
        raise FunctreeValueError(
            f"{count(len(problems), 'name')} to offload that no value in {layer} has", problems
        )


def _names(program: AnyJaxpr) -> set[str]:
    """The names of the values in a program, and in the programs inside of it."""
    # What `jax.ad_checkpoint.checkpoint_name` leaves in a program.
    named = (one for one in all_equations(program) if one.primitive.name == "name")
    return {one.params["name"] for one in named}


def remat_policy(remat: Remat) -> Policy | None:
    """The policy that a `remat=` argument means; `None` if nothing is recomputed.

    Raises:
        FunctreeError: the argument is neither a known name nor a policy.

    Examples:
        >>> from functree.transforms.remat import remat_policy
        >>> remat_policy(
        ...     "dots"
        ... ) is jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        True
    """
    if not REMAT.fits(remat):
        raise parameter_error(f"remat={remat!r}: use {REMAT.text}", right_type=REMAT.is_type(remat))
    if isinstance(remat, str):
        return _POLICIES[remat]
    return remat
