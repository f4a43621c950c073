"""Host memory that activations are copied to: made once, then used again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from megatron.schedules.runtime.free_host_memory import available_host_bytes
from megatron.schedules.schedule.host_memory import fitting, made

_PAGE = 4096


class Block(NamedTuple):
    """Some host memory, one-dimensional ``uint8``, and the copy that reads it last, if any does."""

    memory: Tensor
    read_by: Any = None


class HostMemory:
    """Blocks of host memory, as many as are in use at once; one that is given back is used again.

    In training each iteration asks for the same as the one before, so all are made in the first. Where sizes differ
    from microbatch to microbatch, as those of experts' inputs do, a larger one than ever before makes another block.

    Args:
        allocate: makes one-dimensional ``uint8`` memory of so many bytes, that copies to and from the device may use.
    """

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._free: list[Block] = []
        self.bytes = 0
        """Of all blocks."""

    def take(self, size: int) -> Block:
        """A block of at least ``size`` bytes; of those that fit equally well the one given back first.

        Raises:
            MemoryError: there is not so much memory.
            Exception: whatever ``allocate`` raises.
        """
        found = fitting([block.memory.nbytes for block in self._free], size, _PAGE)
        if found is not None:
            return self._free.pop(found)
        size = -(-int(made(size)) // _PAGE) * _PAGE
        free = available_host_bytes()
        if free is not None and size > free:
            raise MemoryError(f"the host has {free / 2**30:.3g} GiB left")
        block = Block(self._allocate(size))
        self.bytes += size
        return block

    def give_back(self, block: Block, read_by: Any) -> None:
        """``block`` may be used again, once the copy ``read_by`` has read it."""
        self._free.append(Block(block.memory, read_by))
