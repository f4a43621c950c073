"""Time of each operation on a GPU by a roofline.

Matrix products are limited by arithmetic in whole tiles, everything else by the bytes it moves. What is reached of the
peaks is in :mod:`.calibration`. A measured cost profile corrects it, see :func:`corrections`.
"""

from __future__ import annotations

import math
from statistics import fmean

from megatron.schedules.estimate.build import Build, LayerKind, Quantized
from megatron.schedules.estimate.calibration import CALIBRATED, Calibration
from megatron.schedules.estimate.devices import Device
from megatron.schedules.estimate.models import Model, built, gpt
from megatron.schedules.estimate.symbols import typical_layers
from megatron.schedules.estimate.times import PassTimes, Prices, layer_times
from megatron.schedules.measure.job_profile import JobProfile

_TILE = 128, 256  # of a product; NVIDIA's guide to matrix multiplication explains tiles and waves


class Roofline(Prices):
    """Seconds on ``device``, with what ``calibration`` says is reached of its peaks.

    Args:
        overlaps: true if stock's own overlap runs another microbatch behind experts' messages.

    Attributes:
        splitting: price of a split backward, as a part of a whole one.
    """

    def __init__(self, device: Device, calibration: Calibration = CALIBRATED, *, overlaps: bool = False) -> None:
        self._device, self._known, self._overlaps = device, calibration, overlaps
        self._reached = calibration.reached[device.architecture]
        self.domain = device.domain
        self.splitting = self._reached.splitting
        self.attention_in_w = self._reached.attention_in_w
        self.exposed = calibration.messages

    def speed(self, quantized: Quantized | None) -> float:
        """FLOPs of a product for one of bf16 in the same time, at the peak."""
        scaled = quantized is not None and quantized.recipe == "mxfp8"
        return self._device.speed(quantized) * (self._known.block_scaled if scaled else 1.0)

    def product(self, rows: float, columns: float, inner: float, bytes_out: int = 2, speed: float = 1.0) -> float:
        """Seconds of a product: whole waves of tiles, or the bytes of its matrices."""
        (tall, wide), device = _TILE, self._device
        tiles = math.ceil(rows / tall) * math.ceil(columns / wide)
        waves = math.ceil(tiles / device.multiprocessors)
        flops = 2.0 * waves * device.multiprocessors * tall * wide * inner
        moved = 2.0 / speed * inner * (rows + columns) + bytes_out * rows * columns
        return (
            max(flops / (self._reached.products * speed * device.matrix_flops), self.stream(moved, 0))
            + self._known.launch
        )

    def attention(self, flops: float, *, backward: bool) -> float:
        """Seconds at the kernel's share of the peak, and of what layers move around it."""
        return self._reached.attention * flops / (self._device.matrix_flops * self._device.attention[backward])

    def stream(self, size: float, kernels: int = 1) -> float:
        """Seconds to read or write ``size`` bytes of memory."""
        return size / (self._known.stream * self._device.memory_bandwidth) + kernels * self._known.launch

    def shared(self, size: float, ranks: int, *, same_node: bool = True) -> float:
        """Seconds of a collective among ranks that are numbered one after another."""
        return self.collective(size, ranks, same_node=same_node)

    def sent(self, size: float, *, same_node: bool) -> float:
        """Seconds of ``size`` bytes of experts' messages within a domain, or beyond it, that nothing hides."""
        return (self.exposed if self._overlaps else 1.0) * size / self._rate(same_node)

    def copies(self, groups: float, chosen: int) -> float:
        """Groups with any of ``chosen`` experts, if the router spreads tokens evenly: each gets one copy of a token.

        DeepEP and HybridEP send a token once to each node, and there once to each rank.
        """
        return groups * (1 - (1 - 1 / groups) ** chosen)

    def permuted(self, build: Build, size: float) -> float:
        """Seconds in which F, or I, reads and writes routed tokens that are permuted."""
        return self._dispatched(build) * self._known.routed_passes / 2 * self.stream(size, 0)

    def host(self, build: Build) -> float:
        """Seconds in which each of F, I and W of a layer with experts waits for its host."""
        if build.captured:
            return 0.0
        left = self._dispatched(build) * (1.0 if build.graphs is None else self._known.partial_graphs)
        experts = build.shape.experts
        own = 0.0 if experts is None or build.fused_experts else experts.number * self._known.each_expert
        return (left * self._known.experts_host + own) / 3

    def collective(self, size: float, ranks: int, *, same_node: bool) -> float:
        """Seconds of a ring all-gather or reduce-scatter of ``size`` bytes in all."""
        return size * (ranks - 1) / ranks / self._rate(same_node)

    def message(self, size: float, *, same_node: bool) -> float:
        """Seconds of a message between pipeline ranks."""
        pair = self._known.link * self._device.pair_link if same_node else 0.0
        return size / (pair or self._rate(same_node)) + 10e-6

    def _dispatched(self, build: Build) -> float:
        """Part of permuting, and of waiting for the host, that a dispatcher leaves."""
        return self._known.fused_dispatch if build.fused_dispatch else 1.0

    def _rate(self, same_node: bool) -> float:
        return self._known.link * (self._device.link if same_node else self._device.network)


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
