"""Waiting for what another thread or process does, however busy the machine is.

No test asserts how long something took: that fails on a machine with other work to do. A clock is given to what is
tested, or order and counts are asserted, and a limit only ends what would otherwise hang.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

HANGS_S = 600.0
"""What is not done after so many seconds hangs."""


def until(come: Callable[[], Any], what: str = "it") -> Any:
    """What ``come`` returns, as soon as that is true; fails where it hangs."""
    end = time.monotonic() + HANGS_S
    while not (found := come()):
        assert time.monotonic() < end, f"{what} has not come after {HANGS_S:.0f} s"
        time.sleep(0.01)
    return found
