"""distreqx: distributions and bijectors as arguments, results and parameters."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from distreqx import bijectors, distributions
from jax import Array

import functree as ft
from tests.lib.meshes import assert_lies
from tests.libraries.alike import assert_parts, jit_alike, train_alike


def mixture() -> Any:
    components = eqx.filter_vmap(distributions.Normal)(jnp.arange(3.0), jnp.ones(3))
    weights = distributions.Categorical(logits=jnp.array([0.1, 0.2, 0.3]))
    return distributions.MixtureSameFamily(weights, components)


def transformed() -> Any:
    chain = bijectors.Chain([bijectors.Tanh(), bijectors.ScalarAffine(jnp.array(0.1))])
    return distributions.Transformed(distributions.Normal(jnp.zeros(()), jnp.ones(())), chain)


def all_distributions() -> dict[str, Any]:
    lower = jnp.array([[1.0, 0.0], [0.5, 2.0]])
    normal = distributions.Normal(jnp.zeros(3), jnp.ones(3))
    return {
        "categorical": distributions.Categorical(logits=jnp.arange(4.0)),
        "independent": distributions.Independent(normal),
        "mixture": mixture(),
        "multivariate": distributions.MultivariateNormalTri(jnp.zeros(2), lower),
        "normal": normal,
        "transformed": transformed(),
    }


def log_prob(found: dict[str, Any], key: Array) -> tuple[Array, dict[str, Any]]:
    """The sum of that of a sample of each, and the samples."""
    samples = {name: one.sample(key) for name, one in found.items()}
    samples = jax.lax.stop_gradient(samples)
    total = sum(jnp.sum(found[name].log_prob(x)) for name, x in samples.items())
    return jnp.asarray(total), samples


def test_distributions_are_arguments_results_and_parameters():
    found = all_distributions()
    assert_parts(found)
    jit_alike(
        lambda found, key: (found, ft.value_and_grad(log_prob, has_aux=True)(found, key)),
        found,
        jax.random.key(1),
        plain=lambda found, key: (
            found,
            eqx.filter_value_and_grad(log_prob, has_aux=True)(found, key),
        ),
    )


def test_a_distribution_is_fitted_sharded():
    layout = ft.StateSharding({"**.loc": ft.P("model"), "**.scale": ft.P("model"), ...: ft.P()})

    def loss(distribution: Any, x: Array) -> Array:
        return -distribution.log_prob(x).sum()

    start = distributions.Normal(jnp.zeros(8), jnp.ones(8))
    ts = train_alike(start, loss, optax.sgd(0.1), jnp.ones(8), layout, spec=ft.P("model"))
    assert_lies(ts.model.loc, "model")
