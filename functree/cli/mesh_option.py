"""The text of `--mesh` ─► the sizes of the mesh axes."""

import re

from functree.cli.failure import Failure

_EXAMPLE = "write sizes by name, such as `--mesh data=8,model=4`"


def mesh_sizes(text: str) -> dict[str, int]:
    """`data=8,model=4` ─► `{"data": 8, "model": 4}`.

    Raises:
        Failure: the text has another form.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*([^\s=,]+)\s*=\s*([0-9]{1,9})\s*", part)
        if found is None or int(found[2]) < 1:
            raise Failure(f"--mesh {text!r}: {part!r} is no size of a mesh axis: {_EXAMPLE}")
        if found[1] in sizes:
            raise Failure(f"--mesh {text!r}: it has `{found[1]}` twice")
        sizes[found[1]] = int(found[2])
    return sizes


def mesh_or_devices(text: str) -> dict[str, int] | int:
    """The sizes of a mesh, or a number of devices."""
    if re.fullmatch(r"[1-9][0-9]{0,8}", text):
        return int(text)
    return mesh_sizes(text)
