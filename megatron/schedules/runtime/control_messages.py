"""What ranks tell one another between two iterations, in a few bytes and without their devices."""

from __future__ import annotations

from typing import Any, Protocol

import torch.distributed as dist


class Store(Protocol):
    """Texts by name that all ranks can read: ``torch.distributed.Store``."""

    def set(self, name: str, text: str, /) -> Any: ...

    def get(self, name: str, /) -> bytes:
        """Waits until there is one."""
        ...


class Notices:
    """Short texts from the first rank to all, each under a name that says for which boundary between iterations.

    One that is posted an iteration ahead is there when ranks come to read it: no rank is a whole iteration ahead of
    another, since all need each other's gradients; and one that were would wait.

    Args:
        store: the job's.
        name: of these notices, where there are others.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name

    def post(self, boundary: str, text: str) -> None:
        """The first rank only."""
        self._store.set(f"{self._name}/{boundary}", text)

    def read(self, boundary: str) -> str:
        """What was posted for ``boundary``."""
        return self._store.get(f"{self._name}/{boundary}").decode()


def told_by_all(text: str) -> list[str]:
    """What each rank of the job says; collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, text)
    return found
