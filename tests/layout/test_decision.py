"""What has been decided about one leaf: dimension by dimension, and by a spec over what is still
whole."""

import pytest
from jax.sharding import PartitionSpec

from functree.devices.meshes import MeshView
from functree.labels.leaf import Leaf
from functree.layout.decision import (
    Decision,
    Dimension,
    Named,
    Reason,
    Source,
    apply_spec,
    conflict,
    leaf_problems,
    undecided,
    whole,
)
from functree.tree.axes import Axes
from tests.lib.trees import leaf

P = PartitionSpec
AB = leaf("a b", 4, 8)
SPLIT = Decision(
    (Dimension(("data",), Source("P('data')")), Dimension(("model", "stage")), Dimension()),
    (Reason(("first",)),),
)


def test_its_spec_and_its_mesh_axes():
    assert SPLIT.mesh_axes == (("data",), ("model", "stage"), ())
    assert SPLIT.spec == P("data", ("model", "stage"), None)
    assert SPLIT.used() == {"data", "model", "stage"}
    assert SPLIT.used(but=1) == {"data"} and SPLIT.used(but=2) == SPLIT.used()


def test_the_same_with_more():
    assert SPLIT.because("second").reason == "first; second"
    assert whole(AB).because("only").reason == "only"
    wrong = SPLIT.wrong(("why", "remedy")).wrong(("again", "so"), ("more", "x"))
    assert (
        wrong.faults == (("why", "remedy"), ("again", "so"), ("more", "x")) and SPLIT.faults == ()
    )


def test_a_reason_is_a_value_whose_text_is_made_late():
    rules = Reason(("embed→None", "hidden→model"))
    assert str(rules) == "embed→None, hidden→model" and str(Reason((3,))) == "3"
    chosen = Reason((rules, Reason(("FSDP: smaller than 8 elements",))), "'**.up'")
    assert str(chosen) == "'**.up': embed→None, hidden→model; FSDP: smaller than 8 elements"
    assert rules == Reason(("embed→None", "hidden→model")) and hash(rules) == hash(
        Reason(rules.parts)
    )
    assert str(Source("hidden→model", is_rule=True)) == "rule hidden→model"
    assert str(Source("P('data')")) == "P('data')"


def test_settled():
    rule = Source("a→data", is_rule=True)
    open_ = Dimension(("data",), rule, Named.MISSING, blocked=("why", "remedy"))
    settled = Decision((open_, Dimension()), faults=(("it", "stays"),)).settle()
    assert settled.dimensions == (
        Dimension(("data",), rule, Named.DECIDED),
        Dimension(named=Named.DECIDED),
    )
    assert settled.faults == (("it", "stays"),)


@pytest.mark.parametrize(
    "which",
    [AB, leaf("_ b", 4, 8), leaf(""), AB._replace(axes=Axes()), AB._replace(axes=Axes("a"))],
    ids=["names", "one name", "scalar", "no axes", "fewer axes"],
)
def test_whole(which: Leaf):
    decision = whole(which)
    assert all(one.named is Named.UNASKED for one in decision.dimensions)
    assert decision.spec == P(*[None] * len(which.shape)) and decision.reason == ""
    assert decision.specified


def test_undecided_is_whole_or_as_the_annotation_has_it():
    assert undecided(AB) == whole(AB)
    found = undecided(AB._replace(spec=P(None, "model")))
    assert (
        found.spec == P(None, "model") and found.reason == "its annotation" and found.faults == ()
    )


# The spec before, the spec that is applied, the spec after, and what is wrong.
APPLIED: dict[str, tuple[P | None, P, P, list[str]]] = {
    "nothing": (None, P(), P(None, None), []),
    "over what is whole": (None, P(None, "model"), P(None, "model"), []),
    "beside what is split": (P("data"), P(None, "model"), P("data", "model"), []),
    "the same again": (P("data"), P("data"), P("data", None), []),
    "None leaves it": (P("data"), P(None, None), P("data", None), []),
    "as a tuple": (P("data"), P(("data",)), P("data", None), []),
    "another": (P("data"), P("model"), P("data", None),
                ['"a" is already sharded over data, and P(\'model\') shards it over model']),
    "more of them": (P("data"), P(("data", "model")), P("data", None),
                     ['"a" is already sharded over data, and P((\'data\', \'model\')) shards it over (data, model)']),
    "too many": (None, P("data", None, "model"), P("data", None),
                 ["P('data', None, 'model') has 3 entries for 2 dimensions"]),
    "no entry": (P("data"), P(None, 3), P("data", None),
                 ["P(None, 3): 3 is neither a mesh axis, a tuple of them, nor `None`"]),
    "unconstrained": (None, P(P.UNCONSTRAINED, "model"), P(None, "model"),
                      ["dimension 0 is `P.UNCONSTRAINED`, which does not say how it is sharded"]),
    "partial": (None, P("data", unreduced={"model"}), P("data", None),
                ["P('data', unreduced={'model'}) describes partial sums, which exist only inside a computation"]),
    "reduced": (None, P("data", reduced={"model"}), P("data", None),
                ["P('data', reduced={'model'}) describes partial sums, which exist only inside a computation"]),
    "all at once": (P("data"), P("model", P.UNCONSTRAINED, None), P("data", None),
                    ["P('model', P.UNCONSTRAINED, None) has 3 entries for 2 dimensions",
                     '"a" is already sharded over data, and P(\'model\', P.UNCONSTRAINED, None) shards it over model',
                     "dimension 1 is `P.UNCONSTRAINED`, which does not say how it is sharded"]),
}  # fmt: skip


@pytest.mark.parametrize("case", APPLIED)
def test_a_spec_over_what_is_whole(case: str):
    given, spec, after, wrong = APPLIED[case]
    before = whole(AB) if given is None else apply_spec(AB, given, whole(AB), "before")
    found = apply_spec(AB, spec, before, "its reason")
    assert found.spec == after and [why for why, _ in found.faults] == wrong
    assert all(remedy for _, remedy in found.faults)
    if case != "no entry":
        assert found.reason.endswith("its reason") and all(
            one.named is Named.DECIDED for one in found.dimensions
        )
        assert all(one.source for one in found.dimensions if one.mesh_axes)


def test_a_conflict_says_who_and_what_to_do():
    why, remedy = conflict(
        1, leaf("_ b", 4, 8), ("data",), ("model", "stage"), Source("b→model", True)
    )
    assert why == '"b" is already sharded over data, and rule b→model shards it over (model, stage)'
    assert (
        remedy
        == "let the layout after `|` shard only dimensions that the layout before it leaves unsharded"
    )


def test_a_size_is_not_divided_by_what_is_not_known():
    """By a mesh axis that the mesh lacks, together with one that does not divide the size."""
    found = apply_spec(AB, P(("nowhere", "model")), whole(AB), "its reason")
    problems = leaf_problems(AB, found, MeshView({"model": 3}))
    assert [problem.why for problem in problems] == [
        "P(('nowhere', 'model')) names `nowhere`, and the mesh (model=3) has no such axis"
    ]
