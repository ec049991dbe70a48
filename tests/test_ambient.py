"""`axis_rules` and `spec`."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

import functree as ft

RULES = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})


def test_spec_follows_the_innermost_rules():
    with ft.axis_rules(RULES):
        assert ft.spec("batch hidden") == P("data", "model")
        with ft.axis_rules(ft.AxisRules({"batch": "model", "hidden": None})):
            assert ft.spec(ft.Axes("batch", "hidden")) == P("model", None)
        assert ft.spec("batch _ hidden") == P("data", None, "model")


def test_rules_end_with_their_context_also_after_an_error():
    with pytest.raises(KeyError), ft.axis_rules(RULES):
        raise KeyError
    with pytest.raises(ft.ShardingError, match=r"no ambient rules: enter `with ft.axis_rules\(rules\):`"):
        ft.spec("batch")


def test_rules_can_be_switched_off_inside():
    with ft.axis_rules(RULES), ft.axis_rules(None), pytest.raises(ft.ShardingError, match="no ambient rules"):
        ft.spec("batch")


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ("batch hiden", "no rule names `hiden`; did you mean the rule for `hidden`"),
        ("hidden hidden", '`model` is used by "hidden"'),
    ],
)
def test_spec_refuses_what_the_rules_do_not_place(axes: str, message: str):
    with ft.axis_rules(RULES), pytest.raises(ft.ShardingError, match=message):
        ft.spec(axes)


def test_spec_checks_the_mesh():
    with jax.set_mesh(ft.make_mesh(data=8)), ft.axis_rules(RULES):
        with pytest.raises(ft.ShardingError, match=r"the mesh \(data=8\) has no axis `model`"):
            ft.spec("batch hidden")
        with ft.axis_rules(RULES.on({"data": 8})):
            assert ft.spec("batch hidden") == P("data", None)


def test_spec_serves_jax_out_sharding():
    mesh = ft.make_mesh(data=2, model=4, explicit=True)
    with jax.set_mesh(mesh), ft.axis_rules(RULES):
        x = jax.numpy.ones((4, 16), out_sharding=ft.spec("batch hidden"))
        w = jax.numpy.ones((16, 6), out_sharding=ft.spec("hidden embed"))
        y = jax.jit(lambda x, w: jax.numpy.einsum("bh,he->be", x, w, out_sharding=ft.spec("batch embed")))(x, w)
    assert y.sharding.spec == P("data", None)


def test_rules_must_be_a_layout():
    with pytest.raises(ft.RuleError, match="is not a layout"), ft.axis_rules({"batch": "data"}):
        pass


def test_ambient_filters_may_match_nothing():
    layout = ft.StateSharding({"opt_state.**": P(), ...: RULES})
    with ft.axis_rules(layout):
        assert ft.spec("batch hidden") == P("data", "model")


def test_filters_that_match_nothing_in_one_array_are_no_mistake():
    """They are for a whole tree, of which one array at a time is laid out."""
    layout = ft.StateSharding({"embed.**": ft.P(), "blocks.**": ft.P("data"), ...: RULES})
    with jax.set_mesh(ft.make_mesh(data=2, model=4)), ft.axis_rules(layout):
        found = jax.jit(lambda x: ft.constrain(x, "batch hidden"))(jax.numpy.ones((4, 8)))
    assert found.sharding.spec == ft.P("data", "model")
