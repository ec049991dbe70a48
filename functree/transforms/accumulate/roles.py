"""A call of a gradient function ─► the role of each of its arrays in the loop over pieces.

An array of the batch is divided, a random key is split, an array that is carried is taken from the
piece before, and all others are the same in each piece.
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
)
from functree.labels.leaf import Leaf, meeting
from functree.labels.leaves import Leaves, read
from functree.tree.arrays import Tree
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton


class Role(Enum):
    """What the loop over pieces does with an array of the call."""

    SAME = "the same in each piece"
    BATCH = "divided into pieces"
    KEY = "split into keys"
    CARRIED = "taken from the piece before"


class Arguments(NamedTuple):
    """The parameters of a gradient function, and what the loop does with them.

    Attributes:
        signature: the signature.
        partial: the function, and what is bound to it.
        model: the name of the first parameter.
        keys: the beginnings of the paths of the arguments whose keys are split.
        carried: those of the arguments that each piece takes from the one before.
    """

    signature: Signature
    partial: Partial
    model: str
    keys: tuple[Path, ...]
    carried: tuple[Path, ...]

    @classmethod
    def of(cls, fn: Callable[..., Any], keys: Sequence[str], carry: Sequence[str]) -> "Arguments":
        """The parameters of a function.

        Raises:
            FunctreeError: it has no parameter for the model; a name is not that of a parameter, or
                of one that has another role already.
        """
        signature, partial = Signature.of(fn)
        if not signature.positional:
            raise FunctreeTypeError(
                f"accumulate: {signature.name} has no positional parameter for the model"
            )
        model = signature.positional[0]
        known = cls(signature, partial, model, (), ())
        problems = [*known._misnamed("keys", keys), *known._misnamed("carry", carry)]
        for name in keys:
            if name in carry:
                why = "is in `keys` and in `carry`: a key that is carried is not split"
                problems.append(Problem(None, None, f"`{name}`", why, "name it in one of them"))
        if problems:
            raise FunctreeValueError("accumulate: parameters cannot be named so", problems)
        return known._replace(
            keys=tuple(map(known._path, keys)), carried=tuple(map(known._path, carry))
        )

    def _misnamed(self, option: str, names: Sequence[str]) -> list[Problem]:
        """The problems of names that an option cannot have."""
        signature = self.signature
        problems: list[Problem] = []
        for i, name in enumerate(names):
            what = f"{option}={name!r}"
            if name in names[:i]:
                problems.append(Problem(None, None, what, "is named twice", "name it once"))
            elif name == self.model:
                why = "is the model, which is the same in each piece"
                problems.append(Problem(None, None, what, why, "name another parameter"))
            elif name in signature.parameters[: len(self.partial.args)]:
                why = f"is bound to {signature.name}, so a call has no value of it"
                remedy = "leave it out of the `functools.partial` or the method, and pass it"
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
        for option, paths in (("keys", self.keys), ("carry", self.carried)):
            for path in paths:
                if len(path) > 1 and path not in known:
                    why = f"is in `{option}`, and the call passes no argument by this name"
                    problems.append(Problem(path, None, "", why, "pass it by its name"))
        if problems:
            missing = count(len(problems), "keyword argument")
            raise FunctreeTypeError(f"accumulate: {missing} cannot be found", problems)

    def _path(self, name: str) -> Path:
        """The path of an argument."""
        by_name = self.signature.by_name
        # One among `**more` is known by its name only, or all of them by theirs.
        if name in self.signature.parameters or by_name is None:
            return Path((name,))
        return Path((by_name, name))


class Call(NamedTuple):
    """A call, and the role of each of its arrays.

    Attributes:
        arguments: the parameters of the function.
        record: the call.
        given: the names of the arguments that were passed by keyword.
        leaves: its arrays.
        roles: the role of each of them.
    """

    arguments: Arguments
    record: Tree
    given: frozenset[str]
    leaves: Leaves
    roles: Sequence[Role]

    @classmethod
    def of(
        cls, arguments: Arguments, args: tuple[Any, ...], kwargs: Mapping[str, Any], steps: int
    ) -> "Call":
        """A call of the function.

        Raises:
            FunctreeError: an array cannot be divided; what is to be split is no key; an array is
                deleted.
        """
        if not args:
            raise FunctreeTypeError("accumulate: pass the model as the first positional argument")
        partial, signature = arguments.partial, arguments.signature
        record = signature.bind(*partial.with_bound(args, kwargs))
        arguments.check_given(record)
        leaves = read(record)
        check_deleted("accumulate", record)
        # Arguments that are bound to the function (`self`, those of a partial) are not part of the
        # batch either.
        bound = [name for name in partial.kwargs if name not in kwargs]
        fixed = {arguments.model, *signature.parameters[: len(partial.args)], *bound}
        roles = [_role(leaf, arguments, fixed) for leaf in leaves.leaves]
        call = cls(arguments, record, frozenset(kwargs), leaves, roles)
        call = call._replace(roles=call._with_batches_of_keys())
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
    def model(self) -> Tree:
        """The model."""
        (value,) = self.values_at([Path((self.arguments.model,))]).values()
        return value

    @property
    def of_model(self) -> list[int]:
        """The indices of the arrays of the model."""
        model = self.arguments.model
        return [i for i, leaf in enumerate(self.leaves.leaves) if leaf.path[0] == model]

    @property
    def carried(self) -> list[int]:
        """The indices of the arrays that are carried, in the order of `carry=`."""
        found: list[int] = []
        for path in self.arguments.carried:
            found += [i for i, leaf in enumerate(self.leaves.leaves) if _is_named(leaf, [path])]
        return found

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
        # name, and what is split or carried has one in each piece.
        looped = {path[-1] for path in (*arguments.keys, *arguments.carried)}
        own: dict[str, Any] = {}
        for name, value in kwargs.items():
            if name not in partial.kwargs or name in self.given or name in looped:
                own[name] = value
        return fn(*args[len(partial.args) :], **own)

    def _with_batches_of_keys(self) -> list[Role]:
        """The roles, in which an array of keys with the batch in front is a part of the batch."""
        roles = list(self.roles)
        for i in self.indices(Role.KEY):
            if _is_array_of_keys(self.leaves.leaves[i].value):
                roles[i] = Role.BATCH
        return roles

    # Checks

    def _check(self, steps: int) -> None:
        """Raise for all arrays that cannot have their role."""
        self._check_keys()
        problems: list[Problem] = meeting(self.having(Role.BATCH))
        for leaf in self.having(Role.BATCH):
            why = _indivisible(leaf, steps)
            if why is not None:
                problems.append(leaf.problem(why, _REMEDY))
        if problems:
            raise FunctreeValueError(
                f"accumulate: {count(len(problems), 'array')} cannot be split into pieces", problems
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
    "use a batch whose size `steps` divides; pass an array that is not part of it in the model or "
    "a closure, name a random key in `keys=` and a state in `carry=`"
)


def _role(leaf: Leaf, arguments: Arguments, fixed: set[str]) -> Role:
    """The role of an array, by the argument that it belongs to."""
    if _is_named(leaf, arguments.keys):
        return Role.KEY
    if _is_named(leaf, arguments.carried):
        return Role.CARRIED
    if leaf.path[0] in fixed:
        return Role.SAME
    return Role.BATCH


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
    """Why an array cannot be divided into that many pieces; None if it can."""
    if not leaf.shape:
        return f"has no leading dimension to split into {steps} pieces"
    size, parts = leaf.shape[0], _parts(leaf.value)
    if size % (steps * parts) == 0:
        return None
    why = f"its leading dimension of size {size} cannot be split into {steps} pieces"
    if parts > 1:
        why += f" on each of {parts} devices"
    return why


def _parts(x: jax.Array) -> int:
    """The number of parts into which the leading dimension is sharded, by the type of the array."""
    sharding = jax.typeof(x).sharding
    # On Auto axes the type has an empty spec: the compiler may shard a piece in another way.
    entry = next(iter(sharding.spec), None)
    return math.prod(sharding.mesh.shape[axis] for axis in mesh_axes(entry))
