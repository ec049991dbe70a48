"""`why` explains why a function's program moves arrays, and finds edits that avoid moves."""

import html
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from jax.sharding import AbstractMesh, Mesh

from functree.argument_checks import FLAG, SIZE, check
from functree.calls.program_ledger import ledger_of
from functree.compiled.collective import Cause, Collective, total_of
from functree.compiled.flops import count_flops
from functree.compiled.ledger import Ledger
from functree.compiled.shardy import moved_bytes
from functree.compiled.sources import source_end
from functree.compiled.table import VERDICTS
from functree.compiled.verdicts import ASKED, COMPILER
from functree.errors import count
from functree.explorer.edits import Edit, Edits
from functree.explorer.progress import attempts
from functree.layout.layout import LayoutTree
from functree.report.json_text import json_of
from functree.report.page import Report, code, notes_html, report_html, section_html, table_html
from functree.report.table import INDENT, bytes_text, grouped, lines_text, paragraphs
from functree.transforms.ledger import LoweredCall, call_of
from functree.tree.arrays import Tree

AVOIDABLE = "avoidable"

_T = TypeVar("_T")

# A fix may increase flops and memory by at most these factors.
_FLOPS, _MEMORY = 1.05, 1.02
# A removed constraint comes before another fix, unless the fix moves less than this share of the
# bytes that are still moved after the removal.
_CLEARLY = 0.9
# The maximum number of compiled edits of one place, and the maximum number of printed fixes.
_OF_ONE_PLACE = 2
_PRINTED = 3
# A fix must reduce the moved bytes to less than this share of the original program's bytes.
_WORTH = 0.97


class WhyRow(NamedTuple):
    """A collective with its reason.

    Attributes:
        collective: the collective.
        verdict: `asked`, `compiler` or None, as in `Collective.verdict`, or `avoidable`.
            `avoidable` means that the compiler chose the collective, and that a fix reduces the
            bytes that it moves.
        reason: why it is classified as asked for; `not asked for` if it is not.
        cause: the operation that it comes from.
    """

    collective: Collective
    verdict: str | None
    reason: str
    cause: Cause | None


class Fix(NamedTuple):
    """An edit after which a program moves less. The edited program was compiled.

    Each pair holds the figures before and after the edit, for one device.

    Attributes:
        change: the description of the edit.
        source: the line that it concerns; None if it concerns a layout.
        moved: the bytes moved in a run.
        peak: the most bytes of memory in use at one time.
        flops: the number of flops.
    """

    change: str
    source: str | None
    moved: tuple[int, int]
    peak: tuple[int, int]
    flops: tuple[int, int]

    def __str__(self) -> str:
        moved = f"moved {bytes_text(self.moved[0])} → {bytes_text(self.moved[1])}"
        costs = f"peak {_percent(*self.peak)}, flops {_percent(*self.flops)}"
        return f"{self.change}{_at(self.source)}: {moved}, {costs}"


