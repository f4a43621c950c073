"""Memory by rank: a table in GiB, and whether it fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron.schedules.report.table import aligned

_GIB = 2.0**30
_HEADINGS = (
    ("rank", ""),
    ("layers", "by chunk"),
    ("weights", "GiB"),
    ("gradients", "GiB"),
    ("optimizer", "GiB"),
    ("activations", "GiB"),
    ("messages", "GiB"),
    ("together", "GiB"),
    ("on host", "GiB"),
)
NOT_COUNTED = (
    "the CUDA context, buffers of NCCL and of kernels, fragmentation, what a pass needs for a moment (such as the "
    "gradient of the logits), and quantised copies: leave some GiB"
)


class Rank(NamedTuple):
    """Bytes of one pipeline rank.

    Args:
        layers: decoder layers of each of its chunks.
        weights, gradients, optimizer, activations, messages: on its device, each at most.
        device: all of these.
        host: beside them.
    """

    layers: tuple[int, ...]
    weights: float
    gradients: float
    optimizer: float
    activations: float
    messages: float
    device: float
    host: float


def as_text(ranks: Sequence[Rank]) -> str:
    """A row for each rank."""
    rows = [
        [str(rank), "+".join(map(str, found.layers)), *(_gib(value) for value in found[1:])]
        for rank, found in enumerate(ranks)
    ]
    return aligned(_HEADINGS, rows)


def verdict(rank: int, found: Rank, room: float) -> str:
    """Whether the rank that holds most fits, and of what it holds most."""
    parts = ("weights", "gradients", "optimizer", "activations", "messages")
    largest = max(parts, key=lambda part: getattr(found, part))
    fits, apart = found.device <= room, abs(room - found.device)
    said = f"{_gib(apart)} GiB {'are left' if fits else 'too much'}"
    return (
        f"{'fits' if fits else 'does not fit'} {_gib(room)} GiB: rank {rank} holds most, {_gib(found.device)} GiB, "
        f"{said}; {_gib(getattr(found, largest))} GiB of it are {largest}"
    )


def _gib(value: float) -> str:
    return f"{value / _GIB:.2f}"
