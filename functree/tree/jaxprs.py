"""`all_equations` lists a program's operations; `dependencies` follows values through a program."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

AnyJaxpr: TypeAlias = ClosedJaxpr | Jaxpr
"""A traced program. In later versions of JAX, the two classes are one."""


def inner_programs(equation: JaxprEqn) -> Iterator[AnyJaxpr]:
    """Yield the programs among the parameters of an operation.

    Args:
        equation: the operation.
    """
    for value in equation.params.values():
        # `cond` has a tuple of programs; other operations have single programs.
        several = value if isinstance(value, tuple | list) else (value,)
        for inner in several:
            if isinstance(inner, ClosedJaxpr | Jaxpr):
                yield inner


def all_equations(program: AnyJaxpr, shard_maps: bool = True) -> Iterator[JaxprEqn]:
    """Yield all operations of a program, including the operations of its inner programs.

    Args:
        program: a program, such as `jax.make_jaxpr` returns.
        shard_maps: whether to include the operations inside a `shard_map`.

    Examples:
        >>> from functree.tree.jaxprs import all_equations
        >>> program = jax.make_jaxpr(lambda x: jax.lax.map(jnp.sin, x))(
        ...     jnp.ones(3)
        ... )
        >>> [equation.primitive.name for equation in all_equations(program)]
        ['scan', 'sin']
    """
    waiting, seen = [program], set[int]()
    while waiting:
        current = waiting.pop()
        # A function that is called several times is one program.
        if id(current) in seen:
            continue
        seen.add(id(current))
        for equation in current.eqns:
            yield equation
            if shard_maps or equation.primitive.name != "shard_map":
                waiting += inner_programs(equation)


Sources = frozenset[Hashable]
"""The sources that a value depends on."""

NOTHING: Sources = frozenset()

_Adds = Callable[[JaxprEqn], Sources] | None

# Prefixes of the operations that draw random numbers or make random keys.
_RANDOM = ("random_", "threefry", "rng_")


def dependencies(program: AnyJaxpr, inputs: Sequence[Sources], adds: _Adds = None) -> list[Sources]:
    """Find the sources that each output of a program depends on.

    Dependencies are followed into called functions, branches and loops. Each output of any other
    operation depends on all its inputs. After a concatenation and a split, each piece therefore
    depends on all concatenated arrays.

    Args:
        program: a program, such as `jax.make_jaxpr` returns.
        inputs: the sources of each input; for example, a set with the input's index.
        adds: a function from an operation, other than loops, branches and calls, to further
            sources of its outputs.

    Examples:
        >>> from functree.tree.jaxprs import dependencies
        >>> program = jax.make_jaxpr(lambda x, y, z: (x * y, jnp.sin(z)))(
        ...     1.0, 2.0, 3.0
        ... )
        >>> [sorted(sources) for sources in dependencies(program, [{0}, {1}, {2}])]
        [[0, 1], [2]]
    """
    open_program: Any = getattr(program, "jaxpr", program)
    known: dict[Any, Sources] = dict.fromkeys(open_program.constvars, NOTHING)
    known.update(zip(open_program.invars, map(frozenset, inputs), strict=True))
    for equation in open_program.eqns:
        outputs = _outputs(equation, _looked_up(known, equation.invars), adds)
        known.update(zip(equation.outvars, outputs, strict=True))
    return _looked_up(known, open_program.outvars)


def _looked_up(known: Mapping[Any, Sources], variables: Sequence[Any]) -> list[Sources]:
    """Look up the sources of variables. Literals have no sources."""
    sources: list[Sources] = []
    for variable in variables:
        if isinstance(variable, Literal):  # it has no hash
            sources.append(NOTHING)
        else:
            sources.append(known[variable])
    return sources


def _outputs(equation: Any, inputs: list[Sources], adds: _Adds) -> list[Sources]:
    """Find the sources of an operation's outputs."""
    name = equation.primitive.name
    if name == "cond":
        return _branches(equation, inputs, adds)
    if name == "while":
        return _while(equation, inputs, adds)
    if name == "scan":
        return _scan(equation, inputs, adds)
    called = called_program(equation)
    if called is not None:
        return dependencies(called, inputs, adds)
    added = NOTHING if adds is None else adds(equation)
    return [added.union(*inputs)] * len(equation.outvars)