@dataclass(frozen=True, repr=False)
class Why(Report):
    """The result of `ft.why`: the reasons why a program moves arrays, and edits that avoid moves.

    Attributes:
        name: the name of the function.
        rows: the program's collectives, the largest first.
        fixes: edits that move less with at most 5 % more flops and 2 % more memory, best first.
        trades: edits that move less, but need more flops or memory than a fix may, best first.
        hints: advice for collectives that no fix avoids.
        data: the arguments that are treated as data. Their layouts are not changed.
        tried: the number of edits that could be lowered and ranked.
        compiled: the number of edits that were compiled.
    """

    name: str
    rows: tuple[WhyRow, ...]
    fixes: tuple[Fix, ...]
    trades: tuple[Fix, ...]
    hints: tuple[str, ...]
    data: tuple[str, ...]
    tried: int
    compiled: int

    def __str__(self) -> str:
        lines = paragraphs([self._head()])
        rows = [row for row in self.rows if row.verdict != ASKED]
        for alike in grouped(rows, lambda row: (row.verdict, row.collective.kind, row.cause)):
            verdict = _verdict_text(alike[0])
            lines += paragraphs([f"{_title(alike)}: {verdict}: {_cause_text(alike[0])}"])
        for title, fixes in (("fixes", self.fixes), ("trades", self.trades)):
            if fixes:
                lines += ["", f"{title}, each compiled:"]
            for i, fix in enumerate(fixes[:_PRINTED], 1):
                lines += paragraphs([f"{INDENT}{i}. {fix}"])
        if self.hints:
            lines += ["", "hints:", *paragraphs([f"{INDENT}{hint}" for hint in self.hints])]
        return lines_text(lines)

    def __repr__(self) -> str:
        return f"<Why of {self.name}: fixes: {len(self.fixes)}, trades: {len(self.trades)}>"

    def _head(self) -> str:
        sizes = {None: 0, ASKED: 0, COMPILER: 0, AVOIDABLE: 0}
        for row in self.rows:
            sizes[row.verdict] += row.collective.total
        text = f"{self.name} moves {bytes_text(sum(sizes.values()))} to each device"
        text += f": {bytes_text(sizes[ASKED])} asked for, {bytes_text(sizes[AVOIDABLE])} avoidable"
        text += f", {bytes_text(sizes[COMPILER])} by the compiler's choice"
        if sizes[None]:
            text += f", {bytes_text(sizes[None])} unknown"
        if not self.fixes:
            text += "; no fix found"
        text += f"; {count(self.tried, 'edit')} tried, {self.compiled} compiled"
        if self.data:
            text += f"; data: {', '.join(self.data)}"
        return text

    def to_json(self) -> str:
        """Return the result as JSON."""
        return json_of("why", self)

    def _html(self, page: bool) -> str:
        rows = [
            (html.escape(_title([row])), _verdict_text(row), html.escape(_cause_text(row)))
            for row in self.rows
        ]
        content = section_html("Fixes", notes_html([], map(str, self.fixes)))
        content += section_html("Trades", notes_html([], map(str, self.trades)))
        content += section_html("Hints", notes_html([], self.hints))
        table = table_html(("collective", "verdict", "cause"), rows)
        content += section_html("Collectives", table)
        return report_html(f"Why {self.name} moves arrays", code(self._head()), content, page)


def _title(alike: Sequence[WhyRow]) -> str:
    """Return the title of rows with one cause."""
    collective = alike[0].collective
    axes, kind = ", ".join(collective.mesh_axes or ("?",)), collective.kind
    if len(alike) > 1:
        kind += f" ×{len(alike)}"
    total = bytes_text(sum(row.collective.total for row in alike))
    return f"{total} {kind} over {axes}{_at(collective.source and source_end(collective.source))}"


def _verdict_text(row: WhyRow) -> str:
    return VERDICTS.get(row.verdict or "", row.verdict or "unknown")


def _cause_text(row: WhyRow) -> str:
    return str(row.cause or "the collective's mesh axes are unknown")


def _at(source: str | None) -> str:
    return f" at {source}" if source else ""


def _percent(before: int, after: int) -> str:
    """Return the change in percent: `-12%`."""
    return f"{(after - before) / max(before, 1):+.0%}"


