"""Programs as others write them, and which names a ledger may give to what each moves.

Nothing here is of functree: the programs are plain JAX, and the names are tables, written by hand.

A dimension has a letter, and each capital letter an odd prime number, times a power of two. Meshes
have powers of two of devices. So the odd part of the bytes of an array tells which dimensions it
has, however it is sharded, and whatever its dtype: `DH` in a table is each array of 3 × 5, which no
other letters make.

A key of a table is such letters (`1` if there are none, `*` for any), and before them what else has
to fit: a phase, a kind, and `@tag`, the end of the line of source that the collective is of. A value
is the names that are allowed there, all keys that fit together; what no key fits may have no name. What
is made of data and of a parameter may be named by both, but by the data alone (`+x`) it may not.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

SIZES = {
    "D": 3 * 128, "H": 5 * 128, "O": 7 * 128, "B": 11 * 128, "K": 13 * 128,
    "V": 19 * 128, "e": 32, "r": 8, "l": 4, "i": 16,
}  # fmt: skip
PRIMES = {"D": 3, "H": 5, "O": 7, "B": 11, "K": 13, "V": 19}
DTYPES = {"": "float32", "i:": "int32", "q:": "int8", "k:": "uint32"}

MESHES = {
    "dp": {"data": 8},
    "fsdp": {"data": 8},
    "tp": {"data": 2, "model": 4},
    "both": {"data": 2, "model": 4},
}
"""The mesh of each layout."""


class Audited(NamedTuple):
    """A program, how it is called, and what it may be told.

    Attributes:
        name: its name.
        fun: the function.
        args: its arguments, each array as its letters, with a dtype before them if it is no float.
        layouts: the layouts that it is compiled under.
        names: the table, as the module says.
        by_argument: the layout of single arguments, instead.
        jit: what jits it.
        donate: whether its first argument is donated.
    """

    name: str
    fun: Callable[..., Any]
    args: Mapping[str, Any]
    layouts: tuple[str, ...]
    names: Mapping[str, str]
    by_argument: Mapping[str, str]
    jit: Callable[..., Any]
    donate: bool


PROGRAMS: dict[str, Audited] = {}


def program(
    layouts: str,
    args: Mapping[str, Any],
    names: Mapping[str, str],
    by_argument: Mapping[str, str] = {},
    jit: Callable[..., Any] = jax.jit,
    donate: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a function to the programs."""

    def add(fun: Callable[..., Any]) -> Callable[..., Any]:
        one = Audited(
            fun.__name__, fun, args, tuple(layouts.split()), names, by_argument, jit, donate
        )
        PROGRAMS[fun.__name__] = one
        return fun

    return add


def spec_of(shape: tuple[int, ...], layout: str) -> P:
    """How an array is sharded: by its dimensions alone."""
    primes = [odd_part(size) for size in shape]
    entries: list[Any] = [None] * len(shape)
    if 11 in primes:
        entries[primes.index(11)] = "data"
        return P(*entries)
    if layout in ("tp", "both"):
        for i, (size, prime) in enumerate(zip(shape, primes, strict=True)):
            if prime in (5, 13, 19) or size == SIZES["e"]:
                entries[i] = "model"
                break
    if layout in ("fsdp", "both"):
        for i, (size, prime) in enumerate(zip(shape, primes, strict=True)):
            if entries[i] is None and (prime > 1 or size == SIZES["e"]):
                entries[i] = "data"
                break
    return P(*entries)


def abstract(args: Any) -> Any:
    """Arguments of which each array is its letters ─► abstract arrays."""
    return jax.tree.map(_array, args, is_leaf=lambda x: isinstance(x, str))


def _array(letters: Any) -> Any:
    if not isinstance(letters, str):
        return letters
    dtype = letters[:2] if letters[1:2] == ":" else ""
    shape = tuple(SIZES[letter] for letter in letters[len(dtype) :])
    return jax.ShapeDtypeStruct(shape, DTYPES[dtype])


def allowed(
    names: Mapping[str, str], *, kind: str, phase: str | None, size: int, tag: str
) -> set[str]:
    """The names that a table allows for what is moved."""
    found: set[str] = set()
    for key, value in names.items():
        *conditions, letters = key.split()
        wanted = 1 if letters == "1" else math.prod(PRIMES.get(one, 1) for one in letters)
        fits = letters == "*" or wanted == odd_part(size)
        for one in conditions:
            if one.startswith("@"):
                fits &= tag in (one[1:], "")
            elif "-" in one:
                fits &= kind == one
            else:
                fits &= phase in (one, None)
        if fits:
            found.update(value.split())
    return found


