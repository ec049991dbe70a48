"""A `Call` gives each array in a call of a gradient function a role in the micro-batch loop.

The loop divides the arrays of the batch and splits random keys. It takes carried arrays from the
previous micro-batch. All other arrays are the same in each micro-batch. This module also checks the
function's arguments and results.
"""

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from functree.argument_checks import shown
from functree.calls.signature import AnyFunction, Partial, Signature
from functree.devices.meshes import mesh_axes
from functree.devices.placement import check_deleted
from functree.errors import (
    FunctreeError,
    FunctreeTypeError,
    FunctreeValueError,
    Problem,
    count,
    did_you_mean,
    warn,
)
from functree.labels.leaves import Leaf, Leaves, meeting, read
from functree.transforms.grad.grad import KnownGradient
from functree.tree.arrays import Tree, is_key, value_text
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton


class Role(Enum):
    """The role of an array in the loop over micro-batches.

    The value of a role is the option that names the parameters whose arrays have this role.
    """

    SAME = None  # the same in each micro-batch
    BATCH = "batch"  # divided
    KEY = "keys"  # split
    CARRIED = "carry"  # taken from the previous micro-batch


Names = Mapping[Role, Sequence[str] | None]
"""The names of the parameters with each role, or None for all parameters without another role."""


class GradientFunction(NamedTuple):
    """A gradient function, and the roles of its parameters.

    Attributes:
        signature: the function's signature.
        partial: the function, and the arguments that are bound to it.
        gradient: the description of what the function returns. If the function is not from
            functree, only `argnums` is used: the first argument is assumed to be differentiated.
        is_known: whether the function is a gradient function of functree.
        differentiated: the path prefixes of the differentiated arguments.
        named: the path prefixes of the arguments that are named for each role.
        weighted: whether the aux contains a weight.
    """

    signature: Signature
    partial: Partial
    gradient: KnownGradient
    is_known: bool
    differentiated: tuple[Path, ...]
    named: Mapping[Role, tuple[Path, ...]]
    weighted: bool

    @classmethod
    def of(cls, fn: AnyFunction, names: Names, weighted: bool) -> "GradientFunction":
        """Describe a function, and give roles to the parameters with these names.

        Raises:
            FunctreeError: if a name cannot have its role.
            FunctreeError: if the function is not known to return the required aux.
        """
        signature, partial = Signature.of(fn)
        known = KnownGradient.of(partial.fun)
        gradient = known or KnownGradient((0,), (None,), has_aux=False, with_value=False)
        differentiated = tuple(_positional(signature, partial, i) for i in gradient.argnums)
        named: dict[Role, tuple[Path, ...]] = {}
        for role, each in names.items():
            # All arguments are below the empty path. Other roles override this one.
            named[role] = (Path(),) if each is None else tuple(Path((name,)) for name in each)
        is_known = known is not None
        function = cls(signature, partial, gradient, is_known, differentiated, named, weighted)
        function._check_names(names)
        if function.uses_aux and not gradient.has_aux:
            problem = Problem(None, None, signature.name, "returns no aux", _AUX)
            raise FunctreeTypeError(
                "accumulate: pass `has_aux=True` to `ft.grad` or `ft.value_and_grad`", [problem]
            )
        return function

    @property
    def uses_aux(self) -> bool:
        """Whether the aux contains a weight or carried values."""
        return self.weighted or bool(self.named[Role.CARRIED])

    # The names of parameters

    def _check_names(self, names: Names) -> None:
        """Raise FunctreeError for names that cannot have their role."""
        parameters, function = self.signature.parameters, self.signature.name
        problems: list[Problem] = []
        differentiated = {path[0] for path in self.differentiated}
        options: dict[str, str] = {}  # the option that already names a parameter
        for role, each in names.items():
            for name in each or ():
                what = f"{role.value}={name!r}"
                if name not in parameters:
                    why = f"{function} has no such parameter{did_you_mean(name, parameters)}"
                    remedy = f"name one of its parameters: {', '.join(parameters)}"
                    problems.append(Problem(None, None, what, why, remedy))
                elif name in options:
                    why = f"`{name}` is already in `{options[name]}`"
                    problems.append(Problem(None, None, what, why, "name it once"))
                elif name in differentiated:
                    why = "is differentiated, so it is the same in each micro-batch"
                    remedy = "name a different parameter, or change the gradient's `argnums=`"
                    problems.append(Problem(None, None, what, why, remedy))
                options[name] = str(role.value)
        if problems:
            raise FunctreeValueError("accumulate: invalid parameter names", problems)

    # The aux

    def with_weight(self, result: Any) -> Any:
        """Convert a weight that is a Python number, such as `x.size`, to an array."""
        aux = result[0][1] if self.gradient.with_value else result[1]
        leaves, structure = jax.tree.flatten(aux)
        if not leaves or type(leaves[0]) not in (int, float):
            return result
        aux = structure.unflatten([jnp.asarray(leaves[0]), *leaves[1:]])
        return ((result[0][0], aux), result[1]) if self.gradient.with_value else (result[0], aux)

    def check_aux(self, result: Any, carried: Sequence[Tree]) -> None:
        """Raise FunctreeError if the aux of a result differs from the required aux.

        Args:
            result: the function's result.
            carried: the arguments in `carry=`.
        """
        if not self.uses_aux:
            return
        aux = result[0][1] if self.gradient.with_value else result[1]
        wanted: Tree = carried[0] if len(carried) == 1 else tuple(carried)
        if self.weighted:
            weight = jax.ShapeDtypeStruct((), np.float32)
            wanted = (weight, wanted) if carried else weight
        # The weight comes first.
        if Skeleton.of(aux) != Skeleton.of(wanted):
            why = "differs in structure, or in values that are not arrays"
        elif self.weighted and jnp.shape(jax.tree.leaves(aux)[0]):
            why = "has a weight that is not a scalar"
        else:
            return
        problem = Problem(None, None, f"aux: {value_text(aux)}", why, _AUX)
        name = self.signature.name
        raise FunctreeTypeError(f"accumulate: {name} returns an invalid aux", [problem])


