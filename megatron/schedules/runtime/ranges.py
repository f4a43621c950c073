"""Named ranges for profilers, so that a profile can be compared with the plan: ``3F12``, ``3SEND_F12``."""

from __future__ import annotations

import torch

from megatron.schedules.runtime.engine import Observer
from megatron.schedules.runtime.program import Action


class ProfilerRanges(Observer):
    """Names every action for torch's profiler, and on a GPU for those that read NVTX ranges.

    Costs some microseconds an action: it is there only while somebody profiles.
    """

    def __init__(self) -> None:
        self._nvtx = torch.cuda.nvtx if torch.cuda.is_available() else None
        self._open: torch.profiler.record_function | None = None

    def began(self, action: Action) -> None:
        if self._nvtx is not None:
            self._nvtx.range_push(str(action))
        self._open = torch.profiler.record_function(str(action))
        self._open.__enter__()

    def ended(self, action: Action) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
        if self._nvtx is not None:
            self._nvtx.range_pop()
