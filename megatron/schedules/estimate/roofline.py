"""Time of each operation on a GPU by a roofline.

Matrix products are bound by arithmetic in whole tiles, everything else by the bytes it moves. The three shares below
are assumptions, the same for all methods; a measured cost profile corrects them, see :func:`corrections`.
"""

from __future__ import annotations

import math

from megatron.schedules.estimate.hardware import Device
from megatron.schedules.estimate.models import Model, built, gpt
from megatron.schedules.estimate.times import PassTimes, Prices, layer_times
from megatron.schedules.measure.cost_profile import Profile

# Share of the peak that large products, memory streams and collectives reach.
_MATRIX, _MEMORY, _LINK = 0.85, 0.85, 0.75
_LAUNCH = 4e-6  # seconds from one kernel to the next
_TILE = 128, 256  # of a product; NVIDIA's guide to matrix multiplication explains tiles and waves


class Roofline(Prices):
    """Seconds on ``device``."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def product(self, rows: float, columns: float, inner: float, bytes_out: int = 2) -> float:
        """Seconds of a bf16 product: whole waves of tiles, or the bytes of its matrices."""
        (tall, wide), device = _TILE, self._device
        tiles = math.ceil(rows / tall) * math.ceil(columns / wide)
        waves = math.ceil(tiles / device.multiprocessors)
        flops = 2.0 * waves * device.multiprocessors * tall * wide * inner
        moved = 2.0 * inner * (rows + columns) + bytes_out * rows * columns
        return max(flops / (_MATRIX * device.matrix_flops), self.stream(moved, 0)) + _LAUNCH

    def attention(self, flops: float, *, backward: bool) -> float:
        """Seconds at FlashAttention's share of the peak."""
        return flops / (self._device.matrix_flops * self._device.attention[backward])

    def stream(self, size: float, kernels: int = 1) -> float:
        """Seconds to read or write ``size`` bytes of memory."""
        return size / (_MEMORY * self._device.memory_bandwidth) + kernels * _LAUNCH

    def shared(self, size: float, ranks: int) -> float:
        """Seconds of a collective among ranks of one node."""
        return self.collective(size, ranks, same_node=True)

    def sent(self, size: float) -> float:
        """Seconds to send ``size`` bytes to other nodes."""
        return size / (_LINK * self._device.network)

    def collective(self, size: float, ranks: int, *, same_node: bool) -> float:
        """Seconds of a ring all-gather or reduce-scatter of ``size`` bytes in all."""
        return size * (ranks - 1) / ranks / self._rate(same_node)

    def message(self, size: float, *, same_node: bool) -> float:
        """Seconds of a message between pipeline ranks."""
        return size / self._rate(same_node) + 10e-6

    def _rate(self, same_node: bool) -> float:
        return _LINK * (self._device.link if same_node else self._device.network)


def corrections(profile: Profile, device: Device, model: Model) -> PassTimes:
    """Measured over estimated time of each pass of a layer, at the profile's setting.

    Args:
        profile: of this model's layers, or of a plain GPT of another width.
        device: that it was measured on.
        model: to correct.
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
