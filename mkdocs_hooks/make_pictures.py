"""This script draws the documentation's pictures with functree, into a folder.

`python mkdocs_hooks/make_pictures.py docs/pictures --svg` draws only the pictures that the README
shows, which are in the repository. `mkdocs build` draws all of them.
"""

import argparse
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# Simulate the devices. This must be set before JAX creates its backend.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import equinox as eqx
import jax
import optax
from drawing import WIDTH, Drawing
from jaxtyping import Array, Float

import functree as ft
from functree.compiled.table import table_rows
from functree.report.page import HIGH, WIDE, Pictures, device_color
from functree.report.table import bytes_text

SIZES = {"data": 2, "model": 4}
RULES = {"batch": "data", "hidden": "model", "embed": None}


class MLP(eqx.Module):
    """The model of the front page."""

    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden embed"]

    def __init__(self, key: Array):
        up, down = jax.random.split(key)
        self.up = jax.random.normal(up, (512, 2048)) / 512**0.5
        self.down = jax.random.normal(down, (2048, 512)) / 2048**0.5

    def __call__(self, x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
        hidden = ft.constrain(jax.nn.relu(x @ self.up), "batch hidden")
        return ft.constrain(hidden @ self.down, "batch embed")


class Forgetful(MLP):
    """The model of the front page with a wrong constraint: its spec lacks one mesh axis."""

    def __call__(self, x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
        hidden = ft.constrain(jax.nn.relu(x @ self.up), ft.P("data"))
        return ft.constrain(hidden @ self.down, "batch embed")


def loss(model: MLP, x: Float[Array, "batch embed"]) -> Float[Array, ""]:
    return (model(x) ** 2).mean()


class Block(eqx.Module):
    """A part of a block in the tutorial's model."""

    up: Float[Array, "embed hidden"]


class Classifier(eqx.Module):
    """A part of the tutorial's model."""

    blocks: list[Block]

    def __init__(self, key: Array):
        self.blocks = [Block(jax.random.normal(key, (256, 1024)))]


def mesh_plan() -> tuple[ft.Plan, ft.AxisRules, jax.sharding.Mesh]:
    rules, mesh = ft.AxisRules(RULES), ft.make_mesh(**SIZES)
    return ft.plan(ft.abstract(MLP)(jax.random.key(0)), rules, mesh), rules, mesh


def ledger_of(make: type[MLP]) -> ft.Ledger:
    """Return the ledger of a training step."""
    rules, mesh = ft.AxisRules(RULES), ft.make_mesh(**SIZES)
    model = ft.abstract(make)(jax.random.key(0))
    x = jax.ShapeDtypeStruct((4096, 512), "float32")
    step = ft.jit(
        ft.value_and_grad(loss),
        in_shardings=(rules, ft.P("data")),
        out_shardings=(None, rules),
        mesh=mesh,
        rules=rules,
    )
    return step.lower(model, x).compile().ledger()


# Pictures of arrays


class Cut(NamedTuple):
    """An array's shape, and the mesh axes that shard each dimension."""

    shape: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]


def cut_by(shape: tuple[int, ...], spec: jax.sharding.PartitionSpec) -> Cut:
    """Return the `Cut` of a shape that a spec shards."""
    axes: list[tuple[str, ...]] = []
    for entry in spec:
        mesh_axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
        axes.append(mesh_axes)
    return Cut(shape, tuple(axes))


def cut_of(row: ft.Row) -> Cut:
    """Return the `Cut` of a plan's row."""
    return cut_by(row.shape, row.spec or ft.P())


@dataclass
class Arrays:
    """The arrays in a picture, drawn as on a plan's page."""

    pictures: Pictures
    drawing: Drawing

    def draw(self, cut: Cut, x: float, y: float, width: float) -> str:
        """Draw an array, and return its description on the page."""
        name = re.findall('href="#(.*?)"', self.pictures.of(*cut))[0]
        height = width * HIGH / WIDE
        self.drawing.add(
            f'<use href="#{name}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>'
        )
        symbol = re.findall(f'<symbol id="{name}".*?</symbol>', self.pictures.definitions())[0]
        return re.findall("<title>(.*?)</title>", symbol)[0]

    def define(self) -> None:
        """Add the definitions of all arrays to the picture."""
        self.drawing.add(self.pictures.definitions().replace("<svg ", '<svg width="0" height="0" '))


def draw_mesh(drawing: Drawing, x: float, y: float, side: float) -> None:
    """Draw the mesh of 2 × 4, with each device in its color."""
    drawing.text(x + 2 * side, y - 12, "model", "muted", "middle")
    drawing.text(x - 10, y + side + 5, "data", "muted", "end")
    for device in range(8):
        row, column = divmod(device, 4)
        left, top = x + column * side, y + row * side
        drawing.block(left, top, side - 3, side - 3, device_color(device, SIZES))
        # The colors of the first row are light.
        kind = "light" if row else "dark"
        drawing.text(left + side / 2 - 1.5, top + side / 2 + 4, str(device), kind, "middle")


def mesh_picture() -> str:
    """Draw how rules shard arrays over a mesh of 2 × 4."""
    drawing = Drawing(
        "Three arrays sharded over a mesh of two by four devices, using the names of their axes"
    )
    arrays = Arrays(Pictures(SIZES), drawing)
    drawing.code(24, 36, "mesh = ft.make_mesh(data=2, model=4)")
    draw_mesh(drawing, 78, 78, 42)
    for i, (axis, mesh_axis) in enumerate(RULES.items()):
        top = 96 + 26 * i
        drawing.code(330, top, f"{axis!r:8}")
        drawing.arrow([(404, top - 5), (436, top - 5)])
        drawing.code(448, top, repr(mesh_axis))
    drawing.text(330, 66, "rules", "muted")
    shapes = {"batch hidden": (64, 256), "embed hidden": (64, 256), "batch embed": (64, 64)}
    rules = ft.AxisRules(RULES)
    for i, (axes, shape) in enumerate(shapes.items()):
        left = 24 + 192 * i
        spec = rules.spec(axes)
        drawing.box(left, 190, 172, 220)
        drawing.code(left + 86, 216, f'"{axes}"', "", "middle")
        says = arrays.draw(cut_by(shape, spec), left + 14, 228, 144)
        drawing.code(left + 86, 336, str(spec), "", "middle")
        for j, line in enumerate(re.split(", |: ", says)):
            drawing.text(left + 86, 358 + 19 * j, line, "muted", "middle")
    arrays.define()
    return drawing.svg(430)


def plan_picture() -> str:
    """Draw the plan of the front page's model."""
    plan, _, _ = mesh_plan()
    drawing = Drawing(
        "The plan of a model: each array with its shards, its spec, the reason and its bytes"
    )
    arrays = Arrays(Pictures(SIZES), drawing)
    drawing.code(24, 36, "ft.plan(model, rules, mesh)")
    drawing.text(WIDTH - 24, 36, "mesh (data=2, model=4)", "muted", "end")
    for i, row in enumerate(plan):
        top = 54 + 104 * i
        drawing.box(20, top, WIDTH - 40, 92)
        says = arrays.draw(cut_of(row), 32, top + 14, 102)
        drawing.code(152, top + 28, str(row.path), "strong")
        drawing.code(204, top + 28, str(row.spec))
        drawing.code(WIDTH - 36, top + 28, f"[{', '.join(map(str, row.shape))}]", "", "end")
        drawing.text(152, top + 52, f"{row.axes}: {row.reason}", "muted")
        drawing.text(152, top + 76, says.partition(":")[0], "muted")
        size = bytes_text(row.bytes_per_device)
        drawing.text(WIDTH - 36, top + 76, f"{size} each", "", "end")
    arrays.define()
    return drawing.svg(54 + 104 * len(plan) + 8)


def leaf_picture() -> str:
    """Draw the steps of one leaf in the tutorial's model, from annotation to array."""
    rules, mesh = ft.AxisRules(RULES), ft.make_mesh(**SIZES)
    model = ft.init(Classifier, rules, mesh)(jax.random.key(0))
    row, array = ft.plan(model, rules, mesh)["blocks.0.up"], model.blocks[0].up
    drawing = Drawing("One leaf in five steps, from its annotation to the array on the devices")
    arrays = Arrays(Pictures(SIZES), drawing)
    dimensions = Block.__annotations__["up"].dim_str
    shape = "×".join(map(str, row.shape))
    steps = [
        ("annotation", f'up: Float[Array, "{dimensions}"]', "what you write"),
        ("label", f"{row.path}, axes ({row.axes}), {shape}", "the leaf's path, axes and shape"),
        ("decision", str(row.reason), "what the layout chooses, and why"),
        ("spec", repr(row.spec), "JAX's PartitionSpec, checked against the mesh"),
        ("array", ", ".join(shards_text(row.shape, array.sharding.spec)), "created sharded"),
    ]
    for i, (name, code, about) in enumerate(steps):
        top = 20 + 84 * i
        drawing.box(20, top, WIDTH - 40, 60)
        drawing.text(36, top + 36, name, "strong")
        drawing.code(146, top + 26, code)
        drawing.text(146, top + 48, about, "muted")
        if i:
            drawing.arrow([(68, top - 24), (68, top - 2)])
    arrays.draw(cut_of(row), WIDTH - 118, 20 + 84 * 4 + 3, 86)
    arrays.define()
    return drawing.svg(20 + 84 * len(steps) - 4)


def stack_step() -> tuple[ft.Row, ft.Ledger]:
    """Return a leaf of a stack, and the ledger of its training step.

    The stack has four layers, with FSDP on four devices.
    """
    mesh = ft.make_mesh(data=4, devices=jax.devices()[:4])
    names = {"batch": "data", "layers": None, "seq": None, "embed": None, "hidden": None}
    layout = ft.AxisRules(names) | ft.FSDP("data", min_size=0)
    model = ft.abstract(make_stack)(jax.random.key(0))
    step = ft.jit(
        ft.value_and_grad(lambda model, x: (model.scan(x) ** 2).mean()),
        in_shardings=(layout, ft.P("data")),
        out_shardings=(None, layout),
        mesh=mesh,
        rules=layout,
    )
    x = jax.ShapeDtypeStruct((16, 64, 512), "float32")
    return ft.plan(model, layout, mesh)["layer.up"], step.lower(model, x).compile().ledger()


def make_stack(key: Array) -> ft.Stacked:
    return ft.stack(lambda key: ft.nn.MLP(512, 2048, key=key), 4, key)


def stack_picture() -> str:
    """Draw how FSDP shards a stack, and when it gathers a layer."""
    row, ledger = stack_step()
    drawing = Drawing("A stack of four layers under FSDP, which gathers one layer at a time")
    arrays = Arrays(Pictures({"data": 4}), drawing)
    layers, *shape = row.shape
    _, *axes = cut_of(row).axes
    drawing.code(24, 36, f"{row.path}: {row.dtype}{list(row.shape)} as {row.spec}")
    drawing.text(24, 60, "Each layer is sharded over all four devices.", "muted")
    for i in range(layers):
        left = 24 + 142 * i
        drawing.text(left + 62, 96, f"layer {i}", "strong" if i == 1 else "", "middle")
        arrays.draw(Cut(tuple(shape), tuple(axes)), left, 104, 124)
    drawing.arrow([(228, 182), (228, 222)])
    drawing.text(244, 208, "all-gather, when the scan reaches layer 1", "muted")
    whole = Cut(tuple(shape), ((), ()))
    arrays.draw(whole, 166, 228, 124)
    drawing.text(310, 262, "whole on each device", "strong")
    drawing.text(310, 284, "while this layer runs; then freed", "muted")
    for i, (phase, kind) in enumerate(
        [("forward", "all-gather"), ("backward", "all-gather"), ("backward", "all-reduce")]
    ):
        moved = [x for x in ledger.collectives if (x.phase, x.kind) == (phase, kind)]
        runs, most = sum(x.count or 0 for x in moved), max(x.bytes for x in moved)
        arrays_moved = "gradients" if kind == "all-reduce" else "weights"
        top = 338 + 26 * i
        drawing.text(24, top, phase)
        drawing.code(108, top, f"{runs} {kind}s")
        drawing.text(262, top, f"of {arrays_moved}, {bytes_text(most)} each", "muted")
    arrays.define()
    return drawing.svg(414)


def shards_text(shape: tuple[int, ...], spec: jax.sharding.PartitionSpec) -> tuple[str, str]:
    """Describe in two lines how an array is sharded on the mesh of 2 × 4."""
    sharding = jax.sharding.NamedSharding(ft.make_mesh(**SIZES), spec)
    local = "×".join(map(str, sharding.shard_shape(shape)))
    shards = len({str(index) for index in sharding.devices_indices_map(shape).values()})
    if shards == 1:
        return "replicated", f"{local} on each device"
    copies = 8 // shards
    return f"{shards} shards of {local}", f"each on {copies} device{'s' * (copies > 1)}"


def specs_picture() -> str:
    """Draw one array on a mesh of 2 × 4, sharded by four specs."""
    drawing = Drawing("A mesh of two by four devices, and one array sharded by four specs")
    arrays = Arrays(Pictures(SIZES), drawing)
    drawing.code(24, 36, "mesh = ft.make_mesh(data=2, model=4)")
    draw_mesh(drawing, 78, 78, 42)
    drawing.text(290, 92, "Each device has a number and a color.", "muted")
    drawing.text(290, 114, "A shard has the colors of all devices", "muted")
    drawing.text(290, 136, "that keep it.", "muted")
    specs = [
        ft.P(None, None),
        ft.P("data", None),
        ft.P(None, "model"),
        ft.P("data", "model"),
    ]
    for i, spec in enumerate(specs):
        left, top = 24 + 284 * (i % 2), 190 + 204 * (i // 2)
        drawing.box(left, top, 268, 188)
        drawing.code(left + 134, top + 28, repr(spec), "strong", "middle")
        arrays.draw(cut_by((8, 16), spec), left + 64, top + 42, 140)
        for j, line in enumerate(shards_text((8, 16), spec)):
            drawing.text(left + 134, top + 150 + 20 * j, line, "muted", "middle")
    arrays.define()
    return drawing.svg(600)


# The mesh in the pictures of collectives and of parallelism.
FOUR = {"data": 4}


def draw_row(drawing: Drawing, x: float, y: float, cells: list[tuple[str, str] | None]) -> None:
    """Draw the contents of a device: colored blocks with text, and empty boxes."""
    for i, cell in enumerate(cells):
        left = x + 32 * i
        if cell is None:
            drawing.box(left, y, 29, 24)
            continue
        color, text = cell
        drawing.block(left, y, 29, 24, color)
        drawing.text(left + 14.5, y + 17, text, "dark", "middle")


def collectives_picture() -> str:
    """Draw the contents of four devices before and after each kind of collective."""
    drawing = Drawing("Four collectives: what each of four devices has before and after")
    colors = [device_color(device, FOUR) for device in range(4)]
    total = "var(--bar)"

    def all_of(i: int) -> list[tuple[str, str] | None]:
        return [(colors[i], f"{i}{'abcd'[part]}") for part in range(4)]

    def only(i: int, cell: tuple[str, str]) -> list[tuple[str, str] | None]:
        return [cell if part == i else None for part in range(4)]

    sums: list[tuple[str, str] | None] = [(total, f"Σ{part}") for part in "abcd"]
    parts: list[tuple[str, str] | None] = [(colors[i], "abcd"[i]) for i in range(4)]
    kinds = [
        (
            "all-reduce",
            "Each device gets the sum over all devices.",
            [all_of(i) for i in range(4)],
            [sums] * 4,
        ),
        (
            "all-gather",
            "Each device gets the shards of all devices.",
            [only(i, (colors[i], "abcd"[i])) for i in range(4)],
            [parts] * 4,
        ),
        (
            "reduce-scatter",
            "Each device gets one shard of the sum.",
            [all_of(i) for i in range(4)],
            [only(i, (total, f"Σ{'abcd'[i]}")) for i in range(4)],
        ),
        (
            "all-to-all",
            "Each device sends one part to each device.",
            [all_of(i) for i in range(4)],
            [[(colors[j], f"{j}{'abcd'[i]}") for j in range(4)] for i in range(4)],
        ),
    ]
    for k, (kind, about, before, after) in enumerate(kinds):
        top = 16 + 168 * k
        drawing.box(20, top, WIDTH - 40, 156)
        drawing.code(36, top + 26, kind, "strong")
        drawing.text(170, top + 26, about, "muted")
        for i in range(4):
            y = top + 40 + 28 * i
            drawing.text(36, y + 17, f"device {i}", "muted")
            draw_row(drawing, 124, y, before[i])
            draw_row(drawing, 352, y, after[i])
        drawing.arrow([(268, top + 94), (336, top + 94)])
    return drawing.svg(16 + 168 * 4)


def parallelism_picture() -> str:
    """Draw what four devices keep and move under three kinds of parallelism."""
    drawing = Drawing(
        "Data parallelism, FSDP and tensor parallelism: what each of four devices keeps and moves"
    )
    kinds = [
        ("Data parallelism", False, True, ["all-reduce gradients"]),
        ("FSDP", True, True, ["all-gather parameters", "reduce-scatter", "gradients"]),
        ("Tensor parallelism", True, False, ["all-reduce activations"]),
    ]
    for k, (kind, model_sharded, batch_sharded, moved) in enumerate(kinds):
        left = 16 + 192 * k
        drawing.box(left, 16, 184, 326)
        drawing.text(left + 92, 42, kind, "strong", "middle")
        drawing.text(left + 62, 70, "batch", "muted", "middle")
        drawing.text(left + 134, 70, "model", "muted", "middle")
        for i in range(4):
            color = device_color(i, FOUR)
            top = 80 + 48 * i
            drawing.text(left + 16, top + 25, str(i), "muted", "middle")
            for x, sharded, across in ((30, batch_sharded, False), (102, model_sharded, True)):
                drawing.box(left + x, top, 64, 40)
                if not sharded:
                    drawing.block(left + x, top, 64, 40, color)
                elif across:
                    drawing.block(left + x + 16 * i, top, 16, 40, color)
                else:
                    drawing.block(left + x, top + 10 * i, 64, 10, color)
        for j, line in enumerate(moved):
            drawing.text(left + 92, 292 + 20 * j, line, "muted", "middle")
    return drawing.svg(358)


# Ledgers


def ledgers_picture() -> str:
    """Draw the ledgers of a training step with a constraint by names and with a wrong spec."""
    drawing = Drawing("Two ledgers of one training step side by side: 6 MiB moved, and 22 MiB")
    sides = [
        (MLP, "good", 'constrain(h, "batch hidden")'),
        (Forgetful, "bad", 'constrain(h, P("data"))'),
    ]
    ledgers = [ledger_of(make) for make, _, _ in sides]
    moved = [sum(collective.total for collective in ledger.collectives) for ledger in ledgers]
    for i, ((_, kind, code), ledger) in enumerate(zip(sides, ledgers, strict=True)):
        left = 20 + 286 * i
        drawing.box(left, 20, 274, 290)
        drawing.code(left + 14, 48, code)
        drawing.text(left + 14, 84, f"{bytes_text(moved[i])} moved", f"strong {kind}")
        width = 246 * moved[i] / max(moved)
        drawing.block(left + 14, 94, width, 8, f"var(--{kind})")
        for j, row in enumerate(table_rows(ledger.collectives)[:3]):
            top = 138 + 58 * j
            drawing.code(left + 14, top, row.title.replace("model.", ""), "strong")
            drawing.text(left + 260, top, bytes_text(row.total), "", "end")
            drawing.text(left + 14, top + 20, f"{row.kind} over {row.axes}", "muted")
            drawing.block(left + 14, top + 28, 246 * row.total / max(moved), 4, "var(--bar)")
    drawing.text(24, 336, "Both programs compute the same values, and neither raises an error.")
    drawing.text(24, 358, "The second gathers an activation that should stay sharded.")
    return drawing.svg(378)


# Pages


def larger_plan() -> ft.Plan:
    """Plan a transformer's training state for devices that you don't have."""
    config = ft.nn.TransformerConfig(
        vocab_size=32_000,
        embed=2048,
        layers=16,
        heads=16,
        kv_heads=4,
        head_dim=128,
        hidden=5632,
        max_seq=4096,
    )

    def make(key: Array) -> ft.TrainState:
        return ft.TrainState.create(ft.nn.Transformer.create(config, key=key), optax.adamw(1e-3))

    names = ["vocab", "heads", "kv_heads", "hidden"]
    rules = {**dict.fromkeys(names, "model"), "embed": None, "layers": None, "head_dim": None}
    layout = ft.AxisRules(rules) | ft.FSDP("data")
    return ft.plan(ft.abstract(make)(jax.random.key(0)), layout, {"data": 8, "model": 4})


SVG: dict[str, Callable[[], str]] = {
    "mesh.svg": mesh_picture,
    "specs.svg": specs_picture,
    "collectives.svg": collectives_picture,
    "parallelism.svg": parallelism_picture,
    "plan.svg": plan_picture,
    "leaf.svg": leaf_picture,
    "stack.svg": stack_picture,
    "ledgers.svg": ledgers_picture,
}
PAGES: dict[str, Callable[[], str]] = {
    "plan.html": lambda: mesh_plan()[0].html(),
    "larger-plan.html": lambda: larger_plan().html(),
    "ledger.html": lambda: ledger_of(MLP).html(),
    "bad-ledger.html": lambda: ledger_of(Forgetful).html(),
}


def write(folder: Path, pictures: Iterable[str]) -> None:
    """Draw the pictures with these names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in pictures:
        (folder / name).write_text((SVG | PAGES)[name](), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder for the pictures")
    parser.add_argument("--svg", action="store_true", help="draw only pictures in the repository")
    options = parser.parse_args()
    write(options.folder, SVG if options.svg else SVG | PAGES)


if __name__ == "__main__":
    main()