def why(
    fn: Callable[..., Tree],
    /,
    *args: Tree,
    in_shardings: LayoutTree = None,
    out_shardings: LayoutTree = None,
    mesh: Mesh | AbstractMesh | None = None,
    compilations: int = 8,
    progress: bool = True,
    **kwargs: Tree,
) -> Why:
    """Explain why a function's program moves arrays, and find edits that avoid moves. Nothing runs.

    An edit removes a constraint, or changes one dimension of an argument's spec. It may also shard
    a result like the argument that it replaces, drop a result's layout, change a rule, or add a
    missing `rules=` or `out_shardings=`. A changed rule also lays out the arguments that are on the
    mesh, if the function's own rules gave them their shardings. Edits are ranked using Shardy's
    layouts, and the best are compiled. The layout of data is never changed. On Explicit axes,
    layouts are types, so only rules and results are changed. An interrupt (Ctrl-C) ends the search
    and returns the edits found so far.

    Args:
        fn: a function, as in `ft.ledger`.
        *args: its arguments, which may be abstract.
        in_shardings: the layouts of the arguments, as in `ft.jit`, if the function is not jitted.
        out_shardings: the layout of the result, if the function is not jitted.
        mesh: the mesh, if the function is not jitted.
        compilations: the maximum number of edits to compile.
        progress: whether to show progress on standard error.
        **kwargs: its keyword arguments.

    Raises:
        FunctreeError: if `fn` is not a function.
        FunctreeError: if a layout is passed for a function that is already jitted.
        FunctreeError: if a mesh is passed for a function made with `ft.jit`.
        FunctreeError: if this version of JAX does not have Shardy's passes.
        FunctreeError: if the compiler does not return the program's text.
        FunctreeError: if `compilations` is not a positive integer.

    Examples:
        >>> def loss(w, x):
        ...     h = ft.constrain(jax.nn.relu(x @ w["up"]), ft.P("model", None))
        ...     return jnp.mean((h @ w["down"]) ** 2)
        >>> shapes = {"up": (128, 256), "down": (256, 128)}
        >>> w = {k: jax.ShapeDtypeStruct(v, "float32") for k, v in shapes.items()}
        >>> x = jax.ShapeDtypeStruct((64, 128), "float32")
        >>> why = ft.why(
        ...     jax.grad(loss),
        ...     w,
        ...     x,
        ...     in_shardings=(
        ...         {"up": ft.P(None, "model"), "down": ft.P("model", None)},
        ...         ft.P("data"),
        ...     ),
        ...     mesh=ft.make_mesh(data=2, model=4),
        ... )
        >>> print(why.fixes[0].change)
        remove `ft.constrain(jax.nn.relu(x @ w["up"]), ft.P("model", None))`
    """
    check("why: invalid options", compilations=(compilations, SIZE), progress=(progress, FLAG))
    call = call_of("why", fn, args, kwargs, in_shardings, out_shardings, mesh)
    layouts = call.layouts()  # raises, before anything is compiled, if they are unavailable
    ledger, text = call.compiled()
    edits = list(Edits(call, args, kwargs, layouts, ledger))
    estimated = _tried("why: {} ranked", edits, lambda edit: moved_bytes(edit.lower()), progress)
    chosen = _chosen(estimated, moved_bytes(call.lowered), compilations)
    before = _Figures.of(ledger, text)
    tried = _tried("why: {} compiled", chosen, lambda edit: _measured(edit, call, before), progress)
    less = [one for _, one in tried if one.fix.moved[1] < _WORTH * one.fix.moved[0]]
    less.sort(key=_order)
    fixes = [one for one in less if one.is_fix]
    rows = tuple(_rows(ledger, fixes))
    return Why(
        call.name,
        rows,
        tuple(one.fix for one in fixes),
        tuple(one.fix for one in less if not one.is_fix),
        tuple(_hints(rows)),
        ledger.data,
        len(estimated),
        len(tried),
    )


class _Figures(NamedTuple):
    moved: int
    peak: int
    flops: int
    arguments: int

    @classmethod
    def of(cls, ledger: Ledger, text: str) -> "_Figures":
        memory = ledger.memory
        moved = total_of(ledger.collectives)
        given = sum(memory.arguments.values())
        return cls(moved, memory.peak, count_flops(text).total, given)


class _Measured(NamedTuple):
    """A compiled edit.

    Attributes:
        fix: the edit with its figures.
        is_fix: whether its flops and memory are within the limits for a fix.
        left: the bytes that are still moved, by the collectives' properties.
    """

    fix: Fix
    is_fix: bool
    left: Mapping[Hashable, int]