def is_wrong(names: frozenset[str], fitting: frozenset[str]) -> bool:
    """Whether names are not allowed. Those behind a `+` are so only beside another one."""
    alone = {one for one in fitting if not one.startswith("+")}
    beside = {one[1:] for one in fitting - alone}
    return not names <= alone | beside or bool(names and not names & alone)


def odd_part(number: int) -> int:
    """A number without its factors of two."""
    while number and number % 2 == 0:
        number //= 2
    return number


# Models that several programs have


def mlp(name: str) -> dict[str, str]:
    """The table of a model of two layers. An activation may be named by the layer that makes it of
    parts, or for which it is gathered."""
    return {
        "DH": f"{name}.w1", "H": f"{name}.b1", "HO": f"{name}.w2", "O": f"{name}.b2",
        "BD": f"{name}.w1 x", "BH": f"{name}.w1 {name}.w2", "BO": f"{name}.w2",
    }  # fmt: skip


MLP = {"w1": "DH", "b1": "H", "w2": "HO", "b2": "O"}


def forward(p: Any, x: Any) -> Any:
    return jax.nn.relu(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]


def loss_of(p: Any, x: Any, y: Any) -> Any:
    return ((forward(p, x) - y) ** 2).mean()


def sgd(p: Any, g: Any, rate: float = 0.1) -> Any:
    return jax.tree.map(lambda p, g: p - rate * g, p, g)


# Two arguments of like structure

DQN = {
    "@online DH": "online.w1", "@online H": "online.b1", "@online HO": "online.w2",
    "@online O": "online.b2", "@online BH": "online.w1 online.w2", "@online BO": "online.w2",
    "@online BD": "online.w1 s",
    "@target DH": "target.w1", "@target H": "target.b1", "@target HO": "target.w2",
    "@target O": "target.b2", "@target BH": "target.w1 target.w2", "@target BO": "target.w2",
    "@target BD": "target.w1 s2",
}  # fmt: skip
DQN_ARGS = {"online": MLP, "target": MLP, "s": "BD", "s2": "BD", "a": "i:B", "r": "B"}


def td_loss(online: Any, target: Any, s: Any, s2: Any, a: Any, r: Any) -> Any:
    hidden = jax.nn.relu(s @ online["w1"] + online["b1"])  # @online
    q = hidden @ online["w2"] + online["b2"]  # @online
    hidden2 = jax.nn.relu(s2 @ target["w1"] + target["b1"])  # @target
    q2 = hidden2 @ target["w2"] + target["b2"]  # @target
    chosen = (q * jax.nn.one_hot(a, q.shape[1])).sum(1)
    return ((chosen - r - 0.99 * q2.max(1)) ** 2).mean()


@program("dp fsdp tp both", DQN_ARGS, DQN)
def dqn_frozen(online, target, s, s2, a, r):
    value, g = jax.value_and_grad(td_loss)(online, target, s, s2, a, r)
    return sgd(online, g), value


@program("dp fsdp both", {"target": MLP, **DQN_ARGS}, DQN)
def dqn_gradient_only(target, online, s, s2, a, r):
    return jax.grad(td_loss)(online, target, s, s2, a, r)


@program("dp fsdp tp", {"target": MLP, **DQN_ARGS}, DQN)
def dqn_soft_update(target, online, s, s2, a, r):
    g = jax.grad(td_loss)(online, target, s, s2, a, r)
    new = sgd(online, g)
    return new, jax.tree.map(lambda t, o: 0.99 * t + 0.01 * o, target, new)


TOWERS = {
    "@user DO": "user.w", "@item DO": "item.w", "@user BO": "user.w", "@item BO": "item.w",
    "@user O": "user.b", "@item O": "item.b", "@user BD": "user.w xu", "@item BD": "item.w xi",
    "@features forward BO": "user.w user.b item.w item.b +xu +xi",
    "@item forward BO": "item.w item.b +xi",
}  # fmt: skip
TOWER = {"w": "DO", "b": "O"}


