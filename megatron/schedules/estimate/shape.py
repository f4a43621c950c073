"""The sizes of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Latent(NamedTuple):
    """Multi-latent attention (arXiv 2405.04434).

    Args:
        query: width of compressed queries; None if not compressed.
        key_value: width of compressed keys and values.
        head: width of one head's query without position.
        position: width of its position.
        value: width of its value.
    """

    query: int | None
    key_value: int
    head: int
    position: int
    value: int


class Experts(NamedTuple):
    """Experts instead of an MLP.

    Args:
        inner: width of one expert.
        chosen: experts per token.
        number: experts on each device.
        shared: width of the experts that process all tokens.
        latent: width of what experts read and give, between two projections of all tokens; 0 for the hidden states.
    """

    inner: int
    chosen: int
    number: float
    shared: int = 0
    latent: int = 0


class Mamba(NamedTuple):
    """State-space layers (Mamba-2, arXiv 2405.21060).

    Args:
        heads: heads.
        head: width of one head.
        state: width of the state.
        groups: groups of heads that share what enters and leaves the state.
    """

    heads: int
    head: int
    state: int
    groups: int


class DeltaNet(NamedTuple):
    """Gated delta net (arXiv 2412.06464).

    Args:
        keys, values: heads of queries and of keys each, and of values.
        key, value: width of one of them.
        reach: tokens that the convolution before it sees.
    """

    keys: int
    values: int
    key: int
    value: int
    reach: int = 4


class Indexer(NamedTuple):
    """What chooses the tokens that sparse attention sees (DeepSeek-V3.2's lightning indexer, arXiv 2512.02556).

    Args:
        heads: heads.
        head: width of one head.
        chosen: tokens that each token attends to.
        trained: true if a loss trains it.
        kernels: true if attention to the chosen tokens has kernels of its own.
    """

    heads: int
    head: int
    chosen: int
    trained: bool = False
    kernels: bool = False


@dataclass(frozen=True)
class Shape:
    """Sizes of a model.

    Args:
        layers: decoder layers, each the symbols of its parts in order (:data:`.symbols.SYMBOLS`): a GPT has blocks such
            as ``*-``, a hybrid model one symbol a layer. Plans place whole layers.
        hidden: hidden size.
        heads: attention heads.
        sequence: tokens of a sample.
        vocabulary: padded number of words; 0 if unknown.
        width: width of all heads together; defaults to ``hidden``.
        groups: groups of queries that share keys and values; defaults to the number of heads.
        inner: width of the MLP; defaults to four times ``hidden``.
        gated: true if the MLP is gated, as in SwiGLU.
        fused: true if attention is one kernel, such as FlashAttention.
        latent: multi-latent attention, instead of ``width`` and ``groups``.
        experts: experts of the layers that have them.
        mamba, delta, indexer: sizes of these parts, if layers have them.
        ahead: layers of multi-token prediction, as ``layers``.
        masks: dropout of the scores, and dropout after attention and MLP; true if used.
    """

    layers: tuple[str, ...]
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
    mamba: Mamba | None = None
    delta: DeltaNet | None = None
    indexer: Indexer | None = None
    ahead: tuple[str, ...] = ()
    masks: tuple[bool, bool] = (True, True)
