"""Control messages: short texts between ranks, sent between two iterations without their devices."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


class ControlMessages:
    """Short texts from the first rank to all, each for one boundary between iterations.

    A text that is posted one iteration ahead is there when ranks read it: no rank is a whole iteration ahead of
    another, since all need each other's gradients. If one were, it would wait.

    Args:
        store: the job's; its ``get`` waits for the text.
        name: distinguishes these messages from others.
    """

    def __init__(self, store: dist.Store, name: str) -> None:
        self._store, self._name = store, name

    def post(self, boundary: str, text: str) -> None:
        """Posts ``text`` for a boundary; on the first rank only."""
        self._store.set(f"{self._name}/{boundary}", text)

    def read(self, boundary: str) -> str:
        """Returns the text posted for ``boundary``."""
        text: bytes = self._store.get(f"{self._name}/{boundary}")
        return text.decode()


def of_all_ranks[T](value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gathers ``value`` from all ranks of ``group``, by default of the job. Collective over these ranks."""
    values: list[Any] = [None] * (dist.get_world_size() if group is None else group.size())
    dist.all_gather_object(values, value, group=group)
    return values