def towers_loss(user, item, xu, xi):
    u = jnp.tanh(xu @ user["w"] + user["b"])  # @user
    v = jnp.tanh(xi @ item["w"] + item["b"])  # @item
    logits = u @ v.T  # @features
    return -jax.nn.log_softmax(logits).trace() / len(logits)


@program("dp fsdp", {"user": TOWER, "item": TOWER, "xu": "BD", "xi": "BD"}, TOWERS)
def two_towers_gradients(user, item, xu, xi):
    return jax.value_and_grad(towers_loss, (0, 1))(user, item, xu, xi)


GAN = {
    "@gen DH": "gen.w1", "@gen HD": "gen.w1 gen.w2", "@disc DH": "disc.w1 disc.w2",
    "@gen BH": "gen.w1 gen.w2", "@disc BH": "disc.w1 disc.w2", "@gen BD": "gen.w1 gen.w2 z",
    "@disc BD": "disc.w1 disc.w2 real", "@disc backward H": "disc.w2",
}  # fmt: skip
GAN_ARGS = {
    "gen": {"w1": "DH", "w2": "HD"}, "disc": {"w1": "DH", "w2": "HD"}, "z": "BD", "real": "BD",
}  # fmt: skip


def generate(gen, z):
    return jnp.tanh(jax.nn.relu(z @ gen["w1"]) @ gen["w2"])  # @gen


def judge(disc, x):
    return (jax.nn.relu(x @ disc["w1"]) @ disc["w2"]).mean(1)  # @disc


def disc_loss(disc, gen, z, real):
    return (jax.nn.softplus(judge(disc, generate(gen, z))) - judge(disc, real)).mean()


def gen_loss(gen, disc, z):
    return -judge(disc, generate(gen, z)).mean()


@program("dp fsdp tp", GAN_ARGS, GAN)
def gan_both(gen, disc, z, real):
    new = sgd(disc, jax.grad(disc_loss)(disc, gen, z, real))
    return sgd(gen, jax.grad(gen_loss)(gen, new, z)), new


@program(
    "dp fsdp tp",
    {"enc": {"w1": "DH", "w2": "HO"}, "dec": {"w1": "OH", "w2": "HD"}, "x": "BD", "noise": "BO"},
    {
        "@enc DH": "enc.w1", "@enc HO": "enc.w2", "@dec HO": "dec.w1", "@dec DH": "dec.w2",
        "@enc BH": "enc.w1 enc.w2", "@dec BH": "dec.w1 dec.w2", "@enc BO": "enc.w2",
        "@dec BO": "dec.w1", "@enc BD": "x enc.w1", "@dec BD": "dec.w2",
    },
)  # fmt: skip
def autoencoder(enc, dec, x, noise):
    def loss(both):
        enc, dec = both
        z = jax.nn.relu(x @ enc["w1"]) @ enc["w2"]  # @enc
        z = z + noise
        out = jax.nn.relu(z @ dec["w1"]) @ dec["w2"]  # @dec
        return ((out - x) ** 2).mean()

    return jax.grad(loss)((enc, dec))


# Index-only paths

LIST = {
    "@0 DD": "ps.0", "@1 DD": "ps.1", "@2 DD": "ps.2", "@0 BD": "ps.0 x", "@1 BD": "ps.1",
    "@2 BD": "ps.2", "DDD": "",
}  # fmt: skip


def list_loss(ps, x):
    h = jnp.tanh(x @ ps[0])  # @0
    h = jnp.sin(h @ ps[1])  # @1
    return (jnp.cos(h @ ps[2]) ** 2).mean()  # @2


@program("dp fsdp", {"ms": ["DD"] * 3, "ps": ["DD"] * 3, "x": "BD"}, LIST)
def lists_of_moments(ms, ps, x):
    g = jax.grad(list_loss)(ps, x)
    ms = jax.tree.map(lambda m, g: 0.9 * m + g, ms, g)
    return ms, sgd(ps, ms)


@program(
    "dp fsdp tp",
    {"state": [["DH", "HO"], ["DH", "HO"]], "x": "BD", "y": "BO"},
    {"DH": "state.0.0", "HO": "state.0.1", "BD": "x state.0.0", "BH": "state.0.0 state.0.1",
     "BO": "state.0.1"},
)  # fmt: skip
def nested_lists(state, x, y):
    ps, ms = state
    g = jax.grad(lambda ps: ((jax.nn.relu(x @ ps[0]) @ ps[1] - y) ** 2).mean())(ps)
    ms = jax.tree.map(lambda m, g: 0.9 * m + g, ms, g)
    return [sgd(ps, ms), ms]


