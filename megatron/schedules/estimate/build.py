"""How a model is built and cut: what its shape leaves open, and what is held for it depends on."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.schedules.estimate.shape import Shape


@dataclass(frozen=True)
class Build:
    """A model as its ranks have it.

    Args:
        shape: its sizes.
        head: width of one head of queries, keys and values; those of latent attention stand in ``shape``.
        tensor: tensor-parallel ranks.
        sequence_parallel: whether these share what lies between attention and feed-forward parts, too.
        expert_tensor: tensor-parallel ranks of an expert.
        experts: of a layer, on all devices.
        biases, attention_biases: whether linears add one, and whether that into attention does in any case.
        two_norms: whether a norm has a shift beside its scale: layer norm, not RMS norm.
        head_norms: whether each head's queries and keys are normed.
        shared_gate: whether the experts that all tokens go through have a gate.
        positions: learned ones, 0 where there are none.
        rotary, fused_rotary: whether queries and keys are turned by their positions, and by one kernel.
        given_mask: whether each microbatch brings a mask of who attends to whom.
        fused_activation: whether what stands between both linears of a feed-forward part is one kernel.
        fused_loss: whether the loss keeps the logits as they are, not in single precision.
        plain: whether torch's own operations stand in for kernels of a GPU, as on a CPU: dropouts keep numbers in place
            of masks, and an RMS norm two tensors in single precision in place of its input.
        samples: of a microbatch.
        context: context-parallel ranks, which share the tokens of a sample.
        number, residual: bytes of one number of activations, and of one that goes from layer to layer.
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
        """Of a microbatch on one rank."""
        return self.samples * self.shape.sequence / self.context

    @property
    def queries(self) -> int:
        """Width of all queries on all ranks."""
        return self.shape.width or self.shape.hidden

    @property
    def groups(self) -> int:
        """Heads of keys, and of values, on one rank: at least one."""
        return max(1, (self.shape.groups or self.shape.heads) // self.tensor)

    @property
    def where(self) -> tuple[bool, ...]:
        """Of each layer, whether it has experts."""
        return self.shape.experts.where if self.shape.experts else (False,) * self.shape.layers
