"""How Megatron builds a model on its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron.schedules.estimate.shape import Shape

# Bytes of a number with its share of scales: four for 128 numbers, or one for 32 or 16. FP8 has one for a tensor else.
_OPERANDS = {"blockwise": 1 + 4 / 128, "mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16}
# The same of a weight, which has four bytes for 128 x 128 numbers in blockwise.
_WEIGHTS = _OPERANDS | {"blockwise": 1 + 4 / 128**2}


class Quantized(NamedTuple):
    """Linears in FP8 or FP4, as Transformer Engine quantizes them.

    Args:
        recipe: Megatron's name of the recipe.
        ends: decoder layers at the start, and at the end, that stay in half precision.
        output: true if the output layer is quantized too.
        primary: true if decoder layers have no weights in half precision beside the quantized ones.
    """

    recipe: str
    ends: tuple[int, int] = (0, 0)
    output: bool = False
    primary: bool = False

    def __str__(self) -> str:
        return "FP4 (nvfp4)" if self.recipe == "nvfp4" else f"FP8 ({self.recipe})"

    @property
    def operand(self) -> float:
        """Bytes of a number of an input, or of an output's gradient, that waits for W: one copy, with its scales."""
        return _OPERANDS.get(self.recipe, 1.0)

    @property
    def weight(self) -> float:
        """Bytes of a weight's copies, by rows and by columns."""
        return 2 * _WEIGHTS.get(self.recipe, 1.0)

    @property
    def speed(self) -> float:
        """FLOPs of a product for one of bf16 in the same time (NVIDIA's data sheets of the H100 and the B200)."""
        return 4.0 if self.recipe == "nvfp4" else 2.0

    @property
    def scales_now(self) -> bool:
        """True if a tensor has one scale, of its own largest number, which must be found first."""
        return self.recipe in ("tensorwise", "nvfp4")

    @property
    def keeps_originals(self) -> bool:
        """True if Megatron makes linears keep inputs that another operation keeps anyway, instead of a quantized copy.

        W then quantizes them. With delayed scaling it cannot: the scale has changed.
        """
        return self.recipe != "delayed"


class Adapters(NamedTuple):
    """Low-rank adapters, the only weights that are trained (LoRA, arXiv 2106.09685).

    Args:
        rank: width between both products of an adapter.
        targets: linears that have one each, by Megatron's names.
    """

    rank: int
    targets: frozenset[str]


class LayerKind(NamedTuple):
    """Kind of a decoder layer.

    Args:
        symbols: its parts in order (:data:`.symbols.SYMBOLS`).
        quantized: true if its linears are.
    """

    symbols: str = "*-"
    quantized: bool = False


@dataclass(frozen=True)
class Build:
    """A model as built on its ranks.

    Args:
        shape: sizes of the model.
        head: width of one head's query, key and value; latent attention has its own.
        tensor: tensor-parallel ranks.
        sequence_parallel: true if these ranks also split the hidden states between linears.
        expert_tensor: tensor-parallel ranks of an expert.
        experts: experts of a layer, on all devices.
        biases: true if linears have a bias.
        attention_biases: true if the linear into attention has a bias in any case.
        two_norms: true if norms have a shift besides their scale: layer norm, not RMS norm.
        head_norms: true if each head's queries and keys are normed.
        output_gates: true if attention's output is gated.
        shared_gate: true if shared experts have a gate.
        positions: number of learned positions; 0 without.
        rotary: true if positions are rotary.
        fused_rotary: true if one kernel applies rotary positions.
        given_mask: true if each microbatch has an attention mask.
        fused_activation: true if the activation function of an MLP is one kernel.
        fused_gradients: true if products add weight gradients to ``main_grad`` (gradient accumulation fusion).
        fused_loss: true if the loss keeps the logits in their own precision, not in single precision.
        joined_loss: true if kernels of the loss are fused, whatever it keeps.
        contiguous: true if attention copies what is not contiguous of queries, keys and values, as Transformer
            Engine's does; otherwise it keeps views.
        plain: true if torch's own operations run, as on a CPU: dropouts keep numbers instead of masks, and an RMS norm
            keeps two tensors in single precision instead of its input. No flag sets it, so that a job has the same plan
            on every machine: plans are for GPUs.
        samples: samples of a microbatch.
        context: context-parallel ranks, which share the tokens of a sample.
        number: bytes of one number of activations.
        residual: bytes of one number of the residual stream.
        quantized: how linears are quantized; None if they are not.
        graphs: parts of a layer that are captured as CUDA graphs, by Megatron's names; empty for whole layers, None
            without graphs.
        captured: true if a CUDA graph has a whole iteration.
        fused_experts: true if experts are fused operations, whose I computes the weight gradients too.
        fused_dispatch: true if kernels that send tokens to experts permute them too (HybridEP).
        adapters: what is trained instead of the model's own weights; None if these are.
        streams: residual streams between layers, several with hyper-connections (arXiv 2512.24880).
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
    output_gates: bool = False
    shared_gate: bool = False
    positions: int = 0
    rotary: bool = False
    fused_rotary: bool = True
    given_mask: bool = False
    fused_activation: bool = True
    fused_gradients: bool = False
    fused_loss: bool = False
    joined_loss: bool = False
    contiguous: bool = False
    plain: bool = False
    samples: int = 1
    context: int = 1
    number: int = 2
    residual: int = 2
    quantized: Quantized | None = None
    graphs: frozenset[str] | None = None
    captured: bool = False
    fused_experts: bool = False
    fused_dispatch: bool = False
    adapters: Adapters | None = None
    streams: int = 1

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
    def kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each layer."""
        layers = self.shape.layers
        first, last = self.quantized.ends if self.quantized else (len(layers), 0)
        inner = range(first, len(layers) - last)
        return tuple(LayerKind(symbols, at in inner) for at, symbols in enumerate(layers))

    @property
    def kinds_ahead(self) -> tuple[LayerKind, ...]:
        """Kind of each layer of multi-token prediction: in FP8 even if the last layers are not, and never in FP4."""
        quantized = self.quantized is not None and self.quantized.recipe != "nvfp4"
        return tuple(LayerKind(symbols, quantized) for symbols in self.shape.ahead)

    @property
    def has_experts(self) -> bool:
        """True if any decoder layer has experts."""
        return any("E" in symbols for symbols in self.shape.layers)

    @property
    def output_quantized(self) -> bool:
        """True if the output layer is quantized."""
        return self.quantized is not None and self.quantized.output

    def operand(self, *, quantized: bool) -> float:
        """Bytes of one number of a linear's input, or of its output's gradient; 0 if nothing of its own is trained."""
        if self.adapters is not None:
            return 0.0
        return self.quantized.operand if quantized and self.quantized else self.number
