"""Programs that compute on a mesh what they compute on one device: no operation of theirs differs.

Each is a function that makes `(fn, args, layouts, mesh)`, as `assert_same_as_unsharded` takes them.
Those with a shard_map take the mesh of the context.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Int

import functree as ft
from tests.lib.meshes import EXPLICIT, MESH
from tests.lib.training import LAYOUTS, batch_spec, loss, make

P = ft.P
Case = tuple[Callable[..., Any], tuple[Any, ...], Any, Any]
SOUND: dict[str, Callable[[], Case]] = {}


def sound(case: Callable[[], Case]) -> Callable[[], Case]:
    SOUND[case.__name__] = case
    return case


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


TOKENS = jax.random.randint(jax.random.key(1), (8, 17), 0, 256)


def gradient(name: str, mesh: Any = MESH, **options: Any) -> Case:
    fun = ft.jit(
        lambda model, tokens: ft.value_and_grad(loss)(model, tokens), rules=LAYOUTS[name], mesh=mesh
    )
    model = make(jax.random.key(0), layers=2, **options)
    return fun, (model, TOKENS), (LAYOUTS[name], batch_spec(name)), mesh


for _name in LAYOUTS:
    SOUND[f"transformer {_name}"] = functools.partial(gradient, _name)
for _remat in ("full", "dots"):
    SOUND[f"transformer, remat {_remat}"] = functools.partial(gradient, "FSDP+TP", remat=_remat)
SOUND["transformer unrolled"] = functools.partial(gradient, "TP", unrolled=True)
SOUND["transformer Explicit"] = functools.partial(gradient, "FSDP", mesh=EXPLICIT)


def config(**options: Any) -> ft.nn.TransformerConfig:
    sizes = {"layers": 2, "heads": 4, "kv_heads": 4, "head_dim": 4, "hidden": 32}
    return ft.nn.TransformerConfig(64, 16, **{**sizes, **options})


def small(layout: str, **options: Any) -> Case:
    model = ft.nn.Transformer.create(config(**options), key=jax.random.key(0))

    def fun(model: Any, tokens: Int[Array, "batch seq"]) -> Any:
        return ft.value_and_grad(ft.nn.cross_entropy)(model, tokens[:, :-1], tokens[:, 1:], chunk=8)

    fun = ft.jit(fun, rules=LAYOUTS[layout], mesh=MESH)
    return fun, (model, TOKENS % 64), (LAYOUTS[layout], batch_spec(layout)), MESH


SOUND["cross entropy TP"] = functools.partial(small, "TP", tie_embedding=True)
SOUND["cross entropy bf16"] = functools.partial(small, "FSDP+TP", compute_dtype=jnp.bfloat16)
SOUND["cross entropy in bf16 alone"] = functools.partial(
    small, "FSDP", compute_dtype=jnp.bfloat16, param_dtype=jnp.bfloat16
)


@sound
def training_step() -> Case:
    layout = LAYOUTS["FSDP+TP"]
    model = ft.nn.Transformer.create(config(), key=jax.random.key(0))
    with jax.numpy_dtype_promotion("standard"):
        state = ft.TrainState.create(model, optax.adam(1e-2))

    def step(state: Any, tokens: Any) -> Any:
        value, grads = ft.value_and_grad(loss)(state.model, tokens)
        with jax.numpy_dtype_promotion("standard"):
            return ft.apply_gradients(state, grads), value

    fun = ft.jit(step, rules=layout, mesh=MESH, donate="state")
    return fun, (state, TOKENS % 64), (layout, P("data")), MESH


@sound
def generate() -> Case:
    model = ft.nn.Transformer.create(config(), key=jax.random.key(0))
    fun = ft.jit(
        lambda model, prompts: ft.nn.generate(model, prompts, 4, stop=7),
        rules=LAYOUTS["TP"],
        mesh=MESH,
    )
    return fun, (model, TOKENS[:, :5] % 64), (LAYOUTS["TP"], P("data")), MESH


@sound
def accumulate() -> Case:
    rules = ft.AxisRules({"batch": "data", "hidden": "model", ...: None})

    def mse(model: ft.nn.MLP, x: Float[Array, "batch embed"]) -> Array:
        return (model(x) ** 2).mean()

    fun = ft.jit(
        lambda model, x: ft.accumulate(ft.value_and_grad(mse), 2)(model, x), rules=rules, mesh=MESH
    )
    return fun, (ft.nn.MLP(8, 16, key=jax.random.key(0)), normal(1, 8, 8)), (rules, P("data")), MESH


# By hand, in shard_maps


def mapped(body: Callable[..., Any], in_specs: Any, out_specs: Any, check_vma: bool = True) -> Any:
    return ft.shard_map(body, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


MLP_SPECS = (P("data"), P(None, "model"), P("model"))
MLP_ARGS = (normal(0, 8, 8), normal(1, 8, 16), normal(2, 16, 8))


def mlp(x: Any, up: Any, down: Any) -> Any:
    y = jnp.tanh(x @ up)
    return lax.psum(y @ down, "model")


def of_mlp(derivative: str, check_vma: bool) -> Case:
    def squares(x: Any, up: Any, down: Any) -> Any:
        return lax.psum((mlp(x, up, down) ** 2).sum(), "data")

    def inside(x: Any, up: Any, down: Any) -> Any:
        return jax.grad(squares, (1, 2))(x, up, down)

    if derivative == "inside":
        return mapped(inside, MLP_SPECS, MLP_SPECS[1:]), MLP_ARGS, MLP_SPECS, MESH
    fun = mapped(mlp, MLP_SPECS, P("data"), check_vma)
    if derivative == "outside":
        inner = fun
        fun = jax.grad(lambda x, up, down: (inner(x, up, down) ** 2).mean(), (0, 1, 2))
    return fun, MLP_ARGS, MLP_SPECS, MESH


for _check in (True, False):
    for _derivative in ("no", "outside"):
        SOUND[f"MLP by hand, {_derivative} gradient, {_check}"] = functools.partial(
            of_mlp, _derivative, _check
        )
SOUND["MLP by hand, gradient inside"] = functools.partial(of_mlp, "inside", True)


@sound
def fsdp_by_hand() -> Case:
    def body(x: Any, w: Any) -> Any:
        w = lax.all_gather(w, "data", axis=1, tiled=True)
        return lax.psum_scatter(x @ w, "model", scatter_dimension=1, tiled=True)

    specs = P("data", "model"), P("model", "data")
    args = normal(0, 8, 8), normal(1, 8, 8)
    return mapped(body, specs, P("data", "model")), args, specs, MESH


@sound
def all_to_all() -> Case:
    def body(x: Any) -> Any:
        y = lax.all_to_all(x, "model", split_axis=1, concat_axis=0, tiled=True)
        y = jnp.cumsum(y, 0)
        return lax.all_to_all(y, "model", split_axis=0, concat_axis=1, tiled=True)

    return mapped(body, P("model"), P("model")), (normal(0, 8, 8),), (P("model"),), MESH


@sound
def ring_of_products() -> Case:
    def body(x: Any, w: Any) -> Any:
        n, me = lax.axis_size("model"), lax.axis_index("model")
        out = jnp.zeros((x.shape[0], w.shape[1]), x.dtype)
        for i in range(n):
            k = w.shape[0]
            part = lax.dynamic_slice_in_dim(x, ((me + i) % n) * k, k, 1)
            out = out + part @ w
            w = lax.ppermute(w, "model", [(j, (j - 1) % n) for j in range(n)])
        return lax.psum(out, "model") / n

    return (
        mapped(body, (P("data"), P("model")), P("data"), False),
        (normal(0, 8, 8), normal(1, 8, 8)),
        (P("data"), P("model")),
        MESH,
    )


@sound
def softmax_by_hand() -> Case:
    def body(x: Any) -> Any:
        m = lax.pmax(x.max(1, keepdims=True), "model")
        e = jnp.exp(x - m)
        return e / lax.psum(e.sum(1, keepdims=True), "model")

    return (
        mapped(body, P("data", "model"), P("data", "model")),
        (normal(0, 8, 16),),
        (P("data", "model"),),
        MESH,
    )


def vocab_loss(logits: Any, labels: Any) -> Any:
    size = logits.shape[1]
    start = lax.axis_index("model") * size
    m = lax.stop_gradient(lax.pmax(lax.stop_gradient(logits).max(1), "model"))
    total = lax.psum(jnp.exp(logits - m[:, None]).sum(1), "model")
    local = labels - start
    mine = (local >= 0) & (local < size)
    picked = jnp.take_along_axis(logits, jnp.clip(local, 0, size - 1)[:, None], 1)[:, 0]
    picked = lax.psum(jnp.where(mine, picked, 0.0), "model")
    return lax.pmean((jnp.log(total) + m - picked).mean(), "data")


@sound
def vocabulary_by_hand() -> Case:
    specs = P("data", "model"), P("data")
    return mapped(vocab_loss, specs, P()), (normal(0, 8, 16), TOKENS[:, 0] % 16), specs, MESH


@sound
def gradient_of_vocabulary() -> Case:
    specs = P("data", "model"), P("data")
    return (
        jax.value_and_grad(mapped(vocab_loss, specs, P())),
        (normal(0, 8, 16), TOKENS[:, 0] % 16),
        specs,
        MESH,
    )


@sound
def scan_in_a_shard_map() -> Case:
    def body(x: Any, ws: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            y = lax.psum_scatter(x @ w, "model", scatter_dimension=1, tiled=True)
            return jnp.tanh(y), (y**2).sum()

        x, sums = lax.scan(layer, x, ws)
        return x, lax.psum(sums, ("data", "model"))

    specs = P("data", "model"), P(None, "model")
    return (
        mapped(body, specs, (P("data", "model"), P())),
        (normal(0, 8, 8), normal(1, 3, 8, 8)),
        specs,
        MESH,
    )


@sound
def shard_map_in_a_scan() -> Case:
    def fun(x: Any, ups: Any, downs: Any) -> Any:
        def layer(x: Any, ws: Any) -> Any:
            y = mapped(mlp, (P("data"), P(None, "model"), P("model")), P("data"))(x, *ws)
            return x + jnp.sin(y), y.mean()

        return jax.checkpoint(lambda x: lax.scan(layer, x, (ups, downs)))(x)

    args = normal(0, 8, 8), normal(1, 3, 8, 16), normal(2, 3, 16, 8)
    layouts = P("data"), P(None, None, "model"), P(None, "model")
    return (
        jax.grad(lambda x, ups, downs: fun(x, ups, downs)[0].sum(), (0, 1, 2)),
        args,
        layouts,
        MESH,
    )


@sound
def conditional_by_device() -> Case:
    def body(x: Any) -> Any:
        first = lax.axis_index("model") == 0
        y = lax.cond(first, lambda x: x * 1.0, lambda x: x * 0.0, x)
        return lax.psum(y, "model")

    return mapped(body, P("data"), P("data"), False), (normal(0, 8, 8),), (P("data"),), MESH


@sound
def partly_manual() -> Case:
    def fun(x: Any, w: Any) -> Any:
        body = lambda x, w: lax.psum(jnp.sin(x @ w).sum(0), "data")  # noqa: E731
        return jax.shard_map(body, in_specs=(P("data"), P()), out_specs=P(), axis_names={"data"})(
            x, w
        )

    return fun, (normal(0, 8, 8), normal(1, 8, 8)), (P("data"), P(None, "model")), MESH


# In jax.numpy alone


@sound
def newton() -> Case:
    def fun(x: Any) -> Any:
        def more(state: Any) -> Any:
            return (jnp.abs(state[0] ** 2 - x).max() > 1e-3) & (state[1] < 30)

        root, count = lax.while_loop(more, lambda s: ((s[0] + x / s[0]) / 2, s[1] + 1), (x, 0))
        return root.mean(), count

    return fun, (jnp.abs(normal(0, 8, 8)) + 1,), (P("data", "model"),), MESH


@sound
def convolutions() -> Case:
    class Net(eqx.Module):
        first: eqx.nn.Conv2d
        second: eqx.nn.Conv2d

        def __call__(self, x: Any) -> Any:
            return jax.nn.relu(self.second(jax.nn.relu(self.first(x)))).mean((1, 2))

    keys = jax.random.split(jax.random.key(0))
    net = Net(eqx.nn.Conv2d(3, 8, 3, key=keys[0]), eqx.nn.Conv2d(8, 4, 3, key=keys[1]))

    def mse(net: Any, x: Any) -> Any:
        return (jax.vmap(net)(x) ** 2).mean()

    return (
        lambda net, x: ft.value_and_grad(mse)(net, x),
        (net, normal(1, 8, 3, 12, 12)),
        (P(), P("data")),
        MESH,
    )


@sound
def integers() -> Case:
    def fun(x: Any) -> Any:
        order = jnp.argsort(x[:, 0])
        return jnp.cumsum(x[order], 1), jnp.bincount(x.reshape(-1), length=256), x.argmax(1)

    return fun, (TOKENS[:, :16],), (P("data", "model"),), MESH


@sound
def dropout() -> Case:
    def fun(x: Any, key: Any) -> Any:
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.where(keep, x / 0.5, 0.0) @ x.T

    return fun, (normal(0, 8, 8), jax.random.key(3)), (P("data", "model"), P()), MESH


@sound
def decompositions() -> Case:
    def fun(x: Any) -> Any:
        a = x @ x.T + 8 * jnp.eye(8)
        factor = jnp.linalg.cholesky(a)
        return jax.scipy.linalg.solve_triangular(factor, x, lower=True), jnp.linalg.eigvalsh(a)

    return fun, (normal(0, 8, 8),), (P("data"),), MESH


@sound
def cancelling_sums() -> Case:
    def fun(x: Any) -> Any:
        centred = x - x.mean(1, keepdims=True)
        rest = centred.sum(1)  # rounding and nothing else
        return rest / jnp.sqrt((centred**2).sum(1)), jax.nn.softmax(x, 1).sum(1) - 1

    return fun, (normal(0, 8, 64),), (P("data", "model"),), MESH


@sound
def masks() -> Case:
    def fun(x: Any) -> Any:
        allowed = jnp.tri(8, dtype=bool)
        low = jnp.where(allowed, x, jnp.finfo(x.dtype).min)
        gone = jnp.where(allowed, x, -jnp.inf)
        return jax.nn.softmax(low, 1), jax.nn.softmax(gone, 1), jax.nn.logsumexp(gone, 0)

    return fun, (normal(0, 8, 8),), (P("data", "model"),), MESH


@sound
def spectrum() -> Case:
    def fun(x: Any) -> Any:
        y = jnp.fft.fft(x.astype(jnp.complex64), axis=1)
        return jnp.abs(y) ** 2, jnp.real(jnp.fft.ifft(y * jnp.conj(y), axis=1))

    return fun, (normal(0, 8, 16),), (P("data"),), MESH


@sound
def experts() -> Case:
    def fun(x: Any, gate: Any, w: Any) -> Any:
        scores = jax.nn.softmax(x @ gate, 1)
        best, which = lax.top_k(scores, 2)
        chosen = jax.nn.one_hot(which, 4) * best[..., None]
        return jnp.einsum("tke,te...->t...", chosen, jnp.einsum("td,edh->teh", x, w))

    return (
        fun,
        (normal(0, 16, 8), normal(1, 8, 4), normal(2, 4, 8, 8)),
        (P("data"), P(), P("model")),
        MESH,
    )


@sound
def half_precision() -> Case:
    def fun(x: Any, w: Any) -> Any:
        y = jax.nn.gelu(x @ w)
        return (y @ w.T).astype(jnp.float32).mean(), y

    args = normal(0, 8, 64, dtype=jnp.bfloat16), normal(1, 64, 64, dtype=jnp.bfloat16)
    return fun, args, (P("data", "model"), P("model")), MESH


@sound
def recurrence() -> Case:
    cell = eqx.nn.GRUCell(8, 8, key=jax.random.key(0))

    def fun(cell: Any, xs: Any) -> Any:
        def one(xs: Any) -> Any:
            return lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(8), xs)[0]

        return jax.vmap(one)(xs).sum()

    return (
        lambda cell, xs: ft.grad(fun)(cell, xs),
        (cell, normal(1, 8, 5, 8)),
        (P(), P("data")),
        MESH,
    )


@sound
def adafactor() -> Case:
    rules = ft.AxisRules({"batch": "data", "hidden": "model", ...: None})
    model = ft.nn.MLP(8, 16, key=jax.random.key(0))
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=4)

    def fun(model: Any, x: Float[Array, "batch embed"]) -> Any:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            grads = ft.grad(lambda model, x: (model(x) ** 2).mean())(model, x)
            return optax.apply_updates(model, tx.update(grads, tx.init(model), model)[0])

    return fun, (model, normal(1, 8, 8)), rules, MESH


@sound
def segments() -> Case:
    def fun(x: Any, which: Any) -> Any:
        sums = jax.ops.segment_sum(x, which, 4)
        return sums / jnp.bincount(which, length=4)[:, None].astype(x.dtype), x.at[which].max(0.5)

    return (
        fun,
        (normal(0, 16, 8), TOKENS.reshape(-1)[:16] % 4),
        (P("data", "model"), P("data")),
        MESH,
    )


@sound
def running_statistics() -> Case:
    def fun(x: Any, mean: Any) -> Any:
        now, var = x.mean(0), x.var(0)
        y = (x - now[None]) / jnp.sqrt(var[None] + 1e-5)
        return y, 0.9 * mean + 0.1 * now, jnp.quantile(x, 0.5, axis=0)

    return fun, (normal(0, 16, 8), jnp.zeros(8)), (P("data", "model"), P("model")), MESH


@sound
def linear_attention() -> Case:
    def fun(q: Any, k: Any, v: Any) -> Any:
        def one(state: Any, qkv: Any) -> Any:
            q, k, v = qkv
            state = state + k[:, :, None] * v[:, None]
            return state, jnp.einsum("bd,bde->be", q, state)

        return lax.scan(one, jnp.zeros((8, 4, 4)), (q, k, v))[1]

    args = normal(0, 6, 8, 4), normal(1, 6, 8, 4), normal(2, 6, 8, 4)
    grads = jax.grad(lambda q, k, v: (fun(q, k, v) ** 2).sum(), (0, 1, 2))
    return grads, args, (P(None, "data"), P(None, "data"), P(None, "data")), MESH


@sound
def nested_shard_maps() -> Case:
    def inner(y: Any) -> Any:
        return lax.psum(y.sum(0, keepdims=True), "model")

    def outer(y: Any) -> Any:
        z = jax.shard_map(inner, in_specs=P("model"), out_specs=P(), axis_names={"model"})(y)
        return lax.psum(z, "data")

    def fun(x: Any) -> Any:
        return jax.shard_map(outer, in_specs=P("data"), out_specs=P(), axis_names={"data"})(x)

    return fun, (normal(0, 8, 8),), (P("data"),), MESH


@sound
def effects() -> Case:
    def fun(x: Any) -> Any:
        sums = jax.new_ref(jnp.zeros(8))

        def add(i: Any, none: Any) -> Any:
            sums[...] = sums[...] + x[i]
            return none

        lax.fori_loop(0, 4, add, None)
        x = eqx.error_if(x, (x > 1e9).any(), "too large")
        return sums[...], jax.vmap(lambda row: lax.cond(row[0] > 0, jnp.sin, jnp.cos, row))(x)

    return fun, (normal(0, 8, 8),), (P("data"),), MESH
