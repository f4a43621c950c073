"""Time of each operation on a GPU by a roofline.

Matrix products are limited by arithmetic in whole tiles, everything else by the bytes it moves. The three shares below
are assumptions, the same for all methods. A measured cost profile corrects them, see :func:`corrections`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from megatron.schedules.estimate.build import LayerKind
from megatron.schedules.estimate.models import Model, built, gpt
from megatron.schedules.estimate.symbols import typical_layers
from megatron.schedules.estimate.times import PassTimes, Prices, layer_times
from megatron.schedules.measure.job_profile import JobProfile

GIB = 2.0**30


@dataclass(frozen=True)
class Device:
    """A GPU in a cluster.

    Args:
        name: the vendor's name.
        matrix_flops: dense bf16 multiplications and additions per second.
        memory: bytes of memory.
        memory_bandwidth: bytes per second.
        link, network: bytes per second one way between GPUs of a node, and between nodes.
        node: GPUs of a node.
        multiprocessors: multiprocessors of the GPU.
        attention: shares of ``matrix_flops`` that FlashAttention reaches forward and backward.
        host_link: bytes per second one way between GPU and host while all GPUs of the node copy both ways.
        host_memory: bytes of host memory of a node.
        recipes: FP8 and FP4 recipes that it computes.
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
    recipes: tuple[str, ...] = ()


# Vendor data sheets; FlashAttention-2's shares of peak from arXiv 2307.08691 (figures 4 to 7, causal, heads of 128) and
# FlashAttention-3's from 2407.08608 for Hopper. The network is one adapter a GPU: 200 and 400 Gb/s. To the host: PCIe 4
# and 5 with 16 lanes, 32 and 64 GB/s one way, of which some four fifths are reached; two GPUs of a DGX share one switch
# (its user guide, system topology). Its memory is from the data sheets.
DEVICES = {
    device.name: device
    for device in (
        Device("A100-80GB", 312e12, 80 * GIB, 2.039e12, 300e9, 25e9, 8, 108, (0.58, 0.50), 12.5e9, 2e12),
        Device(
            *("H100-80GB", 989e12, 80 * GIB, 3.35e12, 450e9, 50e9, 8, 132, (0.60, 0.50), 25e9, 2e12),
            recipes=("tensorwise", "delayed", "blockwise"),
        ),
    )
}


# Share of the peak that large products, memory streams and collectives reach.
_MATRIX, _MEMORY, _LINK = 0.85, 0.85, 0.75
_LAUNCH = 4e-6  # seconds from one kernel to the next
_TILE = 128, 256  # of a product; NVIDIA's guide to matrix multiplication explains tiles and waves


class Roofline(Prices):
    """Seconds on ``device``."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.node = device.node

    def product(self, rows: float, columns: float, inner: float, bytes_out: int = 2, speed: float = 1.0) -> float:
        """Seconds of a product: whole waves of tiles, or the bytes of its matrices."""
        (tall, wide), device = _TILE, self._device
        tiles = math.ceil(rows / tall) * math.ceil(columns / wide)
        waves = math.ceil(tiles / device.multiprocessors)
        flops = 2.0 * waves * device.multiprocessors * tall * wide * inner
        moved = 2.0 / speed * inner * (rows + columns) + bytes_out * rows * columns
        return max(flops / (_MATRIX * speed * device.matrix_flops), self.stream(moved, 0)) + _LAUNCH

    def attention(self, flops: float, *, backward: bool) -> float:
        """Seconds at FlashAttention's share of the peak."""
        return flops / (self._device.matrix_flops * self._device.attention[backward])

    def stream(self, size: float, kernels: int = 1) -> float:
        """Seconds to read or write ``size`` bytes of memory."""
        return size / (_MEMORY * self._device.memory_bandwidth) + kernels * _LAUNCH

    def shared(self, size: float, ranks: int) -> float:
        """Seconds of a collective among ranks of one node."""
        return self.collective(size, ranks, same_node=True)

    def sent(self, size: float, *, same_node: bool) -> float:
        """Seconds to send ``size`` bytes to other GPUs of the node, or to other nodes."""
        return size / self._rate(same_node)

    def collective(self, size: float, ranks: int, *, same_node: bool) -> float:
        """Seconds of a ring all-gather or reduce-scatter of ``size`` bytes in all."""
        return size * (ranks - 1) / ranks / self._rate(same_node)

    def message(self, size: float, *, same_node: bool) -> float:
        """Seconds of a message between pipeline ranks."""
        return size / self._rate(same_node) + 10e-6

    def _rate(self, same_node: bool) -> float:
        return _LINK * (self._device.link if same_node else self._device.network)


def corrections(profile: JobProfile, device: Device, model: Model) -> PassTimes:
    """Returns measured over estimated time of each pass of a layer, at the profile's setting.

    Args:
        profile: profile of this model's layers, or of a plain GPT of another width.
        device: the device of the measurement.
        model: the model to correct.
    """
    facts, tensor = profile.facts, profile.facts.tensor_parallel
    same = model.args.hidden_size == facts.hidden_size
    of = model if same else gpt("measured", facts.layers, facts.heads, facts.hidden_size)
    args = of.trained(
        seq_length=facts.sequence_length,
        micro_batch_size=facts.micro_batch_size,
        context_parallel_size=facts.context_parallel,
        tensor_model_parallel_size=tensor,
        sequence_parallel=tensor > 1,
    )
    build = built(args)
    # tools/profile_passes.py measures in bf16.
    kinds = [LayerKind(symbols) for symbols in typical_layers(build)]
    times = {kind: layer_times(build, Roofline(device), build.tokens, kind) for kind in {*kinds}}
    assumed = [fmean(column) for column in zip(*(times[kind] for kind in kinds), strict=True)]
    return PassTimes(*(seconds / guess for seconds, guess in zip(profile.layer_seconds, assumed, strict=True)))
