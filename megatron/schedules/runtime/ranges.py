"""Named ranges for profilers, so that a profile can be laid beside the plan: ``3F12``, ``3SEND_F12``."""

from __future__ import annotations

import torch

from megatron.schedules.runtime.program import Action


class ProfilerRanges:
    """An engine's observer (see :class:`.engine.Observer`) that names every action.

    For torch's profiler, and on a GPU for those that read NVTX ranges. Costs some microseconds an action: it is there
    only while somebody profiles.
    """

    def __init__(self) -> None:
        self._nvtx = torch.cuda.nvtx if torch.cuda.is_available() else None
        self._open: torch.profiler.record_function | None = None

    def began(self, action: Action) -> None:
        """The host begins to carry out ``action``."""
        if self._nvtx is not None:
            self._nvtx.range_push(str(action))
        self._open = torch.profiler.record_function(str(action))
        self._open.__enter__()

    def arrived(self) -> None:
        """Ranges have no part of their own for what is waited for."""

    def ended(self, action: Action) -> None:
        """It has queued all of it."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
        if self._nvtx is not None:
            self._nvtx.range_pop()
