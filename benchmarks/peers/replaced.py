"""`replaced` copies a peer's module with some of functree's functions in it.

functree itself uses the real module.
"""

from types import ModuleType
from typing import Any


def replaced(real: ModuleType, **ours: Any) -> Any:
    """Return a module with the attributes of `real`, except for the given ones."""
    made: Any = ModuleType(real.__name__)
    made.__getattr__ = lambda name: getattr(real, name)
    vars(made).update(ours)
    return made
