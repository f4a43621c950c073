"""The sizes of a GPT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Latent(NamedTuple):
    """Multi-latent attention (arXiv 2405.04434): the widths that queries, keys and values are squeezed to.

    Args:
        query: of the queries; None where they are not squeezed.
        key_value: of keys and values together.
        head, position, value: of one head's query without position, its position, and its value.
    """

    query: int | None
    key_value: int
    head: int
    position: int
    value: int


@dataclass(frozen=True)
class Experts:
    """What stands in the place of a feed-forward part.

    Args:
        where: of each layer, whether it has them.
        inner: width of one expert, and of those that all tokens go through (``shared``).
        chosen: experts that a token goes through.
        number: on each device.
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
        inner: width inside the feed-forward part; four times ``hidden`` without it.
        gated: whether that part has a second projection, as SwiGLU.
        fused: whether attention is one kernel, such as FlashAttention.
        latent: of multi-latent attention, instead of ``width`` and ``groups``.
        experts: where layers have them.
        ahead: layers of multi-token prediction, each a decoder layer with an output layer of its own use.
        masks: whether there is dropout, of the scores and behind attention and the feed-forward part.
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
