"""A seed ─► a random model with experts, a sequence in parts or a pipeline, under random rules; it
is run, and compared with the same model on one device.

Of experts alone the values are those of the oracle in float64 (`moe_oracle.py`), with what a
capacity drops on this mesh. Other capacities have room for all tokens, since what is dropped
depends on the mesh.
"""

import dataclasses
import math
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import functree as ft
from functree.nn.attention import attend as attending
from tests.nn.moe_oracle import mixture
from tests.soak.rules_by_hand import Leaf, Rule, spec_of

MESHES = (
    {"a": 8},
    {"a": 2, "b": 4},
    {"a": 4, "b": 2},
    {"a": 2, "b": 2, "c": 2},
    {"a": 1, "b": 2, "c": 4},
)
OF_WEIGHTS = ("embed", "hidden", "experts", "heads", "kv_heads", "vocab")
NAMES = ("batch", "seq", *OF_WEIGHTS, "layers", "head_dim")
KINDS = ("experts", "attention", "model", "model", "stack")
RTOL = 3e-5

# What functree says, by the documentation, that it cannot do. Another error is a failure.
REFUSALS = (
    r"needs a multiple of",  # a mesh axis does not divide a dimension
    r"does not divide",
    r'context="heads": the \d+ parts of the sequence',
    r'dispatch="exchange"',
    r"Stacked.scan: the stack's axis .* is sharded over",
    r"layers can return only `x`",
    r"cannot be divided into \d+ equal micro-batch",
    r"cannot be divided into \d+ stages? over",
    r"shards both the batch and the stack",
)


def is_refusal(text: str) -> bool:
    return any(re.search(one, text) for one in REFUSALS)


@dataclasses.dataclass
class Program:
    """One random program: all that it is made from, in plain values.

    Attributes:
        options: those of the model and of its call.
    """

    seed: int
    kind: str
    mesh: dict[str, int]
    explicit: bool
    rules: list[Rule]
    fsdp: tuple[str, int] | None
    gradient: str
    chunk: int
    options: dict[str, Any]

    def __str__(self) -> str:
        axes = "Explicit" if self.explicit else "Auto"
        return (
            f"seed {self.seed}: {self.kind} {self.options}, gradient of {self.gradient}, chunks of "
            f"{self.chunk}, on {axes} {self.mesh}; rules {self.rules}, fsdp {self.fsdp}"
        )

    @property
    def layout(self) -> Any:
        rules = ft.AxisRules(self.rules)
        if self.fsdp is None:
            return rules
        return rules | ft.FSDP(self.fsdp[0], min_size=self.fsdp[1], otherwise=P())

    def spec(self, axes: str, shape: tuple[int, ...]) -> P:
        """The spec of an activation."""
        return spec_of(Leaf(tuple(axes.split()), shape), self.rules, None, self.mesh)

    def parts(self, axes: str, name: str) -> int:
        """Into how many parts the rules shard a dimension of an activation."""
        one = self.spec(axes, ())[axes.split().index(name)]
        return int(np.prod([self.mesh[axis] for axis in _axes(one)], dtype=int))


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


# --- Random values


def make(seed: int) -> Program:
    rng = random.Random(seed)
    kind = rng.choice(KINDS)
    mesh = rng.choice(MESHES)
    has_stack = kind in ("model", "stack")
    pipe = rng.random() < 0.5 and has_stack
    make_options = {"experts": experts_options, "attention": attention_options}
    options = make_options.get(kind, model_options)(rng, pipe)
    if kind == "stack":
        options |= {"order": "in order", "segments": False}
    return Program(
        seed,
        kind,
        mesh,
        explicit=rng.random() < 0.4,
        rules=make_rules(rng, mesh, pipe, options),
        fsdp=(rng.choice(list(mesh)), rng.choice([0, 100])) if rng.random() < 0.2 else None,
        gradient=rng.choice(["ft", "jax"]),
        chunk=rng.choice([3, 4, 1024]),
        options=options,
    )


