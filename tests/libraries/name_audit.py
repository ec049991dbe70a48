"""Programs of others ─► what their ledgers say, each name judged by the table of its program."""

import linecache
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

import functree as ft
from tests.libraries.audit_programs import (
    MESHES,
    PROGRAMS,
    Audited,
    abstract,
    allowed,
    is_wrong,
    odd_part,
    spec_of,
)

CELLS = [(name, layout) for name, one in PROGRAMS.items() for layout in one.layouts]
"""Each program with each of its layouts."""

COVERING = [
    (name, one.layouts[i % len(one.layouts)]) for i, (name, one) in enumerate(PROGRAMS.items())
]
"""Each program with one of its layouts."""


class Judged(NamedTuple):
    """An entry of a ledger, and the names that it has and may have.

    Attributes:
        entry: the entry.
        names: the names that it has.
        allowed: the names that the table allows.
    """

    entry: Any
    names: frozenset[str]
    allowed: frozenset[str]

    @property
    def is_wrong(self) -> bool:
        return is_wrong(self.names, self.allowed)

    def __str__(self) -> str:
        one = self.entry
        tag = _tag(one.called_from or one.source)
        return (
            f"{one.kind} {one.phase} {one.bytes} B {'@' + tag if tag else ''} ({one.source}): "
            f"named {', '.join(sorted(self.names)) or 'nothing'}, "
            f"allowed {', '.join(sorted(self.allowed)) or 'nothing'}"
        )


def mesh_of(layout: str, target: str | None) -> Any:
    """The mesh of a layout, on simulated devices or for a compiler alone."""
    sizes = MESHES[layout]
    if target is None:
        return jax.make_mesh(
            tuple(sizes.values()), tuple(sizes),
            axis_types=(jax.sharding.AxisType.Auto,) * len(sizes),
        )  # fmt: skip
    return ft.make_mesh(**sizes, target=target)


def ledger_of(one: Audited, layout: str, mesh: Mesh) -> ft.Ledger:
    """The ledger of a program."""
    args: dict[str, Any] = {}
    for name, value in one.args.items():
        tree = abstract(value() if callable(value) else value)
        own = one.by_argument.get(name, layout)
        put = lambda x, own=own: jax.ShapeDtypeStruct(  # noqa: E731
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec_of(x.shape, own))
        )
        args[name] = jax.tree.map(put, tree)
    arrays = tuple(args.values())
    # On a mesh for a compiler alone nothing can be computed, as diffrax does in a trace.
    by_hand = "mapped" in one.fun.__code__.co_names
    with jax.set_mesh(mesh) if by_hand else nullcontext(), jax.numpy_rank_promotion("allow"):
        with jax.numpy_dtype_promotion("standard"):
            if one.jit is eqx.filter_jit and mesh.devices.flat[0].platform == "cpu":
                # It takes abstract arrays for static values.
                real = jax.tree.map(
                    lambda x: jax.device_put(jnp.zeros(x.shape), x.sharding), arrays
                )
                return ft.ledger(eqx.filter_jit(one.fun), *real)
            results = _results(one, layout, mesh, args)
            donate = (0,) if one.donate else ()
            jitted = jax.jit(one.fun, out_shardings=results, donate_argnums=donate)
            return ft.ledger(jitted, *arrays)


def _results(one: Audited, layout: str, mesh: Mesh, args: Mapping[str, Any]) -> Any:
    """How the results are sharded: as the arguments of their names, or by their dimensions."""
    given = {str(path): x.sharding for path, x in _leaves(dict(args))}
    out = jax.eval_shape(one.fun, *args.values())
    shardings: list[NamedSharding] = []
    for path, x in _leaves(out):
        own = given.get(str(path)) if one.by_argument else None
        shardings.append(own or NamedSharding(mesh, spec_of(x.shape, layout)))
    return jax.tree.unflatten(jax.tree.structure(out), shardings)


def _leaves(tree: Any) -> Any:
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def judged(name: str, ledger: ft.Ledger) -> Iterator[Judged]:
    """Each entry of a ledger with its names."""
    table = PROGRAMS[name].names
    for one in ledger.collectives:
        names: set[str] = set()
        for argument, path in zip(one.arguments, one.paths, strict=True):
            names.add(f"{argument}.{path}" if len(path) else argument)
        fitting = allowed(
            table,
            kind=one.kind,
            phase=one.phase,
            size=one.bytes,
            tag=_tag(one.called_from or one.source),
        )
        yield Judged(one, frozenset(names), frozenset(fitting))


def _tag(source: str | None) -> str:
    """What stands behind `# @` in a line of source: `-` if nothing does, and empty if the line is
    not known."""
    if source is None:
        return ""
    file, _, number = source.rpartition(":")
    _, mark, tag = linecache.getline(file, int(number)).rpartition("# @")
    if mark:
        return tag.strip()
    return "-" if file.endswith("audit_programs.py") else ""


# What is moved has another size there than what it is: a cache of activations is an argument.
OTHERWISE = {("decode", "tp")}


def sizes_of(one: Audited) -> dict[str, int]:
    """The odd part of the number of elements of each argument, which tells its dimensions."""
    found: dict[str, int] = {}
    for name, value in one.args.items():
        for path, x in _leaves(abstract(value() if callable(value) else value)):
            found[f"{name}.{ft.Path.of(path)}" if path else name] = odd_part(x.size)
    return found


def is_moved(one: Judged, sizes: Mapping[str, int]) -> bool:
    """Whether an array can be what a ledger says: a parameter, or its gradient, has the dimensions
    of one that it is named for, and an activation has others."""
    like_one = odd_part(one.entry.bytes) in {sizes[name] for name in one.names}
    match one.entry.moves:
        case "itself" | "gradient":
            return like_one
        case "activation":
            return not like_one
        case "update":
            return bool(one.names)
    return not one.names


class Audit(NamedTuple):
    """What was found in some programs.

    Attributes:
        wrong: a line for each array with a name that it may not have.
        misread: a line for each that is not what the ledger says that is moved.
        arrays: the number of arrays.
        unnamed: the number of those without a name.
        share: the share of the bytes of these.
        missing: the share of the bytes of those that could have one, by their tables.
    """

    wrong: list[str]
    misread: list[str]
    arrays: int
    unnamed: int
    share: float
    missing: float


def audit(cells: Iterable[tuple[str, str]], target: str | None = None) -> Audit:
    """Judge each array that some programs move.

    Args:
        cells: the programs, each with a layout.
        target: what they are compiled for; None for simulated devices.
    """
    wrong: list[str] = []
    misread: list[str] = []
    found: list[Judged] = []
    for name, layout in cells:
        ledger = ledger_of(PROGRAMS[name], layout, mesh_of(layout, target))
        sizes = sizes_of(PROGRAMS[name])
        for one in judged(name, ledger):
            found.append(one)
            if one.is_wrong:
                wrong.append(f"{name} {layout}: {one}")
            if not is_moved(one, sizes) and (name, layout) not in OTHERWISE:
                misread.append(f"{name} {layout}: {one}, said to move {one.entry.moves}")
    unnamed = [one for one in found if not one.names]
    moved = sum(one.entry.total for one in found)
    share = sum(one.entry.total for one in unnamed) / moved
    missing = sum(one.entry.total for one in unnamed if one.allowed) / moved
    return Audit(wrong, misread, len(found), len(unnamed), share, missing)
