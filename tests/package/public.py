"""The public names, without the modules `nn` and `testing`, which have a page, and JAX's `P`."""

import functree as ft

NAMES = [
    *(name for name in ft.__all__ if name not in ("nn", "testing", "P")),
    *(f"nn.{name}" for name in ft.nn.__all__),
    *(f"testing.{name}" for name in ft.testing.__all__),
]
