"""`Edits` proposes changes to a function's layouts and constraints, each with a changed program.

A `Variant` is a traced program whose constraints and shardings can be changed.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, cast

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.stages import Lowered
from jax.tree_util import tree_leaves, tree_map

from functree.calls.program import around
from functree.compiled.layouts import Layouts, result_name
from functree.compiled.ledger import Ledger
from functree.compiled.shardy import ARGUMENT, CONSTRAINT
from functree.compiled.sources import lines_of
from functree.compiled.verdicts import COMPILER
from functree.devices.meshes import (
    entry,
    mesh_axes,
    named_axes,
    of_rank,
    parts_over,
    spec_text,
    without,
)
from functree.devices.placement import first_mesh, is_sharded_as
from functree.errors import FunctreeError, FunctreeWarning
from functree.labels.leaves import read
from functree.layout.layout import LayoutTree, as_layout, is_layout, walk
from functree.layout.rules import AxisRules, with_rule
from functree.layout.state_sharding import with_tables
from functree.report.table import common_path, grouped, pattern_of
from functree.transforms.jit.jitted import Jit
from functree.transforms.ledger import LoweredCall
from functree.tree.arrays import AnyArray, Tree, abstract
from functree.tree.jaxprs import all_equations
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton


@dataclass(frozen=True)
class Variant:
    """A traced program with the shardings of its inputs and outputs.

    Attributes:
        program: the program, from arrays to arrays.
        inputs: its abstract inputs, with their shardings.
        outputs: the sharding of each output; None if the compiler chooses the sharding.
        donated: the indices of the donated inputs.
        mesh: the mesh to enter for lowering; None for the current mesh.
    """

    program: Any
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    outputs: tuple[NamedSharding | None, ...]
    donated: tuple[int, ...]
    mesh: Mesh | AbstractMesh | None

    @classmethod
    def of(
        cls, fn: Callable[..., Any], arrays: Sequence[AnyArray], mesh: Mesh | AbstractMesh | None
    ) -> "Variant | None":
        """Trace a function that only calls a jitted function; return None if it does more.

        Args:
            fn: the function, from arrays to arrays.
            arrays: its inputs, which may be abstract.
            mesh: the mesh to enter for tracing.
        """
        with around(mesh):
            traced = jax.make_jaxpr(fn)(*arrays)
        if len(traced.eqns) != 1 or "out_shardings" not in traced.eqns[0].params:
            return None
        [call] = traced.eqns
        given: dict[Any, Any] = dict(zip(traced.jaxpr.invars, arrays, strict=True))
        # If the function is a module, its arrays are constants.
        given |= zip(traced.jaxpr.constvars, traced.consts, strict=True)
        inputs: list[jax.ShapeDtypeStruct] = []
        shardings = call.params["in_shardings"]
        for variable, sharding in zip(call.invars, shardings, strict=True):
            if not isinstance(sharding, NamedSharding):
                array = variable.val if isinstance(variable, Literal) else given.get(variable)
                sharding = getattr(array, "sharding", None)
            inputs.append(_laid(variable.aval, sharding))
        donated = [i for i, is_donated in enumerate(call.params["donated_invars"]) if is_donated]
        outputs = map(_named, call.params["out_shardings"])
        return cls(call.params["jaxpr"], tuple(inputs), tuple(outputs), tuple(donated), mesh)

    def lower(self) -> Lowered:
        """Lower the program."""
        jitted = jax.jit(
            jaxpr_as_fun(self.program),
            out_shardings=list(self.outputs),
            donate_argnums=self.donated,
        )
        with around(self.mesh):
            return jitted.lower(*self.inputs)

    def constraints(self) -> Iterator["Constraint"]:
        """Yield the constraints, without repeats."""
        yield from dict.fromkeys(filter(None, map(_constraint, all_equations(self.program))))

    def without_constraint(self, constraint: "Constraint") -> "Variant":
        """Return the program without a constraint, wherever the line is called."""
        return replace(self, program=_Without(constraint).program(self.program))

    def with_sharding(
        self,
        sharding: NamedSharding | None,
        inputs: Collection[int] = (),
        outputs: Collection[int] = (),
    ) -> "Variant":
        """Return the program with a different sharding for some inputs and outputs."""
        arrays = [_laid(x, sharding) if i in inputs else x for i, x in enumerate(self.inputs)]
        shardings = [sharding if i in outputs else x for i, x in enumerate(self.outputs)]
        return replace(self, inputs=tuple(arrays), outputs=tuple(shardings))


def _laid(array: Any, sharding: object) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=_named(sharding))


def _named(sharding: object) -> NamedSharding | None:
    """Return a sharding if it is a `NamedSharding`; None otherwise."""
    return sharding if isinstance(sharding, NamedSharding) else None


class Constraint(NamedTuple):
    """A constraint in a traced program.

    Attributes:
        line: its source line, as in a ledger.
        spec: its spec; None for all constraints on the line. A line may contain several
            constraints, or be in a helper with several callers.
    """

    line: str
    spec: PartitionSpec | None


def _constraint(equation: JaxprEqn) -> Constraint | None:
    """Return a constraint; None for other operations."""
    if equation.primitive.name != "sharding_constraint" or equation.source_info.traceback is None:
        return None
    frames = equation.source_info.traceback.frames
    lines = lines_of((frame.file_name, frame.line_num) for frame in frames)
    sharding, aval = _named(equation.params["sharding"]), cast(Any, equation.outvars[0].aval)
    if lines is None or sharding is None:
        return None
    return Constraint(lines.source, of_rank(sharding.spec, aval.ndim))


class _Without:
    """A transformation that removes a constraint from programs."""

    def __init__(self, constraint: Constraint):
        self._constraint = constraint
        # The program of a function that is called several times must stay one object.
        self._known: dict[int, Any] = {}

    def program(self, program: Any) -> Any:
        """Remove these constraints from a program and the programs inside it."""
        if id(program) not in self._known:
            inner = getattr(program, "jaxpr", program)
            changed = self._jaxpr(inner)
            if inner is not program:
                changed = program.replace(jaxpr=changed)
            self._known[id(program)] = changed
        return self._known[id(program)]

    def _jaxpr(self, jaxpr: Any) -> Any:
        same: dict[Any, Any] = {}

        def seen(variables: Sequence[Any]) -> list[Any]:
            return [x if isinstance(x, Literal) else same.get(x, x) for x in variables]

        equations: list[JaxprEqn] = []
        for equation in jaxpr.eqns:
            operands = seen(equation.invars)
            found = _constraint(equation)
            if found is not None and self._constraint in (found, found._replace(spec=None)):
                same[equation.outvars[0]] = operands[0]
                continue
            params = tree_map(self._inner, equation.params)
            equations.append(equation.replace(invars=operands, params=params))
        return jaxpr.replace(eqns=equations, outvars=seen(jaxpr.outvars))

    def _inner(self, value: Any) -> Any:
        return self.program(value) if isinstance(value, ClosedJaxpr | Jaxpr) else value


# Edits

_Call = tuple[Sequence[Tree], Mapping[str, Tree]]
"""The positional and the keyword arguments of a call."""


class Edit(NamedTuple):
    """A change to a program.

    Attributes:
        change: the description of the edit.
        source: the line that it concerns; None if it concerns a layout.
        place: the constraint, array or rule that it concerns; edits of one place are alternatives.
        lower: a function that lowers the changed program. It may raise any error that tracing may
            raise.
        is_blamed: whether it concerns the origin of a collective that the compiler chose or that a
            constraint requires.
    """

    change: str
    source: str | None
    place: str
    lower: Callable[[], Lowered]
    is_blamed: bool = True


class Edits:
    """The edits that may avoid a program's collectives.

    Args:
        call: the lowered call of the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        layouts: the layouts of the function's program.
        ledger: the ledger of the function's program.
    """

    def __init__(
        self,
        call: LoweredCall,
        args: Sequence[Tree],
        kwargs: Mapping[str, Tree],
        layouts: Layouts,
        ledger: Ledger,
    ):
        self._call, self._args, self._kwargs = call, args, kwargs
        self._ledger, self._layouts = ledger, layouts
        self._variant = Variant.of(call.of_arrays, call.arrays, call.mesh)
        self._data = [i for i, path in enumerate(call.parameters) if str(path[0]) in ledger.data]
        # Constraints on Explicit axes are types, not operations in the trace.
        self._constraints = [] if self._variant is None else list(self._variant.constraints())
        # The mesh axes that shard an argument. The compiler may use a part of a mesh axis, which
        # has another name.
        used = (named_axes(row.spec) for row in layouts if row.op == ARGUMENT)
        self._used = set[str]().union(*used) & layouts.sizes.keys()

    def __iter__(self) -> Iterator[Edit]:
        blamed, others = dict[str, None](), dict[str, None]()
        for collective in sorted(self._ledger.collectives, key=lambda one: -one.total):
            if collective.cause is not None:
                is_blamed = collective.verdict == COMPILER or collective.cause.op == CONSTRAINT
                (others, blamed)[is_blamed].update(dict.fromkeys(collective.cause.origins))
        if self._variant is not None:
            # A result that is sharded differently from the parameter that it replaces is tried even
            # if it is not an origin. Results without layouts are tried together.
            outputs = list(self._variant.outputs)
            for i, path in enumerate(self._call.results):
                replaced = list(self._replaced(i, self._variant))
                if replaced and outputs[i] is not None:
                    others[result_name(path)] = None
                elif len(replaced) == 1:
                    [outputs[i]] = replaced
            if outputs != list(self._variant.outputs):
                text = "pass the layouts of the replaced arguments as `out_shardings=`"
                changed = replace(self._variant, outputs=tuple(outputs))
                yield Edit(text, None, "out_shardings=", changed.lower)
            # Layers share edits.
            known = set[tuple[str, str | None]]()
            for origin in dict.fromkeys([*blamed, *others]):
                for edit in self._of_origin(origin, self._variant):
                    if (edit.change, edit.source) not in known:
                        yield edit._replace(is_blamed=origin in blamed)
                    known.add((edit.change, edit.source))
        if self._ledger.collectives:
            yield from self._of_rules(bool(blamed))

    def _of_origin(self, origin: str, variant: Variant) -> Iterator[Edit]:
        on_line = [constraint for constraint in self._constraints if constraint.line == origin]
        if len(on_line) > 1:
            on_line.append(Constraint(origin, None))
        rows = (row for row in self._layouts if row.op == CONSTRAINT and row.source == origin)
        known: dict[PartitionSpec | None, str] = {row.spec: row.expression for row in rows}
        for constraint in on_line:
            # Code without a file has an empty expression.
            expression = known.get(constraint.spec) or next(iter(known.values()), "")
            change = f"remove `{expression}`" if expression else "remove the constraint"
            if len(on_line) > 1 and constraint.spec is not None:
                change += f" where it is {spec_text(constraint.spec)}"
            changed = variant.without_constraint(constraint)
            yield Edit(change, origin, f"{origin} {constraint.spec}", changed.lower)
        for i, path in enumerate(self._call.parameters):
            if str(path) == origin and i not in self._data:
                yield from self._of_parameter(i, variant)
        for i, path in enumerate(self._call.results):
            if result_name(path) == origin:
                yield from self._of_result(i, variant)

    def _of_parameter(self, i: int, variant: Variant) -> Iterator[Edit]:
        """Yield edits of a parameter's spec in all layers.

        Each edit also changes the specs of the parameter's optimizer moments and its new value.
        """
        array, sharding = variant.inputs[i], variant.inputs[i].sharding
        # On Explicit axes, the types in the trace would change.
        if not isinstance(sharding, NamedSharding) or AxisType.Explicit in sharding.mesh.axis_types:
            return
        paths, like = self._call.parameters, (array.shape, sharding)
        same = [
            j
            for j, other in enumerate(variant.inputs)
            if (other.shape, other.sharding) == like and j not in self._data
        ]
        # Another model with the same paths is changed too, since a result may replace either.
        alike = [j for j in same if _pattern_inside(paths[j]) == _pattern_inside(paths[i])]
        tails = {_inside(paths[j]) for j in alike}
        inputs = [j for j in same if _ends_with(paths[j], tails)]
        outputs = [
            j
            for j, output in enumerate(variant.outputs)
            if output == sharding and _ends_with(self._call.results[j], tails)
        ]
        groups = grouped([paths[j] for j in alike], pattern_of)
        what = "` and `".join(map(common_path, groups))
        old = of_rank(sharding.spec, len(array.shape))
        for spec in self._specs(old, array.shape, sharding):
            new = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
            changed = variant.with_sharding(new, {*alike, *inputs}, outputs)
            text = f"shard `{what}` with {spec_text(spec)} instead of {spec_text(old)}"
            yield Edit(text, None, what, changed.lower)

    def _specs(
        self, spec: PartitionSpec, shape: Sequence[int], sharding: NamedSharding
    ) -> Iterator[PartitionSpec]:
        """Yield specs in which one dimension has no mesh axis, a different one, or one more.

        A mesh axis that a dimension gains is removed from the dimension that it sharded before.
        Mesh axes that no argument uses stay unused.
        """
        sizes, used = sharding.mesh.shape, sorted(self._used)
        specs: dict[PartitionSpec, None] = {spec: None}
        for dim, size in enumerate(shape):
            old_axes = mesh_axes(spec.partitions[dim])
            wanted = [(), *((axis,) for axis in used), *((*old_axes, axis) for axis in used)]
            for axes in dict.fromkeys(wanted):
                if len(set(axes)) < len(axes) or size % parts_over(axes, sizes):
                    continue
                entries = list(without(spec, set(axes) - set(old_axes)).partitions)
                entries[dim] = entry(axes)
                specs[PartitionSpec(*entries)] = None
        yield from list(specs)[1:]

    def _of_result(self, i: int, variant: Variant) -> Iterator[Edit]:
        """Yield edits that shard a result like the replaced parameter, or remove its own layout."""
        result, old = self._call.results[i], variant.outputs[i]
        replaced = self._replaced(i, variant)
        # The state of a loop keeps its layout.
        if old is None or old in replaced:
            return
        alike = [
            j
            for j, path in enumerate(self._call.results)
            if pattern_of(path) == pattern_of(result) and variant.outputs[j] == old
        ]
        what = common_path([Path(("result", *self._call.results[j])) for j in alike])
        for sharding, path in replaced.items():
            changed = variant.with_sharding(sharding, outputs=alike)
            text = f"shard `{what}` with {spec_text(sharding.spec)}, like `{path}`"
            yield Edit(text, None, what, changed.lower)
        changed = variant.with_sharding(None, outputs=alike)
        text = f"remove the layout {spec_text(old.spec)} of `{what}`"
        yield Edit(text, None, what, changed.lower)

    def _replaced(self, i: int, variant: Variant) -> dict[NamedSharding, Path]:
        """Return the parameters that a result may replace, by their different shardings."""
        replaced: dict[NamedSharding, Path] = {}
        for path, parameter in zip(self._call.parameters, variant.inputs, strict=True):
            sharding = parameter.sharding
            has_shape = variant.program.out_avals[i].shape == parameter.shape
            if has_shape and _ends_with(self._call.results[i], {_inside(path)}):
                if isinstance(sharding, NamedSharding):
                    replaced.setdefault(sharding, path)
        return replaced

    def _of_rules(self, is_blamed: bool) -> Iterator[Edit]:
        """Yield edits that change a rule in the function's tables, or pass the rules at all."""
        fn = self._call.fn
        if not isinstance(fn, Jit):
            return
        mesh = first_mesh(self._call.arrays)
        if mesh is not None:
            fn = fn.changed(mesh=mesh)
        given = self._for_rules(fn)

        def edit(text: str, place: str, options: Mapping[str, Any]) -> Edit:
            return Edit(text, None, place, partial(self._lower, fn, given, options), is_blamed)

        layouts = list(map(as_layout, tree_leaves(fn.layouts, is_leaf=is_layout)))
        # Without `rules=`, a model's layers do not constrain activations.
        if fn.layouts["rules"] is None:
            for text, layout in {repr(one): one for one in layouts if one.rules}.items():
                yield edit(f"also pass `rules={text}`", "rules=", {"rules": layout})
        inner = chain.from_iterable(map(walk, layouts))
        for table in dict.fromkeys(one for one in inner if isinstance(one, AxisRules)):
            known = dict(reversed(table.pairs))
            for axis in dict.fromkeys([*table.mentioned, *self._axes()]):
                old = known.get(axis)
                for new in [None, *sorted(self._used)]:
                    if new != old:
                        text = f"change the rule for `{axis}` from {old!r} to {new!r}"
                        yield edit(text, f"rule {axis}", _with_rule(fn.layouts, table, axis, new))

    def _for_rules(self, fn: Jit[..., Tree]) -> _Call:
        """Return the arguments without the shardings that the function's own rules give them.

        Changed rules lay out these arguments differently. If the rules do not give all arguments
        except data their shardings, all arguments keep theirs.
        """
        skeleton, arrays = Skeleton.apart((tuple(self._args), dict(self._kwargs)))
        given = [
            array if i in self._data else abstract(jax.typeof(array))
            for i, array in enumerate(arrays)
        ]
        args, kwargs = skeleton.fill(given)
        with suppress(FunctreeError, FunctreeWarning), warnings.catch_warnings():
            # Rules do not give arrays without names their shardings, but warn about them.
            warnings.simplefilter("error", FunctreeWarning)
            _, arrays = fn.trace(*args, **kwargs).of_arrays()
            if all(map(_lies_as, arrays, self._call.arrays)):
                return args, kwargs
        return self._args, self._kwargs

    def _lower(self, fn: Jit[..., Tree], given: _Call, options: Mapping[str, Any]) -> Lowered:
        """Lower the call with other options of the function."""
        args, kwargs = given
        traced = fn.changed(**options).trace(*args, **kwargs)
        _, arrays = traced.of_arrays()
        for i in self._data:
            if not _lies_as(arrays[i], self._call.arrays[i]):
                raise FunctreeError("the layout of data must not change")
        return traced.lower().jax

    def _axes(self) -> Iterator[str]:
        """Yield the axis names of all arguments."""
        for leaf in read((*self._args, *self._kwargs.values()), None).leaves:
            yield from filter(None, leaf.axes)


