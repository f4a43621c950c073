"""What the devices and hosts of a job allow its plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """The devices and hosts of a job, as far as they are known.

    Args:
        device: memory of a device, bytes; None if unknown.
        host: free memory of a host, bytes; None if unknown.
        ranks_on_host: ranks that share the host's memory.
        engine_fault: why the linears of the installed Transformer Engine cannot be split; empty if they can.
        has_engine: whether Transformer Engine works there at all.
        graphs_fault: why the installed libraries cannot capture layers as CUDA graphs; empty if they can.
        gpu: name of the device; empty if unknown.
        logs_unequal: whether Megatron logs auxiliary losses of a hybrid model if not all ranks have experts.
    """

    device: float | None = None
    host: float | None = None
    ranks_on_host: int = 1
    engine_fault: str = ""
    has_engine: bool = True
    graphs_fault: str = ""
    gpu: str = ""
    logs_unequal: bool = True


ANY = Machine()
"""A machine of which nothing is known."""
