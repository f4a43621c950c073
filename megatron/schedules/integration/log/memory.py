"""The most that activations of an iteration took on this rank's GPU, without touching the allocator's own figures."""

from __future__ import annotations

import torch

from megatron.schedules.integration.cpu import standin


class PeakWatch:
    """Watches the allocator's maximum, which stock reports too and which therefore is never set back.

    The maximum moves while a program runs, in the first iterations at least, whose peak is then known; later ones that
    hold more are seen too, and those that hold less are not.
    """

    def __init__(self) -> None:
        self._counts = not standin.enabled()
        self._allocated = self._most = 0
        self.bytes: int | None = None

    def begin(self) -> None:
        """A program is about to run."""
        if self._counts:
            self._allocated, self._most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()

    def end(self) -> None:
        """The host has given the device all of it."""
        if not self._counts:
            return
        most = torch.cuda.max_memory_allocated()
        if most != self._most:
            self.bytes = most - self._allocated
