"""A module of a peer in which some functions are ours; functree itself uses the real one."""

from types import ModuleType
from typing import Any


def replaced(real: ModuleType, **ours: Any) -> Any:
    """A module with the attributes of another one, but for ours."""
    made: Any = ModuleType(real.__name__)
    made.__getattr__ = lambda name: getattr(real, name)
    vars(made).update(ours)
    return made
