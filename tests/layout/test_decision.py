"""What has been decided about one leaf: dimension by dimension, and by a spec over what is still
whole."""

from typing import Any

import pytest
from jax.sharding import PartitionSpec

from functree.labels.leaf import Leaf
from functree.layout.decision import (
    Decision,
    Dimension,
    Reason,
    Source,
    apply_spec,
    conflict,
    decide_each,
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
    turned = SPLIT.each(lambda i, one: one._replace(source=Source(i)))
    assert [str(one.source) for one in turned.dimensions] == ["0", "1", "2"]


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
    open_ = Dimension(("data",), rule, settled=False, closed=True, fault=("why", "remedy"))
    settled = Decision((open_, Dimension(settled=False)), faults=(("it", "stays"),)).settle()
    assert settled.dimensions == (Dimension(("data",), rule), Dimension())
    assert settled.faults == (("it", "stays"),)


@pytest.mark.parametrize(("which", "settled"), [
    (AB, (False, False)), (leaf("_ b", 4, 8), (True, False)), (leaf("", ), ()),
    (AB._replace(axes=Axes()), (True, True)), (AB._replace(axes=Axes("a")), (False, True)),
], ids=["names", "one name", "scalar", "no axes", "fewer axes"])  # fmt: skip
def test_whole(which: Leaf, settled: tuple[bool, ...]):
    """A name that no layout has mentioned is not settled yet."""
    decision = whole(which)
    assert tuple(one.settled for one in decision.dimensions) == settled
    assert decision.spec == P(*[None] * len(which.shape)) and decision.reason == ""
    assert decision.specified and not whole(which._replace(activation=True)).specified


def test_undecided_is_whole_or_as_the_annotation_has_it():
    assert undecided(AB) == whole(AB)
    found = undecided(AB._replace(spec=P(None, "model")))
    assert (
        found.spec == P(None, "model") and found.reason == "its annotation" and found.faults == ()
    )


def test_an_activation_is_unspecified_until_something_is_about_it():
    bare = AB._replace(activation=True)
    assert not whole(bare).specified and not undecided(bare).specified
    assert undecided(bare._replace(spec=P("data"))).specified
    assert apply_spec(bare, P(), whole(bare), "given").specified


def test_leaves_that_are_alike_are_decided_once():
    leaves = [AB, leaf("a b", 9, 9), leaf("b a", 4, 8), AB]
    asked: list[Any] = []

    def decide(one: Leaf, before: Decision | None) -> Decision:
        asked.append((one, before))
        return whole(one)

    found = decide_each(leaves, None, lambda one: one.axes, decide)
    assert asked == [(leaves[0], None), (leaves[2], None)]
    assert found[0] is found[1] is found[3] and found[2] is not found[0]
    # What was decided before makes leaves unlike.
    before = [whole(AB), whole(AB).because("b"), whole(AB)]
    before.append(before[0])
    asked.clear()
    found = decide_each(leaves, before, lambda one: 0, decide)
    assert asked == list(zip(leaves[:3], before, strict=False)) and found[3] is found[0]


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
        assert found.reason.endswith("its reason") and all(one.settled for one in found.dimensions)
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
