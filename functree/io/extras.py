"""Packages of the optional extras, imported on use."""

import importlib
import importlib.util
from types import ModuleType

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