def make_rules(
    rng: random.Random, mesh: dict[str, int], pipe: bool, options: dict[str, Any]
) -> list[Rule]:
    """For each mesh axis some names that it shards, and the rules for these in random order."""
    # Of most programs, mesh axes divide the sizes.
    sizes = {} if rng.random() < 0.05 else options
    targets: dict[str, list[str]] = {}
    own = None
    if pipe:
        own = rng.choice([axis for axis in mesh if mesh[axis] <= 4] or list(mesh))
    for axis in rng.sample(list(mesh), len(mesh)):
        names = ["layers"]
        if axis != own:
            names = rng.sample(["batch", "seq", *OF_WEIGHTS], rng.randint(1, 4))
        if "heads" in names and rng.random() < 0.7:
            names.append("kv_heads")
        for name in dict.fromkeys(names):
            before = targets.setdefault(name, [])
            if (sizes.get(name) or 8) % math.prod(mesh[one] for one in (*before, axis)) == 0:
                before.append(axis)
    rules: list[Rule] = []
    for name in rng.sample(NAMES, len(NAMES)):
        axes = targets.get(name, [])
        if axes:
            rules.append((name, axes[0] if len(axes) == 1 else tuple(axes)))
        if len(axes) > 1 and rng.random() < 0.5:
            rules.append((name, rng.choice(axes)))
        rules.append((name, None))
    return rules


def experts_options(rng: random.Random, pipe: bool) -> dict[str, Any]:
    experts = rng.choice([4, 8])
    return {
        "batch": rng.choice([4, 8]),
        "seq": rng.choice([3, 4, 8]),
        "embed": 8,
        "hidden": rng.choice([4, 8]),
        "experts": experts,
        "top_k": rng.randint(1, 3),
        "capacity": rng.choice([None, 0.5, 1.0, 1.5, float(experts)]),
        "dispatch": rng.choice(["auto", "gather", "exchange"]),
        "normalize": rng.random() < 0.7,
    }


def attention_options(rng: random.Random, pipe: bool) -> dict[str, Any]:
    heads = rng.choice([4, 8])
    return {
        "batch": rng.choice([4, 8]),
        "seq": rng.choice([8, 16]),
        "embed": rng.choice([8, 16]),
        "heads": heads,
        "kv_heads": rng.choice([2, 4, heads]),
        "window": rng.choice([None, None, 1, 5]),
        "context": rng.choice(["auto", "auto", "gather", "heads", "ring"]),
        "qk_norm": rng.random() < 0.3,
        "bias": rng.random() < 0.3,
        "attention": rng.choice(["auto", "auto", "chunked", "xla"]),
        "order": rng.choice(["in order", "in order", "zigzag 2", "zigzag 4"]),
        "segments": rng.random() < 0.3,
    }


def model_options(rng: random.Random, pipe: bool) -> dict[str, Any]:
    options = attention_options(rng, pipe) | {"layers": rng.choice([2, 4, 4])}
    options |= {"hidden": rng.choice([8, 16]), "vocab": 32, "experts": None}
    options |= {"remat": rng.choice([None, "full", "dots"]), "tied": rng.random() < 0.3}
    options |= {"microbatches": None, "cross_entropy": rng.choice([3, 8, 1024])}
    options |= {"mask": rng.random() < 0.3, "balance": 0.0}
    if rng.random() < 0.5:
        found = experts_options(rng, pipe)
        options |= {name: found[name] for name in ("experts", "top_k", "dispatch", "normalize")}
        # Room for all tokens, which may all go to one expert.
        options["capacity"] = rng.choice([None, options["experts"] / options["top_k"]])
        options["balance"] = rng.choice([0.0, 0.1])
    if rng.random() < (0.95 if pipe else 0.2):
        options["microbatches"] = rng.choice([1, 2, 2, 4])
        options["batch"] = rng.choice([8, 16])
        if rng.random() < 0.9:
            options["balance"] = 0.0
    return options


# --- What is computed


@dataclasses.dataclass
class Case:
    """A function of a model and arrays, and what it has to give.

    Attributes:
        fun: returns a scalar, and arrays beside it.
        model: of which the gradient is taken.
        reference: the same model without anything that is for several devices.
        arrays: the other arguments, in the order of their sequence.
        names: the axes of these.
    """

    fun: Callable[..., Any]
    model: Any
    reference: Any
    arrays: dict[str, Any]
    names: dict[str, str]


