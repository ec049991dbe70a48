"""What a ledger consists of: `Collective`, one array that a program moves between devices, and
`Memory`, what the program needs on one device."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from functree.argument_checks import shown
from functree.errors import FunctreeValueError, did_you_mean
from functree.tree.paths import Path

MOVES = ("itself", "gradient", "activation", "update")
"""What a collective may move for a parameter."""


class Cause(NamedTuple):
    """Why a collective is there: an operation whose operands lie otherwise than its result.

    Attributes:
        op: the operation, as StableHLO calls it.
        source: its line, as in `Collective.source`.
        expression: what stands there.
        before: how its operands lie, and who has decided so: `f32[8/data, 32/model] (model by w)`.
        after: how its result lies, likewise.
        origins: who has decided so, each once: paths of arguments and results, and lines of
            constraints.
        reason: what asks for the collective; empty if nothing does.
        hint: what other code would do without it; empty if that is not known.
    """

    op: str
    source: str | None
    expression: str
    before: tuple[str, ...]
    after: str
    origins: tuple[str, ...]
    reason: str = ""
    hint: str = ""

    def __str__(self) -> str:
        told = self.reason or "nobody asked for it"
        if not self.after:
            return told
        taken = f" takes {', '.join(self.before)} and" if self.before else ""
        return f"{told}: `{self.expression or self.op}`{taken} makes {self.after}"


@dataclass(frozen=True)
class Collective:
    """One array that a compiled program moves between devices.

    Arrays that the compiler has combined in one collective share `op`.

    Attributes:
        kind: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all`, `ragged-all-to-all`,
            `collective-permute`.
        mesh_axes: the mesh axes that vary within a group of devices, for a permute between source
            and target; None if the groups are not understood, or the mesh is not known.
        group_size: the number of devices in a group; None likewise.
        bytes: the bytes of its result on one device, once.
        count: how often it runs, with all loops around it; a branch counts as if it were taken.
            None if the length of a loop is not known.
        paths: the parameters that it serves, each path starting inside its argument; empty if there
            are none.
        arguments: the function's parameters that these belong to, in the same order.
        phase: `forward`, `backward`, `recompute`, `update`; None if it is not known.
        source: the innermost line of a model that it comes from, `file:line`; None if it is not
            known. Layers of functree, of Equinox and of any other installed package are parts of a
            model; JAX, optax and the transforms of functree and Equinox are not.
        op: the name of the instruction in the text of the program.
        moves: what is moved for these parameters: `itself`, the array or what is computed of it
            alone; its `gradient`; an `activation` that it is multiplied by, or makes, or the
            gradient of such an activation; a part of its `update`. None if it serves none.
        called_from: the innermost line of your own code, if `source` is in an installed package or
            in functree. None otherwise, or if it is not known: JAX keeps the ten innermost frames
            (`jax_traceback_in_locations_limit`).
        verdict: `asked`, if the layout means it or you wrote it; `compiler`, if nobody asked for
            it; None if that cannot be told.
        cause: the operation that it comes from; None if that is not known.
    """

    kind: str
    mesh_axes: tuple[str, ...] | None
    group_size: int | None
    bytes: int
    count: int | None
    paths: tuple[Path, ...]
    arguments: tuple[str, ...]
    phase: str | None
    source: str | None
    op: str
    moves: str | None = None
    called_from: str | None = None
    verdict: str | None = None
    cause: Cause | None = None

    def __post_init__(self) -> None:
        if len(self.paths) != len(self.arguments):
            raise FunctreeValueError(
                f"a collective has an argument for each path: {self.op!r} has {len(self.paths)} "
                f"`paths` and {len(self.arguments)} `arguments`"
            )
        if self.moves not in (None, *MOVES):
            raise FunctreeValueError(
                f"{self.op!r} has `moves` {shown(self.moves)}, which is {', '.join(MOVES)} or None"
            )

    @property
    def path(self) -> Path | None:
        """The parameter that it serves, if it is only one."""
        if len(self.paths) != 1:
            return None
        return self.paths[0]

    @property
    def total(self) -> int:
        """The bytes of all its runs; of one run, if their number is not known."""
        if self.count is None:
            return self.bytes
        return self.bytes * self.count


class BytesByPath(Mapping[Path, int]):
    """Bytes by path. A path may be given as its text.

    Args:
        sizes: the bytes by path.
    """

    def __init__(self, sizes: Mapping[Path, int]):
        self._sizes: dict[Path, int] = dict(sizes)

    def __getitem__(self, path: Any) -> int:
        key = Path(path)  # of a text too, such as `model.blocks.0.w`
        if key not in self._sizes:
            raise KeyError(f"no argument at `{key}`{did_you_mean(key, self._sizes)}")
        return self._sizes[key]

    def __iter__(self) -> Iterator[Path]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __repr__(self) -> str:
        return repr({str(path): size for path, size in self._sizes.items()})


@dataclass(frozen=True)
class Memory:
    """What a compiled program needs on one device, in bytes.

    Attributes:
        arguments: the bytes of each array of the arguments, by its path, which begins with the name
            of the function's parameter. An array that the program does not use is not part of it.
        outputs: the bytes of the result.
        aliases: the bytes of the result that are in the memory of donated arguments.
        temporaries: the bytes of what is computed in between.
        peak: the most bytes at one time in the main memory, as the compiler says. The one for
            CPUs leaves out temporaries, so there it is the sum; the one for TPUs adds what is in
            their fast memory and in that of the host, so there it is at most the sum without these.
            It may be less than `arguments` or `temporaries`: it counts the buffers that are in use
            at one time, and the others count what is allocated, in the memory of the host too.
    """

    arguments: Mapping[Path, int] = field(hash=False)
    outputs: int
    aliases: int
    temporaries: int
    peak: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", BytesByPath(self.arguments))
