"""Times of transfers: messages between ranks, and copies to and from the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.schedules.schedule.layer_times import check_time


@dataclass(frozen=True)
class Link:
    """P2P latency between two ranks, in the unit of the passes.

    Args:
        latency: that of every pair of ranks which is not in ``pairs``.
        pairs: (from, to, latency).
    """

    latency: float = 0.0
    pairs: tuple[tuple[int, int, float], ...] = ()

    def __post_init__(self) -> None:
        for latency in self.latencies:
            check_time(latency, "the P2P latency", "costs", zero=True)

    @property
    def latencies(self) -> list[float]:
        """All latencies."""
        return [self.latency, *(latency for _, _, latency in self.pairs)]

    def scaled(self, scale: Callable[[float], float]) -> Link:
        """Returns these latencies in another unit."""
        return Link(scale(self.latency), tuple((source, to, scale(latency)) for source, to, latency in self.pairs))


@dataclass(frozen=True)
class HostCopies:
    """Copies of activations to the host (O) and back (L).

    Args:
        time: time to copy the activations of half a rank's layers in one direction, in the unit of the passes; 0 if
            unknown.
        one_way: whether a rank copies in one direction at a time.
    """

    time: float = 0.0
    one_way: bool = False

    def __post_init__(self) -> None:
        check_time(self.time, "the time of a copy", "copy", zero=True)

    def scaled(self, scale: Callable[[float], float]) -> HostCopies:
        """Returns the same copies with their time in another unit."""
        return HostCopies(scale(self.time), self.one_way)
