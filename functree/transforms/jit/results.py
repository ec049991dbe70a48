"""A result, `out_shardings` and the donated arguments ─► the shardings of the result."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh, NamedSharding

from functree.calls.program import Shardings
from functree.calls.signature import Signature
from functree.errors import Problem, ShardingError, count, listed
from functree.layout.decision import leaves_at_fault
from functree.layout.layout import LayoutTree
from functree.layout.plan.make_plan import plan_tree
from functree.transforms.jit.arguments import planning_mesh
from functree.tree.arrays import Tree, is_array
from functree.tree.nodes import children, walk
from functree.tree.paths import Keys, Path
from functree.tree.skeleton.kinds import ARRAY


class StateForm(NamedTuple):
    """What two trees have in common if one can replace the other as state: the class of the root,
    and the path, shape and dtype of each array. Gradients of a model have its form, although they
    have None for its functions."""

    root: type
    arrays: tuple[tuple[Keys, tuple[int, ...], Any], ...]

    @classmethod
    def of(cls, tree: Any) -> "StateForm":
        """The form of a tree, whose arrays may be abstract."""
        arrays = [(keys, x.shape, x.dtype) for keys, x, kind in walk(tree) if kind is ARRAY]
        return cls(type(tree), tuple(arrays))


class Donated(NamedTuple):
    """A donated argument.

    Attributes:
        path: its path.
        form: its form.
        shardings: the sharding of each of its arrays.
    """

    path: Path
    form: StateForm
    shardings: Shardings


Kept = NamedSharding | Problem | None
"""What an array of a result keeps: a sharding; None if it keeps none; a problem if it is not known
which one."""


def closed(result: Any, donated: Sequence[Donated]) -> list[Kept]:
    """For each array of a result, the sharding that it keeps from a donated argument.

    Outer parts are compared before inner ones. A bare array never keeps a sharding: that it has the
    shape of an argument does not mean that it replaces it. A part that has the form of several
    arguments, which are sharded differently, is a problem.
    """
    by_form: dict[StateForm, list[Donated]] = {}
    for one in donated:
        by_form.setdefault(one.form, []).append(one)
    return _closed(result, (), by_form)


def _closed(node: Any, keys: Keys, donated: Mapping[StateForm, Sequence[Donated]]) -> list[Kept]:
    """The same for the part of a result at some keys."""
    below = children(node)
    if below is None:
        return [None] if is_array(node) else []
    # To compute the form of every part would be slow.
    if any(form.root is type(node) for form in donated):
        same = donated.get(StateForm.of(node), ())
        if len({one.shardings for one in same}) > 1:
            return [_problem(Path(keys), same)] * len(same[0].shardings)
        if same:
            return list(same[0].shardings)
    found: list[Kept] = []
    for key, child in below:
        found += _closed(child, (*keys, key), donated)
    return found


def _problem(path: Path, same: Sequence[Donated]) -> Problem:
    """The problem of a part of the result that may replace several arguments."""
    names = listed([f"`{one.path}`" for one in same])
    why = f"has the structure of the donated arguments {names}, which are sharded differently"
    remedy = "write `out_shardings=`, which says how the result is sharded"
    return Problem(path, None, "" if path else "the result", why, remedy)


def check_known(name: str, shardings: Sequence[Kept]) -> list[NamedSharding | None]:
    """The shardings. Raises ShardingError for problems among them."""
    problems = list(dict.fromkeys(one for one in shardings if isinstance(one, Problem)))
    if problems:
        parts = count(len(problems), "part")
        raise ShardingError(
            f"{name}: it is not known which shardings {parts} of the result should keep", problems
        )
    return [one for one in shardings if not isinstance(one, Problem)]


def resolve_out_shardings(
    signature: Signature, result: Tree, layouts: LayoutTree, mesh: Mesh | AbstractMesh | None
) -> Shardings:
    """Resolve `out_shardings`, a prefix of the result. Rules read the annotation of the result.

    Raises:
        ShardingError: a layout does not fit.
        RuleError: the prefix has another structure than the result.
    """
    # As a record with one field, whose annotation is that of the result.
    record = signature.result
    planned = plan_tree(
        record(result), record(layouts), planning_mesh(mesh), check=False, allow_unspecified=True
    )
    if planned.problems:
        at_fault = leaves_at_fault(planned.problems) or "the result"
        headline = f"{signature.name}: out_shardings does not fit {at_fault} on mesh {planned.view}"
        raise ShardingError(headline, planned.problems)
    return [None if row.spec is None else planned.sharding(row) for row in planned.rows]
