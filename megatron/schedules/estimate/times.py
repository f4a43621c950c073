"""Time of a model's passes, from their arithmetic, the bytes they move, and the prices of a device.

The device is a GPU by name (:mod:`.roofline`), in seconds, or :data:`ANY`, with a typical ratio of computing to moving.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from megatron.schedules.estimate.activations import activations, whole
from megatron.schedules.estimate.build import Build, LayerKind, Quantized
from megatron.schedules.estimate.parts import SINGLE, LinearShape, PartWork, adapter, mixed
from megatron.schedules.estimate.symbols import output_layer, works
from megatron.schedules.schedule.model_loads import Load, ModelLoads, Part

_BLOCK = LayerKind()
# Bytes that F and I move for each logit. Fused kernels of the loss read and write it a few times in single precision.
_FUSED = 18.0, 6.0
# Otherwise five kernels of F and one of I read it so, and three and one write it (Megatron's cross_entropy.py). Logits
# in half precision are converted before, and their gradients after.
_APART, _CONVERTED = (32.0, 8.0), 6.0


class PassTimes(NamedTuple):
    """Times of F, I and W."""

    forward: float
    input_grad: float
    weight_grad: float

    @property
    def whole(self) -> float:
        """Sum of all three."""
        return self.forward + self.input_grad + self.weight_grad

    def scaled(self, by: PassTimes) -> PassTimes:
        """Returns each time multiplied by its own factor."""
        return PassTimes(*(mine * factor for mine, factor in zip(self, by, strict=True)))


ONES = PassTimes(1.0, 1.0, 1.0)


class Prices:
    """Time of each sort of work on a device.

    This class describes any GPU, in FLOPs: it computes about 200 FLOPs while its memory moves a byte. An A100 computes
    150 and an H100 300 (data sheets). While a byte goes to another GPU of its node it computes 2,000 FLOPs, and 16,000
    while it goes to another node; an A100 computes 1,200 and 14,000, an H100 2,500 and 22,000
    (:data:`.devices.DEVICES`).

    Attributes:
        domain: GPUs that links of a node connect.
        attention_in_w: part of the time of attention's backward that counts as W's.
        exposed: part of the time of experts' messages that stays exposed even where other work runs behind them.
    """

    domain = 8
    attention_in_w = 0.0
    exposed = 0.0

    def speed(self, quantized: Quantized | None) -> float:
        """FLOPs of a product for one of bf16 in the same time."""
        return 1.0 if quantized is None else quantized.speed

    def product(self, rows: float, columns: float, inner: float, bytes_out: int = 2, speed: float = 1.0) -> float:
        """Time of one product of matrices. Quantized ones compute ``speed`` times as fast, from smaller numbers."""
        return 2.0 * rows * columns * inner / speed

    def attention(self, flops: float, *, backward: bool) -> float:
        """Time of attention itself."""
        return flops

    def stream(self, size: float, kernels: int = 1) -> float:
        """Time to read or write ``size`` bytes of memory with ``kernels`` kernels."""
        return 200.0 * size

    def shared(self, size: float, ranks: int, *, same_node: bool = True) -> float:
        """Time to gather or reduce ``size`` bytes among tensor- or context-parallel ranks."""
        return 0.0

    def sent(self, size: float, *, same_node: bool) -> float:
        """Time to send ``size`` bytes to experts on other ranks, all on the same node or all on other ones."""
        return size * (2_000.0 if same_node else 16_000.0)

    def copies(self, groups: float, chosen: int) -> float:
        """Copies of a token that are sent to ``chosen`` experts on so many groups of ranks, its own group included."""
        return float(chosen)

    def permuted(self, build: Build, size: float) -> float:
        """Time in which F, or I, brings ``size`` bytes of routed tokens into the order of their experts and back."""
        return 0.0

    def host(self, build: Build) -> float:
        """Time in which each of F, I and W of a layer with experts waits for its host."""
        return 0.0


ANY = Prices()


def loads(build: Build, prices: Prices = ANY, tokens: float = 1.0, correction: PassTimes = ONES) -> ModelLoads:
    """Time and memory of each part of ``build`` for one microbatch.

    Args:
        build: the model as built on its ranks.
        prices: prices of the device.
        tokens: tokens of a microbatch on one rank.
        correction: measured over estimated times of a decoder layer.
    """
    kept = activations(build)
    every = {*build.kinds, *build.kinds_ahead}
    kinds = {kind: layer_times(build, prices, tokens, kind).scaled(correction) for kind in every}
    layers = tuple(
        Part(split=Load(*kinds[kind], tokens * whole(layer).forward))
        for kind, layer in zip(build.kinds, kept.layers, strict=True)
    )
    output = output_times(build, prices, tokens)
    last = Part(whole=Load(*output, tokens * kept.last.forward))
    for kind, held in zip(build.kinds_ahead, kept.ahead, strict=True):
        # A projection joins two streams before the layer, and it has logits of its own.
        projection = LinearShape(2 * build.shape.hidden, build.shape.hidden / build.tensor)
        joined = _linear(build, projection, prices, tokens, quantized=kind.quantized)
        layer = Load(*kinds[kind]).plus(Load(*joined, tokens * held.forward))
        last = last.plus(Part(layer, Load(*output)))
    looked_up = prices.stream(4.0 * build.shape.hidden * tokens / build.tensor)
    first = Part(whole=Load(looked_up, looked_up, 0.0, tokens * kept.first.forward))
    alone, together = kept.words
    attention, messages = amounts(build)
    words = tokens * alone, tokens * together
    block = 1 if any(len(symbols) > 1 for symbols in build.shape.layers) else 2
    return ModelLoads(first, layers, last, kept_for_output=words, attention=attention, messages=messages, block=block)


def attention_shares(build: Build) -> tuple[float, float]:
    """Shares of attention in an average layer's F and I, for a sample that is one sequence."""
    mean, scores = loads(build).mean, _scores(build)
    forward, input_grad = (fmean(scores[symbols][of] for symbols in build.shape.layers) for of in (0, 1))
    return forward / mean.forward, input_grad / mean.input_grad