# Gradients within gradients


@program("dp fsdp tp both", {"p": MLP, "x": "BD", "y": "BO"}, mlp("p"))
def sam(p, x, y):
    g = jax.grad(loss_of)(p, x, y)
    norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(g)))
    near = jax.tree.map(lambda p, g: p + 0.05 * g / norm, p, g)
    return sgd(p, jax.grad(loss_of)(near, x, y))


@program("dp fsdp tp", {"p": MLP, "x": "BD", "y": "BO", "x2": "BD", "y2": "BO"},
         {**mlp("p"), "BD": "p.w1 x x2"})  # fmt: skip
def maml(p, x, y, x2, y2):
    def outer(p):
        return loss_of(sgd(p, jax.grad(loss_of)(p, x, y)), x2, y2)

    value, g = jax.value_and_grad(outer)(p)
    return sgd(p, g), value


# Weights that are computed


@program("dp fsdp tp", {"base": {"w1": "DH"}, "lora": {"a1": "Dr", "b1": "rH"}, "x": "BD"},
         {"DH": "base.w1 lora.a1 lora.b1", "D": "lora.a1", "H": "lora.b1",
          "BD": "x base.w1", "BH": "base.w1 lora.a1 lora.b1"})  # fmt: skip
def lora_merged(base, lora, x):
    def loss(lora):
        return (jnp.tanh(x @ (base["w1"] + lora["a1"] @ lora["b1"])) ** 2).mean()

    return sgd(lora, jax.grad(loss)(lora))


QUANTIZED = {
    "DH": "p.q1 p.s1", "H": "p.s1", "HO": "p.q2 p.s2", "O": "p.s2", "BD": "x p.q1 p.s1",
    "BH": "p.q1 p.s1 p.q2 p.s2", "BO": "p.q2 p.s2",
}  # fmt: skip


@program("fsdp tp both", {"p": {"q1": "q:DH", "s1": "H", "q2": "q:HO", "s2": "O"}, "x": "BD"},
         QUANTIZED)  # fmt: skip
def quantized(p, x):
    h = jax.nn.relu(x @ (p["q1"].astype("float32") * p["s1"]))
    return h @ (p["q2"].astype("float32") * p["s2"])


# Optimizers and accumulators


@program("dp fsdp both", {"p": MLP, "acc": MLP, "x": "BD", "y": "BO"}, mlp("p"))
def accumulated_gradient(p, acc, x, y):
    return jax.tree.map(jnp.add, acc, jax.grad(loss_of)(p, x, y))


@program("dp fsdp", {"acc": MLP, "p": MLP, "x": "BD", "y": "BO"}, mlp("p"))
def accumulator_first(acc, p, x, y):
    value, g = jax.value_and_grad(loss_of)(p, x, y)
    return {"acc": jax.tree.map(jnp.add, acc, g), "loss": value}


ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
FLAX = {
    "DH": "params.Dense_0.kernel", "H": "params.Dense_0.bias", "HO": "params.Dense_1.kernel",
    "O": "params.Dense_1.bias", "BD": "x params.Dense_0.kernel",
    "BH": "params.Dense_0.kernel params.Dense_1.kernel", "BO": "params.Dense_1.kernel",
}  # fmt: skip
DENSE = {
    "Dense_0": {"kernel": "DH", "bias": "H"},
    "Dense_1": {"kernel": "HO", "bias": "O"},
}


def dense(params, x):
    h = jax.nn.relu(x @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"])
    return h @ params["Dense_1"]["kernel"] + params["Dense_1"]["bias"]


@program(
    "dp fsdp tp both",
    {"params": DENSE, "opt": jax.eval_shape(ADAM.init, abstract(DENSE)), "x": "BD", "y": "BO"},
    FLAX,
)
def linen_like(params, opt, x, y):
    value, g = jax.value_and_grad(lambda p: ((dense(p, x) - y) ** 2).mean())(params)
    updates, opt = ADAM.update(g, opt, params)
    return optax.apply_updates(params, updates), opt, value


@program(
    "fsdp",
    {"p": MLP, "mu": MLP, "nu": MLP, "x": "BD", "y": "BO"},
    {**mlp("p")},
    by_argument={"p": "dp"},
)
def zero_one(p, mu, nu, x, y):
    g = jax.grad(loss_of)(p, x, y)
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mu, g)
    nu = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, nu, g)
    return {
        "p": jax.tree.map(lambda p, m, v: p - m / (jnp.sqrt(v) + 1e-8), p, mu, nu),
        "mu": mu,
        "nu": nu,
    }


