"""A ledger ─► the assertion that its collectives, or its memory, are within a budget."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from functree.argument_checks import EXTENT, check, parameter_error, shown
from functree.compiled.collective import Collective
from functree.compiled.data_flow import KINDS
from functree.compiled.ledger import Ledger
from functree.compiled.table import rows_of_parameters
from functree.errors import FunctreeTypeError, FunctreeValueError, did_you_mean
from functree.report.table import bytes_text

Kind = str | tuple[str, str | tuple[str, ...]]
"""A kind of collective, `"all-reduce"`; or only that over these mesh axes, `("all-reduce",
"model")`."""

SHOWN = 10
"""The number of lines that a message has of what is moved."""


def assert_collectives(
    ledger: object,
    allow: Collection[Kind] | None = None,
    at_most: int | Mapping[Kind, int] | None = None,
) -> None:
    """Assert that a program moves what is expected, and nothing else.

    Args:
        ledger: a ledger, or a compiled function.
        allow: the collectives that it may have: kinds, or pairs of a kind and mesh axes; None for
            all.
        at_most: the bytes that it may move to each device, with all runs: in all, or by kind.

    Raises:
        AssertionError: it has others, or moves more. The message has what is moved, for which
            parameters and how much. Or there is something in it that the ledger could not read.
        FunctreeError: an argument is something else.

    Examples:
        >>> mesh = ft.make_mesh(data=2, model=4)
        >>> shapes = [
        ...     jax.ShapeDtypeStruct(shape, "float32")
        ...     for shape in [(64, 32), (16, 64)]
        ... ]
        >>> layouts = (ft.P("model"), ft.P(None, "model"))
        >>> options = dict(in_shardings=layouts, out_shardings=ft.P(), mesh=mesh)
        >>> ledger = ft.ledger(lambda w, x: x @ w, *shapes, **options)
        >>> ft.testing.assert_collectives(
        ...     ledger, allow={("all-reduce", "model")}, at_most=2048
        ... )
        >>> ft.testing.assert_collectives(ledger, allow={"all-gather"})
        Traceback (most recent call last):
            ...
        AssertionError: the program has collectives that are not allowed
          all-reduce over model, 2 KiB: w, x
    """
    found = _ledger_of(ledger)
    # What could not be read may be any collective, and one in a loop of unknown length may move any
    # number of bytes: an assertion that passes over it would say nothing.
    if found.not_understood and (allow is not None or at_most is not None):
        raise AssertionError(
            "\n  ".join(["this program cannot be held to a budget:", *found.not_understood])
        )
    # Both arguments are checked before one is compared, so that a misspelt kind is not hidden by
    # another failure.
    allowed, budgets = _allowed(allow, found), _budgets(at_most, found)
    if allowed is not None:
        others = list(found.collectives)
        for kind in allowed:
            others = [one for one in others if not kind.covers(one)]
        if others:
            raise AssertionError(
                f"the program has collectives that are not allowed\n{_listed(others)}"
            )
    for kind, most in budgets.items():
        what, moved = "the program", list(found.collectives)
        if kind is not None:
            what, moved = str(kind), [one for one in moved if kind.covers(one)]
        total = sum(one.total for one in moved)
        if total > most:
            raise AssertionError(
                f"{what} moves {bytes_text(total)}, of at most {bytes_text(most)}\n{_listed(moved)}"
            )


def assert_peak_memory(compiled: object, bytes: int) -> None:
    """Assert that a program needs at most so many bytes on one device at one time.

    Args:
        compiled: a compiled function, or its ledger.
        bytes: the most bytes.

    Raises:
        AssertionError: it needs more. The message has the memory by part, and the largest
            arguments.
        FunctreeError: `compiled` is something else.
    """
    check("assert_peak_memory has no budget", bytes=(bytes, EXTENT))
    memory = _ledger_of(compiled).memory
    if memory.peak <= bytes:
        return
    lines = [
        f"the program needs {bytes_text(memory.peak)} on each device, of at most "
        f"{bytes_text(bytes)}",
        f"  temporaries {bytes_text(memory.temporaries)}, outputs {bytes_text(memory.outputs)}",
    ]
    # Arguments by path: they are what a layout can make smaller.
    largest = sorted(memory.arguments.items(), key=lambda item: item[1], reverse=True)
    for path, size in largest[:SHOWN]:
        lines.append(f"  {path} {bytes_text(size)}")
    raise AssertionError("\n".join(lines))


def _ledger_of(value: object) -> Ledger:
    if isinstance(value, Ledger):
        return value
    make = getattr(value, "ledger", None)
    if make is None:
        raise FunctreeTypeError(
            f"give a ledger, or a function that `ft.jit` has compiled, not {shown(value)}"
        )
    return make()


class _Kind(NamedTuple):
    """A kind of collective, as a budget names it.

    Attributes:
        name: the name of the kind, `"all-reduce"`.
        axes: the mesh axes, in any order; None for all.
    """

    name: str
    axes: tuple[str, ...] | None

    @classmethod
    def of(cls, written: object, ledger: Ledger) -> "_Kind":
        """The kind that a user wrote.

        What does not exist in the program is refused: a budget for it would always hold.

        Raises:
            FunctreeError: there is no such kind, or no such mesh axis in the program.
        """
        name, axes = written, None
        if isinstance(written, tuple) and len(written) == 2:
            name, axes = written
        if name not in KINDS:
            raise FunctreeValueError(
                f"{shown(written)} is no kind of collective: {', '.join(KINDS)}"
                f"{did_you_mean(name, KINDS)}"
            )
        if axes is None:
            return cls(str(name), None)
        if isinstance(axes, str):
            axes = (axes,)
        if not isinstance(axes, tuple | list) or not all(isinstance(one, str) for one in axes):
            raise FunctreeTypeError(
                f"{shown(written)}: mesh axes are names, such as ('all-reduce', 'model')"
            )
        for axis in axes:
            if axis not in ledger.sizes:
                known = ", ".join(ledger.sizes) or "no axes"
                raise FunctreeValueError(
                    f"{shown(written)}: the program has no mesh axis `{axis}`; its mesh has "
                    f"{known}{did_you_mean(axis, ledger.sizes)}"
                )
        return cls(str(name), tuple(axes))

    def covers(self, collective: Collective) -> bool:
        """Whether a collective is of this kind."""
        if collective.kind != self.name:
            return False
        return self.axes is None or set(collective.mesh_axes or ()) == set(self.axes)

    def __str__(self) -> str:
        if self.axes is None:
            return self.name
        return f"{self.name} over {', '.join(self.axes)}"


def _allowed(allow: object, ledger: Ledger) -> list[_Kind] | None:
    """The kinds that are allowed; None for all."""
    if allow is None:
        return None
    # A text is a collection too, of its letters.
    if not isinstance(allow, Collection) or isinstance(allow, str | bytes):
        raise FunctreeTypeError(
            f"allow={shown(allow)}: give a set of kinds, such as `{{'all-reduce'}}`"
        )
    return [_Kind.of(kind, ledger) for kind in allow]


def _budgets(at_most: object, ledger: Ledger) -> dict[_Kind | None, int]:
    """The most bytes of each kind; of None for all kinds together."""
    if at_most is None:
        return {}
    if not isinstance(at_most, Mapping):
        _check_sizes(at_most, [at_most])
        return {None: int(at_most)}  # pyright: ignore[reportArgumentType]
    _check_sizes(at_most, at_most.values())
    return {_Kind.of(kind, ledger): size for kind, size in at_most.items()}


def _check_sizes(at_most: object, sizes: Collection[object]) -> None:
    if not all(map(EXTENT.fits, sizes)):
        raise parameter_error(
            f"at_most={shown(at_most)}: give a number of bytes, or one for each kind in a dict",
            right_type=all(map(EXTENT.is_type, sizes)),
        )


def _listed(moved: Collection[Collective]) -> str:
    """What is moved, the most first, as lines of a message."""
    rows = rows_of_parameters(list(moved))
    lines: list[str] = []
    for row in rows[:SHOWN]:
        lines.append(f"  {row.kind} over {row.axes}, {bytes_text(row.total)}: {row.title}")
    if len(rows) > SHOWN:
        lines.append(f"  and {len(rows) - SHOWN} more")
    return "\n".join(lines)
