"""Programs in which one result has an unlucky layout."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import functree as ft
from tests.why.arrays import floats, laid, shapes
from tests.why.mistake import Made, mistake


@mistake(
    "recurrence: a gradient unlike its weight",
    wrong=ft.P("model", None),
    right=ft.P(None, "model"),
    edit="result",
    named="1.inwards",
)
def recurrence(mesh: Mesh, inwards: ft.P) -> Made:
    """The gradients of a linear recurrence whose states decay, each at its own rate.

    The gradient of the first weight is returned sharded over its rows, and the weight is
    sharded over its columns, so 1 MiB of gradient is relaid.
    """

    def loss(params, x, y):
        driven = jnp.swapaxes(x @ params["inwards"], 0, 1)
        decay = jax.nn.sigmoid(params["decay"])[None]

        def tick(state, drive):
            state = decay * state + drive
            return state, state

        _, states = jax.lax.scan(tick, jnp.zeros_like(driven[0]), driven)
        read = jax.nn.gelu(states) @ params["outwards"]
        return jnp.mean((jnp.swapaxes(read, 0, 1) - y) ** 2)

    def gradients(params, x, y):
        return jax.value_and_grad(loss)(params, x, y)

    params = shapes(inwards=(256, 1024), decay=(1024,), outwards=(1024, 256))
    specs = {
        "inwards": ft.P(None, "model"),
        "decay": ft.P("model"),
        "outwards": ft.P("model", None),
    }
    x = floats(64, 16, 256)
    series = ft.P("data", None, None)
    layouts = laid((specs, series, series), (ft.P(), {**specs, "inwards": inwards}))
    return gradients, (params, x, x), layouts


@mistake(
    "transcriber: logits replicated",
    wrong=ft.P(None, None, None),
    right=ft.P("data", None, "model"),
    edit="result",
    named="logits",
)
def transcriber(mesh: Mesh, logits: ft.P) -> Made:
    """A convolution over the spectra of a recording, and logits for each of its frames.

    The logits are returned replicated, which nobody needs: all 8 MiB of them are gathered.
    """

    def transcribe(params, spectra):
        h = jax.lax.conv_general_dilated(
            spectra,
            params["kernel"],
            window_strides=(2,),
            padding="SAME",
            dimension_numbers=("NWC", "WIO", "NWC"),
        )
        h = jax.nn.gelu(h)
        frames = h @ params["frames"]
        return {"logits": frames @ params["tokens"], "loudness": spectra.mean((1, 2))}

    params = shapes(kernel=(5, 64, 256), frames=(256, 128), tokens=(128, 1024))
    specs = {
        "kernel": ft.P(None, None, "model"),
        "frames": ft.P("model", None),
        "tokens": ft.P(None, "model"),
    }
    spectra = floats(64, 64, 64)
    layouts = laid((specs, ft.P("data", None, None)), {"logits": logits, "loudness": ft.P("data")})
    return transcribe, (params, spectra), layouts