def run(program: Program) -> Sequence[str]:
    """Run a program, and compare. Raises whatever is wrong.

    Returns:
        What the compiler warns of.
    """
    attending.CHUNK = program.chunk  # some sequences are longer, so that there are several
    case = {"experts": of_experts, "attention": of_attention}.get(program.kind, of_model)(program)
    arrays, inverse = in_another_order(program, case.arrays)
    mesh = ft.make_mesh(**program.mesh, explicit=program.explicit)
    with jax.default_matmul_precision("highest"):
        with jax.set_mesh(mesh):
            layout = program.layout
            model = ft.shard(case.model, layout)
            given = {name: placed(program, case, name, x) for name, x in arrays.items()}
            gradient = ft.value_and_grad if program.gradient == "ft" else jax.value_and_grad
            both = ft.jit(gradient(case.fun, has_aux=True), rules=layout)
            compiled = both.lower(model, given).compile()
            found = compiled(model, given)
        # Behind it, since what is refused may have no expected values: parts that do not divide.
        expected = expected_of(program, case)
    compare(found, expected, inverse)
    check_shardings(program, mesh, found)
    return compiled.ledger().warnings


def placed(program: Program, case: Case, name: str, x: Any) -> Any:
    if name == "scales":  # as the batch of what they scale, or the types would not fit
        return ft.shard(jnp.asarray(x), P(program.spec("batch seq embed", ())[0]))
    return ft.shard(jnp.asarray(x), ft.AxisRules(program.rules), axes=case.names[name])


def in_another_order(
    program: Program, arrays: dict[str, Any]
) -> tuple[dict[str, Any], np.ndarray | None]:
    """The arrays as they are given, and how their results are put in order again."""
    order = program.options.get("order", "in order")
    if order == "in order":
        return arrays, None
    moved = {name: ft.nn.zigzag(np.asarray(x), int(order[-1]))[0] for name, x in arrays.items()}
    positions = np.asarray(ft.nn.zigzag(next(iter(arrays.values())), int(order[-1]))[1])
    return {**moved, "positions": positions}, np.argsort(positions)


def expected_of(program: Program, case: Case) -> Any:
    if program.kind == "experts":
        return of_oracle(program, case)
    return jax.jit(jax.value_and_grad(case.fun, has_aux=True))(case.reference, case.arrays)


def compare(found: Any, expected: Any, inverse: np.ndarray | None) -> None:
    (loss, y), gradient = found
    (of_loss, of_y), of_gradient = expected
    if inverse is not None and y is not None:
        y = np.asarray(y)[:, inverse]
    pairs = [("loss", loss, of_loss)]
    for name, one, other in (("y", y, of_y), ("gradient", gradient, of_gradient)):
        leaves = zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True)
        pairs += [(name + jax.tree_util.keystr(path), x, wanted) for (path, x), wanted in leaves]
    # Some gradients are zero but for rounding, such as those of routers that choose one expert.
    least = 1e-1 * max(np.abs(wanted).max() for _, _, wanted in pairs)
    for name, x, wanted in pairs:
        x, wanted = np.asarray(x, np.float64), np.asarray(wanted, np.float64)
        assert x.shape == wanted.shape, f"{name} has the shape {x.shape}, not {wanted.shape}"
        largest = max(np.abs(wanted).max(), least)
        error = np.abs(x - wanted).max() / largest
        assert error <= RTOL, f"{name} has other values: by {error:.2g} of the largest, {largest}"


def check_shardings(program: Program, mesh: Any, found: Any) -> None:
    """The result is sharded as an activation, and gradients as the rules say of their weights."""
    (_, y), gradient = found
    wanted: list[tuple[str, Any, P]] = []
    # The last thing in the layers of a stack is not functree's, and the compiler may shard it.
    if y is not None and program.kind != "stack":
        wanted.append(("y", y, program.spec("batch seq embed", y.shape)))
    if program.gradient == "ft":
        for path, x in jax.tree_util.tree_leaves_with_path(gradient):
            text = jax.tree_util.keystr(path)
            stacked = int("blocks" in text)
            axes = ("layers",) * stacked + axes_of(text, x.ndim - stacked)
            leaf = Leaf(axes, x.shape, stacked)
            wanted.append((text, x, spec_of(leaf, program.rules, program.fsdp, dict(mesh.shape))))
    for name, x, spec in wanted:
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim), (
            f"{name} is {x.sharding.spec}, not {spec}"
        )


