"""How long one layer's passes take on a GPU that is not at hand: each operation by what bounds it.

A product of matrices takes its arithmetic at what the tiles leave of the peak, everything else the bytes it moves.
The three shares below are assumptions, the same for all methods that are compared; a measured cost profile corrects
them, see :func:`corrections`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from megatron.schedules.estimate.hardware import Device, Model
from megatron.schedules.estimate.transformer import FUSED_BACKWARD, MOVED_BY_LOGITS, moved
from megatron.schedules.measure.profile_facts import Profile

# Of the peak: large products, streams through memory, collectives on a link.
_MATRIX, _MEMORY, _LINK = 0.85, 0.85, 0.75
_LAUNCH = 4e-6  # seconds from one kernel to the next
_TILE = 128, 256  # of a product; NVIDIA's guide to matrix multiplication explains tiles and waves


class PassTimes(NamedTuple):
    """Seconds of F, I and W."""

    forward: float
    input_grad: float
    weight_grad: float

    @property
    def whole(self) -> float:
        """All three."""
        return self.forward + self.input_grad + self.weight_grad

    def scaled(self, by: PassTimes) -> PassTimes:
        """Each times its own factor."""
        return PassTimes(*(mine * factor for mine, factor in zip(self, by, strict=True)))


ONES = PassTimes(1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Microbatch:
    """What a GPU works on at a time.

    Args:
        model: what is trained.
        tensor: GPUs that share each layer, with sequence parallelism.
        samples: of the microbatch.
    """

    model: Model
    tensor: int = 1
    samples: int = 1

    @property
    def tokens(self) -> int:
        """Of a microbatch."""
        return self.model.sequence * self.samples


class SlotTimes(NamedTuple):
    """The passes of one decoder layer, the embedding, and the output layer with its loss."""

    layer: PassTimes
    embedding: PassTimes
    output_layer: PassTimes


def slot_times(batch: Microbatch, device: Device, correction: PassTimes = ONES) -> SlotTimes:
    """What a microbatch takes in each kind of slot, on one of ``batch.tensor`` GPUs."""
    return SlotTimes(_layer(batch, device).scaled(correction), _embedding(batch, device), _output_layer(batch, device))


def corrections(profile: Profile, device: Device) -> PassTimes:
    """Measured over modelled, for each pass of a layer, at the setting that ``profile`` was measured at."""
    facts = profile.facts
    model = Model(facts.device, facts.layers, facts.heads, facts.hidden_size, facts.sequence_length)
    assumed = _layer(Microbatch(model, facts.tensor_parallel, facts.micro_batch_size), device)
    return PassTimes(*(seconds / each for seconds, each in zip(profile.layer_seconds, assumed, strict=True)))


def p2p_seconds(batch: Microbatch, device: Device, *, same_node: bool) -> float:
    """One microbatch's activations from one pipeline rank to the next; sequence parallelism sends each its part."""
    bytes_sent = 2.0 * batch.tokens * batch.model.hidden / batch.tensor
    return bytes_sent / (_LINK * (device.link if same_node else device.network)) + 10e-6


def collective_seconds(size: float, ranks: int, device: Device, *, same_node: bool) -> float:
    """An all-gather or a reduce-scatter of ``size`` bytes in all: a ring sends all but one part through each rank."""
    return size * (ranks - 1) / ranks / (_LINK * (device.link if same_node else device.network))


def stream_seconds(size: float, device: Device) -> float:
    """Reading or writing ``size`` bytes of a GPU's memory."""
    return size / (_MEMORY * device.memory_bandwidth)


def _layer(batch: Microbatch, device: Device) -> PassTimes:
    model, tokens, t = batch.model, batch.tokens, batch.tensor
    hidden = model.hidden
    shapes = [(3 * hidden // t, hidden), (hidden, hidden // t), (4 * hidden // t, hidden), (hidden, 4 * hidden // t)]
    forward = sum(_product(tokens, out, inner, device) for out, inner in shapes)
    input_grad = sum(_product(tokens, inner, out, device) for out, inner in shapes)
    # Added to gradients in single precision: read and written.
    weight_grad = sum(_product(out, inner, tokens, device, bytes_out=8) for out, inner in shapes)

    attention = model.layer.scores.flops * tokens / t
    at_forward, at_backward = device.attention
    forward += attention / (device.matrix_flops * at_forward)
    input_grad += FUSED_BACKWARD * attention / (device.matrix_flops * at_backward)

    # All split by sequence parallelism.
    moved_forward, moved_backward = moved(hidden, 4 * hidden)
    forward += stream_seconds(moved_forward * tokens / t, device) + 6 * _LAUNCH
    input_grad += stream_seconds(moved_backward * tokens / t, device) + 6 * _LAUNCH

    # Two all-gathers and two reduce-scatters each way (arXiv 2205.05198, section 4.2.2); W's are behind its products.
    if t > 1:
        messages = 4 * collective_seconds(2.0 * hidden * tokens, t, device, same_node=True)
        forward, input_grad = forward + messages, input_grad + messages
    return PassTimes(forward, input_grad, weight_grad)


def _embedding(batch: Microbatch, device: Device) -> PassTimes:
    looked_up = 4.0 * batch.tokens * batch.model.hidden / batch.tensor
    return PassTimes(
        stream_seconds(looked_up, device) + _LAUNCH, _LAUNCH, stream_seconds(2.5 * looked_up, device) + _LAUNCH
    )


def _output_layer(batch: Microbatch, device: Device) -> PassTimes:
    tokens, hidden, part = batch.tokens, batch.model.hidden, math.ceil(batch.model.vocabulary / batch.tensor)
    logits = float(tokens * part)
    moved_forward, moved_backward = (each * logits for each in MOVED_BY_LOGITS)
    return PassTimes(
        _product(tokens, part, hidden, device) + stream_seconds(moved_forward, device),
        _product(tokens, hidden, part, device) + stream_seconds(moved_backward, device),
        _product(part, hidden, tokens, device, bytes_out=8),
    )


def _product(rows: int, columns: int, inner: int, device: Device, bytes_out: int = 2) -> float:
    """Seconds of one product in bf16: whole waves of tiles over the multiprocessors, or the bytes of its matrices."""
    tall, wide = _TILE
    tiles = math.ceil(rows / tall) * math.ceil(columns / wide)
    waves = math.ceil(tiles / device.multiprocessors)
    flops = 2.0 * waves * device.multiprocessors * tall * wide * inner
    moved = 2.0 * inner * (rows + columns) + bytes_out * rows * columns
    return max(flops / (_MATRIX * device.matrix_flops), stream_seconds(moved, device)) + _LAUNCH
