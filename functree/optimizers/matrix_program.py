"""A traced update of one parameter ─► what of it is computed element by element, and what on whole
matrices.

An update such as Muon's has three parts: moments, element by element; matrix products and what
belongs to them; and element by element again, the learning rate and the decay of weights. Only what
goes into the second part and what comes out of it has to be moved.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jaxtyping import Array

from functree.tree.jaxprs import Program, called_program, inner_programs

Variable = Any
"""A variable of a traced program, or a `Literal`."""

Equation = Any
"""An equation of a traced program."""

# What combines only elements at the same place.
_ELEMENTWISE = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "bitcast_convert_type", "broadcast_in_dim", "cbrt", "ceil", "clamp", "complex", "conj",
    "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf",
    "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag", "integer_pow",
    "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne",
    "neg", "nextafter", "not", "or", "pow", "real", "reduce_precision", "rem", "round", "rsqrt",
    "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin",
    "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
})  # fmt: skip
# What computes with matrices.
_MATRIX = frozenset({
    "cholesky", "conv_general_dilated", "custom_linear_solve", "dot_general", "eig", "eigh",
    "geqp3", "geqrf", "hessenberg", "householder_product", "lu", "lu_pivots_to_permutation", "qr",
    "ragged_dot", "ragged_dot_general", "scaled_dot", "schur", "svd", "symmetric_product",
    "triangular_solve", "tridiagonal", "tridiagonal_solve",
})  # fmt: skip


class Piece(NamedTuple):
    """A piece of a program, which can be run by itself.

    Attributes:
        program: the program that it is a piece of.
        equations: its equations, in order.
        inputs: the variables that it is computed from.
        outputs: the variables that others are computed from.
    """

    program: ClosedJaxpr
    equations: Sequence[Equation]
    inputs: Sequence[Variable]
    outputs: Sequence[Variable]

    def kind(self, layered: Set[Variable]) -> Hashable:
        """What it computes: equal for pieces that compute the same of other values of layers."""
        own = _program(self.program, self.equations, self.inputs, self.outputs)
        used = {v for one in self.equations for v in variables(one.invars)}
        # In the text variables are named by their order. Of constants it has only the types, and
        # what all layers share has to be the same.
        shared = [v for v in self.program.jaxpr.constvars if v in used]
        shared += [v for v in self.inputs if v not in layered]
        return str(own), tuple(shared)

    def run(
        self,
        values: Mapping[Variable, Array],
        layered: Set[Variable],
        stacked: int,
    ) -> dict[Variable, Array]:
        """The values of its outputs.

        Args:
            values: those of its inputs.
            layered: the variables that each layer of a stack has its own value of. Their values
                have leading dimensions.
            stacked: the number of these.
        """
        own = _program(self.program, self.equations, self.inputs, self.outputs)
        run: Callable[..., Any] = jaxpr_as_fun(own)
        in_axes = [0 if one in layered else None for one in self.inputs]
        out_axes = [0 if one in layered else None for one in self.outputs]
        if 0 in in_axes:
            for _ in range(stacked):
                run = jax.vmap(run, in_axes, out_axes)
        results = run(*(values[one] for one in self.inputs))
        return dict(zip(self.outputs, results, strict=True))


def _program(
    program: ClosedJaxpr,
    equations: Sequence[Equation],
    inputs: Sequence[Variable],
    outputs: Sequence[Variable],
) -> ClosedJaxpr:
    """A program with the constants of another one, and some of its equations."""
    own: Any = program.jaxpr.replace(
        invars=list(inputs), outvars=list(outputs), eqns=list(equations)
    )
    # In later versions of JAX a program has its constants itself.
    if not isinstance(own, ClosedJaxpr):
        own = ClosedJaxpr(own, program.consts)
    return own


def piece_of(
    program: ClosedJaxpr, equations: Sequence[Equation], wanted: Iterable[Variable]
) -> Piece:
    """The piece of a program with those of some equations that are needed for some variables."""
    outputs = list(dict.fromkeys(wanted))
    needed, kept = set(outputs), list[Equation]()
    for one in reversed(equations):
        if not needed.isdisjoint(one.outvars):
            kept.append(one)
            needed.update(variables(one.invars))
    kept.reverse()
    made = {variable for one in kept for variable in one.outvars}
    known = made.union(program.jaxpr.constvars)
    inputs: dict[Variable, None] = {}
    for one in kept:
        inputs.update(dict.fromkeys(variables(one.invars)))
    inputs.update(dict.fromkeys(outputs))
    return Piece(program, kept, [one for one in inputs if one not in known], outputs)


def variables(atoms: Iterable[Variable]) -> list[Variable]:
    """The variables among the operands of an equation, which may be literals too."""
    # A literal has no hash.
    return [one for one in atoms if not isinstance(one, Literal)]


def _derived(equations: Iterable[Equation], inputs: Iterable[Variable]) -> set[Variable]:
    """The variables that equations compute from some variables, and these."""
    found = set(inputs)
    for one in equations:
        if not found.isdisjoint(variables(one.invars)):
            found.update(one.outvars)
    return found


class Division(NamedTuple):
    """The update of one parameter in three pieces, each of which is computed from the inputs and
    the earlier ones.

    Attributes:
        before: what is computed element by element.
        whole: what is computed on whole matrices.
        after: what is computed element by element again.
        layered: the variables that each layer of a stack has its own value of.
    """

    before: Piece
    whole: Piece
    after: Piece
    layered: Set[Variable]


class MatrixProgram:
    """A traced update, of which that of each parameter is divided.

    Args:
        program: the program.
    """

    def __init__(self, program: ClosedJaxpr):
        self.program: ClosedJaxpr = inlined(program)
        self._producers: dict[Variable, int] = {}
        for i, one in enumerate(self.program.jaxpr.eqns):
            self._producers.update(dict.fromkeys(one.outvars, i))

    def needed(self, wanted: Iterable[Variable]) -> list[Equation]:
        """The equations that compute some variables, in order."""
        return [self.program.jaxpr.eqns[i] for i in sorted(self._needed(wanted))]

    def _needed(self, wanted: Iterable[Variable]) -> set[int]:
        """The indices of the equations that compute some variables."""
        waiting, found = variables(wanted), set[int]()
        while waiting:
            i = self._producers.get(waiting.pop())
            if i is not None and i not in found:
                found.add(i)
                waiting += variables(self.program.jaxpr.eqns[i].invars)
        return found

    def inputs(self, wanted: Iterable[Variable]) -> set[Variable]:
        """The inputs of the program that some variables are computed from."""
        wanted = variables(wanted)
        used = {v for one in self.needed(wanted) for v in variables(one.invars)}
        return used.union(wanted).intersection(self.program.jaxpr.invars)

    def only(self, indices: Sequence[int]) -> ClosedJaxpr:
        """The program with some of its outputs, what is needed for these, and its effects, such as
        what is printed."""
        open_program = self.program.jaxpr
        wanted = [open_program.outvars[i] for i in indices]
        effects = [i for i, one in enumerate(open_program.eqns) if one.effects]
        needed = self._needed([*wanted, *(v for i in effects for v in open_program.eqns[i].invars)])
        equations = [open_program.eqns[i] for i in sorted(needed.union(effects))]
        return _program(self.program, equations, open_program.invars, wanted)

    def divide(
        self, outputs: Iterable[Variable], own: Iterable[Variable], random: Iterable[Variable]
    ) -> Division | None:
        """The update of one parameter in pieces.

        What combines elements at different places is computed on whole matrices, and so is all
        between two such operations. What comes element by element behind them is too, as long as it
        needs nothing that is not whole anyway: so one array leaves, and not all that it is computed
        from.

        Args:
            outputs: the outputs that belong to the parameter.
            own: the inputs that belong to it.
            random: the inputs that are random keys, of which each layer has its own.

        Returns:
            None if there are no operations on matrices.
        """
        outputs = variables(outputs)
        needed = self.needed(outputs)
        own = _derived(needed, own)
        layered = _derived(needed, own.union(random))
        mixing: set[int] = set()
        for i, one in enumerate(needed):
            if not own.isdisjoint(one.outvars) and not _is_elementwise(one):
                mixing.add(i)
        if not any(_is_of_matrices(needed[i]) for i in mixing):
            return None
        behind = _behind(needed, mixing)
        whole = behind & _in_front(needed, mixing)
        whole |= _without_others(needed, whole, behind, layered)
        whole |= _from_others(needed, whole, layered)
        return self._pieces(needed, outputs, behind, whole, layered)

    def _pieces(
        self,
        needed: Sequence[Equation],
        outputs: Sequence[Variable],
        behind: Set[int],
        whole: Set[int],
        layered: Set[Variable],
    ) -> Division:
        """The pieces of which one has the equations `whole`; those of the last one are `behind`."""
        # What all layers share is computed where it is needed.
        shared = {i for i, one in enumerate(needed) if layered.isdisjoint(one.outvars)}

        def piece(indices: Set[int], wanted: Iterable[Variable]) -> Piece:
            equations = [one for i, one in enumerate(needed) if i in indices]
            made = _made(equations)
            return piece_of(self.program, equations, [v for v in wanted if v in made])

        after = piece(behind - whole | shared, outputs)
        used = {*outputs, *after.inputs}
        leaving = _made(needed[i] for i in sorted(whole))
        inside = piece(whole | shared, [v for v in leaving if v in used])
        outside = {*range(len(needed))} - behind
        before = piece(outside, [*inside.inputs, *after.inputs, *outputs])
        return Division(before, inside, after, layered)


def _made(equations: Iterable[Equation]) -> dict[Variable, None]:
    """The variables that equations compute, in order."""
    return dict.fromkeys(variable for one in equations for variable in one.outvars)


def _behind(equations: Sequence[Equation], some: Set[int]) -> set[int]:
    """The indices of some equations and of those that are computed from them."""
    found, made = set(some), set[Variable]()
    for i, one in enumerate(equations):
        if i in found or not made.isdisjoint(variables(one.invars)):
            found.add(i)
            made.update(one.outvars)
    return found


def _in_front(equations: Sequence[Equation], some: Set[int]) -> set[int]:
    """The indices of some equations and of those that they are computed from."""
    found, used = set(some), set[Variable]()
    for i in reversed(range(len(equations))):
        one = equations[i]
        if i in found or not used.isdisjoint(one.outvars):
            found.add(i)
            used.update(variables(one.invars))
    return found


def _without_others(
    equations: Sequence[Equation],
    whole: Set[int],
    behind: Set[int],
    layered: Set[Variable],
) -> set[int]:
    """The indices of equations behind those on whole matrices that need nothing else of a layer."""
    there: set[Variable] = set()
    for i in whole:
        there.update(variables(equations[i].invars), equations[i].outvars)
    found: set[int] = set()
    for i, one in enumerate(equations):
        needs = {v for v in variables(one.invars) if v in layered}
        if i in behind and i not in whole and needs <= there:
            found.add(i)
            there.update(one.outvars)
    return found


def _from_others(
    equations: Sequence[Equation], whole: Set[int], layered: Set[Variable]
) -> set[int]:
    """The indices of equations in front of those on whole matrices that are computed there too, so
    that less enters: a parameter alone, and not its squares and its half."""
    found: set[int] = set()
    while True:
        inside = whole | found
        used = {v for i in inside for v in variables(equations[i].invars) if v in layered}
        entering = used - _made(equations[i] for i in inside).keys()
        # By what they are computed from, the equations whose results enter.
        by_needs: dict[frozenset[Variable], list[int]] = {}
        for i, one in enumerate(equations):
            if i not in inside and not entering.isdisjoint(one.outvars):
                needs = frozenset(v for v in variables(one.invars) if v in layered)
                by_needs.setdefault(needs, []).append(i)
        more: set[int] = set()
        for needs, some in by_needs.items():
            if needs and (needs <= entering or len(needs) < len(some)):
                more.update(some)
        if not more:
            return found
        found |= more


def _is_elementwise(equation: Equation) -> bool:
    """Whether each element of the results is computed from those at the same place."""
    (shape, *others) = {one.aval.shape for one in equation.outvars}
    # A single number is at every place.
    fits = all(one.aval.shape in (shape, ()) for one in equation.invars)
    if others or not fits:
        return False
    if equation.primitive.name in _ELEMENTWISE:
        return True
    inner = list(inner_programs(equation))
    if equation.primitive.name != "cond" and called_program(equation) is None:
        return False
    return all(_is_elementwise(one) for program in inner for one in equations_of(program))


def _is_of_matrices(equation: Equation) -> bool:
    """Whether an operation, or one inside of it, computes with matrices."""
    # The product of two vectors is a sum.
    if equation.primitive.name in _MATRIX and equation.outvars[0].aval.shape:
        return True
    inner = inner_programs(equation)
    return any(_is_of_matrices(one) for program in inner for one in equations_of(program))


def equations_of(program: Program) -> Sequence[Equation]:
    """The equations of a program."""
    return getattr(program, "jaxpr", program).eqns


def inlined(program: ClosedJaxpr) -> ClosedJaxpr:
    """The same program, in which the functions under `jit` are no longer functions of their own."""
    types: list[jax.ShapeDtypeStruct] = []
    for variable in program.jaxpr.invars:
        type_: Any = variable.aval
        types.append(
            jax.ShapeDtypeStruct(
                type_.shape,
                type_.dtype,
                weak_type=getattr(type_, "weak_type", False),
                manual_axis_type=getattr(type_, "manual_axis_type", None),
            )
        )
    return jax.make_jaxpr(lambda *values: _run_inlined(program, values))(*types)


# The operations that call a function under `jit`.
_CALLS = frozenset({"closed_call", "jit", "pjit"})


def _run_inlined(program: Any, values: Sequence[Array]) -> list[Array]:
    """The results of a program, in which the functions under `jit` are run without it."""
    given = program.jaxpr
    known = dict(zip(given.invars, values, strict=True))
    known.update(zip(given.constvars, program.consts, strict=True))

    def value(atom: Variable) -> Any:
        return atom.val if isinstance(atom, Literal) else known[atom]

    for one in given.eqns:
        called = called_program(one) if one.primitive.name in _CALLS else None
        if called is not None:
            results = _run_inlined(called, list(map(value, one.invars)))
        else:
            operands = list(dict.fromkeys(variables(one.invars)))
            single = _program(program, [one], operands, one.outvars)
            results = jaxpr_as_fun(single)(*map(value, operands))
        known.update(zip(one.outvars, results, strict=True))
    return list(map(value, given.outvars))