@program(
    "dp fsdp tp",
    {"p": {"w1": "DH", "w2": "HO"}, "left": {"w1": "DD", "w2": "HH"},
     "right": {"w1": "HH", "w2": "OO"}, "x": "BD", "y": "BO"},
    {"DH": "p.w1", "HO": "p.w2", "BD": "x p.w1", "BH": "p.w1 p.w2", "BO": "p.w2",
     "update DD": "p.w1 left.w1", "update HH": "p.w2 left.w2 p.w1 right.w1",
     "update OO": "p.w2 right.w2", "update DH": "p.w1 left.w1 right.w1",
     "update HO": "p.w2 left.w2 right.w2"},
)  # fmt: skip
def shampoo(p, left, right, x, y):
    g = jax.grad(lambda p: ((jax.nn.relu(x @ p["w1"]) @ p["w2"] - y) ** 2).mean())(p)
    left = jax.tree.map(lambda l, g: l + g @ g.T, left, g)
    right = jax.tree.map(lambda r, g: r + g.T @ g, right, g)
    new = jax.tree.map(lambda p, l, r, g: p - l @ g @ r, p, left, right, g)
    return new, left, right


@program("dp fsdp tp", {"p": MLP, "m": MLP, "x": "BD", "y": "BO"}, mlp("p"), donate=True)
def lion_donated(p, m, x, y):
    g = jax.grad(loss_of)(p, x, y)
    new = jax.tree.map(lambda p, m, g: p - 0.1 * jnp.sign(0.9 * m + 0.1 * g), p, m, g)
    return new, jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g, m, g)


@program("dp fsdp", {"p": MLP, "x": "BD", "y": "BO"},
         {**mlp("p"), "1": "p.w1 p.b1 p.w2 p.b2"})  # fmt: skip
def norms_of_layers(p, x, y):
    g = jax.grad(loss_of)(p, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g * jnp.linalg.norm(p) / jnp.linalg.norm(g), p, g)


@program("dp", {"p": MLP, "x": "BD", "y": "BO", "key": "k:"}, mlp("p"))
def random_search(p, x, y, key):
    def body(best, i):
        near = jax.tree.map(lambda p: p + jnp.sin(i.astype("float32")) * 0.1, best)
        better = loss_of(near, x, y) < loss_of(best, x, y)
        return jax.tree.map(lambda a, b: jnp.where(better, a, b), near, best), None

    return lax.scan(body, p, jnp.arange(4))[0]


# Models


@program("dp fsdp tp both", {"layers": {"w": "lDD", "b": "lD"}, "x": "BD"},
         {"DD": "layers.w", "D": "layers.b", "BD": "layers.w x"})  # fmt: skip
def scanned_layers(layers, x):
    def loss(layers):
        def body(x, layer):
            return jnp.tanh(x @ layer["w"] + layer["b"]), None

        return (lax.scan(jax.checkpoint(body), x, layers)[0] ** 2).mean()

    return sgd(layers, jax.grad(loss)(layers))


@program("fsdp tp", {"w": "DD", "b": "D", "x": "BD"},
         {"DD": "w", "D": "b", "BD": "w x"})  # fmt: skip
def until_small(w, b, x):
    return lax.while_loop(lambda x: (x**2).sum() > 1, lambda x: jnp.tanh(jnp.sin(x) @ w + b), x)


@program("dp fsdp tp", {"a": {"w": "DD"}, "b": {"w": "DD"}, "x": "BD", "flag": ""},
         {"@a DD": "a.w", "@b DD": "b.w", "@- all-gather DD": "a.w b.w", "@a BD": "a.w x", "@b BD": "b.w x"})  # fmt: skip
def branches(a, b, x, flag):
    def loss(both):
        left = lambda x: jnp.tanh(x @ both[0]["w"])  # noqa: E731 # @a
        right = lambda x: jnp.sin(x @ both[1]["w"])  # noqa: E731 # @b
        return (lax.cond(flag > 0, left, right, x) ** 2).mean()

    return sgd((a, b), jax.grad(loss)((a, b)))


