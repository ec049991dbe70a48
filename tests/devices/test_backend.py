"""A device ─► the name of what a program for it is compiled for."""

from types import SimpleNamespace

import jax
import pytest

from functree.devices.meshes import backend_text


@pytest.mark.parametrize(
    ("platform", "kind", "text"),
    [
        ("cpu", "cpu", "cpu"),
        ("tpu", "TPU v4", "tpu v4"),
        ("tpu", "TPU v5 lite", "tpu v5e"),
        ("tpu", "TPU v5", "tpu v5p"),
        ("tpu", "TPU v6 lite", "tpu v6e"),
        ("gpu", "NVIDIA H100 80GB HBM3", "cuda h100"),
        ("cuda", "NVIDIA A100-SXM4-80GB", "cuda a100-sxm4-80gb"),
        ("cuda", "NVIDIA H200", "cuda h200"),
    ],
)
def test_names(platform: str, kind: str, text: str) -> None:
    assert backend_text(SimpleNamespace(platform=platform, device_kind=kind)) == text


def test_of_this_machine() -> None:
    assert backend_text(jax.devices()[0]) == "cpu"