def is_random(equation: Any) -> bool:
    """Return whether an operation draws random numbers or makes random keys."""
    return equation.primitive.name.startswith(_RANDOM)


def called_program(equation: Any) -> AnyJaxpr | None:
    """Return the program that an operation runs once, with the operation's inputs and outputs.

    The program is a function under `jit` or `checkpoint`, or a function with a custom derivative
    rule. The result is None for all other operations.
    """
    if equation.primitive.name in ("while", "scan"):
        return None
    inner = list(inner_programs(equation))
    if len(inner) != 1:
        return None
    program: Any = inner[0]
    open_program = getattr(program, "jaxpr", program)
    same_inputs = len(open_program.invars) == len(equation.invars)
    # The inner programs of reductions and scatters work on scalars.
    same_ranks = all(
        inside.aval.ndim == outside.aval.ndim
        for inside, outside in zip(open_program.outvars, equation.outvars, strict=False)
        if hasattr(inside.aval, "ndim")
    )
    if same_inputs and same_ranks and len(open_program.outvars) == len(equation.outvars):
        return program
    return None


def _branches(equation: Any, inputs: list[Sources], adds: _Adds) -> list[Sources]:
    """Find the sources of a `cond`'s outputs. Each output depends on the branch index too."""
    index, *operands = inputs
    outputs = [index] * len(equation.outvars)
    for branch in equation.params["branches"]:
        of_branch = dependencies(branch, operands, adds)
        outputs = [one | other for one, other in zip(outputs, of_branch, strict=True)]
    return outputs


def _while(equation: Any, inputs: list[Sources], adds: _Adds) -> list[Sources]:
    """Find the sources of a `while_loop`'s outputs. Each output depends on the condition too."""
    before = equation.params["cond_nconsts"]
    first = before + equation.params["body_nconsts"]
    of_condition, of_body, carry = inputs[:before], inputs[before:first], inputs[first:]

    test, body = equation.params["cond_jaxpr"], equation.params["body_jaxpr"]
    while True:
        (condition,) = dependencies(test, [*of_condition, *carry], adds)
        after = dependencies(body, [*of_body, *carry], adds)
        grown = [old | new | condition for old, new in zip(carry, after, strict=True)]
        if grown == carry:
            return grown
        carry = grown


class ScanSizes(NamedTuple):
    """The numbers of constants and carried values of a `scan`.

    The inputs of a `scan` are its constants, its carried values and its sliced arrays. Its outputs
    are the carried values and the stacked results.
    """

    constants: int
    carried: int


def scan_sizes(equation: Any) -> ScanSizes:
    """Count the constants and carried values of a `scan`.

    The operation's parameters differ between JAX versions, so the counts are derived from shapes:
    only sliced arrays and stacked results have one dimension fewer inside the loop.
    """
    body: Any = equation.params["jaxpr"]
    open_body = getattr(body, "jaxpr", body)
    sliced = _fewer_dimensions(open_body.invars, equation.invars)
    carried = len(equation.outvars) - _fewer_dimensions(open_body.outvars, equation.outvars)
    return ScanSizes(len(equation.invars) - sliced - carried, carried)


def _scan(equation: Any, inputs: list[Sources], adds: _Adds) -> list[Sources]:
    """Find the sources of a `scan`'s outputs."""
    body: Any = equation.params["jaxpr"]
    first, carried = scan_sizes(equation)
    constants, slices = inputs[:first], inputs[first + carried :]
    carry = inputs[first : first + carried]

    while True:
        after = dependencies(body, [*constants, *carry, *slices], adds)
        grown = [old | new for old, new in zip(carry, after[:carried], strict=True)]
        if grown == carry:
            return [*grown, *after[carried:]]
        carry = grown


def _fewer_dimensions(inside: Sequence[Any], outside: Sequence[Any]) -> int:
    """Count the values that have fewer dimensions inside a loop than outside."""
    pairs = zip(inside, outside, strict=True)
    return sum(inner.aval.ndim < outer.aval.ndim for inner, outer in pairs)