@program("dp fsdp tp", {"embed": "VD", "w": "DD", "tokens": "i:B", "labels": "i:B"},
         {"VD": "embed", "DD": "w", "BD": "embed w", "BV": "embed", "B": "embed tokens labels"})  # fmt: skip
def tied_weights(embed, w, tokens, labels):
    def loss(p):
        h = jnp.tanh(p["embed"][tokens] @ p["w"])
        logp = jax.nn.log_softmax(h @ p["embed"].T)
        return -jnp.take_along_axis(logp, labels[:, None], 1).mean()

    return jax.grad(loss)({"embed": embed, "w": w})


@program("dp fsdp", {"p": {"w": "DH", "scale": "H", "shift": "H"},
                     "stats": {"mean": "H", "var": "H"}, "x": "BD"},
         {"DH": "p.w", "BD": "x p.w", "BH": "p.w", "forward H": "stats.mean stats.var p.w p.scale p.shift",
          "backward H": "p.scale p.shift", "all-gather H": "p.scale p.shift"})  # fmt: skip
def batch_norm(p, stats, x):
    def loss(p):
        h = x @ p["w"]
        mean, var = h.mean(0), h.var(0)
        h = (h - mean) / jnp.sqrt(var + 1e-5) * p["scale"] + p["shift"]
        new = {"mean": 0.9 * stats["mean"] + 0.1 * mean, "var": 0.9 * stats["var"] + 0.1 * var}
        return (jnp.tanh(h) ** 2).mean(), new

    g, new = jax.grad(loss, has_aux=True)(p)
    return sgd(p, g), new


@program("dp fsdp tp both", {"p": {"q": "DH", "k": "DH", "v": "DH", "o": "HD"}, "x": "BiD"},
         {"@q DH": "p.q", "@k DH": "p.k", "@v DH": "p.v", "@o DH": "p.o",
          "BD": "p.q p.k p.v p.o x", "@q BH": "p.q", "@k BH": "p.k", "@v BH": "p.v",
          "@o BH": "p.o"})  # fmt: skip
def attention(p, x):
    def loss(p):
        split = lambda y: y.reshape(*y.shape[:2], 8, -1)  # noqa: E731
        q = split(x @ p["q"])  # @q
        k = split(x @ p["k"])  # @k
        v = split(x @ p["v"])  # @v
        scores = jax.nn.softmax(jnp.einsum("bihd,bjhd->bhij", q, k) * 0.1)
        y = jnp.einsum("bhij,bjhd->bihd", scores, v).reshape(*x.shape[:2], -1)
        return (jnp.tanh(x + y @ p["o"]) ** 2).mean()  # @o

    return sgd(p, jax.grad(loss)(p))


@program("tp fsdp", {"p": {"q": "DH", "k": "DH", "v": "DH", "o": "HD"},
                     "cache": {"k": "BiH", "v": "BiH"}, "x": "BD", "at": "i:"},
         {"DH": "p.q p.k p.v p.o", "BD": "p.q p.k p.v p.o x",
          "BH": "p.q p.k p.v p.o cache.k cache.v +x"})  # fmt: skip
def decode(p, cache, x, at):
    q, k, v = (x @ p[name] for name in "qkv")
    keys = lax.dynamic_update_slice_in_dim(cache["k"], k[:, None], at, 1)
    values = lax.dynamic_update_slice_in_dim(cache["v"], v[:, None], at, 1)
    split = lambda y: y.reshape(*y.shape[:-1], 8, -1)  # noqa: E731
    scores = jnp.einsum("bhd,bjhd->bhj", split(q), split(keys)) * 0.1
    y = jnp.einsum("bhj,bjhd->bhd", jax.nn.softmax(scores), split(values))
    return x + y.reshape(x.shape[0], -1) @ p["o"], {"k": keys, "v": values}


@program("dp fsdp", {"nodes": "BD", "w1": "DH", "w2": "HO", "src": "i:K", "dst": "i:K"},
         {"DH": "w1", "HO": "w2", "BD": "nodes w1", "BH": "w1 w2 +nodes", "KD": "nodes w1",
          "KH": "w1 w2", "BO": "w2", "K": "src dst"})  # fmt: skip
