"""Packages of the optional extras: imported on use, and their errors made ours."""

import importlib
import importlib.util
from types import ModuleType

import jax

from functree.errors import FunctreeError


def needed(package: str, extra: str) -> ModuleType:
    """A package of an extra.

    Raises:
        FunctreeError: it is not installed; the message says what to install.
    """
    if not _is_installed(package):
        raise FunctreeError(f"`{package}` is not installed: pip install 'functree[{extra}]'")
    return importlib.import_module(package)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package that it would be in
        return False


class foreign:
    """What other packages raise inside, of files and bytes that they cannot read or write, becomes an error of ours.

    Its cause is chained. orbax raises errors of all classes, `Exception` itself among them. Those of a device, such as
    one that is out of memory, are not about a file, and stay what they are.

    Args:
        kind: the class of the error.
        failure: what is not possible, for its message.
    """

    def __init__(self, kind: type[FunctreeError], failure: str):
        self._kind, self._failure = kind, failure

    def __enter__(self) -> None:
        """Nothing is to be done."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, FunctreeError | jax.errors.JaxRuntimeError):
            first = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise self._kind(f"{self._failure}: {first}") from error
