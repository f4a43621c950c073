"""Host memory that activations are copied to: made once, then used again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megatron.schedules.planning.host import fitting, made

_PAGE = 4096
_MEMORY_INFO, _OWN_GROUP, _GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


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


def available_host_bytes() -> int | None:
    """How much memory this process may still take on the host, by the kernel and by its control groups; None: unknown.

    On a node all its ranks take from it.
    """
    found = [*_free_of_machine(), *_free_of_groups()]
    return min(found) if found else None


def _free_of_machine() -> list[int]:
    lines = _lines(_MEMORY_INFO)
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]


def _free_of_groups() -> list[int]:
    """What the limits of the process's own control group and of those round it leave; files in caches can go."""
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
