"""This extension lets the reference find functions that share their module's name.

In Python, `functree.nn.generate` is the function: `functree.nn` imports it from the module of the
same name. Griffe, which parses the package for the reference, would find the module instead.
"""

from typing import Any

import griffe


class NamedAsModule(griffe.Extension):
    """An extension that replaces modules with their functions of the same name."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Replace such modules in a package that griffe has parsed."""
        _replace(pkg)


def _replace(module: griffe.Module) -> None:
    for name, member in list(module.members.items()):
        if not isinstance(member, griffe.Module):
            continue
        _replace(member)
        if module.imports.get(name) == f"{member.path}.{name}":
            module.members[name] = griffe.Alias(name, member.members[name], parent=module)
