"""`import_extra` imports optional packages, and `ForeignErrors` converts their errors."""

import importlib
import importlib.util
from types import ModuleType

import jax

from functree.errors import FunctreeError


def import_extra(package: str, extra: str) -> ModuleType:
    """Import an optional package.

    Args:
        package: the package.
        extra: the extra of functree that installs the package.

    Raises:
        FunctreeError: if the package is not installed.
    """
    # The package is not imported here, since an ImportError inside it would be a different problem.
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        raise FunctreeError(f"`{package}` is not installed: run `pip install 'functree[{extra}]'`")
    return importlib.import_module(package)


class ForeignErrors:
    """A context manager that converts errors of other packages into functree's errors.

    The original error is chained as the cause. Orbax raises errors of many classes, including
    `Exception` itself. JAX runtime errors, such as out-of-memory errors, are not converted.

    Args:
        kind: the class of the new error.
        failure: the beginning of the new error's message.
    """

    def __init__(self, kind: type[FunctreeError], failure: str):
        self._kind, self._failure = kind, failure

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        own = FunctreeError | jax.errors.JaxRuntimeError
        # A KeyboardInterrupt is not an `Exception`, and propagates.
        if isinstance(error, Exception) and not isinstance(error, own):
            first = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise self._kind(f"{self._failure}: {first}") from error
