"""`Objects`: those of a bucket below a prefix, by tensorstore, with a deadline for each answer."""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NamedTuple, Self

from functree.io.extras import import_extra

DEADLINE = 60.0
"""Seconds after which a bucket that has not answered is taken to be unreachable. Tensorstore by
itself would try for many minutes."""

# For a deletion of all that is below a prefix, which may be many thousands of objects.
_LONG_DEADLINE = 900.0


class Found(NamedTuple):
    """An object as it was read.

    Attributes:
        data: its bytes; None if there is no object.
        generation: what tells it from all others that were, or will be, of its name; of no object,
            always the same.
    """

    data: bytes | None
    generation: bytes


class Objects:
    """Objects by name.

    Args:
        store: a `tensorstore.KvStore` of what is below the prefix.
        files: a file system of fsspec, which lists by folder; tensorstore has no such list.
        root: the prefix, as this file system calls it.
    """

    # `Any`: the types of tensorstore and fsspec are not known where they are not installed.
    def __init__(self, store: Any, files: Any, root: str):
        self._store, self._files, self._root = store, files, root

    @classmethod
    def below_path(cls, path: str) -> Self:
        """Those below an address.

        Raises:
            FunctreeError: the extra is not installed.
        """
        # Orbax reaches a bucket by it, and says nothing of what is missing.
        import_extra("gcsfs", "gcs")
        tensorstore: Any = import_extra("tensorstore", "gcs")
        fsspec: Any = import_extra("fsspec", "gcs")
        # What other processes write is to be seen at once.
        files = fsspec.filesystem("gs", use_listings_cache=False)
        store = tensorstore.KvStore.open(key_value_store(path)).result()
        return cls(store, files, path.removeprefix("gs://"))

    def below(self, name: str) -> "Objects":
        """The objects below a name of these."""
        return Objects(self._store / f"{name}/", self._files, f"{self._root}/{name}")

    def read(self, name: str) -> Found:
        """An object, or that there is none."""
        found = _answer(self._store.read(name))
        return Found(found.value if found.state == "value" else None, found.stamp.generation)

    def write(self, name: str, data: bytes | None, generation: bytes) -> bytes | None:
        """Write an object, or delete it, if it has this generation.

        Returns:
            The new generation; None if it had another one.
        """
        if not generation:
            raise ValueError("an empty generation would be no condition")
        return _answer(self._store.write(name, data, if_equal=generation)).generation or None

    def remove(self, name: str) -> None:
        """Delete an object, and all that is below its name."""
        import tensorstore  # it is installed, since the store is its

        below = tensorstore.KvStore.KeyRange(f"{name}/", f"{name}0")  # 0 comes after the slash
        _answer(self._store.delete_range(below), _LONG_DEADLINE)
        _answer(self._store.write(name, None))

    def existing(self, names: Sequence[str]) -> list[str]:
        """Those of some names that are objects."""
        import tensorstore

        # All at once, and without their data.
        ranges = [tensorstore.KvStore.KeyRange(name, f"{name}\0") for name in names]
        listed = [self._store.list(one) for one in ranges]
        return [name for name, one in zip(names, listed, strict=True) if _answer(one)]

    def names(self) -> list[str]:
        """The names of objects, and of folders, directly below the prefix."""
        try:
            paths = self._listed(self._files._ls, self._root, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        # Where there is no such folder, gcsfs lists an object of its name.
        inside = [path for path in paths if path.startswith(f"{self._root}/")]
        return [path.rstrip("/").rpartition("/")[2] for path in inside]

    def written(self, name: str) -> datetime:
        """When an object was written, by the clock of the bucket.

        Raises:
            FileNotFoundError: there is no such object.
        """
        about = self._listed(self._files._info, f"{self._root}/{name}")
        return datetime.fromisoformat(about["updated"])

    def _listed(self, ask: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """What a coroutine of the file system returns."""
        from fsspec.asyn import sync  # it is installed, since the file system is its

        # By itself it tries each request six times, and waits without end for each.
        try:
            return sync(self._files.loop, ask, *arguments, **options, timeout=DEADLINE)
        except TimeoutError:
            raise _silence(DEADLINE) from None


def _answer(future: Any, deadline: float | None = None) -> Any:
    """What the bucket answers.

    Raises:
        OSError: it does not, or refuses.
    """
    seconds = deadline or DEADLINE
    try:
        return future.result(timeout=seconds)
    except TimeoutError:
        future.cancel()
        raise _silence(seconds) from None
    except (ValueError, NotImplementedError) as error:
        # Into one of these tensorstore turns every status, such as that of no permission.
        raise OSError(str(error).partition("\n")[0]) from error


def _silence(seconds: float) -> OSError:
    return OSError(f"the bucket has not answered for {seconds:g} seconds")


def key_value_store(path: object) -> dict[str, str]:
    """How tensorstore is told to open what is below an address."""
    bucket, _, below = str(path).removeprefix("gs://").partition("/")
    return {"driver": "gcs", "bucket": bucket, "path": f"{below}/"}
