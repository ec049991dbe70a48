"""Checks of Equinox in compiled functions: Equinox' error, raised by the call, and short."""

import logging
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import Array

import functree as ft
from functree.calls.program import has_checks
from tests.lib.launch import ended, started

X = jnp.ones(4)


def check(x: Array) -> Array:
    return eqx.error_if(x, jnp.any(x < 0), "x is negative")


def square(x: Array) -> Array:
    return jnp.sum(check(x) ** 2)


def loop(x: Array) -> Array:
    return jax.lax.scan(lambda carry, _: (check(carry), None), x, length=2)[0]


class Layer(eqx.Module):
    bias: Array

    @ft.jit
    def __call__(self, x: Array) -> Array:
        return check(x) + self.bias


CASES: dict[str, Callable[[Array], Any]] = {
    "jit": ft.jit(check),
    "a method": lambda x: Layer(X)(x),
    "eqx.filter_jit inside": ft.jit(eqx.filter_jit(check)),
    "a loop": ft.jit(loop),
    "a branch": ft.jit(lambda x: jax.lax.cond(x[0] < 0, check, jnp.sin, x)),
    "a recomputation": ft.jit(ft.value_and_grad(jax.checkpoint(square))),
    "vmap": ft.jit(jax.vmap(check)),
    "donated": lambda x: ft.jit(check, donate="x")(ft.copy(x)),
    "compared": ft.jit(check, check_processes=True),
    "compiled": lambda x: ft.jit(check).lower(X).compile()(x),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_error_of_the_call(case: str, caplog: pytest.LogCaptureFixture):
    call = CASES[case]
    call(X)
    for _ in range(2):  # the second call is not traced
        with pytest.raises(
            eqx.EquinoxRuntimeError, match=r"^x is negative\n\nThis check failed in "
        ) as e:
            call(-X)
        assert len(str(e.value)) < 200 and e.value.__suppress_context__
    call(X)
    assert not caplog.records
    assert not logging.getLogger("jax._src.callback").filters


def test_its_message():
    with pytest.raises(eqx.EquinoxRuntimeError) as caught:
        ft.jit(check)(-X)
    assert str(caught.value) == (
        "x is negative\n\nThis check failed in check. Set the environment variable "
        "`EQX_ON_ERROR=breakpoint` to open a debugger at the check."
    )
    # Around it, `eqx.filter_jit` says all of what it says.
    with pytest.raises(eqx.EquinoxRuntimeError, match=r"x is negative(?s:.*)`JAX_DISABLE_JIT=1`"):
        eqx.filter_jit(ft.jit(check))(-X)


def test_other_errors_stay_what_they_are():
    def raises(x: Any) -> Any:
        raise KeyError("of the user")

    def called(x: Array) -> Array:
        kind = jax.ShapeDtypeStruct((4,), "float32")
        return jax.pure_callback(raises, kind, check(x))

    with pytest.raises((RuntimeError, ValueError), match="of the user"):
        jax.block_until_ready(ft.jit(called)(X))


def test_callbacks_of_the_user_are_not_waited_for():
    def pure(x: Array) -> Array:
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((4,), "float32"), x)

    def debug(x: Array) -> Array:
        jax.debug.callback(lambda x: None, x)
        return x

    programs = [jax.make_jaxpr(fun)(X) for fun in (check, loop, pure, debug)]
    assert list(map(has_checks, programs)) == [True, True, False, False]


ON_SEVERAL_DEVICES = """
import os, equinox as eqx, jax, jax.numpy as jnp, functree as ft
x = ft.shard(jnp.ones(8), ft.P("data"), ft.make_mesh(data=8))
zero = lambda x: eqx.error_if(jnp.zeros(()), jnp.any(x < 0), "x is negative")
f = ft.jit(lambda x: x + zero(x))
f(x)
try:
    f(-x)
except eqx.EquinoxRuntimeError as error:
    print(str(error).splitlines()[0], flush=True)
os._exit(0)  # the other devices wait for the first one, and XLA would end the process
"""


@pytest.mark.slow
def test_on_several_devices():
    [(code, out, err)] = ended(started(["-c", ON_SEVERAL_DEVICES]), 30)
    assert (code, out) == (0, "x is negative\n"), err
