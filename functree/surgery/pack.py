"""`pack` turns a tree into a flat tuple of arrays with static data; `unpack` restores the tree."""

from typing import Any, Generic, TypeVar

from jax.tree_util import register_pytree_with_keys

from functree.errors import FunctreeTypeError, count
from functree.labels.leaves import read
from functree.tree.interfaces import PackedTree
from functree.tree.skeleton.skeleton import Skeleton

T = TypeVar("T")


class Packed(PackedTree, Generic[T]):
    """A tree that JAX flattens in one Python call, for any number of arrays. `ft.pack` builds it.

    A `Packed` is a pytree: `jax.jit`, `jax.lax.scan`, `jax.vmap` and `jax.tree.map` take and return
    it. Do not assign to its attributes. It is equal only to itself, because comparing arrays gives
    no single truth value. Compare `.static` and `.arrays` instead. `ft.plan`, `ft.shard`,
    `ft.split` and `ft.grad` use the paths and axes of the tree that was packed. The parts and
    gradients that they return are packed too.

    Attributes:
        arrays: the arrays of the tree, in JAX's order.
        static: everything else. It is hashable and compared by value.
        tree: the tree that was packed, with the arrays of this `Packed`.

    Examples:
        >>> packed = ft.pack({"w": jnp.ones((2, 3)), "act": "relu"})
        >>> packed
        <Packed dict: 1 array>
        >>> jax.tree.map(jnp.shape, packed).arrays, packed.tree["act"]
        (((2, 3),), 'relu')
    """

    __slots__ = ("arrays", "static")

    # The attributes are declared here, because functree would read class-level annotations as
    # annotations of the leaves below the node.
    def __init__(self, arrays: tuple[Any, ...], static: Skeleton):
        self.arrays: tuple[Any, ...] = arrays
        self.static: Skeleton = static

    @property
    def tree(self) -> T:
        return self.static.fill(self.arrays)

    def __repr__(self) -> str:
        root = self.static.treedef.node_data()  # None for a tree that is a single array
        name = f" {root[0].__name__}" if root else ""
        return f"<Packed{name}: {count(len(self.static), 'array')}>"


# The arrays are children of the node itself, so JAX's C++ code iterates over them. Each key holds a
# whole path. JAX asks for keys only when it traces a function.
register_pytree_with_keys(
    Packed,
    lambda packed: (tuple(zip(packed.static.keys, packed.arrays, strict=True)), packed.static),
    lambda static, arrays: Packed(tuple(arrays), static),
    lambda packed: (packed.arrays, packed.static),
)


def pack(tree: T | Packed[T]) -> Packed[T]:
    """Pack a tree, for loops in which a call's overhead takes longer than its computation.

    JAX flattens and unflattens modules in Python on each call of a compiled function. Flattening a
    packed tree takes one Python call.

    Args:
        tree: any tree. A `Packed` is returned unchanged.

    Returns:
        The arrays as one flat tuple, with everything else as static data.

    Raises:
        FunctreeError: if static values cannot be hashed. The error lists them by path.

    Examples:
        >>> packed = ft.pack(eqx.nn.MLP(2, 2, 8, 3, key=jax.random.key(0)))
        >>> double = jax.jit(lambda packed: jax.tree.map(lambda x: 2 * x, packed))
        >>> (
        ...     double(packed),
        ...     ft.unpack(double(packed)).activation is packed.tree.activation,
        ... )
        (<Packed MLP: 8 arrays>, True)
        >>> jax.tree_util.keystr(
        ...     jax.tree_util.tree_flatten_with_path(packed)[0][0][0]
        ... )
        '.layers.0.weight'
    """
    if isinstance(tree, Packed):
        return tree
    leaves = read(tree)
    leaves.skeleton.learn(tree).check_hashable()
    return Packed(tuple(leaves.values), leaves.skeleton)


def unpack(packed: Packed[T]) -> T:
    """Unpack a tree: return the tree that was packed, with the arrays of this `Packed`.

    Args:
        packed: a result of `ft.pack`, or a transformation of it.

    Raises:
        FunctreeError: if the argument is not packed.

    Examples:
        >>> ft.unpack(ft.pack({"a": jnp.arange(2), "b": "text"}))
        {'a': Array([0, 1], dtype=int32), 'b': 'text'}
    """
    if not isinstance(packed, Packed):
        raise FunctreeTypeError(
            f"unpack: the argument has type {type(packed).__name__}: pass a result of `ft.pack`"
        )
    return packed.tree
