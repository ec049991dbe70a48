"""A call of a gradient function ─► what the loop over micro-batches does with each of its arrays,
and the checks of what the function takes and returns.

An array of the batch is divided, a random key is split, an array that is carried is taken from the
micro-batch before, and all others are the same in each micro-batch.
"""

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from functree.argument_checks import shown
from functree.calls.signature import AnyFunction, Partial, Signature
from functree.devices.placement import check_deleted
from functree.devices.specs import mesh_axes
from functree.errors import (
    FunctreeError,
    FunctreeTypeError,
    FunctreeValueError,
    Problem,
    count,
    did_you_mean,
    warn,
)
from functree.labels.leaf import Leaf, meeting
from functree.labels.leaves import Leaves, read
from functree.transforms.grad.gradient_types import KnownGradient, known_gradient
from functree.tree.arrays import Tree, is_key, value_text
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton


class Role(Enum):
    """What the loop over micro-batches does with an array. The value is the option that names such
    arrays."""

    SAME = None  # it is the same in each micro-batch
    BATCH = "batch"  # it is divided
    KEY = "keys"  # it is split
    CARRIED = "carry"  # it is taken from the micro-batch before


Names = Mapping[Role, Sequence[str] | None]
"""The names of the parameters that have a role; None for all that have no other."""


