"""A device ─► the name of what a program for it is compiled for: `cpu`, `tpu v5e`, `cuda h100`."""

from typing import Any

Device = Any
"""A device of JAX. Type checkers do not take `jax.Device` as a type: to them it is a variable."""

# What TPUs call themselves, and what everybody else calls them.
_TPUS = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}


def backend_text(device: Device) -> str:
    """The name of a device's platform and kind.

    >>> backend_text(jax.devices()[0])
    'cpu'
    """
    kind = str(device.device_kind)
    match device.platform:
        case "tpu":
            return f"tpu {_TPUS.get(kind, kind.removeprefix('TPU').strip())}"
        case "gpu" | "cuda":  # "NVIDIA H100 80GB HBM3"
            return " ".join(["cuda", *kind.removeprefix("NVIDIA ").lower().split(" ")[:1]])
    return str(device.platform)
