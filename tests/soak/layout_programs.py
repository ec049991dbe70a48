"""A seed ─► a random model of annotated arrays under random rules, given to `ft.jit` in a random way
and called in a random transform. It is run, and compared with what NumPy computes and with a reading
of the rules that uses nothing of functree."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

import functree as ft
from tests.soak.rules_by_hand import Leaf, Rule, spec_of

AXES = ("batch", "seq", "embed", "hidden", "heads", "vocab")
SIZES = (8, 16, 24)
MESHES = (
    {"data": 8},
    {"data": 2, "model": 4},
    {"data": 2, "model": 2, "pipe": 2},
    {"model": 8},
    {"data": 4, "model": 2},
)


# A random model


def make_class(rng: random.Random, sizes: dict[str, int]) -> tuple[Callable[[], Any], list[Leaf]]:
    """A module of one to four annotated arrays: a function that makes one, and its leaves."""
    leaves = []
    for _ in range(rng.randint(1, 4)):
        axes = tuple(rng.sample(AXES, rng.randint(1, 3)))
        leaves.append(Leaf(axes, tuple(sizes[axis] for axis in axes)))
    names = [f"w{i}" for i in range(len(leaves))]
    hints = {
        name: Float[Array, " ".join(leaf.axes)] for name, leaf in zip(names, leaves, strict=True)
    }
    cls: Any = type("Random", (eqx.Module,), {"__annotations__": hints, "__module__": __name__})

    def make() -> Any:
        return cls(
            *[
                np.arange(np.prod(leaf.shape), dtype=np.float32).reshape(leaf.shape) % 7 - 3
                for leaf in leaves
            ]
        )

    return make, leaves


def make_model(rng: random.Random) -> tuple[Any, list[Leaf]]:
    """A tree of random modules, of NumPy's arrays, and its leaves in JAX's order."""
    sizes = {axis: rng.choice(SIZES) for axis in AXES}
    make, leaves = make_class(rng, sizes)
    kind = rng.choice(["module", "list", "dict", "stack", "nested"])
    if kind == "module":
        return make(), leaves
    if kind == "list":
        return [make(), make()], leaves * 2
    if kind == "dict":
        other, others = make_class(rng, sizes)
        return {"b": other(), "a": (make(),)}, leaves + others
    if kind == "nested":
        return ({"x": [make()]}, make()), leaves * 2
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *[make() for _ in range(3)])
    return ft.Stacked(stacked), [
        Leaf(("layers", *leaf.axes), (3, *leaf.shape), 1) for leaf in leaves
    ]


def make_rules(rng: random.Random, mesh: dict[str, int]) -> list[Rule]:
    """Rules for all axes in random order, some with a fallback. All sizes are multiples of 8."""
    rules: list[Rule] = []
    for axis in rng.sample(AXES, len(AXES)):
        target = rng.choice(
            [None, *mesh, *mesh, tuple(rng.sample(list(mesh), 2)) if len(mesh) > 1 else None]
        )
        rules.append((axis, target))
        if target is not None:
            if rng.random() < 0.3:
                rules.append((axis, rng.choice(list(mesh))))
            rules.append((axis, None))  # so that no name is without a rule
    return [*rules, ("layers", None)]


# How it is given, computed and called


def doubled(model: Any) -> Any:
    return jax.tree.map(lambda w: 2 * w, model)


def squares(model: Any) -> Any:
    return sum((w**2).sum() for w in jax.tree.leaves(model))


TRANSFORMS: dict[str, Callable[[Callable[[Any], Any], Any], Any]] = {
    "eager": lambda f, x: f(x),
    "jax.jit": lambda f, x: jax.jit(lambda x: f(x))(x),
    "ft.jit": lambda f, x: ft.jit(lambda x: f(x))(x),
    "remat": lambda f, x: jax.checkpoint(f)(x),
    "cond": lambda f, x: jax.lax.cond(jnp.bool_(True), f, f, x),
    "scan": lambda f, x: first(jax.lax.scan(lambda c, _: (c, f(x)), 0, None, length=1)[1]),
    "vmap": lambda f, x: first(jax.vmap(f)(jax.tree.map(lambda w: w[None], x))),
    "linearize": lambda f, x: jax.linearize(f, x)[0],
    "vjp": lambda f, x: jax.vjp(f, x)[0],
}


def first(tree: Any) -> Any:
    return jax.tree.map(lambda w: w[0], tree)


@dataclasses.dataclass
class Program:
    """One random program."""

    seed: int
    mesh: Mesh
    model: Any
    leaves: list[Leaf]
    rules: list[Rule]
    fsdp: tuple[str, int] | None
    explicit: bool
    given: str
    computed: str
    transform: str
    placed: str
    donated: bool

    def __str__(self) -> str:
        shapes = ", ".join(f"{' '.join(leaf.axes)} {leaf.shape}" for leaf in self.leaves)
        kind = "Explicit" if self.explicit else "Auto"
        return (
            f"seed {self.seed}: {self.computed} by {self.given}, {self.placed}{', donated' * self.donated}, in "
            f"{self.transform}, on {kind} {dict(self.mesh.shape)}; rules {self.rules}, fsdp {self.fsdp}; {shapes}"
        )


def make(seed: int) -> Program:
    rng = random.Random(seed)
    sizes, explicit = rng.choice(MESHES), rng.random() < 0.4
    model, leaves = make_model(rng)
    fsdp = (rng.choice(list(sizes)), rng.choice([0, 200])) if rng.random() < 0.3 else None
    given = rng.choice(["in_shardings", "out_shardings", "rules", "both"])
    return Program(
        seed,
        ft.make_mesh(**sizes, explicit=explicit),
        model,
        leaves,
        make_rules(rng, sizes),
        fsdp,
        explicit,
        given,
        rng.choice(["doubled", "doubled", "gradient"]),
        rng.choice(list(TRANSFORMS)),
        # On Explicit axes `in_shardings` asks for arrays that are placed.
        rng.choice(["placed"] if explicit else ["placed", "uncommitted", "NumPy's"]),
        rng.random() < 0.3,
    )


def run(program: Program) -> None:
    """Run a program, and compare. Raises whatever is wrong."""
    rules: Any = ft.AxisRules(program.rules)
    if program.fsdp is not None:
        rules = rules | ft.FSDP(program.fsdp[0], min_size=program.fsdp[1], otherwise=P())
    options: dict[str, Any] = {"mesh": program.mesh}
    if program.given in ("in_shardings", "both"):
        options["in_shardings"] = rules
    if program.given in ("out_shardings", "both"):
        options["out_shardings"] = rules
    if program.given == "rules":
        options["rules"] = rules
    if program.donated:
        options["donate"] = ...
    body = doubled if program.computed == "doubled" else ft.grad(squares, layout=rules)
    f = ft.jit(lambda model: body(model), **options)
    sizes = dict(program.mesh.shape)
    specs = [spec_of(leaf, program.rules, program.fsdp, sizes) for leaf in program.leaves]
    model = program.model
    if program.placed == "uncommitted":
        model = jax.tree.map(jnp.asarray, model)
    if program.placed == "placed":
        flat = [
            jax.device_put(x, NamedSharding(program.mesh, spec))
            for x, spec in zip(jax.tree.leaves(model), specs, strict=True)
        ]
        model = jax.tree.unflatten(jax.tree.structure(model), flat)
    with jax.set_mesh(program.mesh):
        result = TRANSFORMS[program.transform](f, model)
    assert jax.tree.structure(result) == jax.tree.structure(program.model), "another structure"
    # Where nothing asks for the sharding of a result, the compiler may choose another one inside of
    # a transform.
    asked = (
        program.given in ("out_shardings", "both")
        or program.computed == "gradient"
        or program.transform == "eager"
    )
    leaves = zip(jax.tree.leaves(result), jax.tree.leaves(program.model), specs, strict=True)
    for i, (found, before, spec) in enumerate(leaves):
        assert np.array_equal(found, 2 * before), f"leaf {i} has other values"
        if not asked:
            continue
        wanted = NamedSharding(program.mesh, spec)
        assert found.sharding.is_equivalent_to(wanted, found.ndim), (
            f"leaf {i} is {found.sharding}, not {spec}"
        )
