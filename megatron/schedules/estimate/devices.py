"""GPUs by their vendors' data sheets.

What a job reaches of these peaks is in :mod:`.calibration`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron.schedules.estimate.build import Quantized

GIB = 2.0**30


@dataclass(frozen=True)
class Device:
    """A GPU in a cluster.

    Args:
        name: the vendor's name.
        architecture: its name in :data:`.calibration.REACHED`.
        matrix_flops: dense bf16 multiplications and additions per second.
        memory: bytes of memory.
        memory_bandwidth: bytes per second.
        link, network: bytes per second one way between GPUs of a domain, and between domains.
        node: GPUs of a host.
        domain: GPUs that links connect, such as those of a rack (NVL72).
        multiprocessors: multiprocessors of the GPU.
        attention: shares of ``matrix_flops`` that the vendor's or FlashAttention's kernel reaches forward and backward.
        host_link: bytes per second one way between GPU and host while all GPUs of the node copy both ways.
        host_memory: bytes of host memory of a node.
        recipes: FP8 and FP4 recipes that it computes.
        fp8_flops, fp4_flops: dense multiplications and additions per second in FP8 and in FP4; 0 without.
        pair_link: bytes per second one way between two GPUs of a domain, if it has no switch; 0 with one.
    """

    name: str
    architecture: str
    matrix_flops: float
    memory: float
    memory_bandwidth: float
    link: float
    network: float
    node: int
    domain: int
    multiprocessors: int
    attention: tuple[float, float]
    host_link: float
    host_memory: float
    recipes: tuple[str, ...] = ()
    fp8_flops: float = 0.0
    fp4_flops: float = 0.0
    pair_link: float = 0.0

    def speed(self, quantized: Quantized | None) -> float:
        """FLOPs of a product for one of bf16 in the same time, at the peak. 1 in a format that the GPU has not."""
        if quantized is None:
            return 1.0
        return max(1.0, (self.fp4_flops if quantized.recipe == "nvfp4" else self.fp8_flops) / self.matrix_flops)

    def peak(self, quantized: Quantized | None) -> float:
        """Peak FLOPs per second of linears, for model FLOPs utilization."""
        return self.matrix_flops * self.speed(quantized)


_HOPPER = "tensorwise", "delayed", "blockwise"
_BLACKWELL = (*_HOPPER, "mxfp8", "nvfp4")
_CDNA3 = "tensorwise", "delayed"

# Vendor data sheets, all dense; memory as nvidia-smi and rocm-smi show it. FlashAttention-2's shares of the peak are
# from arXiv 2307.08691 (figures 4 to 7, causal, heads of 128), FlashAttention-3's for Hopper from 2407.08608. Later
# GPUs are assumed to reach Hopper's. The network is one adapter a GPU: 200, 400, 800 or 1600 Gb/s. To the host: PCIe 4,
# 5 and 6 with 16 lanes, 32, 64 and 128 GB/s one way, of which some four fifths are reached; two GPUs of a DGX share one
# switch (its user guide, system topology). Grace and Vera have NVLink-C2C, 450 and 900 GB/s one way for two GPUs.
DEVICES = {
    device.name: device
    for device in (
        Device(
            *("A100-80GB", "ampere", 312e12, 80 * GIB, 2.039e12, 300e9, 25e9, 8, 8, 108),
            *((0.58, 0.50), 12.5e9, 2e12),
        ),
        Device(
            *("H100-80GB", "hopper", 989e12, 80 * GIB, 3.35e12, 450e9, 50e9, 8, 8, 132),
            *((0.60, 0.50), 25e9, 2e12, _HOPPER, 1979e12),
        ),
        Device(
            *("H200", "hopper", 989e12, 140 * GIB, 4.8e12, 450e9, 50e9, 8, 8, 132),
            *((0.60, 0.50), 25e9, 2e12, _HOPPER, 1979e12),
        ),
        Device(
            *("B200", "blackwell", 2250e12, 180 * GIB, 8e12, 900e9, 50e9, 8, 8, 148),
            *((0.60, 0.50), 25e9, 4e12, _BLACKWELL, 4500e12, 9000e12),
        ),
        Device(
            *("GB200", "blackwell", 2500e12, 186 * GIB, 8e12, 900e9, 50e9, 4, 72, 152),
            *((0.60, 0.50), 90e9, 960e9, _BLACKWELL, 5000e12, 10000e12),
        ),
        Device(
            *("B300", "blackwell ultra", 2250e12, 268 * GIB, 8e12, 900e9, 100e9, 8, 8, 148),
            *((0.60, 0.50), 50e9, 4e12, _BLACKWELL, 4500e12, 13500e12),
        ),
        Device(
            *("GB300", "blackwell ultra", 2500e12, 279 * GIB, 8e12, 900e9, 100e9, 4, 72, 152),
            *((0.60, 0.50), 90e9, 960e9, _BLACKWELL, 5000e12, 15000e12),
        ),
        Device(
            *("VR200", "rubin", 4000e12, 288 * GIB, 22e12, 1800e9, 200e9, 4, 72, 224),
            *((0.60, 0.50), 180e9, 3e12, _BLACKWELL, 17500e12, 35000e12),
        ),
        Device(
            *("MI300X", "cdna3", 1307e12, 192 * GIB, 5.3e12, 448e9, 50e9, 8, 8, 304),
            *((0.60, 0.50), 25e9, 2e12, _CDNA3, 2615e12, 0.0, 64e9),
        ),
        Device(
            *("MI355X", "cdna4", 2517e12, 288 * GIB, 8e12, 538e9, 50e9, 8, 8, 256),
            *((0.60, 0.50), 25e9, 3e12, (*_CDNA3, "mxfp8"), 5033e12, 10066e12, 76.8e9),
        ),
    )
}

# Each device's name without its memory.
SHORT = {name.partition("-")[0]: device for name, device in DEVICES.items()}


def named(text: str) -> Device | None:
    """Returns the device that ``text`` names, such as ``H100`` or ``NVIDIA H100 80GB HBM3``; None if it is none."""
    words = re.findall(r"[A-Z]+\d+[A-Z]*", text.upper())
    return next((SHORT[word] for word in words if word in SHORT), None)
