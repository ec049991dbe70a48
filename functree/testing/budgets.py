"""A ledger ─► the assertion that its collectives, or its memory, are within a budget."""

from collections.abc import Collection, Mapping
from typing import Any

from functree.compiled.collective import Collective
from functree.compiled.flow import KINDS
from functree.compiled.fold import fold
from functree.compiled.ledger import Ledger
from functree.errors import FunctreeError, did_you_mean
from functree.layout.plan.fold import bytes_text
from functree.parameters import EXTENT, check, shown

Kind = str | tuple[str, str | tuple[str, ...]]
"""A kind of collective, `"all-reduce"`; or only that over these mesh axes, `("all-reduce", "model")`."""

SHOWN = 10
"""The number of lines that a message has of what is moved."""


def assert_collectives(
    ledger: Any, allow: Collection[Kind] | None = None, at_most: int | Mapping[Kind, int] | None = None
) -> None:
    """Assert that a program moves what is expected, and nothing else.

    Args:
        ledger: a ledger, or a compiled function.
        allow: the collectives that it may have: kinds, or pairs of a kind and mesh axes; None for all.
        at_most: the bytes that it may move to each device, with all runs: in all, or by kind.

    Raises:
        AssertionError: it has others, or moves more. The message has what is moved, for which parameters and how much.
            Or there is something in it that the ledger could not read.
        FunctreeError: an argument is something else.

    Examples:
        >>> mesh = ft.make_mesh(data=2, model=4)
        >>> shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in [(64, 32), (16, 64)]]
        >>> layouts = (ft.P("model"), ft.P(None, "model"))
        >>> ledger = ft.ledger(lambda w, x: x @ w, *shapes, in_shardings=layouts, out_shardings=ft.P(), mesh=mesh)
        >>> ft.testing.assert_collectives(ledger, allow={("all-reduce", "model")}, at_most=2048)
        >>> ft.testing.assert_collectives(ledger, allow={"all-gather"})
        Traceback (most recent call last):
            ...
        AssertionError: the program has collectives that are not allowed
          all-reduce over model, 2 KiB: w, x
    """
    found = _ledger(ledger)
    # What could not be read may be anything, and what runs nobody knows how often is in no budget.
    if found.not_understood and (allow is not None or at_most is not None):
        raise AssertionError("\n  ".join(["this program cannot be held to a budget:", *found.not_understood]))
    for kind in [*(allow if isinstance(allow, Collection) else ()), *(at_most if isinstance(at_most, Mapping) else ())]:
        _check_axes(kind, found)
    if allow is not None:
        if not isinstance(allow, Collection) or isinstance(allow, str | bytes):
            raise FunctreeError(f"allow={shown(allow)}: give a set of kinds, such as `{{'all-reduce'}}`")
        allowed = list(map(_key, allow))
        others = [one for one in found.collectives if not any(_fits(one, key) for key in allowed)]
        if others:
            raise AssertionError(f"the program has collectives that are not allowed\n{_listed(others)}")
    for key, most in _budgets(at_most).items():
        moved = [one for one in found.collectives if key is None or _fits(one, key)]
        total = sum(one.total for one in moved)
        if total > most:
            what = "the program" if key is None else _text(key)
            raise AssertionError(f"{what} moves {bytes_text(total)}, of at most {bytes_text(most)}\n{_listed(moved)}")


def assert_peak_memory(compiled: Any, bytes: int) -> None:
    """Assert that a program needs at most so many bytes on one device at one time.

    Args:
        compiled: a compiled function, or its ledger.
        bytes: the most bytes.

    Raises:
        AssertionError: it needs more. The message has the memory by part, and the largest arguments.
        FunctreeError: `compiled` is something else.
    """
    check("assert_peak_memory has no budget", bytes=(bytes, EXTENT))
    memory = _ledger(compiled).memory
    if memory.peak <= bytes:
        return
    largest = sorted(memory.arguments.items(), key=lambda item: -item[1])[:SHOWN]
    lines = [f"the program needs {bytes_text(memory.peak)} on each device, of at most {bytes_text(bytes)}"]
    lines.append(f"  temporaries {bytes_text(memory.temporaries)}, outputs {bytes_text(memory.outputs)}")
    lines += [f"  {path} {bytes_text(size)}" for path, size in largest]
    raise AssertionError("\n".join(lines))


def _ledger(value: Any) -> Ledger:
    if isinstance(value, Ledger):
        return value
    make = getattr(value, "ledger", None)
    if make is None:
        raise FunctreeError(f"give a ledger, or a function that `ft.jit` has compiled, not {shown(value)}")
    return make()


_Key = tuple[str, tuple[str, ...] | None]
"""A kind, and the mesh axes if they are given."""


def _budgets(at_most: object) -> dict[_Key | None, int]:
    """The most bytes of each kind; of None for all kinds together."""
    if at_most is None:
        return {}
    if EXTENT.fits(at_most):
        return {None: int(at_most)}  # pyright: ignore[reportArgumentType]
    if not isinstance(at_most, Mapping) or not all(map(EXTENT.fits, at_most.values())):
        raise FunctreeError(f"at_most={shown(at_most)}: give a number of bytes, or one for each kind in a dict")
    return {_key(kind): size for kind, size in at_most.items()}


def _key(kind: object) -> _Key:
    """What a user has written for a kind. Raises FunctreeError for one that does not exist, which would fit nothing."""
    name, axes = kind if isinstance(kind, tuple) and len(kind) == 2 else (kind, None)
    if name not in KINDS:
        raise FunctreeError(f"{shown(kind)} is no kind of collective: {', '.join(KINDS)}{did_you_mean(name, KINDS)}")
    axes = (axes,) if isinstance(axes, str) else axes
    if axes is not None and not (isinstance(axes, tuple | list) and all(isinstance(one, str) for one in axes)):
        raise FunctreeError(f"{shown(kind)}: mesh axes are names, such as ('all-reduce', 'model')")
    return str(name), None if axes is None else tuple(axes)


def _check_axes(kind: object, ledger: Ledger) -> None:
    """Raise FunctreeError for mesh axes that the program does not have: a budget for them would hold always."""
    if isinstance(kind, str | bytes):
        return
    for axis in _key(kind)[1] or ():
        if axis not in ledger.sizes:
            known = f"its mesh has {', '.join(ledger.sizes) or 'no axes'}{did_you_mean(axis, ledger.sizes)}"
            raise FunctreeError(f"{shown(kind)}: the program has no mesh axis `{axis}`; {known}")


def _fits(one: Collective, key: _Key) -> bool:
    kind, axes = key
    return one.kind == kind and (axes is None or set(one.mesh_axes or ()) == set(axes))


def _text(key: _Key) -> str:
    kind, axes = key
    return kind if axes is None else f"{kind} over {', '.join(axes)}"


def _listed(moved: Collection[Collective]) -> str:
    lines = fold(list(moved))
    texts = [f"  {line.kind} over {line.axes}, {bytes_text(line.total)}: {line.title}" for line in lines[:SHOWN]]
    rest = [f"  and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "\n".join([*texts, *rest])
