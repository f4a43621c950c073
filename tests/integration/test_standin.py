"""The CPU stand-in: what names a CUDA device gets the CPU, wherever it is called."""

from __future__ import annotations

from tests.integration.server import Megatron


def test_tensors_made_on_cuda_in_a_backward_are_on_the_cpu(megatron: Megatron) -> None:
    """Torch leaves its function modes in a backward."""
    assert megatron("devices_in_a_backward") == ["cpu"] * 4
