"""A forward step that one rank does not come out of."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from itertools import count
from typing import Any

from megatron.schedules.integration import gpt

RANK, CALL = 1, 5
"""Which rank it is, and which of its calls from 0 on."""


def put_in_place(how: str) -> None:
    """Rank 1 "sleeps" in its sixth forward step, "is stopped" there as if its machine had gone, or "never" stalls."""
    if os.environ["RANK"] == str(RANK) and how != "never":
        gpt.forward_step = _stalled(gpt.forward_step, how)


def _stalled(step: Callable[..., Any], how: str) -> Callable[..., Any]:
    calls = count()

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == CALL:
            if how == "is stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(3600)
        return step(*args, **kwargs)

    return forward_step
