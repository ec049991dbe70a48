"""A tree ─► `Packed`: its arrays as one flat tuple, all else as static data; and back."""

from typing import Any, Generic, TypeVar

from jax.tree_util import register_pytree_with_keys

from functree.errors import FunctreeError, count
from functree.tree.interfaces import PackedTree
from functree.tree.leaves import read
from functree.tree.skeleton.skeleton import Skeleton

T = TypeVar("T")


class Packed(PackedTree, Generic[T]):
    """A tree that JAX flattens in one Python call, however many arrays it has; made by `ft.pack`.

    A pytree: `jax.jit`, `jax.lax.scan`, `jax.vmap` and `jax.tree.map` take one and return one. Immutable. Two are
    equal only if they are one object, as arrays have no single truth value: compare `.static` and `.arrays`.
    `ft.plan`, `ft.shard`, `ft.split` and `ft.grad` see the paths and axes of the tree, and return something packed.

    Attributes:
        arrays: the arrays of the tree, in JAX's order.
        static: everything else; hashable, equal by value and type.
        tree: the tree again.

    Examples:
        >>> packed = ft.pack({"w": jnp.ones((2, 3)), "act": "relu"})
        >>> packed
        <Packed dict: 1 array>
        >>> jax.tree.map(jnp.shape, packed).arrays, packed.tree["act"]
        (((2, 3),), 'relu')
    """

    __slots__ = ("_arrays", "_static")

    # Declared here, not in the class: a class's annotations speak of the axes of what is below it.
    def __init__(self, arrays: tuple[Any, ...], static: Skeleton):
        self._arrays: tuple[Any, ...] = arrays
        self._static: Skeleton = static

    @property
    def arrays(self) -> tuple[Any, ...]:
        return self._arrays

    @property
    def static(self) -> Skeleton:
        return self._static

    @property
    def tree(self) -> T:
        return self._static.fill(self._arrays)

    def __repr__(self) -> str:
        root = self._static.treedef.node_data()
        name = f" {root[0].__name__}" if root else ""
        return f"<Packed{name}: {count(len(self._static), 'array')}>"


# The arrays are the node's own children, and JAX walks over them in C++: a key can name each, and is only asked for
# when a function is traced.
register_pytree_with_keys(
    Packed,
    lambda packed: (tuple(zip(packed.static.keys, packed.arrays, strict=True)), packed.static),
    lambda static, arrays: Packed(tuple(arrays), static),
    lambda packed: (packed._arrays, packed._static),
)


def pack(tree: T | Packed[T]) -> Packed[T]:
    """Take a tree's structure out of the way, for loops in which a call costs more than its work.

    JAX flattens and unflattens a module in Python, on every call of a compiled function; a packed one it flattens in
    constant time.

    Args:
        tree: any tree. A packed one comes back as it is.

    Returns:
        The arrays as one flat tuple, with the rest as static data.

    Raises:
        FunctreeError: static values that cannot be hashed; lists them by path.

    Examples:
        >>> packed = ft.pack(eqx.nn.MLP(2, 2, 8, 3, key=jax.random.key(0)))
        >>> double = jax.jit(lambda packed: jax.tree.map(lambda x: 2 * x, packed))
        >>> double(packed), ft.unpack(double(packed)).activation is packed.tree.activation
        (<Packed MLP: 8 arrays>, True)
        >>> jax.tree_util.keystr(jax.tree_util.tree_flatten_with_path(packed)[0][0][0])
        '.layers.0.weight'
    """
    if isinstance(tree, Packed):
        return tree
    leaves = read(tree)
    leaves.skeleton.check_hashable()
    return Packed(tuple(leaf.value for leaf in leaves.leaves), leaves.skeleton)


def unpack(packed: Packed[T]) -> T:
    """The tree that was packed, with the arrays that the packed one has now.

    Args:
        packed: from `ft.pack`, or what a transform made of it.

    Raises:
        FunctreeError: it is not packed.

    Examples:
        >>> ft.unpack(ft.pack({"a": jnp.arange(2), "b": "text"}))
        {'a': Array([0, 1], dtype=int32), 'b': 'text'}
    """
    if not isinstance(packed, Packed):
        raise FunctreeError(f"unpack takes what `ft.pack` gave, not a {type(packed).__name__}")
    return packed.tree
