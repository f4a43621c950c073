"""How many bytes a call of the schedule holds at most: says the allocator on a GPU; elsewhere tensors are counted."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron.schedules.integration.cpu import standin
from megatron.schedules.runtime.activation_meter import ActivationMeter


class PeakMemory:
    """Bytes beyond what is held when it is made: activations, messages, and on a GPU whatever else passes need.

    Args:
        parameters: the model's, which do not count.
        counted: count on a GPU too: slower, and without what passes need for a moment.
    """

    def __init__(self, parameters: Iterable[Tensor], *, counted: bool = False) -> None:
        self.meter: ActivationMeter | None = None
        self._before = 0
        if counted or standin.enabled():
            self.meter = ActivationMeter(parameters)
        else:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()

    @property
    def bytes(self) -> int:
        """The most so far."""
        return self.meter.peak if self.meter is not None else torch.cuda.max_memory_allocated() - self._before
