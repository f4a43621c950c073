"""Models and GPUs by name: the numbers that estimates start from, each with its source."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.schedules.estimate.shape import Shape
from megatron.schedules.estimate.transformer import Layer, Work, output_layer

GIB = 2.0**30


@dataclass(frozen=True)
class Model:
    """A GPT.

    Args:
        name: its size as people say it.
        layers, heads, hidden: its shape.
        sequence: tokens of a sample.
        vocabulary: tokens it knows.
    """

    name: str
    layers: int
    heads: int
    hidden: int
    sequence: int = 1024
    vocabulary: int = 32_000

    @property
    def slots(self) -> int:
        """Layers, the embedding and the output layer: what the pipeline is cut into, each counting as one."""
        return self.layers + 2

    @property
    def shape(self) -> Shape:
        """The same for whoever asks for its loads."""
        return Shape(self.layers, self.hidden, self.heads, self.sequence, self.vocabulary)

    @property
    def layer(self) -> Layer:
        """The loads of one decoder layer, for one token, with attention in one kernel."""
        return self.shape.layer()

    @property
    def output_layer(self) -> Work:
        """Those of the output layer and the loss."""
        return output_layer(self.hidden, self.vocabulary)

    @property
    def layer_parameters(self) -> int:
        """Weights, biases and norms of one decoder layer."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def parameters(self) -> int:
        """Of the whole model, the embedding counted once, as the names of the paper's models count it."""
        return self.layers * self.layer_parameters + self.vocabulary * self.hidden

    @property
    def flops_a_token(self) -> float:
        """Forward and backward without recompute, causal attention counted by half as Megatron's logs count it."""
        return 3 * (self.layers * self.layer.whole.flops + self.output_layer.flops)


# arXiv 2405.15362, table 3; a vocabulary of 32000 gives the sizes in their names.
MODELS = {
    model.name: model
    for model in (
        Model("9.6B", 30, 40, 5120),
        Model("21B", 46, 48, 6144),
        Model("38.5B", 62, 56, 7168),
        Model("98.5B", 78, 80, 10240),
    )
}

# The paper's, and Meta's Llama 3 (arXiv 2407.21783, table 3).
SHAPES = {name: model.shape for name, model in MODELS.items()} | {
    "Llama-3-8B": Shape(32, 4096, 32, 8192, 128_256, groups=8, inner=14_336, gated=True),
    "Llama-3-70B": Shape(80, 8192, 64, 8192, 128_256, groups=8, inner=28_672, gated=True),
}


@dataclass(frozen=True)
class Device:
    """A GPU in a cluster.

    Args:
        name: as vendors call it.
        matrix_flops: bf16 multiplications and additions a second, dense.
        memory: bytes.
        memory_bandwidth: bytes a second.
        link, network: bytes a second one way from a GPU to others of its node, and to other nodes.
        node: GPUs of a node.
        multiprocessors: that share the tiles of a product.
        attention: the parts of ``matrix_flops`` that FlashAttention reaches forward and backward.
        host_link: bytes a second one way between a GPU and its host while all GPUs of the node copy both ways.
        host_memory: bytes, of a node.
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


# Vendor data sheets; FlashAttention-2's shares of peak from arXiv 2307.08691 (figures 4 to 7, causal, heads of 128) and
# FlashAttention-3's from 2407.08608 for Hopper. The network is one adapter a GPU: 200 and 400 Gb/s. To the host: PCIe 4
# and 5 with 16 lanes, 32 and 64 GB/s one way, of which some four fifths are reached; two GPUs of a DGX stand behind one
# switch (its user guide, system topology), and are taken to share that. Its memory is from the data sheets.
DEVICES = {
    device.name: device
    for device in (
        Device("A100-80GB", 312e12, 80 * GIB, 2.039e12, 300e9, 25e9, 8, 108, (0.58, 0.50), 12.5e9, 2e12),
        Device("H100-80GB", 989e12, 80 * GIB, 3.35e12, 450e9, 50e9, 8, 132, (0.60, 0.50), 25e9, 2e12),
    )
}
