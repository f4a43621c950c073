"""Host memory that activations are copied to: allocated once, then used again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from megatron.schedules.runtime.free_host_memory import available_host_bytes
from megatron.schedules.schedule.host_memory import fitting, made

_PAGE = 4096


class HostBlock(NamedTuple):
    """Host memory, one-dimensional ``uint8``, and the copy that reads it last, if any does."""

    memory: Tensor
    read_by: Any = None


class HostMemory:
    """Blocks of host memory, as many as are in use at once; released blocks are used again.

    In training each iteration needs the same as the one before, so the first allocates all. Where sizes differ between
    microbatches, as those of experts' inputs do, a new largest size allocates another block.

    Args:
        allocate: allocates one-dimensional ``uint8`` memory of so many bytes, for copies to and from the device.

    Attributes:
        bytes: total size of all blocks.
    """

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._free: list[HostBlock] = []
        self.bytes = 0

    def take(self, size: int) -> HostBlock:
        """Returns a block of at least ``size`` bytes; of those that fit equally well the one released first.

        Raises:
            MemoryError: the host has too little memory.
            Exception: whatever ``allocate`` raises.
        """
        index = fitting([block.memory.nbytes for block in self._free], size, _PAGE)
        if index is not None:
            return self._free.pop(index)
        size = -(-int(made(size)) // _PAGE) * _PAGE
        free = available_host_bytes()
        if free is not None and size > free:
            raise MemoryError(f"the host has {free / 2**30:.3g} GiB left")
        block = HostBlock(self._allocate(size))
        self.bytes += size
        return block

    def release(self, block: HostBlock, read_by: Any) -> None:
        """Releases ``block`` for reuse once the copy ``read_by`` has read it."""
        self._free.append(HostBlock(block.memory, read_by))
