"""A traced program ─► its operations, with the programs inside them; and what its outputs depend
on."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

AnyJaxpr: TypeAlias = ClosedJaxpr | Jaxpr
"""A traced program. In later versions of JAX the two are one class."""


def inner_programs(equation: JaxprEqn) -> Iterator[AnyJaxpr]:
    """The programs that an operation has among its parameters.

    Args:
        equation: the operation.
    """
    for value in equation.params.values():
        # `cond` has a tuple of programs, others have single ones.
        several = value if isinstance(value, tuple | list) else (value,)
        for one in several:
            if isinstance(one, ClosedJaxpr | Jaxpr):
                yield one


def all_equations(program: AnyJaxpr) -> Iterator[JaxprEqn]:
    """All operations of a program: its own, and those of the programs inside of it.

    Args:
        program: the program, as `jax.make_jaxpr` returns it.

    Examples:
        >>> from functree.tree.jaxprs import all_equations
        >>> program = jax.make_jaxpr(lambda x: jax.lax.map(jnp.sin, x))(
        ...     jnp.ones(3)
        ... )
        >>> [one.primitive.name for one in all_equations(program)]
        ['scan', 'sin']
    """
    waiting, seen = [program], set[int]()
    while waiting:
        one = waiting.pop()
        # A function that is called several times is one program.
        if id(one) in seen:
            continue
        seen.add(id(one))
        for equation in one.eqns:
            yield equation
            waiting += inner_programs(equation)


Sources = frozenset[Hashable]
"""What a value depends on."""

NOTHING: Sources = frozenset()

# Whatever draws random numbers, or makes the keys for that.
_RANDOM = ("random_", "threefry", "rng_")


class Reader(NamedTuple):
    """What else is asked of a program.

    Attributes:
        see: is called with each operation that is no loop, branch or call, and with what its inputs
            depend on; in a loop once, with what they depend on in any iteration.
        constants: what the constants of the program depend on.
        mutable: what that depends on which is read from a mutable array.
        adds: what the outputs of such an operation depend on besides its inputs.
    """

    see: Callable[[Any, Sequence[Sources]], None] | None = None
    constants: Sources = NOTHING
    mutable: Sources = NOTHING
    adds: Callable[[Any], Sources] | None = None


def dependencies(
    program: AnyJaxpr, inputs: Sequence[Sources], reader: Reader | None = None
) -> list[Sources]:
    """What each output of a program depends on.

    The programs inside of a program are followed too: those of functions that it calls, of
    branches and of loops. An output of any other operation depends on all inputs of the operation,
    so what is concatenated and split again depends on all parts.

    Args:
        program: the program, as `jax.make_jaxpr` returns it.
        inputs: what each input depends on; a set with the input's own index, to ask for the inputs.
        reader: what else is asked of it.

    Examples:
        >>> from functree.tree.jaxprs import dependencies
        >>> program = jax.make_jaxpr(lambda x, y, z: (x * y, jnp.sin(z)))(
        ...     1.0, 2.0, 3.0
        ... )
        >>> [sorted(found) for found in dependencies(program, [{0}, {1}, {2}])]
        [[0, 1], [2]]
    """
    reader = reader or Reader()
    open_program: Any = getattr(program, "jaxpr", program)
    known: dict[Any, Sources] = dict.fromkeys(open_program.constvars, reader.constants)
    known.update(zip(open_program.invars, map(frozenset, inputs), strict=True))
    for equation in open_program.eqns:
        found = _outputs(equation, _looked_up(known, equation.invars), reader)
        known.update(zip(equation.outvars, found, strict=True))
    return _looked_up(known, open_program.outvars)


def _looked_up(known: Mapping[Any, Sources], variables: Sequence[Any]) -> list[Sources]:
    """What variables depend on. Literals depend on nothing."""
    found: list[Sources] = []
    for variable in variables:
        if isinstance(variable, Literal):  # it has no hash
            found.append(NOTHING)
        else:
            found.append(known[variable])
    return found


def _outputs(equation: Any, inputs: list[Sources], reader: Reader) -> list[Sources]:
    """What the outputs of one operation depend on."""
    name = equation.primitive.name
    if name == "cond":
        return _branches(equation, inputs, reader)
    if name == "while":
        return _while(equation, inputs, reader)
    if name == "scan":
        return _scan(equation, inputs, reader)
    called = called_program(equation)
    if called is not None:
        return dependencies(called, inputs, reader)
    if reader.see is not None:
        reader.see(equation, inputs)
    read = any(hasattr(one.aval, "inner_aval") for one in equation.invars)
    added = NOTHING if reader.adds is None else reader.adds(equation)
    return [added.union(reader.mutable if read else NOTHING, *inputs)] * len(equation.outvars)


def is_random(equation: Any) -> bool:
    """Whether an operation draws random numbers, or makes keys for that."""
    return equation.primitive.name.startswith(_RANDOM)


def called_program(equation: Any) -> AnyJaxpr | None:
    """The program that an operation runs once, with the operation's own inputs and outputs: that of
    a function under `jit` or `checkpoint`, or one with a derivative rule of its own."""
    if equation.primitive.name in ("while", "scan"):
        return None
    inner = list(inner_programs(equation))
    if len(inner) != 1:
        return None
    program: Any = inner[0]
    open_program = getattr(program, "jaxpr", program)
    same_inputs = len(open_program.invars) == len(equation.invars)
    # The programs of reductions and scatters are those of scalars.
    same_ranks = all(
        inside.aval.ndim == outside.aval.ndim
        for inside, outside in zip(open_program.outvars, equation.outvars, strict=False)
        if hasattr(inside.aval, "ndim")
    )
    if same_inputs and same_ranks and len(open_program.outvars) == len(equation.outvars):
        return program
    return None


def _branches(equation: Any, inputs: list[Sources], reader: Reader) -> list[Sources]:
    """Of a choice between branches: each output depends on what chooses too."""
    chosen, *operands = inputs
    found = [chosen] * len(equation.outvars)
    for branch in equation.params["branches"]:
        of_branch = dependencies(branch, operands, reader)
        found = [one | other for one, other in zip(found, of_branch, strict=True)]
    return found


def _while(equation: Any, inputs: list[Sources], reader: Reader) -> list[Sources]:
    """Of a loop with a condition: each output depends on what ends the loop too."""
    before = equation.params["cond_nconsts"]
    first = before + equation.params["body_nconsts"]
    of_condition, of_body, carry = inputs[:before], inputs[before:first], inputs[first:]

    def iteration(reader: Reader) -> list[Sources]:
        test, body = equation.params["cond_jaxpr"], equation.params["body_jaxpr"]
        (going_on,) = dependencies(test, [*of_condition, *carry], reader)
        after = dependencies(body, [*of_body, *carry], reader)
        return [one | new | going_on for one, new in zip(carry, after, strict=True)]

    unseen = reader._replace(see=None)
    while (grown := iteration(unseen)) != carry:
        carry = grown
    return grown if reader.see is None else iteration(reader)


class ScanSizes(NamedTuple):
    """The numbers of the constants and of the carried values among the inputs of a loop over
    slices: the first inputs, before the arrays that are sliced. Carried values are the first
    outputs."""

    constants: int
    carried: int


def scan_sizes(equation: Any) -> ScanSizes:
    """The sizes of a loop.

    The parameters of the operation differ between versions of JAX. Slices and what is collected
    have one dimension less inside of the loop, and nothing else has.
    """
    body: Any = equation.params["jaxpr"]
    open_body = getattr(body, "jaxpr", body)
    sliced = _fewer_dimensions(open_body.invars, equation.invars)
    carried = len(equation.outvars) - _fewer_dimensions(open_body.outvars, equation.outvars)
    return ScanSizes(len(equation.invars) - sliced - carried, carried)


def _scan(equation: Any, inputs: list[Sources], reader: Reader) -> list[Sources]:
    """Of a loop over slices."""
    body: Any = equation.params["jaxpr"]
    first, carried = scan_sizes(equation)
    constants, slices = inputs[:first], inputs[first + carried :]
    carry = inputs[first : first + carried]

    def iteration(reader: Reader) -> list[Sources]:
        after = dependencies(body, [*constants, *carry, *slices], reader)
        grown = [one | new for one, new in zip(carry, after[:carried], strict=True)]
        return [*grown, *after[carried:]]

    unseen = reader._replace(see=None)
    while (grown := iteration(unseen))[:carried] != carry:
        carry = grown[:carried]
    return grown if reader.see is None else iteration(reader)


def _fewer_dimensions(inside: Sequence[Any], outside: Sequence[Any]) -> int:
    """How many values have fewer dimensions inside of a loop than outside."""
    pairs = zip(inside, outside, strict=True)
    return sum(one.aval.ndim < other.aval.ndim for one, other in pairs)
