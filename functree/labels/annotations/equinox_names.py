"""Axis names for the layers of Equinox, which has few annotations of its own."""

from collections.abc import Mapping
from types import MappingProxyType

import equinox as eqx

from functree.tree.axes import Names, names

equinox_names: Mapping[type, Names] = MappingProxyType(
    {
        eqx.nn.Linear: names(weight="out_features in_features", bias="out_features"),
        **dict.fromkeys(
            (eqx.nn.Conv, eqx.nn.ConvTranspose),
            names(weight="out_channels in_channels ...", bias="out_channels ..."),
        ),
        eqx.nn.Embedding: names(weight="num_embeddings embedding_size"),
        # The first dimension has the gates one behind the other, so it has no name.
        eqx.nn.GRUCell: names(
            weight_ih="_ input_size", weight_hh="_ hidden_size", bias="_", bias_n="hidden_size"
        ),
        eqx.nn.LSTMCell: names(weight_ih="_ input_size", weight_hh="_ hidden_size", bias="_"),
        eqx.nn.GroupNorm: names(weight="channels", bias="channels"),
        eqx.nn.BatchNorm: names(
            {"*_state_index.init.**": "input_size"}, weight="input_size", bias="input_size"
        ),
        eqx.nn.PReLU: names(negative_slope="..."),
        eqx.nn.WeightNorm: names(g="..."),
        # The initial values of Equinox' own state, in a model that was made without
        # `eqx.nn.make_with_state`.
        eqx.nn.StateIndex: names({"init.**": "..."}),
        eqx.nn.State: names({"**": "..."}),
    }
)
"""Names for the leaves of each layer in `eqx.nn`, for `names=` of rules. They are the names of the
constructors' parameters, such as `out_features` and `in_features`; a dimension that is none of
these is unnamed. `LayerNorm` and `RMSNorm` have annotations of their own, with the axis `shape`.

Those of `eqx.nn.State`, which holds what layers declare by `eqx.nn.StateIndex`, are read without
`names=` too: its leaves have no names, and rules leave them whole.

Examples:
    >>> rules = ft.AxisRules(
    ...     {"out_features": "model", "in_features": None},
    ...     names=ft.equinox_names,
    ... )
    >>> model = eqx.nn.MLP(8, 4, 16, 2, key=jax.random.key(0))
    >>> ft.plan(model, rules, {"model": 4})["layers.0.weight"].spec
    P('model', None)
"""

OWN_STATE: Mapping[type, Names] = MappingProxyType({eqx.nn.State: equinox_names[eqx.nn.State]})
"""Names for Equinox' own state, whose leaves nobody can annotate."""
