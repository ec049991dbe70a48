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
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        raise FunctreeError(f"`{package.partition('.')[0]}` is not installed: pip install 'functree[{extra}]'")
    return importlib.import_module(package)
