"""Memory by rank: a table in GiB, and a line that says if it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron.schedules.estimate.build_flags import GRAPHS, WHOLE
from megatron.schedules.estimate.device_memory import RESERVED, usable
from megatron.schedules.report.table import aligned, gib

NOT_COUNTED = (
    "the CUDA context, buffers of NCCL and of kernels, fragmentation, and what a pass needs for a moment (such as the "
    "gradient of the logits): for these a tenth of each device is left"
)

NOT_COUNTED_OF_GRAPHS = {
    GRAPHS: "objects of CUDA graphs, what a slot frees before its W or needs for a moment, ",
    WHOLE: "the object of the CUDA graph, its samples, what the iterations before it leave in the allocator, ",
}
"""What is not counted besides, by what captures CUDA graphs."""


class Rank(NamedTuple):
    """One pipeline rank.

    Args:
        layers: decoder layers of each of its chunks.
        parts: upper bound of the bytes of each sort on its device.
        host: bytes on its host.
    """

    layers: tuple[int, ...]
    parts: Mapping[str, float]
    host: float

    @property
    def device(self) -> float:
        """Bytes on its device."""
        return sum(self.parts.values())


def as_text(ranks: Sequence[Rank]) -> str:
    """Returns a table with a row for each rank."""
    parts = [(name, "GiB") for name in (*ranks[0].parts, "together", "on host")]
    rows = [
        [str(rank), "+".join(map(str, memory.layers)), *map(gib, (*memory.parts.values(), memory.device, memory.host))]
        for rank, memory in enumerate(ranks)
    ]
    return aligned([("rank", ""), ("layers", "by chunk"), *parts], rows)


def verdict(rank: int, memory: Rank, room: float) -> str:
    """Says if the rank with the most memory fits, and which sort uses most of it."""
    largest = max(memory.parts, key=lambda part: memory.parts[part])
    fits, apart = memory.device <= usable(room), abs(usable(room) - memory.device)
    said = f"{gib(apart)} GiB {'are left' if fits else 'too much'}"
    return (
        f"{'fits' if fits else 'does not fit'} {gib(room)} GiB, of which plans use {100 * (1 - RESERVED):.0f} %, "
        f"{gib(usable(room))} GiB: rank {rank} holds most, {gib(memory.device)} GiB, "
        f"{said}; {gib(memory.parts[largest])} GiB of it are {largest}"
    )
