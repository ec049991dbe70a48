"""A traced function that calls back, for GPUs that are not there ─► an error that says so."""

from collections.abc import Iterable

import jax
from jax.sharding import Mesh, NamedSharding, Sharding

from functree.errors import ShardingError
from functree.tree.jaxprs import AnyJaxpr, all_equations

# The operations of `jax.debug.print`, `jax.debug.callback`, `jax.pure_callback` and `io_callback`.
_CALLBACKS = frozenset({"debug_callback", "debug_print", "io_callback", "pure_callback"})


def check_callbacks(name: str, program: AnyJaxpr, shardings: Iterable[Sharding | None]) -> None:
    """Refuse what prints or calls back, before it is lowered for GPUs that are not there.

    JAX asks the GPU's own backend for a place in which a callback is kept, and a compiler alone has
    none. For TPUs it needs none.

    Args:
        name: the name of the function.
        program: the traced function.
        shardings: those of its arguments, as far as they are known.

    Raises:
        ShardingError: it prints or calls back, which JAX lowers only beside a GPU.
    """
    if not any(map(_is_on_absent_gpus, shardings)):
        return
    if any(one.primitive.name in _CALLBACKS for one in all_equations(program)):
        raise ShardingError(
            f"{name} prints or calls back to the host, and JAX lowers this for GPUs only where "
            "there is one: take out `jax.debug.print`, `jax.debug.callback`, `jax.pure_callback` "
            "and `io_callback` to compile for `target=`"
        )


def _is_on_absent_gpus(sharding: Sharding | None) -> bool:
    """Whether a sharding is on GPUs, and this machine has none."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return False
    if sharding.mesh.devices.flat[0].platform != "gpu":
        return False
    try:
        return not jax.devices("gpu")
    except RuntimeError:  # JAX has no such platform here
        return True
