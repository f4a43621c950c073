"""How much work a call is, in lines of Python: the same on every machine, however busy it is."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable


def lines_run(call: Callable[[], object]) -> int:
    """The lines of Python that ``call`` runs in its thread."""
    monitoring, tool, count, own = sys.monitoring, 4, 0, threading.get_ident()

    def another(*_: object) -> None:
        nonlocal count
        count += threading.get_ident() == own

    monitoring.use_tool_id(tool, "lines")
    try:
        monitoring.register_callback(tool, monitoring.events.LINE, another)
        monitoring.set_events(tool, monitoring.events.LINE)
        call()
        monitoring.set_events(tool, 0)
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)
    return count
