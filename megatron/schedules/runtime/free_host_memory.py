"""How much memory a host has left."""

from __future__ import annotations

from pathlib import Path

_MEMORY_INFO, _OWN_GROUP, _GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


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