_AUX = (
    "return as aux the weight of the micro-batch, a scalar (`weighted=True`), the next value "
    "of the parameter in `carry=` (a tuple for several parameters), or with both a pair of these"
)


class Call(NamedTuple):
    """A call of a gradient function, and the role of each of its arrays.

    Attributes:
        function: the gradient function.
        record: the arguments of the call.
        leaves: the arrays of the arguments.
        roles: the role of each array.
    """

    function: GradientFunction
    record: Sequence[Tree]
    leaves: Leaves
    roles: Sequence[Role]

    @classmethod
    def of(
        cls, function: GradientFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> "Call":
        """Give a role to each array of a call.

        Raises:
            FunctreeError: if an array is deleted.
        """
        partial, signature = function.partial, function.signature
        record = signature.bind(*partial.with_bound(args, kwargs))
        leaves = read(record)
        check_deleted("accumulate", record)
        # Arguments that are bound to the function do not belong to the batch.
        bound = [*signature.parameters[: len(partial.args)], *(partial.kwargs.keys() - kwargs)]
        same = (*function.differentiated, *(Path((name,)) for name in bound))
        roles = [Role.SAME] * len(leaves.leaves)
        # Later roles override earlier ones, since an array may be listed for several roles.
        for role, arguments in {Role.BATCH: (), Role.SAME: same, **function.named}.items():
            for i in below(arguments, leaves.paths):
                # An array with one key for each example belongs to the batch.
                is_batch = role is Role.KEY and bool(_keys_shape(leaves.values[i]))
                roles[i] = Role.BATCH if is_batch else role
        return cls(function, record, leaves, roles)

    def value_at(self, argument: Path) -> Tree:
        """Return the value of an argument."""
        return self.record[self.function.signature.parameters.index(argument[0])]

    def run(self, values: Sequence[Any]) -> Tree:
        """Run the function with new values for the arrays. Raise the error of `check_aux`."""
        function = self.function
        record = self.leaves.skeleton.fill(values)
        result = function.signature.run(function.partial.fun, record)
        if function.weighted:
            result = function.with_weight(result)
        function.check_aux(result, list(map(self.value_at, function.named[Role.CARRIED])))
        return result

    # Checks

    def check(self, steps: int, shards: Mapping[str, int]) -> None:
        """Raise FunctreeError for all arrays that cannot have their role.

        Args:
            steps: the number of micro-batches.
            shards: the mesh axes over whose shards the loop runs, with their sizes.
        """
        leaves = list(zip(self.leaves.leaves, self.roles, strict=True))
        batch = [leaf for leaf, role in leaves if role is Role.BATCH]
        self._check_keys()
        if not batch:
            raise FunctreeTypeError(
                "accumulate: no array of the call is divided into micro-batches: pass the batch as "
                "a separate argument. The gradient function's `argnums=` selects the "
                "differentiated arguments, and `batch=` selects the divided ones"
            )
        problems: list[Problem] = meeting(batch)
        for leaf in batch:
            problems += _indivisible(leaf, steps, shards)
        refuse(problems, "array", "cannot be split into micro-batches", FunctreeValueError)
        for leaf, role in leaves:
            # A model may hold a key that the loss does not use.
            kept = below(self.function.differentiated, [leaf.path])
            if steps > 1 and role is Role.SAME and not kept and is_key(leaf.value.dtype):
                warn(
                    f"accumulate: `{leaf.path}` is a random key, and all {steps} micro-batches "
                    "draw the same numbers from it: pass it as a separate argument and name it in "
                    "`keys=`. If this is intended, silence the warning: `warnings."
                    'filterwarnings("ignore", "accumulate: .* is a random key", '
                    "ft.FunctreeWarning)`"
                )

    def _check_keys(self) -> None:
        """Raise FunctreeError for arguments in `keys` that are not random keys."""
        problems: list[Problem] = []
        for path in self.function.named[Role.KEY]:
            for leaf in [self.leaves.leaves[i] for i in below([path], self.leaves.paths)]:
                if _keys_shape(leaf.value) is None:
                    problems.append(leaf.problem("is not a random key", _A_KEY))
            for _, other in Skeleton.of(self.value_at(path)).others:
                problems.append(Problem(path, None, shown(other), "is not a random key", _A_KEY))
        refuse(problems, "value", "in `keys` cannot be split")


_A_KEY = "pass a key, such as `jax.random.key(0)`, or name a different parameter in `keys=`"


def refuse(
    problems: Sequence[Problem], noun: str, why: str, kind: type[FunctreeError] = FunctreeTypeError
) -> None:
    """Raise an error if there are problems.

    Args:
        problems: the problems to raise.
        noun: a noun for the subject of each problem.
        why: the rest of the headline, after the subject.
        kind: the class of the error to raise.
    """
    if problems:
        raise kind(f"accumulate: {count(len(problems), noun)} {why}", problems)


def _positional(signature: Signature, partial: Partial, number: int) -> Path:
    """Return the path of the argument at a position. Raise FunctreeError if there is none."""
    named = (name for name in signature.positional if name != signature.many)
    names = [*signature.parameters[: len(partial.args)], *named]
    if not -len(names) <= number < len(names):
        raise FunctreeTypeError(
            f"accumulate: {signature.name} has no positional parameter {number} to differentiate: "
            "change `argnums=`"
        )
    return Path((names[number],))


def below(places: Sequence[tuple[Any, ...]], paths: Sequence[Path]) -> list[int]:
    """Return the indices of the paths that begin with one of the prefixes, in prefix order."""
    return [i for place in places for i, path in enumerate(paths) if path[: len(place)] == place]


def _keys_shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of an array of random keys, typed or raw, or None for any other array.

    The shape of a single key is empty.
    """
    if is_key(value.dtype):
        return value.shape
    # The shape of a raw key depends on JAX's option for the random number generator.
    raw = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape
    if value.dtype == np.uint32 and value.shape[-len(raw) :] == raw:
        return value.shape[: -len(raw)]
    return None


def _indivisible(leaf: Leaf, steps: int, shards: Mapping[str, int]) -> list[Problem]:
    """Return the problem with an array that cannot be divided evenly into micro-batches."""
    # On Auto axes, the type has an empty spec: the compiler may shard a micro-batch differently.
    sharding = jax.typeof(leaf.value).sharding
    typed = mesh_axes(next(iter(sharding.spec), None))
    parts = math.prod({**{axis: sharding.mesh.shape[axis] for axis in typed}, **shards}.values())
    if leaf.shape and leaf.shape[0] % (steps * parts) == 0:
        return []
    number = f"{steps} micro-batch{'' if steps == 1 else 'es'}"
    why = f"has no leading dimension to split into {number}"
    if leaf.shape:
        why = f"its leading dimension of size {leaf.shape[0]} cannot be split into {number}"
    if parts > 1:
        why += f" on each of {parts} devices"
    divisor = steps * parts
    remedy = f"use a batch whose size is a multiple of {divisor}, or name the parameters to divide "
    return [leaf.problem(why, f"{remedy}in `batch=`, random keys in `keys=` and state in `carry=`")]
