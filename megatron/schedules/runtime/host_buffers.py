"""Host memory that activations are copied to: allocated once, then used again, as long as the host has any left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megatron.schedules.schedule.host_memory import fitting, made

_MEMORY_INFO, _OWN_GROUP, _GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def available_host_bytes() -> int | None:
    """Returns how much memory this process may still take on the host, in bytes; None where that is unknown.

    The kernel and the process's control groups limit it; all ranks of a node share it.
    """
    found = [*_free_of_machine(), *_free_of_groups()]
    return min(found) if found else None


def _free_of_machine() -> list[int]:
    lines = _lines(_MEMORY_INFO)
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]


def _free_of_groups() -> list[int]:
    """Returns what the limits of the process's control group and its parents leave; cached files can go."""
    path = next((line.removeprefix("0::/") for line in _lines(_OWN_GROUP) if line.startswith("0::/")), None)
    if path is None:
        return []
    group, found = _GROUPS / path, []
    for each in (group, *group.parents):
        if not each.is_relative_to(_GROUPS):
            break
        limit = next(iter(_lines(each / "memory.max")), "max")
        held = dict(line.split() for line in _lines(each / "memory.stat") if len(line.split()) == 2)
        if limit.isdigit() and "anon" in held:
            found.append(max(0, int(limit) - sum(int(held.get(name, 0)) for name in ("anon", "shmem", "kernel"))))
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


_PAGE = 4096


class Block(NamedTuple):
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
        self._free: list[Block] = []
        self.bytes = 0

    def take(self, size: int) -> Block:
        """Returns a block of at least ``size`` bytes; of those that fit equally well the one released first.

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

    def release(self, block: Block, read_by: Any) -> None:
        """``block`` may be used again once the copy ``read_by`` has read it."""
        self._free.append(Block(block.memory, read_by))
