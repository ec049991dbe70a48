"""What the backward pass recomputes, keeps, or reads from host memory ─► a policy for `jax.checkpoint`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from functree.errors import FunctreeError, Problem, count, did_you_mean

#: What the backward pass recomputes: a name, `ft.offload(...)`, or a policy of `jax.checkpoint_policies`.
Remat = str | Callable[..., Any] | None

_POLICIES: dict[str, Callable[..., Any]] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@dataclass(frozen=True)
class Offload:
    """A checkpoint policy that is equal by value, so that a config which holds one compiles nothing twice."""

    names: tuple[str, ...]
    others: Remat

    def __call__(self, prim: Any, *args: Any, **params: Any) -> Any:
        named = prim.name == "name" and params["name"] in self.names
        policy = _to_host(self.names) if named else remat_policy(self.others)
        return policy is None or policy(prim, *args, **params)

    def __repr__(self) -> str:
        others = () if self.others == "full" else (f"others={self.others!r}",)
        return f"offload({', '.join([*map(repr, self.names), *others])})"


def _to_host(names: tuple[str, ...]) -> Callable[..., Any]:
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(names),
        offload_src="device",
        offload_dst="pinned_host",
    )


def offload(*names: str, others: Remat = "full") -> Callable[..., Any]:
    """For `remat=`: the backward pass reads the values of these names from host memory.

    A layer names a value by `x = jax.ad_checkpoint.checkpoint_name(x, "name")`. Each goes to pinned host memory in the
    forward pass and comes back in the backward pass. The layers of `ft.nn` say in their documentation what they name.

    Also a policy for `jax.checkpoint`, which does not tell of a name that no value has.

    Args:
        *names: of the values.
        others: what of all other values is kept on the device, as in `Stacked.scan(remat=...)`.

    Returns:
        A policy, equal by value.

    Raises:
        FunctreeError: no names, or what is no identifier; an unknown `others`.

    Examples:
        >>> layers = ft.stack(lambda key: ft.nn.MLP(4, 8, key=key), 3, jax.random.key(0))
        >>> layers.scan(jnp.ones((5, 4)), remat=ft.offload("mlp_gate", "mlp_up")).shape
        (5, 4)
        >>> layers.scan(jnp.ones((5, 4)), remat=ft.offload("mlp_gates"))
        Traceback (most recent call last):
            ...
        functree.errors.FunctreeError: 1 name to offload that MLP gives to no value
        <BLANKLINE>
          "mlp_gates"
              no value has this name; did you mean `mlp_gate`?
        <BLANKLINE>
        Try: one of `mlp_gate`, `mlp_up`
    """
    if not names:
        raise FunctreeError('offload() needs the names of values: offload("hidden")')
    for name in names:
        if not (isinstance(name, str) and name.isidentifier()):
            raise FunctreeError(f'offload({name!r}): the name of a value is an identifier: "hidden"')
    remat_policy(others)
    if isinstance(others, Offload):
        names, others = (*names, *others.names), others.others
    return Offload(names, others)


def check_names(policy: Offload, layer: str, run: Callable[..., Any], *operands: Any) -> None:
    """Raise for a name that no value has: JAX would recompute what was meant, and say nothing.

    The names are read in the traced program, so that a call without a gradient is checked too: a policy that recorded
    them would see only what is differentiated, too late to refuse. JAX remembers its trace of the step, and no layer's
    code runs twice. Only `jax.custom_vjp` hides names until it is differentiated.
    """
    found = _names(jax.make_jaxpr(run)(*operands))
    if not found.issuperset(policy.names):
        found |= _names(jax.make_jaxpr(lambda *operands: jax.linearize(run, *operands)[0])(*operands))
    there = ", ".join(f"`{name}`" for name in sorted(found))
    remedy = f"one of {there}" if there else 'name a value: `x = jax.ad_checkpoint.checkpoint_name(x, "name")`'
    problems = [
        Problem(None, None, f'"{name}"', f"no value has this name{did_you_mean(name, found)}", remedy)
        for name in policy.names
        if name not in found
    ]
    if problems:
        raise FunctreeError(f"{count(len(problems), 'name')} to offload that {layer} gives to no value", problems)


def _names(jaxpr: Any) -> set[str]:
    """The names of values in a program, and in the programs that its equations hold."""
    eqns = getattr(jaxpr, "jaxpr", jaxpr).eqns
    found = {eqn.params["name"] for eqn in eqns if eqn.primitive.name == "name"}
    params = [value for eqn in eqns for value in eqn.params.values()]
    inner = [x for value in params for x in (value if isinstance(value, tuple) else (value,)) if hasattr(x, "eqns")]
    return found.union(*map(_names, inner))


def remat_policy(remat: Remat) -> Callable[..., Any] | None:
    """The policy that a `remat=` argument stands for; `None` where nothing is recomputed.

    Raises:
        FunctreeError: neither a known name nor callable.

    Examples:
        >>> from functree.transforms.remat import remat_policy
        >>> remat_policy("dots") is jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        True
    """
    if remat is None or callable(remat):
        return remat
    if isinstance(remat, str) and remat in _POLICIES:
        return _POLICIES[remat]
    raise FunctreeError(
        f'remat={remat!r}: write None, "full", "dots", `ft.offload("name")` or one of `jax.checkpoint_policies`'
    )