def _with_rule(
    layouts: Mapping[str, LayoutTree], table: AxisRules, axis: str, new: str | None
) -> Mapping[str, LayoutTree]:
    """Change a rule in each layout that contains a table."""

    def changed(rules: AxisRules) -> AxisRules:
        return with_rule(rules, axis, new) if rules == table else rules

    def relaid(layout: Any) -> Any:
        return layout and with_tables(as_layout(layout), changed)

    return tree_map(relaid, layouts, is_leaf=is_layout)


def _lies_as(array: Any, other: Any) -> bool:
    here, there = getattr(array, "sharding", None), getattr(other, "sharding", None)
    if here is None or there is None:
        return here is there
    return is_sharded_as(array, there)


def _inside(path: Path) -> tuple[Any, ...]:
    """Return a path relative to its argument or, in a training state, relative to the model."""
    inner = tuple(path[1:])
    return inner[1:] if inner[:1] == ("model",) else inner


def _pattern_inside(path: Path) -> tuple[object, ...]:
    """Return the pattern of a path inside its argument; the path of an argument without parts."""
    return pattern_of(Path(_inside(path)) or path)


def _ends_with(path: Path, tails: set[tuple[Any, ...]]) -> bool:
    return any(tail and tuple(path[-len(tail) :]) == tail for tail in tails)
