"""How long work takes on a GPU that is not at hand: each operation by what bounds it.

A product of matrices takes its arithmetic at what the tiles leave of the peak, everything else the bytes it moves.
The three shares below are assumptions, the same for all methods that are compared; a measured cost profile corrects
them, see :func:`corrections`.
"""

from __future__ import annotations

import math

from megatron.schedules.estimate.hardware import Device
from megatron.schedules.estimate.models import Model, built, gpt
from megatron.schedules.estimate.times import PassTimes, layer_times
from megatron.schedules.measure.profile_facts import Profile

# Of the peak: large products, streams through memory, collectives on a link.
_MATRIX, _MEMORY, _LINK = 0.85, 0.85, 0.75
_LAUNCH = 4e-6  # seconds from one kernel to the next
_TILE = 128, 256  # of a product; NVIDIA's guide to matrix multiplication explains tiles and waves


class Roofline:
    """Seconds on ``device``; see :class:`.times.Prices`."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def product(self, rows: float, columns: float, inner: float, bytes_out: int = 2) -> float:
        """In bf16: whole waves of tiles over the multiprocessors, or the bytes of its matrices."""
        (tall, wide), device = _TILE, self._device
        tiles = math.ceil(rows / tall) * math.ceil(columns / wide)
        waves = math.ceil(tiles / device.multiprocessors)
        flops = 2.0 * waves * device.multiprocessors * tall * wide * inner
        moved = 2.0 * inner * (rows + columns) + bytes_out * rows * columns
        return max(flops / (_MATRIX * device.matrix_flops), self.stream(moved, 0)) + _LAUNCH

    def attention(self, flops: float, *, backward: bool) -> float:
        """At FlashAttention's share of the peak."""
        return flops / (self._device.matrix_flops * self._device.attention[backward])

    def stream(self, size: float, kernels: int = 1) -> float:
        """Reading or writing ``size`` bytes of the GPU's memory."""
        return size / (_MEMORY * self._device.memory_bandwidth) + kernels * _LAUNCH

    def shared(self, size: float, ranks: int) -> float:
        """By ranks of one node."""
        return self.collective(size, ranks, same_node=True)

    def sent(self, size: float) -> float:
        """To other nodes."""
        return size / (_LINK * self._device.network)

    def collective(self, size: float, ranks: int, *, same_node: bool) -> float:
        """An all-gather or a reduce-scatter of ``size`` bytes in all: a ring sends all but one part through each."""
        return size * (ranks - 1) / ranks / self._rate(same_node)

    def message(self, size: float, *, same_node: bool) -> float:
        """From one pipeline rank to the next."""
        return size / self._rate(same_node) + 10e-6

    def _rate(self, same_node: bool) -> float:
        return _LINK * (self._device.link if same_node else self._device.network)


def corrections(profile: Profile, device: Device, model: Model) -> PassTimes:
    """Measured over modelled, for each pass of a layer, at the setting that ``profile`` was measured at.

    Args:
        profile: of this model's layers, or, where they are not as wide, of a plain GPT's.
        device: which it was measured on.
        model: which is to be corrected.
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
    assumed = layer_times(build, Roofline(device), build.tokens, experts=any(build.where))
    return PassTimes(*(seconds / each for seconds, each in zip(profile.layer_seconds, assumed, strict=True)))
