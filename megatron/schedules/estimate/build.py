"""The sizes of a model, and how Megatron builds it on its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Latent(NamedTuple):
    """Multi-latent attention (arXiv 2405.04434).

    Args:
        query: width that queries are compressed to; None where they are not.
        key_value: width that keys and values are compressed to.
        head, position, value: widths of one head's query without position, its position, and its value.
    """

    query: int | None
    key_value: int
    head: int
    position: int
    value: int


@dataclass(frozen=True)
class Experts:
    """Experts in place of an MLP.

    Args:
        where: whether each layer has them.
        inner: width of one expert.
        chosen: experts of a token.
        number: experts on each device.
        shared: width of the experts that all tokens go through.
    """

    where: tuple[bool, ...]
    inner: int
    chosen: int
    number: float
    shared: int = 0


@dataclass(frozen=True)
class Shape:
    """A GPT.

    Args:
        layers, hidden, heads, sequence, vocabulary: its sizes; the vocabulary as padded, 0 where it is not known.
        width: of all heads together; ``hidden`` without it.
        groups: of queries that share keys and values; as many as heads without it.
        inner: width of the MLP; four times ``hidden`` without it.
        gated: whether the MLP is gated, as SwiGLU.
        fused: whether attention is one kernel, such as FlashAttention.
        latent: multi-latent attention, instead of ``width`` and ``groups``.
        experts: of the layers that have them.
        ahead: layers of multi-token prediction.
        masks: whether there is dropout of the scores, and after attention and MLP.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    width: int | None = None
    groups: int | None = None
    inner: int | None = None
    gated: bool = False
    fused: bool = True
    latent: Latent | None = None
    experts: Experts | None = None
    ahead: int = 0
    masks: tuple[bool, bool] = (True, True)


@dataclass(frozen=True)
class Build:
    """A model as built on its ranks.

    Args:
        shape: its sizes.
        head: width of one head's query, key and value; latent attention has its own.
        tensor: tensor-parallel ranks.
        sequence_parallel: whether they also split the hidden states between linears.
        expert_tensor: tensor-parallel ranks of an expert.
        experts: of a layer, on all devices.
        biases, attention_biases: whether linears have one, and whether that into attention has one in any case.
        two_norms: whether norms have a shift besides their scale: layer norm, not RMS norm.
        head_norms: whether each head's queries and keys are normed.
        shared_gate: whether shared experts have a gate.
        positions: learned ones; 0 without.
        rotary, fused_rotary: whether positions are rotary, and applied by one kernel.
        given_mask: whether each microbatch brings an attention mask.
        fused_activation: whether the activation function of an MLP is one kernel.
        fused_loss: whether the loss keeps the logits in their own precision, not in single precision.
        plain: whether torch's own operations run, as on a CPU: dropouts keep numbers instead of masks, and an RMS norm
            two tensors in single precision instead of its input.
        samples: of a microbatch.
        context: context-parallel ranks, which share the tokens of a sample.
        number, residual: bytes of one number of activations, and of the residual stream.
    """

    shape: Shape
    head: int
    tensor: int = 1
    sequence_parallel: bool = False
    expert_tensor: int = 1
    experts: int = 0
    biases: bool = True
    attention_biases: bool = False
    two_norms: bool = True
    head_norms: bool = False
    shared_gate: bool = False
    positions: int = 0
    rotary: bool = False
    fused_rotary: bool = True
    given_mask: bool = False
    fused_activation: bool = True
    fused_loss: bool = False
    plain: bool = False
    samples: int = 1
    context: int = 1
    number: int = 2
    residual: int = 2

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch on one rank."""
        return self.samples * self.shape.sequence / self.context

    @property
    def queries(self) -> int:
        """Width of all queries on all ranks."""
        return self.shape.width or self.shape.hidden

    @property
    def groups(self) -> int:
        """Heads of keys, and of values, on one rank."""
        return max(1, (self.shape.groups or self.shape.heads) // self.tensor)

    @property
    def where(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        return self.shape.experts.where if self.shape.experts else (False,) * self.shape.layers
