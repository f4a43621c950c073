"""The free memory of a host."""

from __future__ import annotations

from pathlib import Path

_MEMORY_INFO, _OWN_GROUP, _GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def available_host_bytes() -> int | None:
    """Returns the host memory that this process can still allocate, bytes; None if unknown.

    The kernel and the process's control groups limit it; all ranks of a node share it.
    """
    free = [*_free_of_machine(), *_free_of_groups()]
    return min(free) if free else None


def _free_of_machine() -> list[int]:
    lines = _lines(_MEMORY_INFO)
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]


def _free_of_groups() -> list[int]:
    """Returns the bytes left in the process's control group and its parents; cached files count as free."""
    path = next((line.removeprefix("0::/") for line in _lines(_OWN_GROUP) if line.startswith("0::/")), None)
    if path is None:
        return []
    group, free = _GROUPS / path, []
    for folder in (group, *group.parents):
        if not folder.is_relative_to(_GROUPS):
            break
        limit = next(iter(_lines(folder / "memory.max")), "max")
        held = dict(line.split() for line in _lines(folder / "memory.stat") if len(line.split()) == 2)
        if limit.isdigit() and "anon" in held:
            free.append(max(0, int(limit) - sum(int(held.get(name, 0)) for name in ("anon", "shmem", "kernel"))))
    return free


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
