"""GPUs by name, with the source of each number."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2.0**30


@dataclass(frozen=True)
class Device:
    """A GPU in a cluster.

    Args:
        name: as vendors call it.
        matrix_flops: bf16 multiplications and additions a second, dense.
        memory: bytes.
        memory_bandwidth: bytes a second.
        link, network: bytes a second one way between GPUs of a node, and between nodes.
        node: GPUs of a node.
        multiprocessors: of the GPU.
        attention: parts of ``matrix_flops`` that FlashAttention reaches forward and backward.
        host_link: bytes a second one way between GPU and host while all GPUs of the node copy both ways.
        host_memory: bytes of a node.
    """

    name: str
    matrix_flops: float
    memory: float
    memory_bandwidth: float
    link: float
    network: float
    node: int
    multiprocessors: int
    attention: tuple[float, float]
    host_link: float
    host_memory: float


# Vendor data sheets; FlashAttention-2's shares of peak from arXiv 2307.08691 (figures 4 to 7, causal, heads of 128) and
# FlashAttention-3's from 2407.08608 for Hopper. The network is one adapter a GPU: 200 and 400 Gb/s. To the host: PCIe 4
# and 5 with 16 lanes, 32 and 64 GB/s one way, of which some four fifths are reached; two GPUs of a DGX share one switch
# (its user guide, system topology). Its memory is from the data sheets.
DEVICES = {
    device.name: device
    for device in (
        Device("A100-80GB", 312e12, 80 * GIB, 2.039e12, 300e9, 25e9, 8, 108, (0.58, 0.50), 12.5e9, 2e12),
        Device("H100-80GB", 989e12, 80 * GIB, 3.35e12, 450e9, 50e9, 8, 132, (0.60, 0.50), 25e9, 2e12),
    )
}
