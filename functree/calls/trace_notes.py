"""An error of JAX in a trace, about the mesh that `ft.jit` enters ─► the same error, with a note
that says what to write."""

from collections.abc import Iterator
from contextlib import contextmanager

# From JAX's message; it is not told by the class of the error.
_OTHER_MESH = "should match the aval mesh"
_CHECKIFY = (
    "functree: JAX has this error for `checkify` of a `shard_map` wherever a mesh is entered, as "
    "`ft.jit` enters one. If it is this, write `jax.shard_map`, and around the call "
    "`with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):`"
)


@contextmanager
def noting_meshes() -> Iterator[None]:
    """A context in which the error for `checkify` of a `shard_map` has a note."""
    try:
        yield
    except ValueError as error:
        if _OTHER_MESH in str(error) and _CHECKIFY not in getattr(error, "__notes__", ()):
            error.add_note(_CHECKIFY)
        raise