class GradientFunction(NamedTuple):
    """A gradient function, and what the loop does with its parameters.

    Attributes:
        signature: the signature.
        partial: the function, and what is bound to it.
        gradient: what the function returns. Of another function than functree's gradients only the
            differentiated argument, the first one, is assumed.
        is_known: whether it is a gradient function of functree.
        differentiated: the beginnings of the paths of the arguments that are differentiated.
        named: those of the arguments that are named for a role.
        weighted: whether the aux has a weight.
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
        """A function whose parameters with these names have a role.

        Raises:
            FunctreeError: if a name is not that of a parameter, or of one that has another role; if
                it is not known that the function returns the aux that is needed.
        """
        signature, partial = Signature.of(fn)
        known = known_gradient(partial.fun)
        gradient = known or KnownGradient((0,), (None,), has_aux=False, with_value=False)
        differentiated = tuple(_positional(signature, partial, i) for i in gradient.argnums)
        named: dict[Role, tuple[Path, ...]] = {}
        for role, each in names.items():
            # All arguments that have no other role are below the empty path.
            named[role] = (Path(),) if each is None else tuple(_path(signature, x) for x in each)
        is_known = known is not None
        function = cls(signature, partial, gradient, is_known, differentiated, named, weighted)
        function._check_names(names)
        function._check_aux()
        return function

    @property
    def own_aux(self) -> str:
        """What the aux has to be, in words: a weight, carried values, or both. Empty if it may be
        anything."""
        parts: list[str] = []
        if self.weighted:
            parts.append("the weight of the micro-batch")
        carried = [f"`{path}`" for path in self.named[Role.CARRIED]]
        if carried:
            number = len(carried)
            values = "the next value" if number == 1 else f"a tuple of the {number} next values"
            parts.append(f"{values} of {', '.join(carried)}")
        return f"`({', '.join(parts)})`" if len(parts) > 1 else "".join(parts)

    # The names of parameters

    def _check_names(self, names: Names) -> None:
        """Raise for names that cannot have their role."""
        problems: list[Problem] = []
        roles: dict[str, Role] = {}
        for role, each in names.items():
            for name in each or ():
                fault = self._fault(name, role, roles.get(name))
                roles[name] = role
                if fault is not None:
                    problems.append(Problem(None, None, f"{role.value}={name!r}", *fault))
        if problems:
            raise FunctreeValueError("accumulate: parameters cannot be named so", problems)

    def _fault(self, name: str, role: Role, before: Role | None) -> tuple[str, str] | None:
        """Why a name cannot have a role, and the remedy; None if it can. `before` is a role that it
        has already."""
        parameters, function = self.signature.parameters, self.signature.name
        if before is role:
            return "is named twice", "name it once"
        if before is not None:
            why = f"`{name}` is in `{before.value}` and in `{role.value}`"
            return why, "name it in one of them"
        if name in parameters[: len(self.partial.args)]:
            why = f"is bound to {function}, so a call has no value of it"
            return why, "leave it out of the `functools.partial` or the method, and pass it"
        if Path((name,)) in self.differentiated:
            why = "is differentiated, so it is the same in each micro-batch"
            return why, "name another parameter, or pass another `argnums=` to the gradient"
        if name in parameters or self.signature.by_name is not None:
            return None
        why = f"{function} has no such parameter{did_you_mean(name, parameters)}"
        return why, f"name one of its parameters: {', '.join(parameters)}"

    # The aux

    def checked(self, result: Any, carried: Mapping[Path, Skeleton]) -> Tree:
        """A result, in whose aux the weight is an array.

        Args:
            result: the result.
            carried: the skeletons of the arguments in `carry=`, by their paths.

        Raises:
            FunctreeError: if the aux is not the one that is wanted.
        """
        if not self.own_aux:
            return result
        aux = result[0][1] if self.gradient.with_value else result[1]
        pair = (None, aux)
        if self.weighted:
            pair = aux if carried else (aux, ())
        if not _has_length(pair, 2):
            raise self._refused(aux, "is not a pair")
        weight, values = pair
        each = (values,) if len(carried) == 1 else values
        if not _has_length(each, len(carried)):
            raise self._refused(values, f"is not a tuple of {len(carried)}")
        for (path, wanted), value in zip(carried.items(), each, strict=True):
            found = Skeleton.of(value)
            if found != wanted:
                raise self._refused(value, _difference(path, wanted, found))
        if not self.weighted:
            return result
        weight = self._as_weight(weight)
        aux = weight
        if carried:
            aux = weight, values
        if self.gradient.with_value:
            return (result[0][0], aux), result[1]
        return result[0], aux

    def _as_weight(self, weight: Any) -> jax.Array:
        """A weight as an array."""
        if eqx.is_array_like(weight) and jnp.shape(weight) == ():
            array = jnp.asarray(weight)
            if not is_key(array.dtype):
                return array
        raise FunctreeTypeError(
            f"accumulate: the weight that {self.signature.name} returns as aux is "
            f"{value_text(weight)}, not a scalar"
        )

    def _refused(self, value: Tree, why: str) -> FunctreeTypeError:
        """The error for an aux that is not the one that is wanted."""
        kind = value_text(value)
        if isinstance(value, tuple | list):
            kind = f"a {type(value).__name__} of {len(value)}"
        problem = Problem(None, None, f"aux: {kind}", why, f"return {self.own_aux} as aux")
        headline = f"{self.signature.name} does not return {self.own_aux} as its aux"
        return FunctreeTypeError(f"accumulate: {headline}", [problem])

    def _check_aux(self) -> None:
        """Raise for a function that is known to return no aux, or of which this is not known."""
        name = self.signature.name
        if self.own_aux and not self.is_known:
            raise FunctreeTypeError(
                f"accumulate: it is not known whether {name} returns {self.own_aux} as its aux: "
                "use `ft.grad` or `ft.value_and_grad` with `has_aux=True`"
            )
        if self.own_aux and not self.gradient.has_aux:
            raise FunctreeTypeError(
                f"accumulate: {name} returns no aux: return {self.own_aux} as aux, and write "
                "`has_aux=True` in `ft.grad` or `ft.value_and_grad`"
            )


class Call(NamedTuple):
    """A call of a gradient function, and the role of each of its arrays.

    Attributes:
        function: the function.
        record: the call.
        leaves: its arrays.
        roles: the role of each of them.
    """

    function: GradientFunction
    record: Sequence[Tree]
    leaves: Leaves
    roles: Sequence[Role]

    @classmethod
    def of(
        cls, function: GradientFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> "Call":
        """A call of the function.

        Raises:
            FunctreeError: an argument that has a role is not passed; an array is deleted.
        """
        partial, signature = function.partial, function.signature
        record = signature.bind(*partial.with_bound(args, kwargs))
        _check_given(function, record)
        leaves = read(record)
        check_deleted("accumulate", record)
        # What is bound to the function is no part of the batch.
        bound = [*signature.parameters[: len(partial.args)], *(partial.kwargs.keys() - kwargs)]
        same = (*function.differentiated, *(Path((name,)) for name in bound))
        roles = [Role.SAME] * len(leaves.leaves)
        # In this order, since an array may be in several of them.
        for role, arguments in {Role.BATCH: (), Role.SAME: same, **function.named}.items():
            for i in below(arguments, leaves.paths):
                # Keys that are one for each example are a part of the batch.
                is_batch = role is Role.KEY and bool(_keys_shape(leaves.values[i]))
                roles[i] = Role.BATCH if is_batch else role
        return cls(function, record, leaves, roles)

    def value_at(self, argument: Path) -> Tree:
        """The value of an argument."""
        name, *keys = argument
        value = self.record[self.function.signature.parameters.index(name)]
        for key in keys:
            value = value[key]
        return value

    def run(self, values: Sequence[Any]) -> Tree:
        """The result of the function for other values of the arrays. Raises as `checked`."""
        function = self.function
        record = self.leaves.skeleton.fill(values)
        result = function.signature.run(function.partial.fun, record)
        carried = function.named[Role.CARRIED]
        return function.checked(result, {x: Skeleton.of(self.value_at(x)) for x in carried})

    # Checks

    def check(self, steps: int, shards: Mapping[str, int]) -> None:
        """Raise for all arrays that cannot have their role.

        Args:
            steps: the number of micro-batches.
            shards: the mesh axes on whose shards the loop runs, with their sizes.
        """
        leaves = list(zip(self.leaves.leaves, self.roles, strict=True))
        batch = [leaf for leaf, role in leaves if role is Role.BATCH]
        self._check_keys(batch)
        if not batch:
            differentiated = ", ".join(f"`{path}`" for path in self.function.differentiated)
            raise FunctreeTypeError(
                "accumulate: no array of the call is divided into micro-batches "
                f"({differentiated} is differentiated): pass the batch as an argument of its own. "
                "`argnums=` of the gradient says which arguments are differentiated, and `batch=` "
                "which ones are divided"
            )
        problems: list[Problem] = meeting(batch)
        for leaf in batch:
            problems += _indivisible(leaf, steps, shards)
        refuse(problems, "array", "cannot be split into micro-batches", FunctreeValueError)
        for leaf, role in leaves:
            # A model may keep a key that the loss does not draw from.
            kept = below(self.function.differentiated, [leaf.path])
            if steps > 1 and role is Role.SAME and not kept and is_key(leaf.value.dtype):
                warn(
                    f"accumulate: `{leaf.path}` is a random key, and all {steps} micro-batches "
                    "draw the same numbers from it: pass it as an argument of its own and name it "
                    "in `keys=`. If one draw for all is meant, silence this: `warnings."
                    'filterwarnings("ignore", "accumulate: .* is a random key", '
                    "ft.FunctreeWarning)`"
                )

    def _check_keys(self, batch: Sequence[Leaf]) -> None:
        """Raise for arguments in `keys` that are no keys."""
        named = self.function.named[Role.KEY]
        sizes = {x.shape[0] for x in batch if x.shape and not below(named, [x.path])}
        problems: list[Problem] = []
        for path in named:
            for leaf in [self.leaves.leaves[i] for i in below([path], self.leaves.paths)]:
                shape = _keys_shape(leaf.value)
                if shape is None:
                    problems.append(leaf.problem("is no random key", _A_KEY))
                elif shape and sizes and shape[0] not in sizes:
                    size = " or ".join(map(str, sorted(sizes)))
                    why = f"is an array of {shape[0]} keys, and the batch has the size {size}"
                    remedy = "pass one key, which is split, or one for each example"
                    problems.append(leaf.problem(why, remedy))
            for _, other in Skeleton.of(self.value_at(path)).others:
                problems.append(Problem(path, None, shown(other), "is no random key", _A_KEY))
        refuse(problems, "value", "in `keys` cannot be split")


_A_KEY = "pass a key, such as `jax.random.key(0)`, or name another parameter in `keys=`"


def refuse(
    problems: Sequence[Problem], noun: str, why: str, kind: type[FunctreeError] = FunctreeTypeError
) -> None:
    """Raise an error if there are problems.

    Args:
        problems: the problems.
        noun: what each of them is about.
        why: what cannot be done with it.
        kind: the class of the error.
    """
    if problems:
        raise kind(f"accumulate: {count(len(problems), noun)} {why}", problems)


def _path(signature: Signature, name: str) -> Path:
    """The path of an argument with a name."""
    # One among `**more` is known by its name only, or all of them by theirs.
    if name in signature.parameters or signature.by_name is None:
        return Path((name,))
    return Path((signature.by_name, name))


def _positional(signature: Signature, partial: Partial, number: int) -> Path:
    """The path of the argument at a position."""
    names = [*signature.parameters[: len(partial.args)], *signature.positional]
    if signature.many in names and number >= names.index(signature.many):
        return Path((signature.many, number - names.index(signature.many)))
    if not -len(names) <= number < len(names):
        raise FunctreeTypeError(
            f"accumulate: {signature.name} has no positional parameter {number} to differentiate"
        )
    return Path((names[number],))


def _check_given(function: GradientFunction, record: Sequence[Tree]) -> None:
    """Raise for names among the `**more` of the function that a call does not pass."""
    parameters, problems = function.signature.parameters, list[Problem]()
    for role, paths in function.named.items():
        for path in paths:
            if len(path) > 1 and path[1] not in record[parameters.index(path[0])]:
                why = f"is in `{role.value}`, and the call passes no argument by this name"
                problems.append(Problem(path, None, "", why, "pass it by its name"))
    refuse(problems, "keyword argument", "cannot be found")


def below(places: Sequence[tuple[Any, ...]], paths: Sequence[Path]) -> list[int]:
    """The indices of the paths that begin at one of some places, for one place after another."""
    return [i for place in places for i, path in enumerate(paths) if path[: len(place)] == place]


def _has_length(value: Any, length: int) -> bool:
    """Whether a value is a tuple, or a list, of a length."""
    return isinstance(value, tuple | list) and len(value) == length


def _keys_shape(value: Any) -> tuple[int, ...] | None:
    """The shape of an array of random keys, typed or raw; empty for one key, None for an array of
    something else."""
    if is_key(value.dtype):
        return value.shape
    # The shape of a raw key, by JAX's option for the kind of random numbers.
    raw = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape
    if value.dtype == np.uint32 and value.shape[-len(raw) :] == raw:
        return value.shape[: -len(raw)]
    return None


def _indivisible(leaf: Leaf, steps: int, shards: Mapping[str, int]) -> list[Problem]:
    """The problem of an array of the batch that the micro-batches, or its shards, do not divide."""
    # On Auto axes the type has an empty spec: the compiler may shard a micro-batch in another way.
    sharding = jax.typeof(leaf.value).sharding
    typed = mesh_axes(next(iter(sharding.spec), None))
    parts = math.prod({**{axis: sharding.mesh.shape[axis] for axis in typed}, **shards}.values())
    if leaf.shape and leaf.shape[0] % (steps * parts) == 0:
        return []
    why = f"has no leading dimension to split into {steps} micro-batches"
    if leaf.shape:
        why = f"its leading dimension of size {leaf.shape[0]} cannot be split into {steps} "
        why += "micro-batches"
    divisor = "`steps` divides"
    if parts > 1:
        why += f" on each of {parts} {'shards' if shards else 'devices'}"
        divisor = "both divide"
    remedy = f"use a batch whose size {divisor}; name the parameters that are divided in `batch=`, "
    return [leaf.problem(why, f"{remedy}a random key in `keys=`, and a state in `carry=`")]


def _difference(path: Path, wanted: Skeleton, found: Skeleton) -> str:
    """What is different in a carried value, as far as it can be said in a line."""
    if found.treedef == wanted.treedef and found.indices == wanted.indices:
        for (_, old), (_, new) in zip(wanted.others, found.others, strict=True):
            if type(old) is not type(new) or old != new:
                return (
                    f"`{path}` has the static value {shown(old)}, and the next one has "
                    f"{shown(new)}: make it an array"
                )
    return f"has another structure than `{path}`"