def axes_of(path: str, ndim: int) -> tuple[str, ...]:
    """The axes of a weight of a layer."""
    *_, layer, name = ["", *re.findall(r"\w+", path)]
    if name == "scale":
        return ("head_dim" if layer in ("query_norm", "key_norm") else "embed",)
    if name == "weight":
        return ("vocab", "embed") if layer == "embed" else ("embed", "vocab")
    table = {
        "router": "embed experts",
        "gate": "experts embed hidden" if ndim == 3 else "embed hidden",
        "down": "experts hidden embed" if ndim == 3 else "hidden embed",
        "query": "embed heads head_dim",
        "key": "embed kv_heads head_dim",
        "out": "heads head_dim embed",
        "query_bias": "heads head_dim",
        "key_bias": "kv_heads head_dim",
    }
    table |= {"up": table["gate"], "value": table["key"], "value_bias": table["key_bias"]}
    return tuple(table[name].split())


# --- Models


def random_of(program: Program) -> np.random.Generator:
    return np.random.default_rng(program.seed)


def made(program: Program, create: Callable[[Any], Any]) -> Any:
    """A model of NumPy's arrays: nothing is compiled for it."""
    random = random_of(program)

    def array(x: Any) -> np.ndarray:
        return (random.normal(size=x.shape) / math.sqrt(x.shape[-2:][0])).astype(np.float32)

    return jax.tree.map(array, jax.eval_shape(create, jax.random.key(0)))


def of_experts(program: Program) -> Case:
    given = program.options
    names = ("embed", "hidden", "experts", "top_k", "capacity", "dispatch", "normalize")
    layer = ft.nn.MoE(**{name: given[name] for name in names}, key=jax.random.key(program.seed))
    shape = given["batch"], given["seq"], given["embed"]
    arrays = {"x": random_of(program).normal(size=shape).astype(np.float32)}

    def fun(layer: Any, arrays: Any) -> Any:
        y, losses = layer(arrays["x"])
        return jnp.sum(y) + losses.balance + losses.z, y

    return Case(fun, layer, layer, arrays, {"x": "batch seq embed"})


def of_oracle(program: Program, case: Case) -> Any:
    """The values of a layer of experts in float64, with what is dropped on this mesh."""
    given, x = program.options, case.arrays["x"]
    numbers = np.arange(x.shape[0] * x.shape[1]).reshape(x.shape[:2])
    shards: list[np.ndarray] = []
    rows, columns = token_parts(program, x.shape)
    for part in np.split(numbers, rows):
        shards += [one.ravel() for one in np.split(part, columns, axis=1)]
    weights = {name: np.asarray(getattr(case.model, name)) for name in ("router", "gate", "up")}
    weights["down"] = np.asarray(case.model.down)
    flat = x.reshape(-1, x.shape[-1])
    found = mixture(
        weights,
        flat,
        np.ones_like(flat),
        given["top_k"],
        given["capacity"],
        shards,
        given["normalize"],
    )
    gradient = case.model
    for name in weights:
        gradient = eqx.tree_at(
            lambda tree, name=name: getattr(tree, name), gradient, found.gradient[name]
        )
    return (found.y.sum() + found.balance + found.z, found.y.reshape(x.shape)), gradient


def token_parts(program: Program, shape: tuple[int, ...]) -> tuple[int, int]:
    """Into how many parts the rows and the columns of the tokens are, of which each has its own
    capacity."""
    given = program.options
    tokens = program.spec("batch seq embed", shape)
    of_experts = _axes(program.spec("experts embed hidden", ())[0])
    if not program.explicit:
        # By rules, all other dimensions come before the sequence, in whatever order these are.
        others = program.spec("batch _ embed", shape)
        used = {axis for one in others for axis in _axes(one)}
        left = tuple(axis for axis in _axes(tokens[1]) if axis not in used)
        tokens = P(others[0], left)
    entries = [list(_axes(tokens[0])), list(_axes(tokens[1]))]
    count = lambda axes: int(np.prod([program.mesh[axis] for axis in axes], dtype=int))  # noqa: E731
    more = [axis for axis in of_experts if axis not in entries[0] + entries[1]]
    fits = [i for i in (0, 1) if shape[i] % count(entries[i] + more) == 0]
    capacity = given["capacity"]
    many = capacity is not None and count(of_experts) > given["top_k"] * capacity
    exchanged = given["dispatch"] == "exchange" or (given["dispatch"] == "auto" and many)
    if count(of_experts) > 1 and exchanged and more and fits:
        entries[fits[0]] += more
    return count(entries[0]), count(entries[1])


