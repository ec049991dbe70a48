"""Results of functions of trees for abstract arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from functree.labels.leaves import arrays_by_path
from functree.tree.skeleton.skeleton import abstract_result, read_abstract
from tests.lib.structures import Pair


def doubled(tree: Any) -> Any:
    return Pair(tree["a"] * 2, {"b": tree["b"]}, name=tree["text"])


def test_a_result():
    tree = {"a": jax.ShapeDtypeStruct((2, 3), "float32"), "b": np.ones(4, np.int8), "text": "t"}
    found = abstract_result(doubled, tree)
    assert found.first == jax.ShapeDtypeStruct((2, 3), "float32") and found.name == "t"
    assert found.second["b"] == jax.ShapeDtypeStruct((4,), "int8")


def test_what_is_read_in_the_trace():
    def read(x: Any) -> Any:
        found = arrays_by_path({"w": [x, x + 1]})
        return list(found), list(found.values())

    paths, arrays = read_abstract(read, jnp.ones(3))
    assert list(map(str, paths)) == ["w.0", "w.1"]
    assert arrays == [jax.ShapeDtypeStruct((3,), "float32")] * 2
