"""`check_callbacks` refuses host callbacks in a program for GPUs that this machine lacks.

A traced function ─► an error, or nothing.
"""

from collections.abc import Iterable

import jax
from jax.sharding import Mesh, NamedSharding, Sharding

from functree.errors import ShardingError
from functree.tree.jaxprs import AnyJaxpr, all_equations

# The operations of `jax.debug.print`, `jax.debug.callback`, `jax.pure_callback` and `io_callback`.
_CALLBACKS = frozenset({"debug_callback", "debug_print", "io_callback", "pure_callback"})


def check_callbacks(name: str, program: AnyJaxpr, shardings: Iterable[Sharding | None]) -> None:
    """Refuse host callbacks before a program is lowered for GPUs that this machine lacks.

    JAX registers a callback with the GPU backend, which exists only on a machine with a GPU. For
    TPUs, lowering a callback needs no backend.

    Args:
        name: the name of the function.
        program: the traced function.
        shardings: the shardings of its arguments, where they are known.

    Raises:
        ShardingError: if an argument is on absent GPUs and the program has host callbacks, such as
            `jax.debug.print`.
    """
    if not any(map(_is_on_absent_gpus, shardings)):
        return
    if any(equation.primitive.name in _CALLBACKS for equation in all_equations(program)):
        raise ShardingError(
            f"{name} has host callbacks, which JAX lowers for GPUs only on a machine with a GPU: "
            "to compile for `target=`, remove the calls to `jax.debug.print`, "
            "`jax.debug.callback`, `jax.pure_callback` and `io_callback`"
        )


def _is_on_absent_gpus(sharding: Sharding | None) -> bool:
    """Return whether a sharding is on GPUs while this machine has none."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return False
    if sharding.mesh.devices.flat[0].platform != "gpu":
        return False
    try:
        return not jax.devices("gpu")
    except RuntimeError:  # JAX has no GPU platform here
        return True
