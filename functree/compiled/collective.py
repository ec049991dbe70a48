"""A ledger consists of `Collective`s and a `Memory`.

A `Collective` is an array that a program moves between devices. A `Memory` holds the bytes that the
program needs on one device.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from functree.argument_checks import shown
from functree.errors import FunctreeValueError, did_you_mean
from functree.tree.paths import Path

MOVES = {
    "itself": "the array itself",
    "gradient": "its gradient",
    "activation": "an activation",
    "update": "a part of its update",
}
"""The values of `Collective.moves`, with their texts."""


class Cause(NamedTuple):
    """The reason for a collective: an operation whose operands and result are sharded differently.

    If the result is sharded for a later constraint, the constraint is the reason. In this case,
    `before` describes the operands of the earlier operation.

    Attributes:
        op: the name of the operation in StableHLO.
        source: the operation's source line, as in `Collective.source`.
        expression: the code at that line.
        before: each operand with its sharding and the origins of the sharding, such as
            `f32[8/data, 32/model] (model by w)`.
        after: the result, in the same form.
        origins: where these shardings come from, without duplicates: paths of arguments and
            results, and source lines of constraints. For a collective that was not asked for, they
            include the origins at the nearest earlier operation that moves the mesh axes.
        reason: why the collective is classified as asked for; empty if it is not.
        hint: advice for avoiding the collective; empty if there is none.
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
        told = self.reason or "not asked for"
        if not self.after:
            return told
        taken = f" takes {', '.join(self.before)} and" if self.before else ""
        return f"{told}: `{self.expression or self.op}`{taken} returns {self.after}"


class _OnDemand:
    """A field of a `Collective` that is None by default, or computed when it is first read."""

    def __init__(self, name: str):
        self._name = name

    def __get__(self, row: object, owner: type) -> Any:
        if row is None:
            return None  # the default: a dataclass reads it from the class
        # Python calls this only while the value is missing.
        values = vars(row)
        judge = values.get(_JUDGE)
        if judge is not None:
            values["verdict"], values["cause"] = judge(row)
            values.pop(_JUDGE, None)
        return values.get(self._name)


_JUDGE = "_judge"
_VERDICT: Any = _OnDemand("verdict")
_CAUSE: Any = _OnDemand("cause")


@dataclass(frozen=True)
class Collective:
    """One array that a compiled program moves between devices.

    Arrays that the compiler combined into one collective have the same `op`.

    Attributes:
        kind: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all`, `ragged-all-to-all`, or
            `collective-permute`.
        mesh_axes: the mesh axes along which the devices of a group differ; for a permute, along
            which source and target differ. None if the groups could not be parsed, or if the mesh
            is unknown.
        group_size: the number of devices in a group; None if it is unknown.
        bytes: the bytes of its result on one device, per run.
        count: the number of runs, including every iteration of enclosing loops. Every branch is
            assumed to be taken. None if the length of an enclosing loop is unknown.
        paths: the paths of the parameters that it serves, each relative to the argument that
            contains the parameter. Empty if there are none.
        arguments: the argument that each of these parameters belongs to, in the same order.
        phase: `forward`, `backward`, `recompute`, or `update`; None if it is unknown.
        source: the innermost line of model code, as `file:line`; if there is none, the innermost
            line. None if no line is known. Model code is your own code, the layers of functree, and
            installed packages other than JAX, Equinox, Flax, haliax, optax and einops.
        op: the name of its instruction in the program's text.
        moves: the role of the array for each of these parameters. `itself` is the parameter, or a
            value computed from the parameter alone. `gradient` is its gradient. `activation` is an
            activation that the parameter is multiplied by or helps to compute, or the gradient of
            such an activation. `update` is a part of its update. None if the array serves no
            parameter.
        called_from: the innermost line of your own code, if `source` is in an installed package or
            in functree. None otherwise, or if the line is unknown, since JAX keeps only the ten
            innermost frames (`jax_traceback_in_locations_limit`).
        verdict: `asked` if the layout requires it or you wrote it; `compiler` if the compiler chose
            it; None if this is unknown. The verdict and the cause are computed when one of them is
            first read.
        cause: the operation that the collective comes from; None if the operation is unknown.
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
    verdict: str | None = _VERDICT
    cause: Cause | None = _CAUSE

    def __post_init__(self) -> None:
        if len(self.paths) != len(self.arguments):
            raise FunctreeValueError(
                f"{self.op!r} has {len(self.paths)} `paths` and {len(self.arguments)} `arguments`: "
                "give one argument for each path"
            )
        if self.moves not in (None, *MOVES):
            known = ", ".join(map(repr, MOVES))
            raise FunctreeValueError(
                f"`moves` of {self.op!r} is {shown(self.moves)}: use {known} or None"
            )

    def __getstate__(self) -> dict[str, Any]:
        # A copy, for example in another process, has the verdict and the cause.
        _ = self.verdict
        return dict(vars(self))

    @property
    def path(self) -> Path | None:
        """The path of the parameter that it serves; None if it serves none or several."""
        if len(self.paths) != 1:
            return None
        return self.paths[0]

    @property
    def total(self) -> int:
        """The bytes of all runs together, or of one run if the number of runs is unknown."""
        if self.count is None:
            return self.bytes
        return self.bytes * self.count


def judge_later(
    row: Collective, judge: Callable[[Collective], tuple[str | None, Cause | None]]
) -> None:
    """Compute the verdict and the cause of a new collective when one of them is first read."""
    values = vars(row)
    del values["verdict"], values["cause"]
    values[_JUDGE] = judge


def total_of(collectives: Iterable[Collective]) -> int:
    """Return the bytes of all runs of some collectives."""
    return sum([collective.total for collective in collectives])


class BytesByPath(Mapping[Path, int]):
    """A mapping from paths to bytes. A key may be a `Path` or a string.

    Args:
        sizes: the bytes of each path.
    """

    def __init__(self, sizes: Mapping[Path, int]):
        self._sizes: dict[Path, int] = dict(sizes)

    def __getitem__(self, path: Any) -> int:
        key = Path(path)  # parses a string such as `model.blocks.0.w`
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
    """The memory that a compiled program needs on one device, in bytes.

    Attributes:
        arguments: the bytes of each argument array, by path. Each path begins with the name of its
            argument. Arrays that the program does not use are left out.
        outputs: the bytes of the result.
        aliases: the bytes of the result that reuse the memory of donated arguments.
        temporaries: the bytes of intermediate values.
        peak: the most bytes in use at one time in main memory, as the compiler reports them. The
            CPU compiler's figure leaves out temporaries, so on CPUs `peak` is the sum of all
            allocations instead. The TPU compiler's figure includes fast on-chip memory and host
            memory, so on TPUs `peak` is limited to the sum of the allocations in main memory. The
            peak may be less than the arguments or the temporaries, since both cover all
            allocations, including host memory.
    """

    arguments: Mapping[Path, int] = field(hash=False)
    outputs: int
    aliases: int
    temporaries: int
    peak: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", BytesByPath(self.arguments))
