"""`in_context` makes a function's custom derivative rules run in the function's own context.

JAX runs the rules of `jax.custom_vjp` and `jax.custom_jvp` when it differentiates. JAX may
differentiate long after the trace of the function that contains the rules, and outside that trace.
JAX then restores the mesh without its devices, and does not restore user contexts.
"""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.extend.linear_util import WrappedFun, transformation2
from jax.tree_util import tree_leaves, tree_structure, tree_unflatten

from functree.tree.jaxprs import all_equations

_P = ParamSpec("_P")
_T = TypeVar("_T")

MakeContext = Callable[[], AbstractContextManager[None]]
"""A hashable function that creates a context manager, for example for an ambient mesh and rules."""

_RULES = frozenset({"fwd_jaxpr_thunk", "bwd", "jvp_jaxpr_fun"})
"""The equation parameters that hold user functions, which JAX calls when it differentiates."""


def has_derivatives(value: object) -> bool:
    """Return whether a value is a traced function with custom derivative rules.

    The rules may belong to a function that the traced function calls.
    """
    if not isinstance(value, ClosedJaxpr | Jaxpr):
        return False
    return any(not _RULES.isdisjoint(equation.params) for equation in all_equations(value))


def in_context(fun: Callable[_P, _T], context: MakeContext) -> Callable[_P, _T]:
    """Make a function's custom derivative rules run in a context."""
    jitted = jax.jit(fun)

    @functools.wraps(fun, updated=())
    def rewritten(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        # The result of `jitted.trace` would lack the traced arrays that the function closes over.
        jaxpr, output = jax.make_jaxpr(jitted, return_shape=True)(*args, **kwargs)
        run = jaxpr_as_fun(_Rewriting(context).value(jaxpr))
        return tree_unflatten(tree_structure(output), run(*tree_leaves((args, kwargs))))

    return rewritten


class _Rewriting:
    """The rewriting of one function and the functions that it calls."""

    def __init__(self, context: MakeContext):
        self._context = context
        # A function that is called several times stays one function, so JAX compiles it once. The
        # originals stay alive, so that their ids are not reused.
        self._known: dict[int, tuple[object, object]] = {}

    def value(self, value: Any) -> Any:
        """Rewrite the functions in a parameter of an equation or in a rule's result."""
        if isinstance(value, tuple | list) and any(map(has_derivatives, value)):
            return type(value)(map(self.value, value))
        if not has_derivatives(value):
            return value
        if id(value) not in self._known:
            self._known[id(value)] = value, self._function(value)
        return self._known[id(value)][1]

    def _function(self, jaxpr: Any) -> object:
        # A `ClosedJaxpr` contains a `Jaxpr`; in later JAX versions, both are one class.
        if isinstance(jaxpr, ClosedJaxpr) and jaxpr.jaxpr is not jaxpr:
            return jaxpr.replace(jaxpr=self.value(jaxpr.jaxpr))
        equations = [eqn.replace(params=self._params(eqn.params)) for eqn in jaxpr.eqns]
        new: Any = jaxpr
        return new.replace(eqns=equations)

    def _params(self, params: Mapping[str, object]) -> dict[str, object]:
        new: dict[str, object] = {}
        for key, value in params.items():
            if key in _RULES and isinstance(value, WrappedFun):
                new[key] = _entered(value, self._context)
            else:
                new[key] = self.value(value)
        return new


@transformation2
def _entered(
    rule: Callable[..., object], context: MakeContext, *args: Any, **kwargs: Any
) -> object:
    """Run a rule in a context.

    For higher derivatives, a function in the rule's result may have its own rules, which then run
    in the context too.
    """
    with context():
        result = rule(*args, **kwargs)
    return _Rewriting(context).value(result)