def of_attention(program: Program) -> Case:
    given = program.options
    options: dict[str, Any] = {"window": given["window"], "use_bias": given["bias"]}
    options |= {"qk_norm": given["qk_norm"]}
    sizes = given["embed"], given["heads"], given["kv_heads"], 4
    own = {"context": given["context"], "attention": given["attention"]}
    layer, reference = (
        made(program, lambda key, more=more: ft.nn.Attention(*sizes, **more, **options, key=key))
        for more in (own, {"attention": "xla"})
    )
    shape = given["batch"], given["seq"], given["embed"]
    arrays = {"x": random_of(program).normal(size=shape).astype(np.float32)}
    names = {"x": "batch seq embed", "positions": "seq", "segments": "batch seq"}
    with_segments(program, arrays)

    def fun(layer: Any, arrays: Any) -> Any:
        positions = arrays.get("positions")
        in_order = positions is None
        y = layer(arrays["x"], positions, arrays.get("segments"), in_order=in_order)
        return jnp.sum(jnp.sin(y)), y

    return Case(fun, layer, reference, arrays, names)


def with_segments(program: Program, arrays: dict[str, Any]) -> None:
    given = program.options
    if given["segments"]:
        ids = random_of(program).integers(0, 3, (given["batch"], given["seq"]))
        arrays["segments"] = np.sort(ids, 1).astype(np.int32)


def of_model(program: Program) -> Case:
    """A transformer and its loss; or the stack of its blocks alone."""
    given = program.options
    sizes = given["vocab"], given["embed"], given["layers"], given["heads"], given["kv_heads"], 4
    same: dict[str, Any] = {"window": given["window"], "qk_norm": given["qk_norm"]}
    same |= {"attention_bias": given["bias"], "tie_embedding": given["tied"]}
    own = {name: given[name] for name in ("context", "attention", "remat", "microbatches")}
    if given["experts"]:
        same |= {name: given[name] for name in ("experts", "top_k", "normalize")}
        own |= {name: given[name] for name in ("capacity", "dispatch")}
    configs = [
        ft.nn.TransformerConfig(*sizes, given["hidden"], **same, **more)
        for more in (own, {"attention": "xla"})
    ]
    model, reference = (
        made(program, lambda key, config=config: ft.nn.Transformer.create(config, key=key))
        for config in configs
    )
    if program.kind == "stack":
        return of_stack(program, model, reference)
    text = random_of(program).integers(0, given["vocab"], (given["batch"], given["seq"] + 1))
    arrays = {"tokens": text[:, :-1].astype(np.int32), "targets": text[:, 1:].astype(np.int32)}
    with_segments(program, arrays)
    if given["mask"]:
        arrays["mask"] = random_of(program).random(arrays["tokens"].shape) < 0.7

    def fun(model: Any, arrays: Any) -> Any:
        rest = {name: x for name, x in arrays.items() if name not in ("tokens", "targets")}
        options = {"chunk": given["cross_entropy"], "balance": given["balance"]}
        options |= {"router_z": given["balance"], "in_order": "positions" not in arrays}
        return ft.nn.cross_entropy(
            model, arrays["tokens"], arrays["targets"], **rest, **options
        ), None

    names = {name: "batch seq" for name in ("tokens", "targets", "segments", "mask")}
    return Case(fun, model, reference, arrays, {**names, "positions": "seq"})


class Scaled(eqx.Module):
    """A block whose result is scaled by row, and shifted alike for all rows."""

    blocks: Any

    def __call__(self, x: Any, scales: Any, shift: Any) -> Any:
        return self.blocks(x) * scales[:, None, None] + jnp.broadcast_to(shift, x.shape)


def of_stack(program: Program, model: Any, reference: Any) -> Case:
    """Blocks that share an array by row and another one for all rows."""
    given = program.options
    shape = given["batch"], given["seq"], given["embed"]
    arrays = {"x": random_of(program).normal(size=shape).astype(np.float32)}
    arrays["scales"] = random_of(program).uniform(0.5, 1, shape[0]).astype(np.float32)

    def fun(blocks: Any, arrays: Any) -> Any:
        y = blocks.scan(
            arrays["x"],
            arrays["scales"],
            jnp.full((1, 1, 1), 0.1),
            remat=given["remat"],
            microbatches=given["microbatches"],
        )
        return jnp.sum(jnp.sin(y)), y

    stacks = [ft.Stacked(Scaled(one.blocks.layer)) for one in (model, reference)]
    return Case(fun, *stacks, arrays, {"x": "batch seq embed"})
