"""A call of a gradient function ─► the role of each of its arrays in the loop over micro-batches.

An array of the batch is divided, a random key is split, an array that is carried is taken from the
micro-batch before, and all others are the same in each micro-batch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from functree.argument_checks import is_key, shown
from functree.calls.signature import Partial, Signature
from functree.devices.placement import check_deleted
from functree.devices.specs import mesh_axes
from functree.errors import (
    FunctreeTypeError,
    FunctreeValueError,
    Problem,
    count,
    did_you_mean,
    warn,
)
from functree.labels.leaf import Leaf, meeting
from functree.labels.leaves import Leaves, read
from functree.transforms.grad.known_gradient import KnownGradient, known_gradient
from functree.tree.arrays import Tree
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton


class Role(Enum):
    """What the loop over micro-batches does with an array of the call."""

    SAME = "the same in each micro-batch"
    BATCH = "divided into micro-batches"
    KEY = "split into keys"
    CARRIED = "taken from the micro-batch before"


class ParameterRoles(NamedTuple):
    """The parameters of a gradient function, and what the loop does with them.

    Attributes:
        signature: the signature.
        partial: the function, and what is bound to it.
        gradient: what the function returns, if that is known.
        differentiated: the beginnings of the paths of the arguments that are differentiated.
        batch: those of the arguments that are divided; None for all that have no other role.
        keys: those of the arguments whose keys are split.
        carried: those of the arguments that each micro-batch takes from the one before.
    """

    signature: Signature
    partial: Partial
    gradient: KnownGradient | None
    differentiated: tuple[Path, ...]
    batch: tuple[Path, ...] | None
    keys: tuple[Path, ...]
    carried: tuple[Path, ...]

    @classmethod
    def of(
        cls,
        fn: Callable[..., Any],
        batch: Sequence[str] | None,
        keys: Sequence[str],
        carry: Sequence[str],
    ) -> "ParameterRoles":
        """The parameters of a function.

        Raises:
            FunctreeError: if a name is not that of a parameter, or of one that has another role.
        """
        signature, partial = Signature.of(fn)
        gradient = known_gradient(partial.fun)
        numbers = [0] if gradient is None else gradient.argnums
        differentiated = tuple(_positional(signature, partial, number) for number in numbers)
        known = cls(signature, partial, gradient, differentiated, None, (), ())
        problems: list[Problem] = []
        options = {"batch": batch or (), "keys": keys, "carry": carry}
        roles: dict[str, str] = {}
        for option, names in options.items():
            problems += known._misnamed(option, names)
            for name in names:
                other = roles.setdefault(name, option)
                if other != option:
                    why = f"is in `{other}` and in `{option}`"
                    problems.append(Problem(None, None, f"`{name}`", why, "name it in one of them"))
        if problems:
            raise FunctreeValueError("accumulate: parameters cannot be named so", problems)
        return known._replace(
            batch=None if batch is None else tuple(map(known._path, batch)),
            keys=tuple(map(known._path, keys)),
            carried=tuple(map(known._path, carry)),
        )

    def _misnamed(self, option: str, names: Sequence[str]) -> list[Problem]:
        """The problems of names that an option cannot have."""
        signature = self.signature
        problems: list[Problem] = []
        for i, name in enumerate(names):
            what = f"{option}={name!r}"
            if name in names[:i]:
                problems.append(Problem(None, None, what, "is named twice", "name it once"))
            elif name in signature.parameters[: len(self.partial.args)]:
                why = f"is bound to {signature.name}, so a call has no value of it"
                remedy = "leave it out of the `functools.partial` or the method, and pass it"
                problems.append(Problem(None, None, what, why, remedy))
            elif Path((name,)) in self.differentiated:
                why = "is differentiated, so it is the same in each micro-batch"
                remedy = "name another parameter, or pass another `argnums=` to the gradient"
                problems.append(Problem(None, None, what, why, remedy))
            elif name not in signature.parameters and signature.by_name is None:
                near = did_you_mean(name, signature.parameters)
                listed = ", ".join(signature.parameters)
                why = f"{signature.name} has no such parameter{near}"
                remedy = f"name one of its parameters: {listed}"
                problems.append(Problem(None, None, what, why, remedy))
        return problems

    def check_given(self, record: Tree) -> None:
        """Raise for names among the `**more` of the function that a call does not pass."""
        known = dict(self.signature.each(record))
        problems: list[Problem] = []
        options = {"batch": self.batch or (), "keys": self.keys, "carry": self.carried}
        for option, paths in options.items():
            for path in paths:
                if len(path) > 1 and path not in known:
                    why = f"is in `{option}`, and the call passes no argument by this name"
                    problems.append(Problem(path, None, "", why, "pass it by its name"))
        if problems:
            missing = count(len(problems), "keyword argument")
            raise FunctreeTypeError(f"accumulate: {missing} cannot be found", problems)

    def role(self, leaf: Leaf, fixed: Sequence[str]) -> Role:
        """The role of an array, by the argument that it belongs to.

        Args:
            leaf: the array.
            fixed: the names of the arguments that are bound to the function.
        """
        if _is_named(leaf, self.keys):
            return Role.BATCH if _is_array_of_keys(leaf.value) else Role.KEY
        if _is_named(leaf, self.carried):
            return Role.CARRIED
        if _is_named(leaf, self.differentiated) or leaf.path[0] in fixed:
            return Role.SAME
        if self.batch is None or _is_named(leaf, self.batch):
            return Role.BATCH
        return Role.SAME

    def _path(self, name: str) -> Path:
        """The path of an argument."""
        by_name = self.signature.by_name
        # One among `**more` is known by its name only, or all of them by theirs.
        if name in self.signature.parameters or by_name is None:
            return Path((name,))
        return Path((by_name, name))


def _positional(signature: Signature, partial: Partial, number: int) -> Path:
    """The path of the argument at a position."""
    bound = signature.parameters[: len(partial.args)]
    names = [*bound, *signature.positional]
    if signature.many in names and number >= names.index(signature.many):
        start = names.index(signature.many)
        return Path((signature.many, number - start))
    if not -len(names) <= number < len(names):
        raise FunctreeTypeError(
            f"accumulate: {signature.name} has no positional parameter {number} to differentiate"
        )
    return Path((names[number],))


class Call(NamedTuple):
    """A call, and the role of each of its arrays.

    Attributes:
        arguments: the parameters of the function.
        record: the call.
        given: the names of the arguments that were passed by keyword.
        leaves: its arrays.
        roles: the role of each of them.
    """

    arguments: ParameterRoles
    record: Tree
    given: frozenset[str]
    leaves: Leaves
    roles: Sequence[Role]

    @classmethod
    def of(
        cls, arguments: ParameterRoles, args: tuple[Any, ...], kwargs: Mapping[str, Any], steps: int
    ) -> "Call":
        """A call of the function.

        Raises:
            FunctreeError: an array cannot be divided; what is to be split is no key; an array is
                deleted.
        """
        partial, signature = arguments.partial, arguments.signature
        record = signature.bind(*partial.with_bound(args, kwargs))
        arguments.check_given(record)
        leaves = read(record)
        check_deleted("accumulate", record)
        # Arguments that are bound to the function (`self`, those of a partial) are not part of the
        # batch either.
        bound = [name for name in partial.kwargs if name not in kwargs]
        fixed = [*signature.parameters[: len(partial.args)], *bound]
        roles = [arguments.role(leaf, fixed) for leaf in leaves.leaves]
        call = cls(arguments, record, frozenset(kwargs), leaves, roles)
        call._check(steps)
        return call

    def having(self, role: Role) -> list[Leaf]:
        """The arrays with a role."""
        return [
            leaf for leaf, own in zip(self.leaves.leaves, self.roles, strict=True) if own is role
        ]

    def indices(self, role: Role) -> list[int]:
        """The indices of the arrays with a role."""
        return [i for i, own in enumerate(self.roles) if own is role]

    @property
    def carried(self) -> list[int]:
        """The indices of the arrays that are carried, in the order of `carry=`."""
        found: list[int] = []
        for path in self.arguments.carried:
            found += self.indices_in(path)
        return found

    def indices_in(self, argument: Path) -> list[int]:
        """The indices of the arrays of an argument."""
        return [i for i, leaf in enumerate(self.leaves.leaves) if _is_named(leaf, [argument])]

    def values_at(self, paths: Sequence[Path]) -> dict[Path, Tree]:
        """The values of some arguments."""
        found = dict(self.arguments.signature.each(self.record))
        for path in paths:
            # That of the whole `*args` or `**more` is in parts.
            if path not in found:
                found[path] = self.record[self.arguments.signature.parameters.index(path[0])]
        return {path: found[path] for path in paths}

    def run(self, fn: Callable[..., Any], values: Sequence[Any]) -> Any:
        """The result of the function for other values of the arrays."""
        arguments = self.arguments
        partial, signature = arguments.partial, arguments.signature
        given = signature.arguments(self.leaves.skeleton.fill(values))
        args, kwargs = signature.by_keyword(*given, partial.kwargs)
        # The function adds what is bound to it. A call may give another value for what is bound by
        # name, and what is split or carried has one in each micro-batch.
        looped = {path[-1] for path in (*arguments.keys, *arguments.carried)}
        own: dict[str, Any] = {}
        for name, value in kwargs.items():
            if name not in partial.kwargs or name in self.given or name in looped:
                own[name] = value
        return fn(*args[len(partial.args) :], **own)

    def parameters_of(self, result: Tree) -> dict[int, int]:
        """For the index of each gradient among the arrays of a result, the index of its parameter
        among those of the call; empty if it is not known where gradients are in the result."""
        gradient, found = self.arguments.gradient, dict[int, int]()
        if gradient is None:
            return found
        all_of_them = Skeleton.of(result).learn(result).paths
        for number, argument in zip(gradient.argnums, self.arguments.differentiated, strict=True):
            place = Path(gradient.place_of(number))
            leaves = self.leaves.leaves
            parameters = {leaves[i].path[len(argument) :]: i for i in self.indices_in(argument)}
            for k, path in enumerate(all_of_them):
                if path[: len(place)] == place:
                    found[k] = parameters[path[len(place) :]]
        return found

    # Checks

    def _check(self, steps: int) -> None:
        """Raise for all arrays that cannot have their role."""
        self._check_keys()
        batch = self.having(Role.BATCH)
        if not batch:
            raise self._nothing_to_divide()
        problems: list[Problem] = meeting(batch)
        for leaf in batch:
            why = _indivisible(leaf, steps)
            if why is not None:
                problems.append(leaf.problem(why, _REMEDY))
        if problems:
            arrays = count(len(problems), "array")
            raise FunctreeValueError(
                f"accumulate: {arrays} cannot be split into micro-batches", problems
            )
        self._warn_of_same_keys(steps)

    def _nothing_to_divide(self) -> FunctreeTypeError:
        """The error for a call without a batch."""
        arguments = self.arguments
        differentiated = ", ".join(f"`{path}`" for path in arguments.differentiated)
        return FunctreeTypeError(
            f"accumulate: no array of the call is divided into micro-batches ({differentiated} is "
            "differentiated): pass the batch as an argument of its own. `argnums=` of the gradient "
            "says which arguments are differentiated, and `batch=` which ones are divided"
        )

    def _warn_of_same_keys(self, steps: int) -> None:
        """Warn of random keys that each micro-batch would use again."""
        if steps == 1:
            return
        for leaf, role in zip(self.leaves.leaves, self.roles, strict=True):
            # A model may keep a key that the loss does not draw from.
            differentiated = _is_named(leaf, self.arguments.differentiated)
            if role is Role.SAME and not differentiated and _is_typed_key(leaf.value):
                warn(
                    f"accumulate: `{leaf.path}` is a random key, and all {steps} micro-batches "
                    "draw the same numbers from it: pass it as an argument of its own and name it "
                    "in `keys=`. If one draw for all is meant, silence this: `warnings."
                    'filterwarnings("ignore", "accumulate: .* is a random key", '
                    "ft.FunctreeWarning)`"
                )

    def _check_keys(self) -> None:
        """Raise for arguments in `keys` that are no keys."""
        sizes = set[int]()
        for leaf in self.having(Role.BATCH):
            if leaf.shape and not _is_named(leaf, self.arguments.keys):
                sizes.add(leaf.shape[0])
        problems: list[Problem] = []
        for leaf in self.leaves.leaves:
            if not _is_named(leaf, self.arguments.keys):
                continue
            if _is_array_of_keys(leaf.value):
                size = leaf.shape[0]
                if sizes and size not in sizes:
                    batch = " or ".join(map(str, sorted(sizes)))
                    why = f"is an array of {size} keys, and the batch has the size {batch}"
                    remedy = "pass one key, which is split, or one for each example"
                    problems.append(leaf.problem(why, remedy))
            elif not _is_one_key(leaf.value):
                problems.append(leaf.problem("is no random key", _A_KEY))
        for path, value in self.values_at(self.arguments.keys).items():
            for _, other in Skeleton.of(value).others:
                problems.append(Problem(path, None, shown(other), "is no random key", _A_KEY))
        if problems:
            raise FunctreeTypeError(
                f"accumulate: {count(len(problems), 'value')} in `keys` cannot be split", problems
            )


_A_KEY = "pass a key, such as `jax.random.key(0)`, or name another parameter in `keys=`"
_REMEDY = (
    "use a batch whose size `steps` divides; name the parameters that are divided in `batch=`, a "
    "random key in `keys=`, and a state in `carry=`"
)


def _is_named(leaf: Leaf, arguments: Sequence[Path]) -> bool:
    """Whether an array belongs to one of some arguments."""
    return any(leaf.path[: len(path)] == path for path in arguments)


def _is_typed_key(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _is_one_key(value: Any) -> bool:
    """Whether an array is one random key, typed or raw."""
    return is_key(value) and (_is_typed_key(value) or value.shape == _raw_shape())


def _is_array_of_keys(value: Any) -> bool:
    """Whether an array has random keys, typed or raw, along its leading dimension."""
    if _is_typed_key(value):
        return len(value.shape) > 0
    raw = _raw_shape()
    return value.dtype == np.uint32 and len(value.shape) > 1 and value.shape[-len(raw) :] == raw


def _raw_shape() -> tuple[int, ...]:
    """The shape of a raw key, by JAX's option for the kind of random numbers."""
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape


def _indivisible(leaf: Leaf, steps: int) -> str | None:
    """Why an array cannot be divided into so many micro-batches; None if it can."""
    if not leaf.shape:
        return f"has no leading dimension to split into {steps} micro-batches"
    size, parts = leaf.shape[0], _parts(leaf.value)
    if size % (steps * parts) == 0:
        return None
    why = f"its leading dimension of size {size} cannot be split into {steps} micro-batches"
    if parts > 1:
        why += f" on each of {parts} devices"
    return why


def _parts(x: jax.Array) -> int:
    """The number of parts into which the leading dimension is sharded, by the type of the array."""
    sharding = jax.typeof(x).sharding
    # On Auto axes the type has an empty spec: the compiler may shard a micro-batch in another way.
    entry = next(iter(sharding.spec), None)
    return math.prod(sharding.mesh.shape[axis] for axis in mesh_axes(entry))