def graph(nodes, w1, w2, src, dst):
    def loss(p):
        h = jax.nn.relu(nodes @ p["w1"])
        h = h + jax.ops.segment_sum(h[src], dst, nodes.shape[0])
        return (jnp.tanh(h @ p["w2"]) ** 2).mean()

    return sgd({"w1": w1, "w2": w2}, jax.grad(loss)({"w1": w1, "w2": w2}))


@program("dp fsdp tp", {"p": {"router": "De", "up": "eDH", "down": "eHD"}, "x": "BD"},
         {"DH": "p.up p.down", "D": "p.router", "BD": "x p.router p.up p.down",
          "BH": "p.up p.down", "B": "p.router p.up p.down +x"})  # fmt: skip
def experts(p, x):
    def loss(p):
        gates = jax.nn.softmax(x @ p["router"])
        h = jax.nn.relu(jnp.einsum("bd,edh->ebh", x, p["up"]))
        y = jnp.einsum("ebh,ehd,be->bd", h, p["down"], gates)
        return (jnp.tanh(y) ** 2).mean()

    return jax.grad(loss)(p)


@program("dp fsdp", {"kernel": "llrD", "last": "DO", "x": "Biir"},
         {"D": "kernel", "DO": "last", "BD": "kernel last", "B": "x kernel", "BO": "last"})  # fmt: skip
def convolutional(kernel, last, x):
    def loss(p):
        y = lax.conv_general_dilated(
            x, p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return ((jnp.tanh(y).mean((1, 2)) @ p["last"]) ** 2).mean()

    p = {"kernel": kernel, "last": last}
    return sgd(p, jax.grad(loss)(p))


@program("dp fsdp", {"a": "DD", "b": "DD", "x": "BD"},
         {"@a DD": "a", "@b DD": "b", "@a BD": "a x", "@b BD": "b"})  # fmt: skip
def bare_arrays_alike(a, b, x):
    def loss(a, b):
        h = jnp.tanh(x @ a)  # @a
        return (jnp.sin(h @ b) ** 2).mean()  # @b

    return jax.grad(loss, (0, 1))(a, b)


@jax.custom_vjp
def clipped(x):
    return jnp.tanh(x)


clipped.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (jnp.clip(g * jnp.cos(x), -1, 1),))


