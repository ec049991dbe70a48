"""Packages of the optional extras ─► imported on use; their errors ─► ours."""

import importlib
import importlib.util
from types import ModuleType

import jax

from functree.errors import FunctreeError


def import_extra(package: str, extra: str) -> ModuleType:
    """A package of an extra, imported.

    Raises:
        FunctreeError: it is not installed; the message says what to install.
    """
    if not _is_installed(package):
        raise FunctreeError(f"`{package}` is not installed: pip install 'functree[{extra}]'")
    return importlib.import_module(package)


def _is_installed(package: str) -> bool:
    # Not by importing it: an ImportError inside of a package that is there is another problem.
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False  # there is not even the package that it would be in


class ForeignErrors:
    """A block in which other packages read or write: what they raise becomes an error of ours.

    Its cause is chained. Orbax raises errors of all classes, `Exception` itself among them. Those
    of a device, such as one that is out of memory, are not about a file, and stay what they are.

    Args:
        kind: the class of the error.
        failure: what is not possible, for its message.
    """

    def __init__(self, kind: type[FunctreeError], failure: str):
        self._kind, self._failure = kind, failure

    def __enter__(self) -> None:
        """Nothing is to be done."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        own = FunctreeError | jax.errors.JaxRuntimeError
        # Not a KeyboardInterrupt either, which is no `Exception`.
        if isinstance(error, Exception) and not isinstance(error, own):
            first = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise self._kind(f"{self._failure}: {first}") from error