def _scores(build: Build) -> dict[str, tuple[float, float]]:
    """FLOPs of attention in F and in I of each sort of layer."""
    scores = {symbols: [work.scores for work in works(build, symbols)] for symbols in {*build.shape.layers}}
    return {symbols: (sum(f for f, _ in parts), sum(i for _, i in parts)) for symbols, parts in scores.items()}


def message_shares(build: Build, prices: Prices = ANY, tokens: float = 1.0) -> tuple[float, float]:
    """Shares of experts' messages in an average layer's F and I, see :func:`expert_messages`.

    Args:
        build, prices, tokens: as in :func:`loads`.
    """
    if not build.has_experts:
        return 0.0, 0.0
    of_layers = _waiting(build, prices, tokens)
    mean, waiting = loads(build, prices, tokens).mean, fmean(of_layers[symbols] for symbols in build.shape.layers)
    return waiting / mean.forward, waiting / mean.input_grad


def _waiting(build: Build, prices: Prices, tokens: float) -> dict[str, float]:
    """Time of experts' messages of each sort of layer."""
    return {
        symbols: sum(expert_messages(build, work, prices, tokens) for work in works(build, symbols))
        for symbols in {*build.shape.layers}
    }


def amounts(build: Build) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Attention and messages of experts of each layer, in those of an average layer.

    Empty where no layer has any, and for blocks, which have them in proportion to their time.
    """
    layers = build.shape.layers
    if any(len(symbols) > 1 for symbols in layers):
        return (), ()
    attention = {symbols: forward for symbols, (forward, _) in _scores(build).items()}
    return _in_means(layers, attention), _in_means(layers, _waiting(build, ANY, 1.0))


def _in_means(layers: Sequence[str], of_sorts: Mapping[str, float]) -> tuple[float, ...]:
    mean = fmean(of_sorts[symbols] for symbols in layers)
    return tuple(of_sorts[symbols] / mean for symbols in layers) if mean else ()


def expert_messages(build: Build, work: PartWork, prices: Prices, tokens: float) -> float:
    """Time in which the F of a part, or its I, waits for tokens that travel to their experts and back.

    A router spreads tokens evenly. The ranks that share experts are numbered one after another, as Megatron numbers
    them, so as many as possible are on one node. What comes from another node is forwarded within the node. Links of
    the node and of the network work at the same time.
    """
    if build.shape.experts is None or not work.routed:
        return 0.0
    ranks = max(1.0, build.experts / build.shape.experts.number)
    near = min(ranks, max(1.0, prices.domain / build.expert_tensor))
    chosen, nodes = build.shape.experts.chosen, ranks / near
    copy = 2 * work.routed * tokens / chosen
    within = copy * prices.copies(ranks, chosen) * (near - 1) / near
    beyond = copy * prices.copies(nodes, chosen) * (nodes - 1) / nodes
    return max(prices.sent(within, same_node=True), prices.sent(beyond, same_node=False))


def layer_times(build: Build, prices: Prices, tokens: float, kind: LayerKind = _BLOCK) -> PassTimes:
    """Times of one decoder layer."""
    parts = [_part_times(build, prices, tokens, work, kind.quantized) for work in works(build, kind.symbols)]
    return PassTimes(*map(sum, zip(*parts, strict=True)))


def _part_times(build: Build, prices: Prices, tokens: float, work: PartWork, quantized: bool) -> PassTimes:
    """Times of one part of a layer. Attention itself is never quantized."""
    times = [_linear(build, linear, prices, tokens, quantized=quantized) for linear in work.linears]
    times[: work.joined] = [PassTimes(f, i + w, 0.0) for f, i, w in times[: work.joined]]
    forward, input_grad, weight_grad = (sum(column) for column in zip(*times, strict=True))
    mixing, moved = work.mixing, tuple(map(sum, zip(work.moved, mixed(build), strict=True)))
    forward += prices.attention(mixing[0] * tokens, backward=False) + prices.stream(moved[0] * tokens, work.kernels)
    attended = prices.attention(mixing[1] * tokens, backward=True)
    input_grad += (1 - prices.attention_in_w) * attended + prices.stream(moved[1] * tokens, work.kernels)
    weight_grad += prices.attention_in_w * attended
    # W's messages are hidden behind its products.
    around = _messages(build, work, prices, tokens) + prices.permuted(build, work.routed * tokens)
    host = prices.host(build) if work.routed else 0.0
    in_w = 0.0 if work.joined else host
    # I gathers keys and values again, and reduces their gradients.
    gathered = _keys_and_values(build, prices, tokens) if work.scores[0] else 0.0
    return PassTimes(forward + around + gathered + host, input_grad + around + 2 * gathered + host, weight_grad + in_w)


def _keys_and_values(build: Build, prices: Prices, tokens: float) -> float:
    """Time in which context-parallel ranks gather keys and values, as if attention hid none of it."""
    if build.context == 1:
        return 0.0
    latent, heads = build.shape.latent, build.shape.heads / build.tensor
    width: float = 2 * build.groups * build.head
    if latent is not None:
        width = heads * (latent.head + latent.position + latent.value)
    near = prices.domain % (build.tensor * build.context) == 0
    return prices.shared(build.number * width * tokens * build.context, build.context, same_node=near)


def output_times(build: Build, prices: Prices, tokens: float) -> PassTimes:
    """Times of the output layer with the loss."""
    output, quantized = output_layer(build), build.output_quantized
    forward, input_grad, weight_grad = _linear(build, output, prices, tokens, quantized=quantized)
    logits = tokens * build.shape.vocabulary / build.tensor
    converted = _CONVERTED if build.number < SINGLE else 0.0
    moved = _FUSED if build.joined_loss else [each + converted for each in _APART]
    softmax, gradient = (prices.stream(each * logits, 0) for each in moved)
    return PassTimes(forward + softmax, input_grad + gradient, weight_grad)


def _linear(build: Build, linear: LinearShape, prices: Prices, tokens: float, *, quantized: bool) -> PassTimes:
    inner, out, rows, parts, _ = linear
    rows_of_part, how = tokens * rows / parts, build.quantized if quantized else None
    speed = prices.speed(how)
    times = PassTimes(
        parts * prices.product(rows_of_part, out, inner, speed=speed),
        parts * prices.product(rows_of_part, inner, out, speed=speed),
        # Added to gradients in single precision: read and written.
        parts * prices.product(out, inner, rows_of_part, bytes_out=8, speed=speed),
    )
    if build.adapters is not None:
        trained = replace(build, adapters=None)
        products = [_linear(trained, each, prices, tokens, quantized=False) for each in adapter(build, linear)]
        times = PassTimes(*map(sum, zip(times._replace(weight_grad=0.0), *products, strict=True)))
    if how is None:
        return times
    # Each number is read in bf16, perhaps for its scale first, and written by rows and by columns.
    moved = tokens * rows * ((4.0 if how.scales_now else 2.0) + 2 * how.operand)
    return times._replace(
        forward=times.forward + prices.stream(moved * inner), input_grad=times.input_grad + prices.stream(moved * out)
    )


def _messages(build: Build, work: PartWork, prices: Prices, tokens: float) -> float:
    """Time of experts' messages and of an all-gather and a reduce-scatter each way (arXiv 2205.05198, 4.2.2)."""
    gathered = 2 * prices.shared(2.0 * build.shape.hidden * tokens, build.tensor) if build.tensor > 1 else 0.0
    return gathered + expert_messages(build, work, prices, tokens)
