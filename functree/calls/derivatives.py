"""A traced function ─► the same function, whose custom derivative rules run with its own ambient mesh and rules.

JAX runs the rules of `jax.custom_vjp` and `jax.custom_jvp` when it differentiates, which may be long after the function
that contains them was traced, and outside of it. JAX then restores the mesh without its devices, and no user contexts.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.extend.linear_util import WrappedFun, transformation2

Context = Callable[[], AbstractContextManager[Any]]
"""A hashable function that makes a context."""

_RULES = frozenset({"fwd_jaxpr_thunk", "bwd", "jvp_jaxpr_fun"})
"""The parameters of an equation that are functions of the user, which JAX calls when it differentiates."""


def has_derivatives(value: Any) -> bool:
    """Whether a function, or one that it calls, has custom derivative rules."""
    if isinstance(value, tuple | list):
        return any(map(has_derivatives, value))
    if not isinstance(value, ClosedJaxpr | Jaxpr):
        return False
    params = [one.params for one in value.eqns]
    return any(not _RULES.isdisjoint(one) or any(map(has_derivatives, one.values())) for one in params)


def in_context(jaxpr: ClosedJaxpr, context: Context) -> ClosedJaxpr:
    """The same function, whose custom derivative rules run in a context."""
    return _Rewriting(context).value(jaxpr)


class _Rewriting:
    """The rewriting of one function and of those that it calls."""

    def __init__(self, context: Context):
        self._context = context
        # A function that is called several times stays one function, so that JAX compiles it once. The original is kept
        # too, so that its id is not used again.
        self._known: dict[int, tuple[Any, Any]] = {}

    def value(self, value: Any) -> Any:
        """A parameter of an equation, or a result of a rule: the functions in it are rewritten."""
        if not has_derivatives(value):
            return value
        if isinstance(value, tuple | list):
            return type(value)(map(self.value, value))
        if id(value) not in self._known:
            self._known[id(value)] = value, self._function(value)
        return self._known[id(value)][1]

    def _function(self, jaxpr: Any) -> Any:
        # A `ClosedJaxpr` contains a `Jaxpr`; in later versions of JAX the two are one class.
        if isinstance(jaxpr, ClosedJaxpr) and jaxpr.jaxpr is not jaxpr:
            return jaxpr.replace(jaxpr=self.value(jaxpr.jaxpr))
        new: Any = jaxpr
        return new.replace(eqns=[one.replace(params=self._params(one.params)) for one in jaxpr.eqns])

    def _params(self, params: Mapping[str, Any]) -> dict[str, Any]:
        rules = {key: _entered(rule, self._context) for key, rule in params.items() if _is_rule(key, rule)}
        return {key: self.value(value) for key, value in params.items()} | rules


def _is_rule(key: str, value: Any) -> bool:
    return key in _RULES and isinstance(value, WrappedFun)


@transformation2
def _entered(rule: Callable[..., Any], context: Context, *args: Any, **kwargs: Any) -> Any:
    """A rule that runs in a context. It may return a function with rules of its own, for higher derivatives."""
    with context():
        result = rule(*args, **kwargs)
    return _Rewriting(context).value(result)
