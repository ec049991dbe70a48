"""What is read of the package ─► the same, in which a function that has the name of its module is
found under it.

`functree.nn.generate` is the function, as in Python: `functree.nn` imports it from the module of
this name. Griffe, which reads the package for the reference, would find the module.
"""

from typing import Any

import griffe


class NamedAsModule(griffe.Extension):
    """Puts such functions in the place of their modules."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called by griffe once it has read a package."""
        _replace(pkg)


def _replace(module: griffe.Module) -> None:
    for name, member in list(module.members.items()):
        if not isinstance(member, griffe.Module):
            continue
        _replace(member)
        if module.imports.get(name) == f"{member.path}.{name}":
            module.members[name] = griffe.Alias(name, member.members[name], parent=module)