@program("dp fsdp tp", {"p": MLP, "x": "BD", "y": "BO"}, mlp("p"))
def own_gradients(p, x, y):
    def loss(p):
        return ((clipped(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"] - y) ** 2).mean()

    return sgd(p, jax.grad(loss)(p))


# What moves nothing but data


@program("dp fsdp", {"v": "D", "x": "BD"}, {"D": "x v", "BD": "x", "B": "v x"})
def power_iteration(v, x):
    def body(v, _):
        v = (x @ v) @ x
        return v / jnp.linalg.norm(v), None

    return lax.scan(body, v, None, length=4)[0]


# By hand, in shard_map


def mapped(in_specs: Any, out_specs: Any) -> Any:
    return functools.partial(jax.shard_map, in_specs=in_specs, out_specs=out_specs)


@program("fsdp", {"p": {"w1": "DH", "w2": "HO"}, "x": "BD", "y": "BO"},
         {"DH": "p.w1", "HO": "p.w2"})  # fmt: skip
def by_hand_fully_sharded(p, x, y):
    @mapped((P("data"), P("data"), P("data")), P("data"))
    def step(p, x, y):
        def loss(p):
            w = jax.tree.map(lambda w: lax.all_gather(w, "data", tiled=True), p)
            return ((jax.nn.relu(x @ w["w1"]) @ w["w2"] - y) ** 2).mean()

        return sgd(p, jax.grad(loss)(p))

    return step(p, x, y)


@program("tp", {"p": {"w1": "DH", "w2": "HO"}, "x": "BD"},
         {"BO": "p.w2", "BD": "p.w1", "DH": "p.w1", "HO": "p.w2"})  # fmt: skip
def by_hand_tensor_parallel(p, x):
    specs = {"w1": P(None, "model"), "w2": P("model")}

    @mapped((specs, P("data")), P("data"))
    def apply(p, x):
        return lax.psum(jax.nn.relu(x @ p["w1"]) @ p["w2"], "model")

    return jax.grad(lambda p: (apply(p, x) ** 2).mean())(p)


@program("dp", {"user": TOWER, "item": TOWER, "xu": "BD", "xi": "BD"},
         {**TOWERS, "@all forward BO": "item.w item.b +xi"})  # fmt: skip
def gathered_features(user, item, xu, xi):
    @mapped((P(), P(), P("data"), P("data")), P())
    def loss(user, item, xu, xi):
        u = jnp.tanh(xu @ user["w"] + user["b"])  # @user
        v = jnp.tanh(xi @ item["w"] + item["b"])  # @item
        v = lax.all_gather(v, "data", tiled=True)  # @all
        own = lax.axis_index("data") * len(u) + jnp.arange(len(u))
        logp = jax.nn.log_softmax(u @ v.T)
        return lax.pmean(-jnp.take_along_axis(logp, own[:, None], 1).mean(), "data")

    g = jax.grad(loss, (0, 1))(user, item, xu, xi)
    return sgd((user, item), g)


@program("dp", {"p": {"q": "DH", "k": "DH", "v": "DH", "o": "HD"}, "x": "eBD"},
         {"DH": "p.q p.k p.v p.o", "forward BH": "p.q p.k p.v p.o +x", "backward BH": "p.o"})  # fmt: skip
def ulysses(p, x):
    @mapped((P(), P(None, "data")), P(None, "data"))
    def apply(p, x):
        split = lambda y: y.reshape(*y.shape[:2], 8, -1)  # noqa: E731
        to_heads = lambda y: lax.all_to_all(y, "data", 2, 1, tiled=True)  # noqa: E731
        q, k, v = (to_heads(split(x @ p[name])) for name in "qkv")
        scores = jax.nn.softmax(jnp.einsum("bihd,bjhd->bhij", q, k) * 0.1)
        y = jnp.einsum("bhij,bjhd->bihd", scores, v)
        y = lax.all_to_all(y, "data", 1, 2, tiled=True)
        return y.reshape(*y.shape[:2], -1) @ p["o"]

    return sgd(p, jax.grad(lambda p: (jnp.tanh(apply(p, x)) ** 2).mean())(p))


# Of libraries


class Dense(eqx.Module):
    """A layer of Equinox."""

    weight: Any
    bias: Any

    def __call__(self, x):
        return self.weight @ x + self.bias


def equinox_layers() -> Any:
    return [Dense(*map(_array, letters)) for letters in (("HD", "H"), ("OH", "O"))]


EQX = {
    "DH": "model.0.weight", "H": "model.0.bias", "HO": "model.1.weight", "O": "model.1.bias",
    "BD": "x model.0.weight", "BH": "model.0.weight model.1.weight", "BO": "model.1.weight",
}  # fmt: skip


@program("dp fsdp tp", {"model": equinox_layers, "x": "BD", "y": "BO"}, EQX, jit=eqx.filter_jit)
def equinox_model(model, x, y):
    @eqx.filter_value_and_grad
    def loss(model):
        h = jax.nn.relu(jax.vmap(model[0])(x))
        return ((jax.vmap(model[1])(h) - y) ** 2).mean()

    value, g = loss(model)
    return eqx.apply_updates(model, g), value


@program("fsdp", {"p": {"w1": "DH", "w2": "HD"}, "x": "BD"},
         {"DH": "p.w1 p.w2", "BD": "x p.w1 p.w2", "BH": "p.w1 p.w2"})  # fmt: skip
def adaptive_steps(p, x):
    return diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, p: jnp.tanh(y @ p["w1"]) @ p["w2"]),
        diffrax.Tsit5(), 0.0, 1.0, 0.25, x, args=p, max_steps=64,
        stepsize_controller=diffrax.PIDController(1e-2, 1e-2),
    ).ys  # fmt: skip


@program("dp fsdp", {"p": {"w1": "DH", "w2": "HD"}, "x": "BD"},
         {"@1 DH": "p.w1", "@2 DH": "p.w2", "@- DH": "p.w1 p.w2", "BD": "x p.w1 p.w2", "BH": "p.w1 p.w2"})  # fmt: skip
def ode_by_hand(p, x):
    def body(state):
        t, x, step = state
        h = jnp.tanh(x @ p["w1"])  # @1
        slope = h @ p["w2"]  # @2
        jax.debug.print("{}", t)
        step = jnp.minimum(step, 0.1 / (1e-6 + jnp.abs(slope).max()))
        return t + step, x + step * slope, step

    return lax.while_loop(lambda s: s[0] < 1, body, (0.0, x, 0.1))[1]
