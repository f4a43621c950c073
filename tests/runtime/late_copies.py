"""Copies as late as they may be, that find out whoever touches what they read or write: none but waits begin them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.schedules.runtime.copies import Copying, CopyWatch, Pair

_POISON = 0xFF  # a NaN in every floating-point type


class LateCopies:
    """Copies that are carried out where they are waited for, and no sooner; what was copied from is spoilt then.

    Attributes:
        moved: for each call, which way, and how many bytes each copy had.
    """

    smallest = 1

    def __init__(self, pinned: float = float("inf")) -> None:
        self.device = torch.device("cpu")
        self.watch: CopyWatch | None = None
        self.moved: list[tuple[str, list[int]]] = []
        self.allocated: list[int] = []
        self._left = pinned

    def allocate(self, size: int) -> Tensor:
        if size > self._left:
            raise RuntimeError("cudaHostRegister: out of memory")
        self._left -= size
        self.allocated.append(size)
        return torch.full((size,), _POISON, dtype=torch.uint8)

    def to_host(self, pairs: Sequence[Pair], after: Copying | None = None) -> Copying:
        self.moved.append(("out", [source.nbytes for source, _ in pairs]))
        return _Late(pairs, after, spoil_source=True)

    def from_host(self, pairs: Sequence[Pair]) -> Copying:
        self.moved.append(("back", [source.nbytes for source, _ in pairs]))
        for _, target in pairs:
            target.fill_(_POISON)
        return _Late(pairs, None, spoil_source=True)

    def storages(self, way: str) -> int:
        """How many were copied that way."""
        return sum(len(sizes) for each, sizes in self.moved if each == way)


class _Late:
    def __init__(self, pairs: Sequence[Pair], after: Copying | None, *, spoil_source: bool) -> None:
        self._pairs, self._after, self._spoil = pairs, after, spoil_source

    def wait(self) -> None:
        """Do it, and have whoever still reads what is given back read nonsense."""
        if self._after is not None:
            self._after.wait()
        for source, target in self._pairs:
            target.copy_(source)
            source.fill_(_POISON)
        self._pairs, self._after = (), None