def _tried(
    what: str, edits: Sequence[Edit], run: Callable[[Edit], _T], progress: bool
) -> list[tuple[Edit, _T]]:
    """Run a function on edits. Drop the edits for which it raises an error.

    For example, a mesh axis of a changed rule may not divide a size.
    """
    tried: list[tuple[Edit, _T]] = []
    for edit, result in attempts(what, edits, lambda edit: edit.change, run, progress):
        if not isinstance(result, Exception):
            tried.append((edit, result))
    return tried


def _chosen(estimated: Sequence[tuple[Edit, int]], before: int, most: int) -> list[Edit]:
    """Choose the best edits to compile, but only a few for each place.

    An edit that is not blamed is chosen only if its program is estimated to move less than before.

    Args:
        estimated: the edits, with an estimate of the bytes that their programs move.
        before: the estimate for the program without an edit.
        most: the maximum number of edits.
    """
    chosen: list[Edit] = []
    places = Counter[str]()
    for edit, moved in sorted(estimated, key=lambda pair: pair[1]):
        if not edit.is_blamed and moved >= before:
            continue
        places[edit.place] += 1
        if places[edit.place] <= _OF_ONE_PLACE:
            chosen.append(edit)
    return chosen[:most]


def _measured(edit: Edit, call: LoweredCall, before: _Figures) -> _Measured:
    """Compile an edit and measure it."""
    compiled = edit.lower().compile()
    ledger = ledger_of(
        compiled, call.name, call.parameters, call.results, None, None, of_program=False
    )
    after = _Figures.of(ledger, compiled.as_text() or "")
    moved, peak, flops, _ = zip(before, after, strict=True)
    is_fix = after.flops <= _FLOPS * before.flops
    is_fix &= after.peak <= _MEMORY * before.peak
    is_fix &= after.arguments <= _MEMORY * before.arguments
    fix = Fix(edit.change, edit.source, moved, peak, flops)
    return _Measured(fix, is_fix, _by_kind(ledger.collectives))


def _by_kind(collectives: Sequence[Collective]) -> Counter[Hashable]:
    sizes = Counter[Hashable]()
    for collective in collectives:
        sizes[_alike(collective)] += collective.total
    return sizes


def _alike(collective: Collective) -> Hashable:
    return collective.source, collective.kind, collective.mesh_axes, collective.phase


def _order(measured: _Measured) -> tuple[float, ...]:
    """Sort edits by the moved bytes. A removed constraint is preferred, as the simplest edit."""
    fix = measured.fix
    is_removal = fix.source is not None
    moved = fix.moved[1] * (_CLEARLY if is_removal else 1)
    return moved, not is_removal, fix.peak[1], fix.flops[1]


def _rows(ledger: Ledger, fixes: Sequence[_Measured]) -> Iterator[WhyRow]:
    """Yield the collectives of a ledger, the largest first; mark those that a fix avoids."""
    before = _by_kind(ledger.collectives)
    for collective in sorted(ledger.collectives, key=lambda collective: -collective.total):
        verdict, cause = collective.verdict, collective.cause
        less = any(
            fix.left.get(_alike(collective), 0) < before[_alike(collective)] for fix in fixes
        )
        if verdict == COMPILER and less:
            verdict = AVOIDABLE
        reason = (cause is not None and cause.reason) or "not asked for"
        yield WhyRow(collective, verdict, reason, cause)


def _hints(rows: Sequence[WhyRow]) -> list[str]:
    """Return the hints for operations whose collectives no fix avoids."""
    hints: dict[str, None] = {}
    for row in rows:
        if row.verdict == COMPILER and row.cause is not None and row.cause.hint:
            hints[f"`{row.cause.expression}`{_at(row.cause.source)}: {row.cause.hint}"] = None
    return list(hints)
