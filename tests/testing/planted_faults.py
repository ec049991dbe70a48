"""Programs that compute something else on a mesh than on one device, and the line at fault.

The line is the one with the comment `# fault: <name>`. In a *switched* program each fault has a
number, which is an argument, so that the program is compiled once for all of its faults. The others
are programs with one fault each. On one device a fault is none: to sum over one device changes
nothing.
"""

# fmt: off
# A fault is one line, with its name at the end.

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

import functree as ft

P = ft.P


class Faulty(NamedTuple):
    """A function, its arguments and their layouts; and its faults, in the order of their numbers if
    there are several."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    layouts: Any
    faults: tuple[str, ...]
    switched: bool = False


PROGRAMS: list[Callable[[], Faulty]] = []


def line_of(fault: str) -> str:
    """The file and the line of a fault."""
    found = [
        number
        for number, line in enumerate(Path(__file__).read_text(encoding="utf-8").splitlines(), 1)
        if line.endswith(f"# fault: {fault}")
    ]
    (number,) = found
    return f"{Path(__file__).name}:{number}"


def normal(seed: int, *shape: int) -> Array:
    return jax.random.normal(jax.random.key(seed), shape)


def program(case: Callable[[], Faulty]) -> Callable[[], Faulty]:
    PROGRAMS.append(case)
    return case


def switched(fn: Callable[..., Any], args: tuple[Any, ...], layouts: Any, *faults: str) -> Faulty:
    """A program whose last parameter is the number of a fault."""
    return Faulty(fn, (*args, jnp.zeros((), jnp.int32)), (*layouts, P()), faults, switched=True)


def mapped(body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
    # By hand is unchecked: with `check_vma=True` JAX finds some of these faults itself.
    return ft.shard_map(body, in_specs=in_specs, out_specs=out_specs, check_vma=False)


# A layer by hand


@program
def layer() -> Faulty:
    def body(x: Any, up: Any, down: Any, n: Any) -> Any:
        me, size = lax.axis_index("model"), lax.axis_size("model")
        h = jnp.tanh(x @ up)
        h = jnp.where((n == 1) & (me == 2), jnp.nan, h)  # fault: a NaN on one device
        h = jnp.where((n == 2) & (me == 1), h[::-1], h)  # fault: rows reversed on one device
        h = jnp.where(n == 3, lax.ppermute(h, "model", [(i, (i + 1) % size) for i in range(size)]), h)  # fault: passed on
        part = h @ down  # fault: a missing psum
        y = lax.psum(part, "model")
        y = jnp.where(n == 4, part, y)
        y = jnp.where(n == 5, lax.psum(y, "model"), y)  # fault: summed twice
        y = jnp.where(n == 6, lax.psum(part, "data"), y)  # fault: summed over the other axis
        y = jnp.where(n == 7, lax.pmean(part, "model"), y)  # fault: pmean for psum
        y = jnp.where(n == 8, y * size, y)  # fault: scaled by the size of an axis
        y = jnp.where(n == 9, lax.psum(y, "data"), y)  # fault: rows summed
        return y + x

    specs = P("data"), P(None, "model"), P("model"), P()
    fn = mapped(body, specs, P("data"))
    args = normal(0, 8, 8), normal(1, 8, 16), normal(2, 16, 8)
    return switched(
        fn, args, specs[:-1],
        "a NaN on one device", "rows reversed on one device", "passed on", "a missing psum", "summed twice",
        "summed over the other axis", "pmean for psum", "scaled by the size of an axis",
        "rows summed",
    )




# Loops


@program
def layers() -> Faulty:
    def body(x: Any, ups: Any, downs: Any, n: Any) -> Any:
        def block(x: Any, w: Any) -> Any:
            i, up, down = w
            h = jnp.tanh(x @ up)
            h = jnp.where((n == 1) & (i == 2) & (lax.axis_index("data") == 1), jnp.inf, h)  # fault: an infinity in a layer
            y = h @ down  # fault: a missing psum in a layer
            y = jnp.where((n == 2) & (i == 1), y, lax.psum(y, "model"))
            y = jnp.where((n == 3) & (i == 1), lax.psum(y, "model"), y)  # fault: summed twice in a layer
            y = jnp.where((n == 4) & (i == 2), lax.all_gather(y, "data")[0], y)  # fault: the rows of another device
            return x + 0.5 * y, lax.pmean((y**2).mean(), "data")

        return lax.scan(block, x, (jnp.arange(3), ups, downs))

    specs = P("data"), P(None, None, "model"), P(None, "model"), P()
    args = normal(0, 8, 8), normal(1, 3, 8, 16), normal(2, 3, 16, 8)
    return switched(
        mapped(body, specs, (P("data"), P())), args, specs[:-1],
        "an infinity in a layer", "a missing psum in a layer", "summed twice in a layer", "the rows of another device",
    )


@program
def shard_map_in_a_loop() -> Faulty:
    def fn(x: Any, ws: Any, n: Any) -> Any:
        def block(x: Any, w: Any) -> Any:
            def body(x: Any, w: Any) -> Any:
                y = x @ w  # fault: a missing psum in a shard_map in a loop
                return jnp.where(n == 1, y, lax.psum(y, "model"))

            y = mapped(body, (P("data", "model"), P("model")), P("data"))(x, w)
            z = jnp.sin(y) / 2
            z = jnp.where(n == 2, z * _devices("data"), z)  # fault: scaled in a loop
            return z, z.sum()

        step = jax.checkpoint(block)
        return jax.grad(lambda x: lax.scan(step, x, ws)[1].sum())(x)

    args = normal(0, 8, 8), normal(1, 3, 8, 8)
    return switched(
        fn, args, (P("data", "model"), P(None, "model")),
        "a missing psum in a shard_map in a loop", "scaled in a loop",
    )


def _devices(axis: str) -> int:
    """How many devices an axis of the ambient mesh has."""
    return jax.sharding.get_abstract_mesh().shape.get(axis, 1)


@program
def iterations() -> Faulty:
    def fn(x: Any, n: Any) -> Any:
        def halve(state: Any) -> Any:
            y, i = state
            y = y * 0.75
            y = jnp.where((n == 1) & (i == 3), y + _devices("data") - 1, y)  # fault: in an iteration of a while
            y = jnp.where((n == 2) & (i >= 12), y - _devices("data") + 1, y)  # fault: in the last iterations of a while
            return y, i + 1

        y, _ = lax.while_loop(lambda state: state[1] < 14, halve, (x, 0))
        total = lax.fori_loop(0, 4, lambda i, t: t + y * i * jnp.where(n == 3, _devices("data"), 1), y)  # fault: in a fori_loop
        return total.sum(1), y

    return switched(
        fn, (normal(0, 8, 8),), (P("data", "model"),),
        "in an iteration of a while", "in the last iterations of a while", "in a fori_loop",
    )


# Conditionals, derivatives, and what is recomputed


@program
def branches() -> Faulty:
    def body(x: Any, n: Any) -> Any:
        me = lax.axis_index("model")
        which = jnp.where((n == 1) & (me == 1), 0, 1)  # fault: another branch on a device

        def first(x: Any) -> Any:
            return x * 3

        def second(x: Any) -> Any:
            y = jnp.cos(x)
            y = jnp.where(n == 2, y + me.astype(y.dtype), y)  # fault: in a branch
            return y

        y = lax.switch(which, [first, second], x)
        z = lax.cond(x.sum() > -1e9, lambda y: y + 1, lambda y: y, y)
        return jnp.where(n == 3, lax.psum(z, "data"), z)  # fault: after a branch

    specs = P("data"), P()
    return switched(
        mapped(body, specs, P("data")), (normal(0, 8, 8),), specs[:-1],
        "another branch on a device", "in a branch", "after a branch",
    )


@program
def backward_by_hand() -> Faulty:
    def body(x: Any, w: Any, n: Any) -> Any:
        y, pullback = jax.vjp(jax.checkpoint(lambda x, w: jnp.sin(x @ w)), x, w)  # fault: a missing psum of a gradient
        ct = 2 * y
        dx, dw = pullback(ct)
        dx = jnp.where(n == 1, dx, lax.psum(dx, "model"))
        total = lax.psum(dw, "data")
        total = jnp.where(n == 2, lax.psum(total, "data"), total)  # fault: a gradient summed twice
        total = jnp.where(n == 3, total / lax.axis_size("data"), total)  # fault: a mean of gradients
        return dx, total

    specs = P("data"), P(None, "model"), P()
    return switched(
        mapped(body, specs, specs[:-1]), (normal(0, 8, 8), normal(1, 8, 16)), specs[:-1],
        "a missing psum of a gradient", "a gradient summed twice", "a mean of gradients",
    )


# Specs


@program
def order_of_axes() -> Faulty:
    def fn(x: Any) -> Any:
        specs = {"in_specs": P(("data", "model")), "out_specs": P(("model", "data"))}
        y = ft.shard_map(jnp.sin, check_vma=False, **specs)(x)  # fault: the order of axes in a spec
        return y * jnp.arange(8.0)[:, None]

    return Faulty(fn, (normal(0, 8, 8),), (P("data"),), ("the order of axes in a spec",))


@program
def claimed_replicated() -> Faulty:
    def fn(x: Any) -> Any:
        def body(x: Any) -> Any:
            most = x.max(0)  # fault: a spec that claims it is replicated
            return most

        y = mapped(body, P("data"), P())(x)
        return y * 2

    return Faulty(fn, (normal(0, 8, 8),), (P("data"),), ("a spec that claims it is replicated",))






# Functions that ask for the mesh


class Net(eqx.Module):
    w: Array
    norm: eqx.nn.LayerNorm

    def __call__(self, x: Any) -> Any:
        h = jax.vmap(self.norm)(x @ self.w)
        return jax.nn.gelu(h)


def asking(fn: Callable[..., Any], fault: str) -> None:
    net = Net(normal(1, 8, 8), eqx.nn.LayerNorm(8))
    PROGRAMS.append(lambda: Faulty(fn, (net, normal(0, 8, 8)), (P(), P("data", "model")), (fault,)))


def _sharded() -> bool:
    return _devices("data") > 1


def rounded(net: Any, x: Any) -> Any:
    y = net(x)
    if _sharded():
        y = y.astype(jnp.bfloat16)  # fault: another dtype
    return (y * 2).astype(jnp.float32).sum()


def left_out(net: Any, x: Any) -> Any:
    y = net(x)
    if not _sharded():
        y = jnp.tanh(y)  # fault: an operation that the mesh leaves out
    return y.mean(0)


def inserted(net: Any, x: Any) -> Any:
    y = jnp.sin(x)
    if _sharded():
        y = jnp.flip(y, 0)  # fault: an operation that only the mesh has
    return net(y)


def constant(net: Any, x: Any) -> Any:
    rows = jnp.arange(8.0) // _devices("data")  # fault: another constant
    return net(x) * rows[:, None]


def jitted(net: Any, x: Any) -> Any:
    @jax.jit
    def inner(y: Any) -> Any:
        y = jnp.cos(y)
        return y * _devices("model")  # fault: in an inner jit

    return inner(net(x)).sum()




asking(rounded, "another dtype")
asking(left_out, "an operation that the mesh leaves out")
asking(inserted, "an operation that only the mesh has")
asking(constant, "another constant")
asking(jitted, "in an inner jit")


@functools.cache
def faulty(number: int) -> Faulty:
    """A program of the table."""
    return PROGRAMS[number]()


FAULTS = [
    (number, k + 1, fault)
    for number in range(len(PROGRAMS))
    for k, fault in enumerate(faulty(number).faults)
]
